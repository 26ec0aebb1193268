"""What drafting gives as it is really done, stops inside rounds included."""

from __future__ import annotations

# How much a round still counts one round later: about the last 33 matter, to notice that the text has changed, …
DISCOUNT = 0.97
# … or the last 250, to tell a small gain from a small loss.
SLOW_DISCOUNT = 0.996


class Gain:
    """Tokens per second as a ratio of discounted sums; the average of the rounds' own ratios would be biased."""

    def __init__(self, discount: float = DISCOUNT) -> None:
        self.num_rounds = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._discount = discount

    @property
    def rate(self) -> float | None:
        """Tokens per row and second, None before the first round."""
        return self._tokens / self._seconds if self._seconds > 0 else None

    def add(self, tokens: float, seconds: float) -> None:
        """Enter a round: what each row got, and how long it took."""
        self.num_rounds = self._discount * self.num_rounds + 1.0
        self._tokens = self._discount * self._tokens + tokens
        self._seconds = self._discount * self._seconds + seconds
