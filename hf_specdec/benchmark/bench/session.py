"""A whole benchmark: from a pair and a grid to results, written after every cell so that it can be stopped."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from hf_specdec.benchmark.bench.calls import total_memory
from hf_specdec.benchmark.bench.grid import Cell, Grid
from hf_specdec.benchmark.bench.numbers import with_summaries
from hf_specdec.benchmark.bench.runner import Inputs, idle_check, measure_cell, warm_up, weights_of
from hf_specdec.benchmark.bench.ways import Choice, Pair, ways_of
from hf_specdec.benchmark.hardware import hardware_in_words, versions
from hf_specdec.engine.layout import context_of
from hf_specdec.placement import device_of

VERSION = 1
RESULTS = "results.json"
COMPARED = frozenset({"hardware", "threads", "versions", "options"})
"""Of the provenance: what two runs must have in common to be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Who wants to know how far it is.

    Attributes:
        on_start: Called once, with how many of the cells were there already, and how many are to be measured.
        on_cell: Called with each cell's key before it, and how many calls it will time.
        on_call: Called after each of them.
        on_result: Called with the results so far, summaries included, after each cell.
    """

    on_start: Callable[[int, int], None] = lambda _, __: None
    on_cell: Callable[[str, int], None] = lambda _, __: None
    on_call: Callable[[], None] = lambda: None
    on_result: Callable[[dict[str, Any]], None] = lambda _: None


def provenance(options: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return where and with what the figures are measured.

    Args:
        options: Everything that a figure depends on, as JSON types.
        device: What computes.
    """
    return {
        "version": VERSION,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware_in_words(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "total_memory_bytes": total_memory(device),
        "versions": versions(),
        "commit": _commit(),
        # As they come back from a file, where tuples are lists.
        "options": json.loads(json.dumps(options)),
        "idle_check": idle_check(),
    }


def _commit() -> str:
    """Return the commit of a checkout; empty for an installed package."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def started_or_resumed(path: Path, origin: dict[str, Any], pair: Mapping[str, str]) -> dict[str, Any]:
    """Return results to go on with: those in the file, or empty ones.

    Raises:
        ValueError: What is in the file was measured elsewhere or with other options.
    """
    if not path.exists():
        return {"provenance": origin, "pair": dict(pair), "cells": {}}
    results = read_results(path)
    before, now = results["provenance"], origin
    differing = differences(before, now)
    if results["pair"] != pair:
        differing.append("pair")
    if differing:
        raise ValueError(
            f"{str(path)!r} holds figures measured with other settings ({', '.join(differing)}). Give another folder, "
            "or the same options as before."
        )
    return results


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in what two runs' settings differ, as far as it bears on their figures."""
    return [
        name if name != "options" else _differing_options(before[name], now[name])
        for name in sorted(COMPARED)
        if before[name] != now[name]
    ]


def _differing_options(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)


def read_results(path: Path) -> dict[str, Any]:
    """Return the results in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds none.
    """
    path = path / RESULTS if path.is_dir() else path
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        # What cannot be summed up is not ours, or damaged.
        is_ours = not (COMPARED - results["provenance"].keys()) and isinstance(results["pair"], dict)
        if is_ours and not path.name.startswith("suite"):
            with_summaries(results)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{str(path)!r} must be the `results.json` of `hf-specdec bench`, but is something else. Give the file "
            "that a run wrote."
        )
    return dict(results)


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write the results; being stopped meanwhile leaves the previous ones."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def run(
    pair: Pair,
    choice: Choice,
    cells: Sequence[Cell],
    workloads: Mapping[str, Any],
    grid: Grid,
    results: dict[str, Any],
    path: Path,
    watch: Watch,
) -> dict[str, Any]:
    """Measure every cell that `results` lacks and return the completed results."""
    inputs = {cell: encoded(pair, workloads[cell.workload], cell, grid) for cell in cells}
    missing = [cell for cell in cells if not _is_measured(results["cells"].get(cell.key), inputs[cell])]
    watch.on_start(len(cells) - len(missing), len(missing))
    quantized_bytes: dict[str, int] = {}
    warm: set[tuple[Any, ...]] = set()
    for cell in missing:
        ways = ways_of(pair, choice, cell.batch_size)
        num_calls = grid.repeats * len(inputs[cell]) * sum(not way.refusal for way in ways.values())
        watch.on_cell(cell.key, num_calls)
        if (shape := cell[1:]) not in warm:
            warm.add(shape)
            warm_up(pair, ways, inputs[cell][0], cell.temperature, grid)
        values = measure_cell(pair, ways, inputs[cell], cell, grid, watch.on_call)
        if not quantized_bytes:
            quantized_bytes = _quantized_bytes(pair, choice)
        values["prompts"] = digest(inputs[cell])
        for name, own in values["ways"].items():
            own["weight_bytes"] = weights_of(pair, ways[name], quantized_bytes)
        results["cells"][cell.key] = values
        save(results, path)
        watch.on_result(with_summaries(results))
    save(with_summaries(results), path)
    return with_summaries({**results, "cells": {cell.key: results["cells"][cell.key] for cell in cells}})


