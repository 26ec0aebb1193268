"""Makes the texts of conditional models: what an encoder reads, and prompts around an image or a sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from zoo.conditional_configs import FIRST_SPECIAL

Inputs = dict[str, torch.Tensor]
Maker = Callable[[PreTrainedModel, int], Inputs]

TEXT_LENGTH = 12
BEFORE, AFTER, IMAGE, VIDEO, AUDIO = 88, 89, 90, 91, 92  # token ids, as the small configurations give them


def words(length: int) -> torch.Tensor:
    return torch.randint(4, FIRST_SPECIAL, (length,))


def text_for_encoder(model: PreTrainedModel, batch: int) -> Inputs:
    """Return rows of different length, padded on the right."""
    del model
    rows = [words(TEXT_LENGTH - 4 * row) for row in range(batch)]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([[len(row)] for row in rows])
    return {"input_ids": input_ids, "attention_mask": (torch.arange(TEXT_LENGTH) < lengths).long()}


def prompt(model: PreTrainedModel, count: int, batch: int, placeholder: int = IMAGE) -> Inputs:
    """Return rows of text around `count` placeholders, padded on the left to a common length."""
    middle = torch.tensor([BEFORE, *[placeholder] * count, AFTER])
    rows = [torch.cat([words(3), middle, words(TEXT_LENGTH - 3 - 4 * row)]) for row in range(batch)]
    width = len(rows[0])
    input_ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    inputs = {"input_ids": input_ids, "attention_mask": (torch.arange(width) >= width - lengths).long()}
    fields = inspect.signature(model.forward).parameters
    kinds = (input_ids == placeholder).long()
    return inputs | {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in fields}


def count_features(model: PreTrainedModel, arguments: dict[str, Any], batch: int, kind: str = "image") -> int:
    """Return how many features the model makes of each row's image or sound."""
    name = f"get_{kind}_features"
    owner = model if hasattr(model, name) else model.model
    with torch.no_grad():
        features = getattr(owner, name)(**arguments)
    pooled = getattr(features, "pooler_output", features)
    pooled = features.last_hidden_state if pooled is None else pooled
    parts = [pooled] if isinstance(pooled, torch.Tensor) else pooled
    return sum(part.numel() // part.shape[-1] for part in parts) // batch
