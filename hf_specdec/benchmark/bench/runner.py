"""Go through a cell: every way on one batch of prompts before the next batch, backwards in every other repeat."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_specdec.benchmark.bench.calls import TimedCall, timed_call
from hf_specdec.benchmark.bench.grid import Cell, Grid
from hf_specdec.benchmark.bench.ways import PLAIN, Pair, Way, generation_settings
from hf_specdec.memory import held_bytes
from hf_specdec.metrics import SpeculationStats, added_up

SEEDS_PER_REPEAT = 1000
# Of a speculating call's rounds, for the picture of K over time.
MOST_LENGTHS_KEPT = 256
# For the idle check: a product that takes some milliseconds, so often.
CHECK_SIZE = 512
NUM_CHECKS = 30
BUSY_LOAD = 0.3
UNSTEADY = 0.15

Inputs = Mapping[str, torch.Tensor]


def measure_cell(
    pair: Pair,
    ways: Mapping[str, Way],
    batches: Sequence[Inputs],
    cell: Cell,
    grid: Grid,
    on_call: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time all ways in one cell.

    Args:
        pair: What is measured.
        ways: The ways, plain decoding among them; those that are refused here are reported, not run.
        batches: Encoded prompts, `[B, L]` each.
        cell: The situation.
        grid: What cells share.
        on_call: Called after every timed call.

    Returns:
        The cell as JSON types: per way its calls, one entry per batch and repeat, in seconds.
    """
    started = time.perf_counter()
    running = {name: way for name, way in ways.items() if not way.refusal}
    settings = generation_settings(cell.temperature, grid.max_new_tokens)
    calls: dict[str, list[TimedCall]] = {name: [] for name in running}
    differing = dict.fromkeys(running, 0)
    for repeat in range(grid.repeats):
        names = list(running)[:: 1 if repeat % 2 == 0 else -1]
        for index, inputs in enumerate(batches):
            for name in names:
                torch.manual_seed(grid.seed + SEEDS_PER_REPEAT * repeat + index)
                calls[name].append(timed_call(pair.target, inputs, {**settings, **running[name].keywords}))
                on_call()
            for name in running:
                differing[name] += calls[name][-1].token_ids != calls[PLAIN][-1].token_ids
    return {
        **cell._asdict(),
        "num_batches": len(batches),
        "num_new_tokens": grid.max_new_tokens,
        "prompt_tokens": [int(inputs["attention_mask"].sum()) for inputs in batches],
        "measured_in_seconds": round(time.perf_counter() - started, 1),
        "ways": {
            name: _way_values(own, differing[name], is_greedy=not cell.temperature) for name, own in calls.items()
        },
        "refused": {name: way.refusal for name, way in ways.items() if way.refusal},
    }


def warm_up(pair: Pair, ways: Mapping[str, Way], inputs: Inputs, temperature: float, grid: Grid) -> None:
    """Call every way once, untimed: first calls load, probe and compile."""
    settings = generation_settings(temperature, grid.warm_up_tokens)
    for way in ways.values():
        if not way.refusal:
            torch.manual_seed(grid.seed)
            timed_call(pair.target, inputs, {**settings, **way.keywords})


def weights_of(pair: Pair, way: Way, quantized_bytes: Mapping[str, int]) -> int:
    """Return the bytes of the weights that a way needs.

    Args:
        pair: What is measured.
        way: The way.
        quantized_bytes: Of the draft, by quantization other than "none".
    """
    total = held_bytes(pair.target) + pair.ballast_bytes
    if not way.uses_draft:
        return total
    settings = way.keywords.get("speculative_config") or {}
    quantization = settings.get("draft_quantization", "none")
    return total + (quantized_bytes[quantization] if quantization != "none" else held_bytes(pair.draft))


def _way_values(calls: Sequence[TimedCall], num_differing: int, *, is_greedy: bool) -> dict[str, Any]:
    peaks = [call.peak_bytes for call in calls if call.peak_bytes is not None]
    values: dict[str, Any] = {
        "first_seconds": [round(call.first_seconds, 6) for call in calls],
        "seconds": [round(call.seconds, 6) for call in calls],
        "new_tokens": [max(map(len, call.token_ids)) for call in calls],
        "target_forwards": [call.num_target_forwards for call in calls],
        "peak_bytes": max(peaks) if peaks else None,
    }
    if is_greedy:
        values["num_differing_outputs"] = num_differing
    stats = [call.stats for call in calls if call.stats is not None]
    if stats:
        values["speculation"] = speculation_values(stats)
    return values


def speculation_values(calls: Sequence[SpeculationStats]) -> dict[str, Any]:
    """Return what calls with a draft did, together, as JSON types; times in milliseconds."""
    stats = added_up(calls)
    num_steps = sum(stats.draft_lengths)
    return {
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "token_acceptance_rate": round(stats.token_acceptance_rate, 4),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "acceptance_rate_per_position": [round(rate, 4) for rate in stats.acceptance_rate_per_position],
        "mean_draft_length": round(num_steps / stats.num_rounds, 4) if stats.num_rounds else 0.0,
        "plain_step_share": round(stats.num_plain_steps / stats.num_rounds, 4) if stats.num_rounds else 0.0,
        "num_probes": len(stats.probes),
        "draft_step_milliseconds": round(1e3 * stats.draft_seconds / num_steps, 4) if num_steps else 0.0,
        "verify_milliseconds": round(1e3 * stats.verify_seconds / stats.num_rounds, 4) if stats.num_rounds else 0.0,
        "overhead_milliseconds": round(1e3 * stats.overhead_seconds / stats.num_rounds, 4) if stats.num_rounds else 0.0,
        "catch_up_milliseconds": round(1e3 * stats.catch_up_seconds / len(calls), 4),
        "last_draft_lengths": calls[-1].draft_lengths[:MOST_LENGTHS_KEPT],
        "survival": (calls[-1].controller_hints or {}).get("survival"),
        "cost_ratio": (calls[-1].controller_hints or {}).get("cost_ratio"),
        "lane": stats.lane,
        "draft_lane": stats.draft_lane,
        "draft_quantization": stats.draft_quantization,
        "runner": stats.runner,
        "draft_runner": stats.draft_runner,
        "runner_reason": stats.runner_reason,
        "fallbacks": sorted(set(stats.fallbacks)),
        "draft_suspicions": stats.draft_suspicions,
    }


def idle_check() -> dict[str, Any]:
    """Return how busy and how steady the machine is, before anything is measured."""
    matrix = torch.ones(CHECK_SIZE, CHECK_SIZE)
    times = []
    for _ in range(NUM_CHECKS):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - started)
    quartiles = statistics.quantiles(times[NUM_CHECKS // 3 :])
    try:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):  # not everywhere
        load = None
    spread = (quartiles[2] - quartiles[0]) / quartiles[1]
    return {
        "load_per_core": None if load is None else round(load, 3),
        "spread_of_equal_products": round(spread, 4),
        "is_idle": (load is None or load <= BUSY_LOAD) and spread <= UNSTEADY,
    }
