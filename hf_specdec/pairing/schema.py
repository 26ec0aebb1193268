"""`draft_pairing.json`: what a pairing says, checked field by field.

Everything here is plain data: no file is read, nothing is fetched, no model is known.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args

from hf_specdec.config import LONGEST_DRAFT, DraftQuantization
from hf_specdec.errors import InvalidConfigError, InvalidPairingError, in_short
from hf_specdec.hints import checked_hints
from hf_specdec.pairing.fields import (
    check_choice,
    check_count,
    check_digest,
    check_length,
    check_mapping,
    check_text,
    described,
    is_local_path,
    is_safe_name,
    quoted,
)
from hf_specdec.pairing.records import Measurement, ModelReference, PairingSource

if TYPE_CHECKING:
    import os

__all__ = ["FILE_NAME", "DraftPairing", "Measurement", "ModelReference", "PairingSource", "only_here", "parse_pairing"]

FILE_NAME = "draft_pairing.json"
SCHEMA_VERSION = 1
LARGEST_FILE = 2**20
MOST_MEASUREMENTS = 256
LONGEST_MESSAGE = 400
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPairing:
    """A target, the draft that suits it, and what is known of the two; pass it to `generate` as `draft_model`.

    Args:
        target: The model whose text is wanted.
        draft: The small model that proposes.
        tokenizer_fingerprint: Of the target's tokenizer, "sha256:…"; None if unknown.
        draft_tokenizer_fingerprint: Of the draft's; None if it is the same tokenizer.
        draft_quantization: How the draft is stored in memory; see `SpeculativeConfig`.
        num_draft_tokens: K, or "auto".
        controller_hints: What "auto" learned about the pair; see `SpeculativeConfig`.
        measurements: At most 256.
        schema_version: Of the file's format.
        description: A few sentences.
        files: "sha256:…" of each file of a draft in the pairing's own folder, by its name relative to that folder, such
            as "draft/model.safetensors"; empty for other drafts.
        source: Where it was read from; no part of the file.

    Raises:
        InvalidPairingError: A field breaks its rule.

    Example:
        >>> target = ModelReference(id="org/large", revision="0" * 40)
        >>> pairing = DraftPairing(target=target, draft=ModelReference(id="org/small", revision="1" * 40))
        >>> parse_pairing(pairing.to_json()) == pairing
        True
    """

    target: ModelReference
    draft: ModelReference
    tokenizer_fingerprint: str | None = None
    draft_tokenizer_fingerprint: str | None = None
    draft_quantization: DraftQuantization = "auto"
    num_draft_tokens: int | Literal["auto"] = "auto"
    controller_hints: Mapping[str, Any] | None = field(default=None, hash=False)
    measurements: tuple[Measurement, ...] = ()
    schema_version: int = SCHEMA_VERSION
    description: str | None = None
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    source: PairingSource | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check every field."""
        _check_version(self.schema_version)
        for name in ("target", "draft"):
            if not isinstance(value := getattr(self, name), ModelReference):
                raise InvalidPairingError(
                    f"`{name}` must be a ModelReference, but is {described(value)}. Give at least its `id`."
                )
        if self.target.is_own:
            raise InvalidPairingError(
                'Only the draft can lie in the pairing\'s own folder, but `target.id` is ".". Give its Hub id.'
            )
        for name in ("tokenizer_fingerprint", "draft_tokenizer_fingerprint"):
            if (value := getattr(self, name)) is not None:
                check_digest(name, value)
        check_choice("draft_quantization", self.draft_quantization, get_args(DraftQuantization))
        check_length("num_draft_tokens", self.num_draft_tokens, LONGEST_DRAFT)
        _check_hints(self.controller_hints, self.num_draft_tokens)
        _check_measurements(self.measurements)
        if self.description is not None:
            check_text("description", self.description, may_break_lines=True)
        _check_files(self.files, self.draft)

    def to_json(self) -> str:
        """Return the text of `draft_pairing.json`.

        Raises:
            InvalidPairingError: A model on the Hub has no pinned revision, or the text would be too large.
        """
        _check_pins(self)
        values = {own.name: _plain(getattr(self, own.name)) for own in fields(self) if own.name != "source"}
        text = json.dumps(values, indent=2, allow_nan=False) + "\n"
        _check_size(text)
        return text

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> DraftPairing:
        """Read and check a pairing.

        Args:
            name: A Hub id or a local folder.
            revision: Branch, tag or commit on the Hub; what it stands for is told by `source.revision`.
            token: For private repositories; None takes the stored one.
            local_files_only: Ask no Hub; what was fetched before is found in its cache.

        Raises:
            PairingNotFoundError: There is no such pairing, or it could not be fetched.
            InvalidPairingError: It breaks a rule.
        """
        from hf_specdec.pairing.resolve import read_pairing

        return read_pairing(name, revision=revision, token=token, local_files_only=local_files_only)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the pairing to a folder: the JSON, what `custom_generate=` needs, and the files of an own draft.

        Args:
            folder: Made if it is missing. Other files in it, such as the card, stay as they are.

        Raises:
            InvalidPairingError: It could not be loaded again from there.
        """
        from hf_specdec.pairing.folder import write_pairing

        write_pairing(self, folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Publish the pairing as one commit; its folder's other files, such as the card, go with it.

        Args:
            repo_id: "organisation/name"; made if it is missing.
            private: For a new repository; None takes the organisation's default.
            token: None takes the stored one.
            commit_message: None says what it is.

        Returns:
            The address of the commit.

        Raises:
            PairingNotFoundError: The Hub could not be reached or refused.
            InvalidPairingError: It breaks a rule, or names models that only this machine has.
        """
        from hf_specdec.pairing.hub import push_pairing

        return push_pairing(self, repo_id, private=private, token=token, commit_message=commit_message)


