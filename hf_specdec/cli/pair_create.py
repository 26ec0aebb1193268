"""`hf-specdec pair create`: measure a pair on the user's prompts and write it as a pairing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.cli.lengths import NumDraftTokens, as_length
from hf_specdec.cli.names import refuse_missing_folder
from hf_specdec.cli.whole_folder import refuse_folder, whole_folder
from hf_specdec.config import DraftQuantization
from hf_specdec.errors import in_short

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_specdec.benchmark.pairs import PairSettings, WorkloadFigures
    from hf_specdec.benchmark.prompt_files import Prompt
    from hf_specdec.pairing.schema import DraftPairing, ModelReference

BUNDLED = "bundled"
OWN_DRAFT = "draft"
_RULE = "`hf-specdec pair create` measures two causal language models, given as Hub ids or local folders"
_Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def create(
    model: Annotated[str, typer.Option(help="The target: a Hub id or a local folder.")],
    draft: Annotated[str, typer.Option(help="The draft: a Hub id or a local folder.")],
    output: Annotated[Path, typer.Option(help="The folder to write; it must be empty, or not exist yet.")],
    prompts: Annotated[
        str, typer.Option(help="A text file with a prompt a line, or JSON lines (.jsonl); bundled takes our own.")
    ] = BUNDLED,
    workload_name: Annotated[str | None, typer.Option(help="What to call a file's prompts; default: its name.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="At most so many per workload; default: all.")] = None,
    draft_quantization: Annotated[
        DraftQuantization, typer.Option(help="How the draft's weights are stored; auto goes by free memory.")
    ] = "auto",
    num_draft_tokens: NumDraftTokens = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts, with the draft and without.")] = 3,
    save_draft: Annotated[
        bool, typer.Option("--save-draft", help="Also write the draft's weights, quantized as asked for.")
    ] = False,
    repo_id: Annotated[str | None, typer.Option(help="Where it will be published, for the card.")] = None,
    card_license: Annotated[str | None, typer.Option("--license", help="For the card, by the Hub's spelling.")] = None,
    dtype: Annotated[_Dtype, typer.Option(help="Of the weights; auto takes what they are stored in.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pairing that is in the folder.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a pair on your prompts, and write a folder that `draft_model=` takes and `pair push` publishes."""
    for name in (model, draft):
        refuse_missing_folder(_RULE, name)
    refuse_folder(output, overwrite=overwrite, sources=(model, draft))
    _refuse_bad_repo_id(repo_id)
    length = as_length(num_draft_tokens)
    workloads = _workloads(prompts, workload_name, num_prompts)
    from hf_specdec.benchmark.pairs import PairSettings, measured_pair
    from hf_specdec.config import SpeculativeConfig
    from hf_specdec.pairing.schema import only_here

    SpeculativeConfig.from_user(None, num_draft_tokens=length)
    settings = PairSettings(
        num_draft_tokens=length,  # type: ignore[arg-type]  # checked just above
        draft_quantization=draft_quantization,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        trust_remote_code=trust_remote_code,
    )
    talk = Console(stderr=True, highlight=False)
    talk.print(f"Loading {model} …", markup=False, soft_wrap=True)
    pair = _load(model, draft, workloads, dtype, device, trust_remote_code=trust_remote_code)
    if len(set(pair.fingerprints)) > 1:
        talk.print(
            "The draft's tokenizer is not the target's: expect few of its tokens to be accepted.",
            style="yellow",
            soft_wrap=True,
        )
    settings = replace(settings, draft_revision=pair.draft_reference.revision)
    figures = measured_pair(
        pair.target,
        pair.draft_name,
        pair.inputs,
        settings,
        on_workload=lambda name: talk.print(f"Measuring {name} …", markup=False, soft_wrap=True),
    )
    pairing = _described(pair, figures, settings)
    with whole_folder(output) as folder:
        if save_draft:
            pairing = _with_own_draft(pairing, pair, settings, folder)
        pairing.save_pretrained(folder)
        origin = pair.draft_reference.id if save_draft and pair.draft_reference.is_on_hub else None
        _write_card(pairing, folder, repo_id=repo_id, license=card_license, draft_origin=origin)
    for role in only_here(pairing):
        talk.print(
            f"The {role} is a local folder, so nobody else can load this pairing. Give its Hub id to share it.",
            style="yellow",
            soft_wrap=True,
        )
    if json_output:
        print(json.dumps(_to_json(output, pairing, figures), indent=2))
    else:
        _print_figures(output, pairing, figures)


