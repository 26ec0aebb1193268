"""Greedy decoding with a draft gives the ids of plain decoding, whatever the draft, the batch and the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch
from integration.comparing import (
    EVERY_OUTCOME,
    KINDS,
    assert_same_ids,
    ids_that_end_rows_apart,
    new_tokens,
    num_tokens_until,
    outcomes_of,
    plain,
    prompts,
    same_as_plain,
    same_for_all_drafts,
)
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import hf_specdec
import models
from hf_specdec import SpeculationWarning, SpeculativeConfig

LENGTHS = {1: [6], 3: [3, 6, 11], 8: [1, 3, 6, 11, 2, 7, 4, 9]}
Models = tuple[PreTrainedModel, dict[str, PreTrainedModel]]


@pytest.fixture(autouse=True)
def _enabled(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)


def build(model_class: type, config: Any, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()


def pair(model_class: type, config: Any) -> Models:
    """Return an enabled target and its three drafts, of any architecture."""
    model = build(model_class, config)
    drafts = {
        "identical": copy.deepcopy(model),
        "unrelated": build(model_class, copy.deepcopy(config), seed=100),
        "noisy": models.build_noisy(model),
    }
    return hf_specdec.enable(model), drafts


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.6,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def gpt2_config(num_positions: int = 512) -> GPT2Config:
    return GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=num_positions,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def assert_outcomes_of_kind(kind: str, num_draft_tokens: int, seen: set[str]) -> None:
    """Each draft must have done what it was built for; a noisy draft of one token has no partial acceptance."""
    if kind == "identical":
        assert seen == {"full"}
    elif kind == "unrelated":
        assert "none" in seen
    else:
        assert {"none", "partial" if num_draft_tokens > 1 else "full"} <= seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_equals_plain_decoding(
    target: LlamaForCausalLM, drafts: dict[str, Any], num_rows: int, num_draft_tokens: int, kind: str
) -> None:
    inputs = prompts(LENGTHS[num_rows])
    stats = same_as_plain(target, drafts[kind], inputs, num_draft_tokens, max_new_tokens=12)
    assert_outcomes_of_kind(kind, num_draft_tokens, outcomes_of(stats.rounds))


@pytest.mark.parametrize("how_many", [1, 2], ids=["one", "several"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_rows_end_at_their_own_end_of_sequence(
    target: LlamaForCausalLM, drafts: dict[str, Any], num_rows: int, num_draft_tokens: int, how_many: int
) -> None:
    inputs = prompts(LENGTHS[num_rows])
    rows = new_tokens(plain(target, inputs, max_new_tokens=12), inputs)
    eos = ids_that_end_rows_apart(rows, how_many)
    lengths = num_tokens_until(rows, eos)
    assert min(lengths) < 12
    assert num_rows == 1 or len(set(lengths)) > 1
    same_for_all_drafts(
        target,
        drafts,
        inputs,
        num_draft_tokens,
        outcomes={"full", "none"},
        max_new_tokens=12,
        eos_token_id=eos[0] if how_many == 1 else eos,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_ids_alone_equal_those_of_the_full_output(target: LlamaForCausalLM, drafts: dict[str, Any], kind: str) -> None:
    inputs = prompts(LENGTHS[8])
    rows = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    arguments = {"max_new_tokens": 14, "eos_token_id": ids_that_end_rows_apart(rows, 2)}
    records: list[Any] = []
    got = target.generate(
        **inputs,
        **arguments,
        draft_model=drafts[kind],
        speculative_config=SpeculativeConfig(num_draft_tokens=4, on_round=records.append),
    )
    assert_same_ids(got, plain(target, inputs, **arguments))
    assert_outcomes_of_kind(kind, 4, outcomes_of(records))


def test_twenty_prompts_stay_equal_for_a_hundred_tokens(target: LlamaForCausalLM, drafts: dict[str, Any]) -> None:
    inputs = prompts([1 + row % 13 for row in range(20)], seed=5)
    stats = same_as_plain(target, drafts["noisy"], inputs, 3, max_new_tokens=100)
    assert outcomes_of(stats.rounds) == EVERY_OUTCOME


@pytest.mark.parametrize("num_rows", [1, 3])
def test_prompts_of_one_token_work(target: LlamaForCausalLM, drafts: dict[str, Any], num_rows: int) -> None:
    same_for_all_drafts(target, drafts, prompts([1] * num_rows), max_new_tokens=14)


def test_prompts_without_a_mask_work(target: LlamaForCausalLM, drafts: dict[str, Any]) -> None:
    inputs = {"input_ids": prompts([7, 7, 7])["input_ids"]}
    same_for_all_drafts(target, drafts, inputs, max_new_tokens=14)


def test_a_positional_prompt_works(target: LlamaForCausalLM, drafts: dict[str, Any]) -> None:
    input_ids = prompts([6])["input_ids"]
    wanted = target.generate(input_ids, max_new_tokens=12)
    assert_same_ids(target.generate(input_ids, max_new_tokens=12, draft_model=drafts["noisy"]), wanted)


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
def test_prompts_of_32_bit_ids_work(target: LlamaForCausalLM, drafts: dict[str, Any], lengths: list[int]) -> None:
    inputs = prompts(lengths)
    inputs["input_ids"] = inputs["input_ids"].int()
    same_for_all_drafts(target, drafts, inputs, max_new_tokens=14)


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 1.3}, {"output_scores": True}], ids=str)
def test_a_text_may_outgrow_the_memory_allocated_at_first(
    monkeypatch: pytest.MonkeyPatch,
    target: LlamaForCausalLM,
    drafts: dict[str, Any],
    arguments: dict[str, Any],
    lengths: list[int],
) -> None:
    monkeypatch.setattr("hf_specdec.engine.prompt.FIRST_ALLOCATION", 2)
    monkeypatch.setattr("hf_specdec.engine.cache.GROWTH", 2)
    same_for_all_drafts(target, drafts, prompts(lengths), max_new_tokens=30, **arguments)


@pytest.mark.parametrize("num_return_sequences", [2, 5])
def test_several_sequences_per_prompt_have_the_shape_of_plain_decoding(
    target: LlamaForCausalLM, drafts: dict[str, Any], num_return_sequences: int
) -> None:
    # Sampling from one token only is greedy decoding, so the ids are known, too.
    arguments = {
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": num_return_sequences,
        "max_new_tokens": 12,
    }
    stats = same_for_all_drafts(target, drafts, prompts(LENGTHS[3]), **arguments)
    assert {s.num_rows for s in stats.values()} == {3 * num_return_sequences}


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_never_drafts_more_than_the_length_limit_leaves_room_for(
    target: LlamaForCausalLM, drafts: dict[str, Any], kind: str, max_new_tokens: int
) -> None:
    num_fed: list[int] = []
    drafts[kind].register_forward_pre_hook(
        lambda _module, _args, kwargs: num_fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    stats = same_as_plain(target, drafts[kind], prompts([6]), 5, max_new_tokens=max_new_tokens)
    remaining = max_new_tokens - 1  # The first token is the prefill's.
    for record in stats.rounds:
        assert record.num_draft_tokens == min(5, remaining - 1)
        remaining -= len(record.committed_token_ids[0])
    assert remaining == 0
    # One forward reads the prompt, and each drafted token takes one more.
    assert len(num_fed) <= 1 + sum(stats.draft_lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_of_one_more_token_gives_one_token(target: LlamaForCausalLM, drafts: dict[str, Any], kind: str) -> None:
    inputs = prompts(LENGTHS[3])
    width = inputs["input_ids"].shape[1]
    stats = same_as_plain(target, drafts[kind], inputs, 5, max_length=width + 1)
    assert stats.num_new_tokens == 3
    assert stats.num_rounds == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_explicit_position_ids_are_continued(target: LlamaForCausalLM, drafts: dict[str, Any], num_rows: int) -> None:
    inputs = prompts([6] * num_rows)
    # A gap inside, since rotary positions do not notice a shift of everything.
    gaps = torch.arange(num_rows)[:, None] * 5 + 4
    position_ids = torch.arange(6)[None] + gaps * (torch.arange(6) > 2)
    without = plain(target, inputs, max_new_tokens=14)
    assert not torch.equal(plain(target, inputs, max_new_tokens=14, position_ids=position_ids), without)
    # No draft knows these positions, so none agrees with everything.
    same_for_all_drafts(
        target, drafts, inputs, outcomes={"none", "partial"}, max_new_tokens=14, position_ids=position_ids
    )


@pytest.mark.parametrize(
    "mask",
    [[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 1, 0, 1]],
    ids=["left", "hole", "left and holes"],
)
def test_a_masked_row_alone_works(target: LlamaForCausalLM, drafts: dict[str, Any], mask: list[int]) -> None:
    inputs = {**prompts([8]), "attention_mask": torch.tensor([mask])}
    unmasked = plain(target, prompts([8]), max_new_tokens=14)
    assert not torch.equal(plain(target, inputs, max_new_tokens=14), unmasked)
    same_for_all_drafts(target, drafts, inputs, max_new_tokens=14)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("with_types", [False, True], ids=["no types", "token types"])
def test_learned_positions_and_token_types_work(num_rows: int, with_types: bool) -> None:
    model, drafts = pair(GPT2LMHeadModel, gpt2_config())
    inputs = prompts(LENGTHS[num_rows])
    without = plain(model, inputs, max_new_tokens=14)
    outcomes = EVERY_OUTCOME
    if with_types:
        inputs["token_type_ids"] = torch.full_like(inputs["input_ids"], 7)
        assert not torch.equal(plain(model, inputs, max_new_tokens=14), without)
        outcomes = frozenset({"none"})  # Drafts do not get the types.
    same_for_all_drafts(model, drafts, inputs, outcomes=outcomes, max_new_tokens=14)


@pytest.mark.parametrize("lengths", [[6], [20], [3, 6, 14]], ids=["short", "longer than the window", "batch"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sliding_window_is_kept(attention: str, lengths: list[int]) -> None:
    small = SMALL | {"num_hidden_layers": 1}
    model, drafts = pair(MistralForCausalLM, MistralConfig(**small, sliding_window=8, attn_implementation=attention))
    num_tokens = 60 if lengths == [6] else 25
    with_wide_window = build(MistralForCausalLM, MistralConfig(**small, sliding_window=None))
    inputs = prompts(lengths)
    assert not torch.equal(
        plain(model, inputs, max_new_tokens=num_tokens), plain(with_wide_window, inputs, max_new_tokens=num_tokens)
    )
    same_for_all_drafts(model, drafts, inputs, 3, max_new_tokens=num_tokens)


@pytest.mark.parametrize("lengths", [[12], [3, 6, 14]], ids=["single", "batch"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 8, "tie_word_embeddings": False}),
        (Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True}),
    ],
    ids=["gemma3", "qwen2"],
)
def test_alternating_layer_types_work(
    model_class: type, config_class: type, options: dict[str, Any], attention: str, lengths: list[int]
) -> None:
    options = {
        **SMALL,
        **options,
        "num_hidden_layers": 4,
        "layer_types": ALTERNATING,
        "sliding_window": 8,
        "attn_implementation": attention,
    }
    model, drafts = pair(model_class, config_class(**options))
    same_for_all_drafts(model, drafts, prompts(lengths), 3, max_new_tokens=14)


# --- models that are more than their masks and positions --------------------------------------------------------------


def gpt_neo() -> Models:
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        # Wider than the few tokens that a trial run could look at.
        window_size=16,
        max_position_embeddings=512,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return pair(GPTNeoForCausalLM, config)


def dynamic_rope() -> Models:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return pair(LlamaForCausalLM, LlamaConfig(**SMALL | {"max_position_embeddings": 16, "rope_parameters": rope}))


def long_rope() -> Models:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 24,
    }
    return pair(Phi3ForCausalLM, Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=24))


@pytest.mark.parametrize("lengths", [[6], [3, 6, 14]], ids=["single", "batch"])
@pytest.mark.parametrize("build_pair", [gpt_neo, dynamic_rope, long_rope], ids=lambda build_pair: build_pair.__name__)
def test_a_model_that_looks_at_the_whole_length_is_exact_or_refused(build_pair: Any, lengths: list[int]) -> None:
    # Windows that are counted from the last column, and frequencies that change with the longest position.
    model, drafts = build_pair()
    inputs = prompts(lengths)
    wanted = plain(model, inputs, max_new_tokens=40)
    for draft in drafts.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SpeculationWarning)
            got = plain(model, inputs, max_new_tokens=40, draft_model=draft, num_draft_tokens=3)
        assert_same_ids(got, wanted)


# --- vocabularies that differ by padding ---------------------------------------------------------------------------


def widened(model: LlamaForCausalLM, vocab_size: int, padding: float) -> LlamaForCausalLM:
    """Return a copy with more rows in embedding and head, filled with `padding`."""
    with torch.random.fork_rng(devices=[]):
        wide = models.build_target(vocab_size=vocab_size)
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = torch.full((vocab_size - state[name].shape[0], state[name].shape[1]), padding)
        state[name] = torch.cat([state[name], extra])
    wide.load_state_dict(state)
    return wide


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
@pytest.mark.parametrize("padding", [0.0, 9.0], ids=["zeros", "large values"])
def test_a_draft_with_a_padded_vocabulary_works(
    target: LlamaForCausalLM, drafts: dict[str, Any], padding: float, lengths: list[int]
) -> None:
    wide = {kind: widened(draft, 72, padding) for kind, draft in drafts.items()}
    stats = same_for_all_drafts(target, wide, prompts(lengths), max_new_tokens=14)
    assert stats["identical"].acceptance_rate == 1.0


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
def test_a_target_with_a_padded_vocabulary_works(
    target: LlamaForCausalLM, drafts: dict[str, Any], lengths: list[int]
) -> None:
    wide = hf_specdec.enable(widened(target, 72, 0.0))
    stats = same_for_all_drafts(wide, drafts, prompts(lengths), max_new_tokens=14)
    assert stats["identical"].acceptance_rate == 1.0


def test_ids_that_only_the_target_has_may_be_in_prompt_and_text(drafts: dict[str, Any]) -> None:
    model = hf_specdec.enable(models.build_target(vocab_size=72))
    inputs = prompts([6, 9, 4], vocab_size=72, seed=3)
    output = plain(model, inputs, max_new_tokens=20)
    assert (inputs["input_ids"] >= 64).any()
    assert (output[:, 9:] >= 64).any()
    same_for_all_drafts(model, drafts, inputs, outcomes={"none"}, max_new_tokens=20)


@pytest.mark.parametrize("target_is_wider", [True, False], ids=["wider target", "wider draft"])
def test_sampling_with_a_padded_vocabulary_proposes_only_ids_of_both(
    target: LlamaForCausalLM, drafts: dict[str, Any], target_is_wider: bool
) -> None:
    model = hf_specdec.enable(widened(target, 72, 0.0)) if target_is_wider else target
    draft = drafts["noisy"] if target_is_wider else widened(drafts["noisy"], 72, 9.0)
    size = 72 if target_is_wider else 64
    for seed in range(5):
        torch.manual_seed(seed)
        output = model.generate(
            **prompts([6, 3]),
            do_sample=True,
            top_k=0,
            temperature=2.0,
            max_new_tokens=14,
            draft_model=draft,
            return_dict_in_generate=True,
        )
        assert output.sequences.max() < size
        assert output.speculation.fallbacks == []


# --- short contexts -----------------------------------------------------------------------------------------------


@pytest.fixture
def speculation_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", SpeculationWarning)
        yield caught


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11], [40]], ids=["single", "batch", "long prompt"])
def test_drafting_stops_with_one_warning_at_the_end_of_the_drafts_context(
    speculation_warnings: list[warnings.WarningMessage], lengths: list[int]
) -> None:
    model, _ = pair(GPT2LMHeadModel, gpt2_config(512))
    short = copy.deepcopy(gpt2_config(32))
    identical = build(GPT2LMHeadModel, short)
    state = model.state_dict()
    state["transformer.wpe.weight"] = state["transformer.wpe.weight"][:32]
    identical.load_state_dict(state)
    inputs = prompts(lengths)
    wanted = plain(model, inputs, max_new_tokens=60)
    for draft in (identical, build(GPT2LMHeadModel, short, seed=100), models.build_noisy(identical)):
        speculation_warnings.clear()
        output = model.generate(
            **inputs, max_new_tokens=60, draft_model=draft, num_draft_tokens=4, return_dict_in_generate=True
        )
        assert_same_ids(output.sequences, wanted)
        assert [warning.category for warning in speculation_warnings] == [SpeculationWarning]
        assert len(output.speculation.fallbacks) == 1
        assert output.speculation.num_draft_tokens > 0 or lengths == [40]


@pytest.mark.parametrize("num_draft_tokens", [2, 9])
def test_the_targets_own_context_may_be_used_to_its_end(num_draft_tokens: int) -> None:
    model = hf_specdec.enable(build(GPT2LMHeadModel, gpt2_config(48)))
    identical = build(GPT2LMHeadModel, gpt2_config(512))
    state = model.state_dict()
    positions = identical.transformer.wpe.weight.detach()
    state["transformer.wpe.weight"] = torch.cat([state["transformer.wpe.weight"], positions[48:]])
    identical.load_state_dict(state)
    drafts = {"identical": identical, "noisy": models.build_noisy(identical)}
    # Rows get ahead of each other, and the one in front must not look past the last position.
    same_for_all_drafts(
        model, drafts, prompts([11, 11, 11, 11], seed=1), num_draft_tokens, outcomes={"none", "full"}, max_length=48
    )


# --- the draft length ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
def test_a_fixed_draft_length_is_honoured(
    target: LlamaForCausalLM, drafts: dict[str, Any], num_draft_tokens: int, kind: str
) -> None:
    stats = same_as_plain(target, drafts[kind], prompts([6]), num_draft_tokens, max_new_tokens=14)
    remaining = 13
    for record in stats.rounds:
        assert record.num_draft_tokens == min(num_draft_tokens, remaining - 1)
        remaining -= len(record.committed_token_ids[0])


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_run_the_same_rounds_and_leave_the_settings_alone(
    target: LlamaForCausalLM, drafts: dict[str, Any], kind: str
) -> None:
    draft = drafts[kind]
    before = [model.generation_config.to_dict() for model in (target, draft)]
    inputs = prompts(LENGTHS[3])
    runs = [same_as_plain(target, draft, inputs, 4, max_new_tokens=12) for _ in range(5)]
    fields = attrgetter("num_draft_tokens", "rows", "num_accepted_tokens", "committed_token_ids")
    lists = [[fields(record) for record in stats.rounds] for stats in runs]
    assert lists[1:] == lists[:-1]
    assert [model.generation_config.to_dict() for model in (target, draft)] == before
