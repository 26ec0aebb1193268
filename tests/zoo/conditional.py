"""Tiny random models that generate from something else than text alone: encoder-decoders and image-text models."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from zoo.conditional_configs import FIRST_SPECIAL, small_config
from zoo.conditional_images import IMAGE_MAKERS, any_image
from zoo.conditional_inputs import Inputs, text_for_encoder
from zoo.conditional_sounds import SOUND_MAKERS


@dataclass(frozen=True)
class Example:
    """A model in eval mode, and the inputs for `model.generate(**inputs, ...)`."""

    model: PreTrainedModel
    inputs: dict[str, torch.Tensor]


_SPEECH_TYPES = ("whisper", "speech_to_text")
_CLASS_NAMES: dict[str, str] = {
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **{name: modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[name] for name in _SPEECH_TYPES},
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
_TIMM = "Its vision tower is a TimmWrapperModel, which 'requires the PIL library' and timm, both optional."
_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
_NOT_BUILT_ANYWHERE = {
    "diffusion_gemma": "It denoises blocks of tokens in a generate() of its own and has no next-token logits.",
    "fast_vlm": _TIMM,
    "gemma3n": _TIMM,
    "perception_lm": _TIMM,
    "pi0": "It predicts a robot's actions, not tokens; its generate() is a policy.",
}
_NOT_BUILT_FROM_5_24 = {
    "llama4": "generate() fails: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'.",
}
_NOT_BUILT_BEFORE_5_20 = {
    "mllama": "Its own forward warns: '`hidden_state` is deprecated and will be removed in version v5.20'.",
    "vibevoice_asr": "It adds fresh noise to what it hears on every call, and does not yet know `sample=False`.",
}
_LEFT_OUT = (
    _NOT_BUILT_ANYWHERE
    | (_NOT_BUILT_FROM_5_24 if _VERSION >= (5, 24) else {})
    | (_NOT_BUILT_BEFORE_5_20 if _VERSION < (5, 20) else {})
)

# Types of the installed version that are left out, and why.
NOT_BUILT: dict[str, str] = {name: reason for name, reason in _LEFT_OUT.items() if name in _CLASS_NAMES}
# Types whose plain generate() fails for two rows.
BATCH_FAILS: dict[str, str] = {
    "evolla": "With padding, the mask grows too fast: 'size of tensor a (29) must match the size of tensor b (15)'.",
}
CONDITIONAL_TYPES: list[str] = sorted(_CLASS_NAMES.keys() - NOT_BUILT.keys())

# Standard deviation of embeddings, gain of queries and keys, gain of other matrices. Where every step sees the same
# encoder states, only a strong embedding keeps the last token from being forgotten.
_ENCODER_DECODER = (3.0, 3.0, 1.0)
_DECODER = (1.0, 1.6, 1.6)
_STRENGTHS = {
    **dict.fromkeys(["exaone4_5", "gemma4", "git", "glm46v", "glm4v", "glmga", "hunyuan_vl"], (1.0, 2.0, 1.0)),
    **dict.fromkeys(["idefics", "idefics2", "nemotron_h_omni", "nllb-moe", "t5gemma2"], (1.0, 2.0, 1.0)),
    "fsmt": (1.0, 2.0, 0.7),
    **dict.fromkeys(["bigbird_pegasus", "pegasus_x"], (2.0, 2.0, 1.5)),
}
_SEED_SHIFTS = {"hunyuan_vl": 1, "t5gemma2": 1}  # seed 0 happens to give these a dull model
_GATE = re.compile(r"gate$|alpha_cross_attn$|alpha_dense$|_gate_ffn$|gate_attention$|gate_ffw$")
_QUERY_OR_KEY = re.compile(r"(q|k|query|key|q_proj|k_proj|query_proj|key_proj)\.weight$")
_HEAD_GAIN = 3.0


def build_conditional(model_type: str, *, batch: int = 1, seed: int = 0) -> Example:
    """Return a tiny model of `model_type` and inputs of `batch` different rows."""
    seed += _SEED_SHIFTS.get(model_type, 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, _CLASS_NAMES[model_type])(small_config(model_type)).float().eval()
        common = _ENCODER_DECODER if model.config.is_encoder_decoder else _DECODER
        _enliven(model, *_STRENGTHS.get(model_type, common))
        model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, decoder_start_token_id=2)
        torch.manual_seed(seed + 1)
        return Example(model, _inputs(model_type, model, batch))


def _inputs(model_type: str, model: PreTrainedModel, batch: int) -> Inputs:
    """Return inputs of `batch` rows for `model.generate`."""
    maker = (IMAGE_MAKERS | SOUND_MAKERS).get(model_type)
    if maker is not None:
        return maker(model, batch)
    takes_image = model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return any_image(model, batch) if takes_image else text_for_encoder(model, batch)


@torch.no_grad()
def _enliven(model: PreTrainedModel, embedding: float, peak: float, gain: float) -> None:
    """Give every matrix weights so large that the next token depends on all that came before it."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings:
            parameter.normal_(std=embedding)
        elif _GATE.search(name) and parameter.count_nonzero() == 0:
            parameter.fill_(1)  # a closed gate hides the image
        elif parameter.dim() in (2, 4, 5):
            parameter.normal_(std=(peak if _QUERY_OR_KEY.search(name) else gain) * parameter[0].numel() ** -0.5)
        elif parameter.dim() == 3:
            parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
    _untie(model)


def _untie(model: PreTrainedModel) -> None:
    """Give the model a head of its own: a tied one mostly repeats the last token."""
    head: Any = model.get_output_embeddings()
    if head is None:
        return
    head.weight = nn.Parameter(torch.randn_like(head.weight) * _HEAD_GAIN * head.weight.shape[-1] ** -0.5)
    head.weight[:3] = 0
    head.weight[FIRST_SPECIAL:] = 0
    model.config.tie_word_embeddings = False
