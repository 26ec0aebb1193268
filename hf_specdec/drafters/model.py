"""Propose with a draft model: a causal LM of the target's token space on a lane of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_specdec.engine.compatible import CompatibleLane
from hf_specdec.engine.forward import Lane, prefilled_lane
from hf_specdec.engine.host import prefill_by_host
from hf_specdec.engine.layout import context_of
from hf_specdec.engine.processors import ProcessorPlan
from hf_specdec.engine.sequences import Sequences, Span
from hf_specdec.engine.state import Proposal
from hf_specdec.placement import device_of

Tensor = torch.Tensor


class ModelDrafter:
    """Runs K draft steps per round; its law follows the target's because it uses the same processors."""

    def __init__(
        self,
        model: Any,
        sequences: Sequences,
        *,
        plan: ProcessorPlan,
        do_sample: bool,
        vocab_size: int,
        attention_mask: Tensor | None,
        capacity: int,
        lane: str = "ragged",
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare to draft.

        Args:
            model: The draft.
            sequences: The rows to continue; proposals are written into its buffer.
            plan: The target's processors that a draft may run.
            do_sample: Whether to sample from the draft or to take its most likely token.
            vocab_size: The target's; draft logits are cut or filled up to it.
            attention_mask: The prompt's, `[B, W]`, None when nothing is padded.
            capacity: Cache slots to allocate per row.
            lane: "ragged", or "compatible" where rows move in lockstep.
            inputs: What the draft reads beside tokens (an encoder's input, images), as for `generate`.
        """
        self.model = model
        self.sequences = sequences
        self.plan = plan
        self.do_sample = do_sample
        self.vocab_size = vocab_size
        self.attention_mask = attention_mask
        self.capacity = capacity
        self.lane_name = lane
        self.inputs = dict(inputs or {})
        embeddings = model.get_input_embeddings().weight
        self.num_embeddings = int(embeddings.shape[0])
        self.max_positions = context_of(model)
        self.lane: Lane | CompatibleLane | None = None
        # Committed columns whose states the cache holds, per row in the batch.
        self._cached: list[int] = []
        self._proposed_at: list[int] = []
        self._num_proposed = 0

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft so far, the prefill included."""
        return self.lane.num_forwards + 1 if self.lane is not None else 0

    @property
    def needs(self) -> frozenset[str]:
        """A draft model reads tokens only."""
        return frozenset()

    def limit(self) -> int | None:
        """Return how many tokens still fit into the draft's own context."""
        if self.max_positions is None:
            return None
        return max(0, self.max_positions - max(self.sequences.lengths))

    def prefill(self) -> None:
        """Read the prompt."""
        num_columns = self.sequences.num_prompt_columns
        prompt = self._embeddable(self.sequences.buffer[:, :num_columns])
        if self.lane_name == "ragged":
            self.lane = prefilled_lane(self.model, prompt, self.attention_mask, capacity=self.capacity)
        else:
            prefill = prefill_by_host(self.model, **self._prompt_arguments(prompt))
            self.lane = CompatibleLane(self.model, prefill, is_draft=True)
        self._cached = [num_columns] * len(self.sequences.rows)

    def propose(self, num_draft_tokens: int) -> Proposal:
        """Catch up on committed tokens, then take `num_draft_tokens` steps."""
        sequences = self.sequences
        lengths = sequences.lengths
        missing = max(length - cached for length, cached in zip(lengths, self._cached, strict=True))
        self._proposed_at, self._num_proposed = lengths, num_draft_tokens
        assert self.lane is not None, "prefill comes first"
        self.lane.settle(min(lengths))
        # Rows that lack fewer tokens write a known one again: nothing changes and the batch stays rectangular.
        span = sequences.span(-missing, missing)
        tokens = sequences.read(span, missing)
        chosen: list[Tensor] = []
        laws: list[Tensor] = []
        broken: list[Tensor] = []
        for step in range(num_draft_tokens):
            scores = self.plan.run(self._logits(tokens, span)[:, None], sequences, step)[:, 0]
            token, law, is_broken = self._choose(scores)
            chosen.append(token)
            broken.append(is_broken)
            if law is not None:
                laws.append(law)
            if step + 1 < num_draft_tokens:
                span, tokens = sequences.span(step, 1), token[:, None]
                if self.plan.reads_prefix:
                    sequences.write(span, tokens)
        return Proposal(
            token_ids=torch.stack(chosen, dim=1),
            probs=torch.stack(laws, dim=1) if laws else None,
            is_broken=torch.stack(broken, dim=1).any(dim=1),
        )

    def commit(self, num_kept: Sequence[int]) -> None:
        """Roll back: the last drafted token was never fed, and rejected ones do not count."""
        for position, (row, kept) in enumerate(zip(self.sequences.rows, num_kept, strict=True)):
            fed = self._proposed_at[position] + min(kept, self._num_proposed - 1)
            self._cached[position] = min(fed, self.sequences.length_of(row) - 1)

    def rows_left(self, kept: Sequence[int]) -> None:
        """Drop the rows that finished."""
        if self.lane is not None:
            self.lane.select_rows(torch.tensor(kept, device=self.lane.device))
        self._cached = [self._cached[position] for position in kept]

    def _logits(self, tokens: Tensor, span: Span) -> Tensor:
        """Feed `[B, T]` tokens and return the last position's logits `[B, V]`, V being the target's vocabulary."""
        assert self.lane is not None, "prefill comes first"
        logits = self.lane.forward(self._embeddable(tokens), span, num_logits=1).logits[:, -1]
        logits = logits[:, : self.vocab_size].to(device=self.sequences.device, dtype=torch.float32)
        # Ids that only the target has get probability 0, ids that only the draft has are cut off.
        return torch.nn.functional.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)

    def _prompt_arguments(self, prompt: Tensor) -> dict[str, Any]:
        device = device_of(self.model)
        if self.model.config.is_encoder_decoder:
            return {**self.inputs, "decoder_input_ids": prompt.to(device)}
        mask = self.attention_mask if self.attention_mask is not None else torch.ones_like(prompt)
        tokens = {"input_ids": prompt.to(device), "attention_mask": mask.to(device)}
        return {**self.inputs, **tokens}

    def _embeddable(self, token_ids: Tensor) -> Tensor:
        if self.num_embeddings >= self.vocab_size:
            return token_ids
        return token_ids.clamp(max=self.num_embeddings - 1)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return tokens `[B]`, the law they were drawn from `[B, V]` (None when greedy), and where it was NaN `[B]`."""
        if not self.do_sample:
            best, token = scores.max(dim=-1)
            return token, None, ~best.isfinite()
        law = scores.softmax(dim=-1)
        is_broken = law[:, 0].isnan()
        # A broken row proposes token 0 for sure: a valid law, so the answer stays exact until drafting is switched off.
        certain = torch.zeros_like(law)
        certain[:, 0] = 1
        law = torch.where(is_broken[:, None], certain, law)
        return torch.multinomial(law, 1).squeeze(1), law, is_broken
