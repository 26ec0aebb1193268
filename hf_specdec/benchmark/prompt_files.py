"""Prompts of the user's own, to measure a pair on: a text file with one a line, or JSON lines.

Lines of some well-known sets of prompts are recognised by their keys, so that their files can be used as they are:
HumanEval (`prompt`), GSM8K (`question`), MT-bench and Spec-Bench (`turns`, `category`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specdec.errors import InvalidPromptsError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

JSON_LINES = (".jsonl", ".ndjson")
_LONGEST_CATEGORY = 64
_RULE = (
    'Prompts must be UTF-8 text with one prompt a line, or JSON lines (.jsonl) with one of {"prompt": "…"}, '
    '{"messages": [{"role": "…", "content": "…"}]}, {"question": "…"} and {"turns": ["…"]} on each'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model is to continue: a text, or the messages of a conversation that it is to answer."""

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the prompt as token ids, with what the tokenizer puts in front of a text.

        Messages are put into the tokenizer's chat template, and into plain text where it has none.

        Raises:
            ValueError: Nothing is left to continue.
        """
        encoded: Any
        if self.messages and tokenizer.chat_template is not None:
            encoded = tokenizer.apply_chat_template(
                [dict(message) for message in self.messages], add_generation_prompt=True, return_dict=True
            )
        else:
            encoded = tokenizer(as_plain_text(self.messages) if self.messages else self.text)
        ids = list(encoded["input_ids"])
        if not ids:
            raise ValueError(f"A prompt must have at least one token, but {self.text!r} has none. Leave it out.")
        return ids

    def encoded(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, `[1, L]`.

        Raises:
            ValueError: Nothing is left to continue.
        """
        # Files are read by commands that print an error before they import what takes seconds.
        import torch

        ids = torch.tensor([self.token_ids(tokenizer)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def as_plain_text(messages: tuple[Mapping[str, str], ...]) -> str:
    r"""Return a conversation as a text that a model without a chat template can go on with.

    Example:
        >>> as_plain_text(({"role": "user", "content": "Hello!"},))
        'User: Hello!\nAssistant:'
    """
    return "".join(f"{message['role'].capitalize()}: {message['content']}\n" for message in messages) + "Assistant:"


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, in order; empty lines are skipped.

    Raises:
        InvalidPromptsError: The file is no UTF-8 text, holds no prompt, or a line of JSON is not as it should be.
        OSError: It cannot be read.
    """
    return [prompt for _, prompt in _read(path)]


def read_prompts_by_workload(path: Path) -> dict[str, list[Prompt]]:
    """Return the prompts of a file by workload, in order of appearance.

    A workload is what a line of JSON calls its `category`; where it has none, the file's name without its ending.

    Raises:
        InvalidPromptsError: The file is no UTF-8 text, holds no prompt, or a line of JSON is not as it should be.
        OSError: It cannot be read.
    """
    workloads: dict[str, list[Prompt]] = {}
    for category, prompt in _read(path):
        workloads.setdefault(category or path.stem, []).append(prompt)
    return workloads


def _read(path: Path) -> list[tuple[str | None, Prompt]]:
    try:
        # Not `splitlines`: it also cuts at characters that may stand within a JSON string, such as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidPromptsError(f"{_RULE}, but {str(path)!r} is no UTF-8 ({error}). Save it as UTF-8.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InvalidPromptsError(f"{_RULE}, but {str(path)!r} holds none. Write at least one.")
    if path.suffix.lower() not in JSON_LINES:
        return [(None, Prompt(text=line)) for _, line in numbered]
    return [_from_json(line, f"line {number} of {str(path)!r}") for number, line in numbered]


def _from_json(line: str, place: str) -> tuple[str | None, Prompt]:
    shown = line if len(line) <= 80 else line[:80] + "…"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidPromptsError(f"{_RULE}, but {place} is no JSON ({error}). Correct it.") from error
    kinds = [name for name in _PROMPT_OF if isinstance(values, dict) and name in values]
    if len(kinds) != 1:
        found = f"has {' and '.join(kinds)}" if kinds else "has none of them"
        raise InvalidPromptsError(f"{_RULE}, but {place} {found}: {shown}. Give one of them on each line.")
    (kind,) = kinds
    prompt = _PROMPT_OF[kind](values[kind])
    if prompt is None:
        raise InvalidPromptsError(f"{_RULE}, but `{kind}` in {place} is of another form or empty: {shown}. Correct it.")
    return _category(values, place), prompt


def _category(values: Mapping[str, Any], place: str) -> str | None:
    if "category" not in values:
        return None
    category = values["category"]
    if not _is_text(category) or len(category) > _LONGEST_CATEGORY or not category.isprintable():
        shown = json.dumps(category)
        raise InvalidPromptsError(
            f"`category` names the workload, so it must be a text of 1 to {_LONGEST_CATEGORY} printable characters, "
            f"but in {place} it is {shown if len(shown) <= 80 else shown[:80] + '…'}. Correct it, or leave it out."
        )
    return str(category)


def _from_text(value: Any) -> Prompt | None:
    return Prompt(text=value) if _is_text(value) else None


def _from_messages(value: Any) -> Prompt | None:
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        return None
    return Prompt(messages=tuple({"role": own["role"], "content": own["content"]} for own in value))


def _from_question(value: Any) -> Prompt | None:
    return Prompt(messages=({"role": "user", "content": value},)) if _is_text(value) else None


def _from_turns(value: Any) -> Prompt | None:
    # Later turns refer to an answer that is still to be given.
    return _from_question(value[0]) if isinstance(value, list) and value else None


_PROMPT_OF: dict[str, Callable[[Any], Prompt | None]] = {
    "prompt": _from_text,
    "messages": _from_messages,
    "question": _from_question,
    "turns": _from_turns,
}


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and _is_encodable(value.get("content"))


def _is_text(value: Any) -> bool:
    return _is_encodable(value) and bool(value.strip())


def _is_encodable(value: Any) -> bool:
    """Whether it is a string without lone surrogates, which JSON can spell and no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
