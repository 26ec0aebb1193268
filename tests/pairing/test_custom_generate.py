"""`model.generate(custom_generate=<pairing>, trust_remote_code=True)`: the door that needs no `enable`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils as host_modules
from integration.comparing import assert_same_ids
from pairing.building import BATCH, KINDS, build_kinds, build_own_pairing
from transformers.generation.streamers import BaseStreamer

import hf_specdec
import models
from hf_specdec import InvalidPairingError
from hf_specdec.pairing.folder import recipe_text

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_kinds(tmp_path_factory.mktemp("pairings"))


def installed(folder: Path) -> Path:
    """Return a folder that makes the package count as installed, as the host asks before it runs the recipe."""
    record = folder / f"hf_specdec-{hf_specdec.__version__}.dist-info"
    record.mkdir()
    text = f"Metadata-Version: 2.1\nName: hf-specdec\nVersion: {hf_specdec.__version__}\n"
    (record / "METADATA").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the host copy recipes to a folder of this test's."""
    cache = tmp_path / "modules"
    monkeypatch.setattr(host_modules, "HF_MODULES_CACHE", str(cache))
    path, loaded = list(sys.path), set(sys.modules)
    try:
        metadata.version("hf-specdec")
    except metadata.PackageNotFoundError:
        (tmp_path / "installed").mkdir()
        sys.path.append(str(installed(tmp_path / "installed")))
    yield
    sys.path[:] = path
    for name in set(sys.modules) - loaded:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def through_recipe(model: Any, folder: Path, **options: Any) -> Any:
    return model.generate(**BATCH, custom_generate=str(folder), trust_remote_code=True, **options)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.is_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.is_ended = True


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets(folders: dict[str, Path], kind: str) -> None:
    model: Any = models.build_target()
    kept = type(model), model.generation_config.to_dict(), set(vars(model))
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    output = through_recipe(model, folders[kind], max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert_same_ids(output.sequences, wanted)
    assert output.speculation.num_draft_forwards > 0
    assert output.speculation.draft_pairing.startswith(str(folders[kind]))
    assert (type(model), model.generation_config.to_dict(), set(vars(model))) == kept


def test_sampling_is_seeded_as_with_draft_model(folders: dict[str, Path]) -> None:
    model: Any = models.build_target()
    options = {"max_new_tokens": 12, "do_sample": True, "num_draft_tokens": 3, "temperature": 0.7}
    torch.manual_seed(5)
    output = through_recipe(model, folders["noisy"], **options)
    torch.manual_seed(5)
    hf_specdec.enable(model)
    assert_same_ids(output, model.generate(**BATCH, draft_model=str(folders["noisy"]), **options))
    torch.manual_seed(5)
    assert_same_ids(output, through_recipe(model, folders["noisy"], **options))


def test_the_process_wide_form_is_no_obstacle(folders: dict[str, Path]) -> None:
    model: Any = models.build_target()
    wanted = model.generate(**BATCH, max_new_tokens=12, do_sample=False)
    hf_specdec.enable()
    try:
        output = through_recipe(model, folders["noisy"], max_new_tokens=12, do_sample=False)
    finally:
        hf_specdec.disable()
    assert_same_ids(output, wanted)


def test_a_streamer_gets_the_text(folders: dict[str, Path]) -> None:
    model: Any = models.build_target()
    prompt = BATCH["input_ids"][1:]
    streamer = Recorder()
    output = model.generate(
        prompt,
        max_new_tokens=12,
        do_sample=False,
        streamer=streamer,
        custom_generate=str(folders["noisy"]),
        trust_remote_code=True,
    )
    assert [token for piece in streamer.pieces for token in piece] == output[0].tolist()
    assert streamer.is_ended


def test_the_callers_settings_are_taken(folders: dict[str, Path]) -> None:
    model: Any = models.build_target()
    told: list[Any] = []
    config = {"on_round": told.append, "num_draft_tokens": 2}
    through_recipe(model, folders["noisy"], max_new_tokens=8, speculative_config=config)
    assert max(record.num_draft_tokens for record in told) == 2


def test_it_runs_only_with_the_callers_trust(folders: dict[str, Path]) -> None:
    model: Any = models.build_target()
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**BATCH, custom_generate=str(folders["noisy"]), trust_remote_code=False, max_new_tokens=4)


def test_trusting_the_recipe_does_not_trust_the_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "tampered"
    build_own_pairing(folder)
    (folder / "draft" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidPairingError, match="was changed after the pairing was made"):
        through_recipe(models.build_target(), folder, max_new_tokens=4)


def test_called_by_hand_it_says_how_to_call_it() -> None:
    space: dict[str, Any] = {"__file__": __file__, "__name__": "recipe"}
    exec(recipe_text("custom_generate/generate.py"), space)
    with pytest.raises(RuntimeError, match=r"was called otherwise\. Call `model\.generate"):
        space["generate"](models.build_target(), **BATCH)


SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({target!r})
ids = torch.tensor([[1, 5, 9, 12, 33, 7]])
wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
assert "hf_specdec" not in sys.modules
kind = type(model)
options = dict(max_new_tokens=12, do_sample=False, custom_generate={folder!r}, trust_remote_code=True)
output = model.generate(ids, return_dict_in_generate=True, **options)
assert torch.equal(output.sequences, wanted)
assert output.speculation.num_draft_forwards > 0
assert type(model) is kind

# The same without the package: the recipe itself says what is missing.
for name in [name for name in sys.modules if name.startswith("hf_specdec")]:
    del sys.modules[name]
sys.modules["hf_specdec"] = None
try:
    model.generate(ids, **options)
except ImportError as error:
    print("said:", error)
"""


@pytest.mark.slow
def test_a_process_that_never_imported_the_package(folders: dict[str, Path], tmp_path: Path) -> None:
    target = models.save_tiny_model(tmp_path / "target")
    (tmp_path / "path").mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed(tmp_path / "path"))]),
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
    }
    script = SCRIPT.format(target=str(target), folder=str(folders["noisy"]))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "pip install hf-specdec" in done.stdout
