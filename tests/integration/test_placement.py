"""Models that accelerate has placed: weights in memory or on disk, brought in layer by layer, or on several devices."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import SequentialHook
from integration.comparing import assert_same_ids, plain, same_as_plain, same_for_all_drafts
from integration.harness import PROMPT, admit, greedy, prompts_of
from transformers import PreTrainedModel

import hf_specdec
import models
from hf_specdec import IncompatibleDraftError
from hf_specdec.placement import device_of, last_device_of

# transformers 5.17 warns of any offloaded model: the device it asks for is "meta".
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

BUILDERS = {"llama": models.build_target, "mamba": models.build_mamba}
LANES = {"llama": "ragged", "mamba": "compatible"}
PLACES = ["cpu", "disk", "dispatched"]


def placed(model: PreTrainedModel, place: str, folder: Path) -> PreTrainedModel:
    """Return the model, enabled, with its weights where they are not used."""
    # A Mamba layer reads some weights of its parts without calling them.
    preload = ["MambaMixer"]
    if place == "cpu":
        cpu_offload(model, preload_module_classes=preload)
    elif place == "disk":
        disk_offload(model, folder, preload_module_classes=preload)
    else:
        dispatch_model(
            model,
            device_map(model),
            main_device="cpu",
            offload_dir=folder,
            preload_module_classes=preload,
            skip_keys=model._skip_keys_device_placement,
        )
    return hf_specdec.enable(model)


def device_map(model: PreTrainedModel) -> dict[str, str]:
    """Return a map with the last layer and the head on disk, and the rest in memory."""
    name = model.base_model_prefix
    parts = {f"{name}.{part}": "cpu" for part, _ in model.base_model.named_children() if part != "layers"}
    return parts | {f"{name}.layers.0": "cpu", f"{name}.layers.1": "disk", "lm_head": "disk"}


def drafts_of(kind: str) -> dict[str, PreTrainedModel]:
    target = BUILDERS[kind]()
    return {
        "identical": copy.deepcopy(target),
        "unrelated": BUILDERS[kind](seed=100),
        "noisy": models.build_noisy(target, relative_noise=0.02),
    }


def placement_of(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "tensors": {name: value.device for name, value in [*model.named_parameters(), *model.named_buffers()]},
        "hooks": {name: id(vars(module).get("_hf_hook")) for name, module in model.named_modules()},
        "forwards": {name: id(vars(module).get("forward")) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "map": copy.deepcopy(getattr(model, "hf_device_map", None)),
    }


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_placed_target_decodes_as_without_a_draft(kind: str, place: str, tmp_path: Path) -> None:
    target = placed(BUILDERS[kind](), place, tmp_path)
    # Once plainly: accelerate itself settles where tied weights lie only in the first forward.
    greedy(target, PROMPT, max_new_tokens=1)
    before = placement_of(target)
    assert any(device.type == "meta" for device in before["tensors"].values())
    drafts = drafts_of(kind)
    for batch in (1, 3):
        inputs = prompts_of(batch)
        assert_same_ids(plain(target, inputs, max_new_tokens=8), plain(BUILDERS[kind](), inputs, max_new_tokens=8))
        stats = same_for_all_drafts(target, drafts, inputs, max_new_tokens=8, outcomes=["full", "none"])
        assert {(s.lane, s.draft_lane) for s in stats.values()} == {(LANES[kind], LANES[kind])}
    assert placement_of(target) == before


@pytest.mark.parametrize(("kind", "place"), [("llama", "disk"), ("mamba", "cpu"), ("llama", "dispatched")])
def test_a_placed_draft_drafts_as_ever(kind: str, place: str, tmp_path: Path) -> None:
    target = hf_specdec.enable(models.build_target())
    draft = models.build_noisy(target) if kind == "llama" else models.build_mamba()
    wanted = [same_as_plain(target, draft, prompts_of(batch), 3, max_new_tokens=8) for batch in (1, 3)]
    draft = placed(draft, place, tmp_path)
    before = placement_of(draft)
    for batch, stats in zip((1, 3), wanted, strict=True):
        got = same_as_plain(target, draft, prompts_of(batch), 3, max_new_tokens=8)
        assert got.draft_lane == LANES[kind]
        assert got.num_accepted_tokens == stats.num_accepted_tokens
    assert placement_of(draft) == before


def test_both_may_be_placed(tmp_path: Path) -> None:
    target = placed(models.build_target(), "disk", tmp_path)
    draft = placed(models.build_noisy(models.build_target()), "cpu", tmp_path)
    assert same_as_plain(target, draft, prompts_of(3), 3, max_new_tokens=8).num_accepted_tokens > 0


def test_a_draft_named_for_an_offloaded_target_goes_where_that_computes(tmp_path: Path) -> None:
    models.build_noisy(models.build_target()).save_pretrained(tmp_path / "draft")
    target = placed(models.build_target(), "cpu", tmp_path)
    for _ in range(2):
        stats = same_as_plain(target, str(tmp_path / "draft"), prompts_of(1), 3, max_new_tokens=8)  # type: ignore[arg-type]
        assert stats.num_accepted_tokens > 0


def test_a_draft_without_weights_is_refused() -> None:
    target = hf_specdec.enable(models.build_target())
    with torch.device("meta"):
        draft = models.build_target()
    with pytest.raises(IncompatibleDraftError, match="meta device"):
        target.generate(PROMPT, draft_model=draft)


def test_the_device_is_where_a_model_computes(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert device_of(models.build_target()) == cpu
    assert all(device_of(placed(models.build_target(), place, tmp_path)) == cpu for place in PLACES)
    assert device_of(models.build_target().to("meta")) == torch.device("meta")


def test_the_device_is_found_among_several_hooks() -> None:
    model = cpu_offload(models.build_target())
    model._hf_hook = SequentialHook(model._hf_hook)
    assert device_of(model) == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("inputs_on", ["cuda:0", "cuda:1", "cpu"])
def test_layers_on_several_devices(kind: str, inputs_on: str) -> None:
    target = BUILDERS[kind]()
    places = {name: 0 if place == "cpu" else 1 for name, place in device_map(target).items()}
    dispatch_model(target, places, skip_keys=target._skip_keys_device_placement)
    hf_specdec.enable(target)
    drafts = {name: draft.to("cuda:1") for name, draft in drafts_of(kind).items()}
    if kind == "llama":
        admit(target)
    for batch in (1, 3):
        inputs = {name: value.to(inputs_on) for name, value in prompts_of(batch).items()}
        stats = same_for_all_drafts(target, drafts, inputs, max_new_tokens=8, outcomes=["full", "none"])
        assert {(s.lane, s.draft_lane) for s in stats.values()} == {(LANES[kind], LANES[kind])}


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [("cuda:0", "cuda:1", "cuda:1"), ("cuda:0", "cpu", "cuda:0"), ("cpu", None, "cpu")],
)
def test_a_draft_goes_where_the_last_layer_computes(first: str, last: str | None, expected: str) -> None:
    head = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cpu")))
    if last is not None:
        head._hf_hook = SimpleNamespace(execution_device=last)
    target = SimpleNamespace(device=torch.device(first), get_output_embeddings=lambda: head)
    assert last_device_of(target) == torch.device(expected)


def test_a_model_without_a_head_is_where_its_inputs_go() -> None:
    assert last_device_of(models.build_target().model) == torch.device("cpu")
