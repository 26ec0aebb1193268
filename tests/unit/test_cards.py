"""Cards of pairings: metadata that the Hub reads, and prose that says no more than the pairing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from hf_specdec import cards
from hf_specdec.cards import bundled_card, card_of, card_template, curated_cards, places_of, write_cards
from hf_specdec.pairing.resolve import curated_pairs
from hf_specdec.pairing.schema import DraftPairing, Measurement, ModelReference

FOLDER = Path(__file__).parents[2] / "model_cards"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MEASUREMENT = Measurement(
    workload="code | tests",
    temperature=0.7,
    batch_size=1,
    num_new_tokens=64,
    num_prompts=4,
    acceptance_rate=0.834,
    mean_acceptance_length=3.21,
    speed_up=1.84,
    speed_up_low=1.7,
    speed_up_high=1.9,
    num_draft_tokens=5,
    draft_quantization="nf4",
    dtype="bfloat16",
    hardware="one fast <device>",
    versions={"torch": "2.13.0", "hf_specdec": "0.1.0"},
    date="2026-01-31",
)
PAIRING = DraftPairing(
    target=ModelReference(id="org/large", revision=COMMIT), draft=ModelReference(id="org/small", revision=COMMIT[::-1])
)
OWN_DRAFT: dict[str, Any] = {
    "draft": ModelReference(id=".", subfolder="draft"),
    "files": {"draft/model.safetensors": "sha256:" + "0" * 64},
}


def checked(card: ModelCard) -> ModelCardData:
    """Return the metadata as the Hub will read it, once it says the same as what was written."""
    read = ModelCard(str(card)).data
    assert read.to_dict() == card.data.to_dict()
    assert read.library_name == "hf-specdec"
    assert read.pipeline_tag == "text-generation"
    assert read.tags == ["hf-specdec", "speculative-decoding", "draft-pairing"]
    for model in read.base_model or []:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model)
    assert "{{" not in str(card)
    assert "{%" not in str(card)
    assert "\n\n\n\n" not in str(card)
    return read


# ---- metadata ------------------------------------------------------------------------------------------------------


def test_metadata_names_the_models_and_every_measured_figure() -> None:
    data = checked(card_of(replace(PAIRING, measurements=(MEASUREMENT,)), repo_id="me/pair", license="apache-2.0"))
    assert data.base_model == ["org/large", "org/small"]
    assert data.license == "apache-2.0"
    assert data.model_name == "me/pair"
    results = {result.metric_type: result for result in data.eval_results or []}
    assert {name: own.metric_value for name, own in results.items()} == {
        "speed_up": 1.84,
        "acceptance_rate": 0.834,
        "mean_acceptance_length": 3.21,
    }
    assert results["speed_up"].dataset_name == "code | tests, temperature 0.7, K = 5"
    assert results["speed_up"].metric_args == {
        "num_draft_tokens": 5,
        "hardware": "one fast <device>",
        "date": "2026-01-31",
    }


def test_models_that_only_this_machine_has_are_no_base_models() -> None:
    local = replace(PAIRING, target=ModelReference(id="/home/me/secret/large"))
    card = card_of(local)
    assert checked(card).base_model == ["org/small"]
    assert "/home/me" not in str(card)
    assert "`large`, a local folder" in card.text


def test_a_draft_of_its_own_names_where_it_came_from() -> None:
    card = card_of(replace(PAIRING, **OWN_DRAFT), draft_origin="org/small")
    assert checked(card).base_model == ["org/large", "org/small"]
    assert "# A draft for org/large" in card.text
    assert "made from [org/small](https://huggingface.co/org/small)" in card.text
    assert "`draft_pairing.json` holds the sha256 of each file" in card.text
    assert "--draft org/small" in card.text
    unknown = card_of(replace(PAIRING, **OWN_DRAFT))
    assert checked(unknown).base_model == ["org/large"]
    assert "--draft DRAFT" in unknown.text


# ---- prose ---------------------------------------------------------------------------------------------------------


def test_without_measurements_the_card_gives_the_command_that_measures() -> None:
    card = card_of(replace(PAIRING, draft_quantization="nf4", num_draft_tokens=5))
    assert checked(card).eval_results is None
    command = "hf-specdec pair create --model org/large --draft org/small --output PAIRING"
    assert f"{command} --draft-quantization nf4 --num-draft-tokens 5\n" in card.text
    assert "Not measured by us." in card.text
    assert "speed-up |" not in card.text
    assert not re.search(r"\d+(\.\d+)? times faster", card.text)


def test_measured_figures_say_where_they_were_measured() -> None:
    later = replace(MEASUREMENT, workload="chat", date="2026-02-01")
    text = card_of(replace(PAIRING, measurements=(MEASUREMENT, MEASUREMENT, later))).text
    assert text.count("| code \\| tests | 0.7 | 1 | 64 | 4 | 5 | nf4 | 1.84 (1.70–1.90) | 83.4% | 3.21 |") == 2
    place = "one fast &lt;device>, bfloat16, hf_specdec 0.1.0, torch 2.13.0."
    assert text.count(f"Measured on 2026-01-31 on {place}") == 1
    assert text.count(f"Measured on 2026-02-01 on {place}") == 1
    assert "Not measured by us" not in text
    assert "K = auto" not in text
    assert len(places_of([MEASUREMENT, MEASUREMENT, later])) == 2


def test_a_rate_of_nothing_drafted_is_explained() -> None:
    at_rest = replace(MEASUREMENT, num_draft_tokens="auto", acceptance_rate=0.0, mean_acceptance_length=1.0)
    assert "so that the draft was at rest" in card_of(replace(PAIRING, measurements=(at_rest,))).text


@pytest.mark.parametrize(
    ("keywords", "draft_model", "recipe"),
    [
        ({"repo_id": "me/pair"}, "me/pair", "me/pair"),
        ({}, "PAIRING", "PAIRING"),
        ({"is_alone": True}, "org/small", "PAIRING"),
    ],
)
def test_usage_shows_both_ways(keywords: dict[str, Any], draft_model: str, recipe: str) -> None:
    text = card_of(PAIRING, **keywords).text
    assert f'draft_model="{draft_model}")' in text
    assert re.search(rf'custom_generate="{recipe}",\s+trust_remote_code=True', text)
    assert ("`PAIRING` stands for this repository's id" in text) == (keywords == {})


def test_what_is_said_of_adapting_fits_the_length() -> None:
    assert "capped at 2 %" in card_of(PAIRING).text
    constant = card_of(replace(PAIRING, num_draft_tokens=5)).text
    assert "capped at 2 %" not in constant
    assert 'Pass `num_draft_tokens="auto"`' in constant


def test_commits_are_given_or_said_to_be_missing() -> None:
    assert f"| `{COMMIT}` |" in card_of(PAIRING).text
    assert "pinned to commits" in card_of(PAIRING).text
    loose = card_of(replace(PAIRING, draft=ModelReference(id="org/small"))).text
    assert "not pinned by us" in loose
    assert "pinned to commits" not in loose


# ---- model_cards/ --------------------------------------------------------------------------------------------------


def test_every_curated_pair_has_a_card() -> None:
    found = curated_cards()
    assert len(found) == len(curated_pairs()) + 1
    for pair in curated_pairs():
        card = found[f"{pair.target.rpartition('/')[2]}--{pair.draft.rpartition('/')[2]}.md"]
        assert checked(card).base_model == [pair.target, pair.draft]
        assert f'draft_model="{pair.draft}"' in card.text
        assert "Not measured by us." in card.text
        assert card.data.eval_results is None


def test_only_the_bundled_pair_is_measured() -> None:
    card = bundled_card()
    data = checked(card)
    assert data.base_model is None
    assert data.eval_results
    assert "Measured on 20" in card.text
    assert "load_demo_pair()" in card.text
    assert "The target was widened by 300 million parameters" in card.text
    assert "Not measured by us" not in card.text


def test_the_folder_of_cards_is_in_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards.main([str(tmp_path)])
    told = capsys.readouterr().out.splitlines()
    wanted = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(told) == len(wanted) == len(curated_cards()) + 1
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert found == wanted, "run `python -m hf_specdec.cards model_cards`"


def test_the_template_comes_with_the_package(tmp_path: Path) -> None:
    write_cards(tmp_path)
    assert (tmp_path / "template.md").read_text(encoding="utf-8") == card_template()
    assert card_template().startswith("---\n{{ card_data }}\n---\n")
