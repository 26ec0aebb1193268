"""Other rules for the draft length behind the same protocol, written from their descriptions, to compare with.

The rules look at one row, as the originals do or as they are mostly used; of a batch they see the mean.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hf_specdec.benchmark.simulator import CostModel, simulate
from hf_specdec.benchmark.traces import Trace
from hf_specdec.controller import AdaptiveDraftLength, DraftLengthController, FixedDraftLength, Outlook
from hf_specdec.metrics import ProbeRecord, RoundRecord


class _Rival:
    """What the rules share: no probes, and no stops inside a round."""

    def num_probe_tokens(self, outlook: Outlook) -> int:
        """Return 0: the rule never looks back."""
        return 0

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Go on to the length chosen before the round."""
        return True

    def observe_probe(self, probe: ProbeRecord) -> None:
        """Ignore the probe."""


class TransformersHeuristic(_Rival):
    """transformers' schedule "heuristic": two tokens more after a round that kept all, one fewer after any other.

    It starts with 5, never drafts fewer than 1, and knows no upper bound. Confidence plays no part in it here, which in
    transformers takes `assistant_confidence_threshold=0`.
    """

    def __init__(self, start: int = 5) -> None:
        self._length = start

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return the length, or the limit if that is smaller."""
        return min(self._length, outlook.limit)

    def observe(self, record: RoundRecord) -> None:
        """Grow or shrink."""
        if record.num_draft_tokens:
            is_full = min(record.num_accepted_tokens) == record.num_draft_tokens
            self._length = self._length + 2 if is_full else max(1, self._length - 1)


class TransformersConfidence(_Rival):
    """transformers' default: up to 20 tokens, ended by the first whose draft probability is below a threshold.

    The token that ends the round is verified too. The threshold is 0.4. Where scikit-learn is installed transformers
    fits it again after every round: over all tokens evaluated so far it takes the threshold with the least false
    positive rate + 3 · false negative rate, a positive being a token that was accepted. Here that happens whenever the
    tokens have grown by a fiftieth, which in the long run gives the same and takes less time.

    Args:
        refits: Whether to do so.
    """

    MOST_DRAFT_TOKENS = 20
    FIRST_THRESHOLD = 0.4
    FEWEST_TOKENS = 6

    def __init__(self, *, refits: bool = False) -> None:
        self.threshold = self.FIRST_THRESHOLD
        self._refits = refits
        # (draft probability, whether accepted), rising.
        self._tokens: list[tuple[float, bool]] = []
        self._fit_at = self.FEWEST_TOKENS

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return the most the round may draft."""
        return min(self.MOST_DRAFT_TOKENS, outlook.limit)

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Go on while a row is sure."""
        return max(confidences) >= self.threshold

    def observe(self, record: RoundRecord) -> None:
        """Take in which tokens were accepted, and fit the threshold where it is time."""
        if not self._refits:
            return
        for index, confidences in enumerate(record.confidences):
            num_accepted = record.num_accepted_tokens[index]
            for position in range(record.num_evaluated_tokens[index]):
                insort(self._tokens, (confidences[position], position < num_accepted))
        if len(self._tokens) >= self._fit_at:
            self._fit_at = max(len(self._tokens) + 1, len(self._tokens) * 51 // 50)
            self._fit()

    def _fit(self) -> None:
        num_accepted = sum(is_accepted for _, is_accepted in self._tokens)
        num_rejected = len(self._tokens) - num_accepted
        if not num_accepted or not num_rejected:
            return
        # From the highest threshold down; of equal costs the first stays, as in transformers.
        missed, passed = num_accepted, 0
        least = math.inf
        for index in range(len(self._tokens) - 1, -1, -1):
            probability, is_accepted = self._tokens[index]
            missed -= is_accepted
            passed += not is_accepted
            if index and self._tokens[index - 1][0] == probability:
                continue
            cost = passed / num_rejected + 3 * missed / num_accepted
            if cost < least:
                least, self.threshold = cost, probability


class MovingAverageTiers(_Rival):
    """SGLang's adaptive draft length, algorithm "ema": one of a few lengths, by a moving average of accepted tokens.

    Every 5 rounds, after 10 to warm up, it drops to the tier below while the average is at most that tier − 0.75, or
    else rises while the average is above the current tier − 0.5. Costs play no part.

    Args:
        tiers: The lengths, rising.
        start: The first of them to use.
    """

    WEIGHT = 0.2
    WARM_UP = 10
    EVERY = 5
    MARGIN = 0.5
    DOWN = -0.25

    def __init__(self, tiers: Sequence[int] = (1, 3, 7), start: int = 3) -> None:
        self._tiers = tuple(tiers)
        self._at = self._tiers.index(start)
        self._average = float(start - 1)
        self._num_rounds = 0

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return the tier, or the limit if that is smaller."""
        return min(self._tiers[self._at], outlook.limit)

    def observe(self, record: RoundRecord) -> None:
        """Update the average and, where it is time, the tier."""
        if not record.num_draft_tokens:
            return
        accepted = sum(record.num_accepted_tokens) / len(record.num_accepted_tokens)
        self._average += self.WEIGHT * (accepted - self._average)
        self._num_rounds += 1
        if self._num_rounds >= self.WARM_UP and self._num_rounds % self.EVERY == 0:
            self._decide()

    def _decide(self) -> None:
        before = self._at
        while self._at and self._average <= self._tiers[self._at - 1] - self.MARGIN + self.DOWN:
            self._at -= 1
        if self._at < before:
            return
        while self._at + 1 < len(self._tiers) and self._average > self._tiers[self._at] - self.MARGIN:
            self._at += 1


