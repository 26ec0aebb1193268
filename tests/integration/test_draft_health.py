"""A broken draft is told of, in the log and in the stats, and changes nothing else."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers_of_text as trained
import torch
from integration.comparing import assert_same_ids, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel

import hf_specdec
import models
from hf_specdec import demo, loading, quality
from hf_specdec.memory import weight_bytes

BATCH = prompts([4, 6])
DRAFT_FOLDER = Path(demo.__file__).parent / "draft"


@pytest.fixture
def target() -> LlamaForCausalLM:
    return hf_specdec.enable(models.build_target())


def run(target: Any, draft: Any, **arguments: Any) -> Any:
    settings = {"max_new_tokens": 50, "do_sample": False, "num_draft_tokens": 2, "return_dict_in_generate": True}
    return target.generate(**{**BATCH, **settings, **arguments}, draft_model=draft)


def test_acceptance_near_chance_is_reported_once_for_a_pair(
    target: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    draft = models.build_target(seed=100)
    plain = target.generate(**BATCH, max_new_tokens=50, do_sample=False)
    with caplog.at_level(logging.WARNING, logger="hf_specdec"):
        outputs = [run(target, draft) for _ in range(5)]
    for output in outputs:
        assert_same_ids(output.sequences, plain)
    (suspicion,) = outputs[-1].speculation.draft_suspicions
    assert "as by chance" in suspicion
    assert [record.message for record in caplog.records] == [suspicion]
    assert f"suspicion: {suspicion}" in str(outputs[-1].speculation)


def test_good_and_middling_drafts_are_not_suspected(
    target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM], caplog: pytest.LogCaptureFixture
) -> None:
    rates = []
    for name in ("identical", "noisy"):
        stats = run(target, drafts[name]).speculation
        rates.append(stats.acceptance_rate)
        assert stats.draft_suspicions == []
    assert rates[0] == 1.0 > rates[1] > 0.1
    assert not caplog.records


def test_disable_forgets_it(target: LlamaForCausalLM) -> None:
    draft = models.build_target(seed=100)
    assert run(target, draft).speculation.draft_suspicions
    hf_specdec.enable(hf_specdec.disable(target))
    assert not run(target, draft, max_new_tokens=4).speculation.draft_suspicions


def test_text_that_is_sampled_says_nothing_of_the_draft(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = trained.byte_level()
    target = hf_specdec.enable(trained.build_for(tokenizer))
    draft_tokenizer, draft = trained.permuted(tokenizer, target)
    config = {"draft_tokenizer": draft_tokenizer, "token_space": "text"}
    inputs = tokenizer("The keeper wrote", return_tensors="pt")
    output = target.generate(
        inputs["input_ids"],
        max_new_tokens=100,
        do_sample=True,
        temperature=5.0,
        top_k=0,
        tokenizer=tokenizer,
        draft_model=draft,
        num_draft_tokens=4,
        speculative_config=config,
        return_dict_in_generate=True,
    )
    assert output.speculation.token_acceptance_rate < 0.05
    assert output.speculation.draft_suspicions == []
    assert not caplog.records


# ---- at load -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_target() -> PreTrainedModel:
    return hf_specdec.enable(AutoModelForCausalLM.from_pretrained(DRAFT_FOLDER, dtype=torch.bfloat16))


def run_quantized(target: PreTrainedModel, folder: Path, quantization: str) -> Any:
    inputs = AutoTokenizer.from_pretrained(DRAFT_FOLDER)("def main():", return_tensors="pt")
    config = {"draft_quantization": quantization}
    arguments = {"max_new_tokens": 4, "return_dict_in_generate": True, "speculative_config": config}
    output = target.generate(inputs["input_ids"], draft_model=str(folder), do_sample=False, **arguments)
    return output.speculation


def spoil(model: PreTrainedModel) -> PreTrainedModel:
    """Give every 4-bit block the scale of another one, as a broken kernel or file might."""
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            state.absmax = state.absmax.flip(0) * 3
    return model


@pytest.mark.parametrize("quantization", ["nf4", "fp4", "int8"])
def test_a_quantized_draft_that_works_is_not_suspected(
    demo_target: PreTrainedModel, caplog: pytest.LogCaptureFixture, quantization: str
) -> None:
    assert run_quantized(demo_target, DRAFT_FOLDER, quantization).draft_suspicions == []
    assert not [record for record in caplog.records if record.name.startswith("hf_specdec")]


def test_a_failed_quantization_is_found_when_the_draft_is_loaded(
    demo_target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(DRAFT_FOLDER, tmp_path / "draft"))
    place = loading._placed
    monkeypatch.setattr(loading, "_placed", lambda draft, device: spoil(place(draft, device)))
    stats = [run_quantized(demo_target, folder, "nf4") for _ in range(2)]
    found = [record.message for record in caplog.records if record.name.startswith("hf_specdec")]
    assert len(found) == 1
    assert "Quantizing the draft (nf4) has spoilt it" in found[0]
    assert all(own.draft_suspicions == found for own in stats)


def test_without_room_for_the_unquantized_draft_nothing_is_claimed(
    demo_target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(DRAFT_FOLDER, tmp_path / "draft"))
    place = loading._placed
    monkeypatch.setattr(loading, "_placed", lambda draft, device: spoil(place(draft, device)))
    monkeypatch.setattr(quality, "free_bytes", lambda _: weight_bytes(demo_target))
    assert run_quantized(demo_target, folder, "nf4").draft_suspicions == []


def test_a_draft_without_a_tokenizer_is_not_tried(target: LlamaForCausalLM, tmp_path: Path) -> None:
    models.build_noisy(target).save_pretrained(tmp_path)
    config = {"draft_quantization": "nf4"}
    output = run(target, str(tmp_path), speculative_config=config, max_new_tokens=4)
    assert output.speculation.draft_suspicions == []
