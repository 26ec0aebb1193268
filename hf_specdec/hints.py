"""What is known of a pair before its first round, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hf_specdec.errors import InvalidConfigError

KEYS = ("survival", "confidence", "next_confidence", "cost_ratio", "num_draft_tokens")
MOST_POSITIONS = 64
LARGEST_PARAMETER = 8.0
LARGEST_COST_RATIO = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """See `AdaptiveDraftLength.hints`."""

    survival: tuple[float, ...] = ()
    # How much a draft's confidence tells is to be learned.
    confidence: tuple[float, float, float] = (0.2, 0.0, 0.0)
    next_confidence: tuple[float, float, float] = (0.1, 0.0, 0.0)
    cost_ratio: float | None = None
    num_draft_tokens: int = 0


def checked_hints(hints: Mapping[str, Any] | None) -> Hints:
    """Return the hints, each one checked; None gives those of an unknown pair.

    Raises:
        InvalidConfigError: They are no mapping, a key is unknown, or a value is out of its range.
    """
    if hints is None:
        return Hints()
    if not isinstance(hints, Mapping):
        raise InvalidConfigError(
            f"`controller_hints` must be a mapping, but is {type(hints).__name__}. Pass what "
            "`output.speculation.controller_hints` gave."
        )
    if unknown := sorted(str(key) for key in hints if key not in KEYS):
        raise InvalidConfigError(
            f"`controller_hints` has no key {unknown[0]!r}. The keys are {', '.join(KEYS)}; leave others out."
        )
    values: dict[str, Any] = {}
    if hints.get("survival") is not None:
        values["survival"] = _survival(hints["survival"])
    for name in ("confidence", "next_confidence"):
        if hints.get(name) is not None:
            values[name] = _numbers(name, hints[name], 3, -LARGEST_PARAMETER, LARGEST_PARAMETER)
    if hints.get("cost_ratio") is not None:
        values["cost_ratio"] = _numbers("cost_ratio", [hints["cost_ratio"]], 1, 0.0, LARGEST_COST_RATIO)[0]
    if hints.get("num_draft_tokens") is not None:
        values["num_draft_tokens"] = int(_numbers("num_draft_tokens", [hints["num_draft_tokens"]], 1, 0.0, 256.0)[0])
    return Hints(**values)


def _survival(value: Any) -> tuple[float, ...]:
    curve = _numbers("survival", value, None, 0.0, 1.0)
    if any(later > earlier for earlier, later in pairwise(curve)):
        raise InvalidConfigError(
            f"`survival` in `controller_hints` must not rise, since each value is the probability of more tokens to be "
            f"accepted than the one before it, but is {list(curve)}. Pass the values as they were exported."
        )
    return curve


def _numbers(name: str, value: Any, length: int | None, low: float, high: float) -> tuple[float, ...]:
    is_list = isinstance(value, list | tuple) and (
        len(value) == length if length is not None else len(value) <= MOST_POSITIONS
    )
    if is_list and all(_is_number(item) and low <= item <= high for item in value):
        return tuple(float(item) for item in value)
    count = f"{length}" if length is not None else f"at most {MOST_POSITIONS}"
    raise InvalidConfigError(
        f"`{name}` in `controller_hints` must be {count} number(s) between {low:g} and {high:g}, but is {value!r}. "
        "Pass the values as they were exported, or leave the key out."
    )


def _is_number(value: Any) -> bool:
    # NaN differs from itself; what is infinite fails the bounds.
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
