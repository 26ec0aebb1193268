"""What the times of a benchmark say: speeds, ratios, and how sure they are. Pure: numbers in, numbers out."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hf_specdec.benchmark.bench.ways import ASSISTANT_PREFIX, FIXED_PREFIX, OURS_PREFIX, PLAIN, PLAIN_AGAIN

NUM_RESAMPLES = 1000
CONFIDENCE = 0.95
ADAPTIVE = f"{OURS_PREFIX}adaptive"

WayValues = Mapping[str, Any]


def seconds_per_token(way: WayValues) -> list[float]:
    """Return the time of each call by the tokens that each row got."""
    return [seconds / max(count, 1) for seconds, count in zip(way["seconds"], way["new_tokens"], strict=True)]


def token_times(way: WayValues) -> list[float]:
    """Return for each call the mean seconds per token after the first, as servers report it (TPOT)."""
    calls = zip(way["seconds"], way["first_seconds"], way["new_tokens"], strict=True)
    return [(seconds - first) / max(count - 1, 1) for seconds, first, count in calls]


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of values, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def speed_up(plain: Sequence[float], own: Sequence[float], noise: float = 0.0, seed: int = 0) -> dict[str, float]:
    """Return how many times faster `own` is than `plain`, call by call, with a bootstrap interval.

    The value is the ratio of the summed times. The interval resamples pairs of calls (the same prompt and repeat), and
    is widened by `noise`: between two runs a machine differs by more than within one.

    Args:
        plain: Seconds per token of plain decoding's calls.
        own: The same of another way, in the same order.
        noise: Standard deviation of the logarithm of a ratio that should be 1.
        seed: Of the resampling.
    """
    pairs = list(zip(plain, own, strict=True))
    value = sum(plain) / sum(own)
    draw = random.Random(seed)
    logs = []
    for _ in range(NUM_RESAMPLES):
        chosen = draw.choices(pairs, k=len(pairs))
        logs.append(
            math.log(sum(pair[0] for pair in chosen) / sum(pair[1] for pair in chosen)) + draw.gauss(0.0, noise)
        )
    tail = (1 - CONFIDENCE) / 2
    return {
        "value": round(value, 4),
        "low": round(min(math.exp(quantile(logs, tail)), value), 4),
        "high": round(max(math.exp(quantile(logs, 1 - tail)), value), 4),
    }


def noise_of(cells: Sequence[Mapping[str, Any]]) -> float:
    """Return the standard deviation of the logarithm of plain decoding's speed against itself, over the cells."""
    ratios = [
        math.log(sum(seconds_per_token(cell["ways"][PLAIN])) / sum(seconds_per_token(cell["ways"][PLAIN_AGAIN])))
        for cell in cells
        if PLAIN_AGAIN in cell["ways"]
    ]
    # Around 0, which is where they should be; both runs of a comparison have it, hence no division.
    return math.sqrt(statistics.fmean(ratio * ratio for ratio in ratios)) if ratios else 0.0


def way_summary(
    name: str, way: WayValues, plain: WayValues, *, batch_size: int, noise: float, total_memory: int | None
) -> dict[str, Any]:
    """Return a way's row of the table, as JSON types; times in milliseconds.

    Args:
        name: Of the way.
        way: Its calls.
        plain: Plain decoding's calls in the same cell.
        batch_size: Rows of each call.
        noise: See `speed_up`.
        total_memory: Bytes of the device.
    """
    per_token, later = seconds_per_token(way), token_times(way)
    row: dict[str, Any] = {
        "tokens_per_second_per_row": round(len(per_token) / sum(per_token), 3),
        "tokens_per_second": round(batch_size * len(per_token) / sum(per_token), 3),
        "first_token_milliseconds": round(1e3 * statistics.median(way["first_seconds"]), 3),
        "token_milliseconds_p50": round(1e3 * quantile(later, 0.5), 3),
        "token_milliseconds_p95": round(1e3 * quantile(later, 0.95), 3),
        "speed_up": speed_up(seconds_per_token(plain), per_token, noise),
        "tokens_per_target_forward": round(sum(way["new_tokens"]) / max(sum(way["target_forwards"]), 1), 3),
        "is_wrong": bool(way.get("num_differing_outputs")) and name not in (PLAIN, PLAIN_AGAIN),
    }
    if way.get("peak_bytes") is not None:
        row["memory_bytes"] = way["peak_bytes"] + way.get("weight_bytes", 0)
        if total_memory:
            row["memory_share"] = round(row["memory_bytes"] / total_memory, 4)
    return row


