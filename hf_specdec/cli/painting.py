"""Show tokens as they come, coloured by where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from hf_specdec.metrics import RoundRecord

STYLES = {"accepted": "green", "corrected": "yellow", "bonus": "cyan", "plain": ""}
_MAX_TOKENS_HELD_BACK = 8  # a character has at most 4 bytes; more than this is not an unfinished character


class IncrementalDecoder:
    """Turn tokens into text piece by piece: what is an unfinished character is held back until it is finished."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Some tokenizers drop a leading space, so each piece is decoded together with the piece before it.
        self._previous = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is now certain, often its own and sometimes none."""
        self._ids.append(token_id)
        before, now = self._decode(self._shown), self._decode(len(self._ids))
        is_unfinished = now.endswith("\ufffd") and len(self._ids) - self._shown < _MAX_TOKENS_HELD_BACK
        return "" if is_unfinished or len(now) <= len(before) else self._advance(before, now)

    def flush(self) -> str:
        """Return what was held back."""
        return self._advance(self._decode(self._shown), self._decode(len(self._ids)))

    def _advance(self, before: str, now: str) -> str:
        self._previous, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def _decode(self, end: int) -> str:
        ids = self._ids[self._previous : end]
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence decodes to one string"
        return text


class TokenWriter:
    """A streamer for one row that writes text to a console as soon as tokens arrive; `console=None` writes nothing."""

    def __init__(self, console: Console | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self._console = console
        self._decoder = IncrementalDecoder(tokenizer)
        self._has_seen_prompt = False

    def put(self, value: Tensor) -> None:
        """Skip the prompt `[1, L]`, which `generate` hands over first; take tokens `[1]`."""
        if self._has_seen_prompt:
            self._take(value.reshape(-1).tolist())
        self._has_seen_prompt = True

    def end(self) -> None:
        """Write what was held back and end the line."""
        self._write(self._decoder.flush(), "plain")
        self._write("\n", "plain")

    def _take(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._write(self._decoder.push(token_id), "plain")

    def _write(self, text: str, kind: str) -> None:
        if self._console is not None and text:
            self._console.out(text, style=STYLES[kind] or None, end="", highlight=False)


class RoundWriter(TokenWriter):
    """A `TokenWriter` that waits for the record of each round, and colours its tokens.

    Pass it to `generate` as `streamer`, and its `on_round` in the `SpeculativeConfig`.
    """

    def __init__(self, console: Console | None, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(console, tokenizer)
        self._waiting: list[int] | None = None

    def on_round(self, record: RoundRecord) -> None:
        """Write the tokens that arrived since the round before."""
        for token_id, kind in zip(self._waiting or [], token_kinds(record), strict=False):
            self._write(self._decoder.push(token_id), kind)
        self._waiting = []

    def end(self) -> None:
        """Write tokens that belong to no round (plain decoding took over), then as `TokenWriter.end`."""
        super()._take(self._waiting or [])
        super().end()

    def _take(self, token_ids: Sequence[int]) -> None:
        if self._waiting is None:  # the first token comes from the prefill and is in no round
            super()._take(token_ids)
            self._waiting = []
        else:
            self._waiting += token_ids


def token_kinds(record: RoundRecord) -> list[str]:
    """Return for each token that the first row committed in this round what it is, a key of `STYLES`."""
    num_accepted = record.num_accepted_tokens[0]
    last = "bonus" if num_accepted == record.num_draft_tokens else "corrected"
    if record.num_draft_tokens == 0:
        last = "plain"
    return ["accepted" if i < num_accepted else last for i in range(len(record.committed_token_ids[0]))]


def legend() -> Text:
    """Return one line that explains the colours."""
    return Text.assemble(
        ("draft token, accepted", STYLES["accepted"]),
        "  ",
        ("correction by the target", STYLES["corrected"]),
        "  ",
        ("bonus token after a fully accepted draft", STYLES["bonus"]),
    )
