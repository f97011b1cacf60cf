#!/usr/bin/env python3
"""The peer's own distance from the reference: KL(golden || llama.cpp) at the last position of each prompt of
tests/golden/logits.bin, to set beside `test_logits --only fast`.

  python3 bench/peer_kl.py --model MODEL.gguf --llama-include DIR --llama-lib DIR [--threads 2]

Needs numpy. Both flash-attention settings, both buffer settings and caches of f16 and q8_0 (flash attention alone has
those) are measured."""
import argparse
import os
import struct
import subprocess
import tempfile
import numpy as np
import peer


def golden(path):
    with open(path, "rb") as f:
        d = f.read()
    n, vocab = struct.unpack_from("<II", d, 4)
    at, out = 12, []
    for _ in range(n):
        k, = struct.unpack_from("<I", d, at)
        ids = np.frombuffer(d, "<i4", k, at + 4)
        at += 4 + 4 * k
        lo, step = struct.unpack_from("<ff", d, at)
        out.append((ids, lo + step * np.frombuffer(d, "<u2", vocab, at + 8).astype(np.float64)))
        at += 8 + 2 * vocab
    return vocab, out


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--llama-include", required=True, action="append")
    p.add_argument("--llama-lib", required=True)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    vocab, rows = golden(os.path.join(peer.HERE, "..", "tests", "golden", "logits.bin"))
    with tempfile.TemporaryDirectory() as folder:
        exe = peer.build_peer(args, folder)
        ids, out = os.path.join(folder, "ids"), os.path.join(folder, "out")
        with open(ids, "wb") as f:
            for r, _ in rows:
                f.write(struct.pack("<i", len(r)) + r.astype("<i4").tobytes())
        print("flash,extra_buffers,kv,kl_mean,kl_worst,top1")
        for flash, kv in ((0, "f16"), (1, "f16"), (1, "q8_0")):
            for extra in (0, 1):
                rc = subprocess.run([exe, args.model, str(args.threads), str(
                    flash), str(extra), kv, "--logits", ids, out]).returncode
                if rc:
                    print(f"# flash {flash}, extra buffers {extra}, {kv}: exit {rc}")
                    continue
                z = np.fromfile(out, "<f4").reshape(len(rows), vocab).astype(np.float64)
                z -= z.max(-1, keepdims=True)
                z -= np.log(np.exp(z).sum(-1, keepdims=True))
                kl = [float((np.exp(lp) * (lp - q)).sum()) for (_, lp), q in zip(rows, z)]
                top = sum(lp.argmax() == q.argmax() for (_, lp), q in zip(rows, z))
                print(
                    f"{flash},{extra},{kv},{np.mean(kl):.3e},{np.max(kl):.3e},{top}/{len(rows)}",
                    flush=True)


if __name__ == "__main__":
    main()
