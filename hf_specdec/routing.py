"""Which lanes a call takes, as far as its arguments tell, and what its prompt holds beside tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specdec.engine.cache import refusal_of
from hf_specdec.engine.choice import Choice, choose_lane
from hf_specdec.engine.forward import batched_extras
from hf_specdec.engine.host import CACHE_NAMES, Prefill, filled_cache, prefill_by_host
from hf_specdec.engine.layout import arguments_of
from hf_specdec.errors import IncompatibleDraftError
from hf_specdec.placement import device_of
from hf_specdec.refusals import Settings, has_padding, is_batched

Tensor = torch.Tensor
# Arguments of `generate` that are no input of a draft's.
NOT_INPUTS = frozenset({"inputs", "input_ids", "attention_mask", "decoder_input_ids", "position_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The lanes of a call; `reason` says why it has to decode plainly, and is empty when it does not."""

    target: str = "plain"
    draft: str = "plain"
    reason: str = ""


def prompt_kind(model: PreTrainedModel, arguments: dict[str, Any]) -> str:
    """Return what the prompt holds beside tokens, empty for plain text."""
    if model.config.is_encoder_decoder:
        return "encoder"
    return " ".join(sorted(name for name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL if _holds(arguments.get(name))))


def prepared_kind(model: PreTrainedModel, arguments: dict[str, Any], prepared: dict[str, Any]) -> str:
    """Return the same once the host has prepared the call: any tensor counts that is no part of a text."""
    tensors = [name for name, value in batched_extras(prepared).items() if isinstance(value, Tensor)]
    return prompt_kind(model, prepared) or prompt_kind(model, arguments) or " ".join(sorted(tensors))


def _holds(value: Any) -> bool:
    """Return whether an argument holds anything; the host gathers encoded images in a dict that may be empty."""
    return any(_holds(item) for item in value.values()) if isinstance(value, dict) else value is not None


def lanes_for(
    model: PreTrainedModel, draft: PreTrainedModel, arguments: dict[str, Any], settings: Settings, user_cache: Any
) -> Lanes:
    """Choose the lanes of a call before the host prepares it.

    The target's is "unknown" where the prompt holds more than text: then it takes the prepared inputs to tell.
    """
    if user_cache is not None and (reason := cache_refusal(user_cache)):
        return Lanes(reason=reason)
    batched = is_batched(arguments, settings)
    # What a draft reads beside tokens is known once the host has prepared the call.
    reads_more = bool(prompt_kind(draft, _accepted(draft, arguments)))
    drafting = Choice("compatible") if reads_more else choose_lane(draft, is_batched=batched, is_draft=True)
    if drafting.lane == "plain":
        return Lanes(reason=f"no lane runs the draft: {drafting.reason}")
    if prompt_kind(model, arguments):
        return Lanes(target="unknown", draft=drafting.lane)
    obstacle = refusal_of(user_cache) if user_cache is not None else None
    target = choose_lane(model, is_batched=batched, obstacle=obstacle or "")
    if target.lane == "plain":
        return Lanes(reason=f"no lane runs the target: {target.reason}")
    return Lanes(target=target.lane, draft=drafting.lane)


def tokenizer_obstacle(model: PreTrainedModel, draft: PreTrainedModel, arguments: dict[str, Any]) -> str:
    """Return why a draft with another tokenizer cannot read a call's prompt, empty if it can."""
    if prompt_kind(draft, _accepted(draft, arguments)):
        return "a draft with another tokenizer reads text alone, and this one is to read more"
    if prompt_kind(model, arguments) not in ("", "encoder"):
        return "a draft with another tokenizer reads text alone, and the prompt holds more"
    return ""


def lanes_once_prepared(
    lanes: Lanes,
    model: PreTrainedModel,
    prepared: dict[str, Any],
    *,
    kind: str,
    prompt_shape: tuple[int, ...],
    make_prefill: Callable[[dict[str, Any]], Prefill],
) -> Lanes:
    """Choose again where the prepared inputs tell more than the arguments did.

    Args:
        lanes: What `lanes_for` chose.
        model: The target.
        prepared: What the host prepared for the target's `forward`.
        kind: See `prompt_kind`.
        prompt_shape: Rows and columns of the prompt.
        make_prefill: Reads the prompt with the given arguments.
    """
    num_rows, num_columns = prompt_shape
    if not num_columns:
        return Lanes(reason="a draft reads tokens, but the model was given its prompt as embeddings alone")
    cache = filled_cache(prepared)
    if cache is not None and (reason := cache_refusal(cache)):
        return Lanes(reason=reason)
    obstacle = f"the prompt holds more than text ({kind})" if kind else ""
    if cache is not None:
        obstacle = obstacle or refusal_of(cache) or ""
    position_ids = prepared.get("position_ids")
    if position_ids is not None and position_ids.ndim != 2:
        obstacle = obstacle or "a position has several parts"
    if lanes.target == "ragged" and not obstacle:
        return lanes
    if isinstance(cache, StaticCache):
        return Lanes(reason="a static cache needs the ragged lane")
    if lanes.target == "compatible":
        return lanes
    mask = prepared.get("attention_mask") if kind != "encoder" else None
    target = choose_lane(
        model,
        is_batched=num_rows > 1 or has_padding(mask),
        obstacle=obstacle,
        make_prefill=(lambda: make_prefill(_with_own_caches(prepared))) if kind else None,
        kind=kind,
    )
    if target.lane == "plain":
        return Lanes(reason=f"no lane runs the target: {target.reason}")
    return Lanes(target=target.lane, draft=lanes.draft)


