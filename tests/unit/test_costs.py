"""Costs, curves and survival: estimates from noisy numbers, against values worked out by hand."""

from __future__ import annotations

import random

import pytest

from hf_specdec.controller.costs import Costs
from hf_specdec.controller.curves import LONGEST_AGE, Curve, Samples
from hf_specdec.controller.load import FEWEST_KNOWN, Load
from hf_specdec.controller.load import WINDOW as LOAD_WINDOW
from hf_specdec.controller.stopping import InRoundStop, thresholds_of
from hf_specdec.controller.survival import Calibration, Survival, log_odds
from hf_specdec.metrics import RoundRecord


def curve(*points: tuple[int, float], times: int = 15) -> Curve:
    made = Curve()
    for now in range(times):
        for count, seconds in points:
            made.add(now, count, seconds)
    return made


# ---- samples and curves --------------------------------------------------------------------------------------------


def test_a_median_ignores_the_odd_slow_one() -> None:
    samples = Samples()
    for now, seconds in enumerate([1.0, 1.0, 50.0, 1.0, 1.1]):
        samples.add(now, seconds)
    assert samples.median == 1.0


def test_old_samples_are_forgotten() -> None:
    samples = Samples()
    samples.add(1, 5.0)
    samples.add(10, 1.0)
    samples.forget_before(5)
    assert samples.median == 1.0
    samples.forget_before(11)
    assert samples.median is None


def test_a_single_count_is_continued_by_the_slope_given_or_in_proportion() -> None:
    assert curve((4, 2.0)).seconds(6, 0.1) == pytest.approx(2.2)
    assert curve((4, 2.0)).seconds(2, 0.1) == pytest.approx(1.8)
    assert curve((4, 2.0)).seconds(6, None) == pytest.approx(3.0)


def test_counts_in_between_lie_on_the_line() -> None:
    made = curve((2, 1.0), (6, 2.0))
    assert made.seconds(4, 0.0) == pytest.approx(1.5)
    assert made.seconds(4.5, 0.0) == pytest.approx(1.625)
    assert made.seconds(60, 0.0) == pytest.approx(1.0 + 58 / 4, rel=0.01)


def test_a_count_measured_often_counts_more_than_the_line() -> None:
    made = curve((2, 1.0), (3, 1.0), (4, 1.0), (5, 3.0), (6, 3.0), (7, 3.0))
    assert made.seconds(4, 0.0) < 1.3
    assert made.seconds(5, 0.0) > 2.7


def test_one_slow_measurement_hardly_bends_the_curve() -> None:
    made = curve((2, 1.0), (4, 1.2), (5, 1.3))
    made.add(20, 3, 5.0)
    assert made.seconds(3, 0.0) < 2.0
    assert made.seconds(3, 0.0) - made.seconds(2, 0.0) < 0.7


def test_one_slow_measurement_far_out_does_not_bend_the_rest() -> None:
    made = curve((2, 1.0), (3, 1.1), (4, 1.2), (5, 1.3))
    made.add(20, 13, 50.0)
    assert [made.seconds(count, 0.0) for count in (2, 3, 4, 5)] == pytest.approx([1.0, 1.1, 1.2, 1.3], rel=0.02)


def test_a_straight_curve_is_its_line_whatever_single_counts_say() -> None:
    made = Curve(is_straight=True)
    for count, seconds in ((1, 1.0), (2, 2.0), (3, 3.3), (4, 4.0), (5, 5.0)):
        made.add(0, count, seconds)
    assert [made.seconds(count, None) for count in range(7)] == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_it_never_falls() -> None:
    source = random.Random(0)
    for _ in range(50):
        made = Curve()
        for now in range(60):
            count = source.randint(1, 17)
            made.add(now, count, source.lognormvariate(0, 1) * (1 + 0.02 * count))
        values = [made.seconds(count, 0.01) for count in range(40)]
        assert values == sorted(values)
        assert values[0] >= 0


def test_what_was_measured_long_ago_is_forgotten() -> None:
    made = Curve()
    made.add(1, 9, 100.0)
    made.add(LONGEST_AGE + 2, 2, 1.0)
    assert made.seconds(9, 0.0) == pytest.approx(1.0)


# ---- costs ---------------------------------------------------------------------------------------------------------


