"""The drafter's part of a round: how much to draft, catching up, proposing, and probing while drafting is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.controller import FixedDraftLength, Outlook
from hf_specdec.engine.session import Session
from hf_specdec.engine.state import Drafter, Proposal
from hf_specdec.metrics import ProbeRecord

Tensor = torch.Tensor


@dataclass(slots=True, kw_only=True)
class Drafted:
    """What the drafter did in a round.

    `proposal` is None for a plain step; `caught_up` marks the time after catching up, for which the drafter read
    `num_caught_up` tokens per row; `confidences` are those that were read, per row in the batch.
    """

    proposal: Proposal | None = None
    caught_up: Any = None
    num_caught_up: int = 0
    confidences: list[list[float]] = field(default_factory=list)


def draft(session: Session, outlook: Outlook) -> Drafted:
    """Ask the controller for K and let the drafter propose; whatever goes wrong there leaves a plain step."""
    drafted = Drafted()
    num_draft_tokens = min(session.controller.next_num_draft_tokens(outlook), outlook.limit)
    drafter = session.drafter
    if drafter is not None and num_draft_tokens:
        try:
            drafted.num_caught_up = outlook.num_unread_tokens
            if drafted.num_caught_up:
                drafter.catch_up()
            drafted.caught_up = session.stopwatch.mark()
            watch = _watch(session, drafted, outlook) if outlook.reads_confidence else None
            drafted.proposal = drafter.propose(num_draft_tokens, watch)
        except Exception as error:  # noqa: BLE001  whatever a draft does must not harm the answer
            session.stop_drafting(f"the draft failed ({type(error).__name__}: {error})", error)
    if drafted.caught_up is None:
        drafted.caught_up = session.stopwatch.mark()
    return drafted


def probe_if_due(session: Session) -> Outlook:
    """Try the draft on the latest plain steps, where the controller asks for it, and return what it knows now."""
    outlook = look_ahead(session)
    drafter = session.drafter
    num_tokens = session.controller.num_probe_tokens(outlook) if outlook.num_shadow_tokens else 0
    if not num_tokens or drafter is None:
        return outlook
    num_preparations = session.num_preparations()
    try:
        record = _probe(session, drafter, num_tokens, outlook.num_unread_tokens)
    except Exception as error:  # noqa: BLE001  whatever a draft does must not harm the answer
        session.stop_drafting(f"the draft failed ({type(error).__name__}: {error})", error)
        return look_ahead(session)
    if any(math.isnan(value) for row in record.agreement for value in row):
        session.stop_drafting("the draft gave NaN or infinite logits")
        return look_ahead(session)
    # The drafter has read these tokens, and some cannot go back.
    session.streak.clear()
    session.stats.probes.append(record)
    if session.num_preparations() == num_preparations:
        session.controller.observe_probe(record)
    session.note_guesses(sum(map(sum, record.agreement)), sum(map(len, record.agreement)))
    return look_ahead(session)


def look_ahead(session: Session) -> Outlook:
    """Return what the controller needs to know before a round."""
    counted = session.counted_positions()
    room = _room(session)
    drafter = session.drafter
    return Outlook(
        limit=room,
        num_rows=len(counted),
        num_batch_rows=len(session.sequences.rows),
        is_lockstep=session.stats.is_lockstep,
        num_remaining_tokens=session.remaining(),
        num_unread_tokens=drafter.num_unread() if drafter is not None else 0,
        num_shadow_tokens=session.streak.length,
        reads_confidence=_is_reading_cheap(session),
    )


def _room(session: Session) -> int:
    """Return how many draft tokens the rows, the target's context and the draft's have room for."""
    if session.drafter is None:
        return 0
    limit = session.request.config.max_draft_tokens
    if (remaining := session.remaining()) is not None:
        limit = min(limit, remaining - 1)
    if limit < 1:
        return 0
    if (context := session.target_context()) is not None:
        # A verify forward must not look past the target's last position, also not for the row in front.
        lengths = session.sequences.lengths
        if context - min(lengths) < 1:
            session.stop_drafting("the text has outgrown the target's context", is_failure=False)
            return 0
        limit = min(limit, context - max(lengths))
        if limit < 1:
            return 0
    room = session.drafter.limit()
    if room is not None and room < 1:
        session.stop_drafting("the text has outgrown the draft's context", is_failure=False)
        return 0
    return limit if room is None else min(limit, room)


def _is_reading_cheap(session: Session) -> bool:
    if session.drafter is not None and not session.drafter.asks_midway:
        return False
    # On an accelerator each read would wait for the draft step to end; a fixed length has no use for it.
    return session.sequences.device.type == "cpu" and not isinstance(session.controller, FixedDraftLength)


def _watch(session: Session, drafted: Drafted, outlook: Outlook) -> Callable[[Tensor], bool]:
    """Return the question after each draft step whether to go on."""
    counted = session.counted_positions()
    drafted.confidences = [[] for _ in session.sequences.rows]

    def goes_on(confidence: Tensor) -> bool:
        # sync: only on the CPU, where it waits for nothing.
        values: list[float] = confidence.tolist()
        for row, value in zip(drafted.confidences, values, strict=True):
            row.append(value)
        return session.controller.goes_on([values[position] for position in counted])

    return goes_on


def _probe(session: Session, drafter: Drafter, num_tokens: int, num_unread: int) -> ProbeRecord:
    started = session.stopwatch.mark()
    shadow = drafter.shadow(num_tokens)
    agreement = session.streak.agreement(shadow.probs)
    # sync: once per probe, which is once in 32 to 256 tokens and only while drafting is off.
    values = torch.stack([agreement, shadow.confidences]).tolist()
    ended = session.stopwatch.mark()
    counted = session.counted_positions()
    rows, confidences = ([tuple(part[position]) for position in counted] for part in values)
    return ProbeRecord(
        num_after_round=session.stats.num_rounds,
        agreement=tuple(rows),
        confidences=tuple(confidences),
        num_caught_up_tokens=max(num_unread, num_tokens),
        seconds=session.stopwatch.seconds(started, ended),
    )
