"""Writes smollm2_exact.json: the default model as PyTorch computes it in f32 from the same quantised weights.

    pip install torch transformers gguf numpy
    python make_smollm2_exact.py SmolLM2-135M-Instruct.Q4_1.gguf

llama.cpp (smollm2_golden.json) rounds activations to 8 bits before each product. That rounding is chaotic: any other order
of additions flips some of the roundings, and after a few layers two correct programs differ by as much as each differs
from exact arithmetic. What is compared with this file, in f32 throughout, may differ by the order of additions only.
"""

import json
import pathlib
import sys

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
NUM_GREEDY = 40
# The longest prompts add minutes and no new path.
MAX_PROMPT = 64

NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}


def load(path):
    reader = gguf.GGUFReader(path)

    def value(key):
        field = reader.fields["llama." + key]
        return field.parts[field.data[0]][0].item()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=value("vocab_size"), hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"), num_hidden_layers=value("block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"), max_position_embeddings=value("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")}, tie_word_embeddings=True,
    )
    net = LlamaForCausalLM._from_config(config, attn_implementation="eager").float().eval()
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *layer, kind = tensor.name.removesuffix(".weight").split(".")
        if kind in ("attn_q", "attn_k"):
            count = heads if kind == "attn_q" else kv_heads
            values = values.reshape(count, values.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        state[f"{prefix}{NAMES[kind]}.weight"] = torch.from_numpy(values.copy())
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return net


@torch.no_grad()
def greedy(net, prompt):
    tokens, top_tokens, top_logits = [], [], []
    out = net(torch.tensor([prompt]), use_cache=True)
    for step in range(NUM_GREEDY):
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        top_tokens.append(best.indices.tolist())
        top_logits.append([round(logit, 5) for logit in best.values.tolist()])
        if step + 1 < NUM_GREEDY:
            out = net(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return {"tokens": tokens, "top2": top_tokens, "top2_logits": top_logits}


@torch.no_grad()
def mean_nll(net, tokens):
    logits = net(torch.tensor([tokens])).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(tokens[1:])))


def main():
    golden = json.loads((HERE / "smollm2_golden.json").read_text())
    net = load(sys.argv[1])
    cases = []
    for case in golden["greedy"]:
        if len(case["token_ids"]) <= MAX_PROMPT:
            cases.append({"name": case["name"], "token_ids": case["token_ids"], **greedy(net, case["token_ids"])})
            print(case["name"], cases[-1]["tokens"][:8], flush=True)
    exact = {
        "model": golden["model"],
        "oracle": f"PyTorch {torch.__version__.split('+')[0]}, f32, weights decoded from the file",
        "greedy": cases,
        "prose": {"file": "prose.txt", "mean_nll": mean_nll(net, golden["prose"]["token_ids"])},
    }
    text = json.dumps(exact, separators=(",", ":")).replace('{"name":', '\n{"name":').replace(',"prose":', ',\n"prose":')
    (HERE / "smollm2_exact.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
