"""Turn what the caller passed as `draft_model` into a loaded draft that fits the target."""

from __future__ import annotations

import copy
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import DraftLoadError, IncompatibleDraftError, InvalidConfigError, in_short
from hf_specdec.memory import (
    FOUR_BIT,
    QUANTIZATIONS,
    Choice,
    choose_quantization,
    fits,
    free_bytes,
    in_words,
    skeleton_of,
    weight_bytes,
)
from hf_specdec.pairing.compat import TokenSpaces
from hf_specdec.pairing.tokenizers import Source, pairing_of
from hf_specdec.placement import device_of, last_device_of
from hf_specdec.quality import damage_by_quantization

logger = logging.getLogger(__name__)

# A draft that shares less of the target's vocabulary than this was surely made for another tokenizer.
SMALLEST_SHARED_VOCABULARY = 0.5
# What bitsandbytes makes 4 and 8 bits of.
QUANTIZABLE_FROM = frozenset({torch.float16, torch.bfloat16, torch.float32})

_DraftKey = tuple[str, str | None, bool, torch.dtype, str]
_loaded: weakref.WeakKeyDictionary[PreTrainedModel, dict[_DraftKey, PreTrainedModel]] = weakref.WeakKeyDictionary()
_reasons: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
_suspicions: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def resolve_draft(target: PreTrainedModel, draft_model: Any, config: SpeculativeConfig) -> PreTrainedModel:
    """Return a draft for `target`.

    Args:
        target: The model whose text is wanted.
        draft_model: A loaded causal LM, or the Hub id or local folder of one. By name it is loaded once per target,
            with safetensors weights, in the target's dtype or quantized, and on the device of its last layer.
        config: Gives `trust_remote_code`, `draft_revision` and `draft_quantization`.

    Raises:
        DraftLoadError: The name does not lead to a causal LM that can be loaded, or its weights do not fit.
        IncompatibleDraftError: The draft cannot propose for this target.
        InvalidConfigError: `draft_quantization` is not what the draft already is.
    """
    if isinstance(draft_model, str | os.PathLike):
        draft = _load_once(target, os.fspath(draft_model), config)
    else:
        draft = _unwrapped(draft_model)
        _refuse_other_quantization(draft.config, config.draft_quantization, f"this {type(draft).__name__} was loaded")
    check_compatibility(target, draft)
    return draft


def forget_drafts(target: PreTrainedModel | None) -> None:
    """Free the drafts that were loaded by name for `target`, or for every target."""
    with _lock:
        if target is None:
            _loaded.clear()
        else:
            _loaded.pop(target, None)


def quantization_of(draft: PreTrainedModel) -> tuple[str, str]:
    """Return how a draft's weights are stored ("none", "nf4", "fp4", "int8", or another method's name) and why."""
    return stored_as(draft.config) or "none", _reasons.get(draft, "the caller loaded it")


def suspicions_of(draft: PreTrainedModel) -> tuple[str, ...]:
    """Return what seemed wrong with a draft when it was loaded."""
    return (_suspicions[draft],) if draft in _suspicions else ()


