"""Where a model computes, which need not be where its weights lie."""

from __future__ import annotations

from typing import Any

import torch


def device_of(model: Any) -> torch.device:
    """Return the device that a model's inputs belong on.

    Accelerate may keep weights in memory or on disk and bring them to another device layer by layer; what it leaves in
    their places is on the meta device, which `model.device` would name.

    Returns:
        The meta device only for a model that has no weights anywhere.
    """
    device: torch.device = model.device
    if "_hf_hook" not in vars(model) and device.type != "meta":
        return device
    for module in model.modules():
        hook = vars(module).get("_hf_hook")
        for part in getattr(hook, "hooks", (hook,)):
            if (found := getattr(part, "execution_device", None)) is not None:
                return torch.device(found)
    return device
