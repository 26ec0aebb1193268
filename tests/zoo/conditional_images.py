"""Makes the images of conditional models in whatever form each model wants them, with a prompt around them."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from zoo.conditional_configs import IMAGE_SIZE, PATCH_SIZE
from zoo.conditional_inputs import IMAGE, TEXT_LENGTH, VIDEO, Inputs, Maker, count_features, prompt, text_for_encoder

GRID = 4  # patches along each side of an image


def with_image(model: PreTrainedModel, image: Inputs, batch: int) -> Inputs:
    """Return a prompt around an image, with as many placeholders as the model makes features of it."""
    return prompt(model, count_features(model, image, batch), batch) | image


def _pixels(batch: int, *shape: int, width: int = IMAGE_SIZE) -> torch.Tensor:
    """Return images; `shape` stands between the row and the colour dimension."""
    return torch.randn(batch, *shape, 3, IMAGE_SIZE, width)


def _patches(model: PreTrainedModel, batch: int, frames: int | None = None) -> Inputs:
    """Return images as flat patches and their grid."""
    vision = model.config.vision_config
    frames = frames or getattr(vision, "temporal_patch_size", 1)
    return {
        "pixel_values": torch.randn(batch * GRID**2, 3 * frames * PATCH_SIZE**2),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]] * batch),
    }


def _image(make: Maker) -> Maker:
    """Return a maker of prompts around the image that `make` makes."""
    return lambda model, batch: with_image(model, make(model, batch), batch)


def _beside(make: Maker) -> Maker:
    """Return a maker of text without placeholders, beside the image that `make` makes."""
    return lambda model, batch: prompt(model, 0, batch) | make(model, batch)


def _sizes(batch: int, height: int = IMAGE_SIZE, width: int = IMAGE_SIZE) -> torch.Tensor:
    return torch.tensor([[height, width]] * batch)


def _plain(model: PreTrainedModel, batch: int) -> Inputs:
    return {"pixel_values": _pixels(batch)}


def _one_of_several(model: PreTrainedModel, batch: int) -> Inputs:
    return {"pixel_values": _pixels(batch, 1)}


def _sized(model: PreTrainedModel, batch: int) -> Inputs:
    return _plain(model, batch) | {"image_sizes": _sizes(batch)}


def _tiled(model: PreTrainedModel, batch: int) -> Inputs:
    return {"pixel_values": _pixels(batch, 3), "image_sizes": _sizes(batch, width=2 * IMAGE_SIZE)}


def _shaped_patches(model: PreTrainedModel, batch: int) -> Inputs:
    return {
        "pixel_values": torch.randn(batch, GRID**2, 3 * PATCH_SIZE**2),
        "spatial_shapes": _sizes(batch, GRID, GRID),
        "pixel_attention_mask": torch.ones(batch, GRID**2, dtype=torch.long),
    }


def _square_patches(model: PreTrainedModel, batch: int) -> Inputs:
    image = _patches(model, batch, 1)
    return image | {"pixel_values": image["pixel_values"].view(-1, 3, PATCH_SIZE, PATCH_SIZE)}


def _strip(model: PreTrainedModel, batch: int) -> Inputs:
    return {
        "pixel_values": torch.randn(1, 3, PATCH_SIZE, batch * GRID**2 * PATCH_SIZE),
        "target_sizes": _sizes(batch, GRID, GRID).int(),
    }


def _merged_patches(model: PreTrainedModel, batch: int) -> Inputs:
    return _patches(model, batch) | {"image_merge_sizes": torch.full((batch,), 2)}


def _colour_last_blocks(model: PreTrainedModel, batch: int) -> Inputs:
    return {
        "pixel_values": torch.randn(batch * GRID**2 // 4, 2 * PATCH_SIZE, 2 * PATCH_SIZE, 3),
        "image_grid_thw": torch.tensor([[1, GRID // 2, GRID // 2]] * batch),
    }


def _two_frames(model: PreTrainedModel, batch: int) -> Inputs:
    return _patches(model, batch, 2)


def _two_resolutions(model: PreTrainedModel, batch: int) -> Inputs:
    return _plain(model, batch) | {"high_res_pixel_values": _pixels(batch)}


def _grid_hw(model: PreTrainedModel, batch: int) -> Inputs:
    return {"pixel_values": _patches(model, batch, 1)["pixel_values"], "image_grid_hw": _sizes(batch, GRID, GRID)}


def _placed_patches(model: PreTrainedModel, batch: int) -> Inputs:
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))
    return {
        "pixel_values": torch.rand(batch, GRID**2, 3 * PATCH_SIZE**2),
        "image_position_ids": places.expand(batch, -1, -1),
    }


def _placed_blocks(model: PreTrainedModel, batch: int) -> Inputs:
    places = torch.cartesian_prod(torch.arange(GRID // 2), torch.arange(GRID // 2))
    return {
        "pixel_values": torch.rand(batch, GRID**2 // 4, 12 * PATCH_SIZE**2),
        "image_position_ids": places.expand(batch, -1, -1),
    }


def _flattened(model: PreTrainedModel, batch: int) -> torch.Tensor:
    """Return patches that begin with their row and column, counted from one."""
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)) + 1.0
    patch = 3 * PATCH_SIZE**2
    return torch.cat([places.expand(batch, -1, -1), torch.randn(batch, GRID**2, patch)], dim=-1)


def _pix2struct(model: PreTrainedModel, batch: int) -> Inputs:
    mask = torch.ones(batch, GRID**2)
    mask[1:, GRID**2 // 2 :] = 0
    return {"flattened_patches": _flattened(model, batch), "attention_mask": mask}


def _kosmos2(model: PreTrainedModel, batch: int) -> Inputs:
    inputs = prompt(model, model.config.latent_query_num, batch)
    position_mask = (inputs["input_ids"] == IMAGE).long()
    return inputs | {"pixel_values": _pixels(batch), "image_embeds_position_mask": position_mask}


def _kosmos2_5(model: PreTrainedModel, batch: int) -> Inputs:
    inputs = prompt(model, model.config.latent_query_num, batch)
    position_mask = (inputs["input_ids"] == IMAGE).long()
    return inputs | {"flattened_patches": _flattened(model, batch), "image_embeds_position_mask": position_mask}


def _instructblip(model: PreTrainedModel, batch: int) -> Inputs:
    question = {"qformer_" + name: value for name, value in text_for_encoder(model, batch).items()}
    return prompt(model, model.config.num_query_tokens, batch) | {"pixel_values": _pixels(batch)} | question


def _instructblipvideo(model: PreTrainedModel, batch: int) -> Inputs:
    question = {"qformer_" + name: value for name, value in text_for_encoder(model, batch).items()}
    inputs = prompt(model, 4 * model.config.num_query_tokens, batch, VIDEO)
    return inputs | {"pixel_values": _pixels(batch, 4)} | question


def _idefics(model: PreTrainedModel, batch: int) -> Inputs:
    inputs = prompt(model, 0, batch)
    seen = torch.ones(batch, inputs["input_ids"].shape[1], 1, dtype=torch.long)
    return inputs | {"pixel_values": _pixels(batch, 1), "image_attention_mask": seen}


def _fuyu(model: PreTrainedModel, batch: int) -> Inputs:
    patches = torch.randn(batch, GRID**2, 3 * PATCH_SIZE**2)
    return prompt(model, GRID**2, batch) | {"image_patches": patches}


def _video_llava(model: PreTrainedModel, batch: int) -> Inputs:
    # Newer versions also take an image as `pixel_values`; all know it by this name, if not when asked for its features.
    return prompt(model, GRID**2, batch) | {"pixel_values_images": _pixels(batch)}


def _mllama(model: PreTrainedModel, batch: int) -> Inputs:
    inputs = prompt(model, 1, batch)
    tiles = model.config.vision_config.max_num_tiles
    return inputs | {
        "pixel_values": _pixels(batch, 1, tiles),
        "aspect_ratio_ids": torch.ones(batch, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(batch, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(batch, inputs["input_ids"].shape[1], 1, tiles, dtype=torch.long),
    }


def _molmo2(model: PreTrainedModel, batch: int) -> Inputs:
    # Each of the four features of a picture pools a block of two by two patches.
    blocks = torch.arange(GRID**2).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    pooling = torch.cat([blocks + row * GRID**2 for row in range(batch)])
    image = {
        "pixel_values": torch.randn(batch, GRID**2, 3 * PATCH_SIZE**2),
        "image_token_pooling": pooling,
        "image_grids": torch.tensor([[2, 2, 0, 0]] * batch),
        "image_num_crops": torch.ones(batch, dtype=torch.long),
    }
    del image["image_num_crops"]
    return with_image(model, image, batch)


def _llama4(model: PreTrainedModel, batch: int) -> Inputs:
    return prompt(model, GRID**2 // 4, batch) | _plain(model, batch)


def _granite4_vision(model: PreTrainedModel, batch: int) -> Inputs:
    image = _tiled(model, batch)
    with torch.no_grad():
        _, rows = model.get_image_features(**image).deepstack_features[0]
    return prompt(model, len(rows[0]), batch) | image


def _masked_tiles(model: PreTrainedModel, batch: int) -> Inputs:
    return _one_of_several(model, batch) | {"pixel_attention_mask": torch.ones(batch, 1, dtype=torch.bool)}


def _blocks_in_time(model: PreTrainedModel, batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch * GRID, 2, PATCH_SIZE, PATCH_SIZE, 3)}


def _udop(model: PreTrainedModel, batch: int) -> Inputs:
    inputs = text_for_encoder(model, batch)
    corners = torch.rand(batch, TEXT_LENGTH, 2) / 2
    return inputs | {"bbox": torch.cat([corners, corners + 0.25], dim=-1), "pixel_values": _pixels(batch)}


IMAGE_MAKERS: dict[str, Maker] = {
    "apertus1p5": _image(_sized),
    "blip": _beside(_plain),
    "deepseek_vl_hybrid": _image(_two_resolutions),
    "emu3": _image(_sized),
    "fuyu": _fuyu,
    "gemma4": _image(_placed_patches),
    "gemma4_unified": _image(_placed_blocks),
    "git": _beside(_plain),
    "granite4_vision": _granite4_vision,
    "granite_docling": _image(_masked_tiles),
    "idefics": _idefics,
    "idefics2": _image(_one_of_several),
    "idefics3": _image(_one_of_several),
    "inkling2": _image(_colour_last_blocks),
    "inkling2_loop": _image(_colour_last_blocks),
    "inkling_mm_model": _image(_blocks_in_time),
    "instructblip": _instructblip,
    "instructblipvideo": _instructblipvideo,
    "kimi_k25": _image(_square_patches),
    "kosmos-2": _kosmos2,
    "kosmos-2.5": _kosmos2_5,
    "lfm2_vl": _image(_shaped_patches),
    "lighton_ocr": _image(_sized),
    "llama4": _llama4,
    "llava_next": _image(_tiled),
    "llava_next_video": _image(_tiled),
    "llava_onevision": _image(_tiled),
    "minicpm_ocr": _image(_strip),
    "minicpmv4_6": _image(_strip),
    "minicpmv4_7": _image(_strip),
    "mistral3": _image(_sized),
    "mistral4": lambda model, batch: prompt(model, 0, batch),
    "mistral_large4": _image(_sized),
    "mllama": _mllama,
    "molmo2": _molmo2,
    "muse_glimmer": _image(_two_frames),
    "muse_spark": _image(_two_frames),
    "nemotron_h_omni": _image(_grid_hw),
    "paddleocr_vl": _image(_square_patches),
    "pix2struct": _pix2struct,
    "pp_formulanet": _plain,
    "smolvlm": _image(_one_of_several),
    "udop": _udop,
    "video_llama_3": _image(_merged_patches),
    "video_llava": _video_llava,
    "vision-encoder-decoder": _plain,
}


def any_image(model: PreTrainedModel, batch: int) -> Inputs:
    """Return a prompt around an image for a model without a maker of its own."""
    by_grid = "image_grid_thw" in inspect.signature(model.forward).parameters
    return with_image(model, _patches(model, batch) if by_grid else _plain(model, batch), batch)
