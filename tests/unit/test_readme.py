"""The README's tables are those of the files with results."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_specdec.benchmark.readme import BLOCK, TABLES, written

README = Path(__file__).parents[2] / "README.md"


def test_every_table_is_that_of_its_file() -> None:
    text = README.read_text(encoding="utf-8")
    assert {found[0] for found in BLOCK.findall(text)} == TABLES.keys()
    assert written(text) == text, "run `python -m hf_specdec.benchmark.readme README.md`"


def test_a_stale_table_is_replaced_and_an_unknown_one_refused() -> None:
    page = "before\n<!-- figures: {} -->\nstale\n<!-- end of figures -->\nafter\n"
    renewed = written(page.format("simulation"))
    assert "stale" not in renewed
    assert "| 0.05 | easy |" in renewed
    assert renewed.startswith("before\n")
    assert renewed.endswith("\nafter\n")
    with pytest.raises(ValueError, match=r"must be one of bench, .* but is 'weather'"):
        written(page.format("weather"))
