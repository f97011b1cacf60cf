"""Step 1: the target talks to itself. Writes shards of token sequences for training and for held-out evaluation.

All sequences of a batch advance in lockstep, one position a step, so the KV cache needs no lengths and no
masks: prompts are put down token by token, the model fills the rest, and one conversation follows the next until
the sequence is full. What is written at each position (template, user, assistant; which kind of conversation) is
kept beside the tokens.
"""
import argparse
import os
import random
import time

import numpy as np
import torch
import torch.nn.functional as F

import gguf_io as gg
import prompts
from llama import Target, rms_norm, rope_tables, rotate

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU without Triton: attention by PyTorch, slow and the same
    triton = None

END_OF_TURN, END_OF_TEXT = 2, 0  # <|im_end|>, <|endoftext|> of the default target

if triton is not None:
    @triton.jit
    def _attend_kernel(q, k, v, o, last, stride, scale, GROUP: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
        """One program: the GROUP query heads that share one KV head of one sequence, against positions 0..last."""
        row = tl.program_id(0).to(tl.int64)
        n = tl.load(last).to(tl.int32) + 1
        r, d, j = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, TILE)
        at = row * (GROUP * DIM) + r[:, None] * DIM + d[None, :]
        used = (r < GROUP)[:, None]
        query = tl.load(q + at, mask=used, other=0.0)
        top = tl.full([16], -1e30, tl.float32)
        total = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, DIM], tl.float32)
        for start in range(0, n, TILE):
            t = start + j
            ok = t < n
            key = tl.load(k + row * stride + t[None, :] * DIM + d[:, None], mask=ok[None, :], other=0.0)
            s = tl.where(ok[None, :], tl.dot(query, key) * scale, -1e30)
            new = tl.maximum(top, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            shrink = tl.exp(top - new)
            total = total * shrink + tl.sum(p, 1)
            value = tl.load(v + row * stride + t[:, None] * DIM + d[None, :], mask=ok[:, None], other=0.0)
            acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value)
            top = new
        tl.store(o + at, (acc / total[:, None]).to(o.dtype.element_ty), mask=used)


