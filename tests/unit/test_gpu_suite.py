"""The suite for accelerators, on a CPU and with tiny shapes: its parts, its limit, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.benchmark.bench.gpu_suite import RESULTS, Suite, run_suite

TINY = Suite(
    shapes="tiny-target:tiny-draft",
    dtype="float32",
    device="cpu",
    quantizations=("none",),
    num_tokens=(1, 3),
    context=16,
    batch_sizes=(1, 2),
    temperatures=(0.0,),
    max_new_tokens=8,
    repeats=2,
)


@pytest.mark.slow
def test_every_part_is_measured_and_written(tmp_path: Path) -> None:
    results = run_suite(TINY, tmp_path)
    assert results == json.loads((tmp_path / RESULTS).read_text(encoding="utf-8"))
    assert list(results["cells"]) == [
        "target forwards, eager, B=1",
        "target forwards, cuda_graph, B=1",
        "target forwards, eager, B=2",
        "target forwards, cuda_graph, B=2",
        "draft forwards, none, eager",
        "draft forwards, none, cuda_graph",
        "table, draft none, synthetic T=0 B=1",
        "table, draft none, synthetic T=0 B=2",
    ]
    assert not any("error" in part["result"] for part in results["cells"].values())
    assert results["cells"]["target forwards, eager, B=2"]["result"]["3"]["median"] > 0
    assert results["cells"]["target forwards, cuda_graph, B=1"]["result"]["runner"] == "eager"
    rows = results["cells"]["table, draft none, synthetic T=0 B=1"]["result"]["cells"]["synthetic T=0 B=1"]["rows"]
    assert {"plain", "draft_model K=4", "draft_model adaptive", "assistant_model"} <= rows.keys()
    assert not any(row["is_wrong"] for row in rows.values())


def test_it_stops_when_its_time_is_up_and_goes_on_later(tmp_path: Path) -> None:
    calls: list[str] = []

    def part(name: str) -> Any:
        return lambda: calls.append(name) or {"value": name}

    parts = {name: part(name) for name in ("a", "b")}
    timed_out = Suite(device="cpu", limit_seconds=-1.0)
    assert run_suite(timed_out, tmp_path / "x", parts=parts)["not_begun"] == ["a", "b"]
    assert not calls
    suite = Suite(device="cpu")
    assert run_suite(suite, tmp_path / "y", parts={"a": parts["a"]})["not_begun"] == []
    results = run_suite(suite, tmp_path / "y", parts=parts)
    assert calls == ["a", "b"]
    assert results["cells"]["b"]["result"] == {"value": "b"}


def test_a_part_that_fails_does_not_cost_the_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory\nand more")

    results = run_suite(Suite(device="cpu"), tmp_path, parts={"a": fail, "b": lambda: 1})
    assert results["cells"]["a"]["result"] == {"error": "RuntimeError: out of memory"}
    assert results["cells"]["b"]["result"] == 1


def test_results_of_another_suite_are_not_mixed(tmp_path: Path) -> None:
    run_suite(Suite(device="cpu"), tmp_path, parts={})
    with pytest.raises(ValueError, match="other settings"):
        run_suite(Suite(device="cpu", acceptance=0.5), tmp_path, parts={})
