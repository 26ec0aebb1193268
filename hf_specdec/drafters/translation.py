"""A row's text as a draft with another tokenizer reads it, token by token on the host.

Texts are compared as bytes. A special token that both sides have counts as five: a byte that UTF-8 never uses, and the
draft's id of it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hf_specdec.pairing.compat import TokenSpaces
from hf_specdec.pairing.spelling import LONGEST_CONTEXT, complete_part

Tensor = torch.Tensor
# A draft that writes a text in fewer tokens than this part of the target's has longer ones.
FEWER = 0.9
# Tokens at the prompt's end that tell what kind of text it is.
LONGEST_SAMPLE = 1024
SPECIAL = re.compile(rb"\xff(....)", re.DOTALL)


@dataclass(slots=True, kw_only=True)
class OwnText:
    """One row.

    Attributes:
        row: Its index in the output batch.
        ids: All its tokens as the draft reads them.
        ends: Where each of them ends, in bytes after the prompt's end.
        num_prompt_ids: How many of them are the prompt's; they stay as they are.
        num_prompt_tokens: Tokens of the target that the prompt consists of.
        unread: The end of the text that no token of the draft's says yet: part of a character.
        end: Where all that was said so far ends.
        target_ends: Where each new token of the target ends, in the same bytes.
        target_ids: The target's latest tokens.
    """

    row: int
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    num_prompt_ids: int = 0
    num_prompt_tokens: int = 0
    unread: bytes = b""
    end: int = 0
    target_ends: list[int] = field(default_factory=list)
    target_ids: list[int] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        """New tokens of the target that were taken in."""
        return len(self.target_ends)

    def num_ids_before(self, token: int) -> int:
        """Return how many of the draft's tokens end before new token `token` of the target starts."""
        return bisect_right(self.ends, self._start_of(token))

    def ids_over(self, token: int) -> tuple[int, int]:
        """Return the first and one past the last of the draft's tokens that new token `token` of the target covers."""
        last = bisect_left(self.ends, self.target_ends[token])
        return self.num_ids_before(token), min(last + 1, len(self.ids))

    def _start_of(self, token: int) -> int:
        return self.target_ends[token - 1] if token else 0


