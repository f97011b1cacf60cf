"""How well a draft guesses its target on held-out self-chat, teacher-forced: greedy agreement, sum(min(p, q)) at
two temperatures, tokens per round by draft length, all by kind, temperature and depth; what that predicts for speed
under a cost model. Works on CPU and GPU, on the files as they are shipped (weights dequantised, activations not
quantised)."""
import argparse
import json
import os

import numpy as np
import torch
import torch.nn.functional as F

import gguf_io as gg
import windows
from generate import mm_f32
from prompts import ASSISTANT, FORCED, KINDS

DEPTHS = [0, 512, 1024, 2048, 4096, 5500, 6500, 8192]
MAX_G = 8
# Cost of a target pass over g + 1 rows in units of one row: a guess for a CPU that is bound by multiplies from
# three rows on. On a GPU small numbers of rows are free.
V_CPU = [1, 1.25, 1.6, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0]


@torch.no_grad()
def token_scores(target, body, head, head_ids, packed, tokens_at_once, chunk=4096, head_sizes=()):
    """Score every position that has a next token. Returns {length: dict of arrays [windows, length - 1]}:
    agree (argmax of p and q the same), match (argmax of q is the next token), min1 and min07 (sum of min(p, q) at
    temperature 1 and .7, p over the whole vocabulary), top (p's mass inside the head).

    head_sizes: [(name, mask over head rows)] whose agree, min1 and match are added as agree_<name> ..."""
    device = target.embedding.device
    out = {}
    for length, (tokens, _) in packed.items():
        per = {}
        step = max(1, tokens_at_once // length)
        for i in range(0, len(tokens), step):
            ids = torch.from_numpy(tokens[i:i + step].astype(np.int64)).to(device)
            x = F.embedding(ids, target.embedding).float()
            ht = target.body(x)[:, :-1].reshape(-1, x.shape[-1]).to(target.embedding.dtype)
            hd = body(x)[:, :-1].reshape(ht.shape).to(head.dtype)
            nxt = ids[:, 1:].reshape(-1)
            parts = []
            for a in range(0, len(nxt), chunk):
                parts.append(_scores(mm_f32(ht[a:a + chunk], target.embedding.t()),
                                     mm_f32(hd[a:a + chunk], head.t()), head_ids, nxt[a:a + chunk], head_sizes))
            for k in parts[0]:
                v = torch.cat([q[k] for q in parts]).view(len(ids), length - 1)
                per.setdefault(k, []).append(v.cpu().numpy())
        out[length] = {k: np.concatenate(v) for k, v in per.items()}
    return out


def _scores(zt, zd, head_ids, nxt, head_sizes):
    best = zt.argmax(-1)
    guess = head_ids[zd.argmax(-1)]
    r = {"agree": guess == best, "match": guess == nxt}
    for name, t in (("min1", 1.0), ("min07", .7)):
        p = (zt / t).softmax(-1)[:, head_ids]
        r[name] = torch.minimum(p, (zd / t).softmax(-1)).sum(-1)
        if t == 1:
            r["top"] = p.sum(-1)
            for label, mask in head_sizes:
                z = zd.masked_fill(~mask, -torch.inf)
                g = head_ids[z.argmax(-1)]
                r["agree_" + label], r["match_" + label] = g == best, g == nxt
                r["min1_" + label] = torch.minimum(p, z.softmax(-1)).sum(-1)
    return r


def rounds(match, length_of_run, g):
    """Tokens per round of runs of greedy text: match is flat, runs follow one another. A round accepts matches up to
    the first miss, g at most, and adds one token."""
    n_rounds, n_tokens, i = 0, 0, 0
    for n in length_of_run:
        m, at = match[i:i + n], 0
        while at < n:
            a = 0
            while a < g and at + a < n and m[at + a]:
                a += 1
            take = min(a + 1, n - at)
            n_rounds, n_tokens, at = n_rounds + 1, n_tokens + take, at + take
        i += n
    return n_tokens, n_rounds


def loop_share(tokens, n=8):
    """Share of a text's positions whose n tokens before occurred in that order earlier in it."""
    seen, hits = set(), 0
    for i in range(n, len(tokens)):
        gram = tuple(tokens[i - n:i])
        hits += gram in seen
        seen.add(gram)
    return hits / max(1, len(tokens))


def greedy_runs(scores, packed, match="match", kind=None, loops=True):
    """(matches, run lengths) of the assistant's greedy turns; without `loops` only turns that repeat themselves at
    less than a twentieth of their positions."""
    matches, lengths = [], []
    for length, s in scores.items():
        meta = packed[length][1][:, 1:]
        mine = (windows.role(meta) == ASSISTANT) & (windows.temperature_class(meta) == 0)
        if kind is not None:
            mine &= windows.kind(meta) == kind
        for row, ok, tokens in zip(s[match], mine, packed[length][0][:, 1:]):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], ok.astype(np.int8), [0]])))
            for a, b in zip(edges[::2], edges[1::2]):
                if not loops and loop_share(tokens[a:b].tolist()) >= .05:
                    continue
                matches.append(row[a:b])
                lengths.append(b - a)
    return (np.concatenate(matches) if matches else np.zeros(0, bool)), lengths


