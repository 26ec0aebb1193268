"""Names that users give models by: Hub ids and local folders."""

from __future__ import annotations

import os


def refuse_missing_folder(rule: str, name: str) -> None:
    """Refuse what can only be a path and leads nowhere, before a Hub is asked for it.

    Args:
        rule: What the command needs, the start of the message.
        name: As given.

    Raises:
        ValueError: There is no such folder.
    """
    is_path = os.path.isabs(name) or name.startswith(".")
    if is_path and not os.path.isdir(name):
        raise ValueError(f"{rule}, but there is no folder {name!r}. Check the path.")
