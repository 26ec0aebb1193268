"""Run a target or a draft on just the tokens its cache lacks: the ragged lane."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hf_specdec.engine.alibi import BIAS, from_any_mask, modules_with_biases
from hf_specdec.engine.borrowing import replaced
from hf_specdec.engine.cache import RaggedCache, refusal_of, take_over
from hf_specdec.engine.host import HOSTS_CACHE_NAME, filled_cache
from hf_specdec.engine.layout import Model, context_of, layout_of, windows_of
from hf_specdec.engine.masks import MOST_QUERIES, CausalBand, is_plain_causal, masks_over
from hf_specdec.engine.runners import Function, Tensors
from hf_specdec.engine.sequences import Span
from hf_specdec.engine.static import StaticForward, StepForward
from hf_specdec.placement import device_of

Tensor = torch.Tensor
# Arguments of `forward` that the lane sets itself or that only concern the prompt.
OWN_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_params",
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "inputs_tensor",
        "labels",
        "logits_to_keep",
        "mm_encoder_outputs",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class PreparedOutputs:
    """What a prepared forward gives: `logits` `[B, T, V]`, good until the next one of this shape."""

    logits: Tensor


class Lane:
    """One model on one ragged cache.

    Slot `column + shift` of the cache holds the token at `column` of the sequences; `shift` is not 0 when the model
    was prefilled with more than the visible prompt (an earlier turn, soft prompts).
    """

    # Nothing is ever fed again here.
    num_replayed_tokens = 0
    num_flushes = 0

    def __init__(
        self,
        model: Model,
        cache: RaggedCache,
        *,
        shift: int,
        visible: Tensor | None,
        last_positions: Tensor | None,
        num_prompt_columns: int,
        extras: Mapping[str, Any],
        static: StaticForward | None = None,
    ) -> None:
        """Wrap a prefilled model.

        Args:
            model: Target or draft.
            cache: Its cache, filled up to the prompt's last column.
            shift: Slots before column 0.
            visible: Which prompt slots may be attended to, `[B, shift + num_prompt_columns]` bool; None means all.
            last_positions: Position id of the prompt's last token, `[B]`; None means its slot.
            num_prompt_columns: Columns of the prompt.
            extras: Further arguments of `forward`, passed as they are; batched tensors follow the rows.
            static: What prepares forwards over `cache`, which it made; None runs the model as usual.
        """
        self.model = model
        self.cache = cache
        self.layout = layout_of(model)
        self.device = device_of(model)
        self.shift = shift
        self.visible = visible.to(self.device) if visible is not None else None
        last_slot = shift + num_prompt_columns - 1
        self.position_offset = (
            (last_positions.to(self.device) - last_slot)[:, None] if last_positions is not None else None
        )  # [B, 1]
        self.extras = {
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in extras.items()
        }
        self.num_forwards = 0
        self._biases = modules_with_biases(model)
        self._context = context_of(model)
        self._slots = torch.empty(0, device=self.device)
        self.static: StaticForward | None = None
        self._reach(cache.cursor.capacity)
        if static is not None and (self.extras or self._biases):
            static.stand_aside("it reads more than tokens")
        self.static = static
        self._adopt()

    @classmethod
    def over(
        cls,
        model: Model,
        cache: RaggedCache,
        *,
        filled: int,
        num_prompt_columns: int,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        extras: Mapping[str, Any],
        static: StaticForward | None = None,
    ) -> Lane:
        """Return a lane over a cache whose first `filled` slots hold the prompt; see `open_lane`."""
        visible = None
        if attention_mask is not None:
            # A mask shorter than the cache covers its end: an earlier turn was all visible.
            visible = torch.nn.functional.pad(attention_mask.bool(), (filled - attention_mask.shape[1], 0), value=True)
        return cls(
            model,
            cache,
            shift=filled - num_prompt_columns,
            visible=visible,
            last_positions=position_ids[:, -1] if position_ids is not None else None,
            num_prompt_columns=num_prompt_columns,
            extras=extras,
            static=static,
        )

    def forward(
        self, token_ids: Tensor, span: Span, *, num_logits: int, collect: Mapping[str, bool] | None = None
    ) -> Any:
        """Feed `token_ids` `[B, T]` at the columns of `span` and return the model's outputs.

        Args:
            token_ids: Tokens of consecutive columns per row.
            span: Their columns.
            num_logits: How many of the last positions need logits; outputs hold at least those, in order.
            collect: `output_attentions` and `output_hidden_states`, where wanted.

        Returns:
            The model's output with `logits` `[B, >= num_logits, V]`; its cache has been written in place.
        """
        start = None if span.start is None else span.start + self.shift
        end = span.end + self.shift
        token_ids = token_ids.to(self.device)
        self.num_forwards += 1
        if self.static is None or self.static.reason or collect:
            starts = self._first_slots(span, len(token_ids)) if start is None else None
            return self._run(token_ids, start, starts, end, num_logits, collect)
        starts = self._first_slots(span, len(token_ids))
        arguments: dict[str, Any] = {"end": end, "num_logits": num_logits, "context": self._context}
        logits = self.static.logits(token_ids, starts, **arguments)
        if logits is not None:
            return PreparedOutputs(logits)
        tried = self.static.trial(token_ids, starts, **arguments)
        outputs = self._run(token_ids, start, starts, end, num_logits, collect)
        if tried is not None:
            self.static.judge(tried, outputs.logits[:, -num_logits:])
        return outputs

    def run_unit(
        self,
        key: Hashable,
        build: Callable[[StepForward], Function],
        tokens: Tensor,
        span: Span,
        num_steps: int,
    ) -> Tensors | None:
        """Run several forwards as one; see `StaticForward.unit`. The first reads `tokens` at `span`, the others one."""
        if self.static is None:
            return None
        end = span.end + self.shift + num_steps - 1
        starts = self._first_slots(span, len(tokens))
        outputs = self.static.unit(key, build, tokens.to(self.device), starts, end)
        if outputs is not None:
            self.num_forwards += num_steps
        return outputs

    def _first_slots(self, span: Span, num_rows: int) -> Tensor:
        """Return the slot of each row's first token in a span, `[B]`."""
        if span.start is not None:
            return torch.full((num_rows,), span.start + self.shift, device=self.device)
        assert span.starts is not None, "rows without a common start have starts of their own"
        return span.starts.to(self.device) + self.shift

    def _run(
        self,
        token_ids: Tensor,
        start: int | None,
        starts: Tensor | None,
        end: int,
        num_logits: int,
        collect: Mapping[str, bool] | None,
    ) -> Any:
        """Run the model itself on tokens whose first slots are `start`, or `starts` `[B]` where they differ."""
        batch, num_tokens = token_ids.shape
        self.cache.begin(num_tokens, start=start, starts=starts, end=end)
        self._reach(self.cache.cursor.capacity)
        if start is not None:
            slots = self._slots.narrow(0, start, num_tokens).unsqueeze(0)  # [1, T]
        else:
            slots = starts[:, None] + self._slots[:num_tokens]  # type: ignore[index]  # [B, T]
        arguments: dict[str, Any] = {
            "input_ids": token_ids,
            "attention_mask": self._masks(slots, start, end, batch),
            self.layout.cache_name: self.cache,
            "use_cache": True,
            "return_dict": True,
            **self.extras,
            **(collect or {}),
        }
        if "token_type_ids" in self.extras:
            arguments["token_type_ids"] = self.extras["token_type_ids"].expand(batch, num_tokens)
        if self.layout.accepts_position_ids:
            positions = slots if self.position_offset is None else slots + self.position_offset
            arguments["position_ids"] = positions if batch == 1 else positions.expand(batch, num_tokens)
        if self.layout.accepts_logits_to_keep:
            arguments["logits_to_keep"] = num_logits
        if not self._biases:
            return self.model(**arguments)
        with replaced(self._biases, {BIAS: from_any_mask}):
            return self.model(**arguments)

    def settle(self, column: int) -> None:
        """Hear that the tokens before `column` stay; this lane can take back any."""

    @property
    def windows(self) -> list[int | None] | None:
        """See `windows_of`."""
        return windows_of(self.model, self.layout)

    def select_rows(self, rows: Tensor) -> None:
        """Keep only `rows` (indices `[kept]`)."""
        before = self._batch_size()
        rows = rows.to(self.device)
        self.cache.select_rows(rows)
        if self.visible is not None:
            self.visible = self.visible[rows]
        if self.position_offset is not None:
            self.position_offset = self.position_offset[rows]
        self._adopt()
        for name, value in self.extras.items():
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == before:
                self.extras[name] = value[rows]

    def _batch_size(self) -> int:
        return next((int(layer.keys.shape[0]) for layer in self.cache.ragged_layers if layer.is_initialized), 0)

    def _adopt(self) -> None:
        """Let prepared forwards know of padding and positions."""
        if self.static is not None:
            self.visible, self.position_offset = self.static.adopt(self.visible, self.position_offset)

    def _reach(self, capacity: int) -> None:
        """Prepare slots, band and padding for a cache that has grown."""
        if len(self._slots) >= capacity:
            return
        self._slots = torch.arange(capacity, device=self.device)
        self._band = CausalBand(capacity, self.device)
        if self.visible is not None:
            self.visible = torch.nn.functional.pad(self.visible, (0, capacity - self.visible.shape[1]), value=True)
        if self.static is not None:
            self._adopt()

    def _masks(self, slots: Tensor, start: int | None, end: int, num_rows: int) -> Any:
        """Return what `masks_over` does, by the short way where there is one."""
        num_tokens = slots.shape[1]
        is_short = start is not None and self.visible is None and num_tokens <= MOST_QUERIES and not self._biases
        if is_short and is_plain_causal(self.layout, end):
            assert start is not None, "just looked at"
            mask = None if num_tokens == 1 else self._band.mask(start, num_tokens, end)
            kinds = self.layout.layer_types
            return mask if kinds is None else dict.fromkeys(kinds, mask)
        return masks_over(
            self.layout,
            slots,
            self._slots[:end],
            visible=self.visible,
            offset=self.position_offset,
            dtype=self.model.dtype,
            is_exact=True,
            num_rows=num_rows if self._biases else None,
        )


