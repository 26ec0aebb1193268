"""Shrinks the default configuration of any conditional model type to a few thousand parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

VOCAB_SIZE = 96
FIRST_SPECIAL = 80  # ids from here on stand for images and the like; text never holds them
WIDTH = 32
HEADS = 4
IMAGE_SIZE = 16
PATCH_SIZE = 4

# The first pattern that matches a whole field name gives its small value; None keeps the default.
RULES: list[tuple[str, Any]] = [
    (r"(image|img)_token_(id|index)|image_patch_id|media_placeholder_token_id", 90),
    (r"video_token_(id|index)", 91),
    (r"audio_token_(id|index)", 92),
    (r"(vision_start|image_start|boi|image_bos|im_start)(_token)?_(id|index)", 88),
    (r"(vision_end|image_end|eoi|image_eos|im_end)(_token)?_(id|index)", 89),
    (r"(video_start|frame_start)_token_id", 86),
    (r"(video_end|frame_end)_token_id", 87),
    (r"(low_res_image_start|im_newline|audio_start|boa|audio_bos)(_token)?_(id|index)", 84),
    (r"(audio_end|eoa|audio_eos)(_token)?_(id|index)", 85),
    (r".*eos_token_id", None),
    (r".*forced_(bos|eos)_token_id", None),
    (r"_?pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"decoder_start_token_id", 2),
    (r"sep_token_id|cls_token_id|eod_token_id|user_token_id", 3),
    (r".*_token_id|.*_token_index", 83),
    (r".*vocab_size.*|codebook_size|num_embeddings", VOCAB_SIZE),
    (r"(image|img|base_image|input|num_image)_size|resolution|scale|image_width|image_height", IMAGE_SIZE),
    (r"patch_embed_hidden_size", 3 * PATCH_SIZE**2),
    (r"num_patches|mm_posemb_size", (IMAGE_SIZE // PATCH_SIZE) ** 2),
    (r"pooling_kernel_size", 2),
    (r"patch_size|spatial_patch_size|patch_stride", PATCH_SIZE),
    # With few heads an indexer scores many keys as exactly 0, and which of those it takes depends on the pass.
    (r"index(er)?_n_heads", 8),
    (r"(.*num_)?(key_value|kv)_heads|.*num_key_value_heads", 2),
    (r".*head_dim|.*dim_head|d_kv|qk_.*_dim|.*head_size|dim_key|rotary_dim", WIDTH // HEADS),
    (r".*num_.*heads|.*_heads|num_heads|n_head|layers?_heads|resampler_n_heads", HEADS),
    (r".*num_.*experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r".*experts_per_tok|moe_topk|moe_k|num_selected_experts|num_experts_per_tok", 2),
    (r"n_shared_experts|.*num_shared_experts", 1),
    (r"n_group|topk_group", 1),
    (r"num_kv_shared_layers|first_k_dense_replace|num_nextn_predict_layers", None),
    (r".*cross_layer_interval|.*no_rope_layer_interval|.*moe_layer_step|.*_layer_interval", None),
    (r"(.*_)?(num_.*layers|layers|depth|n_layers|num_layers|resampler_depth)", 2),
    (r".*sliding_window(_size)?", 16),
    (r".*sparse_step|decoder_sparse_step", 2),
    (r".*lora_rank|.*_rank", 16),
    (r"max_source_positions", 32),
    (r"n_groups", 2),
    (r".*max_position.*|max_.*positions|.*position_embedding.*|n_positions|max_seq.*|seq_len.*", 256),
    (r".*sampling_rate|.*hop_length|.*_base|seed|.*_layer_id.*|.*sinkhorn.*|.*theta|.*_pattern", None),
    (r"chunk_size_feed_forward|num_labels|.*merge_size|.*temporal.*|.*num_channels|in_channels|.*kernel.*", None),
    (r".*_buckets|.*_max_distance", None),
]
_COMPILED = [(re.compile(pattern), value) for pattern, value in RULES]
_NEVER = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id")
_PLACEHOLDER = re.compile(r"(image|audio|video)_token_(id|index)")
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "layers")
_NOT_ARGUMENTS = {"transformers_version", "_name_or_path", "architectures", "id2label", "label2id", "torch_dtype"}


def _small(name: str, value: Any) -> Any:
    """Return the small value of one integer field."""
    for pattern, small in _COMPILED:
        if pattern.fullmatch(name):
            if small is None or small == 0 or name.endswith(("_id", "_index")):
                return value if small is None else small
            return min(value, small) if value else value
    return WIDTH if value >= 48 else value


def _chosen_layers(config: PretrainedConfig) -> tuple[str, list[str], list[int]] | None:
    """Return the count's name, the per-layer lists and the positions of one layer of each kind (at least two)."""
    fields = vars(config)
    for name in _LAYER_COUNTS:
        count = fields.get(name)
        if not isinstance(count, int) or count < 2:
            continue
        lists = [key for key, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == count]
        kinds = [str([fields[key][index] for key in lists]) for index in range(count)]
        positions = sorted({kinds.index(kind) for kind in kinds})[:4]
        positions += [index for index in range(count) if index not in positions][: max(0, 2 - len(positions))]
        return name, lists, sorted(positions)
    return None


