"""Small real tokenizers, trained in a moment on a text of our own, and models to fit them."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import models

TEXT = [
    "The lighthouse keeper counted the boats that came home before the storm, and wrote their names in a book.",
    "Wer im Café sitzt, zählt die Boote nicht; он пишет письма, und die Möwen schreien über dem Hafen.",
    "def count(boats):\n    return sum(boat.is_home for boat in boats)\n",
    "In the morning the storm was over: 12 boats, 34 gulls, and a letter from the keeper's daughter.",
    "She wrote that the city was loud, that the trams rang all night, and that she missed the sound of the sea.",
    "The keeper read the letter twice, put it into the book, and lit the lamp again when the evening came.",
]


@cache
def byte_level(size: int = 400) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer like GPT-2's."""
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>", "<|filling|>", "<|turn|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|filling|>",
        additional_special_tokens=["<|turn|>"],
        padding_side="left",
    )


@cache
def metaspace(size: int = 420, *, has_bytes: bool = True) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer like Llama 2's, whose rare characters are bytes, or unknown."""
    tokenizer = Tokenizer(kinds.BPE(unk_token="<unk>", byte_fallback=has_bytes, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([parts[0], decoders.ByteFallback(), *parts[1:]] if has_bytes else parts)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if has_bytes else []
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=60, show_progress=False
    )
    # A text of words apart, or whole sentences would become tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(TEXT, trainer)
    if has_bytes:
        tokenizer = _with_bytes(tokenizer, bytes_)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


@cache
def unigram(size: int = 150) -> PreTrainedTokenizerFast:
    """Return a Unigram tokenizer like T5's, which knows no bytes."""
    tokenizer = Tokenizer(kinds.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def build_for(tokenizer: Any, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Return a random model of a tokenizer's vocabulary, padded to a multiple of 16."""
    size = -(-len(tokenizer) // 16) * 16
    return models.build_target(seed, vocab_size=size, pad_token_id=None, **options)


def _with_bytes(tokenizer: Tokenizer, names: list[str]) -> Tokenizer:
    """Return the tokenizer with a token for each byte, which training alone does not make."""
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for name in names:
        vocabulary.setdefault(name, len(vocabulary))
    return Tokenizer.from_str(json.dumps(state))


def permuted(tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM) -> tuple[Any, LlamaForCausalLM]:
    """Return the same tokenizer and model under other ids."""
    size = model.config.vocab_size
    order = torch.randperm(len(tokenizer), generator=torch.Generator().manual_seed(5)).tolist()
    new_ids = torch.tensor([*order, *range(len(tokenizer), size)])
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] = {token: order[token_id] for token, token_id in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = order[token["id"]]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        additional_special_tokens=[token for token in ("<|turn|>",) if token in state["model"]["vocab"]],
        padding_side="left",
    )
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for matrix in {
            id(w): w for w in (twin.get_input_embeddings().weight, twin.get_output_embeddings().weight)
        }.values():
            matrix[new_ids] = matrix.clone()
    return other, twin
