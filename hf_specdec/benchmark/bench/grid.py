"""What a benchmark goes through: cells of workload, temperature, batch size and prompt length, and what they share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

OWN_LENGTH = 0
"""As a prompt length: prompts as they are."""


class Cell(NamedTuple):
    """One situation: the kind of prompt, the temperature (0 is greedy), rows of a batch, and tokens per prompt."""

    workload: str
    temperature: float
    batch_size: int
    num_prompt_tokens: int = OWN_LENGTH

    @property
    def key(self) -> str:
        """Return the cell's name in the results."""
        length = f" P={self.num_prompt_tokens}" if self.num_prompt_tokens else ""
        return f"{self.workload} T={self.temperature:g} B={self.batch_size}{length}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What every cell shares.

    Attributes:
        max_new_tokens: Tokens per row, never fewer: every way does the same work.
        num_prompts: Prompts of a cell at most, and as many as fill one batch at least.
        repeats: Passes through all ways.
        warm_up_tokens: Length of the untimed call that each way makes before the first cell of its shape.
        seed: Of the first prompt in the first repeat.
    """

    max_new_tokens: int
    num_prompts: int
    repeats: int
    warm_up_tokens: int = 8
    seed: int = 0


def cells_of(
    workloads: Sequence[str], temperatures: Sequence[float], batch_sizes: Sequence[int], prompt_lengths: Sequence[int]
) -> list[Cell]:
    """Return all combinations, in the order in which they are measured."""
    return list(itertools.starmap(Cell, itertools.product(workloads, temperatures, batch_sizes, prompt_lengths)))
