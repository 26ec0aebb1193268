"""`hf-specdec pair`: draft pairings as folders and on the Hub."""

from __future__ import annotations

import typer

pair_app = typer.Typer(
    name="pair", help="Draft pairings: a target, the draft that suits it, and what was measured.", no_args_is_help=True
)
