"""Whether to draft one more token inside a round, from how sure the draft was of those before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hf_specdec.controller.survival import Calibration

# Per round; more rows than that say the same.
MOST_LABELS = 32
# Its multiples are spread evenly over 0..1.
GOLDEN_RATIO = 0.618


def thresholds_of(hazards: Sequence[float], seconds: Sequence[float], rate: float) -> list[float]:
    """Return for the second token, the third, … the probability of survival from which on drafting it pays.

    It pays where it does together with the tokens that may follow it: one token alone can look too dear where times
    rise in steps.
    """
    thresholds = []
    for position in range(1, len(seconds)):
        tokens, reached, least = 0.0, 1.0, math.inf
        for last in range(position, len(seconds)):
            # In parts of this token's own probability.
            reached *= hazards[last] if last > position else 1.0
            tokens += reached
            price = rate * (seconds[last] - seconds[position - 1]) / tokens
            if price < least:
                least = price
        thresholds.append(least)
    return thresholds


class InRoundStop:
    """Stops a round where the next token is not expected to be worth its time.

    The token that was just drafted always stays. Dropping it for its own low probability would change what is sampled.
    """

    def __init__(self, this: Sequence[float], following: Sequence[float]) -> None:
        """Start from known calibrations: of the token just drafted, and of the one that would come after it."""
        self._this = Calibration(*this)
        self._next = Calibration(*following)
        self._hazards: Sequence[float] = ()
        self._thresholds: Sequence[float] = ()
        self._is_lockstep = False
        self._chances: list[float] = []
        self._num_drafted = 0

    def prepare(
        self, hazards: Sequence[float], seconds: Sequence[float], rate: float, *, is_lockstep: bool = False
    ) -> None:
        """Take in what rounds are judged by, before one begins, for `goes_on` is asked between two draft steps.

        Args:
            hazards: For each position the probability of its token to be accepted when the ones before it were.
            seconds: What rounds of 1, 2, 3, … draft tokens take.
            rate: Tokens per row that a second is worth.
            is_lockstep: Whether a token only counts where all rows accept it.
        """
        self._hazards, self._is_lockstep = hazards, is_lockstep
        self._thresholds = thresholds_of(hazards, seconds, rate)

    def start_round(self, num_rows: int) -> None:
        """Begin a round, or go over one in thought."""
        self._num_drafted = 0
        self._chances = [1.0] * num_rows

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Say, after a draft step, whether to take another."""
        position = self._num_drafted
        self._num_drafted += 1
        if position >= len(self._thresholds):
            return False
        this, following = self._hazards[position], self._hazards[position + 1]
        expected = []
        for row, confidence in enumerate(confidences):
            self._chances[row] *= self._this.probability(confidence, this)
            expected.append(self._chances[row] * self._next.probability(confidence, following))
        gain = math.prod(expected) if self._is_lockstep else sum(expected) / max(len(expected), 1)
        return gain > self._thresholds[position]

    def learn(
        self, hazards: Sequence[float], survival: Sequence[Sequence[float]], confidences: Sequence[Sequence[float]]
    ) -> None:
        """Learn from a round: per row its survival labels and its confidences."""
        num_labels = 0
        for labels, values in zip(survival, confidences, strict=False):
            reached = 1.0
            for position, (label, confidence) in enumerate(zip(labels, values, strict=False)):
                if reached > 0:
                    self._this.observe(confidence, hazards[position], label / reached, reached)
                if label > 0 and position + 1 < len(labels):
                    self._next.observe(confidence, hazards[position + 1], labels[position + 1] / label, label)
                reached = label
            num_labels += len(labels)
            if num_labels >= MOST_LABELS:
                return

    def learn_from_text(
        self, hazards: Sequence[float], agreement: Sequence[Sequence[float]], confidences: Sequence[Sequence[float]]
    ) -> None:
        """Learn from a probe: per row the probability of each token to be accepted, and the confidences."""
        for chances, values in zip(agreement, confidences, strict=False):
            for chance, confidence in zip(chances, values, strict=False):
                self._this.observe(confidence, hazards[0], chance)
            for confidence, (chance, following) in zip(values, pairwise(chances), strict=False):
                self._next.observe(confidence, hazards[1], following, chance)

    def rounds_over(self, chances: Sequence[float], confidences: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield the expected tokens and the draft tokens of the rounds that would have gone over a probed text."""
        start, luck = 0, 0.0
        while start < len(chances):
            tokens, survival, accepted = 1.0, 1.0, 0
            self.start_round(1)
            # Evenly spread instead of random, so that the same probe always gives the same.
            luck = (luck + GOLDEN_RATIO) % 1.0
            for chance, confidence in zip(chances[start:], confidences[start:], strict=False):
                survival *= chance
                tokens += survival
                accepted += survival > luck
                if not self.goes_on([confidence]):
                    break
            yield tokens, self._num_drafted
            start += accepted + 1

    def hints(self) -> dict[str, list[float]]:
        """Return both calibrations: weight, bias and center."""
        return {
            name: [round(value, 4) for value in (one.weight, one.bias, one.center)]
            for name, one in (("confidence", self._this), ("next_confidence", self._next))
        }
