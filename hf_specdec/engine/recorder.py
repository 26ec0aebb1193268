"""Collect scores, logits, hidden states and attentions per token, as plain decoding returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

Tensor = torch.Tensor


class Recorder:
    """Tuples with one entry per new token; None for what the caller did not ask for."""

    def __init__(self, config: GenerationConfig, *, is_encoder_decoder: bool = False) -> None:
        """Read from `config` what is wanted; an encoder-decoder's states are its decoder's."""
        self.prefix = "decoder_" if is_encoder_decoder else ""
        wants = bool(config.return_dict_in_generate)
        self.scores: list[Tensor] | None = [] if wants and config.output_scores else None
        self.logits: list[Tensor] | None = [] if wants and config.output_logits else None
        self.hidden_states: list[Any] | None = [] if wants and config.output_hidden_states else None
        self.attentions: list[Any] | None = [] if wants and config.output_attentions else None
        self.cross_attentions: list[Any] | None = [] if self.attentions is not None and is_encoder_decoder else None

    @property
    def wants_scores(self) -> bool:
        """Whether scores or logits are collected."""
        return self.scores is not None or self.logits is not None

    @property
    def collect(self) -> Mapping[str, bool]:
        """The arguments of `forward` that make it return what is wanted."""
        wanted = {"output_hidden_states": self.hidden_states, "output_attentions": self.attentions}
        return {name: True for name, kept in wanted.items() if kept is not None}

    def add_prefill(self, outputs: Any) -> None:
        """Keep the prompt's hidden states and attentions, which belong to the first token."""
        if self.hidden_states is not None:
            self.hidden_states.append(outputs[f"{self.prefix}hidden_states"])
        if self.attentions is not None:
            self.attentions.append(outputs[f"{self.prefix}attentions"])
        if self.cross_attentions is not None:
            self.cross_attentions.append(outputs.cross_attentions)

    def add_token(self, logits: Tensor, scores: Tensor) -> None:
        """Keep one token's logits and scores, both `[B, V]`; copied, for they are views of a round's."""
        if self.logits is not None:
            self.logits.append(logits.clone())
        if self.scores is not None:
            self.scores.append(scores.clone())

    def add_position(
        self, outputs: Any, position: int, num_positions: int, windows: Sequence[int | None] | None
    ) -> None:
        """Keep the states of one of the round's positions: `[B, 1, H]` and `[B, heads, 1, keys]` per layer.

        `windows` holds each layer's sliding window, outside of which plain decoding has no keys; None: no layer slides.
        """
        if self.hidden_states is not None:
            states = outputs[f"{self.prefix}hidden_states"]
            self.hidden_states.append(tuple(layer[:, position : position + 1] for layer in states))
        if self.cross_attentions is not None:
            rows = [layer[:, :, position : position + 1] for layer in outputs.cross_attentions]
            self.cross_attentions.append(tuple(rows))
        if self.attentions is None:
            return
        later = num_positions - 1 - position
        layers = outputs[f"{self.prefix}attentions"]
        rows = [layer[:, :, position : position + 1, : layer.shape[-1] - later] for layer in layers]
        # Some attention functions give no weights.
        if windows is not None and rows:
            rows = [row if window is None else row[..., -window:] for row, window in zip(rows, windows, strict=True)]
        self.attentions.append(tuple(rows))

    def scores_so_far(self) -> tuple[Tensor, ...] | None:
        """Return what plain decoding hands to stopping criteria."""
        return tuple(self.scores) if self.scores is not None else None

    def fields(self) -> dict[str, Any]:
        """Return the output object's fields."""
        return {
            name: tuple(kept) if kept is not None else None
            for name, kept in (
                ("scores", self.scores),
                ("logits", self.logits),
                (f"{self.prefix}hidden_states", self.hidden_states),
                (f"{self.prefix}attentions", self.attentions),
                *([("cross_attentions", self.cross_attentions)] if self.prefix else []),
            )
        }
