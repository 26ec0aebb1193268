"""Sampling with a draft has the law of the target alone.

Some ten thousand texts of a few tokens are drawn through `generate` and counted. The exact law of such a text follows
from the target's logits by enumeration, and Pearson's chi-square test compares the two. The seed is fixed; had it not
been, each of these tests would fail with probability `FALSE_ALARM_RATE` without anything being wrong.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from integration.comparing import EVERY_OUTCOME, KINDS, assert_same_ids, outcomes_of, plain, prompts
from scipy.stats import chi2
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

import hf_specdec
import models
from hf_specdec import RoundRecord, SpeculativeConfig

Tensor = torch.Tensor
Tokens = tuple[int, ...]
Law = dict[Tokens, float]

FALSE_ALARM_RATE = 1e-6
NUM_DRAWS = 51_200
VOCAB_SIZE = 5
PROMPT = (1, 3, 2)
NUM_TOKENS = 3
PADDING = 0
END = 3


# --- tiny models, shared by all tests, which change nothing about them -----------------------------------------------


def build(seed: int) -> LlamaForCausalLM:
    return models.build_target(
        seed,
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        # Flat enough for every text to have a chance.
        initializer_range=0.25,
        max_position_embeddings=32,
        # The embedding of a padding token would be zero, which the slightest noise turns into anything.
        pad_token_id=None,
    )


@cache
def target_model() -> LlamaForCausalLM:
    return hf_specdec.enable(build(seed=0))


@cache
def draft_model(kind: str) -> LlamaForCausalLM:
    if kind == "unrelated":
        return build(seed=7)
    # The target rejects about one token in four hundred of a "close" draft.
    noise = {"identical": 0.0, "noisy": 0.6, "near": 0.15, "close": 0.002}[kind]
    return models.build_noisy(target_model(), noise)


# --- the exact law, from logits alone ------------------------------------------------------------------------------


@cache
def logits_after(model_of: Callable[[], LlamaForCausalLM]) -> dict[Tokens, Tensor]:
    """Return the next-token logits after each text of fewer than `NUM_TOKENS` tokens."""
    found = {}
    for length in range(NUM_TOKENS):
        texts = list(itertools.product(range(VOCAB_SIZE), repeat=length))
        with torch.no_grad():
            logits = model_of()(torch.tensor([PROMPT + text for text in texts])).logits[:, -1]
        found.update(zip(texts, logits.double(), strict=True))
    return found


def warped(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return probabilities `[V]` by the definitions of the three warpers."""
    probs = (logits / temperature).softmax(dim=0)
    order = probs.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    probs = torch.zeros_like(probs).index_copy(0, kept, probs[kept] / probs[kept].sum())
    # The smallest set of most likely tokens that reaches `top_p`.
    before = probs[order].cumsum(dim=0) - probs[order]
    kept = order[before < top_p]
    return torch.zeros_like(probs).index_copy(0, kept, probs[kept] / probs[kept].sum())


def exact_law(
    model_of: Callable[[], LlamaForCausalLM] = target_model, eos_token_id: int | None = None, **warpers: Any
) -> Law:
    """Return the probability of each text of `NUM_TOKENS` tokens; texts that ended are padded."""
    logits = logits_after(model_of)
    law: Law = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: Law = {}
        for text, probability in law.items():
            if eos_token_id is not None and eos_token_id in text:
                longer[(*text, PADDING)] = probability
                continue
            for token, factor in enumerate(warped(logits[text], **warpers).tolist()):
                if factor > 0:
                    longer[(*text, token)] = probability * factor
        law = longer
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-9)
    return law


# --- drawing and testing -------------------------------------------------------------------------------------------


def draw(
    kind: str, *, batch: int = 5120, num_draws: int = NUM_DRAWS, verification: str = "block", **arguments: Any
) -> tuple[Counter[Tokens], list[RoundRecord]]:
    """Return how often each text was drawn with this draft, and all rounds."""
    records: list[RoundRecord] = []
    config = SpeculativeConfig(num_draft_tokens=2, verification=verification, on_round=records.append)
    # More tokens than are counted, so that blocks reach beyond the last counted one.
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_TOKENS + 1, "pad_token_id": PADDING} | arguments
    input_ids = torch.tensor([PROMPT])
    counts: Counter[Tokens] = Counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(num_draws // batch):
            output = target_model().generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                num_return_sequences=batch,
                draft_model=draft_model(kind),
                speculative_config=config,
                **arguments,
            )
            ids = output if isinstance(output, Tensor) else output.sequences
            texts = torch.nn.functional.pad(ids[:, len(PROMPT) :], (0, NUM_TOKENS), value=PADDING)[:, :NUM_TOKENS]
            counts.update(map(tuple, texts.tolist()))
    return counts, records


