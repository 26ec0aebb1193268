"""Examine every architecture, keep what was found, and write the page for users.

`python tests/zoo` does all of them, `python tests/zoo mamba t5` only those named.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch
import transformers
from tqdm import tqdm

from zoo.findings import Findings, write_expected, write_page
from zoo.roster import GROUPS, examined


def main() -> None:
    """Examine, keep and write, unless a text differs or a call fails."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    wanted = set(sys.argv[1:])
    found: Findings = {}
    failures: list[str] = []
    for group, names in GROUPS.items():
        found[group] = {}
        for name in tqdm([name for name in names if not wanted or name in wanted], desc=group):
            try:
                findings = examined(group, name)
            except Exception as error:  # noqa: BLE001  the others shall be examined all the same
                failures.append(f"{name}: {type(error).__name__}: {error}")
                continue
            failures += [f"{name}: another text" for finding in findings.values() if not finding.is_exact]
            reason = next((finding.reason for finding in findings.values() if finding.reason), "")
            lanes = {size: finding.lane for size, finding in findings.items()}
            found[group][name] = {**lanes, **({"reason": reason} if reason else {})}
    if failures:
        raise SystemExit("\n".join(failures))
    write_expected(found, is_complete=not wanted)
    write_page()


if __name__ == "__main__":
    main()
