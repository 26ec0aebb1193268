"""The round loop: propose, verify, accept, commit, until every row has stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hf_specdec.engine.commit import commit
from hf_specdec.engine.drafting import draft, probe_if_due
from hf_specdec.engine.finish import finish
from hf_specdec.engine.inside import copy_state, put_back, stateful_modules
from hf_specdec.engine.lockstep import lockstep_round
from hf_specdec.engine.phases import accept, verify
from hf_specdec.engine.profiling import traced
from hf_specdec.engine.prompt import enter_lane, first_token, open_session, start_drafter
from hf_specdec.engine.session import Request, Session
from hf_specdec.engine.snapshot import freeze, thaw
from hf_specdec.engine.state import Committed, Proposal
from hf_specdec.metrics import RoundRecord

Tensor = torch.Tensor
T = TypeVar("T")


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
    with traced(is_on=request.config.profile) as trace_files:
        with session.phases.phase("prompt"):
            first_token(session)
        if not session.is_done:
            with session.phases.phase("start"):
                enter_lane(session)
                session.drop_finished_rows()
                start_drafter(session)
            while not session.is_done:
                run_round(session)
    session.stats.profile = session.phases.seconds
    session.stats.trace_file = "".join(trace_files)
    return finish(session)


def run_round(session: Session) -> None:
    """Run one round and account for it."""
    phase = session.phases.phase
    with phase("probe"):
        outlook = probe_if_due(session)
    stopwatch, sequences = session.stopwatch, session.sequences
    num_preparations = session.num_preparations()
    started = stopwatch.mark()
    with phase("draft"):
        drafted = draft(session, outlook)
    proposal = drafted.proposal
    proposed = stopwatch.mark()
    assert session.lane is not None, "the prefill opens the lane"
    rows, counted = list(sequences.rows), session.counted_positions()
    replays = session.lane.num_replayed_tokens, session.lane.num_flushes
    if session.is_stepwise:
        with phase("lockstep"):
            committed = lockstep_round(session, proposal)
        verified = stopwatch.mark()
    else:
        with phase("verify"):
            verification = verify(session, proposal)
        verified = stopwatch.mark()
        with phase("accept"):
            acceptance = accept(session, proposal, verification.scores)
        with phase("commit"):
            committed = commit(session, proposal, verification, acceptance)
    with phase("conclude"):
        _conclude(session, proposal, committed)
    ended = stopwatch.mark()
    _account(
        session,
        RoundRecord(
            num_draft_tokens=proposal.token_ids.shape[1] if proposal is not None else 0,
            rows=_picked(rows, counted),
            num_accepted_tokens=_picked(committed.num_accepted, counted),
            num_evaluated_tokens=_picked(committed.num_evaluated, counted),
            committed_token_ids=_picked(committed.token_ids, counted),
            draft_seconds=stopwatch.seconds(drafted.caught_up, proposed),
            verify_seconds=stopwatch.seconds(proposed, verified),
            round_seconds=stopwatch.seconds(started, ended),
            survival=_picked(committed.survival, counted),
            confidences=_picked([tuple(row) for row in drafted.confidences], counted if drafted.confidences else []),
            num_batch_rows=len(rows),
            num_replayed_tokens=session.lane.num_replayed_tokens - replays[0],
            num_replay_forwards=session.lane.num_flushes - replays[1],
            num_caught_up_tokens=drafted.num_caught_up,
            catch_up_seconds=stopwatch.seconds(started, drafted.caught_up) if drafted.num_caught_up else 0.0,
        ),
        tells_costs=session.num_preparations() == num_preparations,
    )


def _conclude(session: Session, proposal: Proposal | None, committed: Committed) -> None:
    """Tell the drafter and the streamer what stays, and let finished rows go."""
    if proposal is None:
        session.streak.add(committed.next_probs)
    else:
        session.streak.clear()
        if session.drafter is not None:
            session.drafter.commit(committed.num_accepted)
    session.emitter.emit(session.sequences)
    if committed.is_broken:
        session.stop_drafting("the draft gave NaN or infinite logits")
    session.drop_finished_rows()


def _picked(values: Sequence[T], positions: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[position] for position in positions)


def _account(session: Session, record: RoundRecord, *, tells_costs: bool) -> None:
    if record.num_caught_up_tokens and not session.stats.draft_prefill_seconds:
        session.stats.draft_prefill_seconds = record.catch_up_seconds
    session.stats.observe(record)
    if tells_costs:
        # Compiling takes seconds, once; as the time of a round that would end all drafting.
        session.controller.observe(record)
    session.note_guesses(sum(record.num_accepted_tokens), sum(record.num_evaluated_tokens))
    on_round: Callable[[RoundRecord], None] | None = session.request.config.on_round
    if on_round is not None:
        on_round(record)
