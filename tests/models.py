"""Builders of the tiny models that every test uses: made in memory from fixed seeds, never downloaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Model = TypeVar("Model", bound=PreTrainedModel)
VOCAB_SIZE = 64
PADDING = "<pad>"
END_OF_TEXT = "</s>"
# 62 characters that printable text can be made of; everything else is dropped by the tokenizer.
CHARACTERS = " abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'\"()[]{}<>=+-*/_#@\n"


def build_target(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """Return a random Llama that never stops by itself.

    The wide initialisation makes its next-token law peaked enough for a draft to agree or disagree with it.
    """
    options: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(options | overrides))).eval()


def build_mamba(seed: int = 0, **overrides: object) -> MambaForCausalLM:
    """Return a random Mamba that never stops by itself."""
    options: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "initializer_range": 0.6,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MambaForCausalLM(MambaConfig(**(options | overrides))).eval()


def build_noisy(model: Model, relative_noise: float = 0.05, seed: int = 1) -> Model:
    """Return a copy whose weights got Gaussian noise of `relative_noise` times each weight's standard deviation."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            if not weight.is_floating_point() or weight.numel() == 1:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((relative_noise * weight.float().std() * noise).to(weight.dtype))
    return noisy


def build_drafts(target: LlamaForCausalLM) -> dict[str, LlamaForCausalLM]:
    """Return the three drafts of which every engine test needs: all accepted, almost none accepted, and mixed."""
    return {
        "identical": copy.deepcopy(target),
        "unrelated": build_target(seed=100),
        "noisy": build_noisy(target),
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 64 ids: padding, end of text, and one id for each of 62 characters."""
    vocabulary = {token: index for index, token in enumerate([PADDING, END_OF_TEXT, *CHARACTERS])}
    assert len(vocabulary) == VOCAB_SIZE, len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END_OF_TEXT, padding_side="left"
    )


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer of 258 ids, in which a non-ASCII character takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PADDING, END_OF_TEXT, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, eos_token=END_OF_TEXT, padding_side="left"
    )


def save_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write `build_target(seed)` and the 64-id tokenizer to `folder`, as a user's local model, and return it."""
    build_target(seed).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def build_refused() -> BertLMHeadModel:
    """Return a model that no lane can run: it attends both ways, so a token changes what comes before it."""
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertLMHeadModel(config).eval()
