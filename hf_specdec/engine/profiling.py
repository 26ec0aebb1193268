"""Where a call spends its time: seconds per phase, and a trace of `torch.profiler`."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, record_function

from hf_specdec.errors import in_short, warn_caller


class Phases:
    """Says of every piece of work to which phase it belongs; without a profile it costs next to nothing."""

    def __init__(self, *, is_on: bool) -> None:
        """Measure only if `is_on`."""
        self.is_on = is_on
        self.seconds: dict[str, float] = {}
        self._nothing = nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Within this, time counts for the phase `name`; phases do not overlap."""
        return self._measured(name) if self.is_on else self._nothing

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with record_function(f"hf_specdec {name}"):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@contextmanager
def traced(*, is_on: bool) -> Iterator[list[str]]:
    """Within this, torch records what it does.

    Yields:
        A list that afterwards holds the name of the file with the trace, which Perfetto and Chrome show; it stays empty
        where the caller or another call records already, for torch knows only one recorder at a time, and where it
        cannot be written.
    """
    files: list[str] = []
    if not is_on:
        yield files
        return
    with ExitStack() as turn:
        if not _is_recorder_free(turn):
            yield files
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with torch.profiler.profile(activities=activities) as recorder:
            yield files
        try:
            handle, name = tempfile.mkstemp(prefix="hf_specdec-", suffix=".trace.json")
            os.close(handle)
            recorder.export_chrome_trace(name)
        except OSError as error:
            warn_caller(f"The trace of this call could not be written ({in_short(error)}).")
            return
        files.append(name)


def _is_recorder_free(turn: ExitStack) -> bool:
    """Return whether nobody records, and keep others of ours from it until `turn` ends."""
    # torch does not refuse a second recorder: the first loses what it has, and two threads' crash the process.
    if not _recording.acquire(blocking=False):
        return False
    turn.callback(_recording.release)
    return not getattr(torch.autograd.profiler, "_is_profiler_enabled", False)


_recording = threading.Lock()
