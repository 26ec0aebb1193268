"""What drafting would give while it is off: the tokens of plain steps, and what the target thought of them."""

from __future__ import annotations

from collections import deque

import torch

Tensor = torch.Tensor
LONGEST_STREAK = 256


class Streak:
    """The latest plain steps in a row that the drafter has not read."""

    def __init__(self) -> None:
        self.length = 0
        self._probs: deque[Tensor] = deque(maxlen=LONGEST_STREAK)

    def add(self, probs: Tensor | None) -> None:
        """Take in a plain step and the target's probability `[B]` of its token; None when nothing is sampled."""
        self.length = min(self.length + 1, LONGEST_STREAK)
        if probs is not None:
            self._probs.append(probs)

    def clear(self) -> None:
        """Forget all: the drafter has read them, in a round of its own or in a probe."""
        self.length = 0
        self._probs.clear()

    def select_rows(self, rows: Tensor) -> None:
        """Keep only `rows` (indices `[kept]`)."""
        for position, probs in enumerate(self._probs):
            self._probs[position] = probs[rows]

    def agreement(self, draft_probs: Tensor) -> Tensor:
        """Return how likely a draft of the last tokens was to be accepted there, `[B, N]`, from its probabilities.

        min(1, draft / target) at tokens of the target has the mean of min(1, target / draft) at tokens of the draft:
        both are the overlap of the two laws. Without sampling the draft's probabilities are 0 or 1 and say it already.
        """
        if not self._probs:
            return draft_probs
        target_probs = torch.stack(list(self._probs)[-draft_probs.shape[1] :], dim=1)
        return (draft_probs / target_probs).clamp(max=1.0)