# ---- before anything is loaded -------------------------------------------------------------------------------------


def _refuse_bad_repo_id(repo_id: str | None) -> None:
    from hf_specdec.pairing.fields import is_hub_id

    if repo_id is not None and not is_hub_id(repo_id):
        raise ValueError(
            f'`--repo-id` must be a Hub id ("organisation/name"), but is {repo_id!r}. Leave it out where it is not '
            "known yet."
        )


def _workloads(prompts: str, workload_name: str | None, num_prompts: int | None) -> dict[str, list[Prompt]]:
    from hf_specdec.benchmark.prompt_files import Prompt, read_prompts
    from hf_specdec.demo.prompts import DEMO_PROMPTS
    from hf_specdec.pairing.fields import check_text

    if prompts != BUNDLED:
        path = Path(prompts)
        if not path.is_file():
            raise ValueError(
                f"`--prompts` must be a file of prompts, or {BUNDLED!r} for our own, but there is no file {prompts!r}. "
                "Check the path."
            )
        name = path.stem if workload_name is None else workload_name
        check_text("workload", name)
        return {name: read_prompts(path)[:num_prompts]}
    if workload_name is not None:
        raise typer.BadParameter("is for a file of prompts: give --prompts.", param_hint="--workload-name")
    return {name: [Prompt(text=text) for text in texts[:num_prompts]] for name, texts in DEMO_PROMPTS.items()}


# ---- loading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A target that can speculate, the name its draft is loaded by and its tokenizer, and encoded prompts.

    `fingerprints` are those of the target's and the draft's tokenizer.
    """

    target: PreTrainedModel
    draft_name: str
    draft_tokenizer: PreTrainedTokenizerBase
    fingerprints: tuple[str, str]
    inputs: Mapping[str, Any]
    target_reference: ModelReference
    draft_reference: ModelReference


def _load(
    model: str, draft: str, workloads: Mapping[str, list[Prompt]], dtype: str, device: str, *, trust_remote_code: bool
) -> _Loaded:
    import torch
    from transformers import AutoModelForCausalLM

    import hf_specdec
    from hf_specdec.benchmark.pairs import encoded
    from hf_specdec.pairing.fingerprint import fingerprint
    from hf_specdec.placement import device_of

    # What is small comes first, so that its errors do.
    tokenizer, target_reference = _looked_up(model, trust_remote_code=trust_remote_code)
    draft_tokenizer, draft_reference = _looked_up(draft, trust_remote_code=trust_remote_code)
    for own in workloads.values():
        encoded(own, tokenizer, torch.device("cpu"))
    fingerprints = fingerprint(tokenizer), fingerprint(draft_tokenizer)
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if device == "auto" and torch.cuda.is_available():
        options["device_map"] = "auto"
    target: Any = AutoModelForCausalLM.from_pretrained(
        model, revision=target_reference.revision or "main", trust_remote_code=trust_remote_code, **options
    )
    if device != "auto":
        target.to(device)
    hf_specdec.enable(target)
    return _Loaded(
        target=target,
        draft_name=draft,
        draft_tokenizer=draft_tokenizer,
        fingerprints=fingerprints,
        inputs={name: encoded(own, tokenizer, device_of(target)) for name, own in workloads.items()},
        target_reference=target_reference,
        draft_reference=draft_reference,
    )


def _looked_up(name: str, *, trust_remote_code: bool) -> tuple[PreTrainedTokenizerBase, ModelReference]:
    """Return a model's tokenizer, and the folder or the commit that stands for it."""
    from transformers import AutoConfig, AutoTokenizer

    from hf_specdec.pairing.schema import ModelReference

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken folder can make any of the host's loaders raise anything
        raise ValueError(
            f"{_RULE}, but {name!r} could not be loaded as one with its tokenizer ({in_short(error)}). Check the name, "
            "and that it has a tokenizer."
        ) from error
    if Path(name).is_dir():
        return tokenizer, ModelReference(id=str(Path(name).resolve()))
    commit = getattr(config, "_commit_hash", None)
    if commit is None:
        raise ValueError(
            f"A pairing names the commit that was measured, but which one {name!r} was loaded from is not known. "
            "Download it to a folder, and give that."
        )
    return tokenizer, ModelReference(id=name, revision=commit)


