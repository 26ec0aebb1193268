"""Every architecture decodes with a draft as it does without, in the lane it is known to take or a better one."""

from __future__ import annotations

import json

import pytest

from zoo.findings import EXPECTED, PAGE, expected, is_worse, page
from zoo.roster import GROUPS, SIZES, examined_at, fails_in_a_batch

CASES = [(group, name, size) for group, names in GROUPS.items() for name in names for size in SIZES]
# A token changes what comes before it, so that tokens cannot be verified together.
NOT_CAUSAL = {"cpmant", "reformer", "xlm", "xlnet"}
NAMED = [
    *("qwen3_next", "qwen3_5_text", "nemotron_h", "olmo_hybrid", "mamba", "mamba2", "falcon_mamba", "jamba", "bamba"),
    *("zamba2", "lfm2", "granitemoehybrid", "falcon_h1", "kimi_linear", "minimax", "gemma3_text", "gemma3n_text"),
    *("gpt_oss", "deepseek_v3", "glm4_moe", "mistral", "bloom", "recurrent_gemma", "t5", "whisper"),
]


@pytest.mark.parametrize(("group", "name", "size"), CASES, ids=["-".join(case) for case in CASES])
def test_the_text_is_that_of_plain_decoding(group: str, name: str, size: str) -> None:
    if size == "batch" and fails_in_a_batch(group, name):
        pytest.skip("plain decoding fails for two rows")
    finding = examined_at(group, name, SIZES[size])
    assert finding.is_exact
    known = expected().get(group, {}).get(name, {}).get(size, "plain")
    assert not is_worse(finding.lane, than=known), finding.reason
    if finding.lane == "plain":
        assert finding.reason
    else:
        assert "none" in finding.outcomes


def test_the_promised_shares_speculate() -> None:
    found = {name: entry for name, entry in expected()["causal"].items() if name not in NOT_CAUSAL}
    assert len(found) >= 160
    for size, share in (("single", 0.97), ("batch", 0.85)):
        lanes = [entry.get(size, "plain") for entry in found.values()]
        assert sum(lane != "plain" for lane in lanes) >= share * len(lanes)


def test_what_is_not_causal_decodes_plainly() -> None:
    found = expected()["causal"]
    assert {found[name]["single"] for name in NOT_CAUSAL & set(found)} == {"plain"}


@pytest.mark.parametrize("name", NAMED)
def test_named_architectures_speculate(name: str) -> None:
    known = next((found[name] for found in expected().values() if name in found), None)
    if known is None:
        pytest.skip("not in this version of transformers")
    assert "plain" not in (known["single"], known["batch"])


def test_the_page_shows_what_is_expected() -> None:
    assert PAGE.read_text() == page(json.loads(EXPECTED.read_text()))
