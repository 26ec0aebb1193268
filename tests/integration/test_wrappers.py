"""Models as people hold them: adapters, compiled modules, pipelines, and drafts that are a folder on disk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from integration.comparing import KINDS
from integration.harness import PROMPT, greedy, prompts_of, state_of
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

import hf_specdec
import models

Drafts = dict[str, LlamaForCausalLM]
NUM_TOKENS = 12


def same_as_plain(model: Any, draft: Any, batch: int = 1, **options: Any) -> Any:
    """Assert the plain text and return the statistics."""
    inputs = prompts_of(batch)
    output = greedy(
        model, inputs, max_new_tokens=NUM_TOKENS, draft_model=draft, return_dict_in_generate=True, **options
    )
    assert torch.equal(output.sequences, greedy(model, inputs, max_new_tokens=NUM_TOKENS))
    assert output.speculation.fallbacks == []
    return output.speculation


# ---- adapters --------------------------------------------------------------------------------------------------


def with_adapter(model: LlamaForCausalLM, seed: int = 0) -> Any:
    """Return a copy with random LoRA weights that change its text."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # PEFT still reads `is_gradient_checkpointing`, which transformers 5.24 has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(copy.deepcopy(model), config).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_target_with_an_adapter_takes_a_draft(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    adapted = with_adapter(target)
    plain = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS)
    assert hf_specdec.enable(adapted) is adapted
    same_as_plain(adapted, drafts[kind], batch)
    assert not torch.equal(greedy(adapted, PROMPT, max_new_tokens=NUM_TOKENS), plain), "the adapter does nothing"


def test_an_adapter_of_the_draft_is_used(target: LlamaForCausalLM) -> None:
    adapted = with_adapter(target)
    hf_specdec.enable(adapted)
    assert same_as_plain(adapted, with_adapter(target)).acceptance_rate == 1.0
    assert same_as_plain(adapted, target).acceptance_rate < 1.0


def test_an_adapter_that_is_switched_off_stays_off(target: LlamaForCausalLM) -> None:
    adapted = with_adapter(target)
    hf_specdec.enable(adapted)
    with adapted.disable_adapter():
        output = greedy(adapted, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=with_adapter(target, seed=1))
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


def test_an_adapted_model_gets_its_class_back(target: LlamaForCausalLM) -> None:
    adapted = with_adapter(target)
    outer = type(adapted)
    hf_specdec.enable(adapted)
    assert type(adapted) is outer
    assert type(adapted.get_base_model()) is not LlamaForCausalLM
    hf_specdec.disable(adapted)
    assert type(adapted.get_base_model()) is LlamaForCausalLM


