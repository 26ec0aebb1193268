"""State that a model keeps in its own modules, where no cache is told of it (RecurrentGemma, arXiv:2402.19427)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hf_specdec.engine.layout import Model

Tensor = torch.Tensor
Module = torch.nn.Module
CONVOLUTION, CONVOLUTION_STATE = "conv_1d", "conv1d_state"
State = list[tuple[Module, dict[str, Tensor]]]


def stateful_modules(model: Model) -> list[Module]:
    """Return the modules that hold tensors beside parameters and buffers, if the model says that it has a state."""
    if not getattr(model, "_is_stateful", False):
        return []
    return [module for module in model.modules() if any(isinstance(value, Tensor) for value in vars(module).values())]


def copy_state(modules: Sequence[Module]) -> State:
    """Return copies of the tensors that the modules hold."""
    return [
        (module, {name: value.clone() for name, value in vars(module).items() if isinstance(value, Tensor)})
        for module in modules
    ]


def put_back(state: State) -> None:
    """Give the modules copies of what they held."""
    for module, tensors in state:
        for name, value in tensors.items():
            setattr(module, name, value.clone())


@contextmanager
def continued_convolutions(modules: Sequence[Module]) -> Iterator[None]:
    """Within this, convolutions over several tokens see the tokens before them; by themselves they would see zeros."""
    with ExitStack() as stack:
        for module in modules:
            convolution, state = getattr(module, CONVOLUTION, None), getattr(module, CONVOLUTION_STATE, None)
            if isinstance(convolution, torch.nn.Conv1d) and state is not None:
                handle = convolution.register_forward_hook(_continuing(module, state))
                stack.callback(handle.remove)
        yield


def _continuing(owner: Module, state: Tensor) -> Any:
    def continue_from_state(convolution: torch.nn.Conv1d, inputs: tuple[Tensor], outputs: Tensor) -> Tensor:
        """Replace the outputs `[B, C, T + padding]` at the T tokens, and let the owner remember the last of them."""
        joined = torch.cat([state, inputs[0]], dim=-1)
        setattr(owner, CONVOLUTION_STATE, joined[..., -state.shape[-1] :])
        real = torch.nn.functional.conv1d(
            joined, convolution.weight, convolution.bias, convolution.stride, groups=convolution.groups
        )
        return torch.cat([real, outputs[..., real.shape[-1] :]], dim=-1)

    return continue_from_state
