"""Step 3, optional: cut the head of a written draft to the rows that it uses most.

The draft chats with itself over training templates on a CPU (it is small), its probabilities at temperatures 1 and .5
are summed over the positions that it writes, and the rows with the largest sums stay, byte for byte. train.py's
--write-head does the same from token counts of the training text, when the size is known beforehand.
"""
import argparse
import random

import numpy as np
import torch

import gguf_io as gg
import prompts
from draft_file import copy_with_rows
from generate import Decoder, advance
from llama import Draft, TargetEmbedding


@torch.no_grad()
def row_use(draft, writer, batch, length, log=print):
    """Summed probability of each head row over what the draft writes, f64 [rows]."""
    scripts = [writer.script(length, False) for _ in range(batch)]
    script = torch.full((batch, max(map(len, scripts))), -1000000)
    for b, s in enumerate(scripts):
        script[b, :len(s)] = torch.tensor([entry for entry, _, _ in s])
    use = torch.zeros(len(draft.head_ids), dtype=torch.float64)
    decoder = Decoder(draft, batch, length, compile=False)
    temperature = torch.rand(batch) * .6 + .4
    at, written = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
    token, _, at, written = advance(at * 0, script, at, written)
    for position in range(length - 1):
        z = decoder.logits(token, position)
        free = script.gather(1, at[:, None])[:, 0] < 0
        for t in (1.0, .5):
            use += (z[free] / t).softmax(1).sum(0).double()
        noise = torch.empty_like(z).exponential_().log_().neg_()
        pick = draft.head_ids[(z + temperature[:, None] * noise).argmax(1)]
        token, _, at, written = advance(pick, script, at, written)
        if position % 25 == 0:
            log(f"position {position} of {length}", flush=True)
    return use


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True)
    p.add_argument("--draft", required=True, help="the file to cut")
    p.add_argument("--out", required=True)
    p.add_argument("--rows", type=int, default=12288, help="rows to keep (default 12288)")
    p.add_argument("--batch", type=int, default=640, help="conversations (default 640)")
    p.add_argument("--length", type=int, default=150, help="tokens of each (default 150)")
    p.add_argument("--seed", type=int, default=5)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    target = TargetEmbedding(a.target)
    draft = Draft(a.draft, target, "cpu", torch.float32)
    use = row_use(draft, prompts.Writer(gg.tokenizer(target.file), random.Random(11)), a.batch, a.length).numpy()
    use[draft.head_ids.numpy() < 3] = np.inf  # end of text, start and end of turn
    keep = np.sort(np.argsort(-use, kind="stable")[:a.rows])
    left = use[np.isfinite(use)].sum() - use[keep][np.isfinite(use[keep])].sum()
    copy_with_rows(draft.file, a.out, keep, f"Tandem default draft, {draft.cfg.n_layers} layers, head of {a.rows}")
    print(f"kept {a.rows} rows; the others held {left / use[np.isfinite(use)].sum():.4%} of the draft's probability")


if __name__ == "__main__":
    main()
