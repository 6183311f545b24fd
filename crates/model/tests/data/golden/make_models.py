"""Writes the golden models: tiny random checkpoints with the logits that PyTorch computes for them.

    pip install torch transformers gguf numpy
    python make_models.py

Each folder `<name>/` is a checkpoint as `save_pretrained` writes it, with beside it

    golden.json   prompts as token ids, `max_model_len`, greedy continuations
    logits.f32    the logits of all positions of all prompts, f32 little endian, [sum of lengths, vocab]

and for some a `model.gguf` of the same weights. Everything is computed in f32 by the eager implementation from weights
that were rounded to the format of the checkpoint first, so a correct reader has the same numbers to start from.
Weights are much larger than those of a fresh model, for logits with structure: a wrong scale, a wrong pair of rotated
dimensions or a key too many changes them visibly.
"""

import json
import pathlib
import shutil
import sys

import gguf
import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = pathlib.Path(__file__).parent
VOCAB = 160
LENGTHS = (1, 13, 70)
NUM_GREEDY = 24
MAX_MODEL_LEN = 96
# Two best logits closer than this part of the largest one are no fair question to another implementation.
MIN_MARGIN = 0.01
# Nor is an expert whose choice hangs on so small a part of what the router sees: activations of bf16 are off by up to half of it.
ROUTER_NOISE = 0.04
# Weights of routers.
ROUTER = 0.25

BASE = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=MAX_MODEL_LEN,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    initializer_range=0.02,
)


def rope(kind="default", theta=10000.0, **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def model(family, *, causal=None, dtype=torch.bfloat16, legacy=False, shards=None, as_gguf=False, pin=None, softcap=None, gguf_family=None,
          splits_heads=False, finish=None, pack=None, **changes):
    return locals()


MODELS = {
    # The plain case, in f32.
    "llama": model("Llama", dtype=torch.float32, as_gguf=True, num_hidden_layers=2, rope_parameters=rope()),
    # Every bias, an untied head, a head_dim that is not hidden / heads, one kv head a head.
    "llama-bias": model(
        "Llama", dtype=torch.float16, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, head_dim=20,
        num_key_value_heads=4, num_hidden_layers=2, rope_parameters=rope(),
    ),
    "llama-linear": model("Llama", legacy=True, num_hidden_layers=2, rope_parameters=rope("linear", factor=4.0)),
    # Transformers recomputes this table as a sequence grows; Baton serves with that of the longest sequence.
    "llama-dynamic": model(
        "Llama", num_hidden_layers=2, max_position_embeddings=32, pin=MAX_MODEL_LEN,
        rope_parameters=rope("dynamic", factor=3.0),
    ),
    "llama3": model(
        "Llama", as_gguf=True, num_hidden_layers=2, tie_word_embeddings=False,
        rope_parameters=rope(
            "llama3", theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": model(
        "Llama", legacy=True, num_hidden_layers=2,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=24),
    ),
    "llama-yarn-mscale": model(
        "Llama", num_hidden_layers=2,
        rope_parameters=rope(
            "yarn", factor=8.0, original_max_position_embeddings=24, mscale=1.3, mscale_all_dim=0.6, beta_fast=16.0,
            beta_slow=2.0, truncate=False,
        ),
    ),
    # A window of 9 tokens on every layer; several shards.
    "mistral": model(
        "Mistral", shards="48KB", tie_word_embeddings=False, sliding_window=9, rope_parameters=rope(theta=1000000.0)
    ),
    "qwen2": model("Qwen2", as_gguf=True, legacy=True, rope_parameters=rope(theta=1000000.0), head_dim=None,
                   num_attention_heads=3, num_key_value_heads=1),
    # The window is used from the second layer on.
    "qwen2-window": model(
        "Qwen2", rope_parameters=rope(), use_sliding_window=True, sliding_window=11, max_window_layers=1, head_dim=None
    ),
    "qwen3": model("Qwen3", as_gguf=True, dtype=torch.float16, head_dim=24, rope_parameters=rope(theta=1000000.0)),
    "gemma3": model(
        "Gemma3Text", as_gguf=True, legacy=True, hidden_size=32, num_hidden_layers=7, sliding_window=7,
        intermediate_size=64, query_pre_attn_scalar=16,
        rope_parameters={"sliding_attention": rope(), "full_attention": rope("linear", theta=1000000.0, factor=8.0)},
    ),
    "gemma3-softcap": model(
        "Gemma3Text", softcap=3.0, num_hidden_layers=4, hidden_size=32, intermediate_size=64, sliding_window=10,
        num_key_value_heads=1, query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": rope(), "full_attention": rope(theta=100000.0)},
    ),
    # Learned positions, layer norms, an MLP without a gate, weights as [in, out]; its keys have names of their own.
    "gpt2": model(
        "GPT2", causal="GPT2LMHeadModel", dtype=torch.float32, as_gguf=True, n_embd=48, n_inner=80, n_layer=2, n_head=4,
        n_positions=MAX_MODEL_LEN, **dict.fromkeys(
            ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "max_position_embeddings", "rms_norm_eps")
        ),
    ),
}


