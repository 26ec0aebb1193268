"""What is known of a pair from earlier calls, kept with the target and the draft it was learned of.

It lives in this process only, in nobody's configuration, and goes when either model goes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_specdec.controller import AdaptiveDraftLength
from hf_specdec.health import DraftHealth

# Settings that decide how well a draft does, since they shape the law that both models draw from.
SHAPING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Per pair; a service that lets its users choose temperatures would collect them without end.
MOST_SETTINGS = 32

_Settings = dict[Hashable, AdaptiveDraftLength]
_Drafts = weakref.WeakKeyDictionary[PreTrainedModel, _Settings]
_learned: weakref.WeakKeyDictionary[PreTrainedModel, _Drafts] = weakref.WeakKeyDictionary()
_Healths = weakref.WeakKeyDictionary[PreTrainedModel, DraftHealth]
_healths: weakref.WeakKeyDictionary[PreTrainedModel, _Healths] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def sampling_key(
    config: GenerationConfig,
    verification: str,
    *,
    is_lockstep: bool,
    num_rows: int,
    token_space: str = "same",
    runners: tuple[str, str] = ("eager", "eager"),
) -> Hashable:
    """Return what tells calls apart that should not learn from each other.

    Args:
        config: As the host resolved it.
        verification: "block" or "token".
        is_lockstep: Whether all rows commit the same number of tokens; then it matters how many they are.
        num_rows: Rows in the batch.
        token_space: "same", "shared" or "text".
        runners: How forwards of target and draft run; one tells nothing of the times of another.
    """
    shape = tuple(getattr(config, name, None) for name in SHAPING) if config.do_sample else ()
    return shape, verification if config.do_sample else "", num_rows if is_lockstep else 0, token_space, runners


@contextmanager
def lent_controller(
    target: PreTrainedModel, draft: PreTrainedModel, key: Hashable, hints: Mapping[str, Any] | None
) -> Iterator[AdaptiveDraftLength]:
    """Lend the pair's controller for one text; a second text at the same time gets one of its own."""
    with _lock:
        controller = _settings_of(target, draft).pop(key, None)
    if controller is None:
        controller = AdaptiveDraftLength(hints)
    controller.start_text()
    try:
        yield controller
    finally:
        with _lock:
            settings = _settings_of(target, draft)
            settings[key] = controller
            while len(settings) > MOST_SETTINGS:
                settings.pop(next(iter(settings)))


def health_of(
    target: PreTrainedModel, draft: PreTrainedModel, quantization: str, suspicions: tuple[str, ...]
) -> DraftHealth:
    """Return the pair's record of the draft's guesses, a new one for a new pair.

    Args:
        target: The target.
        draft: The draft.
        quantization: How the draft's weights are stored.
        suspicions: What was found when the draft was loaded.
    """
    with _lock:
        healths = _healths.setdefault(target, weakref.WeakKeyDictionary())
        return healths.setdefault(draft, DraftHealth(quantization, suspicions))


def forget_learned(target: PreTrainedModel | None) -> None:
    """Forget what was learned of one target, or of all."""
    with _lock:
        if target is None:
            _learned.clear()
            _healths.clear()
        else:
            _learned.pop(target, None)
            _healths.pop(target, None)


def _settings_of(target: PreTrainedModel, draft: PreTrainedModel) -> _Settings:
    return _learned.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
