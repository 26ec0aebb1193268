"""What the tokens of one tokenizer produce, as bytes, and how text is written in them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
METASPACE = "▁"
# Text is spelled together with so many tokens before it, so that both sides of the seam fit.
LONGEST_CONTEXT = 8
# Stands before a text that has no such context; tokenizers do not merge a line's end with what follows.
ANCHOR = "\n"
# Where a tokenizer does not say how its tokens are read, this share of a sign in its vocabulary says it.
TELLING_SHARE = 0.01


def _byte_of_sign() -> dict[int, int]:
    """Return the byte behind each sign of byte-level vocabularies, which show every byte as something printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + number: byte for number, byte in enumerate(others)}


BYTE_OF_SIGN = _byte_of_sign()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSpace:
    """One tokenizer's tokens by what they produce.

    Attributes:
        tokenizer: The tokenizer.
        pieces: For each id the bytes it adds to a text; None for special tokens and ids without a token.
        specials: The content of each special token, by id.
        ids: The id of each piece; where several produce the same, the one that text is usually written in.
        adds_space: Whether it puts a space before a text.
        first_ids: Special tokens that it puts before a text.
        roles: Ids of "bos", "eos", "pad" and "unk", as far as there are such tokens.
        has_all_bytes: Whether there is a token for each byte of UTF-8, so that any text can be written.
    """

    tokenizer: Any
    pieces: tuple[bytes | None, ...]
    specials: Mapping[int, str]
    ids: Mapping[bytes, int]
    adds_space: bool
    first_ids: tuple[int, ...]
    roles: Mapping[str, int]
    has_all_bytes: bool

    @property
    def num_pieces(self) -> int:
        """Different strings of bytes that a single token produces."""
        return len(self.ids)

    def piece(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, None for special ones and ids that are none."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as the tokenizer splits it, without special tokens around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return [token_id for token_id in ids if token_id < len(self.pieces)]

    def spell_after(self, before: Sequence[int], text: str, *, may_drop: bool = False) -> tuple[int, list[int]]:
        """Return the ids that continue `before` with a text.

        Args:
            before: The ids it follows; only the last few matter.
            text: What is to be added.
            may_drop: Whether the last id of `before` may be replaced, where both together are one token.

        Returns:
            How many ids at the end of `before` are replaced, 0 or 1, and the new ids.
        """
        for start in self._starts_of_context(before):
            kept = list(before[start:])
            context = b"".join(self.pieces[token_id] or b"" for token_id in kept).decode(errors="replace")
            ids = self.encode((context + text)[1 if self.adds_space else 0 :])
            if ids[: len(kept)] == kept:
                return 0, ids[len(kept) :]
            if may_drop and ids[: len(kept) - 1] == kept[:-1] and len(ids) >= len(kept):
                return 1, ids[len(kept) - 1 :]
        anchor, ids = self.encode(ANCHOR), self.encode(ANCHOR + text)
        if anchor and ids[: len(anchor)] == anchor:
            return 0, ids[len(anchor) :]
        return 0, self.spell_bytes(text.encode())

    def spell_bytes(self, piece: bytes) -> list[int]:
        """Return ids that produce exactly these bytes, the longest first; bytes without a token are left out."""
        ids, start = [], 0
        while start < len(piece):
            for end in range(len(piece), start, -1):
                if (token_id := self.ids.get(piece[start:end])) is not None:
                    ids.append(token_id)
                    break
            start = end
        return ids

    def _starts_of_context(self, before: Sequence[int]) -> Iterator[int]:
        """Yield, farthest first, at most two places of `before` from where it reads like the start of a text."""
        starts = []
        for start in range(len(before) - 1, max(-1, len(before) - 1 - LONGEST_CONTEXT), -1):
            piece = self.piece(before[start])
            if piece is None:
                break
            # A text that begins inside of a character is none; a tokenizer's own space must stand for a real one.
            if piece and piece[0] & 0xC0 != 0x80 and (not self.adds_space or piece[:1] == b" "):
                starts.append(start)
        yield from sorted({starts[-1], starts[0]} if starts else ())


def token_space_of(tokenizer: Any, size: int | None = None) -> TokenSpace:
    """Return what a tokenizer's tokens produce.

    Args:
        tokenizer: A transformers tokenizer, fast or slow.
        size: Ids from here on are left out, for the model has no logits for them.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    size = size if size is not None else max(vocabulary.values(), default=-1) + 1
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
    alphabet = _alphabet_of(tokenizer, vocabulary)
    pieces: list[bytes | None] = [None] * size
    ids: dict[bytes, int] = {}
    specials, spare = {}, []
    for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
        if token_id >= size:
            continue
        if token_id in special_ids:
            specials[token_id] = token
            continue
        is_byte = "fallback" in alphabet and BYTE_TOKEN.fullmatch(token) is not None
        piece = token.encode() if token_id in added else _piece(token, alphabet)
        pieces[token_id] = piece
        if is_byte:
            spare.append((piece, token_id))
        else:
            ids.setdefault(piece, token_id)
    for piece, token_id in spare:
        ids.setdefault(piece, token_id)
    found = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    trial: list[int] = tokenizer.encode("a", add_special_tokens=False)
    whole: list[int] = tokenizer.encode("a")
    num_first = next((n for n, token_id in enumerate(whole) if token_id not in special_ids), 0)
    return TokenSpace(
        tokenizer=tokenizer,
        pieces=tuple(pieces),
        specials=specials,
        ids=ids,
        adds_space=bool(trial) and trial[0] < size and (pieces[trial[0]] or b"")[:1] == b" ",
        first_ids=tuple(token_id for token_id in whole[:num_first] if token_id < size),
        roles={name: token_id for name, token_id in found.items() if token_id is not None and token_id < size},
        has_all_bytes=all(bytes([byte]) in ids for byte in range(0xF5) if byte not in (0xC0, 0xC1)),
    )


def complete_part(piece: bytes) -> tuple[bytes, bytes]:
    """Split bytes before a character that is still incomplete at their end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(piece)
    rest = decoder.getstate()[0]
    return piece[: len(piece) - len(rest)], rest


def _piece(token: str, alphabet: frozenset[str]) -> bytes:
    if "fallback" in alphabet and (match := BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    if "bytes" in alphabet:
        try:
            return token.translate(BYTE_OF_SIGN).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()
    if "metaspace" in alphabet:
        return token.replace(METASPACE, " ").encode()
    if "words" in alphabet:
        return token[2:].encode() if token.startswith("##") else f" {token}".encode()
    return token.encode()


def _alphabet_of(tokenizer: Any, vocabulary: Mapping[str, int]) -> frozenset[str]:
    """Return how tokens are written: "bytes", "metaspace" or "words" (none is plain text), and maybe "fallback"."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is not None:
        parts = list(_parts_of(json.loads(decoder.__getstate__())))
        kinds = {part["type"] for part in parts}
        signs = {
            "bytes": "ByteLevel" in kinds,
            "metaspace": "Metaspace" in kinds or any(METASPACE in json.dumps(p, ensure_ascii=False) for p in parts),
            "words": "WordPiece" in kinds,
            "fallback": "ByteFallback" in kinds,
        }
        return frozenset(name for name, is_there in signs.items() if is_there)
    least = TELLING_SHARE * len(vocabulary)
    signs = {
        "bytes": sum(token.startswith("Ġ") for token in vocabulary) > least,
        "metaspace": sum(token.startswith(METASPACE) for token in vocabulary) > least,
        "fallback": "<0x0A>" in vocabulary,
    }
    return frozenset(name for name, is_there in signs.items() if is_there)


def _parts_of(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a decoder's state, those of a sequence one by one."""
    yield state
    for part in state.get("decoders", ()):
        yield from _parts_of(part)
