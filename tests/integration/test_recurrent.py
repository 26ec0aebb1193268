"""Targets and drafts with a recurrent state give the texts of plain decoding, and hand back its state."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from integration.comparing import (
    EVERY_OUTCOME,
    KINDS,
    Fresh,
    assert_same_ids,
    ids_that_end_rows_apart,
    new_tokens,
    outcomes_of,
    plain,
    prompts,
    same_as_plain,
    same_for_all_drafts,
)
from integration.harness import failing, state_of, token_after
from integration.recurrent import (
    assert_close_caches,
    attributes_of,
    build,
    cache_keyword,
    drafts_of,
    next_turn,
    returned_cache,
    target_of,
    tensors_of,
)
from scipy.stats import chi2
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_specdec
import models
from hf_specdec import DraftFailedError, SpeculationWarning, SpeculativeConfig
from hf_specdec.engine.scans import CHUNKED_SCAN, SCAN

Tensor = torch.Tensor
TYPES = ["mamba", "mamba2", "jamba", "qwen3_next", "lfm2", "bamba", "recurrent_gemma", "rwkv"]
# Recurrent layers only; recurrent and attention layers.
WITH_CACHES = ["mamba", "qwen3_next"]
PROMPT = prompts([6])


def drafted(model: PreTrainedModel, draft: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Decode with a draft."""
    options = {"do_sample": False, "num_draft_tokens": 3, "return_dict_in_generate": True} | options
    return model.generate(**inputs, draft_model=draft, **options)


# ---- the same text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_draft_tokens", "max_new_tokens"), [(1, 7), (4, 13), (7, 11)])
@pytest.mark.parametrize("name", TYPES)
def test_equals_plain_decoding(name: str, num_draft_tokens: int, max_new_tokens: int) -> None:
    outcomes = EVERY_OUTCOME if num_draft_tokens > 1 else {"full", "none"}
    stats = same_for_all_drafts(
        target_of(name),
        drafts_of(name),
        PROMPT,
        num_draft_tokens,
        max_new_tokens=max_new_tokens,
        outcomes=outcomes,
    )
    assert {(told.lane, told.draft_lane) for told in stats.values()} == {("compatible", "compatible")}
    assert outcomes_of(stats["identical"].rounds) == {"full"}
    assert "none" in outcomes_of(stats["unrelated"].rounds)


@pytest.mark.parametrize("name", [name for name in TYPES if name != "rwkv"])
def test_padded_rows_equal_plain_decoding(name: str) -> None:
    stats = same_for_all_drafts(target_of(name), drafts_of(name), prompts([3, 6, 5]), 2, max_new_tokens=9)
    assert {told.lane for told in stats.values()} == {"compatible"}
    assert all(told.is_lockstep for told in stats.values())


