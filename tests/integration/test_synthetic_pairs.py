"""Pairs with a set acceptance, through `generate`: the plain text, the claimed share, every lane and quantization."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from integration.comparing import assert_same_ids, plain
from integration.harness import watched
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_specdec
from hf_specdec.benchmark.synthetic import SyntheticPair, make_synthetic_pair
from hf_specdec.loading import bitsandbytes_config

TINY = "tiny-target:tiny-draft"
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SAMPLING = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "top_k": 0},
    "T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.9},
}


@cache
def pair_of(acceptance: float, dtype: torch.dtype, quantization: str = "none") -> SyntheticPair:
    pair = make_synthetic_pair(TINY, acceptance, dtype=dtype, draft_quantization=quantization)
    hf_specdec.enable(pair.target)
    return pair


def decode(pair, prompt, num_draft_tokens=4, **options):
    torch.manual_seed(0)
    return pair.target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        draft_model=pair.draft,
        num_draft_tokens=num_draft_tokens,
        return_dict_in_generate=True,
        **options,
    )


def assert_speculated(stats):
    assert (stats.lane, stats.draft_lane, stats.fallbacks) == ("ragged", "ragged", [])


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
@BOTH
def test_greedy_output_is_the_plain_one(acceptance, dtype):
    pair = pair_of(acceptance, dtype)
    prompt = pair.prompt(4, 6)
    output = decode(pair, prompt, max_new_tokens=12, do_sample=False)
    assert_speculated(output.speculation)
    wanted = plain(pair.target, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, max_new_tokens=12)
    assert_same_ids(output.sequences, wanted)


@pytest.mark.parametrize("setting", SAMPLING)
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_the_measured_acceptance_is_the_set_one(acceptance, setting):
    """Over more than 2000 judged guesses, from many places of the cycle at once; fewer where all must go one way."""
    pair = pair_of(acceptance, torch.float32)
    is_certain = acceptance in (0.0, 1.0)
    num_rows, num_tokens = (8, 16) if is_certain else (72, 40)
    options = SAMPLING[setting] | {"max_new_tokens": num_tokens}
    output = decode(pair, pair.prompt(num_rows, 2), num_draft_tokens=3, **options)
    assert_speculated(output.speculation)
    assert output.sequences.shape == (num_rows, 2 + num_tokens)
    judged = sum(sum(record.num_evaluated_tokens) for record in output.speculation.rounds)
    assert judged > (50 if is_certain else 2000)
    assert abs(output.speculation.token_acceptance_rate - acceptance) <= (0.0 if is_certain else 0.03)
    # Nothing but ordinary tokens.
    assert torch.isin(output.sequences, pair.token_ids).all()


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_acceptance_does_not_depend_on_the_position_or_the_verification(verification):
    pair = pair_of(0.8, torch.bfloat16)
    options = SAMPLING["T=1"] | {"speculative_config": {"verification": verification}}
    stats = decode(pair, pair.prompt(64, 2), max_new_tokens=24, **options).speculation
    first, second = stats.acceptance_rate_per_position[:2]
    assert abs(first - 0.8) < 0.07
    assert abs(second / first - 0.8) < 0.07


def test_processors_that_forbid_tokens_work_as_in_plain_decoding():
    pair = pair_of(0.5, torch.float32)
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 16, "do_sample": False}
    likely = plain(pair.target, {"input_ids": pair.prompt(1, 4)}, max_new_tokens=4)[0, 4:].tolist()
    options["bad_words_ids"] = [[token] for token in likely]
    prompt = pair.prompt(1, 4)
    output = decode(pair, prompt, **options)
    wanted = plain(pair.target, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, **options)
    assert_same_ids(output.sequences, wanted)
    assert not set(likely) & set(output.sequences[0, 4:].tolist())


@BOTH
def test_the_hosts_assisted_decoding_runs_on_the_pair_and_accepts_as_much(dtype):
    pair = pair_of(0.8, dtype)
    assistant = copy.deepcopy(pair.draft)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    prompt = pair.prompt(1, 6)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    with watched(pair.target) as forwards:
        output = plain(pair.target, inputs, max_new_tokens=64, assistant_model=assistant)
    assert_same_ids(output, plain(pair.target, inputs, max_new_tokens=64))
    ours = decode(pair, prompt, max_new_tokens=64, do_sample=False)
    assert_same_ids(ours.sequences, output)
    # Both end their rounds with the first wrong guess; ours has one more forward, that of the prompt.
    assert abs(len(forwards) - ours.speculation.num_rounds) <= 2


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@BOTH
def test_a_quantized_draft_is_accepted_at_the_same_rate(quantization, dtype):
    pair, unquantized = pair_of(0.5, dtype, quantization), pair_of(0.5, dtype)
    prompt = pair.prompt(4, 6)
    output = decode(pair, prompt, max_new_tokens=16, do_sample=False)
    assert_speculated(output.speculation)
    assert output.speculation.draft_quantization == quantization
    same = decode(unquantized, prompt, max_new_tokens=16, do_sample=False)
    assert_same_ids(output.sequences, same.sequences)
    assert output.speculation.token_acceptance_rate == same.speculation.token_acceptance_rate


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_quantized_layers_are_those_that_the_host_would_load(quantization, tmp_path):
    quantized, plain_draft = (
        make_synthetic_pair("tiny-target:tiny-qwen3", 0.5, dtype=torch.float32, draft_quantization=kind).draft
        for kind in (quantization, "none")
    )
    plain_draft.save_pretrained(tmp_path)
    settings = bitsandbytes_config(quantization, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=settings)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        wanted, got, unquantized = (
            model.model(ids).last_hidden_state for model in (loaded.eval(), quantized, plain_draft)
        )
    assert torch.equal(got, wanted)
    assert not torch.allclose(got, unquantized, atol=1e-4)


def test_vocabularies_may_differ_in_size_where_the_tokens_are_the_same(tmp_path):
    for name, vocab_size in (("target", 112), ("draft", 96)):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        LlamaConfig(**sizes, vocab_size=vocab_size).save_pretrained(tmp_path / name)
    pair = make_synthetic_pair(f"{tmp_path}/target:{tmp_path}/draft", 0.5, dtype=torch.float32)
    hf_specdec.enable(pair.target)
    prompt = pair.prompt(3, 6)
    output = decode(pair, prompt, max_new_tokens=24, do_sample=False)
    wanted = plain(pair.target, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, max_new_tokens=24)
    assert_same_ids(output.sequences, wanted)
    assert 0.3 < output.speculation.token_acceptance_rate < 0.7


def test_enabling_disabling_and_copying_leave_the_script_in_place():
    pair = make_synthetic_pair(TINY, 0.5, dtype=torch.float32)
    tokens = pair.prompt(1, 5)
    with torch.no_grad():
        wanted = pair.target(tokens).logits
        for changed in (
            hf_specdec.enable(pair.target),
            copy.deepcopy(pair.target),
            hf_specdec.disable(pair.target),
        ):
            assert torch.equal(changed(tokens).logits, wanted)
    assert len(pair.target._forward_hooks) == 1


def test_the_note_says_that_the_acceptance_was_set():
    pair = pair_of(0.8, torch.float32, "nf4")
    assert pair.note.startswith("set acceptance, not measured: 0.8")
    assert "tiny-target and tiny-draft in nf4" in pair.note
