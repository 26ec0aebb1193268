"""One cell of the adaptive benchmark: a workload at a temperature and batch size, every method timed on it."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.benchmark.bench.ways import generation_settings
from hf_specdec.benchmark.demo_pair import Run, Times, methods
from hf_specdec.benchmark.random_draft import with_random_weights
from hf_specdec.demo import DEMO_PROMPTS, DemoPair, widen
from hf_specdec.metrics import SpeculationStats, added_up

PLAIN = "plain"
PLAIN_AGAIN = "plain again"
AUTO = "auto"
USELESS = "auto, useless draft"
SLOW = "auto, slow draft"
ASSISTANT = "assistant_model"
ASSISTANT_PREFIX = "assistant_model K="
FIXED_PREFIX = "draft_model K="
LEARNING = (AUTO, USELESS, SLOW)
GROUPS = ("auto", "useless", "slow", "fixed", "assistant", "assistant-lengths")
"""What `--leave-out` takes."""
TEXTS = ("code", "json", "prose")
RANDOM = "random"
SEED = 0


class Cell(NamedTuple):
    """What is generated: the kind of prompt, the temperature (0 is greedy), and the rows of a batch."""

    workload: str
    temperature: float
    batch_size: int

    @property
    def key(self) -> str:
        """Return the cell's name in the results."""
        return f"{self.workload} T={self.temperature:g} B={self.batch_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What every cell shares: which methods run with which draft lengths, and how long.

    Attributes:
        lengths: Our fixed draft lengths.
        assisted_lengths: Constant draft lengths of `assistant_model=`.
        left_out: Of `GROUPS`, those not to run.
        num_prompts: Prompts of a cell whose batch size is 1; a larger batch takes as many as it has rows, once.
        num_new_tokens: Tokens per row, never fewer.
        repeats: Passes through all methods.
        warm_up_calls: Untimed calls of each method that learns, before a cell.
    """

    lengths: tuple[int, ...]
    assisted_lengths: tuple[int, ...]
    left_out: frozenset[str]
    num_prompts: int
    num_new_tokens: int
    repeats: int
    warm_up_calls: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """The pair, and two drafts that an adaptive draft length has to leave alone."""

    pair: DemoPair
    useless: PreTrainedModel
    slow: PreTrainedModel


def make_drafts(pair: DemoPair, num_parameters: int) -> Drafts:
    """Return the pair with a draft of random weights and one that costs what the target costs.

    Args:
        pair: The bundled pair, its target widened by `num_parameters`.
        num_parameters: Parameters to widen the slow draft by; 0 leaves it as it is.
    """
    slow = copy.deepcopy(pair.draft)
    if num_parameters:
        widen(slow, num_parameters)
    return Drafts(pair, with_random_weights(pair.draft, SEED), slow)


def encoded_prompts(tokenizer: PreTrainedTokenizerBase, cell: Cell, num_prompts: int) -> list[Any]:
    """Return the inputs of the cell's calls: `num_prompts` of one row, or one of `cell.batch_size` rows, padded left.

    Raises:
        ValueError: The workload has fewer prompts than the batch has rows.
    """
    num_rows = num_prompts if cell.batch_size == 1 else cell.batch_size
    rows = _random_rows(tokenizer, num_rows) if cell.workload == RANDOM else _rows(tokenizer, cell.workload)[:num_rows]
    if len(rows) < num_rows:
        raise ValueError(f"`{cell.workload}` has {len(rows)} prompts, but {num_rows} are asked for. Ask for fewer.")
    return [
        tokenizer.pad(
            {"input_ids": rows[start : start + cell.batch_size]},
            padding_side="left",
            return_tensors="pt",
            verbose=False,
        )
        for start in range(0, num_rows, cell.batch_size)
    ]


def _rows(tokenizer: PreTrainedTokenizerBase, workload: str) -> list[list[int]]:
    return [list(tokenizer(prompt)["input_ids"]) for prompt in DEMO_PROMPTS[workload]]


def _random_rows(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> list[list[int]]:
    """Return random tokens, special ones excluded, as many in row i as the i-th prompts of text have on average."""
    texts = [_rows(tokenizer, workload) for workload in TEXTS]
    ordinary = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    generator = torch.Generator().manual_seed(SEED)
    rows = []
    for prompts in list(zip(*texts, strict=False))[:num_rows]:
        length = round(sum(map(len, prompts)) / len(prompts))
        rows.append(ordinary[torch.randint(len(ordinary), (length,), generator=generator)].tolist())
    return rows


def runs_of(drafts: Drafts, cell: Cell, grid: Grid) -> dict[str, Run]:
    """Return the cell's methods in the order in which a pass goes through them.

    What is compared most closely comes close together: plain decoding, the adaptive lengths, plain decoding again.
    """
    pair = drafts.pair
    settings = settings_of(cell, grid.num_new_tokens)
    lengths = [] if "fixed" in grid.left_out else list(grid.lengths)
    has_assistant = cell.batch_size == 1  # transformers refuses larger batches
    assisted_lengths = list(grid.assisted_lengths) if has_assistant and "assistant-lengths" not in grid.left_out else []
    fixed = methods(pair, lengths, assisted_lengths, settings)
    runs = {PLAIN: fixed.pop(PLAIN)}
    learning = {"auto": (AUTO, pair.draft), "useless": (USELESS, drafts.useless), "slow": (SLOW, drafts.slow)}
    for group, (name, draft) in learning.items():
        if group not in grid.left_out:
            ours = {"draft_model": draft, "num_draft_tokens": "auto", "return_dict_in_generate": True}
            runs[name] = _run_with(pair, settings, **ours)
    runs[PLAIN_AGAIN] = runs[PLAIN]
    if has_assistant and "assistant" not in grid.left_out:
        # A copy, since the host may write what it learns into the assistant's configuration.
        runs[ASSISTANT] = _run_with(pair, settings, assistant_model=copy.deepcopy(pair.draft))
    return runs | fixed


def settings_of(cell: Cell, num_new_tokens: int) -> dict[str, Any]:
    """Return what every method passes to `generate`."""
    return generation_settings(cell.temperature, num_new_tokens)


def _run_with(pair: DemoPair, settings: dict[str, Any], **keywords: Any) -> Run:
    return methods(pair, [], [], {**settings, **keywords})[PLAIN]


def deeds_of(calls: Sequence[SpeculationStats]) -> dict[str, Any]:
    """Return what a method's calls did, on average, as JSON types; times in milliseconds, lengths in tokens."""
    stats = added_up(calls) if calls else SpeculationStats()
    num_drafting = stats.num_rounds - stats.num_plain_steps
    num_steps = sum(stats.draft_lengths)
    return {
        "num_rounds": stats.num_rounds,
        "mean_draft_length": _ratio(num_steps, num_drafting),
        "plain_step_share": _ratio(stats.num_plain_steps, stats.num_rounds),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "num_probes": len(stats.probes),
        "probe_milliseconds": _ratio(1e3 * stats.probe_seconds, len(stats.probes)),
        "draft_step_milliseconds": _ratio(1e3 * stats.draft_seconds, num_steps),
        "verify_milliseconds": _ratio(1e3 * stats.verify_seconds, stats.num_rounds),
        "fallbacks": sorted(set(stats.fallbacks)),
    }


