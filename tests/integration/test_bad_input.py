"""What a caller can get wrong, and drafts that break: an error before any work, or the plain text and one warning."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.comparing import KINDS
from integration.harness import (
    PROMPT,
    admit,
    build_gpt2,
    failing,
    greedy,
    prompts_of,
    spoiled,
    state_of,
    token_after,
    watched,
)
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_specdec
import models
from hf_specdec import (
    DraftFailedError,
    DraftLoadError,
    IncompatibleDraftError,
    InvalidConfigError,
    SpecDecError,
    SpeculationWarning,
    SpeculativeConfig,
    UnsupportedGenerationError,
)
from hf_specdec.config import FOREIGN_SPELLINGS
from hf_specdec.engine import probe
from hf_specdec.engine.forward import Lane

Drafts = dict[str, LlamaForCausalLM]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def pair() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """An enabled target and a noisy draft; shared, since every test here asserts that neither changes."""
    target = models.build_target()
    draft = models.build_noisy(target)
    hf_specdec.enable(target)
    return target, draft


@pytest.fixture
def fresh_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which models passed the trial forwards."""
    monkeypatch.setattr(probe, "_verdicts", {})


STRICT = {"strict": True}


def build_t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=models.VOCAB_SIZE,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        initializer_factor=6.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config).eval()


