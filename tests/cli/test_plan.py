"""`hf-specdec plan`: memory and predicted speed from configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, LlamaConfig, MistralConfig, MixtralConfig, T5Config
from typer.testing import CliRunner

import models
from hf_specdec.cli import app, main
from hf_specdec.memory import cache_bytes, size_of, skeleton_of

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return folders with the configurations, and no weights, of shapes like Llama's 70B and 1B."""
    root = tmp_path_factory.mktemp("shapes")
    common: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "architectures": ["LlamaForCausalLM"]}
    large = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64}
    small = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    LlamaConfig(**common, **large).save_pretrained(root / "large")
    LlamaConfig(**common, **small, head_dim=64, tie_word_embeddings=True).save_pretrained(root / "small")
    return root / "large", root / "small"


def planned(runner: CliRunner, folders: tuple[Path, Path], *options: str) -> Any:
    result = runner.invoke(app, ["plan", *map(str, folders), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_large_pair_on_two_devices(runner: CliRunner, folders: tuple[Path, Path]) -> None:
    values = planned(runner, folders, "--gpu", "h100", "--num-gpus", "2", "--efficiency", "1")
    assert values["target"]["weight_bytes"] == pytest.approx(141.1e9, rel=0.002)
    assert values["target"]["cache_bytes"] == 2 * 80 * 8 * 128 * 2 * (1024 + 512)
    assert values["drafts"]["none"]["weight_bytes"] == pytest.approx(2.47e9, rel=0.002)
    assert values["drafts"]["nf4"]["weight_bytes"] < 0.5 * values["drafts"]["none"]["weight_bytes"]
    assert values["fits"]
    assert values["draft_quantization"] == "none"
    speeds = {name: own["tokens_per_second"] for name, own in values["predictions"].items()}
    # 139 GB a token at 3.35 TB/s, and a little for the cache.
    assert speeds["plain"] == pytest.approx(24.0, rel=0.01)
    assert speeds["plain"] < speeds["K = 4"] < speeds["adaptive"]
    assert values["predictions"]["plain"]["utilisation"] == pytest.approx(0.9, abs=0.01)


def test_tensors_split_over_devices_are_read_at_once(runner: CliRunner, folders: tuple[Path, Path]) -> None:
    plain = [
        planned(runner, folders, "--gpu", "h100", "--num-gpus", "2", "--parallel", parallel)["predictions"]["plain"]
        for parallel in ("layers", "tensors")
    ]
    assert plain[1]["tokens_per_second"] == pytest.approx(2 * plain[0]["tokens_per_second"])


def test_auto_takes_four_bits_where_memory_is_short_and_says_where_nothing_fits(
    runner: CliRunner, folders: tuple[Path, Path]
) -> None:
    small = (folders[1], folders[1])
    rows = {"none": "240", "nf4": "300", "nothing": "600"}
    plans = {kind: planned(runner, small, "--gpu", "a10g", "--batch-size", size) for kind, size in rows.items()}
    shared = planned(runner, small, "--gpu", "a10g", "--batch-size", "1")
    assert (shared["draft_quantization"], shared["fits"]) == ("none", True)
    for own in plans.values():
        kind = own["draft_quantization"]
        assert own["fits"] == own["drafts"][kind]["fits"]
        assert ("does not fit either" in own["draft_quantization_reason"]) is not own["fits"]
    assert not plans["nothing"]["fits"]
    printed = runner.invoke(app, ["plan", *map(str, small), "--gpu", "a10g", "--batch-size", "600"]).stdout
    assert "The pair does not fit" in printed


def test_an_asked_for_quantization_is_planned_with(runner: CliRunner, folders: tuple[Path, Path]) -> None:
    options = ["--gpu", "h100", "--num-gpus", "2"]
    speeds = {
        kind: planned(runner, folders, *options, "--draft-quantization", kind)["predictions"]["K = 4"]
        for kind in ("none", "nf4")
    }
    assert speeds["nf4"]["tokens_per_second"] > speeds["none"]["tokens_per_second"]
    assert speeds["nf4"]["memory"] < speeds["none"]["memory"]


def test_it_prints_tables_that_say_they_are_predictions(runner: CliRunner, folders: tuple[Path, Path]) -> None:
    result = runner.invoke(app, ["plan", *map(str, folders), "--gpu", "H100", "--num-gpus", "2"])
    assert result.exit_code == 0, result.output
    for words in ("Predicted, not measured", "draft, nf4", "adaptive (K = ", "141.1 GB"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "z80"], "must be one of h100"),
        ([], "must be given"),
        (["--gpu", "h100", "--acceptance", "2"], "equal to 1"),
    ],
)
def test_wrong_usage_names_the_option(
    runner: CliRunner, folders: tuple[Path, Path], options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = runner.invoke(app, ["plan", *map(str, folders), *options])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("name", ["/no/such/folder", "empty"])
def test_a_missing_configuration_is_named(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    target = name if name.startswith("/") else str(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(["plan", target, str(folders[1]), "--gpu", "h100"])
    assert raised.value.code == 1
    assert target in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BertConfig(), "could not be built or run"),
        (T5Config(), "could not be built or run"),
        (LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}), "says 'gptq'"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path], tmp_path: Path, config: Any, words: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(["plan", str(folders[1]), str(tmp_path), "--gpu", "h100"])
    assert raised.value.code == 1
    message = capsys.readouterr().err
    assert words in message
    assert len(message) < 800


def test_a_token_reads_only_its_own_experts() -> None:
    config = MixtralConfig(**TINY, num_local_experts=8, num_experts_per_tok=2)
    size = size_of(config, torch.float32)
    experts = 2 * 8 * 3 * 32 * 64
    assert size.expert_bytes == 4 * experts
    assert size.bytes_read(1) == size.read_bytes - 0.75 * 4 * experts
    assert size.bytes_read(100) == pytest.approx(size.read_bytes)
    assert size.num_parameters == size.weight_bytes // 4 - 0.75 * experts - buffer_values(config)


def buffer_values(config: Any) -> int:
    return sum(buffer.numel() for buffer in skeleton_of(config, torch.float32).buffers())


def test_all_of_a_sliding_window_is_kept() -> None:
    config = MistralConfig(**TINY, sliding_window=32)
    assert cache_bytes(skeleton_of(config, torch.float32)) == (0, 2 * 2 * 2 * 8 * 4)


def test_a_recurrent_state_does_not_grow_and_keys_and_values_do() -> None:
    recurrent = cache_bytes(skeleton_of(models.build_mamba().config, torch.float32))
    assert recurrent[0] > 0
    assert recurrent[1] == 0
    # Two layers, two heads of eight numbers, for keys and for values.
    assert cache_bytes(skeleton_of(models.build_target().config, torch.float32)) == (0, 2 * 2 * 2 * 8 * 4)


def test_a_table_that_is_only_looked_up_in_is_not_read() -> None:
    config = models.build_target().config
    untied = size_of(config, torch.float32)
    assert untied.weight_bytes - untied.read_bytes == 64 * 32 * 4
    config.tie_word_embeddings = True
    tied = size_of(config, torch.float32)
    assert tied.read_bytes == tied.weight_bytes == untied.weight_bytes - 64 * 32 * 4
