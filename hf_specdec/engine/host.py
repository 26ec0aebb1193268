"""The host's own steps of `generate` that lanes are built from, private ones among them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import GenerationConfig, GenerationMixin

from hf_specdec.engine.layout import Model

Tensor = torch.Tensor
# The names that versions and models of the host give to a cache.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# transformers 5.17 says `past_key_values`.
_PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
HOSTS_CACHE_NAME = "cache" if "cache" in _PREPARE else "past_key_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A model that has read its prompt.

    `token_ids` `[B, W]` are the prompt's (an encoder-decoder's: the decoder's), `model_kwargs` the arguments that the
    host prepared for it, `outputs` what its forward returned.
    """

    token_ids: Tensor
    model_kwargs: dict[str, Any]
    outputs: Any


def prefill_by_host(model: Model, **arguments: Any) -> Prefill:
    """Let the host prepare a call of `generate` on a model of our own choice, and stop after the prompt's forward.

    Args:
        model: A draft, or a model that is being probed.
        **arguments: Inputs as for `generate`; settings are ours.
    """

    def stop_after_the_prompt(
        _model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **prepared: Any
    ) -> Prefill:
        generation_config = prepared.pop("generation_config")
        outputs = prefill(model, input_ids, generation_config, prepared)
        return Prefill(token_ids=input_ids, model_kwargs=prepared, outputs=outputs)

    if (decoder_ids := arguments.get("decoder_input_ids")) is not None:
        # sync: once per prompt; a model that starts its texts otherwise would put its own first token before these.
        arguments["decoder_start_token_id"] = int(decoder_ids[0, 0].item())
    result: Any = GenerationMixin.generate(model, **arguments, **NO_SETTINGS, custom_generate=stop_after_the_prompt)
    return cast(Prefill, result)


# What a model's own generation config might ask for, and a prefill has no use for.
NO_SETTINGS: dict[str, Any] = {
    "cache_implementation": None,
    "do_sample": False,
    "guidance_scale": None,
    "max_length": None,
    "max_new_tokens": 1,
    "min_length": None,
    "min_new_tokens": None,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "return_dict_in_generate": False,
    "stop_strings": None,
    "use_cache": True,
}


def lengthened(model: Model, outputs: Any, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `forward` for one more token, as the host would make them after `outputs`."""
    longer: dict[str, Any] = model._update_model_kwargs_for_generation(
        outputs, dict(model_kwargs), is_encoder_decoder=bool(model.config.is_encoder_decoder), num_new_tokens=1
    )
    return longer


def prefill(model: Model, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
    """Run the host's own prefill, exactly as plain decoding would."""
    return model._prefill(input_ids, config, model_kwargs, is_first_iteration=not config.is_assistant)


def filled_cache(values: Mapping[str, Any]) -> Any:
    """Return the cache among a forward's outputs, or among arguments, under whichever name; None if there is none."""
    return next((values[name] for name in CACHE_NAMES if values.get(name) is not None), None)


def sample_plainly(
    model: Model,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: Mapping[str, Any],
) -> Any:
    """Run the host's own decoding loop on what the host has prepared."""
    return model._sample(
        input_ids, logits_processor, stopping_criteria, config, synced_gpus=False, streamer=streamer, **model_kwargs
    )
