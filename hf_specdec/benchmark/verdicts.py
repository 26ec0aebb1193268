"""What the times of the adaptive benchmark say: ratios, bars, and a table. Pure: numbers in, numbers and text out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from hf_specdec.benchmark.cells import (
    ASSISTANT,
    ASSISTANT_PREFIX,
    AUTO,
    FIXED_PREFIX,
    LEARNING,
    PLAIN,
    PLAIN_AGAIN,
    SLOW,
    USELESS,
)

CALL = "call"
AFTER_FIRST_TOKEN = "after_first_token"
BASES = {CALL: "whole call", AFTER_FIRST_TOKEN: "after the first token"}
"""The two times a ratio is taken of. transformers hands out the first token together with all of its first round's, so
that after it fewer tokens are left than elsewhere: only the whole call compares equal work."""

CELL_BARS = {"auto_to_plain": 0.98, "useless_to_plain": 0.98, "slow_to_plain": 0.98, "auto_to_best_fixed": 0.97}
"""The least median, in every cell, of how many times faster the first is than the second."""
MEAN_BARS = {"auto_to_assistant": 1.15, "auto_to_best_assistant": 1.0}
"""The least geometric mean over cells."""
OTHER_MEANS = (
    "auto_to_fixed_picked_elsewhere",
    "auto_to_assistant_picked_elsewhere",
    "assistant_to_plain",
    "plain_again_to_plain",
)
"""Further ratios whose geometric means are given."""

Methods = Mapping[str, Mapping[str, Any]]


def seconds_of(method: Mapping[str, Any], basis: str) -> list[float]:
    """Return a method's time in each repeat."""
    if basis == CALL:
        return list(method["seconds"])
    return [total - first for total, first in zip(method["seconds"], method["seconds_to_first_token"], strict=True)]


def faster(slower: Iterable[float], own: Iterable[float]) -> dict[str, float]:
    """Return how many times faster `own` is, each repeat against the same repeat: the median and the range."""
    ratios = [other / mine for other, mine in zip(slower, own, strict=True)]
    return {
        "median": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
    }


def cell_summary(methods: Methods, basis: str) -> dict[str, Any]:
    """Return a cell's ratios and which bars it meets; what was left out is absent.

    The best length is the one with the highest median against plain decoding, picked after the fact: the more noise and
    lengths there are, the more luck is in it. `…_picked_elsewhere` are the same ratios without that luck.
    """
    seconds = {name: seconds_of(method, basis) for name, method in methods.items()}
    to_plain = {name: faster(seconds[PLAIN], own) for name, own in seconds.items() if name != PLAIN}
    result: dict[str, Any] = {"plain_again_to_plain": to_plain[PLAIN_AGAIN]}
    for key, name in (("auto", AUTO), ("useless", USELESS), ("slow", SLOW), ("assistant", ASSISTANT)):
        if name in seconds:
            result[f"{key}_to_plain"] = to_plain[name]
    for key, prefix in (("fixed", FIXED_PREFIX), ("assistant", ASSISTANT_PREFIX)):
        names = [name for name in seconds if name.startswith(prefix)]
        if not names:
            continue
        best = max(names, key=lambda name: to_plain[name]["median"])
        length = int(best.removeprefix(prefix))
        result[f"best_{key}"] = {"num_draft_tokens": length, "to_plain": to_plain[best]}
        if AUTO in seconds:
            result[f"auto_to_best_{key}"] = faster(seconds[best], seconds[AUTO])
            result[f"auto_to_{key}_picked_elsewhere"] = faster(picked_elsewhere(seconds, names), seconds[AUTO])
    if AUTO in seconds and ASSISTANT in seconds:
        result["auto_to_assistant"] = faster(seconds[ASSISTANT], seconds[AUTO])
    bars = {key: result[key]["median"] >= bar for key, bar in CELL_BARS.items() if key in result}
    return {**result, "bars_met": bars}


def picked_elsewhere(seconds: Mapping[str, list[float]], names: list[str]) -> list[float]:
    """Return, for each repeat, the time of the method that is fastest over all others; of a single repeat, its best."""
    num_repeats = len(seconds[names[0]])
    picked = []
    for repeat in range(num_repeats):
        others = [other for other in range(num_repeats) if other != repeat] or [repeat]
        totals = {name: sum(seconds[name][other] for other in others) for name in names}
        picked.append(seconds[min(totals, key=totals.__getitem__)][repeat])
    return picked


def cell_costs(cell: Mapping[str, Any]) -> dict[str, float]:
    """Return the cell's milliseconds for a plain step (all rows), to a first token, and for one step of each draft."""
    plain = cell["methods"][PLAIN]
    num_steps = cell["num_calls"] * (cell["num_new_tokens"] - 1)
    costs = {
        "plain_step": 1e3 * statistics.median(seconds_of(plain, AFTER_FIRST_TOKEN)) / max(num_steps, 1),
        "first_token": 1e3 * statistics.median(plain["seconds_to_first_token"]) / cell["num_calls"],
    }
    for name, method in cell["methods"].items():
        if name in LEARNING or name.startswith(FIXED_PREFIX):
            costs[f"draft_step of {name}"] = method.get("speculation", {}).get("draft_step_milliseconds", 0.0)
    return {name: round(value, 3) for name, value in costs.items()}


