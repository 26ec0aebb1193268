"""A cache of the caller's: continued, handed back as plain decoding leaves it, and untouched by a call that fails.

`speculative_decode` takes the states out of the host's cache and puts them back at the end, so each way in and each way
out is compared with plain decoding of the same call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from integration.comparing import KINDS
from integration.harness import (
    CACHE_NAME,
    PROMPT,
    RaisingProcessor,
    admit,
    assert_same_cache,
    build_gpt2,
    build_mistral,
    cached_length,
    cached_states,
    dynamic_cache,
    failing,
    greedy,
    mistral_drafts,
    prompts_of,
    static_cache,
    token_after,
    watched,
)
from transformers import DynamicCache, LlamaForCausalLM, MistralForCausalLM, PreTrainedModel

import hf_specdec
import models

Inputs = dict[str, torch.Tensor]
Drafts = dict[str, LlamaForCausalLM]
CACHES: dict[str, Callable[[PreTrainedModel], Any]] = {"dynamic": dynamic_cache, "static": static_cache}
USER_TURN = torch.tensor([[7, 8, 9]])


@pytest.fixture
def mistral() -> MistralForCausalLM:
    return build_mistral()


def with_cache(cache: Any) -> dict[str, Any]:
    return {CACHE_NAME: cache}


def first_turn(model: PreTrainedModel, batch: int, cache: Any, **options: Any) -> Inputs:
    """Fill `cache` with a first turn and return the second turn's prompt: everything so far and three new tokens."""
    inputs = prompts_of(batch)
    ids = greedy(model, inputs, **{"max_new_tokens": 10, **with_cache(cache), **options})
    ids = torch.cat([ids, USER_TURN.expand(batch, -1)], dim=1)
    num_new = ids.shape[1] - inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, num_new, dtype=torch.long)], dim=1)
    return {"input_ids": ids, "attention_mask": mask}


def only_new_ids(inputs: Inputs, cache: Any) -> Inputs:
    """Leave out the ids that the cache holds; the mask still covers everything."""
    return {**inputs, "input_ids": inputs["input_ids"][:, cached_length(cache) :]}


def returned_cache(output: Any) -> Any:
    return output[CACHE_NAME]


