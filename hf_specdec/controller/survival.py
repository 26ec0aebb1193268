"""How far drafts survive: running estimates from every verification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from hf_specdec.hints import LARGEST_PARAMETER

# How much an observation still counts one round later: about the last 33 rounds matter.
DISCOUNT = 0.97
# Before anything was observed, a draft token is taken to survive the one before it with this probability, …
FIRST_HAZARD = 0.7
# … which weighs as much as so many rounds.
FIRST_WEIGHT = 3.0


class Survival:
    """Estimates S_j, the probability that the first j draft tokens are all accepted.

    The labels are soft (given the first j drafted tokens, the probability that they stay), so a rejection hides
    nothing: every drafted position has a label in every round. Positions that were not drafted are filled in with the
    pooled hazard, the average probability of a token to survive when the ones before it did.
    """

    def __init__(self, length: int, prior: Sequence[float] = ()) -> None:
        """Start with `prior`, S_1, S_2, …, continued by the first hazard; estimates reach up to `length`."""
        curve = list(prior[:length])
        while len(curve) < length:
            curve.append((curve[-1] if curve else 1.0) * FIRST_HAZARD)
        self._sums = [FIRST_WEIGHT * value for value in curve]
        self._weight = FIRST_WEIGHT
        known = curve[: max(len(prior), 1)]
        self._reached = FIRST_WEIGHT * (1.0 + sum(known[:-1]))
        self._survived = FIRST_WEIGHT * sum(known)

    @property
    def hazard(self) -> float:
        """The probability of a draft token to be accepted when the ones before it were."""
        return self._survived / self._reached if self._reached > 0 else FIRST_HAZARD

    def hazards(self) -> list[float]:
        """Return for each position the probability of its token to be accepted when the ones before it were."""
        curve = [1.0, *self.curve(len(self._sums))]
        return [later / earlier if earlier > 0 else 0.0 for earlier, later in pairwise(curve)]

    def curve(self, length: int) -> list[float]:
        """Return S_1 … S_length, which never rises."""
        curve: list[float] = []
        lowest = 1.0
        for total in self._sums[:length]:
            lowest = min(lowest, total / self._weight)
            curve.append(lowest)
        return curve

    def observe(self, labels: Sequence[Sequence[float]]) -> None:
        """Learn from one round: per row the labels of its K drafted tokens."""
        self._fade(DISCOUNT)
        share = 1.0 / len(labels)
        hazard = self.hazard
        for row in labels:
            self._enter(row, share, hazard)
        self._weight += 1.0

    def observe_text(self, agreement: Sequence[Sequence[float]]) -> None:
        """Learn from a probe: per row the probabilities of consecutive tokens to be accepted.

        Every token of the text starts a draft that might have been. Along the target's own text the running product of
        min(1, draft / target) estimates survival without bias, as min(1, target / draft) does along the draft's.
        """
        length = len(self._sums)
        starts = [row[start : start + length] for row in agreement for start in range(len(row))]
        if not starts:
            return
        # As if so many rounds had been drafted: a round of several tokens would have passed over most of these starts.
        num_rounds = max(len(row) for row in agreement) / 2
        self._fade(DISCOUNT**num_rounds)
        share = (1 - DISCOUNT**num_rounds) / (1 - DISCOUNT) / len(starts)
        for start in starts:
            self._enter(list(accumulate(start, mul)), share, self.hazard)
        self._weight += share * len(starts)

    def _enter(self, labels: Sequence[float], share: float, hazard: float) -> None:
        """Add one draft's labels, continued by `hazard`; it counts as `share` of a round."""
        reached = 1.0
        for position in range(len(self._sums)):
            if position < len(labels):
                self._reached += share * reached
                reached = labels[position]
                self._survived += share * reached
            else:
                reached *= hazard
            self._sums[position] += share * reached

    def _fade(self, factor: float) -> None:
        self._sums = [total * factor for total in self._sums]
        self._weight *= factor
        self._reached *= factor
        self._survived *= factor


class Calibration:
    """Corrects a probability by the draft's confidence, as far as that has turned out to say anything.

    log-odds = those of the uncorrected probability + weight · (log-odds of the confidence − center) + bias, fitted by
    Newton's method on a discounted likelihood as labels come in; `center` is the mean log-odds of the confidence.
    """

    def __init__(self, weight: float, bias: float, center: float) -> None:
        """Start from a known curve."""
        self.weight = weight
        self.bias = bias
        self.center = center
        self._curvature = (PRIOR_CURVATURE, PRIOR_CURVATURE)

    def probability(self, confidence: float, uncorrected: float) -> float:
        """Return the probability that goes with a largest draft probability of `confidence`."""
        feature = log_odds(confidence) - self.center
        return _logistic(log_odds(uncorrected) + self.weight * feature + self.bias)

    def observe(self, confidence: float, uncorrected: float, label: float, importance: float = 1.0) -> None:
        """Learn that something of this confidence came true with probability `label`."""
        if importance <= 0.0:
            return
        self.center += CENTER_STEP * importance * (log_odds(confidence) - self.center)
        feature = log_odds(confidence) - self.center
        predicted = self.probability(confidence, uncorrected)
        error = importance * (label - predicted)
        steepness = importance * max(predicted * (1 - predicted), 0.02)
        # The feature is centred, so the two parameters hardly disturb each other and each has its own step.
        own, bias = (CALIBRATION_DISCOUNT * value for value in self._curvature)
        own, bias = own + steepness * feature * feature, bias + steepness
        self._curvature = (max(own, LEAST_CURVATURE), max(bias, LEAST_CURVATURE))
        self.weight = _bounded(self.weight + error * feature / self._curvature[0])
        self.bias = _bounded(self.bias + error / self._curvature[1])


CALIBRATION_DISCOUNT = 0.995
CENTER_STEP = 0.02
# So strong that a few dozen labels must agree before confidence has a say.
PRIOR_CURVATURE = 8.0
LEAST_CURVATURE = 4.0
LARGEST_LOG_ODDS = 6.0


def log_odds(probability: float) -> float:
    """Return log(p / (1 - p)), bounded; NaN counts as no confidence at all."""
    if not probability > 0.0:
        return -LARGEST_LOG_ODDS
    if probability >= 1.0:
        return LARGEST_LOG_ODDS
    value = math.log(probability / (1.0 - probability))
    if value > LARGEST_LOG_ODDS:
        return LARGEST_LOG_ODDS
    return value if value > -LARGEST_LOG_ODDS else -LARGEST_LOG_ODDS


def _logistic(value: float) -> float:
    if value < 0:
        odds = math.exp(value)
        return odds / (1.0 + odds)
    return 1.0 / (1.0 + math.exp(-value))


def _bounded(parameter: float) -> float:
    return min(max(parameter, -LARGEST_PARAMETER), LARGEST_PARAMETER)