# ---- the pairing ---------------------------------------------------------------------------------------------------


def _described(pair: _Loaded, figures: Mapping[str, WorkloadFigures], settings: PairSettings) -> DraftPairing:
    from hf_specdec.pairing.schema import DraftPairing

    target_fingerprint, draft_fingerprint = pair.fingerprints
    return DraftPairing(
        target=pair.target_reference,
        draft=pair.draft_reference,
        tokenizer_fingerprint=target_fingerprint,
        draft_tokenizer_fingerprint=None if draft_fingerprint == target_fingerprint else draft_fingerprint,
        draft_quantization=settings.draft_quantization,
        num_draft_tokens=settings.num_draft_tokens,
        # What was learned goes on from workload to workload, so the last one knows of all.
        controller_hints=list(figures.values())[-1].controller_hints,
        measurements=tuple(measurement for own in figures.values() for measurement in own.measurements),
    )


def _with_own_draft(pairing: DraftPairing, pair: _Loaded, settings: PairSettings, folder: Path) -> DraftPairing:
    """Write the draft as it was measured, and return the pairing that names it."""
    from hf_specdec.config import SpeculativeConfig
    from hf_specdec.loading import resolve_draft
    from hf_specdec.pairing.folder import hash_files
    from hf_specdec.pairing.schema import ModelReference

    config = SpeculativeConfig(
        draft_quantization=settings.draft_quantization,
        draft_revision=settings.draft_revision,
        trust_remote_code=settings.trust_remote_code,
    )
    draft = resolve_draft(pair.target, pair.draft_name, config)
    draft.save_pretrained(folder / OWN_DRAFT)
    pair.draft_tokenizer.save_pretrained(folder / OWN_DRAFT)
    for path in (folder / OWN_DRAFT).iterdir():
        path.chmod(0o644)  # weights come out readable by their owner alone
    own = ModelReference(id=".", subfolder=OWN_DRAFT)
    return replace(pairing, draft=own, files=hash_files(folder, OWN_DRAFT))


def _write_card(
    pairing: DraftPairing, folder: Path, *, repo_id: str | None, license: str | None, draft_origin: str | None
) -> None:
    from hf_specdec.cards import CARD_NAME, card_of

    card = card_of(pairing, repo_id=repo_id, license=license, draft_origin=draft_origin)
    (folder / CARD_NAME).write_text(f"{card}\n", encoding="utf-8", newline="\n")


# ---- what is said of it --------------------------------------------------------------------------------------------


def _to_json(output: Path, pairing: DraftPairing, figures: Mapping[str, WorkloadFigures]) -> dict[str, Any]:
    return {
        "folder": str(output),
        "pairing": json.loads(pairing.to_json()),
        "workloads": {name: own.to_dict() for name, own in figures.items()},
    }


def _print_figures(output: Path, pairing: DraftPairing, figures: Mapping[str, WorkloadFigures]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("workload", "K", "speed-up", "accepted", "tokens per round", "outputs"):
        table.add_column(name, justify="left" if name in ("workload", "outputs") else "right")
    for name, own in figures.items():
        for index, measurement in enumerate(own.measurements):
            table.add_row(
                name,
                str(measurement.num_draft_tokens),
                f"{measurement.speed_up:.2f} ({measurement.speed_up_low:.2f}–{measurement.speed_up_high:.2f})",
                f"{measurement.acceptance_rate:.0%}",
                f"{measurement.mean_acceptance_length:.2f}",
                _equality(own, index),
            )
    noise = [
        f"{name} {own.noise['median']:.2f} ({own.noise['min']:.2f}–{own.noise['max']:.2f})"
        for name, own in figures.items()
    ]
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"Plain decoding against itself: {', '.join(noise)}.", markup=False)
    if any(sum(own.num_differing_outputs or ()) for own in figures.values()):
        console.print("In 16 bit a near tie can round either way; in float32 outputs must be equal.")
    first = next(iter(figures.values())).measurements[0]
    console.print(f"Draft in {first.draft_quantization}, {first.dtype}, on {first.hardware}.", markup=False)
    console.print(f"Written to {output}. Use it: generate(..., draft_model={str(output)!r}).", markup=False)


def _equality(own: WorkloadFigures, index: int) -> str:
    if own.num_differing_outputs is None:
        return "sampled"
    if not (num_differing := own.num_differing_outputs[index]):
        return "equal"
    return f"{num_differing} of {own.num_outputs} differ"
