"""`hf-specdec pair create`: what it measures, what it writes, and what it refuses before any work."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_specdec
import models
from hf_specdec import DraftPairing, InvalidConfigError, SpecDecError
from hf_specdec.benchmark import pairs
from hf_specdec.cli import app, main, pair_create
from hf_specdec.cli.whole_folder import whole_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "make_a_pairing.py"
QUICK = ["--max-new-tokens", "12", "--repeats", "1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = models.build_target()
    tokenizer = models.build_tokenizer()
    for name, model in {"target": target, **models.build_drafts(target)}.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "prompts.txt").write_text("hello there\nonce upon\n", encoding="utf-8")
    return {name: root / name for name in ("target", "identical", "unrelated", "noisy", "prompts.txt")}


def arguments(folders: dict[str, Path], output: Path, *more: str, draft: str = "noisy") -> list[str]:
    pair = ["--model", str(folders["target"]), "--draft", str(folders[draft]), "--output", str(output)]
    return ["pair", "create", *pair, *QUICK, "--prompts", str(folders["prompts.txt"]), *more]


def created(folders: dict[str, Path], output: Path, *more: str, draft: str = "noisy") -> Any:
    result = CliRunner().invoke(app, arguments(folders, output, *more, "--json", draft=draft))
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def stored(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a pairing with a constant draft length and its draft in 4 bits, which tests may copy."""
    folder = tmp_path_factory.mktemp("pairings") / "stored"
    more = ["--save-draft", "--draft-quantization", "nf4", "--num-draft-tokens", "3"]
    result = CliRunner().invoke(app, arguments(folders, folder, *more, "--repo-id", "me/pair", "--license", "mit"))
    assert result.exit_code == 0, (result.output, result.exception)
    (folder.parent / "stdout").write_text(result.stdout, encoding="utf-8")
    (folder.parent / "stderr").write_text(result.stderr, encoding="utf-8")
    return folder


# ---- what is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["identical", "unrelated", "noisy"])
def test_a_pairing_says_what_was_measured(folders: dict[str, Path], tmp_path: Path, draft: str) -> None:
    values = created(folders, tmp_path / "new" / "pairing", "--num-draft-tokens", "3", draft=draft)
    pairing = DraftPairing.from_pretrained(tmp_path / "new" / "pairing")
    assert values["pairing"] == json.loads(pairing.to_json())
    assert pairing.target.id == str(folders["target"].resolve())
    assert pairing.draft.id == str(folders[draft].resolve())
    assert pairing.tokenizer_fingerprint is not None
    assert pairing.draft_tokenizer_fingerprint is None
    assert pairing.controller_hints is None
    (measurement,) = pairing.measurements
    assert (measurement.workload, measurement.num_prompts, measurement.num_new_tokens) == ("prompts", 2, 12)
    assert (measurement.num_draft_tokens, measurement.temperature, measurement.dtype) == (3, 0.0, "float32")
    assert measurement.draft_quantization == "none"
    assert measurement.versions["hf_specdec"] == hf_specdec.__version__
    assert measurement.versions["torch"] == torch.__version__
    rates = {"identical": (1.0, 1.0), "unrelated": (0.0, 0.4), "noisy": (0.1, 1.0)}
    low, high = rates[draft]
    assert low <= measurement.acceptance_rate <= high
    # The last round drafts fewer where fewer tokens are left to write.
    assert 1.0 <= measurement.mean_acceptance_length <= 1 + 3 * measurement.acceptance_rate + 1e-3
    assert (measurement.mean_acceptance_length > 3) == (draft == "identical")
    assert values["workloads"]["prompts"]["num_outputs"] == 2
    assert values["workloads"]["prompts"]["num_differing_outputs"] == [0]


def test_the_adaptive_length_comes_with_hints_and_with_a_constant_one(folders: dict[str, Path], tmp_path: Path) -> None:
    created(folders, tmp_path / "pairing", draft="identical")
    pairing = DraftPairing.from_pretrained(tmp_path / "pairing")
    assert [own.num_draft_tokens for own in pairing.measurements] == ["auto", 4]
    assert pairing.measurements[1].acceptance_rate == 1.0
    assert pairing.num_draft_tokens == "auto"
    assert pairing.controller_hints is not None
    assert len(pairing.controller_hints["survival"]) == 16


