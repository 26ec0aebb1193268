"""The benchmark of quantized drafts: interleaving, growing a draft, arithmetic, the table, and one small run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import models
from hf_specdec.benchmark import quantized_drafts
from hf_specdec.benchmark.grown_draft import WIDTH_MULTIPLE, grown, save_grown
from hf_specdec.benchmark.interleaving import Timing, interleaved
from hf_specdec.benchmark.quantized_table import AUTO, FIXED, rendered, with_summary
from hf_specdec.demo import load_demo_pair
from hf_specdec.metrics import RoundRecord, SpeculationStats

# ---- interleaving --------------------------------------------------------------------------------------------------


class Scripted:
    """A target whose `generate` notes who called it, and continues by what its keywords say."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, float]] = []

    def generate(self, *, input_ids: torch.Tensor, streamer: Any, way: str, add: list[int], **_: Any) -> Any:
        self.calls.append((way, int(input_ids[0, 0]), float(torch.rand(()))))
        for value in (input_ids, *add):
            streamer.put(torch.as_tensor(value))
        stats = None if way == "plain" else SpeculationStats(num_new_tokens=len(add))
        return SimpleNamespace(sequences=torch.cat([input_ids, torch.tensor([add])], dim=1), speculation=stats)


def test_ways_take_turns_with_one_seed_per_prompt_and_repeat() -> None:
    target = Scripted()
    inputs = [{"input_ids": torch.tensor([[index]])} for index in (10, 20)]
    ways = {"plain": {"way": "plain", "add": [1, 2]}, "same": {"way": "same", "add": [1, 2]}}
    ways["other"] = {"way": "other", "add": [1, 3, 4]}
    state = torch.get_rng_state()
    timings = interleaved(target, inputs, ways, repeats=2)
    torch.set_rng_state(state)
    assert [(way, prompt) for way, prompt, _ in target.calls] == [
        *[(way, 10) for way in ("plain", "same", "other")],
        *[(way, 20) for way in ("plain", "same", "other")],
        *[(way, 10) for way in ("other", "same", "plain")],
        *[(way, 20) for way in ("other", "same", "plain")],
    ]
    seeds = [{number for _, _, number in target.calls[start : start + 3]} for start in range(0, 12, 3)]
    assert all(len(own) == 1 for own in seeds)
    assert len(set.union(*seeds)) == 4
    assert [timing.num_differing_outputs for timing in timings.values()] == [0, 0, 4]
    assert timings["other"].num_new_tokens == [6, 6]
    assert [len(calls) for calls in timings["other"].calls] == [2, 2]
    assert timings["plain"].calls == [[], []]
    for timing in timings.values():
        assert len(timing.seconds) == len(timing.first) == 2
        assert all(0 < first <= whole for first, whole in zip(timing.first, timing.seconds, strict=True))


def test_times_are_compared_by_the_token() -> None:
    timing = Timing(seconds=[6.0, 1.0], num_new_tokens=[3, 0])
    assert timing.seconds_per_token == [2.0, 1.0]


# ---- growing -------------------------------------------------------------------------------------------------------


def test_a_grown_draft_computes_the_same_and_is_as_large_as_asked() -> None:
    draft = load_demo_pair(num_parameters=0).draft
    state = torch.get_rng_state()
    larger: Any = grown(draft, 2_000_000)
    assert torch.equal(torch.get_rng_state(), state)
    assert larger.num_parameters() - draft.num_parameters() == pytest.approx(2_000_000, rel=0.03)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(larger(ids).logits, draft(ids).logits, rtol=0, atol=2e-4)
    assert draft.config.intermediate_size == 384


