"""Prompts from files: what is read, and what is refused with the line it is on."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from hf_specdec.benchmark.prompt_files import Prompt, read_prompts


def test_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text('one\n\n  \n{"prompt": "two"}\n', encoding="utf-8")
    assert read_prompts(path) == [Prompt(text="one"), Prompt(text='{"prompt": "two"}')]


def test_json_lines_have_prompts_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"prompt": "a\\nb", "id": 7}\n\n{"messages": [{"role": "user", "content": "hi", "name": "x"}]}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == [Prompt(text="a\nb"), Prompt(messages=({"role": "user", "content": "hi"},))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("own.txt", b"\n \n", "holds none"),
        ("own.txt", b"\xff\xfe", "is no UTF-8"),
        ("own.jsonl", b'{"prompt": "a"}\n{"prompt": }\n', "line 2 of .* is no JSON"),
        ("own.jsonl", b'\n["a"]\n', r"line 2 of .* is \[\"a\"\]"),
        ("own.jsonl", b'{"text": "a"}\n', "line 1 of"),
        ("own.jsonl", b'{"prompt": ""}\n', "line 1 of"),
        ("own.jsonl", b'{"prompt": "a", "messages": []}\n', "line 1 of"),
        ("own.jsonl", b'{"messages": [{"role": "user"}]}\n', "line 1 of"),
        ("own.jsonl", b'{"messages": [{"role": "user", "content": ["a"]}]}\n', "line 1 of"),
        ("own.jsonl", b"[" * 100_000, "line 1 of"),
        ("own.jsonl", b'{"prompt": 3, "more": "' + b"x" * 500 + b'"}', "x…. Give one of the two"),
    ],
)
def test_what_holds_no_prompts_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_prompts(path)
    assert str(raised.value).startswith("Prompts must be UTF-8 text")


def test_prompts_are_encoded_as_they_are_and_messages_by_the_chat_template() -> None:
    tokenizer = models.build_tokenizer()
    messages = Prompt(messages=({"role": "user", "content": "hi"},))
    with pytest.raises(ValueError, match="need a tokenizer with a chat template"):
        messages.encoded(tokenizer)
    with pytest.raises(ValueError, match="at least one token"):
        Prompt(text="Ä").encoded(tokenizer)
    encoded = Prompt(text="hello").encoded(tokenizer)
    assert list(encoded) == ["input_ids", "attention_mask"]
    assert tokenizer.decode(encoded["input_ids"][0]) == "hello"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model:"
    assert tokenizer.decode(messages.encoded(tokenizer)["input_ids"][0]) == "user: hi\nmodel:"
