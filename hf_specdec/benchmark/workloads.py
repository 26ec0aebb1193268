"""Prompts to measure on, sorted by kind: how much a draft helps depends most of all on how predictable the text is.

The bundled prompts were written for this purpose, so that no model knows them from a benchmark. They lie in `prompts/`,
a file for each kind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import chain, cycle, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from hf_specdec.benchmark.prompt_files import Prompt, read_prompts, read_prompts_by_workload
from hf_specdec.errors import InvalidConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_WORKLOADS = ("code", "json", "maths", "chat", "writing", "copying")
RANDOM = "random"
WORKLOADS = (*TEXT_WORKLOADS, RANDOM)
"""Roughly from low to high entropy of what is to be written; `copying` stands apart: it repeats what is in the prompt.

code, json: texts to be continued, in several programming languages, and after a JSON schema. maths, chat, writing:
word problems, questions, and creative tasks. copying: a text is to be copied, changed a little, or summarised. random:
random tokens, which no draft can foresee.
"""

# Texts that differ from their first token on: what they have in common in a prompt was put in front of them.
_MARKS = ("0", "a")
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of one kind.

    Attributes:
        name: What to call it in a table.
        prompts: In a fixed order; none of them means random tokens, made when they are asked for.
    """

    name: str
    prompts: tuple[Prompt, ...]

    def encoded(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_prompts: int,
        *,
        num_prompt_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        seed: int = 0,
    ) -> list[list[int]]:
        """Return the first prompts as rows of token ids, as they are or brought to one length.

        Where `num_prompt_tokens` is given, other prompts of the workload are put before each, again and again where
        they are short, and what is too much is cut off on their left. So the end stays what the model is to continue.
        What the tokenizer or the chat template puts in front of a text stays in front.

        Args:
            tokenizer: The target's.
            num_prompts: How many rows.
            num_prompt_tokens: Length of each row. None leaves them as they are; random tokens are then as many as
                bundled prompts have.
            max_prompt_tokens: The most tokens that the models have room for; longer rows are cut on the left. None
                cuts nothing.
            seed: Of random tokens and their lengths. Row i is the same for every `num_prompts`.

        Raises:
            InvalidConfigError: A number is below 1, there are fewer prompts, or the length is more than
                `max_prompt_tokens` or, where that is None, than what the tokenizer says of its model.
            ValueError: The tokenizer makes nothing of a prompt, or has no ordinary tokens.
        """
        self._check_num_prompts(num_prompts)
        _check_lengths(tokenizer, num_prompt_tokens, max_prompt_tokens)
        if not self.prompts:
            return _random_rows(tokenizer, num_prompts, num_prompt_tokens, max_prompt_tokens, seed)
        prompts = self.prompts[:num_prompts]
        rows = [prompt.token_ids(tokenizer) for prompt in prompts]
        if num_prompt_tokens is None:
            return [
                _cut(row, _opening(row, prompt, tokenizer), max_prompt_tokens)
                if max_prompt_tokens is not None and len(row) > max_prompt_tokens
                else row
                for row, prompt in zip(rows, prompts, strict=True)
            ]
        texts = [_text_ids(prompt, tokenizer) for prompt in self.prompts]
        return [
            _brought_to(num_prompt_tokens, row, _opening(row, prompt, tokenizer), _others(texts, index))
            for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
        ]

    def _check_num_prompts(self, num_prompts: int) -> None:
        if num_prompts < 1:
            raise InvalidConfigError(f"`num_prompts` must be at least 1, but is {num_prompts}. Ask for one or more.")
        if self.prompts and num_prompts > len(self.prompts):
            raise InvalidConfigError(
                f"`num_prompts` must be at most the number of prompts, which for the workload {self.name!r} is "
                f"{len(self.prompts)}, but is {num_prompts}. Ask for fewer, or give a file with more."
            )


@cache
def workload(name: str) -> Workload:
    """Return a bundled workload.

    Args:
        name: One of `WORKLOADS`.

    Raises:
        InvalidConfigError: There is none of this name.

    Example:
        >>> workload("code").prompts[0].text.splitlines()[0]
        'def tide_windows(heights, threshold):'
    """
    if name not in WORKLOADS:
        raise InvalidConfigError(
            f"A workload must be one of {', '.join(WORKLOADS)}, but is {name!r}. Choose one of them; prompts of your "
            "own come from a file."
        )
    if name == RANDOM:
        return Workload(name=name, prompts=())
    with resources.as_file(resources.files("hf_specdec.benchmark") / "prompts" / f"{name}.jsonl") as path:
        return Workload(name=name, prompts=tuple(read_prompts(path)))


