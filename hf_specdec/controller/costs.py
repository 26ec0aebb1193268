"""What draft steps, verifications and catching up cost, measured.

Machines are shared and first passes are slow, so every estimate rests on medians over a window, the load of the moment
is taken out, and what has not been measured for a while is forgotten rather than believed for good.
"""

from __future__ import annotations

from hf_specdec.controller.curves import Curve, Samples
from hf_specdec.controller.load import Load
from hf_specdec.metrics import RoundRecord

PLAIN_WINDOW = 7
FEWEST_DRAFTS = 2
# Until two lengths are measured: what each further token adds to a verification, as a share of a plain step.
FIRST_SLOPE = 0.01
# Shorter catch-ups are all fixed cost and would exaggerate what a token costs.
FEWEST_CAUGHT_UP = 16
# Until catching up is measured: so many tokens cost a draft step over the first one.
FIRST_CAUGHT_UP = 128


class Costs:
    """Seconds for one batch size.

    A round of K draft tokens costs its draft steps and what comes after them: verifying, accepting, committing. The
    latter is measured by how many tokens per row the target reads, which is K + 1 and whatever it has to read again.
    """

    def __init__(self, now: int = 0, cost_ratio: float | None = None) -> None:
        """Start without samples; until a draft step was measured, it takes `cost_ratio` plain steps, if given."""
        self.plain_samples = Samples(PLAIN_WINDOW)
        self._raw_plain_samples = Samples(PLAIN_WINDOW)
        self.num_draft_rounds = 0
        self.num_plain_steps = 0
        self._catch_up_samples = Samples()
        self._draft = Curve(is_straight=True)
        self._after_draft = Curve()
        self._load = Load()
        self._now = now
        self._cost_ratio = cost_ratio
        self._rounds: dict[int, float] = {}
        self._rounds_are_of: tuple[float | None, float | None, int, int] | None = None

    def inherited(self, times_more_rows: float) -> Costs:
        """Return a first guess for another batch size: each median as a single sample, soon outvoted.

        Args:
            times_more_rows: The other size / this one. Catching up takes as many times as long: it reads many tokens at
                once even for one row, and a guess that is too low would be dear.
        """
        heir = Costs(self._now, self._cost_ratio)
        heir.num_draft_rounds = self.num_draft_rounds
        # A plain step of its own is due soon.
        heir.num_plain_steps = 1
        for own, inherited, factor in (
            (heir.plain_samples, self.plain_samples, 1.0),
            (heir._raw_plain_samples, self._raw_plain_samples, 1.0),
            (heir._catch_up_samples, self._catch_up_samples, max(times_more_rows, 1.0)),
        ):
            if inherited.median is not None:
                own.add(self._now, factor * inherited.median)
        heir._draft.inherit(self._draft, self._now)
        heir._after_draft.inherit(self._after_draft, self._now)
        return heir

    def observe(self, record: RoundRecord) -> None:
        """Learn from a round."""
        self._now += 1
        if not record.num_draft_tokens:
            self.num_plain_steps += 1
            if not record.num_replay_forwards:
                self._load.observe(record.round_seconds, self.plain_samples)
                self.plain_samples.add(self._now, record.round_seconds / self._load.factor)
                self._raw_plain_samples.add(self._now, record.round_seconds)
            return
        self.num_draft_rounds += 1
        if not record.num_replay_forwards:
            # With one it is two forwards, and would pass for a slow one.
            num_tokens = record.num_draft_tokens + 1 + record.num_replayed_tokens
            seconds = record.round_seconds - record.catch_up_seconds - record.draft_seconds
            self._load.observe(seconds, self._after_draft.samples_of(num_tokens))
            self._after_draft.add(self._now, num_tokens, seconds / self._load.factor)
        self._draft.add(self._now, record.num_draft_tokens, record.draft_seconds / self._load.factor)
        if record.num_caught_up_tokens:
            self.observe_catch_up(record.num_caught_up_tokens, record.catch_up_seconds)

    def observe_catch_up(self, num_tokens: int, seconds: float) -> None:
        """Learn from a forward of the draft over text that is already there."""
        if num_tokens >= FEWEST_CAUGHT_UP:
            per_token = max(seconds / self._load.factor - (self.draft_step or 0.0), 0.0) / num_tokens
            self._catch_up_samples.add(self._now, per_token)

    @property
    def plain(self) -> float | None:
        """Seconds of a plain step; never forgotten, since everything is compared with it."""
        return self.plain_samples.median

    @property
    def raw_plain(self) -> float | None:
        """Seconds of a plain step as the clock showed them, the load included."""
        return self._raw_plain_samples.median

    @property
    def draft_step(self) -> float | None:
        """Seconds of a draft of one token, None if unknown."""
        if not self._draft.is_empty:
            return self.drafting(1)
        if self._cost_ratio is not None and self.plain is not None:
            return self._cost_ratio * self.plain
        return None

    @property
    def longest_draft(self) -> int:
        """The longest draft whose time was measured."""
        return self._draft.longest

    def forget_draft(self) -> None:
        """Forget what drafting takes, so that it is measured again."""
        self._draft = Curve(is_straight=True)
        self._after_draft = Curve()
        self._rounds_are_of = None
        self._cost_ratio = None
        self.num_draft_rounds = 0

    @property
    def are_known(self) -> bool:
        """Whether a round's time can be estimated: a first draft alone is slow and says little."""
        is_timed = self._draft.is_empty or self.num_draft_rounds >= FEWEST_DRAFTS
        return self.plain is not None and self.draft_step is not None and is_timed

    def catch_up(self, num_tokens: int) -> float:
        """Estimate the seconds in which the draft reads `num_tokens` per row."""
        if not num_tokens:
            return 0.0
        step, per_token = self.draft_step or 0.0, self._catch_up_samples.median
        return step + num_tokens * (step / FIRST_CAUGHT_UP if per_token is None else per_token)

    def drafting(self, num_draft_tokens: int) -> float:
        """Estimate the seconds of that many draft steps."""
        if self._draft.is_empty:
            return num_draft_tokens * (self.draft_step or 0.0)
        return self._draft.seconds(num_draft_tokens, None)

    def after_draft(self, num_tokens: float) -> float:
        """Estimate the seconds of a round without its draft steps, when the target reads `num_tokens` per row."""
        plain = self.plain or 0.0
        if self._after_draft.is_empty:
            return plain * (1 + FIRST_SLOPE * (num_tokens - 1))
        # A round that drafts cannot end sooner than one that does not.
        return max(plain, self._after_draft.seconds(num_tokens, FIRST_SLOPE * plain))

    def round(self, num_draft_tokens: int, num_replayed_tokens: float = 0.0) -> float:
        """Estimate the seconds of a round."""
        if not num_draft_tokens:
            return self.plain or 0.0
        if num_replayed_tokens:
            return self._round(num_draft_tokens, num_replayed_tokens)
        # Asked for all lengths before every round, though little changes between two.
        now = (self.plain, self._cost_ratio, self._draft.version, self._after_draft.version)
        if now != self._rounds_are_of:
            self._rounds, self._rounds_are_of = {}, now
        if num_draft_tokens not in self._rounds:
            self._rounds[num_draft_tokens] = self._round(num_draft_tokens, 0.0)
        return self._rounds[num_draft_tokens]

    def _round(self, num_draft_tokens: int, num_replayed_tokens: float) -> float:
        return self.drafting(num_draft_tokens) + self.after_draft(num_draft_tokens + 1 + num_replayed_tokens)
