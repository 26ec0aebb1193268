"""Write the README's tables from the files in `results/`: `python -m hf_specdec.benchmark.readme README.md`.

A table stands between two comments, `<!-- figures: NAME -->` and `<!-- end of figures -->`; what is between them is
replaced. `--check` only says whether they are in step.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_specdec.benchmark import quantized_table, token_spaces
from hf_specdec.benchmark.bench.numbers import with_summaries
from hf_specdec.benchmark.bench.report import overview
from hf_specdec.benchmark.verdicts import table

RESULTS = Path(__file__).parent / "results"
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)


def _bench(results: dict[str, Any]) -> str:
    return overview(with_summaries(results)) + "\n"


def _simulation(results: dict[str, Any]) -> str:
    names = list(results["cells"][0]["speeds"])
    lines = []
    for cell in results["cells"]:
        speeds = [f"{speed:.2f}" for speed in cell["speeds"].values()]
        speeds[0] += f" ({cell['best_fixed_length']})"
        lines.append([f"{cell['cost_ratio']:g}", cell["workload"], *speeds])
    return table(["cost ratio", "text", *names], lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "bench": _bench,
    "quantized_drafts": quantized_table.rendered,
    "simulation": _simulation,
    "token_spaces": token_spaces.rendered,
}
"""Name of a block, and of the file without its ending, to what makes its table."""


def written(text: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        ValueError: A block has a name that is not known.
    """

    def block(found: re.Match[str]) -> str:
        name = found[1]
        if name not in TABLES:
            raise ValueError(f"A block of figures must be one of {', '.join(TABLES)}, but is {name!r}. Correct it.")
        results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        return f"<!-- figures: {name} -->\n{TABLES[name](results).strip()}\n<!-- end of figures -->"

    return BLOCK.sub(block, text)


def main() -> None:
    """Write or check a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would change")
    options = parser.parse_args()
    before = options.page.read_text(encoding="utf-8")
    after = written(before)
    if options.check:
        sys.exit(int(before != after))
    options.page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
