"""Prepared forwards, kept from one call to the next with the model they belong to, and lent to one call at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.engine.layout import Model, layout_of
from hf_specdec.engine.static import StaticForward, refusal_of_static
from hf_specdec.placement import device_of

_Kept = dict[Hashable, StaticForward]
_Models = weakref.WeakKeyDictionary[Any, _Kept]
_kept: weakref.WeakKeyDictionary[Any, _Models] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Runner:
    """How a model's forwards run in a call: `kind` as in `SpeculativeConfig`, and why not otherwise.

    `static` is what prepares them, None where the model runs as usual.
    """

    kind: str
    reason: str = ""
    static: StaticForward | None = None

    @property
    def told(self) -> tuple[str, str]:
        """What became of it: the runner in the end, and why it is not the one that was meant."""
        if self.static is None:
            return self.kind, self.reason
        if self.static.reason:
            return "eager", self.static.reason
        if not self.static.num_uses:
            return "eager", "no shape came often enough to be prepared"
        return self.kind, ""


EAGER = Runner("eager")


@contextmanager
def lent_runner(target: Model, model: Model, wanted: str, lane: str) -> Iterator[Runner]:
    """Lend what runs a model's forwards, for one call; a second call at the same time gets one of its own.

    Args:
        target: The model whose `generate` was called.
        model: That, or its draft.
        wanted: "auto", "eager", "compiled" or "cuda_graph".
        lane: "ragged" or "compatible"; only the first has shapes that repeat.
    """
    kind = chosen_kind(model, wanted)
    if kind == "eager":
        yield EAGER
        return
    reason = _refusal(model, kind, lane)
    if reason:
        yield Runner("eager", reason)
        return
    key = _circumstances(model, kind)
    with _lock:
        static = _of(target, model).pop(key, None)
    if static is None:
        static = StaticForward(model, kind, is_draft=model is not target)
    static.start_call(model)
    try:
        yield Runner(kind, "", static)
    finally:
        static.end_call()
        with _lock:
            _of(target, model)[key] = static


def chosen_kind(model: Model, wanted: str) -> str:
    """Return the runner that "auto" stands for with a model, any other as it is."""
    if wanted != "auto":
        return wanted
    # Compiling takes minutes where capturing takes seconds, so it is for those who ask.
    return "cuda_graph" if device_of(model).type == "cuda" else "eager"


def forget_prepared(target: Model | None) -> None:
    """Free the prepared forwards of one target and its drafts, or of all."""
    with _lock:
        if target is None:
            _kept.clear()
        else:
            _kept.pop(target, None)


def _of(target: Model, model: Model) -> _Kept:
    return _kept.setdefault(target, weakref.WeakKeyDictionary()).setdefault(model, {})


def _refusal(model: Model, kind: str, lane: str) -> str:
    if lane != "ragged":
        return f"the {lane} lane has no shapes that repeat"
    if model.training:
        return "it is in training mode"
    return refusal_of_static(model, kind)


def _circumstances(model: Model, kind: str) -> Hashable:
    """Return what a prepared forward depends on beside its model's weights and its inputs."""
    device = device_of(model)
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    # The layout for another implementation of attention, which takes other masks.
    return kind, str(device), str(model.dtype), layout_of(model), torch.is_inference_mode_enabled(), autocast
