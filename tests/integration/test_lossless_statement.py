"""What "lossless" means here, as a test of each half of the statement.

In float32, greedy decoding with a draft gives the ids of plain decoding; it could part from it only where the two best
tokens lie within the last bit of their logits, which these prompts avoid. In 16 bit, verifying several tokens in one
forward rounds differently from feeding them one by one, so the texts may part; but only where the two best tokens of
plain decoding were as close as that rounding. What sampling promises is tested with the acceptance rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integration.comparing import KINDS, assert_same_ids, prompts
from integration.harness import greedy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import hf_specdec
import models

Drafts = dict[str, LlamaForCausalLM]
NUM_TOKENS = 100
# bfloat16 has 8 significant bits, and a logit is a sum of rounded terms: two such roundings of the largest logit.
TOLERANCE = 2 * 2**-7


def twenty_prompts() -> dict[str, torch.Tensor]:
    return prompts([3 + number % 7 for number in range(20)], seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_exact_for_twenty_prompts_and_a_hundred_tokens(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    hf_specdec.enable(target)
    plain = greedy(
        target, twenty_prompts(), max_new_tokens=NUM_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    assert relative_gaps(plain.logits).min() > 1e-5, "a tie may go either way; choose other prompts"
    output = greedy(target, twenty_prompts(), max_new_tokens=NUM_TOKENS, draft_model=drafts[kind])
    assert_same_ids(output, plain.sequences)


def relative_gaps(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return by how much the best token leads, as a share of the largest logit: `[B, new tokens]`."""
    stacked = torch.stack(logits, dim=1)  # [B, T, V]
    best = stacked.topk(2, dim=-1).values
    return (best[..., 0] - best[..., 1]) / stacked.abs().amax(dim=-1)


def first_difference(got: torch.Tensor, wanted: torch.Tensor) -> int | None:
    """Return the first position where two sequences of ids differ."""
    different = (got != wanted).nonzero()
    return int(different[0]) if len(different) else None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_parts_from_plain_only_at_near_ties(kind: str) -> None:
    target = models.build_target().to(torch.bfloat16)
    draft = models.build_drafts(target)[kind]
    hf_specdec.enable(target)
    inputs = twenty_prompts()
    width = inputs["input_ids"].shape[1]
    plain = greedy(target, inputs, max_new_tokens=NUM_TOKENS, return_dict_in_generate=True, output_logits=True)
    output = greedy(target, inputs, max_new_tokens=NUM_TOKENS, draft_model=draft)
    gaps = relative_gaps(plain.logits)
    assert gaps.median() > 3 * TOLERANCE, "the tolerance would excuse any difference"
    for row in range(len(output)):
        position = first_difference(output[row, width:], plain.sequences[row, width:])
        if position is not None:
            assert gaps[row, position] <= TOLERANCE, (row, position)


@pytest.mark.slow
def test_a_bfloat16_draft_leaves_a_float32_target_exact(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    draft = drafts["noisy"].to(torch.bfloat16)
    wanted = greedy(target, twenty_prompts(), max_new_tokens=40)
    assert torch.equal(greedy(target, twenty_prompts(), max_new_tokens=40, draft_model=draft), wanted)


# ---- a real pair -----------------------------------------------------------------------------------------------

GOLDEN = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


@pytest.fixture
def stories(real_data: Path) -> tuple[Any, Any, Any]:
    """A trained target, its distilled draft, and their tokenizer."""
    folders = [real_data / "stories260k", real_data / "stories260k_draft"]
    for folder in folders:
        if not (folder / "model.safetensors").is_file():
            pytest.skip(f"needs the trained model in {folder.name}, and {real_data} does not hold it")
    target, draft = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    return hf_specdec.enable(target), draft, AutoTokenizer.from_pretrained(folders[0])


@pytest.mark.real
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_a_trained_pair_tells_the_published_story(stories: tuple[Any, Any, Any], num_draft_tokens: int) -> None:
    target, draft, tokenizer = stories
    start = torch.tensor([[1]])
    output = greedy(
        target,
        start,
        max_new_tokens=150,
        draft_model=draft,
        num_draft_tokens=num_draft_tokens,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, greedy(target, start, max_new_tokens=150))
    assert tokenizer.decode(output.sequences[0], skip_special_tokens=True).strip().startswith(GOLDEN)
    assert output.speculation.mean_acceptance_length > 1.3


@pytest.mark.real
def test_a_trained_pair_is_exact_in_a_batch(stories: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = stories
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["Once upon a time", "Lily and Tom were playing in the garden when", "The dog"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 60, "pad_token_id": tokenizer.pad_token_id}
    wanted = greedy(target, inputs, **options)
    assert torch.equal(greedy(target, inputs, draft_model=draft, num_draft_tokens=4, **options), wanted)
