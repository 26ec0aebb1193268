"""Pairings, and folders of them, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import models
from hf_specdec.pairing.fingerprint import fingerprint
from hf_specdec.pairing.folder import hash_files
from hf_specdec.pairing.schema import DraftPairing, Measurement, ModelReference

COMMITS = ("0123456789abcdef" * 3)[:40], "f" * 40
DIGEST = "sha256:" + "ab" * 32
BATCH = {
    "input_ids": torch.tensor([[0, 0, 1, 5, 9, 12], [1, 7, 7, 20, 33, 41]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
}
KINDS = ("identical", "unrelated", "noisy")


def build_measurement(**overrides: Any) -> Measurement:
    """Return a measurement that breaks no rule."""
    values: dict[str, Any] = {
        "workload": "chat",
        "temperature": 0.0,
        "batch_size": 1,
        "num_new_tokens": 128,
        "num_prompts": 8,
        "acceptance_rate": 0.71,
        "mean_acceptance_length": 3.4,
        "speed_up": 1.9,
        "speed_up_low": 1.7,
        "speed_up_high": 2.2,
        "num_draft_tokens": "auto",
        "draft_quantization": "nf4",
        "dtype": "bfloat16",
        "hardware": "1 × a test machine",
        "versions": {"torch": "2.13.0"},
        "date": "2026-02-28",
    }
    return Measurement(**(values | overrides))


def build_pairing(**overrides: Any) -> DraftPairing:
    """Return a pairing of two models on the Hub, with everything in it that a pairing can say."""
    values: dict[str, Any] = {
        "target": ModelReference(id="org/large", revision=COMMITS[0]),
        "draft": ModelReference(id="org/small", revision=COMMITS[1], subfolder="weights/latest"),
        "tokenizer_fingerprint": DIGEST,
        "draft_quantization": "nf4",
        "controller_hints": {"survival": [0.8, 0.6], "cost_ratio": 0.1},
        "measurements": (build_measurement(), build_measurement(temperature=1, num_draft_tokens=4)),
        "description": "Two models.\nThey get on well.",
    }
    return DraftPairing(**(values | overrides))


def build_own_pairing(folder: Path, seed: int = 0, **overrides: Any) -> DraftPairing:
    """Save the tiny draft of that seed into a pairing's folder, write the pairing around it, and return it."""
    models.save_tiny_model(folder / "draft", seed)
    values: dict[str, Any] = {
        "draft": ModelReference(id=".", subfolder="draft"),
        "files": hash_files(folder, "draft"),
        "draft_quantization": "none",
        "tokenizer_fingerprint": fingerprint(models.build_tokenizer()),
    }
    build_pairing(**(values | overrides)).save_pretrained(folder)
    return DraftPairing.from_pretrained(folder)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's `draft_pairing.json` as an attacker would, without any check."""
    path = folder / "draft_pairing.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | changes), encoding="utf-8")


def rehash(folder: Path) -> None:
    """List the draft's files as they are now, as an attacker who can write the JSON would."""
    rewrite(folder, files=hash_files(folder, "draft"))


def build_kinds(root: Path) -> dict[str, Path]:
    """Return pairings with three kinds of own draft, in folders of `root`."""
    for kind, draft in models.build_drafts(models.build_target()).items():
        build_own_pairing(root / kind)
        draft.save_pretrained(root / kind / "draft")
        rehash(root / kind)
    return {kind: root / kind for kind in KINDS}
