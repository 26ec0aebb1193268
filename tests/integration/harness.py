"""Prompts, and ways to watch, break and compare runs of `generate`, for the integration tests."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from integration.comparing import prompts
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import models
from hf_specdec.engine.probe import probe_ragged

PROMPT = torch.tensor([[1, 5, 9, 12, 33, 7]])
# transformers 5.24 calls the argument `cache`; 5.17 knows only the older name.
CACHE_NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def prompts_of(batch: int) -> dict[str, torch.Tensor]:
    """Return one prompt without padding, or three left-padded ones."""
    if batch == 1:
        return {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    assert batch == 3
    return prompts([3, 6, 5])


def greedy(model: Any, inputs: dict[str, torch.Tensor] | torch.Tensor, **options: Any) -> Any:
    """Generate without sampling, with a draft in rounds of 3 tokens if one is given and nothing else is asked for."""
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs}
    if "draft_model" in options:
        options.setdefault("num_draft_tokens", 3)
    return model.generate(**inputs, do_sample=False, **options)


def token_after(row: torch.Tensor, num_tokens: int, num_prompt_columns: int) -> int:
    """Return the first token at or after new token `num_tokens` that the row has not emitted before."""
    emitted = row[num_prompt_columns:].tolist()
    return next(
        token for position, token in enumerate(emitted) if position >= num_tokens and token not in emitted[:position]
    )


# ---- models ----------------------------------------------------------------------------------------------------


def build_mistral(seed: int = 0, **overrides: Any) -> MistralForCausalLM:
    """Return a random Mistral whose attention reaches back 8 tokens."""
    options: dict[str, Any] = {
        "vocab_size": models.VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.6,
        "max_position_embeddings": 512,
        "sliding_window": 8,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MistralForCausalLM(MistralConfig(**(options | overrides))).eval()


def build_gpt2(num_positions: int, seed: int = 0) -> GPT2LMHeadModel:
    """Return a random GPT-2, which cannot read beyond `num_positions` tokens."""
    config = GPT2Config(
        vocab_size=models.VOCAB_SIZE,
        n_positions=num_positions,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def mistral_drafts(target: MistralForCausalLM) -> dict[str, PreTrainedModel]:
    """Return the three kinds of draft for a Mistral."""
    return {
        "identical": copy.deepcopy(target),
        "unrelated": build_mistral(seed=100),
        "noisy": models.build_noisy(target),
    }


# ---- watching and breaking -------------------------------------------------------------------------------------


def admit(*subjects: PreTrainedModel) -> None:
    """Run the trial forwards now, so that none falls into what a test watches."""
    for subject in subjects:
        for is_batched in (False, True):
            assert probe_ragged(subject, is_batched=is_batched).is_admitted


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield a list that gets the number of tokens per row of every forward of `model`."""
    widths: list[int] = []

    def note(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        widths.append(0 if ids is None else ids.shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


@contextmanager
def failing(model: PreTrainedModel, at: int, error: BaseException) -> Iterator[None]:
    """Raise `error` in forward number `at` (from 1) and in every later one."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise error

    handle = model.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def spoiled(model: PreTrainedModel, at: int, value: float) -> Iterator[None]:
    """Fill the logits of forward number `at` (from 1) and of every later one with `value`."""
    calls = 0

    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= at:
            output.logits = torch.full_like(output.logits, value)
        return output

    handle = model.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


class RaisingProcessor(LogitsProcessor):
    """A caller's own processor that raises in call number `at` (from 1)."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at = at
        self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at -= 1
        if self.at == 0:
            raise self.error
        return scores


# ---- caches ----------------------------------------------------------------------------------------------------


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache of the kind `generate` makes by itself."""
    return DynamicCache(config=model.config)


def static_cache(model: PreTrainedModel, max_cache_len: int = 64) -> StaticCache:
    """Return an empty cache of fixed size."""
    return StaticCache(config=model.config, max_cache_len=max_cache_len)


def cached_length(cache: Any) -> int:
    """Return how many tokens a cache holds."""
    return int(cache.get_seq_length())


def cached_states(cache: Any) -> list[torch.Tensor]:
    """Return copies of the filled part of every layer's keys and values."""
    states = []
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        stored = min(int(layer.get_seq_length()), layer.keys.shape[2])
        states += [layer.keys[:, :, :stored].clone(), layer.values[:, :, :stored].clone()]
    return states


def assert_same_cache(cache: Any, expected: Any, *, atol: float = 1e-4) -> None:
    """Compare lengths, keys and values of two caches."""
    assert type(cache) is type(expected)
    assert cached_length(cache) == cached_length(expected)
    ours, theirs = cached_states(cache), cached_states(expected)
    assert [state.shape for state in ours] == [state.shape for state in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=atol, rtol=1e-3)


# ---- what must not change --------------------------------------------------------------------------------------


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return everything about a model that no call of `generate` may change, in comparable form."""
    return {
        "class": type(model),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "config": copy.deepcopy(model.config.to_dict()),
        "weights": {name: hash(weight.float().numpy().tobytes()) for name, weight in model.state_dict().items()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in model.named_modules()
        },
        "gradients": {name: weight.requires_grad for name, weight in model.named_parameters()},
    }
