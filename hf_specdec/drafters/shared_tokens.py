"""Draft in the tokens that both tokenizers have: token-level intersection, arXiv:2502.05202, algorithm 4.

The draft's law over the target's vocabulary is its own, restricted to the common tokens and normalised anew. That is a
law like any other, so the rules of acceptance stay exact as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec.drafters.other_tokenizer import OtherTokenizerDrafter
from hf_specdec.drafters.translation import OwnText

Tensor = torch.Tensor


class SharedTokensDrafter(OtherTokenizerDrafter):
    """Chooses tokens of the target's, with its processors, by the draft's logits of the same tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Prepare to draft; see `OtherTokenizerDrafter`."""
        super().__init__(*args, **kwargs)
        spaces, device = self.translator.spaces, self.sequences.device
        num_more = self.vocab_size - len(spaces.target_to_draft)
        pad = torch.nn.functional.pad
        # `[V]`: which of the draft's logits belongs to a token of the target's, and which tokens may be proposed.
        self._source = pad(spaces.target_to_draft.clamp(min=0), (0, num_more)).to(device)
        self._is_missing = ~pad(spaces.proposable, (0, num_more)).to(device)

    def _read_new(self, position: int, text: OwnText, tokens: Sequence[int]) -> None:
        self.translator.read(text, tokens)

    def _fed(self, position: int, num_kept: int) -> list[int]:
        text = self._texts[position]
        kept = self.sequences.new_tokens[text.row][text.num_read :][: min(num_kept, self._num_proposed - 1)]
        return [self.translator.to_draft[token] for token in kept]

    def _as_read(self, token_ids: Tensor) -> Tensor:
        return self._source[token_ids]

    def _fitted(self, logits: Tensor) -> Tensor:
        """Return float32 logits `[B, T, V]` over the target's vocabulary, on its device."""
        logits = logits.to(device=self.sequences.device, dtype=torch.float32)
        fitted = logits[..., self._source].masked_fill_(self._is_missing, -torch.inf)
        # Without common tokens a draft is as good as broken only where it is broken in all the others, too.
        is_broken = ~logits.amax(dim=-1, keepdim=True).isfinite()
        return fitted.masked_fill_(is_broken, torch.nan)

    def _processed(self, logits: Tensor, offset: int) -> Tensor:
        scores = super()._processed(logits, offset)
        # Where processors leave no common token, token 0 is proposed for sure: a valid law, which costs only time.
        is_empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
        first = torch.arange(scores.shape[-1], device=scores.device) == 0
        return scores.masked_fill(is_empty & first, 0.0)

    def _logits_before_last(self, num_tokens: int) -> Tensor:
        """Return the draft's logits that each of the target's last tokens followed from, `[B, num_tokens, draft's V]`.

        What the draft has no token for has no logits either: it counts as not proposed.
        """
        num_own = self._own_window(num_tokens)
        firsts = [
            [text.num_ids_before(text.num_read - num_tokens + index) - len(text.ids) for index in range(num_tokens)]
            for text in self._texts
        ]
        logits = super()._logits_before_last(num_own)
        columns = torch.tensor(firsts, device=logits.device).clamp(min=-num_own, max=-1) + num_own
        return logits.gather(1, columns[..., None].expand(-1, -1, logits.shape[-1]))
