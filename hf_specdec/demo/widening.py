"""Give a small model the cost of a large one without changing what it computes.

Speculative decoding pays because one forward pass of a large model is bound by reading its weights: a pass over K + 1
tokens costs about as much as a pass over one. A model of a few megabytes lives in the processor's cache and shows
nothing of that. Here each MLP gets ballast beside it: a SwiGLU of random weights that is really computed, but whose
down projection is zero, so that it adds exactly 0.0.
"""

from __future__ import annotations

import itertools
import platform
import weakref
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

ModelT = TypeVar("ModelT", bound=nn.Module)

NUM_TOKENS_AT_ONCE = 256  # bounds the memory of a long prompt: its intermediate values are `[tokens, width]`
WIDTH_MULTIPLE = 64  # keeps rows of the weights aligned for every kernel
NUM_RANDOM_ROWS = 1024  # drawn once and repeated: the values do not matter, the bytes do, and drawing is slow


@dataclass(frozen=True, slots=True)
class BallastSize:
    """What widening added to a model."""

    num_parameters: int
    num_bytes: int


def widen(model: ModelT, num_parameters: int, seed: int = 0) -> ModelT:
    """Add ballast to every MLP of `model`, in place: the logits stay bit for bit the same, the cost grows.

    Call it when the model is on its device and has its dtype. Ballast is neither counted by `num_parameters()` of
    the model nor saved with it; `ballast_size` counts it.

    Args:
        model: A decoder whose layers have an attribute `mlp`.
        num_parameters: How many 16-bit weights to add in all, met to within `WIDTH_MULTIPLE` columns a layer.
        seed: Of the random weights. The global random state is not touched.

    Returns:
        The same model.

    Raises:
        ValueError: If `num_parameters` is too small to give every layer some ballast, or there is no MLP to widen.

    Example:
        >>> pair = load_demo_pair(num_parameters=0)
        >>> ballast_size(widen(pair.target, 3_000_000)).num_bytes
        5898240
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(getattr(layer, "mlp", None), nn.Module)]
    if not layers:
        raise ValueError(f"`model` must have layers with an `mlp`, but `{type(model).__name__}` has none.")
    config: Any = model.config
    hidden_size: int = config.hidden_size
    width = round(num_parameters / (len(layers) * 3 * hidden_size * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE
    if width < 1:
        smallest = len(layers) * 3 * hidden_size * WIDTH_MULTIPLE
        raise ValueError(
            f"`num_parameters` must be about {smallest:,} or more for this model, but is {num_parameters:,}. "
            "To leave the model as it is, do not widen it."
        )
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        layer.mlp = WidenedMlp(layer.mlp, Ballast(hidden_size, width, device, generator))
    return model


def ballast_size(model: nn.Module) -> BallastSize:
    """Return how much ballast `model` carries: its 16-bit weights, which are no `Parameter`s."""
    num_weights = sum(module.num_parameters for module in model.modules() if isinstance(module, Ballast))
    return BallastSize(num_parameters=num_weights, num_bytes=2 * num_weights)


class WidenedMlp(nn.Module):
    """`mlp(x) + ballast(x)`, where the second term is 0.0."""

    def __init__(self, mlp: nn.Module, ballast: Ballast) -> None:
        super().__init__()
        self.mlp_itself = mlp  # not called `mlp`, or a second `widen` would go inside instead of around
        self.ballast = ballast

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # [B, T, H] -> [B, T, H]
        """Return what the wrapped MLP returns."""
        own: torch.Tensor = self.mlp_itself(hidden_states)
        zeros: torch.Tensor = self.ballast(hidden_states)
        return own + zeros  # exact: x + 0.0 is x, but for -0.0, which turns into the equal 0.0


class Ballast(nn.Module):
    """A SwiGLU of `3 * hidden_size * width` 16-bit weights with a zero down projection."""

    def __init__(self, hidden_size: int, width: int, device: torch.device, generator: torch.Generator) -> None:
        super().__init__()
        self.num_parameters = 3 * hidden_size * width
        self.gate = _linear(_random_weight(width, hidden_size, generator), device)
        self.up = _linear(_random_weight(width, hidden_size, generator), device)
        # Written, not merely zeroed by the system: untouched pages would all be one page and cost no traffic.
        self.down = _linear(torch.empty(hidden_size, width).fill_(0.0), device)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # [B, T, H] -> [B, T, H], all 0.0
        """Read every weight once per `NUM_TOKENS_AT_ONCE` tokens and return zeros of the input's shape and dtype."""
        parts = torch.split(hidden_states.flatten(0, -2), NUM_TOKENS_AT_ONCE)  # each [<= NUM_TOKENS_AT_ONCE, H]
        zeros = torch.cat([self.down(functional.silu(self.gate(part)).mul_(self.up(part))) for part in parts])
        return zeros.view(hidden_states.shape).to(hidden_states.dtype)


class PackedFloat16Linear(nn.Module):
    """16-bit weights in FBGEMM's packed layout, float32 activations.

    Measured on a CPU with AVX2 but no bfloat16 instructions, 1 thread: 5 tokens cost 1.04 times one token this way,
    4.4 times in bfloat16 (emulated) and 2 to 4 times in float32. Only this form is bound by memory there, as
    every ordinary linear layer is on a GPU.
    """

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in], float32
        super().__init__()
        self.num_outputs = weight.shape[0]
        self.weight = PackedWeight(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, in], any float dtype -> [T, out], float32
        """Return `x @ weight.T`."""
        if torch.compiler.is_compiling():
            compiled: torch.Tensor = packed_linear(x.float(), self.weight.number, self.num_outputs)
            return compiled
        result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.weight.packed)
        return result


class PackedWeight:
    """Packed weights with a number, by which a compiled graph, which cannot hold them, finds them; copies share it."""

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in], float32
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self.number = next(_numbers)
        _weights[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return self


_numbers = itertools.count()
_weights: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


@torch.library.custom_op("hf_specdec::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, number: int, num_outputs: int) -> torch.Tensor:
    """Return `x @ weight.T`, `[T, num_outputs]` float32, for the packed weight of that number."""
    result: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, _weights[number].packed)
    return result


@packed_linear.register_fake
def _(x: torch.Tensor, number: int, num_outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


class Bfloat16Linear(nn.Module):
    """A bfloat16 linear layer whose weight is a buffer, so that it follows `model.to(device)` but is not saved."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:  # [out, in]
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, in], any float dtype -> [T, out]
        """Return `x @ weight.T`."""
        result: torch.Tensor = functional.linear(x.to(self.weight.dtype), self.weight)
        return result


def _linear(weight: torch.Tensor, device: torch.device) -> nn.Module:
    is_x86 = platform.machine().lower() in {"x86_64", "amd64"}
    if device.type == "cpu" and is_x86 and "fbgemm" in torch.backends.quantized.supported_engines:
        return PackedFloat16Linear(weight)
    return Bfloat16Linear(weight.to(device, torch.bfloat16))


def _random_weight(width: int, hidden_size: int, generator: torch.Generator) -> torch.Tensor:  # [width, H], float32
    block: torch.Tensor = torch.randn(min(width, NUM_RANDOM_ROWS), hidden_size, generator=generator) * hidden_size**-0.5
    repeated: torch.Tensor = block.repeat(-(-width // NUM_RANDOM_ROWS), 1)
    return repeated[:width]
