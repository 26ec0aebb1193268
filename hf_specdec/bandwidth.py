"""What decoding should take on an accelerator, from the bytes that a step has to read: a model, not a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul
from typing import Literal

LENGTHS = range(17)
# Of the peak rate of matrix products, reached while a prompt is read.
COMPUTE_EFFICIENCY = 0.5
# Beside weights and caches, per device: the driver's context, kernels, fragments.
RESERVED_BYTES = 800_000_000

Parallelism = Literal["layers", "tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device, by its data sheet.

    Attributes:
        name: What people call it.
        memory: Bytes.
        bandwidth: Bytes per second between its memory and its cores.
        flops: Dense 16-bit multiplications and additions per second.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator(name="h100", memory=80e9, bandwidth=3.35e12, flops=989e12),
        Accelerator(name="h100-pcie", memory=80e9, bandwidth=2.0e12, flops=756e12),
        Accelerator(name="h200", memory=141e9, bandwidth=4.8e12, flops=989e12),
        Accelerator(name="a100", memory=80e9, bandwidth=2.04e12, flops=312e12),
        Accelerator(name="a100-40gb", memory=40e9, bandwidth=1.555e12, flops=312e12),
        Accelerator(name="l40s", memory=48e9, bandwidth=0.864e12, flops=362e12),
        Accelerator(name="a10g", memory=24e9, bandwidth=0.6e12, flops=70e12),
        Accelerator(name="rtx-4090", memory=24e9, bandwidth=1.008e12, flops=165e12),
    )
}
"""Published figures of the makers, SXM where there are several and nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a model takes.

    Attributes:
        weight_bytes: Of all weights.
        read_bytes: Of those that every forward reads: all but an embedding table that is only looked up in.
        num_parameters: Parameters that a token meets, each of which takes a multiplication and an addition.
        expert_bytes: Of `read_bytes`, those of experts, of which a token meets only some.
        expert_share: The share of the experts that a token meets, 0..1.
        cache_bytes_per_token: What a row's cache grows by per token.
        cache_bytes_per_row: What a row's cache holds whatever its length: recurrent states.
        vocab_size: Entries of the vocabulary.
    """

    weight_bytes: int
    read_bytes: int
    num_parameters: int
    cache_bytes_per_token: int
    cache_bytes_per_row: int
    vocab_size: int
    expert_bytes: int = 0
    expert_share: float = 1.0

    def bytes_read(self, num_tokens: int) -> float:
        """Return the bytes of weights that a forward over so many tokens reads, whose experts are chosen at random."""
        unread = self.expert_bytes * (1.0 - self.expert_share) ** num_tokens
        return self.read_bytes - unread

    def cache_bytes(self, num_rows: int, num_tokens: float) -> float:
        """Return the bytes of a batch's cache."""
        return num_rows * (self.cache_bytes_per_row + num_tokens * self.cache_bytes_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where and what is decoded.

    Attributes:
        accelerator: The kind of device.
        num_devices: How many.
        parallelism: "layers" is what `device_map` does: each device holds some of the layers and waits for the others,
            so that several add memory and no speed. "tensors" splits each layer, so that they read at once.
        efficiency: Share of the bandwidth that is reached, 0..1.
        num_rows: Rows of the batch.
        num_prompt_tokens: Per row.
        num_new_tokens: Per row.
        acceptance: Probability of a draft token to be accepted when the ones before it were.
        verified_token_share: What each further token of a verification adds to a target step, as a share of one.
    """

    accelerator: Accelerator
    num_devices: int = 1
    parallelism: Parallelism = "layers"
    efficiency: float = 0.8
    num_rows: int = 1
    num_prompt_tokens: int = 1024
    num_new_tokens: int = 512
    acceptance: float = 0.8
    verified_token_share: float = 0.01

    @property
    def num_reading(self) -> int:
        """Devices that read their part of the target at the same time."""
        return self.num_devices if self.parallelism == "tensors" else 1

    @property
    def mean_length(self) -> float:
        """Tokens in a row's cache halfway through."""
        return self.num_prompt_tokens + self.num_new_tokens / 2

    @property
    def full_length(self) -> int:
        """Tokens in a row's cache at the end."""
        return self.num_prompt_tokens + self.num_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a way to decode should give.

    Attributes:
        num_draft_tokens: K; 0 is plain decoding.
        tokens_per_second: Per row.
        time_to_first_token: Seconds. The draft reads the prompt after the first token, so it is the same for every K.
        memory: Bytes on all devices together.
        utilisation: Those / the bytes that the devices have.
    """

    num_draft_tokens: int
    tokens_per_second: float
    time_to_first_token: float
    memory: float
    utilisation: float


def predict(target: ModelSize, draft: ModelSize, situation: Situation, lengths: Sequence[int]) -> list[Prediction]:
    """Return a prediction for each draft length."""
    return [_predict(target, draft, situation, length) for length in lengths]


def best_length(target: ModelSize, draft: ModelSize, situation: Situation) -> int:
    """Return the draft length with the most tokens per second, the smaller of two equals."""
    return max(LENGTHS, key=lambda length: _tokens_per_second(target, draft, situation, length))


def step_seconds(model: ModelSize, situation: Situation, num_reading: int = 1, num_tokens: int = 1) -> float:
    """Return the seconds in which a forward over so many tokens per row reads what it needs, or computes one token."""
    read = model.bytes_read(situation.num_rows * num_tokens) + model.cache_bytes(
        situation.num_rows, situation.mean_length
    )
    by_reading = read / (situation.accelerator.bandwidth * situation.efficiency * num_reading)
    return max(by_reading, _computing_seconds(model, situation, situation.num_rows, num_reading))


def verify_seconds(target: ModelSize, situation: Situation, num_draft_tokens: int) -> float:
    """Return the seconds of a verification of K draft tokens per row."""
    reading = step_seconds(target, situation, situation.num_reading, num_draft_tokens + 1)
    reading *= 1 + situation.verified_token_share * num_draft_tokens
    num_tokens = situation.num_rows * (num_draft_tokens + 1)
    return max(reading, _computing_seconds(target, situation, num_tokens, situation.num_reading))


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Return the tokens that a row gets per round."""
    survival: Iterator[float] = accumulate(repeat(acceptance, num_draft_tokens), mul)
    return 1.0 + sum(survival)


def memory_bytes(target: ModelSize, draft: ModelSize | None, situation: Situation, num_draft_tokens: int) -> float:
    """Return the bytes of weights, caches and what a forward needs in passing, on all devices together."""
    models = [target] if draft is None else [target, draft]
    held = sum(model.weight_bytes + model.cache_bytes(situation.num_rows, situation.full_length) for model in models)
    return held + workspace_bytes(target, situation, num_draft_tokens)


def workspace_bytes(target: ModelSize, situation: Situation, num_draft_tokens: int) -> float:
    """Return the bytes of a round's laws in float32, which acceptance needs a few of, and what each device reserves."""
    laws = 6 * 4 * situation.num_rows * (num_draft_tokens + 1) * target.vocab_size
    return laws + RESERVED_BYTES * situation.num_devices


def _predict(target: ModelSize, draft: ModelSize, situation: Situation, length: int) -> Prediction:
    memory = memory_bytes(target, draft if length else None, situation, length)
    num_prompt_tokens = situation.num_rows * situation.num_prompt_tokens
    first = max(
        step_seconds(target, situation, situation.num_reading),
        _computing_seconds(target, situation, num_prompt_tokens, situation.num_reading),
    )
    return Prediction(
        num_draft_tokens=length,
        tokens_per_second=_tokens_per_second(target, draft, situation, length),
        time_to_first_token=first,
        memory=memory,
        utilisation=memory / (situation.accelerator.memory * situation.num_devices),
    )


def _tokens_per_second(target: ModelSize, draft: ModelSize, situation: Situation, length: int) -> float:
    seconds = length * step_seconds(draft, situation) + verify_seconds(target, situation, length)
    return expected_tokens(situation.acceptance, length) / seconds


def _computing_seconds(model: ModelSize, situation: Situation, num_tokens: int, num_reading: int) -> float:
    return 2 * model.num_parameters * num_tokens / (situation.accelerator.flops * COMPUTE_EFFICIENCY * num_reading)