def test_a_grown_draft_is_quantized_whole_and_loads_from_its_folder(tmp_path: Path) -> None:
    draft = models.build_target(intermediate_size=128, hidden_size=64)
    larger = save_grown(draft, models.build_tokenizer(), 100_000, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.intermediate_size == larger.config.intermediate_size > 128
    assert loaded.config.intermediate_size % WIDTH_MULTIPLE == 0
    for name, weight in larger.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("make", "number", "message"),
    [
        (lambda: models.build_mamba(), 10**6, "must have MLPs"),
        (lambda: models.build_target(intermediate_size=96), 10**6, "a multiple of 64"),
        (lambda: models.build_target(), 10, "about 12,288 parameters or more, but is to grow by 10"),
    ],
)
def test_a_draft_that_cannot_grow_is_refused(make: Any, number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grown(make(), number)


def test_other_families_grow_too() -> None:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    draft = MistralForCausalLM(config).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(grown(draft, 50_000)(ids).logits, draft(ids).logits, rtol=0, atol=1e-5)


# ---- arithmetic and table ------------------------------------------------------------------------------------------


def way(*seconds: float, step: float | None = None, **values: Any) -> dict[str, Any]:
    return {
        "seconds": list(seconds),
        "draft_step_milliseconds": [step] * len(seconds),
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 3.0,
        "num_outputs": 3,
        "num_differing_outputs": 0,
        "fallbacks": [],
        **values,
    }


def results(**rows: dict[str, Any]) -> dict[str, Any]:
    options = {"num_draft_tokens": "4", "dtype": "bfloat16", "max_new_tokens": "48", "repeats": "2"}
    origin = {"date": "2026-01-31", "hardware": "a machine", "torch": "1", "transformers": "2", "bitsandbytes": "3"}
    return {
        "provenance": {**origin, "options": options},
        "target": {"name": "T", "num_parameters": 304_000_000},
        "draft": {"name": "D", "num_parameters": 20_900_000},
        "num_prompts": 3,
        "plain": {"seconds": [4.0, 6.0]},
        "plain_again": {"seconds": [4.0, 5.0]},
        "rows": rows,
    }


def row(fixed: dict[str, Any], auto: dict[str, Any], size: int = 2_000_000) -> dict[str, Any]:
    return {"predicted_bytes": size, "measured_bytes": size + 100_000, FIXED: fixed, AUTO: auto}


def test_ratios_are_those_of_one_repeat() -> None:
    summary = with_summary(
        results(none=row(way(2.0, 2.0, step=10.0), way(1.0, 3.0)), nf4=row(way(4.0, 3.0, step=15.0), way(2.0, 2.0)))
    )["summary"]
    assert summary["plain_again_to_plain"] == {"median": 1.1, "min": 1.0, "max": 1.2}
    assert summary["rows"]["none"]["fixed_to_plain"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert summary["rows"]["none"]["auto_to_plain"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert summary["rows"]["none"]["draft_step_ratio"]["median"] == 1.0
    assert summary["rows"]["nf4"]["draft_step_ratio"] == {"median": 1.5, "min": 1.5, "max": 1.5}


def test_the_table_names_every_figure_and_where_it_is_from() -> None:
    text = rendered(
        results(
            none=row(way(2.0, 2.0, step=10.0), way(1.0, 3.0)),
            int8=row(
                way(4.0, 3.0, step=15.0, num_differing_outputs=1), way(2.0, 2.0, fallbacks=["the draft failed"]), 10**9
            ),
        )
    )
    heading, table, noise = text.split("\n\n")
    assert "Target T (304 M parameters), draft D (20.9 M), bfloat16, greedy" in heading
    assert "2026-01-31 on a machine, torch 1, transformers 2, bitsandbytes 3." in heading
    lines = table.splitlines()
    assert "speed-up, K = 4" in lines[0]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == (
        "| none | 2.0 MB | 2.1 MB | 1.00 (1.00–1.00) × | 50.0% | 3.00 | 2.50 (2.00–3.00) | 3.00 (2.00–4.00) | 0 of 6 |"
    )
    assert "| 1.0 GB | 1.0 GB | 1.50 (1.50–1.50) × |" in lines[3]
    assert lines[3].endswith("| 2.50 (2.00–3.00) (decoded plainly) | 1 of 6 |")
    assert noise == "Plain decoding against itself: 1.10 (1.00–1.20).\n"


@pytest.mark.parametrize("step", [None, 10.0])
def test_without_anything_to_compare_with_there_is_no_ratio(step: float | None) -> None:
    rows = {"nf4": row(way(2.0, 2.0, step=10.0), way(1.0, 1.0))}
    if step is None:
        rows["none"] = row(way(2.0, 2.0, step=None), way(1.0, 1.0))
    assert "draft_step_ratio" not in with_summary(results(**rows))["summary"]["rows"]["nf4"]
    assert "| 2.1 MB | – | 50.0% |" in rendered(results(**rows))


def test_deeds_are_per_repeat_where_they_are_times() -> None:
    def stats(seconds: float, num_draft_tokens: int, num_accepted: int) -> SpeculationStats:
        record = RoundRecord(
            num_draft_tokens=num_draft_tokens,
            rows=(0,),
            num_accepted_tokens=(num_accepted,),
            num_evaluated_tokens=(num_draft_tokens,),
            committed_token_ids=((1,) * (num_accepted + 1),),
            draft_seconds=seconds,
            verify_seconds=0.0,
            round_seconds=seconds,
        )
        return SpeculationStats(rounds=[record])

    timing = Timing(
        first=[0.1, 0.1], seconds=[1.0, 2.0], calls=[[stats(0.2, 4, 4), stats(0.2, 4, 0)], [stats(0.0, 0, 0)]]
    )
    deeds = quantized_drafts.deeds_of(timing)
    assert deeds["draft_step_milliseconds"] == [pytest.approx(50.0), None]
    assert deeds["acceptance_rate"] == 0.5
    assert deeds["plain_step_share"] == round(1 / 3, 4)
    assert deeds["num_outputs"] == 3
    json.dumps(deeds)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "org/large"], "--model and --draft belong together"),
        (["--quantizations", "nf4,int4"], "but is 'int4'"),
        (["--workloads", ""], "must be of code"),
    ],
)
def test_wrong_options_end_before_anything_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_drafts, "opened_pair", lambda _: pytest.fail("something was loaded"))
    with pytest.raises(SystemExit):
        quantized_drafts.main(arguments)
    assert message in capsys.readouterr().err


