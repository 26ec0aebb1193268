"""Verify and accept: what the target says of the proposal, and how much of it stays."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec.engine.acceptance import (
    block_verification,
    greedy_acceptance,
    one_hot_probs,
    survival_probs,
    token_verification,
)
from hf_specdec.engine.session import Session
from hf_specdec.engine.state import Acceptance, Proposal, Verification

Tensor = torch.Tensor


def run_target(session: Session, proposal: Proposal | None) -> tuple[Any, Tensor]:
    """Feed the last committed token and the K proposed ones; return the outputs and float32 logits `[B, K+1, V]`."""
    sequences, lane = session.sequences, session.lane
    assert lane is not None, "the prefill opens the lane"
    num_positions = 1 + (proposal.token_ids.shape[1] if proposal is not None else 0)
    if proposal is not None and session.plan.reads_prefix:
        sequences.write(sequences.span(0, num_positions - 1), proposal.token_ids)
    span = sequences.span(-1, num_positions)
    lane.settle(min(sequences.lengths))
    tokens = sequences.read(sequences.span(-1, 1), 1)
    if proposal is not None:
        tokens = torch.cat([tokens, proposal.token_ids], dim=1)
    outputs = lane.forward(tokens, span, num_logits=num_positions, collect=session.recorder.collect)
    logits = outputs.logits[:, -num_positions:].to(device=sequences.device, dtype=torch.float32)
    return outputs, logits


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
    target_probs = scores.softmax(dim=-1)
    if proposal is None:
        next_ids = torch.multinomial(target_probs[:, 0], 1)
        return Acceptance(
            num_accepted=next_ids.new_zeros(batch),
            next_token_ids=next_ids.squeeze(1),
            next_probs=target_probs[:, 0].gather(1, next_ids).squeeze(1),
        )
    draft_probs = proposal.probs
    if draft_probs is None:
        draft_probs = one_hot_probs(draft_ids, scores.shape[-1])
    uniforms = torch.rand(draft_ids.shape, dtype=torch.float32, device=scores.device)
    is_block = session.request.config.verification == "block"
    rule = block_verification if is_block else token_verification
    num_accepted, next_probs = rule(draft_ids, draft_probs, target_probs, uniforms)
    next_ids = torch.multinomial(next_probs, 1).squeeze(1)
    survival = survival_probs(draft_ids, draft_probs, target_probs, is_block=is_block)
    return Acceptance(num_accepted=num_accepted, next_token_ids=next_ids, survival=survival)


def survival_of(count: int, num_draft_tokens: int) -> tuple[float, ...]:
    """Return the labels of a draft whose fate is certain: `count` of its tokens survive."""
    return (1.0,) * count + (0.0,) * (num_draft_tokens - count)
