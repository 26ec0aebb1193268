"""`generate(draft_model=<pairing>)`: the right draft with the right settings, and the target's own text."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.comparing import assert_same_ids
from pairing.building import (
    BATCH,
    COMMITS,
    DIGEST,
    KINDS,
    build_kinds,
    build_pairing,
    rehash,
    rewrite,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import hf_specdec
import models
from hf_specdec import (
    DraftLoadError,
    DraftPairing,
    IncompatibleDraftError,
    InvalidConfigError,
    InvalidPairingError,
    PairingNotFoundError,
    SpeculationWarning,
    SpeculativeConfig,
    matching,
)
from hf_specdec.demo import DEMO_FOLDER, load_demo_pair
from hf_specdec.loading import quantization_of
from hf_specdec.pairing import resolve
from hf_specdec.pairing.fingerprint import fingerprint
from hf_specdec.pairing.folder import read_folder
from hf_specdec.pairing.resolve import CuratedPair, curated_pairs, find_pairing, id_of
from hf_specdec.pairing.schema import ModelReference


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return pairings with three kinds of own draft."""
    return build_kinds(tmp_path_factory.mktemp("pairings"))


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(folders["noisy"], tmp_path / "pairing")
    return tmp_path / "pairing"


@pytest.fixture
def model() -> Any:
    return hf_specdec.enable(models.build_target())


def run(model: Any, draft_model: Any, config: Any = None, **options: Any) -> Any:
    if config is not None:
        options["speculative_config"] = config
    return model.generate(
        **BATCH,
        max_new_tokens=12,
        do_sample=False,
        draft_model=draft_model,
        return_dict_in_generate=True,
        **options,
    )


def settings_with(pairing: DraftPairing, config: Any = None, *, keyword: Any = None) -> SpeculativeConfig:
    target = models.build_target()
    checked = SpeculativeConfig.from_user(config, num_draft_tokens=keyword)
    says_length = matching.says_length(keyword, config)
    return matching.match_draft(target, pairing, checked, says_length=says_length).config


# ---- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["folder", "path", "pairing"])
def test_the_text_is_the_targets(model: Any, folders: dict[str, Path], kind: str, form: str) -> None:
    given = {"folder": str, "path": Path, "pairing": DraftPairing.from_pretrained}[form](folders[kind])
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    output = run(model, given)
    assert_same_ids(output.sequences, wanted)
    stats = output.speculation
    assert stats.num_draft_forwards > 0
    assert stats.draft_pairing.startswith(f"{folders[kind]}; tokenizers were not compared")


def test_sampling_is_seeded_as_with_the_draft_itself(model: Any, folders: dict[str, Path]) -> None:
    draft = AutoModelForCausalLM.from_pretrained(folders["noisy"] / "draft")
    outputs = []
    for given in (draft, folders["noisy"]):
        torch.manual_seed(3)
        outputs.append(
            model.generate(**BATCH, max_new_tokens=12, do_sample=True, draft_model=given, num_draft_tokens=3)
        )
    assert_same_ids(*outputs)


def test_a_draft_on_this_machine(model: Any, folders: dict[str, Path]) -> None:
    where = [
        ModelReference(id=str(folders["noisy"] / "draft")),
        ModelReference(id=str(folders["noisy"]), subfolder="draft"),
    ]
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    for draft in where:
        pairing = build_pairing(draft=draft, draft_quantization="none", tokenizer_fingerprint=None)
        output = run(model, pairing)
        assert_same_ids(output.sequences, wanted)
        assert output.speculation.draft_pairing == f"{draft.id}; its tokenizer is not known"
    gone = build_pairing(draft=ModelReference(id="/no/such/folder"), tokenizer_fingerprint=None)
    with pytest.raises(DraftLoadError, match="there is no folder '/no/such/folder'"):
        run(model, gone)


