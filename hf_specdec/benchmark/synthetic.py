"""Pairs that need no weights: real architectures and costs, and a draft whose guesses are accepted at a set rate.

Such a pair answers what hardware, software and shapes make of an acceptance rate. Which rate a real draft has on real
text, it cannot say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.benchmark.scripted import FEWEST_TOKENS, script, scripted_laws
from hf_specdec.benchmark.shapes import Blueprint, blueprints_of
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError, in_short
from hf_specdec.loading import SMALLEST_SHARED_VOCABULARY, bitsandbytes_config, quantized_layer
from hf_specdec.memory import QUANTIZATIONS, free_bytes, in_words, linear_layers, skeleton_of, weight_bytes

Tensor = torch.Tensor
# Drawn once and repeated: the values do not matter, the bytes do, and drawing is slow. A prime, so that the rows of
# a matrix are not copies of each other.
NUM_RANDOM_VALUES = 1_048_573
STANDARD_DEVIATION = 0.02  # what most architectures are initialised with before training


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticPair:
    """A target and a draft of random weights whose logits follow a script.

    Attributes:
        target: Costs what the real model costs; not yet enabled.
        draft: The same, its guesses accepted at the set rate.
        target_name: The target's shape.
        draft_name: The draft's shape.
        draft_quantization: How the draft's linear layers are stored.
        acceptance: The set probability that a draft token is accepted, given that those before it were.
        note: What has to stand beside every figure that is measured with the pair.
        token_ids: `[N]` int64 on the CPU, the tokens that prompts and texts are made of, in their order in a greedy
            text.
    """

    target: PreTrainedModel = field(repr=False)
    draft: PreTrainedModel = field(repr=False)
    target_name: str
    draft_name: str
    draft_quantization: str
    acceptance: float
    note: str
    token_ids: Tensor = field(repr=False)

    def prompt(self, num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
        """Return random prompts `[num_rows, num_tokens]` on the target's device; none of them needs padding.

        Args:
            num_rows: Rows of the batch.
            num_tokens: Tokens of each.
            seed: Of the choice. The global random state is not touched.
        """
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.token_ids), (num_rows, num_tokens), generator=generator)
        return self.token_ids[chosen].to(self.target.device)


def make_synthetic_pair(
    pair: str,
    acceptance: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    draft_quantization: str = "none",
) -> SyntheticPair:
    """Build a pair that costs what real models of these shapes cost, with a set acceptance.

    Both models run whole, and then their logits are overwritten. In greedy decoding the draft's best token is the
    target's after a share of `acceptance` of all tokens, chosen at random; a text walks through the vocabulary and
    does not repeat itself before it has seen most of it. When sampling, the two laws are equal after those tokens and
    have no token in common after the others, so the acceptance is the same at every temperature, top-k and top-p, and
    with token and block verification alike. The draft is equally sure of right and wrong guesses: what a draft length
    that watches the draft's confidence gains on real pairs does not show. Nothing special is ever generated, so texts
    end at `max_new_tokens`.

    Weights are made on the device, in `dtype`, one tensor after the other.

    Args:
        pair: "TARGET:DRAFT", each the name of a shape (`SHAPES`) or a local folder with a config.json.
        acceptance: Between 0 and 1.
        dtype: Of both models.
        device: Where both go.
        seed: Of the weights and the script. The global random state is not touched.
        draft_quantization: "none", "nf4", "fp4" or "int8", for the draft's linear layers.

    Raises:
        InvalidConfigError: An argument is out of range, or the weights do not fit.
        IncompatibleDraftError: The two shapes' vocabularies are too different for a pair.

    Example:
        >>> pair = make_synthetic_pair("tiny-target:tiny-draft", 0.8, dtype=torch.float32)
        >>> hf_specdec.enable(pair.target).generate(pair.prompt(1, 8), draft_model=pair.draft, max_new_tokens=32)
    """
    _check(acceptance, dtype, draft_quantization)
    place = _device(device)
    blueprints = blueprints_of(pair)
    vocab_sizes = _vocab_sizes(*blueprints)
    cycle_tokens = _ordinary_tokens(blueprints, min(vocab_sizes))
    skeletons = [_skeleton(blueprint, dtype) for blueprint in blueprints]
    _refuse_too_large(pair, skeletons, draft_quantization, place)
    generator = torch.Generator().manual_seed(seed)
    cycle = cycle_tokens[torch.randperm(len(cycle_tokens), generator=generator)]
    laws = scripted_laws(cycle, vocab_sizes, acceptance, generator)
    block = (STANDARD_DEVIATION * torch.randn(NUM_RANDOM_VALUES, generator=generator)).to(place, dtype)
    for skeleton, law, quantization in zip(skeletons, laws, ("none", draft_quantization), strict=True):
        _materialize(skeleton, block, quantization)
        script(skeleton, law.to(place, dtype))
    target, draft = blueprints
    stored = "" if draft_quantization == "none" else f" in {draft_quantization}"
    return SyntheticPair(
        target=skeletons[0],
        draft=skeletons[1],
        target_name=target.name,
        draft_name=draft.name,
        draft_quantization=draft_quantization,
        acceptance=acceptance,
        note=(
            f"set acceptance, not measured: {acceptance:g} per draft token by script; random weights in the shapes of "
            f"{target.name} and {draft.name}{stored}, costs are real"
        ),
        token_ids=cycle,
    )


# ---- what can be asked for -----------------------------------------------------------------------------------------


def _check(acceptance: Any, dtype: Any, draft_quantization: Any) -> None:
    is_number = isinstance(acceptance, int | float) and not isinstance(acceptance, bool)
    if not is_number or not 0 <= acceptance <= 1:
        raise InvalidConfigError(
            f"`acceptance` must be a number from 0 to 1, but is {acceptance!r}. Give the share of draft tokens to be "
            "accepted, such as 0.8."
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidConfigError(
            f"`dtype` must be a floating dtype that models compute in, but is {dtype!r}. Use torch.bfloat16, "
            "torch.float16 or torch.float32."
        )
    if draft_quantization not in QUANTIZATIONS:
        raise InvalidConfigError(
            f"`draft_quantization` of a synthetic pair must be one of {', '.join(map(repr, QUANTIZATIONS))}, but is "
            f"{draft_quantization!r}. There is no 'auto' here: a measurement has to know what it measures."
        )


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        # Told by a try, since what makes a kind of device usable differs from one to the next.
        return torch.empty(1, device=place).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidConfigError(
            f"`device` must be one that this torch can use, but {device!r} is not ({in_short(error)}). Use 'cpu', or "
            "install a torch that supports the device."
        ) from error


def _vocab_sizes(target: Blueprint, draft: Blueprint) -> tuple[int, int]:
    sizes = tuple(blueprint.config.get_text_config(decoder=True).vocab_size for blueprint in (target, draft))
    if min(sizes) < SMALLEST_SHARED_VOCABULARY * max(sizes):
        raise IncompatibleDraftError(
            f"Target and draft must share a tokenizer, but the vocabulary of {target.name!r} has {sizes[0]} entries "
            f"and that of {draft.name!r} has {sizes[1]}. Choose two shapes of one family."
        )
    return sizes[0], sizes[1]


def _ordinary_tokens(blueprints: tuple[Blueprint, Blueprint], vocab_size: int) -> Tensor:
    """Return `[N]` ids that stand for text in both vocabularies."""
    special: set[int] = set()
    first, end = 0, vocab_size
    for blueprint in blueprints:
        for config in (blueprint.config, blueprint.config.get_text_config(decoder=True)):
            for name in vars(config):
                if name.endswith(("_token_id", "_token_index")):
                    value = getattr(config, name)
                    special.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
        if blueprint.ordinary is not None:
            first, end = max(first, blueprint.ordinary[0]), min(end, blueprint.ordinary[1])
    tokens = torch.tensor([token for token in range(first, end) if token not in special], dtype=torch.long)
    if len(tokens) < FEWEST_TOKENS:
        raise InvalidConfigError(
            f"A synthetic pair needs {FEWEST_TOKENS} ordinary tokens that both models know, but {blueprints[0].name!r} "
            f"and {blueprints[1].name!r} share {len(tokens)}. Choose shapes with larger vocabularies."
        )
    return tokens


def _refuse_too_large(pair: str, skeletons: list[PreTrainedModel], quantization: str, device: torch.device) -> None:
    size = weight_bytes(skeletons[0]) + weight_bytes(skeletons[1], quantization)
    free = free_bytes(device)
    if free is not None and size > free:
        raise InvalidConfigError(
            f"The weights of a pair must fit into the free memory, but those of {pair!r} take {in_words(size)}, and "
            f"{in_words(free)} are free on {device}. Choose smaller shapes, or free memory."
        )


# ---- weights -------------------------------------------------------------------------------------------------------


def _skeleton(blueprint: Blueprint, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model = skeleton_of(blueprint.config, dtype)
    except Exception as error:  # what a class makes of an odd configuration can raise anything
        raise InvalidConfigError(
            f"A shape must be that of a causal LM of transformers, but no model could be made of {blueprint.name!r} "
            f"({in_short(error)}). Choose another."
        ) from error
    if model.config.is_encoder_decoder:
        raise InvalidConfigError(
            f"A shape must be that of a decoder-only model, but {blueprint.name!r} has an encoder. Choose another."
        )
    return model


def _materialize(model: Any, block: Tensor, quantization: str) -> None:
    """Give a skeleton its buffers and random weights, in place; linear layers are quantized one by one."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=block.device))
    # The host computes buffers where it would draw weights; those, still on the meta device, cost nothing yet.
    with torch.random.fork_rng(devices=[]):
        model.init_weights()
    to_quantize = {name for name, _ in linear_layers(model)} if quantization != "none" else set()
    skeletal = list(model.parameters())
    made: dict[int, nn.Parameter] = {}
    # By name: a list of the modules would keep those alive that quantized ones take the place of.
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        own = list(module.named_parameters(recurse=False))
        for own_name, parameter in own:
            # One for all places of a tied weight.
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(_filled(own_name, parameter, block), parameter.requires_grad)
            setattr(module, own_name, made[id(parameter)])
        if name in to_quantize:
            model.set_submodule(name, quantized_layer(module, quantization, block.dtype))
            for _, parameter in own:
                del made[id(parameter)]
    del skeletal  # kept till here, or the id of one could become another's
    if to_quantize:
        model.config.quantization_config = bitsandbytes_config(quantization, block.dtype)
    _complete(model)


def _filled(name: str, parameter: nn.Parameter, block: Tensor) -> Tensor:
    """Return a weight's values: biases 0, other vectors (of norms) 1, matrices the block over and over."""
    weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=block.device)
    if weight.ndim < 2:
        return weight.fill_(0.0 if name.endswith("bias") else 1.0)
    flat = weight.view(-1)
    whole = len(flat) // len(block) * len(block)
    flat[:whole].view(-1, len(block)).copy_(block)
    flat[whole:].copy_(block[: len(flat) - whole])
    return weight


def _complete(model: Any) -> None:
    model.eval()
    settings = model.generation_config
    if settings.pad_token_id is None:
        ends: Any = settings.eos_token_id
        settings.pad_token_id = ends[0] if isinstance(ends, list) else ends