def test_only_the_bundled_draft_grows_unasked() -> None:
    parser = quantized_drafts.parser_of_options()
    own = quantized_drafts.checked_options(parser, ["--model", "a", "--draft", "b"])
    assert own.draft_parameters == 0
    assert quantized_drafts.checked_options(parser, []).draft_parameters == quantized_drafts.DRAFT_PARAMETERS


@pytest.mark.slow
def test_a_small_run_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    sizes = ["--num-parameters", "1000000", "--draft-parameters", "200000", "--max-new-tokens", "8"]
    how = ["--repeats", "1", "--workloads", "code", "--dtype", "float32", "--output", str(path)]
    threads = torch.get_num_threads()
    quantized_drafts.main([*sizes, *how])
    torch.set_num_threads(threads)
    measured = json.loads(path.read_text(encoding="utf-8"))
    text = capsys.readouterr().out
    assert text == rendered(measured)
    assert list(measured["rows"]) == ["none", "nf4", "fp4", "int8"]
    for kind, own in measured["rows"].items():
        assert own["measured_bytes"] == pytest.approx(own["predicted_bytes"], rel=0.02), kind
        assert own[FIXED]["num_differing_outputs"] == own[AUTO]["num_differing_outputs"] == 0
        assert own[FIXED]["fallbacks"] == own[AUTO]["fallbacks"] == []
        assert own[FIXED]["draft_step_milliseconds"][0] > 0
    sizes_in_bytes = [own["measured_bytes"] for own in measured["rows"].values()]
    assert sizes_in_bytes[1] < sizes_in_bytes[3] < sizes_in_bytes[0]
    quantized_drafts.main(["--render", str(path)])
    assert capsys.readouterr().out == text