def build(spec, seed):
    """A model whose f32 weights are exactly representable in the checkpoint's format."""
    torch.manual_seed(seed)
    config = getattr(transformers, spec["family"] + "Config")(
        **{key: value for key, value in {**BASE, **spec["changes"]}.items() if value is not None or key == "q_lora_rank"}
    )
    causal = getattr(transformers, spec["causal"] or spec["family"].removesuffix("Text") + "ForCausalLM")
    net = causal._from_config(config, attn_implementation="eager").float().eval()
    gemma = spec["family"].startswith("Gemma")
    for name, values in net.named_parameters():
        if "norm" in name or ".ln_" in name and name.endswith("weight"):
            values.data = torch.randn_like(values) * 0.3 + (0.0 if gemma else 1.0)
        elif name.endswith(("mlp.gate.weight", "router.weight")):
            values.data = torch.randn_like(values) * ROUTER
        elif name.endswith("sinks"):
            values.data = torch.randn_like(values) * 1.5
        elif name.endswith("gate_up_proj_bias"):
            # So large that gates and what they let through are cut off now and then.
            values.data = torch.randn_like(values) * 4.0
        elif name.endswith("bias"):
            values.data = torch.randn_like(values) * 0.3
        elif any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
            values.data = torch.randn_like(values) * 0.4
        else:
            values.data = torch.randn_like(values) * 0.22
        values.data = values.data.to(spec["dtype"]).float()
    if spec["finish"]:
        spec["finish"](net)
    for name, values in net.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values.data = (torch.rand_like(values) * 0.3).to(spec["dtype"]).float()
    net.tie_weights()
    if spec["pin"]:
        table = net.model.rotary_emb
        table.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=spec["pin"])
        table.rope_type = "default"
    return net


@torch.no_grad()
def logits_of(net, spec, tokens):
    more = {"softcap": spec["softcap"]} if spec["softcap"] else {}
    out = net(torch.tensor([tokens]), use_cache=False, **more)
    return out.logits[0].float()


def greedy(net, spec, prompt):
    """The continuation, or None if a step has no clear winner."""
    tokens = list(prompt)
    for _ in range(NUM_GREEDY):
        last = logits_of(net, spec, tokens)[-1]
        best = last.topk(2).values
        if best[0] - best[1] < MIN_MARGIN * last.abs().max():
            return None
        tokens.append(int(last.argmax()))
    return tokens[len(prompt):]


