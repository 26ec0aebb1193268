"""The command line: what goes to stdout, what to stderr, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import models
from hf_specdec.cli import app, main
from hf_specdec.cli.comparison import Comparison, TimedRun
from hf_specdec.cli.painting import IncrementalDecoder, RoundWriter, TokenWriter, token_kinds
from hf_specdec.demo import DEMO_FOLDER
from hf_specdec.metrics import RoundRecord

COMMANDS = ["demo", "generate", "simulate", "env", "pair"]

needs_weights = pytest.mark.skipif(
    not (DEMO_FOLDER / "draft" / "model.safetensors").is_file(), reason="the demo pair has not been trained yet"
)


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_tiny_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "draft"
    models.build_noisy(models.build_target()).save_pretrained(folder)
    models.build_tokenizer().save_pretrained(folder)
    return folder


def plain_text(prompt: str, num_tokens: int) -> str:
    target, tokenizer = models.build_target(), models.build_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def round_record(num_draft_tokens: int, num_accepted: int, committed: tuple[int, ...]) -> RoundRecord:
    return RoundRecord(
        num_draft_tokens=num_draft_tokens,
        rows=(0,),
        num_accepted_tokens=(num_accepted,),
        num_evaluated_tokens=(min(num_accepted + 1, num_draft_tokens),),
        committed_token_ids=(committed,),
        draft_seconds=0.0,
        verify_seconds=0.0,
        round_seconds=0.0,
    )


# ---- help and environment --------------------------------------------------------------------------------------


def test_help_lists_every_command(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_env_names_versions_and_machine(runner: CliRunner) -> None:
    values = json.loads(runner.invoke(app, ["env", "--json"]).stdout)
    assert values["torch"] == torch.__version__
    assert values["num_threads"] == torch.get_num_threads()
    assert "cpu_capability" in runner.invoke(app, ["env"]).stdout


# ---- generate --------------------------------------------------------------------------------------------------


def test_generate_streams_the_text_of_plain_decoding(
    runner: CliRunner, target_folder: Path, draft_folder: Path
) -> None:
    result = runner.invoke(
        app,
        f"generate --model {target_folder} --draft {draft_folder} --prompt hello --max-new-tokens 24 --temperature 0",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_text("hello", 24) + "\n"
    assert "tokens/s" in result.stderr


def test_generate_stores_the_draft_as_asked(runner: CliRunner, target_folder: Path, draft_folder: Path) -> None:
    command = f"generate --model {target_folder} --prompt hello --max-new-tokens 12 --temperature 0 --json"
    result = runner.invoke(app, f"{command} --draft {draft_folder} --draft-quantization nf4")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["text"] == plain_text("hello", 12)
    assert record["speculation"]["draft_quantization"] == "nf4"
    for wrong in (f"--draft {draft_folder} --draft-quantization int4", "--draft-quantization nf4"):
        refused = runner.invoke(app, f"{command} {wrong}")
        assert refused.exit_code == 2
        assert "--draft-quantization" in refused.output


def test_generate_without_draft_decodes_plainly(runner: CliRunner, target_folder: Path) -> None:
    result = runner.invoke(
        app, f"generate --model {target_folder} --prompt hello --max-new-tokens 9 --temperature 0 --json"
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["text"] == plain_text("hello", 9)
    assert record["num_new_tokens"] == len(record["token_ids"]) == 9
    assert record["draft"] is record["speculation"] is record["comparison"] is None


def test_generate_reads_the_prompt_from_stdin(runner: CliRunner, target_folder: Path) -> None:
    command = f"generate --model {target_folder} --max-new-tokens 8 --temperature 0"
    result = runner.invoke(app, command, input="from a pipe")
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_text("from a pipe", 8) + "\n"


def test_generate_reads_the_prompt_from_a_file(runner: CliRunner, target_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file", encoding="utf-8")
    command = f"generate --model {target_folder} --prompt-file {file} --max-new-tokens 8 --temperature 0"
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_text("from a file", 8) + "\n"


def test_generate_compares_with_plain_decoding(runner: CliRunner, target_folder: Path, draft_folder: Path) -> None:
    command = (
        f"generate --model {target_folder} --draft {draft_folder} --prompt hello --max-new-tokens 20 "
        "--temperature 0 --num-draft-tokens 3 --compare --json"
    )
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["comparison"]["is_equal"] is True
    assert record["speculation"]["num_rounds"] > 0
    assert set(record["speculation"]["draft_lengths"]) <= {0, 1, 2, 3}
    assert "the outputs are equal" in result.stderr


def test_generate_repeats_itself_with_a_seed(runner: CliRunner, target_folder: Path, draft_folder: Path) -> None:
    command = f"generate --model {target_folder} --draft {draft_folder} --prompt hello --max-new-tokens 16 "
    first, second, other = (
        runner.invoke(app, f"{command} --temperature 1.5 --top-k 0 --seed {seed}").stdout for seed in (1, 1, 2)
    )
    assert first == second != other


def test_generate_applies_a_chat_template(runner: CliRunner, draft_folder: Path, tmp_path: Path) -> None:
    folder = models.save_tiny_model(tmp_path / "chat")
    tokenizer = models.build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}bot: "
    tokenizer.save_pretrained(folder)
    command = f"generate --model {folder} --prompt hello --max-new-tokens 8 --temperature 0"
    assert runner.invoke(app, command).stdout == plain_text("user: hello\nbot: ", 8) + "\n"
    assert runner.invoke(app, f"{command} --no-chat").stdout == plain_text("hello", 8) + "\n"


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--prompts", "poems"], "'poems'"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "--prompt", "hello"], "--model"),
        (["generate", "--model", "m", "--prompt", "hello", "--compare"], "--compare"),
        (["generate", "--model", "m", "--prompt", ""], "must not be empty"),
        (["generate", "--model", "m", "--prompt", "hello", "--prompt-file", __file__], "--prompt-file"),
        (["generate", "--model", "m", "--prompt-file", "no-such-file"], "no-such-file"),
        (["env", "--draft", "d"], "MODEL"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_wrong_usage_ends_with_code_2(runner: CliRunner, arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert not result.stdout
    assert message in result.stderr


@pytest.mark.parametrize("command", ["generate --model x", "demo"])
@pytest.mark.parametrize("length", ["0", "-3", "many", "2.5"])
def test_a_draft_length_must_be_a_number_or_auto(runner: CliRunner, command: str, length: str) -> None:
    result = runner.invoke(app, f"{command} --num-draft-tokens {length}".split())
    assert result.exit_code == 2
    assert "number of at least 1, or auto" in " ".join(result.stderr.replace("│", " ").split())


def test_an_error_is_one_line_on_stderr_and_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--model", str(tmp_path / "nothing-here"), "--prompt", "hello"])
    assert exit_info.value.code == 1
    output = capsys.readouterr()
    assert not output.out
    loading, message = output.err.rstrip("\n").split("\n", 1)
    assert loading.startswith("Loading")
    assert message.startswith("hf-specdec: ")
    assert "nothing-here" in message
    assert "\n" not in message


def test_a_missing_draft_is_one_line_too(
    capsys: pytest.CaptureFixture[str], target_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--model", str(target_folder), "--draft", str(tmp_path / "gone"), "--prompt", "hello"])
    assert exit_info.value.code == 1
    assert "gone" in capsys.readouterr().err.splitlines()[-1]


def test_debug_shows_the_error_itself(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        main(["--debug", "generate", "--model", str(tmp_path / "nothing-here"), "--prompt", "hello"])


def test_ctrl_c_ends_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target_folder: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenWriter, "put", interrupt)
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--model", str(target_folder), "--prompt", "hello"])
    assert exit_info.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_commands_import_torch_only_when_they_run() -> None:
    # A bare package stands in for `hf_specdec/__init__.py`, so that only what the command line itself imports counts.
    code = (
        "import sys, types; package = types.ModuleType('hf_specdec'); "
        f"package.__path__ = [{str(DEMO_FOLDER.parent)!r}]; sys.modules['hf_specdec'] = package; "
        "import hf_specdec.cli; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- demo ------------------------------------------------------------------------------------------------------


@needs_weights
def test_demo_prints_comparable_figures_as_json(runner: CliRunner) -> None:
    result = runner.invoke(app, "demo --num-parameters 0 --max-new-tokens 12 --prompts code,prose --json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [prompt["workload"] for prompt in record["prompts"]] == ["code", "prose"]
    assert record["summary"]["num_equal"] == record["summary"]["num_prompts"] == 2
    assert all(prompt["drafted"]["speculation"]["num_rounds"] > 0 for prompt in record["prompts"])
    assert not any(prompt["drafted"]["speculation"]["fallbacks"] for prompt in record["prompts"])
    assert record["settings"]["num_ballast_parameters"] == 0


@needs_weights
def test_demo_shows_text_and_tables(runner: CliRunner) -> None:
    result = runner.invoke(app, "demo --num-parameters 1000000 --max-new-tokens 8 --prompts json")
    assert result.exit_code == 0, result.output
    assert "The outputs are equal (8 tokens)." in result.stdout
    assert "tokens/s" in result.stdout
    assert "All: 1 prompt, 1 equal" in result.stdout
    assert "bit for bit" in result.stderr.replace("\n", " ")


@needs_weights
def test_demo_does_not_promise_equal_samples(runner: CliRunner) -> None:
    result = runner.invoke(app, "demo --num-parameters 0 --max-new-tokens 8 --prompts docs --sample --temperature 0.8")
    assert result.exit_code == 0, result.output
    assert "same law, not the same text" in result.stdout


# ---- painting --------------------------------------------------------------------------------------------------


def test_characters_of_several_tokens_are_shown_when_complete() -> None:
    tokenizer = models.build_byte_tokenizer()
    text = "naïve “quotes” and 😀!"
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(token_id) for token_id in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "😀" in pieces


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = models.build_byte_tokenizer()
    decoder = IncrementalDecoder(tokenizer)
    shown = "".join(decoder.push(token_id) for token_id in tokenizer("a😀")["input_ids"][:-1])
    assert shown == "a"
    assert decoder.flush() == "\ufffd"


def test_broken_bytes_do_not_hold_back_text_for_ever() -> None:
    tokenizer = models.build_byte_tokenizer()
    decoder = IncrementalDecoder(tokenizer)
    continuation = tokenizer("😀")["input_ids"][-1]
    assert "\ufffd" in "".join(decoder.push(continuation) for _ in range(20))


@pytest.mark.parametrize(
    ("record", "kinds"),
    [
        (round_record(3, 2, (5, 6, 7)), ["accepted", "accepted", "corrected"]),
        (round_record(2, 2, (5, 6, 7)), ["accepted", "accepted", "bonus"]),
        (round_record(3, 0, (5,)), ["corrected"]),
        (round_record(0, 0, (5,)), ["plain"]),
        (round_record(3, 3, (5, 6)), ["accepted", "accepted"]),
    ],
    ids=["rejection", "full acceptance", "nothing accepted", "plain step", "cut by the length limit"],
)
def test_tokens_are_named_by_their_origin(record: RoundRecord, kinds: list[str]) -> None:
    assert token_kinds(record) == kinds


def test_a_round_is_coloured_when_its_record_comes() -> None:
    tokenizer = models.build_tokenizer()
    console = Console(force_terminal=True, color_system="standard", width=80)
    writer = RoundWriter(console, tokenizer)
    ids = tokenizer("abcd")["input_ids"]
    with console.capture() as capture:
        writer.put(torch.tensor([[9, 9]]))
        for token_id in ids:
            writer.put(torch.tensor([token_id]))
        writer.on_round(round_record(3, 2, tuple(ids[1:])))
        writer.end()
    assert capture.get() == "a\x1b[32mb\x1b[0m\x1b[32mc\x1b[0m\x1b[33md\x1b[0m\n"


def test_tokens_without_a_round_are_not_lost() -> None:
    tokenizer = models.build_tokenizer()
    console = Console(width=80)
    writer = RoundWriter(console, tokenizer)
    with console.capture() as capture:
        writer.put(torch.tensor([[9, 9]]))
        for token_id in tokenizer("abc")["input_ids"]:
            writer.put(torch.tensor([token_id]))
        writer.end()
    assert capture.get() == "abc\n"


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"), [([1, 2, 3], [1, 2, 3], None), ([1, 9, 3], [1, 2, 3], 1), ([1, 2], [1, 2, 3], 2)]
)
def test_first_difference(ours: list[int], theirs: list[int], expected: int | None) -> None:
    def run(token_ids: list[int]) -> TimedRun:
        return TimedRun(token_ids=token_ids, seconds=1.0, time_to_first_token_seconds=0.1, speculation=None)

    assert Comparison(plain=run(theirs), drafted=run(ours)).first_difference == expected
