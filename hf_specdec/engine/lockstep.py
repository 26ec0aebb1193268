"""Commit token by token, all rows together, for callers whose own code must see the calls of plain decoding.

Unknown processors and criteria may keep state, so each is called once per emitted token, in order, with the whole batch
and a prefix that was really emitted. A round ends for all rows where the first of them rejects; that is exact, since
where a row is cut does not depend on its own later tokens. Finished rows stay, padded, as in plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from hf_specdec.engine.acceptance import one_hot_probs, survival_probs, token_verification
from hf_specdec.engine.phases import accept, refuse_undefined, run_target, survival_of
from hf_specdec.engine.session import Session
from hf_specdec.engine.state import Committed, Proposal

Tensor = torch.Tensor


def lockstep_round(session: Session, proposal: Proposal | None) -> Committed:
    """Verify, accept and commit one round."""
    sequences = session.sequences
    proposal = _with_padded_rows(session, proposal)
    outputs, logits = run_target(session, proposal)
    windows = session.lane.windows if session.lane is not None else None
    num_positions = logits.shape[1]
    before = [len(tokens) for tokens in sequences.new_tokens]
    accepted = [0] * sequences.num_rows
    evaluated = [0] * sequences.num_rows
    survival: list[tuple[float, ...]] = [()] * sequences.num_rows
    next_probs: Tensor | None = None
    decide = _decisions_at_once if session.plan.is_known else _decisions_one_by_one
    for position, decision in enumerate(decide(session, proposal, logits)):
        was_finished = list(sequences.is_finished)
        session.recorder.add_token(logits[:, position], decision.scores)
        session.recorder.add_position(outputs, position, num_positions, windows)
        commit_column(session, decision.tokens)
        survival, next_probs = decision.survival, decision.next_probs
        if position < num_positions - 1:
            for row, was_accepted in enumerate(decision.has_accepted):
                evaluated[row] += 1
                accepted[row] += was_accepted
        # A row that ends here is padded from the next token on, which this round's forward did not feed.
        is_news = sequences.is_finished != was_finished
        is_padding = [done and session.stops.pads_finished_rows for done in was_finished]
        everyone_accepted = all(ok or pad for ok, pad in zip(decision.has_accepted, is_padding, strict=True))
        if is_news or not everyone_accepted:
            break
    # sync: this path reads the host once per token anyway.
    is_broken = proposal is not None and proposal.is_broken is not None and bool(proposal.is_broken.any().item())
    return Committed(
        num_accepted=accepted,
        num_evaluated=evaluated,
        token_ids=[tuple(tokens[start:]) for tokens, start in zip(sequences.new_tokens, before, strict=True)],
        survival=survival,
        is_broken=is_broken,
        next_probs=next_probs,
    )


def commit_column(session: Session, tokens: Tensor) -> None:
    """Append one token `[B]` per row, stream it and ask all stopping criteria."""
    sequences = session.sequences
    if session.stops.pads_finished_rows and any(sequences.is_finished):
        is_finished = torch.tensor(sequences.is_finished, device=tokens.device)
        tokens = tokens.masked_fill(is_finished, session.pad_token_id or 0)
    sequences.write(sequences.span(0, 1), tokens[:, None])
    # sync: the criteria and the streamer that follow live on the host.
    for row, token in enumerate(tokens.tolist()):
        sequences.new_tokens[row].append(token)
    sequences.device_lengths = sequences.device_lengths + 1
    length = sequences.length_of(0)
    answers = session.stops.ask_all(sequences.buffer[:, :length], session.recorder.scores_so_far())
    sequences.is_finished = [old or new for old, new in zip(sequences.is_finished, answers, strict=True)]
    session.emitter.emit(sequences)


def _with_padded_rows(session: Session, proposal: Proposal | None) -> Proposal | None:
    """Let finished rows go on with padding, which is what the host feeds them."""
    if proposal is None or not session.stops.pads_finished_rows or not any(session.sequences.is_finished):
        return proposal
    is_finished = torch.tensor(session.sequences.is_finished, device=proposal.token_ids.device)
    token_ids = proposal.token_ids.masked_fill(is_finished[:, None], session.pad_token_id or 0)
    return Proposal(token_ids=token_ids, probs=proposal.probs, is_broken=proposal.is_broken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of one position.

    `scores` `[B, V]` and `tokens` `[B]` as committed; `has_accepted` says per row whether that was the draft's token,
    `survival` the labels as far as positions were looked at; `next_probs` as in `Acceptance`.
    """

    scores: Tensor
    tokens: Tensor
    has_accepted: list[bool]
    survival: list[tuple[float, ...]]
    next_probs: Tensor | None = None


