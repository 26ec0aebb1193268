"""`hf-specdec bench`: what it measures, writes and compares, on the bundled pair without its ballast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec.benchmark.bench import runner, ways
from hf_specdec.benchmark.bench.numbers import ADAPTIVE
from hf_specdec.benchmark.bench.runner import speculation_values
from hf_specdec.benchmark.bench.ways import ASSISTANT, PLAIN, PROMPT_LOOKUP
from hf_specdec.benchmark.random_draft import with_random_weights
from hf_specdec.cli import main
from hf_specdec.demo import load_demo_pair
from hf_specdec.metrics import SpeculationStats

SMALL = ["--num-parameters", "0", "--dtype", "float32", "--num-prompts", "2", "--max-new-tokens", "12"]
QUICK = [*SMALL, "--workloads", "code", "--repeats", "1", "--lengths", "3", "--assisted-lengths", "2"]

Run = Callable[..., dict[str, Any]]


def bench(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 0


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_bench(*arguments: str, folder: str = "out") -> dict[str, Any]:
        bench(*QUICK, "--no-plots", "--json", "--output", str(tmp_path / folder), *arguments)
        results: dict[str, Any] = json.loads(capsys.readouterr().out)
        written = json.loads((tmp_path / folder / "results.json").read_text(encoding="utf-8"))
        assert {name: written["cells"][name]["ways"] for name in results["cells"]} == {
            name: cell["ways"] for name, cell in results["cells"].items()
        }
        return results

    return run_bench


@pytest.mark.slow
def test_every_way_decodes_the_same_text(run: Run, tmp_path: Path) -> None:
    results = run("--quantizations", "none,nf4", "--batch-sizes", "1,2")
    single, batch = results["cells"]["code T=0 B=1"], results["cells"]["code T=0 B=2"]
    names = {"draft_model K=3", ADAPTIVE, "draft_model K=3, nf4", f"{ADAPTIVE}, nf4"}
    hosts = {ASSISTANT, "assistant_model, heuristic", "assistant_model K=2", PROMPT_LOOKUP}
    assert single["rows"].keys() == {PLAIN, "plain again"} | names | hosts
    assert batch["rows"].keys() == {PLAIN, "plain again"} | names
    assert batch["refused"].keys() >= hosts
    for cell in (single, batch):
        for name, way in cell["ways"].items():
            assert way["num_differing_outputs"] == 0, name
            assert not cell["rows"][name]["is_wrong"]
            assert way["new_tokens"] == [12] * cell["num_batches"]
            assert way["weight_bytes"] > 0
    assert single["ways"]["draft_model K=3, nf4"]["speculation"]["draft_quantization"] == "nf4"
    assert single["ways"]["draft_model K=3"]["speculation"]["mean_acceptance_length"] > 1
    assert single["rows"]["draft_model K=3"]["tokens_per_target_forward"] > 1
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "### code T=0 B=2" in report
    assert "transformers refuses batches there" in report


FEW = ["--leave-out", "plain-compiled,assistant,assistant-lengths,prompt-lookup,adaptive"]


def test_a_run_that_was_stopped_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(*FEW, "--temperatures", "0,0.7")
    calls: list[Any] = []
    measure = runner.timed_call
    monkeypatch.setattr(runner, "timed_call", lambda *arguments: calls.append(arguments) or measure(*arguments))
    assert run(*FEW, "--temperatures", "0,0.7")["cells"] == first["cells"]
    assert not calls
    third = run(*FEW, "--temperatures", "0,1")
    assert third["cells"].keys() == {"code T=0 B=1", "code T=1 B=1"}, "only what was asked for counts"
    assert {call[2].get("temperature") for call in calls} == {1.0}


def test_prompts_that_changed_are_measured_anew(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "mine.txt"
    own.write_text("def main():\n", encoding="utf-8")
    first = run(*FEW, "--prompts", str(own))
    own.write_text("class Tree(Node):\n", encoding="utf-8")
    second = run(*FEW, "--prompts", str(own))
    assert first["cells"]["mine T=0 B=1"]["prompts"] != second["cells"]["mine T=0 B=1"]["prompts"]
    assert first["cells"]["mine T=0 B=1"]["prompt_tokens"] != second["cells"]["mine T=0 B=1"]["prompt_tokens"]


def test_more_prompts_than_there_are_count_once(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "mine.txt"
    own.write_text("def main():\nclass Tree:\n", encoding="utf-8")
    results = run(*FEW, "--prompts", str(own), "--num-prompts", "9", "--batch-sizes", "1,4", "--max-new-tokens", "4")
    assert [cell["num_batches"] for cell in results["cells"].values()] == [2, 1]


def test_two_runs_are_compared(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(*FEW, folder="a")
    run(*FEW, folder="b")
    bench("--compare", str(tmp_path / "a"), str(tmp_path / "b" / "results.json"))
    assert "of 2 speed-ups agree within their intervals." in capsys.readouterr().out


def test_runs_that_do_not_belong_together_are_told_apart(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(*FEW)
    other = json.loads(json.dumps(results))
    other["provenance"]["hardware"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(other), encoding="utf-8")
    bench("--compare", str(tmp_path / "out"), str(tmp_path / "other.json"))
    assert "The two runs differ in more than time: hardware" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ['{"provenance": 1, "pair": {}, "cells": {}}', '{"provenance": {}, "pair": {}, "cells": {"x": 3}}', "[]"]
)
def test_damaged_results_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as error:
        main(["bench", *QUICK, *FEW, "--no-plots", "--output", str(tmp_path)])
    assert error.value.code == 1
    assert "must be the `results.json` of `hf-specdec bench`" in capsys.readouterr().err


def test_long_prompts_and_own_prompts(run: Run, tmp_path: Path) -> None:
    own = tmp_path / "mine.jsonl"
    own.write_text('{"prompt": "def main():"}\n{"prompt": "class Tree:"}\n', encoding="utf-8")
    results = run(*FEW, "--prompts", str(own), "--prompt-tokens", "0,40")
    assert results["cells"].keys() == {"mine T=0 B=1", "mine T=0 B=1 P=40"}
    assert results["cells"]["mine T=0 B=1 P=40"]["prompt_tokens"] == [40, 40]


def test_a_synthetic_pair_says_that_its_acceptance_is_set(run: Run, tmp_path: Path) -> None:
    results = run(*FEW, "--synthetic", "tiny-target:tiny-draft", "--acceptance", "1")
    assert "set" in results["pair"]["note"]
    way = results["cells"]["synthetic T=0 B=1"]["ways"]["draft_model K=3"]
    assert way["speculation"]["token_acceptance_rate"] == 1.0
    assert results["pair"]["note"] in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_a_random_draft_is_called_that_and_guesses_by_chance(run: Run, tmp_path: Path) -> None:
    left_out = ["--leave-out", "plain-compiled,assistant,assistant-lengths,prompt-lookup"]
    results = run(*left_out, "--draft", "random", "--quantizations", "none,nf4", "--max-new-tokens", "24")
    cell = results["cells"]["code T=0 B=1"]
    assert cell["ways"]["draft_model K=3"]["speculation"]["token_acceptance_rate"] < 0.05
    assert cell["ways"][ADAPTIVE]["num_differing_outputs"] == 0
    assert cell["refused"].keys() >= {"draft_model K=3, nf4"}
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "# the bundled target with a draft of random weights" in report
    assert results["pair"]["note"] in report
    assert "random weights" in results["pair"]["note"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", *QUICK, *left_out, "--no-plots", "--output", str(tmp_path / "out")])
    assert ended.value.code == 1, "the trained draft's figures must not go on from these"


def test_a_seed_draws_the_same_random_draft() -> None:
    trained = load_demo_pair(num_parameters=0, dtype=torch.bfloat16).draft
    state = torch.get_rng_state()
    first, again, other = (with_random_weights(trained, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.dtype == trained.dtype
    assert first.config.to_dict() == trained.config.to_dict()
    weights = [model.get_input_embeddings().weight for model in (first, again, other, trained)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])


def test_pictures_are_drawn_where_matplotlib_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    left_out = ["--leave-out", "plain-compiled,assistant,assistant-lengths,prompt-lookup"]
    bench(*QUICK, *left_out, "--output", str(tmp_path), "--batch-sizes", "1,2")
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures >= {"speed_up_by_workload.png", "acceptance_by_position.png", "latency_against_batch.png"}
    assert all(picture in (tmp_path / "report.md").read_text(encoding="utf-8") for picture in pictures)
    assert "code T=0 B=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "poems"], "must be of code, json"),
        (["--temperatures", "-1"], "numbers of at least 0"),
        (["--batch-sizes", "0"], "numbers of at least 1"),
        (["--quantizations", "int3"], "but holds 'int3'"),
        (["--runners", "graph"], "but holds 'graph'"),
        (["--leave-out", "everything"], "but holds 'everything'"),
        (["--model", "org/target"], "needs the other of the two"),
        (["--draft", "org/draft"], "needs the other of the two"),
        (["--model", "org/target", "--draft", "random"], "draws the weights of the bundled draft anew"),
        (["--synthetic", "a:b", "--draft", "random"], "cannot be combined"),
        (["--synthetic", "a:b", "--model", "x", "--draft", "y"], "cannot be combined"),
        (["--compare", "nowhere", "neither"], "must be two folders"),
        (["--lengths", "9999"], "at most 256"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    # The package's attribute of that name is the command.
    module = sys.modules["hf_specdec.cli.bench"]
    monkeypatch.setattr(module, "_load", lambda *_: pytest.fail("nothing must be loaded"))
    with pytest.raises(SystemExit) as error:
        main(["bench", *arguments])
    assert error.value.code in (1, 2)
    # Usage errors come in a frame.
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_an_assistant_shares_the_drafts_weights_and_nothing_else() -> None:
    draft = load_demo_pair(num_parameters=0).draft
    assistant = ways.assistant_of(draft, {"num_assistant_tokens": 3})
    assert assistant.generation_config.num_assistant_tokens == 3
    assert draft.generation_config.num_assistant_tokens != 3
    pairs = zip(assistant.parameters(), draft.parameters(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)


def test_a_call_without_rounds_has_values_too() -> None:
    assert speculation_values([SpeculationStats()])["mean_draft_length"] == 0.0


def test_a_device_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["bench", "--device", "nonsense"])
    assert error.value.code == 2
    assert "must be a device of this machine" in " ".join(capsys.readouterr().err.split())