def test_rows_that_the_host_mixes_up_are_decoded_plainly() -> None:
    """With several rows, plain RWKV shifts one row's state into the others'."""
    model, inputs = target_of("rwkv"), prompts([4, 4])
    with pytest.warns(SpeculationWarning, match="Decoding without the draft"):
        output = drafted(model, drafts_of("rwkv")["noisy"], inputs, max_new_tokens=6)
    assert_same_ids(output.sequences, plain(model, inputs, max_new_tokens=6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_CACHES)
def test_a_single_new_token(name: str, kind: str) -> None:
    stats = same_as_plain(target_of(name), drafts_of(name)[kind], PROMPT, 4, max_new_tokens=1)
    assert stats.num_target_forwards == 1
    assert stats.rounds == []


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next"])
def test_prompts_of_one_token(name: str) -> None:
    stats = same_for_all_drafts(target_of(name), drafts_of(name), prompts([1], seed=4), 3, max_new_tokens=16)
    assert {told.num_prompt_tokens for told in stats.values()} == {1}


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_end_of_text_in_the_middle_of_a_round(name: str) -> None:
    model = target_of(name)
    end = token_after(plain(model, PROMPT, max_new_tokens=16)[0], 7, 6)
    stats = same_for_all_drafts(model, drafts_of(name), PROMPT, 5, max_new_tokens=16, eos_token_id=end, pad_token_id=0)
    ended = stats["identical"].rounds[-1]
    assert ended.num_committed_tokens <= ended.num_accepted_tokens[0]


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_rows_that_end_apart_are_padded(name: str) -> None:
    model, inputs = target_of(name), prompts([3, 6, 5])
    ends = ids_that_end_rows_apart(new_tokens(plain(model, inputs, max_new_tokens=12), inputs), 2)
    same_for_all_drafts(model, drafts_of(name), inputs, 2, max_new_tokens=12, eos_token_id=ends, pad_token_id=0)


class Counting(LogitsProcessor):
    """Favours another token in every call, so a call too many or too few changes the text."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        scores = scores.clone()
        scores[:, (7 * self.num_calls + int(input_ids[0, -1])) % scores.shape[1]] += 3.0
        return scores


@pytest.mark.parametrize("lengths", [[6], [3, 5]])
@pytest.mark.parametrize("name", ["mamba", "bamba"])
def test_a_processor_that_keeps_state(name: str, lengths: list[int]) -> None:
    processors = Fresh(lambda: LogitsProcessorList([Counting()]))
    same_for_all_drafts(
        target_of(name),
        drafts_of(name),
        prompts(lengths),
        3,
        max_new_tokens=10,
        logits_processor=processors,
        # The draft does not know what the processor will say.
        outcomes={"none"},
    )


# ---- caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_CACHES)
def test_the_returned_cache_is_that_of_plain_decoding(name: str) -> None:
    model, seen = target_of(name), set()
    options = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    theirs = model.generate(**PROMPT, **options)
    inputs = next_turn(PROMPT, theirs.sequences, only_new=name == "mamba")
    keyword, their_cache = cache_keyword(model), copy.deepcopy(returned_cache(theirs))
    wanted = plain(model, inputs, max_new_tokens=10, **{keyword: returned_cache(theirs)})
    for draft in drafts_of(name).values():
        ours = drafted(model, draft, PROMPT, **options)
        assert_close_caches(returned_cache(ours), their_cache)
        assert_same_ids(plain(model, inputs, max_new_tokens=10, **{keyword: returned_cache(ours)}), wanted)
        seen |= outcomes_of(ours.speculation.rounds)
    assert seen == EVERY_OUTCOME


@pytest.mark.parametrize("lengths", [[6], [3, 6]])
@pytest.mark.parametrize("name", WITH_CACHES)
def test_turns_on_a_cache_of_the_callers(name: str, lengths: list[int]) -> None:
    model, seen = target_of(name), set()
    keyword, drafts = cache_keyword(model), drafts_of(name)
    ours, theirs, inputs = (
        {kind: DynamicCache(config=model.config) for kind in drafts},
        DynamicCache(config=model.config),
        prompts(lengths),
    )
    for _ in range(3):
        wanted = plain(model, inputs, max_new_tokens=8, **{keyword: theirs})
        for kind, draft in drafts.items():
            output = drafted(model, draft, inputs, max_new_tokens=8, **{keyword: ours[kind]})
            assert output.speculation.fallbacks == []
            assert_same_ids(output.sequences, wanted)
            assert returned_cache(output) is ours[kind]
            assert_close_caches(ours[kind], theirs)
            assert names_in(ours[kind]) == names_in(theirs)
            seen |= outcomes_of(output.speculation.rounds)
        inputs = next_turn(inputs, wanted, only_new=name == "mamba")
    assert seen == EVERY_OUTCOME


def names_in(cache: DynamicCache) -> list[list[str]]:
    """Return the names of the attributes of a cache and its layers."""
    return [sorted(vars(part)) for part in (cache, *cache.layers)]


class Interrupting(BaseStreamer):
    """Raises when it is given the third piece of text."""

    def __init__(self) -> None:
        self.num_pieces = 0

    def put(self, value: Tensor) -> None:
        self.num_pieces += 1
        if self.num_pieces == 4:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@pytest.mark.parametrize("is_draft_to_blame", [True, False], ids=["the draft fails", "the streamer is interrupted"])
@pytest.mark.parametrize("name", WITH_CACHES)
def test_a_call_that_fails_leaves_the_callers_cache_as_it_was(name: str, is_draft_to_blame: bool) -> None:
    model, draft, keyword = target_of(name), build(name, seed=100), cache_keyword(target_of(name))
    cache = DynamicCache(config=model.config)
    ids = plain(model, PROMPT, max_new_tokens=5, **{keyword: cache})
    inputs = next_turn(PROMPT, ids, only_new=name == "mamba")
    again = copy.deepcopy(cache)
    drafted(model, draft, inputs, max_new_tokens=2, **{keyword: copy.deepcopy(cache)})  # the trial forwards
    tensors, attributes = tensors_of(cache), attributes_of(cache)
    config = SpeculativeConfig(strict=True, num_draft_tokens=3)
    options: dict[str, Any] = {keyword: cache, "speculative_config": config, "max_new_tokens": 12}
    options["num_draft_tokens"] = 3
    if is_draft_to_blame:
        with failing(draft, 5, RuntimeError("broken")), pytest.raises(DraftFailedError):
            drafted(model, draft, inputs, **options)
    else:
        with pytest.raises(KeyboardInterrupt):
            drafted(model, draft, inputs, streamer=Interrupting(), **options)
    assert attributes_of(cache) == attributes
    assert all(torch.equal(mine, other) for mine, other in zip(tensors_of(cache), tensors, strict=True))
    assert_same_ids(
        plain(model, inputs, max_new_tokens=6, **{keyword: cache}),
        plain(model, inputs, max_new_tokens=6, **{keyword: again}),
    )


# ---- sampling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_sampling_repeats_with_the_seed(name: str, kind: str) -> None:
    model, inputs = target_of(name), prompts([3, 6])
    options = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 6}
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(drafted(model, drafts_of(name)[kind], inputs, **options))
        assert outputs[-1].sequences.shape == (2, 12)
        assert 0 <= int(outputs[-1].sequences.min()) <= int(outputs[-1].sequences.max()) < models.VOCAB_SIZE
        assert outputs[-1].speculation.fallbacks == []
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert not torch.equal(outputs[0].sequences, outputs[2].sequences)


def test_sampled_law_is_the_targets() -> None:
    vocab_size, num_tokens, num_rows, num_calls, temperature = 4, 4, 64, 60, 6.0
    tiny = {"vocab_size": vocab_size, "hidden_size": 16, "num_hidden_layers": 1, "initializer_range": 0.4}
    model = hf_specdec.enable(models.build_mamba(**tiny, pad_token_id=None))
    draft = models.build_noisy(model, 0.1)
    prompt = torch.tensor([[1, 3, 2]])
    texts = torch.tensor(list(itertools.product(range(vocab_size), repeat=num_tokens)))
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1)).logits[:, 2:-1]
    law = (logits.double() / temperature).log_softmax(-1).gather(2, texts[..., None]).sum((1, 2)).exp()
    counts: Counter[tuple[int, ...]] = Counter()
    seen: set[str] = set()
    torch.manual_seed(0)
    for _ in range(num_calls):
        output = drafted(
            model,
            draft,
            {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)},
            do_sample=True,
            temperature=temperature,
            num_return_sequences=num_rows,
            max_new_tokens=num_tokens,
            num_draft_tokens=2,
        )
        seen |= outcomes_of(output.speculation.rounds)
        counts.update(map(tuple, output.sequences[:, 3:].tolist()))
    assert seen == EVERY_OUTCOME
    expected = law * num_rows * num_calls
    observed = torch.tensor([counts[tuple(text)] for text in texts.tolist()])
    frequent = expected >= 5
    statistic = float(((observed - expected)[frequent] ** 2 / expected[frequent]).sum())
    assert int(frequent.sum()) > 100
    assert chi2.sf(statistic, int(frequent.sum()) - 1) > 1e-6


# ---- what must not change --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mamba", "nemotron_h"])
def test_models_and_the_host_are_as_before(name: str, kind: str) -> None:
    model, draft = target_of(name), drafts_of(name)[kind]
    module = sys.modules[type(model).__module__]
    before, scans = (
        [state_of(model), state_of(draft)],
        {key: getattr(module, key, None) for key in (SCAN, CHUNKED_SCAN)},
    )
    drafted(model, draft, PROMPT, max_new_tokens=8)
    assert [state_of(model), state_of(draft)] == before
    assert {key: getattr(module, key, None) for key in scans} == scans


def test_a_draft_that_fails_leaves_the_hosts_scan_as_it_was() -> None:
    model, draft = target_of("mamba"), build("mamba", seed=100)
    drafted(model, draft, PROMPT, max_new_tokens=2)
    module = sys.modules[type(model).__module__]
    scan = getattr(module, SCAN)
    wanted = plain(model, PROMPT, max_new_tokens=10)
    with failing(draft.backbone.layers[1], 6, RuntimeError("broken")), pytest.warns(SpeculationWarning, match="broken"):
        output = drafted(model, draft, PROMPT, max_new_tokens=10)
    assert getattr(module, SCAN) is scan
    assert_same_ids(output.sequences, wanted)
