"""What the times of the benchmark of quantized drafts say. Pure: numbers in, numbers and text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.benchmark.verdicts import faster, table
from hf_specdec.memory import in_words

UNQUANTIZED = "none"
FIXED = "fixed"
AUTO = "auto"
WAYS = (FIXED, AUTO)
_COLUMNS = ("draft's weights", "predicted", "measured", "draft step", "accepted", "tokens per round")


def with_summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results with their summary renewed: every ratio is that of two runs of the same repeat."""
    rows = results["rows"]
    plain = results["plain"]["seconds"]
    summary: dict[str, Any] = {"plain_again_to_plain": faster(plain, results["plain_again"]["seconds"]), "rows": {}}
    base = rows.get(UNQUANTIZED)
    for kind, row in rows.items():
        own: dict[str, Any] = {f"{way}_to_plain": faster(plain, row[way]["seconds"]) for way in WAYS}
        steps = [part[FIXED]["draft_step_milliseconds"] for part in (row, base) if part is not None]
        if len(steps) == 2 and None not in steps[0] + steps[1]:
            own["draft_step_ratio"] = faster(*steps)
        summary["rows"][kind] = own
    return {**results, "summary": summary}


def rendered(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown: where they were measured, a row per quantization, and the noise."""
    renewed = with_summary(results)
    num_draft_tokens = renewed["provenance"]["options"]["num_draft_tokens"]
    header = [*_COLUMNS, f"speed-up, K = {num_draft_tokens}", "speed-up, adaptive", "outputs unlike plain's"]
    rows = [_row(kind, row, renewed["summary"]["rows"][kind]) for kind, row in renewed["rows"].items()]
    noise = _spread(renewed["summary"]["plain_again_to_plain"])
    return "\n\n".join([_heading(renewed), table(header, rows), f"Plain decoding against itself: {noise}."]) + "\n"


def _row(kind: str, row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    fixed, auto = row[FIXED], row[AUTO]
    differing, outputs = (sum(row[way][key] for way in WAYS) for key in ("num_differing_outputs", "num_outputs"))
    return [
        kind,
        in_words(row["predicted_bytes"]),
        in_words(row["measured_bytes"]),
        f"{_spread(summary['draft_step_ratio'])} ×" if "draft_step_ratio" in summary else "–",
        f"{fixed['acceptance_rate']:.1%}",
        f"{fixed['mean_acceptance_length']:.2f}",
        _spread(summary["fixed_to_plain"]) + _fallbacks(fixed),
        _spread(summary["auto_to_plain"]) + _fallbacks(auto),
        f"{differing} of {outputs}",
    ]


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}–{values['max']:.2f})"


def _fallbacks(method: Mapping[str, Any]) -> str:
    return " (decoded plainly)" if method["fallbacks"] else ""


def _heading(results: Mapping[str, Any]) -> str:
    origin = results["provenance"]
    options = origin["options"]
    packages = ", ".join(f"{name} {origin[name]}" for name in ("torch", "transformers", "bitsandbytes"))
    return (
        f"Target {results['target']['name']} ({results['target']['num_parameters'] / 1e6:.0f} M parameters), draft "
        f"{results['draft']['name']} ({results['draft']['num_parameters'] / 1e6:.1f} M), {options['dtype']}, greedy, "
        f"batch 1, {options['max_new_tokens']} new tokens, {results['num_prompts']} prompts. Medians of "
        f"{options['repeats']} interleaved repeats with their range: a draft step's time as a multiple of the "
        "unquantized draft's, and times faster than plain decoding (whole call). Acceptance is that of the constant K. "
        f"Measured on {origin['date']} on {origin['hardware']}, {packages}."
    )
