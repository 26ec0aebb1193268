"""Find out which lane tells the truth about a model, before it decodes anything.

Plain decoding is the reference: the model's own cache, one token per forward. A lane is admitted when several tokens
per forward, some of them rejected, give the same logits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_specdec.engine.compatible import CompatibleLane, foreign_windows
from hf_specdec.engine.forward import prefilled_lane
from hf_specdec.engine.host import Prefill, prefill_by_host
from hf_specdec.engine.layout import Model, layout_of, tolerance_of, turns_by_length
from hf_specdec.engine.sequences import Span
from hf_specdec.placement import device_of

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model may use a lane; `reason` says why not.

    `is_passing` marks an answer that need not hold next time (the trial ran out of memory, say).
    """

    is_admitted: bool
    reason: str = ""
    is_passing: bool = False


class _RefusedError(Exception):
    """A trial found a reason that no further trial would change."""


# Prompts of the trials, shorter rows padded on the left.
PROMPT_LENGTHS = (4, 6)
# Rounds of a trial in the compatible lane: how many tokens are fed, and how many of them stay.
TRIAL_ROUNDS = ((4, 2), (4, 1), (4, 4), (4, 1), (3, 1), (1, 1), (3, 2))
KNOWN_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

_verdicts: dict[tuple[Any, ...], Verdict] = {}
_verdicts_lock = threading.Lock()


def probe_ragged(model: Model, *, is_batched: bool, is_draft: bool = False) -> Verdict:
    """Check once per class, configuration, attention implementation and dtype that the ragged lane tells the truth.

    A few random tokens go through the lane, with a rollback and in rows of unequal length if `is_batched`, and through
    the model's ordinary decoding; the logits must agree. The caller's random state and the model's mode are left as
    they were. A quantized draft's need only agree roughly (`is_draft`).
    """
    tolerance = tolerance_of(model, is_draft=is_draft)

    def find() -> Verdict:
        return _static_refusal(model) or _trial(
            model, lambda: _ragged_difference(model, is_batched=is_batched), tolerance
        )

    return _once(model, f"ragged {is_batched} {tolerance}", find)


def probe_compatible(
    model: Model,
    *,
    is_batched: bool,
    is_draft: bool = False,
    make_prefill: Callable[[], Prefill] | None = None,
    kind: str = "",
) -> Verdict:
    """Check the same for the compatible lane.

    Args:
        model: The model.
        is_batched: Whether several rows, or padded ones, will be decoded together.
        is_draft: See `tolerance_of`.
        make_prefill: Returns a fresh prefill of the caller's own prompt, for models that need more than tokens; None
            makes up a prompt of a few tokens.
        kind: What the prompt holds beside tokens; a verdict is kept for each kind.
    """

    def difference() -> tuple[float, float]:
        return _compatible_difference(model, make_prefill or (lambda: _made_up_prefill(model, is_batched=is_batched)))

    tolerance = tolerance_of(model, is_draft=is_draft)
    return _once(model, f"compatible {is_batched} {kind} {tolerance}", lambda: _trial(model, difference, tolerance))


def _once(model: Model, lane: str, find: Callable[[], Verdict]) -> Verdict:
    config = model.config
    key = (
        lane,
        type(config).__module__,
        type(config).__qualname__,
        f"{type(model).__module__}.{type(model).__qualname__}",
        getattr(config, "_attn_implementation", None),
        str(model.dtype),
        str(device_of(model)),
        _settings_of(config),
    )
    with _verdicts_lock:
        verdict = _verdicts.get(key)
    if verdict is None:
        verdict = find()
        if not verdict.is_passing:
            with _verdicts_lock:
                _verdicts[key] = verdict
    return verdict


def _settings_of(config: Any) -> tuple[Any, ...]:
    """Return all that a configuration says, to be compared; its own JSON takes longer than a small model's forward."""
    return tuple(
        (name, _settings_of(value) if isinstance(value, PreTrainedConfig) else repr(value))
        for name, value in vars(config).items()
    )


def _static_refusal(model: Model) -> Verdict | None:
    """Return a refusal of the ragged lane that needs no forward."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return Verdict(False, f"{name} is an encoder-decoder model")
    if getattr(model, "_is_stateful", False):
        return Verdict(False, f"{name} keeps a recurrent state")
    if turns_by_length(model):
        return Verdict(False, f"{name} turns its positions by the longest row")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return Verdict(False, f"{name} finds its local window by the number of keys, which rows do not share")
    kinds = set(layout_of(model).layer_types or ()) - KNOWN_KINDS
    if kinds:
        return Verdict(False, f"{name} has layers of kind {', '.join(sorted(kinds))}")
    return None


def _trial(model: Model, difference: Callable[[], tuple[float, float]], tolerance: float) -> Verdict:
    try:
        with _undisturbed(model):
            worst, scale = difference()
    except _RefusedError as refusal:
        return Verdict(False, str(refusal))
    except Exception as error:  # noqa: BLE001  whatever a trial raises, the model is better left alone
        return Verdict(False, f"a trial forward failed ({type(error).__name__}: {error})", is_passing=True)
    if worst != worst:
        return Verdict(False, "its logits are NaN", is_passing=True)
    if worst > tolerance * max(scale, 1.0):
        return Verdict(False, f"its logits change by {worst:.2g} when several tokens are verified at once")
    return Verdict(True)


@contextmanager
def _undisturbed(model: Model) -> Iterator[None]:
    """Run without gradients and dropout; leave the random state and the modules' modes as they were."""
    modes = [(module, module.training) for module in model.modules() if module.training]
    device = device_of(model)
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            if modes:
                model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _random_tokens(model: Model, *shape: int) -> Tensor:
    """Return ids `shape` that stand for nothing but text (an image's, say, would want an image)."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    special = {value for config in (model.config, model.config.get_text_config(decoder=True)) for value in _ids(config)}
    allowed = [token for token in range(min(vocab_size, 4096)) if token not in special] or [0]
    device = device_of(model)
    chosen = torch.randint(len(allowed), shape, device=device)
    return torch.tensor(allowed, device=device)[chosen]


def _ids(config: Any) -> list[int]:
    names = [name for name in vars(config) if name.endswith(("_token_id", "_token_index"))]
    return [value for name in names if isinstance(value := getattr(config, name, None), int)]


def _padded_prompts(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return rows as `[B, W]` ids and attention mask, padded on the left."""
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=0) for row in rows])
    mask = torch.stack([torch.arange(width, device=row.device) >= width - len(row) for row in rows])
    return ids, mask.long()


