"""Targets and drafts of different kinds: each runs in the lane that suits it, and the text is the target's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from integration.comparing import (
    EVERY_OUTCOME,
    KINDS,
    assert_same_ids,
    outcomes_of,
    plain,
    prompts,
    same_as_plain,
    same_for_all_drafts,
)
from integration.harness import build_gpt2, build_mistral
from integration.recurrent import build
from integration.scripting import in_turn, steer_by_script
from transformers import PreTrainedModel
from zoo.conditional import Example, build_conditional

import hf_specdec
import models
from hf_specdec import SpeculationWarning

Tensor = torch.Tensor
BUILDERS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": lambda seed: models.build_target(seed, num_hidden_layers=1),
    "mistral": lambda seed: build_mistral(seed),
    "mamba": lambda seed: build("mamba", seed),
    "qwen3_next": lambda seed: build("qwen3_next", seed),
}
LANES = {"llama": "ragged", "mistral": "ragged", "mamba": "compatible", "qwen3_next": "compatible"}
PAIRS = [
    ("llama", "mamba"),
    ("mamba", "llama"),
    ("llama", "qwen3_next"),
    ("qwen3_next", "mamba"),
    ("llama", "mistral"),
    ("mistral", "llama"),
    ("mistral", "mamba"),
]
# Tokens that are right in each round and row.
SCRIPT = in_turn((3, 0, 1, 3, 3, 2, 0, 3))
K = 3
# So much that some, but not all drafted tokens are right.
NOISE = {"t5": 0.06, "whisper": 0.1}


@cache
def target_of(name: str) -> PreTrainedModel:
    """Return an enabled target; tests leave it as it is."""
    return hf_specdec.enable(BUILDERS[name](0))


@cache
def draft_of(name: str) -> PreTrainedModel:
    """Return a draft that knows nothing of the target."""
    return BUILDERS[name](100)


def drafted(model: PreTrainedModel, draft: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Decode with a draft."""
    options = {"do_sample": False, "num_draft_tokens": K, "return_dict_in_generate": True} | options
    return model.generate(**inputs, draft_model=draft, **options)


# ---- decoders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6], [3, 7]])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_equals_plain_decoding_and_the_draft_knows_the_text(
    monkeypatch: pytest.MonkeyPatch, target: str, draft: str, lengths: list[int]
) -> None:
    model, inputs = target_of(target), prompts(lengths)
    wanted = plain(model, inputs, max_new_tokens=20)
    distances = steer_by_script(monkeypatch, wanted, SCRIPT)
    output = drafted(model, draft_of(draft), inputs, max_new_tokens=20)
    assert_same_ids(output.sequences, wanted)
    stats = output.speculation
    assert stats.fallbacks == []
    assert (stats.lane, stats.draft_lane) == (LANES[target], LANES[draft])
    assert outcomes_of(stats.rounds) == EVERY_OUTCOME
    assert len(distances) > 10 * len(lengths)
    assert max(distances) < 1e-4


@pytest.mark.parametrize("lengths", [[6], [3, 7]])
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_equals_plain_decoding_with_a_draft_of_no_use(target: str, draft: str, lengths: list[int]) -> None:
    stats = same_as_plain(target_of(target), draft_of(draft), prompts(lengths), K, max_new_tokens=7)
    assert "none" in outcomes_of(stats.rounds)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_sampling_repeats_with_the_seed(target: str, draft: str) -> None:
    model, inputs, outputs = target_of(target), prompts([3, 7]), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(drafted(model, draft_of(draft), inputs, do_sample=True, top_k=20, max_new_tokens=6))
        assert outputs[-1].speculation.fallbacks == []
        assert outputs[-1].sequences.shape == (2, 13)
        assert 0 <= int(outputs[-1].sequences.min()) <= int(outputs[-1].sequences.max()) < models.VOCAB_SIZE
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert not torch.equal(outputs[0].sequences, outputs[2].sequences)


# ---- a draft with a shorter context ----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6], [3, 7]])
@pytest.mark.parametrize("target", ["llama", "mamba"])
def test_decoding_goes_on_beyond_the_context_of_the_draft(
    monkeypatch: pytest.MonkeyPatch, target: str, lengths: list[int]
) -> None:
    model, inputs = target_of(target), prompts(lengths)
    wanted = plain(model, inputs, max_new_tokens=20)
    distances = steer_by_script(monkeypatch, wanted, SCRIPT)
    with pytest.warns(SpeculationWarning, match="outgrown the draft's context"):
        output = drafted(model, build_gpt2(16), inputs, max_new_tokens=20)
    assert_same_ids(output.sequences, wanted)
    stats = output.speculation
    assert stats.fallbacks == ["the text has outgrown the draft's context"]
    assert outcomes_of(stats.rounds) == EVERY_OUTCOME
    assert stats.rounds[-1].num_draft_tokens == 0
    assert max(distances) < 1e-4


