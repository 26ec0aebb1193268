"""Commit in the ragged way: each row keeps what it accepted, read with the round's one sync."""

from __future__ import annotations

import torch

from hf_specdec.engine.phases import refuse_undefined, survival_of
from hf_specdec.engine.session import Session
from hf_specdec.engine.state import Acceptance, Committed, Proposal, Verification
from hf_specdec.engine.stopping import first_stop

Tensor = torch.Tensor
# Probabilities travel as integers beside the tokens, in these parts of 1.
LABEL_UNIT = 1 << 20


def commit(
    session: Session, proposal: Proposal | None, verification: Verification, acceptance: Acceptance
) -> Committed:
    """Append each row's tokens, cut where a criterion stops it, and mark rows that finish.

    Raises:
        RuntimeError: The target's probabilities are NaN or infinite where a token is to be drawn.
    """
    sequences = session.sequences
    num_tokens = 1 + (proposal.token_ids.shape[1] if proposal is not None else 0)
    # The buffer holds the proposal: accepted tokens, the next one, then leftovers that mean nothing.
    span = sequences.span(0, num_tokens)
    sequences.put(acceptance.num_accepted, acceptance.next_token_ids)
    block = sequences.read(span, num_tokens)
    flags = session.stops.flags(sequences, block)
    sequences.device_lengths = sequences.device_lengths + acceptance.num_accepted + 1
    columns = [block, acceptance.num_accepted[:, None]]
    if flags is not None:
        columns.append(flags.long())
    if acceptance.survival is not None:
        columns.append((acceptance.survival * LABEL_UNIT).round().long())
    if acceptance.is_undefined is not None:
        columns.append(acceptance.is_undefined.long()[:, None])
    if proposal is not None and proposal.is_broken is not None:
        columns.append(proposal.is_broken.long()[:, None])
    # sync: the round's one read: tokens, stop flags, accepted counts, labels and the draft's health together.
    packed = torch.cat(columns, dim=1).tolist()
    is_broken = proposal is not None and proposal.is_broken is not None and any(values[-1] for values in packed)
    if acceptance.is_undefined is not None:
        column = -1 if proposal is None or proposal.is_broken is None else -2
        refuse_undefined(bool(values[column]) for values in packed)

    end_of_flags = num_tokens + 1 + (num_tokens if flags is not None else 0)
    accepted: list[int] = []
    committed: list[tuple[int, ...]] = []
    survival: list[tuple[float, ...]] = []
    for position, (row, values) in enumerate(zip(sequences.rows, packed, strict=True)):
        num_accepted = values[num_tokens]
        kept = _kept(session, row, values[num_tokens + 1 : end_of_flags], num_accepted + 1)
        tokens = tuple(values[:kept])
        sequences.new_tokens[row].extend(tokens)
        accepted.append(num_accepted)
        committed.append(tokens)
        if acceptance.survival is None:
            survival.append(survival_of(num_accepted, num_tokens - 1))
        else:
            labels = values[end_of_flags : end_of_flags + num_tokens - 1]
            survival.append(tuple(label / LABEL_UNIT for label in labels))
        if session.recorder.wants_scores:
            _record(session, verification, position, kept)
    _apply_time_limit(session)
    return Committed(
        num_accepted=accepted,
        num_evaluated=[min(count + 1, num_tokens - 1) for count in accepted],
        token_ids=committed,
        survival=survival,
        is_broken=is_broken,
        next_probs=acceptance.next_probs,
    )


def _kept(session: Session, row: int, flags: list[int], num_tokens: int) -> int:
    """Return how many of a row's new tokens stay, and mark the row when it ends there; no flags: no token ends it."""
    stop = first_stop(flags, num_tokens)
    kept = num_tokens if stop is None else stop
    room = session.max_length - session.sequences.length_of(row) if session.max_length is not None else kept + 1
    session.sequences.is_finished[row] = stop is not None or kept >= room
    return min(kept, room)


def _record(session: Session, verification: Verification, position: int, kept: int) -> None:
    rows = slice(position, position + 1)
    for token in range(kept):
        session.recorder.add_token(verification.logits[rows, token], verification.scores[rows, token])


def _apply_time_limit(session: Session) -> None:
    """When time is up, end at the longest row: plain decoding, too, returns rows of one length."""
    sequences = session.sequences
    if session.is_done or not session.stops.is_out_of_time(sequences):
        return
    session.max_length = max(sequences.length_of(row) for row in range(sequences.num_rows))
    for row in sequences.rows:
        if sequences.length_of(row) >= session.max_length:
            sequences.is_finished[row] = True
