"""AdaptiveDraftLength: what it chooses, when it goes off and on, and what it can cost at most.

Times are made up: a plain step takes 1.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import AdaptiveDraftLength, InvalidConfigError, Outlook, ProbeRecord, RoundRecord
from hf_specdec.config import LONGEST_ADAPTIVE_DRAFT
from hf_specdec.controller import adaptive
from hf_specdec.controller.ledger import ALLOWANCE, SHARE, Ledger

SURE = 0.9


def record(
    num_draft_tokens: int,
    chances: Sequence[float] = (),
    *,
    draft_step: float = 0.1,
    round_seconds: float | None = None,
    num_rows: int = 1,
    confidence: float | None = SURE,
    **fields: Any,
) -> RoundRecord:
    """A round of one row or several equal ones; what is drafted stays where its chance is over a half."""
    chances = list(chances[:num_draft_tokens])
    accepted = [chance > 0.5 for chance in chances]
    count = [*accepted, False].index(False)
    seconds = (
        (1.0 if not num_draft_tokens else 1.05 + draft_step * num_draft_tokens)
        if round_seconds is None
        else round_seconds
    )
    values: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "rows": tuple(range(num_rows)),
        "num_accepted_tokens": (count,) * num_rows,
        "num_evaluated_tokens": (min(count + 1, num_draft_tokens),) * num_rows,
        "committed_token_ids": ((7,) * (count + 1),) * num_rows,
        "draft_seconds": draft_step * num_draft_tokens,
        "verify_seconds": 1.0,
        "round_seconds": seconds,
        "survival": (tuple(itertools.accumulate(chances, operator.mul)),) * num_rows,
        "confidences": ((confidence,) * num_draft_tokens,) * num_rows if confidence is not None else (),
        "num_batch_rows": num_rows,
    }
    return RoundRecord(**(values | fields))


def run(
    controller: AdaptiveDraftLength,
    chances: Callable[[int], Sequence[float]],
    num_rounds: int,
    outlook: Outlook | None = None,
    **fields: Any,
) -> list[int]:
    """Let the controller choose, answer with `chances(round)`, and return the lengths drafted."""
    outlook = outlook or Outlook(limit=LONGEST_ADAPTIVE_DRAFT)
    lengths = []
    for index in range(num_rounds):
        num_draft_tokens = controller.next_num_draft_tokens(outlook)
        drafted = num_draft_tokens
        if outlook.reads_confidence and num_draft_tokens:
            confidence = fields.get("confidence", SURE)
            answers = (controller.goes_on([confidence] * outlook.num_rows) for _ in range(num_draft_tokens - 1))
            drafted = 1 + len(list(itertools.takewhile(bool, answers)))
        controller.observe(record(drafted, chances(index), num_rows=outlook.num_rows, **fields))
        lengths.append(drafted)
    return lengths


def next_draft(controller: AdaptiveDraftLength, outlook: Outlook) -> int:
    """Return the next length, or the one after that if a plain step is due."""
    length = controller.next_num_draft_tokens(outlook)
    if not length:
        controller.observe(record(0))
        length = controller.next_num_draft_tokens(outlook)
    return length


def always(chance: float) -> Callable[[int], list[float]]:
    return lambda _: [chance] * LONGEST_ADAPTIVE_DRAFT


READING = Outlook(limit=LONGEST_ADAPTIVE_DRAFT, reads_confidence=True)


# ---- choosing ------------------------------------------------------------------------------------------------------


def test_the_first_steps_are_plain_since_they_are_what_all_is_compared_with() -> None:
    assert run(AdaptiveDraftLength(), always(1.0), 3) == [0, 0, adaptive.FIRST_LENGTH]


@pytest.mark.parametrize("outlook", [Outlook(limit=LONGEST_ADAPTIVE_DRAFT), READING], ids=["between rounds", "inside"])
@pytest.mark.parametrize(("chance", "draft_step"), [(1.0, 0.05), (0.8, 0.165), (0.6, 0.1), (0.9, 0.5)])
def test_it_settles_at_the_length_with_the_most_tokens_per_second(
    chance: float, draft_step: float, outlook: Outlook
) -> None:
    lengths = run(AdaptiveDraftLength(), always(chance), 120, outlook, draft_step=draft_step)
    speeds = {k: (1 + sum(chance**j for j in range(1, k + 1))) / (1.05 + draft_step * k) for k in range(1, 17)}
    # Nearer to the best than the times are known is as good.
    good = {k for k, speed in speeds.items() if speed >= max(speeds.values()) / (1 + adaptive.HYSTERESIS)}
    assert set(lengths[-20:]) - {0} <= good
    assert lengths[-20:].count(0) <= 1


@pytest.mark.parametrize("outlook", [Outlook(limit=LONGEST_ADAPTIVE_DRAFT), READING], ids=["between rounds", "inside"])
@pytest.mark.parametrize(("chance", "draft_step"), [(0.0, 0.05), (0.2, 0.3), (1.0, 1.1)])
def test_it_goes_off_where_plain_decoding_is_faster(chance: float, draft_step: float, outlook: Outlook) -> None:
    lengths = run(AdaptiveDraftLength(), always(chance), 80, outlook, draft_step=draft_step)
    assert sum(map(bool, lengths)) > 0
    assert lengths[-30:] == [0] * 30


def test_an_unsure_token_ends_the_round_once_that_was_learned() -> None:
    controller = AdaptiveDraftLength()
    for index in range(60):
        controller.next_num_draft_tokens(READING)
        is_sure = index % 2 == 0
        chances = [0.95 if is_sure else 0.1] * 4
        controller.observe(record(4 if index > 1 else 0, chances, confidence=0.9 if is_sure else 0.5))
    controller.next_num_draft_tokens(READING)
    assert controller.goes_on([0.9])
    controller.next_num_draft_tokens(READING)
    assert not controller.goes_on([0.5])


def test_the_limit_holds() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(1.0), 30)
    assert controller.next_num_draft_tokens(Outlook(limit=3)) == 3
    assert controller.next_num_draft_tokens(Outlook(limit=0)) == 0


def test_a_batch_counts_the_mean_of_its_rows() -> None:
    # One row always right, three always wrong: on average a chance of a quarter, at a draft that costs 0.3.
    controller = AdaptiveDraftLength()
    outlook = Outlook(limit=16, num_rows=4, num_batch_rows=4)
    for _ in range(60):
        num_draft_tokens = controller.next_num_draft_tokens(outlook)
        survival = ((1.0,) * num_draft_tokens, *((0.0,) * num_draft_tokens,) * 3)
        controller.observe(record(num_draft_tokens, [1.0] * 16, num_rows=4, draft_step=0.3, survival=survival))
    assert controller.next_num_draft_tokens(outlook) == 0


BATCH = Outlook(limit=16, num_rows=4, num_batch_rows=4)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("of_last_row", "is_on"), [(0.1, False), (0.8, True)])
def test_a_batch_goes_off_where_its_last_row_would_be_done_sooner(of_last_row: float, is_on: bool, reads: bool) -> None:
    """Whoever asked for the batch waits for that row, however fast the others are."""
    controller = AdaptiveDraftLength()
    outlook = dataclasses.replace(BATCH, reads_confidence=reads)
    for _ in range(60):
        length = min(controller.next_num_draft_tokens(outlook), 4)
        rows = [[0.9] * 4] * 3 + [[of_last_row] * 4]
        survival = tuple(tuple(itertools.accumulate(row[:length], operator.mul)) for row in rows)
        controller.observe(record(length, [0.9] * 4, num_rows=4, survival=survival))
    assert bool(next_draft(controller, outlook)) is is_on


@pytest.mark.parametrize(("of_last_row", "is_on"), [(0.1, False), (0.9, True)])
def test_a_probe_switches_a_batch_on_where_every_row_gains(of_last_row: float, is_on: bool) -> None:
    controller = AdaptiveDraftLength()
    outlook = dataclasses.replace(BATCH, reads_confidence=True, num_unread_tokens=64, num_shadow_tokens=64)
    run(controller, always(0.0), 60, dataclasses.replace(BATCH, reads_confidence=True))
    assert not controller.next_num_draft_tokens(outlook)
    agreement = ((0.9,) * 64,) * 3 + ((of_last_row,) * 64,)
    for _ in range(4):
        controller.next_num_draft_tokens(outlook)
        controller.observe_probe(dataclasses.replace(probe(0.9), agreement=agreement, confidences=((SURE,) * 64,) * 4))
    assert bool(controller.next_num_draft_tokens(outlook)) is is_on


def test_in_lockstep_a_round_gives_what_its_worst_row_gives() -> None:
    rows = (0.9, 0.9, 0.9, 0.9)
    lengths = {}
    for is_lockstep in (False, True):
        controller = AdaptiveDraftLength()
        outlook = Outlook(limit=16, num_rows=4, num_batch_rows=4, is_lockstep=is_lockstep)
        for _ in range(80):
            num_draft_tokens = controller.next_num_draft_tokens(outlook)
            survival = tuple(tuple(itertools.accumulate([chance] * num_draft_tokens, operator.mul)) for chance in rows)
            controller.observe(record(num_draft_tokens, [1.0] * 16, num_rows=4, draft_step=0.1, survival=survival))
        lengths[is_lockstep] = controller.next_num_draft_tokens(outlook)
    # 0.9 to the fourth is 0.66: the best length falls from 6 to 3.
    assert lengths[False] > lengths[True] > 0


def test_reading_tokens_again_after_rejections_makes_rounds_dearer() -> None:
    lengths = {}
    for num_replayed in (0, 12):
        controller = AdaptiveDraftLength()
        for _ in range(100):
            num_draft_tokens = controller.next_num_draft_tokens(Outlook(limit=16))
            seconds = 1.05 + 0.1 * num_draft_tokens + 0.08 * (num_draft_tokens + num_replayed)
            is_drafted = num_draft_tokens > 0
            controller.observe(
                record(
                    num_draft_tokens,
                    [0.6] * 16,
                    round_seconds=seconds if is_drafted else 1.0,
                    num_replayed_tokens=num_replayed if is_drafted else 0,
                )
            )
        lengths[num_replayed] = controller.next_num_draft_tokens(Outlook(limit=16))
    assert lengths[0] > 0
    assert lengths[12] == 0


def test_forwards_that_only_replay_count() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.4), 40, num_replay_forwards=0)
    assert next_draft(controller, Outlook(limit=16)) > 0
    for _ in range(60):
        num_draft_tokens = controller.next_num_draft_tokens(Outlook(limit=16))
        flushes = 1 if num_draft_tokens else 0
        controller.observe(record(num_draft_tokens, [0.4] * 16, num_replay_forwards=flushes))
    assert controller.next_num_draft_tokens(Outlook(limit=16)) == 0


def test_one_slow_round_changes_nothing() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.8), 60)
    before = next_draft(controller, Outlook(limit=16))
    controller.observe(record(before, [0.8] * 16, round_seconds=40.0, draft_step=5.0))
    assert next_draft(controller, Outlook(limit=16)) == before


def test_the_cut_at_the_end_of_a_text_is_no_rejection() -> None:
    cut, uncut = AdaptiveDraftLength(), AdaptiveDraftLength()
    for controller, committed in ((cut, ((7,),)), (uncut, ((7,) * 5,))):
        run(controller, always(1.0), 20)
        controller.next_num_draft_tokens(Outlook(limit=16))
        controller.observe(record(4, [1.0] * 4, committed_token_ids=committed))
    assert cut.hints()["survival"] == uncut.hints()["survival"]


def pauses_between_plain_steps(chance: float, draft_step: float) -> list[int]:
    lengths = run(AdaptiveDraftLength(), always(chance), 10_000, draft_step=draft_step)
    plain = [index for index, length in enumerate(lengths) if not length]
    return [later - earlier - 1 for earlier, later in itertools.pairwise(plain)][1:]


def test_plain_steps_are_measured_again_often_at_first_and_rarely_later() -> None:
    pauses = pauses_between_plain_steps(0.6, draft_step=0.4)
    assert pauses == sorted(pauses)
    assert pauses[0] == 2 * adaptive.PLAIN_EVERY_AT_FIRST
    assert pauses[-1] == adaptive.PLAIN_EVERY


def test_plain_steps_are_measured_less_often_where_little_hangs_on_them() -> None:
    far_ahead, little_ahead = pauses_between_plain_steps(0.9, 0.1), pauses_between_plain_steps(0.6, 0.4)
    assert far_ahead[0] > 4 * little_ahead[0]
    assert far_ahead[-1] == adaptive.PLAIN_EVERY


def test_the_same_rounds_lead_to_the_same_choices() -> None:
    chances = [[0.9, 0.2, 0.7, 0.95][index % 4 :] + [0.5] * 16 for index in range(4)]
    first, second = (run(AdaptiveDraftLength(), lambda i: chances[i % 4], 150, READING) for _ in range(2))
    assert first == second


def test_a_batch_size_starts_from_what_the_nearest_one_knows() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.9), 40, Outlook(limit=16, num_rows=4, num_batch_rows=4))
    # No plain steps first, no trial of the first length.
    assert next_draft(controller, Outlook(limit=16, num_rows=1, num_batch_rows=1)) > adaptive.FIRST_LENGTH


# ---- off and on ----------------------------------------------------------------------------------------------------


def off(draft_step: float = 0.1) -> AdaptiveDraftLength:
    controller = AdaptiveDraftLength()
    lengths = run(controller, always(0.0), 60, READING, draft_step=draft_step)
    assert lengths[-10:] == [0] * 10
    return controller


def plain_steps_until_probe(controller: AdaptiveDraftLength, at_most: int = 3000, **fields: Any) -> int | None:
    for count in range(at_most):
        outlook = Outlook(limit=16, reads_confidence=True, num_shadow_tokens=min(count, 256), num_unread_tokens=count)
        if controller.num_probe_tokens(outlook):
            return count
        assert controller.next_num_draft_tokens(outlook) == 0
        controller.observe(record(0, **fields))
    return None


def probe(chance: float, num_tokens: int = 64, seconds: float = 0.15) -> ProbeRecord:
    return ProbeRecord(
        num_after_round=0,
        agreement=((chance,) * num_tokens,),
        confidences=((SURE,) * num_tokens,),
        num_caught_up_tokens=num_tokens,
        seconds=seconds,
    )


def test_what_does_not_pay_with_one_row_is_tried_with_eight() -> None:
    controller = AdaptiveDraftLength()
    one, eight = (Outlook(limit=16, num_rows=rows, num_batch_rows=rows) for rows in (1, 8))
    assert run(controller, lambda _: [0.05] * 16, 60, one)[-1] == 0
    controller.start_text()
    assert run(controller, lambda _: [0.95] * 16, 60, eight)[-1] > 0
    controller.start_text()
    assert not any(run(controller, lambda _: [0.05] * 16, 30, one)), "what was known of one row is known still"
    controller.start_text()
    assert run(controller, lambda _: [0.95] * 16, 3, eight)[-1] > 0


def test_rows_that_leave_take_no_verdict_along() -> None:
    controller = AdaptiveDraftLength()
    eight, one = (Outlook(limit=16, num_rows=rows, num_batch_rows=rows) for rows in (8, 1))
    assert run(controller, lambda _: [0.05] * 16, 60, eight)[-1] == 0
    assert not any(run(controller, lambda _: [0.05] * 16, 10, one)), "the same text goes on"


def test_probes_that_find_nothing_become_rarer() -> None:
    controller = off()
    pauses = []
    for _ in range(5):
        pauses.append(plain_steps_until_probe(controller))
        controller.observe_probe(probe(0.05))
    assert pauses[1:] == [64, 128, 256, 256]


def test_a_new_prompt_is_probed_early_again() -> None:
    controller = off()
    for _ in range(4):
        plain_steps_until_probe(controller)
        controller.observe_probe(probe(0.05))
    controller.start_text()
    assert plain_steps_until_probe(controller) == 32


def test_a_probe_that_finds_a_good_draft_switches_on() -> None:
    controller = off()
    plain_steps_until_probe(controller)
    controller.observe_probe(probe(0.95))
    assert run(controller, always(0.95), 30, READING)[-1] > 2


def test_a_text_that_is_nearly_written_is_not_worth_reading_for_the_draft() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.9), 40, READING)
    # Reading 5000 tokens takes as long as four plain steps.
    for remaining, is_worth_it in ((3, False), (200, True)):
        outlook = Outlook(limit=2, reads_confidence=True, num_remaining_tokens=remaining, num_unread_tokens=5000)
        assert (next_draft(controller, outlook) > 0) is is_worth_it
    outlook = Outlook(limit=2, reads_confidence=True, num_remaining_tokens=3)
    assert next_draft(controller, outlook) == 2


@pytest.mark.parametrize("is_lockstep", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_after_a_good_probe_it_stays_on(reads: bool, is_lockstep: bool) -> None:
    outlook = Outlook(limit=16, reads_confidence=reads, is_lockstep=is_lockstep)
    controller = AdaptiveDraftLength()
    assert run(controller, always(0.0), 60, outlook)[-10:] == [0] * 10
    for _ in range(40):
        controller.next_num_draft_tokens(outlook)
        controller.observe(record(0))
    controller.observe_probe(probe(0.95))
    assert 0 not in run(controller, always(0.95), 60, outlook)


def test_probes_take_at_most_their_share_of_the_time() -> None:
    controller = off()
    # Reading 5000 tokens takes 5000 * 0.1 / 128 and one step: as long as four plain steps.
    outlook = Outlook(limit=16, reads_confidence=True, num_shadow_tokens=64, num_unread_tokens=5000)
    for _ in range(180):
        assert not controller.num_probe_tokens(outlook)
        controller.next_num_draft_tokens(outlook)
        controller.observe(record(0))
    for _ in range(200):
        controller.next_num_draft_tokens(outlook)
        controller.observe(record(0))
    assert controller.num_probe_tokens(outlook) == 64


def test_a_draft_too_slow_to_pay_is_never_probed_but_tried_again_once_in_a_long_while() -> None:
    controller = off(draft_step=1.2)
    outlook = Outlook(limit=16, reads_confidence=True, num_shadow_tokens=256, num_unread_tokens=256)
    lengths = []
    for _ in range(adaptive.RETRIAL_AFTER + 50):
        assert controller.num_probe_tokens(outlook) == 0
        lengths.append(controller.next_num_draft_tokens(outlook))
        controller.observe(record(min(lengths[-1], 1), [1.0], draft_step=1.2))
    assert 0 < sum(map(bool, lengths)) <= 5


def test_no_probe_while_drafting_is_on_or_without_tokens_to_look_at() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.9), 30, READING)
    assert controller.num_probe_tokens(Outlook(limit=16, num_shadow_tokens=256)) == 0
    controller = off()
    plain_steps_until_probe(controller)
    assert controller.num_probe_tokens(Outlook(limit=16, reads_confidence=True, num_shadow_tokens=0)) == 0
    assert controller.num_probe_tokens(Outlook(limit=0, reads_confidence=True, num_shadow_tokens=64)) == 0


# ---- the guard -----------------------------------------------------------------------------------------------------


def test_losses_close_the_ledger_until_enough_was_decoded_plainly() -> None:
    ledger = Ledger()
    assert ledger.is_open(1.0)
    ledger.charge(ALLOWANCE + 3.0, 1.0, 1.0)
    assert not ledger.is_open(1.0)
    for _ in range(200):
        ledger.enter_plain(1.0)
    assert ledger.is_open(1.0)


def test_past_gains_hide_only_so_many_losses() -> None:
    ledger = Ledger()
    ledger.charge(0.0, 10_000.0, 1.0)
    ledger.plain_seconds = 0.0
    ledger.charge(50.0 + ALLOWANCE + 1.0, 0.0, 1.0)
    assert not ledger.is_open(1.0)


@st.composite
def adversity(draw: st.DrawFn) -> list[tuple[float, float, float, bool]]:
    """Per round: a chance, a draft step's time, a verification's time, and whether a probe flatters."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.3, 0.9, 1.0]),
                st.sampled_from([0.0, 0.05, 0.5, 3.0]),
                st.sampled_from([0.2, 1.0, 1.3, 8.0]),
                st.booleans(),
            ),
            min_size=1,
            max_size=400,
        )
    )


