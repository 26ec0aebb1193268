"""The bundled pair: widening changes the cost and nothing else; weights and prompts are there."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

import models
from hf_specdec.demo import DEMO_FOLDER, DEMO_PROMPTS, ballast_size, load_demo_pair, widen
from hf_specdec.demo.widening import Ballast, Bfloat16Linear

IDS = torch.arange(1, 41).view(2, 20)
NUM_BALLAST = 2 * 3 * 32 * 128  # layers * matrices * hidden * width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widening_leaves_logits_bit_identical(target: LlamaForCausalLM, dtype: torch.dtype) -> None:
    target = target.to(dtype)
    expected = target(IDS).logits
    assert torch.equal(widen(target, NUM_BALLAST)(IDS).logits, expected)


def test_widening_leaves_logits_bit_identical_without_packed_weights(target: LlamaForCausalLM) -> None:
    expected = target(IDS).logits
    widen(target, NUM_BALLAST)
    for layer in target.model.layers:
        for name in ("gate", "up", "down"):
            shape = (32, 128) if name == "down" else (128, 32)
            weight = torch.zeros(shape) if name == "down" else torch.randn(shape)
            setattr(layer.mlp.ballast, name, Bfloat16Linear(weight.bfloat16()))
    assert torch.equal(target(IDS).logits, expected)


def test_widening_counts_what_it_added(target: LlamaForCausalLM) -> None:
    num_own = target.num_parameters()
    widen(target, NUM_BALLAST)
    assert ballast_size(target).num_parameters == NUM_BALLAST
    assert ballast_size(target).num_bytes == 2 * NUM_BALLAST
    assert target.num_parameters() == num_own


def test_widening_does_not_touch_the_global_random_state(target: LlamaForCausalLM) -> None:
    before = torch.get_rng_state()
    widen(target, NUM_BALLAST)
    assert torch.equal(torch.get_rng_state(), before)


def test_ballast_is_computed_and_is_zero() -> None:
    ballast = Ballast(32, 128, torch.device("cpu"), torch.Generator().manual_seed(0))
    hidden = torch.randn(600, 32)
    assert ballast.gate(hidden).abs().min() > 0
    output = ballast(hidden.view(2, 300, 32))
    assert output.shape == (2, 300, 32)
    assert not output.any()


def test_widened_models_can_be_copied(target: LlamaForCausalLM) -> None:
    widen(target, NUM_BALLAST)
    assert torch.equal(copy.deepcopy(target)(IDS).logits, target(IDS).logits)


def test_refuses_ballast_smaller_than_one_column_block(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"`num_parameters` must be about 12,288 or more .* but is 100\."):
        widen(target, 100)


def test_refuses_a_model_without_mlps() -> None:
    with pytest.raises(ValueError, match="`Linear` has none"):
        widen(torch.nn.Linear(2, 2), NUM_BALLAST)


def test_every_workload_has_prompts() -> None:
    assert set(DEMO_PROMPTS) == {"code", "docs", "json", "prose"}
    assert all(len(set(prompts)) >= 4 for prompts in DEMO_PROMPTS.values())


needs_weights = pytest.mark.skipif(
    not (DEMO_FOLDER / "draft" / "model.safetensors").is_file(), reason="the demo pair has not been trained yet"
)


@needs_weights
def test_bundled_pair_shares_one_tokenizer() -> None:
    pair = load_demo_pair(num_parameters=0)
    assert len(pair.tokenizer) == pair.target.config.vocab_size == pair.draft.config.vocab_size
    for prompts in DEMO_PROMPTS.values():
        for prompt in prompts:
            ids = pair.tokenizer(prompt)["input_ids"]
            assert 30 <= len(ids) <= 80, (len(ids), prompt)
            assert pair.tokenizer.decode(ids) == prompt


@needs_weights
def test_bundled_pair_agrees_more_often_than_chance() -> None:
    pair = load_demo_pair(num_parameters=0)
    agreements = []
    for prompt in (prompt for prompts in DEMO_PROMPTS.values() for prompt in prompts):
        ids = pair.tokenizer(prompt, return_tensors="pt")["input_ids"]
        agreements.append((pair.target(ids).logits.argmax(-1) == pair.draft(ids).logits.argmax(-1)).float().mean())
    assert sum(agreements) / len(agreements) > 0.3


@needs_weights
def test_bundled_pair_is_widened_on_request() -> None:
    small, wide = load_demo_pair(num_parameters=0), load_demo_pair(num_parameters=1_000_000)
    ids = small.tokenizer(DEMO_PROMPTS["code"][0], return_tensors="pt")["input_ids"]
    assert ballast_size(small.target).num_parameters == 0
    assert ballast_size(wide.target).num_parameters == pytest.approx(1_000_000, rel=0.1)
    assert torch.equal(wide.target(ids).logits, small.target(ids).logits)


def test_noisy_builder_changes_only_what_has_spread() -> None:
    target = models.build_target()
    noisy = models.build_noisy(target)
    assert not torch.equal(noisy.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert torch.equal(noisy.model.norm.weight, target.model.norm.weight)
