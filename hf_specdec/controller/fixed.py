"""The same draft length every round."""

from collections.abc import Sequence

from hf_specdec.controller.protocol import Outlook
from hf_specdec.errors import InvalidConfigError
from hf_specdec.metrics import ProbeRecord, RoundRecord


class FixedDraftLength:
    """Draft the same number of tokens every round, fewer only where the limit demands it.

    Args:
        num_draft_tokens: Tokens per round, at least 0; 0 decodes without the draft.

    Raises:
        InvalidConfigError: If `num_draft_tokens` is not an int of at least 0.

    Example:
        >>> FixedDraftLength(5).next_num_draft_tokens(Outlook(limit=3))
        3
    """

    def __init__(self, num_draft_tokens: int) -> None:
        if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 0:
            raise InvalidConfigError(
                f"`num_draft_tokens` must be an int of at least 0, but is {num_draft_tokens!r}. Pass for example 5."
            )
        self.num_draft_tokens = num_draft_tokens

    def num_probe_tokens(self, outlook: Outlook) -> int:
        """Return 0: nothing depends on how good the draft is."""
        return 0

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        """Return the fixed length, or the limit if that is smaller."""
        return min(self.num_draft_tokens, outlook.limit)

    def goes_on(self, confidences: Sequence[float]) -> bool:
        """Go on to the fixed length."""
        return True

    def observe(self, record: RoundRecord) -> None:
        """Ignore the round: a fixed length learns nothing."""

    def observe_probe(self, probe: ProbeRecord) -> None:
        """Ignore the probe."""
