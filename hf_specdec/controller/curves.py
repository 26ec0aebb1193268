"""Times as a function of a token count, from noisy measurements of some of the counts."""

from __future__ import annotations

from collections import deque
from itertools import accumulate, combinations
from statistics import median_low

WINDOW = 31
# In rounds; an estimate this old has outlived the context length or the load that it was measured under.
LONGEST_AGE = 400
# The straight line through all counts weighs as much as so many measurements of a single one.
PULL = 1.0
# A time this much longer than the line through better known counts is a surprise.
SURPRISE = 1.3
LONGEST_TABLE = 40
# The estimates are drawn anew when a median has moved by this share, and after so many measurements in any case: doing
# it after each one would take longer than what can be gained by it.
MOVED = 0.01
DRAWN_AFTER = 8
# Below so many measurements of a count each one matters.
FEW = 4


class Samples:
    """The latest seconds of one kind, with the round they are from."""

    def __init__(self, window: int = WINDOW) -> None:
        self.values: deque[tuple[int, float]] = deque(maxlen=window)
        self._median: float | None = None

    def add(self, now: int, seconds: float) -> None:
        """Take in what round `now` measured."""
        self.values.append((now, seconds))
        self._median = None

    def forget_before(self, oldest: int) -> None:
        """Drop samples from rounds before `oldest`."""
        while self.values and self.values[0][0] < oldest:
            self.values.popleft()
            self._median = None

    @property
    def median(self) -> float | None:
        """The median, of two the lower one, since what is wrong with a time makes it too long; None without samples."""
        if self._median is None and self.values:
            self._median = median_low(seconds for _, seconds in self.values)
        return self._median


class Curve:
    """Seconds by token count: medians of each count, pulled towards a line, and never falling.

    Without the line, one slow measurement of a count would keep it from being chosen, and so from being measured again.
    """

    def __init__(self, *, is_straight: bool = False) -> None:
        """Start without samples.

        Args:
            is_straight: Whether the times are those of the line, since every token takes the same.
        """
        self._is_straight = is_straight
        self._samples: dict[int, Samples] = {}
        self._now = 0
        self._table: list[float] = []
        self._table_slope: float | None = None
        self._drawn_from: dict[int, float] = {}
        self._num_added = 0
        self.version = 0

    @property
    def longest(self) -> int:
        """The largest count that was measured, 0 without any."""
        return max(self._samples, default=0)

    def samples_of(self, count: int) -> Samples | None:
        """Return what was measured at `count` tokens."""
        return self._samples.get(count)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        return not self._samples

    def add(self, now: int, count: int, seconds: float) -> None:
        """Take in what round `now` measured at `count` ≥ 1 tokens."""
        samples = self._samples.setdefault(count, Samples())
        samples.add(now, seconds)
        self._now = now
        self._num_added += 1
        drawn = self._drawn_from.get(count)
        is_like_before = (
            drawn is not None
            and len(samples.values) > FEW
            and self._num_added < DRAWN_AFTER
            and abs((samples.median or 0.0) - drawn) <= MOVED * drawn
        )
        if not is_like_before:
            self._table = []
            self.version += 1

    def inherit(self, other: Curve, now: int) -> None:
        """Take another curve's medians as a single sample each."""
        for count, samples in other._samples.items():
            if samples.median is not None:
                self.add(now, count, samples.median)

    def seconds(self, count: float, first_slope: float | None) -> float:
        """Estimate the seconds at `count` tokens, 0.0 without any measurement.

        Args:
            count: May lie between whole tokens.
            first_slope: Seconds per token while a single count is measured; None: in proportion to the count.
        """
        if not self._table or first_slope != self._table_slope:
            self._table, self._table_slope = self._rising(first_slope), first_slope
            self._drawn_from = {count: own.median for count, own in self._samples.items() if own.median is not None}
            self._num_added = 0
        low = min(int(count), LONGEST_TABLE - 2)
        return self._table[low] + (count - low) * (self._table[low + 1] - self._table[low])

    def _rising(self, first_slope: float | None) -> list[float]:
        """Return the estimates at 0, 1, 2, …: reading more is never faster, whatever the noise says."""
        points, (start, slope) = self._believed(first_slope)
        known = {} if self._is_straight else {count: (seconds, weight) for count, seconds, weight in points}
        pools: list[tuple[float, float, int]] = []
        for count in range(LONGEST_TABLE):
            seconds, weight = known.get(count, (0.0, 0.0))
            value = max(0.0, (weight * seconds + PULL * (start + slope * count)) / (weight + PULL))
            pools.append((value, weight + PULL, 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (low, low_weight, low_width), (high, high_weight, high_width) = pools[-2:]
                weight = low_weight + high_weight
                pools[-2:] = [((low * low_weight + high * high_weight) / weight, weight, low_width + high_width)]
        return [value for value, _, width in pools for _ in range(width)]

    def _believed(self, first_slope: float | None) -> tuple[list[tuple[int, float, float]], tuple[float, float]]:
        """Return count, seconds and weight of every count that is believed, and the line through them.

        The first pass over a new number of tokens often takes several times as long as the next: memory is laid out,
        kernels are chosen. So one slow time of a count is only believed once there are two.
        """
        points: list[tuple[int, float, float]] = []
        unsure: list[tuple[int, float, float]] = []
        for count in sorted(self._samples):
            samples = self._samples[count]
            samples.forget_before(self._now - LONGEST_AGE)
            if samples.median is None:
                del self._samples[count]
            else:
                point = (count, samples.median, float(len(samples.values)))
                (points if len(samples.values) > 1 else unsure).append(point)
        start, slope = _line(points, first_slope)
        believed = [point for point in unsure if not points or point[1] <= SURPRISE * (start + slope * point[0])]
        if not believed:
            return points, (start, slope)
        points = sorted(points + believed)
        return points, _line(points, first_slope)


def _line(points: list[tuple[int, float, float]], first_slope: float | None) -> tuple[float, float]:
    """Return start and slope of a line that does not fall and that no single count can bend (Theil and Sen's)."""
    if not points:
        return 0.0, 0.0
    if len(points) > 1:
        slopes = [
            ((high - low) / (later - earlier), own * other * (later - earlier))
            for (earlier, low, own), (later, high, other) in combinations(points, 2)
        ]
        slope = max(_weighted_median(slopes), 0.0)
    else:
        count, seconds, _ = points[0]
        slope = seconds / count if first_slope is None else first_slope
    return _weighted_median([(seconds - slope * count, weight) for count, seconds, weight in points]), slope


def _weighted_median(pairs: list[tuple[float, float]]) -> float:
    """Return the value that half of the weight lies below, of pairs of value and weight."""
    pairs.sort()
    half = sum(weight for _, weight in pairs) / 2
    reached = accumulate(weight for _, weight in pairs)
    return next((value for (value, _), below in zip(pairs, reached, strict=True) if below >= half), pairs[-1][0])
