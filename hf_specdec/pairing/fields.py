"""What single fields of a pairing may hold; each check gives the rule, the value and the remedy."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any

from hf_specdec.errors import InvalidPairingError

LONGEST_STRING = 4096
LONGEST_ID = 96
MOST_ENTRIES = 1024
LARGEST_COUNT = 10**9

_HUB_PART = r"(?![-.])[\w.-]{1,96}(?<![-.])"
_HUB_ID = re.compile(rf"(?:{_HUB_PART}/)?{_HUB_PART}", re.ASCII)
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


class _Quoting(Repr):
    """Quotes a value of any size in a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        """Return a number in short: Python refuses to write out very long ones."""
        return "a huge integer" if abs(value) >= 10**60 else repr(value)


quoted = _Quoting().repr


def described(value: object) -> str:
    """Return a value in short, and its type."""
    return f"{quoted(value)} ({type(value).__name__})"


def is_hub_id(value: str) -> bool:
    """Return whether the Hub would take this as a model's id: "name" or "organisation/name"."""
    fits = _HUB_ID.fullmatch(value) is not None and len(value.rpartition("/")[2]) <= LONGEST_ID
    return fits and "--" not in value and ".." not in value and not value.endswith(".git")


def is_local_path(value: str) -> bool:
    """Return whether an id is an absolute path on some machine, which no Hub id can be."""
    return value.startswith("/") or _WINDOWS_DRIVE.match(value) is not None


def is_safe_name(value: str) -> bool:
    """Return whether a file's name, parts joined by "/", stays in the folder it is relative to on every system."""
    if not value or len(value) > LONGEST_STRING or "\\" in value or _WINDOWS_DRIVE.match(value):
        return False
    return value.isprintable() and all(part not in ("", ".", "..") for part in value.split("/"))


def check_text(name: str, value: object, *, may_break_lines: bool = False) -> None:
    """Refuse what is no printable string of a sensible length."""
    rule = f"`{name}` must be a non-empty string of at most {LONGEST_STRING} printable characters"
    if not isinstance(value, str):
        raise InvalidPairingError(f"{rule}, but is {described(value)}. Put it in quotes, or leave it out.")
    flat = value.replace("\n", "").replace("\t", "") if may_break_lines else value
    if not value or len(value) > LONGEST_STRING or not flat.isprintable():
        raise InvalidPairingError(f"{rule}, but is {described(value)} with {len(value)}. Shorten or correct it.")


def check_id(name: str, value: object) -> None:
    """Refuse what names no model: neither a Hub id, nor an absolute path, nor "." for the pairing's own folder."""
    rule = f'`{name}` must be a Hub id ("organisation/name"), an absolute path, or "." for a draft in the pairing'
    check_text(name, value)
    assert isinstance(value, str)
    is_path = is_local_path(value) and ".." not in re.split(r"[/\\]", value)
    if value != "." and not is_path and not is_hub_id(value):
        raise InvalidPairingError(f"{rule}, but is {described(value)}. Copy the id from the model's page on the Hub.")


def check_revision(name: str, value: object) -> None:
    """Refuse what is no commit: branches and tags move, so what was measured would not be what is loaded."""
    if not isinstance(value, str) or not _COMMIT.fullmatch(value):
        raise InvalidPairingError(
            f"`{name}` must be a commit of 40 hexadecimal digits, but is {described(value)}. Branches and tags move: "
            "give the commit that they stand for."
        )


def check_digest(name: str, value: object) -> None:
    """Refuse what is no sha256 in our spelling."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise InvalidPairingError(
            f'`{name}` must be "sha256:" and 64 hexadecimal digits, but is {described(value)}. Let '
            "`hf-specdec pair create` compute it."
        )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Refuse what is no finite number within the bounds, both included."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (low <= value <= high) or math.isnan(value):  # type: ignore[operator,arg-type]
        raise InvalidPairingError(
            f"`{name}` must be a number between {low:g} and {high:g}, but is {described(value)}. Correct it."
        )


def check_count(name: str, value: object, low: int, high: int = LARGEST_COUNT) -> None:
    """Refuse what is no whole number within the bounds, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidPairingError(
            f"`{name}` must be a whole number between {low} and {high}, but is {described(value)}. Correct it."
        )


def check_length(name: str, value: object, longest: int) -> None:
    """Refuse what is no draft length."""
    if isinstance(value, str) and value == "auto":
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= longest:
        raise InvalidPairingError(
            f'`{name}` must be between 1 and {longest}, or "auto", but is {described(value)}. Leave it out for "auto".'
        )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse what is not one of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidPairingError(
            f"`{name}` must be one of {', '.join(map(repr, allowed))}, but is {described(value)}. Choose one of them."
        )


def check_date(name: str, value: object) -> None:
    """Refuse what is no day of the calendar."""
    try:
        if not isinstance(value, str) or not _DATE.fullmatch(value):
            raise ValueError(value)
        datetime.date.fromisoformat(value)
    except ValueError:
        raise InvalidPairingError(
            f'`{name}` must be a day such as "2026-01-31", but is {described(value)}. Give the day of the measurement.'
        ) from None


def check_mapping(name: str, value: object) -> None:
    """Refuse what maps no strings, or too many."""
    if not isinstance(value, Mapping) or len(value) > MOST_ENTRIES or not all(isinstance(key, str) for key in value):
        raise InvalidPairingError(
            f"`{name}` must be an object with at most {MOST_ENTRIES} entries, but is {described(value)}. Correct it."
        )


def check_texts(name: str, value: Any) -> None:
    """Refuse what does not map short texts to short texts."""
    check_mapping(name, value)
    for key, item in value.items():
        check_text(f"{name} (a key)", key)
        check_text(f"{name}[{quoted(key)}]", item)
