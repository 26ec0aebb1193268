"""One draft in every quantization: bytes, time of a step, acceptance and speed-up, interleaved in one process.

Run it on an otherwise idle machine: `python -m hf_specdec.benchmark.quantized_drafts --output results.json`. Every
draft is loaded as users get it, `draft_model` being a name and `draft_quantization` the row. A repeat goes once through
all rows, with a constant and with the adaptive draft length, and through plain decoding at its beginning and end; every
ratio is that of two runs of the same repeat.

The bundled draft is so small that its step is mostly Python. So it grows: more columns in its MLPs, whose output is
zero, give it the bytes of a larger draft, and leave what it proposes as it was. Its layers are wider in proportion than
those of a draft trained at that size, so a step's time tells about bytes and not about that draft.
`--draft-parameters 0` leaves the growing out; `--model` and `--draft` measure another pair.

`--render results.json` prints the table of a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.benchmark.demo_pair import provenance
from hf_specdec.benchmark.grown_draft import save_grown
from hf_specdec.benchmark.hardware import hardware_in_words, versions
from hf_specdec.benchmark.interleaving import Timing, interleaved
from hf_specdec.benchmark.quantized_table import AUTO, FIXED, WAYS, rendered, with_summary
from hf_specdec.config import SpeculativeConfig
from hf_specdec.demo import DEMO_FOLDER, DEMO_PROMPTS, load_demo_pair
from hf_specdec.loading import resolve_draft
from hf_specdec.memory import QUANTIZATIONS, held_bytes, skeleton_of, weight_bytes
from hf_specdec.metrics import SpeculationStats, added_up
from hf_specdec.placement import device_of

BUNDLED = "bundled"
DRAFT_PARAMETERS = 20_000_000
WARM_UP_TOKENS = 8
PLAIN, PLAIN_AGAIN = "plain", "plain again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target that can speculate, its tokenizer, and the name that the draft is loaded by.

    `target_name` and `draft_name` are for people.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft: str
    target_name: str
    draft_name: str
    num_target_parameters: int


@contextmanager
def opened_pair(options: argparse.Namespace) -> Iterator[Pair]:
    """Load the target, and make the folder of the grown draft for as long as it is needed."""
    dtype = getattr(torch, options.dtype)
    target: Any
    if options.model == BUNDLED:
        demo = load_demo_pair(num_parameters=options.num_parameters, dtype=dtype, device=options.device)
        target, tokenizer = demo.target, demo.tokenizer
        num_parameters = target.num_parameters() + options.num_parameters
        target_name = "of the bundled pair"
    else:
        target = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        num_parameters, target_name = target.num_parameters(), options.model
    draft = str(DEMO_FOLDER / "draft") if options.draft == BUNDLED else options.draft
    draft_name = "of the bundled pair" if options.draft == BUNDLED else draft
    hf_specdec.enable(target)
    with tempfile.TemporaryDirectory() as folder:
        if options.draft_parameters:
            small = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype)
            save_grown(small, tokenizer, options.draft_parameters, Path(folder))
            draft, draft_name = folder, f"{draft_name}, grown"
        yield Pair(
            target=target,
            tokenizer=tokenizer,
            draft=draft,
            target_name=target_name,
            draft_name=draft_name,
            num_target_parameters=num_parameters,
        )
        hf_specdec.disable(target)


def ways_of(pair: Pair, options: argparse.Namespace, num_new_tokens: int) -> dict[str, dict[str, Any]]:
    """Return what `generate` gets, by row and draft length, with plain decoding at both ends."""
    settings = {"max_new_tokens": num_new_tokens, "min_new_tokens": num_new_tokens, "do_sample": False}
    lengths = {FIXED: options.num_draft_tokens, AUTO: "auto"}
    drafted = {
        f"{kind} {way}": {
            **settings,
            "draft_model": pair.draft,
            "num_draft_tokens": lengths[way],
            "speculative_config": {"draft_quantization": kind},
        }
        for kind in options.quantizations
        for way in WAYS
    }
    return {PLAIN: settings, **drafted, PLAIN_AGAIN: settings}


def measure(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """Load every draft, warm everything up, measure, and return results without a summary."""
    device = device_of(pair.target)
    prompts = [prompt for workload in options.workloads for prompt in DEMO_PROMPTS[workload][: options.num_prompts]]
    inputs = [pair.tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(device) for text in prompts]
    interleaved(pair.target, inputs[:1], ways_of(pair, options, WARM_UP_TOKENS), repeats=1)
    ways = ways_of(pair, options, options.max_new_tokens)
    learning = {name: keywords for name, keywords in ways.items() if name.endswith(f" {AUTO}")}
    interleaved(pair.target, inputs[:1], learning, repeats=1)
    timings = interleaved(pair.target, inputs, ways, repeats=options.repeats)
    rows, num_parameters = {}, 0
    for kind in options.quantizations:
        draft = resolve_draft(pair.target, pair.draft, SpeculativeConfig(draft_quantization=kind))
        config = AutoConfig.from_pretrained(pair.draft)
        skeleton = skeleton_of(config, pair.target.dtype)
        num_parameters = skeleton.num_parameters()
        rows[kind] = {
            "predicted_bytes": weight_bytes(skeleton, kind),
            "measured_bytes": held_bytes(draft),
            **{way: deeds_of(timings[f"{kind} {way}"]) for way in WAYS},
        }
    return {
        "provenance": {**provenance(options), "hardware": hardware_in_words(device), **versions()},
        "target": {"name": pair.target_name, "num_parameters": pair.num_target_parameters},
        "draft": {"name": pair.draft_name, "num_parameters": num_parameters},
        "num_prompts": len(inputs),
        "plain": seconds_of(timings[PLAIN]),
        "plain_again": seconds_of(timings[PLAIN_AGAIN]),
        "rows": rows,
    }


def seconds_of(timing: Timing) -> dict[str, Any]:
    """Return a way's times per repeat, in seconds."""
    return {
        "seconds": [round(value, 6) for value in timing.seconds],
        "seconds_to_first_token": [round(value, 6) for value in timing.first],
    }