def test_the_folder_is_a_draft_that_gives_the_text_of_plain_decoding(
    folders: dict[str, Path], stored: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(stored, tmp_path / "elsewhere")
    pairing = DraftPairing.from_pretrained(moved)
    assert (pairing.draft.id, pairing.draft.subfolder) == (".", "draft")
    assert {"draft/config.json", "draft/model.safetensors", "draft/tokenizer.json"} <= set(pairing.files)
    assert pairing.measurements[0].draft_quantization == "nf4"
    target: Any = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(folders["target"]))
    inputs = models.build_tokenizer()("hello there", return_tensors="pt", return_token_type_ids=False)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    wanted = target.generate(**inputs, **settings).sequences
    for name in (pairing, str(moved)):
        output = target.generate(**inputs, **settings, draft_model=name)
        assert torch.equal(output.sequences, wanted)
        assert output.speculation.draft_quantization == "nf4"
        assert output.speculation.draft_quantization_reason == "the checkpoint is quantized like that"
        assert max(output.speculation.draft_lengths) == 3
    recipe = moved / "custom_generate" / "generate.py"
    assert "def generate(" in recipe.read_text(encoding="utf-8")


def test_another_tokenizer_is_named_and_said(folders: dict[str, Path], tmp_path: Path) -> None:
    other = shutil.copytree(folders["noisy"], tmp_path / "other")
    values = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    options = arguments({**folders, "noisy": other}, tmp_path / "pairing", "--num-draft-tokens", "2")
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "The draft's tokenizer is not the target's" in result.stderr
    pairing = DraftPairing.from_pretrained(tmp_path / "pairing")
    assert pairing.draft_tokenizer_fingerprint not in (None, pairing.tokenizer_fingerprint)


def test_sampled_workloads_are_measured_and_not_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    values = created(
        folders, tmp_path / "pairing", "--temperature", "0.7", "--num-draft-tokens", "2", "--workload-name", "chat"
    )
    assert list(values["workloads"]) == ["chat"]
    assert values["workloads"]["chat"]["num_differing_outputs"] is None
    assert values["pairing"]["measurements"][0]["temperature"] == 0.7


def test_conversations_are_put_in_the_chat_template(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folders["target"], target)
    tokenizer = models.build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    tokenizer.save_pretrained(target)
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "hello"}\n', encoding="utf-8")
    more = ["--prompts", str(prompts), "--num-draft-tokens", "2"]
    seen = []
    interleaved = pairs.interleaved

    def watched(model: Any, inputs: Any, *others: Any, **settings: Any) -> Any:
        seen.append(inputs)
        return interleaved(model, inputs, *others, **settings)

    monkeypatch.setattr(pairs, "interleaved", watched)
    values = created({**folders, "target": target}, tmp_path / "pairing", *more)
    assert [tokenizer.decode(one["input_ids"][0]) for one in seen[-1]] == ["hi:", "hello"]
    assert values["workloads"]["own"]["num_outputs"] == 2


def test_the_card_carries_the_measured_figures(folders: dict[str, Path], stored: Path) -> None:
    card = ModelCard((stored / "README.md").read_text(encoding="utf-8"))
    (measurement,) = DraftPairing.from_pretrained(stored).measurements
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found["acceptance_rate"] == measurement.acceptance_rate
    assert found["speed_up"] == measurement.speed_up
    assert card.data.license == "mit"
    assert 'draft_model="me/pair"' in card.text
    assert str(folders["target"].parent) not in str(card)


def test_people_get_a_table_and_a_warning_of_local_folders(stored: Path) -> None:
    stdout, stderr = ((stored.parent / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert "prompts" in stdout
    assert "equal" in stdout
    assert "Plain decoding against itself: prompts" in stdout
    assert f"draft_model='{stored}'" in stdout
    assert "The target is a local folder, so nobody else can load this pairing" in stderr
    assert "The draft is" not in stderr


@pytest.mark.slow
def test_the_example_makes_and_uses_a_pairing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    folder = example["DEMO_FOLDER"]
    example["main"](str(folder / "target"), str(folder / "draft"), tmp_path / "pairing")
    text = capsys.readouterr().out
    pairing = DraftPairing.from_pretrained(tmp_path / "pairing")
    assert [(own.workload, own.num_draft_tokens) for own in pairing.measurements] == [
        ("prompts", "auto"),
        ("prompts", 4),
    ]
    assert text.count("24 new tokens") == 2


# ---- names on the Hub ----------------------------------------------------------------------------------------------


def test_a_hub_id_is_pinned_to_the_commit_that_it_was_loaded_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: models.build_tokenizer())
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: SimpleNamespace(_commit_hash="a" * 40))
    _, reference = pair_create._looked_up("org/model", trust_remote_code=False)
    assert (reference.id, reference.revision) == ("org/model", "a" * 40)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: SimpleNamespace())
    with pytest.raises(ValueError, match="which one 'org/model' was loaded from is not known"):
        pair_create._looked_up("org/model", trust_remote_code=False)


