"""Run a `LogitsProcessorList` over several positions exactly as plain decoding would run it over one.

Three kinds, told apart by type. *Pointwise* processors look at the scores alone: one call covers all positions.
*Prefix functions* also look at the tokens before a position: one call per position, with the right prefix. *Unknown*
ones (a user's own, grammars, guidance, watermarks) may keep state, so they must see the calls of plain decoding and no
others; `ProcessorPlan.is_known` tells the loop to go token by token when there are any.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_specdec.engine.sequences import Sequences

Tensor = torch.Tensor

POINTWISE: frozenset[type] = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)
PREFIX_FUNCTIONS: frozenset[type] = frozenset(
    {
        EncoderNoRepeatNGramLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
    }
)


# For processors that look at scores alone, wherever those are.
NO_TOKENS = torch.empty((1, 0), dtype=torch.long)


class ProcessorPlan:
    """A list of processors, ready to run over `[B, T, V]` logits."""

    def __init__(self, processors: Sequence[LogitsProcessor], num_rows: int) -> None:
        """Sort `processors` by kind; `num_rows` is the size of the batch they were made for."""
        self.processors = list(processors)
        self.num_rows = num_rows
        self.is_known = all(_is_known(p, num_rows) for p in self.processors)
        self.reads_prefix = any(type(p) in PREFIX_FUNCTIONS for p in self.processors)

    def for_draft(self) -> ProcessorPlan:
        """Return the plan of the known processors only: the draft must not touch anybody's state."""
        known = [p for p in self.processors if type(p) in POINTWISE or type(p) in PREFIX_FUNCTIONS]
        return ProcessorPlan(known, self.num_rows)

    def run(self, logits: Tensor, sequences: Sequences, offset: int) -> Tensor:
        """Process logits of consecutive positions.

        Args:
            logits: `[B, T, V]` float32.
            sequences: Rows in the batch; the tokens of every prefix must lie in its buffer.
            offset: Position t of a row follows its first `committed length + offset + t` tokens.

        Returns:
            Scores `[B, T, V]`.
        """
        scores = logits
        for processor in self.processors:
            if type(processor) in POINTWISE:
                scores = _everywhere(processor, scores)
            else:
                scores = self._by_position(processor, scores, sequences, offset)
        return scores

    def run_alike(self, logits: Tensor) -> Tensor:
        """Process logits `[B, T, V]` where all processors are pointwise."""
        scores = logits
        for processor in self.processors:
            scores = _everywhere(processor, scores)
        return scores

    def _by_position(self, processor: LogitsProcessor, scores: Tensor, sequences: Sequences, offset: int) -> Tensor:
        num_positions = scores.shape[1]
        length = sequences.uniform_length
        if length is not None:
            seen = self._for_rows(processor, sequences.rows)
            columns = [seen(sequences.buffer[:, : length + offset + t], scores[:, t]) for t in range(num_positions)]
            return torch.stack(columns, dim=1)
        rows = []
        for position, row in enumerate(sequences.rows):
            seen, length = self._for_rows(processor, [row]), sequences.length_of(row)
            prefix = sequences.buffer[position : position + 1]
            rows.append(
                torch.cat(
                    [
                        seen(prefix[:, : length + offset + t], scores[position : position + 1, t])
                        for t in range(num_positions)
                    ]
                )
            )
        return torch.stack(rows)

    def _for_rows(self, processor: Any, rows: list[int]) -> Any:
        """Return the processor as it would be if the batch held only `rows`."""
        if rows == list(range(self.num_rows)):
            return processor
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            if isinstance(processor.prompt_ignore_length, Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = processor.prompt_ignore_length[rows]
        elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
            processor = copy.copy(processor)
            ids = processor.encoder_input_ids
            processor.encoder_input_ids = ids[[self._prompt_of(row, len(ids)) for row in rows]]
        elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
            processor = copy.copy(processor)
            ngrams = processor.generated_ngrams
            processor.generated_ngrams = [ngrams[self._prompt_of(row, len(ngrams))] for row in rows]
            processor.batch_size = len(rows)
        return processor

    def _prompt_of(self, row: int, num_prompts: int) -> int:
        # Several sequences may be returned per prompt; these two processors were built before the rows were repeated.
        return row // (self.num_rows // num_prompts)


def _everywhere(processor: Any, scores: Tensor) -> Tensor:
    """Run a pointwise processor, which reads no tokens, over all positions at once."""
    processed: Tensor = processor(NO_TOKENS, scores.reshape(-1, scores.shape[-1]))
    return processed.reshape(scores.shape)


def _is_known(processor: Any, num_rows: int) -> bool:
    """Return whether calls of our own making give what plain decoding's would."""
    if type(processor) is EncoderRepetitionPenaltyLogitsProcessor and len(processor.encoder_input_ids) != num_rows:
        # Several sequences per prompt: transformers 5.17 applies it to the first rows only, later ones to all.
        return False
    return type(processor) in POINTWISE or type(processor) in PREFIX_FUNCTIONS
