"""`model.generate(..., draft_model=...)`: the only override of `generate`, and the host's private names.

The host's seam is `generate(custom_generate=<callable>)`: it prepares inputs, processors, criteria and cache and calls
us. It drops some arguments on the way and refuses others too late; both are mended here.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from transformers import GenerationMixin, PreTrainedModel

from hf_specdec.call import Call, generate_with_draft
from hf_specdec.config import SpeculativeConfig
from hf_specdec.engine.lending import forget_prepared
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.learned import forget_learned
from hf_specdec.loading import compared_tokens, forget_drafts
from hf_specdec.matching import forget_pairings, match_draft, says_length
from hf_specdec.quiet import quiet
from hf_specdec.refusals import (
    checked_settings,
    refuse_foreign_spellings,
    refuse_settings_without_draft,
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
                `draft_model`: a loaded causal LM, or the Hub id or folder of one, with whichever tokenizer; a
                `DraftPairing`, or the Hub id or folder of one; or "auto", to look up what is known to suit the target;
                `num_draft_tokens`: tokens drafted per round, 1 to 256, or "auto" (the default) to let it adapt;
                `speculative_config`: a `SpeculativeConfig` or a dict of its fields.

        Returns:
            Token ids `[B, L]`, or with `return_dict_in_generate=True` a `SpeculativeDecoderOnlyOutput` whose
            `speculation` tells what happened.

        Raises:
            UnsupportedGenerationError: The call asks for something that cannot work with a draft.
            InvalidConfigError: A setting is out of range or unknown.
            DraftLoadError: The draft cannot be loaded.
            PairingNotFoundError: `draft_model="auto"` found nothing; the message says where it looked.
            InvalidPairingError: A pairing breaks a rule, or its files were changed.
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

    Drafts that were loaded by name for the model are freed, so are compiled and captured forwards with their caches,
    and what adaptive draft lengths learned is forgotten.

    Args:
        model: The model given to `enable`, or None for the process-wide form.

    Returns:
        The model that was given.
    """
    if model is None:
        GenerationMixin.generate = _host_generate  # type: ignore[method-assign]
        forget_drafts(None)
        forget_pairings(None)
        forget_learned(None)
        forget_prepared(None)
        return None
    target = _inner_model(model)
    original = type(target).__dict__.get("_specdec_original_class")
    if original is not None:
        target.__class__ = original
    forget_drafts(target)
    forget_pairings(target)
    forget_learned(target)
    forget_prepared(target)
    return model


def generate(model: Any, **kwargs: Any) -> Any:
    """Run `model.generate(**kwargs)` with our keywords, whether or not the model was enabled; nothing is left behind.

    This is what a pairing's `custom_generate` runs.

    Args:
        model: A loaded model, also one wrapped by PEFT or `torch.compile`.
        **kwargs: See `SpeculativeGenerationMixin.generate`. None means the same as leaving an argument of the host's
            out.

    Returns:
        What `model.generate` returns.

    Raises:
        UnsupportedGenerationError: The model cannot generate.

    Example:
        >>> hf_specdec.generate(model, **inputs, max_new_tokens=64, draft_model="org/draft")
    """
    target = _inner_model(model)
    host_generate: Any = target.generate
    named = inspect.signature(_host_generate).parameters
    given = {name: value for name, value in kwargs.items() if value is not None or name not in named}
    if isinstance(target, SpeculativeGenerationMixin):
        return host_generate(**given)
    return _generate(target, host_generate, (), given)


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
    if draft_model is None and isinstance(kwargs.get("custom_generate"), str):
        # A pairing's recipe brings the draft and takes the rest.
        return host_generate(*args, **kwargs, **ours)
    if draft_model is None:
        refuse_settings_without_draft(ours)
        return host_generate(*args, **kwargs)
    config = SpeculativeConfig.from_user(ours.get("speculative_config"), num_draft_tokens=ours.get("num_draft_tokens"))
    arguments = _named(host_generate, args, kwargs)
    refuse_foreign_spellings(arguments)
    settings, user_cache = checked_settings(model, arguments)
    is_said = says_length(ours.get("num_draft_tokens"), ours.get("speculative_config"))
    with quiet():
        matched = match_draft(model, draft_model, config, says_length=is_said, tokenizer=arguments.get("tokenizer"))
        call = Call(
            model=model,
            draft=matched.draft,
            spaces=compared_tokens(model, matched.draft, matched.config, arguments.get("tokenizer")),
            host_generate=host_generate,
            has_own_generate=_has_own_generate(model),
            arguments=arguments,
            config=matched.config,
            pairing=matched.told,
            settings=settings,
            user_cache=user_cache,
            started=started,
        )
        return generate_with_draft(call)


def _has_own_generate(model: Any) -> bool:
    """Return whether the model's class, ours left aside, overrides the host's `generate`."""
    ours = (SpeculativeGenerationMixin, GenerationMixin)
    return any("generate" in vars(kind) for kind in type(model).__mro__ if kind not in ours)


def _named(host_generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of `generate` by name."""
    names = [name for name in inspect.signature(host_generate).parameters if name not in ("self", "kwargs")]
    arguments = dict(zip(names, args, strict=False))
    if len(args) > len(names) or set(arguments) & set(kwargs):
        raise TypeError(f"generate() got too many positional arguments or one of {sorted(arguments)} twice")
    return {**arguments, **kwargs}
