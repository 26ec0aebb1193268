"""What a call asks for that cannot work with a draft: refused before any work, or decoded plainly with a warning."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_specdec.config import FOREIGN_SPELLINGS
from hf_specdec.engine.host import filled_cache
from hf_specdec.errors import InvalidConfigError, UnsupportedGenerationError

OTHER_SPECULATION = ("assistant_early_exit", "prompt_lookup_num_tokens", "speculation_type", "use_mtp")
OTHER_MODES = {
    "constraints": "constrained beam search",
    "dola_layers": "DoLa decoding",
    "force_words_ids": "constrained beam search",
    "penalty_alpha": "contrastive search",
}
UNSUPPORTED_CACHES = ("quantized", "offloaded", "offloaded_static", "paged")


def refuse_settings_without_draft(ours: dict[str, Any]) -> None:
    """Refuse settings that mean nothing without a draft.

    Raises:
        InvalidConfigError: One was given.
    """
    given = [name for name in ("num_draft_tokens", "speculative_config") if ours.get(name) is not None]
    if given:
        raise InvalidConfigError(
            f"`{given[0]}` only has a meaning with `draft_model`, but no draft was given. Pass `draft_model=`, or "
            f"leave `{given[0]}` out."
        )


def refuse_foreign_spellings(arguments: dict[str, Any]) -> None:
    """Refuse other libraries' names of our settings, which would be ignored without a word.

    Raises:
        InvalidConfigError: One was given.
    """
    for name, ours in FOREIGN_SPELLINGS.items():
        if arguments.get(name) is not None:
            raise InvalidConfigError(
                f"With `draft_model` the draft length is called `{ours}`, but `{name}={arguments[name]!r}` was given. "
                f"Pass `{ours}={arguments[name]!r}`."
            )
    if arguments.get("assistant_tokenizer") is not None:
        raise InvalidConfigError(
            "With `draft_model` the draft's tokenizer is a setting of ours, but `assistant_tokenizer` was given. Pass "
            "`speculative_config=SpeculativeConfig(draft_tokenizer=...)`."
        )


class Settings:
    """Values of `GenerationConfig` fields as the host will resolve them: keyword, then config, then model default."""

    def __init__(self, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.config: GenerationConfig | None = arguments.get("generation_config")
        self.defaults = model.generation_config

    def given(self, name: str) -> Any:
        """Return what the caller said of a field, None if nothing."""
        if name in self.arguments:
            return self.arguments[name]
        return getattr(self.config, name, None) if self.config is not None else None

    def get(self, name: str) -> Any:
        """Return the value of a field."""
        value = self.given(name)
        return value if value is not None or name in self.arguments else getattr(self.defaults, name, None)


def checked_settings(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[Settings, Any]:
    """Refuse what cannot work, before anything is loaded or computed; return the settings and the caller's cache."""
    settings = Settings(model, arguments)
    if arguments.get("assistant_model") is not None:
        raise UnsupportedGenerationError(
            "`assistant_model` and `draft_model` are two ways to speculate, but both were given. Pass only one of them."
        )
    if arguments.get("custom_generate") is not None:
        raise UnsupportedGenerationError(
            "`custom_generate` replaces the decoding loop that `draft_model` needs, but both were given. Pass only one."
        )
    if settings.given("use_cache") is False:
        raise UnsupportedGenerationError(
            "Speculation continues from a cache, but `use_cache=False` was given. Leave `use_cache` out."
        )
    beams = settings.get("num_beams") or 1
    if beams > 1:
        raise UnsupportedGenerationError(
            f"`num_beams` must be 1 with `draft_model`, but is {beams}. Beam search compares whole beams, so drafted "
            "tokens cannot be verified one by one: leave out `draft_model`, or sample with `num_return_sequences`."
        )
    _refuse_other_modes(settings)
    _refuse_several_ranks(model, arguments)
    if settings.get("stop_strings") is not None and arguments.get("tokenizer") is None:
        raise UnsupportedGenerationError(
            "`stop_strings` are matched by their tokens, but no `tokenizer` was given. Pass the target's `tokenizer=`."
        )
    implementation = settings.get("cache_implementation")
    if isinstance(implementation, str) and implementation.startswith(UNSUPPORTED_CACHES):
        raise UnsupportedGenerationError(
            f"With `draft_model` the cache must stay on the device in the model's precision, but "
            f"`cache_implementation={implementation!r}` was given. Leave it out, or use 'dynamic' or 'static'."
        )
    ids = arguments.get("inputs", arguments.get("input_ids"))
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] == 0:
        raise UnsupportedGenerationError(
            "The prompt must hold at least one token, but it is empty. Start it with the tokenizer's first token (BOS)."
        )
    if arguments.get("inputs_embeds") is not None and ids is None:
        refuse_embeddings_alone(None)
    if settings.get("use_cache") is False:
        # A model's own default; a cache changes nothing but the time.
        arguments["use_cache"] = True
    return settings, filled_cache(arguments)


def _refuse_other_modes(settings: Settings) -> None:
    for name in OTHER_SPECULATION:
        if settings.get(name):
            raise UnsupportedGenerationError(
                f"`{name}` and `draft_model` are two ways to speculate, but both were given "
                f"(`{name}={settings.get(name)!r}`). Pass only one of them."
            )
    top_k = settings.get("top_k")
    for name, mode in OTHER_MODES.items():
        # The host, too, ignores this one when sampling.
        is_ignored = name == "penalty_alpha" and (settings.get("do_sample") or (top_k is not None and top_k <= 1))
        if settings.get(name) and not is_ignored:
            raise UnsupportedGenerationError(
                f"`draft_model` works with greedy search and sampling, but `{name}={settings.get(name)!r}` asks for "
                f"{mode}. Leave out either `draft_model` or `{name}`."
            )


def _refuse_several_ranks(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    is_sharded = (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
        and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    )
    if arguments.get("synced_gpus") or (arguments.get("synced_gpus") is None and is_sharded):
        raise UnsupportedGenerationError(
            "Ranks that share a model must run the same forwards, but with a draft each needs its own number "
            "(`synced_gpus`). Gather the model on each rank, or leave out `draft_model`."
        )


def refuse_embeddings_alone(input_ids: torch.Tensor | None) -> None:
    """Refuse a prompt without tokens.

    Raises:
        UnsupportedGenerationError: There are no token ids for the draft to read.
    """
    if input_ids is None or input_ids.shape[1] == 0:
        raise UnsupportedGenerationError(
            "A draft reads tokens, but the prompt was given as `inputs_embeds` alone. Pass `input_ids` as well."
        )


def is_batched(arguments: dict[str, Any], settings: Settings) -> bool:
    """Return whether there are several rows, or padded ones."""
    ids = arguments.get("inputs", arguments.get("input_ids"))
    has_several = (ids is not None and len(ids) > 1) or (settings.get("num_return_sequences") or 1) > 1
    return has_several or has_padding(arguments.get("attention_mask"))


def has_padding(mask: torch.Tensor | None) -> bool:
    """Return whether a prompt's mask hides anything."""
    # sync: once or twice per call, and only when there is a mask.
    return mask is not None and not bool((mask == 1).all())
