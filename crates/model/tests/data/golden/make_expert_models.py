"""Writes the golden models with mixtures of experts: see `make_models.py`, whose way this is."""

import torch

from make_models import main, model, rope

MODELS = {
    # Mixtures of experts. Routers are larger than other weights, so that no choice hangs on the last bits.
    "mixtral": model(
        "Mixtral", as_gguf=True, gguf_family="llama", num_local_experts=4, num_experts_per_tok=2, head_dim=12, num_hidden_layers=2,
        rope_parameters=rope(theta=1000000.0), sliding_window=None, tie_word_embeddings=False,
    ),
    # Shared experts twice as wide as the others, with a gate; a dense layer between.
    "qwen2-moe": model(
        "Qwen2Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=48, head_dim=None,
        norm_topk_prob=False, mlp_only_layers=[1], rope_parameters=rope(theta=1000000.0), num_key_value_heads=4,
    ),
    "qwen2-moe-plain": model(
        "Qwen2Moe", as_gguf=True, gguf_family="qwen2moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, head_dim=None, norm_topk_prob=False, num_hidden_layers=2,
        rope_parameters=rope(theta=1000000.0),
    ),
    "qwen3-moe": model(
        "Qwen3Moe", as_gguf=True, gguf_family="qwen3moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, head_dim=16,
        norm_topk_prob=True, num_hidden_layers=2, rope_parameters=rope(theta=1000000.0),
    ),
    # Attention over latents; shared experts; a dense layer first. Yarn's factor is in the scores.
    "deepseek-v2-lite": model(
        "DeepseekV2", as_gguf=True, gguf_family="deepseek2", head_dim=None, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=12, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=24,
        first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
        tie_word_embeddings=False,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=0.707, mscale_all_dim=0.707),
    ),
    # Queries from a latent; experts in groups.
    "deepseek-v2": model(
        "DeepseekV2", as_gguf=True, gguf_family="deepseek2", splits_heads=True, head_dim=None, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=24,
        num_hidden_layers=2, first_k_dense_replace=0, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        norm_topk_prob=False, routed_scaling_factor=2.0, rope_parameters=rope(),
    ),
    # Sigmoid scores, a bias that only chooses, the two best of each group.
    "deepseek-v3": model(
        "DeepseekV3", as_gguf=True, gguf_family="deepseek2", splits_heads=True, head_dim=None, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=24, num_hidden_layers=2,
        first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, tie_word_embeddings=False,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=1.0, mscale_all_dim=1.0),
    ),
    "olmoe": model(
        "Olmoe", as_gguf=True, num_experts=6, num_experts_per_tok=2, intermediate_size=32, head_dim=None, norm_topk_prob=False,
        num_hidden_layers=2, tie_word_embeddings=False, rope_parameters=rope(),
    ),
    "granite-moe": model(
        "GraniteMoe", as_gguf=True, num_local_experts=5, num_experts_per_tok=2, intermediate_size=32, head_dim=None, num_hidden_layers=2,
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0, rope_parameters=rope(),
    ),
}

if __name__ == "__main__":
    main(MODELS, seed=1000)