def drafted(num_draft_tokens: int, seconds: float, draft_seconds: float, **fields: int | float) -> RoundRecord:
    return RoundRecord(
        num_draft_tokens=num_draft_tokens,
        rows=(0,),
        num_accepted_tokens=(0,),
        num_evaluated_tokens=(1,),
        committed_token_ids=((7,),),
        draft_seconds=draft_seconds,
        verify_seconds=0.5,
        round_seconds=seconds,
        **fields,
    )


def test_a_round_is_its_draft_steps_and_what_comes_after() -> None:
    costs = Costs()
    for _ in range(10):
        costs.observe(drafted(0, 1.0, 0.0))
        costs.observe(drafted(2, 1.5, 0.4))
        costs.observe(drafted(4, 1.9, 0.6))
    assert costs.plain == 1.0
    assert costs.round(0) == 1.0
    assert costs.round(2) == pytest.approx(1.5)
    assert costs.round(4) == pytest.approx(1.9)
    assert costs.round(3) == pytest.approx(1.7)


def test_catching_up_is_no_part_of_a_round() -> None:
    costs = Costs()
    costs.observe(drafted(0, 1.0, 0.0))
    costs.observe(drafted(2, 3.5, 0.4, num_caught_up_tokens=100, catch_up_seconds=2.0))
    assert costs.round(2) == pytest.approx(1.5)
    # A draft step (0.2) and 0.018 for each token.
    assert costs.catch_up(100) == pytest.approx(2.0)
    assert costs.catch_up(50) == pytest.approx(1.1)
    assert costs.catch_up(0) == 0.0


def test_a_round_with_a_forward_that_only_replays_does_not_pass_for_a_slow_one() -> None:
    costs = Costs()
    costs.observe(drafted(0, 1.0, 0.0))
    costs.observe(drafted(2, 1.5, 0.4))
    costs.observe(drafted(2, 9.0, 0.4, num_replay_forwards=1))
    assert costs.round(2) == pytest.approx(1.5)


def test_replayed_tokens_are_tokens_the_target_reads() -> None:
    costs = Costs()
    for _ in range(20):
        costs.observe(drafted(0, 1.0, 0.0))
        costs.observe(drafted(2, 1.5, 0.4))
        costs.observe(drafted(2, 2.1, 0.4, num_replayed_tokens=10))
    assert costs.round(2, 5.0) == pytest.approx(1.8)


def test_verifying_takes_no_less_than_a_plain_step() -> None:
    costs = Costs()
    costs.observe(drafted(0, 1.0, 0.0))
    costs.observe(drafted(3, 0.7, 0.3))
    assert costs.after_draft(4) == 1.0


def test_a_known_cost_ratio_holds_until_it_is_measured() -> None:
    costs = Costs(cost_ratio=0.25)
    assert not costs.are_known
    costs.observe(drafted(0, 2.0, 0.0))
    assert costs.are_known
    assert costs.draft_step == 0.5
    assert costs.round(2) == pytest.approx(2 * 0.5 + 2.0 * 1.02)
    costs.observe(drafted(2, 2.4, 0.2))
    assert costs.draft_step == pytest.approx(0.1)


# ---- load ----------------------------------------------------------------------------------------------------------


def known(seconds: float = 1.0) -> Samples:
    samples = Samples()
    for now in range(FEWEST_KNOWN):
        samples.add(now, seconds)
    return samples


def test_load_is_seen_when_everything_has_taken_longer_for_a_while_and_is_gone_with_the_first_that_has_not() -> None:
    load, usual = Load(), known(2.0)
    for _ in range(LOAD_WINDOW - 1):
        load.observe(3.0, usual)
        assert load.factor == 1.0
    load.observe(3.0, usual)
    assert load.factor == 1.5
    load.observe(1.9, usual)
    assert load.factor == 1.0


def test_noise_is_no_load() -> None:
    load, usual, source = Load(), known(), random.Random(0)
    factors = []
    for _ in range(2000):
        load.observe(source.lognormvariate(0.0, 0.3), usual)
        factors.append(load.factor)
    assert factors.count(1.0) > 0.9 * len(factors)


def test_what_was_hardly_measured_says_nothing_of_the_load() -> None:
    load, once = Load(), Samples()
    once.add(0, 1.0)
    for _ in range(LOAD_WINDOW):
        load.observe(5.0, None)
        load.observe(5.0, once)
    assert load.factor == 1.0


