"""Texts as a draft sees them: at every position, how likely its token is accepted and how sure it was.

Synthetic traces are made here; recorded ones come from the stats of a real call (`trace_of`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hf_specdec.metrics import ProbeRecord, RoundRecord, SpeculationStats

WORKLOADS = ("easy", "hard", "switching")
# Standard deviation of what blurs the synthetic confidence, in log-odds.
CONFIDENCE_NOISE = 0.8
# Where nobody read the confidence.
UNKNOWN_CONFIDENCE = 0.5
# Tokens that the switching workload stays easy or hard, evenly spread between the two.
SHORTEST_STRETCH, LONGEST_STRETCH = 200, 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One text, position by position.

    Attributes:
        name: What to call it in a table.
        chances: Probability of a draft token at this position to be accepted if the ones before it were; 0 or 1 for a
            greedy run.
        confidences: Largest probability in the draft's law there.

    Raises:
        ValueError: There is no position, or not one confidence for every chance.
    """

    name: str
    chances: tuple[float, ...]
    confidences: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.chances or len(self.chances) != len(self.confidences):
            raise ValueError(
                f"The trace {self.name!r} must have at least one position, and a chance and a confidence at each, but "
                f"has {len(self.chances)} chances and {len(self.confidences)} confidences. Record a run that drafts."
            )

    def stretched(self, num_tokens: int) -> Trace:
        """Return the trace with at least `num_tokens` positions, begun again from its start where it is shorter."""
        repeats = math.ceil(num_tokens / len(self.chances))
        if repeats <= 1:
            return self
        return Trace(name=self.name, chances=self.chances * repeats, confidences=self.confidences * repeats)


@dataclass(frozen=True, slots=True)
class TwoStates:
    """A text that is now likely and now unlikely to be guessed: a Markov chain of two states.

    Attributes:
        likely: Chance of a draft token in the likely state.
        unlikely: Chance in the other.
        becomes_unlikely: Probability per token to leave the likely state.
        becomes_likely: Probability per token to leave the unlikely state.
    """

    likely: float
    unlikely: float
    becomes_unlikely: float
    becomes_likely: float


EASY = TwoStates(likely=0.93, unlikely=0.2, becomes_unlikely=0.05, becomes_likely=0.3)
HARD = TwoStates(likely=0.8, unlikely=0.1, becomes_unlikely=0.3, becomes_likely=0.1)


def synthetic_trace(
    workload: str,
    num_tokens: int,
    *,
    seed: int = 0,
    confidence_noise: float = CONFIDENCE_NOISE,
    is_greedy: bool = False,
) -> Trace:
    """Make up a text.

    Args:
        workload: "easy", "hard", or "switching", which is one or the other for long stretches.
        num_tokens: Positions.
        seed: Same seed, same text.
        confidence_noise: Standard deviation of Gaussian noise on the log-odds of the chance; what comes out of this is
            the confidence.
        is_greedy: Whether chances are 0 or 1, drawn with the probability they would otherwise be.

    Raises:
        ValueError: There is no such workload.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"`workload` must be one of {', '.join(WORKLOADS)}, but is {workload!r}.")
    source = random.Random(f"{workload} {seed}")
    chances: list[float] = []
    is_easy = workload == "easy" or (workload == "switching" and source.random() < 0.5)
    while len(chances) < num_tokens:
        length = num_tokens
        if workload == "switching":
            length = min(source.randint(SHORTEST_STRETCH, LONGEST_STRETCH), num_tokens - len(chances))
        chances += _two_state_chances(EASY if is_easy else HARD, length, source)
        is_easy ^= workload == "switching"
    confidences = [_logistic(_log_odds(chance) + source.gauss(0.0, confidence_noise)) for chance in chances]
    if is_greedy:
        chances = [float(source.random() < chance) for chance in chances]
    return Trace(name=workload, chances=tuple(chances), confidences=tuple(confidences))


def trace_of(stats: SpeculationStats, name: str = "recorded") -> Trace:
    """Return what a real call tells about its text, its rows one after the other.

    A position is known where a draft token was evaluated (accepted, or the first to be rejected), or where a probe
    looked. Others, such as the token that the target adds when all were accepted, are left out.

    Raises:
        ValueError: No position is known.
    """
    positions: dict[int, list[tuple[float, float]]] = {}
    probes = sorted(stats.probes, key=lambda probe: probe.num_after_round)
    for index, record in enumerate(stats.rounds):
        while probes and probes[0].num_after_round <= index:
            _add_probe(positions, probes.pop(0), record.rows)
        _add_round(positions, record)
    for probe in probes:
        _add_probe(positions, probe, stats.rounds[-1].rows if stats.rounds else ())
    known = [pair for row in sorted(positions) for pair in positions[row]]
    return Trace(
        name=name, chances=tuple(chance for chance, _ in known), confidences=tuple(sureness for _, sureness in known)
    )


def _two_state_chances(text: TwoStates, num_tokens: int, source: random.Random) -> list[float]:
    is_likely = source.random() < text.becomes_likely / (text.becomes_likely + text.becomes_unlikely)
    chances = []
    for _ in range(num_tokens):
        chances.append(text.likely if is_likely else text.unlikely)
        leaves = source.random() < (text.becomes_unlikely if is_likely else text.becomes_likely)
        is_likely ^= leaves
    return chances


def _add_round(positions: dict[int, list[tuple[float, float]]], record: RoundRecord) -> None:
    for index, row in enumerate(record.rows):
        num_accepted, num_evaluated = record.num_accepted_tokens[index], record.num_evaluated_tokens[index]
        outcomes = [float(position < num_accepted) for position in range(num_evaluated)]
        labels = _at(record.survival, index) or tuple(outcomes)
        chances = []
        reached = 1.0
        for label in labels[:num_evaluated]:
            chances.append(min(label / reached, 1.0) if reached > 0 else 0.0)
            reached = label
        positions.setdefault(row, []).extend(_with_confidences(chances, _at(record.confidences, index)))


def _add_probe(positions: dict[int, list[tuple[float, float]]], probe: ProbeRecord, rows: Sequence[int]) -> None:
    numbers = rows if len(rows) == len(probe.agreement) else range(len(probe.agreement))
    for index, row in enumerate(numbers):
        confidences = _at(probe.confidences, index)
        positions.setdefault(row, []).extend(_with_confidences(probe.agreement[index], confidences))


def _with_confidences(chances: Sequence[float], confidences: Sequence[float]) -> list[tuple[float, float]]:
    missing = [UNKNOWN_CONFIDENCE] * (len(chances) - len(confidences))
    return list(zip(chances, [*confidences, *missing], strict=False))


def _at(rows: Sequence[tuple[float, ...]], index: int) -> tuple[float, ...]:
    return rows[index] if index < len(rows) else ()


def _log_odds(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


def _logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))
