"""Tensors that a round fills anew instead of allocating them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Tensor = torch.Tensor


class Scratch:
    """Buffers by name, grown to the largest use so far; what one holds is lost when its name is asked for again."""

    def __init__(self) -> None:
        """Start without any."""
        self._buffers: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor of `shape` on the device of `like`, and of its dtype unless told otherwise."""
        dtype = dtype or like.dtype
        last = self._last.get(name)
        if last is not None and last.shape == shape and last.dtype == dtype and last.device == like.device:
            return last
        num_elements = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_elements or (buffer.dtype, buffer.device) != (dtype, like.device):
            buffer = self._buffers[name] = torch.empty(num_elements, dtype=dtype, device=like.device)
        self._last[name] = view = buffer[:num_elements].view(shape)
        return view


class FreshScratch(Scratch):
    """Allocates every time, for those who keep what they are given."""

    def take(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor."""
        return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)


FRESH = FreshScratch()
"""Holds nothing, so one is enough for everybody."""


def in_float32(logits: Tensor, device: torch.device, scratch: Scratch, name: str) -> Tensor:
    """Return logits as they are where that will do, else copied into `scratch`, under `name`."""
    if logits.dtype == torch.float32 and logits.device == device:
        return logits
    copy = scratch.take(name, logits.shape, torch.empty(0, device=device))
    return copy.copy_(logits)
