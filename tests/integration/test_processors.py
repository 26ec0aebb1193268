"""Logits processors act with a draft exactly as in plain decoding, those with a memory of their own included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integration.comparing import (
    EVERY_OUTCOME,
    KINDS,
    Fresh,
    assert_same_ids,
    ids_that_end_rows_apart,
    new_tokens,
    num_tokens_until,
    outcomes_of,
    plain,
    prompts,
    same_for_all_drafts,
)
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

import hf_specdec
import models

Tensor = torch.Tensor
Drafts = dict[str, LlamaForCausalLM]
SINGLE, RAGGED = [6], [3, 6, 11, 4]
NUM_TOKENS = 12
both_batches = pytest.mark.parametrize("lengths", [SINGLE, RAGGED], ids=["single", "batch"])


def spelled_out(arguments: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in arguments.items())


@pytest.fixture(autouse=True)
def _enabled(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)


@pytest.fixture
def drafts(target: LlamaForCausalLM) -> Drafts:
    """Return drafts of which the noisy one often has several tokens accepted, for prefixes to grow inside a block."""
    return models.build_drafts(target) | {"noisy": models.build_noisy(target, 0.02)}


# --- the host's own, by the argument that asks for them -------------------------------------------------------------


def only_ids_of_the_rows_parity(batch_id: int, input_ids: Tensor) -> list[int]:
    """Allow another half of the vocabulary for each prompt and after each token."""
    offset = (batch_id + int(input_ids[-1])) % 3
    return [token for token in range(2, 64) if token % 3 != offset]


# What a drafter cannot know keeps it from ever being fully right or wrong; `outcomes` says what must still occur.
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 2.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[20], [6], [61, 28], [53, 21], [30, 43], [11, 20, 13]]},
    "sequence_bias": {"sequence_bias": {(9,): 2.5, (20,): -10.0, (61, 28): -9.0, (30, 43): -8.0}},
    # Every token asks for another one next, so each position of a block depends on the one before it.
    "sequence_bias for pairs": {"sequence_bias": {(token, 2 + (7 * token + 3) % 62): 6.0 for token in range(2, 64)}},
    "suppress_tokens": {"suppress_tokens": [20, 6, 61, 30, 53]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [41, 11, 30, 60, 20]},
    "guidance_scale": {"guidance_scale": 1.5},
    "greenlist watermark": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "selfhash watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_ids_of_the_rows_parity},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [20], "guidance_scale": 1.3},
}
UNKNOWN_TO_DRAFTS = {
    "guidance_scale",
    "greenlist watermark",
    "selfhash watermark",
    "prefix_allowed_tokens_fn",
    "several",
}


@both_batches
@pytest.mark.parametrize("name", PROCESSORS)
def test_built_in_processors_act_as_in_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, name: str, lengths: list[int]
) -> None:
    inputs = prompts(lengths)
    without = plain(target, inputs, max_new_tokens=NUM_TOKENS)
    processed = plain(target, inputs, max_new_tokens=NUM_TOKENS, **PROCESSORS[name])
    assert not torch.equal(processed, without)
    rows = new_tokens(processed, inputs)
    [eos] = ids_that_end_rows_apart(rows)
    assert len(rows) == 1 or len(set(num_tokens_until(rows, [eos]))) > 1
    outcomes = {"none"} if name in UNKNOWN_TO_DRAFTS else {"none", "full"}
    same_for_all_drafts(
        target,
        drafts,
        inputs,
        outcomes=outcomes,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=eos,
        **PROCESSORS[name],
    )


@both_batches
@pytest.mark.parametrize(
    "arguments",
    [
        {"min_length": 18},
        {"min_new_tokens": 11},
        {"exponential_decay_length_penalty": (2, 3.0)},
    ],
    ids=spelled_out,
)
@pytest.mark.parametrize("how_many", [1, 3], ids=["one eos", "several eos"])
def test_processors_of_the_end_act_as_in_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, how_many: int, arguments: dict[str, Any], lengths: list[int]
) -> None:
    inputs = prompts(lengths)
    rows = new_tokens(plain(target, inputs, max_new_tokens=16), inputs)
    eos = ids_that_end_rows_apart(rows, how_many)
    arguments = {**arguments, "max_new_tokens": 16, "eos_token_id": eos}
    without = plain(target, inputs, max_new_tokens=16, eos_token_id=eos)
    assert not torch.equal(plain(target, inputs, **arguments), without)
    same_for_all_drafts(target, drafts, inputs, outcomes={"none", "full"}, **arguments)


@both_batches
@pytest.mark.parametrize("forced", [9, [9, 10]], ids=["one", "several"])
def test_the_last_token_before_the_limit_is_forced(
    target: LlamaForCausalLM, drafts: Drafts, forced: int | list[int], lengths: list[int]
) -> None:
    inputs = prompts(lengths)
    rows = new_tokens(plain(target, inputs, max_new_tokens=NUM_TOKENS), inputs)
    # One row of the batch ends before that, others reach it.
    eos = [9, *(ids_that_end_rows_apart(rows) if len(rows) > 1 else [])]
    arguments = {"max_new_tokens": NUM_TOKENS, "eos_token_id": eos, "forced_eos_token_id": forced}
    last = plain(target, inputs, **arguments)[:, -1].tolist()
    assert 9 in last
    assert len(rows) == 1 or 0 in last
    same_for_all_drafts(target, drafts, inputs, outcomes={"none", "full"}, **arguments)


def test_a_forced_first_token_is_forced(target: LlamaForCausalLM, drafts: Drafts) -> None:
    inputs = prompts([1, 1, 1])
    arguments = {"max_new_tokens": NUM_TOKENS, "forced_bos_token_id": 33, "begin_suppress_tokens": [20, 45, 7]}
    output = plain(target, inputs, **arguments)
    assert output[:, 1].tolist() == [33, 33, 33]
    same_for_all_drafts(target, drafts, inputs, **arguments)


@both_batches
def test_invalid_values_are_removed(target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]) -> None:
    # One id's logit is always infinite, another's always NaN.
    for model in (target, *drafts.values()):
        model.lm_head = torch.nn.Linear(32, 64).requires_grad_(False)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.lm_head.bias.zero_()
        model.lm_head.bias[50] = -torch.inf
        model.lm_head.bias[51] = torch.nan
    inputs = prompts(lengths)
    arguments = {"max_new_tokens": NUM_TOKENS, "remove_invalid_values": True}
    assert len(set(new_tokens(plain(target, inputs, **arguments), inputs)[0])) > 3
    same_for_all_drafts(target, drafts, inputs, outcomes={"none", "full"}, **arguments)


@both_batches
def test_renormalised_logits_give_the_same_scores(target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]) -> None:
    inputs = prompts(lengths)
    arguments = {
        "max_new_tokens": NUM_TOKENS,
        "renormalize_logits": True,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    wanted = plain(target, inputs, **arguments)
    torch.testing.assert_close(wanted.scores[-1].exp().sum(dim=-1), torch.ones(len(lengths)))
    for draft in drafts.values():
        got = plain(target, inputs, **arguments, draft_model=draft)
        assert_same_ids(got.sequences, wanted.sequences)
        for ours, theirs in zip(got.scores, wanted.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


WARPERS: list[dict[str, Any]] = [
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_p": 0.5},
    {"top_h": 0.4},
    {"min_p": 0.2},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.02},
    {"temperature": 1.7, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "renormalize_logits": True},
]


@both_batches
@pytest.mark.parametrize("warper", WARPERS, ids=spelled_out)
def test_warpers_over_one_token_give_the_greedy_text(
    target: LlamaForCausalLM, drafts: Drafts, warper: dict[str, Any], lengths: list[int]
) -> None:
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=8)
    seen = set()
    for draft in drafts.values():
        got = target.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=True,
            top_k=1,
            **warper,
            draft_model=draft,
            num_draft_tokens=3,
            return_dict_in_generate=True,
        )
        assert_same_ids(got.sequences, wanted)
        seen |= outcomes_of(got.speculation.rounds)
    assert {"none", "full"} <= seen


@both_batches
@pytest.mark.parametrize("warper", WARPERS, ids=spelled_out)
def test_warpers_leave_only_ids_that_plain_decoding_could_draw(
    target: LlamaForCausalLM, drafts: Drafts, warper: dict[str, Any], lengths: list[int]
) -> None:
    inputs = prompts(lengths)
    torch.manual_seed(0)
    arguments = {"do_sample": True, "top_k": 20, "max_new_tokens": 8, "return_dict_in_generate": True, **warper}
    for draft in drafts.values():
        output = target.generate(**inputs, **arguments, draft_model=draft, num_draft_tokens=2)
        assert output.speculation.fallbacks == []
        # One step of plain decoding from every prefix tells which tokens were possible there.
        width = inputs["input_ids"].shape[1]
        for length in range(width, output.sequences.shape[1], 3):
            mask = torch.ones(len(lengths), length - width, dtype=torch.long)
            step = target.generate(
                input_ids=output.sequences[:, :length],
                attention_mask=torch.cat([inputs["attention_mask"], mask], dim=1),
                **arguments | {"max_new_tokens": 1, "output_scores": True},
            )
            chosen = step.scores[0].gather(1, output.sequences[:, length : length + 1])
            assert chosen.isfinite().all()


@pytest.mark.parametrize("num_return_sequences", [1, 3])
@pytest.mark.parametrize(
    "name", ["repetition_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size"]
)
def test_processors_of_the_prompt_follow_the_rows_of_several_sequences(
    target: LlamaForCausalLM, drafts: Drafts, name: str, num_return_sequences: int
) -> None:
    # Each prompt holds many of the ids, so that another row's prompt would give another text.
    inputs = prompts([9, 30, 40])
    arguments = {
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": num_return_sequences,
        "max_new_tokens": NUM_TOKENS,
        **PROCESSORS[name],
    }
    rows = new_tokens(plain(target, inputs, **arguments), inputs)
    eos = ids_that_end_rows_apart(rows)
    same_for_all_drafts(target, drafts, inputs, outcomes={"none", "full"}, eos_token_id=eos, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_guidance_by_another_prompt_acts_as_in_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    arguments = {
        "max_new_tokens": NUM_TOKENS,
        "guidance_scale": 1.5,
        "negative_prompt_ids": prompts([4], seed=9)["input_ids"],
    }
    inputs = prompts(SINGLE)
    wanted = plain(target, inputs, **arguments)
    assert not torch.equal(wanted, plain(target, inputs, max_new_tokens=NUM_TOKENS, guidance_scale=1.5))
    assert_same_ids(plain(target, inputs, **arguments, draft_model=drafts[kind]), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_synthid_watermark_is_sampled_like_in_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    # Its processor counts its calls and keeps a context per row; from one candidate it can only take that one.
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)
    arguments = {"do_sample": True, "top_k": 1, "max_new_tokens": 12, "watermarking_config": config}
    inputs = prompts(RAGGED)
    assert_same_ids(plain(target, inputs, **arguments, draft_model=drafts[kind]), plain(target, inputs, **arguments))


# --- the caller's own ---------------------------------------------------------------------------------------------


class Recording(LogitsProcessor):
    """Notes every call, and changes some scores depending on how often it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((input_ids.clone(), scores.clone()))
        scores = scores.clone()
        scores[:, len(self.calls) % 5 :: 5] -= 2.0
        return scores


