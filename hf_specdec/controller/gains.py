"""What drafting gives as it is really done, stops inside rounds included."""

from __future__ import annotations

# How much a round still counts one round later: about the last 33 matter, to notice that the text has changed, …
DISCOUNT = 0.97
# … or the last 250, to tell a small gain from a small loss.
SLOW_DISCOUNT = 0.996


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
