"""The tokenizers of a pair: found once, on this machine, compared, and kept for as long as both models live."""

from __future__ import annotations

import filecmp
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from hf_specdec.pairing.compat import TokenSpaces, compare

# Two models whose folders hold this file with the same bytes have one tokenizer.
WHOLE_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairing:
    """What is known of a pair's tokenizers; `spaces` is None where they are the same or not both known.

    `is_known` says that both were found; `has_target` that at least the target's was.
    """

    spaces: TokenSpaces | None = None
    is_known: bool = False
    has_target: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model's tokenizer may come from: an object the caller gave, else a Hub id or folder."""

    tokenizer: Any = None
    name: str = ""
    revision: str | None = None
    trust_remote_code: bool = False

    def key(self) -> tuple[Any, ...]:
        """Return what tells sources apart; tokens that were added to a tokenizer make another one of it."""
        inner = _inner(self.tokenizer)
        size = len(inner) if hasattr(inner, "__len__") else 0
        return id(self.tokenizer), size, self.name, self.revision, self.trust_remote_code


_Known = tuple[tuple[Any, ...], tuple[Source, Source], Pairing]
_Drafts = weakref.WeakKeyDictionary[PreTrainedModel, _Known]
_known: weakref.WeakKeyDictionary[PreTrainedModel, _Drafts] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def pairing_of(target: PreTrainedModel, draft: PreTrainedModel, target_source: Source, draft_source: Source) -> Pairing:
    """Return how the tokenizers of two models compare, from memory where that was asked before.

    Args:
        target: The target.
        draft: The draft.
        target_source: Where its tokenizer comes from.
        draft_source: The same of the draft.
    """
    key = (*target_source.key(), *draft_source.key(), *_ends(target), *_ends(draft))
    with _lock:
        drafts = _known.setdefault(target, weakref.WeakKeyDictionary())
        known = drafts.get(draft)
        if known is None or known[0] != key:
            # The sources are kept so that no other tokenizer can get the same id.
            known = (key, (target_source, draft_source), _compared(target, draft, target_source, draft_source))
            drafts[draft] = known
        return known[2]


def _compared(target: PreTrainedModel, draft: PreTrainedModel, one: Source, other: Source) -> Pairing:
    if one.tokenizer is None and other.tokenizer is None and _is_one_file(one, other):
        return Pairing(is_known=True, has_target=True)
    target_tokenizer = _found(one)
    draft_tokenizer = _found(other) if target_tokenizer is not None else None
    if target_tokenizer is None or draft_tokenizer is None:
        return Pairing(has_target=target_tokenizer is not None)
    try:
        spaces = compare(
            target_tokenizer,
            draft_tokenizer,
            target_size=_num_ids(target),
            draft_size=_num_ids(draft),
            target_eos_ids=_ends(target),
            draft_eos_ids=_ends(draft),
        )
    except Exception:  # noqa: BLE001  tokenizers of other makes may lack anything, and then count as not found
        return Pairing(has_target=True)
    return Pairing(spaces=spaces if spaces.kind != "same" else None, is_known=True, has_target=True)


def _num_ids(model: PreTrainedModel) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def _ends(model: PreTrainedModel) -> tuple[int, ...]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list | tuple) else (() if ends is None else (int(ends),))


def _found(source: Source) -> Any:
    """Return a tokenizer, None where there is none on this machine that can be used."""
    if source.tokenizer is not None:
        tokenizer = _inner(source.tokenizer)
    else:
        tokenizer = local_tokenizer(source.name, source.revision, trust_remote_code=source.trust_remote_code)
    return tokenizer if callable(getattr(tokenizer, "get_vocab", None)) else None


def local_tokenizer(name: str | None, revision: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that belongs to a model's name, if it is on this machine; None otherwise."""
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=revision or "main", local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception:  # noqa: BLE001  without one there is nothing to compare, whatever the reason
        return None


def _inner(tokenizer: Any) -> Any:
    """Return a tokenizer; a processor holds that of its text."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _is_one_file(one: Source, other: Source) -> bool:
    """Return whether both tokenizers are stored in the same bytes; then none of them needs to be read."""
    if not one.name or not other.name:
        return False
    if (one.name, one.revision) == (other.name, other.revision):
        return True
    try:
        paths = [
            cached_file(source.name, WHOLE_TOKENIZER, revision=source.revision, local_files_only=True)
            for source in (one, other)
        ]
        return None not in paths and filecmp.cmp(str(paths[0]), str(paths[1]), shallow=False)
    except (OSError, ValueError):
        # No such file, or a name that can be none of a repository's.
        return False