def test_everything_is_read_once_per_target(model: Any, folder: Path) -> None:
    first = matching.match_draft(model, folder, SpeculativeConfig()).draft
    rewrite(folder, draft_quantization="int4")
    assert matching.match_draft(model, folder, SpeculativeConfig()).draft is first
    known = weakref.ref(first)
    del first
    hf_specdec.disable(model)
    gc.collect()
    assert known() is None
    with pytest.raises(InvalidPairingError, match="but is 'int4'"):
        hf_specdec.enable(model).generate(**BATCH, max_new_tokens=2, draft_model=str(folder))
    hf_specdec.enable()
    hf_specdec.disable()
    assert not matching._found


def test_a_hub_that_was_away_is_asked_again(
    model: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [PairingNotFoundError("away"), read_folder(folders["noisy"])]

    def answer(*_: object, **__: object) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(resolve, "fetch_if_pairing", answer)
    with pytest.raises(DraftLoadError, match="could not be loaded"):
        run(model, "org/pairing")
    assert run(model, "org/pairing").speculation.draft_pairing.startswith(str(folders["noisy"]))
    run(model, "org/pairing")
    assert not answers


def test_a_plain_model_is_still_a_plain_model(model: Any, folders: dict[str, Path]) -> None:
    output = run(model, str(folders["noisy"] / "draft"))
    assert output.speculation.draft_pairing == ""
    with pytest.raises(DraftLoadError, match="could not be loaded"):
        run(model, "no-such-organisation/no-such-model")
    with pytest.raises(DraftLoadError, match="could not be loaded"):
        run(model, "no such name")


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairing(folders: dict[str, Path]) -> DraftPairing:
    draft = ModelReference(id=str(folders["noisy"] / "draft"))
    return build_pairing(draft=draft, draft_quantization="nf4", tokenizer_fingerprint=None)


def test_the_pairing_decides_where_the_caller_said_nothing(pairing: DraftPairing) -> None:
    for nothing in (None, {}, SpeculativeConfig(), {"strict": True}):
        config = settings_with(pairing, nothing)
        assert (config.draft_quantization, config.num_draft_tokens) == ("nf4", "auto")
        assert config.controller_hints == pairing.controller_hints
    fixed = build_pairing(draft=pairing.draft, controller_hints=None, num_draft_tokens=7, tokenizer_fingerprint=None)
    assert settings_with(fixed).num_draft_tokens == 7
    assert settings_with(fixed, SpeculativeConfig(verification="token")).num_draft_tokens == 7


def test_the_caller_wins(pairing: DraftPairing) -> None:
    assert settings_with(pairing, {"draft_quantization": "none"}).draft_quantization == "none"
    assert settings_with(pairing, keyword=3).controller_hints is None
    assert settings_with(pairing, keyword=3).num_draft_tokens == 3
    own = {"survival": [0.5]}
    assert settings_with(pairing, {"controller_hints": own}).controller_hints == own
    fixed = build_pairing(draft=pairing.draft, controller_hints=None, num_draft_tokens=7, tokenizer_fingerprint=None)
    assert settings_with(fixed, keyword=3).num_draft_tokens == 3
    assert settings_with(fixed, keyword="auto").num_draft_tokens == "auto"
    assert settings_with(fixed, {"num_draft_tokens": "auto"}).num_draft_tokens == "auto"
    assert settings_with(fixed, {"controller_hints": own}).num_draft_tokens == "auto"


def test_the_drafts_quantization_and_length_are_used(model: Any, folder: Path) -> None:
    rewrite(folder, draft_quantization="nf4", controller_hints=None, num_draft_tokens=4)
    stats = run(model, folder).speculation
    assert (stats.draft_quantization, stats.draft_quantization_reason) == ("nf4", "asked for")
    assert max(record.num_draft_tokens for record in stats.rounds) == 4
    assert stats.controller_hints is None
    stats = run(model, folder, {"draft_quantization": "none"}, num_draft_tokens=2).speculation
    assert stats.draft_quantization == "none"
    assert max(record.num_draft_tokens for record in stats.rounds) == 2


def test_a_revision_is_for_names(model: Any, pairing: DraftPairing) -> None:
    for given in (pairing, "auto"):
        with pytest.raises(InvalidConfigError, match="`draft_revision` is for a draft or pairing that is given by"):
            run(model, given, {"draft_revision": "main"})


def test_a_draft_that_was_saved_in_four_bits(model: Any, folder: Path) -> None:
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", quantization_config=options, device_map={"": "cpu"})
    draft.save_pretrained(folder / "draft")
    rehash(folder)
    rewrite(folder, draft_quantization="nf4")
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    output = run(model, folder)
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.draft_quantization_reason == "the checkpoint is quantized like that"
    assert quantization_of(matching.match_draft(model, folder, SpeculativeConfig()).draft)[0] == "nf4"


# ---- does it belong to the target? ---------------------------------------------------------------------------------


def test_the_tokenizer_given_to_generate_is_compared(model: Any, folder: Path) -> None:
    assert "were not compared, since the target's was not found" in run(model, folder).speculation.draft_pairing
    output = run(model, folder, tokenizer=models.build_tokenizer())
    assert output.speculation.draft_pairing == f"{folder}; the tokenizer is the pairing's"
    other = hf_specdec.enable(models.build_target())
    with pytest.raises(IncompatibleDraftError, match=r"was made for sha256:\w+ \(org/large.*has sha256") as caught:
        run(other, folder, tokenizer=models.build_byte_tokenizer())
    for tokenizer in (models.build_tokenizer(), models.build_byte_tokenizer()):
        assert fingerprint(tokenizer) in str(caught.value)
    assert "of an unknown kind" in run(other, folder, tokenizer=object()).speculation.draft_pairing


def test_a_wrong_tokenizer_does_not_pass_after_a_right_one(model: Any, folder: Path) -> None:
    tokenizer = models.build_tokenizer()
    for _ in range(2):
        assert run(model, folder, tokenizer=tokenizer).speculation.draft_pairing.endswith("is the pairing's")
    with pytest.raises(IncompatibleDraftError, match="of this target has sha256"):
        run(model, folder, tokenizer=models.build_byte_tokenizer())


def test_the_tokenizer_beside_the_target_is_compared(folder: Path, tmp_path: Path) -> None:
    models.save_tiny_model(tmp_path / "target")
    model = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(tmp_path / "target"))
    assert run(model, folder).speculation.draft_pairing.endswith("the tokenizer is the pairing's")
    rewrite(folder, tokenizer_fingerprint=DIGEST)
    hf_specdec.enable(hf_specdec.disable(model))
    with pytest.raises(IncompatibleDraftError, match=f"was made for {DIGEST}"):
        run(model, folder)


