"""A pairing as a folder: reading, checking and writing it. Nothing in it is executed, and nothing outside is read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from hf_specdec.errors import InvalidPairingError, PairingNotFoundError
from hf_specdec.pairing.fields import is_safe_name, quoted
from hf_specdec.pairing.files import (
    MODEL_SUFFIXES,
    WEIGHTS,
    check_file,
    check_name,
    digest,
    read_json,
)
from hf_specdec.pairing.schema import FILE_NAME, LARGEST_FILE, DraftPairing, PairingSource, parse_pairing

MOST_FILES = 256
RECIPE = ("custom_generate/generate.py", "custom_generate/requirements.txt")
"""What the host runs for `generate(custom_generate=…, trust_remote_code=True)`, and only then."""

# What version control and the Hub's client leave in folders; nothing reads it.
_IGNORED_FOLDERS = frozenset({".git", ".cache"})


def is_pairing_folder(folder: str | os.PathLike[str]) -> bool:
    """Return whether a local folder says that it is a pairing."""
    return os.path.lexists(os.path.join(folder, FILE_NAME))


def read_folder(folder: str | os.PathLike[str], source: PairingSource | None = None) -> DraftPairing:
    """Return the pairing of a folder; of its other files nothing is read yet, see `verify`.

    Args:
        folder: A local folder.
        source: Where it came from, if not from the user.

    Raises:
        PairingNotFoundError: There is no pairing in it.
        InvalidPairingError: Its `draft_pairing.json` breaks a rule.
    """
    path = Path(folder) / FILE_NAME
    if not Path(folder).is_dir():
        raise PairingNotFoundError(f"A pairing is a folder, but there is none at {str(folder)!r}. Check the path.")
    if not os.path.lexists(path):
        raise PairingNotFoundError(
            f"A pairing's folder holds {FILE_NAME}, but {str(folder)!r} does not. Check the path, or make a pairing "
            "with `hf-specdec pair create`."
        )
    size = check_file(path, FILE_NAME, _roots(Path(folder)))
    if size > LARGEST_FILE:
        raise InvalidPairingError(f"{FILE_NAME} must have at most {LARGEST_FILE} bytes, but has {size}. Shorten it.")
    try:
        text = path.read_bytes().decode("utf-8")
    except ValueError:
        raise InvalidPairingError(f"{FILE_NAME} must be UTF-8, but is not. Write it with `save_pretrained`.") from None
    absolute = os.path.abspath(folder)
    return replace(parse_pairing(text), source=source or PairingSource(folder=absolute))


def verify(pairing: DraftPairing, *, trust_remote_code: bool = False) -> None:
    """Check every file of the folder a pairing was read from, and those of its own draft against their sha256.

    Args:
        pairing: As `read_folder` gave it; one without a source has no files.
        trust_remote_code: Whether the caller lets the own draft run code from the folder.

    Raises:
        InvalidPairingError: A file is missing, unlisted, changed, truncated, or could run code.
    """
    if pairing.source is None:
        if pairing.draft.is_own:
            raise InvalidPairingError(
                'A draft in the pairing\'s own folder (`"id": "."`) needs that folder, but this pairing was made in '
                "memory. Load it with `DraftPairing.from_pretrained(folder)`."
            )
        return
    folder = Path(pairing.source.folder)
    names = check_tree(folder)
    if pairing.draft.is_own:
        _check_own_draft(folder, pairing, names, trust_remote_code=trust_remote_code)


def check_tree(folder: Path) -> list[str]:
    """Check every file of a folder for what could do harm, and return their names, sorted.

    Raises:
        InvalidPairingError: A file could do harm, or there are too many.
    """
    roots = _roots(folder)
    names: list[str] = []
    for path in _walk(folder, folder, roots):
        name = path.relative_to(folder).as_posix()
        if len(names) == MOST_FILES:
            raise InvalidPairingError(
                f"A pairing's folder holds at most {MOST_FILES} files, but {str(folder)!r} holds more. Keep other "
                "files elsewhere."
            )
        if not is_safe_name(name):
            raise InvalidPairingError(f"Names of a pairing's files must be printable, but one is {quoted(name)}.")
        check_file(path, name, roots)
        names.append(name)
    return sorted(names)


def check_model(folder: str | os.PathLike[str], *, trust_remote_code: bool) -> None:
    """Check that a folder holds one model without code: weights that are all there, and configurations.

    Raises:
        InvalidPairingError: It does not.
    """
    folder = Path(folder)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if "config.json" not in names:
        raise InvalidPairingError(
            f"A draft's folder must hold config.json, but {folder.name!r} does not. Save it again."
        )
    if not any(name.endswith(WEIGHTS) for name in names):
        raise InvalidPairingError(
            f"A draft's folder must hold its weights as safetensors, but {folder.name!r} holds none. Save it again."
        )
    for name in sorted(names):
        _check_kind(name, trust_remote_code=trust_remote_code)
        if name.endswith(".index.json"):
            _check_index(name, read_json(folder / name, name), names)
        elif name.endswith(".json"):
            _check_code(name, read_json(folder / name, name), trust_remote_code=trust_remote_code)


def hash_files(folder: str | os.PathLike[str], subfolder: str) -> dict[str, str]:
    """Return what `DraftPairing.files` must say of a draft that was saved to a subfolder of a pairing's folder."""
    root = Path(folder)
    paths = sorted(path for path in (root / subfolder).rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): digest(path) for path in paths}


