"""Writes ropes.json: tables of inverse frequencies as transformers computes them, one for each way of scaling.

    pip install torch transformers
    python make_ropes.py
"""

import json
import pathlib

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# (rotary dimensions, max_position_embeddings, length served, rope parameters)
CASES = [
    (64, 2048, 2048, {"rope_type": "default", "rope_theta": 10000.0}),
    (80, 2048, 2048, {"rope_type": "default", "rope_theta": 150000.0}),
    (256, 131072, 131072, {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}),
    (96, 4096, 4096, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    (96, 4096, 16384, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    (96, 4096, 5000, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5}),
    (128, 131072, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    (64, 131072, 131072, {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    (128, 131072, 131072, {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                           "original_max_position_embeddings": 32768}),
    (64, 163840, 163840, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 1.0,
                          "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096}),
    (64, 131072, 131072, {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                          "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 4096}),
    (128, 65536, 65536, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "attention_factor": 1.25,
                         "original_max_position_embeddings": 4096}),
    # The range of blended dimensions is empty.
    (16, 16, 16, {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 1.5, "beta_slow": 1.0,
                  "original_max_position_embeddings": 8}),
]


def main():
    out = []
    for dim, max_positions, length, parameters in CASES:
        config = LlamaConfig(head_dim=dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters))
        if parameters["rope_type"] == "default":
            theta = parameters["rope_theta"]
            inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
            scale = 1.0
        else:
            inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=length)
        out.append({"rotary_dim": dim, "max_position_embeddings": max_positions, "max_model_len": length,
                    "parameters": parameters, "inv_freq": inv_freq.tolist(), "scale": float(scale)})
    text = "[\n" + ",\n".join(json.dumps(case) for case in out) + "\n]\n"
    (pathlib.Path(__file__).parent / "ropes.json").write_text(text)


main()
