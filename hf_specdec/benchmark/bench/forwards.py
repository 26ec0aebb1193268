"""How long a forward over 1, 2, 3, … tokens takes at a given context: the times that decide whether drafts pay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from hf_specdec.benchmark.bench.calls import synchronize
from hf_specdec.engine.forward import Lane, prefilled_lane
from hf_specdec.engine.lending import lent_runner
from hf_specdec.engine.sequences import Span
from hf_specdec.placement import device_of

FIRST_TOKEN = 10
WARM_UP = 5
# Compiled forwards may fill up with a few tokens.
ROOM = 16


def forward_milliseconds(
    model: Any,
    num_tokens: Sequence[int],
    *,
    context: int,
    batch_size: int = 1,
    repeats: int = 20,
    runner: str = "eager",
) -> dict[str, Any]:
    """Time forwards of the ragged lane, all counts in turn in every repeat.

    Args:
        model: A target or a draft.
        num_tokens: Tokens per row of each forward to time: 1 is a draft step or a plain step, K + 1 a verification.
        context: Tokens in the cache before them.
        batch_size: Rows.
        repeats: Timed forwards of each count.
        runner: "eager", "compiled" or "cuda_graph".

    Returns:
        For each count the median, the quartiles and the fastest, in milliseconds. With another runner than "eager" also
        `prepare_seconds`, what preparing all counts took, warm-up forwards included, and `runner` and `reason`, how
        forwards ran in the end and why.
    """
    device = device_of(model)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(context * batch_size, device=device).view(batch_size, context) % (vocab_size - FIRST_TOKEN)
    times: dict[int, list[float]] = {count: [] for count in num_tokens}
    prepare_seconds = 0.0
    with torch.no_grad(), lent_runner(model, model, runner, "ragged") as lent:
        capacity = context + max(num_tokens) + ROOM
        lane = prefilled_lane(model, ids + FIRST_TOKEN, None, capacity=capacity, static=lent.static)
        assert isinstance(lane, Lane), "only this lane can go back to the same place again and again"
        for repeat in range(WARM_UP + repeats):
            for count in num_tokens:
                seconds = _seconds(lane, ids[:, :1].expand(-1, count) + FIRST_TOKEN, context, device)
                if repeat >= WARM_UP:
                    times[count].append(seconds)
                else:
                    prepare_seconds += seconds
        kind, reason = lent.told
    results: dict[str, Any] = {str(count): _spread(own) for count, own in times.items()}
    if runner != "eager":
        results |= {"prepare_seconds": round(prepare_seconds, 3), "runner": kind, "reason": reason}
    return results


def _seconds(lane: Lane, tokens: torch.Tensor, context: int, device: torch.device) -> float:
    count = tokens.shape[1]
    synchronize(device)
    started = time.perf_counter()
    lane.forward(tokens, Span(start=context, end=context + count), num_logits=count)
    synchronize(device)
    return time.perf_counter() - started


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(seconds)
    values = {"median": middle, "low": low, "high": high, "fastest": min(seconds)}
    return {name: round(1e3 * value, 4) for name, value in values.items()}
