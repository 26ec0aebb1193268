"""The table of tokenizers: what is cut off a vocabulary, and what is shown."""

from __future__ import annotations

import argparse

import pytest
import torch

import hf_specdec
from hf_specdec.benchmark.token_spaces import SAME, measure, rendered, with_other_tokenizer
from hf_specdec.demo import load_demo_pair


def test_a_cut_vocabulary_writes_every_text_and_the_draft_goes_by_it() -> None:
    pair = load_demo_pair(num_parameters=0)
    text = "def café(name):\n    return 🙂"
    whole, _ = with_other_tokenizer(pair.tokenizer, pair.draft, 4096)
    cut, draft = with_other_tokenizer(pair.tokenizer, pair.draft, 512)
    for tokenizer in (whole, cut):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert whole.tokenize(text) == pair.tokenizer.tokenize(text)
    assert whole(text)["input_ids"] != pair.tokenizer(text)["input_ids"]
    assert len(cut) == 512 == draft.config.vocab_size
    assert len(cut(text)["input_ids"]) > len(whole(text)["input_ids"])
    own, other = pair.tokenizer.convert_tokens_to_ids("e"), cut.convert_tokens_to_ids("e")
    rows = [model.get_input_embeddings().weight[index] for model, index in ((pair.draft, own), (draft, other))]
    assert torch.equal(*rows)


@pytest.mark.slow
def test_shared_tokens_are_worth_as_much_as_the_same_ones_where_all_are_shared() -> None:
    pair = load_demo_pair(num_parameters=0)
    hf_specdec.enable(pair.target)
    options = argparse.Namespace(sizes=[4096], temperatures=[0.0], num_prompts=1, max_new_tokens=16, num_draft_tokens=3)
    same, shuffled = measure(pair, options)
    assert same["num_tokens"] == SAME
    assert shuffled["T=0, shared"] == same["T=0, same"] > 1.5
    assert shuffled["T=0, text"] > 1.5
    assert same["num_differing_outputs"] == shuffled["num_differing_outputs"] == 0
    table = rendered({"temperatures": [0.0], "rows": [same, shuffled]})
    assert f"| 4096 | 1.00 | {shuffled['T=0, shared']:.2f} / {shuffled['T=0, text']:.2f} |" in table
