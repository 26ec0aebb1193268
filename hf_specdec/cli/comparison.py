"""Time one call of `generate`, and set a plain one beside one with a draft."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from hf_specdec.cli.painting import TokenWriter
    from hf_specdec.metrics import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """One row of generated tokens and how long they took, prefill included."""

    token_ids: list[int]
    seconds: float
    time_to_first_token_seconds: float
    speculation: SpeculationStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens / total time."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "num_new_tokens": len(self.token_ids),
            "token_ids": self.token_ids,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token_seconds": self.time_to_first_token_seconds,
            "speculation": self.speculation.to_dict() if self.speculation else None,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same prompt decoded plainly and with a draft."""

    plain: TimedRun
    drafted: TimedRun

    @property
    def speedup(self) -> float:
        """Tokens per second with the draft / without."""
        return self.drafted.tokens_per_second / self.plain.tokens_per_second if self.plain.token_ids else 1.0

    @property
    def first_difference(self) -> int | None:
        """Index of the first token in which the outputs differ, or None if they are equal."""
        ours, theirs = self.drafted.token_ids, self.plain.token_ids
        if ours == theirs:
            return None
        pairs = zip(ours, theirs, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))

    def to_dict(self) -> dict[str, Any]:
        """Return both runs and what follows from them as JSON types."""
        return {
            "plain": self.plain.to_dict(),
            "drafted": self.drafted.to_dict(),
            "speedup": self.speedup,
            "is_equal": self.first_difference is None,
            "first_difference": self.first_difference,
        }


def run_timed(model: PreTrainedModel, inputs: Mapping[str, Tensor], writer: TokenWriter, **options: Any) -> TimedRun:
    """Call `model.generate` for one row and time it.

    Args:
        model: The target.
        inputs: `input_ids` and `attention_mask`, `[1, L]`.
        writer: Gets every token as it comes.
        options: Further keywords of `generate`.
    """
    clock = _Clock(writer)
    output: Any = model.generate(  # type: ignore[operator]  # the host's `generate` is hidden behind module attributes
        **inputs, streamer=clock, return_dict_in_generate=True, **options
    )
    # Reading the ids waits for the device, so the clock is read after it.
    token_ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - clock.started
    return TimedRun(
        token_ids=token_ids,
        seconds=seconds,
        time_to_first_token_seconds=(clock.first_token or time.perf_counter()) - clock.started,
        speculation=getattr(output, "speculation", None),
    )


class _Clock:
    """A streamer that notes when the first token came and passes everything on."""

    def __init__(self, writer: TokenWriter) -> None:
        self._writer = writer
        self._num_puts = 0
        self.first_token: float | None = None
        self.started = time.perf_counter()

    def put(self, value: Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:  # the first is the prompt
            self.first_token = time.perf_counter()
        self._writer.put(value)

    def end(self) -> None:
        self._writer.end()
