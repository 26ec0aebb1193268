"""The end of a call: token ids, the output object, and the target's cache as plain decoding would leave it."""

from __future__ import annotations

import time
from typing import Any

import torch

from hf_specdec.controller import AdaptiveDraftLength
from hf_specdec.engine.cache import hand_back
from hf_specdec.engine.compatible import CompatibleLane
from hf_specdec.engine.forward import Lane
from hf_specdec.engine.sequences import Span
from hf_specdec.engine.session import Request, Session
from hf_specdec.outputs import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput, cache_field

Tensor = torch.Tensor


def finish(session: Session) -> Tensor | SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """End the stream, bring the cache home and return what `generate` returns."""
    request, stats = session.request, session.stats
    session.emitter.end()
    sequences = session.sequences.output(request.input_ids, session.pad_token_id)
    cache = return_cache(session, sequences) if session.returns_cache else None
    if session.lane is not None:
        stats.num_target_forwards += session.lane.num_forwards
        stats.num_replayed_tokens = session.lane.num_replayed_tokens
        stats.num_replay_forwards = session.lane.num_flushes
    if session.drafter is not None:
        stats.num_draft_forwards += session.drafter.num_forwards
    if isinstance(session.controller, AdaptiveDraftLength):
        stats.controller_hints = session.controller.hints()
    stats.runner, stats.draft_runner, stats.runner_reason = _runners(request)
    stats.draft_suspicions = list(request.health.suspicions)
    # The prefill gave each row its first token; padding is no token.
    stats.num_new_tokens = stats.num_rows + sum(record.num_committed_tokens for record in stats.rounds)
    stats.total_seconds = time.perf_counter() - request.started
    if not request.generation_config.return_dict_in_generate:
        return sequences
    fields = {"sequences": sequences, **session.recorder.fields(), cache_field(): cache}
    if not request.model.config.is_encoder_decoder:
        return SpeculativeDecoderOnlyOutput(**fields, speculation=stats)
    encoded = request.model_kwargs.get("encoder_outputs") or {}
    if session.recorder.attentions is not None:
        fields["encoder_attentions"] = encoded.get("attentions")
    if session.recorder.hidden_states is not None:
        fields["encoder_hidden_states"] = encoded.get("hidden_states")
    return SpeculativeEncoderDecoderOutput(**fields, speculation=stats)


def _runners(request: Request) -> tuple[str, str, str]:
    """Return how target and draft ran in the end, and why they did not as they should have."""
    (of_target, why_target), (of_draft, why_draft) = request.runner.told, request.draft_runner.told
    reasons = {"target": why_target, "draft": why_draft}
    return of_target, of_draft, "; ".join(f"{role}: {reason}" for role, reason in reasons.items() if reason)


def return_cache(session: Session, output_ids: Tensor) -> Any:
    """Fill the host's cache with every column but the last, for all rows, and return it."""
    lane = session.lane
    if lane is None:
        # Everything ended with the first token: the host's own prefill left the cache as it should be.
        return session.host_cache
    if isinstance(lane, CompatibleLane):
        return lane.come_home(output_ids[:, :-1])
    width = output_ids.shape[1] - 1
    num_rows = session.sequences.num_rows
    lengths = [session.sequences.length_of(row) - 1 for row in range(num_rows)]
    if session.left_rows:
        lane = _reassembled(session, lane)
    missing = width - min(lengths)
    if missing:
        # Rows that ended early lack the padding that plain decoding would have fed; the others write the same again.
        span = Span(start=width - missing, end=width)
        lane.forward(output_ids[:, width - missing : width], span, num_logits=1)
    hand_back(lane.cache, session.host_cache, width + lane.shift)
    return session.host_cache


def _reassembled(session: Session, lane: Lane) -> Lane:
    """Return a lane over all rows again, from those in the batch and copies of those that left it."""
    for position, row in enumerate(session.sequences.rows):
        session.left_rows[row] = lane.cache.copy_row(position)
    lane.cache.paste_rows([session.left_rows[row] for row in range(session.sequences.num_rows)])
    session.left_rows.clear()
    whole = Lane.over(
        lane.model, lane.cache, filled=lane.shift + session.sequences.num_prompt_columns, **session.lane_arguments
    )
    whole.num_forwards = lane.num_forwards
    session.lane = whole
    return whole