def test_another_target_is_told_once(model: Any, folder: Path) -> None:
    model.config._name_or_path = "org/another"
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    with pytest.warns(SpeculationWarning, match="was made for org/large, but the target is org/another") as caught:
        output = run(model, folder)
    assert caught[0].filename == __file__
    assert_same_ids(output.sequences, wanted)
    run(model, folder)


@pytest.mark.parametrize("name", ["org/large", "Org/Large-AWQ", "org/large-GPTQ-Int4", "", "/models/some-folder"])
def test_the_same_target_under_another_name_is_not(model: Any, folder: Path, name: str) -> None:
    model.config._name_or_path = name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, folder)


def test_a_draft_without_the_targets_vocabulary(model: Any, tmp_path: Path) -> None:
    models.build_target(vocab_size=400).save_pretrained(tmp_path)
    pairing = build_pairing(draft=ModelReference(id=str(tmp_path)), tokenizer_fingerprint=None)
    with pytest.raises(IncompatibleDraftError, match="the draft's has 400"):
        run(model, pairing)


# ---- "auto" --------------------------------------------------------------------------------------------------------


def test_the_curated_list_is_well_formed() -> None:
    pairs = curated_pairs()
    assert len({pair.target for pair in pairs}) == len(pairs) >= 20
    for pair in pairs:
        found = find_pairing(pair.target)
        assert (found.target.id, found.draft.id) == (pair.target, pair.draft)
        assert found.target.is_on_hub
        assert found.draft.is_on_hub
        assert pair.target != pair.draft


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-72B-Instruct",
        "qwen/qwen2.5-72b-instruct",
        "Qwen/Qwen2.5-72B-Instruct-AWQ",
        "somebody/Qwen2.5-72B-Instruct-GPTQ-Int4",
        "/models/Qwen2.5-72B-Instruct",
        "/models/qwen2.5-72b-instruct-fp8",
        f"/home/x/.cache/huggingface/hub/models--Qwen--Qwen2.5-72B-Instruct/snapshots/{COMMITS[0]}",
    ],
)
def test_names_of_a_curated_target(name: str) -> None:
    assert find_pairing(name).draft.id == "Qwen/Qwen2.5-0.5B-Instruct"


