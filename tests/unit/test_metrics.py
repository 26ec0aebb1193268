"""RoundRecord and SpeculationStats against numbers worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.metrics import ProbeRecord, RoundRecord, SpeculationStats


def record(
    num_draft_tokens: int, accepted: list[int], committed: list[list[int]] | None = None, **times: Any
) -> RoundRecord:
    """One round in which every row emits its accepted tokens and one more, unless `committed` says otherwise."""
    committed = [list(range(count + 1)) for count in accepted] if committed is None else committed
    return RoundRecord(
        num_draft_tokens=num_draft_tokens,
        rows=tuple(range(len(accepted))),
        num_accepted_tokens=tuple(accepted),
        num_evaluated_tokens=tuple(count + (count < num_draft_tokens) for count in accepted),
        committed_token_ids=tuple(map(tuple, committed)),
        **{"draft_seconds": 0.0, "verify_seconds": 0.0, "round_seconds": 0.0, **times},
    )


def stats(*records: RoundRecord, **values: Any) -> SpeculationStats:
    result = SpeculationStats(**values)
    for one in records:
        result.observe(one)
    return result


THREE_ROUNDS = (record(4, [4]), record(4, [1]), record(2, [0]))


def test_verdicts_no_yes_yes_count_as_nothing_accepted() -> None:
    """The target disagrees with the first of three tokens only: the later agreements are worthless."""
    measured = stats(record(3, [0]))
    assert measured.num_accepted_tokens == 0
    assert measured.acceptance_rate == 0.0
    assert measured.token_acceptance_rate == 0.0
    assert measured.mean_acceptance_length == 1.0
    assert measured.acceptance_rate_per_position == [0.0, 0.0, 0.0]


def test_the_four_acceptance_numbers() -> None:
    measured = stats(*THREE_ROUNDS)
    assert measured.acceptance_rate == 5 / 10
    assert measured.token_acceptance_rate == 5 / (4 + 2 + 1)
    assert measured.mean_acceptance_length == 1 + 5 / 3
    assert measured.acceptance_rate_per_position == [2 / 3, 1 / 3, 1 / 2, 1 / 2]


def test_histogram_and_draft_lengths() -> None:
    measured = stats(*THREE_ROUNDS, record(4, [1]))
    assert measured.acceptance_histogram == {0: 1, 1: 2, 4: 1}
    assert list(measured.acceptance_histogram) == [0, 1, 4]
    assert measured.draft_lengths == [4, 4, 2, 4]


def test_each_row_of_a_round_counts_by_itself() -> None:
    measured = stats(record(3, [3, 0]), record(3, [1]))
    assert measured.num_rounds == 2
    assert measured.num_draft_tokens == 9
    assert measured.num_accepted_tokens == 4
    assert measured.acceptance_rate == 4 / 9
    assert measured.token_acceptance_rate == 4 / (3 + 1 + 2)
    assert measured.mean_acceptance_length == 1 + 4 / 3
    assert measured.acceptance_rate_per_position == [2 / 3, 1 / 3, 1 / 3]
    assert measured.acceptance_histogram == {0: 1, 1: 1, 3: 1}


def test_plain_steps_leave_the_rates_alone_but_shorten_the_mean() -> None:
    measured = stats(*THREE_ROUNDS, record(0, [0]))
    assert measured.acceptance_rate == 5 / 10
    assert measured.token_acceptance_rate == 5 / 7
    assert measured.acceptance_rate_per_position == [2 / 3, 1 / 3, 1 / 2, 1 / 2]
    assert measured.mean_acceptance_length == 1 + 5 / 4
    assert measured.num_rounds == 4
    assert measured.draft_lengths == [4, 4, 2, 0]


@pytest.mark.parametrize("records", [[], [record(0, [0]), record(0, [0])]], ids=["no rounds", "only plain steps"])
def test_nothing_drafted(records: list[RoundRecord]) -> None:
    measured = stats(*records)
    assert measured.acceptance_rate == 0.0
    assert measured.token_acceptance_rate == 0.0
    assert measured.mean_acceptance_length == 1.0
    assert measured.acceptance_rate_per_position == []
    assert measured.tokens_per_second == 0.0


def test_end_of_sequence_inside_a_block_counts_only_what_was_kept() -> None:
    """Four accepted, the second is the end of sequence: two draft tokens stay, the other counts are before the cut."""
    measured = stats(record(4, [4], committed=[[11, 2]]))
    assert measured.num_committed_draft_tokens == 2
    assert measured.num_accepted_tokens == 4
    assert measured.mean_acceptance_length == 5.0


def test_correction_token_is_no_draft_token() -> None:
    one = record(4, [1, 4], committed=[[11, 12], [11, 12, 13, 14, 15]])
    assert one.num_committed_tokens == 7
    assert one.num_committed_draft_tokens == 5
    assert stats(one, one).num_committed_draft_tokens == 10


def test_times() -> None:
    measured = stats(
        record(1, [1], draft_seconds=1.0, verify_seconds=2.0, round_seconds=3.5),
        record(1, [1], draft_seconds=1.0, verify_seconds=2.0, round_seconds=2.5),
        num_new_tokens=12,
        total_seconds=8.0,
    )
    assert measured.rounds[0].overhead_seconds == 0.5
    assert measured.rounds[1].overhead_seconds == 0.0  # clocks of two devices may disagree; never negative
    assert measured.draft_seconds == 2.0
    assert measured.verify_seconds == 4.0
    assert measured.overhead_seconds == 0.5
    assert measured.tokens_per_second == 1.5


def test_observe_touches_only_the_rounds() -> None:
    measured = stats(record(3, [2]))
    assert len(measured.rounds) == 1
    measured.rounds.clear()
    assert measured == SpeculationStats()


def test_stats_do_not_share_their_lists() -> None:
    SpeculationStats().fallbacks.append("out of memory")
    assert SpeculationStats().fallbacks == []


def test_to_dict_survives_json_and_holds_the_derived_numbers() -> None:
    measured = stats(*THREE_ROUNDS, num_new_tokens=9, num_rows=1, total_seconds=3.0, fallbacks=["NaN in the draft"])
    values = measured.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["acceptance_rate"] == 0.5
    assert values["acceptance_histogram"] == {"0": 1, "1": 1, "4": 1}
    assert values["tokens_per_second"] == 3.0
    assert values["fallbacks"] == ["NaN in the draft"]
    assert values["rounds"][1] == {
        "num_draft_tokens": 4,
        "rows": [0],
        "num_accepted_tokens": [1],
        "num_evaluated_tokens": [2],
        "committed_token_ids": [[0, 1]],
        "draft_seconds": 0.0,
        "verify_seconds": 0.0,
        "round_seconds": 0.0,
        "survival": [],
        "confidences": [],
        "num_batch_rows": 0,
        "num_replayed_tokens": 0,
        "num_replay_forwards": 0,
        "num_caught_up_tokens": 0,
        "catch_up_seconds": 0.0,
    }


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    measured = stats(
        record(2, [1], survival=((0.75, 0.5),), confidences=((0.9, 0.8),)),
        probes=[
            ProbeRecord(
                num_after_round=1,
                agreement=((1.0, 0.25),),
                confidences=((0.5, 0.5),),
                num_caught_up_tokens=3,
                seconds=0.125,
            )
        ],
        controller_hints={"survival": [0.9]},
        fallbacks=["NaN in the draft"],
    )
    measured.save(tmp_path / "stats.json")
    assert SpeculationStats.load(tmp_path / "stats.json") == measured


def test_what_a_later_version_saved_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    values = stats(record(2, [1])).to_dict() | {"novelty": 1}
    values["rounds"][0]["novelty"] = 2
    (tmp_path / "stats.json").write_text(json.dumps(values), encoding="utf-8")
    assert SpeculationStats.load(tmp_path / "stats.json") == stats(record(2, [1]))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rounds": 3}', '{"rounds": [{}]}', "not json"])
def test_a_file_without_stats_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "stats.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="must hold stats"):
        SpeculationStats.load(tmp_path / "stats.json")


def test_time_of_probes_and_of_catching_up() -> None:
    probe = ProbeRecord(num_after_round=0, agreement=(), confidences=(), num_caught_up_tokens=9, seconds=0.5)
    caught_up = record(2, [1], round_seconds=2.0, draft_seconds=0.25, verify_seconds=0.5, catch_up_seconds=1.0)
    measured = stats(caught_up, record(0, [0]), probes=[probe, probe])
    assert measured.probe_seconds == 1.0
    assert measured.catch_up_seconds == 1.0
    assert measured.overhead_seconds == 0.25
    assert measured.num_plain_steps == 1


def test_to_dict_leaves_no_number_out() -> None:
    properties = {name for name, member in vars(SpeculationStats).items() if isinstance(member, property)}
    assert properties <= SpeculationStats().to_dict().keys()


def test_summary_for_people() -> None:
    measured = stats(
        record(4, [3], draft_seconds=0.25, verify_seconds=0.5, round_seconds=1.0),
        num_new_tokens=5,
        total_seconds=2.0,
        time_to_first_token_seconds=0.5,
        fallbacks=["the draft ran out of memory"],
    )
    assert str(measured).splitlines() == [
        "5 new tokens in 2.00 s (2.5 tokens/s), the first after 0.50 s",
        "3 of 4 draft tokens accepted (75%), 4.00 tokens per row and round, 1 rounds",
        "draft 0.25 s, verify 0.50 s, overhead 0.25 s",
        "ragged lane, block verification",
        "fallback: the draft ran out of memory",
    ]
    assert str(SpeculationStats(is_lockstep=True)).endswith("ragged lane, block verification, lockstep")
