"""SpeculativeConfig: what it accepts, and what its errors say."""

from dataclasses import FrozenInstanceError, fields
from types import MappingProxyType
from typing import Any

import pytest

from hf_specdec.config import FOREIGN_SPELLINGS, LONGEST_ADAPTIVE_DRAFT, SpeculativeConfig
from hf_specdec.errors import InvalidConfigError


def test_defaults() -> None:
    assert SpeculativeConfig() == SpeculativeConfig(
        num_draft_tokens="auto",
        verification="block",
        strict=False,
        on_round=None,
        trust_remote_code=False,
        draft_revision=None,
        controller_hints=None,
    )


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SpeculativeConfig().num_draft_tokens = 3  # type: ignore[misc]


def test_zero_draft_tokens_says_how_to_decode_without_a_draft() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        SpeculativeConfig(num_draft_tokens=0)
    assert str(caught.value) == (
        '`num_draft_tokens` must be between 1 and 256, or "auto", but is 0. To decode without a draft, leave out '
        "`draft_model`."
    )


@pytest.mark.parametrize("value", [1, 256])
def test_accepts_the_ends_of_the_range(value: int) -> None:
    assert SpeculativeConfig(num_draft_tokens=value).num_draft_tokens == value


def test_the_most_a_round_drafts() -> None:
    assert SpeculativeConfig(num_draft_tokens=7).max_draft_tokens == 7
    assert SpeculativeConfig().max_draft_tokens == LONGEST_ADAPTIVE_DRAFT


@pytest.mark.parametrize("hints", [{"num_draft_tokens": 4, "survival": [0.9, 0.8]}, {}])
def test_accepts_hints_for_the_adaptive_length(hints: dict[str, Any]) -> None:
    config = SpeculativeConfig(controller_hints=hints)
    assert config.controller_hints == hints
    hash(config)


def test_refuses_hints_for_a_fixed_length() -> None:
    with pytest.raises(InvalidConfigError, match="`controller_hints` are for"):
        SpeculativeConfig(num_draft_tokens=4, controller_hints={})


@pytest.mark.parametrize("hints", [{"survival": "all"}, {"alpha": 0.8}, 0.8])
def test_refuses_malformed_hints(hints: Any) -> None:
    with pytest.raises(InvalidConfigError, match="`controller_hints`"):
        SpeculativeConfig(controller_hints=hints)


@pytest.mark.parametrize("value", [-1, 257, True, False, 5.0, "5", "AUTO", None, [5]])
def test_refuses_other_draft_lengths_and_says_what_it_got(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"`num_draft_tokens` must be between 1 and 256") as caught:
        SpeculativeConfig(num_draft_tokens=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verification", "tokens"),
        ("verification", None),
        ("verification", ["block"]),
        ("strict", 1),
        ("strict", "no"),
        ("trust_remote_code", None),
        ("on_round", "print"),
        ("draft_revision", ""),
        ("draft_revision", 7),
    ],
)
def test_refuses_wrong_values_and_names_the_setting(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfigError, match=f"`{name}` must be") as caught:
        SpeculativeConfig(**{name: value})
    assert repr(value) in str(caught.value)


def test_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="num_draft_tokens"):
        SpeculativeConfig(num_draft_tokens=0)


def test_from_user_takes_nothing_a_config_or_a_mapping() -> None:
    config = SpeculativeConfig(strict=True)
    assert SpeculativeConfig.from_user(None) == SpeculativeConfig()
    assert SpeculativeConfig.from_user(config) is config
    assert SpeculativeConfig.from_user({"strict": True}) == config
    assert SpeculativeConfig.from_user(MappingProxyType({"strict": True})) == config
    assert SpeculativeConfig.from_user({}) == SpeculativeConfig()


@pytest.mark.parametrize("value", [5, "block", ["strict"], SpeculativeConfig])
def test_from_user_refuses_other_types(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="`speculative_config` must be a SpeculativeConfig"):
        SpeculativeConfig.from_user(value)


@pytest.mark.parametrize(
    "value", [None, {}, {"num_draft_tokens": 7}, SpeculativeConfig(), SpeculativeConfig(num_draft_tokens=7)]
)
def test_from_user_merges_the_keyword(value: Any) -> None:
    assert SpeculativeConfig.from_user(value, num_draft_tokens=7).num_draft_tokens == 7


def test_from_user_keeps_the_other_settings_when_it_merges_the_keyword() -> None:
    config = SpeculativeConfig.from_user(SpeculativeConfig(strict=True), num_draft_tokens=7)
    assert config == SpeculativeConfig(strict=True, num_draft_tokens=7)


@pytest.mark.parametrize(
    "value", [{"num_draft_tokens": 5}, {"num_draft_tokens": 3}, SpeculativeConfig(num_draft_tokens=3)]
)
def test_from_user_refuses_two_different_draft_lengths(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"7 as a keyword of `generate` and \d in `speculative_config`"):
        SpeculativeConfig.from_user(value, num_draft_tokens=7)


@pytest.mark.parametrize("value", [0, True, "adaptive"])
def test_from_user_checks_the_keyword(value: Any) -> None:
    with pytest.raises(InvalidConfigError, match="must be between 1 and 256"):
        SpeculativeConfig.from_user(None, num_draft_tokens=value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("num_draft_token", "num_draft_tokens"),
        ("Verification", "verification"),
        ("revision", "draft_revision"),
        ("onround", "on_round"),
        ("trust_remote", "trust_remote_code"),
    ],
)
def test_unknown_key_names_the_nearest_setting(key: str, nearest: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"no setting `{key}`. Did you mean `{nearest}`?"):
        SpeculativeConfig.from_user({key: 1})


def test_key_without_any_likeness_is_refused_too() -> None:
    with pytest.raises(InvalidConfigError, match="no setting `7`"):
        SpeculativeConfig.from_user({7: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", FOREIGN_SPELLINGS)
def test_foreign_spelling_names_ours(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f"no setting `{name}`. It is called `{FOREIGN_SPELLINGS[name]}` here"):
        SpeculativeConfig.from_user({name: 4})


def test_foreign_spellings_point_at_real_settings_and_are_none_themselves() -> None:
    names = {field.name for field in fields(SpeculativeConfig)}
    assert set(FOREIGN_SPELLINGS.values()) <= names
    assert not names & FOREIGN_SPELLINGS.keys()
    assert {
        "num_assistant_tokens",
        "num_speculative_tokens",
        "speculative_num_steps",
        "speculative_num_draft_tokens",
        "max_draft_len",
        "speculate_k",
        "gamma",
        "lookahead",
        "draft_length",
        "k",
    } <= FOREIGN_SPELLINGS.keys()
