"""The tokens of all rows, committed and proposed, and the columns the next forward covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive columns, as many in each row.

    `start` is the first column when all rows share it; otherwise it is None and `starts` `[B]` holds it per row.
    `end` is one past the last column any row covers.
    """

    start: int | None
    end: int
    starts: Tensor | None = None


class Sequences:
    """Committed tokens per row.

    The host knows every committed token (it reads them at the round's one sync); the device keeps the same tokens in
    `buffer` so that no round uploads anything. Rows that finish leave the buffer and stay in the host's lists.
    """

    def __init__(self, input_ids: Tensor, capacity: int) -> None:
        """Start from a prompt `[B, W]`; the buffer has room for `capacity` columns and grows."""
        num_rows, self.num_prompt_columns = input_ids.shape
        self.device = input_ids.device
        # Ids of 32 bits are welcome as a prompt; from the first new token on the host, too, has 64.
        shape = (num_rows, max(capacity, self.num_prompt_columns + 1))
        self.buffer = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.buffer[:, : self.num_prompt_columns] = input_ids
        self.num_rows = num_rows
        self.rows = list(range(num_rows))
        self.new_tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.is_finished = [False] * num_rows
        self.device_lengths = torch.full((num_rows,), self.num_prompt_columns, device=self.device)
        self._arange = torch.arange(self.buffer.shape[1], device=self.device)

    def length_of(self, row: int) -> int:
        """Return the committed columns of an output row, prompt included."""
        return self.num_prompt_columns + len(self.new_tokens[row])

    @property
    def lengths(self) -> list[int]:
        """Committed columns of the rows still in the batch."""
        return [self.length_of(row) for row in self.rows]

    @property
    def uniform_length(self) -> int | None:
        """The common length of the rows in the batch, or None."""
        lengths = self.lengths
        return lengths[0] if lengths.count(lengths[0]) == len(lengths) else None

    def span(self, offset: int, num_tokens: int) -> Span:
        """Return the columns from `committed length + offset` on."""
        lengths = self.lengths
        end = max(lengths) + offset + num_tokens
        self.reserve(end)
        if lengths.count(lengths[0]) == len(lengths):
            return Span(start=lengths[0] + offset, end=end)
        return Span(start=None, starts=self.device_lengths + offset, end=end)

    def read(self, span: Span, num_tokens: int) -> Tensor:
        """Return the tokens `[B, num_tokens]` of a span."""
        if span.start is not None:
            return self.buffer[:, span.start : span.start + num_tokens]
        return self.buffer.gather(1, self._columns(span, num_tokens))

    def write(self, span: Span, token_ids: Tensor) -> None:
        """Put `[B, T]` tokens into a span."""
        num_tokens = token_ids.shape[1]
        if span.start is not None:
            self.buffer[:, span.start : span.start + num_tokens] = token_ids
        else:
            self.buffer.scatter_(1, self._columns(span, num_tokens), token_ids)

    def put(self, offsets: Tensor, token_ids: Tensor) -> None:
        """Put one token `[B]` per row at its committed length plus `offsets` `[B]`; a span has made room there."""
        self.buffer.scatter_(1, (self.device_lengths + offsets)[:, None], token_ids[:, None])

    def retell(self, num_dropped: Sequence[int], token_ids: Sequence[Sequence[int]]) -> None:
        """Replace the end of each row in the batch by tokens that only the host knows.

        Args:
            num_dropped: Per row, how many of its last tokens go; none of the prompt's may.
            token_ids: Per row, what comes in their place, any number of tokens.
        """
        width = max(map(len, token_ids))
        ends = zip(self.rows, num_dropped, token_ids, strict=True)
        changes = []
        for row, dropped, tokens in ends:
            kept = len(self.new_tokens[row]) - dropped
            self.new_tokens[row][kept:] = tokens
            changes.append(len(tokens) - dropped)
        starts = self.device_lengths - torch.tensor(num_dropped, device=self.device)
        if width:
            self.reserve(max(self.lengths) + width)
            filled = [[*tokens, *[0] * (width - len(tokens))] for tokens in token_ids]
            columns = starts[:, None] + self._arange[:width]
            self.buffer.scatter_(1, columns, torch.tensor(filled, device=self.device))
        self.device_lengths = self.device_lengths + torch.tensor(changes, device=self.device)

    def reserve(self, num_columns: int) -> None:
        """Make room for `num_columns` columns."""
        if num_columns <= self.buffer.shape[1]:
            return
        grown = self.buffer.new_zeros(self.buffer.shape[0], max(2 * self.buffer.shape[1], num_columns))
        grown[:, : self.buffer.shape[1]] = self.buffer
        self.buffer = grown
        self._arange = torch.arange(grown.shape[1], device=self.device)

    def keep_rows(self, positions: list[int]) -> Tensor:
        """Drop the other rows from the batch and return the kept positions as a tensor."""
        index = torch.tensor(positions, device=self.device)
        self.rows = [self.rows[position] for position in positions]
        self.buffer = self.buffer[index]
        self.device_lengths = self.device_lengths[index]
        return index

    def output(self, input_ids: Tensor, pad_token_id: int | None) -> Tensor:
        """Return prompt and committed tokens `[B, width]`, shorter rows padded on the right."""
        width = max(len(tokens) for tokens in self.new_tokens)
        rows = [tokens + [pad_token_id or 0] * (width - len(tokens)) for tokens in self.new_tokens]
        return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)

    def _columns(self, span: Span, num_tokens: int) -> Tensor:
        assert span.starts is not None, "rows without a common start have starts of their own"
        return span.starts[:, None] + self._arange[:num_tokens]
