"""Tiny models with a recurrent state, their drafts, and their caches."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel
from zoo.causal import build_causal

import hf_specdec
import models

Tensor = torch.Tensor
# One layer of each kind.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0],
    },
}
NOISE = 0.1


@cache
def target_of(name: str) -> PreTrainedModel:
    """Return an enabled target; tests leave it as it is."""
    return hf_specdec.enable(build(name))


@cache
def drafts_of(name: str) -> dict[str, PreTrainedModel]:
    """Return the three kinds of draft for it; the unrelated one, which takes most steps, is small."""
    model = build(name)
    return {
        "identical": model,
        "unrelated": build("mamba", seed=100, num_hidden_layers=1),
        "noisy": models.build_noisy(model, NOISE),
    }


def build(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a fresh tiny model of a type."""
    return build_causal(name, seed=seed, **(OVERRIDES.get(name, {}) | overrides))


def cache_keyword(model: PreTrainedModel) -> str:
    """Return by which argument a model takes its cache."""
    names = inspect.signature(type(model).forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def returned_cache(output: Any) -> Any:
    """Return the cache of what `generate` returned, with either name that the host gives it."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def tensors_of(cache_: Any) -> list[Tensor]:
    """Return copies of everything that the layers of a cache hold."""
    held: list[Tensor] = []
    for layer in cache_.layers:
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            held += [states[index].clone() for index in states if states[index] is not None]
        if getattr(layer, "keys", None) is not None:
            held += [layer.keys.clone(), layer.values.clone()]
    return held


def attributes_of(cache_: Any) -> list[tuple[Any, ...]]:
    """Return identities, names of attributes and plain values of a cache and its layers."""
    plain = (bool, int, str, type(None), dict)
    return [
        (
            id(part),
            type(part),
            sorted(vars(part)),
            sorted((name, str(value)) for name, value in vars(part).items() if _is_plain(value, plain)),
        )
        for part in (cache_, *cache_.layers)
    ]


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item, kinds) for item in value.values())
    return isinstance(value, kinds)


def assert_close_caches(got: Any, wanted: Any) -> None:
    """Compare what two caches hold, up to rounding."""
    assert type(got) is type(wanted)
    assert [type(layer) for layer in got.layers] == [type(layer) for layer in wanted.layers]
    ours, theirs = tensors_of(got), tensors_of(wanted)
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-3 * float(other.abs().max().clamp(min=1)))


def next_turn(inputs: dict[str, Tensor], ids: Tensor, *, only_new: bool) -> dict[str, Tensor]:
    """Return the next prompt: the text so far and three tokens more, or only what the cache has not read.

    The latter is for recurrent layers alone, which know neither positions nor a mask of what they have read.
    """
    batch = ids.shape[0]
    ids = torch.cat([ids, torch.tensor([[7, 8, 9]]).expand(batch, -1)], dim=1)
    if only_new:
        return {"input_ids": ids[:, -4:], "attention_mask": torch.ones(batch, 4, dtype=torch.long)}
    num_new = ids.shape[1] - inputs["attention_mask"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, num_new, dtype=torch.long)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}
