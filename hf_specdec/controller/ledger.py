"""The guard: time lost against plain decoding is capped, whatever the text does and however wrong the estimates are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# The loss may grow by this share of the time plain decoding takes, …
SHARE = 0.02
# … and a constant of so many plain steps, which is what finding out about a new pair may cost.
ALLOWANCE = 20.0
# In plain steps; time won counts up to here, so that a lucky past cannot hide new losses.
MOST_WON = 50.0


class Progress:
    """How far the row that is furthest behind has come, which is what a batch has to wait for."""

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._reached = 0.0

    def add(self, rows: Sequence[int], tokens: Iterable[float]) -> float:
        """Enter by how many tokens each row has advanced, and return by how many the last one has."""
        for row, more in zip(rows, tokens, strict=True):
            self._tokens[row] = self._tokens.get(row, 0.0) + more
        before = self._reached
        self._reached = max(before, min((self._tokens[row] for row in rows), default=0.0))
        return self._reached - before


class Ledger:
    """Accounts for the time of everything plain decoding would not have done.

    Let a plain step take τ, N be the tokens of the row that is furthest behind, and T_max the time of the longest round
    or probe. Then the time spent is T ≤ (1 + SHARE)·N·τ + ALLOWANCE·τ + T_max, whatever times and acceptances come: the
    balance only rises in rounds that draft and in probes, those start only while it is at most
    SHARE·N·τ + ALLOWANCE·τ, and each adds at most T_max.
    """

    def __init__(self) -> None:
        self.lost_seconds = 0.0
        self.plain_seconds = 0.0

    def is_open(self, plain_step: float | None) -> bool:
        """Return whether a round that drafts, or a probe, may start: not before a plain step's time is known."""
        return plain_step is not None and self.lost_seconds <= SHARE * self.plain_seconds + ALLOWANCE * plain_step

    def charge(self, seconds: float, num_tokens: float, plain_step: float) -> None:
        """Enter a round that drafted, or a probe: what it took, and by how many tokens the last row advanced."""
        worth = num_tokens * plain_step
        self.plain_seconds += worth
        self.lost_seconds = max(self.lost_seconds + seconds - worth, -MOST_WON * plain_step)

    def enter_plain(self, plain_step: float) -> None:
        """Enter a plain step, which costs what plain decoding costs."""
        self.plain_seconds += plain_step
