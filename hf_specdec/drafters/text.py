"""Draft in the draft's own tokens and split the text anew in the target's: string-level exact match.

Source: arXiv:2502.05202, algorithm 3. The draft takes its most likely tokens, so the proposal depends on the committed
text alone and not on what the target draws: each token of it counts as proposed with probability 1, and acceptance
stays exact, with sampling too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_specdec.drafters.other_tokenizer import OtherTokenizerDrafter
from hf_specdec.drafters.translation import OwnText
from hf_specdec.engine.processors import ProcessorPlan
from hf_specdec.engine.state import Proposal, Shadow

Tensor = torch.Tensor
# Fills up rows whose text splits into fewer tokens than others'; it may be accepted like any other.
FILLING = 0


class TextDrafter(OtherTokenizerDrafter):
    """Writes as many of the draft's tokens as K of the target's are long."""

    # A step of the draft's is no token of the target's.
    asks_midway = False

    def __init__(self, *args: Any, plan: ProcessorPlan, **kwargs: Any) -> None:
        """Prepare to draft; see `OtherTokenizerDrafter`.

        The target's processors say nothing about the draft's tokens, so none of them runs.
        """
        super().__init__(*args, plan=ProcessorPlan([], plan.num_rows), **{**kwargs, "do_sample": False})
        self._drafted: list[list[int]] = []

    def limit(self) -> int | None:
        """Return for how many tokens of the target the draft's own context has room."""
        room = super().limit()
        return room if room is None or self._error is not None else int(room / self._steps_per_token())

    def propose(self, num_draft_tokens: int, goes_on: Callable[[Tensor], bool] | None = None) -> Proposal:
        """Propose up to `num_draft_tokens` tokens of the target; `goes_on` is not asked."""
        self._take_in()
        self._raise_error()
        num_steps = max(1, math.ceil(num_draft_tokens * self._steps_per_token()))
        drafted = super().propose(num_steps)
        # sync: text is split on the host, once per round.
        self._drafted = drafted.token_ids.tolist()
        told = [
            [token for token in self.translator.tell(text, ids) if token < self.vocab_size][:num_draft_tokens]
            for text, ids in zip(self._texts, self._drafted, strict=True)
        ]
        width = max(1, *map(len, told))
        filled = [[*tokens, *[FILLING] * (width - len(tokens))] for tokens in told]
        return Proposal(
            token_ids=torch.tensor(filled, device=self.sequences.device), probs=None, is_broken=drafted.is_broken
        )

    def shadow(self, num_tokens: int) -> Shadow:
        """Judge the last tokens by whether the draft would have written the same text, `[B, num_tokens]`."""
        num_own = self._own_window(num_tokens)
        texts = self._texts
        firsts = [text.num_read - num_tokens for text in texts]
        logits = self._logits_before_last(num_own).to(self.sequences.device, torch.float32)
        confidences, best = logits.softmax(dim=-1).max(dim=-1)  # [B, own]
        own = self.own
        is_other = (best != own.read(own.span(-num_own, num_own), num_own)).long()
        # `[B, own + 1]`: how many of the draft's tokens would have been others, up to each.
        num_other = torch.nn.functional.pad(is_other.cumsum(dim=1), (1, 0))
        covers = [
            [
                [index - len(text.ids) + num_own for index in text.ids_over(first + number)]
                for number in range(num_tokens)
            ]
            for text, first in zip(texts, firsts, strict=True)
        ]
        starts, ends = torch.tensor(covers, device=own.device).clamp_(min=0).unbind(dim=-1)
        agrees = (ends > starts) & (num_other.gather(1, ends) == num_other.gather(1, starts))
        sureness = confidences.gather(1, starts.clamp(max=num_own - 1))
        # NaN stays NaN, or a broken draft would pass for a bad one.
        return Shadow(probs=agrees.float() + 0 * sureness, confidences=sureness)

    def _read_new(self, position: int, text: OwnText, tokens: Sequence[int]) -> None:
        drafted = self._drafted[position] if self._drafted else []
        self.translator.reread(text, tokens, drafted)

    def _advance(self) -> None:
        super()._advance()
        self._drafted = []

    def _fed(self, position: int, num_kept: int) -> list[int]:
        return self._drafted[position][:-1]

    def _scored(self, logits: Tensor, step: int) -> Tensor:
        return logits[:, 0].to(device=self.sequences.device, dtype=torch.float32)

    def _steps_per_token(self) -> float:
        """Return how many of the draft's tokens one of the target's takes in the text so far."""
        num_target_tokens = sum(text.num_prompt_tokens + text.num_read for text in self._texts)
        return sum(len(text.ids) for text in self._texts) / max(1, num_target_tokens)
