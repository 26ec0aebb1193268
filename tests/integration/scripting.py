"""Drafts that are right and wrong where a test wants them to be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.engine.state import Proposal

Tensor = torch.Tensor
# Round and row -> how many tokens are right before a wrong one.
Script = Callable[[int, int], int]


def propose_by_script(monkeypatch: pytest.MonkeyPatch, text: Tensor, num_right: Script) -> None:
    """Let every draft propose the tokens of `text` `[B, L]`, with one wrong token where the script has it.

    The draft's own model does nothing but read the prompt. What follows the wrong token is right again, so a round
    accepts precisely as many tokens as the script says.
    """
    text, rounds = _lengthened(text), itertools.count()

    def propose(self: ModelDrafter, num_draft_tokens: int, _goes_on: Any = None) -> Proposal:
        number, lengths = next(rounds), self.sequences.lengths
        self._proposed_at, self._num_proposed = lengths, num_draft_tokens
        token_ids = torch.stack(
            [text[row, at : at + num_draft_tokens] for row, at in zip(self.sequences.rows, lengths, strict=True)]
        )
        for position, row in enumerate(self.sequences.rows):
            place = num_right(number, row)
            if place < num_draft_tokens:
                token_ids[position, place] = another(token_ids[position, place])
        return Proposal(token_ids=token_ids)

    monkeypatch.setattr(ModelDrafter, "propose", propose)


def spoil_by_script(monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int], bool]) -> list[int]:
    """Let drafts take another token than their best in the draft steps (counted over all rounds) that are wrong.

    Returns:
        A list that gets the number of each step that was wrong.
    """
    choose: Any = ModelDrafter._choose
    steps = itertools.count()
    wrong: list[int] = []

    def choose_otherwise(self: ModelDrafter, *given: Any) -> tuple[Tensor, Tensor | None]:
        token, best = choose(self, *given)
        if is_wrong(step := next(steps)):
            wrong.append(step)
            token = another(token)
        return token, best

    monkeypatch.setattr(ModelDrafter, "_choose", choose_otherwise)
    return wrong


def another(token: Tensor) -> Tensor:
    """Return other tokens, none of them padding or the end of a text in the tests' models."""
    return (token - 3 + 1) % 60 + 3


def in_turn(places: Sequence[int]) -> Script:
    """Return a script that goes through `places` round by round, one further for every row."""
    return lambda number, row: places[(number + row) % len(places)]


def steer_by_script(
    monkeypatch: pytest.MonkeyPatch, text: Tensor, num_right: Script, *, reads_tokens_only: bool = True
) -> list[float]:
    """Let drafts run as always, but take the tokens that `propose_by_script` would.

    Returns:
        A list that gets, for every draft step and row, how far the draft's logits are from those of a forward over the
        whole row, relative to the largest; only for drafts that read nothing but tokens.
    """
    propose: Any = ModelDrafter.propose
    choose: Any = ModelDrafter._choose
    text, rounds = _lengthened(text), itertools.count()
    taken: list[Tensor] = []
    number = 0
    distances: list[float] = []

    def propose_anew(self: ModelDrafter, num_draft_tokens: int, goes_on: Any = None) -> Proposal:
        nonlocal number
        number = next(rounds)
        taken.clear()
        return propose(self, num_draft_tokens, goes_on)

    def choose_by_script(self: ModelDrafter, scores: Tensor, *given: Any) -> tuple[Tensor, Tensor | None]:
        _, best = choose(self, scores, *given)
        tokens = []
        for position, (row, length) in enumerate(zip(self.sequences.rows, self.sequences.lengths, strict=True)):
            if reads_tokens_only:
                so_far = torch.stack([step[position] for step in taken]) if taken else text[row, :0]
                ids = torch.cat([text[row, :length], so_far])
                wanted = _logits_after(self, position, ids)
                distances.append(float((scores[position] - wanted).abs().max() / wanted.abs().max()))
            token = text[row, length + len(taken)]
            tokens.append(another(token) if num_right(number, row) == len(taken) else token)
        taken.append(torch.stack(tokens))
        return taken[-1], best

    monkeypatch.setattr(ModelDrafter, "propose", propose_anew)
    monkeypatch.setattr(ModelDrafter, "_choose", choose_by_script)
    return distances


def _lengthened(text: Tensor) -> Tensor:
    """Go on with any tokens: a row that is ahead may be drafted for beyond its end."""
    return torch.nn.functional.pad(text, (0, 16), value=3)


def _logits_after(drafter: ModelDrafter, position: int, ids: Tensor) -> Tensor:
    """Return what the draft says after a whole row, its padding left out."""
    if drafter.attention_mask is not None:
        ids = ids[int((drafter.attention_mask[position] == 0).sum()) :]
    with torch.no_grad():
        return drafter.model(ids[None], use_cache=False).logits[0, -1, : drafter.vocab_size]
