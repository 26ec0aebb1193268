"""What a lane has to know of a model: its attention, its positions, and the signature of its `forward`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.placement import device_of

# A `PreTrainedModel`; most of its attributes are typed as tensor or module, which nothing here could work with.
Model = Any
MASKED_BY_US = ("sdpa", "eager")


@dataclass(frozen=True, slots=True)
class Layout:
    """What the lane has to know of a model's class, attention implementation and `forward` signature."""

    cache_name: str
    accepts_position_ids: bool
    accepts_logits_to_keep: bool
    accepts_token_type_ids: bool
    attention: str
    layer_types: tuple[str, ...] | None
    sliding_window: int | None
    chunk_size: int | None


def layout_of(model: Model) -> Layout:
    """Read a model's layout."""
    parameters = arguments_of(model)
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return Layout(
        cache_name="cache" if "cache" in parameters else "past_key_values",
        accepts_position_ids="position_ids" in parameters,
        accepts_logits_to_keep="logits_to_keep" in parameters,
        accepts_token_type_ids="token_type_ids" in parameters,
        attention=getattr(config, "_attn_implementation", None) or "eager",
        layer_types=tuple(sorted(set(layer_types))) if layer_types else None,
        sliding_window=window if isinstance(window, int) else None,
        chunk_size=getattr(config, "attention_chunk_size", None),
    )


def arguments_of(model: Model) -> frozenset[str]:
    """Return the names of the arguments that a model's `forward` takes."""
    # The class's own: an instance's `forward` may be wrapped by something that hides the signature.
    return _arguments_of(type(model).forward)


@functools.lru_cache(maxsize=128)
def _arguments_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


# These choose their frequencies by the longest position in a forward.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def turns_by_length(model: Model) -> bool:
    """Return whether the model's rotary positions depend on the longest position of a forward."""
    config = model.config.get_text_config(decoder=True)
    return any(entry["rope_type"] in LENGTH_DEPENDENT_ROPE for entry in _rope_entries(config))


def context_of(model: Model) -> int | None:
    """Return how many positions a forward of several tokens may reach, None when the configuration does not say."""
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    for entry in _rope_entries(config):
        if entry["rope_type"] in LENGTH_DEPENDENT_ROPE:
            # Past the length the model was first trained for, a draft token would change the positions before it.
            original = entry.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None))
    return min((limit for limit in limits if limit is not None), default=None)


def _rope_entries(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters, which newer configurations may give per layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
    return [entry for entry in entries if "rope_type" in entry]


def tolerance_of(model: Model, *, is_draft: bool) -> float:
    """Return how far logits may move, relative to the largest, when a model computes the same in another order.

    Args:
        model: The model; what counts is the coarsest arithmetic in it, that of quantized layers included.
        is_draft: Whether the logits only serve to guess.
    """
    by_dtype = {torch.float64: 1e-6, torch.float32: 2e-4}
    device = device_of(model).type
    is_cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    tolerance = by_dtype.get(torch.get_autocast_dtype(device) if is_cast else model.dtype, 0.1)
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is None:
        return tolerance
    if is_draft:
        return 0.1
    if getattr(quantization, "load_in_4bit", False):
        return max(tolerance, by_dtype.get(quantization.bnb_4bit_compute_dtype, 0.1))
    if getattr(quantization, "load_in_8bit", False):
        # An activation near the middle of two of the 127 steps may fall to either side.
        return max(tolerance, 1 / 127)
    return tolerance


def has_shared_outliers(model: Model) -> bool:
    """Return whether int8 layers choose by all tokens of a forward which columns they compute in 16 bit."""
    quantization = getattr(model.config, "quantization_config", None)
    return bool(getattr(quantization, "load_in_8bit", False) and getattr(quantization, "llm_int8_threshold", 0.0))


def windows_of(model: Model, layout: Layout) -> list[int | None] | None:
    """Return how many keys plain decoding sees at most in each attention layer, or None when it sees all in all."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    widths = {
        "full_attention": None,
        "sliding_attention": layout.sliding_window,
        "chunked_attention": layout.chunk_size,
    }
    found = [widths[kind] for kind in kinds if kind in widths]
    return found if any(width is not None for width in found) else None
