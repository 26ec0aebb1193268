"""Bytes that weights take, against what loading them really takes; what fits where."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import models
from hf_specdec import memory
from hf_specdec.demo import load_demo_pair
from hf_specdec.memory import (
    CACHE_NAMES,
    QUANTIZATIONS,
    cache_bytes,
    choose_quantization,
    free_bytes,
    held_bytes,
    in_words,
    skeleton_of,
    weight_bytes,
)

with warnings.catch_warnings():
    # Of torch.jit, while it is being imported.
    warnings.simplefilter("ignore")
    import bitsandbytes  # noqa: F401

GIGABYTE = 10**9


def tiny_llama() -> PreTrainedModel:
    return models.build_target(hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2)


def tiny_qwen() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def tiny_gpt() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=64, n_layer=2, n_head=4, n_positions=128))


FAMILIES = {"llama": tiny_llama, "qwen, tied": tiny_qwen, "gpt": tiny_gpt, "bundled": lambda: load_demo_pair().draft}


def settings_of(quantization: str) -> dict[str, Any]:
    if quantization == "none":
        return {}
    if quantization == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)}
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quantization, bnb_4bit_compute_dtype=torch.bfloat16
    )
    return {"quantization_config": config}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_bytes_are_those_of_the_loaded_weights(family: str, quantization: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **settings_of(quantization))
    predicted = weight_bytes(skeleton_of(model.config, torch.bfloat16), quantization)
    assert predicted == pytest.approx(held_bytes(loaded), rel=0.05)


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 40), (3, 7)])
@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_bytes_are_those_of_a_filled_cache(family: str, num_rows: int, num_tokens: int) -> None:
    model = FAMILIES[family]().to(torch.bfloat16)
    per_row, per_token = cache_bytes(skeleton_of(model.config, torch.bfloat16))
    ids = torch.ones(num_rows, num_tokens, dtype=torch.long)
    outputs = model(ids, use_cache=True)
    cache = next(outputs[name] for name in CACHE_NAMES if name in outputs)
    held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    measured = sum(tensor.nbytes for tensor in held)
    assert num_rows * (per_row + num_tokens * per_token) == pytest.approx(measured, rel=0.05)


def test_a_skeleton_takes_no_memory_and_leaves_the_configuration_alone() -> None:
    config = models.build_target().config
    before = config.to_dict()
    skeleton = skeleton_of(config, torch.float16)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in skeleton.parameters()} == {torch.float16}
    assert config.to_dict() == before


# ---- what fits -----------------------------------------------------------------------------------------------------

SIZES = {"none": 4 * GIGABYTE, "nf4": GIGABYTE, "fp4": GIGABYTE, "int8": 2 * GIGABYTE}


@pytest.mark.parametrize(
    ("free", "quantization", "reason"),
    [
        (8 * GIGABYTE, "none", "4.0 GB unquantized fit into the 8.0 GB free on cuda:0"),
        (4 * GIGABYTE, "nf4", "4.0 GB unquantized do not fit into the 4.0 GB free on cuda:0, 1.0 GB in nf4 do"),
        (None, "none", "how much memory is free on cuda:0 is not known"),
    ],
)
def test_weights_stay_as_they_are_where_they_fit(free: int | None, quantization: str, reason: str) -> None:
    choice = choose_quantization(SIZES, free, "cuda:0")
    assert choice is not None
    assert (choice.quantization, choice.reason) == (quantization, reason)


def test_nothing_is_chosen_where_nothing_fits() -> None:
    assert choose_quantization(SIZES, GIGABYTE, "cuda:0") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_free_main_memory_is_known() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert 10**6 < free < 10**15


def test_elsewhere_free_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes(torch.device("meta")) is None
    monkeypatch.setattr(memory, "Path", lambda _: Path("does-not-exist"))
    assert free_bytes(torch.device("cpu")) is None


def test_memory_that_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        mem_get_info=lambda _: (10, 100), memory_reserved=lambda _: 30, memory_allocated=lambda _: 25
    )
    monkeypatch.setattr(memory.torch, "cuda", cuda)
    assert free_bytes(torch.device("cuda")) == 15


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 bytes"), (999, "999 bytes"), (1234, "1.2 kB"), (5.6e6, "5.6 MB"), (141e9, "141.0 GB")]
)
def test_bytes_in_words(size: float, words: str) -> None:
    assert in_words(size) == words
