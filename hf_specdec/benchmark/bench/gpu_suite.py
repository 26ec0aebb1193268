"""Everything that one short run on an accelerator should answer, on synthetic pairs, written part by part.

A run that is stopped, or that runs out of its time, goes on where it was when it is started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_specdec.benchmark.bench import session
from hf_specdec.benchmark.bench.forwards import forward_milliseconds
from hf_specdec.benchmark.bench.grid import Cell, Grid
from hf_specdec.benchmark.bench.subjects import SYNTHETIC, Subject, synthetic_pair
from hf_specdec.benchmark.bench.ways import Choice
from hf_specdec.errors import in_short

RESULTS = "suite.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What a suite measures.

    Attributes:
        shapes: Target and draft, as `make_synthetic_pair` names them.
        acceptance: The set one.
        dtype: Name of the weights' dtype.
        device: Where.
        limit_seconds: No part is begun after so long.
        quantizations: Of the draft.
        runners: Of forwards; in the table calls run with "auto", and those of the first draft also with "eager".
        num_tokens: Tokens per forward: 1 is a step, K + 1 a verification.
        context: Tokens before them.
        batch_sizes: Of the target's forwards and of the table.
        temperatures: Of the table.
        max_new_tokens: Of the table's calls.
        repeats: Of forwards and calls.
    """

    shapes: str = "llama-3-8b:llama-3.2-1b"
    acceptance: float = 0.8
    dtype: str = "bfloat16"
    device: str = "cuda"
    limit_seconds: float = 540.0
    quantizations: Sequence[str] = ("none", "nf4", "int8")
    runners: Sequence[str] = ("eager", "cuda_graph")
    num_tokens: Sequence[int] = (1, 2, 3, 5, 7, 9, 13)
    context: int = 1024
    batch_sizes: Sequence[int] = (1, 8)
    temperatures: Sequence[float] = (0.0, 1.0)
    max_new_tokens: int = 128
    repeats: int = 10


Part = Callable[[], Any]


class _Workshop:
    """The suite's parts; a pair is built when the first part needs it, and one at a time."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self.suite = suite
        self.folder = folder
        self._subject: Subject | None = None
        self._quantization: str | None = None

    def parts(self) -> dict[str, Part]:
        """Return name to what measures it, in order: forwards first, since everything else follows from them."""
        suite = self.suite
        parts: dict[str, Part] = {}
        for quantization in suite.quantizations:
            if quantization == "none":
                for rows in suite.batch_sizes:
                    for runner in suite.runners:
                        name = f"target forwards, {runner}, B={rows}"
                        parts[name] = partial(self._forwards, "target", "none", rows, runner)
            for runner in suite.runners:
                name = f"draft forwards, {quantization}, {runner}"
                parts[name] = partial(self._forwards, "draft", quantization, 1, runner)
            for temperature in suite.temperatures:
                for rows in suite.batch_sizes if quantization == "none" else (1,):
                    cell = Cell(SYNTHETIC, temperature, rows)
                    parts[f"table, draft {quantization}, {cell.key}"] = partial(self._table, quantization, cell)
        return parts

    def _pair(self, quantization: str) -> Subject:
        if self._subject is None or self._quantization != quantization:
            self._subject = None  # first free it: two targets do not fit
            suite = self.suite
            dtype = getattr(torch, suite.dtype)
            self._subject = synthetic_pair(suite.shapes, suite.acceptance, dtype, suite.device, 0, quantization)
            self._quantization = quantization
        return self._subject

    def _forwards(self, role: str, quantization: str, num_rows: int, runner: str) -> Any:
        suite = self.suite
        model = getattr(self._pair(quantization).pair, role)
        counts = list(suite.num_tokens) if role == "target" else [1, 2]
        return forward_milliseconds(
            model,
            counts,
            context=suite.context,
            batch_size=num_rows,
            repeats=max(suite.repeats, 2),
            runner=runner,
        )

    def _table(self, quantization: str, cell: Cell) -> Any:
        subject, suite = self._pair(quantization), self.suite
        grid = Grid(
            max_new_tokens=suite.max_new_tokens, num_prompts=max(2, cell.batch_size), repeats=max(2, suite.repeats // 4)
        )
        left_out = set() if quantization == "none" else {"plain-compiled", "assistant", "assistant-lengths"}
        choice = Choice(
            lengths=(4, 6),
            assisted_lengths=(4,),
            runners=("auto", "eager") if quantization == "none" else ("auto",),
            left_out=frozenset(left_out | {"prompt-lookup"}),
        )
        results = {"provenance": {}, "pair": subject.names, "cells": {}}
        path = self.folder / f"{RESULTS}.cell"
        done = session.run(
            subject.pair, choice, [cell], {SYNTHETIC: subject.prompts}, grid, results, path, session.Watch()
        )
        path.unlink()
        return done


def run_suite(
    suite: Suite, folder: Path, on_part: Callable[[str], None] = lambda _: None, parts: Mapping[str, Part] | None = None
) -> dict[str, Any]:
    """Measure every part that the folder's file lacks, as long as there is time.

    Args:
        suite: What to measure.
        folder: Where `suite.json` is, or goes.
        on_part: Called with the name of each part before it.
        parts: Instead of the suite's own.

    Raises:
        ValueError: The file holds another suite's results.
    """
    path = folder / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    origin = session.provenance(asdict(suite), torch.device(suite.device))
    pair = {"target": suite.shapes, "draft": "", "note": f"acceptance set to {suite.acceptance}, not measured"}
    results = session.started_or_resumed(path, origin, pair)
    started = time.monotonic()
    results["not_begun"] = []
    for name, measure in (_Workshop(suite, folder).parts() if parts is None else parts).items():
        if name in results["cells"]:
            continue
        if time.monotonic() - started > suite.limit_seconds:
            results["not_begun"].append(name)
            continue
        on_part(name)
        begun = time.monotonic()
        try:
            measured = measure()
        except Exception as error:  # noqa: BLE001  one part that fails must not cost the others
            measured = {"error": in_short(error)}
        results["cells"][name] = {"result": measured, "seconds": round(time.monotonic() - begun, 1)}
        session.save(results, path)
    session.save(results, path)
    return results
