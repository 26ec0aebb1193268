"""The README's tables and sentences, from what the benchmarks wrote. Pure: JSON in, Markdown out."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hf_specdec.benchmark import token_spaces
from hf_specdec.benchmark.bench.numbers import with_summaries
from hf_specdec.benchmark.bench.report import comparison_text, origin_in_words, overview, verdict
from hf_specdec.benchmark.bench.ways import ASSISTANT, OURS_PREFIX, PROMPT_LOOKUP
from hf_specdec.benchmark.cells import SLOW
from hf_specdec.benchmark.verdicts import CALL, table
from hf_specdec.benchmark.verdicts import with_summaries as with_ratios

WIDTH = 120
_OURS, _PLAIN, _ASSISTED = "draft_model K=", "plain", "assistant_model K="

Results = Mapping[str, Any]


def bench(results: Results) -> str:
    """Return where a run of `hf-specdec bench` was measured, its overview, and what to take away."""
    renewed = with_summaries(dict(results))
    noise = f"Plain decoding against itself varies by {renewed['noise']:.1%}, which is part of every 95% interval."
    return _joined(
        wrapped(f"{_capital(renewed['pair']['target'])} with {renewed['pair']['draft']}. {origin_in_words(renewed)}"),
        overview(renewed),
        wrapped(" ".join([verdict(renewed), noise, _differing(renewed)])),
    )


def _differing(results: Results) -> str:
    """Return how often a greedy output was not plain decoding's, for each kind of way."""
    kinds = {OURS_PREFIX.strip(): OURS_PREFIX, ASSISTANT: ASSISTANT, PROMPT_LOOKUP: PROMPT_LOOKUP}
    counts = []
    for label, prefix in kinds.items():
        ways = [
            way
            for cell in results["cells"].values()
            for name, way in cell["ways"].items()
            if name.startswith(prefix) and "num_differing_outputs" in way
        ]
        if ways:
            total = sum(len(way["seconds"]) for way in ways)
            counts.append(f"{sum(way['num_differing_outputs'] for way in ways)} of {total} with `{label}`")
    if not counts:
        return ""
    tied = "" if results["provenance"]["options"]["dtype"] == "float32" else " (in 16 bit two tokens may be tied)"
    return f"Greedy outputs that are not plain decoding's{tied}: {', '.join(counts)}."


def bench_random(results: Results) -> str:
    """Return the same of a draft that guesses by chance, and what its calls said about it."""
    ways = [way for cell in results["cells"].values() for way in cell["ways"].values()]
    told = dict.fromkeys(text for way in ways for text in (way.get("speculation") or {}).get("draft_suspicions", []))
    return _joined(bench(results), *(wrapped(f"`draft_suspicions`: {text}") for text in told))


def bench_repeat(compared: Results) -> str:
    """Return in how many speed-ups two runs agree, from `hf-specdec bench --compare A B --json`."""
    text = comparison_text(compared["differing"], compared["num_compared"])
    others = [f"They differ in more than time: {'; '.join(compared['other_settings'])}."]
    return _joined(f"Two runs of it, one after the other: {text}", *(others if compared["other_settings"] else []))


def demo_pair(results: Results) -> str:
    """Return the bundled pair's speeds by workload."""
    origin, workloads = results["provenance"], results["workloads"]
    options = origin["options"]
    lengths = options["assisted_lengths"].split(",")
    num_differing = sum(way["num_differing_outputs"] for own in workloads.values() for way in own.values())
    introduction = (
        f"The bundled pair, its target widened by {_millions(options['num_parameters'])} parameters, "
        f"{options['dtype']}, {_sampling(float(options['temperature']))}, batch 1, {options['max_new_tokens']} new "
        f"tokens, {_counted(options['num_prompts'], 'prompt')} per workload: times plain decoding is slower, median of "
        f"{options['repeats']} interleaved repeats with their range. Measured on {_place(origin)}."
    )
    header = [
        "workload",
        "ours, after the first token",
        "ours, whole call",
        "`assistant_model=`, after the first token",
        "`assistant_model=`, whole call",
        "its best constant K",
        "tokens per round, ours",
        "time to first token, ours / plain",
    ]
    equal = "All outputs were equal to plain decoding's." if not num_differing else f"{num_differing} outputs differed."
    conclusion = (
        f"Ours drafts {options['lengths']} tokens a round; `assistant_model=` was given the one of "
        f"{' and '.join(lengths)} with the fastest whole call, with its confidence threshold off. {equal}"
    )
    rows = [_demo_row(name, own, options["lengths"]) for name, own in workloads.items()]
    return _joined(wrapped(introduction), table(header, rows), wrapped(conclusion))