def per_round(scores, packed, match="match", kind=None, gs=range(1, MAX_G + 1), loops=True):
    m, lengths = greedy_runs(scores, packed, match, kind, loops)
    out = []
    for g in gs:
        tokens, n = rounds(m.tolist(), lengths, g)
        out.append(round(float(tokens / n), 3) if n else None)
    return out


def summary(scores, packed):
    """Tables as nested dicts; every row has n, agree, min1, min07."""
    flat = {}
    for length, s in scores.items():
        meta = packed[length][1][:, 1:]
        depth = np.broadcast_to(np.arange(1, length), meta.shape)
        for k, v in list(s.items()) + [("meta", meta), ("depth", depth), ("window", np.full(meta.shape, length))]:
            flat.setdefault(k, []).append(v.reshape(-1))
    flat = {k: np.concatenate(v) for k, v in flat.items()}
    own = windows.role(flat["meta"]) != FORCED
    answer = windows.role(flat["meta"]) == ASSISTANT
    cls, kinds = windows.temperature_class(flat["meta"]), windows.kind(flat["meta"])

    def row(mask):
        n = int(mask.sum())
        return {"n": n, **{k: round(float(flat[k][mask].mean()), 4) for k in ("agree", "min1", "min07", "top") if n}}

    out = {"all written by the model": row(own), "assistant": row(answer), "user": row(own & ~answer)}
    out["assistant by temperature"] = {t: row(answer & (cls == i)) for i, t in enumerate(windows.TEMPERATURES)}
    out["assistant by kind"] = {k: row(answer & (kinds == i)) for i, k in enumerate(KINDS)}
    out["all by depth"] = {f"{a}..{b}": row(own & (flat["depth"] >= a) & (flat["depth"] < b))
                           for a, b in zip(DEPTHS, DEPTHS[1:])}
    out["long windows by depth"] = {f"{a}..{b}": row(own & (flat["window"] > windows.SHORT) & (flat["depth"] >= a)
                                                     & (flat["depth"] < b)) for a, b in zip(DEPTHS, DEPTHS[1:])}
    out["tokens per round, greedy answers, g = 1..8"] = {
        "all": per_round(scores, packed), "without loops": per_round(scores, packed, loops=False),
        **{k: per_round(scores, packed, kind=i) for i, k in enumerate(KINDS)}}
    for name, loops in (("all", True), ("without loops", False)):
        m, lengths = greedy_runs(scores, packed, loops=loops)
        out.setdefault("greedy answers", {})[name] = {"turns": len(lengths), "n": len(m), "match":
                                                      round(float(m.mean()), 4) if len(m) else None}
    return out


def weight_bytes(file):
    """Bytes of a file's tensors: what a step reads of the target (whose embedding is its head, one row apart)."""
    return sum(gg.tensor_bytes(k, int(np.prod(s))) for k, s, _ in file.tensors.values())


def step_bytes(draft_file, target_file):
    """Bytes of weights that one step of the draft and of the target reads."""
    mine = weight_bytes(draft_file)
    if "output.weight" not in draft_file.tensors:
        kind, shape, _ = target_file.tensors["token_embd.weight"]
        mine += gg.tensor_bytes(kind, len(draft_file.keys["tandem.draft.head_ids"]) * shape[1])
    return mine, weight_bytes(target_file)


def predicted_gain(tokens_per_round, draft_cost, v):
    """Best speed over decoding without a draft, and its g."""
    gains = [float(t / (v[g] + g * draft_cost)) for g, t in enumerate(tokens_per_round, 1) if t]
    return (round(max(gains), 3), int(np.argmax(gains)) + 1) if gains else (None, None)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True)
    p.add_argument("--draft", default=os.path.join(here, "..", "default-draft.gguf"))
    p.add_argument("--held-out", default=os.path.join(here, "held_out.npz"))
    p.add_argument("--short", type=int, help="short windows to use (default all)")
    p.add_argument("--long", type=int, help="long windows to use (default all)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default=None, help="default float32 on a CPU, float16 on a GPU")
    p.add_argument("--json", help="also write the tables here")
    a = p.parse_args()
    from llama import Draft, Target
    dtype = getattr(torch, a.dtype or ("float32" if a.device == "cpu" else "float16"))
    target = Target(a.target, a.device, dtype)
    draft = Draft(a.draft, target, a.device, dtype)
    packed = windows.load_held_out(a.held_out)
    caps = {windows.SHORT: a.short}
    packed = {n: (t[:caps.get(n, a.long)], m[:caps.get(n, a.long)]) for n, (t, m) in packed.items()}
    packed = {n: x for n, x in packed.items() if len(x[0])}
    at_once, chunk = (8192, 512) if a.device == "cpu" else (65536, 4096)
    scores = token_scores(target, draft.body, draft.head, draft.head_ids, packed, at_once, chunk)
    tables = summary(scores, packed)
    mine, theirs = step_bytes(draft.file, target.file)
    tables["bytes per step"] = {"draft": mine, "target": theirs}
    gain = predicted_gain(tables["tokens per round, greedy answers, g = 1..8"]["all"], mine / theirs, V_CPU)
    tables["predicted CPU gain, greedy"] = {"gain": gain[0], "g": gain[1], "V": V_CPU}
    for name, t in tables.items():
        print(name)
        for k, v in t.items():
            print(f"    {k}: {v}")
    if a.json:
        with open(a.json, "w") as f:
            json.dump(tables, f, indent=1)


if __name__ == "__main__":
    main()