@torch.no_grad()
def routes_clearly(net, spec, tokens):
    """Whether the last token goes to the same experts when what its routers see is a little off."""
    clear = []

    def look(router, inputs, outputs):
        row = inputs[0].reshape(-1, inputs[0].shape[-1])[-1]
        rows = row + torch.randn(64, len(row)) * ROUTER_NOISE * row.square().mean().sqrt()
        chosen = forward(router, rows[None])[2].sort(-1).values
        clear.append(bool((chosen == outputs[2][-1].sort(-1).values).all()))

    forward = lambda router, rows: type(router).forward(router, rows)
    routers = [module for module in net.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(look) for router in routers]
    if hooks:
        logits_of(net, spec, tokens)
    for hook in hooks:
        hook.remove()
    return all(clear)


def draw_prompt(net, spec, random, length):
    prompt = []
    while len(prompt) < length:
        token = int(random.integers(3, VOCAB))
        # A token changes nothing about those before it.
        if routes_clearly(net, spec, [*prompt, token]):
            prompt.append(token)
    return prompt


def golden(net, spec, seed):
    random = np.random.default_rng(seed)
    prompts, rows = [], []
    for length in LENGTHS:
        for _ in range(200):
            prompt = draw_prompt(net, spec, random, length)
            continuation = greedy(net, spec, prompt)
            if continuation is not None:
                break
        else:
            raise SystemExit("no prompt with clear winners found: choose another seed")
        prompts.append({"token_ids": prompt, "greedy": continuation})
        rows.append(logits_of(net, spec, prompt).numpy())
    return {"max_model_len": MAX_MODEL_LEN, "prompts": prompts}, np.concatenate(rows)


