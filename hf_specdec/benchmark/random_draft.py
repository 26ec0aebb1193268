"""A draft that learned nothing, to see what a bad pair costs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel


def with_random_weights(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a model of the same class, configuration, dtype and device whose weights are drawn anew.

    Args:
        model: The model to imitate; it stays as it is.
        seed: Of the weights. The global random state is not touched.
    """
    # Drawn on the CPU, so that a seed gives the same weights on every device.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drawn: Any = type(model)(copy.deepcopy(model.config))
    drawn.generation_config = copy.deepcopy(model.generation_config)
    ready: PreTrainedModel = drawn.to(model.device, model.dtype).eval()
    return ready
