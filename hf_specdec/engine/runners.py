"""Ways to run one function of a model and tensors again and again: compiled by torch, or captured in a CUDA graph.

What is prepared does not hold the model: whoever keeps it must not keep the model alive.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]
Maker = Callable[[Function, Any, Tensors], Function]


def compiled(function: Function, model: Any, inputs: Tensors) -> Function:
    """Return `function` compiled for the shapes of `inputs`, whose marked dimensions stay free."""
    made: Function = torch.compile(_twin(function), fullgraph=True, dynamic=False)
    with warnings.catch_warnings():
        # The compiler warns of what it uses itself; where warnings are errors, nothing could be compiled.
        warnings.simplefilter("ignore")
        made(model, *inputs)
    return made


def captured(function: Function, model: Any, inputs: Tensors) -> Function:
    """Return a function that replays what `function` does on the current CUDA device, in one launch.

    `function` may read and write tensors of its own, which must stay where they are. What is returned is overwritten by
    the next replay.
    """
    held = tuple(tensor.clone() for tensor in inputs)
    device = held[0].device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        # Libraries set up their workspaces in the first run, which cannot be captured.
        outputs = function(model, *held)
    torch.cuda.current_stream(device).wait_stream(side)
    # Outside of the graphs' common memory, where another graph's replay would overwrite it.
    kept = tuple(torch.empty_like(output) for output in outputs)
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[device.index or 0]
    random_state = generator.clone_state()
    try:
        # Other threads may use the device meanwhile, one of them may capture.
        with (
            _capturing,
            torch.cuda.device(device),
            torch.cuda.graph(graph, pool=_pool(device), capture_error_mode="thread_local"),
        ):
            for own, output in zip(kept, function(model, *held), strict=True):
                own.copy_(output)
    except BaseException:
        # A capture that broke off leaves the generator believing that it goes on.
        generator.graphsafe_set_state(random_state)
        torch.cuda.synchronize(device)
        raise

    def replay(_: Any, *given: Tensor) -> Tensors:
        for own, value in zip(held, given, strict=True):
            own.copy_(value)
        graph.replay()
        return kept

    return replay


RUNNERS: Mapping[str, Maker] = {"compiled": compiled, "cuda_graph": captured}
"""Name of a runner to what prepares a function for inputs of given shapes."""

_pools: dict[torch.device, Any] = {}
_capturing = threading.Lock()


def _pool(device: torch.device) -> Any:
    """Return the memory that all graphs of a device share: they never run at the same time."""
    if device not in _pools:
        _pools[device] = torch.cuda.graph_pool_handle()
    return _pools[device]


def _twin(function: Function) -> Function:
    """Return the same function with code of its own: torch counts what it compiles per code, and stops at a few."""
    assert isinstance(function, FunctionType), "closures of ours"
    code = function.__code__.replace(co_name=function.__code__.co_name)
    twin = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
