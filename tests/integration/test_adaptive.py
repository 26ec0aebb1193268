"""The adaptive draft length inside `generate`: exact whatever it decides, plain at 0, and nothing is left behind.

What it decides follows measured times, so most tests put a scripted controller in its place.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from integration.comparing import EVERY_OUTCOME, KINDS, assert_same_ids, outcomes_of, plain, prompts
from integration.harness import PROMPT, admit, failing, prompts_of, spoiled, state_of, token_after, watched
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedModel
from zoo.conditional import build_conditional

import hf_specdec
import models
from hf_specdec import (
    AdaptiveDraftLength,
    Outlook,
    ProbeRecord,
    RoundRecord,
    SpeculationStats,
    SpeculationWarning,
    learned,
)
from hf_specdec import call as call_module
from hf_specdec.config import LONGEST_ADAPTIVE_DRAFT

Drafts = dict[str, LlamaForCausalLM]


class Scripted:
    """A controller that follows a list: K, "probe" before a plain step, or (K, tokens after which to stop)."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.script = itertools.cycle(script)
        self.now: Any = None
        self.num_drafted = 0
        self.outlooks: list[Outlook] = []
        self.records: list[RoundRecord] = []
        self.probes: list[ProbeRecord] = []
        self.confidences: list[list[float]] = []

    def num_probe_tokens(self, outlook: Outlook) -> int:
        return min(outlook.num_shadow_tokens, 8) if len(self.probes) < 50 and self.peek() == "probe" else 0

    def peek(self) -> Any:
        first = next(self.script)
        self.script = itertools.chain([first], self.script)
        return first

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        self.outlooks.append(outlook)
        self.now, self.num_drafted = next(self.script), 0
        if self.now == "probe":
            return 0
        return min(self.now if isinstance(self.now, int) else self.now[0], outlook.limit)

    def goes_on(self, confidences: Sequence[float]) -> bool:
        self.num_drafted += 1
        self.confidences.append(list(confidences))
        return isinstance(self.now, int) or self.num_drafted < self.now[1]

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)

    def observe_probe(self, probe: ProbeRecord) -> None:
        self.probes.append(probe)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a scripted controller into the next calls."""

    def put(*steps: Any) -> Scripted:
        controller = Scripted(steps)
        monkeypatch.setattr(call_module, "_controller", lambda *_: controller)
        return controller

    return put


def generate(model: Any, draft: Any, inputs: Any = None, **options: Any) -> Any:
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)} if inputs is None else inputs
    options = {"do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True} | options
    return model.generate(**inputs, draft_model=draft, **options)


# ---- exact whatever is decided -------------------------------------------------------------------------------------

SCRIPTS = {
    "lengths": [0, 3, 1, 0, 0, 5, 2],
    "stops": [(6, 1), 0, (6, 3), (2, 5)],
    "long pauses": [4, *[0] * 14, 4, *[0] * 3],
    "probes": [2, *[0] * 9, "probe", 0, 0, "probe", 3],
}


def outcomes_with(
    target: PreTrainedModel, drafts: dict[str, Any], script: Any, steps: list[Any], batch: int, **options: Any
) -> tuple[set[str], list[SpeculationStats]]:
    """Assert the greedy text of plain decoding with every draft, no fallback, and probes if the script has some.

    Returns:
        Which of "full", "none" and "partial" acceptance occurred with one draft or another, and the stats.
    """
    hf_specdec.enable(target)
    wanted = plain(target, prompts_of(batch), **options)
    seen: set[str] = set()
    stats = []
    for draft in drafts.values():
        controller = script(*steps)
        output = generate(target, draft, prompts_of(batch), **options)
        assert_same_ids(output.sequences, wanted)
        assert output.speculation.fallbacks == []
        seen |= outcomes_of(controller.records)
        assert bool(controller.probes) == ("probe" in steps)
        stats.append(output.speculation)
    return seen, stats


@pytest.mark.parametrize("steps", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_is_that_of_plain_decoding(
    target: LlamaForCausalLM, drafts: Drafts, script: Any, batch: int, steps: list[Any]
) -> None:
    seen, _ = outcomes_with(target, drafts, script, steps, batch, max_new_tokens=120)
    assert seen >= EVERY_OUTCOME


@pytest.mark.parametrize("steps", [[*[0] * 14, 3, 3], [*[0] * 14, "probe", 3]], ids=["draft", "probe"])
def test_a_draft_that_starts_when_a_row_has_left(
    target: LlamaForCausalLM, drafts: Drafts, script: Any, steps: list[Any]
) -> None:
    hf_specdec.enable(target)
    inputs = prompts([3, 6, 5])
    end = token_after(plain(target, inputs, max_new_tokens=60)[0], 4, 6)
    wanted = plain(target, inputs, max_new_tokens=60, eos_token_id=end)
    for draft in drafts.values():
        controller = script(*steps)
        output = generate(target, draft, inputs, max_new_tokens=60, eos_token_id=end)
        assert_same_ids(output.sequences, wanted)
        assert output.speculation.fallbacks == []
        first = next(record for record in controller.records if record.num_draft_tokens)
        assert len(first.rows) < 3


class Harmless(LogitsProcessor):
    """Changes nothing, but must be called as in plain decoding."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


