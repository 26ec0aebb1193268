"""Give a small draft the cost of a larger one in weights that can be saved and quantized, and leave its logits alone.

`hf_specdec.demo.widen` packs its weights in a way of its own, which no quantization would find. Here the MLPs
themselves get more columns: random ones in the gate and the up projection, and zeros in the down projection for them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A multiple of the 64 weights that bitsandbytes quantizes together, so that old and new weights share no scale.
WIDTH_MULTIPLE = 64
# Small against the trained activations, which int8 rounds by the largest among all of them.
RELATIVE_SIZE = 1e-2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def grown(model: PreTrainedModel, num_parameters: int, seed: int = 0) -> PreTrainedModel:
    """Return a copy of `model` with about so many parameters more, which computes the same.

    Args:
        model: A decoder whose layers have an `mlp` of three linear layers without biases, as Llama's.
        num_parameters: What to add, met to within `WIDTH_MULTIPLE` columns a layer.
        seed: Of the new weights. The global random state is not touched.

    Raises:
        ValueError: The MLPs are of another kind, or it is too little to give every layer some columns.
    """
    layers = [module for module in model.modules() if _is_growable(module)]
    config: Any = copy.deepcopy(model.config)
    if not layers or config.intermediate_size % WIDTH_MULTIPLE:
        raise ValueError(
            f"A draft that is to grow must have MLPs of gate, up and down projections without biases, of a width that "
            f"is a multiple of {WIDTH_MULTIPLE}, but {type(model).__name__} has none. Leave it as it is."
        )
    hidden_size: int = config.hidden_size
    smallest = len(layers) * 3 * hidden_size * WIDTH_MULTIPLE
    width = round(num_parameters / smallest) * WIDTH_MULTIPLE
    if width < 1:
        raise ValueError(
            f"A draft can grow by about {smallest:,} parameters or more, but is to grow by {num_parameters:,}. Ask for "
            "more, or leave it as it is."
        )
    config.intermediate_size += width
    with torch.random.fork_rng(devices=[]):
        larger: Any = type(model)(config)
    larger = larger.to(model.dtype)
    larger.generation_config = copy.deepcopy(model.generation_config)
    larger.load_state_dict(_widened_weights(model, width, torch.Generator().manual_seed(seed)))
    ready: PreTrainedModel = larger.eval()
    return ready


def save_grown(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_parameters: int, folder: Path
) -> PreTrainedModel:
    """Write a `grown` copy and its tokenizer to a folder that drafts can be loaded from, and return the copy."""
    larger = grown(model, num_parameters)
    larger.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return larger


def _is_growable(module: Any) -> bool:
    parts = [getattr(module, name, None) for name in PROJECTIONS]
    return all(type(part) is torch.nn.Linear and part.bias is None for part in parts)


def _widened_weights(model: PreTrainedModel, width: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, module in model.named_modules():
        if not _is_growable(module):
            continue
        for projection in PROJECTIONS:
            key = f"{name}.{projection}.weight"
            old = weights[key]
            if projection == "down_proj":
                weights[key] = torch.cat([old, old.new_zeros(old.shape[0], width)], dim=1)
                continue
            size = RELATIVE_SIZE * old.shape[1] ** -0.5
            new = size * torch.randn(width, old.shape[1], generator=generator)
            weights[key] = torch.cat([old, new.to(old.device, old.dtype)])
    return weights
