"""Writes the golden models of the families in `src/families`, as `make_models.py` does for the others.

    pip install torch transformers gguf numpy
    python make_families.py [names]

Models that transformers has no class for are a llama of transformers under other names: the numbers are still its own. GGUF files are
written as llama.cpp's converter writes them: names from the `gguf` package, rows of fused tensors in the order q, k, v, rows of q
and k permuted and 1 added to norms where the converter does that.
"""

import json
import re
import shutil
import sys

import gguf
import numpy as np
import torch
import transformers

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import make_models
from make_models import HERE, MAX_MODEL_LEN, golden, interleave, rope

VOCAB = 96
make_models.VOCAB = VOCAB
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 2, 8, 48

BASE = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, max_position_embeddings=MAX_MODEL_LEN, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=True, attention_dropout=0.0,
)
GPT = dict(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=HEADS, n_positions=MAX_MODEL_LEN, bos_token_id=1, eos_token_id=2,
           resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def without(*names, **changes):
    return {key: value for key, value in BASE.items() if key not in names} | changes


def model(family, config, *, causal=None, arch=None, norm_offset=0.0, permute=False, rename=None, window=None):
    return locals() | {"softcap": None}


class Alibi:
    """A llama that adds distances to the scores instead of rotating."""

    def __init__(self, net):
        self.net, self.config = net, net.config
        heads = net.config.num_attention_heads
        self.slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)])
        net.model.rotary_emb.inv_freq = torch.zeros_like(net.model.rotary_emb.inv_freq)

    def __call__(self, ids, use_cache=False):
        position = torch.arange(ids.shape[1])
        distance = (position[None, :] - position[:, None]).float()
        mask = self.slopes[:, None, None] * distance
        mask = torch.where(distance > 0, torch.tensor(torch.finfo(torch.float32).min), mask)
        return self.net(ids, attention_mask=mask[None], use_cache=use_cache)


def fuse_groups(tensors, stem_of, fused):
    """q, k and v of a llama as one tensor, for each kv head its queries, its key, its value."""
    for layer in range(2):
        q, k, v = (tensors.pop(stem_of.format(layer, part)) for part in "qkv")
        groups = [x.reshape(KV_HEADS, -1, HEAD_DIM, HIDDEN) for x in (q, k, v)]
        tensors[fused.format(layer)] = torch.cat(groups, 1).reshape(-1, HIDDEN)


