"""Ratios, intervals and reports of the benchmark, from made-up times."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.benchmark.bench import numbers
from hf_specdec.benchmark.bench.grid import Cell, cells_of
from hf_specdec.benchmark.bench.report import comparison_text, markdown, verdict
from hf_specdec.benchmark.bench.session import read_results, save, started_or_resumed

OURS = "draft_model K=4"
ADAPTIVE = numbers.ADAPTIVE
SPECULATION = {
    "acceptance_rate": 0.8,
    "token_acceptance_rate": 0.85,
    "mean_acceptance_length": 4.2,
    "acceptance_rate_per_position": [0.9, 0.8, 0.75, 0.75],
    "mean_draft_length": 4.0,
    "plain_step_share": 0.0,
    "num_probes": 0,
    "draft_step_milliseconds": 1.0,
    "verify_milliseconds": 10.0,
    "overhead_milliseconds": 1.0,
    "catch_up_milliseconds": 5.0,
    "last_draft_lengths": [4, 4],
    "survival": [0.9, 0.8, 0.7, 0.6],
    "cost_ratio": 0.1,
    "fallbacks": [],
    "draft_suspicions": [],
}


def way(seconds: list[float], first: float = 0.01, num_tokens: int = 11, **more: Any) -> dict[str, Any]:
    return {
        "first_seconds": [first] * len(seconds),
        "seconds": seconds,
        "new_tokens": [num_tokens] * len(seconds),
        "target_forwards": [num_tokens] * len(seconds),
        "peak_bytes": 1000,
        "weight_bytes": 9000,
        **more,
    }


def results_of(plain: list[float], ours: list[float], again: list[float] | None = None, **more: Any) -> dict[str, Any]:
    """Return results of one cell."""
    ways = {
        "plain": way(plain),
        numbers.ADAPTIVE: way(ours, speculation=dict(SPECULATION)),
        OURS: way(ours, speculation=dict(SPECULATION), **more),
        "assistant_model K=3": way(plain),
        "plain again": way(again or plain),
    }
    cell = {**Cell("code", 0.0, 1)._asdict(), "ways": ways, "refused": {"prompt_lookup_num_tokens": "it is refused"}}
    origin = {
        "date": "2026-01-01",
        "hardware": "a machine",
        "threads": 1,
        "versions": {"torch": "2"},
        "commit": "abc",
        "options": {"dtype": "float32", "max_new_tokens": 11, "num_prompts": 2, "repeats": 1},
        "idle_check": {"is_idle": False},
        "total_memory_bytes": 100_000,
    }
    pair = {"target": "large", "draft": "small", "note": "acceptance is set, not measured."}
    return {"provenance": origin, "pair": pair, "cells": {"code T=0 B=1": cell}}


def test_a_row_holds_what_users_ask_for() -> None:
    results = numbers.with_summaries(results_of([0.11, 0.11], [0.055, 0.055]))
    row = results["cells"]["code T=0 B=1"]["rows"][OURS]
    assert row["tokens_per_second_per_row"] == pytest.approx(200)
    assert row["first_token_milliseconds"] == 10
    assert row["token_milliseconds_p50"] == pytest.approx(4.5)
    assert row["speed_up"]["value"] == 2
    assert (row["memory_bytes"], row["memory_share"]) == (10_000, 0.1)
    assert not row["is_wrong"]
    assert results["means"][OURS] == 2
    assert results["means"]["best assistant_model K in each cell"] == 1


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=12), st.integers(0, 100))
def test_an_interval_holds_its_value_and_noise_widens_it(plain: list[float], seed: int) -> None:
    own = [value / 2 for value in plain]
    narrow, wide = (numbers.speed_up(plain, own, noise, seed) for noise in (0.0, 0.1))
    assert narrow["value"] == pytest.approx(2, abs=1e-3)
    assert narrow["low"] <= narrow["value"] <= narrow["high"]
    assert wide["high"] - wide["low"] > narrow["high"] - narrow["low"]


def test_intervals_of_runs_of_one_machine_agree_as_often_as_they_should() -> None:
    draw = random.Random(0)

    def run() -> dict[str, float]:
        plain = [draw.gauss(1.0, 0.05) for _ in range(12)]
        drift = math.exp(draw.gauss(0.0, 0.03))
        return numbers.speed_up(plain, [drift * draw.gauss(0.5, 0.03) for _ in plain], noise=0.03)

    pairs = [(run(), run()) for _ in range(100)]
    agreeing = [first["low"] <= second["high"] and second["low"] <= first["high"] for first, second in pairs]
    assert sum(agreeing) >= 90


def test_noise_is_plain_decoding_against_itself() -> None:
    assert numbers.with_summaries(results_of([1.0], [0.5]))["noise"] == 0
    noisy = numbers.with_summaries(results_of([1.0], [0.5], again=[1.1]))
    assert noisy["noise"] == pytest.approx(math.log(1.1), abs=1e-4)


def test_the_cost_model_predicts_fixed_lengths_from_what_the_adaptive_one_learned() -> None:
    results = numbers.with_summaries(results_of([0.11], [0.05]))
    (expected,) = results["cells"]["code T=0 B=1"]["predicted"].items()
    assert expected == (OURS, pytest.approx(10.0 / ((11.0 + 4 * 1.0) / (1 + 3.0) + 5.0 / 10), abs=1e-4))


def test_nothing_is_predicted_where_nothing_was_learned() -> None:
    results = results_of([0.11], [0.05])
    results["cells"]["code T=0 B=1"]["ways"][numbers.ADAPTIVE]["speculation"]["survival"] = None
    assert numbers.with_summaries(results)["cells"]["code T=0 B=1"]["predicted"] == {}


# ---- reports -------------------------------------------------------------------------------------------------------


def test_a_report_says_what_was_measured_where_and_what_to_doubt() -> None:
    text = markdown(numbers.with_summaries(results_of([0.11, 0.11], [0.055, 0.055])), ["picture.png"])
    assert "large with small" in text
    assert "acceptance is set, not measured" in text
    assert "commit abc" in text
    assert "not idle" in text
    assert "| draft_model K=4 | 200.0 | 10 | 4.5 | 4.5 | 0.00 GB (10%) | 80% | 4.20 | 4.0 | 2.00 (2.00–2.00) |" in text
    assert "prompt_lookup_num_tokens (it is refused)" in text
    assert "![picture.png](picture.png)" in text
    assert "2.00 times as fast as plain decoding" in text


def test_a_wrong_answer_cannot_hide() -> None:
    results = numbers.with_summaries(results_of([0.11], [0.01], num_differing_outputs=1))
    assert results["cells"]["code T=0 B=1"]["rows"][OURS]["is_wrong"]
    assert "1 outputs differ" in markdown(results)


def test_a_draft_that_does_not_pay_is_called_that() -> None:
    results = results_of([0.11, 0.11], [0.11, 0.11])
    results["cells"]["code T=0 B=1"]["ways"][OURS]["speculation"]["draft_suspicions"] = ["It is broken."]
    text = markdown(numbers.with_summaries(results))
    assert "This draft does not pay here" in text
    assert "It is broken." in text


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        (
            {ADAPTIVE: 1.01, OURS: 1.8, "assistant_model": 2.5, "assistant_model K=3": 2.0},
            "This draft does not pay here: left to adapt, decoding is as fast as without it (0.99); `assistant_model` "
            "with it is at best 0.50 times as fast.",
        ),
        (
            {ADAPTIVE: 1.25, OURS: 1.8, "assistant_model": 1.0},
            "This draft does not pay here: left to adapt, decoding is 0.80 times as fast as without it.",
        ),
        (
            {OURS: 1.25, "assistant_model": 2.0},
            "This draft does not pay here, at the lengths that were tried; `assistant_model` with it is at best 0.50 "
            "times as fast.",
        ),
        (
            {ADAPTIVE: 1.0, OURS: 0.8, "assistant_model": 2.0},
            "The fastest of ours is `draft_model K=4`, 1.25 times as fast as plain decoding.",
        ),
        ({"assistant_model": 2.0}, ""),
    ],
)
def test_a_verdict_says_what_to_take_away(seconds: dict[str, float], sentence: str) -> None:
    results = results_of([1.0], [1.0])
    ways = {"plain": way([1.0]), **{name: way([own]) for name, own in seconds.items()}, "plain again": way([1.0])}
    results["cells"]["code T=0 B=1"]["ways"] = ways
    assert verdict(numbers.with_summaries(results)) == sentence


def test_two_runs_are_compared_by_their_intervals() -> None:
    first, second = (numbers.with_summaries(results_of([1.0, 1.0], [own, own])) for own in (0.5, 0.4))
    differing, count = numbers.disagreements(first, second)
    assert count == 4
    assert {own["way"] for own in differing} == {OURS, numbers.ADAPTIVE}
    text = comparison_text(differing, count)
    assert text.startswith("2 of 4 speed-ups agree")
    assert "| code T=0 B=1 | draft_model K=4 | 2.00 (2.00–2.00) | 2.50 (2.50–2.50) |" in text
    assert numbers.disagreements(first, copy.deepcopy(first)) == ([], 4)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_results_go_on_only_with_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = results_of([0.11], [0.05])
    save(results, path)
    assert started_or_resumed(path, results["provenance"], results["pair"]) == results
    other = {**results["provenance"], "options": {"dtype": "bfloat16"}}
    with pytest.raises(ValueError, match=r"other settings \(dtype was float32 and is bfloat16, .*\)"):
        started_or_resumed(path, other, results["pair"])
    with pytest.raises(ValueError, match=r"other settings \(pair\)"):
        started_or_resumed(path, results["provenance"], {"target": "another"})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": {}}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"results\.json` of `hf-specdec bench`"):
        read_results(path)


def test_cells_are_all_combinations() -> None:
    cells = cells_of(["code", "chat"], [0.0, 1.0], [1, 4], [0, 128])
    assert len({cell.key for cell in cells}) == 16
    assert Cell("chat", 1.0, 4, 128).key == "chat T=1 B=4 P=128"
