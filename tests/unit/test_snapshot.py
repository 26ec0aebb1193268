"""Snapshots of caches and of other running state: what they bring back, what they share, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig, PreTrainedConfig, StaticCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, StaticLayer, StaticSlidingWindowLayer

import models
from hf_specdec.engine.snapshot import freeze, thaw

Tensor = torch.Tensor
BATCH, HEADS, DIM, WINDOW, LENGTH = 2, 2, 3, 4, 16


def config(**overrides: Any) -> MistralConfig:
    options = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": HEADS, "hidden_size": 6}
    return MistralConfig(**(options | {"sliding_window": None} | overrides))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def feed(cache: Any, num_tokens: int, seed: int) -> None:
    """Append keys and values of some tokens to every layer."""
    for index in range(2):
        keys, values = (draw(BATCH, HEADS, num_tokens, DIM, seed=10 * seed + index + part) for part in (0, 5))
        cache.update(keys, values, index)


def recur(layer: LinearAttentionLayer, num_tokens: int, seed: int) -> None:
    """What a recurrent layer does with some tokens: both states change in place."""
    layer.update_conv_state(draw(BATCH, DIM, num_tokens, seed=seed), conv_kernel_size=4)
    layer.update_recurrent_state(draw(BATCH, DIM, 5, seed=seed + 100))


def dynamic() -> DynamicCache:
    return DynamicCache(config=config())


def sliding() -> DynamicCache:
    return DynamicCache(config=config(sliding_window=WINDOW))


def static() -> StaticCache:
    return StaticCache(config=config(), max_cache_len=LENGTH)


def static_sliding() -> StaticCache:
    return StaticCache(config=config(sliding_window=WINDOW), max_cache_len=LENGTH)


def hybrid() -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer(), DynamicLayer()]
    return cache


MAKERS: dict[str, Callable[[], Any]] = {
    "dynamic": dynamic,
    "sliding": sliding,
    "static": static,
    "static sliding": static_sliding,
}


def filled(cache: Any) -> list[Any]:
    """Return copies of all that later forwards can see of a cache of keys and values."""
    seen: list[Any] = []
    for layer in cache.layers:
        length = int(layer.get_seq_length())
        stored = min(length, layer.keys.shape[2])
        seen += [type(layer), length, layer.keys[:, :, :stored].clone(), layer.values[:, :, :stored].clone()]
    return seen


def assert_same(got: Any, wanted: Any) -> None:
    """Compare nested values bit for bit."""
    assert type(got) is type(wanted)
    if isinstance(got, Tensor):
        assert torch.equal(got, wanted)
    elif isinstance(got, dict):
        assert got.keys() == wanted.keys()
        for key in got:
            assert_same(got[key], wanted[key])
    elif isinstance(got, (list, tuple)):
        assert len(got) == len(wanted)
        for mine, other in zip(got, wanted, strict=True):
            assert_same(mine, other)
    else:
        assert got == wanted


# ---- caches of keys and values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 7])
@pytest.mark.parametrize("kind", MAKERS)
def test_tokens_fed_after_freezing_are_taken_back(kind: str, num_tokens: int) -> None:
    cache = MAKERS[kind]()
    feed(cache, 5, seed=1)
    before, layers = filled(cache), list(cache.layers)
    frozen = freeze(cache)
    for seed in (2, 3):
        # A snapshot can be used again.
        feed(cache, num_tokens, seed=seed)
        assert filled(cache)[1] == 5 + num_tokens
        assert thaw(frozen) is cache
        assert all(mine is other for mine, other in zip(cache.layers, layers, strict=True))
        assert_same(filled(cache), before)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_thawed_cache_goes_on_like_one_that_never_saw_the_tokens(kind: str) -> None:
    cache, other = MAKERS[kind](), MAKERS[kind]()
    feed(cache, 3, seed=1)
    feed(other, 3, seed=1)
    frozen = freeze(cache)
    feed(cache, 4, seed=2)
    thaw(frozen)
    for seed in (3, 4):
        feed(cache, 2, seed=seed)
        feed(other, 2, seed=seed)
        assert_same(filled(cache), filled(other))


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
def test_keys_and_values_that_nothing_overwrites_are_not_copied(kind: str) -> None:
    cache = MAKERS[kind]()
    feed(cache, 3, seed=1)
    storages = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    frozen = freeze(cache)
    feed(cache, 2, seed=2)
    for _ in range(2):
        thaw(frozen)
        assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == storages


def test_a_static_window_is_copied_for_it_is_shifted_in_place() -> None:
    cache = static_sliding()
    feed(cache, WINDOW + 1, seed=1)
    assert {type(layer) for layer in cache.layers} == {StaticSlidingWindowLayer}
    before, frozen = filled(cache), freeze(cache)
    for layer in cache.layers:
        layer.keys.zero_()
    thaw(frozen)
    assert_same(filled(cache), before)


@pytest.mark.parametrize("kind", ["dynamic", "sliding", "static"])
def test_layers_that_were_empty_are_empty_again(kind: str) -> None:
    cache = MAKERS[kind]()
    frozen = freeze(cache)
    feed(cache, 3, seed=1)
    thaw(frozen)
    assert [layer.is_initialized for layer in cache.layers] == [False, False]
    feed(cache, 2, seed=2)
    other = MAKERS[kind]()
    feed(other, 2, seed=2)
    assert_same(filled(cache), filled(other))


def test_layers_made_after_freezing_are_dropped() -> None:
    cache = DynamicCache()
    frozen = freeze(cache)
    feed(cache, 3, seed=1)
    assert len(cache.layers) == 2
    thaw(frozen)
    assert cache.layers == []


def test_a_crop_is_undone() -> None:
    cache = dynamic()
    feed(cache, 5, seed=1)
    before, frozen = filled(cache), freeze(cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 2
    thaw(frozen)
    assert_same(filled(cache), before)


def test_recording_of_a_window_is_switched_off_again() -> None:
    cache = sliding()
    feed(cache, WINDOW + 2, seed=1)
    before, frozen = filled(cache), freeze(cache)
    cache.activate_past_recording()
    feed(cache, 3, seed=2)
    thaw(frozen)
    assert [layer.record_past for layer in cache.layers] == [False, False]
    assert_same(filled(cache), before)


def test_encoder_decoder_cache() -> None:
    cache = EncoderDecoderCache(dynamic(), dynamic())
    feed(cache.self_attention_cache, 2, seed=1)
    parts = cache.self_attention_cache, cache.cross_attention_cache
    frozen = freeze(cache)
    feed(cache.cross_attention_cache, 6, seed=2)
    feed(cache.self_attention_cache, 1, seed=3)
    cache.is_updated[0] = True
    thaw(frozen)
    assert (cache.self_attention_cache, cache.cross_attention_cache) == parts
    assert cache.self_attention_cache.get_seq_length() == 2
    assert not any(layer.is_initialized for layer in cache.cross_attention_cache.layers)
    assert not cache.is_updated.get(0)


# ---- recurrent state -------------------------------------------------------------------------------------------


def test_recurrent_state_that_changes_in_place_is_brought_back() -> None:
    cache = hybrid()
    recurrent, attention = cache.layers
    recur(recurrent, 3, seed=1)
    cache.update(draw(BATCH, HEADS, 3, DIM, seed=2), draw(BATCH, HEADS, 3, DIM, seed=3), 1)
    before = [recurrent.conv_states[0].clone(), recurrent.recurrent_states[0].clone()]
    keys = attention.keys
    frozen = freeze(cache)
    for seed in (4, 5):
        conv, state = recurrent.conv_states[0], recurrent.recurrent_states[0]
        recur(recurrent, 1, seed=seed)
        # These are the very tensors that the layer held when it was frozen or thawed.
        assert conv is recurrent.conv_states[0]
        assert state is recurrent.recurrent_states[0]
        assert not torch.equal(state, before[1])
        cache.update(draw(BATCH, HEADS, 1, DIM, seed=6), draw(BATCH, HEADS, 1, DIM, seed=7), 1)
        assert thaw(frozen) is cache
        assert cache.layers[0] is recurrent
        assert cache.layers[1] is attention
        assert attention.keys is keys
        assert_same([recurrent.conv_states[0], recurrent.recurrent_states[0]], before)


def test_recurrent_layers_that_were_empty_are_empty_again() -> None:
    cache = hybrid()
    frozen = freeze(cache)
    recur(cache.layers[0], 3, seed=1)
    thaw(frozen)
    assert cache.layers[0].conv_states == {0: None}
    assert cache.layers[0].recurrent_states == {0: None}
    assert cache.layers[0].has_previous_state == {0: False}


def container(kind: type) -> Any:
    items = [draw(2, seed=1), [draw(3, seed=2), {"deep": (draw(1, seed=3),)}], 4]
    return dict(enumerate(items)) if kind is dict else kind(items)


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_containers_of_tensors(kind: type) -> None:
    value, wanted = container(kind), container(kind)
    frozen = freeze(value)
    value[0].zero_()
    value[1][0].zero_()
    value[1][1]["deep"][0].zero_()
    thawed = thaw(frozen)
    assert_same(thawed, wanted)
    # What is done to a thawed state leaves the snapshot alone.
    thawed[0].add_(1)
    thawed[1].append(5)
    assert_same(thaw(frozen), wanted)


def test_a_list_of_states_that_a_model_writes_into() -> None:
    """RWKV hands on its state as a list of tensors, and writes into them."""
    state = [draw(BATCH, DIM, 2, seed=seed) for seed in range(5)]
    wanted = [tensor.clone() for tensor in state]
    frozen = freeze(state)
    for tensor in state:
        tensor[:, :, 0] = 7.0
    state.append(draw(1, seed=9))
    assert_same(thaw(frozen), wanted)


# ---- objects ---------------------------------------------------------------------------------------------------


def test_attributes_are_set_back_also_added_and_removed_ones() -> None:
    subject = SimpleNamespace(tensor=draw(2, seed=1), count=3, gone="here", items=[1, 2])
    frozen = freeze(subject)
    subject.tensor.zero_()
    subject.count, subject.new = 4, "there"
    subject.items.append(3)
    del subject.gone
    assert thaw(frozen) is subject
    assert_same(vars(subject), {"tensor": draw(2, seed=1), "count": 3, "gone": "here", "items": [1, 2]})


def test_cyclic_references() -> None:
    first, second = SimpleNamespace(tensor=draw(2, seed=1)), SimpleNamespace(tensor=draw(2, seed=2))
    first.other, second.other, first.me, second.all = second, first, first, [first, {"second": second}]
    frozen = freeze([first, second])
    for subject in (first, second):
        subject.tensor.zero_()
        subject.other = None
    for _ in range(2):
        assert thaw(frozen) == [first, second]
        assert first.other is second
        assert second.other is first
        assert first.me is first
        assert second.all[0] is first
        assert second.all[1]["second"] is second
        assert torch.equal(first.tensor, draw(2, seed=1))
        assert torch.equal(second.tensor, draw(2, seed=2))
        first.tensor.add_(1)


def test_a_cache_met_twice_stays_one_object() -> None:
    cache = dynamic()
    feed(cache, 3, seed=1)
    state = {"cache": cache, "again": cache, "layers": cache.layers}
    frozen = freeze(state)
    feed(cache, 2, seed=2)
    thawed = thaw(frozen)
    assert thawed["cache"] is cache
    assert thawed["again"] is cache
    assert all(mine is other for mine, other in zip(thawed["layers"], cache.layers, strict=True))
    assert cache.get_seq_length() == 3


def test_what_is_no_state_is_kept_as_it_is() -> None:
    model = models.build_target()
    kept = [model, model.config, torch.float32, torch.device("cpu"), len, draw, torch, DynamicCache, None, 3, "text"]
    frozen = freeze(SimpleNamespace(kept=kept))
    name = model.config.name_or_path
    model.config.name_or_path = "changed"
    assert all(mine is other for mine, other in zip(thaw(frozen).kept, kept, strict=True))
    # Shared, so what the caller does to it meanwhile is not undone.
    assert isinstance(model.config, PreTrainedConfig)
    assert model.config.name_or_path == "changed" != name


def test_nothing_and_plain_values() -> None:
    for value in (None, 3, "text", (), [], {}):
        assert thaw(freeze(value)) == value


def test_static_layers_of_a_callers_own_class_are_copied() -> None:
    """Such a layer may write where the snapshot's tokens are."""

    class OwnLayer(StaticLayer):
        pass

    cache = static()
    cache.layers = [OwnLayer(max_cache_len=LENGTH), OwnLayer(max_cache_len=LENGTH)]
    feed(cache, 3, seed=1)
    before, frozen = filled(cache), freeze(cache)
    cache.layers[0].keys.zero_()
    thaw(frozen)
    assert_same(filled(cache), before)
