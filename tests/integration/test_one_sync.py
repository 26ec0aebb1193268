"""A round may read the device once; everything else it needs it already knows."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

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
def test_a_round_reads_the_device_once(target, drafts, reads_by_us, do_sample, num_rows):
    import hf_specdec

    hf_specdec.enable(target)
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
        speculative_config={"on_round": on_round},
        return_dict_in_generate=True,
    )

    per_round = [later - earlier for earlier, later in itertools.pairwise(before_rounds)]
    assert output.speculation.num_rounds > 5
    assert set(per_round) == {1}, reads_by_us
