"""Compiled and captured forwards: the same text, prepared once per shape, and the model itself when that fails."""

from __future__ import annotations

import copy
import gc
import shutil
import weakref

import pytest
import torch
from integration.comparing import EVERY_OUTCOME, KINDS, assert_same_ids, outcomes_of, plain, prompts
from integration.harness import build_mistral
from integration.stand_ins import compiled_lightly, decode, stand_in_for_graphs

import hf_specdec
import models
from hf_specdec.benchmark.bench.calls import timed_call
from hf_specdec.controller import AdaptiveDraftLength
from hf_specdec.engine import runners
from hf_specdec.engine.cache import bucket_of
from hf_specdec.errors import InvalidConfigError


@pytest.fixture
def replaying(monkeypatch):
    """Stand in for CUDA graphs; see `stand_in_for_graphs`."""
    return stand_in_for_graphs(monkeypatch)


@pytest.mark.parametrize("lengths", [[6], [3, 6, 5]])
def test_captured_forwards_give_the_same_text(target, drafts, replaying, lengths):
    hf_specdec.enable(target)
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=24)
    seen = set()
    for kind in KINDS:
        output = decode(target, inputs, drafts[kind], "cuda_graph")
        assert_same_ids(output.sequences, wanted)
        stats = output.speculation
        assert (stats.runner, stats.draft_runner, stats.runner_reason) == ("cuda_graph", "cuda_graph", "")
        seen |= outcomes_of(stats.rounds)
    assert seen == EVERY_OUTCOME
    assert replaying


def test_captured_forwards_give_the_same_text_in_windows_and_past_several_buckets(replaying):
    target = hf_specdec.enable(build_mistral())
    inputs = prompts([6])
    wanted = plain(target, inputs, max_new_tokens=140)
    for draft in models.build_drafts(target).values():
        output = decode(target, inputs, draft, "cuda_graph", max_new_tokens=140, num_draft_tokens=5)
        assert_same_ids(output.sequences, wanted)
        assert output.speculation.runner == "cuda_graph"


