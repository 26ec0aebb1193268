"""`model.generate(..., draft_model=...)`: the only override of `generate`, and the host's private names.

The host's seam is `generate(custom_generate=<callable>)`: it prepares inputs, processors, criteria and cache and calls
us. It drops some arguments on the way and refuses others too late; both are mended here.
"""

from __future__ import annotations

import copy
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, overload

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateEncoderDecoderOutput

from hf_specdec.config import SpeculativeConfig
from hf_specdec.controller import DraftLengthController, FixedDraftLength
from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.engine.host import Prefill, prefill
from hf_specdec.engine.loop import speculative_decode
from hf_specdec.engine.session import Request, Session
from hf_specdec.errors import IncompatibleDraftError, UnsupportedGenerationError, warn_caller
from hf_specdec.loading import forget_drafts, resolve_draft
from hf_specdec.metrics import SpeculationStats
from hf_specdec.outputs import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput
from hf_specdec.refusals import (
    Settings,
    checked_settings,
    refuse_embeddings_alone,
    refuse_foreign_spellings,
    refuse_settings_without_draft,
)
from hf_specdec.routing import (
    Lanes,
    draft_choice_with_prompt,
    draft_inputs,
    lanes_for,
    lanes_once_prepared,
    prompt_kind,
)

Model = TypeVar("Model")
OUR_KEYWORDS = ("draft_model", "num_draft_tokens", "speculative_config")

_host_generate = GenerationMixin.generate
_classes: dict[type, type] = {}
_lock = threading.Lock()


class SpeculativeGenerationMixin(GenerationMixin):
    """Gives `generate` the keywords `draft_model`, `num_draft_tokens` and `speculative_config`.

    Put it before the model class (`class MyLM(SpeculativeGenerationMixin, LlamaForCausalLM)`), or let `enable` do that
    for a loaded model.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does, faster when a draft is given.

        Without `draft_model` this is the host's `generate`, down to the same code path. With it the output has the
        target's law exactly, and greedy output is the same token for token in float32.

        Args:
            *args: As for the host's `generate`.
            **kwargs: As for the host's `generate`, and:
                `draft_model`: a loaded causal LM of the target's token space, or the Hub id or folder of one;
                `num_draft_tokens`: tokens drafted per round, 1 to 256, 5 by default;
                `speculative_config`: a `SpeculativeConfig` or a dict of its fields.

        Returns:
            Token ids `[B, L]`, or with `return_dict_in_generate=True` a `SpeculativeDecoderOnlyOutput` whose
            `speculation` tells what happened.

        Raises:
            UnsupportedGenerationError: The call asks for something that cannot work with a draft.
            InvalidConfigError: A setting is out of range or unknown.
            DraftLoadError: The draft cannot be loaded.
            IncompatibleDraftError: The draft cannot propose for this target.

        Example:
            >>> import hf_specdec
            >>> hf_specdec.enable(model)
            >>> model.generate(**inputs, max_new_tokens=64, draft_model=draft)
        """
        return _generate(self, super().generate, args, kwargs)


@overload
def enable(model: Model) -> Model: ...
@overload
def enable(model: None = None) -> None: ...
def enable(model: Any = None) -> Any:
    """Let `generate` take a draft: on one model, or without an argument on every model of the process.

    Args:
        model: A loaded model, also one wrapped by PEFT or `torch.compile`. Its class is swapped for a subclass of the
            same name; weights and configuration are untouched. Enabling twice changes nothing.

    Returns:
        The model that was given.

    Raises:
        UnsupportedGenerationError: The model cannot generate, or PEFT prompt learning makes its prompt of vectors.

    Example:
        >>> model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained("org/target"))
    """
    if model is None:
        GenerationMixin.generate = _patched_generate  # type: ignore[method-assign]
        return None
    target = _inner_model(model)
    if not isinstance(target, SpeculativeGenerationMixin):
        target.__class__ = _speculative_class(type(target))
    return model


@overload
def disable(model: Model) -> Model: ...
@overload
def disable(model: None = None) -> None: ...
def disable(model: Any = None) -> Any:
    """Undo `enable`: give one model its class back, or restore `GenerationMixin.generate`.

    Drafts that were loaded by name for the model are freed.

    Args:
        model: The model given to `enable`, or None for the process-wide form.

    Returns:
        The model that was given.
    """
    if model is None:
        GenerationMixin.generate = _host_generate  # type: ignore[method-assign]
        return None
    target = _inner_model(model)
    original = type(target).__dict__.get("_specdec_original_class")
    if original is not None:
        target.__class__ = original
    forget_drafts(target)
    return model


