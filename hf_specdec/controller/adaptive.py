"""The draft length that pays: expected tokens per second from measured acceptance and measured costs, 0 included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from hf_specdec.config import LONGEST_ADAPTIVE_DRAFT
from hf_specdec.controller.costs import Costs
from hf_specdec.controller.gains import Gains, Standing
from hf_specdec.controller.ledger import Ledger, Progress
from hf_specdec.controller.protocol import Outlook
from hf_specdec.controller.stopping import InRoundStop
from hf_specdec.controller.survival import DISCOUNT, Survival
from hf_specdec.hints import LARGEST_COST_RATIO, checked_hints
from hf_specdec.metrics import ProbeRecord, RoundRecord

# The lengths to choose from; few, so that each is measured often and a captured graph per length stays possible.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
MAX_DRAFT_TOKENS = LONGEST_ADAPTIVE_DRAFT
# To draft before the draft's own cost is known.
FIRST_LENGTH = 4
# In halves: a round may draft half as many again as the longest that was timed.
STRETCH = 3
# Plain steps before the first draft: without them there is nothing to compare with.
FIRST_PLAIN_STEPS = 2
# Rounds that draft before it may go off because of what they took, and because of what they gave: first passes of a
# model are slow, and the first estimates with them.
FEWEST_TIMED = 3
FEWEST_JUDGED = 8
# Another length, or switching on, must promise this much more: timings are no better than that.
HYSTERESIS = 0.03
# Rounds between two plain steps taken to measure them again, at most, and at first as many as this for each plain step
# so far: the first ones after a prompt are slow, and everything is compared with them. The further ahead drafting is,
# the less hangs on them: that many times the lead in speed are left between two.
PLAIN_EVERY = 200
PLAIN_EVERY_AT_FIRST = 4
PLAIN_EVERY_PER_LEAD = 8
# Tokens between probes while drafting is off: doubled while they find nothing, as before on a new prompt.
FIRST_PROBE_AFTER = 32
LAST_PROBE_AFTER = 256
MOST_PROBED_TOKENS = 64
FEWEST_PROBED_TOKENS = 8
# Probes may take this share of plain decoding's time, less than what the ledger lets pass.
PROBE_SHARE = 0.015
# Where no probe is worth its time, because catching up takes long or the draft could not pay if everything were
# accepted, drafting is tried again after so many plain steps: times change, and off for good would be wrong.
RETRIAL_AFTER = 2000
# In seconds; clocks can stand still.
SHORTEST = 1e-9


class AdaptiveDraftLength:
    """Choose K in {0, 1, …, 16} so that expected tokens per second are highest.

    The speed in the long run is the ratio of the means, R(K) = (1 + S_1 + … + S_K) / T(K), where S_j is the probability
    that the first j draft tokens are accepted and T(K) the time of a round (TurboSpec, arXiv:2406.14066, calls it
    goodput). S_j is estimated from the soft label of every verification, T(K) from measured times. Where a number can
    be read after every draft step, drafting also stops inside a round as soon as one more token would add fewer
    expected tokens per second than the average gives (keep-then-stop, so it is exact; cf. SpecDec++,
    arXiv:2405.19715). Drafting goes off where plain decoding is faster. Then one forward of the draft over the text
    written meanwhile, from time to time, tells what drafting would give. A ledger caps what all of this may cost:
    2 % of plain decoding's time plus 20 plain steps.

    Pure and deterministic: times and labels come in, K goes out.

    Args:
        hints: What another controller learned about the same pair (`hints()`), to start from.

    Raises:
        InvalidConfigError: The hints are malformed.

    Example:
        >>> controller = AdaptiveDraftLength()
        >>> controller.next_num_draft_tokens(Outlook(limit=8))
        0
    """

    def __init__(self, hints: Mapping[str, Any] | None = None) -> None:
        known = checked_hints(hints)
        self._survival = Survival(MAX_DRAFT_TOKENS, known.survival)
        self._stop = InRoundStop(known.confidence, known.next_confidence)
        self._cost_ratio = known.cost_ratio
        self._known_length = known.num_draft_tokens
        self._costs: dict[int, Costs] = {}
        self._ledger = Ledger()
        self._progress = Progress()
        self._expected_progress = Progress()
        self._standings: dict[int, Standing] = {}
        self._standing = Standing()
        self._begins_text = True
        self._replayed = 0.0
        self._flushes = 0.0
        self._rejections = 0.0
        self._length = FIRST_LENGTH
        self._rounds_since_plain = 0
        self._plain_steps_since_probe = 0
        self._probe_after = FIRST_PROBE_AFTER
        self._outlook = Outlook(limit=0)

    # ---- questions -------------------------------------------------------------------------------------------------

    def start_text(self) -> None:
        """Hear that another prompt begins: how the last one went says less about it."""
        self._probe_after = FIRST_PROBE_AFTER
        self._progress = Progress()
        self._expected_progress = Progress()
        self._begins_text = True

    def num_probe_tokens(self, outlook: Outlook) -> int:
        """Return over how many of the latest tokens per row to try the draft; 0 while drafting is on."""
        self._stand(outlook)
        num_tokens = min(outlook.num_shadow_tokens, MOST_PROBED_TOKENS)
        # Asked before every plain step, so what is quickly known comes first.
        if self._standing.is_on or self._plain_steps_since_probe < self._probe_after:
            return 0
        if outlook.limit < 1 or num_tokens < FEWEST_PROBED_TOKENS:
            return 0
        costs = self._costs_of(outlook)
        plain = costs.plain
        if plain is None or not self._ledger.is_open(costs.raw_plain) or not self._could_pay(outlook):
            return 0
        is_cheap = costs.catch_up(outlook.num_unread_tokens) <= PROBE_SHARE * self._plain_steps_since_probe * plain
        return num_tokens if is_cheap else 0

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return the most tokens the coming round may draft; 0 asks for a plain decoding step."""
        self._outlook = outlook
        self._stand(outlook)
        self._stop.start_round(outlook.num_rows)
        if outlook.limit < 1:
            return 0
        costs = self._costs_of(outlook)
        is_comparable = len(costs.plain_samples.values) >= (1 if self._standing.gains.speed else FIRST_PLAIN_STEPS)
        if costs.plain is None or not is_comparable or not self._ledger.is_open(costs.raw_plain):
            return 0
        if not costs.are_known:
            return min(FIRST_LENGTH, outlook.limit)
        if self._standing.is_on and self._rounds_since_plain >= self._plain_every(costs):
            return 0
        self._switch(outlook)
        if not self._standing.is_on or not self._is_worth_reading(outlook):
            return 0
        limit = min(outlook.limit, self._longest_yet(costs))
        if outlook.reads_confidence:
            self._prepare_to_stop(outlook)
            return limit
        self._choose_length(outlook)
        return min(self._length, limit)

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Say whether one more draft token is expected to give more per second than the average does."""
        return not self._costs_of(self._outlook).are_known or self._stop.goes_on(confidences)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def observe(self, record: RoundRecord) -> None:
        """Take note of a finished round."""
        costs = self._costs_of(self._outlook)
        costs.observe(record)
        plain = costs.raw_plain
        advanced = self._progress.add(record.rows, map(len, record.committed_token_ids))
        if not record.num_draft_tokens:
            self._expected_progress.add(record.rows, map(len, record.committed_token_ids))
            self._rounds_since_plain = 0
            self._plain_steps_since_probe += 1
            if plain is not None:
                self._ledger.enter_plain(plain)
            return
        self._rounds_since_plain += 1
        labels = self._merged(record.survival)
        if labels:
            self._survival.observe(labels)
            self._stop.learn(self._survival.hazards(), record.survival, record.confidences)
            self._note_gain(record, labels, costs)
        if plain is not None:
            self._ledger.charge(record.round_seconds, advanced, plain)

    def observe_probe(self, probe: ProbeRecord) -> None:
        """Take note of a probe."""
        costs = self._costs_of(self._outlook)
        costs.observe_catch_up(probe.num_caught_up_tokens, probe.seconds)
        if costs.raw_plain is not None:
            self._ledger.charge(probe.seconds, 0.0, costs.raw_plain)
        self._survival.observe_text(self._merged(probe.agreement))
        self._plain_steps_since_probe = 0
        self._probe_after = min(2 * self._probe_after, LAST_PROBE_AFTER)
        self._learn_from_text(probe)
        self._standing.is_on = costs.plain is None or self._pays_after_probe(costs.plain)
        if self._standing.is_on and (self._outlook.is_lockstep or not self._outlook.reads_confidence):
            # The probe told of survival only; what rounds gave before says nothing about this text.
            self._standing.gains = Gains()

    def hints(self) -> dict[str, Any]:
        """Return what was learned about the pair, as JSON types.

        Keys: `survival` (S_1, S_2, …), `confidence` and `next_confidence` (weight, bias and center of the two
        calibrations), `cost_ratio` (a draft step / a plain step, None if unknown) and `num_draft_tokens` (the length
        with the highest expected speed, 0 where that is plain decoding). Times themselves are left out: they belong to
        one machine.
        """
        costs = self._costs_of(self._outlook)
        ratio = self._cost_ratio
        if costs.draft_step is not None and costs.plain:
            ratio = costs.draft_step / costs.plain
        return {
            "survival": [round(value, 4) for value in self._survival.curve(MAX_DRAFT_TOKENS)],
            **self._stop.hints(),
            "cost_ratio": None if ratio is None or math.isnan(ratio) else round(min(ratio, LARGEST_COST_RATIO), 4),
            "num_draft_tokens": self._best_length(self._outlook)[0] if costs.are_known and self._standing.is_on else 0,
        }

    # ---- what pays -------------------------------------------------------------------------------------------------

    def _stand(self, outlook: Outlook) -> None:
        """Take up what is known of texts that start with so many rows; what is lost with one may be won with eight."""
        if self._begins_text:
            self._begins_text = False
            self._standing = self._standings.setdefault(_size_of(outlook), Standing())

    def _switch(self, outlook: Outlook) -> None:
        """Go off where plain decoding is faster, and look again after a long while without a probe."""
        costs = self._costs_of(outlook)
        assert costs.plain is not None, "the caller checks"
        if self._standing.is_on:
            num_rounds = costs.num_draft_rounds
            # None at all: then it is the hints that say so.
            is_hopeless = (not num_rounds or num_rounds >= FEWEST_TIMED) and not self._could_pay(outlook)
            if is_hopeless or (
                num_rounds >= FEWEST_JUDGED and self._standing.gains.lose(_num_independent_rows(outlook))
            ):
                self._go_off()
        elif self._plain_steps_since_probe >= RETRIAL_AFTER:
            costs.forget_draft()
            self._standing.gains = Gains()
            self._plain_steps_since_probe = 0
            self._standing.is_on = True

    def _plain_every(self, costs: Costs) -> float:
        """Return after how many rounds that draft a plain step is measured again."""
        lead = max((self._standing.gains.speed or 1.0) - 1.0, 0.0)
        every = PLAIN_EVERY_AT_FIRST * max(1.0, PLAIN_EVERY_PER_LEAD * lead)
        return min(PLAIN_EVERY, every * costs.num_plain_steps)

    def _longest_yet(self, costs: Costs) -> int:
        """Return the most to draft: not much beyond what was timed, for times can jump where nobody has looked."""
        known = max(FIRST_LENGTH, self._known_length, STRETCH * costs.longest_draft // 2)
        return min(MAX_DRAFT_TOKENS, known)

    def _prepare_to_stop(self, outlook: Outlook) -> None:
        costs, rate = self._costs_of(outlook), self._rate(outlook)
        seconds = [costs.round(length) for length in range(1, MAX_DRAFT_TOKENS + 1)]
        self._stop.prepare(self._survival.hazards(), seconds, rate, is_lockstep=outlook.is_lockstep)

    def _go_off(self) -> None:
        self._standing.is_on = False
        self._plain_steps_since_probe = 0
        self._probe_after = FIRST_PROBE_AFTER

    def _choose_length(self, outlook: Outlook) -> None:
        best, rate = self._best_length(outlook)
        if rate >= (1 + HYSTERESIS) * self._fixed_rate(self._length, outlook):
            self._length = best

    def _is_worth_reading(self, outlook: Outlook) -> bool:
        """Return whether what is left to write can make up for what the draft would have to read first."""
        if not outlook.num_unread_tokens or outlook.num_remaining_tokens is None:
            return True
        costs = self._costs_of(outlook)
        plain = costs.plain or 0.0
        # Also where drafting does not pay at the moment it must go on being tried, as long as that is cheap.
        rate = self._drafting_rate(outlook)
        if plain and self._standing.gains.last_speed is not None:
            rate = min(rate, self._standing.gains.last_speed / plain)
        saved = max(plain - 1 / max(rate, SHORTEST), PROBE_SHARE * plain)
        return costs.catch_up(outlook.num_unread_tokens) <= outlook.num_remaining_tokens * saved

    def _pays_after_probe(self, plain: float) -> bool:
        outlook = self._outlook
        _, rate = self._best_length(outlook)
        if max(rate, self._drafting_rate(outlook)) * plain < 1 + HYSTERESIS:
            return False
        # A batch is done when its last row is; between rounds nothing is known of single rows.
        last = (
            self._standing.gains.last_speed if outlook.reads_confidence and _num_independent_rows(outlook) > 1 else None
        )
        return last is None or last >= 1.0

    def _could_pay(self, outlook: Outlook) -> bool:
        """Return whether drafting would pay if everything were accepted."""
        costs = self._costs_of(outlook)
        if costs.plain is None or not costs.are_known:
            return True
        fastest = max((1 + length) / max(costs.round(length), SHORTEST) for length in LENGTHS)
        return fastest * costs.plain >= 1 + HYSTERESIS

    def _rate(self, outlook: Outlook) -> float:
        """Return the tokens per row and second that the better of drafting and plain decoding gives."""
        plain = self._costs_of(outlook).plain
        return max(1 / plain if plain else 0.0, self._drafting_rate(outlook))

    def _drafting_rate(self, outlook: Outlook) -> float:
        """Return the tokens per row and second that drafting gives."""
        speed, plain = self._standing.gains.speed, self._costs_of(outlook).plain
        if outlook.reads_confidence and speed is not None and plain:
            return speed / plain
        return self._best_length(outlook)[1]

    def _best_length(self, outlook: Outlook) -> tuple[int, float]:
        """Return the fixed length with the highest expected tokens per row and second, and that rate."""
        rate, length = max((self._fixed_rate(length, outlook), -length) for length in LENGTHS)
        return -length, rate

    def _fixed_rate(self, length: int, outlook: Outlook) -> float:
        """Return the expected tokens per row and second of rounds of `length` draft tokens."""
        curve = self._survival.curve(length)
        seconds = self._round_seconds(length, 1 - curve[-1], self._costs_of(outlook))
        return (1 + sum(curve)) / max(seconds, SHORTEST)

    def _round_seconds(self, length: int, rejection: float, costs: Costs) -> float:
        """Estimate a round's time, with the share of reading tokens again that its rejections bring about."""
        per_rejection = 1 / self._rejections if self._rejections > 0 else 0.0
        replayed = self._replayed * per_rejection * rejection
        flushes = self._flushes * per_rejection * rejection
        return costs.round(length, replayed) + flushes * (costs.plain or 0.0)

    # ---- learning --------------------------------------------------------------------------------------------------

    def _merged(self, rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Return probabilities per row without empty rows; in lockstep the rows are one, which survives if all do."""
        rows = [row for row in rows if row]
        if self._outlook.is_lockstep and rows:
            return [[math.prod(column) for column in zip(*rows, strict=True)]]
        return list(rows)

    def _learn_from_text(self, probe: ProbeRecord) -> None:
        """Learn from a probe what rounds would have taught, and what they would have given."""
        self._stop.learn_from_text(self._survival.hazards(), probe.agreement, probe.confidences)
        if self._outlook.is_lockstep or not self._outlook.reads_confidence:
            return
        self._prepare_to_stop(self._outlook)
        costs, plain = self._costs_of(self._outlook), self._costs_of(self._outlook).plain
        if not plain:
            return
        rows = [
            [(tokens, costs.round(num_drafted) / plain) for tokens, num_drafted in self._stop.rounds_over(*row)]
            for row in zip(probe.agreement, probe.confidences, strict=True)
        ]
        for tokens, steps in chain.from_iterable(rows):
            self._standing.gains.add(tokens, steps)
        for tokens, steps in min(filter(None, rows), key=_speed_of, default=[]):
            self._standing.gains.add_last(tokens, steps)

    def _note_gain(self, record: RoundRecord, labels: list[Sequence[float]], costs: Costs) -> None:
        self._replayed, self._flushes = DISCOUNT * self._replayed, DISCOUNT * self._flushes
        self._rejections *= DISCOUNT
        # Modelled, not measured: one slow round of a busy machine is no news about the draft.
        seconds = costs.round(record.num_draft_tokens, record.num_replayed_tokens)
        seconds += record.num_replay_forwards * (costs.plain or 0.0)
        tokens = 1 + sum(sum(row) for row in labels) / len(labels)
        last = tokens
        if not self._outlook.is_lockstep:
            last = self._expected_progress.add(record.rows, (1 + sum(row) for row in record.survival))
        if costs.plain:
            self._standing.gains.add(tokens, seconds / costs.plain)
            self._standing.gains.add_last(last, seconds / costs.plain)
        self._replayed += record.num_replayed_tokens
        self._flushes += record.num_replay_forwards
        self._rejections += 1 - sum(row[-1] for row in labels) / len(labels)

    def _costs_of(self, outlook: Outlook) -> Costs:
        """Return the costs of a batch size."""
        size = _size_of(outlook)
        if size not in self._costs:
            nearest = min(self._costs, key=lambda other: (abs(other - size), other), default=None)
            if nearest is None:
                self._costs[size] = Costs(cost_ratio=self._cost_ratio)
            else:
                self._costs[size] = self._costs[nearest].inherited(2.0 ** (size - nearest))
        return self._costs[size]


def _size_of(outlook: Outlook) -> int:
    """Return the logarithm of the batch size; sizes between two powers of two are taken together."""
    return max(outlook.num_batch_rows - 1, 0).bit_length()


def _num_independent_rows(outlook: Outlook) -> int:
    return 1 if outlook.is_lockstep else max(outlook.num_rows, 1)


def _speed_of(rounds: Sequence[tuple[float, float]]) -> float:
    """Return the tokens per step of rounds of so many tokens and steps."""
    return sum(tokens for tokens, _ in rounds) / max(sum(steps for _, steps in rounds), SHORTEST)
