"""Hand tokens to a streamer in order and once, column by column as plain decoding does."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer

from hf_specdec.engine.sequences import Sequences


class Emitter:
    """Feeds a streamer one column `[B]` at a time, as soon as every row has reached it."""

    def __init__(self, streamer: BaseStreamer | None, pad_token_id: int | None) -> None:
        """Wrap `streamer`, which the host has already given the prompt."""
        self.streamer = streamer
        self.pad_token_id = pad_token_id
        self.num_columns = 0

    def emit(self, sequences: Sequences) -> None:
        """Hand out the columns that have become complete; finished rows are padded."""
        if self.streamer is None:
            return
        while column := self._next_column(sequences):
            self.streamer.put(torch.tensor(column))
            self.num_columns += 1

    def end(self) -> None:
        """Tell the streamer that nothing more comes."""
        if self.streamer is not None:
            self.streamer.end()

    def _next_column(self, sequences: Sequences) -> list[int] | None:
        column = []
        has_token = False
        for tokens, is_finished in zip(sequences.new_tokens, sequences.is_finished, strict=True):
            if self.num_columns < len(tokens):
                column.append(tokens[self.num_columns])
                has_token = True
            elif is_finished:
                column.append(self.pad_token_id or 0)
            else:
                return None
        return column if has_token else None
