"""Draw weights that make the greedy text of a tiny model varied and dependent on its context."""

from __future__ import annotations

import math

import torch
from torch import nn

GAIN = 3.0
EMBEDDING_STD = 0.3


def reinitialise(model: nn.Module, seed: int, gain: float = GAIN, embedding_std: float = EMBEDDING_STD) -> None:
    """Redraw all weights in place, without the global random state."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.numel():
                if id(weight) in embeddings:
                    std = 3 * embedding_std if "pos" in name else embedding_std
                    weight.copy_(std * _draw_rows(weight, generator))
                else:
                    weight.copy_(_draw(name, weight, gain, generator))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # steers the choice of experts
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _draw(name: str, weight: torch.Tensor, gain: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":  # the decay of a recurrence is exp(-dt * exp(A_log)) per token
        return torch.empty(weight.shape).uniform_(0.05, 1.0, generator=generator).log()
    if leaf == "dt_bias" or name.endswith("dt_proj.bias"):
        step = torch.empty(weight.shape).uniform_(math.log(0.05), math.log(0.5), generator=generator).exp()
        return step.expm1().log()  # the inverse of softplus
    if weight.dim() < 2 or bool((weight == weight.flatten()[0]).all()):
        # Norms stay around one (or zero, where the class adds one); strong biases would favour the same token always.
        return weight + (0.05 if leaf.endswith("bias") else 0.2) * noise
    if "dt_proj" in name:
        gain = 0.5  # else the steps of a state space become so long that it forgets everything
    return gain / math.sqrt(weight.shape[-1]) * noise


def _draw_rows(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return rows of one norm: with tied embeddings a longer one would win at every position."""
    rows = torch.randn(weight.shape, generator=generator)
    return rows * (math.sqrt(weight.shape[-1]) / rows.norm(dim=-1, keepdim=True))
