"""Propose with a draft that has another tokenizer: what all such drafters share, the draft's own text.

The draft reads sequences of its own, in its own ids, and each row has a length of its own there. They follow the
committed tokens of the target whenever the drafter is asked for anything. Tokens are only appended, so states that the
draft's cache holds stay valid; where that cannot be, the draft reads its text anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_specdec.drafters.model import ModelDrafter
from hf_specdec.drafters.translation import OwnText, Translator
from hf_specdec.engine.processors import ProcessorPlan
from hf_specdec.engine.sequences import Sequences
from hf_specdec.engine.state import Proposal
from hf_specdec.engine.static import StaticForward

Tensor = torch.Tensor


class OtherTokenizerDrafter(ModelDrafter):
    """Keeps the draft's own text; subclasses say how new tokens are read and proposed."""

    # What the target adds may add nothing to the draft's own text, whose last token is then read again.
    num_open = 1
    drafts_as_one = False

    def __init__(
        self,
        model: Any,
        sequences: Sequences,
        *,
        translator: Translator,
        plan: ProcessorPlan,
        do_sample: bool,
        vocab_size: int,
        attention_mask: Tensor | None,
        capacity: int,
        lane: str,
        static: StaticForward | None = None,
    ) -> None:
        """Prepare to draft; nothing is read yet.

        Args:
            model: The draft.
            sequences: The rows to continue, in the target's ids.
            translator: Between the target's tokens and the draft's.
            plan: The target's processors that a draft may run.
            do_sample: Whether to sample from the draft or to take its most likely token.
            vocab_size: The target's.
            attention_mask: The prompt's, `[B, W]`, None when nothing is padded.
            capacity: Columns that are expected for the target's text.
            lane: "ragged", or "compatible" where rows move in lockstep.
            static: What prepares the draft's forwards, None to run it as usual.
        """
        super().__init__(
            model,
            sequences,
            plan=plan,
            do_sample=do_sample,
            vocab_size=vocab_size,
            attention_mask=None,
            capacity=capacity,
            lane=lane,
            static=static,
        )
        self.translator = translator
        self._prompt_mask = attention_mask
        self._texts: list[OwnText] = []
        self._num_earlier_forwards = 0
        # Raised where the engine expects a draft to fail.
        self._error: Exception | None = None

    @property
    def num_forwards(self) -> int:
        """Forwards of the draft so far, all prefills included."""
        return self._num_earlier_forwards + super().num_forwards

    def limit(self) -> int | None:
        """Return how many tokens still fit into the draft's own context."""
        self._take_in()
        return super().limit() if self._error is None else 1

    def num_unread(self) -> int:
        """Return how many of its own tokens `catch_up` would read."""
        self._take_in()
        return super().num_unread() if self._error is None else 0

    def catch_up(self) -> None:
        """Read all committed tokens but the last of the draft's own."""
        self._take_in()
        self._raise_error()
        super().catch_up()

    def propose(self, num_draft_tokens: int, goes_on: Callable[[Tensor], bool] | None = None) -> Proposal:
        """Propose up to `num_draft_tokens` tokens of the target."""
        self._take_in()
        self._raise_error()
        return super().propose(num_draft_tokens, goes_on)

    def commit(self, num_kept: Sequence[int]) -> None:
        """Take in what was committed; of what was fed for the proposal, all that it turned out to be stays."""
        try:
            self._commit(num_kept)
        except Exception as error:  # noqa: BLE001  whatever a tokenizer does must not harm the answer
            self._error = error

    def _commit(self, num_kept: Sequence[int]) -> None:
        fed = [[text.ids[-1], *self._fed(position, kept)] for position, (text, kept) in self._with_texts(num_kept)]
        starts = [len(text.ids) - 1 for text in self._texts]
        self._advance()
        lengths = self.own.lengths
        for position, (text, tokens) in self._with_texts(fed):
            num_same = _num_equal(text.ids[starts[position] :], tokens)
            cached = self._proposed_at[position] - 1 + num_same
            self._cached[position] = min(cached, lengths[position] - 1)
        self._start_over_where_needed()

    def rows_left(self, kept: Sequence[int]) -> None:
        """Drop the rows that finished."""
        if not self._texts:
            if self._prompt_mask is not None:
                self._prompt_mask = self._prompt_mask[torch.tensor(kept, device=self._prompt_mask.device)]
            return
        super().rows_left(kept)
        self._texts = [self._texts[position] for position in kept]
        self.own.keep_rows(list(kept))

    # ---- for subclasses --------------------------------------------------------------------------------------------

    def _read_new(self, position: int, text: OwnText, tokens: Sequence[int]) -> None:
        """Take new tokens of the target into a row's own text."""
        raise NotImplementedError

    def _fed(self, position: int, num_kept: int) -> list[int]:
        """Return the draft's own tokens that it was fed for a row's last proposal, as far as they may have stayed."""
        raise NotImplementedError

    def _own_window(self, num_tokens: int) -> int:
        """Return how many of the draft's tokens the target's last ones cover, and let the lane reach back to them."""
        self._take_in()
        self._raise_error()
        num_own = max(len(text.ids) - text.num_ids_before(text.num_read - num_tokens) for text in self._texts)
        num_own = max(num_own, 1)
        if self.lane is not None and self.lane_name == "compatible":
            # What that lane has read may be settled.
            num_own = min(num_own, self._num_missing() - 1)
        if self.lane is None or num_own < 1 or num_own + 2 > min(self.own.lengths):
            num_own = max(num_own, 1)
            self._lay_out(num_left=num_own + 1)
        return num_own

    # ---- the draft's own text --------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Bring the draft's own text up to what is committed."""
        try:
            if not self._texts:
                self._begin()
            elif self._error is None:
                self._advance()
                self._start_over_where_needed()
        except Exception as error:  # noqa: BLE001  whatever a tokenizer does must not harm the answer
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _begin(self) -> None:
        sequences = self.sequences
        # sync: once per call, to write the prompt in the draft's tokens.
        prompts = sequences.buffer[:, : sequences.num_prompt_columns].tolist()
        masks = self._prompt_mask.tolist() if self._prompt_mask is not None else None  # sync: right after that.
        for position, row in enumerate(sequences.rows):
            prompt = prompts[position]
            if masks is not None:
                prompt = [token for token, is_seen in zip(prompt, masks[position], strict=True) if is_seen]
            text = self.translator.begin(row, prompt)
            self._texts.append(text)
            self._read_new(position, text, sequences.new_tokens[row])
        self._lay_out(num_left=1)

    def _advance(self) -> None:
        """Take in the target's new tokens, and bring the sequences that the draft reads to the same state."""
        sequences, own = self.sequences, self.own
        if all(text.num_read == len(sequences.new_tokens[text.row]) for text in self._texts):
            return
        dropped: list[int] = []
        added: list[list[int]] = []
        for position, text in enumerate(self._texts):
            before, last = len(text.ids), text.ids[-1]
            tokens = sequences.new_tokens[text.row][text.num_read :]
            if self.lane_name == "compatible" and sequences.is_finished[text.row]:
                self.translator.skip(text, tokens)
            else:
                self._read_new(position, text, tokens)
            dropped.append(int(text.ids[before - 1] != last))
            added.append(text.ids[before - dropped[-1] :])
        if self.lane_name == "compatible":
            self._fill_finished_rows(dropped, added)
        own.retell(dropped, added)

    def _fill_finished_rows(self, dropped: list[int], added: list[list[int]]) -> None:
        """Let rows that finished, which stay in lockstep, be as long as the others."""
        grown = [length - less + len(more) for length, less, more in zip(self.own.lengths, dropped, added, strict=True)]
        for position, text in enumerate(self._texts):
            if self.sequences.is_finished[text.row]:
                filling = [self.translator.start_id] * (max(grown) - grown[position])
                added[position] = added[position] + filling
                text.ids += filling
                text.ends += [text.end] * len(filling)

    def _start_over_where_needed(self) -> None:
        """Let the draft read its text anew where rows have come too far apart for its lane."""
        is_rigid = self.lane_name == "compatible"
        are_apart = is_rigid and self.own.uniform_length is None
        if self.lane is None and not are_apart:
            return
        # Further back than the token before the last proposal that lane cannot go.
        is_lost = is_rigid and any(
            cached < proposed_at - 1 for cached, proposed_at in zip(self._cached, self._proposed_at, strict=False)
        )
        if are_apart or is_lost or self._num_missing() > min(self.own.lengths):
            self._lay_out(num_left=1)

    def _lay_out(self, num_left: int) -> None:
        """Put the texts side by side, ending together; the draft will read all but the last `num_left` as a prompt."""
        self._num_earlier_forwards += super().num_forwards
        self.lane = None
        width = max(num_left + 1, *(len(text.ids) for text in self._texts))
        gaps = [width - len(text.ids) for text in self._texts]
        filled = [[self.translator.start_id] * gap + text.ids for gap, text in zip(gaps, self._texts, strict=True)]
        num_columns = width - num_left
        device = self.sequences.device
        prompt = torch.tensor([ids[:num_columns] for ids in filled], device=device)
        self.own = Sequences(prompt, capacity=width + self.capacity - self.sequences.num_prompt_columns)
        self.own.retell([0] * len(filled), [ids[num_columns:] for ids in filled])
        # The last column is always seen: a row without any token to attend to would give NaN.
        mask = [[int(column >= min(gap, num_columns - 1)) for column in range(num_columns)] for gap in gaps]
        self.attention_mask = torch.tensor(mask, device=device) if any(gaps) else None

    def _with_texts(self, values: Sequence[Any]) -> list[tuple[int, tuple[OwnText, Any]]]:
        return list(enumerate(zip(self._texts, values, strict=True)))


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many items two sequences have in common at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
