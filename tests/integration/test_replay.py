"""Rejections at every place of a draft: a recurrent state is set back, and what was kept is read again."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from integration.comparing import assert_same_ids, plain, prompts
from integration.recurrent import build, drafts_of, target_of
from integration.scripting import in_turn, propose_by_script, spoil_by_script
from transformers import PreTrainedModel

import hf_specdec

Tensor = torch.Tensor
K = 3
TYPES = ["mamba", "mamba2", "jamba", "zamba2", "qwen3_next", "lfm2", "nemotron_h", "recurrent_gemma", "rwkv"]
# Each number of accepted tokens comes after each other one.
EVERY_PAIR = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3)
PROMPT = prompts([6])


def drafted(model: PreTrainedModel, draft: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Decode with a draft."""
    options = {"do_sample": False, "num_draft_tokens": K, "return_dict_in_generate": True} | options
    output = model.generate(**inputs, draft_model=draft, **options)
    assert output.speculation.fallbacks == []
    return output


def accepted_in(output: Any, num_draft_tokens: int = K) -> list[tuple[int, ...]]:
    """Return how many tokens each row accepted in each round that was not shortened by the end of the text."""
    rounds = output.speculation.rounds
    return [record.num_accepted_tokens for record in rounds if record.num_draft_tokens == num_draft_tokens]


def assert_same_logits(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Compare the logits of every token, which a wrong state changes long before it changes a text."""
    ours, theirs = torch.stack(got), torch.stack(wanted)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", TYPES)
def test_every_number_of_accepted_tokens_after_every_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, draft = target_of(name), drafts_of(name)["unrelated"]
    options = {"max_new_tokens": 2 + sum(EVERY_PAIR) + len(EVERY_PAIR), "output_logits": True}
    wanted = model.generate(**PROMPT, do_sample=False, return_dict_in_generate=True, **options)
    assert len(set(wanted.sequences[0].tolist())) > 8
    propose_by_script(monkeypatch, wanted.sequences, in_turn(EVERY_PAIR))
    output = drafted(model, draft, PROMPT, **options)
    assert_same_ids(output.sequences, wanted.sequences)
    assert_same_logits(output.logits, wanted.logits)
    accepted = [count for (count,) in accepted_in(output)]
    assert accepted == list(EVERY_PAIR)
    stats = output.speculation
    assert stats.lane == "compatible"
    assert stats.num_replayed_tokens > 0
    assert stats.num_target_forwards == 1 + stats.num_rounds + stats.num_replay_forwards


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "qwen3_next", "lfm2", "nemotron_h"])
def test_padded_rows_that_reject_in_different_places(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, draft = target_of(name), drafts_of(name)["unrelated"]
    inputs, options = prompts([3, 6, 5]), {"max_new_tokens": 14, "output_logits": True}
    wanted = model.generate(**inputs, do_sample=False, return_dict_in_generate=True, **options)
    places = (3, 1, 3, 3, 0, 2, 3, 2, 3)
    propose_by_script(monkeypatch, wanted.sequences, in_turn(places))
    output = drafted(model, draft, inputs, **options)
    assert_same_ids(output.sequences, wanted.sequences)
    assert_same_logits(output.logits, wanted.logits)
    # All rows keep what all of them accepted.
    for number, counts in enumerate(accepted_in(output)):
        assert set(counts) == {min(places[(number + row) % len(places)] for row in range(3))} or min(counts) < K
    assert output.speculation.is_lockstep


@pytest.mark.parametrize(("name", "place"), [("mamba", 0), ("qwen3_next", 1), ("rwkv", 1)])
def test_long_runs_of_rejections_replay_at_most_sixteen_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, place: int
) -> None:
    model, draft = target_of(name), drafts_of(name)["unrelated"]
    options = {"max_new_tokens": 40, "output_logits": True}
    wanted = model.generate(**PROMPT, do_sample=False, return_dict_in_generate=True, **options)
    propose_by_script(monkeypatch, wanted.sequences, lambda number, row: place)
    output = drafted(model, draft, PROMPT, **options)
    assert_same_ids(output.sequences, wanted.sequences)
    assert_same_logits(output.logits, wanted.logits)
    stats = output.speculation
    # The snapshot moves on only when a replay has grown beyond 16 tokens.
    assert stats.num_replay_forwards == 2
    assert stats.num_replayed_tokens / stats.num_rounds < 16


@pytest.mark.parametrize("name", ["mamba", "bamba"])
def test_hidden_states_hold_no_replayed_token(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, draft = target_of(name), drafts_of(name)["unrelated"]
    options = {"max_new_tokens": 16, "output_hidden_states": True}
    wanted = model.generate(**PROMPT, do_sample=False, return_dict_in_generate=True, **options)
    propose_by_script(monkeypatch, wanted.sequences, in_turn((2, 0, 3, 1)))
    output = drafted(model, draft, PROMPT, **options)
    assert_same_ids(output.sequences, wanted.sequences)
    for ours, theirs in zip(output.hidden_states, wanted.hidden_states, strict=True):
        assert [layer.shape for layer in ours] == [layer.shape for layer in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-4 * float(other.abs().max()))
    assert output.speculation.num_replay_forwards > 0


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "qwen3_next", "lfm2", "nemotron_h", "rwkv"])
def test_a_recurrent_draft_that_was_set_back_still_knows_the_text(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The draft is a copy of the target, so only the steps that were spoiled can be rejected."""
    model, draft = target_of(name), drafts_of(name)["identical"]
    wanted = plain(model, PROMPT, max_new_tokens=20)
    chosen = random.Random(1)
    wrong = spoil_by_script(monkeypatch, lambda step: chosen.random() < 0.25)
    output = drafted(model, draft, PROMPT, max_new_tokens=20)
    assert_same_ids(output.sequences, wanted)
    step = 0
    for record in output.speculation.rounds:
        steps = range(step, step + record.num_draft_tokens)
        first_wrong = next((step for step in steps if step in wrong), steps.stop)
        assert record.num_accepted_tokens == (first_wrong - steps.start,)
        step = steps.stop
    assert {0, K} < {count for (count,) in accepted_in(output)}
    assert output.speculation.draft_lane == "compatible"


def test_cost_of_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of all drafted tokens is wrong, each by itself: few forwards of the target do nothing but replay."""
    model = hf_specdec.enable(build("mamba", num_hidden_layers=1))
    wanted = plain(model, PROMPT, max_new_tokens=300)
    chosen = random.Random(2)
    places = [next((place for place in range(4) if chosen.random() < 0.25), 4) for _ in range(300)]
    propose_by_script(monkeypatch, wanted, lambda number, row: places[number])
    output = drafted(
        model, build("mamba", num_hidden_layers=1, seed=100), PROMPT, max_new_tokens=300, num_draft_tokens=4
    )
    assert_same_ids(output.sequences, wanted)
    stats = output.speculation
    assert 0.7 < stats.token_acceptance_rate < 0.8
    assert stats.num_replay_forwards / stats.num_target_forwards <= 0.15
    assert stats.num_replayed_tokens / stats.num_rounds <= 6
