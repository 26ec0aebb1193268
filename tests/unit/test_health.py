"""Signs of a broken draft: acceptance near chance, and a quantization that spoils."""

from __future__ import annotations

import logging
import math

import pytest

from hf_specdec.health import FEWEST_TOKENS, DraftHealth, is_suspicious, lost_by_quantization


def test_acceptance_near_chance_is_told_once_with_its_likely_causes(caplog: pytest.LogCaptureFixture) -> None:
    health = DraftHealth("nf4")
    with caplog.at_level(logging.WARNING, logger="hf_specdec.health"):
        for _ in range(FEWEST_TOKENS - 1):
            health.observe(0, 1)
        assert health.suspicions == []
        for _ in range(FEWEST_TOKENS):
            health.observe(0, 1)
    (suspicion,) = health.suspicions
    assert "0 of 64" in suspicion
    assert all(cause in suspicion for cause in ("another tokenizer", "chat format", "(nf4)"))
    assert "logits processor" not in suspicion
    assert [record.message for record in caplog.records] == [suspicion]


@pytest.mark.parametrize(("num_accepted", "is_told"), [(3, True), (4, False), (64, False)])
def test_it_takes_fewer_than_one_in_twenty(num_accepted: float, is_told: bool) -> None:
    health = DraftHealth()
    health.observe(num_accepted, FEWEST_TOKENS)
    assert bool(health.suspicions) is is_told


def test_a_draft_that_does_not_see_the_grammar_may_not_be_to_blame() -> None:
    health = DraftHealth()
    health.observe(0, FEWEST_TOKENS, sees_all_processors=False)
    assert "logits processor" in health.suspicions[0]
    assert "quantization" not in health.suspicions[0]


def test_what_loading_found_stays_first() -> None:
    health = DraftHealth("int8", ("it is spoilt",))
    health.observe(0, FEWEST_TOKENS)
    assert health.suspicions[0] == "it is spoilt"
    assert len(health.suspicions) == 2


@pytest.mark.parametrize(
    ("nats", "vocab_size", "expected"), [(3.0, 128_000, False), (7.0, 128_000, True), (math.inf, 64, True)]
)
def test_blind_guessing_is_suspicious(nats: float, vocab_size: int, expected: bool) -> None:
    assert is_suspicious(nats, vocab_size) is expected


@pytest.mark.parametrize(
    ("nats", "unquantized", "is_lost"),
    [
        (8.0, 3.0, True),
        (math.inf, 3.0, True),
        (8.0, 7.9, False),
        (8.0, math.inf, False),
        (math.inf, math.inf, False),
        (12.0, 7.0, False),
    ],
)
def test_a_poor_draft_is_not_blamed_on_its_quantization(nats: float, unquantized: float, is_lost: bool) -> None:
    found = lost_by_quantization("fp4", nats, unquantized, vocab_size=4096)
    assert (found is not None) is is_lost
    assert found is None or "(fp4)" in found
