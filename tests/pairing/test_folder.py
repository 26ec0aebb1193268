"""Pairings as folders: written, read back, and every attack refused in its own words before anything is loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairing.building import COMMITS, DIGEST, build_own_pairing, build_pairing, rehash, rewrite
from safetensors.torch import save_file

import hf_specdec
import models
from hf_specdec import DraftPairing, InvalidPairingError, PairingNotFoundError
from hf_specdec.pairing import files
from hf_specdec.pairing.files import check_safetensors
from hf_specdec.pairing.folder import RECIPE, check_model, is_pairing_folder, read_folder, verify
from hf_specdec.pairing.schema import ModelReference

PROMPT = torch.tensor([[1, 5, 9, 12, 33, 7]])


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pairing's folder with a draft in it, which tests copy."""
    folder = tmp_path_factory.mktemp("pairings") / "intact"
    build_own_pairing(folder)
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "pairing"
    shutil.copytree(intact, copy)
    return copy


# ---- there and back ------------------------------------------------------------------------------------------------


def test_a_folder_is_read_back(folder: Path) -> None:
    pairing = DraftPairing.from_pretrained(folder)
    assert pairing.source is not None
    assert (pairing.source.folder, pairing.source.id) == (str(folder), None)
    assert is_pairing_folder(folder)
    assert not is_pairing_folder(folder / "draft")
    assert {name for name in RECIPE if (folder / name).is_file()} == set(RECIPE)
    compile((folder / RECIPE[0]).read_text(encoding="utf-8"), "generate.py", "exec")


def test_an_own_draft_goes_along_when_saved_elsewhere(folder: Path, tmp_path: Path) -> None:
    pairing = DraftPairing.from_pretrained(folder)
    (folder / "README.md").write_text("a card", encoding="utf-8")
    pairing.save_pretrained(tmp_path / "copy")
    assert DraftPairing.from_pretrained(tmp_path / "copy") == pairing
    # Saving in place changes nothing and keeps the card.
    pairing.save_pretrained(folder)
    assert (folder / "README.md").read_text(encoding="utf-8") == "a card"
    assert DraftPairing.from_pretrained(folder) == pairing


def test_a_damaged_own_draft_is_not_copied(folder: Path, tmp_path: Path) -> None:
    pairing = DraftPairing.from_pretrained(folder)
    (folder / "draft" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidPairingError, match="was changed"):
        pairing.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / "draft_pairing.json").exists()


