"""The simulator, the traces it runs on and the rules it compares, by hand-computed cases; and what ours must reach."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from hf_specdec.benchmark.rivals import (
    OURS,
    RULES,
    FixedLengths,
    MovingAverageTiers,
    TransformersConfidence,
    TransformersHeuristic,
    UpperConfidenceBound,
)
from hf_specdec.benchmark.simulator import CostModel, Outcome, simulate
from hf_specdec.benchmark.traces import (
    UNKNOWN_CONFIDENCE,
    WORKLOADS,
    Trace,
    synthetic_trace,
    trace_of,
)
from hf_specdec.controller import AdaptiveDraftLength, DraftLengthController, FixedDraftLength, Outlook
from hf_specdec.metrics import ProbeRecord, RoundRecord, SpeculationStats

# A draft step is 0.1, a verification 1 + 0.01 per further token, a drafting round 0.05 more.
COSTS = CostModel(draft_step=0.1)


def trace(chances: Sequence[float], confidences: Sequence[float] | None = None) -> Trace:
    sureness = [0.5] * len(chances) if confidences is None else confidences
    return Trace(name="made", chances=tuple(chances), confidences=tuple(sureness))


class Scripted:
    """Does what it is told and notes what it hears: per round the draft length, and before some a probe."""

    def __init__(self, lengths: Sequence[int], probes: dict[int, int] | None = None, stop_below: float = 0.0) -> None:
        self.lengths = list(lengths)
        self.probes = probes or {}
        self.stop_below = stop_below
        self.outlooks: list[Outlook] = []
        self.heard: list[list[float]] = []
        self.records: list[RoundRecord] = []
        self.probe_records: list[ProbeRecord] = []

    def num_probe_tokens(self, outlook: Outlook) -> int:
        return self.probes.pop(len(self.records), 0)

    def next_num_draft_tokens(self, outlook: Outlook) -> int:
        self.outlooks.append(outlook)
        return min(self.lengths[len(self.records) % len(self.lengths)], outlook.limit)

    def goes_on(self, confidences: Sequence[float]) -> bool:
        self.heard.append(list(confidences))
        return min(confidences) >= self.stop_below

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)

    def observe_probe(self, probe: ProbeRecord) -> None:
        self.probe_records.append(probe)


# ---- times and tokens ----------------------------------------------------------------------------------------------


def test_fixed_length_at_full_acceptance_has_the_exact_speed() -> None:
    outcome = simulate(FixedDraftLength(3), trace([1.0]), COSTS, 400)
    assert outcome.num_rounds == 100
    assert outcome.seconds == pytest.approx(100 * (0.3 + 1.03 + 0.05))
    assert outcome.speed == pytest.approx(400 / 138)
    assert (outcome.mean_draft_tokens, outcome.plain_share, outcome.num_probes) == (3.0, 0.0, 0)


def test_fixed_length_at_no_acceptance_has_the_exact_speed() -> None:
    outcome = simulate(FixedDraftLength(3), trace([0.0]), COSTS, 100)
    # The last three rounds have room for 2, 1 and 0 draft tokens.
    seconds = 97 * 1.38 + (0.2 + 1.02 + 0.05) + (0.1 + 1.01 + 0.05) + 1.0
    assert outcome.num_rounds == 100
    assert outcome.num_plain_steps == 1
    assert outcome.speed == pytest.approx(100 / seconds)
    # All that was lost was lost before the plain step.
    assert outcome.largest_loss == pytest.approx(seconds - 100)


def test_plain_decoding_has_speed_one_and_loses_nothing() -> None:
    outcome = simulate(FixedDraftLength(0), trace([0.7]), COSTS, 50)
    assert outcome.speed == pytest.approx(1.0)
    assert outcome.plain_share == 1.0
    assert outcome.largest_loss == pytest.approx(0.0)


def test_a_rejection_costs_its_own_position() -> None:
    # Two drafted per round; x marks what the target writes: 1 0→x | 1 1 x | 0→x | …
    controller = Scripted([2])
    outcome = simulate(controller, trace([1, 0, 1, 1, 1, 0, 1, 1, 1]), COSTS, 9)
    assert [record.num_accepted_tokens for record in controller.records] == [(1,), (2,), (0,), (2,)]
    assert [record.num_committed_tokens for record in controller.records] == [2, 3, 1, 3]
    assert [record.num_evaluated_tokens for record in controller.records] == [(2,), (2,), (1,), (2,)]
    assert outcome.num_draft_tokens == 8


def test_records_carry_survival_and_confidence_of_their_positions() -> None:
    controller = Scripted([3])
    simulate(controller, trace([0.5, 0.4, 1.0, 1.0], [0.9, 0.8, 0.7, 0.6]), COSTS, 4)
    first = controller.records[0]
    assert first.survival == (pytest.approx((0.5, 0.2, 0.2)),)
    assert first.confidences == ((0.9, 0.8, 0.7),)
    assert first.round_seconds == pytest.approx(1.38)
    assert (first.draft_seconds, first.verify_seconds) == (pytest.approx(0.3), pytest.approx(1.03))


def test_a_controller_may_stop_inside_a_round_after_the_token_it_heard_of() -> None:
    controller = Scripted([4], stop_below=0.5)
    simulate(controller, trace([1.0] * 9, [0.9, 0.3, 0.9, 0.9, 0.9, 0.9, 0.9, 0.2, 0.9]), COSTS, 8)
    # Two drafted and the bonus token; then four, of which the last needs no answer.
    assert controller.heard[:5] == [[0.9], [0.3], [0.9], [0.9], [0.9]]
    assert [record.num_draft_tokens for record in controller.records] == [2, 4]


def test_without_reading_confidence_nobody_is_asked() -> None:
    controller = Scripted([4], stop_below=0.5)
    simulate(controller, trace([1.0], [0.1]), COSTS, 10, reads_confidence=False)
    assert controller.heard == []
    assert [record.num_draft_tokens for record in controller.records] == [4, 4]
    assert controller.records[0].confidences == ()
    assert not any(outlook.reads_confidence for outlook in controller.outlooks)


def test_limit_is_the_room_left_and_the_bound() -> None:
    controller = Scripted([0])
    simulate(controller, trace([1.0]), COSTS, 6, most_draft_tokens=3)
    assert [outlook.limit for outlook in controller.outlooks] == [3, 3, 3, 2, 1, 0]
    assert [outlook.num_remaining_tokens for outlook in controller.outlooks] == [6, 5, 4, 3, 2, 1]


# ---- catching up and probes ----------------------------------------------------------------------------------------


def test_drafting_after_plain_steps_pays_for_catching_up() -> None:
    controller = Scripted([0] * 40 + [1])
    outcome = simulate(controller, trace([1.0]), COSTS, 42)
    last = controller.records[-1]
    assert last.num_caught_up_tokens == controller.outlooks[-1].num_unread_tokens == 40
    # A draft step, and a 128th of one per token.
    assert last.catch_up_seconds == pytest.approx(0.1 + 40 * 0.1 / 128)
    assert outcome.seconds == pytest.approx(40 + 0.13125 + 0.1 + 1.01 + 0.05)


def test_reading_nothing_costs_nothing_and_a_token_can_be_made_dear() -> None:
    controller = Scripted([0, 1, 1])
    simulate(controller, trace([1.0]), replace(COSTS, per_caught_up_token=0.25), 5)
    assert [record.catch_up_seconds for record in controller.records] == [0.0, pytest.approx(0.35), 0.0]


def test_a_probe_sees_the_latest_tokens_and_is_charged() -> None:
    controller = Scripted([0] * 60, probes={40: 3})
    outcome = simulate(controller, trace([position / 100 for position in range(100)]), COSTS, 60)
    (probe,) = controller.probe_records
    assert probe.agreement == ((0.37, 0.38, 0.39),)
    assert probe.confidences == ((0.5, 0.5, 0.5),)
    assert (probe.num_after_round, probe.num_caught_up_tokens) == (40, 40)
    assert probe.seconds == pytest.approx(0.13125)
    assert outcome.seconds == pytest.approx(60.13125)
    assert outcome.num_probes == 1
    assert outcome.largest_loss == pytest.approx(0.13125)


def test_shadow_grows_over_plain_steps_and_unread_ends_with_a_probe() -> None:
    controller = Scripted([0] * 300 + [1], probes={10: 4})
    simulate(controller, trace([0.0]), COSTS, 303)
    assert [outlook.num_shadow_tokens for outlook in controller.outlooks[:12]] == [*range(10), 0, 1]
    assert [outlook.num_unread_tokens for outlook in controller.outlooks[8:12]] == [8, 9, 0, 1]
    assert controller.outlooks[300].num_shadow_tokens == 256
    assert (controller.outlooks[301].num_shadow_tokens, controller.outlooks[301].num_unread_tokens) == (0, 0)


def test_what_a_probe_looks_at_again_is_read_again() -> None:
    controller = Scripted([0] * 60, probes={40: 8, 42: 20})
    simulate(controller, trace([0.5]), COSTS, 60)
    assert [probe.num_caught_up_tokens for probe in controller.probe_records] == [40, 20]


# ---- batches -------------------------------------------------------------------------------------------------------


def test_rows_of_a_batch_advance_on_their_own_and_leave() -> None:
    controller = Scripted([1])
    outcome = simulate(controller, [trace([1.0]), trace([0.0])], COSTS, 4)
    assert [record.rows for record in controller.records] == [(0, 1), (0, 1), (1,), (1,)]
    assert [record.num_accepted_tokens for record in controller.records] == [(1, 0), (1, 0), (0,), (0,)]
    assert [outlook.num_batch_rows for outlook in controller.outlooks] == [2, 2, 1, 1]
    # Four tokens per verification, then two, then one; plain decoding takes four steps over two tokens.
    seconds = 2 * (0.1 + 1.03 + 0.05) + (0.1 + 1.01 + 0.05) + 1.0
    assert outcome.seconds == pytest.approx(seconds)
    assert outcome.speed == pytest.approx(4 * 1.01 / seconds)


def test_a_batch_hears_the_confidence_of_every_row() -> None:
    controller = Scripted([2])
    simulate(controller, [trace([1.0], [0.9]), trace([1.0], [0.2])], COSTS, 3)
    assert controller.heard == [[0.9, 0.2]]


def test_a_row_that_needs_fewer_tokens_is_cut() -> None:
    controller = Scripted([1, 3])
    # Row 0 has one token left when the other has two; both draft one.
    simulate(controller, [trace([1, 1, 1, 1]), trace([0, 1, 1, 1])], COSTS, 3)
    assert [record.num_accepted_tokens for record in controller.records] == [(1, 0), (1, 1)]
    assert [len(token_ids) for token_ids in controller.records[1].committed_token_ids] == [1, 2]


@pytest.mark.parametrize("num_rows", [1, 4])
def test_ours_keeps_a_batch_within_its_ledger(num_rows: int) -> None:
    traces = [synthetic_trace("switching", 1500, seed=seed) for seed in range(num_rows)]
    outcome = simulate(AdaptiveDraftLength(), traces, CostModel(draft_step=0.5), 1500)
    # 2 % and 20 plain steps, and one round of 4 or probe more.
    assert 0 < outcome.largest_loss <= (0.02 * 1500 + 20 + 4) * COSTS.forward(num_rows)


def test_loss_is_measured_against_plain_decoding_of_the_rows_still_written() -> None:
    costs = CostModel(draft_step=1.0)
    outcome = simulate(FixedDraftLength(1), [trace([1.0]), trace([0.0])], costs, 4)
    # Two rounds over both rows give 1.5 tokens per row, worth 1.01 each; a third gives the second row one, worth 1.
    assert outcome.largest_loss == pytest.approx(2 * (1 + 1.03 + 0.05 - 1.5 * 1.01) + (1 + 1.01 + 0.05 - 1))


@pytest.mark.parametrize("texts", [[], ()])
def test_nothing_to_write_is_refused(texts: Sequence[Trace]) -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        simulate(FixedDraftLength(1), texts, COSTS, 5)


# ---- chance and noise ----------------------------------------------------------------------------------------------


def test_same_seed_same_outcome_and_another_seed_another() -> None:
    text = synthetic_trace("switching", 800)
    costs = CostModel(draft_step=0.165, noise=0.1)

    def run(seed: int) -> Outcome:
        return simulate(AdaptiveDraftLength(), text, costs, 800, seed=seed)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_noise_changes_times_but_not_what_is_accepted_and_is_fair_on_average() -> None:
    text = synthetic_trace("easy", 2000)
    pairs = [
        [simulate(FixedDraftLength(4), text, costs, 2000, seed=seed) for costs in (COSTS, replace(COSTS, noise=0.1))]
        for seed in range(12)
    ]
    assert all(noisy.num_rounds == exact.num_rounds and noisy.seconds != exact.seconds for exact, noisy in pairs)
    # Spikes alone make every time 4.5 % longer on average, those of plain decoding too.
    assert fmean(noisy.speed / exact.speed for exact, noisy in pairs) == pytest.approx(1.0, abs=0.02)


def test_noise_has_spikes() -> None:
    controller = Scripted([0])
    simulate(controller, trace([1.0]), replace(COSTS, noise=0.05), 4000)
    times = sorted(record.round_seconds for record in controller.records)
    assert sum(seconds > 5 for seconds in times) == pytest.approx(20, abs=12)
    assert times[2000] == pytest.approx(1.0, abs=0.02)


def test_accepted_counts_follow_the_chances() -> None:
    outcome = simulate(FixedDraftLength(1), trace([0.8]), COSTS, 9000)
    # 1.8 tokens per round.
    assert outcome.num_rounds == pytest.approx(5000, rel=0.02)


# ---- traces --------------------------------------------------------------------------------------------------------


def test_synthetic_traces_are_seeded() -> None:
    assert synthetic_trace("hard", 200, seed=1) == synthetic_trace("hard", 200, seed=1)
    assert synthetic_trace("hard", 200, seed=1) != synthetic_trace("hard", 200, seed=2)


def test_confidence_is_the_chance_blurred() -> None:
    exact = synthetic_trace("switching", 500, confidence_noise=0.0)
    assert exact.confidences == pytest.approx(exact.chances)
    noisy = synthetic_trace("switching", 500)
    assert noisy.chances == exact.chances
    assert noisy.confidences != pytest.approx(exact.chances, abs=0.1)


def test_hard_labels_are_drawn_from_the_chances() -> None:
    soft, hard = (synthetic_trace("easy", 5000, is_greedy=is_greedy) for is_greedy in (False, True))
    assert set(hard.chances) == {0.0, 1.0}
    assert hard.confidences == soft.confidences
    assert fmean(hard.chances) == pytest.approx(fmean(soft.chances), abs=0.02)


def test_switching_text_has_long_stretches_of_both_kinds() -> None:
    text = synthetic_trace("switching", 20_000)
    windows = [fmean(text.chances[start : start + 100]) for start in range(0, 20_000, 100)]
    assert sum(mean > 0.65 for mean in windows) > 50
    assert sum(mean < 0.45 for mean in windows) > 50
    assert len(text.chances) == 20_000


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ValueError, match="`workload` must be one of easy, hard, switching, but is 'odd'"):
        synthetic_trace("odd", 10)


def test_a_short_trace_starts_again() -> None:
    assert trace([0.1, 0.2]).stretched(5).chances == (0.1, 0.2, 0.1, 0.2, 0.1, 0.2)
    assert trace([0.1, 0.2]).stretched(2) == trace([0.1, 0.2])


@pytest.mark.parametrize(("chances", "confidences"), [((), ()), ((0.5,), ())])
def test_an_empty_or_uneven_trace_is_refused(chances: tuple[float, ...], confidences: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must have at least one position"):
        Trace(name="bad", chances=chances, confidences=confidences)


def round_record(survival: tuple[float, ...], num_accepted: int, **changes: object) -> RoundRecord:
    record = RoundRecord(
        num_draft_tokens=len(survival),
        rows=(0,),
        num_accepted_tokens=(num_accepted,),
        num_evaluated_tokens=(min(num_accepted + 1, len(survival)),),
        committed_token_ids=((0,) * (num_accepted + 1),),
        draft_seconds=0.0,
        verify_seconds=0.0,
        round_seconds=0.0,
        survival=(survival,),
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def test_a_recorded_trace_holds_evaluated_tokens_and_probes_in_order() -> None:
    stats = SpeculationStats(
        rounds=[
            round_record((0.8, 0.4, 0.3), 1, confidences=((0.9, 0.5, 0.4),)),
            round_record((), 0),
            round_record((0.5, 0.5), 2),
        ],
        probes=[
            ProbeRecord(
                num_after_round=2,
                agreement=((0.25, 1.0),),
                confidences=((0.6, 0.7),),
                num_caught_up_tokens=2,
                seconds=0,
            )
        ],
    )
    recorded = trace_of(stats, "run")
    assert recorded.name == "run"
    # The third of the first round was drafted after a rejection and says nothing of the text.
    assert recorded.chances == pytest.approx((0.8, 0.5, 0.25, 1.0, 0.5, 1.0))
    assert recorded.confidences == (0.9, 0.5, 0.6, 0.7, UNKNOWN_CONFIDENCE, UNKNOWN_CONFIDENCE)


def test_rows_of_a_recorded_trace_come_one_after_the_other() -> None:
    both = round_record((0.5,), 1)
    both = replace(
        both,
        rows=(0, 1),
        num_accepted_tokens=(1, 0),
        num_evaluated_tokens=(1, 1),
        survival=((0.5,), (0.1,)),
        committed_token_ids=((0, 0), (0,)),
    )
    stats = SpeculationStats(rounds=[both, round_record((0.2,), 1, rows=(1,)), replace(both, survival=())])
    assert trace_of(stats).chances == pytest.approx((0.5, 1.0, 0.1, 0.2, 0.0))


def test_a_probe_belongs_to_the_rows_still_being_written() -> None:
    probe = ProbeRecord(
        num_after_round=1, agreement=((0.7,),), confidences=((0.6,),), num_caught_up_tokens=1, seconds=0.0
    )
    first = round_record((0.5,), 1, rows=(0,))
    second = round_record((0.3,), 0, rows=(1,))
    assert trace_of(SpeculationStats(rounds=[first, second], probes=[probe])).chances == (0.5, 0.7, 0.3)
    assert trace_of(SpeculationStats(rounds=[second, first], probes=[probe])).chances == (0.7, 0.5, 0.3)


def test_a_run_without_drafts_makes_no_trace() -> None:
    with pytest.raises(ValueError, match="Record a run that drafts"):
        trace_of(SpeculationStats(rounds=[round_record((), 0)]))


def test_a_saved_run_gives_back_the_trace_it_was_simulated_on(tmp_path: Path) -> None:
    # One token per round, so that nothing is drafted twice and no bonus token is skipped but after acceptance.
    text = synthetic_trace("easy", 300, seed=5)
    controller = Scripted([1])
    simulate(controller, text, COSTS, 300)
    SpeculationStats(rounds=controller.records).save(tmp_path / "run.json")
    recorded = trace_of(SpeculationStats.load(tmp_path / "run.json"))
    kept, position = [], 0
    for record in controller.records:
        if record.num_draft_tokens:
            kept.append(position)
        position += record.num_committed_tokens
    assert recorded.chances == pytest.approx([text.chances[index] for index in kept])
    assert recorded.confidences == pytest.approx([text.confidences[index] for index in kept])


# ---- rivals --------------------------------------------------------------------------------------------------------


def lengths_of(controller: DraftLengthController, text: Trace, num_tokens: int, *, reads: bool = False) -> list[int]:
    """The draft lengths a rule uses, apart from the last rounds, where the room ends."""
    lengths = []
    observe = controller.observe

    def noting(record: RoundRecord) -> None:
        lengths.append(record.num_draft_tokens)
        observe(record)

    controller.observe = noting  # type: ignore[method-assign]
    simulate(controller, text, COSTS, num_tokens, reads_confidence=reads)
    return lengths


def test_transformers_heuristic_grows_by_two_and_shrinks_by_one_down_to_one() -> None:
    assert lengths_of(TransformersHeuristic(), trace([1.0]), 1000)[:4] == [5, 7, 9, 11]
    assert lengths_of(TransformersHeuristic(), trace([0.0]), 1000)[:8] == [5, 4, 3, 2, 1, 1, 1, 1]


def test_transformers_confidence_stops_after_the_first_unsure_token() -> None:
    text = trace([1.0] * 231, [0.9] * 30 + [0.39] + [0.4] * 200)
    # Twenty and a bonus token; ten up to the unsure one; then 0.4 is sure enough.
    assert lengths_of(TransformersConfidence(), text, 200, reads=True)[:3] == [20, 10, 20]


def test_transformers_confidence_fits_its_threshold_again() -> None:
    rule = TransformersConfidence(refits=True)
    labels = (1.0, 1.0, 1.0, 0.0)
    rule.observe(round_record(labels, 3, confidences=((0.9, 0.8, 0.3, 0.6),)))
    assert rule.threshold == 0.4  # four tokens are too few
    rule.observe(round_record(labels, 3, confidences=((0.9, 0.7, 0.9, 0.2),)))
    # Positives .9 .9 .9 .8 .7 .3, negatives .6 .2. At .7: 0 + 3/6; at .3: 1/2 + 0, no lower, and the first stays.
    assert rule.threshold == 0.7
    unfitted = TransformersConfidence()
    for _ in range(4):
        unfitted.observe(round_record(labels, 3, confidences=((0.9, 0.8, 0.3, 0.6),)))
    assert unfitted.threshold == 0.4


def test_moving_average_waits_then_moves_between_tiers() -> None:
    good = lengths_of(MovingAverageTiers(), trace([1.0]), 1000)
    assert good[:12] == [3] * 10 + [7] * 2
    bad = lengths_of(MovingAverageTiers(), trace([0.0]), 1000)
    assert bad[:12] == [3] * 10 + [1] * 2
    # From 2 down to 0.25 takes ten rounds of nothing at weight 0.2: 2 · 0.8¹⁰ = 0.21.
    assert set(bad[10:990]) == {1}


def test_moving_average_rises_again() -> None:
    lengths = lengths_of(MovingAverageTiers(), trace([0.0] * 40 + [1.0] * 1000), 500)
    assert lengths[30] == 1
    assert lengths[60] == 7


def test_ucb_pulls_every_arm_once_and_then_mostly_the_best() -> None:
    lengths = lengths_of(UpperConfidenceBound(), trace([1.0]), 4000)
    assert lengths[:9] == list(range(9))
    assert lengths.count(8) > 0.8 * len(lengths)
    hopeless = lengths_of(UpperConfidenceBound(), trace([0.0]), 1000)
    assert hopeless.count(0) > 0.8 * len(hopeless)


def test_fixed_lengths_agree_with_runs_of_their_own() -> None:
    text = synthetic_trace("easy", 500)
    speeds = FixedLengths(text, 500, seed=2).speeds(0.3)
    assert len(speeds) == 17
    for length in (0, 1, 5, 16):
        own = simulate(FixedDraftLength(length), text, CostModel(draft_step=0.3), 500, seed=2)
        assert speeds[length] == pytest.approx(own.speed)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_every_rule_comes_to_an_end(rule: str, chance: float) -> None:
    outcome = simulate(RULES[rule].make(), trace([chance]), COSTS, 200, reads_confidence=RULES[rule].reads_confidence)
    assert 200 / 17 <= outcome.num_rounds <= 200 or rule.startswith("transformers")
    assert outcome.speed > 0.3


# ---- what ours must reach ------------------------------------------------------------------------------------------

RATIOS = (0.05, 0.165, 0.3, 0.5)
TRANSFORMERS: dict[str, Callable[[], DraftLengthController]] = {
    "heuristic": TransformersHeuristic,
    "confidence": TransformersConfidence,
    "confidence, fitted": functools.partial(TransformersConfidence, refits=True),
}
# (tokens, seeds)
REDUCED, WHOLE = (4000, 1), (12_000, 3)
SIZES = [pytest.param(REDUCED, id="reduced"), pytest.param(WHOLE, id="whole", marks=pytest.mark.slow)]
CELLS = [(ratio, workload) for workload in WORKLOADS for ratio in RATIOS]


@functools.cache
def text_of(workload: str, num_tokens: int, seed: int) -> Trace:
    return synthetic_trace(workload, num_tokens, seed=seed)


@functools.cache
def fixed_lengths(workload: str, num_tokens: int, seed: int) -> FixedLengths:
    return FixedLengths(text_of(workload, num_tokens, seed), num_tokens, seed)


def best_fixed(ratio: float, workload: str, size: tuple[int, int]) -> float:
    """The speed of the length that is best over all seeds together."""
    num_tokens, num_seeds = size
    per_seed = [fixed_lengths(workload, num_tokens, seed).speeds(ratio) for seed in range(num_seeds)]
    return max(map(fmean, zip(*per_seed, strict=True)))


def speeds_of(
    make: Callable[[], DraftLengthController], ratio: float, workload: str, size: tuple[int, int]
) -> list[float]:
    num_tokens, num_seeds = size
    costs = CostModel(draft_step=ratio)
    return [
        simulate(make(), text_of(workload, num_tokens, seed), costs, num_tokens, seed=seed).speed
        for seed in range(num_seeds)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ratio", "workload"), CELLS)
def test_ours_against_plain_decoding_fixed_lengths_and_the_rules_of_transformers(
    ratio: float, workload: str, size: tuple[int, int]
) -> None:
    speeds = speeds_of(RULES[OURS].make, ratio, workload, size)
    fixed = best_fixed(ratio, workload, size)
    assert min(speeds) >= 0.98, "slower than plain decoding"
    assert fmean(speeds) >= 0.97 * fixed, "slower than the best fixed length"
    if workload == "switching":
        # So dear a draft leaves hardly anything to win, which a short text does not show.
        least = 0.99 if size == REDUCED and ratio == 0.5 else 1.0
        assert fmean(speeds) > least * fixed, "no faster than the best fixed length on text that changes"
    # On hard text at .165 all that can be won is 3 %, too little for a short one to tell.
    least = 0.98 if size == REDUCED and (ratio, workload) == (0.165, "hard") else 1.0
    for rule, make in TRANSFORMERS.items() if ratio >= 0.165 else ():
        assert fmean(speeds) > least * fmean(speeds_of(make, ratio, workload, size)), f"no faster than {rule}"


BEST_FIXED = {
    "easy": [(0.05, 9, 2.90), (0.165, 5, 1.92), (0.3, 3, 1.49), (0.5, 2, 1.18)],
    "hard": [(0.05, 2, 1.13), (0.165, 1, 1.02), (0.3, 0, 1.0), (0.5, 0, 1.0)],
}


@pytest.mark.parametrize("workload", BEST_FIXED)
def test_workloads_have_the_best_fixed_lengths_they_are_made_for(workload: str) -> None:
    lengths = FixedLengths(synthetic_trace(workload, 12_000), 12_000)
    for ratio, length, speed in BEST_FIXED[workload]:
        speeds = lengths.speeds(ratio)
        assert max(speeds) == pytest.approx(speed, rel=0.03)
        assert abs(speeds.index(max(speeds)) - length) <= 1