def workloads_of_file(path: Path) -> tuple[Workload, ...]:
    """Return the workloads in a file of prompts, in order of appearance; see `read_prompts_by_workload`.

    Raises:
        InvalidPromptsError: The file is no UTF-8 text, holds no prompt, or a line of JSON is not as it should be.
        OSError: It cannot be read.
    """
    return tuple(Workload(name=name, prompts=tuple(own)) for name, own in read_prompts_by_workload(path).items())


# ---- lengths -------------------------------------------------------------------------------------------------------


def _check_lengths(
    tokenizer: PreTrainedTokenizerBase, num_prompt_tokens: int | None, max_prompt_tokens: int | None
) -> None:
    for name, value in (("num_prompt_tokens", num_prompt_tokens), ("max_prompt_tokens", max_prompt_tokens)):
        if value is not None and value < 1:
            raise InvalidConfigError(
                f"`{name}` must be at least 1, but is {value}. Leave it out for prompts as they are."
            )
    limit = tokenizer.model_max_length if max_prompt_tokens is None else max_prompt_tokens
    if num_prompt_tokens is not None and num_prompt_tokens > limit:
        raise InvalidConfigError(
            f"`num_prompt_tokens` must be at most what the model's context leaves for a prompt, {limit} tokens, but is "
            f"{num_prompt_tokens}. Ask for shorter prompts."
        )


def _brought_to(length: int, row: list[int], opening: list[int], others: Sequence[list[int]]) -> list[int]:
    """Return `row` with tokens of `others`, the nearest first, between its opening and the rest; or cut."""
    room = length - len(row)
    if room <= 0:
        return _cut(row, opening, length)
    if not any(others):
        raise ValueError("Prompts that are made longer need others to put before them, but these have no tokens.")
    nearest_first: list[list[int]] = []
    num_taken = 0
    for other in cycle(others):
        nearest_first.append(other)
        num_taken += len(other)
        if num_taken >= room:
            break
    before = list(chain.from_iterable(reversed(nearest_first)))
    return opening + before[-room:] + row[len(opening) :]


def _cut(row: list[int], opening: list[int], length: int) -> list[int]:
    """Return `length` of a row's tokens: its end, and before that its opening where there is room for both."""
    if length <= len(opening):
        return row[-length:]
    return opening + row[len(row) - length + len(opening) :]


def _others(texts: list[list[int]], index: int) -> list[list[int]]:
    """Return all but one, those before it first, backwards; that one where there is no other."""
    return (texts[:index][::-1] + texts[index + 1 :][::-1]) or texts


def _text_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a prompt says, without roles and template, and a gap after it."""
    text = _BETWEEN.join(message["content"] for message in prompt.messages) or prompt.text
    ids = tokenizer(text + _BETWEEN, add_special_tokens=False)["input_ids"]
    return list(ids)


def _opening(row: list[int], prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what the tokenizer, the template and the system put in front of a prompt's own text.

    Models need it where it is: some write nonsense without their first special token.
    """
    rows = [row, *(_with_other_text(prompt, mark).token_ids(tokenizer) for mark in _MARKS)]
    same = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
    return [ids[0] for ids in same]


def _with_other_text(prompt: Prompt, text: str) -> Prompt:
    if not prompt.messages:
        return replace(prompt, text=text)
    is_system = (message["role"] == "system" for message in prompt.messages)
    first = next((index for index, is_one in enumerate(is_system) if not is_one), 0)
    changed = tuple({**message, "content": text} for message in prompt.messages[first:])
    return replace(prompt, messages=prompt.messages[:first] + changed)


# ---- random tokens -------------------------------------------------------------------------------------------------


def _random_rows(
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int,
    num_prompt_tokens: int | None,
    max_prompt_tokens: int | None,
    seed: int,
) -> list[list[int]]:
    ordinary = _ordinary_ids(tokenizer)
    lengths = [num_prompt_tokens] if num_prompt_tokens is not None else _bundled_lengths(tokenizer)
    source = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        row = source.choices(ordinary, k=source.choice(lengths))
        # Cut and not drawn shorter, so that the limit does not change the rows after it.
        rows.append(row if max_prompt_tokens is None else row[:max_prompt_tokens])
    return rows


def _bundled_lengths(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [len(prompt.token_ids(tokenizer)) for name in TEXT_WORKLOADS for prompt in workload(name).prompts]


def _ordinary_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that text is made of: neither special nor added, such as those of a chat template."""
    left_out = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ordinary = sorted(set(tokenizer.get_vocab().values()) - left_out)
    if not ordinary:
        raise ValueError("Random prompts need ordinary tokens, but this tokenizer has only special and added ones.")
    return ordinary
