"""Find out whether the ragged lane tells the truth about a model, before it decodes anything."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from hf_specdec.engine.forward import MASKED_BY_US, Model, layout_of, prefilled_lane
from hf_specdec.engine.sequences import Span


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model may use the ragged lane; `reason` says why not.

    `is_passing` marks an answer that need not hold next time (the trial ran out of memory, say).
    """

    is_admitted: bool
    reason: str = ""
    is_passing: bool = False


# These choose their frequencies by the longest position in a forward.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

_verdicts: dict[tuple[Any, ...], Verdict] = {}
_verdicts_lock = threading.Lock()


def probe(model: Model) -> Verdict:
    """Check once per class, configuration, attention implementation and dtype that the ragged lane tells the truth.

    A few random tokens go through the lane, in rows of unequal length and with a rollback, and through the model's
    ordinary forward; the logits must agree. The caller's random state and the model's mode are left as they were.
    """
    config = model.config
    key = (
        type(config).__module__,
        type(config).__qualname__,
        _class_key(model),
        getattr(config, "_attn_implementation", None),
        str(model.dtype),
        str(model.device),
        config.to_json_string(),
    )
    with _verdicts_lock:
        verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _static_refusal(model) or _run_probe(model)
        if not verdict.is_passing:
            with _verdicts_lock:
                _verdicts[key] = verdict
    return verdict


def _class_key(model: Model) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _static_refusal(model: Model) -> Verdict | None:
    """Return a refusal that needs no forward."""
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return Verdict(False, f"{name} is an encoder-decoder model")
    if getattr(model, "_is_stateful", False):
        return Verdict(False, f"{name} keeps a recurrent state, which cannot be rolled back yet")
    if LENGTH_DEPENDENT_ROPE & _rope_types(config.get_text_config(decoder=True)):
        return Verdict(
            False, f"{name} turns its positions by the whole length, which a round of several tokens changes"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return Verdict(False, f"{name} finds its local window by the number of keys, which rows do not share")
    layout = layout_of(model)
    kinds = set(layout.layer_types or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return Verdict(False, f"{name} has layers of kind {', '.join(sorted(kinds))}")
    return None


def _rope_types(config: Any) -> set[str]:
    """Return the kinds of rotary embedding, which newer configurations may give per layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    entries = [parameters, *(entry for entry in parameters.values() if isinstance(entry, dict))]
    return {str(entry["rope_type"]) for entry in entries if "rope_type" in entry}


def _run_probe(model: Model) -> Verdict:
    modes = [(module, module.training) for module in model.modules() if module.training]
    try:
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(model)):
            torch.manual_seed(0)
            if modes:
                model.eval()
            worst, scale = _largest_difference(model)
    except Exception as error:  # noqa: BLE001  whatever a trial raises, the model is better left alone
        return Verdict(False, f"a trial forward failed ({type(error).__name__}: {error})", is_passing=True)
    finally:
        for module, mode in modes:
            module.training = mode
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-3}.get(model.dtype, 0.1) * max(scale, 1.0)
    if worst != worst:
        return Verdict(False, "its logits are NaN", is_passing=True)
    if worst > tolerance:
        return Verdict(False, f"its logits change by {worst:.2g} when several tokens are verified at once")
    return Verdict(True)


def _cuda_devices(model: Model) -> list[int]:
    return [model.device.index or 0] if model.device.type == "cuda" else []


def _largest_difference(model: Model) -> tuple[float, float]:
    """Return the largest deviation of the lane's logits from the ordinary ones, and the logits' scale."""
    is_ragged = layout_of(model).attention in MASKED_BY_US
    lengths = [4, 6] if is_ragged else [6]
    vocab_size = model.get_input_embeddings().weight.shape[0]
    rows = [torch.randint(vocab_size, (length + 4,), device=model.device) for length in lengths]
    width = max(lengths)
    padded = torch.stack(
        [torch.nn.functional.pad(row[:n], (width - n, 0)) for row, n in zip(rows, lengths, strict=True)]
    )
    mask = torch.stack([torch.arange(width, device=model.device) >= width - n for n in lengths])
    lane = prefilled_lane(model, padded, mask.long() if is_ragged else None, capacity=width + 8)
    batch = len(rows)
    # Round one writes three tokens of which row 0 keeps one and row 1 keeps two, round two goes on from there.
    wrong = torch.randint(vocab_size, (batch, 3), device=model.device)
    first = torch.stack([row[n : n + 3] for row, n in zip(rows, lengths, strict=True)])
    kept = [1, 2][:batch] if is_ragged else [1]
    for index, count in enumerate(kept):
        first[index, count:] = wrong[index, count:]
    got_first = lane.forward(first, Span(start=width, end=width + 3), num_logits=3).logits[:, -3:].float()
    starts = torch.tensor([width + count for count in kept], device=model.device)
    second = torch.stack([row[n + c : n + c + 2] for row, n, c in zip(rows, lengths, kept, strict=True)])
    span = Span(start=None if is_ragged else width + 1, starts=starts, end=width + max(kept) + 2)
    got_second = lane.forward(second, span, num_logits=2).logits[:, -2:].float()
    differences, scales = [], []
    for index, (row, n, count) in enumerate(zip(rows, lengths, kept, strict=True)):
        wanted = model(input_ids=row[None, : n + count + 2], use_cache=False).logits[0].float()
        pairs = ((got_first[index, :count], wanted[n : n + count]), (got_second[index], wanted[n + count :]))
        for got, want in pairs:
            differences.append((got - want).abs().max())
            scales.append(want.abs().max())
    # sync: the probe compares on the host, once per kind of model; a NaN anywhere survives the maximum.
    worst, scale = torch.stack([torch.stack(differences).max(), torch.stack(scales).max()]).tolist()
    return worst, scale