# ---- the ragged lane ---------------------------------------------------------------------------------------------


def _ragged_difference(model: Model, *, is_batched: bool) -> tuple[float, float]:
    """Return the largest deviation of the lane's logits from the ordinary ones, and the logits' scale."""
    prefill = _made_up_prefill(model, is_batched=is_batched)
    batch, width = prefill.token_ids.shape
    tokens = _random_tokens(model, batch, 4)
    wanted = _plain_logits(prefill, model, tokens)
    lane = prefilled_lane(
        model, prefill.token_ids, prefill.model_kwargs["attention_mask"] if is_batched else None, capacity=width + 8
    )
    # Round one writes three tokens of which row 0 keeps one and row 1 keeps two, round two goes on from there.
    kept = [1, 2][:batch]
    first = _random_tokens(model, batch, 3)
    second = torch.stack([tokens[row, count : count + 2] for row, count in enumerate(kept)])
    for row, count in enumerate(kept):
        first[row, :count] = tokens[row, :count]
    got_first = lane.forward(first, Span(start=width, end=width + 3), num_logits=3).logits[:, -3:].float()
    starts = torch.tensor([width + count for count in kept], device=device_of(model))
    span = Span(start=None if is_batched else width + 1, starts=starts, end=width + max(kept) + 2)
    got_second = lane.forward(second, span, num_logits=2).logits[:, -2:].float()
    pairs = []
    for row, count in enumerate(kept):
        pairs.append((got_first[row, :count], wanted[row, :count]))
        pairs.append((got_second[row], wanted[row, count : count + 2]))
    return _worst(pairs)


# ---- the compatible lane -----------------------------------------------------------------------------------------


def _made_up_prefill(model: Model, *, is_batched: bool) -> Prefill:
    torch.manual_seed(1)
    lengths = PROMPT_LENGTHS if is_batched else PROMPT_LENGTHS[-1:]
    ids, mask = _padded_prompts([_random_tokens(model, length) for length in lengths])
    return prefill_by_host(model, input_ids=ids, attention_mask=mask)


def _compatible_difference(model: Model, make_prefill: Callable[[], Prefill]) -> tuple[float, float]:
    """Return the largest deviation of the lane's logits from the ordinary ones, and the logits' scale."""
    prefill = make_prefill()
    if kind := foreign_windows(prefill.outputs):
        raise _RefusedError(f"its layers of kind {kind} drop tokens by rules of their own")
    batch, width = prefill.token_ids.shape
    tokens = _random_tokens(model, batch, sum(kept for _, kept in TRIAL_ROUNDS))
    wanted = _plain_logits(prefill, model, tokens)
    lane = CompatibleLane(model, make_prefill())
    pairs = []
    done = 0
    for num_fed, num_kept in TRIAL_ROUNDS:
        fed = _random_tokens(model, batch, num_fed)
        fed[:, :num_kept] = tokens[:, done : done + num_kept]
        start = width + done
        lane.settle(start + 1)
        got = lane.forward(fed, Span(start=start, end=start + num_fed), num_logits=num_fed).logits[:, -num_fed:]
        pairs.append((got[:, :num_kept].float(), wanted[:, done : done + num_kept]))
        done += num_kept
    return _worst(pairs)


def _plain_logits(prefill: Prefill, model: Model, token_ids: Tensor) -> Tensor:
    """Feed `[B, T]` tokens one by one, as plain decoding does, and return the logits `[B, T, V]`."""
    lane = CompatibleLane(model, prefill, takes_back=False)
    width = prefill.token_ids.shape[1]
    logits = []
    for index in range(token_ids.shape[1]):
        lane.settle(width + index + 1)
        span = Span(start=width + index, end=width + index + 1)
        logits.append(lane.forward(token_ids[:, index : index + 1], span, num_logits=1).logits[:, -1].float())
    return torch.stack(logits, dim=1)


def _worst(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    differences = torch.stack([(got - wanted).abs().max() for got, wanted in pairs])
    scales = torch.stack([wanted.abs().max() for _, wanted in pairs])
    # sync: the probe compares on the host, once per kind of model; a NaN anywhere survives the maximum.
    worst, scale = torch.stack([differences.max(), scales.max()]).tolist()
    return worst, scale
