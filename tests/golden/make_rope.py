#!/usr/bin/env python3
"""Print the table of rope frequencies in tests/test_rope.c: numpy in f32, from the published formulas
(transformers' modeling_rope_utils.py is the authority; Llama 3.1's model card, YaRN arXiv:2309.00071)."""
import math

import numpy as np

f32 = np.float32


def plain(dim, base):
    return f32(1) / np.power(f32(base), np.arange(0, dim, 2, dtype=f32) / f32(dim), dtype=f32)


def llama3(dim, base, factor, low, high, old):
    f = plain(dim, base)
    wave = f32(2 * math.pi) / f
    smooth = (f32(old) / wave - f32(low)) / f32(high - low)
    blend = (f32(1) - smooth) * f / f32(factor) + smooth * f
    out = np.where(wave > f32(old / low), f / f32(factor), f)
    middle = ~(wave < f32(old / high)) & ~(wave > f32(old / low))
    return np.where(middle, blend, out)


def yarn(dim, base, factor, fast, slow, old):
    def turns_at(n):
        return dim * math.log(old / (n * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_at(fast)), 0)
    high = min(math.ceil(turns_at(slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=f32) - f32(low)) / f32(high - low), 0, 1)
    f = plain(dim, base)
    period = np.power(f32(base), np.arange(0, dim, 2, dtype=f32) / f32(dim), dtype=f32)
    return f32(1) / (f32(factor) * period) * ramp + f * (f32(1) - ramp)


CASES = [
    ("none 64", plain(64, 100000)),
    ("linear 128", plain(128, 10000) / f32(8)),
    ("llama3 64", llama3(64, 500000, 32, 1, 4, 8192)),
    ("llama3 128", llama3(128, 500000, 8, 1, 4, 8192)),
    ("yarn 128", yarn(128, 1000000, 4, 32, 1, 32768)),
    ("yarn 64", yarn(64, 10000, 16, 48, 2, 2048)),
]

for name, f in CASES:
    n = len(f)
    where = [0, 1, n // 4, n // 2 - 4, n // 2 - 1, n // 2, n // 2 + 3, 5 * n // 8, 3 * n // 4, n - 1]
    print(name, ", ".join(f"{{{i}, {f[i]:.9g}f}}" for i in where))
print("mscale 4:", 0.1 * math.log(4) + 1, " deepseek:", (0.1 * 0.8 * math.log(40) + 1) / (0.1 * 1.2 * math.log(40) + 1))
