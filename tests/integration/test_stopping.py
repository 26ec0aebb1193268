"""Decoding with a draft stops at the token where plain decoding stops, wherever in a block it falls."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from integration.comparing import (
    KINDS,
    Fresh,
    assert_same_ids,
    fresh,
    ids_that_end_rows_apart,
    new_tokens,
    num_tokens_until,
    outcomes_of,
    plain,
    prompts,
    same_as_plain,
    same_for_all_drafts,
)
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_specdec
import models

Tensor = torch.Tensor
Drafts = dict[str, LlamaForCausalLM]


@pytest.fixture(autouse=True)
def _enabled(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)


# --- end of sequence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_stops_at_every_token_that_may_end_the_sequence(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    inputs = prompts([6])
    [row] = new_tokens(plain(target, inputs, max_new_tokens=18), inputs)
    for token in sorted(set(row)):
        stats = same_as_plain(target, drafts[kind], inputs, 5, max_new_tokens=18, eos_token_id=token)
        assert stats.num_new_tokens == row.index(token) + 1


@pytest.mark.parametrize("kind", KINDS)
def test_stops_at_whichever_of_two_tokens_comes_first(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    inputs = prompts([6])
    [row] = new_tokens(plain(target, inputs, max_new_tokens=24), inputs)
    for first, second in itertools.pairwise(row[::3]):
        stats = same_as_plain(target, drafts[kind], inputs, 4, max_new_tokens=24, eos_token_id=[second, first])
        assert stats.num_new_tokens == min(row.index(first), row.index(second)) + 1


def test_the_end_of_sequence_in_the_prompt_does_not_stop(target: LlamaForCausalLM, drafts: Drafts) -> None:
    inputs = prompts([6], seed=4)
    [row] = new_tokens(plain(target, inputs, max_new_tokens=40), inputs)
    eos = next(token for token in inputs["input_ids"][0].tolist() if token in row)
    stats = same_for_all_drafts(target, drafts, inputs, max_new_tokens=40, eos_token_id=eos)
    assert {s.num_new_tokens for s in stats.values()} == {row.index(eos) + 1}


@pytest.mark.parametrize("position", range(1, 8))
def test_nothing_follows_an_end_inside_a_fully_accepted_block(
    target: LlamaForCausalLM, drafts: Drafts, position: int
) -> None:
    inputs = prompts([6], seed=4)
    [row] = new_tokens(plain(target, inputs, max_new_tokens=24), inputs)
    assert row.index(row[position]) == position
    stats = same_as_plain(target, drafts["identical"], inputs, 16, max_new_tokens=24, eos_token_id=row[position])
    assert stats.draft_lengths == [16]
    assert outcomes_of(stats.rounds) == {"full"}
    assert stats.num_committed_draft_tokens == position


@pytest.mark.parametrize("pad_token_id", [0, 5, 63])
def test_rows_that_ended_are_filled_with_the_padding_of_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, pad_token_id: int
) -> None:
    inputs = prompts([3, 6, 11], pad_token_id=pad_token_id)
    rows = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    [eos] = ids_that_end_rows_apart(rows)
    arguments = {"max_new_tokens": 14, "eos_token_id": eos, "pad_token_id": pad_token_id}
    output = plain(target, inputs, **arguments)
    shortest = min(range(3), key=lambda row: num_tokens_until(rows, [eos])[row])
    assert output[shortest, -1] == pad_token_id
    same_for_all_drafts(target, drafts, inputs, **arguments)


def test_padding_with_the_end_of_sequence_itself_works(target: LlamaForCausalLM, drafts: Drafts) -> None:
    inputs = prompts([3, 6, 11])
    rows = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    [eos] = ids_that_end_rows_apart(rows)
    same_for_all_drafts(target, drafts, inputs, max_new_tokens=14, eos_token_id=eos, pad_token_id=eos)


@pytest.mark.parametrize("ends", [1, 2, 3], ids=["one row", "two rows", "all rows"])
def test_rows_may_end_with_their_first_token(target: LlamaForCausalLM, drafts: Drafts, ends: int) -> None:
    inputs = prompts([3, 6, 11])
    rows = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    eos = [row[0] for row in rows[:ends]]
    outcomes = {"none"} if ends < 3 else set()
    stats = same_for_all_drafts(target, drafts, inputs, outcomes=outcomes, max_new_tokens=14, eos_token_id=eos)
    assert all(s.num_rounds == 0 for s in stats.values()) == (ends == 3)


def test_an_end_given_as_a_criterion_works(target: LlamaForCausalLM, drafts: Drafts) -> None:
    inputs = prompts([3, 6, 11])
    rows = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    [eos] = ids_that_end_rows_apart(rows)
    criteria = Fresh(lambda: StoppingCriteriaList([EosTokenCriteria(eos)]))
    same_for_all_drafts(target, drafts, inputs, max_new_tokens=14, stopping_criteria=criteria)


# --- stop strings -------------------------------------------------------------------------------------------------


def windows(tokenizer: PreTrainedTokenizerFast, row: list[int], size: int = 2) -> list[str]:
    """Return the text of every `size` consecutive tokens that have one."""
    return [
        tokenizer.decode(row[start : start + size])
        for start in range(len(row) - size + 1)
        if min(row[start : start + size]) >= 2
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_stops_at_every_stop_string(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    inputs = prompts([6])
    [row] = new_tokens(plain(target, inputs, max_new_tokens=18), inputs)
    found = windows(tokenizer, row)
    assert len(found) > 12
    lengths = [
        same_as_plain(
            target, drafts[kind], inputs, 5, max_new_tokens=18, stop_strings=[text], tokenizer=tokenizer
        ).num_new_tokens
        for text in found
    ]
    assert len(set(lengths)) > 12


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("offset", [1, 2, 3, 9, 15])
def test_cuts_at_a_stop_string_deep_inside_an_accepted_block(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, offset: int, size: int
) -> None:
    inputs = prompts([6], seed=2)
    [row] = new_tokens(plain(target, inputs, max_new_tokens=20), inputs)
    text = tokenizer.decode(row[offset : offset + 1 + size])
    stats = same_as_plain(
        target, drafts["identical"], inputs, 16, max_new_tokens=40, stop_strings=text, tokenizer=tokenizer
    )
    assert stats.num_new_tokens <= offset + 1 + size
    assert outcomes_of(stats.rounds) == {"full"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["argument", "generation_config", "model.generation_config"])
def test_stop_strings_are_found_wherever_they_were_set(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, place: str, kind: str
) -> None:
    inputs = prompts([6])
    [row] = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    text = tokenizer.decode(row[6:8])
    arguments: dict[str, Any] = {"tokenizer": tokenizer}
    if place == "argument":
        arguments |= {"stop_strings": text, "max_new_tokens": 24}
    elif place == "generation_config":
        arguments["generation_config"] = GenerationConfig(stop_strings=[text], max_new_tokens=24, pad_token_id=0)
    else:
        target.generation_config.stop_strings = [text]
        arguments["max_new_tokens"] = 24
    stats = same_as_plain(target, drafts[kind], inputs, 4, **arguments)
    assert stats.num_new_tokens == 8
    if place == "generation_config":
        assert arguments["generation_config"].stop_strings == [text]
    elif place == "model.generation_config":
        assert target.generation_config.stop_strings == [text]


def test_a_stop_string_may_begin_in_the_prompt(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = prompts([3])
    [row] = new_tokens(plain(target, inputs, max_new_tokens=6), inputs)
    text = tokenizer.decode(inputs["input_ids"][0, -2:].tolist() + row[:3])
    stats = same_for_all_drafts(
        target, drafts, inputs, outcomes={"none"}, max_new_tokens=14, stop_strings=text, tokenizer=tokenizer
    )
    assert {s.num_new_tokens for s in stats.values()} == {3}


def test_a_stop_string_may_be_longer_than_the_text(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = prompts([3, 1])
    rows = new_tokens(plain(target, inputs, max_new_tokens=14), inputs)
    stop_strings = ["z" * 60, tokenizer.decode(rows[0][6:8])]
    stats = same_for_all_drafts(
        target,
        drafts,
        inputs,
        max_new_tokens=14,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        eos_token_id=rows[1][5],
    )
    assert {s.num_new_tokens for s in stats.values()} == {8 + 6}


@pytest.mark.parametrize("with_eos", [False, True], ids=["without eos", "with eos"])
def test_rows_of_a_batch_end_at_their_own_stop_strings(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, with_eos: bool
) -> None:
    inputs = prompts([3, 6, 11, 4])
    rows = new_tokens(plain(target, inputs, max_new_tokens=16), inputs)
    arguments: dict[str, Any] = {
        "max_new_tokens": 16,
        # All rows but the last stop, each after another number of tokens.
        "stop_strings": [tokenizer.decode(row[end - 2 : end]) for row, end in zip(rows, (4, 9, 7), strict=False)],
        "tokenizer": tokenizer,
    }
    if with_eos:
        arguments["eos_token_id"] = rows[3][11]
    output = plain(target, inputs, **arguments)
    # Without an end-of-sequence token plain decoding lets stopped rows grow on.
    assert output[0, -1] == 0 if with_eos else output[0, -1] == rows[0][-1]
    same_for_all_drafts(target, drafts, inputs, **arguments)


def test_a_multi_byte_character_stops_with_its_last_byte(drafts: Drafts) -> None:
    tokenizer = models.build_byte_tokenizer()
    target = hf_specdec.enable(models.build_target(vocab_size=258))
    inputs = prompts([6], vocab_size=258)
    characters = {character: tokenizer(character)["input_ids"] for character in "äöüßéàç€中文"}
    assert min(map(len, characters.values())) > 1
    chosen = characters["€"]
    # Make the model write the character's bytes: bias each byte once the one before it is there.
    bias = {tuple(chosen[: n + 1]): 100.0 for n in range(1, len(chosen))}
    [row] = new_tokens(plain(target, inputs, max_new_tokens=8), inputs)
    bias[(row[4], chosen[0])] = 100.0
    pair = {"identical": models.build_target(vocab_size=258), "noisy": models.build_noisy(target, 0.02)}
    stats = same_for_all_drafts(
        target,
        pair,
        inputs,
        outcomes={"full"},
        max_new_tokens=30,
        sequence_bias=bias,
        stop_strings="€",
        tokenizer=tokenizer,
    )
    assert {s.num_new_tokens for s in stats.values()} == {5 + len(chosen)}


# --- criteria of the caller ---------------------------------------------------------------------------------------


class Recording(StoppingCriteria):
    """Stops each row after a token, or after a number of tokens, and notes every call."""

    def __init__(self, stop_after: list[int | None], prompt_width: int) -> None:
        self.stop_after = stop_after
        self.prompt_width = prompt_width
        self.calls: list[tuple[Tensor, int | None]] = []

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...] | None, **_: Any) -> Tensor:
        self.calls.append((input_ids.clone(), None if scores is None else len(scores)))
        num_new = input_ids.shape[1] - self.prompt_width
        return torch.tensor([end is not None and num_new == end for end in self.stop_after])


def assert_same_calls(got: list[tuple[Tensor, Any]], wanted: list[tuple[Tensor, Any]]) -> None:
    assert len(got) == len(wanted)
    for (ids, scores), (wanted_ids, wanted_scores) in zip(got, wanted, strict=True):
        assert_same_ids(ids, wanted_ids)
        assert scores == wanted_scores


def run_recorded(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    inputs: dict[str, Tensor],
    ends: list[int | None],
    **arguments: Any,
) -> None:
    """Assert equal ids and equal calls of a recording criterion."""
    width = inputs["input_ids"].shape[1]
    recordings = [Recording(ends, width), Recording(ends, width)]
    wanted = plain(target, inputs, **arguments, stopping_criteria=StoppingCriteriaList([recordings[0]]))
    got = plain(
        target,
        inputs,
        **arguments,
        stopping_criteria=StoppingCriteriaList([recordings[1]]),
        draft_model=draft,
        num_draft_tokens=4,
    )
    assert_same_ids(*((ids if isinstance(ids, Tensor) else ids.sequences) for ids in (got, wanted)))
    assert_same_calls(recordings[1].calls, recordings[0].calls)


@pytest.mark.parametrize("end", range(1, 12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_callers_criterion_is_asked_after_every_token(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, end: int
) -> None:
    run_recorded(target, drafts[kind], prompts([6]), [end], max_new_tokens=14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_callers_criterion_lets_other_rows_grow_on(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    run_recorded(target, drafts[kind], prompts([3, 6, 11, 4]), [3, 11, 5, 8], max_new_tokens=20)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_a_criterion_ended_grow_on_as_in_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    run_recorded(target, drafts[kind], prompts([3, 6, 11, 4]), [2, None, 4, None], max_new_tokens=20)


def test_rows_that_ended_are_not_judged_by_a_worse_draft_than_the_others(
    target: LlamaForCausalLM, drafts: Drafts
) -> None:
    # The draft agrees on one row's text and never on the other's, which is the one that has ended.
    inputs = prompts([6, 6], seed=4)
    rows = new_tokens(plain(target, inputs, max_new_tokens=20), inputs)
    assert rows[0] != rows[1]
    for row, other in ((0, 1), (1, 0)):
        ends: list[int | None] = [None, None]
        ends[other] = 2
        for draft in drafts.values():
            run_recorded(target, draft, inputs, ends, max_new_tokens=20)
        assert ends[row] is None


@pytest.mark.parametrize("ends", [[1, None, None], [1, 1, None], [None, 1, 1], [1, 1, 1]])
@pytest.mark.parametrize("with_eos", [False, True], ids=["without eos", "with eos"])
def test_a_criterion_may_end_rows_with_their_first_token(
    target: LlamaForCausalLM, drafts: Drafts, with_eos: bool, ends: list[int | None]
) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 10}
    if with_eos:
        arguments["eos_token_id"] = 1
    for draft in drafts.values():
        run_recorded(target, draft, prompts([3, 6, 11]), ends, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_callers_criterion_sees_padded_rows_as_in_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    inputs = prompts([3, 6, 11, 4])
    rows = new_tokens(plain(target, inputs, max_new_tokens=18), inputs)
    [eos] = ids_that_end_rows_apart(rows)
    assert len(set(num_tokens_until(rows, [eos]))) > 1
    run_recorded(target, drafts[kind], inputs, [None, 13, None, None], max_new_tokens=18, eos_token_id=eos)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_an_end_with_the_first_token_and_a_callers_criterion_work_together(
    target: LlamaForCausalLM, drafts: Drafts, first: int
) -> None:
    inputs = prompts([3, 6, 11, 4])
    rows = new_tokens(plain(target, inputs, max_new_tokens=12), inputs)
    for draft in drafts.values():
        run_recorded(target, draft, inputs, [None, 9, None, None], max_new_tokens=12, eos_token_id=rows[first][0])


class StopWhenSure(StoppingCriteria):
    """Stops where the last token's score leads by some distance, so it needs `output_scores`."""

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **_: Any) -> Tensor:
        best = scores[-1].topk(2).values
        return best[:, 0] - best[:, 1] > 3.4


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
def test_criteria_that_read_scores_get_them(target: LlamaForCausalLM, drafts: Drafts, lengths: list[int]) -> None:
    arguments = {
        "max_new_tokens": 40,
        "output_scores": True,
        "return_dict_in_generate": True,
        "stopping_criteria": Fresh(lambda: StoppingCriteriaList([StopWhenSure()])),
    }
    inputs = prompts(lengths)
    wanted = plain(target, inputs, **fresh(arguments))
    assert 1 < len(wanted.scores) < 40
    seen = set()
    for draft in drafts.values():
        got = plain(target, inputs, **fresh(arguments), draft_model=draft, num_draft_tokens=4)
        assert_same_ids(got.sequences, wanted.sequences)
        assert len(got.scores) == len(wanted.scores)
        for ours, theirs in zip(got.scores, wanted.scores, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
        seen |= outcomes_of(got.speculation.rounds)
    assert {"full", "none"} <= seen


def test_rows_of_one_batch_may_stop_for_different_reasons(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast
) -> None:
    inputs = prompts([3, 6, 11, 4])
    rows = new_tokens(plain(target, inputs, max_new_tokens=18), inputs)
    width = inputs["input_ids"].shape[1]
    arguments: dict[str, Any] = {
        "max_new_tokens": 18,
        "eos_token_id": rows[0][6],
        "stop_strings": [tokenizer.decode(rows[1][9:11])],
        "tokenizer": tokenizer,
        "stopping_criteria": Fresh(lambda: StoppingCriteriaList([Recording([None, None, 13, None], width)])),
    }
    output = plain(target, inputs, **fresh(arguments))
    is_padding = (output[:, width:] == 0).long()
    assert is_padding.sum(dim=1).unique().numel() > 2
    same_for_all_drafts(target, drafts, inputs, **arguments)


# --- time ---------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that moves on by a second whenever somebody reads it."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
@pytest.mark.parametrize("limit", [0.5, 3.5, 7.5])
@pytest.mark.parametrize("kind", KINDS)
def test_stops_when_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
    target: LlamaForCausalLM,
    drafts: Drafts,
    kind: str,
    limit: float,
    lengths: list[int],
) -> None:
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=100)
    monkeypatch.setattr("transformers.generation.stopping_criteria.time", Clock())
    got = plain(target, inputs, max_new_tokens=100, max_time=limit, draft_model=drafts[kind], num_draft_tokens=3)
    num_new = got.shape[1] - inputs["input_ids"].shape[1]
    # The clock is read at least once a round, and a round brings at most four tokens to a row.
    assert 1 <= num_new <= 1 + 4 * (limit + 1)
    assert_same_ids(got, wanted[:, : got.shape[1]])


def test_rows_that_ended_before_time_was_up_are_padded(
    monkeypatch: pytest.MonkeyPatch, target: LlamaForCausalLM, drafts: Drafts
) -> None:
    inputs = prompts([3, 6, 11])
    rows = new_tokens(plain(target, inputs, max_new_tokens=40), inputs)
    lengths = {token: sorted(num_tokens_until(rows, [token])) for row in rows for token in row[2:5]}
    eos = next(token for token, (first, second, _) in lengths.items() if first <= 5 and second >= 20)
    wanted = plain(target, inputs, max_new_tokens=40, eos_token_id=eos)
    for draft in drafts.values():
        monkeypatch.setattr("transformers.generation.stopping_criteria.time", Clock())
        got = plain(
            target,
            inputs,
            max_new_tokens=40,
            eos_token_id=eos,
            max_time=6.5,
            draft_model=draft,
            num_draft_tokens=3,
        )
        assert 5 < got.shape[1] - inputs["input_ids"].shape[1] < 32
        assert_same_ids(got, wanted[:, : got.shape[1]])
