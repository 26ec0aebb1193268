"""Turn what the caller passed as `draft_model` into a loaded draft that fits the target."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import DraftLoadError, IncompatibleDraftError
from hf_specdec.placement import device_of

# A draft that shares less of the target's vocabulary than this was surely made for another tokenizer.
SMALLEST_SHARED_VOCABULARY = 0.5

_DraftKey = tuple[str, str | None, bool, torch.dtype]
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[_DraftKey, PreTrainedModel]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def resolve_draft(target: PreTrainedModel, draft_model: Any, config: SpeculativeConfig) -> PreTrainedModel:
    """Return a draft for `target`.

    Args:
        target: The model whose text is wanted.
        draft_model: A loaded causal LM, or the Hub id or local folder of one. By name it is loaded once per target,
            with safetensors weights, in the target's dtype and on its device.
        config: Gives `trust_remote_code` and `draft_revision`.

    Raises:
        DraftLoadError: The name does not lead to a causal LM that can be loaded.
        IncompatibleDraftError: The draft cannot propose for this target.
    """
    draft = (
        _load_once(target, os.fspath(draft_model), config)
        if isinstance(draft_model, str | os.PathLike)
        else _unwrapped(draft_model)
    )
    check_compatibility(target, draft)
    return draft


def forget_drafts(target: PreTrainedModel) -> None:
    """Free the drafts that were loaded by name for `target`."""
    with _lock:
        _loaded.pop(target, None)


def check_compatibility(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft that could never propose for `target`.

    Raises:
        IncompatibleDraftError: It generates nothing, has an encoder, has no weights, or has another vocabulary.
    """
    name = type(draft).__name__
    if not callable(getattr(draft, "generate", None)) or not draft.can_generate():
        raise IncompatibleDraftError(
            f"`draft_model` must be able to generate, but {name} has no language modelling head. Load it with "
            "`AutoModelForCausalLM`."
        )
    if getattr(draft.config, "is_encoder_decoder", False) and not target.config.is_encoder_decoder:
        raise IncompatibleDraftError(
            f"For a decoder-only target `draft_model` must be a decoder-only causal LM, but {name} has an encoder. "
            "Choose a small model of the target's family."
        )
    both_encode = draft.config.is_encoder_decoder and target.config.is_encoder_decoder
    if both_encode and draft.main_input_name != target.main_input_name:
        raise IncompatibleDraftError(
            f"A draft with an encoder must read what the target reads, but the target reads `{target.main_input_name}` "
            f"and {name} reads `{draft.main_input_name}`. Choose a draft of the target's family."
        )
    if device_of(draft).type == "meta":
        raise IncompatibleDraftError(
            f"`draft_model` must have its weights loaded, but {name} is on the meta device. Load it with "
            "`from_pretrained`."
        )
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if min(sizes) < SMALLEST_SHARED_VOCABULARY * max(sizes):
        raise IncompatibleDraftError(
            f"Target and draft must share a tokenizer, but the target's vocabulary has {sizes[0]} entries and the "
            f"draft's has {sizes[1]}. Choose a draft of the target's family."
        )


def _unwrapped(draft_model: Any) -> PreTrainedModel:
    model = getattr(draft_model, "_orig_mod", draft_model)
    if not isinstance(model, PreTrainedModel) and callable(getattr(model, "get_base_model", None)):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise IncompatibleDraftError(
            "`draft_model` must be a loaded transformers model, a Hub id or a local folder, but is "
            f"{type(draft_model).__name__}. Load the draft with `AutoModelForCausalLM.from_pretrained`."
        )
    return model


def _load_once(target: PreTrainedModel, name: str, config: SpeculativeConfig) -> PreTrainedModel:
    key = (name, config.draft_revision, config.trust_remote_code, target.dtype)
    with _lock:
        drafts = _loaded.setdefault(target, {})
        if key not in drafts:
            drafts[key] = _load(target, name, config)
        draft = drafts[key]
    return _placed(draft, device_of(target))


def _load(target: PreTrainedModel, name: str, config: SpeculativeConfig) -> PreTrainedModel:
    if os.path.isabs(name) and not os.path.isdir(name):
        raise DraftLoadError(
            "`draft_model` must be a loaded model, or the Hub id or local folder of a causal LM, but there is no "
            f"folder {name!r}. Check the path."
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=target.dtype,
            revision=config.draft_revision or "main",
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # a broken folder can make any of the host's loaders raise anything
        raise DraftLoadError(
            f"`draft_model` must be a loaded model, or the Hub id or local folder of a causal LM with safetensors "
            f"weights, but {name!r} could not be loaded ({type(error).__name__}: {_first_line(error)}). Check the "
            "name, or load the draft yourself and pass the model."
        ) from error
    draft, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise DraftLoadError(
            f"A draft's folder must hold all its weights, but {name!r} lacks {len(missing)} of them ({missing[0]!r}, "
            "for one), which would be random. Save the draft again, or load it yourself and pass the model."
        )
    ready: PreTrainedModel = _placed(draft, device_of(target)).eval()
    return ready


def _placed(draft: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a draft on the device; quantized ones, which the host already put there, may refuse to be moved."""
    placed: PreTrainedModel = draft if device_of(draft) == device else draft.to(device)  # type: ignore[arg-type]
    return placed


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
