"""A call leaves no trace: not in models, configs, classes, random numbers or memory, and not in calls beside it."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.comparing import KINDS
from integration.harness import PROMPT, RaisingProcessor, admit, failing, greedy, prompts_of, state_of, watched
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LlamaForCausalLM, PreTrainedModel

import hf_specdec
import models
from hf_specdec import SpeculativeConfig, SpeculativeGenerationMixin
from hf_specdec import generation as extension
from hf_specdec.engine import probe

Drafts = dict[str, LlamaForCausalLM]
NUM_TOKENS = 12


@pytest.fixture
def fresh_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which models passed the trial forwards."""
    monkeypatch.setattr(probe, "_verdicts", {})


@pytest.fixture
def everywhere() -> Any:
    """Let every model of the process take a draft, and undo it."""
    hf_specdec.enable()
    yield
    hf_specdec.disable()


def build_own_draft() -> LlamaForCausalLM:
    """Return a draft of another shape than the target, so that it has trial forwards of its own."""
    return models.build_target(num_hidden_layers=1)


# ---- models and configs ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_call_leaves_both_models_as_they_were(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int, do_sample: bool
) -> None:
    draft = drafts[kind]
    hf_specdec.enable(target)
    before = state_of(target), state_of(draft)
    target.generate(
        **prompts_of(batch), do_sample=do_sample, max_new_tokens=NUM_TOKENS, num_draft_tokens=3, draft_model=draft
    )
    assert (state_of(target), state_of(draft)) == before


FAILURES = ["draft", "processor", "interrupt in the target", "interrupt in the draft", "interrupt in on_round"]


