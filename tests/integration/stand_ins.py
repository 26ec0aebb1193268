"""Stand-ins for CUDA graphs and for the compiler, which a machine without either can run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.engine import runners, static

SYNCING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::item")


class NoReads(TorchDispatchMode):
    """Makes reads of the device errors, as they are while a graph is captured."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name().partition(".")[0] in SYNCING:
            raise RuntimeError(f"{function.name()} cannot be captured")
        return function(*args, **(kwargs or {}))


def stand_in_for_graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Stand in for CUDA graphs: a function runs on inputs and outputs that stay where they are, and may read nothing.

    Returns a list that gets the shapes of what is captured. What a graph bakes in, this would read anew from Python; so
    Python's part is run once and must not matter later.
    """
    made: list[tuple[int, ...]] = []

    def maker(function, model, inputs):
        held = tuple(tensor.clone() for tensor in inputs)
        function(model, *held)
        with NoReads():
            kept = tuple(torch.empty_like(output) for output in function(model, *held))
        made.append(tuple(inputs[0].shape))

        def replay(model, *given):
            for own, value in zip(held, given, strict=True):
                assert own.shape == value.shape, "a graph's shapes are fixed"
                own.copy_(value)
            with NoReads():
                for own, value in zip(kept, function(model, *held), strict=True):
                    own.copy_(value)
            return kept

        return replay

    monkeypatch.setitem(runners.RUNNERS, "cuda_graph", maker)
    monkeypatch.setattr(static, "has_device_for", lambda *_: True)
    return made


def compiled_lightly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch.compile trace and check everything, but leave out its slow code generator; count what it traces."""
    compile_fully = torch.compile
    traced: list[int] = []

    def counting(graph, inputs):
        traced.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_fully(function, **options, backend=counting)
    )
    return traced


def decode(model: Any, inputs: dict[str, Any], draft: Any, runner: str, **options: Any) -> Any:
    """Generate greedily with a runner, unless told otherwise."""
    settings = {"do_sample": False, "max_new_tokens": 24, "num_draft_tokens": 3, **options}
    return model.generate(
        **inputs,
        draft_model=draft,
        speculative_config={"runner": runner},
        return_dict_in_generate=True,
        **settings,
    )


@contextmanager
def before_forwards(module: torch.nn.Module, look: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Call `look` with the arguments of every forward, by way of the module's class: hooks would end preparing."""
    original: Any = type(module)

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(args, kwargs)
        return original.forward(self, *args, **kwargs)

    module.__class__ = type(original.__name__, (original,), {"forward": forward})
    try:
        yield
    finally:
        module.__class__ = original
