"""Targets with an encoder: which drafts and caches they take, and what is said of the others."""

from __future__ import annotations

import copy

import pytest
import torch
from integration.comparing import assert_same_ids
from integration.harness import build_mistral
from transformers import PreTrainedModel
from zoo.conditional import Example, build_conditional

import hf_specdec
from hf_specdec import IncompatibleDraftError, SpeculationWarning

OPTIONS = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture(params=["t5", "bart"])
def example(request: pytest.FixtureRequest) -> Example:
    example = build_conditional(request.param)
    hf_specdec.enable(example.model)
    return example


def draft_of(example: Example) -> PreTrainedModel:
    draft = copy.deepcopy(example.model)
    hf_specdec.disable(draft)
    return draft


def test_a_static_cache_decodes_plainly_also_after_a_dynamic_one(example: Example) -> None:
    draft = draft_of(example)
    wanted = example.model.generate(**example.inputs, **OPTIONS)
    assert_same_ids(example.model.generate(**example.inputs, **OPTIONS, draft_model=draft), wanted)
    with pytest.warns(SpeculationWarning, match="StaticCache"):
        output = example.model.generate(**example.inputs, **OPTIONS, draft_model=draft, cache_implementation="static")
    assert_same_ids(output, wanted)


def test_a_draft_that_starts_its_texts_otherwise(example: Example) -> None:
    other = build_conditional("bart" if type(example.model).__name__.startswith("T5") else "t5").model
    output = example.model.generate(
        **example.inputs, **OPTIONS, draft_model=other, num_draft_tokens=3, return_dict_in_generate=True
    )
    assert_same_ids(output.sequences, example.model.generate(**example.inputs, **OPTIONS))
    assert output.speculation.fallbacks == []


def test_what_the_encoder_made_is_nothing_for_a_draft_with_an_encoder(example: Example) -> None:
    encoded = example.model.get_encoder()(**example.inputs)
    inputs = {"encoder_outputs": encoded, "attention_mask": example.inputs["attention_mask"]}
    wanted = example.model.generate(**inputs, **OPTIONS)
    with pytest.warns(SpeculationWarning, match="Give the encoder's input instead"):
        output = example.model.generate(**inputs, **OPTIONS, draft_model=draft_of(example))
    assert_same_ids(output, wanted)


def test_a_draft_that_reads_text_is_none_for_a_target_that_hears() -> None:
    target, draft = build_conditional("whisper"), build_conditional("t5").model
    hf_specdec.enable(target.model)
    with pytest.raises(IncompatibleDraftError, match=r"`input_features`.*`input_ids`"):
        target.model.generate(**target.inputs, **OPTIONS, draft_model=draft)


@pytest.mark.parametrize("batch", [1, 2])
def test_attentions_of_a_window_that_gives_none(batch: int) -> None:
    target = build_mistral()
    draft = copy.deepcopy(target)
    hf_specdec.enable(target)
    prompt = torch.tensor([[5, 6, 7, 8]] * batch)
    options = {**OPTIONS, "output_attentions": True, "return_dict_in_generate": True}
    wanted = target.generate(prompt, **options)
    output = target.generate(prompt, **options, draft_model=draft)
    assert_same_ids(output.sequences, wanted.sequences)
    assert [len(layers) for layers in output.attentions] == [len(layers) for layers in wanted.attentions]
