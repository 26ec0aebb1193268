"""What every architecture is expected to do, version by version, and the page made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

EXPECTED = Path(__file__).with_name("expected.json")
PAGE = Path(__file__).parents[2] / "hf_specdec" / "compatibility.md"
# From the worst to the best.
LANES = ("plain", "compatible", "ragged")
Findings = dict[str, dict[str, dict[str, str]]]


def version() -> str:
    """Return the installed transformers' major and minor version."""
    return ".".join(transformers.__version__.split(".")[:2])


def expected() -> Findings:
    """Return group -> type -> what is expected, for the installed version or else the newest that was examined."""
    known: dict[str, Findings] = json.loads(EXPECTED.read_text())
    newest = max(known, key=lambda name: tuple(map(int, name.split("."))))
    return known.get(version(), known[newest])


def is_worse(lane: str, than: str) -> bool:
    """Return whether a lane is worse than another one."""
    return LANES.index(lane) < LANES.index(than)


def write_expected(found: Findings, *, is_complete: bool) -> None:
    """Keep the findings of the installed version, beside those of other types unless they are all there is."""
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    earlier = {} if is_complete else known.get(version(), {})
    known[version()] = {group: {**earlier.get(group, {}), **found[group]} for group in found}
    EXPECTED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def write_page() -> None:
    """Write the page for users from what is kept of all versions."""
    known: dict[str, Findings] = json.loads(EXPECTED.read_text())
    PAGE.write_text(page(known))


TITLES = {
    "causal": "Causal language models",
    "conditional": "Models with an encoder, images or sound in the prompt",
}
HEAD = """# What runs how

Made by `python tests/zoo`, which builds a tiny float32 model of each type in transformers' mappings and compares greedy
decoding with a draft (a noisy copy of the target, and one that is always wrong) to plain decoding, for one prompt and
for two of unequal length. The text was the same in every case below.

- **ragged**: own cache, rows of a batch advance independently. The fastest.
- **compatible**: the model's own cache. Rejected tokens are cut off it, or a recurrent state is set back and the kept
  tokens are read again with the next round. Rows of a batch advance together, by the number that all rows accepted.
- **plain**: `generate` warns and decodes without the draft.
"""


def page(known: Mapping[str, Findings]) -> str:
    """Return the page: for each group one table of all types, in the newest version that has them."""
    versions = sorted(known, key=lambda name: tuple(map(int, name.split("."))))
    parts = [HEAD, f"transformers {' and '.join(versions)}.\n"]
    for group, title in TITLES.items():
        newest = known[versions[-1]].get(group, {})
        parts.append(f"## {title}\n\n{_summary(newest)}\n")
        parts.append("| type | one prompt | batch | not faster, because | in " + " | in ".join(versions) + " |")
        parts.append("| --- | --- | --- | --- |" + " --- |" * len(versions))
        types = sorted({name for findings in known.values() for name in findings.get(group, {})})
        for name in types:
            entries = [known[key].get(group, {}).get(name) for key in versions]
            entry = next(found for found in reversed(entries) if found)
            presence = " | ".join(_presence(found, entry) for found in entries)
            batch = entry.get("batch", "–")
            parts.append(f"| {name} | {entry['single']} | {batch} | {_reason(entry)} | {presence} |")
        parts.append("")
    return "\n".join(parts)


def _summary(found: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for size, title in (("single", "One prompt"), ("batch", "Batch")):
        lanes = [entry[size] for entry in found.values() if size in entry]
        counts = {lane: lanes.count(lane) for lane in reversed(LANES)}
        share = 1 - counts["plain"] / max(1, len(lanes))
        told = ", ".join(f"{count} {lane}" for lane, count in counts.items())
        lines.append(f"- {title}: {len(lanes)} types, {told}; {share:.1%} speculate.")
    return "\n".join(lines)


def _presence(found: Mapping[str, str] | None, shown: Mapping[str, str]) -> str:
    if found is None:
        return "–"
    same = all(found.get(size) == shown.get(size) for size in ("single", "batch"))
    return "yes" if same else f"{found['single']} / {found.get('batch', '–')}"


def _reason(entry: Mapping[str, Any]) -> str:
    reason = str(entry.get("reason", ""))
    return reason.replace("|", "\\|").replace("\n", " ")
