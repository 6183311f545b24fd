#!/usr/bin/env python3
"""Makes dequant_golden.json and quantize_golden.json beside itself, with the `gguf` package (pip install gguf numpy)."""

import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

# Offsets of the f16 fields in a block. Everything else in a block may be any bits.
F16_FIELDS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}
GRID_F16_FIELDS = {
    "IQ4_XS": [0], "IQ3_S": [0], "IQ3_XXS": [0], "IQ2_S": [0], "IQ2_XS": [0], "IQ2_XXS": [0], "IQ1_S": [0],
    # Four bits at the top of each of four u16.
    "IQ1_M": [],
}
# Usual, largest, negative, smallest normal, smallest subnormal, zero, negative zero.
SCALES = np.array([0.0123, 65504.0, -1.7, 6.104e-05, 5.96e-08, 0.0, -0.0, -65504.0], dtype=np.float16)
NUM_BLOCKS = {32: 12, 256: 5}
rng = np.random.default_rng(20240607)


def hex_of(array: np.ndarray) -> str:
    return array.tobytes().hex()


def blocks_of(name: str) -> np.ndarray:
    """Random bits with finite scales, [blocks, bytes]."""
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[Type[name]]
    count = NUM_BLOCKS[block_len]
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for number, at in enumerate((F16_FIELDS | GRID_F16_FIELDS)[name]):
        scales = SCALES[(np.arange(count) + 3 * number) % len(SCALES)].copy()
        scales[0] = np.float16(rng.normal() * 0.05)
        blocks[:, at:at + 2] = scales.reshape(-1, 1).view(np.uint8)
    if name == "IQ1_M":
        bits = SCALES[np.arange(count) % len(SCALES)].view(np.uint16)
        for nibble in range(4):
            at = 49 + 2 * nibble
            blocks[:, at] = blocks[:, at] & 15 | (bits >> (4 * nibble) & 15).astype(np.uint8) << 4
    return blocks


def float_rows() -> dict[str, np.ndarray]:
    """Finite floats of every exponent as bytes."""
    f32 = rng.integers(0, 2**32, 64, dtype=np.uint32)
    f32 = np.where((f32 & 0x7F800000) == 0x7F800000, f32 & 0x807FFFFF, f32).astype(np.uint32)
    f16 = rng.integers(0, 2**16, 128, dtype=np.uint16)
    f16 = np.where((f16 & 0x7C00) == 0x7C00, f16 & 0x83FF, f16).astype(np.uint16)
    bf16 = rng.integers(0, 2**16, 128, dtype=np.uint16)
    bf16 = np.where((bf16 & 0x7F80) == 0x7F80, bf16 & 0x807F, bf16).astype(np.uint16)
    return {"F32": f32.view(np.uint8), "F16": f16.view(np.uint8), "BF16": bf16.view(np.uint8)}


def entry(name: str, raw: np.ndarray) -> dict[str, str]:
    values = dequantize(raw.reshape(-1), Type[name]).astype(np.float32)
    assert np.isfinite(values).all(), name
    return {"bytes": hex_of(raw), "values": hex_of(values)}


def quantize_values() -> np.ndarray:
    """Rows of 32: normal, with an outlier, all equal, zeros, tiny, huge, one-sided."""
    rows = rng.normal(size=(10, 32)).astype(np.float32)
    rows[1, 5] = 40.0
    rows[2] = 0.7
    rows[3] = 0.0
    rows[4] *= np.float32(1e-4)
    rows[5] *= np.float32(1e4)
    rows[6] = np.abs(rows[6])
    rows[7] = -np.abs(rows[7])
    rows[8] = np.round(rows[8] * 4) / 4
    return rows.reshape(-1)


here = pathlib.Path(__file__).parent
golden = {name: entry(name, raw) for name, raw in float_rows().items()}
golden |= {name: entry(name, blocks_of(name)) for name in F16_FIELDS}

values = quantize_values()
encoded = {"values": hex_of(values)}
for name in ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]:
    encoded[name] = hex_of(np.ascontiguousarray(quantize(values, Type[name])))
(here / "quantize_golden.json").write_text(json.dumps(encoded, indent=1) + "\n")

golden |= {name: entry(name, blocks_of(name)) for name in GRID_F16_FIELDS}
(here / "dequant_golden.json").write_text(json.dumps(golden, indent=1) + "\n")