def _decisions_at_once(session: Session, proposal: Proposal | None, logits: Tensor) -> Iterator[Decision]:
    """Decide position by position, from one acceptance over all positions."""
    scores = session.plan.run(logits, session.sequences, 0)
    acceptance = accept(session, proposal, scores)
    num_accepted: list[int] = acceptance.num_accepted.tolist()  # sync: rows must agree on a common length.
    num_drafted = logits.shape[1] - 1
    survival = (
        [survival_of(count, num_drafted) for count in num_accepted]
        if acceptance.survival is None
        else [tuple(row) for row in acceptance.survival.tolist()]  # sync: right after the read above.
    )
    # sync: right after the reads above.
    undefined = [False] * len(num_accepted) if acceptance.is_undefined is None else acceptance.is_undefined.tolist()
    for position in range(logits.shape[1]):
        refuse_undefined(lost and count == position for lost, count in zip(undefined, num_accepted, strict=True))
        tokens = acceptance.next_token_ids
        if proposal is not None and position < num_drafted:
            tokens = torch.where(acceptance.num_accepted > position, proposal.token_ids[:, position], tokens)
        yield Decision(
            scores=scores[:, position],
            tokens=tokens,
            has_accepted=[count > position for count in num_accepted],
            survival=survival,
            next_probs=acceptance.next_probs,
        )


def _decisions_one_by_one(session: Session, proposal: Proposal | None, logits: Tensor) -> Iterator[Decision]:
    """Decide the same, calling the processors for a position only once everything before it has been emitted."""
    sequences, batch = session.sequences, logits.shape[0]
    start = sequences.length_of(0)
    survival: list[tuple[float, ...]] = [()] * batch
    for position in range(logits.shape[1]):
        prefix = sequences.buffer[:, : start + position]
        scores: Tensor = session.request.processors(cast(torch.LongTensor, prefix), logits[:, position].clone())
        if proposal is None or position == proposal.token_ids.shape[1]:
            tokens = choose(scores, do_sample=session.do_sample)
            next_probs = scores.softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1) if session.do_sample else None
            yield Decision(
                scores=scores, tokens=tokens, has_accepted=[True] * batch, survival=survival, next_probs=next_probs
            )
            return
        if session.do_sample:
            tokens, decided = _sampled_decision(proposal, position, scores.softmax(dim=-1))
        else:
            tokens = scores.argmax(dim=-1)
            decided = (tokens == proposal.token_ids[:, position]).float().expand(2, -1)
        has_accepted, chances = decided.tolist()  # sync: go on only where every row accepted.
        survival = [
            (*labels, (labels[-1] if labels else 1.0) * chance)
            for labels, chance in zip(survival, chances, strict=True)
        ]
        yield Decision(
            scores=scores, tokens=tokens, has_accepted=[bool(flag) for flag in has_accepted], survival=survival
        )


def _sampled_decision(proposal: Proposal, position: int, target_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens `[B]`, and `[2, B]`: whether each is the draft's, and how likely that was."""
    draft_ids = proposal.token_ids[:, position : position + 1]
    draft_probs = (
        proposal.probs[:, position : position + 1]
        if proposal.probs is not None
        else one_hot_probs(draft_ids, target_probs.shape[-1])
    )
    uniforms = torch.rand(draft_ids.shape, dtype=torch.float32, device=draft_ids.device)
    # The bonus position plays no part in a one-token decision, so the same row stands in for it.
    both = torch.stack([target_probs, target_probs], dim=1)
    num_accepted, residual = token_verification(draft_ids, draft_probs, both, uniforms)
    corrections = torch.multinomial(residual, 1).squeeze(1)
    has_accepted = num_accepted > 0
    chances = survival_probs(draft_ids, draft_probs, both, is_block=False)[:, 0]
    tokens = torch.where(has_accepted, draft_ids[:, 0], corrections)
    return tokens, torch.stack([has_accepted.float(), chances])


def choose(scores: Tensor, *, do_sample: bool) -> Tensor:
    """Return one token `[B]` per row from scores `[B, V]`, drawn as plain decoding draws it."""
    if do_sample:
        return torch.multinomial(scores.softmax(dim=-1), 1).squeeze(1)
    return scores.argmax(dim=-1)