def parse_pairing(text: str) -> DraftPairing:
    """Return the pairing that the text of a `draft_pairing.json` describes.

    Raises:
        InvalidPairingError: It is no JSON, a key is unknown or missing, a value breaks its rule, or a model on the Hub
            has no pinned revision.
    """
    _check_size(text)
    try:
        values = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
        values = _known(DraftPairing, values, "")
        for name in ("target", "draft"):
            if name in values:
                values[name] = _built(ModelReference, values[name], name)
        if "measurements" in values:
            values["measurements"] = _built_list(values["measurements"])
        pairing = _built(DraftPairing, values, "")
        _check_pins(pairing)
    except InvalidPairingError as error:
        raise InvalidPairingError(f"{FILE_NAME}: {error}") from None
    except RecursionError:
        raise InvalidPairingError(
            f"{FILE_NAME} must be nested as its schema is, but is nested far deeper. Write it with `save_pretrained`."
        ) from None
    except ValueError as error:
        raise InvalidPairingError(
            f"{FILE_NAME} must hold one JSON object, but cannot be read ({in_short(error)[:LONGEST_MESSAGE]}). Write "
            "it with `save_pretrained`."
        ) from None
    return pairing


# ---- from JSON -----------------------------------------------------------------------------------------------------


def _check_size(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidPairingError(f"{FILE_NAME} must be text, but is {type(text).__name__}. Decode it as UTF-8.")
    if (size := len(text.encode("utf-8", "surrogatepass"))) > LARGEST_FILE:
        raise InvalidPairingError(
            f"{FILE_NAME} must have at most {LARGEST_FILE} bytes, but has {size}. Leave out measurements."
        )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise InvalidPairingError(f"each key may stand once, but {quoted(twice)} stands twice. Leave one of them out.")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidPairingError(f"numbers must be finite, but there is {name}. Leave out what could not be measured.")


def _built_list(values: object) -> tuple[Measurement, ...]:
    if not isinstance(values, list):
        raise InvalidPairingError(f"`measurements` must be a list, but is {described(values)}. Write `[]` for none.")
    _check_count_of_measurements(len(values))
    return tuple(_built(Measurement, value, f"measurements[{index}]") for index, value in enumerate(values))


def _built(kind: Callable[..., _Record], values: Any, place: str) -> _Record:
    values = _known(kind, values, place)
    try:
        return kind(**values)
    except InvalidPairingError as error:
        raise InvalidPairingError(f"in `{place}`, {error}" if place else str(error)) from None


def _known(kind: Any, values: Any, place: str) -> dict[str, Any]:
    """Return the object's entries once its keys are the record's."""
    of = f"`{place}`" if place else "a pairing"
    if not isinstance(values, dict):
        raise InvalidPairingError(f"{of} must be an object, but is {described(values)}. Write its fields in braces.")
    allowed = {own.name: own for own in fields(kind) if own.name != "source"}
    for key in values:
        if key not in allowed:
            nearest = get_close_matches(key[:LONGEST_MESSAGE], allowed, n=1, cutoff=0.0)[0]
            raise InvalidPairingError(
                f"{of} has no field {quoted(key)}. Did you mean `{nearest}`? The fields are {', '.join(allowed)}."
            )
    for name, own in allowed.items():
        if name not in values and own.default is own.default_factory:
            raise InvalidPairingError(f"{of} must have the field `{name}`, but it is missing. Add it.")
    return values


# ---- rules of a pairing --------------------------------------------------------------------------------------------


def _check_version(value: object) -> None:
    check_count("schema_version", value, 1)
    if value != SCHEMA_VERSION:
        raise InvalidPairingError(
            f"`schema_version` must be {SCHEMA_VERSION} for this version of hf-specdec, but is {value}. Update "
            "hf-specdec: `pip install -U hf-specdec`."
        )


def _check_hints(hints: object, num_draft_tokens: object) -> None:
    try:
        checked_hints(hints)  # type: ignore[arg-type]
    except InvalidConfigError as error:
        raise InvalidPairingError(str(error)[:LONGEST_MESSAGE]) from None
    if hints is not None and num_draft_tokens != "auto":
        raise InvalidPairingError(
            f'`controller_hints` are for `num_draft_tokens` "auto", but that is {num_draft_tokens}. Leave one of them '
            "out."
        )


def _check_measurements(values: object) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, Measurement) for value in values):
        raise InvalidPairingError(
            f"`measurements` must be a tuple of Measurement, but is {described(values)}. Pass `()` for none."
        )
    _check_count_of_measurements(len(values))