def p_value(counts: Counter[Tokens], law: Law) -> float:
    """Return Pearson's p-value; texts that are too rare for the test share one cell."""
    total = sum(counts.values())
    cells: list[tuple[float, int]] = []
    rare_expected, rare_observed = 0.0, sum(count for text, count in counts.items() if text not in law)
    for text, probability in law.items():
        if total * probability < 10:
            rare_expected += total * probability
            rare_observed += counts[text]
        else:
            cells.append((total * probability, counts[text]))
    if rare_expected < 10 and rare_observed:
        # A text that cannot be drawn, or too few that can be for a cell: put them to the largest cell's side.
        assert not any(text not in law for text in counts), "a text of probability 0 was drawn"
        expected, observed = cells.pop()
        rare_expected, rare_observed = rare_expected + expected, rare_observed + observed
    if rare_expected:
        cells.append((rare_expected, rare_observed))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


def assert_follows(counts: Counter[Tokens], law: Law) -> None:
    assert p_value(counts, law) > FALSE_ALARM_RATE


def assert_outcomes(kind: str, records: list[RoundRecord]) -> None:
    if kind == "identical":
        drafted = [record for record in records if record.num_draft_tokens]
        is_full = [count == record.num_draft_tokens for record in drafted for count in record.num_accepted_tokens]
        # Two forwards of one model may differ in the last bit, and a uniform number may fall between them.
        assert sum(is_full) > 0.999 * len(is_full) > 0
    else:
        assert outcomes_of(records) == EVERY_OUTCOME


def mixture(law: Law, other: Law, share: float) -> Law:
    return {text: (1 - share) * law.get(text, 0.0) + share * other.get(text, 0.0) for text in {**law, **other}}


# --- the law -------------------------------------------------------------------------------------------------------


@cache
def drawn_plainly(kind: str, verification: str) -> tuple[Counter[Tokens], list[RoundRecord]]:
    return draw(kind, verification=verification)


@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_follow_the_targets_law(kind: str, verification: str) -> None:
    counts, records = drawn_plainly(kind, verification)
    assert_outcomes(kind, records)
    assert_follows(counts, exact_law())


@pytest.mark.parametrize(
    ("kind", "verification", "settings"),
    [
        ("noisy", "block", {"temperature": 0.6}),
        ("unrelated", "block", {"temperature": 1.5, "top_k": 3}),
        ("noisy", "token", {"top_p": 0.8}),
        ("unrelated", "block", {"temperature": 0.8, "top_k": 4, "top_p": 0.9}),
    ],
    ids=str,
)
def test_texts_follow_the_targets_law_after_warpers(kind: str, verification: str, settings: dict[str, Any]) -> None:
    counts, records = draw(kind, verification=verification, **settings)
    assert_outcomes(kind, records)
    assert_follows(counts, exact_law(**settings))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_end_follow_the_targets_law(kind: str) -> None:
    counts, records = draw(kind, eos_token_id=END)
    assert_outcomes(kind, records)
    law = exact_law(eos_token_id=END)
    assert 0.1 < sum(probability for text, probability in law.items() if END in text) < 0.9
    assert_follows(counts, law)


def test_a_draft_that_is_surer_than_the_target_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sharp = copy.deepcopy(draft_model("noisy"))
    with torch.no_grad():
        sharp.lm_head.weight.mul_(3.0)
    monkeypatch.setitem(globals(), "draft_model", lambda _kind: sharp)
    counts, records = draw("noisy")
    assert_outcomes("noisy", records)
    assert_follows(counts, exact_law())


