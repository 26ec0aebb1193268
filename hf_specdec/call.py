"""One call of `generate` with a draft: from the caller's arguments to the engine and back."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateEncoderDecoderOutput

from hf_specdec.config import SpeculativeConfig
from hf_specdec.controller import DraftLengthController, FixedDraftLength
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.drafters.shared_tokens import SharedTokensDrafter
from hf_specdec.drafters.text import TextDrafter
from hf_specdec.drafters.translation import Translator, chosen_space
from hf_specdec.engine.host import Prefill, prefill, sample_plainly
from hf_specdec.engine.lending import lent_runner
from hf_specdec.engine.loop import speculative_decode
from hf_specdec.engine.session import Request, Session
from hf_specdec.errors import IncompatibleDraftError, UnsupportedGenerationError, warn_caller
from hf_specdec.learned import health_of, lent_controller, sampling_key
from hf_specdec.loading import quantization_of, suspicions_of
from hf_specdec.metrics import SpeculationStats, added_up
from hf_specdec.outputs import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput
from hf_specdec.pairing.compat import TokenSpaces
from hf_specdec.refusals import Settings, refuse_embeddings_alone
from hf_specdec.routing import (
    Lanes,
    draft_choice_with_prompt,
    draft_inputs,
    lanes_for,
    lanes_once_prepared,
    prepared_kind,
    tokenizer_obstacle,
)


@dataclass(slots=True, kw_only=True)
class Call:
    """What a call of `generate` was given to `model`, which may let a model inside of it decode.

    `host_generate` is the model's own `generate`; `has_own_generate` says that its class overrides the host's and may
    call that several times (Whisper does, once per segment of audio). `user_cache` is the caller's cache, if any;
    `started` the host clock's reading at the start, in seconds; `pairing` what the stats say of the draft's pairing.
    """

    model: Any
    draft: PreTrainedModel
    host_generate: Callable[..., Any]
    has_own_generate: bool
    arguments: dict[str, Any]
    config: SpeculativeConfig
    settings: Settings
    user_cache: Any
    started: float
    pairing: str = ""
    spaces: TokenSpaces | None = None
    told: list[SpeculationStats] = field(default_factory=list)


def generate_with_draft(call: Call) -> Any:
    """Run the call and return what `generate` returns."""
    lanes = lanes_for(call.model, call.draft, call.arguments, call.settings, call.user_cache)
    reason = lanes.reason
    if call.spaces is not None and (obstacle := tokenizer_obstacle(call.model, call.draft, call.arguments)):
        if call.spaces.differs_in_specials_only:
            # Such a draft, of Whisper's family say, misreads a few tokens and is no worse for it than slower.
            call.spaces = None
        else:
            reason = reason or obstacle
    if reason:
        return _plain(call, reason)
    _take_stop_strings(call.arguments, call.settings)

    # The host reads the names of this signature: what it does not find in it reaches us through the closure instead.
    def decode(
        decoder: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        inputs_tensor: Any = None,
        **prepared: Any,
    ) -> Any:
        output = _decode(call, decoder, lanes, input_ids, logits_processor, stopping_criteria, inputs_tensor, prepared)
        return _without_stats(call, output) if call.has_own_generate else output

    output = call.host_generate(**call.arguments, custom_generate=decode)
    if call.told and isinstance(output, dict):
        output["speculation"] = added_up(call.told)
    return output


def _decode(
    call: Call,
    model: Any,
    lanes: Lanes,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    inputs_tensor: Any,
    prepared: dict[str, Any],
) -> Any:
    generation_config = prepared.pop("generation_config")
    if model is call.model:
        refuse_embeddings_alone(input_ids)

    def read_prompt(model_kwargs: dict[str, Any]) -> Prefill:
        outputs = prefill(model, input_ids, generation_config, model_kwargs)
        return Prefill(token_ids=input_ids, model_kwargs=model_kwargs, outputs=outputs)

    chosen = lanes_once_prepared(
        lanes,
        model,
        prepared,
        kind=prepared_kind(model, call.arguments, prepared),
        prompt_shape=input_ids.shape,
        make_prefill=read_prompt,
    )
    streamer = call.arguments.get("streamer")
    if chosen.reason:
        _say_plain(call.config, chosen.reason)
        output = sample_plainly(
            model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, prepared
        )
        return _with_plain_stats(output, chosen.reason, call.started, input_ids.shape[1])
    token_space = _token_space(call, input_ids, prepared, do_sample=bool(generation_config.do_sample))
    with ExitStack() as loans:
        wanted = call.config.runner
        runner = loans.enter_context(lent_runner(call.model, model, wanted, chosen.target))
        draft_runner = loans.enter_context(lent_runner(call.model, call.draft, wanted, chosen.draft))
        request = Request(
            model=model,
            input_ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            generation_config=generation_config,
            model_kwargs=prepared,
            streamer=streamer,
            user_cache=call.user_cache,
            config=call.config,
            make_controller=lambda session: _controller(call, session, loans, token_space),
            make_drafter=lambda session: _drafter(call, session, chosen.draft, inputs_tensor, token_space),
            target_lane=chosen.target,
            draft_lane=chosen.draft,
            runner=runner,
            draft_runner=draft_runner,
            started=call.started,
            health=health_of(call.model, call.draft, quantization_of(call.draft)[0], suspicions_of(call.draft)),
        )
        return speculative_decode(request)


def _without_stats(call: Call, output: Any) -> Any:
    """Keep the stats for the end: a `generate` of the model's own would trip over a field it does not know."""
    if isinstance(output, torch.Tensor) or output.speculation is None:
        return output
    call.told.append(output.speculation)
    return type(output)(**{name: value for name, value in output.items() if name != "speculation"})


