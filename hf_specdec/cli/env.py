"""`hf-specdec env`: what a bug report or a measurement needs to say about the machine."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated, Any

import typer

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "bitsandbytes", "accelerate")


def env(json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, device, CPU capability and threads."""
    values = describe_environment()
    if json_output:
        print(json.dumps(values, indent=2))
        return
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value}")


def describe_environment() -> dict[str, Any]:
    """Return versions and hardware as JSON types."""
    import torch

    from hf_specdec import __version__

    has_cuda = torch.cuda.is_available()
    return {
        "hf-specdec": __version__,
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if has_cuda else "cpu",
        "cuda": torch.version.cuda if has_cuda else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