def _demo_row(workload: str, ways: Results, length: str) -> list[str]:
    ours = ways[f"{_OURS}{length}"]
    assisted = {name.removeprefix(_ASSISTED): own for name, own in ways.items() if name.startswith(_ASSISTED)}
    best = max(assisted, key=lambda own: float(assisted[own]["speedup_of_the_call"]["median"]))
    speeds = [
        own[key] for own in (ours, assisted[best]) for key in ("speedup_after_first_token", "speedup_of_the_call")
    ]
    return [
        workload,
        *map(_spread, speeds),
        best,
        f"{ours['mean_acceptance_length']:.1f}",
        f"{ours['time_to_first_token_ratio']['median']:.2f}",
    ]


def overhead(lines: Sequence[Results]) -> str:
    """Return the milliseconds of a round beyond its forwards, and where they were measured."""
    cells = list(dict.fromkeys((line["do_sample"], line["num_draft_tokens"]) for line in lines))
    times = {(line["method"], line["do_sample"], line["num_draft_tokens"]): line["milliseconds"] for line in lines}
    labels = {"ours": "ours", "assistant_model": "`assistant_model=`"}
    header = [
        "ms per round",
        *(f"{'sampling' if is_sampled else 'greedy'}, K={length}" for is_sampled, length in cells),
    ]
    rows = [[label, *(f"{times[method, *cell]:.1f}" for cell in cells)] for method, label in labels.items()]
    first, second = labels
    rows.append(["the one / the other", *(f"{times[first, *cell] / times[second, *cell]:.2f}" for cell in cells)])
    origin = lines[0]
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    told = f"Measured on {origin['date']} on {origin['hardware']}, {versions}."
    return _joined(table(header, rows), wrapped(f"{told} Times are the thread's own, medians of interleaved repeats."))


_RATIOS = {
    "ours / plain decoding": "auto_to_plain",
    "ours, with a useless draft / plain decoding": "useless_to_plain",
    "ours, with a draft as slow as the target / plain decoding": "slow_to_plain",
    "ours / the fixed K ({fixed}) that is best in the other repeat": "auto_to_fixed_picked_elsewhere",
    "ours / the fixed K that turns out best in each cell": "auto_to_best_fixed",
    "ours / `assistant_model=`, its defaults": "auto_to_assistant",
    "ours / `assistant_model=`, the better of K = {assisted}": "auto_to_best_assistant",
    "plain decoding / itself": "plain_again_to_plain",
}


def adaptive(single: Results, batch: Results) -> str:
    """Return the geometric means of the adaptive length's ratios, over one row and over a batch."""
    runs = [with_ratios(dict(own)) for own in (single, batch)]
    means = [own["summary"][CALL]["geometric_means"] for own in runs]
    options = [own["provenance"]["options"] for own in runs]
    lengths = [json.loads(own["lengths"]) for own in options]
    words = {
        "fixed": "; ".join(f"{min(own)} to {max(own)}" for own in lengths),
        "assisted": " and ".join(map(str, json.loads(options[0]["assisted_lengths"]))),
    }
    # transformers' assistant takes no batches.
    rows = [
        [label.format(**words), *(f"{own[key]:.2f}" if key in own else "refused" for own in means)]
        for label, key in _RATIOS.items()
    ]
    cells = list(runs[0]["cells"].values())
    introduction = (
        f"{options[0]['max_new_tokens']}-token calls of the bundled pair (target widened by "
        f"{_millions(options[0]['num_parameters'])} parameters, {options[0]['dtype']}; prompts: "
        f"{', '.join(dict.fromkeys(cell['workload'] for cell in cells))}; {options[0]['warm_up_calls']} call to warm "
        f"up, medians of {options[0]['repeats']} interleaved repeats, geometric means over the cells). Measured on "
        f"{_place(runs[0]['provenance'])}."
    )
    header = ["times faster", *map(_situation, runs)]
    return _joined(wrapped(introduction), table(header, rows), wrapped(_noise(runs) + _resting(runs[0])))


def _situation(results: Results) -> str:
    cells = results["cells"].values()
    temperatures = ", ".join(f"{own:g}" for own in dict.fromkeys(cell["temperature"] for cell in cells))
    sizes = ", ".join(
        "one row" if own == 1 else f"{own} rows" for own in dict.fromkeys(cell["batch_size"] for cell in cells)
    )
    return f"{sizes}, T in {{{temperatures}}}"


