"""Measure one pair on some prompts, as its pairing reports it: plain decoding and the draft taking turns.

`python -m hf_specdec.benchmark.pairs --output results.json` does so with the bundled pair, its target widened: the
figures on its card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import hf_specdec
from hf_specdec.benchmark.hardware import hardware_in_words, versions
from hf_specdec.benchmark.interleaving import Timing, interleaved
from hf_specdec.benchmark.prompt_files import Prompt
from hf_specdec.benchmark.verdicts import faster
from hf_specdec.config import DraftQuantization
from hf_specdec.demo import DEMO_FOLDER, DEMO_PROMPTS, load_demo_pair
from hf_specdec.metrics import added_up
from hf_specdec.pairing.schema import Measurement
from hf_specdec.placement import device_of

PLAIN, PLAIN_AGAIN, DRAFTED, CONSTANT = "plain", "plain again", "drafted", "constant"
# The adaptive length may draft nothing at all where that is best; a constant one tells how often the draft is right.
COMPARABLE_LENGTH = 4
Inputs = Sequence[Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """How a pair is measured.

    Attributes:
        num_draft_tokens: K, or "auto", which a constant `COMPARABLE_LENGTH` is measured beside.
        draft_quantization: How the draft's weights are stored.
        temperature: 0 decodes greedily; otherwise nothing but the temperature shapes the law.
        max_new_tokens: Per prompt; fewer where the model ends.
        repeats: Passes over all prompts.
        trust_remote_code: For the draft.
        draft_revision: The draft's commit on the Hub, None for a local folder.
    """

    num_draft_tokens: int | Literal["auto"] = "auto"
    draft_quantization: DraftQuantization = "auto"
    temperature: float = 0.0
    max_new_tokens: int = 128
    repeats: int = 3
    trust_remote_code: bool = False
    draft_revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFigures:
    """What one workload gave.

    Attributes:
        measurements: With the draft length that was asked for, and beside "auto" with a constant one.
        noise: How many times faster plain decoding was than itself: median, min, max.
        num_outputs: Outputs behind each measurement.
        num_differing_outputs: Of those, for each measurement, how many are not plain decoding's; None where texts are
            sampled.
        controller_hints: What "auto" learned, None with a constant length.
    """

    measurements: tuple[Measurement, ...]
    noise: Mapping[str, float]
    num_outputs: int
    num_differing_outputs: tuple[int, ...] | None
    controller_hints: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {**asdict(self), "measurements": [asdict(own) for own in self.measurements]}


def measured_pair(
    target: Any,
    draft: str,
    workloads: Mapping[str, Inputs],
    settings: PairSettings,
    *,
    on_workload: Callable[[str], None] = lambda _: None,
) -> dict[str, WorkloadFigures]:
    """Measure a pair on each workload, in order.

    Args:
        target: A model that speculation is enabled for.
        draft: The Hub id or local folder of the draft.
        workloads: Name to encoded prompts, `[1, L]` each.
        settings: How.
        on_workload: Called with the name of each workload before it.

    Raises:
        SpecDecError: The draft cannot be loaded, or fails: no figure is reported of what was decoded plainly instead.
    """
    figures: dict[str, WorkloadFigures] = {}
    for name, inputs in workloads.items():
        on_workload(name)
        ways = _ways(draft, settings)
        if not figures:
            # It loads the draft, and lets the adaptive length find its way.
            interleaved(target, inputs[:1], ways, repeats=1)
        timings = interleaved(target, inputs, ways, repeats=settings.repeats)
        figures[name] = _figures(name, target, timings, settings, len(inputs))
    return figures


def _ways(draft: str, settings: PairSettings) -> dict[str, dict[str, Any]]:
    shared: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.temperature > 0}
    if settings.temperature > 0:
        shared |= {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    lengths = {DRAFTED: settings.num_draft_tokens}
    if settings.num_draft_tokens == "auto":
        lengths[CONSTANT] = COMPARABLE_LENGTH
    config = {
        "strict": True,
        "draft_quantization": settings.draft_quantization,
        "draft_revision": settings.draft_revision,
        "trust_remote_code": settings.trust_remote_code,
    }
    drafted = {
        name: {**shared, "draft_model": draft, "num_draft_tokens": length, "speculative_config": config}
        for name, length in lengths.items()
    }
    return {PLAIN: shared, **drafted, PLAIN_AGAIN: shared}


def _figures(
    workload: str, target: Any, timings: Mapping[str, Timing], settings: PairSettings, num_prompts: int
) -> WorkloadFigures:
    plain = timings[PLAIN].seconds_per_token
    drafted = [name for name in (DRAFTED, CONSTANT) if name in timings]
    measurements = []
    for name in drafted:
        timing = timings[name]
        stats = added_up([call for calls in timing.calls for call in calls])
        speed_up = faster(plain, timing.seconds_per_token)
        measurements.append(
            Measurement(
                workload=workload,
                temperature=settings.temperature,
                batch_size=1,
                num_new_tokens=max(round(sum(timing.num_new_tokens) / (num_prompts * settings.repeats)), 1),
                num_prompts=num_prompts,
                acceptance_rate=round(stats.acceptance_rate, 4),
                mean_acceptance_length=round(stats.mean_acceptance_length, 4),
                speed_up=speed_up["median"],
                speed_up_low=speed_up["min"],
                speed_up_high=speed_up["max"],
                num_draft_tokens=COMPARABLE_LENGTH if name == CONSTANT else settings.num_draft_tokens,
                draft_quantization=stats.draft_quantization,
                dtype=str(target.dtype).removeprefix("torch."),
                hardware=hardware_in_words(device_of(target)),
                versions=versions(),
                date=time.strftime("%Y-%m-%d"),
            )
        )
    is_greedy = not settings.temperature
    return WorkloadFigures(
        measurements=tuple(measurements),
        noise=faster(plain, timings[PLAIN_AGAIN].seconds_per_token),
        num_outputs=num_prompts * settings.repeats,
        num_differing_outputs=tuple(timings[name].num_differing_outputs for name in drafted) if is_greedy else None,
        controller_hints=timings[DRAFTED].calls[-1][-1].controller_hints,
    )


def bundled_workloads(tokenizer: Any, device: torch.device, num_prompts: int | None = None) -> dict[str, Inputs]:
    """Return the bundled prompts, encoded, by workload; `num_prompts` of each, or all."""
    return {
        workload: encoded([Prompt(text=text) for text in texts[:num_prompts]], tokenizer, device)
        for workload, texts in DEMO_PROMPTS.items()
    }


def encoded(prompts: Sequence[Prompt], tokenizer: Any, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return encoded prompts, `[1, L]` each, on a device."""
    return [{name: own.to(device) for name, own in prompt.encoded(tokenizer).items()} for prompt in prompts]


def _announce(workload: str) -> None:
    sys.stderr.write(f"{workload} …\n")


def main(arguments: list[str] | None = None) -> None:
    """Measure the bundled pair, its target widened, and print JSON; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--num-parameters", type=int, default=300_000_000, help="to widen the target by")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--num-prompts", type=int, default=1, help="per workload")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    pair = load_demo_pair(num_parameters=options.num_parameters, dtype=getattr(torch, options.dtype))
    hf_specdec.enable(pair.target)
    workloads = bundled_workloads(pair.tokenizer, pair.target.device, options.num_prompts)
    settings = PairSettings(max_new_tokens=options.max_new_tokens, repeats=options.repeats)
    found = []
    for temperature in options.temperatures:
        figures = measured_pair(
            pair.target,
            str(DEMO_FOLDER / "draft"),
            workloads,
            replace(settings, temperature=temperature),
            on_workload=_announce,
        )
        found += [{"workload": name, **own.to_dict()} for name, own in figures.items()]
    text = json.dumps({"num_ballast_parameters": options.num_parameters, "workloads": found}, indent=2) + "\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