def arrange_failure(
    failure: str, target: PreTrainedModel, draft: PreTrainedModel
) -> tuple[AbstractContextManager[None], dict[str, Any]]:
    """Return what makes a call fail: a context to call in, and arguments of the call."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    if failure == "draft":
        return failing(draft, 3, RuntimeError("boom")), {"speculative_config": {"strict": True}}
    if failure == "processor":
        return nullcontext(), {"logits_processor": [RaisingProcessor(4, RuntimeError("boom"))]}
    if failure == "interrupt in on_round":
        return nullcontext(), {"speculative_config": {"on_round": interrupt}}
    return failing(target if "target" in failure else draft, 3, KeyboardInterrupt()), {}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_failed_call_leaves_both_models_as_they_were(
    target: LlamaForCausalLM, drafts: Drafts, failure: str, batch: int
) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    wanted = greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS)
    before = state_of(target), state_of(draft)
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "draft_model": draft}
    context, breaking = arrange_failure(failure, target, draft)
    with context, pytest.raises((RuntimeError, KeyboardInterrupt)):
        greedy(target, prompts_of(batch), **options, **breaking)
    assert (state_of(target), state_of(draft)) == before
    assert torch.equal(greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS), wanted)
    assert torch.equal(greedy(target, prompts_of(batch), **options), wanted)


@pytest.mark.usefixtures("fresh_verdicts")
def test_an_interrupt_in_the_trial_forwards_leaves_the_models_as_they_were(target: LlamaForCausalLM) -> None:
    draft = build_own_draft().train()
    hf_specdec.enable(target)
    before = state_of(target), state_of(draft)
    random_state = torch.get_rng_state()
    with failing(draft, 2, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert (state_of(target), state_of(draft)) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_callers_arguments_are_not_changed(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    tokenizer = models.build_tokenizer()
    config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, stop_strings=["zz"], pad_token_id=0)
    before = config.to_dict()
    criteria: list[Any] = []
    settings = {"num_draft_tokens": 3}
    inputs = prompts_of(3)
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    target.generate(
        **inputs,
        generation_config=config,
        tokenizer=tokenizer,
        stopping_criteria=criteria,
        draft_model=drafts["noisy"],
        speculative_config=settings,
    )
    assert config.to_dict() == before
    assert criteria == []
    assert settings == {"num_draft_tokens": 3}
    for name, tensor in inputs.items():
        assert torch.equal(tensor, copies[name])


def test_the_output_carries_no_gradients(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    output = greedy(
        target,
        PROMPT,
        max_new_tokens=4,
        draft_model=drafts["noisy"],
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert not any(logits.requires_grad for logits in output.logits)
    target(PROMPT, labels=PROMPT).loss.backward()
    assert target.lm_head.weight.grad is not None


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_call_in_inference_mode_does_not_spoil_later_training(target: LlamaForCausalLM) -> None:
    draft = build_own_draft()
    hf_specdec.enable(target)
    with torch.inference_mode():
        first = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert torch.equal(greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft), first)
    for model in (target, draft):
        model(PROMPT, labels=PROMPT).loss.backward()


# ---- training mode, and one model in two roles -----------------------------------------------------------------


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_target_in_training_mode_gives_the_plain_text_and_stays_in_it(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    target.train()
    drafts[kind].train()
    drafts[kind].model.layers[0].eval()
    before = state_of(target), state_of(drafts[kind])
    output = greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS, draft_model=drafts[kind])
    assert torch.equal(output, greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS))
    assert (state_of(target), state_of(drafts[kind])) == before


@pytest.mark.parametrize("batch", [1, 3])
def test_a_target_can_be_its_own_draft(target: LlamaForCausalLM, batch: int) -> None:
    hf_specdec.enable(target)
    output = greedy(
        target, prompts_of(batch), max_new_tokens=NUM_TOKENS, draft_model=target, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS))
    assert output.speculation.acceptance_rate == 1.0


def test_two_targets_can_share_a_draft_and_take_turns(target: LlamaForCausalLM, drafts: Drafts) -> None:
    other = models.build_target(seed=5)
    draft = drafts["noisy"]
    wanted = [greedy(model, PROMPT, max_new_tokens=NUM_TOKENS) for model in (target, other)]
    for model in (target, other):
        hf_specdec.enable(model)
    for _ in range(2):
        for model, text in zip((target, other), wanted, strict=True):
            assert torch.equal(greedy(model, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft), text)


# ---- random numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_a_seed_gives_the_same_text_whether_or_not_the_trial_forwards_ran(
    target: LlamaForCausalLM, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = build_own_draft()
    hf_specdec.enable(target)
    monkeypatch.setattr(probe, "_verdicts", {})
    texts = []
    for has_run in (False, True):
        assert bool(probe._verdicts) == has_run
        torch.manual_seed(7)
        # Fixed, for adaptive lengths follow measured times.
        options = {"draft_model": draft, "num_draft_tokens": 5}
        texts.append(target.generate(**prompts_of(batch), do_sample=True, max_new_tokens=NUM_TOKENS, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["rows apart", "lockstep"])
def test_a_seed_gives_the_same_text_whatever_the_default_precision(
    target: LlamaForCausalLM, drafts: Drafts, dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_specdec.enable(target)
    drawn: set[torch.dtype] = set()
    draw = torch.rand

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        numbers = draw(*args, **kwargs)
        drawn.add(numbers.dtype)
        return numbers

    monkeypatch.setattr(torch, "rand", note)
    # A processor that is not one of the host's makes rows move in lockstep, with draws of its own.
    options = {"logits_processor": [RaisingProcessor(-1, ValueError())]} if mode == "lockstep" else {}
    options |= {"draft_model": drafts["noisy"], "num_draft_tokens": 5}
    texts = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            torch.manual_seed(3)
            texts.append(target.generate(**prompts_of(3), do_sample=True, max_new_tokens=40, **options))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*texts)
    # With 8 bits, one number in 256 would be 0 and accept anything.
    assert drawn <= {torch.float32}


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_uses_no_randomness(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    hf_specdec.enable(target)
    before = torch.get_rng_state()
    greedy(target, prompts_of(3), max_new_tokens=NUM_TOKENS, draft_model=drafts[kind])
    assert torch.equal(torch.get_rng_state(), before)


# ---- threads ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_verdicts")
def test_two_threads_with_one_pair_give_the_texts_they_give_alone(target: LlamaForCausalLM) -> None:
    draft = build_own_draft()
    prompts = [PROMPT, torch.tensor([[40, 41, 42, 43]])]
    wanted = [greedy(target, prompt, max_new_tokens=NUM_TOKENS) for prompt in prompts]
    hf_specdec.enable(target)
    start = threading.Barrier(2)
    texts: list[list[torch.Tensor]] = [[], []]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            start.wait(60)
            for _ in range(6):
                texts[index].append(greedy(target, prompts[index], max_new_tokens=NUM_TOKENS, draft_model=draft))
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for index in range(2):
        assert len(texts[index]) == 6
        assert all(torch.equal(text, wanted[index]) for text in texts[index])


@pytest.mark.usefixtures("fresh_verdicts")
def test_two_threads_leave_a_training_model_in_training_mode(target: LlamaForCausalLM) -> None:
    target.train()
    hf_specdec.enable(target)
    before = state_of(target)
    drafts = [models.build_target(seed=seed) for seed in (1, 2)]
    threads = [
        threading.Thread(target=greedy, args=(target, PROMPT), kwargs={"max_new_tokens": 4, "draft_model": draft})
        for draft in drafts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state_of(target) == before


# ---- memory ----------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    # `isinstance` would ask the objects themselves, and some of the host's warn when asked.
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
def test_three_hundred_calls_keep_nothing() -> None:
    target = models.build_target(num_hidden_layers=1)
    draft = models.build_noisy(target)
    hf_specdec.enable(target)
    inputs = prompts_of(3)

    def call(number: int) -> None:
        options = {"max_new_tokens": 3, "draft_model": draft}
        if number % 3 == 0:
            greedy(target, PROMPT, return_dict_in_generate=True, output_scores=True, **options)
        elif number % 3 == 1:
            greedy(target, inputs, eos_token_id=20, **options)
        else:
            processors = [RaisingProcessor(2, ZeroDivisionError("boom"))]
            with pytest.raises(ZeroDivisionError):
                greedy(target, PROMPT, logits_processor=processors, **options)

    for number in range(60):
        call(number)
    num_tensors, num_objects = live_tensors(), len(gc.get_objects())
    for number in range(240):
        call(number)
    assert live_tensors() == num_tensors
    # One kept list, record or session per call would be 240.
    assert len(gc.get_objects()) - num_objects < 120


@pytest.mark.parametrize("by_name", [False, True], ids=["model", "folder"])
def test_models_are_freed_with_their_last_reference(tmp_path: Path, by_name: bool) -> None:
    target = models.build_target(seed=3)
    draft = models.build_target(seed=4)
    hf_specdec.enable(target)
    if by_name:
        models.save_tiny_model(tmp_path)
    greedy(target, PROMPT, max_new_tokens=4, draft_model=str(tmp_path) if by_name else draft)
    references = [weakref.ref(target), weakref.ref(draft)]
    del target, draft
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# ---- without a draft -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"draft_model": None}], ids=["left out", "None"])
def test_without_a_draft_the_hosts_generate_gets_the_call_unchanged(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    hf_specdec.enable(target)
    calls: list[Any] = []
    answer = object()

    def host(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((self, args, kwargs))
        return answer

    monkeypatch.setattr(GenerationMixin, "generate", host)
    config = GenerationConfig()
    assert target.generate(PROMPT, config, max_new_tokens=3, strange=1, **options) is answer
    [(model, args, kwargs)] = calls
    assert model is target
    assert args[0] is PROMPT
    assert args[1] is config
    assert kwargs == {"max_new_tokens": 3, "strange": 1}


@pytest.mark.usefixtures("fresh_verdicts")
def test_without_a_draft_there_is_one_forward_per_token(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)
    with watched(target) as widths:
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS)
    assert widths == [PROMPT.shape[1]] + [1] * (NUM_TOKENS - 1)


def test_a_call_without_a_draft_after_one_with_it_runs_no_draft(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    with watched(target) as of_target, watched(draft) as of_draft:
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS)
    assert (len(of_target), len(of_draft)) == (NUM_TOKENS, 0)


# ---- enable and disable ----------------------------------------------------------------------------------------


def test_importing_changes_nothing(target: LlamaForCausalLM, drafts: Drafts) -> None:
    assert GenerationMixin.generate is extension._host_generate
    with pytest.raises(ValueError, match=r"not used by the model.*draft_model"):
        greedy(target, PROMPT, max_new_tokens=3, draft_model=drafts["noisy"])


def test_enable_and_disable_return_the_model_and_give_its_class_back(target: LlamaForCausalLM) -> None:
    assert type(target) is LlamaForCausalLM
    before = state_of(target)
    assert hf_specdec.enable(target) is target
    assert isinstance(target, SpeculativeGenerationMixin)
    assert isinstance(target, LlamaForCausalLM)
    assert hf_specdec.disable(target) is target
    assert type(target) is LlamaForCausalLM
    assert state_of(target) == before


def test_enabling_twice_is_enabling_once(target: LlamaForCausalLM) -> None:
    enabled = type(hf_specdec.enable(target))
    assert type(hf_specdec.enable(target)) is enabled
    hf_specdec.disable(target)
    hf_specdec.disable(target)
    assert type(target) is LlamaForCausalLM


def test_a_disabled_model_knows_no_draft(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.disable(hf_specdec.enable(target))
    with pytest.raises(ValueError, match="draft_model"):
        greedy(target, PROMPT, max_new_tokens=3, draft_model=drafts["noisy"])


def test_enabling_one_model_leaves_others_alone(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    assert type(drafts["noisy"]) is LlamaForCausalLM
    with pytest.raises(ValueError, match="draft_model"):
        greedy(drafts["noisy"], PROMPT, max_new_tokens=3, draft_model=target)


def test_an_enabled_model_is_saved_like_any_other(target: LlamaForCausalLM, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "before")
    hf_specdec.enable(target)
    target.save_pretrained(tmp_path / "after")
    saved = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after")]
    assert saved[0]["architectures"] == ["LlamaForCausalLM"]
    assert saved[1] == saved[0]
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("before", "after")]
    assert names[1] == names[0]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "after")) is LlamaForCausalLM


def test_a_deep_copy_of_an_enabled_model_is_enabled(target: LlamaForCausalLM, drafts: Drafts) -> None:
    twin = copy.deepcopy(hf_specdec.enable(target))
    output = greedy(twin, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts["noisy"])
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))
    hf_specdec.disable(twin)
    assert type(twin) is LlamaForCausalLM
    assert isinstance(target, SpeculativeGenerationMixin)


def test_an_enabled_model_can_be_pickled(target: LlamaForCausalLM) -> None:
    wanted = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS)
    revived = pickle.loads(pickle.dumps(hf_specdec.enable(target)))
    assert torch.equal(greedy(revived, PROMPT, max_new_tokens=NUM_TOKENS), wanted)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("kind", KINDS)
def test_enabling_everything_reaches_a_model_that_was_never_named(
    target: LlamaForCausalLM, drafts: Drafts, kind: str
) -> None:
    assert type(target) is LlamaForCausalLM
    output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts[kind], return_dict_in_generate=True)
    assert isinstance(output, hf_specdec.SpeculativeDecoderOnlyOutput)
    assert torch.equal(output.sequences, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


@pytest.mark.usefixtures("everywhere")
def test_enabling_everything_and_one_model_go_together(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts["noisy"])
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


def test_disabling_everything_restores_the_host(target: LlamaForCausalLM, drafts: Drafts) -> None:
    original = GenerationMixin.generate
    hf_specdec.enable()
    hf_specdec.enable()
    assert GenerationMixin.generate is not original
    hf_specdec.disable()
    assert GenerationMixin.generate is original
    with pytest.raises(ValueError, match="draft_model"):
        greedy(target, PROMPT, max_new_tokens=3, draft_model=drafts["noisy"])


# ---- subclasses ------------------------------------------------------------------------------------------------


class MyLM(SpeculativeGenerationMixin, LlamaForCausalLM):
    """What a library author writes."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_with_the_mixin_takes_a_draft(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    model = MyLM(target.config).eval()
    model.load_state_dict(target.state_dict())
    output = greedy(
        model, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts[kind], speculative_config=SpeculativeConfig()
    )
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


def test_a_class_with_the_mixin_stays_what_it_is(target: LlamaForCausalLM) -> None:
    model: PreTrainedModel = MyLM(target.config)
    assert type(hf_specdec.enable(model)) is MyLM
    assert type(hf_specdec.disable(model)) is MyLM
