"""`hf-specdec pair check` and `pair push`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairing.building import DIGEST, build_own_pairing, build_pairing, rehash, rewrite
from typer.testing import CliRunner

import models
from hf_specdec import DraftPairing
from hf_specdec.cli import app, main
from hf_specdec.pairing.schema import ModelReference


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_own_pairing(tmp_path / "pairing", target=ModelReference(id=str(models.save_tiny_model(tmp_path / "target"))))
    return tmp_path / "pairing"


def checked(runner: CliRunner, folder: Path, *options: str, code: int = 0) -> Any:
    result = runner.invoke(app, ["pair", "check", str(folder), "--json", *options])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["pair", *arguments])
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_a_sound_pairing(runner: CliRunner, folder: Path) -> None:
    values = checked(runner, folder)
    assert values["pairing"] == str(folder)
    assert values["tokenizers"] == {"target": "matches", "draft": "matches"}
    assert (values["num_files"], values["num_measurements"], values["differs"]) == (5, 2, False)
    assert [note[:10] for note in values["notes"]] == ["The target", "There is n"]
    (folder / "README.md").write_text("a card", encoding="utf-8")
    result = runner.invoke(app, ["pair", "check", str(folder)])
    assert result.exit_code == 0
    for words in ("The pairing is sound.", "target tokenizer  matches", "files checked     5", ". (draft)"):
        assert words in result.stdout
    assert "README" not in result.stdout


def test_what_cannot_be_compared_is_said(runner: CliRunner, tmp_path: Path) -> None:
    build_pairing(measurements=()).save_pretrained(tmp_path)
    values = checked(runner, tmp_path)
    assert values["tokenizers"]["target"] == "not compared: the tokenizer of org/large is not on this machine"
    assert values["draft"] == "org/small@ffffffffffff (weights/latest)"
    assert "Nothing was measured." in values["notes"]
    rewrite(tmp_path, tokenizer_fingerprint=None)
    assert checked(runner, tmp_path)["tokenizers"]["draft"] == "not compared: the pairing has no fingerprint"
    assert "files checked" not in runner.invoke(app, ["pair", "check", str(tmp_path)]).stdout


@pytest.mark.parametrize("field", ["tokenizer_fingerprint", "draft_tokenizer_fingerprint"])
def test_another_tokenizer_is_an_error(runner: CliRunner, folder: Path, field: str) -> None:
    rewrite(folder, **{field: DIGEST})
    values = checked(runner, folder, code=1)
    assert values["tokenizers"]["draft"] == "differs"
    assert values["tokenizers"]["target"] == ("differs" if field == "tokenizer_fingerprint" else "matches")
    result = runner.invoke(app, ["pair", "check", str(folder)])
    assert (result.exit_code, "not the one that the pairing was made for" in result.stdout) == (1, True)


def test_a_broken_pairing_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "draft" / "model.bin").write_bytes(b"x")
    assert "may hold pickled objects" in said(capsys, "check", str(folder))
    assert "there is none at '/no/such/folder'" in said(capsys, "check", "/no/such/folder")
    assert "may not be asked" in said(capsys, "check", "org/unknown")


def test_code_needs_the_flag(runner: CliRunner, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "draft" / "modeling.py").write_text("", encoding="utf-8")
    rehash(folder)
    assert "'modeling.py' is code" in said(capsys, "check", str(folder))
    assert checked(runner, folder, "--trust-remote-code")["num_files"] == 6


def test_push_asks_for_what_others_can_load_and_for_the_hub(
    runner: CliRunner, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    assert "its target is a path on this machine" in said(capsys, "push", str(folder), "org/name")
    rewrite(folder, target={"id": "org/large", "revision": "0" * 40})
    assert "Could not publish the repository 'org/name'" in said(capsys, "push", str(folder), "org/name")
    assert runner.invoke(app, ["pair", "push", str(tmp_path / "missing"), "org/name"]).exit_code == 2


def test_push_publishes_the_folder(runner: CliRunner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []

    def record(pairing: DraftPairing, repo_id: str, **options: Any) -> str:
        pushed.append((pairing.source, repo_id, options))
        return "https://hub/commit"

    monkeypatch.setattr(DraftPairing, "push_to_hub", record)
    result = runner.invoke(app, ["pair", "push", str(folder), "org/name", "--private", "--message", "First"])
    assert (result.exit_code, result.stdout) == (0, "https://hub/commit\n")
    [(source, repo_id, options)] = pushed
    assert (source.folder, repo_id, options) == (str(folder), "org/name", {"private": True, "commit_message": "First"})
