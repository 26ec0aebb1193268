"""Write a folder as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hf_specdec.pairing.schema import FILE_NAME

OF_A_PAIRING = frozenset({FILE_NAME, "README.md", "custom_generate", "draft"})
"""What lies at the top of a pairing that was written by us."""


def refuse_folder(folder: Path, *, overwrite: bool, sources: Sequence[str] = ()) -> None:
    """Refuse a folder that cannot be written, or would lose something that is not a pairing.

    Args:
        folder: Where a pairing is to go.
        overwrite: Whether a pairing that is there may go.
        sources: Names of models; folders among them must stay.

    Raises:
        ValueError: There is something else, or it may not go.
    """
    rule = "`--output` must be an empty or a new folder"
    _refuse_unwritable(folder, rule)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{rule}, but {str(folder)!r} is no folder. Choose another name.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    strange = sorted(path.name for path in folder.iterdir() if path.name not in OF_A_PAIRING)
    if strange and (folder / FILE_NAME).is_file():
        raise ValueError(
            f"{rule}, or hold a pairing and nothing else, but in {str(folder)!r} there is {strange[0]!r}, too. Choose "
            "another folder, or move it away."
        )
    if not (folder / FILE_NAME).is_file():
        raise ValueError(f"{rule}, but {str(folder)!r} holds files that are no pairing's. Choose another one.")
    if not overwrite:
        raise ValueError(f"{rule}, but {str(folder)!r} holds a pairing. Choose another one, or give `--overwrite`.")
    whole = folder.resolve()
    for source in sources:
        path = Path(source).resolve()
        if path.is_dir() and (path == whole or whole in path.parents):
            raise ValueError(
                f"`--overwrite` must not remove a model that is measured, but {source!r} lies in {str(folder)!r}. "
                "Choose another folder."
            )


def _refuse_unwritable(folder: Path, rule: str) -> None:
    """Try to make a folder beside: what cannot be written shall not be measured first."""
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=place))
    except OSError as error:
        raise ValueError(
            f"{rule} that can be written, but beside {str(folder)!r} nothing can be made ({error.strerror}). Choose "
            "another place or name."
        ) from error


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder beside `folder` to write to, which takes its place at the end; an exception leaves all as it was.

    Args:
        folder: What is in it before is gone afterwards. Its parents are made.
    """
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        (beside / "new").mkdir()  # not `beside` itself, which nobody else may read
        yield beside / "new"
        if target.exists():
            target.rename(beside / "old")
        try:
            os.replace(beside / "new", target)
        except BaseException:  # Ctrl-C as well
            if (beside / "old").exists():
                (beside / "old").rename(target)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
