"""Drive a controller over a trace, round by round as the engine does, with modelled times in place of models.

Every time is in plain steps: one forward of the target over one token of one row takes 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from hf_specdec.benchmark.traces import Trace
from hf_specdec.controller import DraftLengthController, Outlook
from hf_specdec.metrics import ProbeRecord, RoundRecord

# No rule gets near it by choice; it only keeps one that grows without end within the trace.
MOST_DRAFT_TOKENS = 64
MOST_SHADOW_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What things take, in plain steps.

    Attributes:
        draft_step: One forward of the draft (the cost ratio).
        per_verified_token: What each further token of a target forward adds, over all rows.
        per_round: Fixed cost of a round that drafts.
        per_caught_up_token: What the draft takes per token to read text written without it, beside one draft step; None
            is a 128th of a draft step, so that 64 tokens take one and a half.
        noise: Relative standard deviation of every time (log-normal); 0 for exact times.
        spike_share: With noise, the share of times that are `spike_factor` times as long, as when another process
            takes the machine.
        spike_factor: See `spike_share`.
    """

    draft_step: float
    per_verified_token: float = 0.01
    per_round: float = 0.05
    per_caught_up_token: float | None = None
    noise: float = 0.0
    spike_share: float = 0.005
    spike_factor: float = 10.0

    def forward(self, num_tokens: int) -> float:
        """Return the time of a target forward over `num_tokens`, all rows together."""
        return 1.0 + self.per_verified_token * (num_tokens - 1)

    def catch_up(self, num_tokens: int) -> float:
        """Return the time in which the draft reads `num_tokens` per row."""
        if not num_tokens:
            return 0.0
        per_token = self.draft_step / 128 if self.per_caught_up_token is None else self.per_caught_up_token
        return self.draft_step + per_token * num_tokens

    @property
    def slowdown(self) -> float:
        """How much longer a time is than modelled, on average."""
        return 1.0 + self.spike_share * (self.spike_factor - 1.0) if self.noise else 1.0

    def measured(self, seconds: float, source: random.Random) -> float:
        """Return a time as a clock would show it."""
        if not self.noise or not seconds:
            return seconds
        if source.random() < self.spike_share:
            seconds *= self.spike_factor
        # With this shift the noise is 1 on average.
        return seconds * source.lognormvariate(-(self.noise**2) / 2, self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a controller did.

    Attributes:
        speed: Speed relative to plain decoding of the same rows; above 1 is faster.
        seconds: Time of the run, in plain steps.
        num_rounds: Rounds, plain steps included.
        num_plain_steps: Rounds that drafted nothing.
        num_draft_tokens: Tokens drafted, per row.
        num_probes: Looks at what drafting would give while it was off.
        largest_loss: The most that the run ever lay behind plain decoding of the rows then being written, in plain
            steps of one row. Of their tokens the mean counts; that rows end at different times is not in it.
    """

    speed: float
    seconds: float
    num_rounds: int
    num_plain_steps: int
    num_draft_tokens: int
    num_probes: int
    largest_loss: float

    @property
    def mean_draft_tokens(self) -> float:
        """Tokens drafted per round, plain steps included."""
        return self.num_draft_tokens / self.num_rounds

    @property
    def plain_share(self) -> float:
        """Plain steps / rounds."""
        return self.num_plain_steps / self.num_rounds


def simulate(
    controller: DraftLengthController,
    traces: Trace | Sequence[Trace],
    costs: CostModel,
    num_tokens: int,
    *,
    seed: int = 0,
    reads_confidence: bool = True,
    most_draft_tokens: int = MOST_DRAFT_TOKENS,
) -> Outcome:
    """Write `num_tokens` per row under a controller.

    Whether the draft token of a text position is accepted is drawn beforehand, so controllers meet the same luck. This
    changes no law: a position is decided at most once, since either the draft's token stays there or the target's.

    Args:
        controller: Anything with the protocol; it keeps what it learns.
        traces: One text, or several for a batch, whose rows share a draft length and leave when they are complete.
        costs: What things take.
        num_tokens: Tokens per row.
        seed: Of acceptance and of noise in the times.
        reads_confidence: Whether the controller may stop inside a round.
        most_draft_tokens: The most tokens any round may draft.

    Raises:
        ValueError: There is no text, or nothing to write.
    """
    texts = [traces] if isinstance(traces, Trace) else list(traces)
    if not texts or num_tokens < 1:
        raise ValueError(
            f"There must be at least one trace and one token to write, but there are {len(texts)} and {num_tokens}."
        )
    rows = [_Row(number, trace, num_tokens, most_draft_tokens, seed) for number, trace in enumerate(texts)]
    run = _Run(controller, rows, costs, num_tokens, seed)
    while run.rows:
        run.advance(reads_confidence=reads_confidence, most_draft_tokens=most_draft_tokens)
    return run.outcome()


class _Row:
    """One text being written."""

    def __init__(self, number: int, trace: Trace, num_tokens: int, most_draft_tokens: int, seed: int) -> None:
        # A row near its end drafts on beside longer ones; what it drafts there is cut.
        num_positions = num_tokens + most_draft_tokens
        trace = trace.stretched(num_positions)
        source = random.Random(f"acceptance {number} {seed}")
        self.number = number
        self.chances = trace.chances
        self.confidences = trace.confidences
        self.is_accepted = [source.random() < chance for chance in trace.chances[:num_positions]]
        self.position = 0
        self.end = num_tokens

    def num_accepted(self, num_draft_tokens: int) -> int:
        """Return how many draft tokens stay."""
        for count in range(num_draft_tokens):
            if not self.is_accepted[self.position + count]:
                return count
        return num_draft_tokens

    def survival(self, num_draft_tokens: int) -> tuple[float, ...]:
        """Return the probabilities that the first 1, 2, … draft tokens stay."""
        return tuple(accumulate(self.chances[self.position : self.position + num_draft_tokens], mul))

    def sureness(self, num_draft_tokens: int) -> tuple[float, ...]:
        """Return the draft's confidence at the coming positions."""
        return self.confidences[self.position : self.position + num_draft_tokens]


class _Run:
    """The state of one simulation."""

    def __init__(
        self, controller: DraftLengthController, rows: list[_Row], costs: CostModel, num_tokens: int, seed: int
    ) -> None:
        self.controller = controller
        self.rows = rows
        self.costs = costs
        self._noise = random.Random(f"times {seed}")
        self._num_tokens = num_tokens
        # Of plain decoding, while every row is being written.
        self._plain_step = self._plain_seconds()
        self._num_unread = 0
        self._streak = 0
        self._seconds = 0.0
        self._num_rounds = 0
        self._num_plain_steps = 0
        self._num_drafted = 0
        self._num_probes = 0
        self._loss = 0.0
        self._largest_loss = 0.0

    def advance(self, *, reads_confidence: bool, most_draft_tokens: int) -> None:
        """Do what the engine does between one question and the next."""
        outlook = self._outlook(reads_confidence, most_draft_tokens)
        num_probed = self.controller.num_probe_tokens(outlook)
        if num_probed:
            self._probe(num_probed)
            outlook = self._outlook(reads_confidence, most_draft_tokens)
        num_draft_tokens = self.controller.next_num_draft_tokens(outlook)
        if num_draft_tokens and reads_confidence:
            num_draft_tokens = self._draft(num_draft_tokens)
        record = self._round(num_draft_tokens, reads_confidence) if num_draft_tokens else self._plain_round()
        self.controller.observe(record)
        self.rows = [row for row in self.rows if row.position < row.end]

    def outcome(self) -> Outcome:
        """Return the figures of the run so far."""
        return Outcome(
            speed=self._num_tokens * self._plain_step / self._seconds,
            seconds=self._seconds,
            num_rounds=self._num_rounds,
            num_plain_steps=self._num_plain_steps,
            num_draft_tokens=self._num_drafted,
            num_probes=self._num_probes,
            largest_loss=self._largest_loss,
        )

    def _outlook(self, reads_confidence: bool, most_draft_tokens: int) -> Outlook:
        remaining = max(row.end - row.position for row in self.rows)
        return Outlook(
            limit=min(most_draft_tokens, remaining - 1),
            num_rows=len(self.rows),
            num_batch_rows=len(self.rows),
            num_remaining_tokens=remaining,
            num_unread_tokens=self._num_unread,
            num_shadow_tokens=min(self._streak, MOST_SHADOW_TOKENS),
            reads_confidence=reads_confidence,
        )

    def _probe(self, num_tokens: int) -> None:
        # What the draft has read already it must read again where the probe is to look at it.
        num_read = max(num_tokens, self._num_unread)
        seconds = self._measured(self.costs.catch_up(num_read))
        pairs = [(row.chances, row.confidences, row.position - num_tokens, row.position) for row in self.rows]
        self.controller.observe_probe(
            ProbeRecord(
                num_after_round=self._num_rounds,
                agreement=tuple(chances[start:end] for chances, _, start, end in pairs),
                confidences=tuple(confidences[start:end] for _, confidences, start, end in pairs),
                num_caught_up_tokens=num_read,
                seconds=seconds,
            )
        )
        self._num_unread = 0
        self._streak = 0
        self._num_probes += 1
        self._spend(seconds, worth=0.0)

    def _draft(self, most: int) -> int:
        """Return after how many tokens the controller stops."""
        for drafted in range(1, most):
            if not self.controller.goes_on([row.confidences[row.position + drafted - 1] for row in self.rows]):
                return drafted
        return most

    def _plain_round(self) -> RoundRecord:
        seconds = self._measured(self.costs.forward(len(self.rows)))
        record = RoundRecord(
            num_draft_tokens=0,
            rows=tuple(row.number for row in self.rows),
            num_accepted_tokens=(0,) * len(self.rows),
            num_evaluated_tokens=(0,) * len(self.rows),
            committed_token_ids=((0,),) * len(self.rows),
            draft_seconds=0.0,
            verify_seconds=seconds,
            round_seconds=seconds,
            num_batch_rows=len(self.rows),
        )
        self._num_unread += 1
        self._streak += 1
        self._num_plain_steps += 1
        self._enter(record)
        return record

    def _round(self, num_draft_tokens: int, reads_confidence: bool) -> RoundRecord:
        rows, costs = self.rows, self.costs
        accepted = tuple(row.num_accepted(num_draft_tokens) for row in rows)
        draft_seconds = self._measured(num_draft_tokens * costs.draft_step)
        verify_seconds = self._measured(costs.forward(len(rows) * (num_draft_tokens + 1)))
        catch_up_seconds = self._measured(costs.catch_up(self._num_unread))
        record = RoundRecord(
            num_draft_tokens=num_draft_tokens,
            rows=tuple(row.number for row in rows),
            num_accepted_tokens=accepted,
            num_evaluated_tokens=tuple(min(count + 1, num_draft_tokens) for count in accepted),
            committed_token_ids=tuple(
                (0,) * min(count + 1, row.end - row.position) for count, row in zip(accepted, rows, strict=True)
            ),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            round_seconds=draft_seconds + verify_seconds + catch_up_seconds + self._measured(costs.per_round),
            survival=tuple(row.survival(num_draft_tokens) for row in rows),
            confidences=tuple(row.sureness(num_draft_tokens) for row in rows) if reads_confidence else (),
            num_batch_rows=len(rows),
            num_caught_up_tokens=self._num_unread,
            catch_up_seconds=catch_up_seconds,
        )
        self._num_unread = 0
        self._streak = 0
        self._enter(record)
        return record

    def _enter(self, record: RoundRecord) -> None:
        for row, token_ids in zip(self.rows, record.committed_token_ids, strict=True):
            row.position += len(token_ids)
        self._num_rounds += 1
        self._num_drafted += record.num_draft_tokens
        self._spend(record.round_seconds, record.num_committed_tokens / len(self.rows) * self._plain_seconds())

    def _spend(self, seconds: float, worth: float) -> None:
        """Enter what something took, and what plain decoding would have taken for what it gave."""
        self._seconds += seconds
        self._loss += seconds - worth
        self._largest_loss = max(self._largest_loss, self._loss)

    def _plain_seconds(self) -> float:
        return self.costs.slowdown * self.costs.forward(len(self.rows))

    def _measured(self, seconds: float) -> float:
        return self.costs.measured(seconds, self._noise)