def test_rows_that_stop_apart_leave_captured_batches(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([3, 6, 5])
    free = plain(target, inputs, max_new_tokens=24)
    stop = int(free[0, 6 + 4])
    wanted = plain(target, inputs, max_new_tokens=24, eos_token_id=stop, pad_token_id=0)
    for kind in KINDS:
        output = decode(target, inputs, drafts[kind], "cuda_graph", eos_token_id=stop, pad_token_id=0)
        assert_same_ids(output.sequences, wanted)
        assert output.speculation.runner == "cuda_graph"
        assert len({len(record.rows) for record in output.speculation.rounds}) > 1


def test_shapes_are_prepared_once_for_many_calls(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([6])
    decode(target, inputs, drafts["noisy"], "cuda_graph")
    before = len(replaying)
    decode(target, inputs, drafts["noisy"], "cuda_graph")
    decode(target, prompts([5]), drafts["noisy"], "cuda_graph", max_new_tokens=20)
    assert len(replaying) == before > 0
    for _ in range(2):
        decode(target, prompts([3, 6, 5]), drafts["noisy"], "cuda_graph")
        decode(target, inputs, drafts["noisy"], "cuda_graph")
        seen, before = len(replaying) - before, len(replaying)
    assert not seen
    hf_specdec.disable(target)
    hf_specdec.enable(target)
    decode(target, inputs, drafts["noisy"], "cuda_graph")
    assert len(replaying) > before


def test_a_draft_with_pointwise_processors_proposes_in_one_unit(target, drafts, replaying, monkeypatch):
    hf_specdec.enable(target)
    torch.manual_seed(0)
    steps: list[int] = []
    by_steps = hf_specdec.drafters.model.ModelDrafter._proposed_by_steps
    monkeypatch.setattr(
        hf_specdec.drafters.model.ModelDrafter,
        "_proposed_by_steps",
        lambda self, *args: steps.append(args[0]) or by_steps(self, *args),
    )
    output = decode(
        target, prompts([6]), drafts["noisy"], "cuda_graph", do_sample=True, temperature=0.8, top_k=20, top_p=0.9
    )
    assert output.speculation.draft_runner == "cuda_graph"
    assert not steps
    assert outcomes_of(output.speculation.rounds) == EVERY_OUTCOME
    decode(target, prompts([6]), drafts["noisy"], "cuda_graph", repetition_penalty=1.3)
    assert steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_text_before_and_after_forwards_are_captured(target, drafts, replaying, kind):
    hf_specdec.enable(target)
    texts = []
    for runner in ("eager", "cuda_graph", "cuda_graph"):
        torch.manual_seed(3)
        output = decode(target, prompts([3, 6, 5]), drafts[kind], runner, do_sample=True, temperature=0.9)
        assert output.speculation.runner == runner
        texts.append(output.sequences)
    assert_same_ids(texts[1], texts[0])
    assert_same_ids(texts[2], texts[0])


@pytest.mark.parametrize("lengths", [[6], pytest.param([3, 6, 5], marks=pytest.mark.slow)])
def test_compiled_forwards_give_the_same_text(target, drafts, monkeypatch, lengths):
    traced = compiled_lightly(monkeypatch)
    hf_specdec.enable(target)
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=40)
    seen = set()
    for kind in KINDS:
        output = decode(target, inputs, drafts[kind], "compiled", max_new_tokens=40)
        assert_same_ids(output.sequences, wanted)
        assert (output.speculation.runner, output.speculation.runner_reason) == ("compiled", "")
        seen |= outcomes_of(output.speculation.rounds)
    assert seen == EVERY_OUTCOME
    before = len(traced)
    decode(target, inputs, drafts["noisy"], "compiled", max_new_tokens=40)
    assert len(traced) == before > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_real_compiler_gives_the_same_text(target, drafts):
    hf_specdec.enable(target)
    inputs = prompts([6])
    wanted = plain(target, inputs, max_new_tokens=30)
    output = decode(target, inputs, drafts["noisy"], "compiled", max_new_tokens=30)
    assert_same_ids(output.sequences, wanted)
    stats = output.speculation
    assert (stats.runner, stats.draft_runner, stats.runner_reason) == ("compiled", "compiled", "")


@pytest.mark.parametrize("kind", ["compiled", "cuda_graph"])
def test_a_preparation_that_fails_leaves_the_answer_intact(target, drafts, replaying, monkeypatch, kind):
    def failing(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(runners.RUNNERS, kind, failing)
    hf_specdec.enable(target)
    inputs = prompts([3, 6, 5])
    wanted = plain(target, inputs, max_new_tokens=24)
    output = decode(target, inputs, drafts["noisy"], kind)
    assert_same_ids(output.sequences, wanted)
    assert (output.speculation.runner, output.speculation.fallbacks) == ("eager", [])
    assert "no such kernel" in output.speculation.runner_reason


@pytest.mark.parametrize("kind", ["compiled", "cuda_graph"])
def test_rounds_in_which_forwards_were_prepared_say_nothing_about_costs(target, drafts, replaying, monkeypatch, kind):
    monkeypatch.setitem(runners.RUNNERS, "compiled", runners.RUNNERS["cuda_graph"])
    observe = AdaptiveDraftLength.observe
    observed, prepared, before = [], [], [0]
    monkeypatch.setattr(
        AdaptiveDraftLength, "observe", lambda self, record: observed.append(record) or observe(self, record)
    )

    def note(record):
        if len(replaying) > before[0]:
            prepared.append(record)
        before[0] = len(replaying)

    hf_specdec.enable(target)
    settings = {"runner": kind, "on_round": note}
    target.generate(**prompts([6]), draft_model=drafts["identical"], max_new_tokens=40, speculative_config=settings)
    assert prepared
    assert observed
    assert not [record for record in observed if any(record is other for other in prepared)]


def test_a_forward_that_gives_other_logits_is_not_trusted(target, drafts, replaying, monkeypatch):
    right = runners.RUNNERS["cuda_graph"]

    def wrong(function, model, inputs):
        made = right(function, model, inputs)

        def run(*given):
            outputs = made(*given)
            # A unit of draft steps gives three; what it proposes may be anything.
            return (outputs[0] + 1,) if len(outputs) == 1 else outputs

        return run

    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", wrong)
    hf_specdec.enable(target)
    inputs = prompts([6])
    output = decode(target, inputs, drafts["noisy"], "cuda_graph")
    assert_same_ids(output.sequences, plain(target, inputs, max_new_tokens=24))
    assert "gave other logits" in output.speculation.runner_reason


def test_a_prepared_forward_that_fails_later_leaves_the_answer_intact(target, drafts, replaying, monkeypatch):
    right = runners.RUNNERS["cuda_graph"]

    def wearing_out(function, model, inputs):
        made, uses = right(function, model, inputs), []

        def run(*given):
            uses.append(1)
            if len(uses) > 2:
                raise RuntimeError("worn out")
            return made(*given)

        return run

    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", wearing_out)
    hf_specdec.enable(target)
    inputs = prompts([6])
    for do_sample in (False, True):
        output = decode(target, inputs, drafts["noisy"], "cuda_graph", do_sample=do_sample)
        assert output.speculation.fallbacks == []
        assert output.speculation.runner == "eager"
        if not do_sample:
            assert_same_ids(output.sequences, plain(target, inputs, max_new_tokens=24))
            assert "worn out" in output.speculation.runner_reason


@pytest.mark.parametrize("kind", ["hook", "forward"])
def test_a_model_that_is_watched_runs_as_it_is(target, drafts, replaying, kind):
    seen: list[int] = []
    forward = target.forward
    if kind == "hook":
        target.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    else:
        target.forward = lambda *args, **kwargs: seen.append(1) or forward(*args, **kwargs)
    hf_specdec.enable(target)
    stats = decode(target, prompts([6]), drafts["noisy"], "cuda_graph").speculation
    assert (stats.runner, stats.draft_runner) == ("eager", "cuda_graph")
    assert "must run every time" in stats.runner_reason
    assert len(seen) >= stats.num_target_forwards


def test_new_weights_are_noticed(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([6])
    decode(target, inputs, drafts["identical"], "cuda_graph")
    other = models.build_target(seed=5)
    target.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    output = decode(target, inputs, drafts["identical"], "cuda_graph")
    assert_same_ids(output.sequences, plain(target, inputs, max_new_tokens=24))
    assert output.speculation.runner == "cuda_graph"


@pytest.mark.slow
def test_what_is_prepared_does_not_keep_the_model(monkeypatch):
    compiled_lightly(monkeypatch)
    model = hf_specdec.enable(models.build_target())
    draft = models.build_drafts(model)["noisy"]
    output = decode(model, prompts([6]), draft, "compiled", max_new_tokens=24)
    assert output.speculation.runner == "compiled"
    gone = weakref.ref(model), weakref.ref(draft)
    del model, draft, output
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_cache_of_the_callers_is_as_plain_decoding_leaves_it(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([6])
    first = decode(target, inputs, drafts["noisy"], "cuda_graph")
    wanted = target.generate(**inputs, do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
    name = "cache" if "cache" in wanted else "past_key_values"
    decode(target, prompts([4], seed=3), drafts["noisy"], "cuda_graph")
    for ours, theirs in zip(first[name].layers, wanted[name].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def test_an_interrupted_call_leaves_nothing_prepared_lent(target, drafts, replaying):
    hf_specdec.enable(target)
    inputs = prompts([6])

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.generate(
            **inputs,
            draft_model=drafts["noisy"],
            max_new_tokens=24,
            speculative_config={"runner": "cuda_graph", "on_round": interrupt},
        )
    output = decode(target, inputs, drafts["noisy"], "cuda_graph")
    assert_same_ids(output.sequences, plain(target, inputs, max_new_tokens=24))
    assert output.speculation.runner == "cuda_graph"


def test_a_call_too_short_to_prepare_anything_says_so(target, drafts, replaying):
    hf_specdec.enable(target)
    stats = decode(target, prompts([6]), drafts["noisy"], "compiled", max_new_tokens=5).speculation
    assert (stats.runner, stats.draft_runner) == ("eager", "eager")
    assert "no shape came often enough" in stats.runner_reason
    assert "no shape came often enough" in str(stats)


def test_auto_is_eager_on_the_cpu(target, drafts):
    hf_specdec.enable(target)
    stats = decode(target, prompts([6]), drafts["noisy"], "auto").speculation
    assert (stats.runner, stats.draft_runner, stats.runner_reason) == ("eager", "eager", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_graphs_on_the_cpu_are_refused_with_a_reason_in_the_stats(target, drafts):
    hf_specdec.enable(target)
    stats = decode(target, prompts([6]), drafts["noisy"], "cuda_graph").speculation
    assert stats.runner == "eager"
    assert "not on a CUDA device" in stats.runner_reason


def test_a_failure_is_not_tried_again_before_the_weights_change(target, drafts, replaying, monkeypatch):
    right, tries = runners.RUNNERS["cuda_graph"], []

    def failing(*_):
        tries.append(1)
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", failing)
    hf_specdec.enable(target)
    for _ in range(2):
        stats = decode(target, prompts([6]), drafts["noisy"], "cuda_graph").speculation
        assert "no such kernel" in stats.runner_reason
    # The target's forward once, and the draft's steps, which fail as one unit and then by themselves.
    assert len(tries) <= 3
    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", right)
    target.load_state_dict(copy.deepcopy(target.state_dict()), assign=True)
    stats = decode(target, prompts([6]), drafts["noisy"], "cuda_graph").speculation
    assert (stats.runner, stats.draft_runner) == ("cuda_graph", "eager")


def test_unknown_runners_are_refused(target, drafts):
    hf_specdec.enable(target)
    with pytest.raises(InvalidConfigError, match="`runner` must be one of 'auto', 'eager', 'compiled', 'cuda_graph'"):
        decode(target, prompts([6]), drafts["noisy"], "cudagraphs")


def test_buckets_are_at_most_twice_the_length():
    lengths = [bucket_of(length) for length in (1, 64, 65, 128, 129, 1000)]
    assert lengths == [64, 64, 128, 128, 256, 1024]


def test_a_profile_tells_phases_and_writes_a_trace(target, drafts, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hf_specdec.enable(target)
    output = target.generate(
        **prompts([6]),
        draft_model=drafts["noisy"],
        max_new_tokens=12,
        do_sample=False,
        speculative_config={"profile": True},
        return_dict_in_generate=True,
    )
    stats = output.speculation
    assert {"prompt", "start", "probe", "draft", "verify", "accept", "commit", "conclude"} == set(stats.profile)
    assert all(seconds > 0 for seconds in stats.profile.values())
    assert "hf_specdec verify" in (tmp_path / stats.trace_file).read_text()
    assert stats.to_dict()["profile"] == stats.profile


def test_the_benchmark_counts_forwards_without_a_hook_on_a_target_that_is_compiled(target, drafts):
    hf_specdec.enable(target)
    hooks = []

    def note(record):
        hooks.append(len(target._forward_pre_hooks))

    keywords = {"max_new_tokens": 12, "do_sample": False}
    ours = {"draft_model": drafts["noisy"], "num_draft_tokens": 3, "speculative_config": {"on_round": note}}
    call = timed_call(target, prompts([6]), keywords | ours)
    assert call.num_target_forwards == call.stats.num_target_forwards == 1 + len(hooks)
    assert set(hooks) == {0}
    assert timed_call(target, prompts([6]), keywords).num_target_forwards == 12
