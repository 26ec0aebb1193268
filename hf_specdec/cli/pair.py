"""`hf-specdec pair`: draft pairings as folders and on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hf_specdec.pairing.schema import DraftPairing

pair_app = typer.Typer(
    name="pair", help="Draft pairings: a target, the draft that suits it, and what was measured.", no_args_is_help=True
)


@pair_app.command()
def check(
    pairing: Annotated[str, typer.Argument(help="A pairing: a local folder or a Hub id.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the draft in the pairing's folder come with code.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a pairing as loading it would: what it says, every file of it, and tokenizers where they are at hand."""
    from hf_specdec.pairing.folder import verify
    from hf_specdec.pairing.resolve import read_pairing

    found = read_pairing(pairing, revision=revision)
    verify(found, trust_remote_code=trust_remote_code)
    values = describe(found)
    if json_output:
        print(json.dumps(values, indent=2))
    else:
        _print(values)
    if values["differs"]:
        raise typer.Exit(1)


@pair_app.command()
def push(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A pairing's folder.")],
    repo_id: Annotated[str, typer.Argument(help='"organisation/name"; made if it is missing.')],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; else what its owner's default is.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
) -> None:
    """Publish a pairing's folder on the Hub as one commit, after checking it; prints the commit's address."""
    from hf_specdec.pairing.resolve import read_pairing

    print(read_pairing(folder.absolute()).push_to_hub(repo_id, private=private, commit_message=message))


def describe(pairing: DraftPairing) -> dict[str, Any]:
    """Return what there is to say of a pairing whose files were checked, as JSON types.

    Tokenizers are looked up on this machine alone: "matches", "differs", or why they could not be compared.
    """
    source, draft = pairing.source, pairing.draft
    tokenizers = {
        "target": _compared(pairing.target.id, pairing.target.revision, pairing.tokenizer_fingerprint),
        "draft": _compared(
            str(_draft_name(pairing)),
            draft.revision,
            pairing.draft_tokenizer_fingerprint or pairing.tokenizer_fingerprint,
        ),
    }
    return {
        "pairing": str(source),
        "revision": source.revision if source else None,
        "target": str(pairing.target),
        "draft": f"{draft} ({draft.subfolder})" if draft.subfolder else str(draft),
        "draft_quantization": pairing.draft_quantization,
        "num_draft_tokens": pairing.num_draft_tokens,
        "num_measurements": len(pairing.measurements),
        "num_files": len(pairing.files),
        "tokenizers": tokenizers,
        "differs": "differs" in tokenizers.values(),
        "notes": _notes(pairing),
    }


def _draft_name(pairing: DraftPairing) -> str | Path:
    """Return where the draft's tokenizer would be: in the pairing's folder, in another one, or under a Hub id."""
    draft = pairing.draft
    if draft.is_own and pairing.source is not None:
        return Path(pairing.source.folder, draft.subfolder or "")
    return draft.id if draft.subfolder is None or draft.is_on_hub else Path(draft.id, draft.subfolder)


def _compared(name: str, revision: str | None, wanted: str | None) -> str:
    if wanted is None:
        return "not compared: the pairing has no fingerprint"
    from hf_specdec.pairing.fingerprint import fingerprint
    from hf_specdec.pairing.tokenizers import local_tokenizer

    tokenizer = local_tokenizer(name, revision)
    if tokenizer is None:
        return f"not compared: the tokenizer of {name} is not on this machine"
    return "matches" if fingerprint(tokenizer) == wanted else "differs"


def _notes(pairing: DraftPairing) -> list[str]:
    """Return what is no error, but worth knowing before a pairing is published."""
    from hf_specdec.pairing.schema import only_here

    notes = [f"The {role} is a path on this machine: others cannot load it." for role in only_here(pairing)]
    if not pairing.measurements:
        notes.append("Nothing was measured.")
    is_local = pairing.source is not None and pairing.source.id is None
    if is_local and not Path(pairing.source.folder, "README.md").is_file():  # type: ignore[union-attr]
        notes.append("There is no README.md: without its tags a search on the Hub does not find the pairing.")
    return notes


def _print(values: dict[str, Any]) -> None:
    rows = {
        "pairing": values["pairing"],
        "commit": values["revision"],
        "target": values["target"],
        "draft": values["draft"],
        "quantization": values["draft_quantization"],
        "draft tokens": values["num_draft_tokens"],
        "measurements": values["num_measurements"],
        "files checked": values["num_files"] or None,
        "target tokenizer": values["tokenizers"]["target"],
        "draft tokenizer": values["tokenizers"]["draft"],
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        if value is not None:
            print(f"{name:<{width}}  {value}")
    for note in values["notes"]:
        print(f"Note: {note}")
    print("A tokenizer is not the one that the pairing was made for." if values["differs"] else "The pairing is sound.")
