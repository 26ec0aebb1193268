"""The round loop: propose, verify, accept, commit, until every row has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_specdec.engine.commit import commit
from hf_specdec.engine.finish import finish
from hf_specdec.engine.inside import copy_state, put_back, stateful_modules
from hf_specdec.engine.lockstep import lockstep_round
from hf_specdec.engine.phases import accept, verify
from hf_specdec.engine.prompt import enter_lane, first_token, open_session, start_drafter
from hf_specdec.engine.session import Request, Session
from hf_specdec.engine.snapshot import freeze, thaw
from hf_specdec.engine.state import Proposal
from hf_specdec.metrics import RoundRecord

Tensor = torch.Tensor


def speculative_decode(request: Request) -> Any:
    """Decode to the end and return what `generate` returns.

    A cache of the caller's is as it was when this raises, an interrupt included.
    """
    saved = freeze(request.user_cache)
    inside = copy_state(stateful_modules(request.model)) if request.user_cache is not None else []
    try:
        return _decode(request)
    except BaseException:
        thaw(saved)
        put_back(inside)
        raise


def _decode(request: Request) -> Any:
    session = open_session(request)
    first_token(session)
    if not session.is_done:
        enter_lane(session)
        session.drop_finished_rows()
        start_drafter(session)
        while not session.is_done:
            run_round(session)
    return finish(session)


def run_round(session: Session) -> None:
    """Run one round and account for it."""
    stopwatch = session.stopwatch
    started = stopwatch.mark()
    num_draft_tokens = _next_num_draft_tokens(session)
    proposal = _propose(session, num_draft_tokens) if num_draft_tokens else None
    drafted = stopwatch.mark()
    rows = session.sequences.rows
    # In lockstep finished rows stay in the batch as padding, which is nothing that a round achieved.
    counted = [
        position
        for position, row in enumerate(rows)
        if not (session.sequences.is_finished[row] and session.stops.pads_finished_rows)
    ]
    if session.is_stepwise:
        accepted, evaluated, committed = lockstep_round(session, proposal)
        verified = stopwatch.mark()
        # sync: this path reads the host once per token anyway.
        is_broken = proposal is not None and proposal.is_broken is not None and bool(proposal.is_broken.any().item())
    else:
        verification = verify(session, proposal)
        verified = stopwatch.mark()
        acceptance = accept(session, proposal, verification.scores)
        accepted, committed, is_broken = commit(session, proposal, verification, acceptance)
        drawn = proposal.token_ids.shape[1] if proposal is not None else 0
        evaluated = [min(count + 1, drawn) for count in accepted]
    if proposal is not None and session.drafter is not None:
        session.drafter.commit(accepted)
    session.emitter.emit(session.sequences)
    ended = stopwatch.mark()
    record = RoundRecord(
        num_draft_tokens=proposal.token_ids.shape[1] if proposal is not None else 0,
        rows=tuple(rows[position] for position in counted),
        num_accepted_tokens=tuple(accepted[position] for position in counted),
        num_evaluated_tokens=tuple(evaluated[position] for position in counted),
        committed_token_ids=tuple(committed[position] for position in counted),
        draft_seconds=stopwatch.seconds(started, drafted),
        verify_seconds=stopwatch.seconds(drafted, verified),
        round_seconds=stopwatch.seconds(started, ended),
    )
    _account(session, record)
    if is_broken:
        session.stop_drafting("the draft gave NaN or infinite logits")
    session.drop_finished_rows()


def _next_num_draft_tokens(session: Session) -> int:
    """Ask the controller for K, within what the rows and the draft's context have room for."""
    if session.drafter is None:
        return 0
    remaining = session.remaining()
    limit = session.request.config.num_draft_tokens if remaining is None else remaining - 1
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
    limit = limit if room is None else min(limit, room)
    return min(session.request.controller.next_num_draft_tokens(limit), limit)


def _propose(session: Session, num_draft_tokens: int) -> Proposal | None:
    assert session.drafter is not None, "without a drafter K is 0"
    try:
        return session.drafter.propose(num_draft_tokens)
    except Exception as error:  # noqa: BLE001  whatever a draft does must not harm the answer
        session.stop_drafting(f"the draft failed ({type(error).__name__}: {error})", error)
        return None


def _account(session: Session, record: RoundRecord) -> None:
    session.stats.observe(record)
    session.request.controller.observe(record)
    on_round: Callable[[RoundRecord], None] | None = session.request.config.on_round
    if on_round is not None:
        on_round(record)