def as_internlm2(tensors, config):
    fuse_groups(tensors, "model.layers.{}.self_attn.{}_proj.weight", "model.layers.{}.attention.wqkv.weight")
    names = {
        "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    return "InternLM2ForCausalLM", "internlm2", rename_all(tensors, names)


def as_baichuan(tensors, config, name="BaiChuanForCausalLM"):
    for layer in range(2):
        stem = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{stem}{part}_proj.weight") for part in "qkv"]
        tensors[f"{stem}W_pack.weight"] = torch.cat(parts)
    return name, "baichuan", tensors


def as_baichuan2(tensors, config):
    """The logits are those of a head of normalised rows: the file has rows of other lengths."""
    factors = torch.linspace(0.5, 2.0, VOCAB).to(torch.bfloat16).float()
    # Powers of two keep the rounding of the rows.
    factors = 2.0 ** torch.round(torch.log2(factors))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * factors[:, None]
    config["norm_head"] = True
    return as_baichuan(tensors, config, "BaichuanForCausalLM")


def as_exaone(tensors, config):
    names = {
        "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn.": "attn.attention.", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj",
    }
    return "ExaoneForCausalLM", "exaone", rename_all(tensors, names)


def rename_all(tensors, names):
    def renamed(name):
        for old, new in names.items():
            name = name.replace(old, new)
        return name
    return {renamed(name): values for name, values in tensors.items()}


ALTERNATE = ["sliding_attention", "full_attention"]
THREE_OF_FOUR = ["sliding_attention"] * 3 + ["full_attention"]

MODELS = {
    "opt": model("OPT", without("intermediate_size", "num_key_value_heads", ffn_dim=INTERMEDIATE, word_embed_proj_dim=HIDDEN,
                                dropout=0.0, layerdrop=0.0)),
    "gpt-neox": model("GPTNeoX", without("num_key_value_heads", tie_word_embeddings=False, rope_parameters=rope(partial_rotary_factor=0.5)),
                      arch="gptneox"),
    "bloom": model("Bloom", dict(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=2, n_head=HEADS, bos_token_id=1, eos_token_id=2,
                                 seq_length=MAX_MODEL_LEN, hidden_dropout=0.0, attention_dropout=0.0), arch="bloom"),
    "mpt": model("Mpt", dict(vocab_size=VOCAB, d_model=48, n_layers=2, n_heads=3, max_seq_len=MAX_MODEL_LEN, expansion_ratio=4,
                             bos_token_id=1, eos_token_id=2), arch="mpt"),
    "falcon": model("Falcon", without("intermediate_size", "num_key_value_heads", new_decoder_architecture=False, multi_query=True,
                                      parallel_attn=True, bias=False, alibi=False, ffn_hidden_size=INTERMEDIATE), arch="falcon"),
    "falcon-new": model("Falcon", without("intermediate_size", "num_key_value_heads", new_decoder_architecture=True, num_kv_heads=KV_HEADS,
                                          bias=False, alibi=False, ffn_hidden_size=INTERMEDIATE), arch="falcon"),
    "falcon-alibi": model("Falcon", without("intermediate_size", "num_key_value_heads", new_decoder_architecture=False, multi_query=False,
                                            parallel_attn=False, bias=True, alibi=True, ffn_hidden_size=INTERMEDIATE)),
    "phi": model("Phi", without(tie_word_embeddings=False, rope_parameters=rope(partial_rotary_factor=0.5)), arch="phi2"),
    "phi3": model("Phi3", without(sliding_window=11, rope_parameters=rope(), rms_norm_eps=1e-5), arch="phi3"),
    "phi3-longrope": model("Phi3", without(
        original_max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters=rope("longrope", partial_rotary_factor=0.75, original_max_position_embeddings=32,
                             short_factor=[1.0, 1.1, 1.3], long_factor=[1.2, 2.0, 5.0]))),
    "starcoder2": model("Starcoder2", without(sliding_window=11, rope_parameters=rope(), residual_dropout=0.0, embedding_dropout=0.0),
                        arch="starcoder2", window=11),
    "cohere": model("Cohere", without(logit_scale=0.25, rope_parameters=rope()), arch="command-r"),
    "cohere-plus": model("Cohere", without(logit_scale=0.25, use_qk_norm=True, rope_parameters=rope()), arch="command-r"),
    "cohere2": model("Cohere2", without(logit_scale=0.25, num_hidden_layers=4, sliding_window=9, layer_types=THREE_OF_FOUR,
                                        intermediate_size=32, rope_parameters=rope()), arch="cohere2"),
    "olmo2": model("Olmo2", without(rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=rope()), arch="olmo2"),
    "granite": model("Granite", without(embedding_multiplier=3.0, attention_multiplier=0.4, residual_multiplier=0.3, logits_scaling=4.0,
                                        rms_norm_eps=1e-3, rope_parameters=rope()), arch="granite", permute=True),
    "gemma": model("Gemma", without(head_dim=16, num_key_value_heads=1, rope_parameters=rope()), arch="gemma", norm_offset=1.0),
    "gemma2": model("Gemma2", without(head_dim=16, sliding_window=9, num_hidden_layers=3, query_pre_attn_scalar=16,
                                      attn_logit_softcapping=5.0, final_logit_softcapping=6.0, intermediate_size=32,
                                      rope_parameters=rope()), arch="gemma2", norm_offset=1.0),
    "smollm3": model("SmolLM3", without(num_hidden_layers=4, intermediate_size=32, rope_parameters=rope()), arch="smollm3", permute=True),
    "glm": model("Glm", without(head_dim=8, attention_bias=True, tie_word_embeddings=False,
                                rope_parameters=rope(partial_rotary_factor=0.5)), arch="chatglm"),
    "glm4": model("Glm4", without(head_dim=8, attention_bias=True, tie_word_embeddings=False,
                                  rope_parameters=rope(partial_rotary_factor=0.5)), arch="glm4"),
    "internlm2": model("Llama", without(tie_word_embeddings=False, rms_norm_eps=1e-5, rope_parameters=rope()), rename=as_internlm2,
                       arch="internlm2", permute=True),
    "baichuan": model("Llama", without(num_key_value_heads=HEADS, tie_word_embeddings=False, rope_parameters=rope()), rename=as_baichuan,
                      arch="baichuan", permute=True),
    "baichuan-alibi": model("Llama", without(num_key_value_heads=HEADS, tie_word_embeddings=False, rope_parameters=rope()),
                            rename=as_baichuan2),
    "stablelm": model("StableLm", without(use_qkv_bias=True, rope_parameters=rope(partial_rotary_factor=0.25), hidden_dropout=0.0),
                      arch="stablelm"),
    "gptj": model("GPTJ", GPT | dict(rotary_dim=4, n_inner=INTERMEDIATE, tie_word_embeddings=False)),
    "gpt-bigcode": model("GPTBigCode", GPT | dict(n_inner=INTERMEDIATE), arch="starcoder"),
    "nemotron": model("Nemotron", without(tie_word_embeddings=False, rope_parameters=rope(partial_rotary_factor=0.5), hidden_dropout=0.0),
                      arch="nemotron", norm_offset=1.0),
    "arcee": model("Arcee", without(rope_parameters=rope()), arch="arcee", permute=True),
    "seed-oss": model("SeedOss", without(head_dim=8, rope_parameters=rope(), residual_dropout=0.0), arch="seed_oss"),
    "ernie45": model("Ernie4_5", without(head_dim=8, rope_parameters=rope()), arch="ernie4_5"),
    "exaone": model("Llama", without(rms_norm_eps=1e-5, rope_parameters=rope()), rename=as_exaone, arch="exaone"),
    "exaone4": model("Exaone4", without(num_hidden_layers=4, intermediate_size=32, sliding_window=9, sliding_window_pattern=4,
                                        layer_types=THREE_OF_FOUR, rope_parameters=rope()), arch="exaone4"),
}


def build(name, spec, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, spec["family"] + "Config")(**spec["config"])
    causal = getattr(transformers, spec["causal"] or spec["family"] + "ForCausalLM")
    # The eager falcon adds its slopes twice.
    attention = "sdpa" if name == "falcon-alibi" else "eager"
    net = causal._from_config(config, attn_implementation=attention).float().eval()
    for key, values in net.named_parameters():
        is_norm = "norm" in key or re.search(r"\bln_", key)
        if is_norm:
            offset = 1.0 if key.endswith("weight") and not spec["norm_offset"] else 0.0
            values.data = torch.randn_like(values) * 0.3 + offset
        elif key.endswith("bias"):
            values.data = torch.randn_like(values) * 0.3
        elif re.search("embed|lm_head|wte|wpe|word_", key):
            values.data = torch.randn_like(values) * 0.4
        else:
            values.data = torch.randn_like(values) * 0.25
        values.data = values.data.to(torch.bfloat16).float()
    if name == "baichuan-alibi":
        head = net.lm_head.weight
        # Rows of length 1 that bf16 holds: one value of half for each of four places.
        head.data = torch.zeros_like(head)
        for row in range(VOCAB):
            places = torch.randperm(HIDDEN)[:4]
            head.data[row, places] = 0.5 * (torch.randint(0, 2, (4,)).float() * 2 - 1)
    net.tie_weights()
    if name == "phi3-longrope":
        # Transformers changes its table as a sequence grows; Baton serves with that of the longest sequence.
        table = net.model.rotary_emb
        table.inv_freq, table.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=MAX_MODEL_LEN)
        table.rope_type = "default"
    return Alibi(net) if name == "baichuan-alibi" else net