def _token_space(call: Call, input_ids: torch.Tensor, prepared: dict[str, Any], *, do_sample: bool) -> str:
    """Return how the draft proposes: "same", "shared" or "text"."""
    if call.spaces is None:
        return "same"
    mask = None if call.model.config.is_encoder_decoder else prepared.get("attention_mask")
    return chosen_space(call.spaces, call.config.token_space, input_ids, mask, do_sample=do_sample)


def _controller(call: Call, session: Session, loans: ExitStack, token_space: str) -> DraftLengthController:
    config = call.config
    if config.num_draft_tokens != "auto":
        return FixedDraftLength(config.num_draft_tokens)
    is_lockstep, num_rows = session.stats.is_lockstep, session.stats.num_rows
    key = sampling_key(
        session.request.generation_config,
        config.verification,
        is_lockstep=is_lockstep,
        num_rows=num_rows,
        token_space=token_space,
        runners=(session.request.runner.kind, session.request.draft_runner.kind),
    )
    return loans.enter_context(lent_controller(call.model, call.draft, key, config.controller_hints))


def _drafter(call: Call, session: Session, lane: str, encoder_input: Any, token_space: str) -> ModelDrafter:
    draft, sequences, request = call.draft, session.sequences, session.request
    session.stats.draft_pairing = call.pairing
    session.stats.draft_quantization, session.stats.draft_quantization_reason = quantization_of(draft)
    session.stats.token_space = token_space
    num_columns = sequences.num_prompt_columns
    mask = request.model_kwargs.get("attention_mask") if not request.model.config.is_encoder_decoder else None
    inputs = draft_inputs(draft, request.model, call.arguments, request.model_kwargs, encoder_input, sequences.num_rows)
    if inputs:
        choice = draft_choice_with_prompt(draft, inputs, sequences.buffer[:, :num_columns], mask)
        if choice.lane == "plain":
            raise IncompatibleDraftError(f"no lane runs the draft: {choice.reason}")
        lane = session.stats.draft_lane = choice.lane
    if sequences.num_rows != len(sequences.rows) and mask is not None:
        mask = mask[sequences.rows]
    settings: dict[str, Any] = {
        "plan": session.plan.for_draft(),
        "do_sample": session.do_sample,
        "vocab_size": session.vocab_size,
        # An earlier turn's part of the mask belongs to tokens that the draft never sees.
        "attention_mask": mask[:, -num_columns:] if mask is not None else None,
        "capacity": sequences.buffer.shape[1],
        "lane": lane,
        "static": request.draft_runner.static if lane == "ragged" else None,
    }
    if call.spaces is None:
        return ModelDrafter(draft, sequences, inputs=inputs, **settings)
    session.stats.num_shared_tokens = call.spaces.num_shared
    kind = SharedTokensDrafter if token_space == "shared" else TextDrafter
    ends = request.generation_config.eos_token_id
    translator = Translator(call.spaces, ends if isinstance(ends, list) else [] if ends is None else [ends])
    return kind(draft, sequences, translator=translator, **settings)


def _plain(call: Call, reason: str) -> Any:
    """Decode without the draft, say so once, and note it in the stats."""
    _say_plain(call.config, reason)
    ids = call.arguments.get("inputs", call.arguments.get("input_ids"))
    prompt_width = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.ndim == 2 else 0
    return _with_plain_stats(call.host_generate(**call.arguments), reason, call.started, prompt_width)


def _say_plain(config: SpeculativeConfig, reason: str) -> None:
    if config.strict:
        raise UnsupportedGenerationError(
            f"With `strict=True` a call that cannot speculate is an error, and {reason}. Leave `strict` out to decode "
            "plainly."
        )
    warn_caller(f"Decoding without the draft: {reason}.")


def _with_plain_stats(output: Any, reason: str, started: float, prompt_width: int) -> Any:
    """Return the host's output, with stats where it is an object; padding counts as tokens here."""
    if isinstance(output, torch.Tensor):
        return output
    stats = SpeculationStats(
        lane="plain", draft_lane="plain", fallbacks=[reason], total_seconds=time.perf_counter() - started
    )
    # Some models return several codebooks per row.
    stats.num_rows, width = output.sequences.shape[0], output.sequences.shape[-1]
    stats.num_prompt_tokens = stats.num_rows * prompt_width
    stats.num_new_tokens = stats.num_rows * (width - prompt_width)
    has_encoder = isinstance(output, GenerateEncoderDecoderOutput)
    kind = SpeculativeEncoderDecoderOutput if has_encoder else SpeculativeDecoderOnlyOutput
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in output.items() if name in names}, speculation=stats)


def _take_stop_strings(arguments: dict[str, Any], settings: Settings) -> None:
    """Turn stop strings into a criterion, for the host loses their tokenizer on the way to a callable."""
    stop_strings = settings.get("stop_strings")
    tokenizer = arguments.pop("tokenizer", None)
    if stop_strings is None:
        return
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    arguments["stopping_criteria"] = criteria
    if settings.config is not None and settings.config.stop_strings is not None:
        arguments["generation_config"] = copy.deepcopy(settings.config)
        arguments["generation_config"].stop_strings = None
    arguments.pop("stop_strings", None)
    if settings.defaults.stop_strings is not None:
        # Only an explicit None keeps the host from filling in the model's default again.
        arguments["stop_strings"] = None