def overall(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return, over the cells' summaries of one basis, the geometric means of all ratios and which bars are met."""
    keys = (*CELL_BARS, *MEAN_BARS, *OTHER_MEANS)
    medians = {key: [own[key]["median"] for own in summaries.values() if key in own] for key in keys}
    means = {
        key: round(math.exp(statistics.fmean(map(math.log, values))), 4) for key, values in medians.items() if values
    }
    in_all_cells = {
        key: {
            "met": not (missed := [name for name, own in summaries.items() if own["bars_met"].get(key) is False]),
            "least": min(medians[key]),
            "missed_in": missed,
        }
        for key in CELL_BARS
        if medians[key]
    }
    bars = {key: {"met": means[key] >= bar, "bar": bar} for key, bar in MEAN_BARS.items() if key in means}
    return {"geometric_means": means, "bars_in_all_cells": in_all_cells, "bars_on_geometric_means": bars}


def with_summaries(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the summaries of every cell and of all of them renewed."""
    cells = {
        key: {
            **cell,
            "costs_in_milliseconds": cell_costs(cell),
            "summary": {basis: cell_summary(cell["methods"], basis) for basis in BASES},
        }
        for key, cell in results["cells"].items()
    }
    summary = {basis: overall({key: cell["summary"][basis] for key, cell in cells.items()}) for basis in BASES}
    return {**results, "cells": cells, "summary": summary if cells else {}}


# --- rendering ------------------------------------------------------------------------------------------------------

_COLUMNS = {
    "plain again": "plain_again_to_plain",
    "auto": "auto_to_plain",
    "best fixed K": "best_fixed",
    "auto / best fixed K": "auto_to_best_fixed",
    "auto, useless draft": "useless_to_plain",
    "auto, slow draft": "slow_to_plain",
    "`assistant_model=`": "assistant_to_plain",
    "its best K": "best_assistant",
    "auto / `assistant_model=`": "auto_to_assistant",
    "auto / its best K": "auto_to_best_assistant",
}


def rendered(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown: ratios of the whole call and after the first token, bars, what `auto` did."""
    renewed = with_summaries(dict(results))
    if not renewed["cells"]:
        return "No cell has been measured.\n"
    parts = [_heading(renewed)]
    for basis, words in BASES.items():
        rows = [_ratio_row(cell, basis) for cell in _sorted(renewed)]
        parts.append(f"Times faster than plain decoding, {words}; bold where a bar is missed:")
        parts.append(table(["workload", "T", "batch", *_COLUMNS], rows))
        parts.append(_bar_lines(renewed["summary"][basis]))
    parts.append(
        "What the adaptive length did (mean K of rounds that draft; plain steps; tokens per row-round; probes):"
    )
    parts.append(table(["workload", "T", "batch", *LEARNING], [_deeds_row(cell) for cell in _sorted(renewed)]))
    return "\n\n".join(parts) + "\n"


def _heading(results: Mapping[str, Any]) -> str:
    origin = results["provenance"]
    options = origin["options"]
    return (
        f"Measured on {origin['date']}: {origin['cores']} cores ({origin['machine']}, {origin['cpu_capability']}), "
        f"{origin['threads']} thread(s), torch {origin['torch']}, transformers {origin['transformers']}, target "
        f"widened by {int(options['num_parameters']):,} parameters, {options['dtype']}, "
        f"{options['max_new_tokens']} new tokens per row. Medians of {options['repeats']} interleaved repeats, with "
        "their range."
    )


def _sorted(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    cells = list(results["cells"].values())
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    return sorted(cells, key=lambda cell: (workloads.index(cell["workload"]), cell["temperature"], cell["batch_size"]))


def _place(cell: Mapping[str, Any]) -> list[str]:
    return [cell["workload"], f"{cell['temperature']:g}", str(cell["batch_size"])]


def _ratio_row(cell: Mapping[str, Any], basis: str) -> list[str]:
    summary = cell["summary"][basis]
    return _place(cell) + [_ratio_text(summary, key) for key in _COLUMNS.values()]


def _ratio_text(summary: Mapping[str, Any], key: str) -> str:
    if key not in summary:
        return "–"
    value = summary[key]
    spread = value.get("to_plain", value)
    text = f"{spread['median']:.2f} ({spread['min']:.2f}–{spread['max']:.2f})"
    if "num_draft_tokens" in value:
        text = f"K={value['num_draft_tokens']}: {text}"
    return text if summary["bars_met"].get(key, True) else f"**{text}**"


def _bar_lines(summary: Mapping[str, Any]) -> str:
    lines = [
        f"- {_words(key)} ≥ {CELL_BARS[key]:.2f} in every cell: {_verdict(bar['met'])} (least {bar['least']:.3f}"
        + (f"; missed in {', '.join(bar['missed_in'])})" if bar["missed_in"] else ")")
        for key, bar in summary["bars_in_all_cells"].items()
    ]
    lines += [
        f"- {_words(key)} ≥ {bar['bar']:.2f} in the geometric mean: {_verdict(bar['met'])} "
        f"({summary['geometric_means'][key]:.3f})"
        for key, bar in summary["bars_on_geometric_means"].items()
    ]
    means = [f"{_words(key)} {mean:.3f}" for key, mean in summary["geometric_means"].items()]
    return "\n".join([*lines, f"- geometric means: {', '.join(means)}"])


def _words(key: str) -> str:
    return key.replace("_to_", " / ").replace("_", " ")


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _deeds_row(cell: Mapping[str, Any]) -> list[str]:
    return _place(cell) + [_deeds(cell["methods"].get(name, {}).get("speculation")) for name in LEARNING]


def _deeds(speculation: Mapping[str, Any] | None) -> str:
    if speculation is None:
        return "–"
    return (
        f"K={speculation['mean_draft_length']:.1f}; {speculation['plain_step_share']:.0%}; "
        f"{speculation['mean_acceptance_length']:.2f}; {speculation['num_probes']}"
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
