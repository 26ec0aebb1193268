"""The prompt: the host's own prefill, the first token, and the lane that continues from there."""

from __future__ import annotations

import time
from typing import cast

import torch

from hf_specdec.engine.cache import refusal_of
from hf_specdec.engine.clock import Stopwatch
from hf_specdec.engine.compatible import CompatibleLane
from hf_specdec.engine.forward import batched_extras, open_lane
from hf_specdec.engine.host import Prefill, filled_cache, prefill
from hf_specdec.engine.layout import context_of
from hf_specdec.engine.lockstep import choose, commit_column
from hf_specdec.engine.processors import ProcessorPlan
from hf_specdec.engine.profiling import Phases
from hf_specdec.engine.recorder import Recorder
from hf_specdec.engine.sequences import Sequences
from hf_specdec.engine.session import Request, Session
from hf_specdec.engine.stopping import StopPlan
from hf_specdec.engine.streaming import Emitter
from hf_specdec.metrics import SpeculationStats

Tensor = torch.Tensor
# Room for this many new tokens is allocated at once; longer outputs let the buffers grow.
FIRST_ALLOCATION = 512


def open_session(request: Request) -> Session:
    """Sort processors and criteria, and decide whether rows must move in lockstep."""
    input_ids = request.input_ids
    num_rows = input_ids.shape[0]
    plan = ProcessorPlan(request.processors, num_rows)
    stops = StopPlan(request.criteria)
    recorder = Recorder(request.generation_config, is_encoder_decoder=bool(request.model.config.is_encoder_decoder))
    pad = getattr(request.generation_config, "_pad_token_tensor", None)
    pad_token_id = None if pad is None else int(pad)  # sync: once per call.
    is_stepwise = (
        not plan.is_known
        or not stops.is_known
        or bool(recorder.collect)
        or (num_rows > 1 and recorder.wants_scores)
        or (num_rows > 1 and stops.stops_rows_apart and not stops.pads_finished_rows)
        or (num_rows > 1 and "compatible" in (request.target_lane, request.draft_lane))
    )
    mask = request.model_kwargs.get("attention_mask") if not request.model.config.is_encoder_decoder else None
    stats = SpeculationStats(
        # sync: once per call, and only when something is padded.
        num_prompt_tokens=input_ids.numel() if mask is None else int(mask[:, -input_ids.shape[1] :].sum().item()),
        num_rows=num_rows,
        verification=request.config.verification,
        is_lockstep=is_stepwise and num_rows > 1,
        lane=request.target_lane,
        draft_lane=request.draft_lane,
    )
    return Session(
        request=request,
        sequences=Sequences(input_ids, capacity=_capacity(request, stops.max_length)),
        plan=plan,
        stops=stops,
        recorder=recorder,
        emitter=Emitter(request.streamer, pad_token_id),
        stats=stats,
        stopwatch=Stopwatch(input_ids.device),
        pad_token_id=pad_token_id,
        is_stepwise=is_stepwise,
        context=context_of(request.model),
        phases=Phases(is_on=request.config.profile),
        max_length=stops.max_length,
    )


def first_token(session: Session) -> None:
    """Prefill the target as plain decoding does, and commit and stream the first token."""
    request, sequences = session.request, session.sequences
    model_kwargs = dict(request.model_kwargs)
    outputs = prefill(request.model, request.input_ids, request.generation_config, model_kwargs)
    session.stats.num_target_forwards += 1
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=sequences.device)
    session.vocab_size = logits.shape[-1]
    scores: Tensor = request.processors(cast(torch.LongTensor, request.input_ids), logits)
    session.recorder.add_prefill(outputs)
    session.recorder.add_token(logits, scores)
    tokens = choose(scores, do_sample=session.do_sample)
    session.host_cache = filled_cache(outputs)
    session.prefill = Prefill(token_ids=request.input_ids, model_kwargs=model_kwargs, outputs=outputs)
    commit_column(session, tokens)
    session.stats.time_to_first_token_seconds = time.perf_counter() - request.started


def enter_lane(session: Session) -> None:
    """Move the target, which has read the prompt, into its lane."""
    request = session.request
    assert session.prefill is not None, "the prompt comes first"
    read, session.prefill = session.prefill, None
    if request.target_lane == "compatible":
        session.lane = CompatibleLane(request.model, read)
        return
    reason = refusal_of(session.host_cache)
    assert reason is None, "the caller checks that the lane admits the cache"
    position_ids = request.model_kwargs.get("position_ids")
    extras = batched_extras(request.model_kwargs)
    num_rows = request.input_ids.shape[0]
    token_types = request.model_kwargs.get("token_type_ids")
    if token_types is not None:
        extras["token_type_ids"] = token_types[:, -1:]
    if position_ids is not None:
        position_ids = position_ids.expand(num_rows, -1)
    session.lane_arguments = {
        "num_prompt_columns": request.input_ids.shape[1],
        "attention_mask": request.model_kwargs.get("attention_mask"),
        "position_ids": position_ids,
        "extras": extras,
    }
    session.lane = open_lane(
        request.model,
        session.host_cache,
        capacity=_capacity(request, session.max_length),
        keep=request.user_cache is not None,
        static=request.runner.static,
        **session.lane_arguments,
    )


def start_drafter(session: Session) -> None:
    """Make the controller and the drafter, which reads nothing before it is first used."""
    session.controller = session.request.make_controller(session)
    try:
        session.drafter = session.request.make_drafter(session)
        room = session.drafter.limit()
    except Exception as error:  # noqa: BLE001  whatever a draft does must not harm the answer
        session.stop_drafting(f"the draft failed on the prompt ({type(error).__name__}: {error})", error)
        return
    if room is not None and room < 1:
        session.stop_drafting("the prompt is longer than the draft's context", is_failure=False)


def _capacity(request: Request, max_length: int | None) -> int:
    width = request.input_ids.shape[1]
    room = FIRST_ALLOCATION if max_length is None else min(max_length - width, FIRST_ALLOCATION)
    return width + max(room, 1) + request.config.max_draft_tokens + 1
