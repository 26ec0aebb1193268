"""Losslessness by exact enumeration: no sampling, no statistics.

The uniform numbers are integrated out. Each verification decides by thresholds on them, so the unit cube of uniforms
falls into 2^K cells. The thresholds are found by bisection on the function under test, which is then asked in every
cell; a cell's volume is its probability. Nothing here repeats the formulas under test.
"""

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import AdaptiveDraftLength, Outlook, RoundRecord
from hf_specdec.engine.acceptance import (
    block_verification,
    greedy_acceptance,
    one_hot_probs,
    survival_probs,
    token_verification,
)

Tokens = tuple[int, ...]
Probs = tuple[float, ...]
Model = Callable[[Tokens], Probs]  # committed tokens -> distribution of the next one
Verify = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
GoOn = Callable[[Tokens, Tokens], bool]  # kept draft tokens, committed tokens -> draft another one?
Propose = Callable[[Tokens], Iterator[tuple[Tokens, float]]]  # committed tokens -> draft paths and their probabilities
Law = dict[Tokens, float]

TOLERANCE = 1e-6
NOT_DRAFTED = math.nan

both_verifications = pytest.mark.parametrize("verify", [token_verification, block_verification], ids=["token", "block"])


# --- toy models -----------------------------------------------------------------------------------------------------


def random_model(seed: int, vocab_size: int, sharpness: float = 2.0) -> Model:
    """A distribution for each context, each independent of the others."""

    @functools.cache
    def probs(context: Tokens) -> Probs:
        generator = torch.Generator().manual_seed(hash((seed, context)) % 2**31)
        logits = torch.randn(vocab_size, generator=generator) * sharpness
        return tuple(torch.softmax(logits, dim=0).tolist())

    return probs


def masked(model: Model, allowed: Callable[[Tokens], Sequence[int]]) -> Model:
    """The model with only some tokens allowed, as after top-k."""

    @functools.cache
    def probs(context: Tokens) -> Probs:
        kept = [value if token in allowed(context) else 0.0 for token, value in enumerate(model(context))]
        return tuple(value / sum(kept) for value in kept)

    return probs


def one_hot_model(choose: Callable[[Tokens], int], vocab_size: int) -> Model:
    def probs(context: Tokens) -> Probs:
        return tuple(float(token == choose(context)) for token in range(vocab_size))

    return probs


# --- what a round can propose ---------------------------------------------------------------------------------------


def keep_then_stop(draft: Model, go_on: GoOn) -> Propose:
    """Sample a token, keep it, and only then decide whether to draft another."""

    def propose(committed: Tokens) -> Iterator[tuple[Tokens, float]]:
        stack: list[tuple[Tokens, float]] = [((), 1.0)]
        while stack:
            kept, probability = stack.pop()
            if go_on(kept, committed):
                stack += [((*kept, token), probability * p) for token, p in enumerate(draft(committed + kept)) if p > 0]
            else:
                yield kept, probability

    return propose


def fixed_length(draft: Model, num_draft_tokens: int) -> Propose:
    return keep_then_stop(draft, lambda kept, committed: len(kept) < num_draft_tokens)


def stop_after_unsure(draft: Model, threshold: float, limit: int) -> Propose:
    """The token that the draft was unsure about is kept, and nothing is drafted after it."""

    def go_on(kept: Tokens, committed: Tokens) -> bool:
        is_sure = not kept or draft(committed + kept[:-1])[kept[-1]] >= threshold
        return is_sure and len(kept) < limit

    return keep_then_stop(draft, go_on)


def length_from_context(draft: Model) -> Propose:
    """K depends on what was committed (0..3), and a drafted 2 ends the draft."""
    return keep_then_stop(
        draft, lambda kept, committed: len(kept) < (len(committed) + sum(committed)) % 4 and 2 not in kept
    )


def stop_as_the_controller_says(draft: Model, controller: AdaptiveDraftLength, limit: int) -> Propose:
    """The adaptive draft length as the engine asks it: its limit first, then after every kept token."""

    def go_on(kept: Tokens, committed: Tokens) -> bool:
        outlook = Outlook(limit=limit, reads_confidence=True)
        num_draft_tokens = controller.next_num_draft_tokens(outlook)
        confidences = [max(draft(committed + kept[:i])) for i in range(len(kept))]
        return all(controller.goes_on([confidence]) for confidence in confidences) and len(kept) < num_draft_tokens

    return keep_then_stop(draft, go_on)


