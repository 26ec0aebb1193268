"""Find pairings: by folder, by Hub id, and by the target alone."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from hf_specdec.errors import PairingNotFoundError, SpecDecError
from hf_specdec.pairing.fields import is_hub_id, is_local_path, quoted
from hf_specdec.pairing.folder import is_pairing_folder, read_folder, verify
from hf_specdec.pairing.hub import fetch_files, fetch_if_pairing, fetch_pairing, search_pairings
from hf_specdec.pairing.schema import DraftPairing, ModelReference

# Copies of a model in fewer bits keep its tokens: "-AWQ", "-GPTQ-Int4", "-FP8", "-bnb-4bit", …
_QUANTIZED_COPY = re.compile(r"-(?:awq|gptq(?:-int[348])?|fp8|int[48]|nf4|bnb-[48]bit|unsloth)$", re.IGNORECASE)
_CACHE_FOLDER = re.compile(r"models--(.+)")
_BUNDLED = ("demo", "target"), ("demo", "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class CuratedPair:
    """One entry of the bundled list.

    Attributes:
        target: A Hub id.
        draft: The Hub id of a small model with the same tokenizer.
        draft_revision: A commit; None means that we have pinned none, and the main branch is taken as it is.
    """

    target: str
    draft: str
    draft_revision: str | None = None


@cache
def curated_pairs() -> tuple[CuratedPair, ...]:
    """Return the bundled list."""
    text = (resources.files("hf_specdec.pairing") / "registry.json").read_text(encoding="utf-8")
    return tuple(CuratedPair(**pair) for pair in json.loads(text)["pairs"])


def read_pairing(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> DraftPairing:
    """Return a pairing, all its files checked; see `DraftPairing.from_pretrained`.

    Code of its own draft is not refused here, since nothing runs it: that is decided where the draft is loaded.
    """
    name = os.fspath(name)
    if os.path.isdir(name) or is_local_path(name) or name.startswith("."):
        pairing = read_folder(name)
    else:
        pairing = fetch_pairing(name, revision=revision, token=token, local_files_only=local_files_only)
    verify(pairing, trust_remote_code=True)
    return pairing


def read_if_pairing(name: str, *, revision: str | None = None) -> DraftPairing | None:
    """Return the pairing that a name leads to, its files unchecked, or None if it names a plain model or nothing.

    Raises:
        InvalidPairingError: It leads to a pairing that breaks a rule.
        PairingNotFoundError: It leads to a pairing, whose draft could not be fetched.
    """
    if os.path.isdir(name):
        return read_folder(name) if is_pairing_folder(name) else None
    if not is_hub_id(name):
        return None
    try:
        pairing = fetch_if_pairing(name, revision=revision)
    except PairingNotFoundError:
        # Whoever loads the plain model says what is wrong with the name.
        return None
    if pairing is not None:
        fetch_files(pairing)
    return pairing


def find_pairing(target_name: str) -> DraftPairing:
    """Return a pairing for a target: from the bundled list, else from the Hub.

    Args:
        target_name: Where the target was loaded from. Of a local folder, its own name is looked up in the bundled list;
            one in the Hub's cache gives the Hub id.

    Raises:
        PairingNotFoundError: None was found; the message lists where it was looked for.
    """
    if (bundled := _bundled_pairing(target_name)) is not None:
        return bundled
    model_id = id_of(target_name)
    wanted = base_of(model_id or Path(target_name).name)
    curated = _curated(wanted, by_last_part=model_id is None or wanted != model_id)
    if curated is not None:
        return curated
    tried = [f"the {len(curated_pairs())} bundled pairs (for {quoted(wanted)})"]
    if model_id is not None:
        try:
            candidates = search_pairings(model_id)
            tried.append(f"the Hub, for models tagged hf-specdec with this base model ({len(candidates)} found)")
        except PairingNotFoundError as error:
            candidates, found = [], str(error)
            tried.append(f"the Hub ({found})")
        for candidate in candidates:
            try:
                pairing = fetch_pairing(candidate)
            except SpecDecError as error:
                tried.append(f"{candidate} ({error})")
                continue
            if pairing.target.id == model_id:
                return pairing
            tried.append(f"{candidate} (it is for {pairing.target})")
    else:
        tried.append("not the Hub, since the target is a local folder whose Hub id is unknown")
    raise PairingNotFoundError(
        f'`draft_model="auto"` takes a draft that is known to suit the target, but none is known for '
        f"{quoted(target_name)}. Tried: {'; '.join(tried)}. Pass a small model of the target's family as `draft_model`."
    )


def id_of(name: str) -> str | None:
    """Return the Hub id that a model was loaded by, None if it came from some other folder."""
    if os.path.isdir(name) or is_local_path(name):
        for part in Path(name).parts:
            if found := _CACHE_FOLDER.fullmatch(part):
                candidate = found.group(1).replace("--", "/")
                return candidate if is_hub_id(candidate) else None
        return None
    return name if is_hub_id(name) else None


def base_of(model_id: str) -> str:
    """Return the id of the model that a quantized copy was made of, and today's name of one that was renamed."""
    return _QUANTIZED_COPY.sub("", model_id).replace("/Meta-Llama-3.1-", "/Llama-3.1-")


def _curated(wanted: str, *, by_last_part: bool) -> DraftPairing | None:
    for pair in curated_pairs():
        is_same = pair.target.lower() == wanted.lower()
        if is_same or (by_last_part and pair.target.rpartition("/")[2].lower() == wanted.rpartition("/")[2].lower()):
            return DraftPairing(
                target=ModelReference(id=pair.target),
                draft=ModelReference(id=pair.draft, revision=pair.draft_revision),
            )
    return None


def _bundled_pairing(target_name: str) -> DraftPairing | None:
    """Return the pair that ships with the package, if the target is its own."""
    root = Path(str(resources.files("hf_specdec")))
    target, draft = (root.joinpath(*parts) for parts in _BUNDLED)
    if not os.path.isdir(target_name) or not target.is_dir() or not os.path.samefile(target_name, target):
        return None
    return DraftPairing(target=ModelReference(id=str(target)), draft=ModelReference(id=str(draft)))
