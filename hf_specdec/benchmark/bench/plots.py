"""Pictures of a benchmark; matplotlib is needed only here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.benchmark.bench.numbers import ADAPTIVE, after_first_token
from hf_specdec.benchmark.bench.report import NOT_COMPARED
from hf_specdec.benchmark.bench.ways import FIXED_PREFIX
from hf_specdec.errors import SpecDecError

Results = Mapping[str, Any]


def figure_class() -> Callable[..., Any]:
    """Return matplotlib's figure.

    Raises:
        SpecDecError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecDecError(
            'Pictures need matplotlib, which is not installed. Install it (pip install "hf-specdec[bench]"), or pass '
            "`--no-plots`."
        ) from error
    make: Callable[..., Any] = Figure
    return make


def draw_all(results: Results, folder: Path) -> list[str]:
    """Draw every picture that the results have something for, and return their file names."""
    return [name for name in _PICTURES if draw(name, results, folder / name)]


def draw(name: str, results: Results, path: Path) -> bool:
    """Draw one picture, and return whether the results have something for it.

    Args:
        name: Its file name in a run's folder.
        results: With summaries.
        path: Where it goes.

    Raises:
        SpecDecError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    if not _PICTURES[name](results, axes):
        return False
    axes.legend(fontsize="x-small", ncols=2)
    # Without the version of what drew it, the same figures give the same file.
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
    return True


def _speed_up_by_workload(results: Results, axes: Any) -> bool:
    workloads = list(dict.fromkeys(cell["workload"] for cell in results["cells"].values()))
    names = [
        name
        for name in dict.fromkeys(name for cell in results["cells"].values() for name in cell["rows"])
        if name not in NOT_COMPARED
    ]
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        heights, lows, highs, places = [], [], [], []
        for place, workload in enumerate(workloads):
            ratios = [
                cell["rows"][name]["speed_up"]
                for cell in results["cells"].values()
                if cell["workload"] == workload and name in cell["rows"]
            ]
            if ratios:
                value = statistics.geometric_mean(ratio["value"] for ratio in ratios)
                heights.append(value)
                lows.append(max(value - statistics.geometric_mean(ratio["low"] for ratio in ratios), 0.0))
                highs.append(max(statistics.geometric_mean(ratio["high"] for ratio in ratios) - value, 0.0))
                places.append(place + (index - (len(names) - 1) / 2) * width)
        axes.bar(places, heights, width, yerr=(lows, highs), label=name, error_kw={"linewidth": 0.8})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("times faster than plain decoding")
    return bool(names)


def _acceptance_by_position(results: Results, axes: Any) -> bool:
    """Draw how often the first, second, … draft token was accepted, at the longest fixed length of each workload."""
    drawn = False
    for key, cell in results["cells"].items():
        # An adaptive length drafts on where it is sure, so that late positions look better than they are.
        fixed = [way for name, way in cell["ways"].items() if name.startswith(FIXED_PREFIX)]
        told = [way["speculation"] for way in fixed if way.get("speculation")]
        rates: list[float] = max((own["acceptance_rate_per_position"] for own in told), key=len, default=[])
        if rates and cell["batch_size"] == 1:
            axes.plot(range(1, len(rates) + 1), rates, marker="o", label=key)
            drawn = True
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1.02)
    return drawn


def _draft_length_over_time(results: Results, axes: Any) -> bool:
    drawn = False
    for key, cell in results["cells"].items():
        lengths = (cell["ways"].get(ADAPTIVE, {}).get("speculation") or {}).get("last_draft_lengths")
        if lengths and cell["batch_size"] == 1:
            # The later ones are thinner, for they cover the earlier ones.
            width = max(5.0 - 1.3 * len(axes.lines), 1.0)
            axes.step(range(len(lengths)), lengths, where="mid", label=key, linewidth=width)
            drawn = True
    axes.set_xlabel("round of the last call")
    axes.set_ylabel("draft tokens (0: plain step)")
    return drawn


def _latency_against_batch(results: Results, axes: Any) -> bool:
    series: dict[str, dict[int, list[float]]] = {}
    for cell in results["cells"].values():
        for name, row in cell["rows"].items():
            per_size = series.setdefault(name, {})
            per_size.setdefault(cell["batch_size"], []).append(row["token_milliseconds_p50"])
    if len({size for per_size in series.values() for size in per_size}) < 2:
        return False
    for name, per_size in series.items():
        sizes = sorted(per_size)
        axes.plot(sizes, [statistics.median(per_size[size]) for size in sizes], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows")
    axes.set_ylabel("ms per token and row, median")
    return True


def _predicted_against_measured(results: Results, axes: Any) -> bool:
    drawn = False
    for key, cell in results["cells"].items():
        pairs = [(value, after_first_token(cell, name)) for name, value in cell["predicted"].items()]
        if pairs:
            axes.scatter(*zip(*pairs, strict=True), label=key, s=18)
            drawn = True
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set_xlabel("times faster after the first token, predicted by the cost model")
    axes.set_ylabel("measured")
    return drawn


_PICTURES: dict[str, Callable[[Results, Any], bool]] = {
    "speed_up_by_workload.png": _speed_up_by_workload,
    "acceptance_by_position.png": _acceptance_by_position,
    "draft_length_over_time.png": _draft_length_over_time,
    "latency_against_batch.png": _latency_against_batch,
    "predicted_against_measured.png": _predicted_against_measured,
}
