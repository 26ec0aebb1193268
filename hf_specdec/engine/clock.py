"""Time the phases of a round without adding a sync: events on CUDA, the host's clock elsewhere."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Marks points in time on one device, to be compared after the round's sync."""

    def __init__(self, device: torch.device) -> None:
        """Choose the clock that fits `device`."""
        self.device = device
        self.uses_events = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark for the work issued so far."""
        if not self.uses_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # By name: a model on several devices ends on another than the current one.
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks."""
        if not self.uses_events:
            return float(last - first)
        # sync: the round's read came after the marked work, so this returns at once.
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
