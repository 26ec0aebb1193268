"""Files of prompts: what is recognised, under which name, and how the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import models
from hf_specdec.benchmark.prompt_files import Prompt, as_plain_text, read_prompts, read_prompts_by_workload
from hf_specdec.errors import InvalidPromptsError

MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def asked(text: str) -> Prompt:
    return Prompt(messages=({"role": "user", "content": text},))


def written(folder: Path, *lines: Any, name: str = "mine.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(own if isinstance(own, str) else json.dumps(own) for own in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ({"prompt": "def f(x):"}, Prompt(text="def f(x):")),
        ({"task_id": "Own/0", "prompt": "def g():\n", "test": "assert g()"}, Prompt(text="def g():\n")),
        ({"question": "How many?", "answer": "#### 3"}, asked("How many?")),
        ({"question_id": 7, "turns": ["First.", "Second."]}, asked("First.")),
        ({"messages": [{"role": "user", "content": "Hi", "name": "x"}]}, asked("Hi")),
        (
            {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]},
            Prompt(messages=({"role": "system", "content": ""}, {"role": "user", "content": "Hi"})),
        ),
    ],
    ids=["prompt", "HumanEval", "GSM8K", "MT-bench", "messages", "system"],
)
def test_line_of_json_is_recognised(tmp_path: Path, line: dict[str, Any], prompt: Prompt) -> None:
    path = written(tmp_path, line)
    assert read_prompts(path) == [prompt]
    assert read_prompts_by_workload(path) == {"mine": [prompt]}


def test_category_names_the_workload_and_the_file_what_has_none(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"question_id": 1, "category": "translation", "turns": ["a"]},
        {"question_id": 2, "category": "rag", "turns": ["b"]},
        {"question_id": 3, "category": "translation", "turns": ["c"]},
        {"prompt": "d"},
    )
    workloads = read_prompts_by_workload(path)
    assert list(workloads) == ["translation", "rag", "mine"]
    assert workloads["translation"] == [asked("a"), asked("c")]
    assert read_prompts(path) == [asked("a"), asked("b"), asked("c"), Prompt(text="d")]


def test_text_file_holds_a_prompt_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "is text here"}', "", "  ", "  indented", name="own.prompts.txt")
    prompts = [Prompt(text='{"prompt": "is text here"}'), Prompt(text="  indented")]
    assert read_prompts_by_workload(path) == {"own.prompts": prompts}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_end_where_json_lines_end(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "mine.jsonl"
    lines = ['{"prompt": "a\u2028b\x85c"}', "", '{"prompt": "d"}', ""]
    path.write_bytes(b"\xef\xbb\xbf" + end.join(line.encode() for line in lines))
    assert read_prompts(path) == [Prompt(text="a\u2028b\x85c"), Prompt(text="d")]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ([1], "has none of them"),
        ("null", "has none of them"),
        ({"text": "a"}, "has none of them"),
        ({"prompt": "a", "question": "b"}, "has prompt and question"),
        ({"prompt": ""}, "`prompt`"),
        ({"prompt": " \n"}, "`prompt`"),
        ({"prompt": ["a"]}, "`prompt`"),
        ('{"prompt": "\\ud800"}', "`prompt`"),
        ({"question": 3}, "`question`"),
        ({"turns": []}, "`turns`"),
        ({"turns": "a"}, "`turns`"),
        ({"turns": [{"content": "a"}]}, "`turns`"),
        ({"messages": []}, "`messages`"),
        ({"messages": "a"}, "`messages`"),
        ({"messages": [{"role": "user"}]}, "`messages`"),
        ({"messages": [{"role": "", "content": "a"}]}, "`messages`"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "`messages`"),
        ({"prompt": "a", "category": 3}, "`category`"),
        ({"prompt": "a", "category": None}, "`category`"),
        ({"prompt": "a", "category": " "}, "`category`"),
        ({"prompt": "a", "category": "two\nlines"}, "`category`"),
        ({"prompt": "a", "category": "c" * 65}, "`category`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_line_is_refused_with_its_number(tmp_path: Path, line: Any, found: str) -> None:
    path = written(tmp_path, {"prompt": "fine"}, "", line)
    with pytest.raises(InvalidPromptsError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert found in message
    assert f"line 3 of {str(path)!r}" in message
    assert "must be" in message
    assert message.endswith(("Correct it.", "Correct it, or leave it out.", "Give one of them on each line."))
    assert len(message) < 600 + len(str(path))


def test_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidPromptsError, match="holds none"):
        read_prompts(written(tmp_path, "", " "))


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPromptsError, match="UTF-8"):
        read_prompts(tmp_path / "mine.jsonl")


def test_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "mine.jsonl")


# --- encoding -------------------------------------------------------------------------------------------------------

CONVERSATION = Prompt(
    messages=(
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "who?"},
    )
)


def test_messages_become_plain_text_without_a_template() -> None:
    tokenizer = models.build_byte_tokenizer()
    text = tokenizer.decode(CONVERSATION.token_ids(tokenizer))
    assert text == "System: be brief\nUser: hello\nAssistant: hi\nUser: who?\nAssistant:"
    assert as_plain_text(CONVERSATION.messages) == text


def test_messages_go_into_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATE
    text = tokenizer.decode(CONVERSATION.token_ids(tokenizer))
    assert text == "<system>be brief\n<user>hello\n<assistant>hi\n<user>who?\n<assistant>"


@pytest.mark.parametrize("prompt", [Prompt(text="some text"), CONVERSATION], ids=["text", "messages"])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["no template", "template"])
def test_tensors_hold_the_token_ids(tokenizer: PreTrainedTokenizerFast, prompt: Prompt, template: str | None) -> None:
    tokenizer.chat_template = template
    encoded = prompt.encoded(tokenizer)
    assert encoded["input_ids"].tolist() == [prompt.token_ids(tokenizer)]
    assert torch.equal(encoded["attention_mask"], torch.ones_like(encoded["input_ids"]))
    assert encoded["input_ids"].dtype == torch.long


def test_prompt_without_tokens_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Prompt(text="ÄÖÜ").token_ids(tokenizer)


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "workloads"),
    [
        ("humaneval.jsonl", {"humaneval": 164}),
        ("gsm8k_test_first200.jsonl", {"gsm8k_test_first200": 200}),
        (
            "mt_bench.jsonl",
            dict.fromkeys(MT_BENCH_CATEGORIES, 10),
        ),
    ],
)
def test_well_known_file_is_read(real_data: Path, file: str, workloads: dict[str, int]) -> None:
    path = real_data / "prompts" / file
    if not path.is_file():
        pytest.skip(f"needs {file}, and {path.parent} does not hold it")
    assert {name: len(prompts) for name, prompts in read_prompts_by_workload(path).items()} == workloads
