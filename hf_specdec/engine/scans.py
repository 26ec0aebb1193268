"""Let a scan (Mamba) over several tokens do what the host does with single ones: go on from the cache, with free steps.

The host's selective scan (arXiv:2312.00752) always starts from zero, as its kernel does. The recurrence is linear, so
what an initial state adds to outputs and final state can be added afterwards:

    y_t += C_t · (exp(A · sum of dt up to t) * h_0) * silu(z_t)

Its chunked scan (Mamba-2, arXiv:2405.21060) starts from a state, but keeps step sizes within limits (Nemotron-H and
Zamba2: at least 0.001) that single tokens are free of.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_specdec.engine.borrowing import replaced

Tensor = torch.Tensor
SCAN = "mamba_selective_scan"
CHUNKED_SCAN = "mamba2_chunk_scan"
NO_LIMIT = (0.0, float("inf"))


class _Running(threading.local):
    """What this thread's scans have to know.

    `states` are those that the layer now running starts from, one per scan it makes; `depth` counts the contexts
    entered.
    """

    states: list[Tensor] | None = None
    depth: int = 0


_running = _Running()


def modules_with_scans(model: Any) -> frozenset[str]:
    """Return the names of the host's modules with scans of `model` that treat several tokens otherwise than one."""
    return frozenset(type(module).__module__ for module in model.modules() if _scans_otherwise(module))


def _scans_otherwise(module: torch.nn.Module) -> bool:
    source = sys.modules.get(type(module).__module__)
    if "MambaMixer" in type(module).__name__ and hasattr(source, SCAN):
        return True
    limit: Any = getattr(module, "time_step_limit", None) or NO_LIMIT
    return tuple(limit) != NO_LIMIT and hasattr(source, CHUNKED_SCAN)


@contextmanager
def continued_scans(names: frozenset[str], cache: Any) -> Iterator[None]:
    """Within this, scans of the calling thread continue from `cache`; afterwards the host is as it was."""
    if not names:
        yield
        return
    earlier = vars(cache).get("update_conv_state")
    update = cache.update_conv_state

    def update_conv_state(conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        # In all versions of the host a layer's scan follows its convolution.
        layer = cache.layers[layer_idx]
        state = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        _running.states = None if state is None else _by_scan(state)
        return update(conv_states, layer_idx, *args, **kwargs)

    cache.update_conv_state = update_conv_state
    _running.depth += 1
    try:
        with replaced(names, {SCAN: _continuing, CHUNKED_SCAN: _unlimited}):
            yield
    finally:
        _running.depth -= 1
        _running.states = None
        if earlier is None:
            del cache.update_conv_state
        else:
            cache.update_conv_state = earlier


def _by_scan(state: Tensor) -> list[Tensor]:
    """Split `[B, heads, I, N]` by head, each of which has a scan of its own; `[B, I, N]` is one scan's."""
    return list(state.unbind(1)) if state.ndim == 4 else [state]


def _unlimited(scan: Callable[..., Any]) -> Callable[..., Any]:
    def scan_with_free_steps(*args: Any, **kwargs: Any) -> Any:
        if _running.depth and kwargs.get("initial_states") is not None:
            kwargs["dt_limit"] = NO_LIMIT
        return scan(*args, **kwargs)

    return scan_with_free_steps


def _continuing(scan: Callable[..., Any]) -> Callable[..., Any]:
    def scan_from_state(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803  the host's names
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        result = scan(hidden_states, dt, A, B, C, *args, **kwargs)
        states = _running.states
        if not states or args or not kwargs.get("return_last_state"):
            return result
        outputs, last_state = result
        extra, carried = carried_over(
            states.pop(0),
            dt,
            A,
            C,
            gate=kwargs.get("z"),
            bias=kwargs.get("delta_bias"),
            has_softplus=bool(kwargs.get("delta_softplus")),
        )
        return outputs + extra.to(outputs.dtype), last_state + carried.to(last_state.dtype)

    return scan_from_state


def carried_over(
    state: Tensor,
    dt: Tensor,
    decay_rates: Tensor,
    readout: Tensor,
    *,
    gate: Tensor | None,
    bias: Tensor | None,
    has_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Return what an initial state adds to a scan's outputs `[B, I, T]` and final state `[B, I, N]`, in float32.

    Args:
        state: The initial state `[B, I, N]`.
        dt: Step sizes before bias and softplus, `[B, I, T]`.
        decay_rates: A, `[I, N]`.
        readout: C, `[B, N, T]`.
        gate: z, `[B, I, T]`, or None.
        bias: Added to the step sizes, `[I]`, or None.
        has_softplus: Whether step sizes go through a softplus.
    """
    steps = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
    steps = torch.nn.functional.softplus(steps) if has_softplus else steps
    total = steps.float().cumsum(dim=-1)  # [B, I, T]
    left = torch.exp(decay_rates.float()[None, :, None] * total[..., None]) * state.float()[:, :, None]  # [B, I, T, N]
    extra = torch.einsum("bitn,bnt->bit", left, readout.float())
    if gate is not None:
        extra = extra * torch.nn.functional.silu(gate.float())
    return extra, left[:, :, -1]
