"""The parts of a pairing: which models, what was measured, and where it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hf_specdec.config import LONGEST_DRAFT
from hf_specdec.errors import InvalidPairingError
from hf_specdec.pairing.fields import (
    check_count,
    check_date,
    check_id,
    check_length,
    check_number,
    check_revision,
    check_text,
    check_texts,
    described,
    is_hub_id,
    is_safe_name,
    quoted,
)

OWN_FOLDER = "."
"""The id of a draft whose files lie in the pairing's own folder."""

_LARGEST_RATIO = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """Name one model, so exactly that everyone who loads it gets the same weights.

    Args:
        id: A Hub id, an absolute path, which only this machine knows, or "." for the pairing's own folder.
        revision: The commit, 40 hexadecimal digits; None for local files, and for what nobody has pinned yet.
        subfolder: Where the model lies in its repository or folder, None for its top.

    Raises:
        InvalidPairingError: A field breaks its rule.
    """

    id: str
    revision: str | None = None
    subfolder: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        check_id("id", self.id)
        if self.revision is not None:
            check_revision("revision", self.revision)
        if self.revision is not None and not self.is_on_hub:
            raise InvalidPairingError(
                f"`revision` is for models on the Hub, but `id` is {quoted(self.id)} and `revision` is "
                f"{quoted(self.revision)}. Leave it out."
            )
        if self.subfolder is not None:
            check_text("subfolder", self.subfolder)
            if not is_safe_name(self.subfolder):
                raise InvalidPairingError(
                    f"`subfolder` must be a path inside the repository, parts joined by '/', but is "
                    f'{described(self.subfolder)}. Write for example "draft".'
                )
        if self.is_own and self.subfolder is None:
            raise InvalidPairingError(
                'A draft in the pairing\'s own folder (`"id": "."`) needs a `subfolder` of its own, but has none. '
                'Write `"subfolder": "draft"`.'
            )

    @property
    def is_own(self) -> bool:
        """Whether the model's files lie in the pairing's own folder."""
        return self.id == OWN_FOLDER

    @property
    def is_on_hub(self) -> bool:
        """Whether others can load it by its id."""
        return is_hub_id(self.id)

    @property
    def is_pinned(self) -> bool:
        """Whether everyone who loads it gets the same weights; local files cannot be pinned any better."""
        return self.revision is not None or not self.is_on_hub

    def __str__(self) -> str:
        """Return the id, and the first digits of the commit."""
        return f"{self.id}@{self.revision[:12]}" if self.revision else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one workload gave on one machine.

    Args:
        workload: What was generated, in a word or a sentence.
        temperature: 0 for greedy.
        batch_size: Rows.
        num_new_tokens: Per row.
        num_prompts: How many prompts the medians are over.
        acceptance_rate: Accepted / drafted, 0..1.
        mean_acceptance_length: Tokens per row and round, the target's own included.
        speed_up: Time of plain decoding / time with the draft: same process, interleaved, median.
        speed_up_low: The lower end of its range.
        speed_up_high: The upper end.
        num_draft_tokens: K, or "auto".
        draft_quantization: How the draft's weights were stored.
        dtype: Of what was not quantized.
        hardware: The device, and how many.
        versions: Of the packages that were used, by name.
        date: "YYYY-MM-DD".

    Raises:
        InvalidPairingError: A field breaks its rule.
    """

    workload: str
    temperature: float
    batch_size: int
    num_new_tokens: int
    num_prompts: int
    acceptance_rate: float
    mean_acceptance_length: float
    speed_up: float
    speed_up_low: float
    speed_up_high: float
    num_draft_tokens: int | Literal["auto"]
    draft_quantization: str
    dtype: str
    hardware: str
    versions: Mapping[str, str] = field(hash=False)
    date: str

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("workload", "draft_quantization", "dtype", "hardware"):
            check_text(name, getattr(self, name))
        for name in ("batch_size", "num_new_tokens", "num_prompts"):
            check_count(name, getattr(self, name), 1)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("acceptance_rate", self.acceptance_rate, 0.0, 1.0)
        check_number("mean_acceptance_length", self.mean_acceptance_length, 1.0, LONGEST_DRAFT + 1)
        for name in ("speed_up", "speed_up_low", "speed_up_high"):
            check_number(name, getattr(self, name), 0.0, _LARGEST_RATIO)
        if not self.speed_up_low <= self.speed_up <= self.speed_up_high:
            raise InvalidPairingError(
                f"`speed_up` must lie in its range, but is {self.speed_up} and the range is {self.speed_up_low} to "
                f"{self.speed_up_high}. Give the median and the ends of what was measured."
            )
        check_length("num_draft_tokens", self.num_draft_tokens, LONGEST_DRAFT)
        check_texts("versions", self.versions)
        check_date("date", self.date)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingSource:
    """Where a pairing was read from.

    Attributes:
        folder: The local folder that holds its files.
        id: Its Hub id, None for a folder of the user's.
        revision: The commit on the Hub, also where a branch or tag was asked for.
    """

    folder: str
    id: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        """Return what a user would call it."""
        return f"{self.id}@{(self.revision or 'main')[:12]}" if self.id else self.folder