def check_compatibility(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Refuse a draft that could never propose for `target`.

    Raises:
        IncompatibleDraftError: It generates nothing, has an encoder, or has no weights.
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


def compared_tokens(
    target: PreTrainedModel, draft: PreTrainedModel, config: SpeculativeConfig, tokenizer: Any
) -> TokenSpaces | None:
    """Return how two different tokenizers of target and draft compare.

    Args:
        target: The target.
        draft: The draft, as `resolve_draft` returned it.
        config: Gives `draft_tokenizer`, `token_space`, `draft_revision` and `trust_remote_code`.
        tokenizer: The target's, if the caller gave it.

    Returns:
        None where both have the same tokenizer, or where one of them is not known; then ids are taken to mean the same.

    Raises:
        IncompatibleDraftError: The tokenizers have too little in common, or the vocabularies of unknown ones differ too
            much in size, or `draft_tokenizer` was given and the target's tokenizer cannot be found.
    """
    pairing = pairing_of(
        target,
        draft,
        Source(tokenizer=tokenizer, name=target.name_or_path or ""),
        Source(
            tokenizer=config.draft_tokenizer,
            name=draft.name_or_path or "",
            revision=config.draft_revision,
            trust_remote_code=config.trust_remote_code,
        ),
    )
    if config.draft_tokenizer is not None and not pairing.is_known:
        raise IncompatibleDraftError(
            "`draft_tokenizer` is compared with the target's tokenizer, but "
            + (
                f"it is no usable one ({type(config.draft_tokenizer).__name__})"
                if pairing.has_target
                else f"none of the target's was given or found on this machine as {target.name_or_path!r}"
            )
            + ". Pass both: `tokenizer=` to `generate`, `draft_tokenizer` in `speculative_config`."
        )
    if config.draft_tokenizer is not None:
        _refuse_larger_tokenizer(draft, config.draft_tokenizer)
    if pairing.spaces is not None:
        pairing.spaces.refuse_strangers(config.token_space)
    elif not pairing.is_known:
        _refuse_other_sizes(target, draft)
    return pairing.spaces


def _refuse_larger_tokenizer(draft: PreTrainedModel, tokenizer: Any) -> None:
    embeddings: Any = draft.get_input_embeddings().weight
    num_embeddings = int(embeddings.shape[0])
    if hasattr(tokenizer, "__len__") and len(tokenizer) > num_embeddings:
        raise IncompatibleDraftError(
            f"`draft_tokenizer` must be the draft's own, but has {len(tokenizer)} tokens, and the draft knows "
            f"{num_embeddings}. Pass the tokenizer that the draft was trained with."
        )


def _refuse_other_sizes(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if min(sizes) < SMALLEST_SHARED_VOCABULARY * max(sizes):
        raise IncompatibleDraftError(
            f"Target and draft must share a tokenizer, but the target's vocabulary has {sizes[0]} entries and the "
            f"draft's has {sizes[1]}. Choose a draft of the target's family, or pass both tokenizers: `tokenizer=` to "
            "`generate`, and `draft_tokenizer` in `speculative_config`."
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
    key = (name, config.draft_revision, config.trust_remote_code, target.dtype, config.draft_quantization)
    with _lock:
        drafts = _loaded.setdefault(target, {})
        if key not in drafts:
            drafts[key] = _load(target, name, config)
        draft = drafts[key]
    return _placed(draft, last_device_of(target))


def _load(target: PreTrainedModel, name: str, config: SpeculativeConfig) -> PreTrainedModel:
    if os.path.isabs(name) and not os.path.isdir(name):
        raise DraftLoadError(
            "`draft_model` must be a loaded model, or the Hub id or local folder of a causal LM, but there is no "
            f"folder {name!r}. Check the path."
        )
    source: dict[str, Any] = {
        "revision": config.draft_revision or "main",
        "trust_remote_code": config.trust_remote_code,
    }
    settings = dict(source)
    choice, is_to_be_quantized = _quantization_for(target, name, config)
    if is_to_be_quantized:
        settings["quantization_config"] = bitsandbytes_config(choice.quantization, target.dtype)
        settings["device_map"] = {"": last_device_of(target)}
    with _as_load_error(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=target.dtype, use_safetensors=True, output_loading_info=True, **settings
        )
    draft, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise DraftLoadError(
            f"A draft's folder must hold all its weights, but {name!r} lacks {len(missing)} of them ({missing[0]!r}, "
            "for one), which would be random. Save the draft again, or load it yourself and pass the model."
        )
    ready: PreTrainedModel = _placed(draft, last_device_of(target)).eval()
    _reasons[ready] = choice.reason
    if is_to_be_quantized:
        devices = (last_device_of(target), torch.device("cpu"))
        found = damage_by_quantization(ready, name, choice.quantization, devices, settings=source)
        if found is not None:
            _suspicions[ready] = found
            logger.warning(found)
    return ready


@contextmanager
def _as_load_error(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a broken folder can make any of the host's loaders raise anything
        raise DraftLoadError(
            f"`draft_model` must be a loaded model, or the Hub id or local folder of a causal LM with safetensors "
            f"weights, or of a draft pairing, but {name!r} could not be loaded ({in_short(error)}). Check the "
            "name, or load the draft yourself and pass the model."
        ) from error


# ---- quantization --------------------------------------------------------------------------------------------------


def _quantization_for(target: PreTrainedModel, name: str, config: SpeculativeConfig) -> tuple[Choice, bool]:
    """Return how to store the draft's weights, before they are read, and whether that takes quantizing them.

    Raises:
        DraftLoadError: They do not fit into the free memory.
        InvalidConfigError: The checkpoint is quantized in another way than asked for.
    """
    asked, device = config.draft_quantization, last_device_of(target)
    with _as_load_error(name):
        # An adapter's folder has no configuration of its own; the host finds its base model when it loads it.
        is_adapter = find_adapter_config_file(name, revision=config.draft_revision or "main") is not None
        if is_adapter and asked in ("auto", "none"):
            return Choice("none", "it is an adapter"), False
        if is_adapter:
            raise ValueError(f"an adapter cannot be quantized here: leave out `draft_quantization={asked!r}`")
        draft_config = AutoConfig.from_pretrained(
            name, revision=config.draft_revision or "main", trust_remote_code=config.trust_remote_code
        )
    stored = stored_as(draft_config)
    if stored is not None:
        _refuse_other_quantization(draft_config, asked, f"the checkpoint {name!r} was saved")
        choice: Choice | None = Choice(stored, "the checkpoint is quantized like that")
        if stored not in QUANTIZATIONS:
            return Choice(stored, "the checkpoint is quantized like that"), False
    with _as_load_error(name):
        skeleton = skeleton_of(_unquantized(draft_config), target.dtype, trust_remote_code=config.trust_remote_code)
    if stored is None and target.dtype not in QUANTIZABLE_FROM and asked not in ("auto", "none"):
        raise InvalidConfigError(
            f"`draft_quantization` needs weights of 16 or 32 bits, but is {asked!r} and the draft is loaded in the "
            f"target's dtype, {target.dtype}. Leave it out, or load the target in another dtype."
        )
    kinds = QUANTIZATIONS if stored is None else (stored,)
    if stored is None and target.dtype not in QUANTIZABLE_FROM:
        kinds = ("none",)
    sizes, free = {kind: weight_bytes(skeleton, kind) for kind in kinds}, free_bytes(device)
    if stored is None:
        choice = choose_quantization(sizes, free, str(device)) if asked == "auto" else Choice(asked, "asked for")
    if choice is None or not fits(sizes[choice.quantization], free):
        raise DraftLoadError(_too_large(name, sizes, free or 0, device, asked))
    return choice, stored is None and choice.quantization != "none"


def _unquantized(config: Any) -> Any:
    bare = copy.deepcopy(config)
    vars(bare).pop("quantization_config", None)
    return bare


def _too_large(name: str, sizes: dict[str, int], free: int, device: torch.device, asked: str) -> str:
    listed = ", ".join(f"{in_words(size)} as {kind!r}" for kind, size in sizes.items())
    nearest = next((kind for kind, size in sizes.items() if fits(size, free)), None)
    remedy = f"Ask for `draft_quantization={nearest!r}`" if nearest else "Choose a smaller draft, or free memory"
    return (
        f"A draft's weights must fit into the free memory beside the target and leave some for its cache, but {name!r} "
        f"takes {listed}, and {in_words(free)} are free on {device} (`draft_quantization` is {asked!r}). {remedy}."
    )


def bitsandbytes_config(quantization: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the settings with which a draft is quantized: those of `quantization`, computing in `dtype`."""
    if quantization in FOUR_BIT:
        # Quantizing the scales as well would save 0.4 bits per weight and make every step slower.
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=dtype)
    # With a threshold, which columns are computed in 16 bit would depend on the other rows and positions.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def quantized_layer(layer: Any, quantization: str, dtype: torch.dtype) -> nn.Module:
    """Return what takes a linear layer's place in a quantized model, its weight quantized on the device it lies on.

    Args:
        layer: A `Linear`, or the host's `Conv1D`, whose weight is stored transposed.
        quantization: One of `QUANTIZATIONS` but "none".
        dtype: What a 4-bit layer computes in.
    """
    import bitsandbytes.nn  # takes a second, and only quantized drafts need it

    bnb: Any = bitsandbytes.nn
    is_four_bit = quantization in FOUR_BIT
    settings = bitsandbytes_config(quantization, dtype)
    weight = layer.weight.detach()
    if not isinstance(layer, nn.Linear):
        weight = weight.T.contiguous()
    num_outputs, num_inputs = weight.shape
    has_bias = layer.bias is not None
    with torch.device("meta"):
        if is_four_bit:
            new: Any = bnb.Linear4bit(
                num_inputs,
                num_outputs,
                has_bias,
                settings.bnb_4bit_compute_dtype,
                compress_statistics=settings.bnb_4bit_use_double_quant,
                quant_type=settings.bnb_4bit_quant_type,
                quant_storage=settings.bnb_4bit_quant_storage,
            )
        else:
            threshold = settings.llm_int8_threshold
            new = bnb.Linear8bitLt(num_inputs, num_outputs, has_bias, has_fp16_weights=False, threshold=threshold)
    # bitsandbytes quantizes what it moves, int8 weights only where they come from main memory.
    kind, source = (bnb.Params4bit, weight) if is_four_bit else (bnb.Int8Params, weight.cpu())
    options = {name: value for name, value in vars(new.weight).items() if name not in ("CB", "SCB")}
    new.weight = kind(source, requires_grad=False, **options).to(weight.device)
    new.bias = layer.bias
    quantized: nn.Module = new
    return quantized


def stored_as(config: Any) -> str | None:
    """Return the name of a configuration's quantization, None without one."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    values: Any = found if isinstance(found, dict) else getattr(found, "to_dict", dict)()
    if values.get("load_in_8bit") or values.get("_load_in_8bit"):
        return "int8"
    if values.get("load_in_4bit") or values.get("_load_in_4bit"):
        return str(values.get("bnb_4bit_quant_type", "fp4"))
    method = values.get("quant_method", "unknown")
    return str(getattr(method, "value", method))


def _refuse_other_quantization(config: Any, asked: str, how: str) -> None:
    stored = stored_as(config) or "none"
    if asked not in ("auto", stored):
        found = "unquantized" if stored == "none" else f"as {stored!r}"
        raise InvalidConfigError(
            "`draft_quantization` says how a draft that is given by name is loaded from unquantized weights, but is "
            f"{asked!r}, and {how} {found}. Leave it out, or name an unquantized checkpoint."
        )


def _placed(draft: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a draft on the device; quantized ones, which the host already put there, may refuse to be moved."""
    placed: PreTrainedModel = draft if device_of(draft) == device else draft.to(device)  # type: ignore[arg-type]
    return placed
