"""The adaptive benchmark's arithmetic, tables and resuming, on made-up times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_specdec.benchmark import adaptive
from hf_specdec.benchmark.cells import (
    ASSISTANT,
    AUTO,
    PLAIN,
    PLAIN_AGAIN,
    SLOW,
    USELESS,
    Cell,
    Grid,
    deeds_of,
    encoded_prompts,
    make_drafts,
    measure,
    runs_of,
)
from hf_specdec.benchmark.verdicts import (
    AFTER_FIRST_TOKEN,
    CALL,
    cell_costs,
    cell_summary,
    faster,
    overall,
    picked_elsewhere,
    rendered,
    with_summaries,
)
from hf_specdec.demo import DEMO_FOLDER, load_demo_pair
from hf_specdec.metrics import RoundRecord, SpeculationStats

GREEDY = Cell("code", 0.0, 1)
GRID = Grid(
    lengths=(2, 4),
    assisted_lengths=(3,),
    left_out=frozenset(),
    num_prompts=2,
    num_new_tokens=5,
    repeats=2,
    warm_up_calls=1,
)


def method(*seconds: float, first: float = 0.5, **values: Any) -> dict[str, Any]:
    return {"seconds": list(seconds), "seconds_to_first_token": [first] * len(seconds), **values}


def times() -> dict[str, Any]:
    """Plain 4.5 s; auto is twice as fast, K=4 a little faster, K=2 slower, and everything else in between."""
    speculation = deeds_of([])
    return {
        PLAIN: method(4.5, 4.5, 4.5),
        AUTO: method(2.25, 2.5, 1.5, speculation=speculation),
        USELESS: method(4.5, 5.0, 4.4, speculation=speculation),
        SLOW: method(5.0, 5.0, 4.0, speculation=speculation),
        PLAIN_AGAIN: method(4.5, 4.4, 4.6),
        ASSISTANT: method(3.0, 3.0, 3.0),
        "draft_model K=2": method(3.0, 3.0, 3.0, speculation={"draft_step_milliseconds": 7.0}),
        "draft_model K=4": method(2.0, 2.0, 2.0, speculation={"draft_step_milliseconds": 6.0}),
        "assistant_model K=3": method(2.5, 2.5, 2.5),
    }


def cell(workload: str = "code", temperature: float = 0.0, batch_size: int = 1) -> dict[str, Any]:
    return {
        **Cell(workload, temperature, batch_size)._asdict(),
        "num_calls": 2,
        "num_new_tokens": 5,
        "methods": times(),
    }


def options(*arguments: str) -> argparse.Namespace:
    return adaptive.parser_of_options().parse_args(list(arguments))


def results(*cells: dict[str, Any], **values: Any) -> dict[str, Any]:
    keyed = {Cell(one["workload"], one["temperature"], one["batch_size"]).key: one for one in cells}
    return {"provenance": adaptive.origin_of(options()), "cells": keyed, "summary": {}, **values}


# --- arithmetic -----------------------------------------------------------------------------------------------------


def test_ratios_compare_runs_of_the_same_repeat() -> None:
    assert faster([2.0, 4.0, 6.0], [1.0, 4.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_summary_of_a_cell() -> None:
    summary = cell_summary(times(), CALL)
    assert summary["auto_to_plain"] == {"median": 2.0, "min": 1.8, "max": 3.0}
    assert summary["useless_to_plain"]["median"] == 1.0
    assert summary["slow_to_plain"]["median"] == 0.9
    assert summary["plain_again_to_plain"]["median"] == 1.0
    assert summary["best_fixed"] == {"num_draft_tokens": 4, "to_plain": {"median": 2.25, "min": 2.25, "max": 2.25}}
    assert summary["auto_to_best_fixed"]["median"] == round(2 / 2.25, 4)
    assert summary["auto_to_assistant"]["median"] == round(3 / 2.25, 4)
    assert summary["best_assistant"]["num_draft_tokens"] == 3
    assert summary["auto_to_best_assistant"]["median"] == round(2.5 / 2.25, 4)


def test_a_length_can_be_picked_without_the_repeat_it_is_judged_by() -> None:
    seconds = {"K=1": [1.0, 4.0, 5.0], "K=2": [3.5, 2.0, 2.0], "other": [0.1, 0.1, 0.1]}
    assert picked_elsewhere(seconds, ["K=1", "K=2"]) == [3.5, 2.0, 5.0]
    assert picked_elsewhere({"K=1": [2.0], "K=2": [3.0]}, ["K=1", "K=2"]) == [2.0]


def test_bars_are_judged_by_the_median() -> None:
    assert cell_summary(times(), CALL)["bars_met"] == {
        "auto_to_plain": True,
        "useless_to_plain": True,
        "slow_to_plain": False,
        "auto_to_best_fixed": False,
    }


def test_the_time_to_the_first_token_can_be_left_out() -> None:
    summary = cell_summary(times(), AFTER_FIRST_TOKEN)
    assert summary["auto_to_plain"]["median"] == round(4 / 1.75, 4)
    assert summary["plain_again_to_plain"]["min"] == round(4.0 / 4.1, 4)


def test_methods_that_were_left_out_are_absent_from_the_summary() -> None:
    methods = {name: own for name, own in times().items() if name in {PLAIN, PLAIN_AGAIN, AUTO}}
    summary = cell_summary(methods, CALL)
    assert summary.keys() == {"plain_again_to_plain", "auto_to_plain", "bars_met"}
    assert summary["bars_met"] == {"auto_to_plain": True}


def test_costs_of_a_cell() -> None:
    costs = cell_costs(cell())
    assert costs["plain_step"] == 1e3 * 4.0 / (2 * 4)
    assert costs["first_token"] == 250.0
    assert costs["draft_step of draft_model K=4"] == 6.0


def test_overall_takes_geometric_means_and_names_the_cells_that_miss_a_bar() -> None:
    def summary(ratio: float, *, is_met: bool) -> dict[str, Any]:
        spread = {"median": ratio, "min": ratio, "max": ratio}
        return {
            "plain_again_to_plain": spread,
            "auto_to_plain": spread,
            "auto_to_assistant": spread,
            "bars_met": {"auto_to_plain": is_met},
        }

    whole = overall({"one": summary(0.5, is_met=False), "two": summary(8.0, is_met=True)})
    assert whole["geometric_means"]["auto_to_plain"] == 2.0
    assert whole["bars_in_all_cells"] == {"auto_to_plain": {"met": False, "least": 0.5, "missed_in": ["one"]}}
    assert whole["bars_on_geometric_means"] == {"auto_to_assistant": {"met": True, "bar": 1.15}}


def test_summaries_are_renewed_and_times_kept() -> None:
    renewed = with_summaries(results(cell(), cell("prose")))
    assert renewed["cells"]["code T=0 B=1"]["methods"] == times()
    assert renewed["cells"]["prose T=0 B=1"]["summary"][CALL] == cell_summary(times(), CALL)
    assert renewed["summary"][CALL]["bars_in_all_cells"]["slow_to_plain"]["missed_in"] == list(renewed["cells"])
    assert with_summaries(renewed) == renewed
    json.dumps(renewed)


def test_deeds_add_up_over_calls() -> None:
    def record(num_draft_tokens: int, *accepted: int) -> RoundRecord:
        return RoundRecord(
            num_draft_tokens=num_draft_tokens,
            rows=tuple(range(len(accepted))),
            num_accepted_tokens=accepted,
            num_evaluated_tokens=accepted,
            committed_token_ids=tuple((7,) * (count + 1) for count in accepted),
            draft_seconds=0.01 * num_draft_tokens,
            verify_seconds=0.1,
            round_seconds=0.2,
        )

    first = SpeculationStats(rounds=[record(4, 4, 1), record(0, 0, 0)])
    summary = deeds_of([first, SpeculationStats(rounds=[record(2, 1)], fallbacks=["no room"])])
    assert summary["num_rounds"] == 3
    assert summary["mean_draft_length"] == 3.0
    assert summary["plain_step_share"] == round(1 / 3, 4)
    assert summary["mean_acceptance_length"] == 1 + 6 / 5
    assert summary["draft_step_milliseconds"] == pytest.approx(10.0)
    assert summary["verify_milliseconds"] == pytest.approx(100.0)
    assert summary["fallbacks"] == ["no room"]


# --- rendering ------------------------------------------------------------------------------------------------------


def test_rendering_marks_missed_bars() -> None:
    text = rendered(results(cell(), cell("random", 0.7)))
    row = next(line for line in text.splitlines() if line.startswith("| code | 0 | 1 |"))
    assert "| 2.00 (1.80–3.00) |" in row
    assert "| K=4: 2.25 (2.25–2.25) |" in row
    assert "| **0.90 (0.90–1.12)** |" in row
    assert "- slow / plain ≥ 0.98 in every cell: missed (least 0.900; missed in code T=0 B=1, random T=0.7 B=1)" in text
    assert "- auto / assistant ≥ 1.15 in the geometric mean: met (1.333)" in text
    assert "plain again / plain 1.000" in text


def test_rendered_tables_are_rectangular() -> None:
    without_assistant = cell("prose", 0.0, 4)
    without_assistant["methods"] = {name: own for name, own in times().items() if "assistant" not in name}
    text = rendered(results(cell(), without_assistant))
    for table in [part for part in text.split("\n\n") if part.startswith("|")]:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "| – | – | – | – |" in text


def test_cells_are_rendered_by_workload_temperature_and_batch_size() -> None:
    text = rendered(results(cell("prose"), cell("code", 0.7), cell("prose", 0.0, 4), cell("code")))
    rows = text.split("\n\n")[2].splitlines()[2:]
    assert [tuple(row.split(" | ")[:3]) for row in rows] == [
        ("| prose", "0", "1"),
        ("| prose", "0", "4"),
        ("| code", "0", "1"),
        ("| code", "0.7", "1"),
    ]


def test_nothing_measured_is_said() -> None:
    assert rendered(results()) == "No cell has been measured.\n"


# --- resuming -------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    origin = adaptive.origin_of(options())
    assert adaptive.started_or_resumed(path, origin)["cells"] == {}
    adaptive.save(results(cell()), path)
    resumed = adaptive.started_or_resumed(path, origin)
    cells = adaptive.cells_of(options("--workloads", "code", "--temperatures", "0", "--batch-sizes", "1,4"))
    assert adaptive.unfinished(cells, resumed) == [Cell("code", 0.0, 4)]
    assert list(tmp_path.iterdir()) == [path]


def test_other_cells_and_another_day_do_not_hinder_resuming(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    before = results(cell())
    before["provenance"]["date"] = "2001-01-01"
    adaptive.save(before, path)
    origin = adaptive.origin_of(options("--workloads", "json", "--output", str(path)))
    assert adaptive.started_or_resumed(path, origin) == before


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--repeats", "9"], "repeats"), (["--dtype", "float32"], "dtype"), (["--leave-out", "slow"], "leave_out")],
)
def test_figures_of_other_settings_are_not_mixed(tmp_path: Path, arguments: list[str], name: str) -> None:
    path = tmp_path / "results.json"
    adaptive.save(results(cell()), path)
    with pytest.raises(ValueError, match=rf"other settings \({name}\)"):
        adaptive.started_or_resumed(path, adaptive.origin_of(options(*arguments)))


def test_figures_of_another_version_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    before = results(cell())
    before["provenance"]["torch"] = "1.0"
    adaptive.save(before, path)
    with pytest.raises(ValueError, match=r"\(torch\)"):
        adaptive.started_or_resumed(path, adaptive.origin_of(options()))


@pytest.mark.parametrize(("option", "value"), [("--workloads", "cod"), ("--leave-out", "slow,fast")])
def test_unknown_names_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(option, value)
    assert value.split(",")[-1] in capsys.readouterr().err


def test_render_prints_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    adaptive.save(results(cell()), path)
    monkeypatch.setattr("sys.argv", ["adaptive", "--render", str(path)])
    monkeypatch.setattr(adaptive, "run", None)
    adaptive.main()
    assert capsys.readouterr().out == rendered(results(cell()))


# --- cells ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO_FOLDER / "target", local_files_only=True)


@pytest.mark.parametrize("workload", ["code", "json", "prose", "random"])
def test_batches_are_padded_left_and_hold_the_prompts_of_single_rows(
    tokenizer: PreTrainedTokenizerBase, workload: str
) -> None:
    rows = encoded_prompts(tokenizer, Cell(workload, 0.0, 1), 4)
    (batch,) = encoded_prompts(tokenizer, Cell(workload, 0.0, 4), 1)
    assert [row["input_ids"].shape[0] for row in rows] == [1] * 4
    assert (
        batch["input_ids"].shape == batch["attention_mask"].shape == (4, max(row["input_ids"].numel() for row in rows))
    )
    for row, ids, mask in zip(rows, batch["input_ids"], batch["attention_mask"], strict=True):
        assert torch.equal(ids[mask.bool()], row["input_ids"][0])
        assert mask.tolist() == sorted(mask.tolist())


def test_random_prompts_are_fixed_and_hold_no_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    first, again = (encoded_prompts(tokenizer, Cell("random", 0.0, 1), 4) for _ in range(2))
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(first, again, strict=True))
    assert not torch.isin(
        torch.cat([one["input_ids"][0] for one in first]), torch.tensor(tokenizer.all_special_ids)
    ).any()


def test_a_batch_larger_than_the_workload_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="`prose` has"):
        encoded_prompts(tokenizer, Cell("prose", 0.0, 64), 1)


def test_methods_of_a_cell_and_their_drafts() -> None:
    pair = load_demo_pair(num_parameters=0)
    state = torch.get_rng_state()
    drafts = make_drafts(pair, 0)
    assert torch.equal(torch.get_rng_state(), state)
    own, useless = (model.get_input_embeddings().weight for model in (pair.draft, drafts.useless))
    assert own.shape == useless.shape
    assert not torch.equal(own, useless)
    assert list(runs_of(drafts, GREEDY, GRID)) == [
        *(PLAIN, AUTO, USELESS, SLOW, PLAIN_AGAIN, ASSISTANT),
        *("assistant_model K=3", "draft_model K=2", "draft_model K=4"),
    ]
    batch = Cell("code", 0.7, 4)
    assert [name for name in runs_of(drafts, batch, GRID) if "assistant" in name] == []


def test_every_method_sees_every_prompt_in_every_repeat_with_the_same_seed() -> None:
    seen: dict[str, list[tuple[int, float]]] = {PLAIN: [], AUTO: [], PLAIN_AGAIN: []}

    def run(name: str, encoded: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float, float]:
        seen[name].append((int(encoded["input_ids"]), float(torch.rand(()))))
        return encoded["input_ids"] + (name == AUTO), 0.25, 1.0

    inputs = [
        {"input_ids": torch.tensor([[index]]), "attention_mask": torch.tensor([[1]])}
        for index in range(GRID.num_prompts)
    ]
    runs = {name: lambda encoded, name=name: run(name, encoded) for name in seen}
    state = torch.get_rng_state()
    measured = measure(runs, inputs, GREEDY, GRID)
    torch.set_rng_state(state)
    warm_up, *timed = seen[AUTO]
    assert warm_up[0] == 0
    assert timed == seen[PLAIN] == seen[PLAIN_AGAIN]
    assert [index for index, _ in timed] == [0, 1, 0, 1]
    assert len({number for _, number in timed}) == 4
    assert measured["methods"][PLAIN]["seconds"] == [2.0, 2.0]
    assert measured["methods"][PLAIN]["seconds_to_first_token"] == [0.5, 0.5]
    assert measured["methods"][PLAIN]["num_differing_outputs"] == 0
    assert measured["methods"][AUTO]["num_differing_outputs"] == 4
    assert measured["warm_up_calls"] == 1
