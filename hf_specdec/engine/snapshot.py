"""Copies of a model's running state, for models that cannot take a token back.

A recurrent state is one tensor per layer that every token changes for good. It is copied before tokens are fed that may
be rejected, and put back when they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer, StaticLayer

Tensor = torch.Tensor
# Shared, never part of the state.
_OPAQUE = (torch.nn.Module, PreTrainedConfig, torch.dtype, torch.device, FunctionType, MethodType, ModuleType, type)


@dataclass(frozen=True, slots=True)
class _Frozen:
    """An object of the host's (a cache, a layer) with copies of its attributes."""

    subject: Any
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Again:
    """An object that is already part of the snapshot."""

    subject: Any


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor's copy, or with `is_shared` the tensor itself, since the host writes nothing into it that matters."""

    tensor: Tensor
    is_shared: bool


def freeze(value: Any) -> Any:
    """Return a snapshot of caches, tensors and containers of them; other values are kept as they are."""
    return _freeze(value, set())


def thaw(frozen: Any) -> Any:
    """Return the state that was frozen, caches being the same objects as then; the snapshot can be used again."""
    if isinstance(frozen, _Copied):
        return frozen.tensor if frozen.is_shared else frozen.tensor.clone()
    if isinstance(frozen, _Again):
        return frozen.subject
    if isinstance(frozen, _Frozen):
        attributes = {name: thaw(value) for name, value in frozen.attributes.items()}
        frozen.subject.__dict__.clear()
        frozen.subject.__dict__.update(attributes)
        return frozen.subject
    if type(frozen) is dict:
        return {key: thaw(value) for key, value in frozen.items()}
    if type(frozen) in (list, tuple):
        return type(frozen)(thaw(value) for value in frozen)
    return frozen


def _freeze(value: Any, seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return _Copied(value.clone(), is_shared=False)
    if type(value) is dict:
        return {key: _freeze(item, seen) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_freeze(item, seen) for item in value)
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return value
    if id(value) in seen:
        return _Again(value)
    seen.add(id(value))
    return _Frozen(value, {name: _freeze_attribute(value, name, item, seen) for name, item in vars(value).items()})


def _freeze_attribute(owner: Any, name: str, value: Any, seen: set[int]) -> Any:
    # A dynamic layer concatenates into new tensors, and what a static one writes past its length means nothing: holding
    # the tensors themselves is a snapshot that costs nothing.
    is_replaced = isinstance(owner, DynamicLayer) or type(owner) is StaticLayer
    if name in ("keys", "values") and is_replaced and isinstance(value, Tensor):
        return _Copied(value, is_shared=True)
    return _freeze(value, seen)
