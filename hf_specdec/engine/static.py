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
        num_uses: Prepared forwards and steps that this call has run.
        num_tries: Times that a shape was compiled, captured or compared, which takes time beside the forwards.
    """

    def __init__(self, model: Model, kind: str, *, is_draft: bool = False) -> None:
        """Prepare nothing yet; `model` must be one that `refusal_of_static` accepts; for a draft see `tolerance_of`."""
        # What is kept with a model must not keep it.
        self._model = weakref.ref(model)
        self.tolerance = tolerance_of(model, is_draft=is_draft)
        self.kind = kind
        self.layout = layout_of(model)
        self.device = device_of(model)
        self.reason = ""
        self.num_uses = 0
        self.num_tries = 0
        self.cache: RaggedCache | None = None
        self.visible: Tensor | None = None
        self.offset: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
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
        self.num_uses = 0
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
            self._buffers.clear()

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
        if len(self.slots) != capacity:
            self.slots = torch.arange(capacity, device=self.device)
            self._forget()
        self.visible = self._kept("visible", visible)
        self.offset = self._kept("offset", offset)
        return self.visible, self.offset

    def _kept(self, name: str, values: Tensor | None) -> Tensor | None:
        """Return `values` `[B, N]` in a buffer that stays, for calls with fewer rows and calls without any as well."""
        if values is None:
            return None
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[1] != values.shape[1] or len(buffer) < len(values):
            self._buffers[name] = values.clone()
            self._forget()
        else:
            buffer[: len(values)] = values
        return self._buffers[name][: len(values)]

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
        except Exception as error:  # noqa: BLE001  the model itself is still there
            self.give_up(f"a forward that was {_DONE[self.kind]} failed ({_cause(error)})")
            return None
        self.num_uses += 1
        return logits[:, :num_logits]

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
        self.num_tries += 1
        model, inputs = self._model(), self._inputs(tokens, starts, end, num_more)
        try:
            if key not in self._entries:
                count = num_logits + num_more
                self._entries[key] = self._prepared(self._function(count), model, inputs)
            (logits,) = self._entries[key](model, *inputs)
        except Exception as error:  # noqa: BLE001  whatever a compiler does, the model itself is still there
            self.give_up(f"a forward could not be {_DONE[self.kind]} ({_cause(error)})")
            return None
        return key, logits[:, :num_logits]

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

    def _settings(self) -> tuple[bool, bool]:
        """Return which buffers a forward of this call reads beside keys and values."""
        return self.visible is not None, self.offset is not None

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
        return (num_rows, num_tokens + num_more, num_logits + num_more, reach, *self._settings()), num_more

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
        return self._as_one((key, bucket_of(end), *self._settings()), lambda: build(self._forward()), inputs)

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
            outputs = unit(model, *inputs)
            self.num_uses += 1
            return outputs
        except Exception as error:  # noqa: BLE001  step by step always works
            self.unit_reason = f"several steps could not be captured as one ({_cause(error)})"
            return None

    def _prepared(self, function: Function, model: Any, inputs: Tensors) -> Function:
        """Return what `RUNNERS` makes; random numbers go on as if nothing had been run for it."""
        self.num_tries += 1
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _without_kept_casts(self.kind):
            return RUNNERS[self.kind](function, model, inputs)

    def _function(self, num_logits: int) -> Function:
        """Return one forward as a function of the model, tokens, their first slots, and the slots to look at."""
        forward = self._forward()

        def run(model: Model, tokens: Tensor, starts: Tensor, keys: Tensor) -> Tensors:
            return (forward(model, tokens, starts, keys, num_logits).float(),)

        return run

    def _forward(self) -> StepForward:
        layout, cache = self.layout, self.cache
        assert cache is not None, "a lane has one"
        visible, offset = self.visible, self.offset
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
    if not has_device_for(kind, device_of(model)):
        return "its weights are not on a CUDA device"
    if layout_of(model).attention not in MASKED_BY_US:
        return f"attention {layout_of(model).attention!r} takes no masks of ours"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it lies on several devices"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its weights are moved during a forward"
    if any(_is_watched(module) for module in model.modules()):
        return "it has hooks, or a `forward` of its own, which must run every time"
    return ""


def has_device_for(kind: str, device: torch.device) -> bool:
    """Return whether forwards of that kind can be prepared on a device."""
    return kind != "cuda_graph" or device.type == "cuda"


def _is_watched(module: torch.nn.Module) -> bool:
    """Return whether anybody but the host has put something into a module's forwards."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    is_own = any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)
    return is_own or "forward" in vars(module)


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
