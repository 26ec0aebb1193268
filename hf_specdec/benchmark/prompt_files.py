"""Prompts of the user's own, to measure a pair on: a text file with one a line, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

JSON_LINES = (".jsonl", ".ndjson")
_RULE = (
    'Prompts must be UTF-8 text with one prompt a line, or JSON lines (.jsonl) with {"prompt": "…"} or '
    '{"messages": [{"role": "…", "content": "…"}]} on each'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model is to continue: a text, or the messages of a conversation that it is to answer."""

    text: str = ""
    messages: tuple[Mapping[str, str], ...] = ()

    def encoded(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask`, `[1, L]`.

        Raises:
            ValueError: They are messages and the tokenizer has no chat template, or nothing is left to continue.
        """
        encoded: Any
        if not self.messages:
            encoded = tokenizer(self.text, return_tensors="pt", return_token_type_ids=False)
        elif tokenizer.chat_template is None:
            raise ValueError(
                "Prompts that are `messages` need a tokenizer with a chat template, and this one has none. Give the "
                'text as `"prompt"` instead.'
            )
        else:
            encoded = tokenizer.apply_chat_template(
                [dict(message) for message in self.messages],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        if not encoded["input_ids"].shape[1]:
            raise ValueError(f"A prompt must have at least one token, but {self.text!r} has none. Leave it out.")
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file, in order; empty lines are skipped.

    Raises:
        ValueError: The file is no UTF-8 text, holds no prompt, or a line of JSON is not as it should be.
        OSError: It cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{_RULE}, but {str(path)!r} is no UTF-8 ({error}). Save it as UTF-8.") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{_RULE}, but {str(path)!r} holds none. Write at least one.")
    if path.suffix.lower() not in JSON_LINES:
        return [Prompt(text=line) for _, line in numbered]
    return [_from_json(line, f"line {number} of {str(path)!r}") for number, line in numbered]


def _from_json(line: str, place: str) -> Prompt:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_RULE}, but {place} is no JSON ({error}). Correct it.") from error
    if isinstance(values, dict) and ("prompt" in values) != ("messages" in values):
        text, messages = values.get("prompt"), values.get("messages")
        if isinstance(text, str) and text:
            return Prompt(text=text)
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return Prompt(messages=tuple({"role": own["role"], "content": own["content"]} for own in messages))
    shown = line if len(line) <= 80 else line[:80] + "…"
    raise ValueError(f"{_RULE}, but {place} is {shown}. Give one of the two on each line.")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
