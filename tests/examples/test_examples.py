"""The scripts in `examples/`, run as a user runs them: what they print is what plain decoding gives."""

from __future__ import annotations

import copy
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_specdec
import models
from hf_specdec.demo import DEMO_PROMPTS, DemoPair, load_demo_pair

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT_SCRIPTS = ["quickstart", "batch_and_streaming", "custom_processor_grammar", "pipeline"]
MOST_LINES = 70
# The bundled draft agrees with its target here and there, as a noisy one does.
DRAFTS = ["identical", "unrelated", "bundled"]

RunExample = Callable[..., str]


@pytest.fixture(scope="module")
def pair() -> DemoPair:
    loaded = load_demo_pair(num_parameters=0)
    hf_specdec.enable(loaded.target)
    return loaded


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunExample:
    """Return a function that runs a script in this process and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def draft_of_kind(kind: str, pair: DemoPair) -> PreTrainedModel:
    if kind == "identical":
        return copy.deepcopy(pair.target)
    if kind == "unrelated":
        return models.build_target(vocab_size=pair.target.config.vocab_size)
    return pair.draft


def continuation(pair: DemoPair, prompt: str, **options: Any) -> str:
    """Return what the target alone writes after `prompt`."""
    inputs = pair.tokenizer(prompt, return_tensors="pt")
    output = pair.target.generate(**inputs, **{"do_sample": False, **options})
    return pair.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def is_record(text: str) -> bool:
    """Return whether `text` is JSON of the grammar example's schema, without asking the grammar engine."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return False
    if not isinstance(record, dict) or list(record) != ["name", "line", "arguments"]:
        return False
    names = [record["name"], *record["arguments"]]
    has_good_numbers = 1 <= record["line"] <= 999 and 2 <= len(record["arguments"]) <= 3
    return has_good_numbers and all(re.fullmatch("[a-z_]{3,16}", name) for name in names)


@pytest.mark.parametrize("name", SHORT_SCRIPTS)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MOST_LINES
    assert f"    python examples/{name}.py\n" in source


def test_quickstart(run_example: RunExample, pair: DemoPair) -> None:
    greedy, sampled = run_example("quickstart", "--num-parameters", "0").split("---- sampled")
    prompt = DEMO_PROMPTS["code"][1]
    assert f"---- greedy\n{continuation(pair, prompt, max_new_tokens=48)}\n" in greedy
    assert "the same tokens as without the draft: True" in greedy
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "draft_model": pair.draft, "num_draft_tokens": 4}
    assert sampled.startswith(f"\n{continuation(pair, prompt, max_new_tokens=48, **options)}\n")
    for part in (greedy, sampled):
        assert "48 new tokens in " in part
        assert re.search(r"\d+ of \d+ draft tokens accepted", part)
        assert "fallback" not in part


def test_batch_and_streaming(run_example: RunExample, pair: DemoPair) -> None:
    out = run_example("batch_and_streaming", "--num-parameters", "0")
    prompts = [DEMO_PROMPTS["docs"][1], DEMO_PROMPTS["json"][1], DEMO_PROMPTS["prose"][3]]
    texts = [continuation(pair, prompt, max_new_tokens=48) for prompt in prompts]
    assert len(set(texts)) == len(prompts)
    for row, text in enumerate(texts):
        assert f"---- row {row}\n{text}\n" in out
    assert f"---- TextStreamer\n{texts[0]}\n" in out
    assert f"---- TextIteratorStreamer\n{texts[0]}\n" in out
    assert "fallback" not in out


def test_pipeline(run_example: RunExample, pair: DemoPair) -> None:
    out = run_example("pipeline")
    prompts = [DEMO_PROMPTS["prose"][0], *DEMO_PROMPTS["json"][:2]]
    texts = [continuation(pair, prompt, max_new_tokens=48) for prompt in prompts]
    for title, text in zip(["one text", "row 0 of a batch", "row 1 of a batch"], texts, strict=True):
        assert f"---- {title}\n{text}\n" in out
    found = re.search(r"(\d+) of (\d+) tokens came from the draft, in (\d+) rounds", out)
    assert found
    num_from_draft, num_tokens, num_rounds = map(int, found.groups())
    # Each of the three texts got its first token before any round.
    assert num_tokens == 3 * 48 - 3
    assert 0 <= num_from_draft < num_tokens
    assert num_rounds >= 48 / 6 + 48 / 4 - 2


def test_grammar(run_example: RunExample) -> None:
    out = run_example("custom_processor_grammar")
    *parts, verdict = re.split(r"---- [^\n]+\n|\n\n", out.strip())
    texts = [part.partition("\nread as JSON")[0] for part in parts if part]
    assert len(texts) == 3
    assert all(map(is_record, texts)), texts
    assert texts[0] == texts[1]
    assert verdict == "the same greedy text with and without the draft: True"


def test_the_grammar_is_what_makes_the_text_valid(pair: DemoPair) -> None:
    assert not is_record(continuation(pair, DEMO_PROMPTS["json"][0].rpartition("{")[0], max_new_tokens=48))


@pytest.fixture(scope="module")
def write_batch(pair: DemoPair) -> Callable[..., torch.Tensor]:
    """Return a function that writes two rows of JSON with the grammar example's own classes."""
    example = runpy.run_path(str(EXAMPLES / "custom_processor_grammar.py"))
    engine, overrides = example["LLMatcher"], {"whitespace_pattern": example["BLANKS"]}
    tokenizer = example["hf"].from_tokenizer(pair.tokenizer, n_vocab=pair.target.config.vocab_size)
    matcher = engine(tokenizer, engine.grammar_from_json_schema(example["SCHEMA"], overrides=overrides))
    prompts = [DEMO_PROMPTS["json"][index].rpartition("{")[0] for index in (0, 1)]
    inputs = pair.tokenizer(prompts, padding=True, return_tensors="pt")

    def write(**options: Any) -> torch.Tensor:
        processors = [example["GrammarProcessor"](matcher)]
        output = pair.target.generate(
            **inputs, max_new_tokens=300, do_sample=False, logits_processor=processors, **options
        )
        return output[:, inputs["input_ids"].shape[1] :]

    return write


@pytest.fixture(scope="module")
def plain_batch(write_batch: Callable[..., torch.Tensor]) -> torch.Tensor:
    return write_batch()


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_grammar_processor_takes_a_batch(
    pair: DemoPair, write_batch: Callable[..., torch.Tensor], plain_batch: torch.Tensor, kind: str
) -> None:
    drafted = write_batch(draft_model=draft_of_kind(kind, pair), num_draft_tokens=3)
    assert torch.equal(drafted, plain_batch)
    texts = pair.tokenizer.batch_decode(drafted, skip_special_tokens=True)
    assert all(map(is_record, texts)), texts
    # One row ends before the other and is padded, which the processor must not read as text.
    assert (drafted == pair.tokenizer.pad_token_id).any()


def test_the_grammar_example_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SystemExit, match="pip install llguidance"):
        runpy.run_path(str(EXAMPLES / "custom_processor_grammar.py"))
