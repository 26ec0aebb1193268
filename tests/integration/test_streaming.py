"""Streamers get what plain decoding gives them: the prompt, every token once and in order, then the end."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from integration.comparing import KINDS
from integration.harness import PROMPT, admit, build_mistral, failing, greedy, prompts_of, spoiled, token_after
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import hf_specdec
import models

Drafts = dict[str, LlamaForCausalLM]
NUM_TOKENS = 16


class RecordingStreamer(BaseStreamer):
    """Keeps every call in order."""

    def __init__(self, events: list[Any] | None = None) -> None:
        self.events: list[Any] = [] if events is None else events

    def put(self, value: torch.Tensor) -> None:
        self.events.append(("put", tuple(value.shape), value.dtype, value.device.type, value.tolist()))

    def end(self) -> None:
        self.events.append("end")


class StatefulProcessor(LogitsProcessor):
    """A caller's own class, which makes rows move in lockstep; changes nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def calls_of(target: LlamaForCausalLM, inputs: Any, **options: Any) -> list[Any]:
    streamer = RecordingStreamer()
    greedy(target, inputs, streamer=streamer, **options)
    return streamer.events


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("ends_early", [False, True], ids=["full length", "end of sequence"])
@pytest.mark.parametrize("is_lockstep", [False, True], ids=["rows apart", "lockstep"])
def test_a_streamer_sees_the_calls_of_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, ends_early: bool, is_lockstep: bool
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS}
    if ends_early:
        # The second row of three ends first, while its neighbours go on.
        plain = greedy(target, inputs, **options)
        options["eos_token_id"] = token_after(plain[batch // 2], 4, PROMPT.shape[1])
    if is_lockstep:
        options["logits_processor"] = [StatefulProcessor()]
    wanted = calls_of(target, inputs, **options)
    assert calls_of(target, inputs, draft_model=drafts[kind], **options) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_the_output(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    hf_specdec.enable(target)
    streamer = RecordingStreamer()
    output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, streamer=streamer, draft_model=drafts[kind])
    *pieces, end = streamer.events
    ids = [value for *_, value in pieces]
    assert ids[0] == PROMPT.tolist()
    assert ids[0][0] + [token for piece in ids[1:] for token in piece] == output[0].tolist()
    assert end == "end"


def test_all_rows_ending_with_the_first_token_are_streamed_as_in_plain(
    target: LlamaForCausalLM, drafts: Drafts
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(3)
    eos = greedy(target, inputs, max_new_tokens=1)[:, -1].tolist()
    wanted = calls_of(target, inputs, max_new_tokens=NUM_TOKENS, eos_token_id=eos)
    assert len(wanted) == 3
    got = calls_of(target, inputs, max_new_tokens=NUM_TOKENS, eos_token_id=eos, draft_model=drafts["noisy"])
    assert got == wanted


def test_a_text_streamer_prints_the_plain_text(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_specdec.enable(target)
    texts = []
    for extra in ({}, {"draft_model": drafts["noisy"]}):
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, streamer=streamer, **extra)
        texts.append(capsys.readouterr().out)
    assert texts[0]
    assert texts[1] == texts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_streamer_works_from_a_thread(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    hf_specdec.enable(target)
    admit(target, drafts[kind])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"max_new_tokens": NUM_TOKENS, "streamer": streamer, "draft_model": drafts[kind]}
    thread = threading.Thread(target=greedy, args=(target, PROMPT), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    plain = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS)
    assert text == tokenizer.decode(plain[0, PROMPT.shape[1] :])


@pytest.mark.parametrize("batch", [1, 3])
def test_the_first_token_is_streamed_before_the_draft_runs(
    target: LlamaForCausalLM, drafts: Drafts, batch: int
) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    events: list[Any] = []
    handles = [
        model.register_forward_pre_hook(lambda *_, name=name: events.append(name))
        for name, model in (("target", target), ("draft", draft))
    ]
    greedy(target, prompts_of(batch), max_new_tokens=4, streamer=RecordingStreamer(events), draft_model=draft)
    for handle in handles:
        handle.remove()
    kinds = [event if isinstance(event, str) else event[0] for event in events]
    assert kinds[:4] == ["put", "target", "put", "draft"]


def test_tokens_are_streamed_round_by_round(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    events: list[Any] = []
    greedy(
        target,
        PROMPT,
        max_new_tokens=NUM_TOKENS,
        streamer=RecordingStreamer(events),
        draft_model=drafts["noisy"],
        speculative_config={"on_round": lambda record: events.append(record.num_committed_tokens)},
    )
    streamed = 0
    for event in events[2:-1]:  # without the prompt and the first token, and the end
        if isinstance(event, int):
            assert event == streamed
            streamed = 0
        else:
            streamed += 1
    assert streamed == 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_sampled_and_greedy_pieces_equal_what_is_returned(
    target: LlamaForCausalLM, drafts: Drafts, do_sample: bool
) -> None:
    hf_specdec.enable(target)
    streamer = RecordingStreamer()
    output = target.generate(
        **prompts_of(3),
        do_sample=do_sample,
        max_new_tokens=NUM_TOKENS,
        streamer=streamer,
        draft_model=drafts["noisy"],
    )
    columns = [event[-1] for event in streamer.events[1:-1]]
    assert torch.equal(torch.tensor(columns).T, output[:, PROMPT.shape[1] :])


def test_a_draft_that_breaks_does_not_disturb_the_stream(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    wanted = calls_of(target, PROMPT, max_new_tokens=NUM_TOKENS)
    for broken in (failing(draft, 6, RuntimeError("boom")), spoiled(draft, 6, float("nan"))):
        with broken, pytest.warns(hf_specdec.SpeculationWarning):
            assert calls_of(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft) == wanted


def test_a_call_that_decodes_plainly_streams_as_well(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)
    wanted = calls_of(target, PROMPT, max_new_tokens=NUM_TOKENS)
    with pytest.warns(hf_specdec.SpeculationWarning):
        assert calls_of(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=models.build_refused()) == wanted


def test_a_call_whose_cache_cannot_be_taken_over_streams_as_well() -> None:
    target = build_mistral()
    draft = copy.deepcopy(target)
    hf_specdec.enable(target)
    # A static cache of a sliding window forgets what a rejected token has overwritten.
    options = {"max_new_tokens": NUM_TOKENS, "cache_implementation": "static"}
    wanted = calls_of(target, PROMPT, **options)
    with pytest.warns(hf_specdec.SpeculationWarning):
        assert calls_of(target, PROMPT, draft_model=draft, **options) == wanted