def drop_unsure(draft: Model, threshold: float, num_draft_tokens: int) -> Propose:
    """The biased rule: sample a token, look at its own probability, and throw it away if that is low."""

    def propose(committed: Tokens) -> Iterator[tuple[Tokens, float]]:
        for path, probability in fixed_length(draft, num_draft_tokens)(committed):
            is_sure = [draft(committed + path[:i])[token] >= threshold for i, token in enumerate(path)]
            yield path[: [*is_sure, False].index(False)], probability

    return propose


def trained_controller(cost_ratio: float) -> AdaptiveDraftLength:
    """One that has seen sure tokens accepted and unsure ones rejected, at a cost at which the difference matters."""
    controller = AdaptiveDraftLength()
    for index in range(60):
        is_sure = index % 3 > 0
        num_draft_tokens = controller.next_num_draft_tokens(Outlook(limit=3, reads_confidence=True))
        chances = [0.95 if is_sure else 0.3] * num_draft_tokens
        controller.observe(
            RoundRecord(
                num_draft_tokens=num_draft_tokens,
                rows=(0,),
                num_accepted_tokens=(num_draft_tokens if is_sure else 0,),
                num_evaluated_tokens=(num_draft_tokens if is_sure else min(1, num_draft_tokens),),
                committed_token_ids=((0,) * (1 + is_sure * num_draft_tokens),),
                draft_seconds=num_draft_tokens * cost_ratio,
                verify_seconds=1.0,
                round_seconds=num_draft_tokens * cost_ratio + 1.0,
                survival=(tuple(itertools.accumulate(chances, operator.mul)),),
                confidences=((0.9 if is_sure else 0.4,) * num_draft_tokens,),
            )
        )
    return controller


# --- enumeration ----------------------------------------------------------------------------------------------------