def folder_without_model(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no model here")
    return folder


def folder_with_a_pickle(folder: Path) -> Path:
    models.save_tiny_model(folder)
    weights = folder / "model.safetensors"
    weights.unlink()
    torch.save(models.build_target().state_dict(), folder / "pytorch_model.bin")
    return folder


def folder_with_cut_weights(folder: Path) -> Path:
    models.save_tiny_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


def folder_with_wrong_weights(folder: Path) -> Path:
    models.save_tiny_model(folder)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    return folder


# ---- errors before any work ------------------------------------------------------------------------------------

Embed = Callable[[LlamaForCausalLM], dict[str, Any]]


def refused(
    pair: tuple[PreTrainedModel, PreTrainedModel],
    error: type[Exception],
    told: list[str],
    inputs: dict[str, Any] | torch.Tensor = PROMPT,
    **options: Any,
) -> None:
    """Assert an error of this type that tells rule, value and remedy, before any forward and without a trace."""
    target, draft = pair
    before = state_of(target), state_of(draft)
    random_state = torch.get_rng_state()
    arguments = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    arguments |= {"max_new_tokens": NUM_TOKENS, "do_sample": False, "draft_model": draft} | options
    with watched(target) as of_target, watched(draft) as of_draft, pytest.raises(error) as raised:
        target.generate(**arguments)
    message = str(raised.value)
    for part in told:
        assert part in message
    assert (of_target, of_draft) == ([], [])
    assert (state_of(target), state_of(draft)) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert isinstance(raised.value, SpecDecError)


# Each row: arguments, error, and what the message must tell: rule, value received, remedy.
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "beam search": (
        {"num_beams": 2},
        UnsupportedGenerationError,
        ["`num_beams` must be 1", "but is 2", "leave out `draft_model`"],
    ),
    "no cache": (
        {"use_cache": False},
        UnsupportedGenerationError,
        ["continues from a cache", "`use_cache=False`", "Leave `use_cache` out"],
    ),
    "several ranks": (
        {"synced_gpus": True},
        UnsupportedGenerationError,
        ["must run the same forwards", "synced_gpus", "leave out `draft_model`"],
    ),
    "own decoding loop": (
        {"custom_generate": print},
        UnsupportedGenerationError,
        ["`custom_generate` replaces", "both were given", "Pass only one"],
    ),
    "contrastive search": (
        {"penalty_alpha": 0.6, "top_k": 4},
        UnsupportedGenerationError,
        ["works with greedy search and sampling", "contrastive", "Leave out"],
    ),
    "contrastive search with the default top_k": (
        {"penalty_alpha": 0.6},
        UnsupportedGenerationError,
        ["works with greedy search and sampling", "contrastive", "Leave out"],
    ),
    "DoLa": (
        {"dola_layers": "high"},
        UnsupportedGenerationError,
        ["works with greedy search and sampling", "dola", "Leave out"],
    ),
    "prompt lookup": (
        {"prompt_lookup_num_tokens": 3},
        UnsupportedGenerationError,
        ["two ways to speculate", "`prompt_lookup_num_tokens`", "Pass only one"],
    ),
    "early exit": (
        {"assistant_early_exit": 1},
        UnsupportedGenerationError,
        ["two ways to speculate", "`assistant_early_exit`", "Pass only one"],
    ),
    "multi-token prediction": (
        {"use_mtp": True},
        UnsupportedGenerationError,
        ["two ways to speculate", "`use_mtp`", "Pass only one"],
    ),
    "quantized cache": (
        {"cache_implementation": "quantized"},
        UnsupportedGenerationError,
        ["must stay on the device in the model's precision", "'quantized'", "Leave it out"],
    ),
    "offloaded cache": (
        {"cache_implementation": "offloaded"},
        UnsupportedGenerationError,
        ["must stay on the device in the model's precision", "'offloaded'", "Leave it out"],
    ),
    "offloaded static cache": (
        {"cache_implementation": "offloaded_static"},
        UnsupportedGenerationError,
        ["must stay on the device in the model's precision", "'offloaded_static'", "Leave it out"],
    ),
    "offloaded cache by its older name": (
        {"cache_implementation": "offloaded_hybrid"},
        UnsupportedGenerationError,
        ["must stay on the device in the model's precision", "'offloaded_hybrid'", "Leave it out"],
    ),
    "stop strings without a tokenizer": (
        {"stop_strings": ["ab"]},
        UnsupportedGenerationError,
        ["matched by their tokens", "no `tokenizer` was given", "Pass the target's `tokenizer=`"],
    ),
    "no tokens": (
        {"input_ids": PROMPT[:, :0]},
        UnsupportedGenerationError,
        ["must hold at least one token", "it is empty", "(BOS)"],
    ),
    "no draft tokens": (
        {"num_draft_tokens": 0},
        InvalidConfigError,
        ["between 1 and 256", "but is 0", "leave out `draft_model`"],
    ),
    "fewer than no draft tokens": (
        {"num_draft_tokens": -1},
        InvalidConfigError,
        ["between 1 and 256", "but is -1", "leave out `draft_model`"],
    ),
    "a bool as number": (
        {"num_draft_tokens": True},
        InvalidConfigError,
        ["between 1 and 256", "but is True (bool)", "or pass an int"],
    ),
    "too many draft tokens": (
        {"num_draft_tokens": 10**9},
        InvalidConfigError,
        ["between 1 and 256", "but is 1000000000", "Values from 3 to 10"],
    ),
    "a fraction of draft tokens": (
        {"num_draft_tokens": 2.5},
        InvalidConfigError,
        ["between 1 and 256", "but is 2.5 (float)", "or pass an int"],
    ),
    "a word as number": (
        {"num_draft_tokens": "five"},
        InvalidConfigError,
        ["between 1 and 256", "but is 'five' (str)", "or pass an int"],
    ),
    "two draft lengths": (
        {"num_draft_tokens": 3, "speculative_config": {"num_draft_tokens": 4}},
        InvalidConfigError,
        ["must have one value", "3 as a keyword", "4 in `speculative_config`", "Leave one of them out"],
    ),
    "near miss of a setting": (
        {"speculative_config": {"num_draft_token": 3}},
        InvalidConfigError,
        ["has no setting `num_draft_token`", "Did you mean `num_draft_tokens`?"],
    ),
    "near miss of another setting": (
        {"speculative_config": {"on_rounds": print}},
        InvalidConfigError,
        ["has no setting `on_rounds`", "Did you mean `on_round`?"],
    ),
    "settings of another type": (
        {"speculative_config": 5},
        InvalidConfigError,
        ["must be a SpeculativeConfig, a mapping or None", "but is 5 (int)", "SpeculativeConfig("],
    ),
    "a number as draft": (
        {"draft_model": 123},
        IncompatibleDraftError,
        ["must be a loaded transformers model", "but is int", "from_pretrained"],
    ),
    "settings without a draft": (
        {"draft_model": None, "num_draft_tokens": 3},
        InvalidConfigError,
        ["only has a meaning with `draft_model`", "no draft was given", "Pass `draft_model=`"],
    ),
    "a config without a draft": (
        {"draft_model": None, "speculative_config": SpeculativeConfig(strict=True)},
        InvalidConfigError,
        ["only has a meaning with `draft_model`", "no draft was given", "Pass `draft_model=`"],
    ),
}


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_refused_before_any_work(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM], case: str
) -> None:
    options, error, told = REFUSED[case]
    refused(pair, error, told, **options)


