"""How many tokens a forward of the target gives when the draft has another tokenizer, in both ways to translate.

Run it anywhere, for nothing is timed: `python -m hf_specdec.benchmark.token_spaces --output results.json`. The bundled
draft gets other tokenizers: its vocabulary is shuffled and cut to its first N ids, so that it shares fewer and fewer
tokens with the target. `--render FILE` prints the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec.benchmark.demo_pair import provenance
from hf_specdec.benchmark.verdicts import table
from hf_specdec.demo import DEMO_PROMPTS, DemoPair, load_demo_pair
from hf_specdec.metrics import SpeculationStats, added_up

WAYS = ("shared", "text")
SAME = "same"
WORKLOADS = ("code", "json", "prose")


def with_other_tokenizer(
    tokenizer: Any, draft: PreTrainedModel, num_tokens: int, seed: int = 0
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Return a tokenizer of the first `num_tokens` ids under shuffled ids, and a draft that goes by it.

    The draft keeps its weights; only the rows of its embeddings and of its head move.

    Args:
        tokenizer: A byte-level BPE tokenizer whose ids are in the order of its merges, special tokens first.
        draft: A draft that goes by it.
        num_tokens: How many of its ids remain.
        seed: Of the shuffling.
    """
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = {token: order[own] for token, own in state["model"]["vocab"].items() if own < num_tokens}
    state["model"]["vocab"] = vocab
    state["model"]["merges"] = [merge for merge in state["model"]["merges"] if {*merge, "".join(merge)} <= vocab.keys()]
    state["added_tokens"] = [
        {**token, "id": order[token["id"]]} for token in state["added_tokens"] if token["id"] < num_tokens
    ]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    twin: Any = copy.deepcopy(draft)
    places = torch.tensor(order)
    twin.resize_token_embeddings(num_tokens)
    matrices = (twin.get_input_embeddings().weight, twin.get_output_embeddings().weight)
    with torch.no_grad():
        for matrix in {id(own): own for own in matrices}.values():
            matrix[places] = matrix[:num_tokens].clone()
    return other, twin


def measure(pair: DemoPair, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each size of the draft's vocabulary, and one for the target's own tokenizer."""
    rows = [
        {"num_tokens": SAME, "shared_prompt_tokens": 1.0, **_row(pair, pair.tokenizer, pair.draft, (SAME,), options)}
    ]
    for num_tokens in options.sizes:
        sys.stderr.write(f"{num_tokens} tokens …\n")
        tokenizer, draft = with_other_tokenizer(pair.tokenizer, pair.draft, num_tokens)
        known = set(tokenizer.get_vocab())
        tokens = [token for text in _prompts(options) for token in pair.tokenizer.tokenize(text)]
        share = sum(token in known for token in tokens) / len(tokens)
        row = _row(pair, tokenizer, draft, WAYS, options)
        rows.append({"num_tokens": num_tokens, "shared_prompt_tokens": round(share, 4), **row})
    return rows


def _row(
    pair: DemoPair, tokenizer: Any, draft: PreTrainedModel, ways: tuple[str, ...], options: argparse.Namespace
) -> dict[str, Any]:
    """Return tokens per round and row, by temperature and way, and how often greedy text was not plain decoding's."""
    row: dict[str, Any] = {"num_differing_outputs": 0}
    for temperature in options.temperatures:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        for way in ways:
            calls: list[SpeculationStats] = []
            for index, text in enumerate(_prompts(options)):
                inputs = pair.tokenizer(text, return_tensors="pt")
                settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, **sampling}
                space = {} if way == SAME else {"draft_tokenizer": tokenizer, "token_space": way}
                torch.manual_seed(index)
                output = _generate(
                    pair.target,
                    inputs,
                    **settings,
                    tokenizer=pair.tokenizer,
                    draft_model=draft,
                    num_draft_tokens=options.num_draft_tokens,
                    speculative_config={**space, "strict": True},
                    return_dict_in_generate=True,
                )
                calls.append(output.speculation)
                if not temperature:
                    plain = _generate(pair.target, inputs, **settings)
                    row["num_differing_outputs"] += not torch.equal(plain, output.sequences)
            row[f"T={temperature:g}, {way}"] = round(added_up(calls).mean_acceptance_length, 3)
    return row


def _generate(target: Any, inputs: Mapping[str, torch.Tensor], **keywords: Any) -> Any:
    return target.generate(**inputs, **keywords)


def _prompts(options: argparse.Namespace) -> list[str]:
    return [prompt for workload in WORKLOADS for prompt in DEMO_PROMPTS[workload][: options.num_prompts]]


def rendered(results: Mapping[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    temperatures = [float(text) for text in results["temperatures"]]
    names = ["greedy" if not own else f"temperature {own:g}" for own in temperatures]
    header = ["N", "prompt tokens in common", *(f"{name}: shared / text" for name in names)]
    lines = []
    for row in results["rows"]:
        is_same = row["num_tokens"] == SAME
        cells = [
            f"{row[f'T={own:g}, {SAME}']:.2f}"
            if is_same
            else " / ".join(f"{row[f'T={own:g}, {way}']:.2f}" for way in WAYS)
            for own in temperatures
        ]
        label = "the target's own tokenizer" if is_same else str(row["num_tokens"])
        lines.append([label, f"{row['shared_prompt_tokens']:.2f}", *cells])
    return table(header, lines) + "\n"


def main() -> None:
    """Measure, or render what was measured; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where results go")
    parser.add_argument("--render", type=Path, metavar="FILE", help="print a file's table and measure nothing")
    parser.add_argument("--sizes", type=_ints, default=[4096, 2048, 1024, 512, 300], help="of the draft's vocabulary")
    parser.add_argument("--temperatures", type=_floats, default=[0.0, 1.0], help="0 decodes greedily")
    parser.add_argument("--num-prompts", type=int, default=2, help="per workload")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    options = parser.parse_args()
    if options.render is not None:
        sys.stdout.write(rendered(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    pair = load_demo_pair(num_parameters=0)
    hf_specdec.enable(pair.target)
    results = {
        "provenance": provenance(options),
        "temperatures": options.temperatures,
        "rows": measure(pair, options),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(rendered(results))


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
