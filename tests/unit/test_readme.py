"""The README's tables, sentences and pictures are those of the files with results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.benchmark import readme, readme_tables
from hf_specdec.benchmark.readme import BLOCKS, MARKED, PICTURES, RESULTS, draw_pictures, written

README = Path(__file__).parents[2] / "README.md"
# Of the checkout: an installed package has none.
PICTURE_FOLDER = README.parent / "hf_specdec" / "benchmark" / "results"
MOST_BYTES = 60_000

# Headers of tables that hold digits and no measurement.
MEASURE_NOTHING: frozenset[str] = frozenset()
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
# As times, ratios and intervals are written here; limits and settings have fewer places.
MEASURED = re.compile(r"(?<![\w.])(?<!Python )(?<!transformers )\d+\.\d\d(?![\d.])")


def loose_figures(page: str) -> list[str]:
    """Return tables with digits, and lines with figures, that stand in no block."""
    text = FENCED.sub("", MARKED.sub("", page))
    tables = [table for table in TABLE.findall(text) if re.search(r"\d", table)]
    found = [table for table in tables if table.splitlines()[0] not in MEASURE_NOTHING]
    return found + [line for line in TABLE.sub("", text).splitlines() if MEASURED.search(line)]


def file_of(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_every_table_is_that_of_its_file() -> None:
    text = README.read_text(encoding="utf-8")
    assert {found[0] for found in MARKED.findall(text)} == BLOCKS.keys()
    assert written(text) == text, "run `python -m hf_specdec.benchmark.readme README.md`"


def test_every_figure_stands_in_a_block() -> None:
    page = README.read_text(encoding="utf-8")
    assert not loose_figures(page)
    for table in ("| way | speed |\n| --- | --- |\n| ours | 2 |\n", "| 7 | speed |\n| --- | --- |\n"):
        assert loose_figures(f"{page}\n{table}") == [table]
    assert loose_figures(f"{page}\nIt is 2.31 times as fast.\n") == ["It is 2.31 times as fast."]


def test_the_page_says_where_every_figure_comes_from() -> None:
    text = MARKED.sub("", README.read_text(encoding="utf-8"))
    assert not [name for block in BLOCKS.values() for name in block.files if name not in text]


def test_a_stale_table_is_replaced_and_an_unknown_one_refused() -> None:
    page = "before\n<!-- figures: {} -->\nstale\n<!-- end of figures -->\nafter\n"
    renewed = written(page.format("simulation"))
    assert "stale" not in renewed
    assert "| 0.05 | easy |" in renewed
    assert renewed.startswith("before\n")
    assert renewed.endswith("\nafter\n")
    with pytest.raises(ValueError, match=r"must be one of adaptive, .* but is 'weather'"):
        written(page.format("weather"))


def test_pictures_are_there_small_and_shown() -> None:
    text = README.read_text(encoding="utf-8")
    for name in PICTURES:
        size = (PICTURE_FOLDER / name).stat().st_size
        assert 1000 < size < MOST_BYTES, name
        assert f"](hf_specdec/benchmark/results/{name})" in text
    assert {path.name for path in PICTURE_FOLDER.glob("*.png")} == PICTURES.keys()


def test_pictures_are_drawn_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text("Nothing to see.\n", encoding="utf-8")
    assert set(draw_pictures(tmp_path)) == PICTURES.keys()
    before = {name: (tmp_path / name).read_bytes() for name in PICTURES}
    draw_pictures(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in PICTURES} == before
    drawn: list[None] = []
    monkeypatch.setattr(readme, "draw_pictures", lambda: drawn.append(None))
    monkeypatch.setattr("sys.argv", ["readme", str(page), "--check"])
    with pytest.raises(SystemExit) as ended:
        readme.main()
    assert ended.value.code == 0
    assert not drawn
    monkeypatch.setattr("sys.argv", ["readme", str(page)])
    readme.main()
    assert drawn


# ---- what the words say --------------------------------------------------------------------------------------------


def test_the_better_assistant_is_the_one_with_the_faster_call() -> None:
    results = file_of("demo_pair.json")
    ways = results["workloads"]["code"]
    ways["assistant_model K=4"]["speedup_of_the_call"]["median"] = 1.0
    ways["assistant_model K=5"]["speedup_of_the_call"]["median"] = 9.0
    assert "| 9.00 (2.06–2.48) | 5 |" in readme_tables.demo_pair(results)
    assert "All outputs were equal" in readme_tables.demo_pair(results)
    ways["draft_model K=5"]["num_differing_outputs"] = 2
    assert "2 outputs differed" in readme_tables.demo_pair(results)


def test_the_slow_draft_is_called_noise_only_where_it_rested() -> None:
    single, batch = file_of("adaptive.json"), file_of("adaptive_batch.json")
    cells = list(single["cells"].values())
    for cell in cells:
        cell["methods"]["auto, slow draft"]["speculation"]["num_probes"] = 1
    text = readme_tables.adaptive(single, batch)
    assert "noise of that kind" not in text
    assert "| ours / `assistant_model=`, its defaults | 1.21 | refused |" in text
    cells[0]["methods"]["auto, slow draft"]["speculation"]["num_probes"] = 0
    text = " ".join(readme_tables.adaptive(single, batch).split())
    assert f"In 1 of {len(cells)} cells with one row the slow draft was neither used nor probed: their 1.04" in text


def test_figures_that_nobody_published_are_left_empty() -> None:
    text = readme_tables.plan(file_of("plan.json"), file_of("plan_published.json"))
    assert "| K = 4 | 72.6 | 46.8 |" in text
    assert "| K = 6 | 81.3 |  |" in text
    assert "The published speed-ups, 1.9 and 2.2, are below the model's 3.0 and 3.6." in text


def test_a_round_is_shown_by_method_and_situation() -> None:
    origin = {"date": "2026-01-02", "hardware": "an abacus", "versions": {"torch": "2.13.0"}}
    lines = [
        {"method": method, "num_draft_tokens": 3, "milliseconds": value, "do_sample": is_sampled, **origin}
        for is_sampled in (False, True)
        for method, value in (("ours", 1.0 + is_sampled), ("assistant_model", 4.0 + is_sampled))
    ]
    text = readme_tables.overhead(lines)
    assert "| ms per round | greedy, K=3 | sampling, K=3 |" in text
    assert "| ours | 1.0 | 2.0 |" in text
    assert "| `assistant_model=` | 4.0 | 5.0 |" in text
    assert "| the one / the other | 0.25 | 0.40 |" in text
    assert "Measured on 2026-01-02 on an abacus, torch 2.13.0." in text


def test_outputs_that_differ_are_counted_by_kind_of_way() -> None:
    results = file_of("bench.json")
    for cell in results["cells"].values():
        for way in cell["ways"].values():
            way["num_differing_outputs"] = 0
    ways = next(iter(results["cells"].values()))["ways"]
    ways["assistant_model"]["num_differing_outputs"] = 2
    text = " ".join(readme_tables.bench(results).split())
    assert re.search(
        r": 0 of \d+ with `draft_model`, 2 of \d+ with `assistant_model`, 0 of \d+ with `prompt_lookup", text
    )