def test_nothing_is_written_beside_what_could_do_harm(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InvalidPairingError, match="pickled objects"):
        build_pairing().save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["pytorch_model.bin"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_pairing().save_pretrained(tmp_path)
    before = (tmp_path / "draft_pairing.json").read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        build_pairing(description="another").save_pretrained(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "draft_pairing.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["custom_generate", "draft_pairing.json"]


def test_an_own_draft_needs_its_folder() -> None:
    pairing = build_pairing(draft=ModelReference(id=".", subfolder="draft"), files={"draft/config.json": DIGEST})
    with pytest.raises(InvalidPairingError, match="needs that folder, but this pairing was made in memory"):
        verify(pairing)


@pytest.mark.parametrize("name", ["nothing", "empty", "/no/such/folder", "./nowhere"])
def test_no_pairing_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    where = str(tmp_path / name) if name in ("nothing", "empty") else name
    with pytest.raises(PairingNotFoundError, match=r"Check the path") as caught:
        DraftPairing.from_pretrained(where)
    assert where in str(caught.value)


def test_folders_of_version_control_are_left_alone(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "pack.bin").write_bytes(pickle.dumps([1]))
    DraftPairing.from_pretrained(folder)


def test_links_inside_a_folder_and_into_the_store_of_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "models--org--pairing"
    snapshot, blobs = root / "snapshots" / COMMITS[0], root / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    for index, path in enumerate(sorted(path for path in snapshot.rglob("*") if path.is_file())):
        blob = blobs / str(index)
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    assert DraftPairing.from_pretrained(snapshot) == DraftPairing.from_pretrained(folder)


# ---- attacks -------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return an attack that changes the header of the weights and hides it from the digests."""

    def attack(folder: Path) -> None:
        path = folder / "draft" / "model.safetensors"
        header, body = header_of(path)
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        rehash(folder)

    return attack


def raw_weights(data: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / "draft" / "model.safetensors"
        path.write_bytes(data(path.read_bytes()))
        rehash(folder)

    return attack


def extra(name: str, data: bytes | Callable[[Path], bytes], *, listed: bool = True) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data(folder) if callable(data) else data)
        if listed:
            rehash(folder)

    return attack


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / "draft" / name
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(values | changes), encoding="utf-8")
        rehash(folder)

    return attack


def link(name: str, target: str) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return attack


def bomb(folder: Path) -> bytes:
    return pickle.dumps(Bomb(folder.parent / "exploded"))


def torch_archive(folder: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Bomb(folder.parent / "exploded"), buffer)
    return buffer.getvalue()


def zipped(_: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", "x")
    return buffer.getvalue()


def tarred(_: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO())
    return buffer.getvalue()


def numpy_objects(folder: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb(folder.parent / "exploded")], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def set_tensor(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        name = next(key for key in header if key != "__metadata__")
        header[name] = {key: value for key, value in (header[name] | changes).items() if value is not None}

    return change


def shift(by: int) -> Callable[[dict[str, Any]], None]:
    """Move the tensor that lies second."""

    def change(header: dict[str, Any]) -> None:
        second = sorted(own["data_offsets"][0] for key, own in header.items() if key != "__metadata__")[1]
        for key, own in header.items():
            if key != "__metadata__" and own["data_offsets"][0] == second:
                own["data_offsets"] = [offset + by for offset in own["data_offsets"]]

    return change


def drop_last(header: dict[str, Any]) -> None:
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"][0])
    del header[last]


def sharded(**shards: Any) -> Callable[[Path], None]:
    return edited("model.safetensors.index.json", weight_map=shards)


def many_files(folder: Path) -> None:
    for index in range(300):
        (folder / f"{index}.txt").write_text("x", encoding="utf-8")


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return attack


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "notes.txt")


def changed_weight(folder: Path) -> None:
    path = folder / "draft" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_model(folder: Path) -> None:
    models.build_target(seed=5).save_pretrained(folder / "draft")


def linked_folder(folder: Path) -> None:
    shutil.move(folder / "draft", folder.parent / "elsewhere")
    (folder / "draft").symlink_to(folder.parent / "elsewhere")


def removed(name: str, *, listed: bool = True) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        (folder / name).unlink()
        if not listed:
            rehash(folder)

    return attack


def adapter(folder: Path) -> None:
    (folder / "draft" / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}', encoding="utf-8")
    rehash(folder)


def duplicate_tensor(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    first = json.loads(data[8 : 8 + length])
    name = next(key for key in first if key != "__metadata__")
    twice = f"{{{json.dumps(name)}: {json.dumps(first[name])}, {data[9 : 8 + length].decode()}".encode()
    return struct.pack("<Q", len(twice)) + twice + data[8 + length :]


ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    # Pickles and archives, by name.
    "bin": (extra("draft/pytorch_model.bin", bomb), r"may hold pickled objects.*\(.bin\)"),
    "pt": (extra("draft/model.pt", torch_archive), r"\(.pt\)"),
    "pth": (extra("weights.PTH", bomb), r"\(.pth\)"),
    "ckpt": (extra("draft/model.ckpt", bomb), r"\(.ckpt\)"),
    "pkl": (extra("draft/vocab.pkl", bomb), r"\(.pkl\)"),
    "npy": (extra("draft/table.npy", numpy_objects), r"\(.npy\)"),
    "double suffix": (extra("draft/model.bin.txt", b"x"), r"\(.bin\)"),
    "archive": (extra("draft/model.tar", tarred), r"is an archive \(.tar\)"),
    "listed pickle": (
        lambda folder: rewrite(folder, files={"draft/pytorch_model.bin": DIGEST}),
        r"may hold pickled objects.*\(.bin\)",
    ),
    # Under another name.
    "pickle as json": (extra("draft/extra.json", bomb), "'draft/extra.json' is a pickle under another name"),
    "old pickle as text": (
        extra("draft/vocab.txt", lambda folder: pickle.dumps(Bomb(folder / "exploded"), protocol=0)),
        "'draft/vocab.txt' is a pickle under another name",
    ),
    "torch file as text": (extra("draft/merges.txt", torch_archive), "is a zip archive, as PyTorch writes pickles"),
    "zip as card": (extra("README.md", zipped), "'README.md' is a zip archive"),
    "tar as model": (extra("draft/spiece.model", tarred), "is a tar archive under another name"),
    "numpy as text": (extra("draft/table.txt", numpy_objects), "is a NumPy file"),
    "gzip": (extra("draft/vocab.json", b"\x1f\x8b\x08" + bytes(20)), "is a gzip archive"),
    "program": (extra("helper", b"\x7fELF" + bytes(60)), "'helper' is a program"),
    "pickle as safetensors": (raw_weights(lambda _: pickle.dumps(list(range(300)))), "it is a pickle"),
    "torch file as safetensors": (
        extra("draft/model.safetensors", torch_archive),
        "it is a zip archive, as PyTorch writes pickles",
    ),
    # Weights that are not what their header says.
    "empty": (raw_weights(lambda _: b""), "it has only 0 bytes"),
    "truncated header": (raw_weights(lambda data: data[:100]), "its header would have .* bytes, and the file has 100"),
    "truncated": (raw_weights(lambda data: data[:-50]), "it is truncated"),
    "trailing bytes": (raw_weights(lambda data: data + b"#!/bin/sh"), "goes on after its last tensor"),
    "huge header": (
        raw_weights(lambda data: struct.pack("<Q", 2**62) + data[8:]),
        "its header would have 4611686018427387904 bytes",
    ),
    "no JSON": (raw_weights(lambda _: struct.pack("<Q", 4) + b"{]{]"), "its header is no JSON"),
    "deep JSON": (
        raw_weights(lambda _: struct.pack("<Q", 100_000) + b"[" * 100_000),
        "its header is no JSON .*RecursionError",
    ),
    "no object": (raw_weights(lambda _: struct.pack("<Q", 2) + b"[]"), "its header names no tensors"),
    "a name twice": (raw_weights(duplicate_tensor), "a name stands twice"),
    "dtype": (weights(set_tensor(dtype="OBJECT")), "has the unknown dtype 'OBJECT'"),
    "shape": (weights(set_tensor(shape=[1, 2, 3])), "which do not fit its dtype and shape"),
    "negative shape": (weights(set_tensor(shape=[-1, -64])), "offsets that are no sizes"),
    "offsets": (weights(set_tensor(data_offsets=[8, 4])), "which do not fit its dtype and shape"),
    "huge offsets": (weights(set_tensor(data_offsets=[0, 2**64])), "offsets that are no sizes"),
    "fields": (weights(set_tensor(code="x")), "has other fields than dtype"),
    "overlap": (weights(shift(-4)), "overlaps the tensor before it"),
    "gap": (weights(shift(4)), "leaves a gap before it"),
    "missing tensor": (weights(drop_last), "goes on after its last tensor"),
    "metadata": (weights(lambda header: header.update(__metadata__={"x": {}})), "metadata maps no strings"),
    # Out of the folder.
    "link out": (link("draft/config.json", "/etc/hostname"), "'draft/config.json' is a link that leads out"),
    "relative link out": (link("draft/config.json", "../../../x"), "is a link that leads out"),
    "link of the pairing": (link("draft_pairing.json", "/etc/hostname"), "'draft_pairing.json' is a link that leads"),
    "link to a device": (link("draft/config.json", "/dev/zero"), "is a link that leads out"),
    "linked folder": (linked_folder, "'draft' is a link to a folder"),
    "dangling link": (link("draft/config.json", "nowhere.json"), "'draft/config.json' cannot be read"),
    "pipe": (pipe, "'notes.txt' is no ordinary file"),
    "index out": (sharded(a="../../secret.safetensors"), "but names '../../secret.safetensors'"),
    "index absolute": (sharded(a="/etc/passwd.safetensors"), "but names '/etc/passwd.safetensors'"),
    "index to pickle": (sharded(a="pytorch_model.bin"), "but names 'pytorch_model.bin'"),
    "index to nothing": (sharded(a="model-2.safetensors"), "must name files that are there"),
    "index without map": (extra("draft/model.safetensors.index.json", b"[]"), "must have a `weight_map`"),
    "file list out": (lambda folder: rewrite(folder, files={"draft/../../x": DIGEST}), "but has 'draft/../../x'"),
    "draft out": (lambda folder: rewrite(folder, draft={"id": ".", "subfolder": "../x"}), "path inside the repository"),
    "draft absolute": (lambda folder: rewrite(folder, draft={"id": ".", "subfolder": "/etc"}), "path inside the"),
    # Code.
    "code in config": (edited("config.json", auto_map={"AutoConfig": "x.Y"}), "'config.json' asks for code"),
    "code in tokenizer": (
        edited("tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Y", None]}),
        "'tokenizer_config.json' asks for code with `auto_map`",
    ),
    "code": (extra("draft/modeling_x.py", b"raise SystemExit"), "'modeling_x.py' is code"),
    "adapter": (adapter, "belongs to an adapter, whose base lies elsewhere"),
    "unknown kind": (extra("draft/library.so", b"x"), "holds only .safetensors.*'library.so' is none"),
    "no config": (removed("draft/config.json", listed=False), "must hold config.json"),
    "no weights": (removed("draft/model.safetensors", listed=False), "must hold its weights as safetensors"),
    "broken config": (extra("draft/config.json", b"{"), "'config.json' is no readable JSON"),
    # Tampering.
    "changed weight": (changed_weight, "'draft/model.safetensors' must have the digest"),
    "other model": (other_model, "must have the digest"),
    "wrong hash": (
        lambda folder: rewrite(folder, files=dict.fromkeys(listed_files(folder), DIGEST)),
        "must have the digest sha256:abab",
    ),
    "missing file": (removed("draft/tokenizer.json"), "lists 'draft/tokenizer.json', but the folder does not hold it"),
    "unlisted file": (extra("draft/chat_template.jinja", b"x", listed=False), "'draft/chat_template.jinja' is not"),
    "unlisted elsewhere": (lambda folder: rewrite(folder, files={"other/x": DIGEST}), "but has 'other/x'"),
    # Size and shape of the folder.
    "too many files": (many_files, "at most 256 files"),
    "large text": (sparse("notes.txt", 2**28), "has 268435456 bytes"),
    "large pairing": (sparse("draft_pairing.json", 2**21), "at most 1048576 bytes"),
    "large weights": (sparse("draft/model.safetensors", 2**39), "has 549755813888 bytes"),
    "line break in a name": (extra("a\nb.txt", b"x"), "must be printable"),
    "no text": (extra("draft_pairing.json", b"\xff\xfe{}", listed=False), "must be UTF-8"),
    "truncated pairing": (extra("draft_pairing.json", b'{"target": {"id"', listed=False), "cannot be read"),
}