def save(name, spec, net, folder):
    inner = net.net if isinstance(net, Alibi) else net
    inner.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if not spec["rename"]:
        return
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    class_name, kind, tensors = spec["rename"](tensors, config)
    save_file({key: value.contiguous().to(torch.bfloat16) for key, value in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    config |= {"architectures": [class_name], "model_type": kind, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    for key in ("rope_parameters", "dtype", "head_dim"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_gguf(name, spec, net, path):
    config, arch = net.config, spec["arch"]
    writer = gguf.GGUFWriter(str(path), arch)
    get = lambda *names: next((getattr(config, n) for n in names if getattr(config, n, None) is not None), None)
    layers = get("num_hidden_layers", "n_layer", "n_layers")
    hidden = get("hidden_size", "n_embd", "d_model")
    heads = get("num_attention_heads", "n_head", "n_heads")
    kv_heads = {"falcon": 1, "gpt-bigcode": 1, "falcon-new": KV_HEADS}.get(name) or get("num_key_value_heads") or heads
    head_dim = get("head_dim") or hidden // heads
    writer.add_context_length(MAX_MODEL_LEN)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    ffn = {"bloom": 4 * HIDDEN, "mpt": 4 * 48}.get(name) or get("ffn_hidden_size", "intermediate_size", "n_inner")
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if head_dim * heads != hidden:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rms = get("rms_norm_eps")
    if arch in ("command-r", "cohere2", "stablelm", "nemotron", "starcoder2", "phi2", "gptneox", "bloom", "mpt", "falcon", "starcoder"):
        writer.add_layer_norm_eps(get("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"))
    else:
        writer.add_layer_norm_rms_eps(rms)
    parameters = get("rope_parameters") or {}
    if arch not in ("bloom", "mpt", "starcoder"):
        writer.add_rope_dimension_count(int(head_dim * parameters.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(parameters.get("rope_theta", 10000.0))
    if arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if arch in ("cohere2", "gemma2", "phi3", "exaone4") or spec["window"]:
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, layers)
    tied = bool(get("tie_word_embeddings")) if get("tie_word_embeddings") is not None else True
    for key, values in net.state_dict().items():
        if key in ("lm_head.weight", "embed_out.weight") and tied or key.endswith("rotary_emb.inv_freq"):
            continue
        values = values.float().numpy()
        if spec["permute"] and re.search("[qk]_proj", key):
            values = interleave(values, heads if "q_proj" in key else kv_heads)
        if spec["norm_offset"] and "norm" in key and key.endswith("weight"):
            values = values + spec["norm_offset"]
        if "query_key_value" in key:
            groups = values.reshape(kv_heads, heads // kv_heads + 2, head_dim, *values.shape[1:])
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        # The converter reads names of bloom without their first part.
        key = key.removeprefix("transformer.") if arch == "bloom" else key
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target, key
        if values.ndim == 2 and "norm" not in key:
            values = values.astype(np.float16)
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    for number, (name, spec) in enumerate(MODELS.items()):
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        net = build(name, spec, 300 + number)
        cases, logits = golden(net, spec, 400 + number)
        folder.mkdir()
        if spec["arch"]:
            write_gguf(name, spec, net, folder / "model.gguf")
        save(name, spec, net, folder)
        (folder / "golden.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
        (folder / "logits.f32").write_bytes(logits.astype("<f4").tobytes())
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name:20} {size / 1024:6.0f} KiB, logits up to {np.abs(logits).max():.2f}", flush=True)


if __name__ == "__main__":
    main()
