"""`hf-specdec env`: what a bug report or a measurement needs to say about the machine, and how a model would be run."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_specdec.cli.names import refuse_missing_folder
from hf_specdec.errors import in_short

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "bitsandbytes", "accelerate")
_AT_THE_FIRST_CALL = "decided at the first call"


def env(
    model: Annotated[
        str | None, typer.Argument(help="A target to look at: a Hub id or a local folder.", metavar="[MODEL]")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="A draft to look at: a Hub id or a local folder.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print versions, device, CPU capability and threads; with MODEL also how it would be run."""
    if draft is not None and model is None:
        raise typer.BadParameter("needs MODEL: a draft drafts for a target.", param_hint="--draft")
    values = describe_environment()
    names = {"target": model, "draft": draft}
    talk = Console(stderr=True, highlight=False)
    for role, name in names.items():
        if name is not None:
            talk.print(f"Loading {name} …", markup=False, soft_wrap=True)
            loaded = _load(name, trust_remote_code=trust_remote_code)
            values[role] = {"name": name, **describe_model(loaded, is_draft=role == "draft")}
            del loaded
    if json_output:
        print(json.dumps(values, indent=2))
        return
    rows = [
        (f"{name} {key}", value)
        for name, inner in values.items()
        for key, value in (inner.items() if isinstance(inner, dict) else [("", inner)])
    ]
    width = max(len(name.strip()) for name, _ in rows)
    for name, value in rows:
        print(f"{name.strip():<{width}}  {value}")


def describe_environment() -> dict[str, Any]:
    """Return versions and hardware as JSON types."""
    import torch

    from hf_specdec import __version__

    has_cuda = torch.cuda.is_available()
    return {
        "hf-specdec": __version__,
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if has_cuda else "cpu",
        "cuda": torch.version.cuda if has_cuda else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


def describe_model(model: PreTrainedModel, *, is_draft: bool) -> dict[str, Any]:
    """Return the lanes a model gets, with the reason where it is not the ragged one, and its main properties."""
    from hf_specdec.engine.choice import choose_lane
    from hf_specdec.engine.layout import context_of, layout_of
    from hf_specdec.quiet import quiet

    record: dict[str, Any] = {"class": type(model).__name__}
    for key, num_rows in (("single", 1), ("batch", 2)):
        has_encoder = bool(model.config.is_encoder_decoder)
        if has_encoder and model.main_input_name != "input_ids":
            record[key] = _AT_THE_FIRST_CALL
            continue
        with quiet():
            choice = choose_lane(
                model,
                is_batched=num_rows > 1,
                is_draft=is_draft,
                make_prefill=(lambda num_rows=num_rows: _encoder_prefill(model, num_rows)) if has_encoder else None,  # type: ignore[misc]
                kind="encoder" if has_encoder else "",
            )
        record[key] = choice.lane
        if choice.reason:
            record[f"{key}_reason"] = choice.reason
    return {
        **record,
        "attention": layout_of(model).attention,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": context_of(model),
    }


def _encoder_prefill(model: PreTrainedModel, num_rows: int) -> Any:
    import torch

    from hf_specdec.engine.host import prefill_by_host
    from hf_specdec.placement import device_of

    device = device_of(model)
    input_ids = torch.arange(4, 10, device=device).repeat(num_rows, 1)
    start = model.generation_config.decoder_start_token_id if model.generation_config is not None else None
    decoder_ids = torch.full((num_rows, 1), start if isinstance(start, int) else 0, device=device)
    return prefill_by_host(model, input_ids=input_ids, decoder_input_ids=decoder_ids)


def _load(name: str, *, trust_remote_code: bool) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig

    rule = "`hf-specdec env` looks at a language model of transformers, given as Hub id or local folder"
    refuse_missing_folder(rule, name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(name, **options)
        # As for `generate`: spreading a model over several devices is the host's.
        placement = {"device_map": "auto"} if torch.cuda.is_available() else {}
        model: Any = _loader(config).from_pretrained(name, dtype="auto", **placement, **options)
    except Exception as error:  # a broken folder can make any of the host's loaders raise anything
        raise ValueError(
            f"{rule}, but {name!r} could not be loaded as one ({in_short(error)}). Check the name, "
            "and that it names a model that generates text."
        ) from error
    loaded: PreTrainedModel = model.eval()
    return loaded


def _loader(config: Any) -> Any:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )
    from transformers.models.auto import modeling_auto as known

    if config.is_encoder_decoder:
        is_speech = config.model_type in known.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
        return AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
    is_text = config.model_type in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_image = config.model_type in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if is_image and not is_text else AutoModelForCausalLM


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
