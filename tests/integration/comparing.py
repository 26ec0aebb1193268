"""Compare decoding with a draft to plain decoding, and learn from the rounds what the draft's tokens met with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec import RoundRecord, SpeculationStats

Tensor = torch.Tensor
KINDS = ("identical", "unrelated", "noisy")
EVERY_OUTCOME = frozenset({"full", "none", "partial"})


def prompts(lengths: Sequence[int], vocab_size: int = 64, pad_token_id: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Return random prompts of these lengths, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), pad_token_id)
    attention_mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        input_ids[row, width - length :] = torch.randint(2, vocab_size, (length,), generator=generator)
        attention_mask[row, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def plain(model: PreTrainedModel, inputs: Mapping[str, Tensor], **arguments: Any) -> Tensor:
    """Decode greedily (unless told to sample) without a draft and return the ids `[B, L]`."""
    return model.generate(**inputs, **{"do_sample": False, **arguments})


def same_as_plain(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    num_draft_tokens: int,
    **arguments: Any,
) -> SpeculationStats:
    """Assert that decoding with the draft gives the ids of plain decoding, and return what happened."""
    wanted = plain(model, inputs, **fresh(arguments))
    output = model.generate(
        **inputs,
        **{"do_sample": False, **fresh(arguments)},
        draft_model=draft,
        num_draft_tokens=num_draft_tokens,
        return_dict_in_generate=True,
    )
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.fallbacks == []
    return output.speculation


def same_for_all_drafts(
    model: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel],
    inputs: Mapping[str, Tensor],
    num_draft_tokens: int = 3,
    *,
    outcomes: Iterable[str] = EVERY_OUTCOME,
    **arguments: Any,
) -> dict[str, SpeculationStats]:
    """Assert the ids of plain decoding with each draft, and that all `outcomes` occurred with one draft or another."""
    stats = {kind: same_as_plain(model, draft, inputs, num_draft_tokens, **arguments) for kind, draft in drafts.items()}
    seen = set().union(*(outcomes_of(s.rounds) for s in stats.values()))
    assert set(outcomes) <= seen
    return stats


def outcomes_of(rounds: Iterable[RoundRecord]) -> set[str]:
    """Return which of "full", "none" and "partial" acceptance occurred in rounds that drafted."""
    seen = set()
    for record in rounds:
        for accepted in record.num_accepted_tokens if record.num_draft_tokens else ():
            if accepted == 0:
                seen.add("none")
            else:
                seen.add("full" if accepted == record.num_draft_tokens else "partial")
    return seen


def assert_same_ids(got: Tensor, wanted: Tensor) -> None:
    """Assert equal shape and ids, with the first difference in the message."""
    assert got.shape == wanted.shape, f"{tuple(got.shape)} instead of {tuple(wanted.shape)}"
    different = (got != wanted).nonzero().tolist()
    assert not different, f"first difference at {different[0]}:\n{got.tolist()}\ninstead of\n{wanted.tolist()}"


def fresh(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with everything that is `Fresh` made anew."""
    return {name: value() if isinstance(value, Fresh) else value for name, value in arguments.items()}


class Fresh:
    """An argument that keeps state and is therefore made anew for every call of `generate`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


def new_tokens(output: Tensor, inputs: Mapping[str, Tensor]) -> list[list[int]]:
    """Return what was generated in each row."""
    return output[:, inputs["input_ids"].shape[1] :].tolist()


def num_tokens_until(rows: Sequence[Sequence[int]], token_ids: Iterable[int]) -> list[int]:
    """Return after how many tokens each row meets one of `token_ids`, or its whole length."""
    wanted = set(token_ids)
    return [next((n for n, token in enumerate(row, 1) if token in wanted), len(row)) for row in rows]


def ids_that_end_rows_apart(rows: Sequence[Sequence[int]], how_many: int = 1) -> list[int]:
    """Return token ids that, as end-of-sequence, end the rows after as many different lengths as possible.

    The first and the last token of a row do not count as an end: the cut shall fall into the middle of the text.
    """
    chosen: list[int] = []
    for _ in range(how_many):
        candidates = sorted({token for row in rows for token in row[1:-1]} - set(chosen))
        chosen.append(max(candidates, key=lambda token: _spread(rows, [*chosen, token])))
    return chosen


def _spread(rows: Sequence[Sequence[int]], token_ids: Sequence[int]) -> tuple[int, int]:
    lengths = num_tokens_until(rows, token_ids)
    inside = [length for length, row in zip(lengths, rows, strict=True) if 1 < length < len(row)]
    return len(set(lengths)) + (len(inside) > 0), -abs(sum(lengths) - sum(map(len, rows)) // 2)
