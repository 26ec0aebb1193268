"""Time several ways to call `generate` on the same prompts, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_specdec.benchmark.demo_pair import FirstToken
from hf_specdec.metrics import SpeculationStats

SEEDS_PER_REPEAT = 1000


@dataclass(slots=True, kw_only=True)
class Timing:
    """What one way to call `generate` did, one entry per repeat.

    Attributes:
        first: Seconds until the first token, summed over the prompts.
        seconds: Seconds of the whole calls, likewise.
        num_new_tokens: Tokens written, over all prompts.
        calls: Stats of every call that speculated.
        num_differing_outputs: Outputs that are not those of the first way, over all repeats.
    """

    first: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    calls: list[list[SpeculationStats]] = field(default_factory=list)
    num_differing_outputs: int = 0

    @property
    def seconds_per_token(self) -> list[float]:
        """Time by the tokens it gave; outputs that end early may differ in length where they are sampled."""
        pairs = zip(self.seconds, self.num_new_tokens, strict=True)
        return [seconds / max(count, 1) for seconds, count in pairs]


def interleaved(
    target: Any,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    ways: Mapping[str, Mapping[str, Any]],
    *,
    repeats: int,
    seed: int = 0,
) -> dict[str, Timing]:
    """Let every way generate from every prompt in every repeat, all ways on one prompt before the next prompt.

    Every other repeat goes through the ways backwards, so that none gains by what comes before it. Within a repeat all
    ways decode a prompt from the same seed.

    Args:
        target: The model whose `generate` is called.
        inputs: Encoded prompts, `input_ids` and `attention_mask` `[1, L]` each.
        ways: Name to keywords of `generate`; outputs are compared with those of the first.
        repeats: Passes through everything.
        seed: Of the first prompt in the first repeat.
    """
    timings = {name: Timing() for name in ways}
    for repeat in range(repeats):
        for timing in timings.values():
            timing.first.append(0.0)
            timing.seconds.append(0.0)
            timing.num_new_tokens.append(0)
            timing.calls.append([])
        names = list(ways)[:: 1 if repeat % 2 == 0 else -1]
        for index, encoded in enumerate(inputs):
            outputs = {}
            for name in names:
                torch.manual_seed(seed + SEEDS_PER_REPEAT * repeat + index)
                outputs[name] = _called(target, encoded, ways[name], timings[name])
            wanted = outputs[next(iter(ways))]
            for name, timing in timings.items():
                timing.num_differing_outputs += outputs[name] != wanted
    return timings


def _called(target: Any, encoded: Mapping[str, torch.Tensor], keywords: Mapping[str, Any], timing: Timing) -> list[int]:
    streamer = FirstToken()
    started = time.perf_counter()
    output = target.generate(**encoded, **keywords, streamer=streamer, return_dict_in_generate=True)
    # Reading the ids waits for the device, so the clock is read after it.
    new_ids: list[int] = output.sequences[0, encoded["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - started
    timing.first[-1] += streamer.seconds or seconds
    timing.seconds[-1] += seconds
    timing.num_new_tokens[-1] += len(new_ids)
    if (stats := getattr(output, "speculation", None)) is not None:
        timing.calls[-1].append(stats)
    return new_ids
