"""`hf-specdec demo`: the bundled pair, plainly and with its draft, side by side and offline."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.cli.comparison import Comparison, TimedRun, run_timed
from hf_specdec.cli.env import describe_environment
from hf_specdec.cli.lengths import NumDraftTokens, as_length
from hf_specdec.cli.painting import RoundWriter, TokenWriter, legend

if TYPE_CHECKING:
    from hf_specdec.demo import DemoPair

_NUM_WARM_UP_TOKENS = 8


def demo(
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    num_draft_tokens: NumDraftTokens = "auto",
    prompts: Annotated[str, typer.Option(help="Workloads, separated by commas: code, docs, json, prose.")] = (
        "code,json,prose"
    ),
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts per workload.")] = 1,
    num_parameters: Annotated[int, typer.Option(min=0, help="Size of the target's ballast; 0 for none.")] = 300_000_000,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the trained weights; float32 is exact.")
    ] = "float32",
    sample: Annotated[bool, typer.Option("--sample/--greedy", help="Draw tokens, or take the most likely.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="With --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(help="With --sample.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="Do not colour tokens.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and no text.")] = False,
) -> None:
    """Decode a few prompts with the bundled pair, with and without the draft, and compare texts and times."""
    tasks = _tasks(prompts.split(","), num_prompts)
    talk = Console(stderr=True, highlight=False)
    with talk.status("Loading the bundled pair …"):
        pair = _load(num_parameters, dtype)
    talk.print(_describe_target(pair), soft_wrap=True)
    stage = Stage(
        pair=pair,
        console=None if json_output else Console(no_color=no_color, highlight=False, soft_wrap=True),
        num_draft_tokens=as_length(num_draft_tokens),
        max_new_tokens=max_new_tokens,
        sampling={"do_sample": True, "temperature": temperature} if sample else {"do_sample": False},
        seed=seed,
    )
    with talk.status("Warming up …"):
        stage.warm_up(tasks[0][1])
    stage.print_legend()
    results = [(workload, prompt, stage.perform(workload, prompt)) for workload, prompt in tasks]
    summary = _summarize([comparison for _, _, comparison in results], is_greedy=not sample)
    if json_output:
        print(json.dumps(_to_json(stage, results, summary), indent=2))
    else:
        stage.print(_summary_line(summary))
    # In float32 a difference would be a defect; in 16 bit a near tie may round to either side.
    if summary["num_equal"] not in (None, len(results)) and dtype == "float32":
        talk.print("The outputs must be equal in float32, but are not. Please report this.", style="red")
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where prompts are performed: the pair, the console (None says nothing), and the settings of all runs."""

    pair: DemoPair
    console: Console | None
    num_draft_tokens: int | str
    max_new_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def warm_up(self, prompt: str) -> None:
        """Run both ways once, untimed and silently: the first pass over fresh weights is slower than all others."""
        num_tokens = min(_NUM_WARM_UP_TOKENS, self.max_new_tokens)
        self._run_plain(prompt, None, num_tokens)
        self._run_drafted(prompt, None, num_tokens)

    def perform(self, workload: str, prompt: str) -> Comparison:
        """Decode one prompt both ways, show the text as it comes, and show the figures."""
        console = self.console
        if console is not None:
            console.rule(f"prompt: {workload}", align="left")
            console.out(prompt, style="dim", highlight=False)
            console.rule("plain", align="left", style="dim")
        plain = self._run_plain(prompt, console, self.max_new_tokens)
        if console is not None:
            console.rule("with the draft", align="left", style="dim")
        comparison = Comparison(plain, self._run_drafted(prompt, console, self.max_new_tokens))
        self.print(_table(comparison))
        self.print(_verdict(comparison, is_greedy=not self.sampling["do_sample"]))
        return comparison

    def print_legend(self) -> None:
        """Explain the colours, if there are any."""
        if self.console is not None and self.console.color_system and not self.console.no_color:
            self.console.print(legend())

    def print(self, message: Table | str) -> None:
        """Print to the console, if there is one."""
        if self.console is not None:
            self.console.print(message, markup=False)

    def _run_plain(self, prompt: str, console: Console | None, num_tokens: int) -> TimedRun:
        return self._run(prompt, TokenWriter(console, self.pair.tokenizer), num_tokens)

    def _run_drafted(self, prompt: str, console: Console | None, num_tokens: int) -> TimedRun:
        from hf_specdec.config import SpeculativeConfig

        writer = RoundWriter(console, self.pair.tokenizer)
        return self._run(
            prompt,
            writer,
            num_tokens,
            draft_model=self.pair.draft,
            num_draft_tokens=self.num_draft_tokens,
            speculative_config=SpeculativeConfig(on_round=writer.on_round),
        )

    def _run(self, prompt: str, writer: TokenWriter, num_tokens: int, **options: Any) -> TimedRun:
        import torch

        torch.manual_seed(self.seed)
        inputs = self.pair.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        return run_timed(self.pair.target, inputs, writer, max_new_tokens=num_tokens, **self.sampling, **options)


def _tasks(workloads: list[str], num_prompts: int) -> list[tuple[str, str]]:
    from hf_specdec.demo.prompts import DEMO_PROMPTS

    for workload in workloads:
        if workload not in DEMO_PROMPTS:
            raise typer.BadParameter(
                f"must be of {', '.join(DEMO_PROMPTS)}, but is {workload!r}.", param_hint="--prompts"
            )
    return [(workload, prompt) for workload in workloads for prompt in DEMO_PROMPTS[workload][:num_prompts]]


