"""Drafts with another tokenizer: the text is the target's alone, in shared tokens and in the draft's own."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers_of_text as trained
import torch
from integration.comparing import KINDS, Fresh, assert_same_ids, fresh, outcomes_of, plain
from integration.harness import admit, build_gpt2, spoiled, state_of, token_after
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers import models as kinds_of_tokenizer
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)

import hf_specdec
import models
from hf_specdec import SpeculationStats, SpeculationWarning, SpeculativeConfig
from hf_specdec.controller import FixedDraftLength
from hf_specdec.demo import load_demo_pair
from hf_specdec.drafters import model as model_drafter
from hf_specdec.drafters.translation import Translator
from hf_specdec.engine import phases
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError
from hf_specdec.pairing import tokenizers

Tensor = torch.Tensor
SPACES = ("shared", "text")
PROMPTS = ["The keeper wrote", "In the morning", "12 boats came home, and the gulls 🙂 é"]
in_both_spaces = pytest.mark.parametrize("space", SPACES)


class Pair:
    """A target, a draft and their tokenizers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokenizer = trained.byte_level()
        self.target = hf_specdec.enable(trained.build_for(self.tokenizer))
        if kind == "unrelated":
            self.draft_tokenizer = trained.metaspace()
            self.draft = trained.build_for(self.draft_tokenizer, seed=100)
        else:
            self.draft_tokenizer, self.draft = trained.permuted(self.tokenizer, self.target)
        if kind == "noisy":
            self.draft = models.build_noisy(self.draft)

    def settings(self, space: str = "auto") -> dict[str, Any]:
        config = SpeculativeConfig(draft_tokenizer=self.draft_tokenizer, token_space=space, strict=True)
        return {"draft_model": self.draft, "tokenizer": self.tokenizer, "speculative_config": config}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def inputs_of(pair: Pair, prompts: list[str] = PROMPTS) -> dict[str, Tensor]:
    batch = pair.tokenizer(prompts, return_tensors="pt", padding=True)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def same_text(
    pair: Pair, inputs: dict[str, Tensor], space: str, num_draft_tokens: int | str = 3, **arguments: Any
) -> SpeculationStats:
    """Assert that decoding with the draft gives the ids of plain decoding, and return what happened."""
    arguments = {"max_new_tokens": 20, "pad_token_id": 1, **arguments}
    wanted = plain(pair.target, inputs, **fresh(arguments))
    output = pair.target.generate(
        **inputs,
        do_sample=False,
        **fresh(arguments),
        **(pair.settings(space)),
        num_draft_tokens=num_draft_tokens,
        return_dict_in_generate=True,
    )
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.fallbacks == []
    # A draft that was never asked has proposed in no tokens.
    assert output.speculation.token_space == (space if output.speculation.rounds else "same")
    return output.speculation


# --- greedy ---------------------------------------------------------------------------------------------------------


@in_both_spaces
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_text_is_the_targets(pair: Pair, space: str, num_rows: int) -> None:
    stats = same_text(pair, inputs_of(pair, PROMPTS[-num_rows:]), space)
    assert stats.num_shared_tokens > 50
    assert stats.num_draft_tokens > 0
    if pair.kind != "unrelated":
        # Other ids, the same text: the draft proposes what it would have proposed in the target's.
        assert stats.num_accepted_tokens > 0
        assert "full" in outcomes_of(stats.rounds)


