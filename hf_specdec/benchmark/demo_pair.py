"""The bundled pair, widened: plain decoding, transformers' assisted decoding and ours, interleaved in one process.

Run it on an otherwise idle machine: `python -m hf_specdec.benchmark.demo_pair --output results.json`. For each workload
every method generates the same tokens from the same prompts; a repeat goes once through all methods before the next
starts, so that a slow minute of the machine hits all of them. Speed-ups are medians over repeats of the ratio to the
plain run of the same repeat, after the first token (what a draft can change) and of the whole call.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.demo import DEMO_PROMPTS, DemoPair, load_demo_pair

ASSISTED_LENGTHS = "1,2,3,4,5,6,8"
Run = Callable[[Any], tuple[Any, float, float]]


class FirstToken(BaseStreamer):
    """Notes when the first token after the prompt arrives."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.num_puts = 0
        self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Count a put; the first is the prompt."""
        self.num_puts += 1
        if self.num_puts == 2:
            self.seconds = time.perf_counter() - self.started

    def end(self) -> None:
        """Nothing is left to do."""


def methods(
    pair: DemoPair, lengths: list[int], assisted_lengths: list[int], settings: dict[str, Any]
) -> dict[str, Run]:
    """Return every method as a function of the encoded prompt."""
    target: Any = pair.target
    draft = pair.draft
    runs: dict[str, Run] = {"plain": partial(_run, target, settings)}
    for length in assisted_lengths:
        assistant = copy.deepcopy(draft)
        assistant.generation_config.num_assistant_tokens = length
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        runs[f"assistant_model K={length}"] = partial(_run, target, {**settings, "assistant_model": assistant})
    for length in lengths:
        ours = {"draft_model": draft, "num_draft_tokens": length, "return_dict_in_generate": True}
        runs[f"draft_model K={length}"] = partial(_run, target, {**settings, **ours})
    return runs


def _run(target: Any, settings: dict[str, Any], inputs: Any) -> tuple[Any, float, float]:
    """Generate once; return the output and the seconds until the first token and until the end."""
    streamer = FirstToken()
    started = time.perf_counter()
    output = target.generate(**inputs, **settings, streamer=streamer)
    return output, streamer.seconds, time.perf_counter() - started


def measure_workload(pair: DemoPair, prompts: list[str], runs: dict[str, Run], repeats: int) -> dict[str, Any]:
    """Time all methods on one workload and check that greedy outputs agree with plain decoding."""
    inputs = [pair.tokenizer(prompt, return_tensors="pt") for prompt in prompts]
    times: dict[str, list[Times]] = {name: [] for name in runs}
    differing: dict[str, int] = dict.fromkeys(runs, 0)
    acceptance: dict[str, list[float]] = {}
    for repeat in range(repeats):
        plain_ids: list[torch.Tensor] = []
        for name, run in runs.items():
            first = total = 0.0
            for index, encoded in enumerate(inputs):
                torch.manual_seed(1000 * repeat + index)
                output, first_seconds, seconds = run(encoded)
                first, total = first + first_seconds, total + seconds
                ids = output if isinstance(output, torch.Tensor) else output.sequences
                plain_ids += [ids] if name == "plain" else []
                differing[name] += repeat == 0 and not torch.equal(ids, plain_ids[index])
                if not isinstance(output, torch.Tensor):
                    acceptance.setdefault(name, []).append(output.speculation.mean_acceptance_length)
            times[name].append(Times(first, total))
    return {name: summary(times["plain"], own, differing[name], acceptance.get(name)) for name, own in times.items()}


class Times(NamedTuple):
    """Seconds until the first token and until the end, summed over the prompts of one repeat."""

    first: float
    total: float


def summary(plain: list[Times], own: list[Times], num_differing: int, lengths: list[float] | None) -> dict[str, Any]:
    """Return medians over repeats of the ratios to the plain run of the same repeat, with their range."""
    decoding = [(p.total - p.first) / (o.total - o.first) for p, o in zip(plain, own, strict=True)]
    whole = [p.total / o.total for p, o in zip(plain, own, strict=True)]
    first = [o.first / p.first for p, o in zip(plain, own, strict=True)]
    result = {
        "speedup_after_first_token": _with_range(decoding),
        "speedup_of_the_call": _with_range(whole),
        "time_to_first_token_ratio": _with_range(first),
        "seconds_after_first_token": round(statistics.median(o.total - o.first for o in own), 3),
        "num_differing_outputs": num_differing,
    }
    if lengths is not None:
        result["mean_acceptance_length"] = round(statistics.mean(lengths), 2)
    return result


def _with_range(ratios: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Return where and with what the figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "hf-specdec") if _is_installed(name)},
        # Where results go says nothing about them, and a page about somebody's folders.
        "options": {key: str(value) for key, value in vars(options).items() if key not in ("output", "render")},
    }


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except ModuleNotFoundError:
        return False
    return True


def main() -> None:
    """Measure and print JSON; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="code,docs,json,prose")
    parser.add_argument("--lengths", default="5", help="our draft lengths, comma-separated; the first is the default's")
    parser.add_argument("--assisted-lengths", default=ASSISTED_LENGTHS, help="constant lengths for `assistant_model`")
    parser.add_argument("--num-prompts", type=int, default=4, help="prompts per workload")
    parser.add_argument("--num-parameters", type=int, default=300_000_000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = load_demo_pair(num_parameters=options.num_parameters, dtype=getattr(torch, options.dtype))
    hf_specdec.enable(pair.target)
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": options.max_new_tokens,
        "do_sample": options.temperature > 0,
    }
    if options.temperature > 0:
        settings.update(temperature=options.temperature, top_k=0)
    lengths, assisted_lengths = (
        [int(length) for length in text.split(",")] for text in (options.lengths, options.assisted_lengths)
    )
    runs = methods(pair, lengths, assisted_lengths, settings)
    for run in methods(
        pair, lengths, assisted_lengths, {**settings, "max_new_tokens": 8, "min_new_tokens": 8}
    ).values():
        run(pair.tokenizer(DEMO_PROMPTS["code"][0], return_tensors="pt"))  # the warm-up
    results: dict[str, Any] = {"provenance": provenance(options), "workloads": {}}
    for workload in options.workloads.split(","):
        sys.stderr.write(f"{workload} …\n")
        prompts = DEMO_PROMPTS[workload][: options.num_prompts]
        results["workloads"][workload] = measure_workload(pair, prompts, runs, options.repeats)
        if options.output is not None:
            options.output.write_text(json.dumps(results, indent=2) + "\n")
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
