"""Drafts given by name and stored in 4 or 8 bits (bitsandbytes, on the CPU): same text, loaded once, refused early."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.comparing import assert_same_ids, outcomes_of, prompts
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

import hf_specdec
import models
from hf_specdec import DraftLoadError, InvalidConfigError, SpeculationStats, loading

with warnings.catch_warnings():
    # Of torch.jit, while it is being imported.
    warnings.simplefilter("ignore")
    import bitsandbytes as bnb

BATCH = prompts([4, 6])
LAYERS = {"nf4": bnb.nn.Linear4bit, "fp4": bnb.nn.Linear4bit, "int8": bnb.nn.Linear8bitLt}


@pytest.fixture
def target() -> LlamaForCausalLM:
    return hf_specdec.enable(models.build_target())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("drafts")
    for name, draft in models.build_drafts(models.build_target()).items():
        draft.save_pretrained(root / name)
    return {name: str(root / name) for name in ("identical", "unrelated", "noisy")}


def run(target: LlamaForCausalLM, draft: Any, quantization: str = "auto", **arguments: Any) -> Any:
    settings = {"max_new_tokens": 12, "do_sample": False, "num_draft_tokens": 3, "return_dict_in_generate": True}
    config = {"draft_quantization": quantization}
    return target.generate(**BATCH, **{**settings, **arguments}, draft_model=draft, speculative_config=config)


def only_draft(target: LlamaForCausalLM) -> Any:
    (draft,) = loading._loaded[target].values()
    return draft


@pytest.mark.parametrize("quantization", LAYERS)
def test_the_text_is_that_of_plain_decoding(
    target: LlamaForCausalLM, folders: dict[str, str], quantization: str
) -> None:
    wanted = target.generate(**BATCH, max_new_tokens=12, do_sample=False)
    seen: set[str] = set()
    for folder in folders.values():
        output = run(target, folder, quantization)
        assert_same_ids(output.sequences, wanted)
        stats: SpeculationStats = output.speculation
        assert (stats.draft_quantization, stats.draft_quantization_reason) == (quantization, "asked for")
        assert stats.fallbacks == []
        seen |= outcomes_of(stats.rounds)
    assert {"none", "partial"} <= seen
    drafts = list(loading._loaded[target].values())
    assert all(any(type(module) is LAYERS[quantization] for module in draft.modules()) for draft in drafts)


@pytest.mark.parametrize("quantization", LAYERS)
def test_sampling_is_repeated_by_its_seed(target: LlamaForCausalLM, folders: dict[str, str], quantization: str) -> None:
    texts = []
    for _ in range(2):
        torch.manual_seed(0)
        texts.append(run(target, folders["noisy"], quantization, do_sample=True).sequences)
    assert torch.equal(*texts)


def test_a_draft_is_loaded_once_per_setting_and_freed_by_disable(
    target: LlamaForCausalLM, folders: dict[str, str]
) -> None:
    for quantization in ("nf4", "none", "nf4", "none"):
        run(target, folders["noisy"], quantization)
    drafts = [weakref.ref(draft) for draft in loading._loaded[target].values()]
    assert len(drafts) == 2
    hf_specdec.disable(target)
    gc.collect()
    assert [draft() for draft in drafts] == [None, None]


@pytest.mark.parametrize(("share_of_whole", "quantization"), [(2.0, "none"), (1.0, "nf4")])
def test_auto_goes_by_free_memory_and_says_so(
    target: LlamaForCausalLM,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    share_of_whole: float,
    quantization: str,
) -> None:
    whole = sum(parameter.nbytes for parameter in models.build_target().parameters())
    monkeypatch.setattr(loading, "free_bytes", lambda _: int(share_of_whole * whole))
    stats = run(target, folders["noisy"]).speculation
    assert stats.draft_quantization == quantization
    assert "free on cpu" in stats.draft_quantization_reason


@pytest.mark.parametrize(
    ("share_of_whole", "asked", "remedy"),
    [(0.9, "none", "Ask for `draft_quantization='nf4'`"), (0.1, "auto", "smaller draft"), (0.1, "int8", "smaller")],
)
def test_a_draft_that_does_not_fit_is_refused_before_its_weights_are_read(
    target: LlamaForCausalLM,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    share_of_whole: float,
    asked: str,
    remedy: str,
) -> None:
    whole = sum(parameter.nbytes for parameter in models.build_target().parameters())
    monkeypatch.setattr(loading, "free_bytes", lambda _: int(share_of_whole * whole))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(DraftLoadError, match="are free on cpu") as raised:
        run(target, folders["noisy"], asked)
    assert remedy in str(raised.value)
    assert f"`draft_quantization` is {asked!r}" in str(raised.value)


# ---- drafts that are what they are ---------------------------------------------------------------------------------


@pytest.fixture
def quantized_folder(folders: dict[str, str], tmp_path: Path) -> str:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(
        folders["noisy"], quantization_config=config, dtype=torch.float32
    ).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("asked", ["auto", "nf4"])
def test_a_quantized_checkpoint_is_loaded_as_it_is(target: LlamaForCausalLM, quantized_folder: str, asked: str) -> None:
    stats = run(target, quantized_folder, asked).speculation
    assert stats.draft_quantization == "nf4"
    assert stats.draft_quantization_reason == "the checkpoint is quantized like that"


@pytest.mark.parametrize("asked", ["none", "fp4", "int8"])
def test_a_quantized_checkpoint_is_not_quantized_otherwise(
    target: LlamaForCausalLM, quantized_folder: str, asked: str
) -> None:
    with pytest.raises(InvalidConfigError, match=f"is '{asked}', and the checkpoint .* was saved as 'nf4'"):
        run(target, quantized_folder, asked)


def test_a_loaded_draft_stays_as_it_is(target: LlamaForCausalLM) -> None:
    draft = models.build_noisy(models.build_target())
    stats = run(target, draft, "none").speculation
    assert (stats.draft_quantization, stats.draft_quantization_reason) == ("none", "the caller loaded it")
    with pytest.raises(InvalidConfigError, match="is 'nf4', and this LlamaForCausalLM was loaded unquantized"):
        run(target, draft, "nf4")


def test_an_adapter_is_a_draft_by_name(target: LlamaForCausalLM, folders: dict[str, str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folders["noisy"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(tmp_path)
        wanted = target.generate(**BATCH, max_new_tokens=12, do_sample=False)
        output = run(target, str(tmp_path))
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.draft_quantization_reason == "it is an adapter"
    with pytest.raises(DraftLoadError, match="an adapter cannot be quantized here"):
        run(target, str(tmp_path), "nf4")


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_loaded_draft_that_names_no_quantization_has_none(target: LlamaForCausalLM, nothing: object) -> None:
    draft = models.build_noisy(models.build_target())
    draft.config.quantization_config = nothing
    wanted = target.generate(**BATCH, max_new_tokens=12, do_sample=False)
    assert_same_ids(run(target, draft, "none").sequences, wanted)


def test_drafts_are_freed_by_the_process_wide_disable(folders: dict[str, str]) -> None:
    target = models.build_target()
    hf_specdec.enable()
    try:
        run(target, folders["noisy"], "nf4")
        draft = weakref.ref(only_draft(target))
    finally:
        hf_specdec.disable()
    gc.collect()
    assert draft() is None


def test_the_summary_names_the_quantization(target: LlamaForCausalLM, folders: dict[str, str]) -> None:
    assert "draft in nf4" in str(run(target, folders["noisy"], "nf4").speculation)
    assert "draft in" not in str(run(target, folders["noisy"], "none").speculation)


def test_a_checkpoint_in_4_bits_that_does_not_fit_is_refused_too(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.build_noisy(models.build_target()).save_pretrained(tmp_path / "whole")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=settings)
    stored.save_pretrained(tmp_path / "stored")
    monkeypatch.setattr(loading, "free_bytes", lambda _: 1000)
    with pytest.raises(DraftLoadError, match=r"as 'nf4', and 1.0 kB are free on cpu .* Choose a smaller draft"):
        run(target, str(tmp_path / "stored"))
    assert not loading._loaded.get(target)


def test_weights_of_64_bits_are_not_quantized(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = hf_specdec.enable(models.build_target().double())
    with pytest.raises(InvalidConfigError, match=r"needs weights of 16 or 32 bits, but is 'fp4' .* torch.float64"):
        run(target, folders["noisy"], "fp4")
    assert run(target, folders["noisy"]).speculation.draft_quantization == "none"
    monkeypatch.setattr(loading, "free_bytes", lambda _: 10)
    hf_specdec.enable(hf_specdec.disable(target))
    with pytest.raises(DraftLoadError, match="Choose a smaller draft"):
        run(target, folders["noisy"])
