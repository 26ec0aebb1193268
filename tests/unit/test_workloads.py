"""The bundled prompts are what they claim to be; rows have the lengths that were asked for and keep their ends."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from tokenizers import normalizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import models
from hf_specdec.benchmark.prompt_files import Prompt, read_prompts
from hf_specdec.benchmark.workloads import (
    RANDOM,
    TEXT_WORKLOADS,
    WORKLOADS,
    Workload,
    workload,
    workloads_of_file,
)
from hf_specdec.demo import DEMO_FOLDER
from hf_specdec.errors import InvalidConfigError, InvalidPromptsError

TO_BE_CONTINUED = ("code", "json")
NOT_ENGLISH = {"chat": 2, "writing": 1}
TEMPLATE = "[s]be brief[u]{% for m in messages %}{{ m.content }}{% endfor %}[a]"


def words_of(prompt: Prompt) -> str:
    return prompt.text or "\n".join(message["content"] for message in prompt.messages)


def all_texts() -> list[str]:
    return [words_of(prompt) for name in TEXT_WORKLOADS for prompt in workload(name).prompts]


def build_tokenizer_with_bos() -> PreTrainedTokenizerFast:
    tokenizer = models.build_byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{models.END_OF_TEXT} $A", special_tokens=[(models.END_OF_TEXT, 1)]
    )
    return tokenizer


def build_tokenizer_with_template() -> PreTrainedTokenizerFast:
    tokenizer = models.build_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# --- the bundled prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_bundled_set_is_large_enough_and_clean(name: str) -> None:
    own = workload(name)
    assert own.name == name
    texts = [words_of(prompt) for prompt in own.prompts]
    assert len(texts) >= 14
    assert all(bool(prompt.text) == (name in TO_BE_CONTINUED) for prompt in own.prompts)
    for prompt in own.prompts:
        assert [message["role"] for message in prompt.messages] == ([] if prompt.text else ["user"])
    shortest, longest = (80, 250) if name == "copying" else (3, 300)
    for text in texts:
        assert text == text.strip("\n")
        assert text == text.rstrip()
        assert shortest <= len(re.findall(r"\S+", text)) <= longest, text
        assert all(character.isprintable() or character == "\n" for character in text), text
    others = [text for text in texts if not text.isascii()]
    assert len(others) == NOT_ENGLISH.get(name, 0)


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_bundled_file_holds_nothing_but_prompts(name: str) -> None:
    file = resources.files("hf_specdec.benchmark") / "prompts" / f"{name}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    keys = {"prompt"} if name in TO_BE_CONTINUED else {"messages"}
    assert [set(json.loads(line)) for line in lines] == [keys] * len(workload(name).prompts)


def test_bundled_prompts_are_unique_and_begin_differently() -> None:
    texts = all_texts()
    assert len(texts) == len(set(texts)) >= 6 * 14
    beginnings = [" ".join(text.split()[:14]).lower() for text in texts]
    assert len(set(beginnings)) >= len(texts) - 1


def test_bundled_sets_vary_in_length() -> None:
    for name in TEXT_WORKLOADS:
        lengths = sorted(len(words_of(prompt)) for prompt in workload(name).prompts)
        assert lengths[-1] > (2 if name == "copying" else 5) * lengths[0], name


def test_schemas_stand_in_the_json_prompts() -> None:
    for prompt in workload("json").prompts:
        assert "schema" in prompt.text.lower()
        assert '"type":' in prompt.text


def test_code_is_of_several_languages() -> None:
    texts = [prompt.text for prompt in workload("code").prompts]
    for sign in ("def ", "function ", "#include", "SELECT", "#!/usr/bin/env bash"):
        assert any(sign in text for text in texts), sign
    assert sum("def " in text for text in texts) > len(texts) / 2


def test_bundled_tokenizer_reads_all_prompts_within_its_context() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target", local_files_only=True)
    for name in TEXT_WORKLOADS:
        for prompt in workload(name).prompts:
            ids = prompt.token_ids(tokenizer)
            assert words_of(prompt) in tokenizer.decode(ids)
            assert len(ids) < tokenizer.model_max_length - 512


@pytest.mark.real
@pytest.mark.parametrize("file", ["humaneval.jsonl", "gsm8k_test_first200.jsonl", "mt_bench.jsonl"])
def test_nothing_of_a_known_benchmark_is_contained(real_data: Path, file: str) -> None:
    path = real_data / "prompts" / file
    if not path.is_file():
        pytest.skip(f"needs {file}, and {path.parent} does not hold it")
    known = {run for prompt in read_prompts(path) for run in runs_of_words(words_of(prompt))}
    assert known
    shared = {run for text in all_texts() for run in runs_of_words(text)} & known
    assert not shared


def runs_of_words(text: str, length: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


# --- by name, and from files ----------------------------------------------------------------------------------------


def test_names_are_in_order_and_end_with_random() -> None:
    assert WORKLOADS == ("code", "json", "maths", "chat", "writing", "copying", "random")
    assert workload(RANDOM) == Workload(name="random", prompts=())


@pytest.mark.parametrize("name", ["", "Code", "../prompts/code", "docs"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"must be one of code, .*random, but is .*Choose one"):
        workload(name)


def test_file_gives_a_workload_for_each_category(tmp_path: Path) -> None:
    path = tmp_path / "random.jsonl"
    lines = [{"turns": ["abc"], "category": "qa"}, {"prompt": "def"}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    first, second = workloads_of_file(path)
    assert (first.name, second.name) == ("qa", "random")
    # It is the name of a file, not random tokens.
    tokenizer = models.build_byte_tokenizer()
    assert tokenizer.decode(second.encoded(tokenizer, 1)[0]) == "def"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidPromptsError):
        workloads_of_file(path)


# --- rows -----------------------------------------------------------------------------------------------------------

Build = Callable[[], PreTrainedTokenizerBase]
TOKENIZERS: dict[str, Build] = {
    "plain": models.build_byte_tokenizer,
    "bos": build_tokenizer_with_bos,
    "template": build_tokenizer_with_template,
}


@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_rows_are_the_first_prompts_as_they_are(build: Build, name: str) -> None:
    tokenizer = build()
    own = workload(name)
    assert own.encoded(tokenizer, 3) == [prompt.token_ids(tokenizer) for prompt in own.prompts[:3]]
    everything = own.encoded(tokenizer, len(own.prompts), max_prompt_tokens=100_000)
    assert everything == [prompt.token_ids(tokenizer) for prompt in own.prompts]


@pytest.mark.parametrize("num_prompt_tokens", [1, 6, 100, 5000])
@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("name", ["code", "chat", RANDOM])
def test_rows_have_exactly_the_length_asked_for(build: Build, name: str, num_prompt_tokens: int) -> None:
    rows = workload(name).encoded(build(), 14, num_prompt_tokens=num_prompt_tokens)
    assert [len(row) for row in rows] == [num_prompt_tokens] * 14


@pytest.mark.parametrize(
    ("build", "name", "opening", "closing"),
    [
        ("plain", "code", "", ""),
        ("bos", "code", models.END_OF_TEXT, ""),
        ("plain", "chat", "User: ", "\nAssistant:"),
        ("bos", "chat", models.END_OF_TEXT + "User: ", "\nAssistant:"),
        ("template", "chat", "[s]be brief[u]", "[a]"),
    ],
)
def test_longer_rows_keep_opening_and_end_and_fill_the_middle(
    build: str, name: str, opening: str, closing: str
) -> None:
    tokenizer = TOKENIZERS[build]()
    own = workload(name)
    texts = [words_of(prompt) for prompt in own.prompts]
    rows = own.encoded(tokenizer, 4, num_prompt_tokens=3000)
    for index, row in enumerate(rows):
        text = tokenizer.decode(row)
        assert text.startswith(opening)
        middle = text.removeprefix(opening).removesuffix(texts[index] + closing)
        assert len(middle) < len(text) - len(opening) - len(closing), "the prompt stands at the end"
        order = [*texts[:index], *texts[index + 1 :], *texts[:index]] if index else texts[1:]
        filling = "".join(other + "\n\n" for other in order)
        assert filling.endswith(middle[10:])
        assert texts[index] not in middle


def test_short_sets_are_repeated_to_fill_a_row() -> None:
    tokenizer = models.build_byte_tokenizer()
    own = Workload(name="mine", prompts=(Prompt(text="ab"), Prompt(text="cd")))
    rows = own.encoded(tokenizer, 2, num_prompt_tokens=11)
    assert [tokenizer.decode(row) for row in rows] == ["\ncd\n\ncd\n\nab", "\nab\n\nab\n\ncd"]
    alone = replace(own, prompts=own.prompts[:1])
    assert tokenizer.decode(alone.encoded(tokenizer, 1, num_prompt_tokens=8)[0]) == "\n\nab\n\nab"


def test_systems_own_words_stay_in_front() -> None:
    tokenizer = models.build_byte_tokenizer()
    messages = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hello you"})
    own = Workload(name="mine", prompts=(Prompt(messages=messages), Prompt(text="filling")))
    longer, shorter = (own.encoded(tokenizer, 1, num_prompt_tokens=length)[0] for length in (60, 33))
    assert tokenizer.decode(longer).startswith("System: be kind\nUser: ")
    assert tokenizer.decode(longer).endswith("filling\n\nhello you\nAssistant:")
    assert tokenizer.decode(shorter) == "System: be kind\nUser: \nAssistant:"


@pytest.mark.parametrize("name", ["copying", RANDOM])
def test_rows_beyond_the_room_are_cut_on_the_left(name: str) -> None:
    tokenizer = build_tokenizer_with_bos()
    whole = workload(name).encoded(tokenizer, 14)
    cut = workload(name).encoded(tokenizer, 14, max_prompt_tokens=400)
    assert max(map(len, whole)) > 400
    for before, after in zip(whole, cut, strict=True):
        assert len(after) == min(len(before), 400)
        if name == "copying":
            assert tokenizer.decode(after).startswith(models.END_OF_TEXT + "User: ")
        kept = slice(-300, None) if name == "copying" else slice(400)
        assert after[kept] == before[kept]


def test_prompts_without_tokens_cannot_fill(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\n", "")
    own = Workload(name="mine", prompts=(Prompt(text="abc"), Prompt(text="ÄÖÜ")))
    with pytest.raises(ValueError, match="have no tokens"):
        own.encoded(tokenizer, 1, num_prompt_tokens=9)
    with pytest.raises(ValueError, match="at least one token"):
        own.encoded(tokenizer, 2)


# --- random tokens --------------------------------------------------------------------------------------------------


def test_random_rows_depend_on_the_seed_alone() -> None:
    tokenizer = models.build_byte_tokenizer()
    state = random.getstate()
    rows = workload(RANDOM).encoded(tokenizer, 6, seed=3)
    assert random.getstate() == state
    assert workload(RANDOM).encoded(tokenizer, 4, seed=3) == rows[:4]
    assert workload(RANDOM).encoded(tokenizer, 6, seed=4) != rows


def test_random_rows_are_of_ordinary_tokens_only() -> None:
    tokenizer = models.build_byte_tokenizer()
    tokenizer.add_tokens(["<call>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    (row,) = workload(RANDOM).encoded(tokenizer, 1, num_prompt_tokens=20_000)
    assert set(row) == set(range(2, 258))


def test_random_rows_are_as_long_as_the_others() -> None:
    tokenizer = models.build_byte_tokenizer()
    bundled = {len(prompt.token_ids(tokenizer)) for name in TEXT_WORKLOADS for prompt in workload(name).prompts}
    lengths = [len(row) for row in workload(RANDOM).encoded(tokenizer, 200)]
    assert set(lengths) <= bundled
    assert len(set(lengths)) > len(bundled) / 2


def test_tokenizer_without_ordinary_tokens_is_refused() -> None:
    tokenizer = models.build_byte_tokenizer()
    tokenizer.add_tokens([token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens])
    with pytest.raises(ValueError, match="ordinary tokens"):
        workload(RANDOM).encoded(tokenizer, 1)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompts", "settings", "message"),
    [
        (0, {}, "`num_prompts` must be at least 1, but is 0"),
        (1000, {}, "at most the number of prompts, .*'code' is 16, but is 1000. Ask for fewer"),
        (1, {"num_prompt_tokens": 0}, "`num_prompt_tokens` must be at least 1, but is 0"),
        (1, {"max_prompt_tokens": -1}, "`max_prompt_tokens` must be at least 1, but is -1"),
        (1, {"num_prompt_tokens": 300, "max_prompt_tokens": 299}, "leaves for a prompt, 299 tokens, but is 300"),
        (1, {"num_prompt_tokens": 2001}, "leaves for a prompt, 2000 tokens, but is 2001. Ask for shorter"),
    ],
)
def test_numbers_that_cannot_be_had_are_refused(num_prompts: int, settings: dict[str, int], message: str) -> None:
    tokenizer = models.build_byte_tokenizer()
    tokenizer.model_max_length = 2000
    with pytest.raises(InvalidConfigError, match=message):
        workload("code").encoded(tokenizer, num_prompts, **settings)


def test_more_random_rows_than_bundled_prompts_can_be_had() -> None:
    assert len(workload(RANDOM).encoded(models.build_byte_tokenizer(), 50, num_prompt_tokens=3)) == 50


def test_room_that_the_caller_knows_goes_before_the_tokenizers() -> None:
    tokenizer = models.build_byte_tokenizer()
    tokenizer.model_max_length = 100
    (row,) = workload("code").encoded(tokenizer, 1, num_prompt_tokens=700, max_prompt_tokens=700)
    assert len(row) == 700