@pytest.mark.usefixtures("fresh_verdicts")
def test_an_assistant_at_the_same_time_is_refused(pair: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    told = ["two ways to speculate", "both were given", "Pass only one"]
    refused(pair, UnsupportedGenerationError, told, assistant_model=pair[1])


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_setting_in_a_generation_config_is_refused_as_well(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM],
) -> None:
    config = copy.deepcopy(pair[0].generation_config)
    config.num_beams = 3
    before = config.to_dict()
    refused(pair, UnsupportedGenerationError, ["`num_beams` must be 1", "but is 3"], generation_config=config)
    assert config.to_dict() == before


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("name", FOREIGN_SPELLINGS)
def test_a_spelling_of_another_project_is_refused_with_ours(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM], name: str
) -> None:
    told = [f"`{FOREIGN_SPELLINGS[name]}`", name]
    refused(pair, InvalidConfigError, told, **{name: 3})
    refused(pair, InvalidConfigError, told, speculative_config={name: 3})


@pytest.mark.usefixtures("fresh_verdicts")
def test_embeddings_alone_are_refused(pair: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    embeddings = pair[0].get_input_embeddings()(PROMPT).detach()
    told = ["A draft reads tokens", "`inputs_embeds` alone", "Pass `input_ids`"]
    refused(pair, UnsupportedGenerationError, told, {"inputs_embeds": embeddings})


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_draft_without_weights_is_refused(pair: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    with torch.device("meta"):
        draft = models.build_target()
    told = ["must have its weights loaded", "LlamaForCausalLM is on the meta device", "from_pretrained"]
    refused(pair, IncompatibleDraftError, told, draft_model=draft)


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_draft_with_a_much_smaller_vocabulary_is_refused(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM],
) -> None:
    told = ["must share a tokenizer", "64 entries", "has 16", "Choose a draft"]
    refused(pair, IncompatibleDraftError, told, draft_model=models.build_target(vocab_size=16))


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_draft_without_a_head_is_refused(pair: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    told = ["must be able to generate", "LlamaModel has no language modelling head", "AutoModelForCausalLM"]
    refused(pair, IncompatibleDraftError, told, draft_model=pair[1].model)


@pytest.mark.usefixtures("fresh_verdicts")
def test_an_encoder_decoder_draft_is_refused(pair: tuple[LlamaForCausalLM, LlamaForCausalLM]) -> None:
    told = ["must be a decoder-only causal LM", "T5ForConditionalGeneration", "Choose"]
    refused(pair, IncompatibleDraftError, told, draft_model=build_t5())


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize(
    "spoil", [folder_without_model, folder_with_a_pickle, folder_with_cut_weights, folder_with_wrong_weights]
)
def test_a_folder_that_cannot_be_loaded_is_refused(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, spoil: Callable[[Path], Path]
) -> None:
    folder = str(spoil(tmp_path))
    told = ["with safetensors weights", folder, "Check the name"]
    refused(pair, DraftLoadError, told, draft_model=folder)


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize("name", ["", "no/such-model", "./no/such/folder"])
def test_a_name_that_leads_nowhere_is_refused(pair: tuple[LlamaForCausalLM, LlamaForCausalLM], name: str) -> None:
    refused(pair, DraftLoadError, ["with safetensors weights", repr(name), "Check the name"], draft_model=name)


def test_a_pickle_in_a_folder_is_never_opened(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a pickle was opened")

    folder = folder_with_a_pickle(tmp_path)
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(DraftLoadError):
        greedy(pair[0], PROMPT, max_new_tokens=2, draft_model=str(folder))


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), models.build_target().model], ids=["module", "no head"])
def test_only_models_that_generate_can_be_enabled(model: torch.nn.Module) -> None:
    original = type(model)
    with pytest.raises(UnsupportedGenerationError, match="a transformers model that can generate"):
        hf_specdec.enable(model)
    assert type(model) is original


# ---- what the host refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"max_new_token": 5}, {"temperature": -1.0}], ids=repr)
def test_what_the_host_refuses_is_refused_in_its_words(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM], options: dict[str, Any]
) -> None:
    target, draft = pair
    before = state_of(target), state_of(draft)
    with pytest.raises(ValueError, match=r".") as plain:
        target.generate(PROMPT, **{"max_new_tokens": 4, "do_sample": True, **options})
    with pytest.raises(ValueError, match=r".") as ours:
        target.generate(PROMPT, draft_model=draft, **{"max_new_tokens": 4, "do_sample": True, **options})
    assert str(ours.value) == str(plain.value)
    assert (state_of(target), state_of(draft)) == before


