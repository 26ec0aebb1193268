"""The hand-offs of one round, and the protocol of whoever proposes.

Shapes: B rows in the batch, K draft tokens, V vocabulary.

Invariant, after every commit: the target's cache holds every committed token of a row but the last; the draft's lacks
the last one, or the last two after full acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """K draft tokens per row.

    `token_ids` is `[B, K]`. `probs` `[B, K, V]` float32 is the law each token was drawn from, after processors; None
    says that the drafter is deterministic (each token had probability 1). `is_broken` `[B]` bool marks rows where the
    draft gave NaN; None where that cannot happen.
    """

    token_ids: Tensor
    probs: Tensor | None = None
    is_broken: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What the target says of K+1 positions: `logits` and processed `scores`, both `[B, K+1, V]` float32."""

    logits: Tensor
    scores: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """`num_accepted` `[B]` draft tokens stay, then comes `next_token_ids` `[B]` (correction or bonus)."""

    num_accepted: Tensor
    next_token_ids: Tensor


class Drafter(Protocol):
    """Anything that proposes tokens; everything it does may fail without harming the answer."""

    @property
    def num_forwards(self) -> int:
        """Forwards so far, the prefill included."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Outputs of the target that proposals depend on; empty for drafters that only read tokens."""
        ...

    def limit(self) -> int | None:
        """Return how many tokens can still be proposed before the drafter's own context ends; None means any number."""
        ...

    def prefill(self) -> None:
        """Read the committed tokens; called once, after the first token has been handed out."""
        ...

    def propose(self, num_draft_tokens: int) -> Proposal:
        """Propose `num_draft_tokens` ≥ 1 tokens per row after the committed ones."""
        ...

    def commit(self, num_kept: Sequence[int]) -> None:
        """Learn how many of the proposed tokens were kept in each row; called after the tokens were committed."""
        ...

    def rows_left(self, kept: Sequence[int]) -> None:
        """Keep only the batch rows at positions `kept`; the others have finished."""
        ...