def test_lengths_timed_on_a_busy_machine_compare_with_those_timed_before() -> None:
    costs = Costs()
    for _ in range(20):
        costs.observe(drafted(0, 1.0, 0.0))
        costs.observe(drafted(4, 1.6, 0.4))
    for _ in range(20):
        costs.observe(drafted(4, 3.2, 0.8))
    for _ in range(5):
        costs.observe(drafted(6, 3.6, 1.2))
        costs.observe(drafted(0, 2.0, 0.0))
    assert costs.plain == pytest.approx(1.0)
    assert costs.raw_plain == pytest.approx(2.0)
    assert costs.round(4) == pytest.approx(1.6, rel=0.02)
    assert costs.round(6) == pytest.approx(1.8, rel=0.05)


def test_a_clock_that_stands_still_says_nothing_of_the_load() -> None:
    load, usual = Load(), known()
    for seconds in (0.0, -1.0, float("nan"), float("inf")) * LOAD_WINDOW:
        load.observe(seconds, usual)
        assert load.factor == 1.0


def test_a_first_pass_over_a_length_is_not_believed_to_be_slow() -> None:
    made = curve((2, 1.0), (3, 1.1), (4, 1.2))
    made.add(20, 6, 9.0)
    assert made.seconds(6, 0.0) == pytest.approx(1.4, rel=0.02)
    made.add(21, 6, 2.0)
    assert made.seconds(6, 0.0) > 1.6


def test_nothing_is_known_of_drafting_after_a_first_draft() -> None:
    costs = Costs()
    costs.observe(drafted(0, 1.0, 0.0))
    costs.observe(drafted(4, 9.0, 2.0))
    assert not costs.are_known
    costs.observe(drafted(4, 1.6, 0.4))
    assert costs.are_known
    assert costs.round(4) == pytest.approx(1.6)


def test_a_larger_batch_is_taken_to_catch_up_in_proportion_and_a_smaller_one_as_slowly() -> None:
    costs = Costs()
    costs.observe(drafted(0, 1.0, 0.0))
    costs.observe(drafted(4, 1.6, 0.4))
    costs.observe_catch_up(100, 0.1 + 5.0)
    one_step = costs.catch_up(100) - 5.0
    assert costs.inherited(4.0).catch_up(100) - one_step == pytest.approx(20.0)
    assert costs.inherited(0.5).catch_up(100) - one_step == pytest.approx(5.0)


# ---- survival ------------------------------------------------------------------------------------------------------


def test_survival_starts_from_the_first_hazard_or_from_what_is_known() -> None:
    assert Survival(3).curve(3) == pytest.approx([0.7, 0.49, 0.343])
    assert Survival(3, [0.9, 0.8]).curve(3) == pytest.approx([0.9, 0.8, 0.56])
    # 0.9 of the first tokens survived, and 0.8 of 0.9 of the second.
    assert Survival(3, [0.9, 0.8]).hazard == pytest.approx((0.9 + 0.8) / (1 + 0.9))


def test_survival_follows_the_labels() -> None:
    survival = Survival(4)
    for _ in range(300):
        survival.observe([[1.0, 0.5, 0.5]])
    assert survival.curve(3) == pytest.approx([1.0, 0.5, 0.5], abs=1e-3)
    # What was not drafted is filled in with the pooled hazard, (1 + 0.5 + 0.5) / (1 + 1 + 0.5).
    assert survival.curve(4)[3] == pytest.approx(0.5 * 0.8, abs=1e-3)


def test_rows_count_as_their_mean() -> None:
    survival = Survival(1)
    for _ in range(300):
        survival.observe([[1.0], [0.0], [0.0], [1.0]])
    assert survival.curve(1) == pytest.approx([0.5], abs=1e-3)


def test_labels_that_rise_leave_a_curve_that_does_not() -> None:
    survival = Survival(3)
    for _ in range(50):
        survival.observe([[0.5, 0.9, 0.2]])
    values = survival.curve(3)
    assert values == sorted(values, reverse=True)


def test_text_read_by_a_probe_counts_from_every_token() -> None:
    survival = Survival(2)
    for _ in range(30):
        survival.observe_text([[1.0, 0.0] * 20])
    # Half of the starts are accepted, none of them twice.
    assert survival.curve(2) == pytest.approx([0.5, 0.0], abs=0.02)
    survival.observe_text([])


