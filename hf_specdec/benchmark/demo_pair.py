"""The bundled pair, widened: plain decoding, transformers' assisted decoding and ours, interleaved in one process.

Run it on an otherwise idle machine: `python -m hf_specdec.benchmark.demo_pair --output results.json`. For each workload
every method generates the same tokens from the same prompts; a repeat goes once through all methods before the next
starts, so that a slow minute of the machine hits all of them. Speed-ups are medians over repeats of the ratio to the
plain run of the same repeat.
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
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.demo import DEMO_PROMPTS, DemoPair, load_demo_pair

ASSISTED_LENGTHS = (1, 2, 3, 4, 5, 6, 8)
Run = Callable[[Any], Any]


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


def methods(pair: DemoPair, lengths: list[int], settings: dict[str, Any]) -> dict[str, Run]:
    """Return every method as a function of the encoded prompt."""
    target: Any = pair.target
    draft = pair.draft
    runs: dict[str, Run] = {"plain": partial(_run, target, settings)}
    for length in ASSISTED_LENGTHS:
        assistant = copy.deepcopy(draft)
        assistant.generation_config.num_assistant_tokens = length
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        runs[f"assistant_model K={length}"] = partial(_run, target, {**settings, "assistant_model": assistant})
    for length in lengths:
        ours = {"draft_model": draft, "num_draft_tokens": length, "return_dict_in_generate": True}
        runs[f"draft_model K={length}"] = partial(_run, target, {**settings, **ours})
    return runs


def _run(target: Any, settings: dict[str, Any], inputs: Any) -> Any:
    return target.generate(**inputs, **settings)


def measure_workload(
    pair: DemoPair, prompts: list[str], lengths: list[int], repeats: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Time all methods on one workload and check that greedy outputs agree with plain decoding."""
    runs = methods(pair, lengths, settings)
    inputs = [pair.tokenizer(prompt, return_tensors="pt") for prompt in prompts]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first: dict[str, list[float]] = {"plain": [], "draft_model": []}
    differing: dict[str, int] = dict.fromkeys(runs, 0)
    acceptance: dict[str, float] = {}
    for repeat in range(repeats + 1):
        plain_ids: list[torch.Tensor] = []
        for name, run in runs.items():
            elapsed = 0.0
            for index, encoded in enumerate(inputs):
                torch.manual_seed(1000 * repeat + index)
                started = time.perf_counter()
                output = run(encoded)
                elapsed += time.perf_counter() - started
                ids = output if isinstance(output, torch.Tensor) else output.sequences
                if name == "plain":
                    plain_ids.append(ids)
                elif repeat == 0:
                    differing[name] += not torch.equal(ids, plain_ids[index])
                if not isinstance(output, torch.Tensor) and index == 0:
                    acceptance[name] = output.speculation.token_acceptance_rate
            if repeat:  # the first repeat warms up
                seconds[name].append(elapsed)
        if repeat:
            for name, values in first_token_seconds(pair, inputs[0], lengths[0], settings).items():
                first[name].append(values)
    return summary(seconds, first, differing, acceptance, settings["max_new_tokens"] * len(prompts))


def first_token_seconds(pair: DemoPair, inputs: Any, length: int, settings: dict[str, Any]) -> dict[str, float]:
    """Return the time to the first streamed token without and with the draft."""
    result = {}
    short = {**settings, "max_new_tokens": 8, "min_new_tokens": 8}
    for name, extra in (("plain", {}), ("draft_model", {"draft_model": pair.draft, "num_draft_tokens": length})):
        streamer = FirstToken()
        target: Any = pair.target
        target.generate(**inputs, **short, **extra, streamer=streamer)
        result[name] = streamer.seconds
    return result


def summary(
    seconds: dict[str, list[float]],
    first: dict[str, list[float]],
    differing: dict[str, int],
    acceptance: dict[str, float],
    num_tokens: int,
) -> dict[str, Any]:
    """Return medians and quartiles of speed-ups, one entry per method."""
    rows = {}
    for name, values in seconds.items():
        ratios = [plain / value for plain, value in zip(seconds["plain"], values, strict=True)]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        rows[name] = {
            "tokens_per_second": round(num_tokens / statistics.median(values), 2),
            "speedup": round(statistics.median(ratios), 3),
            "speedup_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            "num_differing_outputs": differing[name],
            **({"token_acceptance_rate": round(acceptance[name], 3)} if name in acceptance else {}),
        }
    ratios = [ours / plain for plain, ours in zip(first["plain"], first["draft_model"], strict=True)]
    return {
        "methods": rows,
        "time_to_first_token_seconds": {name: round(statistics.median(v), 4) for name, v in first.items()},
        "time_to_first_token_ratio": round(statistics.median(ratios), 3),
    }


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
        "options": {key: str(value) for key, value in vars(options).items()},
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
    lengths = [int(length) for length in options.lengths.split(",")]
    results: dict[str, Any] = {"provenance": provenance(options), "workloads": {}}
    for workload in options.workloads.split(","):
        sys.stderr.write(f"{workload} …\n")
        results["workloads"][workload] = measure_workload(
            pair, DEMO_PROMPTS[workload], lengths, options.repeats, settings
        )
    text = json.dumps(results, indent=2)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