def write_pairing(pairing: DraftPairing, folder: str | os.PathLike[str]) -> None:
    """Write a pairing to a folder, its own draft included; see `DraftPairing.save_pretrained`.

    Raises:
        InvalidPairingError: It could not be loaded again from there.
    """
    text, root = pairing.to_json(), Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    check_tree(root)
    if pairing.draft.is_own:
        _bring_own_draft(pairing, root)
    for name in RECIPE:
        target = root / name
        target.parent.mkdir(exist_ok=True)
        _replace(target, recipe_text(name))
    _replace(root / FILE_NAME, text)


def recipe_text(name: str) -> str:
    """Return the text of one of the files in `RECIPE`."""
    bundled = resources.files("hf_specdec.pairing") / "recipe" / f"{PurePosixPath(name).name}.in"
    return bundled.read_text(encoding="utf-8")


def _bring_own_draft(pairing: DraftPairing, root: Path) -> None:
    """Copy an own draft's files from where the pairing was read, unless they lie in the new folder already."""
    here = replace(pairing, source=PairingSource(folder=os.path.abspath(root)))
    origin = Path(pairing.source.folder) if pairing.source else root
    if origin.resolve() == root.resolve():
        return verify(here, trust_remote_code=True)
    verify(pairing, trust_remote_code=True)
    for name in pairing.files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / name, root / name)
    return verify(here, trust_remote_code=True)


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, so that no reader and no crash sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# ---- checks --------------------------------------------------------------------------------------------------------


def _roots(folder: Path) -> tuple[Path, ...]:
    """Return the folders that links may lead into: the folder itself, and the store of the Hub's cache it lies in."""
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    in_cache = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--") and blobs.is_dir()
    return (root, blobs) if in_cache else (root,)


def _walk(folder: Path, top: Path, roots: tuple[Path, ...]) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir() and entry.is_symlink():
                name = Path(entry.path).relative_to(top).as_posix()
                raise InvalidPairingError(
                    f"A pairing's files must be harmless to open, but {quoted(name)} is a link to a folder. Put the "
                    "files themselves there."
                )
            if not entry.is_dir():
                yield Path(entry.path)
            elif not (folder == top and entry.name in _IGNORED_FOLDERS):
                yield from _walk(Path(entry.path), top, roots)


def _check_own_draft(folder: Path, pairing: DraftPairing, names: list[str], *, trust_remote_code: bool) -> None:
    own = [name for name in names if name.startswith(f"{pairing.draft.subfolder}/")]
    for name in pairing.files:
        check_name(name)
        if name not in own:
            raise InvalidPairingError(
                f"`files` of {FILE_NAME} lists {quoted(name)}, but the folder does not hold it. Fetch it again."
            )
    for name in own:
        if name not in pairing.files:
            raise InvalidPairingError(
                f"Every file of the draft must be listed in `files` of {FILE_NAME}, but {quoted(name)} is not. Take it "
                "out, or create the pairing again."
            )
    check_model(folder / str(pairing.draft.subfolder), trust_remote_code=trust_remote_code)
    for name, wanted in pairing.files.items():
        if (found := digest(folder / name)) != wanted:
            raise InvalidPairingError(
                f"{quoted(name)} must have the digest {wanted} that {FILE_NAME} lists, but has {found}: it was changed "
                "after the pairing was made, or damaged on the way. Delete it and fetch the pairing again."
            )


def _check_kind(name: str, *, trust_remote_code: bool) -> None:
    if name.endswith(".py") and not trust_remote_code:
        raise _runs_code(name, "is code")
    if PurePosixPath(name).name.startswith("adapter_"):
        raise InvalidPairingError(
            f"A draft in a pairing must be a whole model, but {quoted(name)} belongs to an adapter, whose base lies "
            "elsewhere. Merge it and save the result."
        )
    suffixes = (*MODEL_SUFFIXES, ".py") if trust_remote_code else MODEL_SUFFIXES
    if not name.endswith(suffixes):
        raise InvalidPairingError(
            f"A draft's folder holds only {', '.join(suffixes)} files, but {quoted(name)} is none. Take it out."
        )


def _check_code(name: str, values: Any, *, trust_remote_code: bool) -> None:
    if isinstance(values, dict) and values.get("auto_map") and not trust_remote_code:
        raise _runs_code(name, f"asks for code with `auto_map` ({quoted(values['auto_map'])})")


def _check_index(name: str, values: Any, names: set[str]) -> None:
    shards = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(shards, dict):
        raise InvalidPairingError(f"{quoted(name)} must have a `weight_map`, but has none. Save the draft again.")
    for shard in shards.values():
        if not isinstance(shard, str) or not is_safe_name(shard) or not shard.endswith(WEIGHTS):
            raise InvalidPairingError(
                f"{quoted(name)} must name safetensors files beside it, but names {quoted(shard)}. Save it again."
            )
        if shard not in names:
            raise InvalidPairingError(
                f"{quoted(name)} must name files that are there, but names {quoted(shard)}. Fetch the pairing again."
            )


def _runs_code(name: str, why: str) -> InvalidPairingError:
    return InvalidPairingError(
        f"A draft must not run code of its own unless the caller says so, but {quoted(name)} {why}. Read that code, "
        "then pass `speculative_config={'trust_remote_code': True}`."
    )