def legacy_config(folder):
    """config.json as transformers 4 wrote it and as most checkpoints on the Hub still have it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    if "full_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
        config["sliding_window_pattern"] = 6
    parameters = dict(parameters)
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# GGUF, as llama.cpp's converter would write it.

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
GGUF_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def interleave(rows, num_heads):
    """Rows of q or k so that pairs rotated together become neighbours."""
    dim = rows.shape[0] // num_heads
    shape = (num_heads, 2, dim // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


GGUF_EXPERT_NAMES = {
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks", "mlp.experts.gate": "ffn_gate_exps", "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.gate.bias": "exp_probs_b",
    "block_sparse_moe.router": "ffn_gate_inp", "block_sparse_moe.experts.gate": "ffn_gate_exps",
    "block_sparse_moe.experts.up": "ffn_up_exps", "block_sparse_moe.experts.down": "ffn_down_exps",
}
GGUF_LATENT_NAMES = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b": "attn_k_b", "self_attn.v_b": "attn_v_b",
}
GGUF_NAMES |= GGUF_EXPERT_NAMES | GGUF_LATENT_NAMES


def gguf_tensors(net, splits_heads):
    """The tensors of a model; gate and up of experts, which transformers keeps together, one by one, as keys and values of latents."""
    config = net.config
    for name, values in net.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "bias.bias"), values
            continue
        if name.endswith("kv_b_proj.weight") and splits_heads:
            heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield name.replace("kv_b_proj", "k_b"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b"), values
            continue
        if name.endswith("self_attn.sinks"):
            yield f"{name}.weight", values
            continue
        if config.model_type == "gpt_oss" and ".experts." in name:
            yield from gpt_oss_experts(name, values)
            continue
        stem = name.removesuffix(".gate_up_proj")
        if stem != name:
            gate, up = values.chunk(2, dim=1)
            yield f"{stem}.gate.weight", gate
            yield f"{stem}.up.weight", up
        elif name.endswith("experts.down_proj"):
            yield name.removesuffix("_proj") + ".weight", values
        else:
            yield name, values


def gpt_oss_experts(name, values):
    """Gates and ups take turns in the last dimension, and matrices have inputs first."""
    experts, part = name.rsplit(".", 1)
    suffix = "bias" if part.endswith("_bias") else "weight"
    if suffix == "weight":
        values = values.transpose(1, 2)
    if part.startswith("down"):
        yield f"{experts}.down.{suffix}", values
    else:
        yield f"{experts}.gate.{suffix}", values[:, 0::2]
        yield f"{experts}.up.{suffix}", values[:, 1::2]


def add_deepseek_keys(writer, config, splits_heads):
    """What the converter writes since heads are two tensors, or what it wrote before."""
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if splits_heads:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(query_dim)
        writer.add_value_length_mla(config.v_head_dim)
        is_sigmoid = config.model_type == "deepseek_v3"
        kind = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kind.SIGMOID if is_sigmoid else kind.SOFTMAX)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(query_dim)
        writer.add_value_length(config.v_head_dim)
    scaling = config.rope_parameters
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def add_expert_keys(writer, config, family):
    count = getattr(config, "num_local_experts", None) or config.num_experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    elif family not in ("llama", "olmoe", "granitemoe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def write_gguf(net, spec, path):
    config = net.config
    family = spec["gguf_family"] or spec["family"].removesuffix("Text").lower()
    names = GGUF_NAMES | (GGUF_GEMMA_NAMES if family == "gemma3" else {})
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family == "deepseek2":
        add_deepseek_keys(writer, config, spec["splits_heads"])
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        if family not in ("qwen2", "qwen2moe"):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        if getattr(config, "num_experts_per_tok", None):
            add_expert_keys(writer, config, family)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        # There is no key for query_pre_attn_scalar: llama.cpp's gemma3 divides by the root of key_length.
        assert config.query_pre_attn_scalar == head_dim
        parameters = parameters["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    if family == "gpt-oss":
        names = names | {"post_attention_layernorm": "post_attention_norm"}
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if family == "granitemoe":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in ("llama", "granitemoe"):
        writer.add_vocab_size(VOCAB)
        writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(parameters, head_dim))
    store = np.float32 if spec["dtype"] is torch.float32 else np.float16
    for name, values in gguf_tensors(net, spec["splits_heads"]):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        values = values.float().numpy()
        if family in ("llama", "granitemoe") and ("q_proj" in stem or "k_proj" in stem):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            values = interleave(values, heads)
        if family == "gemma3" and "norm" in stem:
            values = values + 1.0
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{layer}.{names[stem]}.{suffix}"
        else:
            name = f"{names[stem]}.{suffix}"
        if values.ndim >= 2 and "ffn_gate_inp" not in name and suffix == "weight":
            rounded = values.astype(store)
            assert np.abs(rounded.astype(np.float32) - values).max() < 1e-6, name
            values = rounded
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_GPT2_NAMES = {
    "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}


def write_gpt2_gguf(net, path):
    config = net.config
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in net.transformer.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        values = values.float().numpy()
        if ".c_" in stem and suffix == "weight":
            values = values.T
        prefix = ""
        if stem.startswith("h."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"blk.{layer}."
        writer.add_tensor(f"{prefix}{GGUF_GPT2_NAMES[stem]}.{suffix}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(parameters, dim):
    freq = parameters["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    wave_length = 2 * np.pi / freq
    context, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    smooth = (context / wave_length - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(wave_length > context / low, factor, np.where(wave_length < context / high, 1.0, middle))
    return divisors.astype(np.float32)


def main(models=MODELS, seed=0):
    for number, (name, spec) in enumerate(models.items(), seed):
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        net = build(spec, 100 + number)
        cases, logits = golden(net, spec, 200 + number)
        if spec["as_gguf"]:
            folder.mkdir()
            if spec["family"] == "GPT2":
                write_gpt2_gguf(net, folder / "model.gguf")
            else:
                write_gguf(net, spec, folder / "model.gguf")
        more = {"max_shard_size": spec["shards"]} if spec["shards"] else {}
        net.to(spec["dtype"]).save_pretrained(folder, **more)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if spec["legacy"]:
            legacy_config(folder)
        (folder / "golden.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
        (folder / "logits.f32").write_bytes(logits.astype("<f4").tobytes())
        if spec["pack"]:
            folder = spec["pack"](net, folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name:20} {size / 1024:6.0f} KiB, logits up to {np.abs(logits).max():.2f}")


if __name__ == "__main__":
    main()
