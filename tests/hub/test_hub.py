"""The real client of the Hub against a small Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub.server import SmallHub, running
from huggingface_hub import constants
from pairing.building import DIGEST, build_own_pairing, build_pairing

import models
from hf_specdec import DraftPairing, PairingNotFoundError
from hf_specdec.pairing import hub as our_hub
from hf_specdec.pairing.folder import RECIPE, hash_files
from hf_specdec.pairing.schema import FILE_NAME, ModelReference

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OWN_FILES = sorted(["draft/config.json", "draft/generation_config.json", "draft/model.safetensors"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(folder: Path, **changes: Any) -> dict[str, bytes]:
    """Return a folder's files with other fields in the JSON."""
    files = contents(folder)
    files[FILE_NAME] = json.dumps(json.loads(files[FILE_NAME]) | changes).encode()
    return files


def reseeded(root: Path, seed: int) -> tuple[dict[str, bytes], str]:
    """Return a pairing with weights of its own, and their digest."""
    folder = root / f"seed-{seed}"
    build_own_pairing(folder, seed)
    files = contents(folder)
    return files, hashlib.sha256(files["draft/model.safetensors"]).hexdigest()


def publish(hub: SmallHub, root: Path) -> dict[str, Any]:
    """Fill the Hub, and return the settings of the client."""
    folder = root / "folder"
    build_own_pairing(folder)
    (folder / "README.md").write_text("---\ntags: [hf-specdec]\n---\n", encoding="utf-8")
    first = hub.add("org/pairing", contents(folder), branch="v1")
    commit = hub.add("org/pairing", changed(folder, description="newer"), tags=("hf-specdec", "base_model:org/large"))
    for name in ("another", "private", "gated", "busy", "broken"):
        hub.add(f"org/{name}", contents(folder))
    hub.repositories["org/private"].is_private = True
    for name, status in (("gated", 403), ("busy", 429), ("broken", 500)):
        hub.repositories[f"org/{name}"].failure = status

    plain = models.save_tiny_model(root / "plain", seed=3)
    (plain / "pytorch_model.bin").write_bytes(b"never fetched")
    hub.add("org/plain", contents(plain))
    below = {f"deep/er/{name}": data for name, data in contents(plain).items()}
    below_commit = hub.add("org/below", below)
    pointer = {"id": "org/below", "revision": below_commit, "subfolder": "deep/er"}
    hub.add("org/points", {FILE_NAME: changed(folder, draft=pointer, files={})[FILE_NAME]})

    hub.add("org/large-json", {FILE_NAME: b" " * (2**20 + 1)})
    hub.add("org/pickle", changed(folder, files={"draft/pytorch_model.bin": DIGEST}))
    incomplete = contents(folder)
    del incomplete["draft/config.json"]
    hub.add("org/incomplete", incomplete)
    for seed, (name, faults) in enumerate(
        {"swapped": hub.swaps, "short": hub.short, "cut": hub.cuts}.items(), start=10
    ):
        files, digest = reseeded(root, seed)
        hub.add(f"org/{name}", files)
        faults.add(digest)

    # The search finds three, of which two are of no use.
    hub.add("org/wrong", {FILE_NAME: b"{}"}, tags=("hf-specdec", "base_model:org/stranger"))
    hub.add("org/mistagged", contents(folder), tags=("hf-specdec", "base_model:org/stranger"))

    local = root / "local"
    build_pairing(draft=ModelReference(id=str(plain))).save_pretrained(local)
    return {"target": str(models.save_tiny_model(root / "target")), "folder": str(folder), "local": str(local)} | {
        "commit": commit,
        "first": first,
    }


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what every scenario of the client gave, the Hub's state, the settings and the client's home."""
    root = tmp_path_factory.mktemp("hub")
    record = root / "path" / "hf_specdec-0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: hf-specdec\nVersion: 0\n", encoding="utf-8")
    with running() as hub:
        settings = publish(hub, root)
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment = kept | {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(root / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(record.parent)]),
        }
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("client.py")), json.dumps(settings)],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout.splitlines()[-1]), hub, settings, root / "home"


def value(session: Any, name: str) -> Any:
    result = session[0][name]
    assert "value" in result, result
    return result["value"]


# ---- fetching ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "key"), [("branch", "commit"), ("tag", "first"), ("commit", "commit")])
def test_a_revision_is_resolved_to_its_commit(session: Any, name: str, key: str) -> None:
    found = value(session, name)
    assert (found["id"], found["revision"]) == ("org/pairing", session[2][key])


def test_only_what_the_pairing_names_is_fetched(session: Any) -> None:
    found = value(session, "private with a token")["files"]
    folder = Path(session[2]["folder"])
    assert found == sorted([FILE_NAME, *hash_files(folder, "draft")])
    assert set(OWN_FILES) < set(found)
    asked = [request for request in session[1].requests if "pytorch_model.bin" in request]
    assert [request for request in asked if request.startswith("GET")] == []


def test_what_was_fetched_is_found_again_without_the_hub(session: Any) -> None:
    assert value(session, "cached") == value(session, "commit")


def test_an_interrupted_download_goes_on_where_it_stopped(session: Any) -> None:
    files = value(session, "resumed")["files"]
    assert "draft/model.safetensors" in files
    [request] = [request for request in session[1].requests if " bytes=" in request]
    digest = request.split("/")[2].split()[0]
    num_sent = len(session[1].store[digest]) // 2
    assert request.endswith(f"bytes={num_sent // 1000 * 1000}-")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("uncached", "PairingNotFound", "'org/another' at 'main' .*was not fetched before.*Go online once"),
        (
            "missing",
            "PairingNotFound",
            "'org/missing' at 'main' .*does not exist, or is private. Check the id, or log in",
        ),
        ("private", "PairingNotFound", "does not exist, or is private"),
        ("gated", "PairingNotFound", "it is gated. Accept its terms"),
        ("busy", "PairingNotFound", "asked too often. Wait a few minutes"),
        ("broken", "PairingNotFound", "answered with status 500. Try again later"),
        ("no such revision", "PairingNotFound", "'org/pairing' at 'v9' .*no such branch, tag or commit"),
        ("plain model", "PairingNotFound", "'org/plain' at 'main' does not. Check the id; a plain model goes into"),
        ("wrong id", "PairingNotFound", "'not/an/id' is neither"),
        ("large json", "InvalidPairing", "at most 1048576 bytes, but that of 'org/large-json' has 1048577"),
        ("pickle listed", "InvalidPairing", "'draft/pytorch_model.bin' may hold pickled objects"),
        ("file missing", "InvalidPairing", "'draft/config.json' is not there in 'org/incomplete@"),
        ("wrong hash", "InvalidPairing", "'draft/model.safetensors' must have the digest .* damaged on the way"),
        ("truncated", "PairingNotFound", "Consistency check failed.*try again"),
        ("push to no id", "PairingNotFound", "'a/b/c' was given"),
        ("push without leave", "PairingNotFound", "Could not publish the repository 'org/no' .*Log in"),
        ("push a local pairing", "InvalidPairing", "but its draft is a path on this machine"),
        ("generate with nothing", "DraftLoad", "'org/missing' could not be loaded"),
        (
            "auto for a stranger",
            "PairingNotFound",
            r"\(2 found\); org/wrong \(draft_pairing.json: .*; org/mistagged \(it is",
        ),
    ],
)
def test_failures_say_what_was_tried_and_what_to_do(session: Any, name: str, kind: str, words: str) -> None:
    result = session[0][name]
    assert result.get("error") == f"{kind}Error", result
    assert re.search(words, result["message"], flags=re.DOTALL), result["message"]


# ---- using ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("generate", "org/pairing@{commit}"),
        ("generate with a tag", "org/pairing@{first}"),
        ("generate with a subfolder on the hub", "org/points@"),
        ("auto", "org/pairing@{commit}"),
        ("custom generate", "org/pairing@{commit}"),
    ],
)
def test_generating_with_a_pairing_on_the_hub(session: Any, name: str, told: str) -> None:
    found, settings = value(session, name), session[2]
    assert found["is_equal"]
    short = {key: settings[key][:12] for key in ("commit", "first")}
    assert found["pairing"].startswith(told.format(**short))


def test_a_plain_model_on_the_hub_is_no_pairing(session: Any) -> None:
    assert value(session, "generate with a plain model") == {"is_equal": True, "pairing": ""}


def test_the_search_asks_for_the_tag_and_the_base_model(session: Any) -> None:
    assert value(session, "search") == ["org/pairing"]


def test_without_the_hub_the_cache_serves(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(session[3] / "hub"))
    pairing = DraftPairing.from_pretrained("org/pairing")
    assert pairing.source is not None
    assert pairing.source.revision == session[2]["commit"]
    with pytest.raises(PairingNotFoundError, match=r"may not be asked.*Go online once, or give a local folder"):
        DraftPairing.from_pretrained("org/unknown")
    with pytest.raises(PairingNotFoundError, match=r"pairings for 'org/large'.*HF_HUB_OFFLINE"):
        our_hub.search_pairings("org/large")


def test_a_tampered_cache_is_noticed(session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(session[3] / "hub", tmp_path / "hub", symlinks=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    pairing = DraftPairing.from_pretrained("org/pairing")
    assert pairing.source is not None
    path = Path(pairing.source.folder) / "draft" / "config.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="was changed after the pairing was made"):
        DraftPairing.from_pretrained("org/pairing")
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="leads out of the folder"):
        DraftPairing.from_pretrained("org/pairing")


# ---- publishing ----------------------------------------------------------------------------------------------------


def test_a_pairing_is_published_as_one_commit(session: Any) -> None:
    found, hub = value(session, "push"), session[1]
    repository = hub.repositories["org/new"]
    assert found["is_equal"]
    assert repository.is_private
    assert repository.messages == ["Draft pairing: . for org/large@0123456789ab", "Second"]
    first = next(iter(repository.commits.values()))
    assert first == contents(Path(session[2]["folder"]))
    assert {*RECIPE, FILE_NAME, "README.md"} < set(first)
    assert found["url"] == f"{hub.address}/org/new/commit/{next(iter(repository.commits))}"


def test_publishing_again_adds_a_commit(session: Any) -> None:
    assert value(session, "push again")["is_equal"]
    assert "org/no" not in session[1].repositories


def test_a_folder_with_a_pickle_is_not_published(tmp_path: Path) -> None:
    build_pairing().save_pretrained(tmp_path)
    pairing = DraftPairing.from_pretrained(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickled objects"):
        pairing.push_to_hub("org/x")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(PairingNotFoundError, match=r"Could not publish .*may not be asked|could not be reached"):
        pairing.push_to_hub("org/x")
