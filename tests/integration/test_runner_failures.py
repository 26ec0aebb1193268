"""What goes wrong in prepared forwards, or changes under them, leaves the text as it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from integration.comparing import assert_same_ids, plain, prompts
from integration.harness import build_gpt2
from integration.stand_ins import before_forwards, decode, stand_in_for_graphs

import hf_specdec
from hf_specdec import call
from hf_specdec.controller import FixedDraftLength
from hf_specdec.engine import lending, runners, static


@pytest.fixture
def replaying(monkeypatch):
    """Stand in for CUDA graphs; see `stand_in_for_graphs`."""
    return stand_in_for_graphs(monkeypatch)


def last_layer_runs(model, look):
    return before_forwards(model.model.layers[-1], lambda args, _: look(args[0]))


@pytest.mark.parametrize("lengths", [[6], [3, 6, 5]])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_capture_that_breaks_off_inside_a_forward(target, drafts, replaying, lengths, role):
    hf_specdec.enable(target)
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=24)
    reading = {"target": target, "draft": drafts["identical"]}[role]
    with last_layer_runs(reading, lambda states: states.sum().item() and None):
        output = decode(target, inputs, drafts["identical"], "cuda_graph")
    assert_same_ids(output.sequences, wanted)
    assert f"{role}: a forward could not be captured" in output.speculation.runner_reason
    assert (output.speculation.acceptance_rate, output.speculation.fallbacks) == (1.0, [])


@pytest.mark.parametrize("lengths", [[6], [3, 6, 5]])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_prepared_forward_that_breaks_off(target, drafts, replaying, monkeypatch, lengths, error):
    right, replays = runners.RUNNERS["cuda_graph"], itertools.count()

    def broken(states):
        raise error("once")

    def breaking(function, model, inputs):
        made = right(function, model, inputs)

        def run(model, *given):
            if model is not target or next(replays) != 8:
                return made(model, *given)
            with last_layer_runs(target, broken):
                return made(model, *given)

        return run

    hf_specdec.enable(target)
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=24)
    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", breaking)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            decode(target, inputs, drafts["unrelated"], "cuda_graph")
    else:
        output = decode(target, inputs, drafts["unrelated"], "cuda_graph")
        assert_same_ids(output.sequences, wanted)
        assert "a forward that was captured failed (ValueError: once)" in output.speculation.runner_reason
    assert_same_ids(decode(target, inputs, drafts["unrelated"], "cuda_graph").sequences, wanted)


def test_what_a_wrong_forward_wrote_is_written_again(target, drafts, replaying, monkeypatch):
    right = runners.RUNNERS["cuda_graph"]

    def wrong(function, model, inputs):
        made = right(function, model, inputs)
        return lambda model, tokens, *given: made(model, (tokens + 1) % 64, *given)

    hf_specdec.enable(target)
    inputs = prompts([6])
    wanted = plain(target, inputs, max_new_tokens=24)
    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", wrong)
    output = decode(target, inputs, drafts["noisy"], "cuda_graph")
    assert_same_ids(output.sequences, wanted)
    assert "gave other logits" in output.speculation.runner_reason


def test_another_implementation_of_attention_is_captured_anew(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([6])
    for attention in ("sdpa", "eager", "sdpa"):
        for model in (target, drafts["identical"]):
            model.set_attn_implementation(attention)
        stats = decode(target, inputs, drafts["identical"], "cuda_graph").speculation
        assert (stats.runner, stats.draft_runner, stats.acceptance_rate) == ("cuda_graph", "cuda_graph", 1.0)


def test_autocast_is_captured(target, drafts, replaying):
    hf_specdec.enable(target)
    with torch.autocast("cpu", torch.bfloat16):
        stats = decode(target, prompts([3, 6, 5]), drafts["noisy"], "cuda_graph").speculation
    assert (stats.runner, stats.runner_reason, stats.fallbacks) == ("cuda_graph", "", [])


def test_a_capture_keeps_no_cast_of_autocasts(target, drafts, replaying, monkeypatch):
    right, kept = runners.RUNNERS["cuda_graph"], []

    def watching(*given):
        kept.append(torch.is_autocast_cache_enabled())
        return right(*given)

    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", watching)
    hf_specdec.enable(target)
    with torch.autocast("cpu", torch.bfloat16):
        decode(target, prompts([6]), drafts["noisy"], "cuda_graph")
        assert torch.is_autocast_cache_enabled()
    assert set(kept) == {False}


def test_units_of_many_temperatures_are_not_all_kept(target, drafts, replaying, monkeypatch):
    monkeypatch.setattr(static, "MOST_UNITS", 3)
    hf_specdec.enable(target)
    for step in range(5):
        decode(target, prompts([6]), drafts["noisy"], "cuda_graph", do_sample=True, temperature=0.5 + step / 10)
    units = [len(kept._units) for kept in lending._kept[target][drafts["noisy"]].values()]
    assert units == [3]


def test_a_call_that_reads_more_than_tokens_does_not_end_captures(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([6])
    runs = []
    for more in ({}, {"output_router_logits": False}, {}):
        before = len(replaying)
        stats = decode(target, inputs, drafts["noisy"], "cuda_graph", **more).speculation
        runs.append((stats.runner, "reads more than tokens" in stats.runner_reason, len(replaying) > before))
    assert runs == [("cuda_graph", False, True), ("eager", True, False), ("cuda_graph", False, False)]


def test_padding_that_a_unit_reads_again_has_positions(replaying, monkeypatch):
    class Pausing(FixedDraftLength):
        """Drafts in one round of three."""

        rounds = 0

        def next_num_draft_tokens(self, outlook):
            self.rounds += 1
            return 3 if self.rounds % 3 == 1 else 0

    monkeypatch.setattr(call, "_controller", lambda *_: Pausing(3))
    target = hf_specdec.enable(build_gpt2(256))
    # It has nothing accepted, so that the shortest row stays short.
    draft = build_gpt2(256, seed=100)
    inputs = prompts([1, 7, 7])
    wanted = plain(target, inputs, max_new_tokens=24)
    lowest, widths = [], []
    positions = before_forwards(draft.transformer.wpe, lambda args, _: lowest.append(args[0].amin()))
    with positions, before_forwards(draft, lambda _, given: widths.append(given["input_ids"].shape[1])):
        output = decode(target, inputs, draft, "cuda_graph")
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.draft_runner == "cuda_graph"
    assert 8 in widths
    assert min(lowest) == 0


def profiled(target, draft):
    return target.generate(
        **prompts([6]),
        draft_model=draft,
        num_draft_tokens=3,
        max_new_tokens=12,
        speculative_config={"profile": True},
        return_dict_in_generate=True,
    ).speculation


def test_a_profile_leaves_a_recorder_of_the_callers_alone(target, drafts, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hf_specdec.enable(target)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
        stats = profiled(target, drafts["noisy"])
    assert (stats.trace_file, bool(stats.profile)) == ("", True)
    assert any("hf_specdec verify" in event.key for event in recorder.key_averages())


def test_of_profiles_at_the_same_time_one_has_a_trace(target, drafts, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hf_specdec.enable(target)
    files = []

    def generate_again(_):
        if not files:
            files.append(profiled(target, drafts["noisy"]).trace_file)

    outer = target.generate(
        **prompts([6]),
        draft_model=drafts["noisy"],
        max_new_tokens=12,
        speculative_config={"profile": True, "on_round": generate_again},
        return_dict_in_generate=True,
    )
    assert files == [""]
    assert outer.speculation.trace_file


def test_a_trace_that_cannot_be_written_costs_no_text(target, drafts, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    hf_specdec.enable(target)
    with pytest.warns(hf_specdec.SpeculationWarning, match="trace of this call could not be written"):
        assert profiled(target, drafts["noisy"]).trace_file == ""
