"""From what the caller passed as `draft_model` to a loaded draft and the settings that go with it.

A loaded model or the name of one goes straight to `loading`. A draft pairing, given as such, by name or found by
`"auto"`, says which draft to load and how to use it; the caller's own settings win over the pairing's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.config import SpeculativeConfig
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError, InvalidPairingError, warn_caller
from hf_specdec.loading import resolve_draft
from hf_specdec.pairing.fingerprint import fingerprint
from hf_specdec.pairing.folder import check_model, verify
from hf_specdec.pairing.hub import fetch_model
from hf_specdec.pairing.resolve import base_of, find_pairing, id_of, read_if_pairing
from hf_specdec.pairing.schema import DraftPairing, PairingSource
from hf_specdec.pairing.tokenizers import local_tokenizer

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedDraft:
    """A draft for a target; `told` says which pairing chose it and what was checked, and is empty without one."""

    draft: PreTrainedModel
    config: SpeculativeConfig
    told: str = ""


@dataclass(slots=True, kw_only=True)
class _Found:
    """What a name led to, for one target; None where it is no pairing.

    `checked` says how tokenizers compare, `checked_with` is the one that the caller gave, and `draft_name` by what name
    the draft is loaded; all once they are known.
    """

    pairing: DraftPairing | None
    checked: str | None = None
    checked_with: weakref.ref[Any] | None = None
    draft_name: str | None = None


_Key = tuple[Any, PairingSource | None, str | None, bool]
_found: weakref.WeakKeyDictionary[PreTrainedModel, dict[_Key, _Found]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def match_draft(
    target: PreTrainedModel,
    draft_model: Any,
    config: SpeculativeConfig,
    *,
    says_length: bool = False,
    tokenizer: Any = None,
) -> MatchedDraft:
    """Return the draft for a call, and the settings to use it with.

    Args:
        target: The model whose text is wanted.
        draft_model: A loaded model, the name of one, a `DraftPairing`, the folder or Hub id of one, or "auto".
        config: The caller's.
        says_length: Whether the caller asked for `num_draft_tokens="auto"`, which no default can tell.
        tokenizer: The target's, if the caller gave it; else it is looked for where the target came from, locally.

    Raises:
        PairingNotFoundError: "auto" found nothing.
        InvalidPairingError: A pairing breaks a rule, or a file of it was changed.
        DraftLoadError: The draft cannot be loaded.
        IncompatibleDraftError: It cannot propose for this target.
        InvalidConfigError: A setting does not go with what was given.
    """
    if not isinstance(draft_model, str | os.PathLike | DraftPairing):
        return MatchedDraft(draft=resolve_draft(target, draft_model, config), config=config)
    with _lock:
        found = _find_once(target, draft_model, config)
        told = _compare_once(target, found, tokenizer)
        if found.pairing is not None and found.draft_name is None:
            found.draft_name = _name_of(found.pairing, config)
    pairing = found.pairing
    if pairing is None:
        plain = resolve_draft(target, draft_model, config)
        with _lock:
            # Only now: what could not be fetched may be a pairing when it is asked for again.
            _found.setdefault(target, {})[_key_of(draft_model, config)] = found
        return MatchedDraft(draft=plain, config=config)
    config = _settings_of(pairing, config, says_length=says_length)
    draft = resolve_draft(target, found.draft_name, replace(config, draft_revision=pairing.draft.revision))
    return MatchedDraft(draft=draft, config=config, told=f"{pairing.source or pairing.draft}; {told}")


def forget_pairings(target: PreTrainedModel | None) -> None:
    """Forget what names led to, for one target or for all."""
    with _lock:
        if target is None:
            _found.clear()
        else:
            _found.pop(target, None)


def says_length(keyword: Any, config: Any) -> bool:
    """Return whether the caller said how many tokens to draft, "auto" included."""
    return keyword is not None or (isinstance(config, Mapping) and "num_draft_tokens" in config)


def _find_once(target: PreTrainedModel, draft_model: Any, config: SpeculativeConfig) -> _Found:
    key = _key_of(draft_model, config)
    founds = _found.setdefault(target, {})
    if key in founds:
        return founds[key]
    pairing = _find(target, draft_model, config)
    if pairing is not None:
        verify(pairing, trust_remote_code=config.trust_remote_code)
        _warn_of_other_target(target, pairing)
        founds[key] = _Found(pairing=pairing)
    return founds.get(key, _Found(pairing=None))


def _key_of(draft_model: Any, config: SpeculativeConfig) -> _Key:
    where = draft_model.source if isinstance(draft_model, DraftPairing) else None
    return draft_model, where, config.draft_revision, config.trust_remote_code


def _find(target: PreTrainedModel, draft_model: Any, config: SpeculativeConfig) -> DraftPairing | None:
    is_auto = isinstance(draft_model, str) and draft_model == AUTO
    if not is_auto and not isinstance(draft_model, DraftPairing):
        return read_if_pairing(os.fspath(draft_model), revision=config.draft_revision)
    if config.draft_revision is not None:
        raise InvalidConfigError(
            f"`draft_revision` is for a draft or pairing that is given by its Hub id, but is {config.draft_revision!r} "
            f"and `draft_model` is {AUTO!r} or a DraftPairing, which says its revision. Leave it out."
        )
    return find_pairing(target.config.name_or_path or "") if is_auto else draft_model


def _name_of(pairing: DraftPairing, config: SpeculativeConfig) -> str:
    """Return the name to load the draft by: a Hub id or a local folder."""
    draft = pairing.draft
    if draft.is_own and pairing.source is not None:
        return os.path.join(pairing.source.folder, draft.subfolder or "")
    if draft.subfolder is None:
        return draft.id
    if not draft.is_on_hub:
        return os.path.join(draft.id, draft.subfolder)
    folder = fetch_model(draft)
    check_model(folder, trust_remote_code=config.trust_remote_code)
    return folder


def _settings_of(pairing: DraftPairing, config: SpeculativeConfig, *, says_length: bool) -> SpeculativeConfig:
    """Return the caller's settings, with the pairing's where the caller said nothing."""
    values: dict[str, Any] = {}
    if config.draft_quantization == "auto":
        values["draft_quantization"] = pairing.draft_quantization
    if config.num_draft_tokens == "auto" and config.controller_hints is None:
        if pairing.num_draft_tokens != "auto" and not says_length:
            values["num_draft_tokens"] = pairing.num_draft_tokens
        elif pairing.controller_hints is not None:
            values["controller_hints"] = pairing.controller_hints
    return replace(config, **values)


# ---- does it belong to this target? --------------------------------------------------------------------------------


def _warn_of_other_target(target: PreTrainedModel, pairing: DraftPairing) -> None:
    """Say so if the pairing was made for another target, which may still work: fine-tuned models share tokens."""
    ours = id_of(target.config.name_or_path or "")
    if ours is not None and pairing.target.is_on_hub and base_of(ours).lower() != base_of(pairing.target.id).lower():
        warn_caller(
            f"The pairing {pairing.source or pairing.draft} was made for {pairing.target.id}, but the target is "
            f"{ours}. The text stays that of the target; what was measured need not hold."
        )


def _compare_once(target: PreTrainedModel, found: _Found, tokenizer: Any) -> str:
    """Return how the target's tokenizer compares with the pairing's fingerprint.

    Raises:
        IncompatibleDraftError: They differ.
    """
    pairing = found.pairing
    if pairing is None or pairing.tokenizer_fingerprint is None:
        return "its tokenizer is not known"
    is_same = tokenizer is None or (found.checked_with is not None and found.checked_with() is tokenizer)
    if found.checked is None or not is_same:
        found.checked = _compared(target, pairing, tokenizer)
        found.checked_with = _reference_to(tokenizer)
    return found.checked


def _reference_to(tokenizer: Any) -> weakref.ref[Any] | None:
    try:
        return None if tokenizer is None else weakref.ref(tokenizer)
    except TypeError:  # not of a kind that anybody can refer to; then it is compared each time
        return None


def _compared(target: PreTrainedModel, pairing: DraftPairing, tokenizer: Any) -> str:
    tokenizer = tokenizer if tokenizer is not None else local_tokenizer(target.config.name_or_path)
    if tokenizer is None:
        return "tokenizers were not compared, since the target's was not found"
    try:
        ours = fingerprint(tokenizer)
    except InvalidPairingError:
        return "tokenizers were not compared, since the target's is of an unknown kind"
    if ours != pairing.tokenizer_fingerprint:
        raise IncompatibleDraftError(
            f"A pairing is for targets of one tokenizer, but {pairing.source or pairing.draft} was made for "
            f"{pairing.tokenizer_fingerprint} ({pairing.target}), and the tokenizer of this target has {ours}. Choose "
            "a pairing for this target, or pass the draft itself if you know that it fits."
        )
    return "the tokenizer is the pairing's"
