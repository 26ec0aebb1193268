"""What is noted of one round, and of one probe."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


class _Record:
    """What records share: the way to JSON types and back."""

    __slots__ = ()

    def to_dict(self: Any) -> dict[str, Any]:
        """Return the fields as JSON types (tuples become lists)."""
        return {name: _as_lists(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a record from what `to_dict` returned; keys of later versions are ignored."""
        return cls(**{name: _as_tuples(value) for name, value in values.items() if name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord(_Record):
    """One round: what was drafted, accepted and committed, and how long it took.

    The per-row tuples all have one entry per row that took part, in the order of `rows`.

    Attributes:
        num_draft_tokens: K, the tokens drafted for each row; 0 for a plain decoding step.
        rows: Indices into the output batch of the rows that took part.
        num_accepted_tokens: Accepted draft tokens per row, 0..K, before any cut at end of sequence or length.
        num_evaluated_tokens: Draft tokens whose fate was decided, per row: the accepted ones, plus 1 after a rejection.
        committed_token_ids: What stayed in the output, per row, after the cut.
        draft_seconds: Time of all draft steps, catching up not included.
        verify_seconds: Time of the target forward.
        round_seconds: Time of the whole round, catching up included.
        survival: Per row the K probabilities that at least the first 1, 2, …, K drafted tokens are accepted, each given
            the tokens up to there; without sampling each is 0 or 1. Their mean over rounds estimates the same as the
            accepted counts do, with less noise.
        confidences: Per row the largest probability in the draft's law at each drafted token; empty where nobody read
            them.
        num_batch_rows: Rows that every forward ran over, finished ones that stayed in the batch included; 0 means as
            many as took part.
        num_replayed_tokens: Tokens the target read again in this round, per row.
        num_replay_forwards: Forwards of the target in this round that only did that.
        num_caught_up_tokens: Committed tokens the draft had not read and read before its first step, per row.
        catch_up_seconds: Time that took.
    """

    num_draft_tokens: int
    rows: tuple[int, ...]
    num_accepted_tokens: tuple[int, ...]
    num_evaluated_tokens: tuple[int, ...]
    committed_token_ids: tuple[tuple[int, ...], ...]
    draft_seconds: float
    verify_seconds: float
    round_seconds: float
    survival: tuple[tuple[float, ...], ...] = ()
    confidences: tuple[tuple[float, ...], ...] = ()
    num_batch_rows: int = 0
    num_replayed_tokens: int = 0
    num_replay_forwards: int = 0
    num_caught_up_tokens: int = 0
    catch_up_seconds: float = 0.0

    @property
    def num_committed_tokens(self) -> int:
        """Tokens that stayed in the output, summed over the rows."""
        return sum(len(token_ids) for token_ids in self.committed_token_ids)

    @property
    def num_committed_draft_tokens(self) -> int:
        """Accepted draft tokens that stayed in the output, summed over the rows."""
        # Accepted tokens come first in a row's commit, so the shorter of the two counts is what survived the cut.
        pairs = zip(self.num_accepted_tokens, self.committed_token_ids, strict=True)
        return sum(min(num_accepted, len(token_ids)) for num_accepted, token_ids in pairs)

    @property
    def overhead_seconds(self) -> float:
        """Time of the round outside draft and target, never below 0."""
        return max(0.0, self.round_seconds - self.catch_up_seconds - self.draft_seconds - self.verify_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord(_Record):
    """What the draft would have been worth while it was off: one forward of it over text that is already there.

    Attributes:
        num_after_round: Rounds of the call that came before it.
        agreement: Per row, for consecutive tokens of the output, the probability of the draft's guess there to be
            accepted, as far as the emitted token tells: min(1, draft / target) at it. Without sampling it is 1 where
            both choose the same token and 0 elsewhere.
        confidences: Per row the largest probability in the draft's law at the same tokens.
        num_caught_up_tokens: Tokens the draft read for it, per row.
        seconds: Time it took.
    """

    num_after_round: int
    agreement: tuple[tuple[float, ...], ...]
    confidences: tuple[tuple[float, ...], ...]
    num_caught_up_tokens: int
    seconds: float


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