def listed_files(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / "draft_pairing.json").read_text(encoding="utf-8"))["files"]
    return found


@pytest.fixture(scope="module")
def enabled() -> Any:
    return hf_specdec.enable(models.build_target())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_its_own_words(folder: Path, name: str, enabled: Any) -> None:
    attack, words = ATTACKS[name]
    attack(folder)
    with pytest.raises(InvalidPairingError, match=words) as caught:
        enabled.generate(PROMPT, max_new_tokens=4, draft_model=str(folder))
    assert len(str(caught.value)) < 1500
    assert not (folder.parent / "exploded").exists()


def test_the_intact_folder_is_not_refused(folder: Path, enabled: Any) -> None:
    wanted = enabled.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(enabled.generate(PROMPT, max_new_tokens=12, do_sample=False, draft_model=str(folder)), wanted)


def test_code_is_allowed_by_the_caller_alone(folder: Path) -> None:
    edited("config.json", auto_map={"AutoConfig": "x.Y"})(folder)
    extra("draft/x.py", b"")(folder)
    # Reading runs nothing, so it does not ask.
    verify(DraftPairing.from_pretrained(folder), trust_remote_code=True)
    with pytest.raises(InvalidPairingError, match="Read that code, then pass"):
        verify(read_folder(folder))


# ---- safetensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_what_the_library_writes_is_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.zeros(3, 5, dtype=dtype), "b": torch.zeros((), dtype=dtype), "c": torch.zeros(0, dtype=dtype)}
    save_file(tensors, path, metadata={"format": "pt"})
    check_safetensors(path, path.name)
    save_file({}, path)
    check_safetensors(path, path.name)


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_TENSORS", 2)
    path = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(1) for name in "abc"}, path)
    with pytest.raises(InvalidPairingError, match="or more than 2"):
        check_safetensors(path, path.name)


def test_shards_that_are_all_there_are_accepted(tmp_path: Path) -> None:
    models.build_target().save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    check_model(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize("start", [b"cat\ndog\nbird\n", b"# Card\n", b"(c) somebody\n", b"#version: 0.2\n", b""])
def test_ordinary_texts_are_no_pickles(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "vocab.txt"
    path.write_bytes(start)
    assert files.check_file(path, "vocab.txt", (tmp_path,)) == len(start)
