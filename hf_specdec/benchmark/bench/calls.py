"""Time one call of `generate`: its first token, its end, the memory it took, and how often the target ran."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.benchmark.demo_pair import FirstToken
from hf_specdec.metrics import SpeculationStats

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """What one call gave and took.

    Attributes:
        token_ids: New tokens, one list per row.
        first_seconds: Until every row had its first token.
        seconds: The whole call.
        peak_bytes: Memory it took at its peak beyond what was in use before; None where that cannot be known.
        num_target_forwards: Forwards of the target, the prompt's included.
        stats: What happened, where it was one of ours.
    """

    token_ids: list[list[int]]
    first_seconds: float
    seconds: float
    peak_bytes: int | None
    num_target_forwards: int
    stats: SpeculationStats | None


def timed_call(target: Any, inputs: Mapping[str, torch.Tensor], keywords: Mapping[str, Any]) -> TimedCall:
    """Call `target.generate` once.

    Args:
        target: The model.
        inputs: `input_ids` and `attention_mask`, `[B, L]`.
        keywords: Everything else.
    """
    device = target.device
    # Ours counts by itself; a compiler would start anew for every number that a hook counts.
    counting = nullcontext() if "draft_model" in keywords else _counting(target)
    with counting as forwards, _peak(device) as peak:
        synchronize(device)
        streamer = FirstToken()
        started = time.perf_counter()
        output = target.generate(**inputs, **keywords, streamer=streamer, return_dict_in_generate=True)
        synchronize(device)
        seconds = time.perf_counter() - started
    new_ids: list[list[int]] = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    stats: Any = getattr(output, "speculation", None)
    return TimedCall(
        token_ids=new_ids,
        first_seconds=streamer.seconds or seconds,
        seconds=seconds,
        peak_bytes=peak[0],
        num_target_forwards=stats.num_target_forwards if forwards is None else len(forwards),
        stats=stats,
    )


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _counting(model: PreTrainedModel) -> Iterator[list[None]]:
    forwards: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        yield forwards
    finally:
        handle.remove()


@contextmanager
def _peak(device: torch.device) -> Iterator[list[int | None]]:
    """Yield a list that holds, afterwards, the most bytes in use beyond those in use before."""
    taken: list[int | None] = [None]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield taken
        taken[0] = torch.cuda.max_memory_allocated(device) - before
        return
    resident = _resident_bytes("VmRSS") if _forget_peak() else None
    yield taken
    peak = _resident_bytes("VmHWM")
    if resident is not None and peak is not None:
        taken[0] = max(peak - resident, 0)


def _forget_peak() -> bool:
    """Let the kernel start anew with the process's peak; only Linux can."""
    try:
        _CLEAR.write_text(_CLEAR_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def _resident_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def total_memory(device: torch.device) -> int | None:
    """Return the memory of the device, or of the machine for a CPU; None where that cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
