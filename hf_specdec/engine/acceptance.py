"""Decide which draft tokens are kept and what the token after them is drawn from.

Pure tensor functions: no models, no drawing of random numbers, no transfer to the host. Whoever calls them brings
uniform numbers and draws the next token from the returned distribution, so losslessness can be tested by enumeration.

A position whose draft probabilities are all NaN or all 0 counts as not drafted: its token is never accepted, and the
token that replaces it follows the target. A failing draft thus costs time, not correctness.
"""

import torch

from hf_specdec.engine.scratch import FRESH, Scratch


def greedy_acceptance(
    draft_token_ids: torch.Tensor, target_token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep draft tokens for as long as they are what the target would have chosen.

    Args:
        draft_token_ids: `[B, K]`, int64.
        target_token_ids: `[B, K+1]`, int64, the target's choice at each position, given the draft tokens before it.

    Returns:
        `num_accepted` `[B]`, 0..K, the length of the longest matching prefix, and `next_token_ids` `[B]`, the target's
        choice right after it.
    """
    num_draft_tokens = draft_token_ids.shape[1]
    matches = draft_token_ids == target_token_ids[:, :num_draft_tokens]  # [B, K]
    num_accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return num_accepted, target_token_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1)


def token_verification(
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    scratch: Scratch = FRESH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept draft tokens one by one, each with probability min(1, target / draft), until the first rejection.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1.

    Args:
        draft_token_ids: `[B, K]`, int64, drawn from `draft_probs`.
        draft_probs: `[B, K, V]`, float32, after processors.
        target_probs: `[B, K+1, V]`, float32, after processors.
        uniforms: `[B, K]`, float32, independent and uniform on [0, 1).
        scratch: Where the returned distribution and what leads to it are written; fresh tensors by default.

    Returns:
        `num_accepted` `[B]`, 0..K, and `next_probs` `[B, V]`, the distribution of the next token: the residual
        distribution after a rejection, the target's last row after full acceptance.
    """
    num_draft_tokens = draft_token_ids.shape[1]
    if num_draft_tokens == 0:
        return _nothing_drafted(target_probs)
    ratios = _target_over_draft(draft_token_ids, draft_probs, target_probs)  # [B, K]
    # lossless: strict, since a uniform on [0, 1) is below h with probability exactly h, and 0 must never be accepted.
    num_accepted = (uniforms < ratios).long().cumprod(dim=1).sum(dim=1)
    target_row = _row_at(target_probs, num_accepted, scratch, "target row")  # [B, V]
    draft_row = _row_at(draft_probs, num_accepted.clamp(max=num_draft_tokens - 1), scratch, "residual row")  # [B, V]
    residual = torch.sub(target_row, draft_row, out=draft_row).clamp_(min=0.0)
    is_rejected = num_accepted < num_draft_tokens
    return num_accepted, _next_probs(residual, residual.sum(dim=1), target_row, is_rejected)


def block_verification(
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    scratch: Scratch = FRESH,
    prefix_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest prefix of the draft that passes its own test, judging the draft tokens jointly.

    Source: Sun et al. 2025, arXiv:2403.10444. On average it accepts at least as many tokens as token verification, with
    the same output law.

    Args:
        draft_token_ids: `[B, K]`, int64, drawn from `draft_probs`.
        draft_probs: `[B, K, V]`, float32, after processors.
        target_probs: `[B, K+1, V]`, float32, after processors.
        uniforms: `[B, K]`, float32, independent and uniform on [0, 1).
        scratch: Where the returned distribution and what leads to it are written; fresh tensors by default.
        prefix_probs: What `prefix_acceptance_probs` returns, where it is known already.

    Returns:
        `num_accepted` `[B]`, 0..K, and `next_probs` `[B, V]`, the distribution of the next token: the residual
        distribution, with the target scaled by the probability of the accepted prefix, after a rejection; the target's
        last row after full acceptance.
    """
    num_draft_tokens = draft_token_ids.shape[1]
    if num_draft_tokens == 0:
        return _nothing_drafted(target_probs)
    if prefix_probs is None:
        prefix_probs = prefix_acceptance_probs(draft_token_ids, draft_probs, target_probs)
    residuals = scratch.take("residuals", draft_probs.shape, draft_probs)  # [B, K, V]
    torch.mul(target_probs[:, :num_draft_tokens], prefix_probs[:, :num_draft_tokens].unsqueeze(2), out=residuals)
    residuals.sub_(draft_probs).clamp_(min=0.0)
    masses = residuals.sum(dim=2)  # [B, K]
    passes = uniforms < _block_acceptance_probs(prefix_probs, masses)  # [B, K]
    # lossless: the last prefix that passes, even if a shorter one does not. Stopping at the first failure is biased.
    lengths = torch.arange(1, num_draft_tokens + 1, device=passes.device)
    num_accepted = (passes * lengths).amax(dim=1)
    rejected_at = num_accepted.clamp(max=num_draft_tokens - 1).unsqueeze(1)  # [B, 1]
    return num_accepted, _next_probs(
        _row_at(residuals, rejected_at.squeeze(1), scratch, "residual row"),
        masses.gather(1, rejected_at).squeeze(1),
        _row_at(target_probs, num_accepted, scratch, "target row"),
        num_accepted < num_draft_tokens,
    )


def survival_probs(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, *, is_block: bool
) -> torch.Tensor:
    """Return how likely each prefix of a draft was to be accepted, given its tokens, before any uniform was drawn.

    The mean over rounds of these labels is that of the 0/1 outcomes, with less noise and with nothing hidden behind the
    first rejection. With block verification a longer prefix can have the higher label; on average it has not.

    Args:
        draft_token_ids: `[B, K]`, int64.
        draft_probs: `[B, K, V]`, float32, after processors.
        target_probs: `[B, K+1, V]`, float32, after processors.
        is_block: Whether block verification decides, or token verification.

    Returns:
        `[B, K]`, float32: for j = 1..K the probability, given the first j tokens, that at least these are accepted.
    """
    if is_block:
        return prefix_acceptance_probs(draft_token_ids, draft_probs, target_probs)[:, 1:]
    return _target_over_draft(draft_token_ids, draft_probs, target_probs).clamp(max=1.0).cumprod(dim=1)


def prefix_acceptance_probs(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> torch.Tensor:
    """Return the probability that block verification accepts at least the first i tokens, given them, for i = 0..K.

    Args:
        draft_token_ids: `[B, K]`, int64.
        draft_probs: `[B, K, V]`, float32, after processors.
        target_probs: `[B, K+1, V]`, float32, after processors.

    Returns:
        `[B, K+1]`, float32, the first column 1.
    """
    ratios = _target_over_draft(draft_token_ids, draft_probs, target_probs)
    probs = torch.ones((len(ratios), ratios.shape[1] + 1), dtype=ratios.dtype, device=ratios.device)
    before, *columns = probs.unbind(dim=1)
    # The cap at 1 sits inside the recursion, so a cumulative product would be wrong. K steps over [B] are cheap.
    for ratio, column in zip(ratios.unbind(dim=1), columns, strict=True):
        before = torch.mul(before, ratio, out=column).clamp_(max=1.0)
    return probs


def one_hot_probs(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the draft distribution of a drafter that does not sample: all mass on the proposed token.

    Args:
        token_ids: `[B, K]`, int64, each below `vocab_size`.
        vocab_size: V.

    Returns:
        `[B, K, V]`, float32.
    """
    probs = torch.zeros(*token_ids.shape, vocab_size, dtype=torch.float32, device=token_ids.device)
    return probs.scatter_(-1, token_ids.unsqueeze(-1), 1.0)


def _nothing_drafted(target_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_accepted = torch.zeros(target_probs.shape[0], dtype=torch.long, device=target_probs.device)
    return num_accepted, target_probs[:, 0]


def _target_over_draft(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> torch.Tensor:
    """Return target / draft at each drafted token, `[B, K]`, and 0 where the draft gives no valid probability."""
    index = draft_token_ids.unsqueeze(2)  # [B, K, 1]
    draft_at_token = draft_probs.gather(2, index).squeeze(2)
    target_at_token = target_probs[:, : draft_token_ids.shape[1]].gather(2, index).squeeze(2)
    # NaN > 0 is false, so this catches a failed draft as well as a token that the draft cannot have drawn.
    return torch.where(draft_at_token > 0, target_at_token / draft_at_token, 0.0)


def _block_acceptance_probs(prefix_probs: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """Return the probability of each prefix of length 1..K to pass its own test: `[B, K]`."""
    inner_probs, inner_masses = prefix_probs[:, 1:-1], masses[:, 1:]  # [B, K-1]
    inner = inner_masses / (inner_masses + (1.0 - inner_probs))
    # NaN is 0/0 (the prefix is certain, and so is the next token) or a draft that failed at the next position.
    # Either way the test has to give the prefix its full probability by itself.
    inner = torch.where(inner.isnan(), inner_probs, inner)
    return torch.cat([inner, prefix_probs[:, -1:]], dim=1)


def _row_at(probs: torch.Tensor, positions: torch.Tensor, scratch: Scratch, name: str) -> torch.Tensor:
    """Return `probs[b, positions[b]]` for each row b, as a copy: `[B, V]` from `[B, N, V]` and `[B]`."""
    num_rows, num_positions, vocab_size = probs.shape
    rows = scratch.take(name, (num_rows, vocab_size), probs)
    if num_rows > 1:
        positions = torch.arange(0, num_rows * num_positions, num_positions, device=probs.device) + positions
    # One flat index copies whole rows; indexing with two tensors takes several times longer for large vocabularies.
    return torch.index_select(probs.flatten(0, 1), 0, positions, out=rows)


def _next_probs(
    residual: torch.Tensor, mass: torch.Tensor, target_row: torch.Tensor, is_rejected: torch.Tensor
) -> torch.Tensor:
    """Return the residual, normalised by its mass, where a token was rejected, and the target's row elsewhere.

    Both `[B, V]` rows are the caller's to lose.
    """
    # Rounding can leave a rejection without residual mass, and a failed draft makes the mass NaN: both take the target.
    is_residual = (is_rejected & (mass > 0)).unsqueeze(1)
    residual.div_(mass.unsqueeze(1))
    return torch.where(is_residual, residual, target_row, out=target_row)


def drawn(probs: torch.Tensor, scratch: Scratch = FRESH) -> torch.Tensor:
    """Draw one token per row by an exponential race: the first of clocks that run as fast as tokens are probable.

    The same draw as `torch.multinomial`'s, number for number, without its look at the values, which waits for them.

    Args:
        probs: `[B, V]`, float32, not negative; a row need not sum to 1.
        scratch: Holds the noise.

    Returns:
        `[B]`, int64; 0 in a row that is NaN.
    """
    return drawn_with(probs, scratch.take("noise", probs.shape, probs).exponential_())


def drawn_with(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Draw the same with independent exponential `noise` `[B, V]`, which is lost."""
    return torch.div(probs, noise, out=noise).argmax(dim=-1)