def open_lane(
    model: Model,
    cache: Any,
    *,
    capacity: int,
    keep: bool,
    num_prompt_columns: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    extras: Mapping[str, Any],
    static: StaticForward | None = None,
) -> Lane:
    """Take over a prefilled host cache and return the lane that continues from it.

    Args:
        model: The model that filled `cache`.
        cache: Its host cache, for which `refusal_of` is None.
        capacity: Slots to allocate per row.
        keep: Whether the caller still needs `cache`.
        num_prompt_columns: Columns of `input_ids`.
        attention_mask: `[B, >= num_prompt_columns]`, or None when every slot may be attended to.
        position_ids: `[B, P]` whose last column belongs to the prompt's last token, or None.
        extras: Further arguments of `forward`.
        static: See `Lane`.
    """
    new_cache = RaggedCache if static is None else static.new_cache
    ragged, filled = take_over(cache, capacity=capacity, keep=keep, new_cache=new_cache)
    return Lane.over(
        model,
        ragged,
        filled=filled,
        num_prompt_columns=num_prompt_columns,
        attention_mask=attention_mask,
        position_ids=position_ids,
        extras=extras,
        static=static,
    )


def prefilled_lane(
    model: Model,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    capacity: int,
    static: StaticForward | None = None,
) -> Lane:
    """Prefill a model of our own choice (a draft, or a probed model) on `[B, W]` ids and open its lane.

    Raises:
        ValueError: The model's cache cannot be taken over.
    """
    input_ids = input_ids.to(device_of(model))
    layout = layout_of(model)
    arguments: dict[str, Any] = {"use_cache": True}
    position_ids = None
    if attention_mask is not None:
        attention_mask = attention_mask.to(input_ids.device)
        arguments["attention_mask"] = attention_mask
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
    if layout.accepts_position_ids:
        # Some models would count from elsewhere if left alone; the host, too, hands positions to all that take them.
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        arguments["position_ids"] = columns if position_ids is None else position_ids
    else:
        position_ids = None
    if layout.accepts_logits_to_keep:
        arguments["logits_to_keep"] = 1
    arguments[HOSTS_CACHE_NAME] = DynamicCache(config=model.config.get_text_config(decoder=True))
    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **arguments)
    outputs = model(**inputs, return_dict=True)
    cache = filled_cache(outputs)
    if reason := refusal_of(cache):
        raise ValueError(reason)
    return open_lane(
        model,
        cache,
        capacity=capacity,
        keep=False,
        num_prompt_columns=input_ids.shape[1],
        attention_mask=attention_mask,
        position_ids=position_ids,
        extras={},
        static=static,
    )


def batched_extras(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the caller's further arguments of `forward` that hold for every round."""
    return {name: value for name, value in model_kwargs.items() if name not in OWN_ARGUMENTS and value is not None}
