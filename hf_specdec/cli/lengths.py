"""The option `--num-draft-tokens`: a number, or "auto"."""

from __future__ import annotations

from typing import Annotated

import typer


def as_length(text: str) -> int | str:
    """Return what the option means to `generate`."""
    return text if text == "auto" else int(text)


def _checked(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise typer.BadParameter(f"it must be a number of at least 1, or auto, but is {text!r}.")
    return text


NumDraftTokens = Annotated[
    str, typer.Option(callback=_checked, metavar="K|auto", help="Tokens drafted per round; auto lets it adapt.")
]
