"""A selective scan continues from the state that the cache holds, and the host is afterwards as it was."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MambaConfig
from transformers.models.mamba import modeling_mamba
from zoo.causal import build_causal

import models
from hf_specdec.engine.scans import NO_LIMIT, SCAN, carried_over, continued_scans, modules_with_scans

Tensor = torch.Tensor
NAMES = frozenset({modeling_mamba.__name__})
BATCH, INNER, STATE, WIDTH = 2, 3, 4, 7
OPTIONS = list(itertools.product([False, True], repeat=3))


def inputs(num_tokens: int = WIDTH, seed: int = 0) -> dict[str, Tensor]:
    """Return what the host gives to a scan, in its layouts."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "hidden_states": draw(BATCH, INNER, num_tokens),
        "dt": draw(BATCH, INNER, num_tokens).abs(),
        "A": -draw(INNER, STATE).abs(),
        "B": draw(BATCH, STATE, num_tokens),
        "C": draw(BATCH, STATE, num_tokens),
        "D": draw(INNER),
        "z": draw(BATCH, INNER, num_tokens),
        "delta_bias": draw(INNER).abs(),
    }


def scanned(given: dict[str, Tensor], part: slice, *, delta_softplus: bool = True) -> tuple[Tensor, Tensor]:
    """Run the host's scan over some of the tokens, as its layers call it."""
    cut = {
        name: value[..., part] if name in ("hidden_states", "dt", "B", "C", "z") else value
        for name, value in given.items()
    }
    positional = [cut.pop(name) for name in ("hidden_states", "dt", "A", "B", "C")]
    return modeling_mamba.mamba_selective_scan(
        *positional, **cut, delta_softplus=delta_softplus, return_last_state=True, use_mambapy=False
    )


def cache_holding(state: Tensor | None) -> DynamicCache:
    """Return a cache of one recurrent layer."""
    cache = DynamicCache(config=MambaConfig(num_hidden_layers=1))
    if state is not None:
        cache.update_conv_state(torch.zeros(BATCH, INNER, 4), 0)
        cache.update_recurrent_state(state, 0)
    return cache


def convolve(cache: DynamicCache) -> None:
    """What a layer does before its scan."""
    cache.update_conv_state(torch.zeros(BATCH, INNER, 1), 0)


