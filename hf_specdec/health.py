"""Signs of a broken draft, which leaves the text right and makes it slow: told once in the log, and in the stats."""

from __future__ import annotations

import logging
import math
import threading

logger = logging.getLogger(__name__)

# Judged draft tokens before anything is said of their acceptance.
FEWEST_TOKENS = 64
# Two models that read the same text, however different, agree on more of it; models that do not rarely reach a tenth
# of this.
CHANCE = 0.05
# Of the nats per token that guessing blindly takes: a language model of any size that works needs less for plain text.
SUSPICIOUS_SHARE = 0.35
# More nats per token than the unquantized draft: 4 bits usually cost a tenth of this.
MOST_NATS_LOST = 0.5
# Of the same: a draft that is no better than this unquantized has nothing to lose.
HOPELESS_SHARE = 0.8


class DraftHealth:
    """Counts over all calls of a target and a draft what became of the draft's guesses.

    Attributes:
        suspicions: What was found, one text each.
    """

    def __init__(self, quantization: str = "none", suspicions: tuple[str, ...] = ()) -> None:
        self.suspicions = list(suspicions)
        self._quantization = quantization
        self._num_judged = 0
        self._num_accepted = 0.0
        self._is_told = False
        self._lock = threading.Lock()

    def observe(self, num_accepted: float, num_judged: int, *, sees_all_processors: bool = True) -> None:
        """Take note of judged guesses.

        Args:
            num_accepted: How many were accepted, or are expected to be.
            num_judged: Draft tokens whose fate was decided, or tokens of the text that the draft would have guessed.
            sees_all_processors: Whether the draft's law is shaped by everything that shapes the target's.
        """
        with self._lock:
            self._num_judged += num_judged
            self._num_accepted += num_accepted
            if self._is_told or self._num_judged < FEWEST_TOKENS:
                return
            if self._num_accepted >= CHANCE * self._num_judged:
                return
            self._is_told = True
            self.suspicions.append(self._near_chance(sees_all_processors))
        logger.warning(self.suspicions[-1])

    def _near_chance(self, sees_all_processors: bool) -> str:
        causes = [
            "it was trained with another tokenizer",
            "the prompt has a chat format or a language that it does not know",
        ]
        if self._quantization != "none":
            causes.append(f"its quantization ({self._quantization}) has failed")
        if not sees_all_processors:
            causes.append("a logits processor that only the target sees changes what is likely")
        return (
            f"Draft tokens are accepted about as rarely as by chance: {self._num_accepted:.0f} of {self._num_judged}. "
            f"The text is not affected, but it gains nothing. Likely causes: {'; '.join(causes)}."
        )


def is_suspicious(nats: float, vocab_size: int) -> bool:
    """Return whether a model that takes so many nats per token for plain text may be broken."""
    return not nats < SUSPICIOUS_SHARE * math.log(vocab_size)


def lost_by_quantization(quantization: str, nats: float, unquantized_nats: float, vocab_size: int) -> str | None:
    """Return what to say of a quantized draft beside its unquantized self, None where nothing is wrong.

    Args:
        quantization: How its weights are stored.
        nats: The cross entropy per token of a text, quantized.
        unquantized_nats: The same, unquantized.
        vocab_size: Entries of the vocabulary.
    """
    has_something_to_lose = unquantized_nats < HOPELESS_SHARE * math.log(vocab_size)
    if not has_something_to_lose or nats - unquantized_nats <= MOST_NATS_LOST:
        return None
    return (
        f"Quantizing the draft ({quantization}) has spoilt it: for plain text it takes {nats:.1f} nats per token, and "
        f"{unquantized_nats:.1f} unquantized. The text is not affected, but less of the draft will be accepted. Likely "
        "causes: weights with large outliers, or layers that this quantization does not suit. Ask for another "
        "`draft_quantization`."
    )
