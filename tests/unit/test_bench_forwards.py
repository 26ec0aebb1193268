"""Times of single forwards: what is fed, and that it is fed at the same place every time."""

from __future__ import annotations

import pytest
from integration.harness import watched

import models
from hf_specdec.benchmark.bench.forwards import WARM_UP, forward_milliseconds


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_count_is_fed_as_often_and_at_the_same_place(batch_size: int) -> None:
    target = models.build_target()
    with watched(target) as widths:
        times = forward_milliseconds(target, [1, 3, 5], context=20, batch_size=batch_size, repeats=4)
    assert widths[0] == 20
    assert widths[1:] == [1, 3, 5] * (WARM_UP + 4)
    assert list(times) == ["1", "3", "5"]
    for own in times.values():
        assert 0 < own["fastest"] <= own["low"] <= own["median"] <= own["high"]