def _noise(runs: Sequence[Results]) -> str:
    spreads = [cell["summary"][CALL]["plain_again_to_plain"] for own in runs for cell in own["cells"].values()]
    low, high = min(own["min"] for own in spreads), max(own["max"] for own in spreads)
    return f"The last line shows the noise of that machine, which in single cells reached {low:.2f} to {high:.2f}."


def _resting(results: Results) -> str:
    """Return how fast decoding beside the slow draft was where that draft did nothing at all."""
    ratios = []
    for cell in results["cells"].values():
        told = cell["methods"][SLOW]["speculation"]
        if told["plain_step_share"] == 1 and not told["num_probes"]:
            ratios.append(cell["summary"][CALL]["slow_to_plain"]["median"])
    if not ratios:
        return ""
    return (
        f" In {len(ratios)} of {len(results['cells'])} cells with one row the slow draft was neither used nor probed: "
        f"their {statistics.geometric_mean(ratios):.2f} is noise of that kind, too."
    )


def plan(predicted: Results, published: Results) -> str:
    """Return what `hf-specdec plan` predicts, beside what was published."""
    columns = ["predicted tokens/s", "published", "predicted first token", "published", "predicted memory", "published"]
    rows = []
    for name, own in predicted["predictions"].items():
        other = published["rows"].get(name)
        pairs = zip(_plan_texts(own), _plan_texts(other) if other else ["", "", ""], strict=True)
        rows.append([name, *(text for pair in pairs for text in pair)])
    ratios = [
        [f"{_speed(own[name]) / _speed(own[_PLAIN]):.1f}" for name in published["rows"] if name != _PLAIN]
        for own in (published["rows"], predicted["predictions"])
    ]
    weights, total = predicted["target"]["weight_bytes"], predicted["total_bytes"]
    least = published["rows"][_PLAIN]["utilisation"]
    sentence = (
        f"The published speed-ups, {' and '.join(ratios[0])}, are below the model's {' and '.join(ratios[1])}. The "
        f"target's weights of {weights / 1e9:.0f} GB alone are {weights / total:.0%} of {total / 1e9:.0f} GB, so "
        f"{least:.0%} is not a target in 16 bit."
    )
    return _joined(table(["", *columns], rows), wrapped(sentence))


def _speed(prediction: Results) -> float:
    return float(prediction["tokens_per_second"])


def _plan_texts(own: Results) -> list[str]:
    return [
        f"{_speed(own):.1f}",
        f"{1e3 * own['time_to_first_token']:.0f} ms",
        f"{own['utilisation']:.0%}",
    ]


def simulation(results: Results) -> str:
    """Return the speeds of every rule in every simulated cell."""
    names = list(results["cells"][0]["speeds"])
    lines = []
    for cell in results["cells"]:
        speeds = [f"{speed:.2f}" for speed in cell["speeds"].values()]
        speeds[0] += f" ({cell['best_fixed_length']})"
        lines.append([f"{cell['cost_ratio']:g}", cell["workload"], *speeds])
    return table(["cost ratio", "text", *names], lines)


def other_tokenizers(results: Results) -> str:
    """Return the tokens per forward of the target by how much of its vocabulary the draft has."""
    options = results["provenance"]["options"]
    introduction = (
        f"K = {options['num_draft_tokens']}, {options['max_new_tokens']} new tokens, "
        f"{_counted(options['num_prompts'], 'prompt')} of each of {', '.join(token_spaces.WORKLOADS)}; tokens per "
        "forward of the target:"
    )
    return _joined(wrapped(introduction), token_spaces.rendered(results))


# --- words ----------------------------------------------------------------------------------------------------------


def wrapped(text: str) -> str:
    """Return a paragraph in lines as long as the page's."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _joined(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spread(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}–{values['max']:.2f})"


def _millions(count: str) -> str:
    return f"{float(count) / 1e6:g} million"


def _counted(count: Any, name: str) -> str:
    return f"{count} {name}" if int(count) == 1 else f"{count} {name}s"


def _sampling(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _place(origin: Results) -> str:
    return (
        f"{origin['date']} on {_counted(origin['cores'], 'core')} ({origin['machine']}, {origin['cpu_capability']}), "
        f"{_counted(origin['threads'], 'thread')}, torch {origin['torch']}, transformers {origin['transformers']}"
    )
