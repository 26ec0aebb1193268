"""`hf-specdec plan`: what a pair takes and what it should give, from configurations alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.bandwidth import (
    ACCELERATORS,
    RESERVED_BYTES,
    Accelerator,
    ModelSize,
    Prediction,
    Situation,
    best_length,
    memory_bytes,
    predict,
    workspace_bytes,
)
from hf_specdec.cli.names import refuse_missing_folder
from hf_specdec.errors import in_short

_FIXED_LENGTHS = (0, 4, 6)
_LEAST_WIDTH = 100
_LONGEST_QUOTE = 200


class Parallelism(StrEnum):
    """How several devices share the target."""

    layers = "layers"
    tensors = "tensors"


class Dtype(StrEnum):
    """What unquantized weights and caches are stored in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class TargetQuantization(StrEnum):
    """What weights can be stored as."""

    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"


class Quantization(StrEnum):
    """How the draft's weights are stored."""

    auto = "auto"
    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"


def plan(
    target: Annotated[str, typer.Argument(help="The target: a Hub id or a local folder; only its config is read.")],
    draft: Annotated[str, typer.Argument(help="The draft, likewise.")],
    gpu: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(ACCELERATORS)}.", show_default="the one of this machine")
    ] = None,
    num_gpus: Annotated[int, typer.Option(min=1)] = 1,
    parallel: Annotated[
        Parallelism, typer.Option(help="Several devices hold different layers, as `device_map` does, or split each.")
    ] = Parallelism.layers,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Per row.")] = 1024,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Per row.")] = 512,
    dtype: Annotated[Dtype, typer.Option(help="Of unquantized weights and of caches.")] = Dtype.bfloat16,
    target_quantization: Annotated[
        TargetQuantization, typer.Option(help="How the target's weights are stored.")
    ] = TargetQuantization.none,
    draft_quantization: Annotated[
        Quantization, typer.Option(help="The draft's; auto is none where that fits beside the target, else nf4.")
    ] = Quantization.auto,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Chance of a draft token when the ones before it were accepted.")
    ] = 0.8,
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the memory bandwidth that is reached.")
    ] = 0.8,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and no text.")] = False,
) -> None:
    """Say how much memory a pair takes, whether it fits, and how fast it should be; no weights are needed."""
    accelerator = _accelerator(gpu)
    options = {"trust_remote_code": trust_remote_code}
    of_target = _sizes_of(target, dtype.value, [target_quantization.value], **options)[target_quantization.value]
    of_drafts = _sizes_of(draft, dtype.value, [kind.value for kind in TargetQuantization], **options)
    situation = Situation(
        accelerator=accelerator,
        num_devices=num_gpus,
        parallelism=parallel.value,
        efficiency=efficiency,
        num_rows=batch_size,
        num_prompt_tokens=prompt_tokens,
        num_new_tokens=max_new_tokens,
        acceptance=acceptance,
    )
    values = describe(of_target, of_drafts, situation, draft_quantization.value)
    if json_output:
        print(json.dumps(values, indent=2))
        return
    _print(values, situation)


def describe(target: ModelSize, drafts: dict[str, ModelSize], situation: Situation, asked: str) -> dict[str, Any]:
    """Return the plan as JSON types: bytes, what fits, and a prediction for each way to decode.

    Args:
        target: The target's size.
        drafts: The draft's size by quantization.
        situation: Where and what is decoded.
        asked: The draft's quantization, or "auto".
    """
    total = situation.accelerator.memory * situation.num_devices
    place = f"{situation.num_devices} × {situation.accelerator.name}"
    left = int(total - memory_bytes(target, None, situation, max(_FIXED_LENGTHS)))
    needed = {
        kind: size.weight_bytes + int(size.cache_bytes(situation.num_rows, situation.full_length))
        for kind, size in drafts.items()
    }
    quantization, reason = _chosen(needed, left, asked)
    draft = drafts[quantization]
    predictions = _predictions(target, draft, situation)
    return {
        "gpu": place,
        "total_bytes": int(total),
        "target": _bytes_of(target, situation),
        "drafts": {kind: {**_bytes_of(size, situation), "fits": needed[kind] <= left} for kind, size in drafts.items()},
        "workspace_bytes": int(workspace_bytes(target, situation, max(_FIXED_LENGTHS))),
        "reserved_bytes": RESERVED_BYTES * situation.num_devices,
        "draft_quantization": quantization,
        "draft_quantization_reason": reason,
        "target_fits": left >= 0,
        "fits": needed[quantization] <= left,
        "predictions": {name: asdict(prediction) for name, prediction in predictions.items()},
    }


def _chosen(needed: dict[str, int], left: int, asked: str) -> tuple[str, str]:
    """Return the quantization to plan with, and why."""
    from hf_specdec.memory import AUTOMATIC, first_fitting, in_words

    if asked != "auto":
        return asked, "asked for"
    chosen = first_fitting(needed, left)
    kind = chosen or AUTOMATIC[-1]
    said = f"it takes {in_words(needed[kind])} with its cache, and {in_words(max(left, 0))} are left beside the target"
    return kind, said if chosen else f"it does not fit either: {said}"


