"""Show a benchmark: a table in the terminal, a report in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hf_specdec.benchmark.bench.numbers import ADAPTIVE
from hf_specdec.benchmark.bench.ways import ASSISTANT, OURS_PREFIX, PLAIN, PLAIN_AGAIN
from hf_specdec.benchmark.verdicts import table

HEADER = (
    "way",
    "tokens/s per row",
    "first token, ms",
    "ms/token p50",
    "p95",
    "memory",
    "accepted",
    "tokens per round",
    "K",
    "times faster",
)
# A way that is this much faster or slower than plain decoding beyond its interval is said to be so.
EQUAL = 0.03


def row_texts(name: str, row: Mapping[str, Any], way: Mapping[str, Any]) -> list[str]:
    """Return a way's line of the table."""
    told = way.get("speculation")
    ratio = row["speed_up"]
    speed = "" if name == PLAIN else f"{ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
    if row["is_wrong"]:
        speed += f", {way['num_differing_outputs']} outputs differ"
    return [
        name,
        f"{row['tokens_per_second_per_row']:.1f}",
        f"{row['first_token_milliseconds']:.0f}",
        f"{row['token_milliseconds_p50']:.1f}",
        f"{row['token_milliseconds_p95']:.1f}",
        _memory(row),
        f"{told['acceptance_rate']:.0%}" if told else "",
        f"{told['mean_acceptance_length']:.2f}" if told else f"{row['tokens_per_target_forward']:.2f}",
        f"{told['mean_draft_length']:.1f}" if told else "",
        speed,
    ]


def _memory(row: Mapping[str, Any]) -> str:
    if "memory_bytes" not in row:
        return ""
    share = f" ({row['memory_share']:.0%})" if "memory_share" in row else ""
    return f"{row['memory_bytes'] / 1e9:.2f} GB{share}"


def cell_table(key: str, cell: Mapping[str, Any]) -> Table:
    """Return a cell's table for the terminal."""
    shown = Table(*HEADER, title=key, title_justify="left")
    for name, row in cell["rows"].items():
        style = "red" if row["is_wrong"] else ("bold" if name.startswith(OURS_PREFIX) else "")
        shown.add_row(*row_texts(name, row, cell["ways"][name]), style=style)
    return shown


def markdown(results: Mapping[str, Any], plots: Sequence[str] = ()) -> str:
    """Return the whole report.

    Args:
        results: With summaries.
        plots: Names of pictures that lie beside it.
    """
    parts = [f"# {results['pair']['target']} with {results['pair']['draft']}", _introduction(results)]
    parts += [f"![{name}]({name})" for name in plots]
    parts += ["## Over all cells", overview(results), verdict(results), "## Cell by cell"]
    for key, cell in results["cells"].items():
        rows = [row_texts(name, row, cell["ways"][name]) for name, row in cell["rows"].items()]
        parts += [f"### {key}", table(list(HEADER), rows)]
        if cell["refused"]:
            parts.append("Not run: " + "; ".join(f"{name} ({why})" for name, why in cell["refused"].items()) + ".")
        parts += _remarks(cell)
    return "\n\n".join(parts) + "\n"


def origin_in_words(results: Mapping[str, Any]) -> str:
    """Return when, where and with what the figures were measured, and what to know about the pair."""
    origin = results["provenance"]
    options = origin["options"]
    check = origin["idle_check"]
    busy = "" if check["is_idle"] else " **The machine was not idle when this began: do not trust small differences.**"
    note = f" {results['pair']['note']}" if results["pair"]["note"] else ""
    commit = f"commit {origin['commit']}; " if origin["commit"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    return (
        f"Measured on {origin['date']} on {origin['hardware']}, {versions}, "
        f"{commit}{options['dtype']}, {options['max_new_tokens']} new tokens per row, "
        f"{options['num_prompts']} prompts, {options['repeats']} repeats, all ways interleaved in one process."
        f"{note}{busy}"
    )


def _introduction(results: Mapping[str, Any]) -> str:
    return (
        f"{origin_in_words(results)}\n\n"
        "Times faster than plain decoding: the ratio of summed times, with its 95 % interval, in which the noise of "
        f"plain decoding against itself ({results['noise']:.1%}) is contained. Memory is that of the weights a way "
        "needs and of what its calls took beyond. Tokens per round are tokens per forward of the target where "
        "transformers does not tell."
    )


def overview(results: Mapping[str, Any]) -> str:
    """Return how many times faster each way is than plain decoding, in every cell and in the geometric mean."""
    cells = results["cells"]
    rows = []
    for name, mean in results["means"].items():
        if name == PLAIN:
            continue
        ratios = [cell["rows"].get(name, {}).get("speed_up") for cell in cells.values()]
        rows.append([name, *(_interval(ratio) if ratio else "" for ratio in ratios), f"{mean:.2f}"])
    return table(["times faster than plain decoding", *cells, "geometric mean"], rows)


def verdict(results: Mapping[str, Any]) -> str:
    """Say in a sentence what a reader should take away; empty where ours did not run."""
    ours = {name: value for name, value in results["means"].items() if name.startswith(OURS_PREFIX)}
    if not ours:
        return ""
    best = max(ours, key=ours.__getitem__)
    # What plain decoding against itself varies by is no gain.
    margin = max(EQUAL, results["noise"])
    if ours[best] > 1 + margin:
        return f"The fastest of ours is `{best}`, {ours[best]:.2f} times as fast as plain decoding."
    adaptive = ours.get(ADAPTIVE)
    if adaptive is None:
        return f"This draft does not pay here, at the lengths that were tried{_assisted(results)}."
    told = f"as fast as without it ({adaptive:.2f})"
    if abs(adaptive - 1) > margin:
        told = f"{adaptive:.2f} times as fast as without it"
    return f"This draft does not pay here: left to adapt, decoding is {told}{_assisted(results)}."


def _assisted(results: Mapping[str, Any]) -> str:
    """Return how a sentence about a bad draft goes on where transformers' own ways with it are slow."""
    hosts = [value for name, value in results["means"].items() if name.startswith(ASSISTANT)]
    if not hosts or max(hosts) >= 1 - EQUAL:
        return ""
    return f"; `{ASSISTANT}` with it is at best {max(hosts):.2f} times as fast"


def _remarks(cell: Mapping[str, Any]) -> list[str]:
    """Return what else happened in a cell: fallbacks, and signs of a broken draft."""
    lines = []
    for name, way in cell["ways"].items():
        told = way.get("speculation") or {}
        lines += [f"`{name}`: {text}" for text in (*told.get("fallbacks", []), *told.get("draft_suspicions", []))]
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def comparison_text(differing: Sequence[Mapping[str, Any]], count: int) -> str:
    """Return what changed between two runs beyond noise, in Markdown."""
    agreeing = count - len(differing)
    lines = [f"{agreeing} of {count} speed-ups agree within their intervals."]
    if not count:
        return "The two runs have no cell in common.\n"
    if differing:
        rows = [[own["cell"], own["way"], _interval(own["first"]), _interval(own["second"])] for own in differing]
        lines += ["", table(["cell", "way", "first", "second"], rows)]
    return "\n".join(lines) + "\n"


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


NOT_COMPARED = frozenset({PLAIN, PLAIN_AGAIN})