@pytest.mark.parametrize("steps", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_greedy_text_in_lockstep(target: LlamaForCausalLM, drafts: Drafts, script: Any, steps: list[Any]) -> None:
    options = {"max_new_tokens": 100, "logits_processor": [Harmless()]}
    seen, stats = outcomes_with(target, drafts, script, steps, 3, **options)
    assert seen >= EVERY_OUTCOME
    assert all(one.is_lockstep for one in stats)


@pytest.mark.parametrize("steps", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["target", "draft", "both"])
def test_recurrent_models(script: Any, steps: list[Any], batch: int, kind: str) -> None:
    target: PreTrainedModel = models.build_target() if kind == "draft" else models.build_mamba()
    noisy = models.build_noisy(target)
    drafts: dict[str, Any] = {
        "target": {"unrelated": models.build_target(seed=3)},
        "draft": {"unrelated": models.build_mamba()},
        "both": {"identical": copy.deepcopy(target), "noisy": noisy, "unrelated": models.build_mamba(seed=9)},
    }[kind]
    seen, _ = outcomes_with(target, drafts, script, steps, batch, max_new_tokens=70)
    assert seen >= (EVERY_OUTCOME if kind == "both" else {"none"})


@pytest.mark.parametrize("steps", [SCRIPTS["long pauses"], SCRIPTS["probes"], [*[0] * 9, "probe", 2, 2]], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["t5", "whisper", "llava"])
def test_drafts_that_read_more_than_text_can_start_late(name: str, batch: int, script: Any, steps: list[Any]) -> None:
    example = build_conditional(name, batch=batch)
    draft = models.build_noisy(example.model)
    hf_specdec.enable(example.model)
    # Whisper's own `generate` returns other columns without it.
    options = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    wanted = example.model.generate(**example.inputs, **options)
    controller = script(*steps)
    output = generate(example.model, draft, example.inputs, **options)
    assert_same_ids(output["sequences"], wanted["sequences"])
    assert any(record.num_draft_tokens for record in controller.records)
    assert bool(controller.probes) == ("probe" in steps)


@pytest.mark.parametrize("eos_after", [3, 11, 12, 17])
def test_text_ends_where_plain_decoding_ends(
    target: LlamaForCausalLM, drafts: Drafts, script: Any, eos_after: int
) -> None:
    hf_specdec.enable(target)
    text = plain(target, prompts_of(1), max_new_tokens=48)
    eos = token_after(text[0], eos_after, PROMPT.shape[1])
    wanted = plain(target, prompts_of(1), max_new_tokens=48, eos_token_id=eos)
    assert wanted.shape[1] < text.shape[1]
    for draft in drafts.values():
        controller = script(3, 0, 0, 0, 0, 0, 0, 0, 0, "probe", (5, 2))
        output = generate(target, draft, eos_token_id=eos)
        assert_same_ids(output.sequences, wanted)
        # The cut is no rejection: labels and counts are those before it.
        for record in controller.records:
            assert all(len(labels) == record.num_draft_tokens for labels in record.survival)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_adaptive_itself_on_all_drafts(target: LlamaForCausalLM, drafts: Drafts, kind: str, do_sample: bool) -> None:
    hf_specdec.enable(target)
    for _ in range(3):
        output = generate(target, drafts[kind], prompts_of(3), max_new_tokens=100, do_sample=do_sample)
        if not do_sample:
            assert_same_ids(output.sequences, plain(target, prompts_of(3), max_new_tokens=100))
    assert output.speculation.fallbacks == []
    assert output.speculation.controller_hints is not None


# ---- at K = 0 it is plain decoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_that_is_never_used_is_never_run(
    target: LlamaForCausalLM, drafts: Drafts, script: Any, batch: int
) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["noisy"])
    script(0)
    with watched(drafts["noisy"]) as of_draft, watched(target) as of_target:
        output = generate(target, drafts["noisy"], prompts_of(batch), max_new_tokens=30)
    assert of_draft == []
    # The prompt, then a token each time; the cache that is handed back lacks only the last.
    assert set(of_target[1:]) == {1}
    assert len(of_target) == 30
    stats = output.speculation
    assert stats.num_draft_forwards == stats.draft_prefill_seconds == stats.catch_up_seconds == 0
    assert stats.num_plain_steps == stats.num_rounds == 29


