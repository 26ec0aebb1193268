"""Write the README's figures from the files in `results/`: `python -m hf_specdec.benchmark.readme README.md`.

A table or a sentence stands between two comments, `<!-- figures: NAME -->` and `<!-- end of figures -->`; what is
between them is replaced. Pictures are drawn anew where matplotlib is installed. `--check` writes nothing and only says
whether tables and sentences are in step.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_specdec.benchmark import quantized_table, readme_tables
from hf_specdec.benchmark.bench import plots
from hf_specdec.benchmark.bench.numbers import with_summaries

RESULTS = Path(__file__).parent / "results"
MARKED = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two comments.

    Attributes:
        make: Makes it of what is in the files, in their order.
        files: Their names in `results/`.
    """

    make: Callable[..., str]
    files: tuple[str, ...]


BLOCKS = {
    "adaptive": Block(readme_tables.adaptive, ("adaptive.json", "adaptive_batch.json")),
    "bench": Block(readme_tables.bench, ("bench.json",)),
    "bench_random": Block(readme_tables.bench_random, ("bench_random.json",)),
    "bench_repeat": Block(readme_tables.bench_repeat, ("bench_repeat.json",)),
    "demo_pair": Block(readme_tables.demo_pair, ("demo_pair.json",)),
    "overhead": Block(readme_tables.overhead, ("overhead.jsonl",)),
    "plan": Block(readme_tables.plan, ("plan.json", "plan_published.json")),
    "quantized_drafts": Block(quantized_table.rendered, ("quantized_drafts.json",)),
    "simulation": Block(readme_tables.simulation, ("simulation.json",)),
    "token_spaces": Block(readme_tables.other_tokenizers, ("token_spaces.json",)),
}
"""By the name in the comment."""

PICTURES = {
    "bench_speed.png": "speed_up_by_workload.png",
    "bench_acceptance.png": "acceptance_by_position.png",
    "bench_lengths.png": "draft_length_over_time.png",
}
"""Files in `results/`, and which picture of `bench.json` each is."""


def written(text: str) -> str:
    """Return a page with its tables and sentences made anew.

    Raises:
        ValueError: A block has a name that is not known.
    """

    def block(found: re.Match[str]) -> str:
        name = found[1]
        if name not in BLOCKS:
            raise ValueError(f"A block of figures must be one of {', '.join(BLOCKS)}, but is {name!r}. Correct it.")
        own = BLOCKS[name]
        return f"<!-- figures: {name} -->\n{own.make(*map(_read, own.files)).strip()}\n<!-- end of figures -->"

    return MARKED.sub(block, text)


def draw_pictures(folder: Path = RESULTS) -> list[str]:
    """Draw the README's pictures, and return their file names.

    Raises:
        SpecDecError: matplotlib is not installed.
    """
    results = with_summaries(_read("bench.json"))
    return [name for name, picture in PICTURES.items() if plots.draw(picture, results, folder / name)]


def _read(name: str) -> Any:
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


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
    if find_spec("matplotlib") is not None:
        draw_pictures()


if __name__ == "__main__":
    main()