def _is_measured(values: Mapping[str, Any] | None, inputs: Sequence[Inputs]) -> bool:
    """Return whether a cell was measured on these very prompts: a file of prompts may have changed."""
    return values is not None and values.get("prompts") == digest(inputs)


def digest(inputs: Sequence[Inputs]) -> str:
    """Return a short hash of a cell's token ids."""
    ids = [batch["input_ids"].tolist() for batch in inputs]
    return hashlib.sha256(json.dumps(ids).encode("ascii")).hexdigest()[:16]


def _quantized_bytes(pair: Pair, choice: Choice) -> dict[str, int]:
    """Return the predicted bytes of the draft in each quantization; they were compared with loaded ones."""
    from hf_specdec.memory import skeleton_of, weight_bytes

    kinds = [kind for kind in choice.quantizations if kind != "none"]
    if not kinds:
        return {}
    skeleton = skeleton_of(pair.draft.config, pair.draft.dtype)
    return {kind: weight_bytes(skeleton, kind) for kind in kinds}


def encoded(pair: Pair, workload: Any, cell: Cell, grid: Grid) -> list[Inputs]:
    """Return the cell's batches, padded on the left, `[B, L]` each.

    Args:
        pair: Whose tokenizer and device are used.
        workload: Anything with `encoded`, as `Workload` has it.
        cell: The situation.
        grid: What cells share.
    """
    tokenizer, device = pair.tokenizer, device_of(pair.target)
    contexts = [context for model in (pair.target, pair.draft) if (context := context_of(model)) is not None]
    room = min(contexts) - grid.max_new_tokens if contexts else None
    if room is not None and room < 1:
        raise ValueError(
            f"`--max-new-tokens` must leave room for a prompt, but is {grid.max_new_tokens}, and the models' context "
            f"is {min(contexts)}. Ask for fewer."
        )
    available = len(getattr(workload, "prompts", ())) or grid.num_prompts
    # Only a batch that has more rows than there are prompts holds some of them twice.
    num_batches = max(1, min(grid.num_prompts, available) // cell.batch_size)
    needed = num_batches * cell.batch_size
    rows = workload.encoded(
        tokenizer,
        min(needed, available) if available else needed,
        num_prompt_tokens=cell.num_prompt_tokens or None,
        max_prompt_tokens=room,
        seed=grid.seed,
    )
    rows = list(islice(cycle(rows), needed))
    pad_token_id = 0 if tokenizer is None else tokenizer.pad_token_id
    starts = range(0, len(rows), cell.batch_size)
    return [padded(rows[start : start + cell.batch_size], pad_token_id, device) for start in starts]


def padded(rows: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> Inputs:
    """Return rows of token ids as one batch, the shorter ones padded on the left."""
    width = max(map(len, rows))
    ids = [[pad_token_id] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