def assert_same_calls(got: list[tuple[Tensor, Tensor]], wanted: list[tuple[Tensor, Tensor]]) -> None:
    assert len(got) == len(wanted)
    for (ids, scores), (wanted_ids, wanted_scores) in zip(got, wanted, strict=True):
        assert_same_ids(ids, wanted_ids)
        torch.testing.assert_close(scores, wanted_scores, atol=1e-3, rtol=1e-4)


@both_batches
@pytest.mark.parametrize("with_eos", [False, True], ids=["without eos", "with eos"])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_callers_processor_sees_the_calls_of_plain_decoding(
    target: LlamaForCausalLM,
    drafts: Drafts,
    kind: str,
    num_draft_tokens: int,
    with_eos: bool,
    lengths: list[int],
) -> None:
    inputs = prompts(lengths)
    arguments: dict[str, Any] = {"max_new_tokens": NUM_TOKENS}
    if with_eos:
        processor = LogitsProcessorList([Recording()])
        rows = new_tokens(plain(target, inputs, **arguments, logits_processor=processor), inputs)
        arguments["eos_token_id"] = ids_that_end_rows_apart(rows)
        assert min(num_tokens_until(rows, arguments["eos_token_id"])) < NUM_TOKENS
    recordings = [Recording(), Recording()]
    wanted = plain(target, inputs, **arguments, logits_processor=LogitsProcessorList([recordings[0]]))
    got = plain(
        target,
        inputs,
        **arguments,
        logits_processor=LogitsProcessorList([recordings[1]]),
        draft_model=drafts[kind],
        num_draft_tokens=num_draft_tokens,
    )
    assert_same_ids(got, wanted)
    assert_same_calls(recordings[1].calls, recordings[0].calls)


