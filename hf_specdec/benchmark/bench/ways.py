"""The ways to decode that stand beside each other: plain, transformers' own kinds of speculation, and ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLAIN = "plain"
PLAIN_AGAIN = "plain again"
COMPILED = "plain, static cache and compile"
ASSISTANT = "assistant_model"
ASSISTANT_HEURISTIC = "assistant_model, heuristic"
ASSISTANT_PREFIX = "assistant_model K="
PROMPT_LOOKUP = "prompt_lookup_num_tokens"
OURS_PREFIX = "draft_model "
FIXED_PREFIX = f"{OURS_PREFIX}K="
LOOKUP_LENGTH = 10

GROUPS = ("plain-compiled", "assistant", "assistant-lengths", "prompt-lookup", "fixed", "adaptive")
"""What can be left out; plain decoding cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What is measured.

    Attributes:
        target: The model whose text is wanted, enabled.
        draft: The loaded draft, in the target's dtype.
        tokenizer: The target's, None for a synthetic pair, which has no text.
        draft_tokenizer: The draft's, None where it is the same.
        draft_name: Hub id or folder of the draft; quantized drafts can only be loaded by name.
        ballast_bytes: Of the target, beside its parameters: what it was widened by.
        note: What a reader has to know about the pair, for instance that its acceptance is set.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    draft_name: str | None = None
    ballast_bytes: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to call `generate`.

    Attributes:
        keywords: What it adds to the call.
        uses_draft: Whether the draft's weights are needed.
        refusal: Why it cannot run in a cell; empty where it can.
    """

    keywords: Mapping[str, Any] = field(default_factory=dict)
    uses_draft: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which ways run.

    Attributes:
        lengths: Our fixed draft lengths.
        assisted_lengths: Constant draft lengths of `assistant_model`, of which the best is shown.
        quantizations: Of our draft; those beside "none" need the draft's name.
        runners: Of our forwards, as in `SpeculativeConfig`.
        left_out: Of `GROUPS`.
    """

    lengths: Sequence[int] = (4, 6)
    assisted_lengths: Sequence[int] = (3, 5)
    quantizations: Sequence[str] = ("none",)
    runners: Sequence[str] = ("auto",)
    left_out: frozenset[str] = frozenset()


def ways_of(pair: Pair, choice: Choice, batch_size: int) -> dict[str, Way]:
    """Return the ways in the order of a pass: plain decoding first and last, so that its noise is seen."""
    left_out = choice.left_out
    ways = {PLAIN: Way()}
    if "plain-compiled" not in left_out:
        ways[COMPILED] = _compiled(pair.target)
    for quantization in choice.quantizations:
        for runner in choice.runners:
            ways |= _ours(pair, choice, quantization, runner)
    ways |= _hosts(pair, choice, batch_size)
    return ways | {PLAIN_AGAIN: Way()}


def _compiled(target: PreTrainedModel) -> Way:
    # transformers compiles the decoding forward by itself for a static cache, and only on such devices.
    is_compiled = target.device.type == "cuda"
    return Way(
        keywords={"cache_implementation": "static"},
        refusal="" if is_compiled else "transformers compiles only on an accelerator",
    )


def _ours(pair: Pair, choice: Choice, quantization: str, runner: str) -> dict[str, Way]:
    config: dict[str, Any] = {"runner": runner}
    keywords: dict[str, Any] = {"draft_model": pair.draft}
    refusal = ""
    if quantization != "none":
        refusal = "" if pair.draft_name else "only a draft that is given by name can be quantized"
        keywords = {"draft_model": pair.draft_name}
        config["draft_quantization"] = quantization
    if pair.draft_tokenizer is not None:
        keywords["tokenizer"] = pair.tokenizer
    keywords["speculative_config"] = config
    suffix = "".join(f", {told}" for told in (quantization, runner) if told not in ("none", "auto"))
    lengths: list[int | str] = list(choice.lengths) if "fixed" not in choice.left_out else []
    lengths += ["auto"] if "adaptive" not in choice.left_out else []
    return {
        f"{OURS_PREFIX}{'adaptive' if length == 'auto' else f'K={length}'}{suffix}": Way(
            keywords={**keywords, "num_draft_tokens": length}, uses_draft=True, refusal=refusal
        )
        for length in lengths
    }


def _hosts(pair: Pair, choice: Choice, batch_size: int) -> dict[str, Way]:
    """Return transformers' own ways; it changes an assistant's configuration, so each has one of its own."""
    refusal = "transformers refuses batches there" if batch_size > 1 else ""
    shared: dict[str, Any] = {}
    if pair.draft_tokenizer is not None:
        shared = {"tokenizer": pair.tokenizer, "assistant_tokenizer": pair.draft_tokenizer}
    settings: dict[str, dict[str, Any]] = {}
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    if "assistant" not in choice.left_out:
        settings[ASSISTANT] = {}
        heuristic = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic"}
        settings[ASSISTANT_HEURISTIC] = {**heuristic, "assistant_confidence_threshold": 0.0}
    if "assistant-lengths" not in choice.left_out:
        for length in choice.assisted_lengths:
            settings[f"{ASSISTANT_PREFIX}{length}"] = {**constant, "num_assistant_tokens": length}
    ways = {
        name: Way(
            keywords={**shared, "assistant_model": assistant_of(pair.draft, own)}, uses_draft=True, refusal=refusal
        )
        for name, own in settings.items()
    }
    if "prompt-lookup" not in choice.left_out:
        ways[PROMPT_LOOKUP] = Way(keywords={"prompt_lookup_num_tokens": LOOKUP_LENGTH}, refusal=refusal)
    return ways


def assistant_of(draft: PreTrainedModel, settings: Mapping[str, Any]) -> Any:
    """Return the draft with generation settings of its own and the same weights."""
    memo = {id(tensor): tensor for tensor in (*draft.parameters(), *draft.buffers())}
    assistant = copy.deepcopy(draft, memo)
    for name, value in settings.items():
        setattr(assistant.generation_config, name, value)
    return assistant


def generation_settings(temperature: float, num_new_tokens: int) -> dict[str, Any]:
    """Return what every way passes to `generate`."""
    settings: dict[str, Any] = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens}
    if not temperature:
        return {**settings, "do_sample": False}
    return {**settings, "do_sample": True, "temperature": temperature, "top_k": 0}
