"""What a round may do beside its forwards once it has begun: no new large tensors, one read of the device."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from integration.comparing import EVERY_OUTCOME, KINDS, outcomes_of
from torch.utils._python_dispatch import TorchDispatchMode

import hf_specdec
import models

# A few KB: ids, counts and labels of a round are smaller, one row of the vocabulary is larger.
LARGEST = 4096
VOCAB_SIZE = 4096
READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"})


class Watch(TorchDispatchMode):
    """Notes the operations that allocate more than `LARGEST` bytes or read the device, outside of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.is_forward = False
        self.allocations: list[str] = []
        self.reads: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.is_forward:
            return result
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs or {}))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes() > LARGEST:
                self.allocations.append(f"{function} {tuple(tensor.shape)}")
        if function.name().partition(".")[0] in READS:
            self.reads.append(str(function))
        return result

    @contextmanager
    def leaving_out(self, *owners: torch.nn.Module) -> Any:
        """Look away during these models' forwards."""
        originals = [owner.forward for owner in owners]

        def unwatched(forward: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.is_forward = True
                try:
                    return forward(*args, **kwargs)
                finally:
                    self.is_forward = False

            return run

        for owner, original in zip(owners, originals, strict=True):
            owner.forward = unwatched(original)
        try:
            yield
        finally:
            for owner in owners:
                del owner.forward


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.fixture
def wide():
    """Return a target of a larger vocabulary, in the given dtype, and its three drafts."""

    def build(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
        target = models.build_target(vocab_size=VOCAB_SIZE)
        drafts = models.build_drafts(target) | {"unrelated": models.build_target(seed=100, vocab_size=VOCAB_SIZE)}
        return hf_specdec.enable(target.to(dtype)), {name: draft.to(dtype) for name, draft in drafts.items()}

    return build


def watched(target: Any, draft: Any, **options: Any) -> tuple[Watch, list[tuple[int, int]], Any]:
    """Generate under a watch; return it, its two counts after each round, and the stats."""
    watch = Watch()
    counts: list[tuple[int, int]] = []
    prompt = torch.tensor([[1, 5, 9, 12, 33, 7]])
    torch.manual_seed(0)
    with watch, watch.leaving_out(target, draft):
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=40,
            draft_model=draft,
            num_draft_tokens=5,
            speculative_config={
                "on_round": lambda _: counts.append((len(watch.allocations), len(watch.reads))),
            },
            return_dict_in_generate=True,
            **options,
        )
    return watch, counts, output.speculation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("do_sample", [False, True])
def test_rounds_allocate_nothing_large(wide, dtype, do_sample):
    target, drafts = wide(dtype)
    seen = set()
    for kind in KINDS:
        watch, counts, stats = watched(target, drafts[kind], do_sample=do_sample, top_k=0)
        seen |= outcomes_of(stats.rounds)
        allocations = [after[0] - before[0] for before, after in itertools.pairwise(counts)]
        assert len(allocations) > 5
        # The second round still meets a first time: what the draft had not read before.
        assert not any(allocations[1:]), watch.allocations[counts[1][0] :]
    assert seen == EVERY_OUTCOME


def test_scores_that_are_asked_for_are_allocated(wide):
    target, drafts = wide(torch.float32)
    _, counts, _ = watched(target, drafts["noisy"], do_sample=False, output_scores=True)
    assert counts[-1][0] > counts[1][0]


@pytest.mark.parametrize("do_sample", [False, True])
def test_rounds_read_the_device_once(wide, do_sample):
    target, drafts = wide(torch.float32)
    for kind in KINDS:
        watch, counts, stats = watched(target, drafts[kind], do_sample=do_sample, top_k=0)
        # `tolist` on the CPU copies memory without an operation; every other read is one, and there is none.
        assert counts[-1][1] == counts[0][1], watch.reads
        assert stats.num_rounds > 5
