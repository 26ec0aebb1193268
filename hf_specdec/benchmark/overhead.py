"""Host overhead per round: what a round costs beyond its model forwards, ours against transformers' assisted decoding.

Run it on an otherwise idle machine: `python -m hf_specdec.benchmark.overhead`.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_specdec
from hf_specdec.benchmark.hardware import hardware_in_words, versions

NUM_NEW_TOKENS = 120
REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Medians over repeats, in milliseconds per round; `spread` is the distance between the quartiles."""

    method: str
    num_draft_tokens: int
    milliseconds: float
    spread: float


def toy_model() -> LlamaForCausalLM:
    """Return a one-layer model whose forwards cost next to nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


class ForwardTimer:
    """Adds up the time spent in a model's forwards and counts them.

    It is the thread's own time, with one thread on a processor: what else the machine does takes none of it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """Time `model`'s forwards while the context is open."""
        original = model.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started
                self.count += 1

        functools.update_wrapper(timed, original)
        model.forward = timed
        try:
            yield
        finally:
            del model.forward


def overhead_of(run: Callable[[], Any], target: PreTrainedModel, draft: PreTrainedModel) -> float:
    """Return the milliseconds per round that one run spends outside forwards."""
    of_target, of_draft = ForwardTimer(), ForwardTimer()
    with of_target.watching(target), of_draft.watching(draft):
        started = time.thread_time()
        run()
        elapsed = time.thread_time() - started
    rounds = of_target.count - 1
    return 1e3 * (elapsed - of_target.seconds - of_draft.seconds) / rounds


def measure(num_draft_tokens: int, *, do_sample: bool = False) -> list[Overhead]:
    """Measure both methods with one draft length, interleaved."""
    target = hf_specdec.enable(toy_model())
    draft = toy_model()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.05)
    assistant = copy.deepcopy(draft)
    assistant.generation_config.num_assistant_tokens = num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    prompt = torch.arange(1, 17)[None]
    shared = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": do_sample}
    runs: dict[str, tuple[Callable[[], Any], PreTrainedModel]] = {
        "ours": (
            lambda: target.generate(prompt, draft_model=draft, num_draft_tokens=num_draft_tokens, **shared),
            draft,
        ),
        "assistant_model": (lambda: target.generate(prompt, assistant_model=assistant, **shared), assistant),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(REPEATS + 1):
        for name, (run, drafting) in runs.items():
            torch.manual_seed(repeat)
            value = overhead_of(run, target, drafting)
            if repeat:  # the first repeat warms up
                times[name].append(value)
    return [
        Overhead(
            method=name,
            num_draft_tokens=num_draft_tokens,
            milliseconds=statistics.median(values),
            spread=statistics.quantiles(values)[2] - statistics.quantiles(values)[0],
        )
        for name, values in times.items()
    ]


def main() -> None:
    """Print one JSON object per measurement."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    origin = {"date": time.strftime("%Y-%m-%d"), "hardware": hardware_in_words(device), "versions": versions()}
    for do_sample in (False, True):
        for num_draft_tokens in (3, 5):
            for result in measure(num_draft_tokens, do_sample=do_sample):
                sys.stdout.write(json.dumps({**asdict(result), "do_sample": do_sample, **origin}) + "\n")


if __name__ == "__main__":
    main()
