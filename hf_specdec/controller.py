"""Who decides how many tokens the next round drafts.

Controllers know neither torch nor a clock: times reach them inside the records they observe, so a test can replay any
sequence of rounds.

The output stays lossless as long as whether a draft token is verified does not depend on that token itself. Deciding
between rounds, from earlier rounds, always satisfies this.
"""

from typing import Protocol

from hf_specdec.errors import InvalidConfigError
from hf_specdec.metrics import RoundRecord


class DraftLengthController(Protocol):
    """Choose the draft length of each round; any object with these two methods will do."""

    def next_num_draft_tokens(self, limit: int) -> int:
        """Return how many tokens the coming round shall draft.

        Args:
            limit: The most that make sense this round, at least 1; lower near the length limit.

        Returns:
            0..limit; 0 asks for a plain decoding step.
        """
        ...

    def observe(self, record: RoundRecord) -> None:
        """Take note of a finished round, plain steps included."""
        ...


class FixedDraftLength:
    """Draft the same number of tokens every round, fewer only where the limit demands it.

    Args:
        num_draft_tokens: Tokens per round, at least 0; 0 decodes without the draft.

    Raises:
        InvalidConfigError: If `num_draft_tokens` is not an int of at least 0.

    Example:
        >>> FixedDraftLength(5).next_num_draft_tokens(limit=3)
        3
    """

    def __init__(self, num_draft_tokens: int) -> None:
        if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 0:
            raise InvalidConfigError(
                f"`num_draft_tokens` must be an int of at least 0, but is {num_draft_tokens!r}. Pass for example 5."
            )
        self.num_draft_tokens = num_draft_tokens

    def next_num_draft_tokens(self, limit: int) -> int:
        """Return the fixed length, or `limit` if that is smaller."""
        return min(self.num_draft_tokens, limit)

    def observe(self, record: RoundRecord) -> None:
        """Ignore the round: a fixed length learns nothing."""