@given(adversity(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_time_is_bounded_whatever_happens(rounds: list[tuple[float, float, float, bool]], reads: bool) -> None:
    controller = AdaptiveDraftLength()
    total, tokens, longest, streak = 0.0, 0, 0.0, 0
    for chance, draft_step, verify, is_flattered in rounds:
        outlook = Outlook(limit=16, reads_confidence=reads, num_shadow_tokens=streak, num_unread_tokens=streak)
        if (num_probed := controller.num_probe_tokens(outlook)) > 0:
            found = probe(1.0 if is_flattered else 0.0, num_probed, seconds=verify)
            total, longest = total + found.seconds, max(longest, found.seconds)
            controller.observe_probe(found)
        num_draft_tokens = controller.next_num_draft_tokens(outlook)
        if num_draft_tokens and reads:
            answers = (controller.goes_on([SURE if is_flattered else 0.3]) for _ in range(num_draft_tokens - 1))
            num_draft_tokens = 1 + len(list(itertools.takewhile(bool, answers)))
        seconds = verify + draft_step * num_draft_tokens if num_draft_tokens else 1.0
        happened = record(num_draft_tokens, [chance] * 16, draft_step=draft_step, round_seconds=seconds)
        controller.observe(happened)
        total, tokens = total + seconds, tokens + happened.num_committed_tokens
        longest = max(longest, seconds) if num_draft_tokens else longest
        streak = 0 if num_draft_tokens else min(streak + 1, 256)
        assert total <= (1 + SHARE) * tokens + ALLOWANCE + longest + 1e-6


# ---- hints ---------------------------------------------------------------------------------------------------------


def test_hints_carry_over_what_was_learned() -> None:
    teacher = AdaptiveDraftLength()
    run(teacher, always(0.95), 100, READING, draft_step=0.05)
    hints = teacher.hints()
    assert hints["cost_ratio"] == pytest.approx(0.05)
    assert hints["num_draft_tokens"] >= 8
    pupil = AdaptiveDraftLength(hints)
    pupil_lengths = run(pupil, always(0.95), 4, READING, draft_step=0.05)
    fresh_lengths = run(AdaptiveDraftLength(), always(0.95), 4, READING, draft_step=0.05)
    assert pupil_lengths[2] > fresh_lengths[2]
    assert pupil.hints()["survival"] == pytest.approx(hints["survival"], abs=0.05)


def test_hints_of_a_draft_however_slow_can_be_taken_in() -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.9), 10, draft_step=150.0)
    assert AdaptiveDraftLength(controller.hints()).hints()["cost_ratio"] == 100.0


