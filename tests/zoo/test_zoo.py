"""Every architecture decodes with a draft as it does without, in the lane it is known to take or a better one."""

from __future__ import annotations

import pytest

from zoo.findings import PAGE, EXPECTED, expected, is_worse, page
from zoo.roster import GROUPS, SIZES, examined_at, fails_in_a_batch

CASES = [(group, name, size) for group, names in GROUPS.items() for name in names for size in SIZES]
NAMED = """
    qwen3_next qwen3_5_text nemotron_h olmo_hybrid mamba mamba2 falcon_mamba jamba bamba zamba2 lfm2 granitemoehybrid
    falcon_h1 kimi_linear minimax gemma3_text gemma3n_text gpt_oss deepseek_v3 glm4_moe mistral bloom
""".split()


@pytest.mark.parametrize(("group", "name", "size"), CASES, ids=["-".join(case) for case in CASES])
def test_the_text_is_that_of_plain_decoding(group: str, name: str, size: str) -> None:
    if size == "batch" and fails_in_a_batch(group, name):
        pytest.skip("plain decoding fails for two rows")
    finding = examined_at(group, name, SIZES[size])
    assert finding.is_exact
    known = expected().get(group, {}).get(name)
    if known is not None and size in known:
        assert not is_worse(finding.lane, than=known[size]), finding.reason
    if finding.lane == "plain":
        assert finding.reason
    else:
        assert "none" in finding.outcomes
        assert finding.outcomes != ("none",), "nothing was ever accepted"


def test_the_promised_shares_speculate() -> None:
    found = expected()["causal"]
    assert len(found) >= 165 or min(map(int, _version())) < 5 or len(found) >= 140
    singles = [entry["single"] for entry in found.values()]
    batches = [entry.get("batch", "plain") for entry in found.values()]
    assert sum(lane != "plain" for lane in singles) >= 0.97 * len(singles)
    assert sum(lane != "plain" for lane in batches) >= 0.85 * len(batches)


@pytest.mark.parametrize("name", NAMED)
def test_named_architectures_speculate(name: str) -> None:
    known = expected()["causal"].get(name)
    if known is None:
        pytest.skip("not in this version of transformers")
    assert "plain" not in (known["single"], known["batch"])


def test_the_page_shows_what_is_expected() -> None:
    import json

    assert PAGE.read_text() == page(json.loads(EXPECTED.read_text()))
