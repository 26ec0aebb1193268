"""Choose the lane of a model for one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_specdec.engine.host import Prefill
from hf_specdec.engine.layout import MASKED_BY_US, Model, has_shared_outliers, layout_of
from hf_specdec.engine.probe import probe_compatible, probe_ragged


@dataclass(frozen=True, slots=True)
class Choice:
    """A lane, "ragged", "compatible" or "plain", and why it is no better one."""

    lane: str
    reason: str = ""


def choose_lane(
    model: Model,
    *,
    is_batched: bool,
    is_draft: bool = False,
    obstacle: str = "",
    make_prefill: Callable[[], Prefill] | None = None,
    kind: str = "",
) -> Choice:
    """Return the fastest lane that tells the truth about a model.

    Args:
        model: Target or draft.
        is_batched: Whether there are several rows, or padded ones.
        is_draft: See `tolerance_of`.
        obstacle: Why this call cannot use the ragged lane, whatever the model; empty if nothing is known.
        make_prefill: See `probe_compatible`.
        kind: See `probe_compatible`.
    """
    if not is_draft and has_shared_outliers(model):
        # Whatever the probe would say of a few tokens: the draft must have no influence.
        return Choice(
            "plain",
            "its int8 layers choose their outliers by all tokens of a pass, which moves logits further than rounding "
            "does (load it with `llm_int8_threshold=0.0`)",
        )
    attention = layout_of(model).attention
    if is_batched and attention not in MASKED_BY_US:
        obstacle = obstacle or f"attention {attention!r} takes no masks of ours, which a batch needs"
    if not obstacle:
        ragged = probe_ragged(model, is_batched=is_batched, is_draft=is_draft)
        if ragged.is_admitted:
            return Choice("ragged")
        obstacle = ragged.reason
    compatible = probe_compatible(model, is_batched=is_batched, is_draft=is_draft, make_prefill=make_prefill, kind=kind)
    if compatible.is_admitted:
        return Choice("compatible", obstacle)
    reasons = dict.fromkeys((obstacle, compatible.reason))
    return Choice("plain", "; ".join(reasons))
