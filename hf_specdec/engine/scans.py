"""Let a selective scan (Mamba, arXiv:2312.00752) over several tokens start from the state that the cache holds.

The host's scan always starts from zero, as its kernel does; only single tokens continue. The recurrence is linear, so
what an initial state adds to outputs and final state can be added afterwards:

    y_t += C_t · (exp(A · sum of dt up to t) * h_0) * silu(z_t)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Tensor = torch.Tensor
SCAN = "mamba_selective_scan"


class _Running(threading.local):
    """The states that the layer now running in this thread starts from, one per scan it makes."""

    states: list[Tensor] | None = None


_running = _Running()
_lock = threading.Lock()
# Users of each of the host's modules, and the scan it has when nobody uses it.
_users: dict[str, int] = {}
_originals: dict[str, Callable[..., Any]] = {}


def modules_with_scans(model: Any) -> frozenset[str]:
    """Return the names of the host's modules whose selective scans `model` uses."""
    names = {type(module).__module__ for module in model.modules() if "MambaMixer" in type(module).__name__}
    return frozenset(name for name in names if hasattr(sys.modules.get(name), SCAN))


@contextmanager
def continued_scans(names: frozenset[str], cache: Any) -> Iterator[None]:
    """Within this, scans of the calling thread continue from `cache`; afterwards the host is as it was."""
    if not names:
        yield
        return
    read = cache.get_recurrent_state

    def get_recurrent_state(*args: Any, **kwargs: Any) -> Any:
        state = read(*args, **kwargs)
        _running.states = None if state is None else _by_scan(state)
        return state

    cache.get_recurrent_state = get_recurrent_state
    _enter(names)
    try:
        yield
    finally:
        _leave(names)
        del cache.get_recurrent_state
        _running.states = None


def _by_scan(state: Tensor) -> list[Tensor]:
    """Split `[B, heads, I, N]` by head, each of which has a scan of its own; `[B, I, N]` is one scan's."""
    return list(state.unbind(1)) if state.ndim == 4 else [state]


def _enter(names: frozenset[str]) -> None:
    with _lock:
        for name in names:
            _users[name] = _users.get(name, 0) + 1
            if _users[name] == 1:
                _originals[name] = getattr(sys.modules[name], SCAN)
                setattr(sys.modules[name], SCAN, _continuing(_originals[name]))


def _leave(names: frozenset[str]) -> None:
    with _lock:
        for name in names:
            _users[name] -= 1
            if not _users[name]:
                setattr(sys.modules[name], SCAN, _originals.pop(name))


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