class Stateful(LogitsProcessor):
    """Changes nothing, but the engine cannot know that and has to go token by token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


# All rows of a batch take the same number of tokens there, so in a large batch only a draft that is hardly ever
# rejected gets beyond its first token: that of the others is decided often, and the close draft shows what comes after.
# Small batches, of which few can be drawn, mix everything.
LOCKSTEP = [
    ("identical", 5120, NUM_DRAWS),
    ("unrelated", 5120, NUM_DRAWS),
    ("close", 256, NUM_DRAWS),
    ("near", 4, 800),
]


@pytest.mark.parametrize(("kind", "batch", "num_draws"), LOCKSTEP)
def test_texts_follow_the_targets_law_with_a_callers_processor(kind: str, batch: int, num_draws: int) -> None:
    counts, records = draw(
        kind, batch=batch, num_draws=num_draws, logits_processor=LogitsProcessorList([Stateful()]), temperature=0.8
    )
    assert_lockstep(kind, batch, records)
    assert_follows(counts, exact_law(temperature=0.8))


@pytest.mark.parametrize(
    ("kind", "batch", "num_draws", "verification"),
    [("unrelated", 5120, NUM_DRAWS, "block"), ("close", 256, NUM_DRAWS, "block"), ("near", 4, 800, "token")],
)
def test_texts_follow_the_targets_law_when_scores_are_wanted(
    kind: str, batch: int, num_draws: int, verification: str
) -> None:
    counts, records = draw(
        kind,
        batch=batch,
        num_draws=num_draws,
        verification=verification,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert_lockstep(kind, batch, records)
    assert_follows(counts, exact_law())


@pytest.mark.parametrize("verification", ["block", "token"])
def test_texts_that_end_follow_the_targets_law_when_scores_are_wanted(verification: str) -> None:
    counts, records = draw(
        "near",
        batch=4,
        num_draws=800,
        verification=verification,
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=END,
    )
    assert_lockstep("near", 4, records)
    assert_follows(counts, exact_law(eos_token_id=END))


def assert_lockstep(kind: str, batch: int, records: list[RoundRecord]) -> None:
    assert max(len(record.rows) for record in records) == batch
    # Rows that ended take no part, the others take the same number of tokens.
    assert all(len(set(map(len, record.committed_token_ids))) == 1 for record in records)
    num_committed = {len(record.committed_token_ids[0]) for record in records if record.num_draft_tokens == 2}
    if kind == "identical":
        assert 3 in num_committed
    elif kind in ("close", "near"):
        assert num_committed == {1, 2, 3}


# --- the tests can fail ---------------------------------------------------------------------------------------------


def test_a_law_mixed_with_a_little_of_the_drafts_is_noticed() -> None:
    counts, _ = drawn_plainly("unrelated", "block")
    right, draft = exact_law(), exact_law(lambda: draft_model("unrelated"))
    assert_follows(counts, right)
    assert p_value(counts, mixture(right, draft, 0.05)) < 1e-12


def test_a_slightly_wrong_temperature_is_noticed() -> None:
    counts, _ = drawn_plainly("noisy", "block")
    assert p_value(counts, exact_law(temperature=1.1)) < 1e-12


@pytest.mark.parametrize("verification", ["block", "token"])
def test_an_engine_that_accepts_a_little_too_much_is_noticed(
    monkeypatch: pytest.MonkeyPatch, verification: str
) -> None:
    genuine = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *size, **options: 0.8 * genuine(*size, **options))
    counts, _ = draw("unrelated", num_draws=NUM_DRAWS // 2, verification=verification)
    assert p_value(counts, exact_law()) < 1e-12


def test_correlated_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = torch.rand
    # The same uniform number decides all positions of a row.
    monkeypatch.setattr(
        torch, "rand", lambda *size, **options: genuine(*size, **options)[:, :1].expand(*size).contiguous()
    )
    counts, _ = draw("unrelated", num_draws=NUM_DRAWS // 2, verification="token")
    assert p_value(counts, exact_law()) < 1e-12


# --- determinism ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6], [3, 6, 11]], ids=["single", "batch"])
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("setting", [{"top_k": 1}, {"temperature": 1e-3, "top_k": 0}], ids=["top_k", "temperature"])
def test_sampling_from_one_token_is_greedy_decoding_for_any_seed(
    target: LlamaForCausalLM,
    drafts: dict[str, LlamaForCausalLM],
    setting: dict[str, Any],
    verification: str,
    lengths: list[int],
) -> None:
    hf_specdec.enable(target)
    inputs = prompts(lengths)
    wanted = plain(target, inputs, max_new_tokens=10)
    seen = set()
    for kind, seed in itertools.product(KINDS, range(2)):
        torch.manual_seed(seed)
        output = target.generate(
            **inputs,
            do_sample=True,
            max_new_tokens=10,
            **setting,
            draft_model=drafts[kind],
            num_draft_tokens=3,
            speculative_config={"verification": verification},
            return_dict_in_generate=True,
        )
        assert_same_ids(output.sequences, wanted)
        seen |= outcomes_of(output.speculation.rounds)
    assert seen == EVERY_OUTCOME


@pytest.mark.parametrize("with_processor", [False, True], ids=["", "token by token"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_text_again(kind: str, with_processor: bool) -> None:
    # A draft and a target of sizes seen nowhere else, so that the first call is the one that probes them.
    sizes = {"vocab_size": 32, "intermediate_size": 40 + 8 * KINDS.index(kind) + 4 * with_processor}
    target = hf_specdec.enable(models.build_target(**sizes))
    draft = models.build_drafts(target)[kind] if kind != "unrelated" else models.build_target(9, **sizes)
    inputs = prompts([6, 3], vocab_size=32)

    def text(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        processors = LogitsProcessorList([Stateful()] if with_processor else [])
        output = target.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            max_new_tokens=16,
            draft_model=draft,
            num_draft_tokens=5,
            logits_processor=processors,
        )
        return output.tolist()

    texts = [text(seed) for seed in (1, 2, 1, 2)]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


def test_many_seeds_run_to_the_end(target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM]) -> None:
    hf_specdec.enable(target)
    seen = set()
    for seed in range(18):
        torch.manual_seed(seed)
        output = target.generate(
            **prompts([6, 3][: 1 + seed % 2]),
            do_sample=True,
            top_k=0,
            max_new_tokens=20,
            draft_model=drafts[KINDS[seed % 3]],
            num_draft_tokens=3,
            return_dict_in_generate=True,
        )
        assert output.speculation.fallbacks == []
        assert output.speculation.num_new_tokens == 20 * len(output.sequences)
        seen |= outcomes_of(output.speculation.rounds)
    assert seen == EVERY_OUTCOME
