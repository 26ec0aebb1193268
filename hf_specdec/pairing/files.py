"""What single files of a pairing may be: told by name and by content, without running or unpacking anything."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from hf_specdec.errors import InvalidPairingError, in_short
from hf_specdec.pairing.fields import quoted

LARGEST_TEXT = 128 * 2**20
LARGEST_WEIGHTS = 256 * 2**30
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
MOST_TENSORS = 100_000
WEIGHTS = ".safetensors"
MODEL_SUFFIXES = (WEIGHTS, ".json", ".jinja", ".txt", ".model", ".md")
"""What a model without code consists of: weights, configurations, chat templates, vocabularies."""
PICKLE_SUFFIXES = frozenset(
    [
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".pkl",
        ".pickle",
        ".npy",
        ".npz",
        ".joblib",
        ".dill",
        ".th",
        ".pdparams",
        ".h5",
        ".hdf5",
        ".keras",
        ".msgpack",
    ]
)
ARCHIVE_SUFFIXES = frozenset(
    [".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar", ".zst", ".whl", ".egg", ".jar"]
)

# The usual beginnings of a pickle in text form: a function to call and its arguments, or an empty container.
_TEXT_PICKLE = re.compile(rb"c[\w.]+\n[\w.]+\n(?:p\d+\n)?\(|\([ld]p0\n")
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


def check_file(path: Path, name: str, roots: tuple[Path, ...]) -> int:
    """Refuse a file of a pairing that could do harm by being opened, and return its size in bytes.

    Args:
        path: Where it is.
        name: What it is called in the pairing's folder, for messages.
        roots: Resolved folders that links may lead into.

    Raises:
        InvalidPairingError: It is no ordinary file, leads out of the folder, is too large, or holds objects of Python.
    """
    if path.is_symlink() and not _leads_into(path, roots):
        raise _refused(name, "is a link that leads out of the folder", "Put the file itself into the folder")
    try:
        status = path.stat()
    except OSError as error:
        raise _refused(name, f"cannot be read ({in_short(error)})", "Check its rights, or fetch it again") from None
    if not stat.S_ISREG(status.st_mode):
        raise _refused(name, "is no ordinary file but a device, pipe or socket", "Take it out")
    check_name(name)
    largest = LARGEST_WEIGHTS if name.endswith(WEIGHTS) else LARGEST_TEXT
    if status.st_size > largest:
        raise _refused(name, f"has {status.st_size} bytes, more than the {largest} allowed", "Take it out")
    if name.endswith(WEIGHTS):
        check_safetensors(path, name)
    else:
        _check_content(path, name)
    return status.st_size


def check_name(name: str) -> None:
    """Refuse by its name what would be unpickled or unpacked.

    Raises:
        InvalidPairingError: The name is that of a pickle or an archive.
    """
    suffixes = {suffix.lower() for suffix in PurePosixPath(name).suffixes}
    if found := sorted(suffixes & PICKLE_SUFFIXES):
        raise _refused(
            name, f"may hold pickled objects, which run code when they are read ({found[0]})", "Save it as safetensors"
        )
    if found := sorted(suffixes & ARCHIVE_SUFFIXES):
        raise _refused(name, f"is an archive ({found[0]})", "Unpack it and check what is in it")


def digest(path: Path) -> str:
    """Return "sha256:…" of a file's bytes."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def read_json(path: Path, name: str) -> Any:
    """Return what a JSON file holds.

    Raises:
        InvalidPairingError: It is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise _refused(name, f"is no readable JSON ({in_short(error)})", "Save the draft again") from None


def _leads_into(path: Path, roots: tuple[Path, ...]) -> bool:
    resolved = Path(os.path.realpath(path))
    return any(resolved.is_relative_to(root) for root in roots)


def _check_content(path: Path, name: str) -> None:
    with path.open("rb") as file:
        start = file.read(512)
    if kind := _kind_of(start):
        raise _refused(name, f"is {kind} under another name", "Take it out, and save weights as safetensors")


def _kind_of(start: bytes) -> str | None:
    """Return what a file's first bytes give away."""
    signatures = {
        b"PK\x03\x04": "a zip archive, as PyTorch writes pickles",
        b"PK\x05\x06": "a zip archive",
        b"\x93NUMPY": "a NumPy file, which may hold pickles",
        b"\x89HDF\r\n": "an HDF5 file",
        b"\x1f\x8b": "a gzip archive",
        b"BZh": "a bzip2 archive",
        b"\xfd7zXZ": "an xz archive",
        b"7z\xbc\xaf": "a 7z archive",
        b"\x28\xb5\x2f\xfd": "a zstd archive",
        b"\x7fELF": "a program",
        b"MZ\x90\x00": "a program",
    }
    for signature, kind in signatures.items():
        if start.startswith(signature):
            return kind
    if start[257:262] == b"ustar":
        return "a tar archive"
    if (len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5) or _TEXT_PICKLE.match(start):
        return "a pickle"
    return None


