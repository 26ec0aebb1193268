"""What drafting gives as it is really done, stops inside rounds included."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# How much a round still counts one round later: about the last 33 matter, to notice that the text has changed, …
DISCOUNT = 0.97
# … or the last 250, to tell a small gain from a small loss.
SLOW_DISCOUNT = 0.996
# Over n rounds of a row drafting must lag plain decoding by this / √n before it counts as slower: the gain of a single
# round varies by about that much, so smaller lags are noise, and being off wrongly costs more than being on so little
# wrong.
DOUBT = 0.45


class Gain:
    """Speed relative to plain decoding, a ratio of discounted sums: the mean of the rounds' ratios would be biased."""

    def __init__(self, discount: float = DISCOUNT) -> None:
        self.num_rounds = 0.0
        self._tokens = 0.0
        self._steps = 0.0
        self._discount = discount

    @property
    def speed(self) -> float | None:
        """Tokens per row and plain step's time, None before the first round."""
        return self._tokens / self._steps if self._steps > 0 else None

    def add(self, tokens: float, steps: float) -> None:
        """Enter a round: what each row got, and how long it took in plain steps of that time and batch size."""
        self.num_rounds = self._discount * self.num_rounds + 1.0
        self._tokens = self._discount * self._tokens + tokens
        self._steps = self._discount * self._steps + steps


class Gains:
    """The average row's gain, by which lengths are chosen, and that of the row furthest behind, which ends the call."""

    def __init__(self) -> None:
        self._average = Gain()
        self._last = Gain()
        self._last_slowly = Gain(SLOW_DISCOUNT)

    @property
    def speed(self) -> float | None:
        """Speed of the average row relative to plain decoding, None before the first round."""
        return self._average.speed

    @property
    def last_speed(self) -> float | None:
        """Speed of the row furthest behind relative to plain decoding, None before the first round."""
        return self._last.speed

    def add(self, tokens: float, steps: float) -> None:
        """Enter what the average row got in a round, and how long the round took in plain steps."""
        self._average.add(tokens, steps)

    def add_last(self, tokens: float, steps: float) -> None:
        """Enter by how much the last row advanced in a round, and how long the round took in plain steps."""
        self._last.add(tokens, steps)
        self._last_slowly.add(tokens, steps)

    def lose(self, num_rows: int) -> bool:
        """Return whether plain decoding is faster: clearly so of late, or by however little over a longer time."""
        return any(
            gain.speed is not None and gain.speed < 1.0 - DOUBT / math.sqrt(gain.num_rounds * num_rows)
            for gain in (self._last, self._last_slowly)
        )


@dataclass(slots=True)
class Standing:
    """Whether drafting is on for texts that start with so many rows, and what it has given there."""

    is_on: bool = True
    gains: Gains = field(default_factory=Gains)
