"""A key-value cache whose rows have lengths of their own, and its exchange with the host's caches.

A round writes K+1 tokens per row and keeps a different number of them in each row. Here a row's tokens lie in
fixed slots of a preallocated buffer, and the write position is given with each forward, so that rolling back is only
starting the next write further left: nothing is copied, cropped or padded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

Tensor = torch.Tensor
# Capacity grows in steps of this many slots at least, so that short outputs never reallocate.
GROWTH = 64


@dataclass(slots=True)
class Cursor:
    """Where the current forward writes, shared by all layers of one cache.

    `start` is the common first slot, or None when rows start at slots of their own (`starts`, `[B]`); `end` is one
    past the last slot that any row writes; `num_tokens` is the number of tokens each row writes. `slots` `[B, T]` says
    it all in a tensor, for forwards that are prepared once for many; then `end` is one past the last slot they look at.
    """

    start: int | None = 0
    starts: Tensor | None = None
    num_tokens: int = 0
    end: int = 0
    capacity: int = 0
    slots: Tensor | None = None
    num_moves: int = 0
    index: dict[tuple[int, int, torch.device], Tensor] | None = None

    def flat_index(self, num_heads: int, capacity: int, device: torch.device) -> Tensor:
        """Return the positions `[B * num_heads * num_tokens]` of the written slots in a flattened buffer."""
        assert self.starts is not None, "a common start needs no index"
        if self.index is None:
            self.index = {}
        # Layers may lie on several devices.
        key = (num_heads, capacity, device)
        if key not in self.index:
            slots = self.starts.to(device)[:, None] + torch.arange(self.num_tokens, device=device)  # [B, T]
            planes = torch.arange(len(self.starts) * num_heads, device=device).view(-1, num_heads, 1)  # [B, H, 1]
            self.index[key] = (planes * capacity + slots[:, None, :]).flatten()
        return self.index[key]


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer in a buffer `[B, H, capacity, D]`."""

    is_sliding = False

    def __init__(self, cursor: Cursor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cursor = cursor

    # The host's class allows None, which ends with the first states.
    keys: Any
    values: Any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers (garbage that happens to be NaN would leak through masked attention)."""
        self.keys = _buffer_like(key_states, self.cursor.capacity)
        self.values = _buffer_like(value_states, self.cursor.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, H, T, D]` states at the cursor and return all states up to its end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None, "initialised above"
        assert self.values is not None, "initialised above"
        if self.keys.shape[2] < self.cursor.end:
            self.grow(self.cursor.capacity)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            self._write(buffer, states)
        end = self.cursor.end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _write(self, buffer: Tensor, states: Tensor) -> None:
        cursor = self.cursor
        if cursor.slots is not None:
            _scatter(buffer, cursor.slots, states)
            return
        if cursor.start is not None:
            buffer[:, :, cursor.start : cursor.end].copy_(states)
            return
        _, num_heads, capacity, width = buffer.shape
        index = cursor.flat_index(num_heads, capacity, buffer.device)
        buffer.view(-1, width).index_copy_(0, index, states.reshape(-1, width).to(buffer.dtype))

    def grow(self, capacity: int) -> None:
        """Move to buffers of `capacity` slots."""
        self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows` (indices `[kept]`), in that order."""
        self.keys = self.keys.index_select(0, rows.to(self.keys.device))
        self.values = self.values.index_select(0, rows.to(self.values.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of visible slots and their offset, 0."""
        return self.cursor.end, 0

    def get_seq_length(self) -> int:
        """Return the number of slots before those being written."""
        return self.cursor.end - self.cursor.num_tokens

    def get_max_length(self) -> int:
        """Return -1: the buffer grows."""
        return -1


class SteadyLayer(RaggedLayer):
    """The same in buffers that stay where they are for as long as they suffice, from one text to the next."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(cursor)
        self.buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the first rows of the buffers, zeroed, or allocate larger ones."""
        states = key_states, value_states
        if self.buffers is None or not all(map(self._holds, self.buffers, states)):
            super().lazy_initialization(key_states, value_states)
            self._move()
            return
        self.keys, self.values = (buffer[: len(key_states)].zero_() for buffer in self.buffers)
        self.is_initialized = True

    def _holds(self, buffer: Tensor, states: Tensor) -> bool:
        num_rows, *shape = buffer.shape
        batch, num_heads, _, width = states.shape
        is_same = (buffer.dtype, buffer.device) == (states.dtype, states.device)
        return is_same and batch <= num_rows and shape == [num_heads, self.cursor.capacity, width]

    def grow(self, capacity: int) -> None:
        """Move to buffers of `capacity` slots."""
        super().grow(capacity)
        self._move()

    def keep(self, rows: Tensor) -> None:
        """Keep only `rows`, moved to the front of the buffers."""
        assert self.buffers is not None, "a layer with rows has them"
        kept = []
        for buffer, states in zip(self.buffers, (self.keys, self.values), strict=True):
            moved = states.index_select(0, rows.to(states.device))
            kept.append(buffer[: len(moved)].copy_(moved))
        self.keys, self.values = kept

    def _move(self) -> None:
        self.buffers = (self.keys, self.values)
        self.cursor.num_moves += 1


class RaggedCache(Cache):
    """One layer per layer of the model; `begin` sets where the next forward writes."""

    def __init__(self, num_layers: int, capacity: int, layer: type[RaggedLayer] = RaggedLayer) -> None:
        self.cursor = Cursor(capacity=capacity)
        self.layer = layer
        super().__init__(layers=[layer(self.cursor) for _ in range(num_layers)])

    def empty(self) -> None:
        """Forget all tokens."""
        for layer in self.ragged_layers:
            layer.is_initialized = False

    def begin_at(self, slots: Tensor, end: int) -> None:
        """Let the next forward write at `slots` `[B, T]` and look at the first `end` slots, whose buffers suffice."""
        cursor = self.cursor
        cursor.slots, cursor.num_tokens, cursor.end = slots, slots.shape[1], end

    def end_at(self) -> None:
        """End what `begin_at` began, and forget numbers that a compiler would have to keep apart."""
        self.cursor.slots = None
        self.cursor.num_tokens = self.cursor.end = 0

    def begin(self, num_tokens: int, *, start: int | None, starts: Tensor | None, end: int) -> None:
        """Set the slots of the next forward.

        Args:
            num_tokens: Tokens each row writes.
            start: The first slot when it is the same in all rows, else None.
            starts: First slots per row, `[B]`, needed only when `start` is None.
            end: One past the last slot any row writes.
        """
        cursor = self.cursor
        cursor.start, cursor.starts, cursor.num_tokens, cursor.end = start, starts, num_tokens, end
        cursor.index = None
        # Those of a prepared forward that broke off would be written to instead.
        cursor.slots = None
        if end > cursor.capacity:
            is_steady = issubclass(self.layer, SteadyLayer)
            cursor.capacity = steady_capacity(end) if is_steady else max(2 * cursor.capacity, _rounded(end))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write one layer's states; layers appear as the model first names them."""
        while len(self.layers) <= layer_idx:
            self.layers.append(self.layer(self.cursor))
        return self.ragged_layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @property
    def ragged_layers(self) -> list[Any]:
        """The layers, all of them `RaggedLayer`."""
        return self.layers

    def select_rows(self, rows: Tensor) -> None:
        """Keep only `rows` (indices `[kept]`), in that order."""
        for layer in self._filled():
            layer.keep(rows)

    def copy_row(self, row: int) -> list[tuple[Tensor, Tensor] | None]:
        """Return a copy of one row of every layer, None for layers that hold nothing."""
        return [
            (layer.keys[row].clone(), layer.values[row].clone()) if layer.is_initialized else None
            for layer in self.ragged_layers
        ]

    def paste_rows(self, rows: list[list[tuple[Tensor, Tensor] | None]]) -> None:
        """Replace the batch by copied rows, which may differ in capacity."""
        for position, layer in enumerate(self.ragged_layers):
            copies = [copy for row in rows if (copy := row[position]) is not None]
            if not copies:
                continue
            capacity = max(keys.shape[1] for keys, _ in copies)
            layer.keys = torch.stack([_grown(keys[None], capacity)[0] for keys, _ in copies])
            layer.values = torch.stack([_grown(values[None], capacity)[0] for _, values in copies])
            layer.is_initialized = True

    def _filled(self) -> list[Any]:
        return [layer for layer in self.ragged_layers if layer.is_initialized]


def refusal_of(cache: Any) -> str | None:
    """Return why the ragged lane cannot take over a host's cache, or None when it can."""
    if not isinstance(cache, Cache):
        return f"the model keeps its state in {type(cache).__name__}, which is no transformers `Cache`"
    if getattr(cache, "offloading", False):
        return "an offloaded cache would have to stay on the device"
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, RaggedLayer) and holds_state(
            layer
        ):
            return f"the cache has layers of type {type(layer).__name__}, which cannot be rolled back row by row"
    return None


def holds_state(layer: Any) -> bool:
    """Return whether a layer keeps anything; those that share another layer's keys and values do not."""
    # By name: transformers 5.17 has no such class.
    return type(layer).__name__ != "DummyLayer"


def take_over(
    cache: Cache, *, capacity: int, keep: bool, new_cache: Callable[[int, int], RaggedCache] = RaggedCache
) -> tuple[RaggedCache, int]:
    """Copy a host's cache into a ragged one.

    Args:
        cache: A cache that `refusal_of` accepts, filled by a prefill.
        capacity: Slots to allocate per row.
        keep: Whether the caller still needs `cache`; if not, its layers are freed one by one.
        new_cache: Makes an empty cache of so many layers and so many slots at least.

    Returns:
        The ragged cache and the number of filled slots, the same in all rows.
    """
    length = max((_filled_length(layer) for layer in cache.layers), default=0)
    ragged = new_cache(len(cache.layers), max(capacity, _rounded(length)))
    host_layers: list[Any] = cache.layers
    for ours, theirs in zip(ragged.ragged_layers, host_layers, strict=True):
        if not holds_state(theirs) or not theirs.is_initialized or theirs.keys is None:
            continue
        ours.lazy_initialization(theirs.keys, theirs.values)
        # A sliding layer has dropped its oldest tokens; their slots stay zero and masked.
        stored = min(theirs.keys.shape[2], length)
        first = length - stored
        ours.keys[:, :, first:length] = theirs.keys[:, :, :stored]
        ours.values[:, :, first:length] = theirs.values[:, :, :stored]
        if not keep:
            theirs.keys = theirs.values = None
            theirs.is_initialized = False
    return ragged, length


def hand_back(ragged: RaggedCache, cache: Cache, length: int) -> None:
    """Fill a host's cache with the first `length` slots of every row, as plain decoding would leave it."""
    host_layers: list[Any] = cache.layers
    while len(host_layers) < len(ragged.layers):
        host_layers.append(DynamicLayer())
    for ours, theirs in zip(ragged.ragged_layers, host_layers, strict=True):
        if not ours.is_initialized or not holds_state(theirs):
            continue
        keys, values = ours.keys[:, :, :length], ours.values[:, :, :length]
        if not theirs.is_initialized:
            theirs.lazy_initialization(keys, values)
        kind = type(theirs)
        if kind is StaticLayer:
            theirs.keys[:, :, :length] = keys
            theirs.values[:, :, :length] = values
            theirs.cumulative_length.fill_(length)
            continue
        if kind is DynamicSlidingWindowLayer:
            theirs.cumulative_length = length
            window = theirs.sliding_window - 1
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        theirs.keys, theirs.values = keys.clone(), values.clone()


def _scatter(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write `[B, H, T, D]` states at `slots` `[B, T]`, in a way that compilers know how to do in place."""
    states = states.to(buffer.dtype)
    if len(slots) == 1:
        buffer.index_copy_(2, slots[0], states)
        return
    rows = torch.arange(len(slots), device=buffer.device)[:, None]
    buffer[rows, :, slots] = states.transpose(1, 2)


def _filled_length(layer: Any) -> int:
    if not holds_state(layer) or not layer.is_initialized:
        return 0
    length = layer.get_seq_length()
    # sync: a static layer keeps its length on the device; read once, when the cache is taken over.
    return int(length.item()) if isinstance(length, Tensor) else length


def _buffer_like(states: Tensor, capacity: int) -> Tensor:
    batch, num_heads, _, width = states.shape
    return states.new_zeros(batch, num_heads, capacity, width)


def _grown(buffer: Tensor, capacity: int) -> Tensor:
    if buffer.shape[2] >= capacity:
        return buffer
    grown = _buffer_like(buffer, capacity)
    grown[:, :, : buffer.shape[2]] = buffer
    return grown


def bucket_of(length: int) -> int:
    """Return the smallest bucket that holds `length` slots: powers of two times the smallest."""
    bucket = GROWTH
    while bucket < length:
        bucket *= 2
    return bucket


def steady_capacity(length: int) -> int:
    """Return the slots of buffers that are looked at bucket by bucket, for texts of `length`.

    They are more than the largest bucket: to a compiler, the whole would be a shape of its own.
    """
    return bucket_of(length) + GROWTH


def _rounded(length: int) -> int:
    return -(-length // GROWTH) * GROWTH
