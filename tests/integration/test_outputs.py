"""Scores, logits, hidden states, attentions and statistics: one entry per new token, the values of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integration.comparing import KINDS
from integration.harness import (
    CACHE_NAME,
    PROMPT,
    admit,
    build_mistral,
    failing,
    greedy,
    mistral_drafts,
    prompts_of,
    token_after,
    watched,
)
from transformers import LlamaForCausalLM
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_specdec
import models
from hf_specdec import RoundRecord, SpeculationStats, SpeculativeDecoderOnlyOutput

Drafts = dict[str, LlamaForCausalLM]
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
NUM_TOKENS = 14


def eager_target() -> LlamaForCausalLM:
    return models.build_target(attn_implementation="eager")


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    # Hidden states of these models reach 50, so rounding is judged by the largest value of each tensor.
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, atol=1e-5 * max(scale, 10.0), rtol=0)


def assert_same_states(got: Any, wanted: Any) -> None:
    """Compare nested tuples of tensors: one entry per new token, one per layer in each."""
    assert type(got) is type(wanted)
    assert len(got) == len(wanted)
    for mine, other in zip(got, wanted, strict=True):
        if isinstance(other, tuple):
            assert_same_states(mine, other)
        else:
            assert_close(mine, other)


def eos_of(plain: torch.Tensor, batch: int) -> int:
    """Return a token that ends the last row in the middle of its text."""
    return token_after(plain[batch - 1], 5, PROMPT.shape[1])


def unpadded(row: list[int], eos: int | None) -> list[int]:
    """Return a row's new tokens up to the end-of-sequence token."""
    return row[: row.index(eos) + 1] if eos in row else row


# ---- what the host's output object holds -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fields", [("scores", "logits"), ("hidden_states", "attentions")], ids="+".join)
@pytest.mark.parametrize("ends_early", [False, True], ids=["full length", "end of sequence"])
def test_values_of_every_new_token_equal_plain(
    kind: str, batch: int, fields: tuple[str, ...], ends_early: bool
) -> None:
    target = eager_target()
    draft = models.build_drafts(target)[kind]
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    eos = eos_of(greedy(target, inputs, max_new_tokens=NUM_TOKENS), batch) if ends_early else None
    options = {
        "max_new_tokens": NUM_TOKENS,
        "eos_token_id": eos,
        "return_dict_in_generate": True,
        **{f"output_{field}": True for field in fields},
    }
    wanted = greedy(target, inputs, **options)
    got = greedy(target, inputs, draft_model=draft, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    for field in fields:
        assert len(got[field]) == got.sequences.shape[1] - PROMPT.shape[1]
        assert_same_states(got[field], wanted[field])


@pytest.mark.parametrize("batch", [1, 3])
def test_everything_at_once_equals_plain(batch: int) -> None:
    target = eager_target()
    draft = models.build_noisy(target)
    hf_specdec.enable(target)
    wanted = greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS, **EVERYTHING)
    got = greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS, draft_model=draft, **EVERYTHING)
    assert torch.equal(got.sequences, wanted.sequences)
    for field in ("scores", "logits", "hidden_states", "attentions"):
        assert_same_states(got[field], wanted[field])