def test_an_older_name_of_a_curated_target() -> None:
    assert find_pairing("meta-llama/Meta-Llama-3.1-70B-Instruct").draft.id == "meta-llama/Llama-3.2-1B-Instruct"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "org/unknown",
            r"Tried: the \d+ bundled pairs \(for 'org/unknown'\); the Hub \(Could not fetch.*HF_HUB_OFFLINE",
        ),
        ("/models/unknown", r"for '/models/unknown'. Tried: .*; not the Hub, since the target is a local folder"),
        ("", "not the Hub, since the target is a local folder whose Hub id is unknown"),
        ("somebody/Qwen2.5-72B-Instruct", "bundled pairs"),
    ],
)
def test_nothing_found_says_where_it_looked(model: Any, name: str, words: str) -> None:
    model.config._name_or_path = name
    with pytest.raises(PairingNotFoundError, match=words) as caught:
        run(model, "auto")
    assert str(caught.value).endswith("Pass a small model of the target's family as `draft_model`.")


def test_the_bundled_target_finds_its_draft() -> None:
    pair = load_demo_pair(num_parameters=0)
    inputs = pair.tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
    wanted = pair.target.generate(**inputs, max_new_tokens=16, do_sample=False)
    output = hf_specdec.enable(pair.target).generate(
        **inputs, max_new_tokens=16, do_sample=False, draft_model="auto", return_dict_in_generate=True
    )
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.draft_pairing.startswith(str(DEMO_FOLDER / "draft"))
    assert sum(output.speculation.acceptance_histogram) > 0


def test_a_curated_draft_is_loaded(model: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = CuratedPair(target="org/large", draft=str(folders["noisy"] / "draft"))
    monkeypatch.setattr(resolve, "curated_pairs", lambda: (pair,))
    model.config._name_or_path = "org/large"
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    assert_same_ids(run(model, "auto").sequences, wanted)


def test_ids_of_cached_models() -> None:
    assert id_of("org/name") == "org/name"
    assert id_of("/cache/models--org--name/snapshots/x") == "org/name"
    assert id_of("/cache/models--gpt2/snapshots/x") == "gpt2"
    assert id_of("/cache/models--a--b--c/x") is None
    assert id_of("not an id") is None


# ---- without enabling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_enabled", [False, True])
def test_generate_works_without_enabling(folders: dict[str, Path], *, is_enabled: bool) -> None:
    model: Any = models.build_target()
    if is_enabled:
        hf_specdec.enable(model)
    kind = type(model)
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    output = hf_specdec.generate(
        model, inputs=None, streamer=None, **BATCH, max_new_tokens=12, do_sample=False, draft_model=folders["noisy"]
    )
    assert_same_ids(output, wanted)
    assert type(model) is kind
    assert_same_ids(hf_specdec.generate(model, **BATCH, max_new_tokens=12, do_sample=False), wanted)


def test_the_folders_json_says_what_was_saved(folder: Path) -> None:
    values = json.loads((folder / "draft_pairing.json").read_text(encoding="utf-8"))
    assert values["tokenizer_fingerprint"] == fingerprint(AutoTokenizer.from_pretrained(folder / "draft"))