class Batch:
    """Draft paths of one length K, each after its own committed tokens, verified together, one per batch row."""

    def __init__(self, verify: Verify, draft: Model, target: Model, rows: list[tuple[Tokens, Tokens]]) -> None:
        self.verify, self.size, k = verify, len(rows), len(rows[0][1])
        self.num_draft_tokens = k
        contexts = [[committed + path[:i] for i in range(k + 1)] for committed, path in rows]
        self.target_probs = torch.tensor([[target(context) for context in row] for row in contexts])  # [B, K+1, V]
        draft_probs = torch.tensor([[draft(context) for context in row[:k]] for row in contexts])
        self.draft_probs = draft_probs.reshape(self.size, k, self.target_probs.shape[2])
        self.token_ids = torch.tensor([path for _, path in rows], dtype=torch.long).reshape(self.size, k)

    def ask(self, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.verify(self.token_ids, self.draft_probs, self.target_probs, uniforms)

    def cells(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Volume `[B]`, accepted count `[B]` and next distribution `[B, V]` in each cell of the cube."""
        thresholds = self._thresholds()
        for signs in itertools.product((True, False), repeat=self.num_draft_tokens):
            is_below = torch.tensor(signs, dtype=torch.bool).expand_as(thresholds)
            volume = torch.where(is_below, thresholds, 1 - thresholds).double().prod(dim=1)
            answers = []
            for share in (0.1, 0.9):
                uniforms = torch.where(is_below, thresholds * share, thresholds + (1 - thresholds) * share)
                answers.append(self.ask(uniforms))
            # Within a cell nothing may change, or the thresholds did not describe the function.
            is_real = volume > 1e-5
            for here, there in zip(*answers, strict=True):
                assert torch.equal(here[is_real], there[is_real])
            yield volume, *answers[0]

    def _thresholds(self) -> torch.Tensor:
        """Where the decision at each position flips, `[B, K]`, by bisection."""
        columns = [self._threshold(position) for position in range(self.num_draft_tokens)]
        return torch.stack(columns, dim=1) if columns else torch.zeros(self.size, 0)

    def _threshold(self, position: int) -> torch.Tensor:
        low, high = torch.zeros(self.size), torch.ones(self.size)
        for _ in range(26):
            # 0 passes where anything can, infinity nowhere: whether exactly position + 1 tokens are accepted is then up
            # to the position alone.
            uniforms = torch.full((self.size, self.num_draft_tokens), torch.inf)
            uniforms[:, :position] = 0.0
            uniforms[:, position] = middle = (low + high) / 2
            passes = self.ask(uniforms)[0] == position + 1
            low, high = torch.where(passes, middle, low), torch.where(passes, high, middle)
        return high


def round_laws(
    verify: Verify, draft: Model, target: Model, propose: Propose, contexts: Iterable[Tokens]
) -> dict[Tokens, Law]:
    """The law of the tokens that one round emits after each of the contexts."""
    laws: dict[Tokens, Law] = {committed: defaultdict(float) for committed in contexts}
    by_length = defaultdict(list)
    for committed in laws:
        for path, probability in propose(committed):
            by_length[len(path)].append((committed, path, probability))
    for rows in by_length.values():
        batch = Batch(verify, draft, target, [(committed, path) for committed, path, _ in rows])
        for volumes, counts, next_probs in batch.cells():
            answers = zip(rows, volumes.tolist(), counts.tolist(), next_probs.tolist(), strict=True)
            for (committed, path, probability), volume, count, next_row in answers:
                for token, next_probability in enumerate(next_row):
                    laws[committed][*path[:count], token] += probability * volume * next_probability
    return laws


def output_law(verify: Verify, draft: Model, target: Model, propose: Propose, num_tokens: int) -> Law:
    """The law of the first `num_tokens` output tokens, over as many rounds as it takes."""
    vocabulary = range(len(target(())))
    contexts = [c for length in range(num_tokens) for c in itertools.product(vocabulary, repeat=length)]
    rounds = round_laws(verify, draft, target, propose, contexts)
    law: Law = defaultdict(float)
    law[()] = 1.0
    for committed in contexts:  # shorter ones first, so a state has all its mass when its turn comes
        mass = law.pop(committed, 0.0)
        for emitted, probability in rounds[committed].items():
            law[(committed + emitted)[:num_tokens]] += mass * probability
    return law


def target_law(target: Model, num_tokens: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(num_tokens):
        law = {(*state, token): mass * p for state, mass in law.items() for token, p in enumerate(target(state))}
    return law


def error_of(verify: Verify, draft: Model, target: Model, propose: Propose, num_tokens: int) -> float:
    """The largest difference in probability, over all outputs of `num_tokens` tokens."""
    law, expected = output_law(verify, draft, target, propose, num_tokens), target_law(target, num_tokens)
    assert sum(law.values()) == pytest.approx(1.0, abs=TOLERANCE)
    return max(abs(law[state] - probability) for state, probability in expected.items())


def mean_accepted(verify: Verify, draft: Model, target: Model, num_draft_tokens: int) -> float:
    """Mean number of accepted tokens in the first round."""
    law = round_laws(verify, draft, target, fixed_length(draft, num_draft_tokens), [()])[()]
    return sum((len(emitted) - 1) * mass for emitted, mass in law.items())


# --- losslessness ---------------------------------------------------------------------------------------------------

VOCAB_SIZE = 3
TARGET = random_model(1, VOCAB_SIZE)
NEAR_TARGET = random_model(1, VOCAB_SIZE, sharpness=1.0)
UNRELATED = random_model(2, VOCAB_SIZE)
PAIRS: dict[str, tuple[Model, Model]] = {
    "near": (NEAR_TARGET, TARGET),
    "unrelated": (UNRELATED, TARGET),
    "equal": (TARGET, TARGET),
    "disjoint": (masked(UNRELATED, lambda context: [0]), masked(TARGET, lambda context: [1, 2])),
    "one-hot draft": (one_hot_model(lambda context: sum(context) % VOCAB_SIZE, VOCAB_SIZE), TARGET),
    "one-hot target": (UNRELATED, one_hot_model(lambda context: (1 + sum(context)) % VOCAB_SIZE, VOCAB_SIZE)),
    "one-hot both": (
        one_hot_model(lambda context: sum(context) % VOCAB_SIZE, VOCAB_SIZE),
        one_hot_model(lambda context: len(context) % VOCAB_SIZE, VOCAB_SIZE),
    ),
    "draft misses tokens": (masked(UNRELATED, lambda context: [len(context) % 2, 2]), TARGET),
    "target misses tokens": (UNRELATED, masked(TARGET, lambda context: [len(context) % 2, 2])),
}
each_pair = pytest.mark.parametrize(("draft", "target"), PAIRS.values(), ids=PAIRS.keys())


@both_verifications
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
@each_pair
def test_fixed_draft_length_keeps_the_target_law(
    verify: Verify, num_draft_tokens: int, draft: Model, target: Model
) -> None:
    assert error_of(verify, draft, target, fixed_length(draft, num_draft_tokens), 4) <= TOLERANCE


@both_verifications
@each_pair
def test_stopping_after_an_unsure_token_keeps_the_target_law(verify: Verify, draft: Model, target: Model) -> None:
    assert error_of(verify, draft, target, stop_after_unsure(draft, 0.4, limit=3), 4) <= TOLERANCE


@both_verifications
@pytest.mark.parametrize("cost_ratio", [0.05, 0.4])
@each_pair
def test_the_adaptive_length_keeps_the_target_law(
    verify: Verify, cost_ratio: float, draft: Model, target: Model
) -> None:
    propose = stop_as_the_controller_says(draft, trained_controller(cost_ratio), limit=3)
    assert error_of(verify, draft, target, propose, num_tokens=3) <= TOLERANCE


def test_the_adaptive_length_stops_inside_rounds() -> None:
    draft = random_model(seed=2, vocab_size=3)
    propose = stop_as_the_controller_says(draft, trained_controller(0.4), limit=3)
    contexts = [context for length in range(3) for context in itertools.product(range(3), repeat=length)]
    lengths = {len(path) for context in contexts for path, _ in propose(context)}
    assert lengths == {1, 2, 3}


@both_verifications
@each_pair
def test_length_that_depends_on_kept_and_committed_tokens_keeps_the_target_law(
    verify: Verify, draft: Model, target: Model
) -> None:
    assert error_of(verify, draft, target, length_from_context(draft), 4) <= TOLERANCE


@both_verifications
@pytest.mark.parametrize("seed", range(5))
def test_larger_vocabulary_keeps_the_target_law(verify: Verify, seed: int) -> None:
    draft, target = random_model(100 + seed, 5, sharpness=1.0), random_model(200 + seed, 5)
    assert error_of(verify, draft, target, fixed_length(draft, 2), 3) <= TOLERANCE


@both_verifications
def test_dropping_a_sampled_unsure_token_is_biased(verify: Verify) -> None:
    """Proves that the tests above can fail: the same enumeration finds the classic mistake."""
    propose = drop_unsure(UNRELATED, threshold=0.4, num_draft_tokens=2)
    assert error_of(verify, UNRELATED, TARGET, propose, 1) > 0.01


def test_stopping_a_block_at_its_first_failed_test_is_biased() -> None:
    """The other classic mistake, made by counting the tests that pass as token verification does."""

    def stop_at_first_failure(
        draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = draft_token_ids, draft_probs, target_probs
        num_accepted, _ = block_verification(*arguments, uniforms)
        for position in range(uniforms.shape[1] - 1, -1, -1):
            alone = torch.ones_like(uniforms)
            alone[:, position] = uniforms[:, position]
            fails = block_verification(*arguments, alone)[0] != position + 1
            num_accepted = torch.where(fails, num_accepted.clamp(max=position), num_accepted)
        passed = torch.arange(uniforms.shape[1]) < num_accepted.unsqueeze(1)
        return block_verification(*arguments, torch.where(passed, 0.0, 1.0))

    assert error_of(stop_at_first_failure, UNRELATED, TARGET, fixed_length(UNRELATED, 2), 3) > 0.01


@both_verifications
def test_rejection_partial_and_full_acceptance_all_happen(verify: Verify) -> None:
    law = round_laws(verify, NEAR_TARGET, TARGET, fixed_length(NEAR_TARGET, 3), [()])[()]
    masses = [sum(mass for emitted, mass in law.items() if len(emitted) == count + 1) for count in range(4)]
    assert min(masses) > 0.01


@both_verifications
@pytest.mark.parametrize("failing_position", [0, 1, 2])
@pytest.mark.parametrize("fill", [NOT_DRAFTED, 0.0], ids=["nan", "zero"])
def test_position_without_draft_probs_ends_the_draft_and_keeps_the_law(
    verify: Verify, failing_position: int, fill: float
) -> None:
    def with_gap(
        draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draft_probs = draft_probs.clone()
        draft_probs[:, failing_position] = fill
        num_accepted, next_probs = verify(draft_token_ids, draft_probs, target_probs, uniforms)
        assert int(num_accepted.max()) <= failing_position
        assert not next_probs.isnan().any()
        return num_accepted, next_probs

    assert error_of(with_gap, NEAR_TARGET, TARGET, fixed_length(NEAR_TARGET, 3), 3) <= TOLERANCE


# --- acceptance length ----------------------------------------------------------------------------------------------


@each_pair
def test_block_accepts_at_least_as_many_tokens_as_token_verification(draft: Model, target: Model) -> None:
    by_block = mean_accepted(block_verification, draft, target, 3)
    by_token = mean_accepted(token_verification, draft, target, 3)
    assert by_block >= by_token - TOLERANCE


def test_block_accepts_strictly_more_where_the_ratios_leave_room() -> None:
    by_block = mean_accepted(block_verification, UNRELATED, TARGET, 3)
    by_token = mean_accepted(token_verification, UNRELATED, TARGET, 3)
    assert by_block > by_token + 0.01


@both_verifications
@pytest.mark.parametrize(
    ("name", "expected"), [("equal", 3.0), ("disjoint", 0.0)], ids=["equal accepts all", "disjoint accepts none"]
)
def test_extreme_pairs(verify: Verify, name: str, expected: float) -> None:
    assert mean_accepted(verify, *PAIRS[name], 3) == pytest.approx(expected, abs=TOLERANCE)


def test_single_token_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    overlap = sum(map(min, UNRELATED(()), TARGET(())))
    for verify in (token_verification, block_verification):
        assert mean_accepted(verify, UNRELATED, TARGET, 1) == pytest.approx(overlap, abs=TOLERANCE)


# --- literals -------------------------------------------------------------------------------------------------------

DRAFT_PROBS = torch.tensor([[[0.5, 0.5, 0.0], [0.8, 0.1, 0.1]]])  # [1, 2, 3]
TARGET_PROBS = torch.tensor([[[0.25, 0.75, 0.0], [0.2, 0.4, 0.4], [0.0, 0.0, 1.0]]])  # [1, 3, 3]


def test_token_verification_literals() -> None:
    """Ratios of the drafted tokens 0, 0: 0.25 / 0.5 and 0.2 / 0.8."""
    ids = torch.tensor([[0, 0]])
    for uniforms, count, expected in [
        ([0.5, 0.0], 0, [0.0, 1.0, 0.0]),  # 0.5 < 0.5 is false; residual (-, 0.25, 0)
        ([0.49, 0.26], 1, [0.0, 0.5, 0.5]),  # residual (-, 0.3, 0.3)
        ([0.49, 0.24], 2, [0.0, 0.0, 1.0]),  # bonus
    ]:
        num_accepted, next_probs = token_verification(ids, DRAFT_PROBS, TARGET_PROBS, torch.tensor([uniforms]))
        assert num_accepted.tolist() == [count]
        torch.testing.assert_close(next_probs, torch.tensor([expected]))


def test_block_verification_literals() -> None:
    """Drafted 1, 0: prefix probabilities min(1, 1.5) = 1, so the first test always passes, and 0.25."""
    ids = torch.tensor([[1, 0]])
    for uniforms, count, expected in [
        ([0.99, 0.26], 1, [0.0, 0.5, 0.5]),  # residual (-, 0.3, 0.3)
        ([0.99, 0.24], 2, [0.0, 0.0, 1.0]),
    ]:
        num_accepted, next_probs = block_verification(ids, DRAFT_PROBS, TARGET_PROBS, torch.tensor([uniforms]))
        assert num_accepted.tolist() == [count]
        torch.testing.assert_close(next_probs, torch.tensor([expected]))


def test_block_verification_judges_the_prefix_as_a_whole() -> None:
    """Drafted 0, 1: prefix probabilities 0.5 and min(1, 0.5 * 4) = 1, so the second test rescues the failed first."""
    num_accepted, next_probs = block_verification(
        torch.tensor([[0, 1]]), DRAFT_PROBS, TARGET_PROBS, torch.tensor([[0.999, 0.999]])
    )
    assert num_accepted.tolist() == [2]
    assert next_probs.tolist() == [[0.0, 0.0, 1.0]]


@both_verifications
def test_full_acceptance_returns_the_last_target_row_untouched(verify: Verify) -> None:
    probs = torch.softmax(torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0)), dim=-1)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    num_accepted, next_probs = verify(ids, probs[:, :3].clone(), probs, torch.full((2, 3), 1 - 2**-24))
    assert num_accepted.tolist() == [3, 3]
    assert torch.equal(next_probs, probs[:, 3])


@both_verifications
def test_rejection_without_residual_mass_falls_back_to_the_target(verify: Verify) -> None:
    """A uniform of 1 cannot be drawn, but stands for a rejection that only rounding explains."""
    probs = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    num_accepted, next_probs = verify(torch.tensor([[0]]), probs[:, :1], probs, torch.ones(1, 1))
    assert num_accepted.tolist() == [0]
    assert next_probs.tolist() == [[0.25, 0.75]]


@both_verifications
def test_no_draft_tokens(verify: Verify) -> None:
    target_probs = torch.tensor([[[0.25, 0.75]], [[1.0, 0.0]]])
    num_accepted, next_probs = verify(
        torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, 2), target_probs, torch.zeros(2, 0)
    )
    assert num_accepted.tolist() == [0, 0]
    assert next_probs.tolist() == [[0.25, 0.75], [1.0, 0.0]]


def test_greedy_acceptance_literals() -> None:
    draft = torch.tensor([[7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9]])
    target = torch.tensor([[7, 8, 9, 1], [7, 8, 0, 1], [0, 8, 9, 1], [7, 0, 9, 1]])
    num_accepted, next_token_ids = greedy_acceptance(draft, target)
    assert num_accepted.tolist() == [3, 2, 0, 1]
    assert next_token_ids.tolist() == [1, 0, 0, 0]


def test_greedy_acceptance_without_draft_tokens() -> None:
    num_accepted, next_token_ids = greedy_acceptance(torch.zeros(2, 0, dtype=torch.long), torch.tensor([[4], [5]]))
    assert num_accepted.tolist() == [0, 0]
    assert next_token_ids.tolist() == [4, 5]


def test_one_hot_probs_literals() -> None:
    probs = one_hot_probs(torch.tensor([[2, 0]]), vocab_size=3)
    assert probs.dtype == torch.float32
    assert probs.tolist() == [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
    assert one_hot_probs(torch.zeros(2, 0, dtype=torch.long), vocab_size=3).shape == (2, 0, 3)


@both_verifications
def test_never_asks_the_host(verify: Verify) -> None:
    """Meta tensors have no values, so any transfer to the host or branch on a value raises."""
    num_accepted, next_probs = verify(
        torch.zeros(2, 3, dtype=torch.long, device="meta"),
        torch.zeros(2, 3, 5, device="meta"),
        torch.zeros(2, 4, 5, device="meta"),
        torch.zeros(2, 3, device="meta"),
    )
    assert (num_accepted.shape, next_probs.shape) == ((2,), (2, 5))


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def rounds(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft tokens, draft and target distributions (zeros and one-hot rows included), and uniforms."""
    batch, k, vocab_size = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sharpness = draw(st.sampled_from([0.1, 1.0, 5.0, 100.0]))
    logits = torch.randn(2, batch, k + 1, vocab_size, generator=generator) * sharpness
    if draw(st.booleans()):
        hidden = torch.rand(logits.shape, generator=generator) < 0.5
        hidden.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        logits = logits.masked_fill(hidden, -torch.inf)
    draft_probs, target_probs = torch.softmax(logits, dim=-1)
    draft_probs = draft_probs[:, :k]
    token_ids = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).reshape(batch, k)
    return token_ids, draft_probs, target_probs, torch.rand(batch, k, generator=generator)


@both_verifications
@given(arguments=rounds())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_result_is_a_count_and_a_distribution(verify: Verify, arguments: tuple[torch.Tensor, ...]) -> None:
    num_accepted, next_probs = verify(*arguments)
    assert num_accepted.dtype == torch.int64
    assert ((num_accepted >= 0) & (num_accepted <= arguments[0].shape[1])).all()
    assert (next_probs >= 0).all()
    torch.testing.assert_close(next_probs.sum(-1), torch.ones(len(next_probs)))


@both_verifications
@given(arguments=rounds())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_rows_do_not_influence_each_other(verify: Verify, arguments: tuple[torch.Tensor, ...]) -> None:
    num_accepted, next_probs = verify(*arguments)
    for row in range(len(num_accepted)):
        alone = verify(*(argument[row : row + 1] for argument in arguments))
        assert torch.equal(alone[0], num_accepted[row : row + 1])
        torch.testing.assert_close(alone[1], next_probs[row : row + 1])


@both_verifications
@given(arguments=rounds())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_arguments_are_left_as_they_were(verify: Verify, arguments: tuple[torch.Tensor, ...]) -> None:
    before = [argument.clone() for argument in arguments]
    verify(*arguments)
    assert all(torch.equal(old, new) for old, new in zip(before, arguments, strict=True))


@both_verifications
@given(arguments=rounds())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_next_token_is_possible_for_the_target(verify: Verify, arguments: tuple[torch.Tensor, ...]) -> None:
    num_accepted, next_probs = verify(*arguments)
    target_row = arguments[2][torch.arange(len(num_accepted)), num_accepted]
    assert (target_row[next_probs > 0] > 0).all()


@given(arguments=rounds())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_token_verification_never_corrects_to_the_rejected_token(arguments: tuple[torch.Tensor, ...]) -> None:
    num_accepted, next_probs = token_verification(*arguments)
    for row, count in enumerate(num_accepted.tolist()):
        if count < arguments[0].shape[1]:
            assert next_probs[row, arguments[0][row, count]] == 0.0


@both_verifications
@given(arguments=rounds())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_one_hot_distributions_reduce_to_greedy_acceptance(verify: Verify, arguments: tuple[torch.Tensor, ...]) -> None:
    draft_token_ids, _, target_probs, uniforms = arguments
    vocab_size, target_token_ids = target_probs.shape[-1], target_probs.argmax(-1)
    num_accepted, next_probs = verify(
        draft_token_ids,
        one_hot_probs(draft_token_ids, vocab_size),
        one_hot_probs(target_token_ids, vocab_size),
        uniforms,
    )
    expected_count, expected_next = greedy_acceptance(draft_token_ids, target_token_ids)
    assert torch.equal(num_accepted, expected_count)
    assert torch.equal(next_probs, one_hot_probs(expected_next, vocab_size))


# --- survival labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "is_block"), [(token_verification, False), (block_verification, True)])
@each_pair
def test_survival_is_the_chance_of_each_prefix_to_be_accepted(
    verify: Verify, is_block: bool, draft: Model, target: Model
) -> None:
    paths = dict(fixed_length(draft, 3)(()))
    batch = Batch(verify, draft, target, [((), path) for path in paths])
    labels = survival_probs(batch.token_ids, batch.draft_probs, batch.target_probs, is_block=is_block).tolist()
    # The chance of a prefix, over what may follow it and over the uniforms.
    accepted: Law = defaultdict(float)
    drafted: Law = defaultdict(float)
    for volumes, counts, _ in batch.cells():
        for (path, probability), volume, count in zip(paths.items(), volumes.tolist(), counts.tolist(), strict=True):
            for length in (1, 2, 3):
                drafted[path[:length]] += probability * volume
                accepted[path[:length]] += probability * volume * (count >= length)
    for path, label in zip(paths, labels, strict=True):
        for length in (1, 2, 3):
            assert label[length - 1] == pytest.approx(accepted[path[:length]] / drafted[path[:length]], abs=TOLERANCE)


def test_survival_of_a_draft_that_gave_nothing_is_zero() -> None:
    draft_probs = torch.full((1, 2, 3), NOT_DRAFTED)
    target_probs = torch.full((1, 3, 3), 1 / 3)
    for is_block in (False, True):
        labels = survival_probs(torch.tensor([[0, 1]]), draft_probs, target_probs, is_block=is_block)
        assert labels.tolist() == [[0.0, 0.0]]