def _check_count_of_measurements(number: int) -> None:
    if number > MOST_MEASUREMENTS:
        raise InvalidPairingError(
            f"`measurements` must have at most {MOST_MEASUREMENTS} entries, but has {number}. Leave out the oldest."
        )


def _check_files(files: object, draft: ModelReference) -> None:
    check_mapping("files", files)
    assert isinstance(files, Mapping)
    for name, digest in files.items():
        if not is_safe_name(name) or not name.startswith(f"{draft.subfolder}/"):
            raise InvalidPairingError(
                f"`files` names files of the draft's subfolder, {quoted(draft.subfolder)}, but has {quoted(name)}. "
                "Take it out."
            )
        check_digest(f"files[{quoted(name)}]", digest)
    if draft.is_own and not files:
        raise InvalidPairingError(
            '`files` must give the sha256 of every file of a draft in the pairing\'s own folder (`"id": "."`), but is '
            "empty. Let `hf-specdec pair create` compute them."
        )
    if files and not draft.is_own:
        raise InvalidPairingError(
            f'`files` are for a draft in the pairing\'s own folder (`"id": "."`), but `draft.id` is '
            f"{quoted(draft.id)}. Leave them out."
        )


def _check_pins(pairing: DraftPairing) -> None:
    for name, model in (("target", pairing.target), ("draft", pairing.draft)):
        if not model.is_pinned:
            raise InvalidPairingError(
                f"`{name}.revision` must be the commit that was used, since branches move, but {quoted(model.id)} has "
                "none. Give the commit of 40 hexadecimal digits."
            )


def only_here(pairing: DraftPairing) -> list[str]:
    """Return which of "target" and "draft" are paths that mean nothing on other machines."""
    models = {"target": pairing.target, "draft": pairing.draft}
    return [name for name, model in models.items() if is_local_path(model.id)]


def _plain(value: Any) -> Any:
    """Return a value of a record as JSON types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ModelReference | Measurement):
        return {own.name: _plain(getattr(value, own.name)) for own in fields(value)}
    return value
