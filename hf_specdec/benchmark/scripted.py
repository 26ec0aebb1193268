"""Logits by a script: a model does all its work, and then says what was decided beforehand.

The law of the next token depends on the last token alone, so that every way of running the model gives the same: with a
cache or without, in batches, in rows of unequal length. All ordinary tokens form one cycle in random order, and a token
is followed by one of the next few of that cycle. A draft that agrees with its target after a token has the very same
law there; one that disagrees has a law on other tokens. So whatever temperature or truncation does to both, a draft
token is accepted for certain or not at all, and the share of the tokens after which the draft agrees is the acceptance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hf_specdec.errors import UnsupportedGenerationError

Tensor = torch.Tensor
# Of the possible next tokens, from the likeliest; exact in every dtype. At temperature 1 their probabilities are
# 0.71, 0.16, 0.10 and 0.04.
HEIGHTS = (8.0, 6.5, 6.0, 5.0)
NUM_FOLLOWERS = len(HEIGHTS)
# Probability 0 after a softmax, at any temperature below 100. Finite: rules that forbid all of the likely tokens must
# leave something to choose.
ORDINARY_FLOOR = -10_000.0
# Never chosen, since so many ordinary tokens come first.
SPECIAL_FLOOR = -20_000.0
# The share is met in every so many tokens of the cycle, and thus in short texts, too.
TOKENS_PER_PORTION = 100
FEWEST_TOKENS = 4 * NUM_FOLLOWERS
NAME = "scripted_law"


class ScriptedLaw(nn.Module):
    """What follows each token, for one model of a pair.

    Its tables are buffers that follow the model to other devices and are not saved with it.

    Attributes:
        followers: `[V, NUM_FOLLOWERS]` int64, the possible next tokens after each token.
        floor: `[V]`, the logits of a token that nothing makes likely.
        heights: `[NUM_FOLLOWERS]`, the logits of the possible next tokens.
    """

    followers: Tensor
    floor: Tensor
    heights: Tensor

    def __init__(self, followers: Tensor, floor: Tensor) -> None:
        super().__init__()
        self.register_buffer("followers", followers, persistent=False)
        self.register_buffer("floor", floor, persistent=False)
        self.register_buffer("heights", floor.new_tensor(HEIGHTS), persistent=False)

    def write(self, logits: Tensor, last_token_ids: Tensor) -> None:
        """Overwrite logits in place.

        Three kernels, no sync, no shape that depends on data.

        Args:
            logits: `[B, T, V]`.
            last_token_ids: `[B, T]`, the token each of them comes after.
        """
        likely = self.followers[last_token_ids.to(logits.device)]  # [B, T, NUM_FOLLOWERS]
        logits.copy_(self.floor)
        logits.scatter_(-1, likely, self.heights.to(logits.dtype).expand(likely.shape))


def scripted_laws(
    cycle: Tensor, vocab_sizes: tuple[int, int], acceptance: float, generator: torch.Generator
) -> tuple[ScriptedLaw, ScriptedLaw]:
    """Return the laws of target and draft.

    Args:
        cycle: `[N]` int64, all ordinary tokens, in the order in which they follow each other; both models know them.
        vocab_sizes: Rows of the target's and the draft's logits.
        acceptance: The share of the tokens after which the draft agrees; met to within `0.5 / N`.
        generator: Decides after which of them.
    """
    count = len(cycle)
    agrees = _agreement(count, acceptance, generator)
    laws = []
    for vocab_size, is_draft in zip(vocab_sizes, (False, True), strict=True):
        # Tokens outside the cycle, which a prompt may hold, lead into it anywhere.
        ranks = torch.arange(vocab_size) % count
        ranks[cycle] = torch.arange(count)
        steps = torch.arange(1, NUM_FOLLOWERS + 1).expand(vocab_size, -1)
        if is_draft:
            steps = steps + NUM_FOLLOWERS * (~agrees[ranks]).long()[:, None]
        floor = torch.full((vocab_size,), SPECIAL_FLOOR)
        floor[cycle] = ORDINARY_FLOOR
        laws.append(ScriptedLaw(cycle[(ranks[:, None] + steps) % count], floor))
    return laws[0], laws[1]


def _agreement(count: int, acceptance: float, generator: torch.Generator) -> Tensor:
    """Return `[count]` bool, the share of True right in every portion of the cycle and at random within."""
    agrees = torch.zeros(count, dtype=torch.bool)
    for start in range(0, count, TOKENS_PER_PORTION):
        end = min(start + TOKENS_PER_PORTION, count)
        num_true = math.floor(acceptance * end + 0.5) - math.floor(acceptance * start + 0.5)
        agrees[start + torch.randperm(end - start, generator=generator)[:num_true]] = True
    return agrees


def script(model: Any, law: ScriptedLaw) -> None:
    """Let a causal LM's forward end with the law's logits.

    The law becomes a part of the model and a hook of the model writes it: both go along with copies of the model and
    with a change of its class.
    """
    model.add_module(NAME, law)
    model.register_forward_hook(_overwrite, with_kwargs=True)


def _overwrite(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    token_ids = kwargs.get("input_ids", args[0] if args else None)
    if token_ids is None:
        raise UnsupportedGenerationError(
            "A model whose logits follow a script must be given `input_ids`, but got embeddings alone. Pass tokens."
        )
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    kept = kwargs.get("logits_to_keep", 0)
    last = token_ids[:, kept] if isinstance(kept, Tensor) else token_ids[:, token_ids.shape[1] - logits.shape[1] :]
    law: ScriptedLaw = getattr(model, NAME)
    law.write(logits, last)
