"""How many bytes a model and its cache take, known before it is loaded, and which quantization fits."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_specdec.bandwidth import ModelSize

FOUR_BIT = ("nf4", "fp4")
QUANTIZATIONS = ("none", *FOUR_BIT, "int8")
# On current GPUs bitsandbytes saves memory, not time: at batch size 1 a draft in 4 bits takes longer per step than one
# in 16, and one in 8 bits longer still. So weights stay as they are where they fit.
AUTOMATIC = ("none", "nf4")
"""What weights can be stored as, from the most bytes to few."""

# bitsandbytes keeps a float32 scale for each block of a 4-bit weight, and a table of its 16 values per weight …
BLOCK = 64
FOUR_BIT_TABLE_BYTES = 64
# … and a float32 scale for each row of an int8 weight.
SCALE_BYTES = 4
# An odd number that no model has as a dimension of its own.
PROBE_LENGTH = 157
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
GROWING = ("keys", "values")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Of free memory, for weights; the rest is for the draft's cache and what a forward needs in passing.
WEIGHT_SHARE = 0.9


def skeleton_of(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model of a configuration without its weights: on the meta device, where tensors have no storage."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


def weight_bytes(model: PreTrainedModel, quantization: str = "none") -> int:
    """Return the bytes of a model's parameters and buffers.

    Args:
        model: A model that is not quantized; `skeleton_of` one will do.
        quantization: One of `QUANTIZATIONS`: what bitsandbytes would make of its linear layers. It leaves alone the
            language modelling head and what shares its weights.
    """
    total = sum(_bytes(tensor) for tensor in (*model.parameters(), *model.buffers()))
    if quantization == "none":
        return total
    for _, module in linear_layers(model):
        total += _quantized_bytes(module, quantization) - _bytes(module.weight)
    return total


def linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Return name and module of each layer that the host would let bitsandbytes quantize, `Conv1D` among them."""
    kept = get_keys_to_not_convert(model)
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear or isinstance(module, Conv1D)
        if is_linear and should_convert_module(name, kept):
            yield name, module


def held_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors that a model holds, with those that bitsandbytes keeps beside its weights."""
    tensors: dict[int, torch.Tensor] = {}
    for owner in (*model.parameters(), *model.buffers()):
        state = getattr(owner, "quant_state", None)
        beside = [getattr(owner, "SCB", None), getattr(state, "absmax", None), getattr(state, "code", None)]
        found = [owner.data, *(tensor for tensor in beside if isinstance(tensor, torch.Tensor))]
        tensors |= {tensor.data_ptr(): tensor for tensor in found}
    for module in model.modules():
        scales = getattr(getattr(module, "state", None), "SCB", None)
        if isinstance(scales, torch.Tensor):
            tensors[scales.data_ptr()] = scales
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def size_of(config: Any, dtype: torch.dtype) -> ModelSize:
    """Return what the model of a configuration takes unquantized."""
    return sizes_of(config, dtype, ["none"])["none"]


def sizes_of(
    config: Any, dtype: torch.dtype, quantizations: Sequence[str], *, trust_remote_code: bool = False
) -> dict[str, ModelSize]:
    """Return what the model of a configuration takes in each quantization, without its weights."""
    model = skeleton_of(config, dtype, trust_remote_code=trust_remote_code)
    looked_up = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_tied = head is None or head.weight is looked_up
    # Some kernels refuse other dtypes even where nothing is computed.
    narrow = torch.bfloat16
    runnable = model if dtype == narrow else skeleton_of(config, narrow, trust_remote_code=trust_remote_code)
    per_row, per_token = cache_bytes(runnable)
    wider = dtype.itemsize / narrow.itemsize
    experts, share = [own for name, own in model.named_parameters() if ".experts." in name], _expert_share(model.config)
    num_in_experts = sum(parameter.numel() for parameter in experts)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = {quantization: weight_bytes(model, quantization) for quantization in quantizations}
    return {
        quantization: ModelSize(
            weight_bytes=size,
            read_bytes=size - (0 if is_tied else _bytes(looked_up)),
            num_parameters=round(num_parameters - (1 - share) * num_in_experts),
            cache_bytes_per_token=round(wider * per_token),
            cache_bytes_per_row=round(wider * per_row),
            vocab_size=model.config.get_text_config(decoder=True).vocab_size,
            # bitsandbytes leaves experts alone, which are no linear layers.
            expert_bytes=sum(map(_bytes, experts)),
            expert_share=share,
        )
        for quantization, size in weights.items()
    }


def _expert_share(config: Any) -> float:
    """Return the share of the experts that a token meets."""
    text = config.get_text_config(decoder=True)
    total = next((count for name in EXPERT_COUNTS if (count := getattr(text, name, None))), None)
    met = getattr(text, "num_experts_per_tok", None)
    return min(met / total, 1.0) if met and total else 1.0


def cache_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of a row's cache that do not depend on its length, and those for each token.

    Keys and values count as if all were kept, also where the host would drop those outside a window.

    Args:
        model: A `skeleton_of` a model, which is run without computing anything.

    Raises:
        ValueError: It has no cache that is known.
    """
    ids = torch.zeros(1, PROBE_LENGTH, dtype=torch.long, device="meta")
    with torch.no_grad():
        outputs: Any = model(input_ids=ids, use_cache=True, return_dict=True)
    cache = next((outputs[name] for name in CACHE_NAMES if name in outputs), None)
    if cache is None:
        raise ValueError(f"{type(model).__name__} returns no cache that is known")
    per_row, per_token = 0, 0
    for holder in getattr(cache, "layers", None) or [cache]:
        for name, value in vars(holder).items():
            for tensor in _tensors_in(value):
                if name in GROWING and tensor.ndim == 4:
                    per_token += _bytes(tensor) // tensor.shape[-2]
                elif PROBE_LENGTH in tensor.shape[1:]:
                    per_token += _bytes(tensor) // PROBE_LENGTH
                elif tensor.ndim > 1:  # others only count
                    per_row += _bytes(tensor)
    return per_row, per_token


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part)


