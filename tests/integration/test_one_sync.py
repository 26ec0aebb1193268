"""A round may read the device once; everything else it needs it already knows."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import hf_specdec
from hf_specdec import AdaptiveDraftLength, learned
from hf_specdec.engine import drafting

READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__")


@pytest.fixture
def reads_by_us(monkeypatch):
    """Count the device reads that our own code asks for."""
    counted: list[str] = []

    def counting(name):
        original = getattr(torch.Tensor, name)

        def read(self, *args, **kwargs):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("hf_specdec."):
                counted.append(f"{caller}.{name}")
            return original(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    return counted


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [5, "auto"])
def test_a_round_reads_the_device_once(target, drafts, reads_by_us, do_sample, num_rows, length, monkeypatch):
    hf_specdec.enable(target)
    learned.forget_learned(None)
    if length == "auto":
        # As on an accelerator, where every read waits for what was asked before it.
        monkeypatch.setattr(drafting, "_is_reading_cheap", lambda _session: False)
        # A plain step has one read, too; here no probe comes in between.
        monkeypatch.setattr(AdaptiveDraftLength, "num_probe_tokens", lambda *_: 0)
    prompt = torch.tensor([[1, 5, 9, 12, 33, 7]]).repeat(num_rows, 1)
    before_rounds: list[int] = []

    def on_round(record):
        before_rounds.append(len(reads_by_us))

    torch.manual_seed(0)
    output = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=40,
        do_sample=do_sample,
        draft_model=drafts["noisy"],
        num_draft_tokens=length,
        speculative_config={"on_round": on_round},
        return_dict_in_generate=True,
    )

    per_round = [later - earlier for earlier, later in itertools.pairwise(before_rounds)]
    assert output.speculation.num_rounds > 5
    assert set(per_round) == {1}, reads_by_us


def test_on_the_cpu_an_adaptive_round_reads_once_more_per_draft_token(target, drafts, reads_by_us):
    hf_specdec.enable(target)
    learned.forget_learned(None)
    prompt = torch.tensor([[1, 5, 9, 12, 33, 7]])
    seen: list[tuple[int, int]] = []
    target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=False,
        draft_model=drafts["noisy"],
        speculative_config={"on_round": lambda record: seen.append((record.num_draft_tokens, len(reads_by_us)))},
    )
    per_round = {(later[0], later[1] - earlier[1]) for earlier, later in itertools.pairwise(seen)}
    assert len(per_round) > 1
    assert all(num_reads == 1 + num_draft_tokens for num_draft_tokens, num_reads in per_round)
