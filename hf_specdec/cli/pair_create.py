"""`hf-specdec pair create`: measure a pair on the user's prompts and write it as a pairing."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.cli.generate import DraftQuantization
from hf_specdec.cli.lengths import NumDraftTokens, as_length
from hf_specdec.cli.names import refuse_missing_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_specdec.benchmark.pairs import WorkloadFigures
    from hf_specdec.benchmark.prompt_files import Prompt
    from hf_specdec.pairing.schema import DraftPairing

BUNDLED = "bundled"
_RULE = "`hf-specdec pair create` measures two causal language models, given as Hub ids or local folders"


def create(
    model: Annotated[str, typer.Option(help="The target: a Hub id or a local folder.")],
    draft: Annotated[str, typer.Option(help="The draft: a Hub id or a local folder.")],
    output: Annotated[Path, typer.Option(help="The folder to write; it must be empty or not exist.")],
    prompts: Annotated[
        str, typer.Option(help="A text file with a prompt a line, JSON lines (.jsonl), or bundled for the bundled ones.")
    ] = BUNDLED,
    workload_name: Annotated[
        str | None, typer.Option(help="What to call a file's prompts; default: the file's name.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="At most so many per workload; default: all.")] = None,
    draft_quantization: Annotated[
        DraftQuantization, typer.Option(help="How the draft's weights are stored; auto goes by free memory.")
    ] = "auto",
    num_draft_tokens: NumDraftTokens = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts, each with and without the draft.")] = 3,
    save_draft: Annotated[
        bool, typer.Option("--save-draft", help="Also write the draft's weights, quantized as asked for.")
    ] = False,
    repo_id: Annotated[str | None, typer.Option(help="Where it will be published, for the card.")] = None,
    card_license: Annotated[str | None, typer.Option("--license", help="Of the card, by the Hub's spelling.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option()] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pairing that is in the folder.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a pair on your prompts, and write a folder that `draft_model=` takes and `pair push` publishes."""
    for name in (model, draft):
        refuse_missing_folder(_RULE, name)