def attend(q, k, v, last):
    """q [batch, heads, dim] contiguous, k and v [batch, kv heads, capacity, dim] -> [batch, heads, dim]: attention
    to the positions up to `last` (i64 [1], on the device)."""
    b, heads, dim = q.shape
    n_kv = k.shape[1]
    if triton is None or q.device.type == "cpu":
        n = int(last) + 1
        o = F.scaled_dot_product_attention(q.view(b, n_kv, heads // n_kv, dim), k[:, :, :n], v[:, :, :n])
        return o.reshape(b, heads, dim)
    o = torch.empty_like(q)
    _attend_kernel[(b * n_kv,)](q, k, v, o, last, k.stride(1), dim ** -.5, GROUP=heads // n_kv, DIM=dim, TILE=64)
    return o


def add_norm(x, delta, w, eps, dtype):
    x = x + delta.float()
    return x, rms_norm(x, w, eps).to(dtype)


def split_rotate(qkv, cos, sin, n_heads, n_kv, dim):
    q, k, v = qkv.view(qkv.shape[0], n_heads + 2 * n_kv, dim).split([n_heads, n_kv, n_kv], 1)
    return rotate(q, cos, sin).to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype), v.contiguous()


def gate(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def mm_f32(a, b):
    """a @ b with an f32 result, also where the inputs are 16 bits wide."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def choose(logits, temperature):
    """Gumbel-max sampling; temperature 0 is greedy (the noise must stay finite for that)."""
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
    return (logits + temperature[:, None] * noise).argmax(-1)


class Decoder:
    """One step at a time for a whole batch. `target` is a llama.Target or a llama.Draft. On a GPU the step is captured
    as a CUDA graph once; the position is data."""

    def __init__(self, target, batch, capacity, compile=True):
        self.t, c = target, target.cfg
        dev, dt = target.embedding.device, target.embedding.dtype
        self.k = [torch.empty(batch, c.n_kv, capacity, c.head_dim, dtype=dt, device=dev) for _ in range(c.n_layers)]
        self.v = [torch.empty_like(k) for k in self.k]
        self.cos, self.sin = rope_tables(c, capacity, dev)
        self.ids = torch.zeros(batch, dtype=torch.long, device=dev)
        self.where = torch.zeros(1, dtype=torch.long, device=dev)
        self.graph, self.out = None, None
        self.layers = [(b.attn_norm, torch.cat([b.attn_q, b.attn_k, b.attn_v]).t(), b.attn_output.t(),
                        b.ffn_norm, torch.cat([b.ffn_gate, b.ffn_up]).t(), b.ffn_down.t())
                       for b in target.body.blocks]
        wrap = torch.compile if compile else (lambda f: f)
        self.add_norm, self.split_rotate, self.gate = wrap(add_norm), wrap(split_rotate), wrap(gate)

    def logits(self, ids, position):
        """ids [batch] at `position` -> f32 logits [batch, vocab], overwritten by the next call."""
        self.ids.copy_(ids)
        self.where.fill_(position)
        if not self.ids.is_cuda:
            return self._forward()
        if self.graph is None:
            for _ in range(3):  # compiles; writing one position several times does no harm
                self._forward()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self._forward()
        self.graph.replay()
        return self.out

    def _forward(self):
        c, dt = self.t.cfg, self.t.embedding.dtype
        x = F.embedding(self.ids, self.t.embedding).float()
        delta = torch.zeros_like(x, dtype=dt)
        cos, sin = self.cos.index_select(0, self.where)[None], self.sin.index_select(0, self.where)[None]
        for i, (norm1, qkv, out, norm2, up, down) in enumerate(self.layers):
            x, h = self.add_norm(x, delta, norm1, c.eps, dt)
            q, k, v = self.split_rotate(h @ qkv, cos, sin, c.n_heads, c.n_kv, c.head_dim)
            self.k[i].index_copy_(2, self.where, k[:, :, None])
            self.v[i].index_copy_(2, self.where, v[:, :, None])
            o = attend(q, self.k[i], self.v[i], self.where)
            x, h = self.add_norm(x, o.view(x.shape) @ out, norm2, c.eps, dt)
            delta = self.gate(h @ up) @ down
        _, h = self.add_norm(x, delta, self.t.body.output_norm, c.eps, dt)
        return mm_f32(h, self.t.head.t())


def advance(sampled, script, at, written):
    """The next token of each sequence. `at` points into its script, `written` counts the open turn's tokens.
    Returns token, place in the script it came from, new at, new written."""
    entry = script.gather(1, at[:, None])[:, 0]
    forced = entry >= 0
    written = torch.where(forced, 0, written + 1)
    done = ~forced & ((sampled == END_OF_TURN) | (sampled == END_OF_TEXT) | (written >= -entry))
    token = torch.where(forced, entry, torch.where(done, END_OF_TURN, sampled))
    move = forced | done
    return (token, at, (at + move.long()).clamp_max(script.shape[1] - 1), torch.where(move, 0, written))


def temperatures(rng, n):
    """[n, 2] f32: of the user's turns, of the assistant's."""
    user = [rng.uniform(.6, 1.0) for _ in range(n)]
    answer = [rng.choices([0.0, rng.uniform(.3, .7), 1.0, rng.uniform(0, 1.1)], [45, 15, 25, 15])[0]
              for _ in range(n)]
    return np.array([user, answer], np.float32).T


def answers(tokens, meta, rows, shortest=40):
    """Token lists of the assistant's turns in these rows; what runs in a loop is left out."""
    out = []
    for b in rows:
        mine = (meta[b] & 3) == prompts.ASSISTANT
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mine.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2], edges[1::2]):
            t = tokens[b, begin:end]
            t = t[t > END_OF_TURN]
            if len(t) >= shortest and len(np.unique(t)) > .4 * min(len(t), 150):
                out.append(t.astype(int).tolist())
    return out


@torch.no_grad()
def run_batch(target, writers, rng, batch, length, held_share, compile=True, log=print):
    """One batch of sequences. writers: (training, held-out) script writers. The last rows are held out."""
    device = target.embedding.device
    n_held = max(1, int(batch * held_share))
    held = np.arange(batch) >= batch - n_held
    t0 = time.time()
    scripts = [writers[int(h)].script(length, bool(h)) for h in held]
    width = min(max(len(s) for s in scripts), 2 * length)
    script = np.full((batch, width), -1000000, np.int64)
    note = np.full((batch, width), prompts.ASSISTANT, np.uint8)
    for b, s in enumerate(scripts):
        s = s[:width]
        a = np.array(s, np.int64)
        script[b, :len(s)] = a[:, 0]
        note[b, :len(s)] = a[:, 1] | a[:, 2] << 2
    temps = temperatures(rng, batch)
    t1 = time.time()
    script_d, note_d = torch.from_numpy(script).to(device), torch.from_numpy(note).to(device)
    temps_d = torch.from_numpy(temps).to(device)
    decoder = Decoder(target, batch, length, compile)
    pick = torch.compile(choose) if compile else choose
    step = torch.compile(advance) if compile else advance
    at = torch.zeros(batch, dtype=torch.long, device=device)
    written = torch.zeros_like(at)
    tokens = torch.empty(length, batch, dtype=torch.int32, device=device)
    meta = torch.empty(length, batch, dtype=torch.uint8, device=device)
    token, place, at, written = step(at * 0, script_d, at, written)
    for position in range(length):
        tokens[position] = token
        meta[position] = note_d.gather(1, place[:, None])[:, 0]
        if position + 1 == length:
            break
        logits = decoder.logits(token, position)
        role = note_d.gather(1, at[:, None])[:, 0] & 3
        temperature = torch.where(role == prompts.USER, temps_d[:, 0], temps_d[:, 1])
        token, place, at, written = step(pick(logits, temperature), script_d, at, written)
    out = {"tokens": tokens.t().cpu().numpy().astype(np.uint16), "meta": meta.t().contiguous().cpu().numpy(),
           "temps": temps, "held": held}
    t2 = time.time()
    log(f"batch {batch} x {length}: {batch * length / 1e6:.2f} M tokens, scripts {t1 - t0:.1f} s, decoding "
        f"{t2 - t1:.1f} s, {batch * length / (t2 - t1):.0f} tokens/s", flush=True)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, help="the target's GGUF file")
    p.add_argument("--out", required=True, help="folder for the shards")
    p.add_argument("--seed", type=int, default=1, help="of scripts, temperatures and sampling (default 1)")
    p.add_argument("--seconds", type=float, default=150, help="start no batch that would end later (default 150)")
    p.add_argument("--lengths", default="512,1024,2048,512,1024,512,512",
                   help="sequence lengths of the batches, in order, repeated")
    p.add_argument("--batch-tokens", type=int, default=3 << 20, help="tokens of a batch (default 3 Mi)")
    p.add_argument("--held-share", type=float, default=.02, help="share of sequences held out (default .02)")
    p.add_argument("--device", default="cuda")
    p.add_argument("--dtype", default="float16", help="of products and cache (default float16)")
    p.add_argument("--max-batches", type=int, default=10 ** 9)
    p.add_argument("--no-compile", action="store_true")
    a = p.parse_args()
    start = time.time()
    os.makedirs(a.out, exist_ok=True)
    torch.manual_seed(a.seed)
    torch._dynamo.config.recompile_limit = 64
    rng = random.Random(a.seed)
    target = Target(a.target, a.device, getattr(torch, a.dtype))
    tok = gg.tokenizer(target.file)
    writers = [prompts.Writer(tok, random.Random(a.seed * 2 + i)) for i in (0, 1)]
    lengths = [int(x) for x in a.lengths.split(",")]
    took = {}
    for i in range(a.max_batches):
        length = lengths[i % len(lengths)]
        if time.time() - start + took.get(length, 0) * 1.1 > a.seconds:
            break
        t0 = time.time()
        batch = max(2, a.batch_tokens // length)
        shard = run_batch(target, writers, rng, batch, length, a.held_share, not a.no_compile)
        took[length] = time.time() - t0
        for h in (0, 1):
            rows = np.flatnonzero(shard["held"] == bool(h))
            writers[h].pool = (answers(shard["tokens"], shard["meta"], rows[:1500]) + writers[h].pool)[:20000]
        np.savez(os.path.join(a.out, f"shard-{a.seed}-{i}.npz"), **shard)
        if i == 0:
            for b in list(range(3)) + list(range(batch - 2, batch)):
                print(f"--- row {b}, temperatures {shard['temps'][b]}\n" +
                      tok.decode(shard["tokens"][b].astype(int).tolist(), skip_special_tokens=False)[:1500], flush=True)
    print(f"generated in {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
