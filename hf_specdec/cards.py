"""Model cards of draft pairings: the template filled with what a pairing says, and nothing else.

A number on a card was measured, and the card says on what. `python -m hf_specdec.cards model_cards` writes the template
and the card of every curated pairing to a folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_specdec.pairing.resolve import curated_pairs
from hf_specdec.pairing.schema import DraftPairing, Measurement, ModelReference

LIBRARY = "hf-specdec"
TAGS = (LIBRARY, "speculative-decoding", "draft-pairing")
CARD_NAME = "README.md"
TEMPLATE_NAME = "template.md"
BUNDLED_NAME = "bundled-pair.md"
LICENSE = "apache-2.0"
PLACEHOLDER = "PAIRING"
NOT_PINNED = "not pinned by us"
METRICS = {
    "speed_up": "Speed-up over plain decoding",
    "acceptance_rate": "Acceptance rate (accepted / drafted tokens)",
    "mean_acceptance_length": "Tokens per row and round",
}


def card_template() -> str:
    """Return the text of the template."""
    return files("hf_specdec").joinpath("cards_template.md").read_text(encoding="utf-8")


def card_of(
    pairing: DraftPairing,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    draft_origin: str | None = None,
    is_alone: bool = False,
) -> ModelCard:
    """Return the card of a pairing.

    Args:
        pairing: What it says is what the card says.
        repo_id: Where the pairing is or will be published.
        license: Of the repository's own files, by the Hub's spelling, such as "apache-2.0".
        draft_origin: The Hub id of the model that a draft in the pairing's own folder was made from.
        is_alone: Whether there is only the card, and no folder or repository beside it: it then shows how to use the
            draft by its own name.
    """
    target, draft = _name(pairing.target, "target"), _name(pairing.draft, "draft")
    heading = f"A draft for {target}" if pairing.draft.is_own else f"{draft} drafts for {target}"
    command = measuring_command(pairing, target, draft_origin or ("DRAFT" if pairing.draft.is_own else draft))
    data = card_data_of(pairing, title=repo_id or heading, license=license, draft_origin=draft_origin)
    return _filled(
        data,
        pairing,
        heading=heading,
        target=target,
        draft=draft,
        pairing=None if is_alone else repo_id or PLACEHOLDER,
        recipe=repo_id or PLACEHOLDER,
        draft_origin=draft_origin,
        command=command,
    )


def curated_cards() -> dict[str, ModelCard]:
    """Return the cards of the bundled list's pairs and of the pair that comes with the package, by file name."""
    cards = {BUNDLED_NAME: bundled_card()}
    for pair in curated_pairs():
        draft = ModelReference(id=pair.draft, revision=pair.draft_revision)
        pairing = DraftPairing(target=ModelReference(id=pair.target), draft=draft)
        names = [model.id.rpartition("/")[2] for model in (pairing.target, pairing.draft)]
        cards[f"{'--'.join(names)}.md"] = card_of(pairing, license=LICENSE, is_alone=True)
    return cards


