"""How well a quantized draft still predicts text, beside its unquantized self where that is in doubt."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec.errors import in_short
from hf_specdec.health import is_suspicious, lost_by_quantization
from hf_specdec.memory import fits, free_bytes, skeleton_of, weight_bytes
from hf_specdec.placement import device_of

logger = logging.getLogger(__name__)

TEXT = """The bridge was closed for three days after the storm. When the water went down, two engineers walked across it
with lamps and hammers, and knocked on every plank. On the far side they wrote a short list: four boards to replace, one
rail to straighten, and a lamp that had to be lit again. By the end of the week the carts could pass, and the people of
the town brought bread and apples to say thank you.

def area(width, height):
    \"\"\"Return the area of a rectangle.\"\"\"
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height
"""
"""Written for this purpose."""

MOST_TOKENS = 256


def damage_by_quantization(
    draft: PreTrainedModel,
    name: str,
    quantization: str,
    devices: Sequence[torch.device],
    *,
    settings: Mapping[str, Any],
) -> str | None:
    """Return what is wrong with a draft that was just quantized, None where nothing is, or nothing can be said.

    One forward over a short text. Only where that goes badly the unquantized draft is looked at as well: the draft may
    just be small, or know other texts.

    Args:
        draft: The quantized draft.
        name: Hub id or folder that it was loaded from, with its tokenizer.
        quantization: How its weights are stored.
        devices: Where its unquantized self may be loaded, the first with room for it is taken.
        settings: `revision` and `trust_remote_code` of the name.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **settings)
        token_ids = torch.tensor([tokenizer.encode(TEXT)[:MOST_TOKENS]])
        nats = nats_per_token(draft, token_ids)
        vocab_size = draft.config.get_text_config(decoder=True).vocab_size
        if not is_suspicious(nats, vocab_size):
            return None
        unquantized = _unquantized(name, draft.dtype, devices, settings)
        if unquantized is None:
            return None
        return lost_by_quantization(quantization, nats, nats_per_token(unquantized, token_ids), vocab_size)
    except Exception as error:  # noqa: BLE001  a draft without a tokenizer is still a draft
        logger.debug("The quantized draft %r could not be tried on a text: %s", name, in_short(error))
        return None


def _unquantized(
    name: str, dtype: torch.dtype, devices: Sequence[torch.device], settings: Mapping[str, Any]
) -> PreTrainedModel | None:
    needed = weight_bytes(skeleton_of(AutoConfig.from_pretrained(name, **settings), dtype))
    for device in dict.fromkeys(devices):
        if fits(needed, free_bytes(device)):
            model: Any = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, use_safetensors=True, device_map={"": device}, **settings
            )
            unquantized: PreTrainedModel = model.eval()
            return unquantized
    return None


def nats_per_token(model: PreTrainedModel, token_ids: torch.Tensor) -> float:
    """Return the mean negative log-likelihood of tokens `[1, T]` but the first; infinite where the model gives NaN."""
    token_ids = token_ids.to(device_of(model))
    with torch.no_grad():
        outputs: Any = model(input_ids=token_ids, use_cache=False)
    logits = outputs.logits[0, :-1].float()
    nats = float(torch.nn.functional.cross_entropy(logits, token_ids[0, 1:].to(logits.device)))
    return math.inf if math.isnan(nats) else nats
