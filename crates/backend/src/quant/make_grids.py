#!/usr/bin/env python3
"""Makes grids.bin beside itself from the tables of the `gguf` package (pip install gguf numpy).

The grids lie one after the other in the order of GRIDS, each value as its index among the grid's levels: four to a byte where
there are three levels, two to a byte where there are eight, the first value in the lowest bits.
"""

import pathlib

import numpy as np
from gguf import quants

GRIDS = [quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ1_S, quants.IQ3_XXS, quants.IQ3_S]

packed = b""
for grid in GRIDS:
    grid.init_grid()
    levels = np.array(grid.grid_map, dtype=np.float32)
    indices = np.searchsorted(levels, grid.grid.reshape(-1))
    assert (levels[indices] == grid.grid.reshape(-1)).all()
    bits = 2 if len(levels) == 3 else 4
    fields = indices.reshape(-1, 8 // bits) << np.arange(0, 8, bits)
    packed += fields.sum(axis=1).astype(np.uint8).tobytes()
pathlib.Path(__file__).with_name("grids.bin").write_bytes(packed)
