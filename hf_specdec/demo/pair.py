"""Load the bundled pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.demo.widening import widen

DEMO_FOLDER = Path(__file__).parent
"""Holds `target/` and `draft/`, two ordinary model folders with one tokenizer."""


@dataclass(frozen=True, slots=True)
class DemoPair:
    """A target, a draft that learned from it, and their common tokenizer."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_demo_pair(
    *, num_parameters: int = 300_000_000, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> DemoPair:
    """Load the pair trained by `examples/train_demo_pair.py`, with the target widened to a realistic cost.

    The trained target is a few million parameters small: one of its passes costs little more than one of the draft's,
    so a draft could not pay off, whatever the decoder does. `widen` gives it the memory traffic of a larger model and
    changes none of its logits.

    Args:
        num_parameters: Parameters that widening adds to the target; 0 leaves it as it was trained.
        dtype: Of the trained weights. Greedy output is guaranteed to equal plain decoding only in float32.
        device: Where both models go.

    Returns:
        The pair, both models in evaluation mode.

    Raises:
        OSError: If the bundled weights are missing.
        ValueError: If `num_parameters` is negative.

    Example:
        >>> pair = load_demo_pair(num_parameters=0)
        >>> pair.target.config.vocab_size
        4096
    """
    target = _load("target", dtype, device)
    if num_parameters:
        widen(target, num_parameters)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target", local_files_only=True)
    return DemoPair(target, _load("draft", dtype, device), tokenizer)


def _load(name: str, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / name, dtype=dtype, local_files_only=True)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
