#!/usr/bin/env python3
"""Make logits.bin: for each of the twenty prompts its ids and the reference's log-probabilities at the last
position, 16 bits a token (step about 6e-4, which adds under 1e-7 to a KL divergence).
Usage: python3 tests/golden/make_logits.py models/SmolLM2-135M-Instruct.Q4_1.gguf tests/golden/logits.bin
Layout, little endian: "TLG1", u32 n_prompts, u32 vocab; per prompt u32 n_ids, i32 ids[], f32 min, f32 step, u16[vocab].
Needs numpy, gguf, tokenizers."""
import os
import struct
import sys
import numpy as np
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "reference"))
import llama_numpy  # noqa: E402
import prompts  # noqa: E402


def main(path, out):
    m = llama_numpy.Model(path)
    tok = llama_numpy.tokenizer(m)
    blob, n = b"", 0
    for text in prompts.prompts():
        ids = tok.encode(text, add_special_tokens=False).ids[:2000]
        z = m.logits(np.array(ids), rows=[len(ids) - 1])[0]
        z = z - z.max()
        z = z - np.log(np.exp(z).sum())
        lo, step = z.min(), (z.max() - z.min()) / 65535
        q = np.rint((z - lo) / step).astype("<u2")
        blob += struct.pack("<I", len(ids)) + np.array(ids, "<i4").tobytes()
        blob += struct.pack("<ff", lo, step) + q.tobytes()
        n += 1
        print(n, len(ids), int(z.argmax()), repr(tok.decode([int(z.argmax())])), flush=True)
    with open(out, "wb") as f:
        f.write(b"TLG1" + struct.pack("<II", n, len(z)) + blob)


if __name__ == "__main__":
    main(*sys.argv[1:3])
