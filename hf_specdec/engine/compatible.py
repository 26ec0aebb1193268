"""Run a target or a draft on the host's own cache: the compatible lane.

For models whose state cannot be held per row: recurrent ones, those with an encoder, with caches or positions of their
own. All rows have the same number of columns. Inputs are prepared by the model's own `prepare_inputs_for_generation`,
as in plain decoding.

Rejected tokens are taken back in one of two ways. Caches of keys and values are cropped. Anything else is set back to a
snapshot from before the round, and the tokens kept since then are fed again at the head of the next forward ("replay").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_specdec.engine.cache import holds_state
from hf_specdec.engine.host import Prefill, filled_cache, lengthened
from hf_specdec.engine.inside import continued_convolutions, copy_state, put_back, stateful_modules
from hf_specdec.engine.layout import Model, layout_of, windows_of
from hf_specdec.engine.scans import continued_scans, modules_with_scans
from hf_specdec.engine.sequences import Span
from hf_specdec.engine.snapshot import freeze, thaw
from hf_specdec.placement import device_of

Tensor = torch.Tensor
# A longer replay gets a forward of its own, after which the snapshot stands at its end.
LONGEST_REPLAY = 16
# Window layers outside the host's common ones that were compared with plain decoding past their windows.
EXAMINED = frozenset({"DeepseekV4CSACache", "DeepseekV4HCACache"})
# Layers that keep every token.
UNBOUNDED: frozenset[type] = frozenset({DynamicLayer, StaticLayer})
# Results of a forward that are no state and would only occupy memory.
NOT_STATE = frozenset({"attentions", "cross_attentions", "decoder_attentions", "hidden_states", "logits", "loss"})


class CompatibleLane:
    """One model on its own cache, all rows at the same column."""

    def __init__(self, model: Model, prefill: Prefill, *, takes_back: bool = True, is_draft: bool = False) -> None:
        """Continue from a prefill.

        Args:
            model: Target or draft.
            prefill: What the host prepared, and what the prompt's forward returned.
            takes_back: Whether tokens may be rejected; without that the cache is used precisely as in plain decoding.
            is_draft: Whether several forwards may run before one is taken back.
        """
        self.model = model
        self.device = device_of(model)
        self.layout = layout_of(model)
        self.num_forwards = 0
        self.num_replayed_tokens = 0
        self.num_flushes = 0
        self._tokens = prefill.token_ids
        self._fed = prefill.token_ids.shape[1]
        self._settled = self._fed
        self._state = _state_of(prefill.outputs)
        # Some models return no cache, but fill the one they are given.
        self._given_cache = filled_cache(prefill.model_kwargs)
        self._modules = stateful_modules(model)
        # The arguments of `forward` by the column up to which they reach; which tokens stand there does not matter.
        self._arguments = {self._fed: dict(prefill.model_kwargs)}
        self._scans = modules_with_scans(model)
        self._snapshot: Any = None
        self._snapshot_at = -1
        is_croppable = takes_back and not getattr(model, "_is_stateful", False)
        # What has left a window comes back by a crop only right after the forward that pushed it out.
        kinds = UNBOUNDED if is_draft else UNBOUNDED | {DynamicSlidingWindowLayer}
        self._croppable = croppable_cache(self._state, kinds) if is_croppable else None
        if self._croppable is not None:
            self._croppable.activate_past_recording()
        mask = prefill.model_kwargs.get("attention_mask") if not model.config.is_encoder_decoder else None
        # An earlier turn fills slots that are no columns.
        self.shift = max(0, mask.shape[1] - self._fed) if mask is not None and mask.ndim == 2 else 0

    @property
    def windows(self) -> list[int | None] | None:
        """See `windows_of`."""
        return windows_of(self.model, self.layout)

    def settle(self, column: int) -> None:
        """Promise that the tokens before `column` will never be taken back."""
        self._settled = column

    def forward(
        self, token_ids: Tensor, span: Span, *, num_logits: int, collect: Mapping[str, bool] | None = None
    ) -> Any:
        """Feed `token_ids` `[B, T]` at the columns of `span`, which all rows share; see `Lane.forward`."""
        assert span.start is not None, "rows of this lane move together"
        start = span.start
        end = start + token_ids.shape[1]
        self._go_back_to(start)
        # Tokens stay where the prompt's masks are: where a model wants both elsewhere, the host moves both.
        self._tokens = torch.cat([self._tokens[:, :start], token_ids.to(self._tokens.device)], dim=1)
        if self._fed < start and (collect or start - self._fed > LONGEST_REPLAY):
            self._feed(start, num_logits=1)
            self.num_flushes += 1
        if self._croppable is None and self._fed == start <= self._settled:
            self._snapshot_at = start if end > self._settled else -1
            self._snapshot = self._frozen() if end > self._settled else None
        self.num_replayed_tokens += start - self._fed
        return self._feed(end, num_logits=num_logits, collect=collect)

    def select_rows(self, rows: Tensor) -> None:
        """Rows of this lane never leave it."""
        raise AssertionError("rows of the compatible lane stay until all have finished")

    def come_home(self, token_ids: Tensor) -> Any:
        """Bring the host's cache to hold exactly `token_ids` `[B, L]`, and return it."""
        length = token_ids.shape[1]
        self._go_back_to(length)
        self._tokens = token_ids.to(self._tokens.device)
        if self._fed < length:
            self._feed(length, num_logits=1)
        if self._croppable is not None:
            stop_recording(self._croppable)
        return self._cache

    @property
    def _cache(self) -> Any:
        cache = filled_cache(self._state)
        return self._given_cache if cache is None else cache

    def _frozen(self) -> tuple[Any, Any, Any]:
        """Return a snapshot of the last outputs, of a cache that is not among them, and of the modules."""
        # Tensors among the outputs are results that nothing writes into.
        outputs = {name: value if isinstance(value, Tensor) else freeze(value) for name, value in self._state.items()}
        given_cache = freeze(self._given_cache) if filled_cache(self._state) is None else None
        return outputs, given_cache, copy_state(self._modules)

    def _go_back_to(self, column: int) -> None:
        """Take back what was fed at `column` and later; tokens before it may have to be fed again."""
        if self._croppable is not None:
            # Also when nothing is taken back: a recording cache keeps everything until it is cropped.
            self._croppable.crop(min(0, column - self._fed))
            self._fed = min(self._fed, column)
        elif column < self._fed:
            assert 0 <= self._snapshot_at <= column, "a snapshot stands before every token that can be rejected"
            outputs, given_cache, inside = self._snapshot
            self._state = type(self._state)(**thaw(outputs))
            thaw(given_cache)
            put_back(inside)
            self._fed = self._snapshot_at

    def _feed(self, end: int, *, num_logits: int, collect: Mapping[str, bool] | None = None) -> Any:
        """Run the model on the known tokens from where its state ends up to column `end`."""
        arguments = self._arguments_until(end)
        inputs = self.model.prepare_inputs_for_generation(
            self._tokens[:, :end], next_sequence_length=end - self._fed, **arguments
        )
        if self.layout.accepts_logits_to_keep:
            # Set last, for some models put in what they need for one token.
            inputs["logits_to_keep"] = num_logits
        inputs.update(collect or {})
        has_several = end - self._fed > 1
        names = self._scans if has_several else frozenset()
        with (
            continued_scans(names, self._cache),
            continued_convolutions(self._modules if has_several else ()),
        ):
            outputs = self.model(**inputs, return_dict=True)
        self.num_forwards += 1
        self._fed = end
        self._state = _state_of(outputs)
        oldest = self._snapshot_at if self._snapshot_at >= 0 else self._settled - 1
        self._arguments = {at: value for at, value in self._arguments.items() if at >= oldest or at == end}
        return outputs

    def _arguments_until(self, end: int) -> dict[str, Any]:
        """Let the model itself lengthen masks, positions and token types, one column after the other."""
        # The last step is never left out: it also hands over the state.
        known = max(at for at in self._arguments if at < end)
        for column in range(known + 1, end + 1):
            self._arguments[column] = lengthened(self.model, self._state, self._arguments[column - 1])
        return dict(self._arguments[end])