def _load(num_parameters: int, dtype: str) -> DemoPair:
    import torch
    from transformers.utils.logging import disable_progress_bar

    import hf_specdec
    from hf_specdec.demo import load_demo_pair

    disable_progress_bar()  # bars would draw over the spinner
    pair = load_demo_pair(num_parameters=num_parameters, dtype=getattr(torch, dtype))
    hf_specdec.enable(pair.target)
    return pair


def _describe_target(pair: DemoPair) -> str:
    from hf_specdec.demo import ballast_size

    target, draft = pair.target.num_parameters() / 1e6, pair.draft.num_parameters() / 1e6
    size = ballast_size(pair.target)
    if not size.num_parameters:
        return (
            f"Target: {target:.1f} M parameters, not widened. Draft: {draft:.1f} M. One pass of a target this small "
            "costs little more than one of its draft, so expect no gain."
        )
    return (
        f"Target: {target:.1f} M trained parameters, widened by {size.num_parameters / 1e6:.0f} M "
        f"({size.num_bytes / 1e6:.0f} MB) of ballast: random weights beside each MLP whose last projection is zero. "
        "Every pass reads and multiplies them, as a model of that size would, and every logit stays bit for bit what "
        f"it was. Without them the target would be too small to gain from its draft ({draft:.1f} M parameters)."
    )


def _table(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "tokens/s", "first token", "speed-up", "accepted", "tokens per round"):
        table.add_column(name, justify="left" if not name else "right")
    plain, drafted, stats = comparison.plain, comparison.drafted, comparison.drafted.speculation
    table.add_row("plain", f"{plain.tokens_per_second:.1f}", f"{plain.time_to_first_token_seconds:.2f} s")
    table.add_row(
        "with the draft",
        f"{drafted.tokens_per_second:.1f}",
        f"{drafted.time_to_first_token_seconds:.2f} s",
        f"{comparison.speedup:.2f}×",
        f"{stats.acceptance_rate:.0%}" if stats else "-",
        f"{stats.mean_acceptance_length:.2f}" if stats else "-",
    )
    return table


def _verdict(comparison: Comparison, *, is_greedy: bool) -> str:
    if not is_greedy:
        return "Sampled: both outputs are draws from the same law, not the same text."
    if comparison.first_difference is None:
        return f"The outputs are equal ({len(comparison.plain.token_ids)} tokens)."
    return f"The outputs differ from token {comparison.first_difference} on."


def _summarize(comparisons: list[Comparison], *, is_greedy: bool) -> dict[str, Any]:
    plain, drafted = [c.plain for c in comparisons], [c.drafted for c in comparisons]
    plain_rate, drafted_rate = _total_rate(plain), _total_rate(drafted)
    stats = [run.speculation for run in drafted if run.speculation]
    num_drafted = sum(s.num_draft_tokens for s in stats)
    num_accepted = sum(s.num_accepted_tokens for s in stats)
    num_rounds = sum(s.num_rounds for s in stats)
    return {
        "num_prompts": len(comparisons),
        "num_equal": sum(c.first_difference is None for c in comparisons) if is_greedy else None,
        "plain_tokens_per_second": plain_rate,
        "drafted_tokens_per_second": drafted_rate,
        "speedup": drafted_rate / plain_rate,
        "acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "mean_acceptance_length": 1 + num_accepted / num_rounds if num_rounds else 1.0,
    }


def _total_rate(runs: list[TimedRun]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def _summary_line(summary: dict[str, Any]) -> str:
    num_prompts = f"{summary['num_prompts']} prompt{'s' if summary['num_prompts'] > 1 else ''}"
    equality = "sampled" if summary["num_equal"] is None else f"{summary['num_equal']} equal"
    return (
        f"\nAll: {num_prompts}, {equality}; "
        f"{summary['plain_tokens_per_second']:.1f} tokens/s plain, "
        f"{summary['drafted_tokens_per_second']:.1f} with the draft: {summary['speedup']:.2f}× "
        f"({summary['acceptance_rate']:.0%} of draft tokens accepted, "
        f"{summary['mean_acceptance_length']:.2f} tokens per round)."
    )


def _to_json(stage: Stage, results: list[tuple[str, str, Comparison]], summary: dict[str, Any]) -> dict[str, Any]:
    from hf_specdec.demo import ballast_size

    decode = stage.pair.tokenizer.decode
    return {
        "environment": describe_environment(),
        "settings": {
            "num_draft_tokens": stage.num_draft_tokens,
            "max_new_tokens": stage.max_new_tokens,
            "seed": stage.seed,
            "dtype": str(stage.pair.target.dtype).removeprefix("torch."),
            "num_target_parameters": stage.pair.target.num_parameters(),
            "num_ballast_parameters": ballast_size(stage.pair.target).num_parameters,
            "num_draft_parameters": stage.pair.draft.num_parameters(),
            **stage.sampling,
        },
        "prompts": [
            {
                "workload": workload,
                "prompt": prompt,
                "text": decode(comparison.drafted.token_ids),
                **comparison.to_dict(),
            }
            for workload, prompt, comparison in results
        ],
        "summary": summary,
    }
