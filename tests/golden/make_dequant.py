#!/usr/bin/env python3
"""Writes dequant.bin: random blocks of every GGUF type that we read, and their f32 values.

Made with the PyPI package gguf 0.19.0 (its numpy dequantisation is the formats' published reference).
Records: u32 name length, name, u32 bytes, u32 values, the file's bytes, the values as f32. Scales are
random f16 of both signs, subnormal ones among them.
"""
import os
import struct

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

# name, values a block, bytes a block, byte offsets of f16 scales
TYPES = [("F32", 1, 4, []), ("F16", 1, 2, []), ("BF16", 1, 2, []), ("Q8_0", 32, 34, [0]),
         ("Q4_0", 32, 18, [0]), ("Q4_1", 32, 20, [0, 2]), ("Q5_0", 32, 22, [0]), ("Q5_1", 32, 24, [0, 2]),
         ("Q4_K", 256, 144, [0, 2]), ("Q5_K", 256, 176, [0, 2]), ("Q6_K", 256, 210, [208])]

rng = np.random.default_rng(20261129)
out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "dequant.bin")
with open(out, "wb") as f:
    for name, values, size, scales in TYPES:
        blocks = 32 if values == 1 else 5 if values == 32 else 2
        raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
        for at in scales:
            d = (rng.standard_normal(blocks) * 0.01).astype(np.float16)
            d[0] = np.float16(3e-6) if at == scales[0] else np.float16(-0.5)
            raw[:, at:at + 2] = d.view(np.uint8).reshape(blocks, 2)
        if values == 1:
            x = rng.standard_normal(blocks).astype(np.float32)
            x[:3] = [0, -1.5, 3e-6]
            raw = (x if name == "F32" else x.astype(np.float16) if name == "F16"
                   else (x.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8).reshape(1, -1)
        want = dequantize(raw.reshape(1, -1), T[name]).astype(np.float32).ravel()
        assert want.size == blocks * values
        f.write(struct.pack("<I", len(name)) + name.encode() + struct.pack("<II", raw.size, want.size))
        f.write(raw.tobytes() + want.tobytes())
