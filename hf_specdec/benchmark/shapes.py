"""Real architectures by name: what their published configurations say of sizes, without weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

from hf_specdec.errors import InvalidConfigError, in_short


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What to build a model from.

    Attributes:
        model_type: The host's name of the architecture.
        values: Arguments of its configuration.
        ordinary: First id that stands for text, and the one after the last; the tokenizer's special ones lie outside.
    """

    model_type: str
    values: Mapping[str, Any] = field(repr=False)
    ordinary: tuple[int, int]

    def config(self) -> Any:
        """Return a new configuration of the host's."""
        return AutoConfig.for_model(self.model_type, **self.values)


def _llama_3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, scaling: float = 0.0, **values: Any
) -> Shape:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500_000.0}
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    sizes = _sizes(hidden_size, intermediate_size, num_layers, num_heads, num_key_value_heads=8, vocab_size=128_256)
    special = {"bos_token_id": 128_000, "eos_token_id": 128_001, "pad_token_id": 128_001}
    length = {"max_position_embeddings": 131_072 if scaling else 8192}
    norm = {"rms_norm_eps": 1e-5}
    return Shape(
        model_type="llama",
        values={**sizes, **special, **length, **norm, "rope_parameters": rope, **values},
        ordinary=(0, 128_000),
    )


def _qwen(
    model_type: str, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, **values: Any
) -> Shape:
    sizes = _sizes(hidden_size, intermediate_size, num_layers, num_heads, vocab_size=151_936)
    special = {"bos_token_id": None, "eos_token_id": 151_643, "pad_token_id": 151_643}
    norm = {"rms_norm_eps": 1e-6}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    return Shape(model_type=model_type, values={**sizes, **special, **norm, **rope, **values}, ordinary=(0, 151_643))


def _qwen_3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, **values: Any) -> Shape:
    common = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}
    return _qwen("qwen3", hidden_size, intermediate_size, num_layers, num_heads, **common, **values)


def _smollm_2(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_key_value_heads: int, theta: float
) -> Shape:
    sizes = _sizes(
        hidden_size,
        intermediate_size,
        num_layers,
        num_heads,
        num_key_value_heads=num_key_value_heads,
        vocab_size=49_152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return Shape(model_type="llama", values={**sizes, **special, **rope, "rms_norm_eps": 1e-5}, ordinary=(17, 49_152))


def _tiny(model_type: str, hidden_size: int, num_layers: int, **values: Any) -> Shape:
    sizes = _sizes(hidden_size, 2 * hidden_size, num_layers, 4, vocab_size=4096, max_position_embeddings=8192)
    own = {"num_key_value_heads": 2, "head_dim": hidden_size // 4, "tie_word_embeddings": False}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return Shape(model_type=model_type, values={**sizes, **own, **special, **values}, ordinary=(3, 4096))


def _sizes(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, **values: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        **values,
    }


# The numbers of parameters that follow from these are the published ones; a test compares them.
SHAPES: Mapping[str, Shape] = {
    "llama-3-8b": _llama_3(4096, 14_336, 32, 32, tie_word_embeddings=False),
    "llama-3.1-70b": _llama_3(8192, 28_672, 80, 64, scaling=8.0, tie_word_embeddings=False),
    "llama-3.2-1b": _llama_3(2048, 8192, 16, 32, scaling=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama_3(3072, 8192, 28, 24, scaling=32.0, head_dim=128, tie_word_embeddings=True),
    "qwen3-0.6b": _qwen_3(1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen_3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "qwen3-4b": _qwen_3(2560, 9728, 36, 32, tie_word_embeddings=True),
    "qwen3-8b": _qwen_3(4096, 12_288, 36, 32, tie_word_embeddings=False),
    "qwen3-14b": _qwen_3(5120, 17_408, 40, 40, tie_word_embeddings=False),
    "qwen3-32b": _qwen_3(5120, 25_600, 64, 64, tie_word_embeddings=False),
    "qwen2.5-0.5b": _qwen(
        "qwen2",
        896,
        4864,
        24,
        14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _qwen(
        "qwen2",
        3584,
        18_944,
        28,
        28,
        num_key_value_heads=4,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        vocab_size=152_064,
    ),
    "smollm2-135m": _smollm_2(576, 1536, 30, 9, 3, 100_000.0),
    "smollm2-360m": _smollm_2(960, 2560, 32, 15, 5, 100_000.0),
    "smollm2-1.7b": _smollm_2(2048, 8192, 24, 32, 32, 130_000.0),
    "gemma-3-1b": Shape(
        model_type="gemma3_text",
        values=_sizes(
            1152,
            6912,
            26,
            4,
            num_key_value_heads=1,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
            max_position_embeddings=32_768,
            rms_norm_eps=1e-6,
            vocab_size=262_144,
            tie_word_embeddings=True,
            bos_token_id=2,
            eos_token_id=1,
            pad_token_id=0,
        ),
        ordinary=(107, 262_144),
    ),
    "tiny-target": _tiny("llama", 64, 2),
    "tiny-draft": _tiny("llama", 32, 1),
    "tiny-qwen3": _tiny("qwen3", 64, 2),
    "tiny-gemma-3": _tiny(
        "gemma3_text",
        64,
        2,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
"""Shapes by name; the tiny ones are for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A shape that was looked up: its name, a configuration of its own, and its ordinary ids (None: not known)."""

    name: str
    config: Any
    ordinary: tuple[int, int] | None


def blueprints_of(pair: str) -> tuple[Blueprint, Blueprint]:
    """Return what to build target and draft from.

    Args:
        pair: "TARGET:DRAFT", each a name in `SHAPES` or a local folder with a config.json.

    Raises:
        InvalidConfigError: It is not two names, or one of them is unknown.
    """
    names = pair.split(":") if isinstance(pair, str) else []
    if len(names) != 2 or not all(names):
        raise InvalidConfigError(
            "A synthetic pair is named by two shapes, target first, with a colon between them, but got "
            f"{pair!r}. Write it like 'llama-3-8b:llama-3.2-1b'."
        )
    return _looked_up(names[0]), _looked_up(names[1])


def _looked_up(name: str) -> Blueprint:
    if name in SHAPES:
        return Blueprint(name=name, config=SHAPES[name].config(), ordinary=SHAPES[name].ordinary)
    if not os.path.isdir(name):
        known = ", ".join(shape for shape in SHAPES if not shape.startswith("tiny-"))
        raise InvalidConfigError(
            f"A shape must be a name that is known or a local folder with a config.json, but is {name!r}. Known are "
            f"{known}."
        )
    try:
        config: Any = AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # a broken folder can make the host raise anything
        raise InvalidConfigError(
            f"A shape's folder must hold the config.json of a causal LM, but {name!r} does not ({in_short(error)}). "
            "Check the path."
        ) from error
    vars(config).pop("quantization_config", None)
    return Blueprint(name=name, config=config, ordinary=None)