# ---- going on from a cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gives_all_ids", [True, False], ids=["all ids", "only new ids"])
def test_second_turn_equals_the_same_call_without_a_cache(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, gives_all_ids: bool
) -> None:
    hf_specdec.enable(target)
    cache = dynamic_cache(target)
    everything = first_turn(target, batch, cache)
    expected = greedy(target, everything, max_new_tokens=16)
    inputs = everything if gives_all_ids else only_new_ids(everything, cache)
    output = greedy(target, inputs, max_new_tokens=16, draft_model=drafts[kind], **with_cache(cache))
    width = inputs["input_ids"].shape[1]
    assert torch.equal(output[:, :width], inputs["input_ids"])
    assert output[:, width:].tolist() == expected[:, everything["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gives_all_ids", [True, False], ids=["all ids", "only new ids"])
def test_target_reads_only_what_the_cache_lacks(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, gives_all_ids: bool
) -> None:
    hf_specdec.enable(target)
    admit(target, drafts[kind])
    cache = dynamic_cache(target)
    inputs = first_turn(target, 1, cache)
    if not gives_all_ids:
        inputs = only_new_ids(inputs, cache)
    with watched(target) as widths:
        greedy(target, inputs, max_new_tokens=16, draft_model=drafts[kind], num_draft_tokens=4, **with_cache(cache))
    # The last token of the first turn was returned, but never fed.
    assert widths[0] == 1 + USER_TURN.shape[1]
    assert max(widths[1:]) <= 4 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_the_cache_holds_except_for_one_token_can_go_on(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    hf_specdec.enable(target)
    cache = dynamic_cache(target)
    ids = greedy(target, PROMPT, max_new_tokens=10, **with_cache(cache))
    output = greedy(target, ids, max_new_tokens=16, draft_model=drafts[kind], **with_cache(cache))
    assert torch.equal(output, greedy(target, ids, max_new_tokens=16))


def test_a_shared_system_prompt_can_be_continued_twice_from_copies(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = dynamic_cache(target)
    with torch.no_grad():
        target(PROMPT, **with_cache(cache))
    for question in (torch.tensor([[20, 21]]), torch.tensor([[40, 41, 42]])):
        ids = torch.cat([PROMPT, question], dim=1)
        output = greedy(target, ids, max_new_tokens=16, draft_model=drafts["noisy"], **with_cache(copy.deepcopy(cache)))
        assert torch.equal(output, greedy(target, ids, max_new_tokens=16))
    assert cached_length(cache) == PROMPT.shape[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_four_drafted_turns_on_one_cache_equal_plain_turns(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    ours, theirs = dynamic_cache(target), dynamic_cache(target)
    inputs = prompts_of(batch)
    for turn in range(4):
        output = greedy(target, inputs, max_new_tokens=8, draft_model=drafts[kind], **with_cache(ours))
        assert torch.equal(output, greedy(target, inputs, max_new_tokens=8, **with_cache(theirs))), turn
        ids = torch.cat([output, USER_TURN.expand(batch, -1)], dim=1)
        grown = ids.shape[1] - inputs["input_ids"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones(batch, grown, dtype=torch.long)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask}


def test_a_batch_whose_padding_lies_between_the_turns_goes_on_like_plain(
    target: LlamaForCausalLM, drafts: Drafts
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(3)
    width = inputs["input_ids"].shape[1]
    plain = greedy(target, inputs, max_new_tokens=10)
    eos = token_after(plain[1], 3, width)
    outputs = []
    for draft in (None, drafts["noisy"]):
        cache = dynamic_cache(target)
        ids = greedy(target, inputs, max_new_tokens=10, eos_token_id=eos, **with_cache(cache))
        is_padding = ids[:, width:] == 0
        mask = torch.cat([inputs["attention_mask"], (~is_padding).long(), torch.ones(3, 3, dtype=torch.long)], dim=1)
        ids = torch.cat([ids, USER_TURN.expand(3, -1)], dim=1)
        second = {"input_ids": ids, "attention_mask": mask}
        extra = {} if draft is None else {"draft_model": draft}
        outputs.append(greedy(target, second, max_new_tokens=16, **with_cache(cache), **extra))
    assert is_padding.any()
    assert torch.equal(outputs[1], outputs[0])


@pytest.mark.parametrize("has_cache", [False, True], ids=["first turn", "second turn"])
def test_a_prompt_read_in_chunks_gives_the_plain_text(
    target: LlamaForCausalLM, drafts: Drafts, has_cache: bool
) -> None:
    if has_cache and CACHE_NAME != "cache":
        pytest.skip("this transformers reads a continued prompt in chunks wrongly by itself")
    hf_specdec.enable(target)
    outputs = []
    for extra in ({}, {"draft_model": drafts["noisy"]}):
        cache = dynamic_cache(target)
        inputs = first_turn(target, 3, cache) if has_cache else prompts_of(3)
        options = {"max_new_tokens": 16, "prefill_chunk_size": 2}
        outputs.append(greedy(target, inputs, **options, **extra, **with_cache(cache)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_a_second_turn_that_ends_within_the_targets_context_does_not_overrun_it(num_tokens: int) -> None:
    target = build_gpt2(32, seed=5)
    hf_specdec.enable(target)
    outputs = []
    for extra in ({}, {"draft_model": models.build_target()}):
        cache = dynamic_cache(target)
        everything = first_turn(target, 1, cache, max_new_tokens=6)
        assert everything["input_ids"].shape[1] + 17 == 32
        text = greedy(target, everything, max_new_tokens=17)[0, -17:].tolist()
        eos = text[num_tokens - 1]
        assert text.index(eos) == num_tokens - 1
        # The limit is far beyond the context, but the text is not: plain decoding never gets there.
        options = {"max_new_tokens": 60, "eos_token_id": eos}
        outputs.append(greedy(target, only_new_ids(everything, cache), **options, **with_cache(cache), **extra))
    assert torch.equal(*outputs)


# ---- what is left in the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cache_kind", CACHES)
def test_the_callers_cache_ends_as_plain_decoding_leaves_it(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, cache_kind: str
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    cache, expected = CACHES[cache_kind](target), CACHES[cache_kind](target)
    output = greedy(target, inputs, max_new_tokens=16, draft_model=drafts[kind], **with_cache(cache))
    assert torch.equal(output, greedy(target, inputs, max_new_tokens=16, **with_cache(expected)))
    assert cached_length(cache) == output.shape[1] - 1
    assert_same_cache(cache, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cache_kind", CACHES)
def test_the_callers_cache_goes_on_with_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, cache_kind: str
) -> None:
    hf_specdec.enable(target)
    cache = CACHES[cache_kind](target)
    second = first_turn(target, batch, cache, draft_model=drafts[kind])
    output = greedy(target, second, max_new_tokens=16, **with_cache(cache))
    assert torch.equal(output, greedy(target, second, max_new_tokens=16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens_of_row", [1, 4, 9])
def test_the_cache_of_rows_that_ended_early_equals_plain(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, num_tokens_of_row: int
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(3)
    plain = greedy(target, inputs, max_new_tokens=16)
    eos = int(plain[1, inputs["input_ids"].shape[1] + num_tokens_of_row - 1])
    options = {"max_new_tokens": 16, "eos_token_id": eos, "return_dict_in_generate": True}
    ours = greedy(target, inputs, draft_model=drafts[kind], **options, **with_cache(dynamic_cache(target)))
    theirs = greedy(target, inputs, **options)
    assert (theirs.sequences[1] == 0).any(), "the row did not end early"
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_same_cache(returned_cache(ours), returned_cache(theirs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_returned_cache_goes_on_with_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    plain = greedy(target, inputs, max_new_tokens=16)
    eos = token_after(plain[0], 5, inputs["input_ids"].shape[1])
    texts = []
    for draft in (None, drafts[kind]):
        extra = {} if draft is None else {"draft_model": draft}
        output = greedy(target, inputs, max_new_tokens=12, eos_token_id=eos, return_dict_in_generate=True, **extra)
        ids = torch.cat([output.sequences, USER_TURN.expand(batch, -1)], dim=1)
        grown = ids.shape[1] - inputs["input_ids"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones(batch, grown, dtype=torch.long)], dim=1)
        second = {"input_ids": ids, "attention_mask": mask}
        texts.append(greedy(target, second, max_new_tokens=12, **with_cache(returned_cache(output))).tolist())
    assert texts[1] == texts[0]


def test_the_cache_is_right_when_the_first_token_ends_everything(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache, expected = dynamic_cache(target), dynamic_cache(target)
    greedy(target, PROMPT, max_new_tokens=1, draft_model=drafts["noisy"], **with_cache(cache))
    greedy(target, PROMPT, max_new_tokens=1, **with_cache(expected))
    assert cached_length(cache) == PROMPT.shape[1]
    assert_same_cache(cache, expected, atol=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_is_right_after_lockstep_rounds(target: LlamaForCausalLM, drafts: Drafts, batch: int) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    cache, expected = dynamic_cache(target), dynamic_cache(target)
    eos = token_after(greedy(target, inputs, max_new_tokens=16)[0], 5, inputs["input_ids"].shape[1])
    options = {
        "max_new_tokens": 16,
        "eos_token_id": eos,
        "return_dict_in_generate": True,
        "output_hidden_states": True,
    }
    greedy(target, inputs, draft_model=drafts["noisy"], **options, **with_cache(cache))
    greedy(target, inputs, **options, **with_cache(expected))
    assert_same_cache(cache, expected)


def test_a_cache_made_without_a_config_is_filled(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache, expected = DynamicCache(), DynamicCache()
    greedy(target, PROMPT, max_new_tokens=10, draft_model=drafts["noisy"], **with_cache(cache))
    greedy(target, PROMPT, max_new_tokens=10, **with_cache(expected))
    assert_same_cache(cache, expected)


def test_the_returned_cache_is_the_one_that_was_passed(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = dynamic_cache(target)
    output = greedy(
        target,
        PROMPT,
        max_new_tokens=8,
        draft_model=drafts["noisy"],
        return_dict_in_generate=True,
        **with_cache(cache),
    )
    assert returned_cache(output) is cache


# ---- static caches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_static_cache_by_name_gives_the_plain_text(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    options = {"max_new_tokens": 16, "cache_implementation": "static"}
    output = greedy(target, prompts_of(batch), draft_model=drafts[kind], **options)
    assert torch.equal(output, greedy(target, prompts_of(batch), **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_two_turns_on_a_static_cache_equal_the_calls_without_one(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    cache = static_cache(target)
    second = first_turn(target, batch, cache, draft_model=drafts[kind])
    output = greedy(target, second, max_new_tokens=16, draft_model=drafts[kind], **with_cache(cache))
    assert torch.equal(output, greedy(target, second, max_new_tokens=16))


def test_buffers_of_a_static_cache_stay_where_they_are(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = static_cache(target)
    first_turn(target, 1, cache)
    before = [(layer.keys.data_ptr(), layer.cumulative_length.data_ptr()) for layer in cache.layers]
    greedy(target, PROMPT.repeat(1, 4), max_new_tokens=9, draft_model=drafts["noisy"], **with_cache(cache))
    assert [(layer.keys.data_ptr(), layer.cumulative_length.data_ptr()) for layer in cache.layers] == before


def test_a_static_cache_that_is_full_to_the_brim_is_not_overrun(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = static_cache(target, max_cache_len=PROMPT.shape[1] + 15)
    output = greedy(target, PROMPT, max_new_tokens=16, draft_model=drafts["noisy"], **with_cache(cache))
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=16))
    assert cached_length(cache) == cache.layers[0].max_cache_len


# ---- sliding windows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_turns_on_a_cache_with_a_sliding_window_equal_plain_turns(
    mistral: MistralForCausalLM, kind: str, batch: int
) -> None:
    draft = mistral_drafts(mistral)[kind]
    hf_specdec.enable(mistral)
    ours, theirs = dynamic_cache(mistral), dynamic_cache(mistral)
    inputs = prompts_of(batch)
    for turn in range(3):
        output = greedy(mistral, inputs, max_new_tokens=9, draft_model=draft, **with_cache(ours))
        assert torch.equal(output, greedy(mistral, inputs, max_new_tokens=9, **with_cache(theirs))), turn
        assert_same_cache(ours, theirs)
        ids = torch.cat([output, USER_TURN.expand(batch, -1)], dim=1)
        grown = ids.shape[1] - inputs["input_ids"].shape[1]
        mask = torch.cat([inputs["attention_mask"], torch.ones(batch, grown, dtype=torch.long)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_shorter_than_the_window_goes_on_beyond_it(mistral: MistralForCausalLM, kind: str) -> None:
    draft = mistral_drafts(mistral)[kind]
    hf_specdec.enable(mistral)
    cache = dynamic_cache(mistral)
    ids = greedy(mistral, PROMPT[:, :3], max_new_tokens=2, draft_model=draft, **with_cache(cache))
    output = greedy(mistral, ids, max_new_tokens=16, draft_model=draft, **with_cache(cache))
    assert torch.equal(output, greedy(mistral, ids, max_new_tokens=16))


def test_rows_of_a_sliding_window_that_ended_early_leave_the_plain_cache(mistral: MistralForCausalLM) -> None:
    draft = mistral_drafts(mistral)["noisy"]
    hf_specdec.enable(mistral)
    inputs = prompts_of(3)
    eos = token_after(greedy(mistral, inputs, max_new_tokens=16)[2], 2, inputs["input_ids"].shape[1])
    options = {"max_new_tokens": 16, "eos_token_id": eos, "return_dict_in_generate": True}
    ours = greedy(mistral, inputs, draft_model=draft, **options)
    theirs = greedy(mistral, inputs, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_same_cache(returned_cache(ours), returned_cache(theirs))


@pytest.mark.filterwarnings("ignore::hf_specdec.SpeculationWarning")
@pytest.mark.parametrize("gives_cache", [True, False], ids=["object", "name"])
def test_a_static_cache_with_a_sliding_window_gives_the_plain_text(
    mistral: MistralForCausalLM, gives_cache: bool
) -> None:
    draft = mistral_drafts(mistral)["noisy"]
    hf_specdec.enable(mistral)
    outputs = []
    for extra in ({"draft_model": draft}, {}):
        options = with_cache(static_cache(mistral)) if gives_cache else {"cache_implementation": "static"}
        outputs.append(greedy(mistral, PROMPT, max_new_tokens=16, **options, **extra))
    assert torch.equal(*outputs)


# ---- calls that fail -------------------------------------------------------------------------------------------


def _fail_in_target(target: PreTrainedModel, _: PreTrainedModel) -> tuple[AbstractContextManager[None], Any]:
    return failing(target, 3, KeyboardInterrupt()), {}


def _fail_in_prefill(target: PreTrainedModel, _: PreTrainedModel) -> tuple[AbstractContextManager[None], Any]:
    return failing(target, 1, KeyboardInterrupt()), {}


def _fail_in_draft(_: PreTrainedModel, draft: PreTrainedModel) -> tuple[AbstractContextManager[None], Any]:
    return failing(draft, 4, KeyboardInterrupt()), {}


def _fail_in_strict_draft(_: PreTrainedModel, draft: PreTrainedModel) -> tuple[AbstractContextManager[None], Any]:
    return failing(draft, 4, RuntimeError("boom")), {"speculative_config": {"strict": True}}


def _fail_in_processor(*_: PreTrainedModel) -> tuple[AbstractContextManager[None], Any]:
    return nullcontext(), {"logits_processor": [RaisingProcessor(5, RuntimeError("boom"))]}


def _fail_in_callback(*_: PreTrainedModel) -> tuple[AbstractContextManager[None], Any]:
    def interrupt(record: hf_specdec.RoundRecord) -> None:
        raise KeyboardInterrupt

    return nullcontext(), {"speculative_config": {"on_round": interrupt}}


FAILURES = {
    "interrupt in the prefill": (_fail_in_prefill, KeyboardInterrupt),
    "interrupt in the target": (_fail_in_target, KeyboardInterrupt),
    "interrupt in the draft": (_fail_in_draft, KeyboardInterrupt),
    "strict draft": (_fail_in_strict_draft, hf_specdec.DraftFailedError),
    "processor": (_fail_in_processor, RuntimeError),
    "interrupt in on_round": (_fail_in_callback, KeyboardInterrupt),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("cache_kind", [*CACHES, "sliding"])
def test_the_callers_cache_survives_a_failed_call(
    target: LlamaForCausalLM, mistral: MistralForCausalLM, cache_kind: str, failure: str
) -> None:
    model: Any = mistral if cache_kind == "sliding" else target
    draft = copy.deepcopy(model)
    hf_specdec.enable(model)
    admit(model, draft)
    cache = CACHES.get(cache_kind, dynamic_cache)(model)
    second = first_turn(model, 1, cache)
    length, states = cached_length(cache), cached_states(cache)
    untouched = copy.deepcopy(cache)
    arrange, expected = FAILURES[failure]
    context, options = arrange(model, draft)
    with context, pytest.raises(expected):
        greedy(model, second, max_new_tokens=16, draft_model=draft, **options, **with_cache(cache))
    assert cached_length(cache) == length
    for now, before in zip(cached_states(cache), states, strict=True):
        assert torch.equal(now, before)
    output = greedy(model, second, max_new_tokens=16, **with_cache(cache))
    assert torch.equal(output, greedy(model, second, max_new_tokens=16, **with_cache(untouched)))


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("cache_kind", [*CACHES, "made without a config"])
def test_an_empty_cache_is_empty_again_after_a_failed_call(
    target: LlamaForCausalLM, cache_kind: str, failure: str
) -> None:
    draft = copy.deepcopy(target)
    hf_specdec.enable(target)
    admit(target, draft)
    cache = CACHES[cache_kind](target) if cache_kind in CACHES else DynamicCache()
    arrange, expected = FAILURES[failure]
    context, options = arrange(target, draft)
    with context, pytest.raises(expected):
        greedy(target, PROMPT, max_new_tokens=16, draft_model=draft, **options, **with_cache(cache))
    assert cached_length(cache) == 0
    output = greedy(target, PROMPT, max_new_tokens=16, **with_cache(cache))
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=16))


def test_a_draft_that_fails_without_strict_leaves_the_plain_cache(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    cache, expected = dynamic_cache(target), dynamic_cache(target)
    with failing(draft, 9, RuntimeError("boom")), pytest.warns(hf_specdec.SpeculationWarning, match="boom"):
        output = greedy(target, PROMPT, max_new_tokens=16, draft_model=draft, **with_cache(cache))
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=16, **with_cache(expected)))
    assert_same_cache(cache, expected)


def test_a_static_cache_that_is_too_small_is_restored_after_the_error(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = static_cache(target, max_cache_len=PROMPT.shape[1] + 4)
    with pytest.raises((IndexError, RuntimeError)):
        greedy(target, PROMPT, max_new_tokens=16, draft_model=drafts["noisy"], **with_cache(cache))
    assert cached_length(cache) == 0
    output = greedy(target, PROMPT, max_new_tokens=5, **with_cache(cache))
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=5))


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_the_older_argument_name_is_understood(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = dynamic_cache(target)
    second = first_turn(target, 1, cache)
    output = greedy(target, second, max_new_tokens=16, draft_model=drafts["noisy"], past_key_values=cache)
    assert torch.equal(output, greedy(target, second, max_new_tokens=16))
    assert cached_length(cache) == output.shape[1] - 1


@pytest.mark.skipif(CACHE_NAME != "cache", reason="this transformers does not know the name")
def test_the_newer_argument_name_is_understood(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    cache = dynamic_cache(target)
    second = first_turn(target, 1, cache)
    output = greedy(target, second, max_new_tokens=16, draft_model=drafts["noisy"], cache=cache)
    assert torch.equal(output, greedy(target, second, max_new_tokens=16))
    assert cached_length(cache) == output.shape[1] - 1
