"""`hf-specdec generate`: stream text from any causal language model, with a draft if one is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from hf_specdec.cli.comparison import Comparison, TimedRun, run_timed
from hf_specdec.cli.lengths import NumDraftTokens, as_length
from hf_specdec.cli.painting import TokenWriter
from hf_specdec.config import DraftQuantization

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

SEEDED_LENGTH = "5"
_Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def generate(
    model: Annotated[str, typer.Option(help="The target: a Hub id or a local folder.")],
    draft: Annotated[
        str | None, typer.Option(help="The draft: a Hub id or a local folder. Without it, decode plainly.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt. Without it or a file, it is read from stdin.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A UTF-8 file that holds the prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    num_draft_tokens: NumDraftTokens = "auto",
    draft_quantization: Annotated[
        DraftQuantization, typer.Option(help="How the draft's weights are stored; auto goes by free memory.")
    ] = "auto",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy. Without it, what the model's own settings say.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="0 switches it off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling; auto then means 5 draft tokens.")] = None,
    dtype: Annotated[_Dtype, typer.Option(help="Of the weights; auto takes what they are stored in.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Apply the chat template; default: if there is one.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly, and compare.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and no stream.")] = False,
) -> None:
    """Continue a prompt: text goes to stdout as it is produced, figures go to stderr."""
    if compare and draft is None:
        raise typer.BadParameter("needs --draft: there is nothing to compare without one.", param_hint="--compare")
    if draft_quantization != "auto" and draft is None:
        raise typer.BadParameter("needs --draft: it says how a draft is stored.", param_hint="--draft-quantization")
    text = _read_prompt(prompt, prompt_file)
    from hf_specdec.placement import device_of

    sampling = _sampling(temperature, top_p, top_k)
    talk = Console(stderr=True, highlight=False)
    talk.print(f"Loading {model} …", soft_wrap=True)
    target, tokenizer = _load(model, dtype, device, trust_remote_code=trust_remote_code)
    inputs = _encode(tokenizer, text, chat=chat).to(device_of(target))
    if seed is not None and num_draft_tokens == "auto":
        # A length that follows measured times would give another text for the same seed.
        num_draft_tokens = SEEDED_LENGTH
    speculation = _speculation(draft, num_draft_tokens, draft_quantization, trust_remote_code=trust_remote_code)
    if draft is not None:
        talk.print(f"Loading {draft} …", soft_wrap=True)
        # The draft is loaded in the first call and kept; a call of its own keeps loading out of the times below.
        target.generate(**inputs, max_new_tokens=2, **speculation)  # type: ignore[operator]

    def run(console: Console | None, **options: Any) -> TimedRun:
        _seed(seed)
        writer = TokenWriter(console, tokenizer)
        return run_timed(target, inputs, writer, max_new_tokens=max_new_tokens, **sampling, **options)

    result = run(None if json_output else Console(highlight=False, soft_wrap=True), **speculation)
    comparison = Comparison(run(None), result) if compare else None
    if json_output:
        record: dict[str, Any] = {
            "model": model,
            "draft": draft,
            "prompt": text,
            "text": _decode(tokenizer, result.token_ids),
        }
        record |= {"num_prompt_tokens": inputs["input_ids"].shape[1], **result.to_dict()}
        print(json.dumps(record | {"comparison": comparison.to_dict() if comparison else None}, indent=2))
    talk.print(_report(result, comparison, is_greedy=_is_greedy(target, sampling)), markup=False, soft_wrap=True)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("cannot be combined with --prompt-file: give one of them.", param_hint="--prompt")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        text = prompt_file.read_text(encoding="utf-8")
    elif sys.stdin.isatty():
        raise typer.BadParameter("is missing: give --prompt or --prompt-file, or pipe the prompt to stdin.")
    else:
        text = sys.stdin.read()
    if not text:
        raise typer.BadParameter("must not be empty.", param_hint="the prompt")
    return text


def _sampling(temperature: float | None, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True, **options} if options else {}


def _is_greedy(target: PreTrainedModel, sampling: dict[str, Any]) -> bool:
    return not sampling.get("do_sample", getattr(target.generation_config, "do_sample", False))


def _load(
    name: str, dtype: str, device: str, *, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_specdec

    options: dict[str, Any] = {"dtype": "auto" if dtype == "auto" else getattr(torch, dtype)}
    # Spreading a model over several devices is the host's; on a machine without GPU it would only cost start-up time.
    if device == "auto" and torch.cuda.is_available():
        options["device_map"] = "auto"
    target: Any = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    if device != "auto":
        target.to(device)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    hf_specdec.enable(target)
    return target, tokenizer


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool | None) -> BatchEncoding:
    has_template = tokenizer.chat_template is not None
    if chat and not has_template:
        raise ValueError("`--chat` needs a tokenizer with a chat template, and this one has none. Leave `--chat` out.")
    encoded: Any
    if chat is False or not has_template:
        encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    else:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    result: BatchEncoding = encoded
    return result


def _speculation(
    draft: str | None, num_draft_tokens: str, draft_quantization: str, *, trust_remote_code: bool
) -> dict[str, Any]:
    if draft is None:
        return {}
    from hf_specdec.config import SpeculativeConfig

    length = as_length(num_draft_tokens)
    given = {"trust_remote_code": trust_remote_code, "draft_quantization": draft_quantization}
    config = SpeculativeConfig.from_user(given, num_draft_tokens=length)
    return {"draft_model": draft, "speculative_config": config}


def _seed(seed: int | None) -> None:
    if seed is not None:
        import torch

        torch.manual_seed(seed)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _report(result: TimedRun, comparison: Comparison | None, *, is_greedy: bool) -> str:
    lines = [
        f"{len(result.token_ids)} tokens in {result.seconds:.2f} s ({result.tokens_per_second:.1f} tokens/s), "
        f"the first after {result.time_to_first_token_seconds:.2f} s"
    ]
    if result.speculation:
        lines += str(result.speculation).splitlines()[1:]
    if comparison:
        plain = comparison.plain
        lines.append(f"plain: {plain.tokens_per_second:.1f} tokens/s; speed-up {comparison.speedup:.2f}×")
        lines.append(_equality(comparison, is_greedy=is_greedy))
    return "\n".join(lines)


def _equality(comparison: Comparison, *, is_greedy: bool) -> str:
    if not is_greedy:
        return "sampled: both outputs follow the same law, but are different draws"
    if comparison.first_difference is None:
        return "the outputs are equal"
    return f"the outputs differ from token {comparison.first_difference} on (in 16 bit a near tie can round either way)"
