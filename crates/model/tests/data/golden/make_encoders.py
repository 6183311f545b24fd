"""Writes the golden encoders: tiny random checkpoints with the vectors and scores that PyTorch computes for them.

    pip install torch transformers gguf numpy
    python make_encoders.py [names]

Each folder is a checkpoint as `save_pretrained` writes it, with the files of sentence-transformers where they say something, and

    encoder.json   texts (or pairs) as token ids, and for each the pooled vector or the scores, from f32
"""

import json
import re
import shutil
import sys

import gguf
import numpy as np
import torch
import transformers

from make_models import HERE

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH = 96, 32, 4, 2, 64
CLS, SEP = 1, 2
SIZES = (1, 3, 17, 61)

BASE = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=48,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, bos_token_id=CLS,
            eos_token_id=SEP, pad_token_id=0)
ROBERTA = BASE | dict(max_position_embeddings=LENGTH + 2, pad_token_id=1, bos_token_id=0, type_vocab_size=1)


def model(config, network, more, *, pooling="mean", normalize=True, arch=None):
    return locals()


MODELS = {
    "bert": model("BertConfig", "BertModel", BASE, arch="bert"),
    "bert-cls": model("BertConfig", "BertModel", BASE, pooling="cls", normalize=False),
    "bert-reranker": model("BertConfig", "BertForSequenceClassification", BASE | dict(num_labels=1)),
    "roberta": model("XLMRobertaConfig", "XLMRobertaModel", ROBERTA),
    "roberta-reranker": model("XLMRobertaConfig", "XLMRobertaForSequenceClassification", ROBERTA | dict(num_labels=1)),
    "nomic": model("NomicBertConfig", "NomicBertModel", BASE | dict(rope_parameters={"rope_type": "default", "rope_theta": 1000.0}),
                   arch="nomic-bert"),
}


def build(spec, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, spec["config"])(**spec["more"])
    network = getattr(transformers, spec["network"])
    more = {"add_pooling_layer": False} if spec["network"].endswith("Model") else {}
    net = network(config, **more).float().eval()
    net.set_attn_implementation("eager")
    for name, values in net.named_parameters():
        if re.search("norm", name, re.I) and name.endswith("weight"):
            values.data = torch.randn_like(values) * 0.3 + 1.0
        elif name.endswith("bias"):
            values.data = torch.randn_like(values) * 0.3
        else:
            values.data = torch.randn_like(values) * 0.25
        values.data = values.data.to(torch.bfloat16).float()
    return net


@torch.no_grad()
def vectors(net, spec, random):
    texts, results = [], []
    cls = SEP + 3 if "Roberta" in spec["network"] else CLS
    for size in SIZES:
        text = [cls, *(int(token) for token in random.integers(8, VOCAB, size)), SEP]
        rows = net(torch.tensor([text])).last_hidden_state[0]
        vector = rows.mean(0) if spec["pooling"] == "mean" else rows[0]
        if spec["normalize"]:
            vector = vector / vector.norm()
        texts.append(text)
        results.append([float(x) for x in vector])
    return {"texts": texts, "results": results}


@torch.no_grad()
def scores(net, spec, random):
    pairs, results = [], []
    is_roberta = "Roberta" in spec["network"]
    cls = SEP + 3 if is_roberta else CLS
    for first, second in ((1, 1), (5, 9), (12, 30)):
        words = lambda count: [int(token) for token in random.integers(8, VOCAB, count)]
        between = [SEP, SEP] if is_roberta else [SEP]
        one, two = [cls, *words(first), *between], [*words(second), SEP]
        types = torch.tensor([[0] * len(one) + [0 if is_roberta else 1] * len(two)])
        logits = net(torch.tensor([one + two]), token_type_ids=types).logits[0]
        pairs.append(one + two)
        results.append([float(x) for x in torch.sigmoid(logits)])
    return {"texts": pairs, "results": results}


def write_sentence_files(spec, folder):
    kind = lambda name: "sentence_transformers.models." + name
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind("Transformer")},
               {"idx": 1, "name": "1", "path": "1_Pooling", "type": kind("Pooling")}]
    if spec["normalize"]:
        modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": kind("Normalize")})
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": spec["pooling"] == "cls",
               "pooling_mode_mean_tokens": spec["pooling"] == "mean", "pooling_mode_max_tokens": False,
               "pooling_mode_mean_sqrt_len_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


def write_tokenizer(folder):
    """A word of its own for each token: w8, w9, …"""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    mark = lambda token: {"SpecialToken": {"id": token, "type_id": 0}}
    text = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for number, token in enumerate(special)],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": [mark("[CLS]"), text("A"), mark("[SEP]")],
            "pair": [mark("[CLS]"), text("A"), mark("[SEP]"), text("B"), mark("[SEP]")],
            "special_tokens": {token: {"id": token, "ids": [special.index(token)], "tokens": [token]} for token in ("[CLS]", "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                  "vocab": {token: number for number, token in enumerate(special + [f"w{n}" for n in range(4, VOCAB)])}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")


def write_gguf(spec, net, path):
    config, arch = net.config, spec["arch"]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if arch == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["[PAD]", "[CLS]", "[SEP]", "[UNK]"] + [f"\u2581t{token}" for token in range(4, VOCAB)])
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (VOCAB - 4))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(CLS)
    writer.add_eos_token_id(SEP)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, LAYERS)
    tensors = {key: value.float().numpy() for key, value in net.state_dict().items()}
    if arch == "nomic-bert":
        # As the published checkpoint names them.
        own = {"self_attn.o_proj": "attn.out_proj", "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
               "mlp.up_proj": "mlp.fc11", "mlp.gate_proj": "mlp.fc12", "mlp.down_proj": "mlp.fc2", "embeddings.LayerNorm": "emb_ln"}
        for layer in range(LAYERS):
            parts = [tensors.pop(f"layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            tensors[f"layers.{layer}.attn.Wqkv.weight"] = np.concatenate(parts)
        for old, new in own.items():
            tensors = {key.replace(old, new): value for key, value in tensors.items()}
        tensors = {re.sub(r"^layers\.", "encoder.layers.", key): value for key, value in tensors.items()}
    for key, values in tensors.items():
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target, key
        values = values.astype(np.float16) if values.ndim == 2 and "embd" not in target and "types" not in target else values
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
        net, random = build(spec, 500 + number), np.random.default_rng(600 + number)
        is_reranker = spec["network"].endswith("Classification")
        cases = (scores if is_reranker else vectors)(net, spec, random)
        folder.mkdir()
        if spec["arch"]:
            write_gguf(spec, net, folder / "model.gguf")
        net.to(torch.bfloat16).save_pretrained(folder)
        if not is_reranker:
            write_sentence_files(spec, folder)
        if "Roberta" not in spec["network"]:
            write_tokenizer(folder)
        (folder / "encoder.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{name:20} {size / 1024:6.0f} KiB", flush=True)


if __name__ == "__main__":
    main()
