"""Convolutions that go on from a state, and state that modules hold, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_specdec.engine.inside import continued_convolutions, copy_state, put_back, stateful_modules

WIDTH = 4


class Block(nn.Module):
    """Keeps the last inputs of its convolution as RecurrentGemma does: read token by token, but not beyond."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1d = nn.Conv1d(3, 3, WIDTH, groups=3, padding=WIDTH - 1)
        self.conv1d_state = torch.randn(2, 3, WIDTH - 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.conv1d_state = nn.functional.pad(inputs, (WIDTH - inputs.shape[-1] - 1, 0))
        outputs: torch.Tensor = self.conv_1d(inputs)[..., : inputs.shape[-1]]
        return outputs


class Model(nn.Module):
    _is_stateful = True

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("buffer", torch.ones(2))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
@torch.no_grad()
def test_a_convolution_sees_the_tokens_before(model: Model, num_tokens: int) -> None:
    block, inputs = model.block, torch.randn(2, 3, num_tokens)
    joined = torch.cat([block.conv1d_state, inputs], dim=-1)
    weight = block.conv_1d.weight[:, 0]
    wanted = torch.stack(
        [(joined[..., t : t + WIDTH] * weight).sum(-1) + block.conv_1d.bias for t in range(num_tokens)], dim=-1
    )
    with continued_convolutions([block]):
        outputs = block(inputs)
    assert torch.allclose(outputs, wanted, atol=1e-6)
    assert torch.equal(block.conv1d_state, joined[..., -(WIDTH - 1) :])


@torch.no_grad()
def test_afterwards_the_model_is_as_it_was(model: Model) -> None:
    inputs = torch.randn(2, 3, 5)
    wanted = model.block(inputs)
    with pytest.raises(RuntimeError, match="boom"), continued_convolutions([model.block]):
        raise RuntimeError("boom")
    assert not model.block.conv_1d._forward_hooks
    assert torch.equal(model.block(inputs), wanted)


@torch.no_grad()
def test_state_can_be_put_back_twice(model: Model) -> None:
    modules = stateful_modules(model)
    assert modules == [model.block]
    before = model.block.conv1d_state.clone()
    saved = copy_state(modules)
    for _ in range(2):
        model.block.conv1d_state.add_(1)
        put_back(saved)
        assert torch.equal(model.block.conv1d_state, before)


def test_a_model_that_says_nothing_of_a_state_has_none(model: Model) -> None:
    model._is_stateful = False
    assert stateful_modules(model) == []