class Translator:
    """Between the tokens of a target and those of a draft."""

    def __init__(self, spaces: TokenSpaces, ends: Sequence[int] = ()) -> None:
        """Translate between the two sides of `spaces`; `ends` are the target's tokens that end a text."""
        self.spaces = spaces
        self.ends = frozenset(ends)
        self.to_draft, self.to_target = spaces.ids_of_draft, spaces.ids_of_target
        roles = spaces.draft.roles
        # What a text starts with where the draft has no token for its start.
        self.start_id = roles.get("bos", roles.get("eos", roles.get("pad", 0)))

    # ---- reading ---------------------------------------------------------------------------------------------------

    def begin(self, row: int, prompt: Sequence[int]) -> OwnText:
        """Return a row's prompt in the draft's own tokens, written as the draft's tokenizer would write its text."""
        own = OwnText(
            row=row,
            ids=list(self.spaces.draft.first_ids),
            num_prompt_tokens=len(prompt),
            target_ids=list(prompt[-LONGEST_CONTEXT:]),
        )
        first = self.spaces.target.roles.get("bos")
        tokens = list(prompt)
        if tokens and tokens[0] == first and (own.ids or self.to_draft[first] < 0):
            # Each side has its own way to start a text.
            tokens = tokens[1:]
        text = b"".join(self._bytes_of(token) for token in tokens)
        self._spell(own, text, starts=True)
        own.ids = own.ids or [self.start_id]
        own.num_prompt_ids = len(own.ids)
        own.end = -len(own.unread)
        own.ends = [own.end] * len(own.ids)
        return own

    def skip(self, own: OwnText, tokens: Sequence[int]) -> None:
        """Take no notice of tokens after the end of a text, except that they are there."""
        for token in tokens:
            self._note(own, token)

    def read(self, own: OwnText, tokens: Sequence[int]) -> None:
        """Take in new tokens of the target: one for one where the draft has them, else as text."""
        run, own.unread = own.unread, b""
        for token in tokens:
            self._note(own, token)
            mapped = self.to_draft[token] if token < len(self.to_draft) else -1
            if mapped < 0 or (run and not self._can_say(run)):
                run += self._bytes_of(token)
                continue
            self._spell(own, run)
            run, own.end = b"", own.target_ends[-1]
            own.ids.append(mapped)
            own.ends.append(own.end)
        self._spell(own, run)

    def reread(self, own: OwnText, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        """Take in new tokens of the target: what says the same of the draft's own tokens `drafted`, the rest as text.

        The last token of the draft's may change where what follows belongs to the same word.
        """
        text = own.unread + b"".join(self._bytes_of(token) for token in tokens)
        for token in tokens:
            self._note(own, token)
        for token in drafted if not own.unread else ():
            piece = self._own_bytes(token)
            if not piece or not text.startswith(piece):
                break
            text, own.end = text[len(piece) :], own.end + len(piece)
            own.ids.append(token)
            own.ends.append(own.end)
        own.unread = b""
        self._spell(own, text, may_drop=True)

    # ---- telling ---------------------------------------------------------------------------------------------------

    def tell(self, own: OwnText, drafted: Sequence[int]) -> list[int]:
        """Return tokens of the target that say what the draft's own tokens `drafted` would add to a row's text."""
        said: list[int] = []
        run = b""
        for token in drafted:
            piece = self.spaces.draft.piece(token)
            if piece is not None:
                run += piece
                continue
            said += self._told(own, said, run)
            run, mapped = b"", self.to_target[token] if token < len(self.to_target) else -1
            if mapped < 0:
                break
            said.append(mapped)
            if mapped in self.ends:
                break
        return said + self._told(own, said, run)

    def _told(self, own: OwnText, said: Sequence[int], run: bytes) -> list[int]:
        text = complete_part(run)[0].decode(errors="replace")
        return self.spaces.target.spell_after([*own.target_ids, *said], text)[1] if text else []

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _bytes_of(self, token: int) -> bytes:
        """Return what a token of the target adds to the text."""
        target = self.spaces.target
        piece = target.piece(token)
        if piece is not None:
            return piece
        mapped = self.to_draft[token] if token < len(self.to_draft) else -1
        if mapped >= 0:
            return _marked(mapped)
        # What a chat is made of tells a draft something as text, too; what starts, ends or fills texts does not.
        silent = token in self.ends or token in target.roles.values()
        return b"" if silent else target.specials.get(token, "").encode()

    def _own_bytes(self, token: int) -> bytes:
        piece = self.spaces.draft.piece(token)
        if piece is not None:
            return piece
        return _marked(token) if token < len(self.to_target) and self.to_target[token] >= 0 else b""

    def _note(self, own: OwnText, token: int) -> None:
        end = own.target_ends[-1] if own.target_ends else 0
        own.target_ends.append(end + len(self._bytes_of(token)))
        own.target_ids = [*own.target_ids[1 - LONGEST_CONTEXT :], token]

    def _can_say(self, run: bytes) -> bool:
        return self.spaces.draft.has_all_bytes or not complete_part(run)[1]

    def _spell(self, own: OwnText, text: bytes, *, starts: bool = False, may_drop: bool = False) -> None:
        """Append a text in the draft's tokens; the start of a character that they cannot say stays unread."""
        parts = SPECIAL.split(text)
        for position, part in enumerate(parts):
            if position % 2:
                token = int.from_bytes(part)
                self._append(own, [token] if token < len(self.to_target) else [], len(part) + 1)
                continue
            whole, rest = complete_part(part)
            if rest and position + 1 == len(parts) and not self.spaces.draft.has_all_bytes:
                own.unread = rest
            elif rest:
                whole, rest = part, b""
            if whole:
                self._spell_part(own, whole, starts=starts, may_drop=may_drop and position == 0)

    def _spell_part(self, own: OwnText, part: bytes, *, starts: bool, may_drop: bool) -> None:
        draft = self.spaces.draft
        try:
            text = part.decode()
        except UnicodeDecodeError:
            # Part of a character, whose other part came before or comes next.
            self._append(own, draft.spell_bytes(part), len(part))
            return
        if starts:
            # The space that a tokenizer puts before a text is none of the text's.
            text = text[1:] if self.spaces.target.adds_space and text.startswith(" ") else text
            self._append(own, draft.encode(text) if text else [], len(part))
            return
        may_drop = may_drop and len(own.ids) > own.num_prompt_ids and draft.piece(own.ids[-1]) is not None
        num_dropped, ids = draft.spell_after(own.ids[-LONGEST_CONTEXT:], text, may_drop=may_drop)
        if num_dropped:
            own.ids.pop()
            own.ends.pop()
        self._append(own, ids, len(part))

    def _append(self, own: OwnText, ids: Sequence[int], size: int) -> None:
        """Append tokens that say the next `size` bytes, which some tokenizers change a little before splitting."""
        start, own.end = own.ends[-1] if own.ends else own.end, own.end + size
        for token in ids:
            start = min(start + len(self.spaces.draft.piece(token) or b""), own.end)
            own.ids.append(token)
            own.ends.append(start)
        if ids:
            own.ends[-1] = own.end


def chosen_space(
    spaces: TokenSpaces, asked: str, input_ids: Tensor, attention_mask: Tensor | None, *, do_sample: bool
) -> str:
    """Return how a draft with another tokenizer proposes, "shared" or "text".

    With sampling the draft's law of the shared tokens is worth far more than its one most likely text. Without, both
    propose much the same, except where the draft's tokens are longer than the target's: read one by one, the target's
    tokens are then spelled as the draft never saw it, and its own spelling does better. (README, "Another tokenizer".)

    Args:
        spaces: The two tokenizers compared.
        asked: "auto", "shared" or "text".
        input_ids: The target's prompt, `[B, W]`.
        attention_mask: Its mask, `[B, >= W]`, None when nothing is padded.
        do_sample: Whether tokens are drawn.
    """
    if asked != "auto":
        return asked
    if not (spaces.can_share and spaces.can_tell):
        return "shared" if spaces.can_share else "text"
    if do_sample:
        return "shared"
    seen = input_ids if attention_mask is None else input_ids[attention_mask[:, -input_ids.shape[1] :].bool()]
    tokens: list[int] = seen.flatten()[-LONGEST_SAMPLE:].tolist()  # sync: once per call, before any work.
    own = Translator(spaces).begin(0, tokens)
    return "text" if len(own.ids) < FEWER * len(tokens) else "shared"


def _marked(token: int) -> bytes:
    return b"\xff" + token.to_bytes(4)
