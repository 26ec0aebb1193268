"""Load what is measured: the bundled pair, two models by name, or a synthetic pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.benchmark.bench.ways import Pair
from hf_specdec.benchmark.random_draft import with_random_weights
from hf_specdec.benchmark.synthetic import SyntheticPair, make_synthetic_pair
from hf_specdec.demo import DEMO_FOLDER, ballast_size, load_demo_pair

SYNTHETIC = "synthetic"
SYNTHETIC_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A pair, what to call it, and prompts of its own where it cannot read text."""

    pair: Pair
    names: dict[str, str]
    prompts: SyntheticPrompts | None = None


@dataclass(frozen=True, slots=True)
class SyntheticPrompts:
    """The prompts of a synthetic pair, in the place of a workload."""

    pair: SyntheticPair

    def encoded(
        self, tokenizer: None, num_prompts: int, *, num_prompt_tokens: int | None, seed: int, **_: Any
    ) -> list[list[int]]:
        """Return random rows of ids, all of one length."""
        num_tokens = num_prompt_tokens or SYNTHETIC_PROMPT_TOKENS
        rows: list[list[int]] = self.pair.prompt(num_prompts, num_tokens, seed).tolist()
        return rows


def synthetic_pair(
    shapes: str, acceptance: float, dtype: torch.dtype, device: str, seed: int, quantization: str = "none"
) -> Subject:
    """Return a pair of random weights whose acceptance is set, and its prompts.

    Raises:
        InvalidConfigError: The shapes are not known, or the acceptance is out of range.
    """
    made = make_synthetic_pair(
        shapes, acceptance, dtype=dtype, device=device, seed=seed, draft_quantization=quantization
    )
    pair = Pair(target=hf_specdec.enable(made.target), draft=made.draft, tokenizer=None, note=made.note)
    names = {"target": f"{made.target_name} (synthetic)", "draft": f"{made.draft_name} (synthetic)", "note": made.note}
    return Subject(pair=pair, names=names, prompts=SyntheticPrompts(made))


def bundled_pair(num_parameters: int, dtype: torch.dtype, device: str, *, random_seed: int | None = None) -> Subject:
    """Return the bundled pair with its target widened, and what to call the two.

    Args:
        num_parameters: What the target is widened by.
        dtype: Of the weights.
        device: Where both models go.
        random_seed: Draw the draft's weights anew with this seed, so that it guesses no better than chance; None
            leaves it as it was trained.
    """
    pair = load_demo_pair(num_parameters=num_parameters, dtype=dtype, device=device)
    notes = []
    if num_parameters:
        notes.append(
            f"The target is the bundled one, widened by {num_parameters:,} parameters that cost time and change no "
            "logit: its texts are those of a model of four million parameters, which are easier to guess than a large "
            "model's."
        )
    is_random = random_seed is not None
    if is_random:
        notes.append(
            "The draft has the bundled one's shape and random weights: it guesses no better than chance, on purpose, "
            "to show what a bad pair looks like."
        )
    loaded = Pair(
        target=hf_specdec.enable(pair.target),
        draft=pair.draft if random_seed is None else with_random_weights(pair.draft, random_seed),
        tokenizer=pair.tokenizer,
        # Loaded by name it would be the trained one.
        draft_name=None if is_random else str(DEMO_FOLDER / "draft"),
        ballast_bytes=ballast_size(pair.target).num_bytes,
        note=" ".join(notes),
    )
    draft = "a draft of random weights" if is_random else "the bundled draft"
    return Subject(pair=loaded, names={"target": "the bundled target", "draft": draft, "note": loaded.note})


def named_pair(target: str, draft: str, dtype: torch.dtype, device: str, *, trust_remote_code: bool) -> Subject:
    """Return two models by Hub id or local folder.

    Raises:
        OSError: One of them cannot be loaded.
        ValueError: Likewise, or they are no causal LMs.
    """
    model = _model(target, dtype, device, trust_remote_code=trust_remote_code)
    tokenizer = _tokenizer(target, trust_remote_code=trust_remote_code)
    draft_tokenizer = _tokenizer(draft, trust_remote_code=trust_remote_code)
    is_same = tokenizer.get_vocab() == draft_tokenizer.get_vocab()
    pair = Pair(
        target=hf_specdec.enable(model),
        draft=_model(draft, dtype, device, trust_remote_code=trust_remote_code),
        tokenizer=tokenizer,
        draft_tokenizer=None if is_same else draft_tokenizer,
        draft_name=draft,
    )
    return Subject(pair=pair, names={"target": target, "draft": draft, "note": ""})


def _model(name: str, dtype: torch.dtype, device: str, *, trust_remote_code: bool) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def _tokenizer(name: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded
