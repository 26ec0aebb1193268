"""Settings of speculative decoding, checked once, where they enter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from hf_specdec.errors import InvalidConfigError
from hf_specdec.hints import checked_hints
from hf_specdec.metrics import RoundRecord

LONGEST_DRAFT = 256
# "auto" drafts no more than this in a round.
LONGEST_ADAPTIVE_DRAFT = 16

_Verification = Literal["block", "token"]
DraftQuantization = Literal["auto", "none", "nf4", "fp4", "int8"]
_TokenSpace = Literal["auto", "shared", "text"]
RunnerName = Literal["auto", "eager", "compiled", "cuda_graph"]

FOREIGN_SPELLINGS: dict[str, str] = {
    "num_assistant_tokens": "num_draft_tokens",  # transformers
    "num_speculative_tokens": "num_draft_tokens",  # vLLM
    "speculative_num_steps": "num_draft_tokens",  # SGLang
    "speculative_num_draft_tokens": "num_draft_tokens",  # SGLang
    "max_draft_len": "num_draft_tokens",  # TensorRT-LLM
    "speculative_tokens": "num_draft_tokens",  # speculators
    "speculate_k": "num_draft_tokens",  # gpt-fast
    "gamma": "num_draft_tokens",  # Leviathan et al.
    "lookahead": "num_draft_tokens",
    "num_lookahead_tokens": "num_draft_tokens",
    "draft_length": "num_draft_tokens",
    "k": "num_draft_tokens",
}
"""Names that other projects use for our settings, and ours. Each is refused with an error that gives our name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Say how a draft model is used; pass it to `generate` as `speculative_config`.

    Every setting keeps the output lossless: the draft changes the time that generation takes, not what it returns.

    Args:
        num_draft_tokens: Tokens drafted per round (K), 1..256; or "auto", which chooses it anew for each round by what
            was measured, 0 included, where plain decoding is faster.
        verification: Rule that decides which draft tokens are kept when sampling. "block" never accepts fewer tokens on
            average than "token". Without sampling both are the same.
        strict: Raise if the draft fails, instead of warning once and finishing without it.
        on_round: Called with the record of every round right after it, in the thread that generates.
        trust_remote_code: Let a draft that is given by name run code from its repository.
        draft_revision: Branch, tag or commit of a draft or pairing that is given by name.
        draft_quantization: How a draft that is given by name is stored in memory: "none" is the target's dtype, "nf4",
            "fp4" and "int8" are bitsandbytes' formats, and "auto" is "none" where that fits and "nf4" where it does
            not. A checkpoint that is quantized already is loaded as it is.
        draft_tokenizer: The draft's tokenizer, where it is another than the target's; None looks for it where the draft
            came from, on this machine alone. The target's is `tokenizer` of `generate`, or is looked for likewise.
        token_space: How a draft with another tokenizer proposes. "shared" drafts in the tokens that both have, "text"
            drafts in the draft's own and splits the text anew, and "auto" is "text" where nothing is sampled and the
            draft writes the prompt in fewer tokens than the target, else "shared".
        controller_hints: What "auto" learned about this pair elsewhere, `output.speculation.controller_hints`, to start
            from; it goes on learning.
        runner: How forwards run where a model's caches allow it. "eager" runs the model as it is; "cuda_graph" captures
            its forwards on a CUDA device and replays them, which takes the launching of kernels off the host;
            "compiled" hands them to `torch.compile`, which takes a minute or more once per shape, on any device;
            "auto" is "cuda_graph" on CUDA devices and "eager" elsewhere. What cannot be prepared runs eagerly, and the
            stats say why. Prepared forwards and their caches stay with the models until `disable()`.
        profile: Record what the time of a call goes into: seconds per phase, and a trace of `torch.profiler` in a
            temporary file, both told in the stats (`profile`, `trace_file`). Recording itself takes time.

    Raises:
        InvalidConfigError: If a value has the wrong type or is out of range.

    Example:
        >>> SpeculativeConfig(num_draft_tokens=8).num_draft_tokens
        8
    """

    num_draft_tokens: int | Literal["auto"] = "auto"
    # Optimal among rules that look at one draft chain, and never below token verification: arXiv:2403.10444.
    verification: _Verification = "block"
    strict: bool = False
    on_round: Callable[[RoundRecord], None] | None = None
    trust_remote_code: bool = False
    draft_revision: str | None = None
    draft_quantization: DraftQuantization = "auto"
    draft_tokenizer: Any = field(default=None, hash=False, repr=False)
    token_space: _TokenSpace = "auto"
    controller_hints: Mapping[str, Any] | None = field(default=None, hash=False)
    runner: RunnerName = "auto"
    profile: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        _check_num_draft_tokens(self.num_draft_tokens)
        _check_choice("verification", self.verification, get_args(_Verification), "for block verification")
        _check_choice(
            "draft_quantization", self.draft_quantization, get_args(DraftQuantization), "to choose by free memory"
        )
        _check_choice("token_space", self.token_space, get_args(_TokenSpace), "to choose by the prompt")
        _check_choice("runner", self.runner, get_args(RunnerName), "to choose by device")
        _check_draft_tokenizer(self.draft_tokenizer)
        _check_bool("strict", self.strict)
        _check_bool("profile", self.profile)
        _check_bool("trust_remote_code", self.trust_remote_code)
        _check_on_round(self.on_round)
        _check_draft_revision(self.draft_revision)
        checked_hints(self.controller_hints)
        if self.controller_hints is not None and self.num_draft_tokens != "auto":
            raise InvalidConfigError(
                f'`controller_hints` are for `num_draft_tokens="auto"`, but `num_draft_tokens` is '
                f"{self.num_draft_tokens}. Leave one of them out."
            )

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that any round will draft."""
        return LONGEST_ADAPTIVE_DRAFT if self.num_draft_tokens == "auto" else self.num_draft_tokens

    @classmethod
    def from_user(
        cls, value: "SpeculativeConfig | Mapping[str, Any] | None", *, num_draft_tokens: int | str | None = None
    ) -> "SpeculativeConfig":
        """Build a checked config from what a caller of `generate` gave.

        Args:
            value: A config, a mapping with its field names as keys, or None for the defaults.
            num_draft_tokens: The keyword of `generate` of that name; None if it was left out. It may repeat what
                `value` says, but not contradict it. A config whose `num_draft_tokens` is the default counts as saying
                nothing.

        Raises:
            InvalidConfigError: If a key is unknown, a value is wrong, or the two draft lengths differ.
        """
        if value is None:
            value = {}
        if isinstance(value, Mapping):
            _check_keys(value)
            given, config = value.get("num_draft_tokens"), cls(**value)
        elif isinstance(value, SpeculativeConfig):
            # A frozen config cannot tell an explicit default from an omitted one; taking it as omitted lets
            # SpeculativeConfig(strict=True) be combined with the keyword.
            is_default = value.num_draft_tokens == cls().num_draft_tokens
            given, config = None if is_default else value.num_draft_tokens, value
        else:
            raise InvalidConfigError(
                f"`speculative_config` must be a SpeculativeConfig, a mapping or None, but is {_describe(value)}. "
                "Pass for example `SpeculativeConfig(num_draft_tokens=5)`."
            )
        if num_draft_tokens is None:
            return config
        config = replace(config, num_draft_tokens=num_draft_tokens)  # type: ignore[arg-type]  # checked by the class
        if given is not None and given != num_draft_tokens:
            raise InvalidConfigError(
                f"`num_draft_tokens` must have one value, but is {num_draft_tokens!r} as a keyword of `generate` and "
                f"{given!r} in `speculative_config`. Leave one of them out."
            )
        return config


_FIELD_NAMES = tuple(field.name for field in fields(SpeculativeConfig))


def _check_num_draft_tokens(value: object) -> None:
    if isinstance(value, str) and value == "auto":
        return
    rule = f'`num_draft_tokens` must be between 1 and {LONGEST_DRAFT}, or "auto"'
    # bool is an int to Python, so True would silently draft one token per round.
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidConfigError(f"{rule}, but is {_describe(value)}. Leave it out to let it adapt, or pass an int.")
    if value < 1:
        raise InvalidConfigError(f"{rule}, but is {value}. To decode without a draft, leave out `draft_model`.")
    if value > LONGEST_DRAFT:
        raise InvalidConfigError(f"{rule}, but is {value}. Values from 3 to 10 suit most pairs of models.")


def _check_choice(name: str, value: object, allowed: tuple[str, ...], default: str) -> None:
    # Membership in a tuple compares by ==, which an array-like answers with an array, so ask for a string first.
    if not isinstance(value, str) or value not in allowed:
        raise InvalidConfigError(
            f"`{name}` must be one of {', '.join(map(repr, allowed))}, but is {_describe(value)}. "
            f"Leave it out {default}."
        )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidConfigError(f"`{name}` must be True or False, but is {_describe(value)}. Pass a bool.")


def _check_on_round(value: object) -> None:
    if value is not None and not callable(value):
        raise InvalidConfigError(
            f"`on_round` must be callable or None, but is {_describe(value)}. Pass a function that takes a RoundRecord."
        )


def _check_draft_revision(value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidConfigError(
            f"`draft_revision` must be a non-empty string or None, but is {_describe(value)}. "
            "Pass a branch, tag or commit of the draft's repository."
        )


def _check_draft_tokenizer(value: object) -> None:
    if value is not None and not all(callable(getattr(value, name, None)) for name in ("encode", "get_vocab")):
        raise InvalidConfigError(
            f"`draft_tokenizer` must be a transformers tokenizer or None, but is {_describe(value)}. Load it with "
            "`AutoTokenizer.from_pretrained`."
        )


def _check_keys(value: Mapping[str, Any]) -> None:
    for key in value:
        if key in _FIELD_NAMES:
            continue
        name = str(key)
        if name in FOREIGN_SPELLINGS:
            raise InvalidConfigError(
                f"`speculative_config` has no setting `{name}`. It is called `{FOREIGN_SPELLINGS[name]}` here."
            )
        nearest = get_close_matches(name, _FIELD_NAMES, n=1, cutoff=0.0)[0]
        raise InvalidConfigError(
            f"`speculative_config` has no setting `{name}`. Did you mean `{nearest}`? "
            f"The settings are {', '.join(_FIELD_NAMES)}."
        )


def _describe(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