def croppable_cache(state: Mapping[str, Any], kinds: frozenset[type]) -> Any:
    """Return the cache of a forward's outputs if it has layers of these kinds only, whose end can be cut off."""
    cache = filled_cache(state)
    self_attention = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if type(self_attention) not in (DynamicCache, StaticCache):
        # A subclass may hold more than its layers do.
        return None
    is_croppable = all(type(layer) in kinds or not holds_state(layer) for layer in self_attention.layers)
    return cache if is_croppable else None


def foreign_windows(state: Mapping[str, Any]) -> str:
    """Return the kind of a layer that drops tokens by rules of its own, empty if there is none.

    Such rules may hold for single tokens alone, which only a text longer than the window would show.
    """
    for layer in getattr(filled_cache(state), "layers", []):
        kind = type(layer)
        has_window = isinstance(layer, DynamicSlidingWindowLayer | StaticSlidingWindowLayer)
        if has_window and not kind.__module__.startswith("transformers.cache_utils") and kind.__name__ not in EXAMINED:
            return kind.__name__
    return ""


def stop_recording(cache: Any) -> None:
    """Let a cache forget what has left its windows, as before it entered a lane."""
    self_attention = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers: list[Any] = self_attention.layers
    for layer in layers:
        if getattr(layer, "record_past", False):
            layer.record_past = False


def _state_of(outputs: Any) -> Any:
    """Return a forward's outputs without what is only a result."""
    return type(outputs)(**{name: value for name, value in outputs.items() if name not in NOT_STATE})