def test_attentions_of_a_sliding_window_have_the_plain_shapes() -> None:
    target = build_mistral(attn_implementation="eager")
    draft = mistral_drafts(target)["noisy"]
    hf_specdec.enable(target)
    options = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, "output_attentions": True}
    wanted = greedy(target, PROMPT, **options)
    got = greedy(target, PROMPT, draft_model=draft, **options)
    assert_same_states(got.attentions, wanted.attentions)


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_are_processed_and_logits_are_not(target: LlamaForCausalLM, drafts: Drafts, batch: int) -> None:
    hf_specdec.enable(target)
    options = {
        "max_new_tokens": NUM_TOKENS,
        "repetition_penalty": 1.7,
        "suppress_tokens": [33, 34],
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    wanted = greedy(target, prompts_of(batch), **options)
    got = greedy(target, prompts_of(batch), draft_model=drafts["noisy"], **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert not torch.equal(got.scores[5], got.logits[5])
    assert_same_states(got.scores, wanted.scores)
    assert_same_states(got.logits, wanted.logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_of_sampled_tokens_are_the_targets(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    torch.manual_seed(0)
    inputs = prompts_of(batch)
    output = target.generate(
        **inputs,
        do_sample=True,
        top_k=0,
        max_new_tokens=NUM_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        draft_model=drafts[kind],
    )
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, NUM_TOKENS, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = target(output.sequences, attention_mask=mask, position_ids=positions).logits
    wanted = logits[:, PROMPT.shape[1] - 1 : -1]
    assert_close(torch.stack(output.logits, dim=1), wanted)
    assert_close(torch.stack(output.scores, dim=1), wanted)


@pytest.mark.parametrize("batch", [1, 3])
def test_transition_scores_equal_plain(target: LlamaForCausalLM, drafts: Drafts, batch: int) -> None:
    hf_specdec.enable(target)
    options = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, "output_scores": True}
    outputs = [
        greedy(target, prompts_of(batch), **options),
        greedy(target, prompts_of(batch), draft_model=drafts["noisy"], **options),
    ]
    wanted, got = (
        target.compute_transition_scores(output.sequences, output.scores, normalize_logits=True) for output in outputs
    )
    assert got.shape == (batch, NUM_TOKENS)
    assert_close(got, wanted)


# ---- types -----------------------------------------------------------------------------------------------------


def test_ids_alone_are_a_tensor(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    output = greedy(target, PROMPT, max_new_tokens=4, draft_model=drafts["noisy"])
    assert type(output) is torch.Tensor
    assert output.dtype == torch.long
    assert output.shape == (1, PROMPT.shape[1] + 4)


def test_the_output_object_is_one_of_the_hosts(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
    output = greedy(target, PROMPT, draft_model=drafts["noisy"], **options)
    plain = greedy(target, PROMPT, **options)
    assert type(output) is SpeculativeDecoderOnlyOutput
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert list(output.keys()) == [*plain.keys(), "speculation"]
    assert torch.equal(output[0], output.sequences)
    assert isinstance(output.speculation, SpeculationStats)


def test_fields_nobody_asked_for_are_none(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    output = greedy(target, PROMPT, max_new_tokens=4, draft_model=drafts["noisy"], return_dict_in_generate=True)
    assert [output.scores, output.logits, output.hidden_states, output.attentions] == [None] * 4
    assert output[CACHE_NAME] is not None


# ---- statistics ------------------------------------------------------------------------------------------------

# Rows leave the batch on their own, or move in lockstep when scores are collected for several of them.
LOCKSTEP = {"rows apart": {}, "lockstep": {"output_scores": True}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("ends_early", [False, True], ids=["full length", "end of sequence"])
@pytest.mark.parametrize("mode", LOCKSTEP)
def test_rounds_add_up_to_the_output(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, ends_early: bool, mode: str
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    eos = eos_of(greedy(target, inputs, max_new_tokens=NUM_TOKENS), batch) if ends_early else None
    seen: list[RoundRecord] = []
    output = greedy(
        target,
        inputs,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=eos,
        draft_model=drafts[kind],
        speculative_config={"on_round": seen.append},
        return_dict_in_generate=True,
        **LOCKSTEP[mode],
    )
    stats = output.speculation
    rows = [unpadded(row, eos) for row in output.sequences[:, PROMPT.shape[1] :].tolist()]
    texts = [[row[0]] for row in rows]
    for record in seen:
        for row, tokens in zip(record.rows, record.committed_token_ids, strict=True):
            texts[row].extend(tokens)
    assert seen == stats.rounds
    assert texts == rows
    assert stats.num_new_tokens == sum(len(row) for row in rows)
    assert stats.num_rows == batch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", LOCKSTEP)
def test_counts_are_consistent(target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, mode: str) -> None:
    hf_specdec.enable(target)
    output = greedy(
        target,
        prompts_of(batch),
        max_new_tokens=NUM_TOKENS,
        draft_model=drafts[kind],
        num_draft_tokens=4,
        return_dict_in_generate=True,
        **LOCKSTEP[mode],
    )
    stats = output.speculation
    for record in stats.rounds:
        assert 0 <= record.num_draft_tokens <= 4
        for accepted, evaluated, tokens in zip(
            record.num_accepted_tokens, record.num_evaluated_tokens, record.committed_token_ids, strict=True
        ):
            assert 0 <= accepted <= evaluated <= record.num_draft_tokens
            assert evaluated <= accepted + 1
            assert 1 <= len(tokens) <= accepted + 1
        assert record.draft_seconds + record.verify_seconds <= record.round_seconds
    assert stats.num_committed_draft_tokens <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert sum(stats.acceptance_histogram.values()) == sum(len(record.rows) for record in stats.rounds)
    assert stats.is_lockstep == (mode == "lockstep" and batch > 1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mode", LOCKSTEP)
def test_everything_evaluated_is_accepted_from_an_identical_draft(
    target: LlamaForCausalLM, drafts: Drafts, batch: int, mode: str
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    eos = eos_of(greedy(target, inputs, max_new_tokens=NUM_TOKENS), batch)
    output = greedy(
        target,
        inputs,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=eos,
        draft_model=drafts["identical"],
        return_dict_in_generate=True,
        **LOCKSTEP[mode],
    )
    assert output.speculation.num_accepted_tokens > 0
    assert output.speculation.token_acceptance_rate == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gives_dict", [True, False], ids=["returns the cache", "returns ids"])
def test_forwards_are_counted_as_they_happen(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, gives_dict: bool
) -> None:
    draft = drafts[kind]
    hf_specdec.enable(target)
    admit(target, draft)
    inputs = prompts_of(3)
    eos = eos_of(greedy(target, inputs, max_new_tokens=NUM_TOKENS), 3)
    with watched(target) as of_target, watched(draft) as of_draft:
        output = greedy(
            target,
            inputs,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=eos,
            draft_model=draft,
            return_dict_in_generate=True,
            output_scores=gives_dict,
        )
    assert output.speculation.num_target_forwards == len(of_target)
    assert output.speculation.num_draft_forwards == len(of_draft)


def test_a_draft_that_is_always_right_saves_target_forwards(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["identical"])
    with watched(target) as widths:
        greedy(target, PROMPT, max_new_tokens=21, draft_model=drafts["identical"], num_draft_tokens=4)
    assert len(widths) == 1 + 20 // 5


def test_prompt_tokens_do_not_count_padding(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(3)
    output = greedy(target, inputs, max_new_tokens=4, draft_model=drafts["noisy"], return_dict_in_generate=True)
    assert output.speculation.num_prompt_tokens == int(inputs["attention_mask"].sum())


def test_times_are_measured(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    output = greedy(
        target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts["noisy"], return_dict_in_generate=True
    )
    stats = output.speculation
    assert 0 < stats.time_to_first_token_seconds < stats.total_seconds
    parts = stats.draft_prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.overhead_seconds
    assert 0 < parts < stats.total_seconds
    assert stats.tokens_per_second == NUM_TOKENS / stats.total_seconds


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_runs_have_the_same_rounds(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    hf_specdec.enable(target)
    runs = []
    for _ in range(3):
        output = greedy(
            target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts[kind], return_dict_in_generate=True
        )
        runs.append([(r.num_draft_tokens, r.num_accepted_tokens) for r in output.speculation.rounds])
    assert runs.count(runs[0]) == 3


def test_the_first_token_alone_needs_no_round(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["noisy"])
    with watched(drafts["noisy"]) as of_draft:
        output = greedy(target, PROMPT, max_new_tokens=1, draft_model=drafts["noisy"], return_dict_in_generate=True)
    assert output.speculation.rounds == []
    assert output.speculation.num_new_tokens == 1
    assert of_draft == []


def test_rounds_after_a_failed_draft_are_plain_steps(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["identical"]
    hf_specdec.enable(target)
    admit(target, draft)
    with failing(draft, 3, RuntimeError("boom")), pytest.warns(hf_specdec.SpeculationWarning):
        output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft, return_dict_in_generate=True)
    stats = output.speculation
    assert stats.draft_lengths == [0] * (NUM_TOKENS - 1)
    assert stats.num_new_tokens == NUM_TOKENS
    assert stats.num_target_forwards == NUM_TOKENS


def test_statistics_can_be_written_as_json_and_as_text(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    output = greedy(target, PROMPT, max_new_tokens=6, draft_model=drafts["noisy"], return_dict_in_generate=True)
    values = output.speculation.to_dict()
    assert values["num_new_tokens"] == 6
    assert len(values["rounds"]) == len(output.speculation.rounds)
    assert "6 new tokens" in str(output.speculation)


def test_on_round_is_called_as_the_rounds_happen(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["noisy"])
    forwards_at: list[int] = []
    with watched(target) as widths:
        greedy(
            target,
            PROMPT,
            max_new_tokens=NUM_TOKENS,
            draft_model=drafts["noisy"],
            speculative_config={"on_round": lambda _: forwards_at.append(len(widths))},
        )
    # The prefill is forward 1, and each round verifies with one more.
    assert forwards_at == list(range(2, len(widths) + 1))
