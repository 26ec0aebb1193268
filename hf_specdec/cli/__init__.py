"""The command line: data goes to stdout, talk to stderr; torch is imported only by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from hf_specdec.cli.bench import bench
from hf_specdec.cli.demo import demo
from hf_specdec.cli.env import env
from hf_specdec.cli.generate import generate
from hf_specdec.cli.pair import pair_app
from hf_specdec.cli.pair_create import create
from hf_specdec.cli.plan import plan
from hf_specdec.cli.simulate import simulate
from hf_specdec.errors import SpecDecError

app = typer.Typer(
    name="hf-specdec",
    help="Speculative decoding for Hugging Face transformers: the same output, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(generate)
app.command()(env)
app.command()(simulate)
app.command()(plan)
app.command()(bench)
pair_app.command()(create)
app.add_typer(pair_app)


@dataclass(slots=True)
class Settings:
    """What holds for every command."""

    debug: bool = False


@app.callback()
def _configure(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    context.ensure_object(Settings).debug = debug


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit codes are 0, 1 for an error, 2 for wrong usage and 130 for Ctrl-C.

    Args:
        argv: Arguments without the program's name; None takes them from the process.
    """
    settings = Settings()
    try:
        app(args=argv, obj=settings, prog_name="hf-specdec")
    except (SpecDecError, OSError, ValueError) as error:
        if settings.debug:
            raise
        message = " ".join(str(error).split())
        print(f"hf-specdec: {message} (run `hf-specdec --debug …` for the traceback)", file=sys.stderr)
        sys.exit(1)
