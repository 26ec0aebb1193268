"""What `import hf_specdec` promises."""

import re
from pathlib import Path

import pytest

import hf_specdec

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"
CLASSES_AND_FUNCTIONS = [name for name in hf_specdec.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", hf_specdec.__all__)
def test_public_name_exists(name: str) -> None:
    assert hasattr(hf_specdec, name)


@pytest.mark.parametrize("name", CLASSES_AND_FUNCTIONS)
def test_public_name_has_a_docstring_of_its_own(name: str) -> None:
    docstring = getattr(hf_specdec, name).__doc__
    assert docstring
    # What `dataclass` writes into a class that has none.
    assert not docstring.startswith(f"{name}(")


def test_public_names_are_sorted_and_unique() -> None:
    assert sorted(set(CLASSES_AND_FUNCTIONS)) == CLASSES_AND_FUNCTIONS


def test_changelog_starts_with_the_current_version() -> None:
    versions = re.findall(r"^## \[?(\d[^\]\s]*)", CHANGELOG.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert versions
    assert versions[0] == hf_specdec.__version__
