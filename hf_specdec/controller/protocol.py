"""What the engine asks of a controller, and what it tells one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hf_specdec.metrics import ProbeRecord, RoundRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the engine knows before a round.

    Attributes:
        limit: The most tokens that make sense to draft; 0 where there is no room.
        num_rows: Rows that are still being written.
        num_batch_rows: Rows that every forward runs over; more where finished rows stay in the batch.
        is_lockstep: Whether all rows commit the same number of tokens, the fewest that any of them accepts.
        num_remaining_tokens: Tokens a row may still get, None when there is no limit.
        num_unread_tokens: Committed tokens per row that the draft would have to read before its first step.
        num_shadow_tokens: Tokens per row that a probe could look at: those of plain steps since the draft last read.
        reads_confidence: Whether `goes_on` will be asked after every draft step.
    """

    limit: int
    num_rows: int = 1
    num_batch_rows: int = 1
    is_lockstep: bool = False
    num_remaining_tokens: int | None = None
    num_unread_tokens: int = 0
    num_shadow_tokens: int = 0
    reads_confidence: bool = False


class DraftLengthController(Protocol):
    """Choose the draft length of each round.

    Before a round the engine asks `num_probe_tokens`, then `next_num_draft_tokens`; after every draft step, where
    reading a number from the device is cheap, `goes_on`; and it tells what came of it.
    """

    def num_probe_tokens(self, outlook: Outlook) -> int:
        """Return over how many of the latest tokens per row the draft shall be tried before this round; 0 for none."""
        ...

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return the most tokens the coming round may draft, 0..`outlook.limit`; 0 asks for a plain decoding step."""
        ...

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Say whether to draft one more token.

        Args:
            confidences: Per row that is still being written, the largest probability in the law that the token just
                drafted was drawn from.
        """
        ...

    def observe(self, record: RoundRecord) -> None:
        """Take note of a finished round, plain steps included."""
        ...

    def observe_probe(self, probe: ProbeRecord) -> None:
        """Take note of a probe."""
        ...
