"""What `hf-specdec env MODEL` says of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, WhisperConfig, WhisperForConditionalGeneration
from typer.testing import CliRunner

import models
from hf_specdec.cli import app, main


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_env_tells_the_lanes_of_target_and_draft(runner: CliRunner, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    models.build_target().save_pretrained(target)
    models.build_mamba().save_pretrained(draft)
    command = f"env {target} --draft {draft}"
    result = runner.invoke(app, f"{command} --json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["torch"] == torch.__version__
    assert values["target"] == {
        "name": str(target),
        "class": "LlamaForCausalLM",
        "single": "ragged",
        "batch": "ragged",
        "attention": "sdpa",
        "dtype": "float32",
        "context": 512,
    }
    assert (values["draft"]["single"], values["draft"]["batch"]) == ("compatible", "compatible")
    assert "recurrent state" in values["draft"]["single_reason"]
    assert values["draft"]["context"] is None
    lines = runner.invoke(app, command).stdout.splitlines()
    assert ["target", "batch", "ragged"] in [line.split() for line in lines]


def test_env_says_why_no_lane_runs_a_model(runner: CliRunner, tmp_path: Path) -> None:
    models.build_refused().save_pretrained(tmp_path)
    record = json.loads(runner.invoke(app, f"env {tmp_path} --json").stdout)["target"]
    for key in ("single", "batch"):
        assert record[key] == "plain"
        assert "logits change" in record[f"{key}_reason"]


def test_env_looks_at_models_with_an_encoder(runner: CliRunner, tmp_path: Path) -> None:
    sizes = {"d_model": 16, "vocab_size": 64, "decoder_start_token_id": 2}
    text = T5Config(**sizes, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(text).save_pretrained(tmp_path / "text")
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    layers = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    speech = WhisperConfig(**sizes, **tokens, **layers, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8)
    WhisperForConditionalGeneration(speech).save_pretrained(tmp_path / "speech")
    for name, lane in (("text", "compatible"), ("speech", "decided at the first call")):
        result = runner.invoke(app, f"env {tmp_path / name} --json")
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)["target"]
        assert (record["single"], record["batch"]) == (lane, lane)


@pytest.mark.parametrize("kind", ["missing", "empty", "images"])
def test_env_names_what_it_cannot_look_at(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    if kind != "missing":
        (tmp_path / kind).mkdir()
    if kind == "images":
        ViTConfig().save_pretrained(tmp_path / kind)
    with pytest.raises(SystemExit) as exit_info:
        main(["env", str(tmp_path / kind)])
    assert exit_info.value.code == 1
    output = capsys.readouterr()
    assert not output.out
    message = output.err.splitlines()[-1]
    assert all(part in message for part in ("looks at a language model", str(tmp_path / kind), "Check the"))
