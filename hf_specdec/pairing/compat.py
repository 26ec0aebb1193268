"""Do target and draft share a token space? Compare two tokenizers by what their tokens produce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from hf_specdec.errors import IncompatibleDraftError
from hf_specdec.pairing.spelling import TokenSpace, token_space_of

Tensor = torch.Tensor
# With fewer of their tokens in common two vocabularies agree by accident.
SMALLEST_SHARED_PART = 0.01
# A draft that cannot write so much of the target's vocabulary cannot tell its text either.
SMALLEST_SPELLABLE_PART = 0.5
NOTHING = -1


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, for what is derived once
class TokenSpaces:
    """Two tokenizers compared.

    Attributes:
        kind: "same" where no id means two things and no token has two ids; then ids need no translation. Otherwise
            "shared": some tokens produce the same, under other ids.
        target: The target's tokens.
        draft: The draft's tokens.
        target_to_draft: `[target ids]`, int64, the draft's id for each of the target's, -1 for none. Several ids of the
            target may lead to one.
        draft_to_target: `[draft ids]`, int64, the other way round.
        differs_in_specials_only: Whether it would be "same" but for special tokens under other ids.
        num_shared: Different strings that are a single token in both, special tokens apart.
        num_texts: Different strings of whole characters that a single token of the target's produces.
        num_spellable: How many of these the draft can write in tokens of its own.
    """

    kind: Literal["same", "shared"]
    target: TokenSpace
    draft: TokenSpace
    target_to_draft: Tensor
    draft_to_target: Tensor
    differs_in_specials_only: bool
    num_shared: int
    num_texts: int
    num_spellable: int

    @property
    def can_share(self) -> bool:
        """Whether enough tokens are common to both to draft in these alone."""
        return self.num_shared > SMALLEST_SHARED_PART * min(self.target.num_pieces, self.draft.num_pieces)

    @property
    def can_tell(self) -> bool:
        """Whether the draft can read and write the target's text in tokens of its own."""
        return self.num_spellable >= SMALLEST_SPELLABLE_PART * self.num_texts > 0

    @cached_property
    def ids_of_draft(self) -> list[int]:
        """The same as `target_to_draft`, for the host."""
        return self.target_to_draft.tolist()

    @cached_property
    def ids_of_target(self) -> list[int]:
        """The same as `draft_to_target`, for the host."""
        return self.draft_to_target.tolist()

    @cached_property
    def proposable(self) -> Tensor:
        """Whether a draft may propose a token of the target: `[target ids]` bool.

        Of several ids of the target for one of the draft's only one is, or its probability would count twice.
        """
        back = self.draft_to_target[self.target_to_draft.clamp(min=0)]
        return (self.target_to_draft >= 0) & (back == torch.arange(len(back)))

    def refuse_strangers(self, token_space: str) -> None:
        """Refuse a draft that can reach the target's text in no way, or not in the one asked for.

        Args:
            token_space: "auto", "shared" or "text".

        Raises:
            IncompatibleDraftError: With the overlap in numbers.
        """
        ways = {"shared": self.can_share, "text": self.can_tell}
        if self.kind == "same" or ways.get(token_space, any(ways.values())):
            return
        asked = "" if token_space == "auto" else f" for `token_space={token_space!r}`"
        remedy = next((f"Pass `token_space={way!r}`" for way, works in ways.items() if works), None)
        raise IncompatibleDraftError(
            f"A draft with another tokenizer must have tokens or characters in common with the target{asked}, but of "
            f"the target's {self.target.num_pieces} and the draft's {self.draft.num_pieces} tokens {self.num_shared} "
            f"are the same, and the draft can write {self.num_spellable} of the target's {self.num_texts} texts. "
            + (remedy or "Choose a draft of the target's family")
            + "."
        )


