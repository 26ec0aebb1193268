"""`hf-specdec bench`: a pair beside plain decoding and every alternative in transformers, in one process."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from tqdm import tqdm

from hf_specdec.cli.names import refuse_missing_folder
from hf_specdec.config import LONGEST_DRAFT, RunnerName
from hf_specdec.errors import in_short

if TYPE_CHECKING:
    from hf_specdec.benchmark.bench.subjects import Subject

_RULE = "`hf-specdec bench` measures two causal language models, given as Hub ids or local folders"
_Dtype = Literal["float32", "bfloat16", "float16"]
_LEAST_WIDTH = 150
REPORT = "report.md"
RANDOM_DRAFT = "random"


def bench(
    model: Annotated[str | None, typer.Option(help="The target: a Hub id or a local folder; default: bundled.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="The draft, likewise; random without --model: bundled, with weights drawn anew.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="Two shapes, as llama-3-8b:llama-3.2-1b: random weights, real costs, a set acceptance."),
    ] = None,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the synthetic draft's tokens.")] = 0.8,
    output: Annotated[Path, typer.Option(help="The folder for results.json, report.md and pictures.")] = Path("bench"),
    workloads: Annotated[str, typer.Option(help="Separated by commas; all takes all.")] = "code,json,chat,copying",
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A file of prompts instead of ours.")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Separated by commas; 0 is greedy.")] = "0",
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1",
    prompt_tokens: Annotated[str, typer.Option(help="Tokens per prompt, by commas; 0 leaves them as they are.")] = "0",
    lengths: Annotated[str, typer.Option(help="Our fixed draft lengths.")] = "4,6",
    assisted_lengths: Annotated[str, typer.Option(help="Constant draft lengths of assistant_model.")] = "3,5",
    quantizations: Annotated[str, typer.Option(help="Of our draft, of none, nf4, fp4, int8.")] = "none",
    runners: Annotated[str, typer.Option(help="Of our forwards: auto, eager, compiled, cuda_graph.")] = "auto",
    leave_out: Annotated[str, typer.Option(help="Ways not to run, see below.")] = "",
    num_prompts: Annotated[int, typer.Option(min=1, help="Per workload.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Per row, never fewer.")] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[_Dtype, typer.Option(help="Of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Of the processor; 0 leaves it to torch.")] = 0,
    num_parameters: Annotated[int, typer.Option(min=0, help="That the bundled target is widened by.")] = 100_000_000,
    plots: Annotated[
        bool | None, typer.Option("--plots/--no-plots", help="Draw pictures; default: where matplotlib is installed.")
    ] = None,
    suite: Annotated[
        Literal["gpu"] | None,
        typer.Option(help="Everything for one run of ten minutes on an accelerator, on synthetic pairs."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two folders or results.json: say what differs beyond noise, measure nothing."),
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Measure a pair: plain decoding, transformers' own speculation and ours, interleaved.

    Ways that `--leave-out` takes: plain-compiled, assistant, assistant-lengths, prompt-lookup, fixed, adaptive. A run
    that is stopped goes on where it was when it is started again with the same options.
    """
    if compare is not None:
        _compare(*compare, json_output=json_output)
        return
    options = _checked(locals())
    if suite is not None:
        _run_suite(options)
        return
    draw = _drawing(plots)
    sets = _workloads(options)
    subject = _load(options)
    results = _run(options, subject, sets)
    _finish(results, output, draw, json_output=json_output)


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with lists taken apart, before anything is loaded."""
    from hf_specdec.benchmark.bench.ways import GROUPS
    from hf_specdec.memory import QUANTIZATIONS

    _check_pair(given)
    parts = {
        "temperatures": _numbers(given["temperatures"], float, "--temperatures", least=0),
        "batch_sizes": _numbers(given["batch_sizes"], int, "--batch-sizes", least=1),
        "prompt_tokens": _numbers(given["prompt_tokens"], int, "--prompt-tokens", least=0),
        "lengths": _numbers(given["lengths"], int, "--lengths", least=1, most=LONGEST_DRAFT),
        "assisted_lengths": _numbers(given["assisted_lengths"], int, "--assisted-lengths", least=1),
        "quantizations": _names(given["quantizations"], QUANTIZATIONS, "--quantizations"),
        "runners": _names(given["runners"], get_args(RunnerName), "--runners") or ["auto"],
        "leave_out": _names(given["leave_out"], GROUPS, "--leave-out"),
    }
    return {**given, **parts}


def _check_pair(given: dict[str, Any]) -> None:
    """Refuse what names no pair, or two.

    Raises:
        typer.BadParameter: Options that do not go together.
        ValueError: There is no such folder.
    """
    model, draft, synthetic = given["model"], given["draft"], given["synthetic"]
    if draft == RANDOM_DRAFT and model is not None:
        raise typer.BadParameter(
            "draws the weights of the bundled draft anew, and goes without --model. Leave out --model, or write "
            f"./{RANDOM_DRAFT} for a folder of that name.",
            param_hint=f"--draft {RANDOM_DRAFT}",
        )
    if (model is None) != (draft in (None, RANDOM_DRAFT)):
        raise typer.BadParameter(
            f"needs the other of the two, but --model is {model!r} and --draft is {draft!r}: give both, none for the "
            f"bundled pair, or `--draft {RANDOM_DRAFT}` alone for its target with a draft of random weights.",
            param_hint="--model",
        )
    if given["prompts"] is not None and synthetic is not None:
        raise typer.BadParameter("cannot be combined with --synthetic, which reads no text.", param_hint="--prompts")
    if (model is not None or draft is not None) and synthetic is not None:
        raise typer.BadParameter(
            "cannot be combined with --model and --draft: a pair is loaded or made.", param_hint="--synthetic"
        )
    for name in (model, draft):
        if name is not None and name != RANDOM_DRAFT:
            refuse_missing_folder(_RULE, name)


def _numbers(text: str, kind: type, option: str, *, least: float, most: float = sys.maxsize) -> list[Any]:
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= most for number in numbers):
        raise typer.BadParameter(
            f"must be numbers of at least {least}"
            + (f" and at most {most}" if most < sys.maxsize else "")
            + f", separated by commas, but is {text!r}.",
            param_hint=option,
        )
    return list(dict.fromkeys(numbers))


def _names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    given = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [part for part in given if part not in known]:
        raise typer.BadParameter(f"must be of {', '.join(known)}, but holds {unknown[0]!r}.", param_hint=option)
    return given


def _load(options: dict[str, Any]) -> Subject:
    import torch

    from hf_specdec.benchmark.bench import subjects

    if options["threads"]:
        torch.set_num_threads(options["threads"])
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(
            f"must be a device of this machine, but is {device!r} ({in_short(error)}).", param_hint="--device"
        ) from error
    dtype = getattr(torch, options["dtype"])
    Console(stderr=True, highlight=False).print("Loading the pair …")
    if options["synthetic"] is not None:
        return subjects.synthetic_pair(options["synthetic"], options["acceptance"], dtype, device, options["seed"])
    if options["model"] is None:
        seed = options["seed"] if options["draft"] == RANDOM_DRAFT else None
        return subjects.bundled_pair(options["num_parameters"], dtype, device, random_seed=seed)
    return subjects.named_pair(
        options["model"], options["draft"], dtype, device, trust_remote_code=options["trust_remote_code"]
    )


def _run_suite(options: dict[str, Any]) -> None:
    import torch

    from hf_specdec.benchmark.bench.gpu_suite import RESULTS as SUITE_RESULTS
    from hf_specdec.benchmark.bench.gpu_suite import Suite, run_suite

    if options["device"] == "auto" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "needs an accelerator, and there is none. Pass `--device cpu` to try it anyway.", param_hint="--suite"
        )
    device = "cuda" if options["device"] == "auto" else options["device"]
    given = {"acceptance": options["acceptance"], "dtype": options["dtype"], "device": device}
    if options["synthetic"] is not None:
        given["shapes"] = options["synthetic"]
    talk = Console(stderr=True, highlight=False)
    results = run_suite(Suite(**given), options["output"], lambda name: talk.print(f"{name} …", markup=False))
    if options["json_output"]:
        print(json.dumps(results, indent=1))
    left = f" Not begun, for time ran out: {', '.join(results['not_begun'])}." if results["not_begun"] else ""
    talk.print(f"Written to {options['output'] / SUITE_RESULTS}.{left}", markup=False, soft_wrap=True)


def _run(options: dict[str, Any], subject: Subject, sets: dict[str, Any]) -> dict[str, Any]:
    from hf_specdec.benchmark.bench import session
    from hf_specdec.benchmark.bench.grid import Grid, cells_of
    from hf_specdec.benchmark.bench.subjects import SYNTHETIC
    from hf_specdec.benchmark.bench.ways import Choice

    pair = subject.pair
    output: Path = options["output"]
    output.mkdir(parents=True, exist_ok=True)
    if subject.prompts is not None:
        sets = {SYNTHETIC: subject.prompts}
    grid = Grid(
        max_new_tokens=options["max_new_tokens"],
        num_prompts=options["num_prompts"],
        repeats=options["repeats"],
        seed=options["seed"],
    )
    choice = Choice(
        lengths=options["lengths"],
        assisted_lengths=options["assisted_lengths"],
        quantizations=options["quantizations"] or ["none"],
        runners=options["runners"],
        left_out=frozenset(options["leave_out"]),
    )
    cells = cells_of(list(sets), options["temperatures"], options["batch_sizes"], options["prompt_tokens"])
    origin = session.provenance(_recorded(options), pair.target.device)
    results = session.started_or_resumed(output / session.RESULTS, origin, subject.names)
    talk = Console(stderr=True, highlight=False)
    if not origin["idle_check"]["is_idle"]:
        talk.print("The machine is not idle: figures will be noisy.", style="yellow")
    progress = _Progress(talk, is_shown=not options["json_output"])
    watch = session.Watch(
        on_start=progress.start, on_cell=progress.cell, on_call=progress.call, on_result=progress.result
    )
    try:
        return session.run(pair, choice, cells, sets, grid, results, output / session.RESULTS, watch)
    finally:
        progress.close()


class _Progress:
    """A bar for each cell on stderr, and its table on stdout when it is done."""

    def __init__(self, talk: Console, *, is_shown: bool) -> None:
        self._talk = talk
        self._is_shown = is_shown
        self._bar: tqdm[Any] | None = None

    def start(self, num_there: int, num_missing: int) -> None:
        if num_there:
            self._talk.print(f"{num_there} cells are there already, {num_missing} are to be measured.", markup=False)

    def cell(self, key: str, num_calls: int) -> None:
        self.close()
        self._bar = tqdm(total=num_calls, desc=key, unit="call", file=sys.stderr, leave=False, disable=None)

    def call(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def result(self, so_far: dict[str, Any]) -> None:
        from hf_specdec.benchmark.bench.report import cell_table

        self.close()
        if self._is_shown:
            key = next(reversed(so_far["cells"]))
            _wide_console().print(cell_table(key, so_far["cells"][key]))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


# They choose cells or what is shown; everything else changes what a figure means.
_FREE_OPTIONS = {
    "workloads",
    "prompts",
    "temperatures",
    "batch_sizes",
    "prompt_tokens",
    "output",
    "plots",
    "compare",
    "json_output",
    "suite",
    "device",
    "threads",
}


def _recorded(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _FREE_OPTIONS}


def _workloads(options: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt sets by name, in order."""
    from hf_specdec.benchmark.workloads import WORKLOADS, workload, workloads_of_file

    if options["prompts"] is not None:
        return {own.name: own for own in workloads_of_file(options["prompts"])}
    names = (
        list(WORKLOADS)
        if options["workloads"] == "all"
        else _names(options["workloads"], tuple(WORKLOADS), "--workloads")
    )
    if not names:
        raise typer.BadParameter("must name at least one.", param_hint="--workloads")
    return {name: workload(name) for name in names}


