"""Writes tiny quantised checkpoints of every supported scheme, with the logits of PyTorch for their dequantised weights.

    pip install torch transformers safetensors numpy compressed-tensors
    python make_models.py [NAME ...]

Each folder has `config.json` with the scheme's quantization_config, `model.safetensors` as the tools of that scheme write
it, `golden.json` (a prompt, and how far f32 may be off: minima and scales of blocks are f16) and `logits.f32` (all positions, f32 little endian). Weights are random integers or e4m3 codes with
random scales; the network that PyTorch runs gets `scale * (q - zero)` of the same numbers, so packing and unpacking are not
in its way. The layouts are written down here from what is published: AutoAWQ's `gemm`, AutoGPTQ's `gptq` and `gptq_v2`,
and for `pack-quantized` and `mxfp4-pack-quantized` the functions of the compressed-tensors package itself.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import MXFP4PackedCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
PROMPT_LEN = 12


def pack(values, bits, dim, order=None):
    """Unsigned integers to words along a dimension, the first in the lowest bits."""
    n = 32 // bits
    values = values.movedim(dim, -1).to(torch.int64)
    values = values.reshape(*values.shape[:-1], -1, n)
    if order:
        values = values[..., order]
    words = (values << (torch.arange(n) * bits)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.movedim(-1, dim).contiguous()


class Scheme:
    """One module's tensors and what they mean. `weight` is [out, in]."""

    def __init__(self, config, make, ignore=(), **model):
        self.config, self.make, self.ignore, self.model = config, make, ignore, model


def integers(weight, bits, group, symmetric, groups_of=None):
    """(q, scales, zeros) with scales f16 as [groups, out], q as [out, in]."""
    out, inputs = weight.shape
    group = inputs if group == -1 else group
    count = -(-inputs // group)
    groups_of = torch.arange(inputs) // group if groups_of is None else groups_of
    top = 2**bits - 1
    q, scales, zeros = torch.zeros_like(weight), torch.zeros(count, out), torch.zeros(count, out)
    for g in range(count):
        part = weight[:, groups_of == g]
        low, high = part.amin(1), part.amax(1)
        if symmetric:
            scale, zero = part.abs().amax(1) / (top / 2), torch.full((out,), float(2 ** (bits - 1)))
        else:
            scale = (high - low) / top
            zero = (-low / scale).round().clamp(1, top)
        scale = scale.half().float()
        q[:, groups_of == g] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top)
        scales[g], zeros[g] = scale, zero
    real = scales[groups_of].T * (q - zeros[groups_of].T)
    return q, scales, zeros, real, groups_of


def awq(group):
    def make(weight, _):
        q, scales, zeros, real, _ = integers(weight, 4, group, False)
        return {
            "qweight": pack(q.T, 4, 1, AWQ_ORDER),
            "qzeros": pack(zeros, 4, 1, AWQ_ORDER),
            "scales": scales.half(),
        }, real

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Scheme(config | {"modules_to_not_convert": ["v_proj"] if group == 64 else None}, make,
                  ignore=("v_proj",) if group == 64 else ())


def gptq(bits, group, symmetric, desc_act=False, v2=False):
    def make(weight, name):
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        groups_of = torch.arange(inputs) // size
        if desc_act:
            groups_of = order_of(name, inputs, size)
        q, scales, zeros, real, groups_of = integers(weight, bits, group, symmetric, groups_of)
        return {
            "qweight": pack(q.T, bits, 0),
            "qzeros": pack(zeros - (0 if v2 else 1), bits, 1),
            "scales": scales.half(),
            "g_idx": groups_of.to(torch.int32),
        }, real

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act,
              "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return Scheme(config, make)