def test_a_prompt_beyond_the_targets_context_fails_as_in_plain_decoding(drafts: Drafts) -> None:
    target = build_gpt2(16)
    hf_specdec.enable(target)
    prompt = PROMPT.repeat(1, 4)
    with pytest.raises(IndexError) as plain:
        greedy(target, prompt, max_new_tokens=4)
    with pytest.raises(IndexError) as ours:
        greedy(target, prompt, max_new_tokens=4, draft_model=drafts["noisy"])
    assert str(ours.value) == str(plain.value)
    output = greedy(target, PROMPT, max_new_tokens=4, draft_model=drafts["noisy"])
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=4))


@pytest.mark.filterwarnings("ignore::hf_specdec.SpeculationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_contexts_are_exceeded_as_in_plain_decoding(kind: str) -> None:
    target = models.build_target(max_position_embeddings=12)
    draft = models.build_drafts(target)[kind]
    hf_specdec.enable(target)
    for length in (1, 3):
        prompt = PROMPT.repeat(1, length)
        output = greedy(target, prompt, max_new_tokens=NUM_TOKENS, draft_model=draft)
        assert torch.equal(output, greedy(target, prompt, max_new_tokens=NUM_TOKENS))


@pytest.mark.parametrize("num_tokens", [25, 26])
@pytest.mark.parametrize("kind", ["short", "long"])
def test_a_text_that_ends_within_the_targets_context_does_not_overrun_it(num_tokens: int, kind: str) -> None:
    target = build_gpt2(32, seed=2)
    # The context of a short draft keeps the rounds within the target's by itself.
    draft = copy.deepcopy(target) if kind == "short" else models.build_target()
    hf_specdec.enable(target)
    text = greedy(target, PROMPT, max_new_tokens=26)[0, PROMPT.shape[1] :].tolist()
    eos = text[num_tokens - 1]
    assert text.index(eos) == num_tokens - 1
    # The limit is far beyond the context, but the text is not: plain decoding never gets there.
    wanted = greedy(target, PROMPT, max_new_tokens=60, eos_token_id=eos)
    output = greedy(target, PROMPT, max_new_tokens=60, eos_token_id=eos, draft_model=draft)
    assert torch.equal(output, wanted)


def test_a_text_that_outgrows_the_targets_context_fails_as_in_plain_decoding() -> None:
    target = build_gpt2(32)
    draft = copy.deepcopy(target)
    hf_specdec.enable(target)
    with pytest.raises(IndexError):
        greedy(target, PROMPT, max_new_tokens=60)
    with pytest.raises(IndexError), pytest.warns(SpeculationWarning):
        greedy(target, PROMPT, max_new_tokens=60, draft_model=draft)


# ---- unusual input that works ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_together_with_their_ids_work(target: LlamaForCausalLM, drafts: Drafts, kind: str) -> None:
    hf_specdec.enable(target)
    inputs = {"input_ids": PROMPT, "inputs_embeds": target.get_input_embeddings()(PROMPT).detach()}
    output = greedy(target, inputs, max_new_tokens=NUM_TOKENS, draft_model=drafts[kind])
    assert torch.equal(output, greedy(target, inputs, max_new_tokens=NUM_TOKENS))
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


def test_embeddings_that_differ_from_their_ids_rule(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    others = torch.tensor([[9, 8, 7, 6, 5, 4]])
    inputs = {"input_ids": PROMPT, "inputs_embeds": target.get_input_embeddings()(others).detach()}
    output = greedy(target, inputs, max_new_tokens=NUM_TOKENS, draft_model=drafts["identical"])
    assert torch.equal(output, greedy(target, inputs, max_new_tokens=NUM_TOKENS))
    assert not torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


def test_a_penalty_that_sampling_ignores_is_ignored_with_a_draft_as_well(
    pair: tuple[LlamaForCausalLM, LlamaForCausalLM],
) -> None:
    # `penalty_alpha` asks for contrastive search only together with greedy decoding.
    target, draft = pair
    options = {"do_sample": True, "top_k": 1, "penalty_alpha": 0.6, "max_new_tokens": NUM_TOKENS}
    assert torch.equal(target.generate(PROMPT, draft_model=draft, **options), target.generate(PROMPT, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right_gives_the_plain_text_and_the_hosts_warning(
    target: LlamaForCausalLM,
    drafts: Drafts,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    hf_specdec.enable(target)
    inputs = {
        "input_ids": torch.tensor([[1, 5, 9, 0, 0], [3, 4, 5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    }
    outputs, messages = [], []
    for extra in ({}, {"draft_model": drafts[kind]}):
        caplog.clear()
        outputs.append(greedy(target, inputs, max_new_tokens=NUM_TOKENS, **extra))
        messages.append(caplog.messages)
    assert torch.equal(*outputs)
    assert "right-padding was detected" in messages[0][0]
    assert messages[1] == messages[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_ids_of_32_bit_give_the_plain_text_and_type(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int
) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(batch)
    inputs["input_ids"] = inputs["input_ids"].int()
    wanted = greedy(target, inputs, max_new_tokens=NUM_TOKENS)
    output = greedy(target, inputs, max_new_tokens=NUM_TOKENS, draft_model=drafts[kind])
    assert output.tolist() == wanted.tolist()
    assert output.dtype == wanted.dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_masks_of_any_type_give_the_plain_text(target: LlamaForCausalLM, drafts: Drafts, dtype: torch.dtype) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(3)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    output = greedy(target, inputs, max_new_tokens=NUM_TOKENS, draft_model=drafts["noisy"])
    assert torch.equal(output, greedy(target, inputs, max_new_tokens=NUM_TOKENS))


@pytest.mark.parametrize("hidden", [[2, 3], [0, 1, 2, 3, 4, 5]], ids=["holes", "nothing visible"])
def test_a_mask_with_gaps_gives_the_plain_text(target: LlamaForCausalLM, drafts: Drafts, hidden: list[int]) -> None:
    hf_specdec.enable(target)
    inputs = prompts_of(3)
    inputs["attention_mask"][1, hidden] = 0
    output = greedy(target, inputs, max_new_tokens=NUM_TOKENS, draft_model=drafts["noisy"])
    assert torch.equal(output, greedy(target, inputs, max_new_tokens=NUM_TOKENS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_may_have_another_precision(
    target: LlamaForCausalLM, drafts: Drafts, kind: str, dtype: torch.dtype, batch: int
) -> None:
    hf_specdec.enable(target)
    draft = drafts[kind].to(dtype)
    output = greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert torch.equal(output, greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS))
    assert draft.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_draft_of_another_precision_can_be_sampled_from(
    target: LlamaForCausalLM, drafts: Drafts, dtype: torch.dtype
) -> None:
    hf_specdec.enable(target)
    draft = drafts["identical"].to(dtype)
    torch.manual_seed(0)
    output = target.generate(PROMPT, do_sample=True, max_new_tokens=30, draft_model=draft, return_dict_in_generate=True)
    assert output.sequences.shape == (1, PROMPT.shape[1] + 30)
    assert output.speculation.acceptance_rate > 0.7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_new_token_needs_no_draft(target: LlamaForCausalLM, drafts: Drafts, kind: str, batch: int) -> None:
    hf_specdec.enable(target)
    admit(target, drafts[kind])
    with watched(target) as of_target, watched(drafts[kind]) as of_draft:
        output = greedy(target, prompts_of(batch), max_new_tokens=1, draft_model=drafts[kind])
    assert torch.equal(output, greedy(target, prompts_of(batch), max_new_tokens=1))
    assert (len(of_target), len(of_draft)) == (1, 0)


# ---- pairs that decode plainly ---------------------------------------------------------------------------------


def one_warning(record: pytest.WarningsRecorder) -> str:
    """Assert that there was one warning, ours, and return its text."""
    assert [w.category for w in record] == [SpeculationWarning]
    return str(record[0].message)


def test_a_draft_whose_state_cannot_be_taken_back_gives_the_plain_text(target: LlamaForCausalLM) -> None:
    draft = models.build_refused()
    hf_specdec.enable(target)
    with pytest.warns(SpeculationWarning) as record:
        output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert "no lane runs the draft" in one_warning(record)
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


@pytest.mark.parametrize("is_global", [False, True], ids=["one model", "every model"])
def test_the_warning_names_the_line_that_called_generate(target: LlamaForCausalLM, is_global: bool) -> None:
    hf_specdec.enable() if is_global else hf_specdec.enable(target)
    try:
        with pytest.warns(SpeculationWarning) as record:
            target.generate(PROMPT, max_new_tokens=2, draft_model=models.build_refused())
    finally:
        hf_specdec.disable()
    one_warning(record)
    assert record[0].filename == __file__


def test_a_plain_call_counts_its_tokens(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)
    with pytest.warns(SpeculationWarning):
        output = greedy(
            target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=models.build_refused(), return_dict_in_generate=True
        )
    stats = output.speculation
    assert stats.lane == "plain"
    assert len(stats.fallbacks) == 1
    assert stats.num_new_tokens == NUM_TOKENS
    assert stats.num_prompt_tokens == PROMPT.shape[1]


def test_strict_makes_a_call_that_cannot_speculate_an_error(target: LlamaForCausalLM) -> None:
    hf_specdec.enable(target)
    with pytest.raises(UnsupportedGenerationError, match=r"no lane runs the draft.*verified at once"):
        greedy(
            target, PROMPT, max_new_tokens=4, draft_model=models.build_refused(), speculative_config={"strict": True}
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_prompt_beyond_the_drafts_context_gives_the_plain_text_and_one_warning(
    target: LlamaForCausalLM, kind: str, batch: int
) -> None:
    draft = {
        "identical": build_gpt2(4),
        "unrelated": models.build_target(seed=100, max_position_embeddings=4),
        "noisy": build_gpt2(PROMPT.shape[1]),
    }[kind]
    hf_specdec.enable(target)
    admit(target)
    with pytest.warns(SpeculationWarning) as record:
        output = greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS, draft_model=draft)
    one_warning(record)
    assert torch.equal(output, greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS))


# ---- drafts that break -----------------------------------------------------------------------------------------

NAN, INFINITE = float("nan"), float("inf")
BREAKAGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "raises on the prompt": lambda draft: failing(draft, 1, RuntimeError("boom")),
    "raises in forward 3": lambda draft: failing(draft, 3, RuntimeError("boom")),
    "raises an unusual error": lambda draft: failing(draft, 5, AssertionError("boom")),
    "runs out of memory": lambda draft: failing(draft, 5, torch.OutOfMemoryError("boom")),
    "NaN from the start": lambda draft: spoiled(draft, 1, NAN),
    "NaN in forward 7": lambda draft: spoiled(draft, 7, NAN),
    "infinite in forward 7": lambda draft: spoiled(draft, 7, INFINITE),
    "all ruled out in forward 7": lambda draft: spoiled(draft, 7, -INFINITE),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_draft_that_breaks_costs_one_warning_and_nothing_else(
    target: LlamaForCausalLM, drafts: Drafts, breakage: str, batch: int, do_sample: bool
) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    before = state_of(target), state_of(draft)
    # Sampling from the most likely token alone has to give the greedy text.
    options = {"do_sample": True, "top_k": 1} if do_sample else {"do_sample": False}
    options |= {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True}
    with BREAKAGES[breakage](draft), pytest.warns(SpeculationWarning) as record:
        output = target.generate(**prompts_of(batch), draft_model=draft, num_draft_tokens=3, **options)
    message = one_warning(record)
    assert torch.equal(output.sequences, greedy(target, prompts_of(batch), max_new_tokens=NUM_TOKENS))
    assert len(output.speculation.fallbacks) == 1
    assert output.speculation.fallbacks[0] in message
    assert ("boom" in message) or ("NaN" in message)
    assert (state_of(target), state_of(draft)) == before


def test_a_draft_that_breaks_in_lockstep_leaves_the_plain_text(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    options = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True, "output_scores": True}
    wanted = greedy(target, prompts_of(3), **options)
    for breakage in ("raises in forward 3", "NaN in forward 7"):
        with BREAKAGES[breakage](draft), pytest.warns(SpeculationWarning) as record:
            output = greedy(target, prompts_of(3), draft_model=draft, **options)
        one_warning(record)
        assert torch.equal(output.sequences, wanted.sequences)


def test_a_broken_draft_uses_no_randomness_in_greedy_decoding(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    before = torch.get_rng_state()
    with failing(draft, 3, RuntimeError("boom")), pytest.warns(SpeculationWarning):
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_strict_raises_when_the_draft_breaks(target: LlamaForCausalLM, drafts: Drafts, breakage: str) -> None:
    draft = drafts["noisy"]
    hf_specdec.enable(target)
    admit(target, draft)
    before = state_of(target), state_of(draft)
    options = {"max_new_tokens": NUM_TOKENS, "speculative_config": SpeculativeConfig(strict=True)}
    with BREAKAGES[breakage](draft), pytest.raises(DraftFailedError, match=r"strict=True.*leave `strict` out"):
        greedy(target, PROMPT, draft_model=draft, **options)
    assert (state_of(target), state_of(draft)) == before
    output = greedy(target, PROMPT, draft_model=draft, **options)
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


def build_own_draft() -> LlamaForCausalLM:
    """Return a draft of another shape than the target, so that it has trial forwards of its own."""
    return models.build_target(num_hidden_layers=1)


@pytest.mark.usefixtures("fresh_verdicts")
@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), AssertionError("boom"), OSError("boom"), Exception("boom")], ids=repr
)
def test_a_draft_that_raises_in_its_very_first_forward_costs_a_warning(
    target: LlamaForCausalLM, error: Exception
) -> None:
    draft = build_own_draft()
    hf_specdec.enable(target)
    with failing(draft, 1, error), pytest.warns(SpeculationWarning, match="boom"):
        output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_draft_that_failed_once_may_draft_in_the_next_call(target: LlamaForCausalLM) -> None:
    draft = build_own_draft()
    hf_specdec.enable(target)
    with failing(draft, 1, torch.OutOfMemoryError("boom")), pytest.warns(SpeculationWarning):
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft, return_dict_in_generate=True)
    assert output.speculation.num_draft_tokens > 0


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_draft_with_broken_weights_does_not_discredit_sound_ones(target: LlamaForCausalLM) -> None:
    broken = build_own_draft()
    with torch.no_grad():
        broken.lm_head.weight.fill_(NAN)
    hf_specdec.enable(target)
    with pytest.warns(SpeculationWarning):
        output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=broken)
    assert torch.equal(output, greedy(target, PROMPT, max_new_tokens=NUM_TOKENS))
    output = greedy(
        target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=build_own_draft(), return_dict_in_generate=True
    )
    assert output.speculation.num_draft_tokens > 0


@pytest.mark.usefixtures("fresh_verdicts")
def test_a_lane_that_gives_nan_is_not_trusted(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Lane.forward

    def spoil(self: Lane, *args: Any, **kwargs: Any) -> Any:
        outputs = run(self, *args, **kwargs)
        outputs.logits = torch.full_like(outputs.logits, NAN)
        return outputs

    monkeypatch.setattr(Lane, "forward", spoil)
    assert not probe.probe_ragged(target, is_batched=False).is_admitted


def test_a_draft_that_breaks_is_not_given_up_for_the_next_call(target: LlamaForCausalLM, drafts: Drafts) -> None:
    draft = drafts["identical"]
    hf_specdec.enable(target)
    admit(target, draft)
    with failing(draft, 3, RuntimeError("boom")), pytest.warns(SpeculationWarning):
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft)
    output = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=draft, return_dict_in_generate=True)
    assert output.speculation.fallbacks == []
    assert output.speculation.acceptance_rate == 1.0


def test_a_rejected_call_leaves_the_next_one_alone(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    wanted = greedy(target, PROMPT, max_new_tokens=NUM_TOKENS)
    eos = token_after(wanted[0], 3, PROMPT.shape[1])
    with pytest.raises(UnsupportedGenerationError):
        greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, eos_token_id=eos, num_beams=2, draft_model=drafts["noisy"])
    assert torch.equal(greedy(target, PROMPT, max_new_tokens=NUM_TOKENS), wanted)
    assert torch.equal(greedy(target, PROMPT, max_new_tokens=NUM_TOKENS, draft_model=drafts["noisy"]), wanted)


def test_a_draft_folder_that_lacks_a_weight_is_refused(target: LlamaForCausalLM, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    models.save_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf_specdec.enable(target)
    with pytest.raises(DraftLoadError, match="lacks 1 of them"):
        greedy(target, PROMPT, max_new_tokens=4, draft_model=str(tmp_path))


def test_a_path_that_leads_nowhere_is_named_as_such(target: LlamaForCausalLM, tmp_path: Path) -> None:
    hf_specdec.enable(target)
    with pytest.raises(DraftLoadError, match="there is no folder"):
        greedy(target, PROMPT, max_new_tokens=4, draft_model=tmp_path / "nothing")
