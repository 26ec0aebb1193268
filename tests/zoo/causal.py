"""Tiny random models of every type in the host's mapping of causal language models."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zoo.overrides import LIVELINESS, NEED_END_OF_TEXT, NOT_BUILT, OVERRIDES, PADDING_FAILS
from zoo.reinit import reinitialise
from zoo.shrinking import shrink_config

__all__ = ["ALIASES", "CAUSAL_TYPES", "NOT_BUILT", "PADDING_FAILS", "build_causal"]


def _find_aliases() -> dict[str, str]:
    """Return type -> the type that stands for it: the same classes, or the text part of a type with a text-only model.

    This compares names, since importing all models takes long.
    """
    config_classes = {
        model_type: CONFIG_MAPPING[model_type] for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    }
    aliases: dict[str, str] = {}
    for model_type, config_class in config_classes.items():
        parts = {config_class, *config_class.sub_configs.values()}
        for chief, chief_class in config_classes.items():
            same_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[chief] == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
            if chief != model_type and chief == chief_class.model_type and same_model and chief_class in parts:
                aliases[model_type] = chief
    return aliases


def _classes(model_type: str) -> tuple[type[PreTrainedConfig], type[PreTrainedModel]]:
    """Return the classes of a type's configuration (that of its text part, for a text-only model) and model."""
    config_class = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)  # while importing
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if model_class.config_class in config_class.sub_configs.values():
        return model_class.config_class, model_class
    return config_class, model_class


ALIASES: dict[str, str] = _find_aliases()
CAUSAL_TYPES: list[str] = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(ALIASES))


def build_causal(model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a tiny random model of `model_type`, in evaluation mode, that never stops by itself.

    `overrides` are fields of its configuration; those of a sub-configuration come as a dictionary under its name.
    """
    if model_type in NOT_BUILT:
        raise ValueError(f"{model_type} is not built: {NOT_BUILT[model_type]}")
    model_type = ALIASES.get(model_type, model_type)
    config_class, model_class = _classes(model_type)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = shrink_config(config_class(), OVERRIDES.get(model_type, {}) | overrides)
        model = model_class(config)
    reinitialise(model, seed, **LIVELINESS.get(model_type, {}))
    _never_stop(model, keep_in_config=model_type in NEED_END_OF_TEXT)
    return model.float().eval()


def _never_stop(model: PreTrainedModel, *, keep_in_config: bool) -> None:
    """Take away the end of text and everything else that shapes plain greedy text."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig) and not keep_in_config:
            config.eos_token_id = None
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = settings.forced_bos_token_id = None
    settings.pad_token_id = 0
    settings.bos_token_id = settings.decoder_start_token_id = 1
