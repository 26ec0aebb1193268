"""What the general shrinking cannot know about single architectures."""

from __future__ import annotations

from typing import Any

_DECODER = {"is_decoder": True}
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
_USE_SLIDING = _SLIDING_AND_FULL | {"use_sliding_window": True}
_GEMMA4 = {
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
_GEMMA4_UNIFIED = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        _DECODER,
    ),
    "blt": {"num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": _DECODER | {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": _SLIDING_AND_FULL
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "ffn_config": {"moe_top_k": 2}},
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v4": {
        "head_dim": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots3_note_text": {
        "qk_nope_head_dim": 12,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 8,
    },
    "doge": {"sliding_window": 8},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": _SLIDING_AND_FULL
    | {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "intermediate_size": [48] * 4,
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4_UNIFIED},
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 1, "L_cycles": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "inkling2_text": {"unpadded_vocab_size": 62},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 62,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "n_layers_per_attn_res_block": 1,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [2, 3]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    "ministral": _SLIDING_AND_FULL | {"head_dim": 8},
    "musicgen_melody": {"num_codebooks": 1},
    "mpt": {"d_model": 64},
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {"sliding_window": 8},
    "qwen2": _USE_SLIDING,
    "qwen2_moe": _USE_SLIDING | {"mlp_only_layers": [0, 1]},
    "qwen3": _USE_SLIDING,
    "qwen3_moe": {"sliding_window": 8, "use_sliding_window": True, "num_hidden_layers": 2, "mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0, 1]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3],
    },
    "recurrent_gemma": {"num_hidden_layers": 4},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"sliding_window": 8},
    "xlm": {"causal": True, "mask_token_id": 5},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0, "chunk_size": 16},
    "xmod": _DECODER | {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
}
# How weights are drawn where the usual way gives constant text. Where an architecture multiplies its embeddings, small
# ones keep them from drowning all layers: a model with tied embeddings would repeat one token.
_SMALL_EMBEDDINGS = {"embedding_std": 0.06}
_WEAK_LAYERS = {"gain": 1.0, "embedding_std": 1.0}
_STRONGER_LAYERS = {"gain": 4.0}
_STRONGEST_LAYERS = {"gain": 6.0}
LIVELINESS: dict[str, dict[str, float]] = {
    **dict.fromkeys(
        (
            "biogpt",
            "bigbird_pegasus",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4",
            "gemma4_text",
            "gemma4_unified",
            "gemma4_unified_text",
            "minicpm3",
            "recurrent_gemma",
            "vaultgemma",
        ),
        _SMALL_EMBEDDINGS,
    ),
    **dict.fromkeys(("bloom", "camembert", "prophetnet", "sarvam_moe", "xlm-roberta"), _STRONGEST_LAYERS),
    **dict.fromkeys(("cpmant", "openai-gpt"), _STRONGER_LAYERS),
    **dict.fromkeys(("apertus", "apertus1p5_text"), _WEAK_LAYERS),
    "bert-generation": {"gain": 2.0, "embedding_std": 0.05},
    "ctrl": {"gain": 4.0, "embedding_std": 0.6},
    "gemma3": {"gain": 1.0, "embedding_std": 0.03},
    "git": {"gain": 5.0},
    "lfm2": {"gain": 2.0},
    "mamba2": {"gain": 2.0},
    "olmo3": {"embedding_std": 0.1},
    "reformer": {"gain": 4.0, "embedding_std": 0.05},
    "roc_bert": {"embedding_std": 0.6},
    "xglm": {"gain": 6.0, "embedding_std": 0.1},
    "xlnet": {"gain": 4.0, "embedding_std": 0.1},
}
# Types whose modules read the end of text from the configuration.
NEED_END_OF_TEXT = frozenset({"qwen4_exp_text"})
_DRAFTER = (
    "A draft head: its forward refuses to run without the target's hidden states and its `shared_kv_states`, so "
    "that it has no plain generate()."
)
NOT_BUILT: dict[str, str] = {
    "gemma3n": "Its vision tower needs a package: `TimmWrapperModel requires the timm library`; see gemma3n_text.",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "musicgen": "Its own generate() passes `num_return_sequences=None` on: `repeat_interleave() received an invalid "
    "combination of arguments - got (NoneType, dim=int)`.",
}
PADDING_FAILS: dict[str, str] = {
    "musicgen_melody": "Its own generate() loses the pad tokens of the prompt when it undoes the delay pattern: "
    "`shape '[2, 1, -1]' is invalid for input of size 57`.",
}