def test_a_call_leaves_an_adapted_pair_as_it_was(target: LlamaForCausalLM) -> None:
    adapted, draft = with_adapter(target), with_adapter(target, seed=1)
    hf_specdec.enable(adapted)
    before = state_of(adapted.get_base_model()), state_of(draft.get_base_model())
    greedy(adapted, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert (state_of(adapted.get_base_model()), state_of(draft.get_base_model())) == before


def test_a_learned_prompt_is_refused(target: LlamaForCausalLM) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        adapted = peft.get_peft_model(target, config)
    with pytest.raises(hf_specdec.UnsupportedGenerationError, match=r"prompt of tokens.*such as LoRA"):
        hf_specdec.enable(adapted)


# ---- torch.compile ---------------------------------------------------------------------------------------------


@pytest.fixture
def _small_compiler() -> Iterator[None]:
    """Compile two variants of a function at most, then run it as it is; and keep nothing for other tests."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_small_compiler")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_compiled_forward_gives_the_plain_text_and_stays_compiled(role: str) -> None:
    target = models.build_target(num_hidden_layers=1)
    draft = models.build_noisy(target)
    subject = target if role == "target" else draft
    subject.forward = torch.compile(subject.forward, backend="eager")
    compiled = subject.forward
    hf_specdec.enable(target)
    same_as_plain(target, draft, batch=3)
    assert subject.forward is compiled


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_module_takes_a_draft(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    compiled = torch.compile(target, backend="eager")
    assert hf_specdec.enable(compiled) is compiled
    same_as_plain(compiled, drafts[kind])
    hf_specdec.disable(compiled)
    assert type(target) is LlamaForCausalLM


def test_a_draft_may_be_a_compiled_module(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    draft = torch.compile(drafts["identical"], backend="eager")
    assert same_as_plain(target, draft).acceptance_rate == 1.0


# ---- models spread by accelerate -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_models_with_the_hooks_of_a_device_map_go_together(target: LlamaForCausalLM, batch: int) -> None:
    draft = models.build_noisy(target)
    target, draft = (dispatch_model(model, device_map={"": "cpu"}, force_hooks=True) for model in (target, draft))
    hf_specdec.enable(target)
    same_as_plain(target, draft, batch)


# ---- pipelines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", ["hello world", ["hello world", "good"]], ids=["one text", "batch"])
def test_a_pipeline_passes_the_draft_on(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast, kind: str, texts: Any
) -> None:
    hf_specdec.enable(target)
    generate = pipeline("text-generation", model=target, tokenizer=tokenizer)
    seen: list[Any] = []
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "batch_size": 2}
    output = generate(
        texts,
        draft_model=drafts[kind],
        num_draft_tokens=3,
        speculative_config={"on_round": seen.append},
        **options,
    )
    assert output == generate(texts, **options)
    assert seen


def test_a_pipeline_can_keep_the_draft(
    target: LlamaForCausalLM, drafts: Drafts, tokenizer: PreTrainedTokenizerFast
) -> None:
    hf_specdec.enable(target)
    seen: list[Any] = []
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    drafted = pipeline(
        "text-generation",
        model=target,
        tokenizer=tokenizer,
        draft_model=drafts["noisy"],
        speculative_config={"on_round": seen.append},
        **options,
    )
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer, **options)
    assert drafted("hello") == plain("hello")
    assert seen


# ---- drafts by folder ------------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what is loaded by name."""
    recorded: list[Any] = []
    load = AutoModelForCausalLM.from_pretrained

    def note(name: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(name, *args, **kwargs)
        recorded.append((model, kwargs))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", note)
    return recorded


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    """A folder that holds the target's weights, so that every draft token is accepted."""
    return models.save_tiny_model(tmp_path / "draft")


@pytest.mark.parametrize("form", [str, Path])
def test_a_folder_is_loaded_once_and_drafts(
    target: LlamaForCausalLM, draft_folder: Path, loads: list[Any], form: type
) -> None:
    hf_specdec.enable(target)
    for _ in range(3):
        assert same_as_plain(target, form(draft_folder)).acceptance_rate == 1.0
    assert len(loads) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_by_folder_equals_the_same_draft_by_object(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, tmp_path: Path
) -> None:
    drafts[kind].save_pretrained(tmp_path)
    hf_specdec.enable(target)
    by_folder, by_object = (same_as_plain(target, draft) for draft in (str(tmp_path), drafts[kind]))
    assert by_folder.acceptance_histogram == by_object.acceptance_histogram


def test_a_draft_by_folder_is_loaded_safely(target: LlamaForCausalLM, draft_folder: Path, loads: list[Any]) -> None:
    hf_specdec.enable(target)
    same_as_plain(target, str(draft_folder))
    [(_, options)] = loads
    assert options["use_safetensors"] is True
    assert options["trust_remote_code"] is False


def test_disabling_frees_the_loaded_draft(target: LlamaForCausalLM, draft_folder: Path, loads: list[Any]) -> None:
    hf_specdec.enable(target)
    same_as_plain(target, str(draft_folder))
    hf_specdec.disable(target)
    hf_specdec.enable(target)
    same_as_plain(target, str(draft_folder))
    assert len(loads) == 2


def test_each_target_loads_its_own_draft(target: LlamaForCausalLM, draft_folder: Path, loads: list[Any]) -> None:
    other = models.build_target(seed=1)
    for model in (target, other):
        hf_specdec.enable(model)
        same_as_plain(model, str(draft_folder))
    assert len(loads) == 2


def test_a_draft_by_folder_takes_the_targets_precision(
    target: LlamaForCausalLM, drafts: Drafts, tmp_path: Path, loads: list[Any]
) -> None:
    drafts["identical"].to(torch.bfloat16).save_pretrained(tmp_path)
    hf_specdec.enable(target)
    # Its weights were rounded once, on disk, so it agrees with the target often but not always.
    assert same_as_plain(target, str(tmp_path)).num_accepted_tokens > 0
    [((draft, _report), _)] = loads
    assert {weight.dtype for weight in draft.parameters()} == {torch.float32}


def test_a_draft_by_folder_leaves_the_global_precision_alone(target: LlamaForCausalLM, draft_folder: Path) -> None:
    hf_specdec.enable(target)
    before = torch.get_default_dtype()
    same_as_plain(target, str(draft_folder))
    assert torch.get_default_dtype() == before


def test_an_enabled_target_saved_to_disk_can_be_a_draft(target: LlamaForCausalLM, tmp_path: Path) -> None:
    hf_specdec.enable(target)
    target.save_pretrained(tmp_path)
    assert same_as_plain(target, str(tmp_path)).acceptance_rate == 1.0