def _ratio(numerator: float, denominator: float) -> float:
    return round(numerator / denominator, 4) if denominator else 0.0


@dataclass(slots=True)
class Measured:
    """One method in one cell: its times, one per repeat, summed over the calls of the repeat."""

    times: list[Times] = field(default_factory=list)
    num_differing_outputs: int = 0
    calls: list[SpeculationStats] = field(default_factory=list)

    def to_dict(self, *, is_greedy: bool) -> dict[str, Any]:
        """Return it as JSON types; times in seconds."""
        values: dict[str, Any] = {
            "seconds_to_first_token": [round(times.first, 6) for times in self.times],
            "seconds": [round(times.total, 6) for times in self.times],
        }
        if is_greedy:
            values["num_differing_outputs"] = self.num_differing_outputs
        if self.calls:
            values["speculation"] = deeds_of(self.calls)
        return values


def measure(runs: Mapping[str, Run], inputs: Sequence[Any], cell: Cell, grid: Grid) -> dict[str, Any]:
    """Time all methods on the cell: each goes once through every prompt per repeat, all methods on one before the next.

    So a slow minute of the machine hits all of them. Within a repeat and prompt all use the same seed.
    """
    started = time.perf_counter()
    for name in LEARNING:
        for index in range(grid.warm_up_calls if name in runs else 0):
            torch.manual_seed(index)
            runs[name](inputs[index % len(inputs)])
    measured = {name: Measured() for name in runs}
    for repeat in range(grid.repeats):
        for own in measured.values():
            own.times.append(Times(0.0, 0.0))
        for index, encoded in enumerate(inputs):
            _pass_through(runs, encoded, 1000 * repeat + index, measured)
    return {
        **cell._asdict(),
        "num_calls": len(inputs),
        "num_new_tokens": grid.num_new_tokens,
        "num_prompt_tokens": [int(rows["attention_mask"].sum()) for rows in inputs],
        "warm_up_calls": grid.warm_up_calls,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "measured_in_seconds": round(time.perf_counter() - started, 1),
        "methods": {name: own.to_dict(is_greedy=not cell.temperature) for name, own in measured.items()},
    }


def _pass_through(runs: Mapping[str, Run], encoded: Any, seed: int, measured: Mapping[str, Measured]) -> None:
    """Let every method generate once, and add what came of it."""
    plain_ids = torch.empty(0)
    for name, run in runs.items():
        torch.manual_seed(seed)
        output, first, total = run(encoded)
        own = measured[name]
        own.times[-1] = Times(own.times[-1].first + first, own.times[-1].total + total)
        ids = output if isinstance(output, torch.Tensor) else output.sequences
        if name == PLAIN:
            plain_ids = ids
        own.num_differing_outputs += not torch.equal(ids, plain_ids)
        if not isinstance(output, torch.Tensor):
            own.calls.append(output.speculation)