def cache_refusal(cache: Any) -> str | None:
    """Return why no lane can continue from a cache, or None."""
    if not isinstance(cache, Cache):
        return f"{type(cache).__name__} is no transformers `Cache`"
    if getattr(cache, "offloading", False):
        return "an offloaded cache would have to stay on the device"
    if isinstance(cache, EncoderDecoderCache):
        inner = cache.self_attention_cache
        return None if type(inner) is DynamicCache else f"tokens cannot be taken back from {type(inner).__name__} there"
    if type(cache) is DynamicCache or (type(cache) is StaticCache and refusal_of(cache) is None):
        return None
    if isinstance(cache, DynamicCache) and type(cache).__module__.startswith("transformers.models."):
        # A model's own; the probe tells whether it can be taken back.
        return None
    return refusal_of(cache) or f"{type(cache).__name__} may do more than hold keys and values"


def _with_own_caches(prepared: dict[str, Any]) -> dict[str, Any]:
    """Return the prepared inputs with copies of what a forward writes into."""
    return {name: copy.deepcopy(value) if name in CACHE_NAMES else value for name, value in prepared.items()}


def draft_inputs(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    arguments: dict[str, Any],
    prepared: dict[str, Any],
    encoder_input: Any,
    num_rows: int,
) -> dict[str, Any]:
    """Return what a draft reads beside tokens, of what the target was given.

    Args:
        draft: The draft.
        target: The target.
        arguments: The arguments of `generate`.
        prepared: What the host prepared for the target's `forward`.
        encoder_input: What the host gave to the target's encoder, if it has one.
        num_rows: Rows of the batch after `num_return_sequences`.
    """
    parameters = arguments_of(draft)
    if draft.config.is_encoder_decoder:
        if arguments.get("encoder_outputs") is not None:
            raise IncompatibleDraftError(
                "A draft with an encoder reads what the target's encoder reads, but the call gave `encoder_outputs`. "
                "Give the encoder's input instead, or a draft without an encoder."
            )
        inputs = {draft.main_input_name: encoder_input, "attention_mask": arguments.get("attention_mask")}
        return {name: _repeated(value, num_rows, draft) for name, value in inputs.items() if value is not None}
    if target.config.is_encoder_decoder:
        # A decoder made for the target's encoder reads what that has read.
        return (
            {"encoder_outputs": _moved(prepared["encoder_outputs"], draft)} if "encoder_outputs" in parameters else {}
        )
    accepted = _accepted(draft, arguments)
    ids = arguments.get("input_ids", arguments.get("inputs"))
    # Images are not laid out by rows, so they cannot simply be repeated.
    if not prompt_kind(draft, accepted) or ids is None or len(ids) != num_rows:
        return {}
    return {
        name: value.to(device_of(draft))
        for name, value in accepted.items()
        if name not in NOT_INPUTS and isinstance(value, Tensor)
    }


def _accepted(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = arguments_of(model)
    return {name: value for name, value in arguments.items() if name in parameters}


def draft_choice_with_prompt(
    draft: PreTrainedModel, inputs: dict[str, Any], token_ids: Tensor, attention_mask: Tensor | None
) -> Choice:
    """Choose the lane of a draft that reads more than tokens, whose prompt cannot be made up."""
    token_ids = token_ids.to(device_of(draft))
    if draft.config.is_encoder_decoder:
        prompt = {"decoder_input_ids": token_ids}
    else:
        mask = torch.ones_like(token_ids) if attention_mask is None else attention_mask[:, -token_ids.shape[1] :]
        prompt = {"input_ids": token_ids, "attention_mask": mask.to(token_ids.device)}
    return choose_lane(
        draft,
        is_batched=len(token_ids) > 1,
        is_draft=True,
        obstacle="the draft reads more than tokens",
        make_prefill=lambda: prefill_by_host(draft, **inputs, **prompt),
        kind=" ".join(sorted(inputs)),
    )


def _moved(outputs: Any, draft: PreTrainedModel) -> Any:
    device = device_of(draft)
    return type(outputs)(
        **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in outputs.items()}
    )


def _repeated(value: Any, num_rows: int, draft: PreTrainedModel) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.repeat_interleave(num_rows // value.shape[0], dim=0).to(device_of(draft))
