"""FixedDraftLength: the same every round, whatever happens."""

from typing import Any

import pytest

from hf_specdec.controller import DraftLengthController, FixedDraftLength, Outlook
from hf_specdec.errors import InvalidConfigError
from hf_specdec.metrics import RoundRecord


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (4, 4), (5, 5), (6, 5), (1000, 5)])
def test_fixed_length_stays_below_the_limit(limit: int, expected: int) -> None:
    assert FixedDraftLength(5).next_num_draft_tokens(Outlook(limit=limit)) == expected


def test_zero_asks_for_plain_steps() -> None:
    assert FixedDraftLength(0).next_num_draft_tokens(Outlook(limit=8)) == 0


def test_fixed_length_learns_nothing() -> None:
    controller: DraftLengthController = FixedDraftLength(3)
    nothing_accepted = RoundRecord(
        num_draft_tokens=3,
        rows=(0,),
        num_accepted_tokens=(0,),
        num_evaluated_tokens=(1,),
        committed_token_ids=((7,),),
        draft_seconds=1.0,
        verify_seconds=1.0,
        round_seconds=2.0,
    )
    for _ in range(10):
        controller.observe(nothing_accepted)
    assert controller.next_num_draft_tokens(Outlook(limit=8)) == 3
    assert controller.num_probe_tokens(Outlook(limit=8, num_shadow_tokens=100)) == 0
    assert controller.goes_on([0.0])


@pytest.mark.parametrize("value", [-1, True, 2.0, "3", None])
def test_refuses_what_is_no_count(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="`num_draft_tokens` must be an int of at least 0"):
        FixedDraftLength(value)
