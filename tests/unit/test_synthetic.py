"""What a synthetic pair is made of: sizes, weights, memory, and laws that follow from the last token alone."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    EpsilonLogitsWarper,
    LlamaConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    T5Config,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.benchmark.scripted import FEWEST_TOKENS, NAME, NUM_FOLLOWERS
from hf_specdec.benchmark.shapes import SHAPES
from hf_specdec.benchmark.synthetic import make_synthetic_pair
from hf_specdec.engine.acceptance import block_verification, token_verification
from hf_specdec.engine.host import HOSTS_CACHE_NAME, filled_cache
from hf_specdec.engine.probe import probe_ragged
from hf_specdec.errors import IncompatibleDraftError, InvalidConfigError, UnsupportedGenerationError
from hf_specdec.memory import skeleton_of, weight_bytes

TINY = "tiny-target:tiny-draft"
# As the models' own pages and checkpoints count them.
PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "gemma-3-1b": 999_885_952,
}


def save_config(folder, **values):
    """Write a Llama's configuration to a folder and return its path."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaConfig(**({**sizes, "num_key_value_heads": 2, "vocab_size": 64} | values)).save_pretrained(folder)
    return str(folder)


def tiny(acceptance, dtype=torch.float32, names=TINY, **options):
    return make_synthetic_pair(names, acceptance, dtype=dtype, **options)


# ---- shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("tiny-")])
def test_a_shape_has_the_published_number_of_parameters(name):
    model = skeleton_of(SHAPES[name].config(), torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_a_folder_is_a_shape(tmp_path):
    folder = save_config(tmp_path, vocab_size=96, pad_token_id=7, bos_token_id=1, eos_token_id=[2, 3])
    pair = tiny(0.5, names=f"{folder}:{folder}")
    assert sorted(pair.token_ids.tolist()) == [0, 4, 5, 6, *range(8, 96)]
    assert pair.target.generation_config.pad_token_id == 7


# ---- weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("tiny-")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_run_and_stay_finite(name, dtype):
    model = tiny(0.5, dtype, f"{name}:tiny-draft").target
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    ran = []
    parts = [*model.model.layers, model.lm_head]
    for part in parts:
        part.register_forward_hook(lambda module, _args, output: ran.append((module, output)))
    with torch.no_grad():
        outputs = model(input_ids=torch.arange(60)[None], output_hidden_states=True)
    assert [part for part, _ in ran] == parts
    states = torch.stack(outputs.hidden_states)
    assert states.isfinite().all()
    assert (states.float().std(dim=-1) > 0).all()


def test_rotary_frequencies_are_those_of_an_ordinary_model():
    model = tiny(0.5).target
    ordinary = type(model)(copy.deepcopy(model.config))
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_the_seed_alone_decides_and_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    first, same, other = tiny(0.5, seed=3), tiny(0.5, seed=3), tiny(0.5, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.token_ids, same.token_ids)
    assert not torch.equal(first.token_ids, other.token_ids)
    for name, weight in first.draft.state_dict().items():
        assert torch.equal(weight, same.draft.state_dict()[name])
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.draft.state_dict()[weight], other.draft.state_dict()[weight])


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations returned and that are still alive; `peak` is their largest sum."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                reference = StorageWeakRef(leaf.untyped_storage())
                self.known[reference.cdata] = (reference, leaf.untyped_storage().nbytes())
        self.known = {key: value for key, value in self.known.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return result


# With the embeddings counted twice while they are being tied, or a copy in another dtype, the bound would not hold.
@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_building_takes_little_more_than_the_weights(tmp_path, quantization):
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 32_000}
    for name, num_layers in (("target", 8), ("draft", 4)):
        save_config(tmp_path / name, **sizes, num_hidden_layers=num_layers, tie_word_embeddings=True)
    with LiveBytes() as live:
        pair = make_synthetic_pair(f"{tmp_path}/target:{tmp_path}/draft", 0.8, draft_quantization=quantization)
    plain = sum(weight.nbytes for weight in pair.target.parameters())
    draft = skeleton_of(pair.draft.config if quantization == "none" else _bare(pair.draft.config), torch.bfloat16)
    total = plain + weight_bytes(draft, quantization)
    assert total <= live.peak <= 1.2 * total
    assert pair.target.lm_head.weight is pair.target.get_input_embeddings().weight


def _bare(config):
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


# ---- laws ------------------------------------------------------------------------------------------------------


