"""Verify and accept: what the target says of the proposal, and how much of it stays."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from hf_specdec.engine.acceptance import (
    block_verification,
    drawn,
    greedy_acceptance,
    one_hot_probs,
    prefix_acceptance_probs,
    survival_probs,
    token_verification,
)
from hf_specdec.engine.scratch import FRESH, Scratch, in_float32
from hf_specdec.engine.session import Session
from hf_specdec.engine.state import Acceptance, Proposal, Verification

Tensor = torch.Tensor


def run_target(session: Session, proposal: Proposal | None) -> tuple[Any, Tensor]:
    """Feed the last committed token and the K proposed ones; return the outputs and float32 logits `[B, K+1, V]`.

    The logits may lie in memory that the next round uses again.
    """
    sequences, lane = session.sequences, session.lane
    assert lane is not None, "the prefill opens the lane"
    num_positions = 1
    if proposal is not None:
        num_positions += proposal.token_ids.shape[1]
        sequences.write(sequences.span(0, num_positions - 1), proposal.token_ids)
    span = sequences.span(-1, num_positions)
    lane.settle(min(sequences.lengths))
    tokens = sequences.read(span, num_positions)
    outputs = lane.forward(tokens, span, num_logits=num_positions, collect=session.recorder.collect)
    logits = outputs.logits
    if logits.shape[1] != num_positions:
        logits = logits[:, -num_positions:]
    return outputs, in_float32(logits, sequences.device, session.scratch, "logits")


def verify(session: Session, proposal: Proposal | None) -> Verification:
    """Return the target's logits and scores at all K+1 positions, for processors that are known."""
    _, logits = run_target(session, proposal)
    return Verification(logits=logits, scores=session.plan.run(logits, session.sequences, 0))


def accept(session: Session, proposal: Proposal | None, scores: Tensor) -> Acceptance:
    """Decide how many draft tokens stay and which token follows, from scores `[B, K+1, V]`."""
    batch = scores.shape[0]
    draft_ids = (
        proposal.token_ids if proposal is not None else torch.empty((batch, 0), dtype=torch.long, device=scores.device)
    )
    if not session.do_sample:
        num_accepted, next_ids = greedy_acceptance(draft_ids, scores.argmax(dim=-1))
        return Acceptance(num_accepted=num_accepted, next_token_ids=next_ids)
    if proposal is None:
        return _sampled_step(scores, session.scratch)
    draft_probs = proposal.probs
    if draft_probs is None:
        draft_probs = one_hot_probs(draft_ids, scores.shape[-1])
    is_block = session.request.config.verification == "block"
    inputs = draft_ids, draft_probs, scores
    static = session.request.runner.static
    decided = static.maths(("accept", is_block), partial(_decided, is_block=is_block), inputs) if static else None
    num_accepted, next_ids, survival, is_undefined = decided or _decided(
        *inputs, is_block=is_block, scratch=session.scratch
    )
    return Acceptance(num_accepted=num_accepted, next_token_ids=next_ids, survival=survival, is_undefined=is_undefined)


def _sampled_step(scores: Tensor, scratch: Scratch) -> Acceptance:
    """Draw a plain step's token."""
    law = scratch.take("target probs", scores[:, 0].shape, scores)
    torch.softmax(scores[:, 0], dim=-1, out=law)
    next_ids = drawn(law, scratch)
    next_probs = law.gather(1, next_ids[:, None]).squeeze(1)
    return Acceptance(
        num_accepted=torch.zeros_like(next_ids),
        next_token_ids=next_ids,
        next_probs=next_probs,
        is_undefined=next_probs.isnan(),
    )


def _decided(
    draft_ids: Tensor, draft_probs: Tensor, scores: Tensor, *, is_block: bool, scratch: Scratch = FRESH
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the parts of a sampled `Acceptance`, from tensors to tensors."""
    target_probs = scratch.take("target probs", scores.shape, scores)
    torch.softmax(scores, dim=-1, out=target_probs)
    uniforms = torch.rand(draft_ids.shape, dtype=torch.float32, device=scores.device)
    if is_block:
        prefix_probs = prefix_acceptance_probs(draft_ids, draft_probs, target_probs)
        num_accepted, next_law = block_verification(
            draft_ids, draft_probs, target_probs, uniforms, scratch, prefix_probs
        )
        survival = prefix_probs[:, 1:]
    else:
        num_accepted, next_law = token_verification(draft_ids, draft_probs, target_probs, uniforms, scratch)
        survival = survival_probs(draft_ids, draft_probs, target_probs, is_block=False)
    is_undefined = next_law[:, 0].isnan()
    return num_accepted, drawn(next_law, scratch), survival, is_undefined


def refuse_undefined(is_undefined: Iterable[bool]) -> None:
    """Raise what plain decoding raises where the target's probabilities of a token are NaN."""
    if any(is_undefined):
        # In the words of `torch.multinomial`, which plain decoding draws with.
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")


def survival_of(count: int, num_draft_tokens: int) -> tuple[float, ...]:
    """Return the labels of a draft whose fate is certain: `count` of its tokens survive."""
    return (1.0,) * count + (0.0,) * (num_draft_tokens - count)