def _patched_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _generate(self, _host_generate.__get__(self), args, kwargs)


_patched_generate.__doc__ = SpeculativeGenerationMixin.generate.__doc__
# The host inspects the signature of `generate`, and so do editors.
_patched_generate.__signature__ = inspect.signature(_host_generate)  # type: ignore[attr-defined]


def _inner_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside wrappers of PEFT and torch.compile."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, PreTrainedModel) and callable(getattr(inner, "get_base_model", None)):
        if getattr(getattr(inner, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedGenerationError(
                "A draft needs a prompt of tokens, but this PEFT model learns its prompt as vectors. Merge it away or "
                "use an adapter method such as LoRA."
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel) or not isinstance(inner, GenerationMixin):
        raise UnsupportedGenerationError(
            f"`enable` takes a transformers model that can generate, but got {type(model).__name__}. Load it with "
            "`AutoModelForCausalLM.from_pretrained`."
        )
    return inner


def _reduce(model: Any, protocol: Any) -> Any:
    """Pickle an enabled model by its original class: the swapped one has no place in any module."""
    reduced: Any = object.__reduce_ex__(model, max(2, int(protocol)))
    return _revived, (type(model)._specdec_original_class,), *reduced[2:]


def _revived(original: type) -> Any:
    return object.__new__(_speculative_class(original))


def _speculative_class(original: type) -> type:
    with _lock:
        if original not in _classes:
            # `save_pretrained` writes the class name into the configuration, so the name must stay.
            _classes[original] = type(
                original.__name__,
                (SpeculativeGenerationMixin, original),
                {
                    "__module__": original.__module__,
                    "__qualname__": original.__qualname__,
                    "__doc__": original.__doc__,
                    "_specdec_original_class": original,
                    "__reduce_ex__": _reduce,
                },
            )
        return _classes[original]


# ---- one call --------------------------------------------------------------------------------------------------


def _generate(model: Any, host_generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    started = time.perf_counter()
    ours = {name: kwargs.pop(name) for name in OUR_KEYWORDS if name in kwargs}
    draft_model = ours.get("draft_model")
    if draft_model is None:
        refuse_settings_without_draft(ours)
        return host_generate(*args, **kwargs)
    config = SpeculativeConfig.from_user(ours.get("speculative_config"), num_draft_tokens=ours.get("num_draft_tokens"))
    arguments = _named(args, kwargs)
    refuse_foreign_spellings(arguments)
    settings, user_cache = checked_settings(model, arguments)
    draft = resolve_draft(model, draft_model, config)
    lanes = lanes_for(model, draft, arguments, settings, user_cache)
    if lanes.reason:
        return _plain(host_generate, arguments, config, lanes.reason, started)
    _take_stop_strings(arguments, settings)
    streamer = arguments.get("streamer")
    kind = prompt_kind(model, arguments)

    # The host reads the names of this signature: what it does not find in it reaches us through the closure instead.
    def decode(
        _model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, **prepared: Any
    ) -> Any:
        generation_config = prepared.pop("generation_config")
        refuse_embeddings_alone(input_ids)

        def read_prompt(model_kwargs: dict[str, Any]) -> Prefill:
            outputs = prefill(model, input_ids, generation_config, model_kwargs)
            return Prefill(token_ids=input_ids, model_kwargs=model_kwargs, outputs=outputs)

        chosen = lanes_once_prepared(
            lanes, model, prepared, kind=kind, num_rows=len(input_ids), make_prefill=read_prompt
        )
        if chosen.reason:
            _say_plain(config, chosen.reason)
            output = model._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=False,
                streamer=streamer,
                **prepared,
            )
            return _with_plain_stats(output, chosen.reason, started, input_ids.shape[1])
        request = Request(
            model=model,
            input_ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            generation_config=generation_config,
            model_kwargs=prepared,
            streamer=streamer,
            user_cache=user_cache,
            config=config,
            controller=_controller(config),
            make_drafter=lambda session: _drafter(draft, session, chosen, arguments),
            target_lane=chosen.target,
            draft_lane=chosen.draft,
            started=started,
        )
        return speculative_decode(request)

    return host_generate(**arguments, custom_generate=decode)


def _controller(config: SpeculativeConfig) -> DraftLengthController:
    return FixedDraftLength(config.num_draft_tokens)


def _drafter(draft: PreTrainedModel, session: Session, lanes: Lanes, arguments: dict[str, Any]) -> ModelDrafter:
    sequences, request = session.sequences, session.request
    num_columns = sequences.num_prompt_columns
    inputs = draft_inputs(draft, request.model, arguments, request.model_kwargs, sequences.num_rows)
    if draft.config.is_encoder_decoder:
        choice = draft_choice_with_prompt(draft, inputs, sequences.buffer[:, :num_columns])
        if choice.lane == "plain":
            raise IncompatibleDraftError(f"no lane runs the draft: {choice.reason}")
    mask = request.model_kwargs.get("attention_mask") if not request.model.config.is_encoder_decoder else None
    if sequences.num_rows != len(sequences.rows) and mask is not None:
        mask = mask[sequences.rows]
    return ModelDrafter(
        draft,
        sequences,
        plan=session.plan.for_draft(),
        do_sample=session.do_sample,
        vocab_size=session.vocab_size,
        # An earlier turn's part of the mask belongs to tokens that the draft never sees.
        attention_mask=mask[:, -num_columns:] if mask is not None else None,
        capacity=sequences.buffer.shape[1],
        lane=lanes.draft,
        inputs=inputs,
    )


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of `generate` by name."""
    names = [name for name in inspect.signature(_host_generate).parameters if name not in ("self", "kwargs")]
    arguments = dict(zip(names, args, strict=False))
    if len(args) > len(names) or set(arguments) & set(kwargs):
        raise TypeError(f"generate() got too many positional arguments or one of {sorted(arguments)} twice")
    return {**arguments, **kwargs}


def _plain(
    host_generate: Callable[..., Any], arguments: dict[str, Any], config: SpeculativeConfig, reason: str, started: float
) -> Any:
    """Decode without the draft, say so once, and note it in the stats."""
    _say_plain(config, reason)
    ids = arguments.get("inputs", arguments.get("input_ids"))
    prompt_width = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.ndim == 2 else 0
    return _with_plain_stats(host_generate(**arguments), reason, started, prompt_width)


def _say_plain(config: SpeculativeConfig, reason: str) -> None:
    if config.strict:
        raise UnsupportedGenerationError(
            f"With `strict=True` a call that cannot speculate is an error, and {reason}. Leave `strict` out to decode "
            "plainly."
        )
    warn_caller(f"Decoding without the draft: {reason}.")


def _with_plain_stats(output: Any, reason: str, started: float, prompt_width: int) -> Any:
    """Return the host's output, with stats where it is an object; padding counts as tokens here."""
    if isinstance(output, torch.Tensor):
        return output
    stats = SpeculationStats(
        lane="plain", draft_lane="plain", fallbacks=[reason], total_seconds=time.perf_counter() - started
    )
    stats.num_rows, width = output.sequences.shape
    stats.num_prompt_tokens = stats.num_rows * prompt_width
    stats.num_new_tokens = stats.num_rows * (width - prompt_width)
    has_encoder = isinstance(output, GenerateEncoderDecoderOutput)
    kind = SpeculativeEncoderDecoderOutput if has_encoder else SpeculativeDecoderOnlyOutput
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in output.items() if name in names}, speculation=stats)


def _take_stop_strings(arguments: dict[str, Any], settings: Settings) -> None:
    """Turn stop strings into a criterion, for the host loses their tokenizer on the way to a callable."""
    stop_strings = settings.get("stop_strings")
    tokenizer = arguments.pop("tokenizer", None)
    if stop_strings is None:
        return
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, stop_strings))
    arguments["stopping_criteria"] = criteria
    if settings.config is not None and settings.config.stop_strings is not None:
        arguments["generation_config"] = copy.deepcopy(settings.config)
        arguments["generation_config"].stop_strings = None
    arguments.pop("stop_strings", None)
    if settings.defaults.stop_strings is not None:
        # Only an explicit None keeps the host from filling in the model's default again.
        arguments["stop_strings"] = None