# ---- calibration ---------------------------------------------------------------------------------------------------


def test_calibration_finds_the_curve_behind_the_labels() -> None:
    source = random.Random(0)
    calibration = Calibration(0.2, 0.0, 0.0)
    truth = Calibration(1.5, 0.3, 0.0)
    for _ in range(3000):
        confidence = source.uniform(0.05, 0.95)
        calibration.observe(confidence, 0.6, float(source.random() < truth.probability(confidence, 0.6)))
    for confidence in (0.2, 0.5, 0.8):
        assert calibration.probability(confidence, 0.6) == pytest.approx(truth.probability(confidence, 0.6), abs=0.12)


def test_confidence_that_says_nothing_leaves_the_probability_alone() -> None:
    calibration = Calibration(0.2, 0.0, 0.0)
    source = random.Random(1)
    for _ in range(300):
        calibration.observe(source.choice([0.1, 0.95]), 0.9, float(source.random() < 0.9))
    assert calibration.probability(0.1, 0.9) == pytest.approx(0.9, abs=0.08)
    assert calibration.probability(0.95, 0.9) == pytest.approx(0.9, abs=0.08)


def test_a_few_labels_give_confidence_no_say() -> None:
    calibration = Calibration(0.2, 0.0, 0.0)
    for _ in range(3):
        calibration.observe(0.9, 0.5, 1.0)
        calibration.observe(0.1, 0.5, 0.0)
    assert calibration.weight < 1.0
    for _ in range(300):
        calibration.observe(0.9, 0.5, 1.0)
        calibration.observe(0.1, 0.5, 0.0)
    assert calibration.weight > 1.0


@pytest.mark.parametrize("confidence", [0.0, 1.0, float("nan"), 1e-30, 0.5])
def test_calibration_stays_finite(confidence: float) -> None:
    calibration = Calibration(1.0, 0.0, 0.0)
    for _ in range(500):
        calibration.observe(confidence, 0.5, 1.0)
        calibration.observe(confidence, 0.5, 0.0, 0.0)
    assert 0 <= calibration.probability(confidence, 0.5) <= 1
    assert abs(calibration.weight) <= 8
    assert abs(calibration.bias) <= 8


# ---- stopping inside a round ---------------------------------------------------------------------------------------


def test_a_token_pays_from_its_share_of_a_second_on() -> None:
    # A token takes 0.1 seconds more, and a second is worth 2 tokens.
    assert thresholds_of([0.0] * 4, [1.0, 1.1, 1.2, 1.3], 2.0) == pytest.approx([0.2, 0.2, 0.2])


def test_a_step_in_the_times_is_weighed_against_all_that_follows_it() -> None:
    # The third token takes 0.4 seconds more, the two after it nothing: together they are worth it at 0.8 / 3.
    thresholds = thresholds_of([1.0] * 5, [1.0, 1.0, 1.4, 1.4, 1.4], 2.0)
    assert thresholds == pytest.approx([0.0, 0.8 / 3, 0.0, 0.0])


@pytest.mark.parametrize(("is_lockstep", "goes_on"), [(False, True), (True, False)])
def test_rows_count_as_their_mean_and_in_lockstep_as_their_product(is_lockstep: bool, goes_on: bool) -> None:
    stop = InRoundStop((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    # Each row survives with 0.7 · 0.7 = 0.49, all three with 0.12.
    stop.prepare([0.7, 0.7], [1.0, 1.15], 2.0, is_lockstep=is_lockstep)
    stop.start_round(3)
    assert stop.goes_on([0.5, 0.5, 0.5]) is goes_on


def test_rounds_over_a_probed_text() -> None:
    stop = InRoundStop((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    # Always worth two tokens, never three.
    stop.prepare([1.0, 1.0, 0.0], [1.0, 1.1, 2.0], 2.0)
    rounds = list(stop.rounds_over([1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0.5] * 6))
    # Two accepted and one more; none; none; the last one, where the text ends.
    assert rounds == [(3.0, 2), (1.0, 2), (1.0, 2), (2.0, 1)]


def test_log_odds_are_bounded() -> None:
    assert log_odds(0.5) == 0.0
    assert log_odds(1.0) == -log_odds(0.0) == 6.0
    assert log_odds(float("nan")) == -6.0