def looped(
    state: Tensor,
    dt: Tensor,
    decay_rates: Tensor,
    readout: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    soft: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence of the initial state alone, token by token and number by number, in float64."""
    state, dt, decay_rates, readout = (value.double() for value in (state, dt, decay_rates, readout))
    held = state.clone()
    outputs = torch.zeros_like(dt)
    for row, channel, token in itertools.product(*map(range, dt.shape)):
        step = dt[row, channel, token] + (bias.double()[channel] if bias is not None else 0)
        step = torch.log1p(torch.exp(step)) if soft else step
        for number in range(state.shape[-1]):
            held[row, channel, number] *= torch.exp(decay_rates[channel, number] * step)
            outputs[row, channel, token] += readout[row, number, token] * held[row, channel, number]
        if gate is not None:
            opening = gate.double()[row, channel, token]
            outputs[row, channel, token] *= opening / (1 + torch.exp(-opening))
    return outputs, held


# ---- the arithmetic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_gate", "has_bias", "has_softplus"), OPTIONS)
@pytest.mark.parametrize("num_tokens", [1, 2, WIDTH])
def test_carried_over_equals_the_recurrence(
    has_gate: bool, has_bias: bool, has_softplus: bool, num_tokens: int
) -> None:
    given = inputs(num_tokens, seed=num_tokens)
    gate, bias = given["z"] if has_gate else None, given["delta_bias"] if has_bias else None
    state = torch.randn(BATCH, INNER, STATE, generator=torch.Generator().manual_seed(9))
    wanted = looped(state, given["dt"], given["A"], given["C"], gate, bias, has_softplus)
    got = carried_over(state, given["dt"], given["A"], given["C"], gate=gate, bias=bias, has_softplus=has_softplus)
    for mine, other in zip(got, wanted, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), other, atol=1e-5, rtol=1e-5)


def test_carried_over_of_16_bit_inputs_is_computed_in_float32() -> None:
    given = {name: value.bfloat16() for name, value in inputs().items()}
    state = torch.ones(BATCH, INNER, STATE, dtype=torch.bfloat16)
    extra, left = carried_over(state, given["dt"], given["A"], given["C"], gate=None, bias=None, has_softplus=False)
    wanted = looped(state, given["dt"], given["A"], given["C"], None, None, False)
    assert extra.dtype == left.dtype == torch.float32
    torch.testing.assert_close(extra.double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(left.double(), wanted[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("has_gate", "has_bias", "has_softplus"), OPTIONS)
@pytest.mark.parametrize("cut", [1, 4, WIDTH - 1])
def test_two_scans_equal_one_scan_of_all_tokens(has_gate: bool, has_bias: bool, has_softplus: bool, cut: int) -> None:
    given = inputs()
    if not has_gate:
        del given["z"]
    if not has_bias:
        del given["delta_bias"]
    wanted, last = scanned(given, slice(None), delta_softplus=has_softplus)
    first, state = scanned(given, slice(cut), delta_softplus=has_softplus)
    cache = cache_holding(state)
    with continued_scans(NAMES, cache):
        convolve(cache)
        second, end = scanned(given, slice(cut, None), delta_softplus=has_softplus)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end, last, atol=1e-5, rtol=1e-5)


def test_every_head_continues_from_its_own_state() -> None:
    """Some layers scan once per head, and their state has a dimension for the heads."""
    heads = [inputs(seed=seed) for seed in range(3)]
    wanted = [scanned(given, slice(None)) for given in heads]
    cache = cache_holding(torch.stack([scanned(given, slice(4))[1] for given in heads], dim=1))
    with continued_scans(NAMES, cache):
        convolve(cache)
        got = [scanned(given, slice(4, None)) for given in heads]
    for (mine, end), (other, last) in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other[..., 4:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(end, last, atol=1e-5, rtol=1e-5)


# ---- which scans continue --------------------------------------------------------------------------------------


def assert_from_zero(got: tuple[Tensor, Tensor], given: dict[str, Tensor], part: slice) -> None:
    wanted = modeling_mamba_scan(given, part)
    assert all(torch.equal(mine, other) for mine, other in zip(got, wanted, strict=True))


def modeling_mamba_scan(given: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor]:
    """Run the untouched scan; only for use outside of `continued_scans`."""
    assert getattr(modeling_mamba, SCAN) is ORIGINAL
    return scanned(given, part)


ORIGINAL = getattr(modeling_mamba, SCAN)


@contextmanager
def unchanged(*caches: DynamicCache) -> Iterator[None]:
    """Assert that scans and attributes of the caches are the same objects before and after."""
    before = [dict(vars(cache)) for cache in caches]
    yield
    assert getattr(modeling_mamba, SCAN) is ORIGINAL
    assert [dict(vars(cache)) for cache in caches] == before


def test_a_scan_without_a_state_before_it_starts_from_zero() -> None:
    given, cache = inputs(), cache_holding(None)
    with continued_scans(NAMES, cache):
        convolve(cache)
        got = scanned(given, slice(None))
    assert_from_zero(got, given, slice(None))


def test_a_scan_that_no_layer_of_the_cache_makes_starts_from_zero() -> None:
    given, cache = inputs(), cache_holding(torch.ones(BATCH, INNER, STATE))
    with continued_scans(NAMES, cache):
        got = scanned(given, slice(None))
        convolve(cache)
        scanned(given, slice(None))
        again = scanned(given, slice(None))
    assert_from_zero(got, given, slice(None))
    assert_from_zero(again, given, slice(None))


def test_leaves_the_host_as_it_was() -> None:
    cache = cache_holding(torch.ones(BATCH, INNER, STATE))
    with unchanged(cache):
        with continued_scans(NAMES, cache):
            assert getattr(modeling_mamba, SCAN) is not ORIGINAL
        assert "update_conv_state" not in vars(cache)


def test_leaves_the_host_as_it_was_after_an_exception() -> None:
    given, cache = inputs(), cache_holding(torch.ones(BATCH, INNER, STATE))

    def interrupted() -> None:
        with continued_scans(NAMES, cache):
            convolve(cache)
            raise KeyboardInterrupt

    with unchanged(cache), pytest.raises(KeyboardInterrupt):
        interrupted()
    # The state that the interrupted layer read is forgotten, too.
    other = cache_holding(torch.ones(BATCH, INNER, STATE))
    with continued_scans(NAMES, other):
        got = scanned(given, slice(None))
    assert_from_zero(got, given, slice(None))


def test_without_names_nothing_is_touched() -> None:
    with continued_scans(frozenset(), None):
        assert getattr(modeling_mamba, SCAN) is ORIGINAL


@pytest.mark.parametrize("is_same_cache", [False, True])
def test_nests(is_same_cache: bool) -> None:
    given = inputs()
    state = scanned(given, slice(4))[1]
    outer = cache_holding(state)
    inner = outer if is_same_cache else cache_holding(2 * state)
    with unchanged(outer, inner), continued_scans(NAMES, outer):
        with continued_scans(NAMES, inner):
            convolve(inner)
            scanned(given, slice(4, None))
        convolve(outer)
        got, _ = scanned(given, slice(4, None))
    torch.testing.assert_close(got, scanned(given, slice(None))[0][..., 4:], atol=1e-5, rtol=1e-5)


def test_a_wrapper_that_the_caller_put_around_the_cache_stays() -> None:
    cache = cache_holding(torch.ones(BATCH, INNER, STATE))
    calls = []
    update = cache.update_conv_state

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return update(*args, **kwargs)

    cache.update_conv_state = counted
    with unchanged(cache), continued_scans(NAMES, cache):
        convolve(cache)
    assert cache.update_conv_state is counted
    assert len(calls) == 1


def test_scans_of_other_threads_are_left_alone() -> None:
    given, cache = inputs(), cache_holding(torch.ones(BATCH, INNER, STATE))
    got: list[tuple[Tensor, Tensor]] = []
    with continued_scans(NAMES, cache):
        convolve(cache)
        thread = threading.Thread(target=lambda: got.append(scanned(given, slice(None))))
        thread.start()
        thread.join()
        mine = scanned(given, slice(None))
    assert_from_zero(got[0], given, slice(None))
    assert not torch.equal(mine[0], got[0][0])


def test_threads_that_overlap_leave_the_host_as_it_was() -> None:
    given = inputs()
    state = scanned(given, slice(4))[1]
    wanted = scanned(given, slice(None))[0][..., 4:]
    inside, may_leave = threading.Event(), threading.Event()
    got: dict[str, Tensor] = {}

    def work() -> None:
        cache = cache_holding(state)
        with continued_scans(NAMES, cache):
            convolve(cache)
            inside.set()
            assert may_leave.wait(timeout=30)
            got["other"] = scanned(given, slice(4, None))[0]

    thread = threading.Thread(target=work)
    cache = cache_holding(state)
    with continued_scans(NAMES, cache):
        thread.start()
        assert inside.wait(timeout=30)
        convolve(cache)
        got["mine"] = scanned(given, slice(4, None))[0]
    # The other thread entered later and still needs the scan.
    assert getattr(modeling_mamba, SCAN) is not ORIGINAL
    may_leave.set()
    thread.join(timeout=30)
    assert getattr(modeling_mamba, SCAN) is ORIGINAL
    torch.testing.assert_close(got["mine"], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got["other"], wanted, atol=1e-5, rtol=1e-5)


def test_finds_the_modules_whose_scans_a_model_uses() -> None:
    assert modules_with_scans(models.build_mamba()) == NAMES
    assert modules_with_scans(models.build_target()) == frozenset()


def test_a_model_reads_several_tokens_as_it_reads_one_at_a_time() -> None:
    model = models.build_mamba()
    ids = torch.randint(1, models.VOCAB_SIZE, (2, 11), generator=torch.Generator().manual_seed(3))
    name = "cache" if "cache" in type(model).forward.__annotations__ else "cache_params"
    with torch.no_grad():
        wanted = model(ids).logits
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], **{name: cache}, use_cache=True)
        plain = model(ids[:, 5:], **{name: copy.deepcopy(cache)}, use_cache=True).logits
        with continued_scans(modules_with_scans(model), cache):
            got = model(ids[:, 5:], **{name: cache}, use_cache=True).logits
    assert (plain - wanted[:, 5:]).abs().max() > 1e-2
    torch.testing.assert_close(got, wanted[:, 5:], atol=1e-4, rtol=1e-4)


# ---- limits of step sizes --------------------------------------------------------------------------------------


def test_only_chunked_scans_that_go_on_are_free_of_limits() -> None:
    """The host keeps the steps of several tokens within limits, and those of single tokens not."""
    seen: list[Any] = []
    module = types.ModuleType("limited")
    module.mamba2_chunk_scan = lambda *args, **kwargs: seen.append(kwargs["dt_limit"])
    original, limit, state = module.mamba2_chunk_scan, (0.001, float("inf")), torch.zeros(1)
    sys.modules[module.__name__] = module
    try:
        with continued_scans(frozenset({module.__name__}), cache_holding(None)):
            module.mamba2_chunk_scan(initial_states=state, dt_limit=limit)
            module.mamba2_chunk_scan(initial_states=None, dt_limit=limit)
            thread = threading.Thread(
                target=module.mamba2_chunk_scan, kwargs={"initial_states": state, "dt_limit": limit}
            )
            thread.start()
            thread.join()
        assert module.mamba2_chunk_scan is original
    finally:
        del sys.modules[module.__name__]
    assert seen == [NO_LIMIT, limit, limit]


@pytest.mark.parametrize(("name", "is_limited"), [("nemotron_h", True), ("zamba2", True), ("mamba2", False)])
def test_finds_the_modules_that_limit_steps(name: str, is_limited: bool) -> None:
    model = build_causal(name)
    module = inspect.getmodule(type(model).__mro__[0])
    assert module is not None
    assert modules_with_scans(model) == (frozenset({module.__name__}) if is_limited else frozenset())
