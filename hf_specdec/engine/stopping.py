"""Stop at the same token as plain decoding, wherever in a round it falls.

Criteria of transformers are evaluated for all tokens of a round at once, on the device, and read at the round's one
sync. Any other criterion is asked after every token, as plain decoding would ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from hf_specdec.engine.sequences import Sequences

Tensor = torch.Tensor
KNOWN: frozenset[type] = frozenset({EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria})


class StopPlan:
    """A `StoppingCriteriaList`, sorted by what has to be asked when."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        """Sort `criteria` by type."""
        self.criteria = criteria
        self.is_known = all(type(c) in KNOWN for c in criteria)
        self.pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        self._eos = [c for c in criteria if type(c) is EosTokenCriteria]
        self._strings = [c for c in criteria if type(c) is StopStringCriteria]
        self._timers = [c for c in criteria if type(c) is MaxTimeCriteria]

    @property
    def stops_rows_apart(self) -> bool:
        """Whether rows of one batch can stop at different lengths."""
        return bool(self._eos or self._strings) or not self.is_known

    def is_out_of_time(self, sequences: Sequences) -> bool:
        """Ask the clock criteria, once per round."""
        if not self._timers:
            return False
        ids = sequences.buffer[:1, :1]
        # sync: the criterion answers in a tensor, though it only reads the host's clock.
        return any(bool(timer(ids, None).any().item()) for timer in self._timers)

    def flags(self, sequences: Sequences, token_ids: Tensor) -> Tensor | None:
        """Return which tokens would end their row, `[B, T]` bool, None where no token can.

        Args:
            sequences: Rows whose buffer already holds `token_ids` after the committed tokens.
            token_ids: The round's tokens `[B, T]`, accepted or not.
        """
        if not self._eos and not self._strings:
            return None
        flags = torch.zeros_like(token_ids, dtype=torch.bool)
        for criterion in self._eos:
            criterion.eos_token_id = criterion.eos_token_id.to(token_ids.device)
            flags |= torch.isin(token_ids, criterion.eos_token_id)
        for strings in self._strings:
            flags |= self._string_flags(strings, sequences, token_ids.shape[1])
        return flags

    def ask_all(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Ask every criterion about the whole batch `[B, L]`, as plain decoding does after each token."""
        # sync: unknown criteria decide on the host, token by token.
        return [bool(done) for done in self.criteria(input_ids, scores).tolist()]

    @staticmethod
    def _string_flags(criterion: Any, sequences: Sequences, num_tokens: int) -> Tensor:
        width = criterion.maximum_token_len
        if min(sequences.lengths) + 1 >= width:
            span = sequences.span(1 - width, width + num_tokens - 1)
            windows = sequences.read(span, width + num_tokens - 1).unfold(1, width, 1)  # [B, T, width]
            stops: Tensor = criterion(windows.flatten(0, 1), None).view(windows.shape[:2])
            return stops
        rows = []
        for position, length in enumerate(sequences.lengths):
            ids = sequences.buffer[position : position + 1]
            rows.append(torch.cat([criterion(ids[:, : length + t + 1], None) for t in range(num_tokens)]))
        return torch.stack(rows)


def first_stop(flags: Sequence[int], num_tokens: int) -> int | None:
    """Return how many of `num_tokens` tokens stay when the first flagged one is the last, None when none is flagged."""
    return next((position + 1 for position, is_stop in enumerate(flags[:num_tokens]) if is_stop), None)