def write_cards(folder: Path) -> list[Path]:
    """Write the template and every curated card to a folder, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {TEMPLATE_NAME: card_template(), **{name: f"{card}\n" for name, card in curated_cards().items()}}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]


def bundled_card() -> ModelCard:
    """Return the card of the pair that comes with the package, with the figures that were measured of it.

    Source: `hf_specdec/benchmark/results/bundled_pair.json`, written by `python -m hf_specdec.benchmark.pairs`.
    """
    text = files("hf_specdec").joinpath("benchmark/results/bundled_pair.json").read_text(encoding="utf-8")
    results = json.loads(text)
    folder = Path(str(files("hf_specdec").joinpath("demo")))
    pairing = DraftPairing(
        target=ModelReference(id=str((folder / "target").resolve())),
        draft=ModelReference(id=str((folder / "draft").resolve())),
        description="The small trained pair that comes with the package: it shows speculative decoding offline.",
        measurements=tuple(Measurement(**own) for part in results["workloads"] for own in part["measurements"]),
    )
    heading = "The bundled pair"
    return _filled(
        card_data_of(pairing, title=heading, license=LICENSE),
        pairing,
        heading=heading,
        target="hf_specdec/demo/target",
        draft="hf_specdec/demo/draft",
        is_bundled=True,
        measuring_note=(
            f"The target was widened by {results['num_ballast_parameters'] / 1e6:.0f} million parameters that change "
            "its cost and not its output; without them it is too small to gain from a draft."
        ),
        command="python -m hf_specdec.benchmark.pairs",
    )


def _filled(data: ModelCardData, described: DraftPairing, **words: Any) -> ModelCard:
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=card_template(),
        description=described.description,
        target_link=_link(described.target, words["target"]),
        draft_link=_link(described.draft, words["draft"]),
        target_revision=_revision(described.target),
        draft_revision=_revision(described.draft),
        draft_quantization=described.draft_quantization,
        num_draft_tokens=described.num_draft_tokens,
        fingerprint=described.tokenizer_fingerprint,
        has_own_draft=described.draft.is_own,
        is_pinned=all(model.revision for model in (described.target, described.draft)),
        adapts=any(measurement.num_draft_tokens == "auto" for measurement in described.measurements),
        measurements=[_row(measurement) for measurement in described.measurements],
        places=places_of(described.measurements),
        **words,
    )
    return card


def card_data_of(
    pairing: DraftPairing, *, title: str, license: str | None = None, draft_origin: str | None = None
) -> ModelCardData:
    """Return the metadata that the Hub reads: models it knows, tags, and what was measured.

    Args:
        pairing: What is described.
        title: The name that measured results are listed under.
        license: By the Hub's spelling.
        draft_origin: The Hub id of the model that an own draft was made from.
    """
    known = [model.id for model in (pairing.target, pairing.draft) if model.is_on_hub]
    known += [draft_origin] if draft_origin else []
    results = [result for measurement in pairing.measurements for result in _eval_results(measurement)]
    return ModelCardData(
        base_model=known or None,
        library_name=LIBRARY,
        license=license,
        pipeline_tag="text-generation",
        tags=list(TAGS),
        model_name=title if results else None,
        eval_results=results or None,
    )


def measuring_command(pairing: DraftPairing, target: str, draft: str) -> str:
    """Return the command that measures a pairing and writes it with the figures."""
    parts = [f"hf-specdec pair create --model {target} --draft {draft} --output {PLACEHOLDER}"]
    if pairing.draft_quantization != "auto":
        parts.append(f"--draft-quantization {pairing.draft_quantization}")
    if pairing.num_draft_tokens != "auto":
        parts.append(f"--num-draft-tokens {pairing.num_draft_tokens}")
    return " ".join(parts)


def places_of(measurements: Sequence[Measurement]) -> list[str]:
    """Return, in words and once each, where and with what the measurements were made."""
    places = [
        f"on {own.date} on {own.hardware}, {own.dtype}, "
        + ", ".join(f"{name} {version}" for name, version in sorted(own.versions.items()))
        for own in measurements
    ]
    return [_in_a_cell(place) for place in dict.fromkeys(places)]


def _name(model: ModelReference, role: str) -> str:
    if model.is_own:
        return f"the {role} in this repository"
    # A path on somebody's machine would tell its reader nothing.
    return model.id if model.is_on_hub else Path(model.id).name


def _link(model: ModelReference, name: str) -> str:
    if model.is_on_hub:
        return f"[{name}](https://huggingface.co/{name})" + (f", `{model.subfolder}/`" if model.subfolder else "")
    return f"{name}, `{model.subfolder}/`" if model.is_own else f"`{name}`, a local folder"


def _revision(model: ModelReference) -> str:
    if model.is_on_hub:
        return f"`{model.revision}`" if model.revision else NOT_PINNED
    return "–"


def _row(own: Measurement) -> list[str]:
    return [
        _in_a_cell(text)
        for text in (
            own.workload,
            f"{own.temperature:g}",
            str(own.batch_size),
            str(own.num_new_tokens),
            str(own.num_prompts),
            str(own.num_draft_tokens),
            own.draft_quantization,
            f"{own.speed_up:.2f} ({own.speed_up_low:.2f}–{own.speed_up_high:.2f})",
            f"{own.acceptance_rate:.1%}",
            f"{own.mean_acceptance_length:.2f}",
        )
    ]


def _in_a_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _eval_results(own: Measurement) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="hf-specdec-workload",
            dataset_name=f"{own.workload}, temperature {own.temperature:g}, K = {own.num_draft_tokens}",
            metric_type=metric,
            metric_name=name,
            metric_value=round(getattr(own, metric), 4),
            metric_args={"num_draft_tokens": own.num_draft_tokens, "hardware": own.hardware, "date": own.date},
        )
        for metric, name in METRICS.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Write the template and the cards, and say which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where they go")
    for path in write_cards(parser.parse_args(arguments).folder):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
