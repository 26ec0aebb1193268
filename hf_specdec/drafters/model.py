"""Propose with a draft model: a causal LM of the target's token space on a lane of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_specdec.drafters.unit import draft_steps, first_count, unit_key
from hf_specdec.engine.acceptance import drawn_with
from hf_specdec.engine.compatible import CompatibleLane
from hf_specdec.engine.forward import Lane, prefilled_lane
from hf_specdec.engine.host import prefill_by_host
from hf_specdec.engine.layout import context_of
from hf_specdec.engine.processors import ProcessorPlan
from hf_specdec.engine.scratch import Scratch, in_float32
from hf_specdec.engine.sequences import Sequences, Span
from hf_specdec.engine.state import Proposal, Shadow
from hf_specdec.engine.static import StaticForward
from hf_specdec.placement import device_of

Tensor = torch.Tensor
# The first step of a round reads so many tokens along; more get a forward of their own, timed apart.
LONGEST_FIRST_STEP = 8
# Positions whose `[T, V]` probabilities are held at a time.
JUDGED_AT_ONCE = 32


class ModelDrafter:
    """Runs K draft steps per round; its law follows the target's because it uses the same processors."""

    # Whether `propose` asks after each token if it goes on.
    asks_midway = True
    # Whether all steps of a proposal may be captured as one.
    drafts_as_one = True
    # Committed tokens at the end that may still be read otherwise.
    num_open = 0

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
        static: StaticForward | None = None,
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
            static: What prepares its forwards, None to run it as usual.
        """
        self.model = model
        self.sequences = sequences
        # What the draft reads: the same tokens.
        self.own = sequences
        self.plan = plan
        self.do_sample = do_sample
        self.vocab_size = vocab_size
        self.attention_mask = attention_mask
        self.capacity = capacity
        self.lane_name = lane
        self.scratch = Scratch()
        self.inputs = dict(inputs or {})
        self.static = static
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
        return max(0, self.max_positions - max(self.own.lengths))

    def num_unread(self) -> int:
        """Return how many tokens `catch_up` would read; a few that the first step can take along do not count."""
        if self.lane is None:
            return max(self.own.lengths) - 1
        num_missing = self._num_missing()
        return num_missing - 1 if num_missing > LONGEST_FIRST_STEP else 0

    def catch_up(self) -> None:
        """Read all committed tokens but the last, which the first step reads."""
        if self.lane is None:
            self._prefill(min(self.own.lengths) - 1)
        self._read(num_left=1)

    def propose(self, num_draft_tokens: int, goes_on: Callable[[Tensor], bool] | None = None) -> Proposal:
        """Take up to `num_draft_tokens` steps, the first over all committed tokens that are still unread."""
        self._proposed_at = self.own.lengths
        self._settle()
        proposal = self._proposed_as_one(num_draft_tokens) if goes_on is None else None
        if proposal is None:
            proposal = self._proposed_by_steps(num_draft_tokens, goes_on)
        self._num_proposed = proposal.token_ids.shape[1]
        return proposal

    def _proposed_by_steps(self, num_draft_tokens: int, goes_on: Callable[[Tensor], bool] | None) -> Proposal:
        own = self.own
        # Rows that lack fewer tokens write a known one again: nothing changes and the batch stays rectangular.
        num_missing = self._num_missing()
        span = own.span(-num_missing, num_missing)
        tokens = own.read(span, num_missing)
        chosen: list[Tensor] = []
        bests: list[Tensor] = []
        laws: Tensor | None = None
        law: Tensor | None = None
        noise: Tensor | None = None
        for step in range(num_draft_tokens):
            scores = self._scored(self._logits(tokens, span, 1), step)
            if self.do_sample:
                if laws is None:
                    num_rows, vocab_size = scores.shape
                    laws = self.scratch.take("laws", (num_rows, num_draft_tokens, vocab_size), scores)
                    every_noise = self.scratch.take("noise", (num_draft_tokens, num_rows, vocab_size), scores)
                    steps = list(zip(laws.unbind(dim=1), every_noise.exponential_().unbind(), strict=True))
                law, noise = steps[step]
                torch.softmax(scores, dim=-1, out=law)
            token, best = self._choose(scores, law, noise)
            chosen.append(token)
            if best is not None:
                bests.append(best)
            # lossless: the token just drawn stays, whatever is decided about the next one.
            if (goes_on is not None and not goes_on(_confidence(scores, law))) or step + 1 == num_draft_tokens:
                break
            span, tokens = own.span(step, 1), self._as_read(token)[:, None]
            if self.plan.reads_prefix:
                self.sequences.write(self.sequences.span(step, 1), token[:, None])
        token_ids = torch.stack(chosen, dim=1)
        if laws is None:
            return Proposal(token_ids=token_ids, is_broken=~torch.stack(bests, dim=1).isfinite().all(dim=1))
        # Where the draft gave no law, token 0 was drawn, and acceptance counts it as not drafted.
        laws = laws[:, : len(chosen)]
        return Proposal(token_ids=token_ids, probs=laws, is_broken=laws[:, :, 0].isnan().any(dim=1))

    def _proposed_as_one(self, num_draft_tokens: int) -> Proposal | None:
        """Take all steps as one captured unit, where that can be."""
        lane, own = self.lane, self.own
        if self.static is None or not self.drafts_as_one or not isinstance(lane, Lane):
            return None
        count = first_count(self._num_missing(), min(own.lengths))
        key = unit_key(self.plan, num_draft_tokens, do_sample=self.do_sample, vocab_size=self.vocab_size)
        if count is None or key is None or self.sequences.device != lane.device:
            return None
        span = own.span(-count, count)
        tokens = self._embeddable(own.read(span, count))
        steps = draft_steps(self.plan, num_draft_tokens, self._fitted_alone, do_sample=self.do_sample)
        drafted = lane.run_unit(key, steps, tokens, span, num_draft_tokens)
        if drafted is None:
            return None
        token_ids, laws, is_broken = drafted
        return Proposal(token_ids=token_ids, probs=laws if self.do_sample else None, is_broken=is_broken)

    def shadow(self, num_tokens: int) -> Shadow:
        """Read the committed tokens in at most two forwards and judge the last `num_tokens` of them."""
        logits = self._logits_before_last(num_tokens)
        sequences = self.sequences
        texts = sequences.read(sequences.span(-num_tokens, num_tokens), num_tokens)
        pairs = zip(logits.split(JUDGED_AT_ONCE, dim=1), texts.split(JUDGED_AT_ONCE, dim=1), strict=True)
        parts = [
            self._judged(scores, tokens, index * JUDGED_AT_ONCE - num_tokens)
            for index, (scores, tokens) in enumerate(pairs)
        ]
        return Shadow(
            probs=torch.cat([probs for probs, _ in parts], dim=1),
            confidences=torch.cat([confidences for _, confidences in parts], dim=1),
        )

    def commit(self, num_kept: Sequence[int]) -> None:
        """Roll back: the last drafted token was never fed, and rejected ones do not count."""
        for position, (row, kept) in enumerate(zip(self.own.rows, num_kept, strict=True)):
            fed = self._proposed_at[position] + min(kept, self._num_proposed - 1)
            self._cached[position] = min(fed, self.own.length_of(row) - 1)

    def rows_left(self, kept: Sequence[int]) -> None:
        """Drop the rows that finished."""
        if self.attention_mask is not None:
            # The prompt may be read only after they have gone.
            self.attention_mask = self.attention_mask[torch.tensor(kept, device=self.attention_mask.device)]
        if self.lane is None:
            return
        self.lane.select_rows(torch.tensor(kept, device=self.lane.device))
        self._cached = [self._cached[position] for position in kept]

    def _settle(self) -> None:
        """Tell the lane which tokens will never be taken back."""
        assert self.lane is not None, "catching up opens the lane"
        self.lane.settle(min(self.own.lengths) - self.num_open)

    def _logits_before_last(self, num_tokens: int) -> Tensor:
        """Read the committed tokens; return the logits `[B, num_tokens, V]` that the last of them followed from."""
        own = self.own
        if self.lane is None:
            self._prefill(min(own.lengths) - num_tokens - 1)
        self._settle()
        self._read(num_left=num_tokens + 1)
        span = own.span(-num_tokens - 1, num_tokens)
        logits = self._logits(own.read(span, num_tokens), span, num_tokens)
        self._note_read(num_left=1)
        return logits

    def _num_missing(self) -> int:
        """Return the most committed tokens that any row's cache lacks."""
        return max(length - cached for length, cached in zip(self.own.lengths, self._cached, strict=True))

    def _prefill(self, num_columns: int) -> None:
        """Open the lane by reading the prompt, and of what follows as much as `num_columns` says."""
        num_prompt_columns = self.own.num_prompt_columns
        # What belongs to an image or a sound is laid out over the prompt alone.
        num_columns = num_prompt_columns if self.inputs else max(num_columns, num_prompt_columns)
        tokens = self._embeddable(self.own.buffer[:, :num_columns])
        mask = self.attention_mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, num_columns - num_prompt_columns), value=1)
        if self.lane_name == "ragged":
            capacity = max(self.capacity, num_columns)
            self.lane = prefilled_lane(self.model, tokens, mask, capacity=capacity, static=self.static)
        else:
            prefill = prefill_by_host(self.model, **self._prompt_arguments(tokens, mask))
            self.lane = CompatibleLane(self.model, prefill, is_draft=True)
        self._cached = [num_columns] * len(self.own.rows)

    def _read(self, num_left: int) -> None:
        """Feed committed tokens until each row lacks at most the last `num_left`."""
        num_missing = self._num_missing()
        num_tokens = num_missing - num_left
        if num_tokens < 1:
            return
        self._settle()
        span = self.own.span(-num_missing, num_tokens)
        self._logits(self.own.read(span, num_tokens), span, 1)
        self._note_read(num_left)

    def _note_read(self, num_left: int) -> None:
        pairs = zip(self._cached, self.own.lengths, strict=True)
        self._cached = [max(cached, length - num_left) for cached, length in pairs]

    def _logits(self, tokens: Tensor, span: Span, num_logits: int) -> Tensor:
        """Feed `[B, T]` tokens and return the last logits `[B, num_logits, V]`, V being the draft's vocabulary."""
        assert self.lane is not None, "the prefill opens the lane"
        logits: Tensor = self.lane.forward(self._embeddable(tokens), span, num_logits=num_logits).logits
        return logits if logits.shape[1] == num_logits else logits[:, -num_logits:]

    def _scored(self, logits: Tensor, step: int) -> Tensor:
        """Return what a draft step chooses by, `[B, V]`, from its logits `[B, 1, draft's V]`."""
        return self._processed(logits, step)[:, 0]

    def _processed(self, logits: Tensor, offset: int) -> Tensor:
        """Return the target's scores `[B, T, V]` of the draft's logits after `committed length + offset` tokens."""
        return self.plan.run(self._fitted(logits), self.sequences, offset)

    def _as_read(self, token_ids: Tensor) -> Tensor:
        """Return chosen tokens `[B]` as the draft reads them."""
        return token_ids

    def _fitted(self, logits: Tensor) -> Tensor:
        """Return float32 logits over the target's vocabulary, on its device."""
        if logits.shape[-1] > self.vocab_size:
            logits = logits[..., : self.vocab_size]
        return self._padded(in_float32(logits, self.sequences.device, self.scratch, "draft logits"))

    def _fitted_alone(self, logits: Tensor) -> Tensor:
        """Return the same in memory of its own."""
        return self._padded(logits[..., : self.vocab_size].float())

    def _padded(self, logits: Tensor) -> Tensor:
        if logits.shape[-1] == self.vocab_size:
            return logits
        # Ids that only the target has get probability 0, ids that only the draft has are cut off.
        return torch.nn.functional.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    def _judged(self, logits: Tensor, token_ids: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return the draft's probability of `token_ids` `[B, T]` and its largest one, from their logits `[B, T, V]`."""
        scores = self._processed(logits, offset)
        law = scores.softmax(dim=-1)
        confidences, best = law.max(dim=-1)
        if not self.do_sample:
            # NaN stays NaN, or a broken draft would pass for a bad one.
            return (best == token_ids).float() + 0 * confidences, confidences
        return law.gather(-1, token_ids[..., None]).squeeze(-1), confidences

    def _choose(self, scores: Tensor, law: Tensor | None, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return a step's tokens `[B]`, and their scores `[B]` where nothing is drawn."""
        if law is None or noise is None:
            best, token = scores.max(dim=-1)
            return token, best
        return drawn_with(law, noise), None

    def _prompt_arguments(self, prompt: Tensor, mask: Tensor | None) -> dict[str, Any]:
        device = device_of(self.model)
        if self.model.config.is_encoder_decoder:
            return {**self.inputs, "decoder_input_ids": prompt.to(device)}
        mask = mask if mask is not None else torch.ones_like(prompt)
        tokens = {"input_ids": prompt.to(device), "attention_mask": mask.to(device)}
        return {**self.inputs, **tokens}

    def _embeddable(self, token_ids: Tensor) -> Tensor:
        if self.num_embeddings >= self.vocab_size:
            return token_ids
        return token_ids.clamp(max=self.num_embeddings - 1)


def _confidence(scores: Tensor, law: Tensor | None) -> Tensor:
    """Return the largest probability `[B]` of the law behind scores `[B, V]`."""
    return (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp() if law is None else law.amax(dim=-1)
