"""Everything one call of `generate` holds while it runs, so that nothing outlives it anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.config import SpeculativeConfig
from hf_specdec.controller import DraftLengthController, FixedDraftLength
from hf_specdec.engine.clock import Stopwatch
from hf_specdec.engine.compatible import CompatibleLane
from hf_specdec.engine.forward import Lane
from hf_specdec.engine.host import Prefill
from hf_specdec.engine.lending import EAGER, Runner
from hf_specdec.engine.processors import ProcessorPlan
from hf_specdec.engine.profiling import Phases
from hf_specdec.engine.recorder import Recorder
from hf_specdec.engine.scratch import Scratch
from hf_specdec.engine.sequences import Sequences
from hf_specdec.engine.shadow import Streak
from hf_specdec.engine.state import Drafter
from hf_specdec.engine.stopping import StopPlan
from hf_specdec.engine.streaming import Emitter
from hf_specdec.errors import DraftFailedError, warn_caller
from hf_specdec.health import DraftHealth
from hf_specdec.metrics import SpeculationStats

Tensor = torch.Tensor


@dataclass(slots=True, kw_only=True)
class Request:
    """What the host prepared and the caller asked for.

    `user_cache` is the cache the caller passed in, if any; `target_lane` and `draft_lane` are "ragged" or "compatible";
    `make_controller` and `make_drafter` build both once the session stands; `health` hears what becomes of the draft's
    guesses; `runner` and `draft_runner` say how forwards run; `started` is the host clock's reading at the start of the
    call, in seconds.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: BaseStreamer | None
    user_cache: Cache | None
    config: SpeculativeConfig
    make_controller: Callable[[Session], DraftLengthController]
    make_drafter: Callable[[Session], Drafter]
    target_lane: str
    draft_lane: str
    started: float
    health: DraftHealth = field(default_factory=DraftHealth)
    runner: Runner = EAGER
    draft_runner: Runner = EAGER


@dataclass(slots=True, kw_only=True)
class Session:
    """The running state of one call."""

    request: Request
    sequences: Sequences
    plan: ProcessorPlan
    stops: StopPlan
    recorder: Recorder
    emitter: Emitter
    stats: SpeculationStats
    stopwatch: Stopwatch
    pad_token_id: int | None
    is_stepwise: bool
    context: int | None = None
    vocab_size: int = 0
    prefill: Prefill | None = None
    host_cache: Any = None
    lane: Lane | CompatibleLane | None = None
    lane_arguments: dict[str, Any] = field(default_factory=dict)
    controller: DraftLengthController = field(default_factory=lambda: FixedDraftLength(0))
    drafter: Drafter | None = None
    streak: Streak = field(default_factory=Streak)
    scratch: Scratch = field(default_factory=Scratch)
    phases: Phases = field(default_factory=lambda: Phases(is_on=False))
    max_length: int | None = None
    left_rows: dict[int, Any] = field(default_factory=dict)

    @property
    def do_sample(self) -> bool:
        """Whether tokens are drawn or taken by argmax."""
        return bool(self.request.generation_config.do_sample)

    @property
    def returns_cache(self) -> bool:
        """Whether the caller will see the target's cache after the call."""
        return bool(self.request.generation_config.return_dict_in_generate) or self.request.user_cache is not None

    @property
    def is_done(self) -> bool:
        """Whether every row has finished."""
        return all(self.sequences.is_finished)

    def remaining(self) -> int | None:
        """Return the most tokens that any row in the batch may still get, None when there is no limit."""
        if self.max_length is None:
            return None
        return self.max_length - min(self.sequences.lengths)

    def target_context(self) -> int | None:
        """Return how many columns the target's context has room for, None when it does not say."""
        assert self.lane is not None, "the prefill opens the lane"
        # An earlier turn has used up the positions before the first column.
        return None if self.context is None else self.context - self.lane.shift

    def num_preparations(self) -> int:
        """Return how often forwards of either model were prepared, or could not be."""
        runners = self.request.runner, self.request.draft_runner
        return sum(runner.static.num_tries for runner in runners if runner.static is not None)

    def counted_positions(self) -> list[int]:
        """Return the batch positions of rows that are being written; in lockstep finished ones stay as padding."""
        rows = self.sequences.rows
        if not self.stops.pads_finished_rows:
            return list(range(len(rows)))
        return [position for position, row in enumerate(rows) if not self.sequences.is_finished[row]]

    def note_guesses(self, num_accepted: float, num_judged: int) -> None:
        """Watch for signs of a broken draft."""
        # A text that has to be met word for word is rarely met by chance, however good the draft is.
        is_telling = not (self.stats.token_space == "text" and self.do_sample)
        if num_judged and is_telling:
            self.request.health.observe(num_accepted, num_judged, sees_all_processors=self.plan.is_known)

    def stop_drafting(self, reason: str, error: BaseException | None = None, *, is_failure: bool = True) -> None:
        """Go on without the draft: the answer must not suffer from it.

        Raises:
            DraftFailedError: The draft failed and the caller asked for `strict=True`.
        """
        if is_failure and self.request.config.strict:
            raise DraftFailedError(
                f"With `strict=True` a failing draft is an error, and {reason}. Mend or replace the draft, or leave "
                "`strict` out to finish with plain decoding."
            ) from error
        self.stats.num_draft_forwards += self.drafter.num_forwards if self.drafter is not None else 0
        self.drafter = None
        self.stats.fallbacks.append(reason)
        warn_caller(f"Decoding goes on without the draft: {reason}.")

    def drop_finished_rows(self) -> None:
        """Take finished rows out of the batch, so that no forward computes them again; in lockstep they stay."""
        if self.is_stepwise:
            return
        rows = self.sequences.rows
        kept = [position for position, row in enumerate(rows) if not self.sequences.is_finished[row]]
        if not kept or len(kept) == len(rows):
            return
        assert isinstance(self.lane, Lane), "rows of the other lane move in lockstep, and those stay"
        if self.returns_cache:
            for position in set(range(len(rows))) - set(kept):
                self.left_rows[rows[position]] = self.lane.cache.copy_row(position)
        index = self.sequences.keep_rows(kept)
        self.lane.select_rows(index)
        self.streak.select_rows(index)
        if self.drafter is not None:
            self.drafter.rows_left(kept)