def next_logits(model, tokens=None):
    """Return the logits `[T, V]` after each token of the vocabulary, or after some."""
    tokens = torch.arange(model.config.vocab_size) if tokens is None else tokens
    with torch.no_grad():
        return model(input_ids=tokens[:, None]).logits[:, 0].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_follow_from_the_last_token_alone(dtype):
    pair = tiny(0.5, dtype)
    ids = pair.prompt(3, 12)
    for model in (pair.target, pair.draft):
        law = next_logits(model, ids.flatten()).view(3, 12, -1).to(dtype)
        with torch.no_grad():
            whole = model(input_ids=ids)
            start = model(ids[:, :7])
            rest = model(input_ids=ids[:, 7:], **{HOSTS_CACHE_NAME: filled_cache(start)}, logits_to_keep=2)
            mask = (torch.arange(12) >= torch.tensor([[0], [4], [9]])).long()
            padded = model(input_ids=ids, attention_mask=mask, logits_to_keep=torch.tensor([2, 11]))
            bare = model(input_ids=ids, return_dict=False)
        assert torch.equal(whole.logits, law)
        assert torch.equal(start.logits, law[:, :7])
        assert torch.equal(rest.logits, law[:, -2:])
        assert torch.equal(padded.logits, law[:, [2, 11]])
        assert torch.equal(bare[0], law)


@pytest.mark.parametrize("acceptance", [0.0, 0.35, 0.8, 1.0])
def test_the_sampled_share_is_exact_under_every_processor(acceptance, tmp_path):
    # 40 ordinary tokens, so that each of these shares is a whole number of them.
    folder = save_config(tmp_path, vocab_size=42, bos_token_id=0, eos_token_id=1)
    pair = tiny(acceptance, names=f"{folder}:{folder}")
    after = torch.arange(42)[:, None]
    settings = [
        [],
        [TemperatureLogitsWarper(0.7)],
        [TemperatureLogitsWarper(3.0)],
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), TopPLogitsWarper(0.9)],
        [MinPLogitsWarper(0.2)],
        [EpsilonLogitsWarper(0.05)],
    ]
    for warpers in settings:
        processed = LogitsProcessorList(warpers)
        target, draft = (
            processed(after, next_logits(model)).double().softmax(-1)[2:] for model in (pair.target, pair.draft)
        )
        # Texts stay among the ordinary tokens and come to each equally often: the law is doubly stochastic.
        assert target[:, :2].sum() == draft[:, :2].sum() == 0
        assert torch.allclose(target[:, 2:].sum(dim=0), torch.ones(40, dtype=torch.float64), atol=1e-6)
        overlap = torch.minimum(target, draft).sum(dim=1)
        assert abs(overlap.mean().item() - acceptance) <= 1e-6
        assert ((overlap < 1e-6) | (overlap > 1 - 1e-6)).all()


@pytest.mark.parametrize("verify", [token_verification, block_verification])
def test_the_law_of_the_number_of_accepted_tokens_is_as_claimed(verify, tmp_path):
    """Every last token, every pair of draft tokens, weighted; whatever the uniform numbers are."""
    folder = save_config(tmp_path, vocab_size=22, bos_token_id=0, eos_token_id=1)
    pair = tiny(0.5, names=f"{folder}:{folder}")
    target, draft = (next_logits(model).softmax(-1) for model in (pair.target, pair.draft))
    agrees = (target == draft).all(dim=1)
    assert agrees[2:].sum() == 10
    outcomes = [
        (last, first, second)
        for last in range(2, 22)
        for first, second in itertools.product(range(22), repeat=2)
        if draft[last, first] * draft[first, second] > 0
    ]
    assert len(outcomes) == 20 * NUM_FOLLOWERS**2
    last, first, second = torch.tensor(outcomes).T
    weights = draft[last, first] * draft[first, second] / 20
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-6)
    claimed = agrees[last].long() * (1 + agrees[first].long())
    for uniform in (0.0, 0.5, 1 - 2**-24):
        counts, following = verify(
            torch.stack([first, second], dim=1),
            torch.stack([draft[last], draft[first]], dim=1),
            torch.stack([target[last], target[first], target[second]], dim=1),
            torch.full((len(outcomes), 2), uniform),
        )
        assert torch.equal(counts, claimed)
        before = torch.stack([last, first, second], dim=1).gather(1, counts[:, None])[:, 0]
        assert torch.allclose(following, target[before], atol=1e-6)
    # The first guess: half of the last tokens. After a step from an agreeing one, every token is still possible.
    assert weights[claimed >= 1].sum().item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_the_greedy_share_is_met_along_every_stretch_of_the_text(acceptance):
    pair = tiny(acceptance)
    target, draft = (next_logits(model).argmax(-1) for model in (pair.target, pair.draft))
    text, token = [], pair.prompt(1, 1).item()
    for _ in range(2000):
        text.append(token)
        token = int(target[token])
    assert len(set(text)) == 2000
    is_right = (target == draft)[text].double()
    assert abs(is_right.mean().item() - acceptance) <= 0.005
    # A text of a few hundred tokens comes close as well, and is not periodic.
    for stretch in is_right.split(250):
        assert abs(stretch.mean().item() - acceptance) <= 0.06
    if 0 < acceptance < 1:
        followed = is_right[1:][is_right[:-1] == 1].mean().item()
        assert abs(followed - acceptance) <= 0.05


def test_special_tokens_are_never_likely():
    pair = tiny(0.5, torch.float16)
    for model in (pair.target, pair.draft):
        logits = next_logits(model, torch.arange(100))
        assert logits.isfinite().all()
        assert (logits[:, :3] < logits[:, 3:].amin(dim=1, keepdim=True)).all()
        assert (logits.softmax(-1)[:, :3] == 0).all()