@pytest.mark.parametrize("seconds", [0.0, 1e300, float("inf")])
def test_odd_clocks_end_nothing(seconds: float) -> None:
    controller = AdaptiveDraftLength()
    run(controller, always(0.9), 30)
    for outlook in (Outlook(limit=3), READING, BATCH):
        run(controller, always(0.9), 30, outlook, round_seconds=seconds, draft_step=seconds)
    assert controller.next_num_draft_tokens(Outlook(limit=16, num_unread_tokens=50, num_remaining_tokens=5)) >= 0


def test_hints_of_a_hopeless_draft_keep_it_off_from_the_start() -> None:
    hints = AdaptiveDraftLength().hints() | {"cost_ratio": 2.0}
    assert run(AdaptiveDraftLength(hints), always(1.0), 30, draft_step=2.0) == [0] * 30


def test_hints_stay_what_they_are_while_the_pupil_learns() -> None:
    teacher = AdaptiveDraftLength()
    run(teacher, always(0.9), 30)
    hints = teacher.hints()
    before = copy.deepcopy(hints)
    run(AdaptiveDraftLength(hints), always(0.1), 30)
    assert hints == before


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ([1, 2], "must be a mapping"),
        ({"hazard": 0.5}, "has no key 'hazard'"),
        ({"survival": [0.5, 0.9]}, "must not rise"),
        ({"survival": 0.5}, "`survival` in `controller_hints` must be"),
        ({"survival": [1.5]}, "between 0 and 1"),
        ({"survival": [float("nan")]}, "between 0 and 1"),
        ({"confidence": [1.0]}, "must be 3 number"),
        ({"next_confidence": [1.0, True, 0.0]}, "must be 3 number"),
        ({"cost_ratio": -0.1}, "between 0 and 100"),
        ({"cost_ratio": "cheap"}, "between 0 and 100"),
        ({"cost_ratio": 10**400}, "between 0 and 100"),
        ({"cost_ratio": float("inf")}, "between 0 and 100"),
        ({"num_draft_tokens": -1}, "between 0 and 256"),
    ],
)
def test_malformed_hints_are_refused(hints: Any, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        AdaptiveDraftLength(hints)


def test_hints_of_nothing_are_those_of_an_unknown_pair() -> None:
    assert AdaptiveDraftLength({}).hints() == AdaptiveDraftLength().hints()