def compare(
    target_tokenizer: Any,
    draft_tokenizer: Any,
    *,
    target_size: int | None = None,
    draft_size: int | None = None,
    target_eos_ids: Sequence[int] = (),
    draft_eos_ids: Sequence[int] = (),
) -> TokenSpaces:
    """Compare two tokenizers by what their tokens produce, special tokens apart.

    Special tokens of the same content belong together; the others by role: the draft's end of text to the target's,
    its first token to the target's, its padding likewise.

    Args:
        target_tokenizer: The target's.
        draft_tokenizer: The draft's.
        target_size: Ids that the target has logits for; None means as many as its tokenizer has.
        draft_size: The same of the draft.
        target_eos_ids: Tokens that end the target's texts beside its tokenizer's own, the most important first.
        draft_eos_ids: The same of the draft.
    """
    target, draft = token_space_of(target_tokenizer, target_size), token_space_of(draft_tokenizer, draft_size)
    to_draft = _by_piece(target, draft)
    to_target = _by_piece(draft, target)
    num_shared = len(target.ids.keys() & draft.ids.keys())
    pairs = [*_specials_by_content(target, draft), *_specials_by_role(target, draft, target_eos_ids, draft_eos_ids)]
    for target_id, draft_id in pairs:
        if to_draft[target_id] == NOTHING:
            to_draft[target_id] = draft_id
        if to_target[draft_id] == NOTHING:
            to_target[draft_id] = target_id
    texts = _texts_of(target)
    has_same_pieces = num_shared > 0 and _have_same_ids(target, draft)
    is_same = has_same_pieces and all(one == other for one, other in pairs)
    return TokenSpaces(
        kind="same" if is_same else "shared",
        target=target,
        draft=draft,
        target_to_draft=torch.tensor(to_draft, dtype=torch.long),
        draft_to_target=torch.tensor(to_target, dtype=torch.long),
        differs_in_specials_only=has_same_pieces and not is_same,
        num_shared=num_shared,
        num_texts=len(texts),
        num_spellable=_num_spellable(texts, draft),
    )


def _by_piece(source: TokenSpace, goal: TokenSpace) -> list[int]:
    return [NOTHING if piece is None else goal.ids.get(piece, NOTHING) for piece in source.pieces]


def _have_same_ids(target: TokenSpace, draft: TokenSpace) -> bool:
    """Return whether every id means one thing and every common piece has one id."""
    pairs = zip(target.pieces, draft.pieces, strict=False)
    means_one = all(one == other for one, other in pairs if one is not None and other is not None)
    return means_one and all(target.ids[piece] == draft.ids[piece] for piece in target.ids.keys() & draft.ids.keys())


def _specials_by_content(target: TokenSpace, draft: TokenSpace) -> Iterator[tuple[int, int]]:
    ids = {content: token_id for token_id, content in draft.specials.items()}
    for token_id, content in target.specials.items():
        if content in ids:
            yield token_id, ids[content]


def _specials_by_role(
    target: TokenSpace, draft: TokenSpace, target_eos_ids: Sequence[int], draft_eos_ids: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of special tokens without a namesake on the other side that do the same there."""
    contents = set(target.specials.values()) & set(draft.specials.values())

    def lonely(space: TokenSpace, token_ids: Sequence[int | None]) -> list[int]:
        known = [i for i in token_ids if i is not None and 0 <= i < len(space.pieces) and space.pieces[i] is None]
        return [i for i in dict.fromkeys(known) if space.specials.get(i) not in contents]

    ends = [
        [i for i in dict.fromkeys((space.roles.get("eos"), *ids)) if i is not None and 0 <= i < len(space.pieces)]
        for space, ids in ((target, target_eos_ids), (draft, draft_eos_ids))
    ]
    if all(ends):
        yield from ((one, ends[1][0]) for one in lonely(target, ends[0]))
        yield from ((ends[0][0], other) for other in lonely(draft, ends[1]))
    for role in ("bos", "pad"):
        one, other = lonely(target, [target.roles.get(role)]), lonely(draft, [draft.roles.get(role)])
        # A token that also ends texts says more by that.
        if one and other and one[0] not in ends[0] and other[0] not in ends[1]:
            yield one[0], other[0]


def _texts_of(space: TokenSpace) -> list[str]:
    """Return what tokens produce by themselves, parts of characters and control characters left out."""
    texts = []
    for piece in space.ids:
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue
        if len(text) != 1 or text.isprintable() or text.isspace():
            texts.append(text)
    return texts


def _num_spellable(texts: Sequence[str], draft: TokenSpace) -> int:
    if draft.has_all_bytes:
        return len(texts)
    own = _texts_of(draft)
    letters = {text for text in own if len(text) == 1}
    # Where a space is part of words only, the tokenizer writes it all the same.
    letters |= {" "} if any(text.startswith(" ") for text in own) else set()
    return sum(letters.issuperset(text) for text in texts)
