"""What a user does with the Hub, run in a process of its own, since the client reads its address when it is imported.

Prints one JSON object: for each scenario what it returned, or the error's class and message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import DraftPairing
from hf_specdec.pairing.hub import search_pairings

IDS = torch.tensor([[1, 5, 9, 12, 33, 7]])
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def describe(pairing: DraftPairing) -> dict[str, Any]:
    """Return where a pairing came from, and what lies there."""
    assert pairing.source is not None
    folder = Path(pairing.source.folder)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {"id": pairing.source.id, "revision": pairing.source.revision, "draft": pairing.draft.id, "files": files}


def load(name: str, **options: Any) -> Callable[[], dict[str, Any]]:
    """Return a scenario that reads a pairing."""
    return lambda: describe(DraftPairing.from_pretrained(name, **options))


def load_twice(name: str) -> dict[str, Any]:
    """Load what breaks off the first time; the client may go on by itself, or when asked again."""
    try:
        return describe(DraftPairing.from_pretrained(name))
    except hf_specdec.PairingNotFoundError:
        return describe(DraftPairing.from_pretrained(name))


def generate(target: Any, **options: Any) -> dict[str, Any]:
    """Decode with and without a draft."""
    wanted = target.generate(IDS, **GREEDY)
    output = target.generate(IDS, return_dict_in_generate=True, **GREEDY, **options)
    return {"is_equal": torch.equal(output.sequences, wanted), "pairing": output.speculation.draft_pairing}


def push(folder: str, repo_id: str, **options: Any) -> dict[str, Any]:
    """Publish a folder and read it back."""
    pairing = DraftPairing.from_pretrained(folder)
    url = pairing.push_to_hub(repo_id, token="good", **options)
    back = DraftPairing.from_pretrained(repo_id, token="good")
    return {"url": url, "is_equal": back == pairing, **describe(back)}


def main(settings: dict[str, Any]) -> None:
    """Run every scenario."""
    # The client keeps whole chunks of what breaks off; the tiny models here are smaller than one of its own.
    constants.DOWNLOAD_CHUNK_SIZE = 1000
    target: Any = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(settings["target"]))
    plain: Any = AutoModelForCausalLM.from_pretrained(settings["target"])
    target.config._name_or_path = plain.config._name_or_path = "org/large"
    stranger: Any = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(settings["target"]))
    stranger.config._name_or_path = "org/stranger"
    recipe = {"custom_generate": "org/pairing", "trust_remote_code": True}
    old = {"speculative_config": {"draft_revision": "v1"}}
    scenarios: dict[str, Callable[[], Any]] = {
        "branch": load("org/pairing"),
        "tag": load("org/pairing", revision="v1"),
        "commit": load("org/pairing", revision=settings["commit"]),
        "cached": load("org/pairing", revision=settings["commit"], local_files_only=True),
        "uncached": load("org/another", local_files_only=True),
        "missing": load("org/missing"),
        "private": load("org/private"),
        "private with a token": load("org/private", token="good"),
        "gated": load("org/gated"),
        "busy": load("org/busy"),
        "broken": load("org/broken"),
        "no such revision": load("org/pairing", revision="v9"),
        "plain model": load("org/plain"),
        "wrong id": load("not/an/id"),
        "large json": load("org/large-json"),
        "pickle listed": load("org/pickle"),
        "file missing": load("org/incomplete"),
        "wrong hash": load("org/swapped"),
        "truncated": load("org/short"),
        "resumed": lambda: load_twice("org/cut"),
        "search": lambda: search_pairings("org/large"),
        "generate": lambda: generate(target, draft_model="org/pairing"),
        "generate with a tag": lambda: generate(target, draft_model="org/pairing", **old),
        "generate with a plain model": lambda: generate(target, draft_model="org/plain"),
        "generate with a subfolder on the hub": lambda: generate(target, draft_model="org/points"),
        "generate with nothing": lambda: generate(target, draft_model="org/missing"),
        "auto": lambda: generate(target, draft_model="auto"),
        "auto for a stranger": lambda: generate(stranger, draft_model="auto"),
        "custom generate": lambda: generate(plain, **recipe),
        "push": lambda: push(settings["folder"], "org/new", private=True),
        "push again": lambda: push(settings["folder"], "org/new", commit_message="Second"),
        "push without leave": lambda: DraftPairing.from_pretrained(settings["folder"]).push_to_hub("org/no", token="x"),
        "push to no id": lambda: DraftPairing.from_pretrained(settings["folder"]).push_to_hub("a/b/c"),
        "push a local pairing": lambda: DraftPairing.from_pretrained(settings["local"]).push_to_hub("org/local"),
    }
    results = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = {"value": scenario()}
        except Exception as error:  # noqa: BLE001  # the test looks at it
            results[name] = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