class UpperConfidenceBound(_Rival):
    """UCB1 with one arm per length 0…8, rewarded by the tokens per second of the round, as bandit codes do.

    The mean of these quotients is not the speed in the long run, which is the quotient of the means: long rounds weigh
    too little. Rewards are divided by the largest seen, since the bound wants them between 0 and 1.

    Args:
        most: The longest arm.
        exploration: Weight of the bound's width. The textbook's √2 is still exploring after thousands of rounds; the
            default did best over our cost ratios and workloads.
    """

    def __init__(self, most: int = 8, exploration: float = 0.2) -> None:
        self._sums = [0.0] * (most + 1)
        self._counts = [0] * (most + 1)
        self._largest = 0.0
        self._exploration = exploration

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return an arm that was never pulled, or else the one with the highest bound."""
        arms = range(min(len(self._counts), outlook.limit + 1))
        unknown = [arm for arm in arms if not self._counts[arm]]
        return unknown[0] if unknown else max(arms, key=self._bound)

    def observe(self, record: RoundRecord) -> None:
        """Reward the arm that was pulled."""
        num_tokens = 1 + sum(record.num_accepted_tokens) / len(record.num_accepted_tokens)
        reward = num_tokens / record.round_seconds
        self._sums[record.num_draft_tokens] += reward
        self._counts[record.num_draft_tokens] += 1
        self._largest = max(self._largest, reward)

    def _bound(self, arm: int) -> float:
        count = self._counts[arm]
        width = self._exploration * math.sqrt(math.log(sum(self._counts)) / count)
        return self._sums[arm] / count / self._largest + width


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule to compare: how to make one, and whether it may stop inside a round."""

    make: Callable[[], DraftLengthController]
    reads_confidence: bool


OURS = "ours"
RULES = {
    "transformers heuristic": Rule(TransformersHeuristic, reads_confidence=False),
    "transformers confidence": Rule(TransformersConfidence, reads_confidence=True),
    "SGLang EMA": Rule(MovingAverageTiers, reads_confidence=False),
    "UCB1": Rule(UpperConfidenceBound, reads_confidence=False),
    "ours between rounds": Rule(AdaptiveDraftLength, reads_confidence=False),
    OURS: Rule(AdaptiveDraftLength, reads_confidence=True),
}


class FixedLengths:
    """Every fixed length 0…16 on one text.

    What costs are changes no round of a fixed length, so each is run once, whatever the number of cost ratios; noise
    in the times would change its speed by 0 on average.
    """

    MOST = 16

    def __init__(self, trace: Trace, num_tokens: int, seed: int = 0) -> None:
        """Write `num_tokens` with each length, with the luck of `seed`."""
        free = CostModel(draft_step=0.0)
        self._num_tokens = num_tokens
        self._outcomes = [
            simulate(FixedDraftLength(length), trace, free, num_tokens, seed=seed, reads_confidence=False)
            for length in range(self.MOST + 1)
        ]

    def speeds(self, draft_step: float) -> list[float]:
        """Return the speed of each length relative to plain decoding, for a draft step of so many plain steps."""
        return [
            self._num_tokens / (outcome.seconds + draft_step * outcome.num_draft_tokens) for outcome in self._outcomes
        ]