def _drawing(plots: bool | None) -> Any:
    """Return what draws, None where nothing is to be drawn; a missing library is told before the work."""
    from hf_specdec.benchmark.bench.plots import draw_all, figure_class

    if plots is None:
        plots = find_spec("matplotlib") is not None
    if plots:
        figure_class()
    return draw_all if plots else None


def _finish(results: dict[str, Any], output: Path, draw: Any, *, json_output: bool) -> None:
    from hf_specdec.benchmark.bench.report import markdown
    from hf_specdec.benchmark.bench.session import RESULTS
    from hf_specdec.benchmark.bench.ways import PLAIN

    pictures = draw(results, output) if draw is not None else []
    (output / REPORT).write_text(markdown(results, pictures), encoding="utf-8")
    if json_output:
        print(json.dumps(results, indent=1))
        return
    console = Console(stderr=True, highlight=False)
    for name, value in results["means"].items():
        if name == PLAIN:
            continue
        console.print(f"{name}: {value:.2f} times as fast as plain decoding (geometric mean)", markup=False)
    console.print(f"Plain decoding against itself varies by {results['noise']:.1%}.", markup=False)
    console.print(f"Written to {output}: {', '.join([RESULTS, REPORT, *pictures])}.", markup=False, soft_wrap=True)


def _compare(first: Path, second: Path, *, json_output: bool) -> None:
    from hf_specdec.benchmark.bench.numbers import disagreements, with_summaries
    from hf_specdec.benchmark.bench.report import comparison_text
    from hf_specdec.benchmark.bench.session import differences, read_results

    for path in (first, second):
        if not path.exists():
            raise typer.BadParameter(
                f"must be two folders that `hf-specdec bench` wrote, or their results.json, but there is no "
                f"{str(path)!r}.",
                param_hint="--compare",
            )
    pair = [with_summaries(read_results(path)) for path in (first, second)]
    differing, count = disagreements(*pair)
    settings = differences(*(own["provenance"] for own in pair)) + ["the pair"] * (pair[0]["pair"] != pair[1]["pair"])
    if json_output:
        print(json.dumps({"num_compared": count, "differing": differing, "other_settings": settings}, indent=1))
        return
    if settings:
        print(f"The two runs differ in more than time: {'; '.join(settings)}.\n")
    print(comparison_text(differing, count), end="")


def _wide_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    return console
