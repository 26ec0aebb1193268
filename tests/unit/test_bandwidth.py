"""The bandwidth model, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from hf_specdec.bandwidth import (
    ACCELERATORS,
    RESERVED_BYTES,
    Accelerator,
    ModelSize,
    Situation,
    best_length,
    expected_tokens,
    memory_bytes,
    predict,
    step_seconds,
    verify_seconds,
    workspace_bytes,
)

# Reads 1 byte per second and computes without end.
DEVICE = Accelerator(name="slow", memory=1e12, bandwidth=1.0, flops=1e30)
TARGET = ModelSize(
    weight_bytes=120,
    read_bytes=100,
    num_parameters=50,
    cache_bytes_per_token=2,
    cache_bytes_per_row=0,
    vocab_size=10,
)
DRAFT = dataclasses.replace(TARGET, weight_bytes=12, read_bytes=10, num_parameters=5, cache_bytes_per_token=0)
SITUATION = Situation(
    accelerator=DEVICE,
    efficiency=0.5,
    num_prompt_tokens=10,
    num_new_tokens=20,
    acceptance=0.5,
    verified_token_share=0.1,
)


def changed(**fields: object) -> Situation:
    return dataclasses.replace(SITUATION, **fields)  # type: ignore[arg-type]


def test_a_step_reads_weights_and_the_cache_as_it_is_halfway() -> None:
    assert step_seconds(TARGET, SITUATION) == pytest.approx((100 + 2 * 20) / 0.5)
    assert step_seconds(TARGET, changed(num_rows=3)) == pytest.approx((100 + 3 * 2 * 20) / 0.5)


def test_several_devices_read_at_once_only_where_layers_are_split() -> None:
    assert verify_seconds(TARGET, changed(num_devices=2), 0) == verify_seconds(TARGET, SITUATION, 0)
    split = changed(num_devices=2, parallelism="tensors")
    assert verify_seconds(TARGET, split, 0) == pytest.approx(verify_seconds(TARGET, SITUATION, 0) / 2)


def test_computing_counts_where_it_takes_longer_than_reading() -> None:
    computing = dataclasses.replace(DEVICE, flops=1.0)
    assert step_seconds(TARGET, changed(accelerator=computing, num_rows=4)) == pytest.approx(2 * 50 * 4 / 0.5)
    assert verify_seconds(TARGET, changed(accelerator=computing), 3) == pytest.approx(2 * 50 * 4 / 0.5)


@pytest.mark.parametrize(
    ("acceptance", "length", "tokens"), [(0.5, 3, 1.875), (1.0, 3, 4.0), (0.0, 3, 1.0), (0.9, 0, 1)]
)
def test_expected_tokens(acceptance: float, length: int, tokens: float) -> None:
    assert expected_tokens(acceptance, length) == pytest.approx(tokens)


def test_speed_is_expected_tokens_over_a_rounds_time() -> None:
    plain, two = predict(TARGET, DRAFT, SITUATION, (0, 2))
    assert plain.tokens_per_second == pytest.approx(1 / 280)
    assert two.tokens_per_second == pytest.approx(1.75 / (2 * 20 + 280 * 1.2))
    assert plain.time_to_first_token == two.time_to_first_token


def test_the_best_length_has_no_faster_one() -> None:
    speeds = [prediction.tokens_per_second for prediction in predict(TARGET, DRAFT, SITUATION, range(17))]
    assert speeds[best_length(TARGET, DRAFT, SITUATION)] == max(speeds)
    assert best_length(TARGET, TARGET, SITUATION) == 0


def test_memory_is_weights_and_full_caches_and_what_passes() -> None:
    passing = 6 * 4 * 5 * 10 + RESERVED_BYTES
    assert workspace_bytes(TARGET, SITUATION, 4) == passing
    assert memory_bytes(TARGET, None, SITUATION, 4) == 120 + 2 * 30 + passing
    assert memory_bytes(TARGET, DRAFT, changed(num_rows=2), 4) == 132 + 2 * 2 * 30 + 2 * 6 * 4 * 5 * 10 + RESERVED_BYTES
    plain, four = predict(TARGET, DRAFT, changed(num_devices=4), (0, 4))
    assert four.utilisation == pytest.approx(four.memory / 4e12)
    assert four.memory - plain.memory == 12 + 6 * 4 * 4 * 10


def test_accelerators_go_by_their_names() -> None:
    assert all(name == own.name for name, own in ACCELERATORS.items())
