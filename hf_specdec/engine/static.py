"""Forwards whose shapes repeat, over buffers that stay where they are, so that they can be compiled or captured.

One such forward reads tokens and the slot of each row's first one; everything else it needs (keys and values, which
slots are padding, how positions are counted) lies in buffers of `StaticForward`, which outlives a call of `generate`.
The cache is looked at up to a bucket's end, so at most twice as far as the text reaches; a mask hides what is beyond.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_specdec.engine.cache import RaggedCache, SteadyLayer, bucket_of, steady_capacity
from hf_specdec.engine.layout import MASKED_BY_US, Model, layout_of, tolerance_of
from hf_specdec.engine.masks import masks_over
from hf_specdec.engine.runners import RUNNERS, Function, Tensors
from hf_specdec.errors import in_short
from hf_specdec.placement import device_of

Tensor = torch.Tensor
StepForward = Callable[..., Tensor]
# A shape is worth its preparation once it has come so often in one call.
USES_BEFORE = {"compiled": 3, "cuda_graph": 1}
# Shapes that are compiled; the tokens of other counts are filled up to the next one.
COMPILED_COUNTS = (1, 2, 3, 5, 7, 9, 13, 17)
# Units kept at a time; a service that lets its users choose temperatures would collect them without end.
MOST_UNITS = 64


class StaticForward:
    """The prepared forwards of one model.

    Attributes:
        kind: "compiled" or "cuda_graph".
        reason: Why nothing is prepared any more; empty while all is well.
        num_prepared: Shapes that were compiled or captured so far.
    """

    def __init__(self, model: Model, kind: str) -> None:
        """Prepare nothing yet; `model` must be one that `refusal_of_static` accepts."""
        # What is kept with a model must not keep it.
        self._model = weakref.ref(model)
        self.tolerance = tolerance_of(model, is_draft=False)
        self.kind = kind
        self.layout = layout_of(model)
        self.device = device_of(model)
        self.reason = ""
        self.num_prepared = 0
        self.cache: RaggedCache | None = None
        self.visible: Tensor | None = None
        self.offset: Tensor | None = None
        self.slots = torch.empty(0, dtype=torch.long, device=self.device)
        self._entries: dict[Hashable, Function] = {}
        self._num_moves = 0
        self._weights = 0
        self._units: dict[Hashable, Function] = {}
        self.unit_reason = ""
        self._is_aside = False
        self._uses: Counter[Hashable] = Counter()
        self._trusted: set[Hashable] = set()

    def start_call(self, model: Model) -> None:
        """Begin to serve a call: weights and switches of `model` may have changed, so nothing is trusted."""
        self._trusted.clear()
        self._uses.clear()
        if self._is_aside:
            self.reason, self._is_aside = "", False
        weights = hash(tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())))
        if weights != self._weights:
            self._weights = weights
            self.reason = self.unit_reason = ""
            self._forget()

    def end_call(self) -> None:
        """Leave no text behind, and no buffers either that nobody will use again."""
        if self.cache is not None:
            self.cache.empty()
        if self.reason and not self._is_aside:
            self.cache = self.visible = self.offset = None

    def new_cache(self, num_layers: int, capacity: int) -> RaggedCache:
        """Return an empty cache of at least `capacity` slots, over the buffers of the last one where they suffice."""
        if self.cache is None or self.cache.cursor.capacity < capacity or len(self.cache.layers) < num_layers:
            self.cache = RaggedCache(num_layers, steady_capacity(capacity), layer=SteadyLayer)
            self._forget()
        self.cache.empty()
        return self.cache

    def adopt(self, visible: Tensor | None, offset: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Copy padding `[B, capacity]` and positions `[B, 1]` of a lane into buffers, and return them there."""
        assert self.cache is not None, "a lane has one"
        capacity = self.cache.cursor.capacity
        before = self.visible, self.offset, self.slots
        if len(self.slots) != capacity:
            self.slots = torch.arange(capacity, device=self.device)
        self.visible = _kept_in(self.visible, visible)
        self.offset = _kept_in(self.offset, offset)
        now = self.visible, self.offset, self.slots
        if any(old is not new for old, new in zip(before, now, strict=True)):
            self._forget()
        shown = None if visible is None or self.visible is None else self.visible[: len(visible)]
        counted = None if offset is None or self.offset is None else self.offset[: len(offset)]
        return shown, counted

    def logits(
        self, tokens: Tensor, starts: Tensor, *, end: int, num_logits: int, context: int | None
    ) -> Tensor | None:
        """Run a prepared forward.

        Args:
            tokens: `[B, T]`.
            starts: The slot of each row's first token, `[B]`.
            end: One past the last slot of any row.
            num_logits: Of the last positions.
            context: Positions that the model knows, None for any number.

        Returns:
            `[B, num_logits, V]`, good until the next forward of this shape; None where none is prepared: then the
            caller asks for a `trial`, and runs the model as usual.
        """
        key, num_more = self._key(tokens, end, num_logits, context)
        if key is None or key not in self._trusted:
            return None
        try:
            (logits,) = self._entries[key](self._model(), *self._inputs(tokens, starts, end, num_more))
        except Exception as error:  # noqa: BLE001  a compiler may have to compile again, and fail at that
            self.give_up(f"a forward that was {_DONE[self.kind]} failed ({_cause(error)})")
            return None
        return logits[:, -(num_logits + num_more) :][:, :num_logits]

    def trial(
        self, tokens: Tensor, starts: Tensor, *, end: int, num_logits: int, context: int | None
    ) -> tuple[Hashable, Tensor] | None:
        """Prepare a forward of this shape where it is worth it, and run it.

        What it wrote is not trusted either: run the model over the same slots next, and `judge` by its logits.
        """
        key, num_more = self._key(tokens, end, num_logits, context)
        if key is None or key in self._trusted:
            return None
        self._uses[key] += 1
        if key not in self._entries and self._uses[key] <= USES_BEFORE[self.kind]:
            return None
        model, inputs = self._model(), self._inputs(tokens, starts, end, num_more)
        try:
            if key not in self._entries:
                count = num_logits + num_more
                self._entries[key] = self._prepared(self._function(len(tokens), count), model, inputs)
            (logits,) = self._entries[key](model, *inputs)
        except Exception as error:  # noqa: BLE001  whatever a compiler does, the model itself is still there
            self.give_up(f"a forward could not be {_DONE[self.kind]} ({_cause(error)})")
            return None
        return key, logits[:, -(num_logits + num_more) :][:, :num_logits]

    def judge(self, tried: tuple[Hashable, Tensor], wanted: Tensor) -> None:
        """Trust what `trial` ran if it gave the `wanted` logits."""
        key, got = tried
        # sync: once per shape and call, to see that it does what the model does.
        difference, scale = torch.stack([(got - wanted).abs().max(), wanted.abs().max()]).tolist()
        if difference <= self.tolerance * max(scale, 1.0):
            self._trusted.add(key)
        else:
            self.give_up(f"a forward that was {_DONE[self.kind]} gave other logits (by {difference:.2g})")

    def give_up(self, reason: str) -> None:
        """Prepare nothing more, in later calls either, until the weights change; the model is run as usual."""
        self.reason = reason
        self._forget()

    def stand_aside(self, reason: str) -> None:
        """Let the model run as usual in this call."""
        if not self.reason:
            self.reason, self._is_aside = reason, True

    def _look_for_moves(self) -> None:
        assert self.cache is not None, "a lane has one"
        if self.cache.cursor.num_moves != self._num_moves:
            self._num_moves = self.cache.cursor.num_moves
            self._forget()

    def _forget(self) -> None:
        """Drop what was prepared: it reads and writes buffers that are no longer ours."""
        self._entries.clear()
        self._units.clear()
        self._trusted.clear()

    def _key(self, tokens: Tensor, end: int, num_logits: int, context: int | None) -> tuple[Hashable | None, int]:
        """Return what tells shapes apart, None where this one is not for us, and tokens to fill up with."""
        num_rows, num_tokens = tokens.shape
        num_more = 0
        if self.kind == "compiled":
            num_more = next((count for count in COMPILED_COUNTS if count >= num_tokens), num_tokens) - num_tokens
        assert self.cache is not None, "a lane has one"
        end += num_more
        is_beyond = bucket_of(end) > self.cache.cursor.capacity or (context is not None and end > context)
        if self.reason or is_beyond or num_tokens > COMPILED_COUNTS[-1]:
            return None, 0
        # A compiled forward reads up to any end.
        reach = None if self.kind == "compiled" else bucket_of(end)
        self._look_for_moves()
        return (num_rows, num_tokens + num_more, num_logits + num_more, reach), num_more

    def _inputs(self, tokens: Tensor, starts: Tensor, end: int, num_more: int) -> tuple[Tensor, Tensor, Tensor]:
        if num_more:
            tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, num_more)], dim=1)
        keys = self.slots[: bucket_of(end + num_more)]
        if self.kind == "compiled":
            torch._dynamo.maybe_mark_dynamic(keys, 0)
        # A view of tokens has any strides, and each would be another shape to a compiler.
        return tokens.clone(memory_format=torch.contiguous_format), starts, keys

    def unit(
        self, key: Hashable, build: Callable[[StepForward], Function], tokens: Tensor, starts: Tensor, end: int
    ) -> Tensors | None:
        """Run several forwards and what lies between them as one, where they can be captured.

        Args:
            key: What tells units of these shapes apart.
            build: Makes the unit, a function like a forward's, from what runs one forward.
            tokens: `[B, T]`, what the first forward reads.
            starts: The slot of each row's first token, `[B]`.
            end: One past the last slot that any forward writes.

        Returns:
            What the unit returns, good until it runs again; None where the caller has to go step by step.
        """
        assert self.cache is not None, "a lane has one"
        if self.kind != "cuda_graph" or self.reason or self.unit_reason or bucket_of(end) > self.cache.cursor.capacity:
            return None
        self._look_for_moves()
        inputs = self._inputs(tokens, starts, end, 0)
        return self._as_one((key, bucket_of(end)), lambda: build(self._forward(len(tokens))), inputs)

    def maths(self, key: Hashable, function: Function, inputs: Tensors) -> Tensors | None:
        """Run a function of tensors that needs no model, captured under `key`; None where it has to run as it is."""
        if self.kind != "cuda_graph" or self.reason or self.unit_reason:
            return None
        return self._as_one(key, lambda: lambda _, *tensors: function(*tensors), inputs)

    def _as_one(self, key: Hashable, build: Callable[[], Function], inputs: Tensors) -> Tensors | None:
        key = (key, *(tensor.shape for tensor in inputs))
        model = self._model()
        try:
            unit = self._units.pop(key, None) or self._prepared(build(), model, inputs)
            # The longest unused one comes first.
            self._units[key] = unit
            if len(self._units) > MOST_UNITS:
                self._units.pop(next(iter(self._units)))
            return unit(model, *inputs)
        except Exception as error:  # noqa: BLE001  step by step always works
            self.unit_reason = f"several steps could not be captured as one ({_cause(error)})"
            return None

    def _prepared(self, function: Function, model: Any, inputs: Tensors) -> Function:
        """Return what `RUNNERS` makes; random numbers go on as if nothing had been run for it."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _without_kept_casts(self.kind):
            made = RUNNERS[self.kind](function, model, inputs)
        self.num_prepared += 1
        return made

    def _function(self, num_rows: int, num_logits: int) -> Function:
        """Return one forward as a function of the model, tokens, their first slots, and the slots to look at."""
        forward = self._forward(num_rows)

        def run(model: Model, tokens: Tensor, starts: Tensor, keys: Tensor) -> Tensors:
            return (forward(model, tokens, starts, keys, num_logits).float(),)

        return run

    def _forward(self, num_rows: int) -> StepForward:
        layout, cache = self.layout, self.cache
        assert cache is not None, "a lane has one"
        visible = None if self.visible is None else self.visible[:num_rows]
        offset = None if self.offset is None else self.offset[:num_rows]
        every_slot = self.slots

        def forward(model: Model, tokens: Tensor, starts: Tensor, keys: Tensor, num_logits: int) -> Tensor:
            slots = starts[:, None] + every_slot[: tokens.shape[1]]
            cache.begin_at(slots, keys.shape[0])
            arguments: dict[str, Any] = {
                "input_ids": tokens,
                "attention_mask": masks_over(
                    layout,
                    slots,
                    keys,
                    visible=visible,
                    offset=offset,
                    dtype=model.dtype,
                    is_exact=False,
                ),
                layout.cache_name: cache,
                "use_cache": True,
                "return_dict": True,
            }
            if layout.accepts_position_ids:
                # Draft steps may read padding once more, which must not count as before the first position.
                arguments["position_ids"] = slots if offset is None else (slots + offset).clamp(min=0)
            if layout.accepts_logits_to_keep:
                arguments["logits_to_keep"] = num_logits
            logits: Tensor = model(**arguments).logits
            cache.end_at()
            return logits[:, -num_logits:]

        return forward


_DONE = {"compiled": "compiled", "cuda_graph": "captured"}


def refusal_of_static(model: Model, kind: str) -> str:
    """Return why forwards of a model cannot be prepared, empty where they may."""
    if kind == "cuda_graph" and device_of(model).type != "cuda":
        return "its weights are not on a CUDA device"
    if layout_of(model).attention not in MASKED_BY_US:
        return f"attention {layout_of(model).attention!r} takes no masks of ours"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it lies on several devices"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its weights are moved during a forward"
    return ""


def _cause(error: BaseException) -> str:
    """Return what went wrong, in a line; torch wraps what its compiler raises."""
    return in_short(getattr(error, "inner_exception", error))


@contextmanager
def _without_kept_casts(kind: str) -> Iterator[None]:
    """Within this, a capture casts weights itself under autocast, which keeps casts only until the caller leaves it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before and kind != "cuda_graph")
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _kept_in(buffer: Tensor | None, values: Tensor | None) -> Tensor | None:
    """Return a buffer that holds `values`, the given one where it is large enough."""
    if values is None:
        return None
    if buffer is None or buffer.shape[1] != values.shape[1] or len(buffer) < len(values):
        return values.clone()
    buffer[: len(values)] = values
    return buffer
