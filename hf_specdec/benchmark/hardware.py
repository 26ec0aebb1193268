"""Where a figure was measured, in the words that a card or a table needs."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from hf_specdec import __version__

PACKAGES = ("torch", "transformers", "bitsandbytes")


def hardware_in_words(device: torch.device) -> str:
    """Return what computes: the GPUs, or the processor with its vector instructions, cores and threads in use."""
    if device.type == "cuda":
        name, count = torch.cuda.get_device_name(device), torch.cuda.device_count()
        return name if count == 1 else f"{name} ({count} in the machine)"
    if device.type != "cpu":
        return f"{device.type} on {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return f"{_processor()} ({capability}), {cores} cores, {threads} thread{'s' if threads > 1 else ''}"


def versions() -> dict[str, str]:
    """Return the versions that speed and text depend on; a package that is not installed is absent."""
    found = {"hf_specdec": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = ""
    return name if name and name != "unknown" else platform.processor() or platform.machine()