# ---- the script as a part of the model --------------------------------------------------------------------------


def test_the_script_goes_along_with_copies_and_other_dtypes():
    draft, tokens = tiny(0.5).draft, torch.arange(100)
    wanted = next_logits(draft, tokens)
    duplicate = copy.deepcopy(draft)
    assert torch.equal(next_logits(duplicate, tokens), wanted)
    getattr(duplicate, NAME).followers.zero_()
    assert not torch.equal(next_logits(duplicate, tokens), wanted)
    assert torch.equal(next_logits(draft, tokens), wanted)
    likely = wanted > 0
    assert torch.equal(next_logits(draft.to(torch.bfloat16), tokens)[likely], wanted[likely])


def test_the_forward_with_its_script_needs_no_values_of_tensors():
    """On the meta device there are none: a sync, or a shape that depends on data, would be an error."""
    pair = tiny(0.5)
    logits = pair.target.to("meta")(input_ids=torch.zeros(2, 5, dtype=torch.long, device="meta")).logits
    assert logits.shape == (2, 5, 4096)


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_script_is_three_kernels():
    law = getattr(tiny(0.5, torch.bfloat16).target, NAME)
    logits, ids = torch.zeros(2, 3, 4096, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.long)
    with Operations() as operations:
        law.write(logits, ids)
    views = {"expand", "view", "detach", "unsqueeze"}
    assert [name for name in operations.names if name not in views] == ["index", "copy_", "scatter_"]


def test_saved_weights_are_those_of_an_ordinary_model():
    model = tiny(0.5).target
    assert set(model.state_dict()) == set(type(model)(copy.deepcopy(model.config)).state_dict())


def test_embeddings_alone_are_refused():
    model = tiny(0.5).target
    with pytest.raises(UnsupportedGenerationError, match="must be given `input_ids`"):
        model(inputs_embeds=torch.zeros(1, 2, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gemma-3"])
def test_the_ragged_lane_takes_both(name, dtype):
    pair = tiny(0.5, dtype, f"{name}:tiny-draft")
    for model in (pair.target, pair.draft):
        for is_batched in (False, True):
            assert probe_ragged(model, is_batched=is_batched).is_admitted


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [-0.1, 1.5, float("nan"), "0.8", True, None])
def test_an_acceptance_out_of_range_is_refused(acceptance):
    with pytest.raises(InvalidConfigError, match="`acceptance` must be a number from 0 to 1"):
        make_synthetic_pair(TINY, acceptance)


@pytest.mark.parametrize("pair", ["llama-3-8b", "a:b:c", ":tiny-draft", "", None])
def test_a_pair_is_two_names(pair):
    with pytest.raises(InvalidConfigError, match="named by two shapes"):
        make_synthetic_pair(pair, 0.5)


def test_an_unknown_shape_is_refused_and_the_known_are_named():
    with pytest.raises(InvalidConfigError, match=r"is 'llama-9'.*qwen3-32b"):
        make_synthetic_pair("tiny-target:llama-9", 0.5)


def test_a_folder_without_a_causal_lm_is_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match=r"must hold the config\.json"):
        make_synthetic_pair(f"{tmp_path}:tiny-draft", 0.5)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_vision_model", "vocab_size": 4096}))
    with pytest.raises(InvalidConfigError, match="must be that of a causal LM"):
        make_synthetic_pair(f"{tmp_path}:tiny-draft", 0.5)
    T5Config(vocab_size=4096, d_model=16, d_ff=16, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfigError, match="must be that of a"):
        make_synthetic_pair(f"{tmp_path}:tiny-draft", 0.5)


def test_vocabularies_of_other_families_are_refused():
    with pytest.raises(IncompatibleDraftError, match="has 128256 entries and that of 'smollm2-135m' has 49152"):
        make_synthetic_pair("llama-3-8b:smollm2-135m", 0.5)


def test_too_small_a_vocabulary_is_refused(tmp_path):
    folder = save_config(tmp_path, vocab_size=FEWEST_TOKENS + 1, bos_token_id=0, eos_token_id=1)
    with pytest.raises(InvalidConfigError, match="needs 16 ordinary tokens"):
        make_synthetic_pair(f"{folder}:{folder}", 0.5)


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("hf_specdec.benchmark.synthetic.free_bytes", lambda _device: 1000)
    with pytest.raises(InvalidConfigError, match=r"1\.0 kB are free on cpu"):
        make_synthetic_pair(TINY, 0.5)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"dtype": torch.int8}, "`dtype` must be a floating dtype"),
        ({"dtype": "bfloat16"}, "`dtype` must be a floating dtype"),
        ({"device": "cuda:99"}, "`device` must be one that this torch can use"),
        ({"device": "nowhere"}, "`device` must be one that this torch can use"),
        ({"draft_quantization": "auto"}, "There is no 'auto' here"),
    ],
)
def test_other_settings_out_of_range_are_refused(options, rule):
    with pytest.raises(InvalidConfigError, match=rule):
        make_synthetic_pair(TINY, 0.5, **options)
