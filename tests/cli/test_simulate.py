"""`hf-specdec simulate`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_specdec.benchmark.rivals import RULES
from hf_specdec.benchmark.simulator import CostModel, simulate
from hf_specdec.benchmark.traces import synthetic_trace
from hf_specdec.cli import app, main
from hf_specdec.controller import FixedDraftLength
from hf_specdec.metrics import RoundRecord, SpeculationStats

SMALL = "simulate --num-tokens 300 --seeds 1"


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    record = RoundRecord(
        num_draft_tokens=2,
        rows=(0,),
        num_accepted_tokens=(2,),
        num_evaluated_tokens=(2,),
        committed_token_ids=((1, 2, 3),),
        draft_seconds=0.1,
        verify_seconds=1.0,
        round_seconds=1.2,
        survival=((1.0, 1.0),),
        confidences=((0.9, 0.9),),
    )
    path = tmp_path / "poem.json"
    SpeculationStats(rounds=[record]).save(path)
    return path


def test_simulate_prints_a_line_and_bars_per_cell(runner: CliRunner) -> None:
    result = runner.invoke(app, f"{SMALL} --cost-ratio .05,.5 --workload easy,hard")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    cells = [line.split()[:2] for line in lines if line.split()[:1] in (["0.05"], ["0.5"])]
    assert cells == [["0.05", "easy"], ["0.05", "hard"], ["0.5", "easy"], ["0.5", "hard"]]
    bars = [line for line in lines if "█" in line]
    assert len(bars) == 4 * (2 + len(RULES))
    assert all(any(f"  {name} " in line for line in bars) for name in RULES)
    assert "Simulating" not in result.stdout


def test_the_longest_bar_is_the_fastest_rule(runner: CliRunner) -> None:
    result = runner.invoke(app, f"{SMALL} --cost-ratio .5 --workload hard")
    bars = [line for line in result.stdout.splitlines() if "█" in line]
    speeds = {line.count("█"): float(line.split()[-1]) for line in bars}
    assert speeds[max(speeds)] == max(speeds.values()) > speeds[min(speeds)]


def test_simulate_prints_json(runner: CliRunner) -> None:
    result = runner.invoke(app, f"{SMALL} --cost-ratio .3 --workload switching --json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert (values["num_tokens"], values["seeds"], values["noise"]) == (300, 1, 0.0)
    (cell,) = values["cells"]
    assert (cell["cost_ratio"], cell["workload"]) == (0.3, "switching")
    assert set(cell["speeds"]) == {"best fixed", "fixed 5", *RULES}
    assert cell["speeds"]["best fixed"] == max(cell["fixed"]) == cell["fixed"][cell["best_fixed_length"]]
    own = simulate(FixedDraftLength(5), synthetic_trace("switching", 300), CostModel(draft_step=0.3), 300)
    assert cell["speeds"]["fixed 5"] == pytest.approx(own.speed)
    assert cell["rules"]["ours"]["lowest_speed"] == pytest.approx(cell["speeds"]["ours"])


def test_the_whole_grid_is_the_default(runner: CliRunner) -> None:
    values = json.loads(runner.invoke(app, "simulate --num-tokens 40 --seeds 1 --json").stdout)
    cells = [(cell["cost_ratio"], cell["workload"]) for cell in values["cells"]]
    assert cells == [(ratio, name) for ratio in (0.05, 0.165, 0.3, 0.5) for name in ("easy", "hard", "switching")]


def test_seeds_are_averaged(runner: CliRunner) -> None:
    command = "simulate --num-tokens 300 --cost-ratio .3 --workload easy --json --seeds"
    one, three = (json.loads(runner.invoke(app, f"{command} {seeds}").stdout)["cells"][0] for seeds in (1, 3))
    assert three["speeds"]["UCB1"] != one["speeds"]["UCB1"]
    assert three["rules"]["UCB1"]["lowest_speed"] < three["speeds"]["UCB1"]


def test_a_recorded_run_is_simulated_alone_unless_workloads_are_named(runner: CliRunner, trace_file: Path) -> None:
    alone = runner.invoke(app, f"{SMALL} --cost-ratio .1 --trace {trace_file} --json")
    assert alone.exit_code == 0, alone.output
    (cell,) = json.loads(alone.stdout)["cells"]
    assert cell["workload"] == "poem"
    # Everything was accepted: the longer the faster.
    assert cell["best_fixed_length"] == 16
    both = runner.invoke(app, f"{SMALL} --cost-ratio .1 --trace {trace_file} --workload hard --json")
    assert [cell["workload"] for cell in json.loads(both.stdout)["cells"]] == ["hard", "poem"]


def test_two_files_of_one_name_go_by_their_paths(runner: CliRunner, trace_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / trace_file.name
    other.parent.mkdir()
    other.write_text(trace_file.read_text())
    result = runner.invoke(app, f"{SMALL} --cost-ratio .1 --trace {trace_file} --trace {other} --json")
    assert [cell["workload"] for cell in json.loads(result.stdout)["cells"]] == [str(trace_file), str(other)]


def test_simulate_draws_a_picture(runner: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "speeds.png"
    result = runner.invoke(app, f"{SMALL} --cost-ratio .1,.5 --workload easy,hard --plot {path}")
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in result.stderr


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stop:
        main([*SMALL.split(), "--plot", str(tmp_path / "x.png")])
    output = capsys.readouterr()
    assert stop.value.code == 1
    assert 'pip install "hf-specdec[bench]"' in output.err
    assert output.out == ""


@pytest.mark.parametrize("content", ["{}", "no json", "[]"])
def test_a_bad_trace_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        main([*SMALL.split(), "--trace", str(path)])
    assert stop.value.code == 1
    assert "bad.json" in (error := capsys.readouterr().err)
    assert "SpeculationStats.save" in error


def test_a_missing_trace_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*SMALL.split(), "--trace", str(tmp_path / "none.json")])
    assert stop.value.code == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--cost-ratio", "fast"), ("--cost-ratio", "-1"), ("--cost-ratio", "inf"), ("--workload", "odd")],
)
def test_wrong_usage_names_the_option(runner: CliRunner, option: str, value: str) -> None:
    result = runner.invoke(app, [*SMALL.split(), option, value])
    assert result.exit_code == 2
    assert option in result.stderr
