"""The hand-offs of one round, and the protocol of whoever proposes.

Shapes: B rows in the batch, K draft tokens, V vocabulary.

Invariant, after every commit: the target's cache holds every committed token of a row but the last; the draft's lacks
the last one, the last two after full acceptance, and whatever plain steps have added since it was last used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """K draft tokens per row.

    `token_ids` is `[B, K]`. `probs` `[B, K, V]` float32 is the law each token was drawn from, after processors, NaN
    where the draft gave none; None says that the drafter is deterministic (each token had probability 1). `is_broken`
    `[B]` bool marks rows where the draft gave NaN; None where that cannot happen. All of it is good until the next one.
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
    """`num_accepted` `[B]` draft tokens stay, then comes `next_token_ids` `[B]` (correction or bonus).

    `survival` `[B, K]` float32 is the probability that at least the first 1, …, K drafted tokens stay, each given the
    tokens up to there; None when nothing is sampled (then it follows from `num_accepted`) or drafted. `next_probs`
    `[B]` float32 is the target's probability of the next token in a sampled plain step, None otherwise. `is_undefined`
    `[B]` bool marks rows whose target gave no law to draw from; None when nothing is sampled.
    """

    num_accepted: Tensor
    next_token_ids: Tensor
    survival: Tensor | None = None
    next_probs: Tensor | None = None
    is_undefined: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a round came to, on the host; every list has an entry per row in the batch.

    `num_accepted` and `num_evaluated` count draft tokens before any cut, `token_ids` are what stayed in the output,
    `survival` as in `Acceptance` (fewer than K where the rest was never looked at); `is_broken` says that the draft
    gave NaN; `next_probs`, on the device, as in `Acceptance`.
    """

    num_accepted: list[int]
    num_evaluated: list[int]
    token_ids: list[tuple[int, ...]]
    survival: list[tuple[float, ...]]
    is_broken: bool = False
    next_probs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """What a drafter would have made of text that is already there.

    For consecutive committed tokens of each row: `probs` `[B, N]`, the draft's probability of the token (without
    sampling 1 where it would have proposed it and 0 elsewhere), and `confidences` `[B, N]`, its largest probability.
    """

    probs: Tensor
    confidences: Tensor


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

    @property
    def asks_midway(self) -> bool:
        """Whether `propose` asks after each token if it goes on."""
        ...

    def limit(self) -> int | None:
        """Return how many tokens can still be proposed before the drafter's own context ends; None means any number."""
        ...

    def num_unread(self) -> int:
        """Return how many committed tokens per row `catch_up` would read; 0 when the next step reads them itself."""
        ...

    def catch_up(self) -> None:
        """Read the committed tokens; first called after the first token has been handed out."""
        ...

    def propose(self, num_draft_tokens: int, goes_on: Callable[[Tensor], bool] | None = None) -> Proposal:
        """Propose up to `num_draft_tokens` ≥ 1 tokens per row after the committed ones.

        After each token, `goes_on` (if given) is told the largest probability of its law, `[B]`, and may end the
        proposal there; the token stays.
        """
        ...

    def shadow(self, num_tokens: int) -> Shadow:
        """Read the committed tokens and judge the last `num_tokens` of them."""
        ...

    def commit(self, num_kept: Sequence[int]) -> None:
        """Learn how many of the proposed tokens were kept in each row; called after the tokens were committed."""
        ...

    def rows_left(self, kept: Sequence[int]) -> None:
        """Keep only the batch rows at positions `kept`; the others have finished."""
        ...