def e4m3(weight, scale):
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(weight, _):
    scale = weight.abs().max() / 448
    codes = e4m3(weight, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, codes.float() * scale


def fp8_channel(weight, _):
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = e4m3(weight, scale.float())
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_block(weight, _):
    out, inputs = weight.shape
    scale = torch.rand(-(-out // 128), -(-inputs // 128)) * 1e-3 + 5e-4
    wide = scale.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :inputs]
    codes = e4m3(weight, wide)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def int8_channel(weight, _):
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def order_of(name, inputs, group):
    """The groups of columns in another order. q and k are ordered alike, v otherwise: they stand in one matrix."""
    kind = {"k_proj": "q_proj", "up_proj": "gate_proj"}.get(name, name)
    return (torch.arange(inputs) // group)[torch.from_numpy(np.random.default_rng(sum(map(ord, kind))).permutation(inputs))]


def compressed(bits, group, symmetric, actorder=False):
    def make(weight, name):
        groups_of = order_of(name, weight.shape[1], group) if actorder else None
        q, scales, zeros, real, groups_of = integers(weight, bits, group, symmetric, groups_of)
        offset = 2 ** (bits - 1)
        parts = {
            "weight_packed": pack_to_int32((q - offset).to(torch.int8), bits),
            "weight_scale": scales.T.contiguous().half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack_to_int32((zeros.T - offset).to(torch.int8), bits, packed_dim=0)
        if actorder:
            parts["weight_g_idx"] = groups_of.to(torch.int32)
        return parts, real

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    weights |= {"actorder": "group"} if actorder else {}
    return Scheme(compressed_config("pack-quantized", weights), make)


def mxfp4(weight, _):
    """Compressed and opened again by the package: what its own users see."""
    top = weight.reshape(weight.shape[0], -1, 32).abs().amax(-1)
    scale = torch.exp2(torch.floor(torch.log2(top)) - 2)
    scheme = QuantizationScheme(targets=["Linear"], weights=MXFP4)
    parts = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    real = MXFP4PackedCompressor.decompress(dict(parts), scheme)["weight"].float()
    return {part: parts[part] for part in ("weight_packed", "weight_scale")}, real


def compressed_config(format, weights, activations=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed"}


TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
CHANNEL = {"num_bits": 8, "strategy": "channel", "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
         "scale_dtype": "torch.uint8"}
SCHEMES = {
    "fp8-tensor-static": Scheme({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8-channel": Scheme(
        compressed_config("float-quantized", CHANNEL | {"type": "float"}, TOKENS | {"type": "float"}), fp8_channel),
    # 192 is a block and a half.
    "fp8-block": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, fp8_block,
        intermediate_size=192),
    "awq-g32": awq(32),
    "awq-g64": awq(64),
    "awq-g128": awq(128),
    "gptq-4-g128": gptq(4, 128, True),
    "gptq-4-desc-g32": gptq(4, 32, False, desc_act=True),
    "gptq-4-desc-v2": gptq(4, 64, True, desc_act=True, v2=True),
    "gptq-8-g64": gptq(8, 64, True),
    "gptq-8-rows": gptq(8, -1, False),
    "w4a16-g128": compressed(4, 128, True),
    "w4a16-g32-zeros": compressed(4, 32, False),
    "w8a8-int8": Scheme(compressed_config("int-quantized", CHANNEL | {"type": "int"}, TOKENS | {"type": "int"}), int8_channel),
    "w4a16-g32-actorder": compressed(4, 32, False, actorder=True),
    "mxfp4": Scheme(compressed_config("mxfp4-pack-quantized", MXFP4), mxfp4),
    # The shared expert is as wide as two others; its matrices are cut in two. All experts are chosen: no choice hangs on rounding.
    "fp8-experts": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, fp8_block,
        num_experts=3, num_experts_per_tok=3, moe_intermediate_size=128, shared_expert_intermediate_size=256,
        norm_topk_prob=False),
}
FAMILIES = {"fp8-experts": "Qwen2Moe", "awq-g32": "Qwen2", "fp8-block": "Qwen3", "gptq-4-g128": "Mistral", "w8a8-int8": "Gemma3Text"}


def write_experts(scheme, module, part, values, tensors):
    """All experts are one parameter in PyTorch, and a module each in files."""
    names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
    for number, expert in enumerate(values.data):
        for name, weight in zip(names, expert.chunk(len(names))):
            parts, real = scheme.make(weight.clone(), name)
            weight.copy_(real)
            tensors.update({f"{module}.{number}.{name}.{part}": value.contiguous() for part, value in parts.items()})


@torch.no_grad()
def write(name, scheme, seed):
    torch.manual_seed(seed)
    family = FAMILIES.get(name, "Llama")
    sizes = dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1,
                 eos_token_id=2, pad_token_id=0)
    config = getattr(transformers, family + "Config")(**sizes | scheme.model)
    causal = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")
    net = causal._from_config(config, attn_implementation="eager").float().eval()
    tensors = {}
    for key, values in net.named_parameters():
        gemma = family.startswith("Gemma")
        if "norm" in key:
            values.data = (torch.randn_like(values) * 0.2 + (0.0 if gemma else 1.0)).bfloat16().float()
        else:
            values.data = (torch.randn_like(values) * (0.4 if "embed" in key else 0.12)).bfloat16().float()
        module, part = key.rsplit(".", 1)
        if module.endswith(".experts"):
            write_experts(scheme, module, part, values, tensors)
            continue
        short = module.rsplit(".", 1)[-1]
        if short.endswith("_proj") and part == "weight" and short not in scheme.ignore:
            parts, real = scheme.make(values.data, short)
            values.data = real
            tensors.update({f"{module}.{part}": value.contiguous() for part, value in parts.items()})
        else:
            tensors[key] = values.data.bfloat16()
    net.tie_weights()
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    description = config.to_dict() | {"architectures": [causal.__name__], "dtype": "bfloat16"}
    description["quantization_config"] = {key: value for key, value in scheme.config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(description, indent=1, sort_keys=True, default=str) + "\n")
    prompt = [int(token) for token in np.random.default_rng(seed).integers(3, 96, PROMPT_LEN)]
    (folder / "golden.json").write_text(json.dumps(
        {"max_model_len": 64, "prompts": [{"token_ids": prompt}], "full_tolerance": 3e-3}) + "\n")
    net(torch.tensor([prompt]), use_cache=False).logits[0].numpy().astype("<f4").tofile(folder / "logits.f32")


if __name__ == "__main__":
    for seed, (name, scheme) in enumerate(SCHEMES.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        write(name, scheme, seed)
        print(name)
