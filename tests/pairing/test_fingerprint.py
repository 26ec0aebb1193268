"""Fingerprints of tokenizers: equal for equal behaviour, whatever the version or the settings of a call."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import models
from hf_specdec import InvalidPairingError
from hf_specdec.demo import DEMO_FOLDER
from hf_specdec.pairing.fingerprint import fingerprint

# Taken once, and the same on every supported version of transformers: pairings that are out there depend on it.
KNOWN = {
    "characters": "sha256:ab976a9dd278a7e2bd6cac8826171c376ab49760158ed611bef68d6efa7be03b",
    "bytes": "sha256:d8115413af2fb3af173fc3ada6d14ede620d01f18f51e3aeac38930beba207a6",
    "bundled": "sha256:0459e0c75e9dccf405c62790e89f3561f86d42b049bd4382dfb55a81ff9cb6cb",
}


def build(name: str) -> PreTrainedTokenizerFast:
    if name == "bundled":
        return AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    return models.build_tokenizer() if name == "characters" else models.build_byte_tokenizer()


@pytest.mark.parametrize("name", KNOWN)
def test_known_fingerprints(name: str) -> None:
    assert fingerprint(build(name)) == KNOWN[name]


def test_target_and_draft_of_the_bundled_pair_agree() -> None:
    assert fingerprint(AutoTokenizer.from_pretrained(DEMO_FOLDER / "draft")) == KNOWN["bundled"]


def test_what_says_nothing_about_ids_changes_nothing(tmp_path: Path) -> None:
    tokenizer = models.build_tokenizer()
    before = fingerprint(tokenizer)
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "left"
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = 7
    tokenizer(["ab", "abcdef"], padding=True, truncation=True, max_length=3)
    assert fingerprint(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == before


def test_what_changes_ids_changes_it() -> None:
    known = [fingerprint(models.build_tokenizer())]
    added = models.build_tokenizer()
    added.add_tokens(["abc"])
    special = models.build_tokenizer()
    special.add_tokens([AddedToken("abc", special=True)])
    role = models.build_tokenizer()
    role.eos_token = "a"
    known += [fingerprint(tokenizer) for tokenizer in (added, special, role)]
    assert len(set(known)) == 4


def test_taking_it_changes_nothing() -> None:
    tokenizer = models.build_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    fingerprint(tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize("thing", [None, "gpt2", {"a": 1}, object()])
def test_what_is_no_tokenizer_is_refused(thing: object) -> None:
    with pytest.raises(InvalidPairingError, match=f"but {type(thing).__name__} does not behave like one"):
        fingerprint(thing)
