"""Decode with an architecture, plainly and with drafts: which lane did it take, and is the text the same?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

import hf_specdec
import models
from hf_specdec import SpeculationStats, SpeculationWarning

NUM_NEW_TOKENS = 16
# Where nothing is ever accepted, fewer say as much.
NUM_REJECTED = 6
PROMPT_LENGTHS = (9, 5)
# Relative to the spread of each weight; a draft this far away is right about half of the time.
NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Finding:
    """What happened with one architecture and one batch size.

    `outcomes` are the kinds of acceptance ("full", "partial", "none") that occurred over all drafts.
    """

    lane: str
    is_exact: bool
    reason: str = ""
    outcomes: tuple[str, ...] = ()
    num_replayed_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Return one prompt, or two of unequal length padded on the left."""
    generator = torch.Generator().manual_seed(3)
    lengths = PROMPT_LENGTHS[:batch]
    width = max(lengths)
    ids = torch.randint(4, 60, (batch, width), generator=generator)
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def draft_for(model: PreTrainedModel) -> PreTrainedModel:
    """Return a noisy copy of the model, or of the text model inside one that cannot do without an image."""
    has_own_generate = type(model).generate is not GenerationMixin.generate
    parts = [getattr(model, name, None) for name in ("language_model", "text_decoder", "text_model")]
    texts = [part for part in parts if isinstance(part, GenerationMixin) and part.can_generate()]
    return models.build_noisy(texts[0] if has_own_generate and texts else model, NOISE)


@contextmanager
def always_wrong(draft: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let a draft prefer what it believes in least, so that every proposal is rejected."""

    def negate(_module: Any, _inputs: Any, outputs: Any) -> Any:
        outputs.logits = -outputs.logits
        return outputs

    handle = draft.register_forward_hook(negate)
    try:
        yield draft
    finally:
        handle.remove()


def examine(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Finding:
    """Compare greedy decoding with drafts to plain decoding."""
    arguments = {**inputs, "max_new_tokens": NUM_NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    wanted = model.generate(**arguments)["sequences"]
    draft = draft_for(model)
    hf_specdec.enable(model)
    try:
        first = _decode(model, arguments, draft, num_draft_tokens=4)
        with always_wrong(draft):
            second = _decode(model, {**arguments, "max_new_tokens": NUM_REJECTED}, draft, num_draft_tokens=2)
    finally:
        hf_specdec.disable(model)
    stats: list[SpeculationStats] = [output["speculation"] for output in (first, second)]
    reasons = [reason for part in stats for reason in part.fallbacks]
    return Finding(
        lane="plain" if reasons else stats[0].lane,
        is_exact=all(_begins_with(wanted, output["sequences"]) for output in (first, second)),
        reason=reasons[0] if reasons else "",
        outcomes=tuple(sorted({outcome for part in stats for outcome in _outcomes(part)})),
        num_replayed_tokens=sum(part.num_replayed_tokens for part in stats),
    )


def _begins_with(wanted: torch.Tensor, got: torch.Tensor) -> bool:
    return torch.equal(wanted[..., : got.shape[-1]], got)


def _decode(model: Any, arguments: dict[str, Any], draft: PreTrainedModel, *, num_draft_tokens: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpeculationWarning)
        return model.generate(**arguments, draft_model=draft, num_draft_tokens=num_draft_tokens)


def _outcomes(stats: SpeculationStats) -> Iterator[str]:
    for record in stats.rounds:
        for accepted in record.num_accepted_tokens if record.num_draft_tokens else ():
            if accepted == 0:
                yield "none"
            else:
                yield "full" if accepted == record.num_draft_tokens else "partial"