def _quantized_bytes(module: nn.Module, quantization: str) -> int:
    weight: Any = module.weight
    count: int = weight.numel()
    if quantization in FOUR_BIT:
        return math.ceil(count / 2) + SCALE_BYTES * math.ceil(count / BLOCK) + FOUR_BIT_TABLE_BYTES
    num_rows = weight.shape[1] if isinstance(module, Conv1D) else weight.shape[0]
    return count + SCALE_BYTES * int(num_rows)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


@dataclass(frozen=True, slots=True)
class Choice:
    """A quantization, and why it is this one."""

    quantization: str
    reason: str


def choose_quantization(sizes: Mapping[str, int], free: int | None, place: str) -> Choice | None:
    """Return the quantization to load a draft with where the caller leaves it open, or None where none fits.

    Args:
        sizes: Bytes of the weights by quantization.
        free: Free bytes there; None if unknown, which counts as enough.
        place: What to call the device.
    """
    if free is None:
        return Choice("none", f"how much memory is free on {place} is not known")
    whole, room = f"{in_words(sizes['none'])} unquantized", f"{in_words(free)} free on {place}"
    chosen = first_fitting(sizes, WEIGHT_SHARE * free)
    if chosen is None:
        return None
    if chosen == "none":
        return Choice(chosen, f"{whole} fit into the {room}")
    return Choice(chosen, f"{whole} do not fit into the {room}, {in_words(sizes[chosen])} in {chosen} do")


def first_fitting(sizes: Mapping[str, int], room: float) -> str | None:
    """Return the quantization that is best where it fits into `room` bytes, None where none of those does."""
    return next((kind for kind in AUTOMATIC if kind in sizes and sizes[kind] <= room), None)


def fits(size: int, free: int | None) -> bool:
    """Return whether weights of `size` bytes leave enough of the free bytes for a cache."""
    return free is None or size <= WEIGHT_SHARE * free


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory can still be used on a device, None if that cannot be known."""
    if device.type == "cuda":
        unused, _ = torch.cuda.mem_get_info(device)
        # What torch holds without using it is free to us as well.
        return int(unused + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return _free_main_memory() if device.type == "cpu" else None


def _free_main_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return 1024 * int(kibibytes)
    except (OSError, ValueError, StopIteration, IndexError):
        return None  # only Linux has it


def in_words(size: float) -> str:
    """Return a number of bytes for people, in powers of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"
