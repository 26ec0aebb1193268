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
        if (found := _execution_device(module)) is not None:
            return found
    return device


def last_device_of(model: Any) -> torch.device:
    """Return the device on which a model's last layer computes, where a draft is best placed.

    With `device_map` that need not be the one its inputs belong on, and it often has more room: the first device also
    holds embeddings and caches of whatever else runs there.

    Returns:
        The device of the inputs if the last layer computes on another kind of device, or has none.
    """
    first, head = device_of(model), model.get_output_embeddings()
    if head is None:
        return first
    weight = getattr(head, "weight", None)
    last: torch.device = _execution_device(head) or (first if weight is None else weight.device)
    return last if last.type == first.type else first


def _execution_device(module: Any) -> torch.device | None:
    """Return the device that accelerate brings a module's weights to, None where it has no say."""
    hook = vars(module).get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        if (found := getattr(part, "execution_device", None)) is not None:
            return torch.device(found)
    return None