def with_summaries(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the rows of every cell and the means over cells renewed."""
    noise = noise_of(list(results["cells"].values()))
    total = results["provenance"].get("total_memory_bytes")
    cells = {}
    for key, cell in results["cells"].items():
        plain = cell["ways"][PLAIN]
        rows = {
            name: way_summary(name, way, plain, batch_size=cell["batch_size"], noise=noise, total_memory=total)
            for name, way in cell["ways"].items()
        }
        cells[key] = {**cell, "rows": rows, "predicted": predicted(cell)}
    return {**results, "cells": cells, "noise": round(noise, 5), "means": geometric_means(cells)}


def geometric_means(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return each way's geometric mean of speed-ups over the cells that it ran in, and that of the best assistant."""
    logs: dict[str, list[float]] = {}
    for cell in cells.values():
        values = {name: row["speed_up"]["value"] for name, row in cell["rows"].items()}
        assisted = [value for name, value in values.items() if name.startswith(ASSISTANT_PREFIX)]
        if assisted:
            values["best assistant_model K in each cell"] = max(assisted)
        for name, value in values.items():
            logs.setdefault(name, []).append(math.log(value))
    return {name: round(math.exp(statistics.fmean(own)), 4) for name, own in logs.items()}


def predicted(cell: Mapping[str, Any]) -> dict[str, float]:
    """Return the speed-up after the first token that the cost model expects of each of our fixed draft lengths.

    A token takes (v + K · d) / (1 + S_1 + … + S_K), and its share of what the draft took to read the prompt. Survival S
    is what the adaptive run learned; the times d of a draft step and v of a verification are the length's own.
    """
    learned = cell["ways"].get(ADAPTIVE, {}).get("speculation") or {}
    survival = learned.get("survival")
    if not survival or learned["plain_step_share"] == 1.0:
        return {}
    plain = 1e3 * statistics.fmean(token_times(cell["ways"][PLAIN]))
    expected = {}
    for name, way in cell["ways"].items():
        length = name.removeprefix(FIXED_PREFIX)
        if length == name or not length.isdecimal():
            continue
        told = way["speculation"]
        spent = told["verify_milliseconds"] + told["overhead_milliseconds"]
        spent += int(length) * told["draft_step_milliseconds"]
        per_token = spent / (1 + sum(survival[: int(length)]))
        per_token += told["catch_up_milliseconds"] / max(statistics.fmean(way["new_tokens"]) - 1, 1)
        expected[name] = round(plain / per_token, 4)
    return expected


def after_first_token(cell: Mapping[str, Any], name: str) -> float:
    """Return how many times faster a way is than plain decoding once the first token is there."""
    return sum(token_times(cell["ways"][PLAIN])) / sum(token_times(cell["ways"][name]))


def disagreements(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return where two runs' intervals of a speed-up do not overlap, and in how many places both have one."""
    differing, count = [], 0
    for key, cell in first["cells"].items():
        other = second["cells"].get(key)
        if other is None:
            continue
        for name in cell["rows"].keys() & other["rows"].keys() - {PLAIN}:
            mine, theirs = cell["rows"][name]["speed_up"], other["rows"][name]["speed_up"]
            count += 1
            if mine["high"] < theirs["low"] or theirs["high"] < mine["low"]:
                differing.append({"cell": key, "way": name, "first": mine, "second": theirs})
    return sorted(differing, key=lambda own: (own["cell"], own["way"])), count
