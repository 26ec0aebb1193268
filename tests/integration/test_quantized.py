"""Weights in 4 and 8 bits (bitsandbytes, on the CPU), in the target, in the draft, and in both."""

from __future__ import annotations

import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.comparing import prompts, same_as_plain, same_for_all_drafts
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import hf_specdec
import models
from hf_specdec import SpeculationWarning
from hf_specdec.engine.layout import tolerance_of
from hf_specdec.quiet import NOISE, quiet

with warnings.catch_warnings():
    # Of torch.jit, while it is being imported.
    warnings.simplefilter("ignore")
    import bitsandbytes  # noqa: F401

SINGLE, BATCH = prompts([6]), prompts([4, 6])
# bitsandbytes takes the outliers of int8 layers apart when the threshold is not 0; 6 is its default.
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "int8 with outliers": {"load_in_8bit": True, "llm_int8_threshold": 6.0},
}
LOGGER = next(iter(NOISE))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of a target and of the three kinds of draft for it."""
    root = tmp_path_factory.mktemp("models")
    target = models.build_target()
    saved = {"target": target, **models.build_drafts(target)}
    for name, model in saved.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in saved}


def load(folder: Path, setting: str | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    quantization = BitsAndBytesConfig(**SETTINGS[setting]) if setting else None
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=dtype).eval()


def load_drafts(folders: dict[str, Path], setting: str | None = None) -> dict[str, PreTrainedModel]:
    return {name: load(folder, setting) for name, folder in folders.items() if name != "target"}


@pytest.mark.parametrize("inputs", [SINGLE, BATCH], ids=["one row", "two rows"])
@pytest.mark.parametrize(
    ("setting", "draft_setting"), [("nf4", None), ("int8", None), ("nf4", "nf4"), ("int8", "int8")]
)
def test_a_quantized_target_decodes_as_without_a_draft(
    folders: dict[str, Path], setting: str, draft_setting: str | None, inputs: dict[str, torch.Tensor]
) -> None:
    target = hf_specdec.enable(load(folders["target"], setting))
    drafts = load_drafts(folders, draft_setting)
    stats = same_for_all_drafts(target, drafts, inputs, outcomes=["none", "partial"], max_new_tokens=16)
    assert {(s.lane, s.draft_lane) for s in stats.values()} == {("ragged", "ragged")}
    if draft_setting == setting:
        assert stats["identical"].acceptance_rate > 0.9


@pytest.mark.parametrize("inputs", [SINGLE, BATCH], ids=["one row", "two rows"])
@pytest.mark.parametrize("draft_setting", SETTINGS)
def test_a_quantized_draft_changes_nothing(
    folders: dict[str, Path], draft_setting: str, inputs: dict[str, torch.Tensor]
) -> None:
    target = hf_specdec.enable(load(folders["target"]))
    draft = load(folders["target"], draft_setting)
    stats = same_as_plain(target, draft, inputs, 3, max_new_tokens=16)
    assert stats.draft_lane == "ragged"
    assert stats.num_accepted_tokens > 0


def test_outliers_shared_by_the_tokens_of_a_pass_are_refused_in_a_target(folders: dict[str, Path]) -> None:
    target = hf_specdec.enable(load(folders["target"], "int8 with outliers"))
    wanted = target.generate(**BATCH, max_new_tokens=12, do_sample=False)
    with pytest.warns(SpeculationWarning, match="llm_int8_threshold=0.0"):
        got = target.generate(**BATCH, max_new_tokens=12, do_sample=False, draft_model=load(folders["noisy"]))
    assert torch.equal(got, wanted)


def test_a_quantized_folder_is_a_draft_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    target = hf_specdec.enable(load(folders["target"]))
    for setting in ("nf4", "int8"):
        folder = tmp_path / setting
        load(folders["noisy"], setting).save_pretrained(folder)
        for _ in range(2):
            stats = same_as_plain(target, str(folder), SINGLE, 3, max_new_tokens=12)  # type: ignore[arg-type]
            assert stats.num_accepted_tokens > 0


def test_tolerance_follows_the_coarsest_arithmetic(folders: dict[str, Path]) -> None:
    plain, int8, nf4 = (load(folders["target"], setting) for setting in (None, "int8", "nf4"))
    assert tolerance_of(plain, is_draft=False) == tolerance_of(plain, is_draft=True) < 0.01
    assert tolerance_of(nf4, is_draft=False) == tolerance_of(plain, is_draft=False)
    assert tolerance_of(plain, is_draft=False) < tolerance_of(int8, is_draft=False) < 0.01
    nf4.config.quantization_config.bnb_4bit_compute_dtype = torch.bfloat16
    assert tolerance_of(nf4, is_draft=False) == tolerance_of(int8, is_draft=True) == 0.1


def test_a_call_is_silent_about_every_product(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    target = hf_specdec.enable(load(folders["target"], "int8"))
    caplog.clear()
    target.generate(**SINGLE, max_new_tokens=4, draft_model=load(folders["noisy"], "int8"))
    assert not [record for record in caplog.records if record.name == LOGGER]
    target.generate(**SINGLE, max_new_tokens=4)
    assert [record for record in caplog.records if record.name == LOGGER]
    assert not logging.getLogger(LOGGER).filters
    assert not recwarn.list


def test_other_threads_and_other_messages_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(LOGGER)
    noise = NOISE[LOGGER][0] + " %s"
    with quiet():
        logger.warning(noise, "mine")
        logger.warning("something else")
        thread = threading.Thread(target=logger.warning, args=(noise, "another's"))
        thread.start()
        thread.join()
    assert [record.getMessage() for record in caplog.records] == ["something else", f"{NOISE[LOGGER][0]} another's"]