@both_batches
def test_drafts_are_accepted_in_spite_of_a_callers_processor(
    target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]
) -> None:
    class DoesNothing(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    arguments = {"max_new_tokens": 20, "logits_processor": Fresh(lambda: LogitsProcessorList([DoesNothing()]))}
    stats = same_for_all_drafts(target, drafts, prompts(lengths), outcomes=EVERY_OUTCOME, **arguments)
    assert stats["identical"].acceptance_rate == 1.0
    assert stats["identical"].num_target_forwards < 10


@pytest.mark.parametrize("row", range(4))
def test_a_callers_processor_works_where_a_row_ends_with_its_first_token(
    target: LlamaForCausalLM, drafts: Drafts, row: int
) -> None:
    inputs = prompts(RAGGED)
    processor = Fresh(lambda: LogitsProcessorList([Recording()]))
    rows = new_tokens(plain(target, inputs, max_new_tokens=4, logits_processor=processor()), inputs)
    same_for_all_drafts(
        target,
        drafts,
        inputs,
        outcomes={"none"},
        max_new_tokens=NUM_TOKENS,
        eos_token_id=rows[row][0],
        logits_processor=processor,
    )


class TwoStateGrammar(LogitsProcessor):
    """Allows odd and even ids in turn and steps its state once per call, as grammar libraries do."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.num_calls % 2 :: 2] = -torch.inf
        self.num_calls += 1
        return scores


@both_batches
def test_a_grammar_that_steps_once_per_call_is_obeyed(
    target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]
) -> None:
    inputs = prompts(lengths)
    grammar = Fresh(lambda: LogitsProcessorList([TwoStateGrammar()]))
    output = plain(target, inputs, max_new_tokens=12, logits_processor=grammar(), draft_model=drafts["noisy"])
    for row in new_tokens(output, inputs):
        assert [token % 2 for token in row] == [1, 0] * 6
    same_for_all_drafts(target, drafts, inputs, outcomes={"none"}, max_new_tokens=12, logits_processor=grammar)


class AfterMarker(LogitsProcessor):
    """Allows only ids below 8 once id 9 has been written; starts to look at the first call."""

    def __init__(self) -> None:
        self.prompt_width: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.prompt_width is None:
            self.prompt_width = input_ids.shape[1]
        is_active = (input_ids[:, self.prompt_width :] == 9).any(dim=1, keepdim=True)
        illegal = torch.arange(scores.shape[1]) >= 8
        return scores.masked_fill(is_active & illegal, -torch.inf)


@pytest.mark.parametrize("offset", range(1, 9))
def test_a_grammar_that_starts_after_a_marker_is_enforced_from_the_next_token_on(
    target: LlamaForCausalLM, drafts: Drafts, offset: int
) -> None:
    inputs = prompts([6], seed=4)
    [row] = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    # Every draft follows the bias, so the marker lies at each offset of a block in turn.
    arguments = {"max_new_tokens": 14, "sequence_bias": {(row[offset - 1], 9): 100.0}}
    output = plain(
        target,
        inputs,
        **arguments,
        logits_processor=LogitsProcessorList([AfterMarker()]),
        draft_model=drafts["identical"],
        num_draft_tokens=8,
    )
    [written] = new_tokens(output, inputs)
    assert written[offset] == 9
    assert max(written[offset + 1 :]) < 8
    same_for_all_drafts(
        target,
        drafts,
        inputs,
        outcomes={"none"},
        logits_processor=Fresh(lambda: LogitsProcessorList([AfterMarker()])),
        **arguments,
    )


@both_batches
def test_a_subclass_of_a_built_in_processor_keeps_its_own_behaviour(
    target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]
) -> None:
    class Growing(RepetitionPenaltyLogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.penalty += 0.1
            return super().__call__(input_ids, scores)

    class Cooling(TemperatureLogitsWarper):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            # Depends on the prefix, which the class it comes from does not.
            return super().__call__(input_ids, scores) - 3.0 * (torch.arange(64) % 4 == input_ids[:, -1:] % 4)

    inputs = prompts(lengths)
    for make in (lambda: Growing(1.0), lambda: Cooling(0.5)):
        processor = Fresh(lambda make=make: LogitsProcessorList([make()]))
        arguments = {"max_new_tokens": NUM_TOKENS, "logits_processor": processor}
        without = plain(target, inputs, max_new_tokens=NUM_TOKENS)
        assert not torch.equal(plain(target, inputs, max_new_tokens=NUM_TOKENS, logits_processor=processor()), without)
        same_for_all_drafts(target, drafts, inputs, outcomes={"none"}, **arguments)


@both_batches
def test_a_built_in_processor_given_by_the_caller_works(
    target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]
) -> None:
    processor = Fresh(lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.8, prompt_ignore_length=4)]))
    same_for_all_drafts(
        target, drafts, prompts(lengths), outcomes={"none", "full"}, max_new_tokens=20, logits_processor=processor
    )


@both_batches
def test_a_processor_may_write_into_the_scores_it_is_given(
    target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]
) -> None:
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[torch.arange(len(scores)), input_ids[:, -1]] = -torch.inf
            scores[:, 20:30] -= 3.0
            return scores

    arguments = {
        "max_new_tokens": NUM_TOKENS,
        "logits_processor": Fresh(lambda: LogitsProcessorList([InPlace()])),
    }
    same_for_all_drafts(target, drafts, prompts(lengths), outcomes={"none"}, **arguments)
