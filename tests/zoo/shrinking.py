"""Shrink any configuration of the host library to a few thousand parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCAB_SIZE = 64
WINDOW = 8
POSITIONS = 256
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Fields = dict[str, Any]

_NAMES_OF_SIZES: tuple[tuple[int, str], ...] = (
    (
        VOCAB_SIZE,
        "vocab_size decoder_vocab_size audio_vocab_size vocab_size_per_layer_input pronunciation_vocab_size "
        "shape_vocab_size codebook_size encoder_hash_byte_group_vocab ngram_vocab_size_base",
    ),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length model_max_length "
        "original_max_position_embeddings relative_attention_max_distance position_bias_max_distance",
    ),
    (64, "max_source_positions num_position_embeddings"),
    (
        48,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff d_ff feed_forward_size "
        "dense_intermediate_size intermediate_size_mlp mlp_dim prefix_dense_intermediate_size expert_ffn_hidden_size "
        "d_inner",
    ),
    (
        32,
        "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size "
        "output_embedding_size hidden_size_global lru_width backbone_hidden_size dim_model_base vision_output_dim "
        "out_hidden_size output_channels projector_input_dim projector_output_dim router_hidden_size",
    ),
    (
        24,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "shared_intermediate_size moe_shared_expert_intermediate_size",
    ),
    (16, "q_lora_rank kv_lora_rank o_lora_rank pronunciation_embed_dim shape_embed_dim"),
    (
        8,
        "head_dim d_head d_kv dim_head kv_channels attention_head_size swa_head_dim qk_nope_head_dim v_head_dim "
        "index_head_dim index_topk indexer_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim "
        "state_size ssm_state_size mamba_d_state mamba_head_dim mamba_headdim mamba_d_head time_step_rank "
        "mamba_dt_rank hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank hc_lowrank d_rel "
        "rel_extent ple_embed_dim chunk_size mamba_chunk_size lsh_attn_chunk_length local_attn_chunk_length "
        "max_patch_length position_bias_num_buckets relative_attention_num_buckets prompt_length num_mel_bins "
        "loop_gate_rank classifier_proj_size num_centroids mamba_n_heads mamba_num_heads index_n_heads",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size local_attention attention_chunk_size "
        "local_attention_window_len keep_window_size",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads qk_rope_head_dim rotary_dim "
        "num_experts num_local_experts n_routed_experts moe_num_experts index_block_size linear_num_heads "
        "linear_num_value_heads block_size block_multiple_of",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads kv_n_heads num_query_groups swa_num_key_value_heads "
        "indexer_n_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts "
        "linear_num_key_heads encoder_layers decoder_layers num_decoder_layers num_encoder_layers "
        "depth index_topk_blocks o_groups n_groups mamba_n_groups mamba_ngroups zero_expert_num "
        "num_random_blocks centroid_intermediate_top_k heads_per_ngram split_ngram_parts num_codebooks n_mamba_heads",
    ),
    (1, "topk_group n_group num_expert_group first_k_dense_replace num_dense_layers"),
)
SIZES: dict[str, int] = {name: size for size, names in _NAMES_OF_SIZES for name in names.split()}
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")


def shrink_config(default: PreTrainedConfig, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a tiny configuration of the class of `default`; `overrides` win, and go into sub-configurations."""
    fields = dict(_own_fields(default))
    shrunk = {name: SIZES[name] for name, value in fields.items() if name in SIZES and _is_size(value)}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        shrunk["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention makes a key for each head
    shrunk |= _shrink_layers(fields, overrides)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            shrunk[name] = shrink_config(value, overrides.get(name) or {})
        elif name == "rope_parameters" and isinstance(value, dict):
            shrunk[name] = _shrink_rope(value)
        elif name.startswith("forced_") or name in ("suppress_tokens", "begin_suppress_tokens"):
            shrunk[name] = None
    shrunk |= {name: value for name, value in TOKENS.items() if name in fields}
    shrunk |= {name: value for name, value in overrides.items() if not isinstance(shrunk.get(name), PreTrainedConfig)}
    return type(default)(**shrunk)


def _own_fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield what the constructor takes; other attributes are derived from those."""
    values = vars(config)  # attribute access may refuse what differs between layers
    for field in dataclasses.fields(config):
        stored = config.attribute_map.get(field.name, field.name)
        if field.init and stored in values:
            yield field.name, values[stored]


def _shrink_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Scale stretched position embeddings to few positions, also where each kind of layer has its own."""
    shrunk = {name: _shrink_rope(value) if isinstance(value, dict) else value for name, value in parameters.items()}
    if "original_max_position_embeddings" in shrunk:
        shrunk |= {"original_max_position_embeddings": POSITIONS // 4, "factor": 4.0}
    return shrunk


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shrink_layers(fields: Fields, overrides: Mapping[str, Any]) -> Fields:
    """Return a depth and lists of layers in which every kind of layer of the architecture occurs."""
    depth_name = next((name for name in DEPTHS if _is_size(fields.get(name))), None)
    lists = {
        name: list(dict.fromkeys(value))
        for name, value in fields.items()
        if isinstance(value, (list, tuple)) and "layer" in name and value and all(isinstance(k, str) for k in value)
    }
    depth = 2
    if any(len(kinds) > 1 for kinds in lists.values()) or any("layer" in name for name in overrides):
        depth = 4
    depth = overrides.get(depth_name, depth) if depth_name else depth
    shrunk: Fields = {} if depth_name is None else {depth_name: depth}
    for name, kinds in lists.items():
        if "mlp" in name:  # in blocks, where other lists alternate: each kind of mixer meets each kind of MLP
            shrunk[name] = [kinds[index * len(kinds) // depth] for index in range(depth)]
        else:
            shrunk[name] = [kinds[index % len(kinds)] for index in range(depth)]
    return shrunk