@pytest.mark.parametrize("target", ["llama", "mamba"])
def test_a_prompt_beyond_the_context_of_the_draft(target: str) -> None:
    model, inputs = target_of(target), prompts([20])
    wanted = plain(model, inputs, max_new_tokens=6)
    with pytest.warns(SpeculationWarning, match="longer than the draft's context"):
        output = drafted(model, build_gpt2(16), inputs, max_new_tokens=6)
    assert_same_ids(output.sequences, wanted)
    assert {record.num_draft_tokens for record in output.speculation.rounds} == {0}


# ---- encoder-decoders ------------------------------------------------------------------------------------------


@cache
def example_of(name: str, batch: int) -> Example:
    """Return an enabled target and its inputs; tests leave both as they are."""
    example = build_conditional(name, batch=batch)
    hf_specdec.enable(example.model)
    return example


@cache
def drafts_of(name: str) -> dict[str, PreTrainedModel]:
    """Return the three kinds of draft with an encoder of their own."""
    model = build_conditional(name).model
    return {
        "identical": model,
        "unrelated": build_conditional(name, seed=7).model,
        "noisy": models.build_noisy(model, NOISE[name]),
    }


def decoder_draft(model: PreTrainedModel) -> PreTrainedModel:
    """Return a draft that reads only the text of the decoder."""
    return models.build_target(100, vocab_size=model.config.vocab_size, num_hidden_layers=1)


@pytest.mark.parametrize("batch", [1, 2])
def test_t5_with_t5_drafts(batch: int) -> None:
    example = example_of("t5", batch)
    stats = same_for_all_drafts(example.model, drafts_of("t5"), example.inputs, K, max_new_tokens=16)
    assert {(told.lane, told.draft_lane) for told in stats.values()} == {("compatible", "compatible")}
    assert outcomes_of(stats["identical"].rounds) == {"full"}


@pytest.mark.parametrize("batch", [1, 2])
def test_t5_with_a_draft_that_has_no_encoder(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    example = example_of("t5", batch)
    wanted = plain(example.model, example.inputs, max_new_tokens=20)
    distances = steer_by_script(monkeypatch, wanted, SCRIPT)
    output = drafted(example.model, decoder_draft(example.model), example.inputs, max_new_tokens=20)
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.fallbacks == []
    assert outcomes_of(output.speculation.rounds) == EVERY_OUTCOME
    assert max(distances) < 1e-4


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("draft", ["t5", "decoder"])
def test_sampled_t5_repeats_with_the_seed(draft: str, batch: int) -> None:
    example, outputs = example_of("t5", batch), []
    model = drafts_of("t5")["noisy"] if draft == "t5" else decoder_draft(example.model)
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(drafted(example.model, model, example.inputs, do_sample=True, max_new_tokens=8))
        assert outputs[-1].sequences.shape == (batch, 9)
        assert outputs[-1].speculation.fallbacks == []
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert not torch.equal(outputs[0].sequences, outputs[2].sequences)


@pytest.mark.parametrize("batch", [1, 2])
def test_whisper_with_whisper_drafts(batch: int) -> None:
    """Its `generate` is its own, and returns other tokens with an output object than without."""
    example, seen = example_of("whisper", batch), set()
    options = {"do_sample": False, "max_new_tokens": 16}
    wanted = example.model.generate(**example.inputs, **options, return_dict_in_generate=True).sequences
    for draft in drafts_of("whisper").values():
        output = drafted(example.model, draft, example.inputs, **options)
        assert_same_ids(output.sequences, wanted)
        assert output.speculation.fallbacks == []
        assert output.speculation.lane == "compatible"
        seen |= outcomes_of(output.speculation.rounds)
    assert seen == EVERY_OUTCOME


@pytest.mark.parametrize("kind", KINDS)
def test_whisper_without_an_output_object(kind: str) -> None:
    example = example_of("whisper", 1)
    options = {"do_sample": False, "max_new_tokens": 10}
    output = example.model.generate(
        **example.inputs, **options, draft_model=drafts_of("whisper")[kind], num_draft_tokens=K
    )
    assert_same_ids(output, example.model.generate(**example.inputs, **options))


@pytest.mark.parametrize("batch", [1, 2])
def test_whisper_with_a_draft_that_has_no_encoder(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    example = example_of("whisper", batch)
    options = {"do_sample": False, "max_new_tokens": 20}
    wanted = example.model.generate(**example.inputs, **options, return_dict_in_generate=True).sequences
    distances = steer_by_script(monkeypatch, wanted, SCRIPT)
    output = drafted(example.model, decoder_draft(example.model), example.inputs, **options)
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.fallbacks == []
    assert outcomes_of(output.speculation.rounds) == EVERY_OUTCOME
    assert max(distances) < 1e-4
