"""What happened in each round, and the numbers derived from it.

Four numbers go by the name "acceptance" in the field, and they differ. Here a *row-round* is one row in one round:

- `acceptance_rate`: accepted / drafted. Falls as more tokens are drafted per round, since every token after the first
  rejection still counts as drafted.
- `token_acceptance_rate`: accepted / evaluated, where a row-round evaluates its accepted tokens and the rejected one,
  if any. Comparable across draft lengths.
- `mean_acceptance_length`: 1 + accepted / row-rounds. Counts the bonus or correction token.
- `acceptance_rate_per_position`: for position i, row-rounds that accepted more than i tokens / row-rounds that drafted
  more than i tokens.

All of them count before the output is cut at an end-of-sequence token or at the length limit.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from hf_specdec.records import ProbeRecord, RoundRecord

__all__ = ["ProbeRecord", "RoundRecord", "SpeculationStats", "added_up"]

_DERIVED_NUMBERS = (
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_committed_draft_tokens",
    "acceptance_rate",
    "token_acceptance_rate",
    "mean_acceptance_length",
    "acceptance_rate_per_position",
    "acceptance_histogram",
    "draft_lengths",
    "num_plain_steps",
    "probe_seconds",
    "catch_up_seconds",
    "draft_seconds",
    "verify_seconds",
    "overhead_seconds",
    "tokens_per_second",
)

_TOKEN_SPACES = {"shared": "shared tokens", "text": "tokens of its own"}


@dataclass(slots=True, kw_only=True)
class SpeculationStats:
    """What one call of `generate` with a draft did; derived numbers are computed when read.

    Attributes:
        rounds: Every round in order, plain steps (K = 0) included.
        probes: Every look at what the draft would have been worth while it was off.
        num_prompt_tokens: Prompt tokens over all rows, padding not counted.
        num_new_tokens: Tokens generated over all rows, including the first one, which the target's prefill gives.
        num_rows: Rows in the output batch.
        time_to_first_token_seconds: From the call until every row had its first token.
        draft_prefill_seconds: Time the draft took to read the prompt and what followed it, the first time it was used;
            0.0 if it never was.
        total_seconds: Time of the whole call.
        num_target_forwards: Forwards of the target, prefill included.
        num_draft_forwards: Forwards of the draft, prefill included.
        fallbacks: Why speculation was off or stopped, one sentence each; empty if it ran to the end.
        lane: How the target was run: "ragged" (own cache, one length per row), "compatible" (the host's cache, rows
            move together), or "plain" (without speculation).
        draft_lane: The same of the draft; "plain" when there was none.
        draft_quantization: How the draft's weights were stored: "none", "nf4", "fp4", "int8", or another method's name.
        draft_quantization_reason: Why.
        draft_suspicions: Signs that the draft is broken, one text each, as far as known of it at the end of the call.
        draft_pairing: The pairing that chose the draft, and how the tokenizers compare; empty without one.
        token_space: In which tokens the draft proposed: "same" (its tokenizer is the target's), "shared" (in the tokens
            that both tokenizers have) or "text" (in its own, and the text was split anew).
        num_shared_tokens: Tokens that both tokenizers have, special ones apart; 0 where they are the same.
        num_replayed_tokens: Tokens the target read again at the head of a verification, to bring a recurrent state
            back to where it was before rejected tokens.
        num_replay_forwards: Forwards of the target that only did that; counted among `num_target_forwards`.
        verification: The rule that decided acceptance, "block" or "token".
        is_lockstep: Whether all rows had to commit the same number of tokens each round.
        controller_hints: What was learned about the pair, to start another controller from; None with a fixed K.
        runner: How the target's forwards ran: "eager", "compiled" or "cuda_graph".
        draft_runner: The same of the draft.
        runner_reason: Why one of them ran otherwise than it was asked to; empty if neither did.
        profile: With `profile=True`, seconds that the host spent in each phase, summed over rounds; empty otherwise.
        trace_file: Then, where the trace of `torch.profiler` was written.
    """

    rounds: list[RoundRecord] = field(default_factory=list)
    probes: list[ProbeRecord] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_rows: int = 0
    time_to_first_token_seconds: float = 0.0
    draft_prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    num_target_forwards: int = 0
    num_draft_forwards: int = 0
    fallbacks: list[str] = field(default_factory=list)
    lane: str = "ragged"
    draft_lane: str = "ragged"
    draft_quantization: str = "none"
    draft_quantization_reason: str = ""
    draft_suspicions: list[str] = field(default_factory=list)
    draft_pairing: str = ""
    token_space: str = "same"
    num_shared_tokens: int = 0
    num_replayed_tokens: int = 0
    num_replay_forwards: int = 0
    verification: str = "block"
    is_lockstep: bool = False
    controller_hints: dict[str, Any] | None = None
    runner: str = "eager"
    draft_runner: str = "eager"
    runner_reason: str = ""
    profile: dict[str, float] = field(default_factory=dict)
    trace_file: str = ""

    def observe(self, record: RoundRecord) -> None:
        """Append one round; touches no other field."""
        self.rounds.append(record)

    @property
    def num_rounds(self) -> int:
        """Rounds of the batch, plain steps included."""
        return len(self.rounds)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted, over all rows and rounds."""
        return sum(record.num_draft_tokens * len(record.rows) for record in self.rounds)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted, over all rows and rounds, before any cut."""
        return sum(sum(record.num_accepted_tokens) for record in self.rounds)

    @property
    def num_committed_draft_tokens(self) -> int:
        """Accepted draft tokens that stayed in the output after the cut, over all rows and rounds."""
        return sum(record.num_committed_draft_tokens for record in self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0..1; 0.0 if nothing was drafted. Plain steps draft nothing and do not count."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def token_acceptance_rate(self) -> float:
        """Accepted / evaluated, 0..1; 0.0 if nothing was drafted. Plain steps do not count."""
        return _ratio(self.num_accepted_tokens, sum(sum(record.num_evaluated_tokens) for record in self.rounds))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per row-round with the bonus or correction token, 1..K+1; plain steps count as 1; 1.0 if no rounds."""
        return 1.0 + _ratio(self.num_accepted_tokens, sum(len(record.rows) for record in self.rounds))

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """For each draft position, the share of row-rounds that drafted it and accepted it; empty if none drafted."""
        return [self._acceptance_rate_at(position) for position in range(max(self.draft_lengths, default=0))]

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Row-rounds per accepted count, in ascending order; a plain step counts under 0."""
        counts = Counter(num_accepted for record in self.rounds for num_accepted in record.num_accepted_tokens)
        return dict(sorted(counts.items()))

    @property
    def draft_lengths(self) -> list[int]:
        """K of each round, in order; 0 for a plain step."""
        return [record.num_draft_tokens for record in self.rounds]

    @property
    def num_plain_steps(self) -> int:
        """Rounds without a draft (K = 0)."""
        return self.draft_lengths.count(0)

    @property
    def probe_seconds(self) -> float:
        """Time of all probes."""
        return sum(probe.seconds for probe in self.probes)

    @property
    def catch_up_seconds(self) -> float:
        """Time the draft took to read committed tokens before its steps, its prefill included, probes not."""
        return sum(record.catch_up_seconds for record in self.rounds)

    @property
    def draft_seconds(self) -> float:
        """Time of all draft steps, without catching up."""
        return sum(record.draft_seconds for record in self.rounds)

    @property
    def verify_seconds(self) -> float:
        """Time of the target's forwards in rounds, without its prefill."""
        return sum(record.verify_seconds for record in self.rounds)

    @property
    def overhead_seconds(self) -> float:
        """Time of rounds outside draft and target."""
        return sum(record.overhead_seconds for record in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows / total time, prefill included; 0.0 if no time was recorded."""
        return _ratio(self.num_new_tokens, self.total_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return fields and derived numbers as JSON types; histogram keys become strings, as JSON demands."""
        values = asdict(self)
        values["rounds"] = [record.to_dict() for record in self.rounds]
        values["probes"] = [probe.to_dict() for probe in self.probes]
        values.update((name, getattr(self, name)) for name in _DERIVED_NUMBERS)
        values["acceptance_histogram"] = {str(count): rounds for count, rounds in self.acceptance_histogram.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpeculationStats":
        """Build stats from what `to_dict` returned; derived numbers and keys of later versions are ignored."""
        own = {name: value for name, value in values.items() if name in cls.__slots__}
        own["rounds"] = [RoundRecord.from_dict(record) for record in own.get("rounds", [])]
        own["probes"] = [ProbeRecord.from_dict(probe) for probe in own.get("probes", [])]
        return cls(**own)

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a JSON file, for instance for `hf-specdec simulate --trace`."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "SpeculationStats":
        """Read what `save` wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: It holds no stats.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict) or "rounds" not in values:
                raise TypeError("there are no rounds in it")
            return cls.from_dict(values)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} must hold stats as `SpeculationStats.save` writes them, but does not ({error}). Save "
                "`output.speculation` of a call with `return_dict_in_generate=True`."
            ) from error

    def __str__(self) -> str:
        """Return a summary of a few lines for people."""
        return "\n".join(
            [
                f"{self.num_new_tokens} new tokens in {self.total_seconds:.2f} s "
                f"({self.tokens_per_second:.1f} tokens/s), the first after {self.time_to_first_token_seconds:.2f} s",
                f"{self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens accepted "
                f"({self.acceptance_rate:.0%}), {self.mean_acceptance_length:.2f} tokens per row and round, "
                f"{self.num_rounds} rounds"
                + (f" ({self.num_plain_steps} without a draft)" if self.num_plain_steps else ""),
                f"draft {self.draft_seconds:.2f} s, verify {self.verify_seconds:.2f} s, "
                f"overhead {self.overhead_seconds:.2f} s",
                f"{self.lane} lane, {self.verification} verification"
                + (", lockstep" if self.is_lockstep else "")
                + (f", draft in {self.draft_quantization}" if self.draft_quantization != "none" else "")
                + (f", draft in {_TOKEN_SPACES[self.token_space]}" if self.token_space in _TOKEN_SPACES else ""),
                *([f"target {self.runner}, draft {self.draft_runner}"] if self._has_other_runner() else []),
                *([f"runner: {self.runner_reason}"] if self.runner_reason else []),
                *(f"fallback: {reason}" for reason in self.fallbacks),
                *(f"suspicion: {text}" for text in self.draft_suspicions),
            ]
        )

    def _has_other_runner(self) -> bool:
        return (self.runner, self.draft_runner) != ("eager", "eager")

    def _acceptance_rate_at(self, position: int) -> float:
        drafted_there = [record for record in self.rounds if record.num_draft_tokens > position]
        outcomes = [num_accepted > position for record in drafted_there for num_accepted in record.num_accepted_tokens]
        return _ratio(sum(outcomes), len(outcomes))


def added_up(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """Return the stats of several decodings that made up one call; the first token and the time are the call's."""
    first, last = parts[0], parts[-1]
    counts = (
        "num_prompt_tokens",
        "num_new_tokens",
        "num_target_forwards",
        "num_draft_forwards",
        "num_replayed_tokens",
        "num_replay_forwards",
        "draft_prefill_seconds",
    )
    return replace(
        last,
        rounds=[record for part in parts for record in part.rounds],
        probes=[probe for part in parts for probe in part.probes],
        fallbacks=[reason for part in parts for reason in part.fallbacks],
        time_to_first_token_seconds=first.time_to_first_token_seconds,
        num_rows=first.num_rows,
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