@in_both_spaces
def test_a_trained_twin_under_other_ids_is_nearly_always_right(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both its proposals and what its probes say of text that it has not written."""
    bundled = load_demo_pair(num_parameters=0)
    pair = Pair("identical")
    pair.tokenizer, pair.target = bundled.tokenizer, hf_specdec.enable(bundled.draft)
    pair.draft_tokenizer, pair.draft = trained.permuted(pair.tokenizer, pair.target)
    inputs = inputs_of(pair, ["It is a truth universally acknowledged, that a single man", "The module provides"])
    stats = same_text(pair, inputs, space, max_new_tokens=40)
    assert stats.acceptance_rate > 0.9
    monkeypatch.setattr("hf_specdec.call._controller", lambda *_: OffAndOn(3))
    stats = same_text(pair, inputs, space, max_new_tokens=40)
    agreement = [value for probe in stats.probes for row in probe.agreement for value in row]
    assert sum(agreement) / len(agreement) > 0.9


@in_both_spaces
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": list(range(3, 200))},
        {"forced_eos_token_id": 0},
    ],
    ids=["one", "two", "repetition", "ngrams", "suppressed", "forced"],
)
def test_settings_of_generate(pair: Pair, space: str, arguments: dict[str, Any]) -> None:
    same_text(pair, inputs_of(pair), space, **arguments)


@in_both_spaces
@pytest.mark.parametrize("prompt", ["T", "🙂", "naïve 中文 text — “quoted”", "<|turn|>The<|turn|>", " "])
def test_prompts_of_all_sorts(pair: Pair, space: str, prompt: str) -> None:
    same_text(pair, inputs_of(pair, [prompt]), space)


@in_both_spaces
def test_a_prompt_that_ends_inside_of_a_character(pair: Pair, space: str) -> None:
    ids = inputs_of(pair, ["gulls 🙂"])["input_ids"][:, :-2]
    assert "�" in pair.tokenizer.decode(ids[0])
    same_text(pair, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, space)


@in_both_spaces
def test_the_end_of_a_text_inside_of_a_round(pair: Pair, space: str) -> None:
    inputs = inputs_of(pair)
    text = plain(pair.target, inputs, max_new_tokens=20, pad_token_id=1)
    ends = [token_after(text[row], 4 + 3 * row, inputs["input_ids"].shape[1]) for row in range(2)]
    same_text(pair, inputs, space, eos_token_id=ends)


@in_both_spaces
def test_stop_strings_and_a_streamer(pair: Pair, space: str) -> None:
    inputs = inputs_of(pair, PROMPTS[:1])
    text = pair.tokenizer.decode(plain(pair.target, inputs, max_new_tokens=20, pad_token_id=1)[0])
    streamer = TextIteratorStreamer(pair.tokenizer)
    arguments = {"max_new_tokens": 20, "pad_token_id": 1, "stop_strings": [text[-4:-2]]}
    wanted = plain(pair.target, inputs, **arguments, tokenizer=pair.tokenizer)
    got = pair.target.generate(**inputs, do_sample=False, **arguments, streamer=streamer, **pair.settings(space))
    assert_same_ids(got, wanted)
    assert "".join(streamer) == pair.tokenizer.decode(got[0])


class Counting(LogitsProcessor):
    """Forbids another token with each call, so it must see the calls of plain decoding."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % scores.shape[1]] = -torch.inf
        return scores


@in_both_spaces
def test_rows_in_lockstep(pair: Pair, space: str) -> None:
    inputs = inputs_of(pair)
    text = plain(pair.target, inputs, max_new_tokens=20, pad_token_id=1)
    end = token_after(text[0], 5, inputs["input_ids"].shape[1])
    processors = Fresh(lambda: LogitsProcessorList([Counting()]))
    stats = same_text(pair, inputs, space, eos_token_id=end, logits_processor=processors)
    assert stats.is_lockstep


@in_both_spaces
def test_an_adaptive_length(pair: Pair, space: str) -> None:
    stats = same_text(pair, inputs_of(pair), space, "auto", max_new_tokens=60)
    assert max(stats.draft_lengths) > 0
    assert stats.controller_hints is not None


@in_both_spaces
def test_a_draft_on_the_compatible_lane(space: str) -> None:
    pair = Pair("unrelated")
    pair.draft = models.build_mamba(vocab_size=trained.build_for(pair.draft_tokenizer).config.vocab_size)
    inputs = inputs_of(pair)
    text = plain(pair.target, inputs, max_new_tokens=20, pad_token_id=1)
    end = token_after(text[0], 5, inputs["input_ids"].shape[1])
    for rows in (inputs, {name: value[-1:] for name, value in inputs.items()}):
        stats = same_text(pair, rows, space, eos_token_id=end)
        assert stats.draft_lane == "compatible"
        assert stats.num_draft_tokens > 0


@in_both_spaces
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_draft_tokens", [3, "auto"])
def test_a_recurrent_draft_that_cannot_write_everything(space: str, num_rows: int, num_draft_tokens: Any) -> None:
    pair = Pair("unrelated")
    pair.draft_tokenizer = trained.unigram()
    pair.draft = models.build_mamba(seed=5, vocab_size=-(-len(pair.draft_tokenizer) // 16) * 16)
    stats = same_text(pair, inputs_of(pair, PROMPTS[:num_rows]), space, num_draft_tokens, max_new_tokens=40)
    assert stats.draft_lane == "compatible"
    assert stats.fallbacks == []


def test_a_tokenizer_larger_than_the_drafts_vocabulary_is_not_the_drafts() -> None:
    pair = Pair("unrelated")
    pair.draft_tokenizer, pair.draft = pair.tokenizer, models.build_target()
    with pytest.raises(IncompatibleDraftError, match=r"has 400 tokens, and the draft knows 64"):
        pair.target.generate(**inputs_of(pair), **pair.settings())


@in_both_spaces
def test_a_draft_whose_own_context_ends(space: str) -> None:
    pair = Pair("unrelated")
    size = trained.build_for(pair.draft_tokenizer).config.vocab_size
    pair.draft = build_gpt2(30)
    pair.draft.resize_token_embeddings(size)
    inputs = inputs_of(pair, PROMPTS[:1])
    settings = {**pair.settings(space)}
    with pytest.warns(SpeculationWarning, match="context"):
        output = pair.target.generate(
            **inputs, max_new_tokens=40, do_sample=False, num_draft_tokens=3, return_dict_in_generate=True, **settings
        )
    assert_same_ids(output.sequences, plain(pair.target, inputs, max_new_tokens=40))
    assert output.speculation.num_draft_tokens > 0


# --- what goes wrong ------------------------------------------------------------------------------------------------


@in_both_spaces
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_draft_leaves_the_text_as_it_is(space: str, value: float) -> None:
    pair = Pair("identical")
    admit(pair.draft)
    inputs = inputs_of(pair)
    settings = pair.settings(space)
    settings["speculative_config"] = replace(settings["speculative_config"], strict=False)
    with spoiled(pair.draft, 4, value), pytest.warns(SpeculationWarning, match="NaN or infinite"):
        output = pair.target.generate(
            **inputs,
            **settings,
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=1,
            num_draft_tokens=3,
            return_dict_in_generate=True,
        )
    assert_same_ids(output.sequences, plain(pair.target, inputs, max_new_tokens=20, pad_token_id=1))


@in_both_spaces
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_broken_tokenizer_leaves_the_text_as_it_is(space: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("unrelated")
    inputs = inputs_of(pair, PROMPTS[:1])
    settings = pair.settings(space)
    settings["speculative_config"] = replace(settings["speculative_config"], strict=False)
    calls, name = itertools.count(1), "read" if space == "shared" else "reread"
    read = getattr(Translator, name)

    def failing(*args: Any) -> None:
        if next(calls) >= at:
            raise LookupError("no such token")
        read(*args)

    monkeypatch.setattr(Translator, name, failing)
    with pytest.warns(SpeculationWarning, match="no such token"):
        output = pair.target.generate(
            **inputs, **settings, do_sample=False, max_new_tokens=20, num_draft_tokens=3, return_dict_in_generate=True
        )
    assert_same_ids(output.sequences, plain(pair.target, inputs, max_new_tokens=20))
    assert len(output.speculation.fallbacks) == 1


# --- probes ---------------------------------------------------------------------------------------------------------


class OffAndOn(FixedDraftLength):
    """Drafts in every sixth round and probes before it."""

    def next_num_draft_tokens(self, outlook: Any) -> int:
        return 0 if outlook.num_shadow_tokens < 5 else 3

    def num_probe_tokens(self, outlook: Any) -> int:
        return 4 if outlook.num_shadow_tokens == 4 else 0

    def observe_probe(self, probe: Any) -> None:
        pass


@in_both_spaces
@pytest.mark.parametrize("is_recurrent", [False, True])
def test_probes_judge_text_that_the_draft_has_not_written(
    pair: Pair, space: str, is_recurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_recurrent:
        size = pair.draft.config.vocab_size
        pair.draft = models.build_mamba(vocab_size=size)
    monkeypatch.setattr("hf_specdec.call._controller", lambda *_: OffAndOn(3))
    stats = same_text(pair, inputs_of(pair), space, max_new_tokens=30)
    assert len(stats.probes) > 2
    agreement = [value for probe in stats.probes for row in probe.agreement for value in row]
    assert set(agreement) <= {0.0, 1.0}
    if space == "shared" and pair.kind == "identical" and not is_recurrent:
        assert sum(agreement) / len(agreement) > 0.99


# --- sampling -------------------------------------------------------------------------------------------------------


@in_both_spaces
@pytest.mark.parametrize("arguments", [{"top_k": 20}, {"top_k": 0, "top_p": 0.8}, {"num_return_sequences": 2}])
def test_sampling_runs_with_the_targets_processors(pair: Pair, space: str, arguments: dict[str, Any]) -> None:
    output = pair.target.generate(
        **inputs_of(pair),
        do_sample=True,
        max_new_tokens=12,
        pad_token_id=1,
        **arguments,
        **pair.settings(space),
        num_draft_tokens=3,
        return_dict_in_generate=True,
    )
    stats = output.speculation
    assert stats.fallbacks == []
    assert stats.num_draft_tokens > 0
    if space == "shared" and pair.kind == "identical":
        assert stats.acceptance_rate > 0.95


def characters(vocabulary: dict[str, int], merges: list[tuple[str, str]], special: str = "") -> Any:
    """Return a tokenizer of a few letters."""
    tokenizer = Tokenizer(kinds_of_tokenizer.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    if special:
        tokenizer.add_special_tokens([AddedToken(special, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def build_toy(size: int, seed: int) -> LlamaForCausalLM:
    return models.build_target(
        seed,
        vocab_size=size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        initializer_range=0.3,
        pad_token_id=None,
    )


class Branches:
    """Goes through everything that random numbers can decide, with the probability of each way."""

    def __init__(self) -> None:
        self.path: list[tuple[int, int]] = []
        self.depth = 0
        self.probability = 1.0

    def decide(self, probabilities: list[float]) -> int:
        if self.depth == len(self.path):
            self.path.append((0, len(probabilities)))
        choice = self.path[self.depth][0]
        self.depth += 1
        self.probability *= probabilities[choice]
        return choice

    def runs(self) -> Iterator[None]:
        while True:
            self.depth, self.probability = 0, 1.0
            yield
            while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
                self.path.pop()
            if not self.path:
                return
            choice, count = self.path.pop()
            self.path.append((choice + 1, count))


@pytest.mark.parametrize(("space", "seed"), [("shared", 1), ("text", 1), ("text", 4)])
def test_the_law_is_the_targets_by_enumeration(space: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way that the random numbers of a call can fall is taken; their probabilities give the law exactly."""
    tokenizer = characters({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    draft_tokenizer = characters({"b": 0, "a": 1}, [], special="<x>")
    target, draft = hf_specdec.enable(build_toy(3, seed=0)), build_toy(3, seed)
    branches = Branches()

    def multinomial(probs: Tensor, num_samples: int) -> Tensor:
        assert probs.shape[0] == num_samples == 1
        options = [(token, p) for token, p in enumerate(probs[0].double().tolist()) if p > 0]
        total = sum(p for _, p in options)
        return torch.tensor([[options[branches.decide([p / total for _, p in options])][0]]])

    rule = phases.token_verification

    def drawn(probs: Tensor, _: Any) -> Tensor:
        return multinomial(probs, 1).squeeze(1)

    def verification(draft_ids: Tensor, draft_probs: Tensor, target_probs: Tensor, *_: Any) -> Any:
        index = draft_ids[..., None]
        # The probability of each token to be accepted, found on the function itself: it flips at this uniform.
        low, high = torch.zeros(1, draft_ids.shape[1]).double(), torch.ones(1, draft_ids.shape[1]).double()
        ratios = target_probs[:, :-1].gather(2, index) / draft_probs.gather(2, index)
        chances = ratios.squeeze(2).clamp(max=1.0).double()
        uniforms = torch.where(chances > 0, low, high)[0].tolist()
        for position, chance in enumerate(chances[0].tolist()):
            ways = [(0.0, chance), (1.0, 1 - chance)] if 0 < chance < 1 else [(1.0 - chance, 1.0)]
            uniforms[position] = ways[branches.decide([p for _, p in ways])][0]
            if uniforms[position]:
                break
        return rule(draft_ids, draft_probs, target_probs, torch.tensor([uniforms]) * (1 - 1e-6))

    told, tell = set(), Translator.tell

    def noted(*args: Any) -> list[int]:
        tokens = tell(*args)
        told.add(len(tokens))
        return tokens

    monkeypatch.setattr(Translator, "tell", noted)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    monkeypatch.setattr(phases, "drawn", drawn)
    monkeypatch.setattr(model_drafter, "drawn_with", drawn)
    monkeypatch.setattr(phases, "token_verification", verification)
    prompt, num_tokens = torch.tensor([[0, 1, 2]]), 3 if space == "shared" else 4
    law: dict[tuple[int, ...], float] = {}
    proposed = set()
    config = SpeculativeConfig(
        draft_tokenizer=draft_tokenizer, token_space=space, verification="token", strict=True, num_draft_tokens=2
    )
    for _ in branches.runs():
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=0,
            max_new_tokens=num_tokens,
            draft_model=draft,
            tokenizer=tokenizer,
            speculative_config=config,
            return_dict_in_generate=True,
        )
        text = tuple(output.sequences[0, 3:].tolist())
        law[text] = law.get(text, 0.0) + branches.probability
        proposed |= outcomes_of(output.speculation.rounds)
    assert {"none", "full"} <= proposed
    # One draft often has nothing to say that the target could read; then the row is filled up.
    assert space == "shared" or (0 in told) == (seed == 4)
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-6)
    for text in itertools.product(range(3), repeat=num_tokens):
        with torch.no_grad():
            logits = target(torch.tensor([[0, 1, 2, *text]])).logits[0, 2:-1]
        wanted = logits.double().softmax(dim=-1)[range(num_tokens), list(text)].prod()
        assert math.isclose(law.get(text, 0.0), float(wanted), abs_tol=1e-6)


# --- which tokenizers -----------------------------------------------------------------------------------------------


def test_the_draft_is_not_changed(pair: Pair) -> None:
    before = state_of(pair.draft)
    for space in SPACES:
        same_text(pair, inputs_of(pair), space)
    assert state_of(pair.draft) == before


def test_tokenizers_are_found_where_the_models_came_from(tmp_path: Path) -> None:
    pair = Pair("noisy")
    for name, model, tokenizer in (
        ("target", pair.target, pair.tokenizer),
        ("draft", pair.draft, pair.draft_tokenizer),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    target = hf_specdec.enable(LlamaForCausalLM.from_pretrained(tmp_path / "target"))
    inputs = inputs_of(pair)
    for draft in (str(tmp_path / "draft"), LlamaForCausalLM.from_pretrained(tmp_path / "draft")):
        output = target.generate(
            **inputs, do_sample=False, max_new_tokens=12, draft_model=draft, return_dict_in_generate=True
        )
        assert output.speculation.token_space == "shared"
    assert_same_ids(output.sequences, plain(target, inputs, max_new_tokens=12))
    twin = LlamaForCausalLM.from_pretrained(tmp_path / "target")
    output = target.generate(
        **inputs, do_sample=False, max_new_tokens=12, draft_model=twin, return_dict_in_generate=True
    )
    assert output.speculation.token_space == "same"


def test_tokenizers_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, calls = Pair("noisy"), []
    compare: Callable[..., Any] = tokenizers.compare
    monkeypatch.setattr(tokenizers, "compare", lambda *args, **kwargs: calls.append(1) or compare(*args, **kwargs))
    for _ in range(3):
        same_text(pair, inputs_of(pair), "shared", max_new_tokens=3)
    assert len(calls) == 1


def test_auto_samples_in_shared_tokens_and_writes_text_where_the_drafts_tokens_are_longer() -> None:
    fine, coarse = models.build_byte_tokenizer(), trained.byte_level(700)
    target = hf_specdec.enable(trained.build_for(fine))
    draft = trained.build_for(coarse, seed=3)
    config = SpeculativeConfig(draft_tokenizer=coarse, strict=True)
    ids = fine("The keeper wrote that the boats came home", return_tensors="pt")["input_ids"]
    chosen = {}
    for do_sample in (False, True):
        output = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=do_sample,
            max_new_tokens=8,
            pad_token_id=0,
            draft_model=draft,
            tokenizer=fine,
            speculative_config=config,
            return_dict_in_generate=True,
        )
        chosen[do_sample] = output.speculation.token_space
    assert chosen == {False: "text", True: "shared"}


def test_refusals() -> None:
    pair = Pair("unrelated")
    inputs = inputs_of(pair)
    with pytest.raises(InvalidConfigError, match="draft_tokenizer="):
        pair.target.generate(**inputs, draft_model=pair.draft, assistant_tokenizer=pair.draft_tokenizer)
    with pytest.raises(InvalidConfigError, match="`draft_tokenizer` must be a transformers tokenizer"):
        SpeculativeConfig(draft_tokenizer="org/name")
    with pytest.raises(InvalidConfigError, match="`token_space` must be one of"):
        SpeculativeConfig(token_space="tokens")
    settings = pair.settings()
    del settings["tokenizer"]
    with pytest.raises(IncompatibleDraftError, match="none of the target's was given"):
        pair.target.generate(**inputs, **settings)
    strangers = characters({"ж": 0, "щ": 1}, [])
    config = SpeculativeConfig(draft_tokenizer=strangers)
    with pytest.raises(IncompatibleDraftError, match=r"target's 397 and the draft's 2 tokens 0 are the same"):
        pair.target.generate(**inputs, draft_model=build_toy(2, 0), tokenizer=pair.tokenizer, speculative_config=config)
    config = SpeculativeConfig(draft_tokenizer=pair.tokenizer)
    with pytest.raises(InvalidConfigError, match="only has a meaning with `draft_model`"):
        pair.target.generate(**inputs, speculative_config=config)


def test_a_model_with_an_encoder_takes_a_draft_with_another_tokenizer_too() -> None:
    tokenizer, draft_tokenizer = trained.unigram(), trained.byte_level()
    size = len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = T5ForConditionalGeneration(
            T5Config(
                vocab_size=size,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=1,
                num_heads=4,
                decoder_start_token_id=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        ).eval()
    hf_specdec.enable(target)
    draft = trained.build_for(draft_tokenizer)
    inputs = tokenizer(["The keeper wrote"], return_tensors="pt")
    arguments = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "max_new_tokens": 12}
    for space in SPACES:
        config = SpeculativeConfig(draft_tokenizer=draft_tokenizer, token_space=space, strict=True)
        output = target.generate(
            **arguments,
            do_sample=False,
            draft_model=draft,
            tokenizer=tokenizer,
            speculative_config=config,
            num_draft_tokens=3,
            return_dict_in_generate=True,
        )
        assert_same_ids(output.sequences, target.generate(**arguments, do_sample=False))
        assert output.speculation.num_draft_tokens > 0
    with_encoder = copy.deepcopy(target)
    with_encoder.resize_token_embeddings(len(draft_tokenizer), mean_resizing=False)
    with pytest.warns(SpeculationWarning, match="reads text alone"):
        target.generate(
            **arguments,
            do_sample=False,
            draft_model=with_encoder,
            tokenizer=tokenizer,
            speculative_config=SpeculativeConfig(draft_tokenizer=draft_tokenizer),
        )


# --- trained models and the tokenizers of well-known ones ---------------------------------------------------------


@in_both_spaces
def test_two_trained_models_with_tokenizers_of_their_own(real_data: Path, space: str) -> None:
    pair = load_demo_pair(num_parameters=0)
    folder = real_data / "stories260k"
    target = hf_specdec.enable(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Once upon a time, there was a little girl named Lily.", return_tensors="pt")["input_ids"]
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
    config = SpeculativeConfig(draft_tokenizer=pair.tokenizer, token_space=space, strict=True)
    output = target.generate(
        **arguments,
        draft_model=pair.draft,
        tokenizer=tokenizer,
        speculative_config=config,
        num_draft_tokens=3,
        return_dict_in_generate=True,
    )
    assert_same_ids(output.sequences, target.generate(**arguments))
    assert output.speculation.num_shared_tokens == 392


@pytest.fixture
def known_tokenizers() -> dict[str, Any]:
    """Return well-known tokenizers, or skip: their vocabularies are not ours to store."""
    root = os.environ.get("HF_SPECDEC_TOKENIZERS")
    folders = sorted(Path(root).glob("*/")) if root else []
    found = {folder.name: folder for folder in folders if (folder / "tokenizer.json").is_file()}
    if len(found) < 2:
        pytest.skip("needs two folders with a tokenizer.json each under HF_SPECDEC_TOKENIZERS")
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in found.items()}


@in_both_spaces
def test_well_known_tokenizers(known_tokenizers: dict[str, Any], space: str) -> None:
    names = list(known_tokenizers)
    for one, other in zip(names, names[1:] + names[:1], strict=True):
        tokenizer, draft_tokenizer = known_tokenizers[one], known_tokenizers[other]
        size = {"hidden_size": 16, "num_hidden_layers": 1}
        target = hf_specdec.enable(trained.build_for(tokenizer, **size))
        draft = trained.build_for(draft_tokenizer, seed=1, **size)
        ids = tokenizer("def count(boats): # naïve 🙂", return_tensors="pt")["input_ids"]
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
        output = target.generate(
            **arguments,
            do_sample=False,
            draft_model=draft,
            tokenizer=tokenizer,
            speculative_config=SpeculativeConfig(draft_tokenizer=draft_tokenizer, token_space=space, strict=True),
            num_draft_tokens=3,
            return_dict_in_generate=True,
        )
        assert_same_ids(output.sequences, target.generate(**arguments, do_sample=False))
        assert output.speculation.num_draft_tokens > 0
        assert output.speculation.num_shared_tokens > 20_000