def deeds_of(timing: Timing) -> dict[str, Any]:
    """Return what a way did, as JSON types."""
    stats = added_up([call for calls in timing.calls for call in calls])
    return {
        **seconds_of(timing),
        "draft_step_milliseconds": [_draft_step(calls) for calls in timing.calls],
        "acceptance_rate": round(stats.acceptance_rate, 4),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "plain_step_share": round(stats.num_plain_steps / max(stats.num_rounds, 1), 4),
        "num_outputs": sum(map(len, timing.calls)),
        "num_differing_outputs": timing.num_differing_outputs,
        "fallbacks": sorted(set(stats.fallbacks)),
    }


def _draft_step(calls: list[SpeculationStats]) -> float | None:
    num_steps = sum(sum(call.draft_lengths) for call in calls)
    return round(1e3 * sum(call.draft_seconds for call in calls) / num_steps, 4) if num_steps else None


def parser_of_options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where results go, as JSON")
    parser.add_argument("--render", type=Path, metavar="FILE", help="print a file's table and measure nothing")
    parser.add_argument("--model", default=BUNDLED, help="a Hub id or local folder; needs --draft")
    parser.add_argument("--draft", default=BUNDLED, help="a Hub id or local folder with unquantized weights")
    parser.add_argument("--num-parameters", type=int, default=300_000_000, help="to widen the bundled target by")
    parser.add_argument(
        "--draft-parameters", type=int, help=f"to grow the draft by ({DRAFT_PARAMETERS} for the bundled one, else 0)"
    )
    parser.add_argument("--quantizations", type=_quantizations, default=list(QUANTIZATIONS))
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="the constant draft length")
    parser.add_argument("--workloads", type=_workloads, default=["code", "prose"])
    parser.add_argument("--num-prompts", type=int, default=1, help="per workload")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def checked_options(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with what depends on others filled in; wrong ones end the program."""
    options = parser.parse_args(arguments)
    if (options.model == BUNDLED) != (options.draft == BUNDLED):
        parser.error("--model and --draft belong together: give both, or neither for the bundled pair")
    if options.draft_parameters is None:
        options.draft_parameters = DRAFT_PARAMETERS if options.draft == BUNDLED else 0
    return options


def _quantizations(text: str) -> list[str]:
    return _known(text, QUANTIZATIONS)


def _workloads(text: str) -> list[str]:
    return _known(text, DEMO_PROMPTS)


def _known(text: str, names: tuple[str, ...] | Mapping[str, Any]) -> list[str]:
    given = [part for part in text.split(",") if part]
    if not given or (unknown := [part for part in given if part not in names]):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, but is {unknown[0] if given else text!r}")
    return given


def main(arguments: list[str] | None = None) -> None:
    """Measure, or render what was measured; progress goes to stderr."""
    parser = parser_of_options()
    options = checked_options(parser, arguments)
    if options.render is not None:
        sys.stdout.write(rendered(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(options.threads)
    try:
        with opened_pair(options) as pair:
            sys.stderr.write(f"{', '.join(options.quantizations)} …\n")
            results = with_summary(measure(pair, options))
    except ValueError as error:
        parser.error(str(error))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(rendered(results))


if __name__ == "__main__":
    main()
