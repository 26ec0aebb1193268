"""The 4-D masks that the ragged lane gives a model: which slots of the cache each query may attend to."""

from __future__ import annotations

from typing import Any

import torch

from hf_specdec.engine.layout import MASKED_BY_US, Layout

Tensor = torch.Tensor
# Queries per forward that the common case below is prepared for.
MOST_QUERIES = 32


class CausalBand:
    """Masks of rows that start at one slot and have no padding: windows into one tensor, nothing to compute."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Prepare for caches of `capacity` slots."""
        self.capacity = capacity
        columns = torch.arange(2 * capacity, device=device)
        band = columns <= capacity + torch.arange(MOST_QUERIES, device=device)[:, None]
        self._band = band[None, None]  # [1, 1, T, 2 * capacity]

    def mask(self, start: int, num_tokens: int, end: int) -> Tensor:
        """Return `[1, 1, T, S]` for queries at `start`, `start + 1`, … over the first `end` slots."""
        return self._band.narrow(2, 0, num_tokens).narrow(3, self.capacity - start, end)


def masks_over(
    layout: Layout,
    slots: Tensor,
    keys: Tensor,
    *,
    visible: Tensor | None,
    offset: Tensor | None,
    dtype: torch.dtype,
    is_exact: bool,
    num_rows: int | None = None,
) -> Any:
    """Return a mask, or a dict of masks where layers differ in kind, None where nothing is hidden.

    Args:
        layout: The model's.
        slots: Of the queries, `[B or 1, T]`.
        keys: The slots that are looked at, `[S]`: 0, 1, ….
        visible: Which slots may be attended to at all, `[B, >= S]` bool, None for all.
        offset: Position minus slot, `[B, 1]`, None for 0.
        dtype: The model's.
        is_exact: Whether the last query sits in the last slot; otherwise those after it must be hidden.
        num_rows: Rows to spread the mask over, where a model makes biases of it; None leaves it at one for all.
    """
    if layout.attention not in MASKED_BY_US:
        return None
    settings = (layout, slots, keys, visible, offset, dtype, is_exact)
    if layout.layer_types is not None:
        return {kind: _mask(kind, *settings) for kind in layout.layer_types}
    mask = _mask("sliding_attention", *settings)
    return mask.expand(num_rows, -1, -1, -1) if num_rows is not None and mask is not None else mask


def is_plain_causal(layout: Layout, end: int) -> bool:
    """Return whether a model that looks at `end` slots of rows without padding needs no more than a causal band."""
    widths = (layout.sliding_window, layout.chunk_size)
    return layout.attention == "sdpa" and not any(width is not None and end > width for width in widths)


def _mask(
    kind: str,
    layout: Layout,
    slots: Tensor,
    keys: Tensor,
    visible: Tensor | None,
    offset: Tensor | None,
    dtype: torch.dtype,
    is_exact: bool,
) -> Tensor | None:
    window = layout.sliding_window if kind == "sliding_attention" else None
    chunk = layout.chunk_size if kind == "chunked_attention" else None
    num_keys = keys.shape[0]
    is_narrow = any(width is not None and num_keys > width for width in (window, chunk))
    if is_exact and slots.shape == (1, 1) and visible is None and not is_narrow:
        return None
    mask = keys <= slots[..., None]  # [B or 1, T, S]
    if is_narrow and window is not None:
        mask = mask & (keys > slots[..., None] - window)
    if is_narrow and chunk is not None:
        # Chunks are counted from a row's first token, not from its padding.
        shift = 0 if offset is None else offset
        mask = mask & ((keys[None] + shift)[:, None] // chunk == (slots + shift)[..., None] // chunk)
    if visible is not None:
        # A query at a padding slot sees itself, so that no row of the softmax is empty.
        mask = mask & (visible[:, None, :num_keys] | (keys == slots[..., None]))
    mask = mask[:, None]  # [B or 1, 1, T, S]
    if layout.attention == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    return mask