def test_the_draft_catches_up_in_one_forward(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    draft = drafts["identical"]
    admit(target, draft)
    controller = script(*[0] * 20, 2, *[0] * 15, 2)
    with watched(draft) as widths:
        output = generate(target, draft, max_new_tokens=44)
    num_prompt = PROMPT.shape[1]
    # Everything but the last token at once, then two steps; after the pause all that was written in it, and two more.
    assert widths[0] == num_prompt + 20
    assert widths[1:3] == [1, 1]
    # The two drafted and the bonus of that round, of which the draft has read the first.
    assert widths[3] == 16
    assert widths[4:6] == [1, 1]
    caught_up = [record.num_caught_up_tokens for record in controller.records if record.num_caught_up_tokens]
    assert caught_up == [num_prompt + 20, 16]
    assert output.speculation.draft_prefill_seconds > 0
    assert output.speculation.catch_up_seconds > output.speculation.draft_prefill_seconds


def test_a_short_pause_costs_no_forward_of_its_own(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    draft = drafts["identical"]
    admit(target, draft)
    script(2, 0, 0, 2, 0, 0)
    with watched(draft) as widths:
        generate(target, draft, max_new_tokens=10)
    assert widths == [PROMPT.shape[1], 1, 1, 4, 1]


def test_a_probe_reads_the_text_once(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["identical"])
    controller = script(*[0] * 10, "probe", *[0] * 8, "probe", 2)
    with watched(drafts["identical"]) as widths:
        output = generate(target, drafts["identical"], max_new_tokens=26)
    # What comes before the judged tokens, then those (each judged by what follows the token before it).
    assert widths[:2] == [PROMPT.shape[1] + 2, 8]
    assert widths[2:4] == [1, 8]
    assert [probe.agreement for probe in controller.probes] == [((1.0,) * 8,)] * 2
    assert output.speculation.probes == controller.probes
    assert output.speculation.probe_seconds > 0
    assert [probe.num_after_round for probe in controller.probes] == [10, 19]


def test_probes_tell_a_useless_draft_from_a_good_one(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    means = {}
    for do_sample, kind in itertools.product((False, True), KINDS):
        controller = script(*[0] * 8, "probe")
        torch.manual_seed(0)
        generate(target, drafts[kind], max_new_tokens=200, do_sample=do_sample, top_k=0)
        values = [value for probe in controller.probes for row in probe.agreement for value in row]
        assert len(values) > 100
        assert all(0 <= value <= 1 for value in values)
        means[do_sample, kind] = sum(values) / len(values)
    for do_sample in (False, True):
        assert means[do_sample, "identical"] == pytest.approx(1.0, abs=1e-4)
        assert means[do_sample, "unrelated"] < 0.4 < means[do_sample, "noisy"] < 0.99


def test_agreement_on_plain_text_estimates_the_overlap_of_the_two_laws(
    target: LlamaForCausalLM, drafts: Drafts, script: Any
) -> None:
    hf_specdec.enable(target)
    draft = drafts["noisy"]
    controller = script(*[0] * 8, "probe")
    torch.manual_seed(1)
    output = generate(target, draft, max_new_tokens=402, do_sample=True, top_k=0)
    text = output.sequences
    with torch.no_grad():
        laws = [model(text).logits.float().softmax(-1)[0] for model in (target, draft)]
    overlap = torch.minimum(*laws).sum(-1)
    chances = torch.tensor([value for probe in controller.probes for value in probe.agreement[0]])
    # The first 8 of every 9 plain steps: which they are does not matter to the mean.
    assert chances.mean().item() == pytest.approx(overlap[PROMPT.shape[1] :].mean().item(), abs=0.06)
    exact = (laws[1] / laws[0]).gather(-1, text.roll(-1)[0, :, None]).squeeze(-1).clamp(max=1)
    starts = [PROMPT.shape[1] + 1 + 9 * index for index in range(len(controller.probes))]
    for start, probe in zip(starts, controller.probes, strict=True):
        torch.testing.assert_close(torch.tensor(probe.agreement[0]), exact[start - 1 : start + 7], atol=1e-3, rtol=1e-3)


# ---- what the controller is told -----------------------------------------------------------------------------------


def test_labels_follow_the_rule_that_decides(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    for verification, mode in itertools.product(("block", "token"), ("apart", "lockstep", "one by one")):
        controller = script(3)
        torch.manual_seed(0)
        options: dict[str, Any] = {
            "lockstep": {"output_hidden_states": True},
            "one by one": {"logits_processor": [Harmless()]},
        }
        generate(
            target,
            drafts["noisy"],
            prompts_of(3),
            max_new_tokens=200,
            do_sample=True,
            top_k=0,
            speculative_config={"verification": verification},
            **options.get(mode, {}),
        )
        full = [record for record in controller.records if record.num_draft_tokens == 3]
        labels = [row[0] for record in full for row in record.survival]
        outcomes = [
            evaluated > 0 and accepted > 0
            for record in full
            for accepted, evaluated in zip(record.num_accepted_tokens, record.num_evaluated_tokens, strict=True)
        ]
        assert len(labels) == len(outcomes) > 50
        assert all(0 <= label <= 1 for label in labels)
        assert sum(labels) / len(labels) == pytest.approx(sum(outcomes) / len(outcomes), abs=0.12)


def test_confidences_are_the_largest_probabilities_of_rows_still_written(
    target: LlamaForCausalLM, drafts: Drafts, script: Any
) -> None:
    hf_specdec.enable(target)
    controller = script((5, 2))
    generate(target, drafts["identical"], prompts_of(3), max_new_tokens=20)
    assert 2 in {record.num_draft_tokens for record in controller.records} <= {0, 1, 2}
    for record in controller.records:
        lengths = [record.num_draft_tokens] * len(record.rows) if record.num_draft_tokens else []
        assert [len(row) for row in record.confidences] == lengths
    text = generate(target, drafts["identical"], max_new_tokens=20).sequences
    with torch.no_grad():
        probs = target(text).logits.softmax(-1).amax(-1)[0, PROMPT.shape[1] :]
    first = controller.records[-2].confidences[0][0]
    assert any(abs(first - value) < 1e-4 for value in probs.tolist())


def test_the_outlook(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    controller = script(*[0] * 3, 2, *[0] * 3)
    generate(target, drafts["identical"], max_new_tokens=12)
    first, *_, last = controller.outlooks
    num_prompt = PROMPT.shape[1]
    assert first == Outlook(
        limit=10,
        num_remaining_tokens=11,
        num_unread_tokens=num_prompt,
        reads_confidence=True,
    )
    assert controller.outlooks[3].num_shadow_tokens == 3
    assert controller.outlooks[3].num_unread_tokens == num_prompt + 3
    assert controller.outlooks[4].num_shadow_tokens == 0
    assert last.limit == last.num_remaining_tokens - 1 == 0


def test_without_a_limit_rounds_stay_within_the_longest_draft(
    target: LlamaForCausalLM, drafts: Drafts, script: Any
) -> None:
    hf_specdec.enable(target)
    controller = script(10_000)
    generate(target, drafts["identical"], max_new_tokens=100)
    assert max(record.num_draft_tokens for record in controller.records) == LONGEST_ADAPTIVE_DRAFT


def test_finished_rows_that_stay_in_the_batch_are_not_asked_about(
    target: LlamaForCausalLM, drafts: Drafts, script: Any
) -> None:
    hf_specdec.enable(target)
    inputs = prompts([3, 6, 5])
    text = plain(target, inputs, max_new_tokens=40)
    eos = token_after(text[0], 6, 6)
    controller = script(2, 0)
    output = generate(
        target,
        drafts["identical"],
        inputs,
        max_new_tokens=40,
        eos_token_id=eos,
        pad_token_id=0,
        logits_processor=[Harmless()],
    )
    assert_same_ids(output.sequences, plain(target, inputs, max_new_tokens=40, eos_token_id=eos, pad_token_id=0))
    late = [outlook for outlook in controller.outlooks if outlook.num_rows < 3]
    assert late
    assert {outlook.num_batch_rows for outlook in late} == {3}
    assert {len(values) for values in controller.confidences} == {outlook.num_rows for outlook in controller.outlooks}


# ---- what goes wrong with the draft --------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [[*[0] * 10, "probe", 2], [*[0] * 10, 3]], ids=["probe", "catching up"])
def test_a_draft_that_fails_late_costs_nothing(
    target: LlamaForCausalLM, drafts: Drafts, script: Any, steps: list[Any], at: int
) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["noisy"])
    script(*steps)
    wanted = plain(target, prompts_of(3), max_new_tokens=40)
    with (
        failing(drafts["noisy"], at, RuntimeError("out of luck")),
        pytest.warns(SpeculationWarning, match="out of luck"),
    ):
        output = generate(target, drafts["noisy"], prompts_of(3), max_new_tokens=40)
    assert_same_ids(output.sequences, wanted)
    assert len(output.speculation.fallbacks) == 1


def test_nan_in_a_probe_ends_drafting(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["noisy"])
    script(*[0] * 10, "probe", 2)
    wanted = plain(target, prompts_of(1), max_new_tokens=40)
    with spoiled(drafts["noisy"], 1, float("nan")), pytest.warns(SpeculationWarning, match="NaN"):
        output = generate(target, drafts["noisy"], max_new_tokens=40)
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.probes == []


def test_strict_raises_for_a_failing_probe(target: LlamaForCausalLM, drafts: Drafts, script: Any) -> None:
    hf_specdec.enable(target)
    admit(target, drafts["noisy"])
    script(*[0] * 10, "probe")
    with failing(drafts["noisy"], 1, RuntimeError("out of luck")), pytest.raises(hf_specdec.DraftFailedError):
        generate(target, drafts["noisy"], speculative_config={"strict": True})


def test_a_context_that_ends_during_a_pause(script: Any) -> None:
    target, draft = models.build_target(), models.build_target(seed=1, max_position_embeddings=24)
    hf_specdec.enable(target)
    script(2, *[0] * 30, 2)
    with pytest.warns(SpeculationWarning, match="outgrown the draft's context"):
        output = generate(target, draft, max_new_tokens=60)
    assert_same_ids(output.sequences, plain(target, prompts_of(1), max_new_tokens=60))


# ---- what is learned, and where it lives ---------------------------------------------------------------------------


@pytest.fixture
def nothing_learned() -> Iterator[None]:
    learned.forget_learned(None)
    yield
    learned.forget_learned(None)


def rounds_known(target: PreTrainedModel) -> list[int]:
    """Return how many plain steps each controller of the target has timed."""
    settings = [kept for drafts in learned._learned.get(target, {}).values() for kept in drafts.values()]
    return [len(costs.plain_samples.values) for one in settings for costs in one._costs.values()]


@pytest.mark.usefixtures("nothing_learned")
def test_the_next_call_starts_warm_and_disable_forgets(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    before = state_of(target), state_of(drafts["noisy"])
    first = generate(target, drafts["noisy"], max_new_tokens=60).speculation
    assert first.draft_lengths[:2] == [0, 0]
    assert rounds_known(target) != []
    second = generate(target, drafts["noisy"], max_new_tokens=60).speculation
    assert second.controller_hints["cost_ratio"] is not None
    assert (state_of(target), state_of(drafts["noisy"])) == before
    hf_specdec.disable(target)
    assert rounds_known(target) == []


@pytest.mark.usefixtures("nothing_learned")
def test_other_drafts_and_other_sampling_learn_apart(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    for options in ({}, {"do_sample": True, "temperature": 0.5}, {"do_sample": True, "temperature": 1.5}):
        generate(target, drafts["noisy"], max_new_tokens=8, **options)
    generate(target, drafts["unrelated"], max_new_tokens=8)
    kept = learned._learned[target]
    assert {draft is drafts["noisy"]: len(settings) for draft, settings in kept.items()} == {True: 3, False: 1}


@pytest.mark.usefixtures("nothing_learned")
def test_settings_do_not_pile_up(target: LlamaForCausalLM, drafts: Drafts) -> None:
    for index in range(learned.MOST_SETTINGS + 5):
        with learned.lent_controller(target, drafts["noisy"], index, None):
            pass
    assert len(learned._learned[target][drafts["noisy"]]) == learned.MOST_SETTINGS


@pytest.mark.usefixtures("nothing_learned")
def test_two_texts_at_once_do_not_share_a_controller(target: LlamaForCausalLM, drafts: Drafts) -> None:
    loan = partial(learned.lent_controller, target, drafts["noisy"], 0, None)
    with loan() as first, loan() as second:
        assert first is not second
    # Whoever is last to finish stays.
    with loan() as third:
        assert third is first


@pytest.mark.usefixtures("nothing_learned")
def test_what_was_learned_goes_with_the_models(drafts: Drafts) -> None:
    target = models.build_target()
    with learned.lent_controller(target, drafts["noisy"], 0, None):
        pass
    assert len(learned._learned) == 1
    del target
    assert len(learned._learned) == 0


@pytest.mark.usefixtures("nothing_learned")
def test_an_interrupted_call_leaves_the_controller_in_place(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)

    def interrupt(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(target, drafts["noisy"], speculative_config={"on_round": interrupt})
    assert rounds_known(target) == [1]
    generate(target, drafts["noisy"], max_new_tokens=8)


@pytest.mark.usefixtures("nothing_learned")
def test_hints_start_a_controller_elsewhere(target: LlamaForCausalLM, drafts: Drafts) -> None:
    hf_specdec.enable(target)
    hints = generate(target, drafts["noisy"], max_new_tokens=60).speculation.controller_hints
    json.dumps(hints)
    learned.forget_learned(None)
    output = generate(target, drafts["noisy"], max_new_tokens=8, speculative_config={"controller_hints": hints})
    assert output.speculation.controller_hints["survival"] == pytest.approx(hints["survival"], abs=0.3)
    assert generate(target, drafts["noisy"], num_draft_tokens=3).speculation.controller_hints is None


@contextmanager
def a_clock_that_makes_drafting_pay(monkeypatch: pytest.MonkeyPatch, target: Any, draft: Any) -> Iterator[None]:
    """Let a target forward take a second, a draft forward a hundredth and nothing else any time."""
    now = [0.0]
    handles = [
        model.register_forward_hook(lambda *_, cost=cost: now.__setitem__(0, now[0] + cost))
        for model, cost in ((target, 1.0), (draft, 0.01))
    ]
    monkeypatch.setattr("hf_specdec.engine.clock.time.perf_counter", lambda: now[0])
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.usefixtures("nothing_learned")
@pytest.mark.parametrize("batch", [1, 3])
def test_where_drafting_pays_it_drafts_far_and_where_it_does_not_it_stays_plain(
    target: LlamaForCausalLM, drafts: Drafts, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_specdec.enable(target)
    stats: dict[str, SpeculationStats] = {}
    for kind in KINDS:
        admit(target, drafts[kind])
        with a_clock_that_makes_drafting_pay(monkeypatch, target, drafts[kind]):
            output = generate(target, drafts[kind], prompts_of(batch), max_new_tokens=300)
        assert_same_ids(output.sequences, plain(target, prompts_of(batch), max_new_tokens=300))
        stats[kind] = output.speculation
    assert sorted(stats["identical"].draft_lengths)[len(stats["identical"].rounds) // 2] >= 12
    assert stats["identical"].num_target_forwards < 60
    assert stats["noisy"].num_target_forwards < 250
    for one in stats.values():
        seconds = one.num_target_forwards + 0.01 * one.num_draft_forwards
        assert seconds < 1.02 * 300 + 5
    assert isinstance(AdaptiveDraftLength(stats["noisy"].controller_hints), AdaptiveDraftLength)
