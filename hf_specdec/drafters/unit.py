"""All steps of a draft as one function of tensors, to be captured as one: nothing of it is decided on the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from hf_specdec.engine.acceptance import drawn_with
from hf_specdec.engine.processors import POINTWISE, ProcessorPlan
from hf_specdec.engine.runners import Function, Tensors
from hf_specdec.engine.static import StepForward

Tensor = torch.Tensor
# What the first forward reads: rows that lack fewer tokens read known ones again.
FIRST_COUNTS = (2, 8)


def unit_key(plan: ProcessorPlan, num_draft_tokens: int, *, do_sample: bool, vocab_size: int) -> Hashable | None:
    """Return what a unit depends on beside shapes, None where a processor needs more than scores and numbers."""
    settings = []
    for processor in plan.processors:
        values = tuple(sorted(vars(processor).items()))
        if type(processor) not in POINTWISE or not all(isinstance(value, int | float) for _, value in values):
            return None
        settings.append((type(processor), values))
    return num_draft_tokens, do_sample, vocab_size, tuple(settings)


def first_count(num_missing: int, shortest: int) -> int | None:
    """Return how many tokens the first forward reads, None where a unit does not suit.

    Args:
        num_missing: The most tokens that any row lacks.
        shortest: Tokens of the shortest row.
    """
    return next((count for count in FIRST_COUNTS if num_missing <= count <= shortest), None)


def draft_steps(
    plan: ProcessorPlan, num_draft_tokens: int, fitted: Callable[[Tensor], Tensor], *, do_sample: bool
) -> Callable[[StepForward], Function]:
    """Return what makes the unit of a forward.

    Args:
        plan: Pointwise processors only.
        num_draft_tokens: K.
        fitted: Float32 logits over the target's vocabulary of the draft's `[B, 1, V]`.
        do_sample: Whether tokens are drawn.

    Returns:
        A maker of functions that return token ids `[B, K]`, their laws `[B, K, V]` (without sampling `[B, K, 0]`), and
        where the draft gave NaN, `[B]`.
    """

    def build(forward: StepForward) -> Function:
        def run(model: Any, tokens: Tensor, starts: Tensor, keys: Tensor) -> Tensors:
            chosen: list[Tensor] = []
            laws: list[Tensor] = []
            broken: list[Tensor] = []
            noise: list[Tensor] = []
            for step in range(num_draft_tokens):
                scores = plan.run_alike(fitted(forward(model, tokens, starts, keys, 1)))[:, 0]
                if do_sample:
                    if not noise:
                        # Drawn together, as step by step: a seed gives the same text either way.
                        shape = (num_draft_tokens, *scores.shape)
                        noise = list(torch.empty(shape, device=scores.device).exponential_().unbind())
                    laws.append(scores.softmax(dim=-1))
                    token = drawn_with(laws[-1], noise[step])
                    broken.append(laws[-1][:, 0].isnan())
                else:
                    best, token = scores.max(dim=-1)
                    laws.append(scores[:, :0])
                    broken.append(~best.isfinite())
                chosen.append(token)
                starts, tokens = starts + tokens.shape[1], token[:, None]
            return torch.stack(chosen, dim=1), torch.stack(laws, dim=1), torch.stack(broken, dim=1).any(dim=1)

        return run

    return build
