"""`hf-specdec simulate`: draft-length rules on traces, with modelled costs and without any model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.benchmark.rivals import RULES, FixedLengths
from hf_specdec.benchmark.simulator import CostModel, Outcome
from hf_specdec.benchmark.simulator import simulate as run_simulation
from hf_specdec.benchmark.traces import CONFIDENCE_NOISE, WORKLOADS, Trace, synthetic_trace, trace_of
from hf_specdec.errors import SpecDecError
from hf_specdec.metrics import SpeculationStats

_USUAL_FIXED_LENGTH = 5
# Wide enough for the table where the output is no terminal.
_LEAST_WIDTH = 110
_BAR_WIDTH = 48

# A text for each seed.
TraceSource = Callable[[int], Trace]


def simulate(
    cost_ratio: Annotated[
        str, typer.Option(help="Times of a draft step in plain steps, separated by commas.")
    ] = "0.05,0.165,0.3,0.5",
    workload: Annotated[
        str | None,
        typer.Option(help=f"Of {', '.join(WORKLOADS)}, separated by commas.", show_default="all; none with --trace"),
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens per text.")] = 4000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per cell; their mean is shown.")] = 3,
    trace: Annotated[
        list[str] | None,
        typer.Option(help="A JSON file that `SpeculationStats.save` wrote; can be given more than once."),
    ] = None,
    noise: Annotated[float, typer.Option(min=0.0, help="Relative standard deviation of times.")] = 0.0,
    confidence_noise: Annotated[
        float, typer.Option(min=0.0, help="Noise on the made-up confidence, in log-odds.")
    ] = CONFIDENCE_NOISE,
    greedy: Annotated[bool, typer.Option("--greedy", help="Make up texts whose chances are 0 or 1.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and no text.")] = False,
    plot: Annotated[str | None, typer.Option(help="Also draw the speeds into this PNG file.")] = None,
) -> None:
    """Compare rules for the draft length: speeds relative to plain decoding, without running a model."""
    make_figure = _figure_class() if plot else None
    ratios = _ratios(cost_ratio)
    names = workload.split(",") if workload is not None else list(WORKLOADS) * (not trace)
    sources = _synthetic(names, num_tokens, confidence_noise, is_greedy=greedy) | _recorded(trace or [])
    talk = Console(stderr=True, highlight=False)
    cells = []
    for name, source in sources.items():
        with talk.status(f"Simulating {name} …"):
            cells += _simulate_text(name, source, ratios, num_tokens, seeds, noise)
    cells.sort(key=lambda cell: cell.cost_ratio)
    if json_output:
        settings = {"num_tokens": num_tokens, "seeds": seeds, "noise": noise}
        print(json.dumps({**settings, "cells": [cell.to_dict() for cell in cells]}, indent=2))
    else:
        console = Console(highlight=False, width=max(_LEAST_WIDTH, Console().width))
        console.print(_table(cells))
        for cell in cells:
            console.print("\n" + _bars(cell), markup=False)
    if plot and make_figure is not None:
        _draw(make_figure, cells, plot)
        talk.print(f"Drawn to {plot}.", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One text at one cost ratio; speeds are relative to plain decoding, means over the seeds.

    Attributes:
        cost_ratio: Time of a draft step, in plain steps.
        workload: Name of the text.
        fixed: Speed of every fixed length 0, 1, ….
        outcomes: Per rule, how each seed went.
    """

    cost_ratio: float
    workload: str
    fixed: Sequence[float]
    outcomes: Mapping[str, Sequence[Outcome]]

    @property
    def best_length(self) -> int:
        """The fixed length with the highest speed, the shortest of equal ones."""
        return max(range(len(self.fixed)), key=self.fixed.__getitem__)

    @property
    def speeds(self) -> dict[str, float]:
        """Name of the rule → speed, the best and the usual fixed length first."""
        return {
            "best fixed": self.fixed[self.best_length],
            f"fixed {_USUAL_FIXED_LENGTH}": self.fixed[_USUAL_FIXED_LENGTH],
            **{name: fmean(outcome.speed for outcome in outcomes) for name, outcomes in self.outcomes.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "cost_ratio": self.cost_ratio,
            "workload": self.workload,
            "best_fixed_length": self.best_length,
            "fixed": list(self.fixed),
            "speeds": self.speeds,
            "rules": {name: _means(outcomes) for name, outcomes in self.outcomes.items()},
        }


def _means(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        "lowest_speed": min(outcome.speed for outcome in outcomes),
        "mean_draft_tokens": fmean(outcome.mean_draft_tokens for outcome in outcomes),
        "plain_share": fmean(outcome.plain_share for outcome in outcomes),
        "num_probes": fmean(outcome.num_probes for outcome in outcomes),
        "largest_loss": max(outcome.largest_loss for outcome in outcomes),
    }


def _ratios(text: str) -> list[float]:
    ratios = []
    for part in text.split(","):
        try:
            ratios.append(float(part))
        except ValueError:
            ratios.append(-1.0)
        if not 0.0 <= ratios[-1] < float("inf"):
            raise typer.BadParameter(
                f"must be numbers of at least 0, separated by commas, but holds {part!r}.", param_hint="--cost-ratio"
            )
    return ratios


def _synthetic(
    names: Sequence[str], num_tokens: int, confidence_noise: float, *, is_greedy: bool
) -> dict[str, TraceSource]:
    for name in names:
        if name not in WORKLOADS:
            raise typer.BadParameter(f"must be of {', '.join(WORKLOADS)}, but is {name!r}.", param_hint="--workload")

    def source(name: str) -> TraceSource:
        return lambda seed: synthetic_trace(
            name, num_tokens, seed=seed, confidence_noise=confidence_noise, is_greedy=is_greedy
        )

    return {name: source(name) for name in names}


def _recorded(paths: Sequence[str]) -> dict[str, TraceSource]:
    traces = {path: trace_of(SpeculationStats.load(path), Path(path).stem) for path in paths}
    stems = [trace.name for trace in traces.values()]
    # Files of one name from two folders are told apart by their paths.
    names = {path: trace.name if stems.count(trace.name) == 1 else path for path, trace in traces.items()}
    return {names[path]: lambda seed, trace=trace: trace for path, trace in traces.items()}  # type: ignore[misc]


def _simulate_text(
    name: str, source: TraceSource, ratios: Sequence[float], num_tokens: int, seeds: int, noise: float
) -> list[Cell]:
    traces = [source(seed) for seed in range(seeds)]
    lengths = [FixedLengths(trace, num_tokens, seed) for seed, trace in enumerate(traces)]
    cells = []
    for ratio in ratios:
        costs = CostModel(draft_step=ratio, noise=noise)
        outcomes = {
            rule_name: [
                run_simulation(rule.make(), trace, costs, num_tokens, seed=seed, reads_confidence=rule.reads_confidence)
                for seed, trace in enumerate(traces)
            ]
            for rule_name, rule in RULES.items()
        }
        per_seed = [fixed.speeds(ratio) for fixed in lengths]
        means = [fmean(speeds) for speeds in zip(*per_seed, strict=True)]
        cells.append(Cell(cost_ratio=ratio, workload=name, fixed=means, outcomes=outcomes))
    return cells


# ---- what is shown -------------------------------------------------------------------------------------------------


def _table(cells: Sequence[Cell]) -> Table:
    table = Table(box=None, pad_edge=False, title="Speed relative to plain decoding", title_justify="left")
    table.add_column("cost\nratio", justify="right")
    table.add_column("workload")
    for name in cells[0].speeds:
        first, _, last = name.rpartition(" ")
        table.add_column(f"{first}\n{last}".strip(), justify="right")
    for cell in cells:
        speeds = [f"{speed:.2f}" for speed in cell.speeds.values()]
        speeds[0] += f" ({cell.best_length})"
        table.add_row(f"{cell.cost_ratio:g}", cell.workload, *speeds)
    return table


def _bars(cell: Cell) -> str:
    highest = max(cell.speeds.values())
    width = max(map(len, cell.speeds))
    lines = [f"cost ratio {cell.cost_ratio:g}, {cell.workload}"]
    for name, speed in cell.speeds.items():
        bar = "█" * round(_BAR_WIDTH * speed / highest)
        lines.append(f"  {name:<{width}}  {bar} {speed:.2f}")
    return "\n".join(lines)


def _figure_class() -> Callable[..., Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecDecError(
            '`--plot` needs matplotlib, which is not installed. Install it: pip install "hf-specdec[bench]"'
        ) from error
    make: Callable[..., Any] = Figure
    return make


def _draw(make_figure: Callable[..., Any], cells: Sequence[Cell], path: str) -> None:
    workloads = list(dict.fromkeys(cell.workload for cell in cells))
    figure = make_figure(figsize=(11, 3.2 * len(workloads)), layout="constrained")
    panels = figure.subplots(len(workloads), 1, squeeze=False)[:, 0]
    for panel, workload in zip(panels, workloads, strict=True):
        own = [cell for cell in cells if cell.workload == workload]
        names = list(own[0].speeds)
        for index, name in enumerate(names):
            offset = (index - (len(names) - 1) / 2) / (len(names) + 1)
            speeds = [cell.speeds[name] for cell in own]
            panel.bar([place + offset for place in range(len(own))], speeds, 1 / (len(names) + 1), label=name)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_xticks(range(len(own)), [f"{cell.cost_ratio:g}" for cell in own])
        panel.set_title(workload)
        panel.set_xlabel("draft step / plain step")
        panel.set_ylabel("speed / plain decoding")
    panels[0].legend(fontsize="small", ncols=2)
    figure.savefig(path, format="png")