# ---- what is refused -----------------------------------------------------------------------------------------------


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> BaseException:
    """Return the error of a call, which must come before any model is loaded."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError | OSError), result.exception
    return result.exception


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "./nowhere"], "there is no folder './nowhere'"),
        (["--draft", "/nowhere/at/all"], "there is no folder '/nowhere/at/all'"),
        (["--model", "org/unknown-model"], "'org/unknown-model' could not be loaded as one"),
        (["--prompts", "/nowhere.txt"], "there is no file"),
        (["--repo-id", "a/b/c"], "`--repo-id` must be a Hub id"),
        (["--num-draft-tokens", "300"], "must be between 1 and 256"),
        (["--workload-name", ""], "`workload` must be a non-empty string"),
    ],
)
def test_wrong_options_are_refused_before_any_work(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    error = refused(arguments(folders, tmp_path / "pairing", *more), monkeypatch)
    assert message in str(error)
    assert isinstance(error, InvalidConfigError) == ("256" in message)
    assert list(tmp_path.iterdir()) == []


def test_a_name_for_the_bundled_prompts_is_wrong_usage(folders: dict[str, Path], tmp_path: Path) -> None:
    options = arguments(folders, tmp_path / "pairing", "--prompts", "bundled", "--workload-name", "mine")
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert "is for a file of prompts" in result.output


def test_a_folder_with_something_else_stays(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.txt").write_text("precious", encoding="utf-8")
    for more in ([], ["--overwrite"]):
        assert "holds files that are no pairing's" in str(refused(arguments(folders, output, *more), monkeypatch))
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    assert "is no folder" in str(refused(arguments(folders, output / "thesis.txt"), monkeypatch))


def test_a_pairing_is_replaced_only_when_asked(folders: dict[str, Path], stored: Path, tmp_path: Path) -> None:
    output = shutil.copytree(stored, tmp_path / "pairing")
    with pytest.MonkeyPatch.context() as patch:
        assert "or give `--overwrite`" in str(refused(arguments(folders, output), patch))
        own = arguments({**folders, "noisy": output / "draft"}, output, "--overwrite")
        assert "must not remove a model that is measured" in str(refused(own, patch))
    assert (output / "draft").is_dir()
    created(folders, output, "--overwrite", "--num-draft-tokens", "2")
    assert DraftPairing.from_pretrained(output).num_draft_tokens == 2
    assert not (output / "draft").exists()
    assert list(tmp_path.iterdir()) == [output]


def test_an_error_on_the_command_line_is_one_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments(folders, tmp_path / "pairing", "--draft", "./nowhere"))
    assert raised.value.code == 1
    assert capsys.readouterr().err.startswith(
        "hf-specdec: `hf-specdec pair create` measures two causal language models"
    )


# ---- a folder is whole or not there --------------------------------------------------------------------------------


def test_a_failure_while_writing_leaves_what_was_there(
    folders: dict[str, Path], stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = shutil.copytree(stored, tmp_path / "pairing")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    monkeypatch.setattr(pair_create, "_write_card", lambda *_, **__: 1 / 0)
    result = CliRunner().invoke(app, arguments(folders, output, "--overwrite", "--num-draft-tokens", "2"))
    assert isinstance(result.exception, ZeroDivisionError)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == [output]


def test_a_draft_that_fails_is_not_reported_as_if_it_had_drafted(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folders["noisy"], broken)
    draft: Any = AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        draft.lm_head.weight.fill_(float("nan"))
    draft.save_pretrained(broken)
    result = CliRunner().invoke(app, arguments({**folders, "noisy": broken}, tmp_path / "pairing"))
    assert isinstance(result.exception, SpecDecError)
    assert list(tmp_path.iterdir()) == [broken]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with whole_folder(tmp_path / "a" / "b") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with whole_folder(tmp_path / "folder") as folder:
            (folder / name).touch()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_interruption_while_folders_change_places_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pairing").mkdir()
    (tmp_path / "pairing" / "old.txt").write_text("old", encoding="utf-8")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.cli.whole_folder.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "pairing") as folder:
        (folder / "new.txt").write_text("new", encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["pairing"]
    assert (tmp_path / "pairing" / "old.txt").read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize("name", ["thesis.txt", "photos"])
def test_what_lies_beside_a_pairing_is_not_removed(
    folders: dict[str, Path], stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = Path(shutil.copytree(stored, tmp_path / "pairing"))
    (folder / name).mkdir() if name == "photos" else (folder / name).write_text("mine", encoding="utf-8")
    error = refused(arguments(folders, folder, "--overwrite"), monkeypatch)
    assert f"there is {name!r}, too" in str(error)
    assert (folder / name).exists()


def test_a_place_that_cannot_be_written_is_told_before_measuring(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(arguments(folders, tmp_path / ("x" * 250)), monkeypatch)
    assert "nothing can be made" in str(error)


def test_weights_can_be_read_by_others(stored: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in (stored / "draft").iterdir()} == {0o644}
