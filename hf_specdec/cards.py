"""Model cards of draft pairings: the template filled with what a pairing says, and nothing else.

A number on a card was measured, and the card says on what. `python -m hf_specdec.cards model_cards` writes the template
and the card of every curated pairing to a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_specdec.pairing.schema import DraftPairing, Measurement, ModelReference

LIBRARY = "hf-specdec"
TAGS = (LIBRARY, "speculative-decoding", "draft-pairing")
CARD_NAME = "README.md"
TEMPLATE_NAME = "template.md"
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
    names: Mapping[str, str] | None = None,
    draft_origin: str | None = None,
    is_bundled: bool = False,
) -> ModelCard:
    """Return the card of a pairing.

    Args:
        pairing: What it says is what the card says.
        repo_id: Where the pairing is or will be published; without it the card shows how to use the draft by its name.
        license: Of the repository's own files, by the Hub's spelling, such as "apache-2.0".
        names: What to call "target" and "draft", where not by their ids; models in local folders are called by the
            folder's name.
        draft_origin: The Hub id of the model that a draft in the pairing's own folder was made from.
        is_bundled: Whether it is the pair that comes with the package, and is used by `load_demo_pair`.
    """
    called = {"target": _name(pairing.target, "target"), "draft": _name(pairing.draft, "draft"), **(names or {})}
    title = repo_id or f"{called['draft']} for {called['target']}"
    data = card_data_of(pairing, title=title, license=license, draft_origin=draft_origin)
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=card_template(),
        **called,
        pairing=repo_id,
        is_bundled=is_bundled,
        description=pairing.description,
        target_link=_link(pairing.target, called["target"]),
        draft_link=_link(pairing.draft, called["draft"]),
        draft_origin=draft_origin,
        target_revision=_revision(pairing.target),
        draft_revision=_revision(pairing.draft),
        draft_quantization=pairing.draft_quantization,
        num_draft_tokens=pairing.num_draft_tokens,
        fingerprint=pairing.tokenizer_fingerprint,
        has_own_draft=pairing.draft.is_own,
        is_pinned=pairing.target.is_pinned and pairing.draft.is_pinned,
        measurements=[_row(measurement) for measurement in pairing.measurements],
        places=places_of(pairing.measurements),
        command=measuring_command(pairing, called),
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


def measuring_command(pairing: DraftPairing, names: Mapping[str, str]) -> str:
    """Return the command that measures the pairing again and writes it with the figures."""
    parts = [f"hf-specdec pair create --model {names['target']} --draft {names['draft']} --output PAIRING"]
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
            dataset_name=f"{own.workload}, temperature {own.temperature:g}, batch {own.batch_size}",
            metric_type=metric,
            metric_name=name,
            metric_value=round(getattr(own, metric), 4),
            metric_args={"num_draft_tokens": own.num_draft_tokens, "hardware": own.hardware, "date": own.date},
        )
        for metric, name in METRICS.items()
    ]