def _shrunken_field(name: str, value: Any) -> Any:
    """Return a small version of one field that is no list over the layers."""
    if isinstance(value, PretrainedConfig):
        return shrunken(value) | {"model_type": value.model_type}
    if type(value) is int:
        return _small(name, value)
    if value is None and _PLACEHOLDER.fullmatch(name):
        return _small(name, 0)
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value.get("mrope_section"):
        value["mrope_section"] = [2, 1, 1]  # half of the small head
    return value


def shrunken(config: PretrainedConfig) -> dict[str, Any]:
    """Return constructor arguments of a small version of `config`."""
    fields = {
        name: value
        for name, value in vars(config).items()
        if name not in _NOT_ARGUMENTS and not name.startswith(("_", "ignore_keys"))
    }
    arguments = {name: _shrunken_field(name, value) for name, value in fields.items()}
    layers = _chosen_layers(config)
    if layers is not None:
        count, lists, positions = layers
        arguments[count] = len(positions)
        arguments |= {name: [fields[name][index] for index in positions] for name in lists if name in fields}
    return arguments | {name: None for name in _NEVER if name in arguments}


def merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` laid over it, nested dictionaries too."""
    result = dict(base)
    for name, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if nested else value
    return result


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_MROPE = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}}}
_GRID = [IMAGE_SIZE, IMAGE_SIZE]
_PINPOINTS = {"image_grid_pinpoints": [[IMAGE_SIZE, 2 * IMAGE_SIZE]]}
_POOLED = {"mm_tokens_per_image": 4}
_FEW_STAGES = {"num_filters": 8, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_NAMED_CODES = range(64, 72)  # ids of a discrete image tokenizer's codes

# What must differ from the general rules, for the type to be built or to run on so small an image.
OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_offset": 64,
        "audio_token_offset": 72,
        "vision_config": {
            "codebook_size": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
        },
        "audio_config": {"codebook_size": 8},
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "chameleon": {
        "vocabulary_map": {"<image>": 90, **{f"IMGIMG{chr(65 + i)}Z": token for i, token in enumerate(_NAMED_CODES)}},
        "vq_config": {"num_embeddings": 8, "resolution": 16, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    },
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": None, "sliding_attention": _ROPE}}},
    "cosmos3_edge": {"vision_config": {"num_patches": 16}},
    "deepseek_ocr2": {
        "vision_config": {"sam_config": {"downsample_channels": [32, 32]}},
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "dots3_note": {
        "text_config": {
            "num_key_value_heads": HEADS,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": HEADS,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 24,
            "swa_v_head_dim": 8,
        }
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 90,
            "<|extra_200|>": 73,
            **{f"<|visual token {i:06}|>": token for i, token in enumerate(_NAMED_CODES)},
        },
        "vq_config": {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    },
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}}},
    "florence2": {"vision_config": {"embed_dim": [32] * 4}},
    "gemma3": _POOLED,
    "gemma4": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "glm46v": _MROPE,
    "glm4v": _MROPE,
    "glm4v_moe": _MROPE,
    "glm5_next": {"text_config": {"num_key_value_heads": HEADS}},
    "glm_ocr": _MROPE,
    "glmga": _MROPE,
    "granite4_vision": _PINPOINTS
    | {
        "text_config": {"model_type": "granite4_vision_text"},  # older versions default to a Llama, and fail
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64},
        "qformer_config": {"hidden_size": 64, "encoder_hidden_size": 64},
    },
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}},
    "internvl": {"vision_config": {"image_size": _GRID, "patch_size": [PATCH_SIZE, PATCH_SIZE]}},
    "kimi_k25": {"text_config": {"num_key_value_heads": HEADS}},
    "llama4": {"vision_config": {"intermediate_size": 4 * WIDTH}},
    "llava_next": _PINPOINTS,
    "llava_next_video": _PINPOINTS,
    "llava_onevision": _PINPOINTS,
    "mistral4": {"head_dim": 16, "qk_head_dim": 16, "num_key_value_heads": HEADS},
    "mistral_large4": {"text_config": {"num_key_value_heads": HEADS}},
    "mllama": {
        "vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 2 * WIDTH},
        "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    },
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0]},
        "vision_config": {"image_size": _GRID, "num_position_embeddings": 16},
    },
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "minimax_m3_vl": {"merged_hidden_size": 4 * WIDTH},
    "muse_spark": {"out_hidden_size": 4 * WIDTH, "audio_config": {"hidden_sizes": [32] * 4, "depths": [1] * 4}},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"chunk_length": 32, "chunk_left_context": 4, "chunk_right_context": 4}}
    },
    "omniasr": {"audio_config": {"conv_dim": [32] * 7}},
    "paddleocr_vl": _MROPE,
    "qianfan_ocr": {"vision_config": {"image_size": _GRID, "patch_size": [PATCH_SIZE, PATCH_SIZE]}},
    "qwen2_5_omni_thinker": _MROPE | {"vision_start_token_id": 88, "vision_end_token_id": 89},
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_asr": {"eos_token_id": 95, "audio_config": {"n_window": 50, "n_window_infer": 100}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 88, "vision_end_token_id": 89},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        }
    },
    "shieldgemma2": _POOLED,
    "step3p7": {"text_config": {"sliding_window": 16}},
    "t5gemma2": {"encoder": _POOLED},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [32, 32]}}},
    "vibevoice_asr": {
        "acoustic_tokenizer_chunk_size": 256,
        "acoustic_tokenizer_encoder_config": _FEW_STAGES,
        "semantic_tokenizer_encoder_config": _FEW_STAGES,
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
}


# Parts whose default is no part at all.
PARTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "encoder-decoder": {
        "encoder": ("bert", {}),
        "decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}),
    },
    "gemma4": {"vision_config": ("gemma4_vision", {})},
    "gemma4_unified": {"vision_config": ("gemma4_unified_vision", {})},
    "vision-encoder-decoder": {
        "encoder": ("vit", {}),
        "decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}),
    },
}


def small_config(model_type: str) -> PretrainedConfig:
    """Return the small configuration of `model_type`."""
    config_class = CONFIG_MAPPING[model_type]
    parts = {
        name: shrunken(CONFIG_MAPPING[part]()) | {"model_type": part} | changes
        for name, (part, changes) in PARTS.get(model_type, {}).items()
    }
    base = {} if {"encoder", "decoder"} <= parts.keys() else shrunken(config_class())
    return config_class(**merged(base | parts, OVERRIDES.get(model_type, {})))
