"""Writes the golden models with mixtures of experts: see `make_models.py`, whose way this is."""

import json
import shutil

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from make_models import HERE, VOCAB, main, model, rope


def expert_parameters(net):
    return [(name, values) for name, values in net.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]


def draw_mxfp4(net):
    """Experts that are exactly MXFP4: random codes and scales, made numbers by transformers."""
    net.mxfp4 = {}
    for name, values in expert_parameters(net):
        experts, inputs, outputs = values.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        # Around 2^-4, for values as large as those of the others.
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        net.mxfp4[name] = (blocks, scales)
        values.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert values.shape == (experts, inputs, outputs), values.shape


def pack_mxfp4(net, folder):
    """As the released checkpoints are."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, (blocks, scales) in net.mxfp4.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return to_quantised(folder)


def to_quantised(folder):
    """To the other quantised models, which have one prompt: a CPU rounds activations beside such weights."""
    path = folder / "golden.json"
    golden = json.loads(path.read_text())
    first, second = (len(prompt["token_ids"]) for prompt in golden["prompts"][:2])
    prompt = {"token_ids": golden["prompts"][1]["token_ids"]}
    path.write_text(json.dumps({"max_model_len": 64, "prompts": [prompt], "full_tolerance": 0.003}) + "\n")
    path = folder / "logits.f32"
    logits = np.frombuffer(path.read_bytes(), "<f4").reshape(-1, VOCAB)
    path.write_bytes(logits[first : first + second].tobytes())
    out = HERE.parent / "quantised" / folder.name
    shutil.rmtree(out, ignore_errors=True)
    return folder.rename(out)

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
    # Sinks, windows in every second layer, experts with biases behind a bounded gate, yarn; the tensors of all experts in one.
    "gpt-oss": model(
        "GptOss", as_gguf=True, gguf_family="gpt-oss", num_local_experts=5, num_experts_per_tok=2, hidden_size=64, intermediate_size=32,
        sliding_window=9, tie_word_embeddings=False, rope_parameters=rope(
            "yarn", theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=24,
        ),
    ),
    # The same with experts in MXFP4.
    "gpt-oss-mxfp4": model(
        "GptOss", finish=draw_mxfp4, pack=pack_mxfp4, num_local_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=64,
        num_hidden_layers=2, sliding_window=9, tie_word_embeddings=False, rope_parameters=rope(
            "yarn", theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=24,
        ),
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
