"""Let models with linear biases (ALiBi, arXiv:2108.12409) take a 4-D mask.

Bloom and Falcon count the positions of keys from a 2-D mask `[B, S]` and cannot read a mask that differs from query to
query. Its last query sees every key that the row's earlier ones do, and keys that no query sees get no weight, so the
last query's row says all that counts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hf_specdec.engine.borrowing import Function

Tensor = torch.Tensor
BIAS = "build_alibi_tensor"


def modules_with_biases(model: Any) -> frozenset[str]:
    """Return the names of the host's modules that make linear biases for `model`."""
    names = {type(module).__module__ for module in model.modules()}
    return frozenset(name for name in names if hasattr(sys.modules.get(name), BIAS))


def from_any_mask(build: Function) -> Function:
    """Return the host's function, able to take masks `[B, 1, T, S]` of booleans or of 0 and large negative numbers."""

    def build_from_any_mask(attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        if attention_mask.ndim == 4:
            last = attention_mask[:, 0, -1]
            attention_mask = (last if last.dtype == torch.bool else last > -1).long()
        return build(attention_mask, *args, **kwargs)

    return build_from_any_mask