# ---- safetensors ---------------------------------------------------------------------------------------------------


def check_safetensors(path: Path, name: str) -> None:
    """Refuse weights whose header does not describe exactly the bytes that follow it.

    Format: https://huggingface.co/docs/safetensors (8 bytes with the header's length, JSON, tensors without gaps).

    Raises:
        InvalidPairingError: It does not.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) == 8 and length <= min(LARGEST_HEADER, size - 8):
            header = file.read(length)
        else:
            file.seek(0)
            raise _broken(name, _no_header(file.read(512), length, size))
    try:
        tensors = json.loads(header, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        found = _kind_of(start + header[:504])
        raise _broken(name, f"it is {found}" if found else f"its header is no JSON ({in_short(error)})") from None
    if not isinstance(tensors, dict) or len(tensors) > MOST_TENSORS:
        raise _broken(name, f"its header names no tensors, or more than {MOST_TENSORS}")
    metadata = tensors.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(name, "its metadata maps no strings to strings")
    spans = sorted(_span(name, key, value) for key, value in tensors.items())
    end = 0
    for begin, stop, key in spans:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise _broken(name, f"tensor {quoted(key)} {what}")
        end = stop
    if end != size - 8 - length:
        what = "is truncated" if end > size - 8 - length else "goes on after its last tensor"
        raise _broken(name, f"it {what}: {end} bytes of tensors are described, {size - 8 - length} are there")


def _no_header(start: bytes, length: int, size: int) -> str:
    if kind := _kind_of(start):
        return f"it is {kind}"
    if size < 8:
        return f"it has only {size} bytes"
    return f"its header would have {length} bytes, and the file has {size}"


def _span(name: str, key: str, value: Any) -> tuple[int, int, str]:
    """Return where a tensor begins and ends, once that agrees with its type and shape."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _broken(name, f"tensor {quoted(key)} has other fields than dtype, shape and data_offsets")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in _BITS:
        raise _broken(name, f"tensor {quoted(key)} has the unknown dtype {quoted(kind)}")
    if not _are_sizes(shape) or len(shape) > 64 or not _are_sizes(offsets) or len(offsets) != 2:
        raise _broken(name, f"tensor {quoted(key)} has a shape or offsets that are no sizes")
    begin, end = offsets
    if 8 * (end - begin) != _BITS[kind] * math.prod(shape):
        raise _broken(name, f"tensor {quoted(key)} takes {end - begin} bytes, which do not fit its dtype and shape")
    return begin, end, key


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 for value in values
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name stands twice")
    return values


def _broken(name: str, why: str) -> InvalidPairingError:
    return InvalidPairingError(
        f"Weights must be a whole safetensors file, but {quoted(name)} is not: {why}. Fetch or save it again."
    )


def _refused(name: str, why: str, remedy: str) -> InvalidPairingError:
    return InvalidPairingError(f"A pairing's files must be harmless to open, but {quoted(name)} {why}. {remedy}.")