def _predictions(target: ModelSize, draft: ModelSize, situation: Situation) -> dict[str, Prediction]:
    lengths = (*_FIXED_LENGTHS, best_length(target, draft, situation))
    names = ("plain", *(f"K = {length}" for length in _FIXED_LENGTHS[1:]), "adaptive")
    return dict(zip(names, predict(target, draft, situation, lengths), strict=True))


def _bytes_of(size: ModelSize, situation: Situation) -> dict[str, int]:
    return {
        "weight_bytes": size.weight_bytes,
        "cache_bytes": int(size.cache_bytes(situation.num_rows, situation.full_length)),
    }


def _sizes_of(name: str, dtype: str, quantizations: list[str], *, trust_remote_code: bool) -> dict[str, ModelSize]:
    """Return a model's sizes by quantization, from its configuration."""
    import torch

    from hf_specdec.memory import sizes_of

    config = _config_of(name, trust_remote_code=trust_remote_code)
    with _as_usage_error(name):
        return sizes_of(config, getattr(torch, dtype), quantizations, trust_remote_code=trust_remote_code)


def _config_of(name: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    from hf_specdec.loading import stored_as

    rule = "`hf-specdec plan` needs the configuration of a causal LM, by Hub id or local folder"
    refuse_missing_folder(rule, name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a broken folder can make any of the host's loaders raise anything
        raise ValueError(
            f"{rule}, but that of {name!r} could not be read ({_shortened(error)}). Check the name; without a network, "
            "give a folder that holds its config.json."
        ) from error
    if (kind := stored_as(config)) is not None:
        raise ValueError(
            f"{rule} whose weights are not quantized yet, but {name!r} says {kind!r}. Name the checkpoint it was made "
            "from, and say with `--target-quantization` or `--draft-quantization` how it is stored."
        )
    return config


@contextmanager
def _as_usage_error(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what a class makes of an odd configuration can raise anything
        raise ValueError(
            f"`hf-specdec plan` builds the model of a configuration without its weights, as a causal LM, but that of "
            f"{name!r} could not be built or run ({_shortened(error)}). Name a decoder-only model that transformers "
            "can load."
        ) from error


def _shortened(error: Exception) -> str:
    # The first line of some names every model there is.
    return in_short(error)[:_LONGEST_QUOTE]


def _accelerator(name: str | None) -> Accelerator:
    if name is not None:
        if name.lower() not in ACCELERATORS:
            raise typer.BadParameter(f"must be one of {', '.join(ACCELERATORS)}, but is {name!r}.", param_hint="--gpu")
        return ACCELERATORS[name.lower()]
    import torch

    device = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "no GPU"
    found = [own for key, own in ACCELERATORS.items() if key.replace("-", " ") in device]
    if not found:
        raise typer.BadParameter(
            f"must be given where the machine's own GPU is not in the list, and this one has {device}. It takes one of "
            f"{', '.join(ACCELERATORS)}.",
            param_hint="--gpu",
        )
    # "h100 pcie" is also an "h100".
    return max(found, key=lambda own: len(own.name))


def _print(values: dict[str, Any], situation: Situation) -> None:
    from hf_specdec.memory import in_words

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_WIDTH)
    memory = Table(
        "", "weights", "cache", "fits beside the target", title=f"{values['gpu']}, {in_words(values['total_bytes'])}"
    )
    memory.add_row("target", *_words(values["target"]), "alone: " + ("yes" if values["target_fits"] else "no"))
    for kind, own in values["drafts"].items():
        memory.add_row(f"draft, {kind}", *_words(own), "yes" if own["fits"] else "no")
    console.print(memory)
    workspace = in_words(values["workspace_bytes"])
    console.print(
        f"{workspace} more are taken in passing and reserved by the driver. "
        f"Draft: {values['draft_quantization']} ({values['draft_quantization_reason']}).",
        markup=False,
    )
    speeds = Table("", "tokens/s per row", "time to first token", "memory", title="Predicted, not measured")
    for name, own in values["predictions"].items():
        label = f"{name} (K = {own['num_draft_tokens']})" if name == "adaptive" else name
        speeds.add_row(
            label,
            f"{own['tokens_per_second']:.1f}",
            f"{1e3 * own['time_to_first_token']:.0f} ms",
            f"{own['utilisation']:.0%}",
        )
    console.print(speeds)
    if not (values["target_fits"] and values["fits"]):
        console.print("The pair does not fit: these speeds would take more memory than there is.")
    console.print(
        f"Bound by memory: {situation.efficiency:.0%} of {situation.accelerator.bandwidth / 1e12:.2f} TB/s, "
        f"{situation.num_reading} device(s) reading at a time, {situation.acceptance:.0%} of draft tokens accepted.",
        markup=False,
    )


def _words(own: dict[str, Any]) -> tuple[str, str]:
    from hf_specdec.memory import in_words

    return in_words(own["weight_bytes"]), in_words(own["cache_bytes"])
