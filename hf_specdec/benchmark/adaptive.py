"""The adaptive draft length on the bundled pair, against plain decoding, every fixed length and assisted decoding.

Run it on an otherwise idle machine: `python -m hf_specdec.benchmark.adaptive --output results.json`. It goes through a
grid of workloads, temperatures and batch sizes, in one process. In each cell a repeat goes once through all methods
before the next starts, and every ratio is that of two runs of the same repeat. Plain decoding runs twice, so that the
noise of a ratio of equal things is known. What the adaptive length has learned stays between calls, as it does for
users; each cell starts with an untimed call. Two further drafts, one useless and one as slow as the target, show what
trying them costs.

The file is written after every cell. A run that is stopped goes on where it was when it is started again with the same
options, or with other cells. `--render results.json` prints the tables.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import hf_specdec
from hf_specdec.benchmark.cells import (
    GROUPS,
    LEARNING,
    RANDOM,
    TEXTS,
    Cell,
    Grid,
    encoded_prompts,
    make_drafts,
    measure,
    runs_of,
)
from hf_specdec.benchmark.demo_pair import ASSISTED_LENGTHS, provenance
from hf_specdec.benchmark.verdicts import CALL, rendered, with_summaries
from hf_specdec.demo import DEMO_PROMPTS, load_demo_pair

WARM_UP_TOKENS = 8
# They choose cells or files; everything else changes what is measured in a cell.
FREE_OPTIONS = {"workloads", "temperatures", "batch_sizes", "output", "render"}


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the grid's cells in the order in which they are measured."""
    return list(
        itertools.starmap(Cell, itertools.product(options.workloads, options.temperatures, options.batch_sizes))
    )


def grid_of(options: argparse.Namespace) -> Grid:
    """Return what the cells share."""
    return Grid(
        lengths=tuple(options.lengths),
        assisted_lengths=tuple(options.assisted_lengths),
        left_out=frozenset(options.leave_out),
        num_prompts=options.num_prompts,
        num_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        warm_up_calls=options.warm_up_calls,
    )


def origin_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return where and with what the figures are measured, the choice of cells aside."""
    fixed = {name: value for name, value in vars(options).items() if name not in FREE_OPTIONS}
    # transformers adapts its confidence threshold only where scikit-learn is installed.
    return {**provenance(argparse.Namespace(**fixed)), "has_scikit_learn": find_spec("sklearn") is not None}


def started_or_resumed(path: Path | None, origin: dict[str, Any]) -> dict[str, Any]:
    """Return results to go on with: those in the file, or empty ones.

    Raises:
        ValueError: What is in the file was measured elsewhere or with other options.
    """
    if path is None or not path.exists():
        return {"provenance": origin, "cells": {}, "summary": {}}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if differing := _differing(results["provenance"], origin):
        raise ValueError(
            f"{str(path)!r} holds figures measured with other settings ({', '.join(differing)}). Give another file, or "
            "the same options as before."
        )
    return results


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names whose values are not the same; a run may take more than a day."""
    earlier, later = ({**values, **values["options"], "options": None, "date": None} for values in (before, now))
    return sorted(name for name in earlier.keys() | later.keys() if earlier.get(name) != later.get(name))


def unfinished(cells: list[Cell], results: dict[str, Any]) -> list[Cell]:
    """Return the cells that the results lack."""
    return [cell for cell in cells if cell.key not in results["cells"]]


def save(results: dict[str, Any], path: Path | None) -> None:
    """Write the results; being stopped meanwhile leaves the previous ones."""
    if path is not None:
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)


def run(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """Measure every cell that `results` lacks and return the completed results."""
    grid = grid_of(options)
    pair = load_demo_pair(num_parameters=options.num_parameters, dtype=getattr(torch, options.dtype))
    hf_specdec.enable(pair.target)
    drafts = make_drafts(pair, options.num_parameters)
    cells = unfinished(cells_of(options), results)
    inputs = {cell: encoded_prompts(pair.tokenizer, cell, grid.num_prompts) for cell in cells}
    short = replace(grid, num_new_tokens=WARM_UP_TOKENS)
    for cell in {cell[1:]: cell for cell in cells}.values():
        for name, method in runs_of(drafts, cell, short).items():
            if name not in LEARNING:  # what they learn here would come on top of the calls that are reported
                method(inputs[cell][0])
    for number, cell in enumerate(cells, start=1):
        sys.stderr.write(f"{cell.key} ({number} of {len(cells)}) …\n")
        results["cells"][cell.key] = measure(runs_of(drafts, cell, grid), inputs[cell], cell, grid)
        results = with_summaries(results)
        save(results, options.output)
        sys.stderr.write(json.dumps(results["cells"][cell.key]["summary"][CALL]) + "\n")
    return results


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = f"{','.join(TEXTS)},{RANDOM}"
    parser.add_argument("--output", type=Path, help="where results go, and come from when there are some")
    parser.add_argument("--render", type=Path, metavar="FILE", help="print a file's tables and measure nothing")
    parser.add_argument("--workloads", type=_workloads, default=_workloads(workloads))
    parser.add_argument("--temperatures", type=_floats, default=[0.0, 0.7, 1.2], help="0 decodes greedily")
    parser.add_argument("--batch-sizes", type=_ints, default=[1, 4])
    parser.add_argument("--lengths", type=_ints, default=[1, 2, 3, 4, 5, 6, 8], help="our fixed draft lengths")
    parser.add_argument(
        "--assisted-lengths", type=_ints, default=_ints(ASSISTED_LENGTHS), help="constant ones of `assistant_model`"
    )
    parser.add_argument("--leave-out", type=_groups, default=[], help=f"methods not to run, of {', '.join(GROUPS)}")
    parser.add_argument("--num-prompts", type=int, default=4, help="prompts of a cell at batch size 1")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per row, never fewer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up-calls", type=int, default=1, help="untimed, of each method that learns, per cell")
    parser.add_argument("--num-parameters", type=int, default=300_000_000)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    return parser


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def _groups(text: str) -> list[str]:
    return _known(text, GROUPS)


def _workloads(text: str) -> list[str]:
    return _known(text, (*DEMO_PROMPTS, RANDOM))


def _known(text: str, names: tuple[str, ...]) -> list[str]:
    given = [part for part in text.split(",") if part]
    if unknown := [part for part in given if part not in names]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, but is {unknown[0]!r}")
    return given


def main() -> None:
    """Measure, or render what was measured; progress goes to stderr."""
    parser = parser_of_options()
    options = parser.parse_args()
    if options.render is not None:
        sys.stdout.write(rendered(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(options.threads)
    try:
        results = started_or_resumed(options.output, origin_of(options))
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(rendered(run(options, results)))


if __name__ == "__main__":
    main()
