"""Step 2: train drafts on the target's self-chat and write them as GGUF.

The target reads every window once; its last states stay in GPU memory, so that a step pays for the rows of the
target's head that the draft has, not for the target. The loss has the target's whole distribution at hand:

    loss = kl * KL(p || q) + tv * TV(p, q) + sharp * TV(p', q')     with p', q' at a low temperature

TV is one minus the acceptance of sampling at temperature 1, TV at a low temperature is close to one minus the greedy
agreement, KL is what gets a draft there from far away. The head's gradient is written out by hand (head_gradient).
Weights have an f32 master; products read a 16-bit copy, from `--quant-from` on a copy of what the file's types make of
the master, the gradient passing straight through.
"""
import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import evaluate
import windows
from draft_file import write_draft
from generate import mm_f32
from llama import FAKE_QUANT, MATRICES, Body, Target
from prompts import ASSISTANT, FORCED, USER

INIT = {2: [0, 29], 3: [0, 1, 29], 4: [0, 1, 2, 29], 5: [0, 1, 2, 3, 29], 6: [0, 1, 2, 3, 28, 29]}


def head_gradient(z, zt, lse, weight, kl, tv, sharp, temperature):
    """z [n, rows] f32 draft logits; zt the target's logits of the same rows; lse [n] of the target's whole row; weight
    [n] of the positions. -> d loss / d z (bf16, scaled by weight), and sums over positions of (loss, weight,
    agreement within the head, sum(min(p, q))), each times weight.

    With P = sum of p over the head, s = [q < p]:  dKL/dz = q P - p,  d sum(min(p, q))/dz = q (s - <q, s>)."""
    logq = z - torch.logsumexp(z, 1, keepdim=True)
    logp = zt.float() - lse[:, None]
    p, q = logp.exp(), logq.exp()
    inside = p.sum(1, keepdim=True)
    s = (q < p).float()
    least = torch.minimum(p, q).sum(1)
    grad = kl * (q * inside - p) - tv * q * (s - (q * s).sum(1, keepdim=True))
    loss = kl * (p * (logp - logq)).sum(1) + tv * (1 - least)
    p2, q2 = (zt.float() / temperature).softmax(1), (z / temperature).softmax(1)
    s2 = (q2 < p2).float()
    grad = grad - sharp * q2 * (s2 - (q2 * s2).sum(1, keepdim=True))
    loss = loss + sharp * temperature * (1 - torch.minimum(p2, q2).sum(1))
    agree = (z.argmax(1) == zt.argmax(1)).float()
    sums = torch.stack([(x * weight).sum() for x in (loss, torch.ones_like(weight), agree, least)])
    return (grad * weight[:, None]).bfloat16(), sums


def orthogonal(g, steps=5):
    """The orthogonal factor of each matrix of a batch, roughly, by a quintic Newton-Schulz iteration (Muon)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    for _ in range(steps):
        y = x @ x.mT
        x = a * x + (b * y + c * (y @ y)) @ x
    return x.mT if flip else x


class Optimizer:
    """Muon for the layers' matrices (or AdamW), AdamW for the head and the norms. Holds the f32 masters and refreshes
    the 16-bit copies that the forward reads."""

    def __init__(self, matrices, others, kind="muon", decay=.02, momentum=.95, betas=(.9, .95)):
        """matrices, others: lists of (parameter, name of its stored type), parameters with a .grad at each step."""
        if kind == "adamw":
            matrices, others = [], matrices + others
        self.decay, self.momentum, self.betas, self.t = decay, momentum, betas, 0
        self.matrices = [(p, q, p.detach().float().clone(), torch.zeros_like(p, dtype=torch.float32))
                         for p, q in matrices]
        self.others = [(p, q, p.detach().float().clone(), torch.zeros_like(p, dtype=torch.float32),
                        torch.zeros_like(p, dtype=torch.float32)) for p, q in others]
        self.groups = {}
        for i, (p, *_) in enumerate(self.matrices):
            self.groups.setdefault(tuple(sorted(p.shape)), []).append(i)

    @torch.no_grad()
    def step(self, lr):
        self.t += 1
        for shape, members in self.groups.items():
            nesterov = []
            for i in members:
                p, _, _, m = self.matrices[i]
                g = p.grad.float()
                m.lerp_(g, 1 - self.momentum)
                u = torch.lerp(g, m, self.momentum)
                nesterov.append(u if u.shape[0] <= u.shape[1] else u.t())
            update = orthogonal(torch.stack(nesterov)).float() * (.2 * max(shape) ** .5)
            for i, u in zip(members, update):
                p, _, w, _ = self.matrices[i]
                w.mul_(1 - lr * self.decay).add_(u if u.shape == w.shape else u.t(), alpha=-lr)
        b1, b2 = self.betas
        for p, _, w, m, v in self.others:
            g = p.grad.float()
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            u = (m / (1 - b1 ** self.t)) / ((v / (1 - b2 ** self.t)).sqrt() + 1e-12)
            w.mul_(1 - lr * self.decay * (w.ndim > 1)).add_(u, alpha=-lr)

    @torch.no_grad()
    def refresh(self, quantised, functions=FAKE_QUANT):
        for p, q, w, *_ in self.matrices + self.others:
            p.copy_(functions[q](w) if quantised and w.ndim > 1 else w)
            p.grad = None

    def master(self):
        return {id(p): w for p, _, w, *_ in self.matrices + self.others}


class Teacher:
    """Windows on the device with the target's states at each position."""

    def __init__(self, target, packed, weights, tokens_at_once, log):
        dev = target.embedding.device
        self.target, self.data = target, {}
        t0, n = time.time(), 0
        for length, (tokens, meta) in packed.items():
            ids = torch.from_numpy(tokens.astype(np.int32)).to(dev)
            # A position is worth what the role of the token after it is worth; the last has none.
            r = np.full(meta.shape, FORCED, np.uint8)
            r[:, :-1] = windows.role(meta[:, 1:])
            w = torch.tensor(weights, dtype=torch.float32, device=dev)[torch.from_numpy(r).to(dev).long()]
            w[:, -1] = 0
            hidden = torch.empty(*tokens.shape, target.cfg.hidden, dtype=target.embedding.dtype, device=dev)
            lse = torch.empty(tokens.shape, dtype=torch.float32, device=dev)
            step = max(1, tokens_at_once // length)
            for i in range(0, len(tokens) // step * step, step):
                h = target.hidden(ids[i:i + step].long())
                hidden[i:i + step] = h.to(hidden.dtype)
                flat = hidden[i:i + step].view(-1, h.shape[-1])
                for a in range(0, len(flat), 16384):
                    lse[i:i + step].view(-1)[a:a + 16384] = torch.logsumexp(
                        mm_f32(flat[a:a + 16384], target.embedding.t()), 1)
                n += step * length
            keep = len(tokens) // step * step
            if keep:
                self.data[length] = (ids[:keep], hidden[:keep], lse[:keep], w[:keep])
        if dev.type == "cuda":
            torch.cuda.synchronize()
        finite = all(torch.isfinite(d[2]).all().item() for d in self.data.values())
        log(f"teacher: {n / 1e6:.2f} M tokens in {time.time() - t0:.1f} s, all finite: {finite}")
        assert finite
        self.n_tokens = n

    def batches(self, tokens_at_once, seed):
        """Endless: a list of one microbatch per window length, windows drawn without replacement per epoch."""
        dev = self.target.embedding.device
        g = torch.Generator().manual_seed(seed)
        order = {n: torch.zeros(0, dtype=torch.long) for n in self.data}
        while True:
            out = []
            for n, d in self.data.items():
                take = min(max(1, tokens_at_once // n), len(d[0]))
                if len(order[n]) < take:
                    order[n] = torch.randperm(len(d[0]), generator=g)
                rows, order[n] = order[n][:take].to(dev), order[n][take:]
                out.append([x[rows] for x in d])
            yield out


def frequent_tokens(packed, n, vocab):
    """The n most frequent tokens that the model wrote itself, ascending, and their share of that text for
    several n."""
    counts = np.zeros(vocab, np.int64)
    for tokens, meta in packed.values():
        counts += np.bincount(tokens[windows.role(meta) != FORCED].astype(np.int64), minlength=vocab)
    counts[:3] += 10 ** 9  # end of text, start and end of turn
    order = np.argsort(-counts, kind="stable")
    counts[:3] -= 10 ** 9
    share = {k: round(float(counts[order[:k]].sum() / counts.sum()), 5) for k in (2048, 4096, 6144, 8192, 12288, 16384)}
    return np.sort(order[:n]), order, share


def train_one(name, n_layers, teacher, held, head_ids, order, args, log, seconds, kl, tv, sharp, kind, lr):
    """Train one draft for `seconds` and evaluate it as its file stores it. Writes <name>.gguf and <name>.json."""
    target, dev = teacher.target, teacher.target.embedding.device
    cfg = target.cfg.with_layers(n_layers)
    cuda = dev.type == "cuda"
    dt = torch.bfloat16 if cuda else torch.float32
    last = target.cfg.n_layers - 1
    layers = INIT[n_layers] if last == 29 else [*range(n_layers - 1), last]
    body = Body(cfg, dt, dev).load(target.file, layers)
    rows = torch.from_numpy(head_ids.astype(np.int64)).to(dev)
    teacher_head = target.embedding[rows]
    head = torch.nn.Parameter(teacher_head.float())
    matrix_kind, head_kind = args.quant.split(",")
    named = dict(body.named_gguf())
    matrices = [(p, matrix_kind) for n, p in named.items() if n.split(".")[-2] in MATRICES]
    others = [(p, matrix_kind) for n, p in named.items() if n.split(".")[-2] not in MATRICES] + [(head, head_kind)]
    opt = Optimizer(matrices, others, kind)
    gradient, functions = head_gradient, dict(FAKE_QUANT)
    if cuda:
        body.compile()
        gradient = torch.compile(head_gradient, dynamic=False)
        functions = {k: torch.compile(f, dynamic=False) for k, f in FAKE_QUANT.items()}
    half = teacher_head.dtype  # f16 on a GPU: head products forward
    stats = torch.zeros(4, device=dev)

    def micro(batch, total_weight):
        ids, ht, lse, w = batch
        h = body(F.embedding(ids.long(), target.embedding).float())
        with torch.no_grad():
            flat = h.reshape(-1, cfg.hidden)
            z = mm_f32(flat.to(half), head.to(half).t())
            zt = mm_f32(ht.reshape(flat.shape), teacher_head.t())
            dz, sums = gradient(z, zt, lse.reshape(-1), w.reshape(-1) / total_weight, c_kl, tv, sharp,
                                args.sharp_temperature)
            del z, zt
            stats.add_(sums)
            dh = (dz.to(dt) @ head.to(dt)).float()
            g = mm_f32(dz.to(dt).t(), flat.to(dt))
            head.grad = g if head.grad is None else head.grad + g
        h.backward(dh.view(h.shape))

    opt.refresh(False, functions)
    batches = teacher.batches(args.micro_tokens, args.seed)
    c_kl = torch.tensor(kl, device=dev)
    t0 = time.time()
    warm = next(batches)
    for b in warm:
        micro(b, 1.0)
    opt.refresh(False, functions)
    if matrix_kind != "f32":
        opt.refresh(True, functions)
        opt.refresh(False, functions)
    if cuda:
        torch.cuda.synchronize()
    log(f"[{name}] compiled in {time.time() - t0:.1f} s")
    stats.zero_()
    start, step, seen, quantised, history = time.time(), 0, 0, False, []
    while True:
        progress = min((time.time() - start) / seconds, 1.0) if not args.max_steps else step / args.max_steps
        if progress >= 1:
            break
        warm_up = min(1.0, (step + 1) / args.warm_up)
        falling = 1 if progress < args.decay_from else (1 - progress) / (1 - args.decay_from)
        quantised = progress >= args.quant_from
        c_kl.fill_(kl * (1 - args.kl_fall * progress))
        micros = next(batches)
        total = sum(b[3].sum() for b in micros)
        for b in micros:
            micro(b, total)
            seen += b[0].numel()
        opt.step(lr * warm_up * (.01 + .99 * falling))
        opt.refresh(quantised, functions)
        step += 1
        if step % args.log_every == 0:
            loss, weight, agree, least = (stats / args.log_every).tolist()
            stats.zero_()
            rate = seen / (time.time() - start)
            history.append([step, seen, round(time.time() - start, 1)] + [round(x, 4) for x in (loss, agree, least)])
            log(f"[{name}] step {step} {seen / 1e6:.1f} M seen {rate / 1e3:.0f} K/s quantised {quantised} "
                f"loss {loss:.4f} agree {agree:.4f} min {least:.4f}")
    opt.refresh(False, functions)
    took = time.time() - start
    master = opt.master()
    tensors = {n: master[id(p)].cpu().numpy() for n, p in named.items()}
    own_head = master[id(head)]
    report = {"layers": n_layers, "from": layers, "optimizer": kind, "lr": lr, "kl": kl, "tv": tv, "sharp": sharp,
              "steps": step, "tokens seen": seen, "seconds": round(took, 1), "history": history}
    if args.checkpoints:
        torch.save({"tensors": tensors, "head": own_head.cpu(), "head_ids": head_ids, "order": order},
                   os.path.join(args.checkpoints, name + ".pt"))
    # As stored: the file's types.
    plain = Body(cfg, target.embedding.dtype, dev).requires_grad_(False)
    score = {}
    for label in (["unquantised", "stored"] if matrix_kind != "f32" else ["stored"]):
        for n, p in plain.named_gguf():
            w = torch.from_numpy(tensors[n]).to(dev)
            p.copy_(FAKE_QUANT[matrix_kind](w) if label == "stored" and w.ndim > 1 else w)
        w = FAKE_QUANT[head_kind](own_head) if label == "stored" else own_head
        sizes = []
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        for k in (4096, 6144, 8192, 12288):
            if label == "stored" and k < len(head_ids):
                sizes.append((str(k), torch.from_numpy(rank[head_ids] < k).to(dev)))
        score = evaluate.token_scores(target, plain, w.to(half), rows, held, args.micro_tokens, 4096, sizes)
        report[label] = evaluate.summary(score, held)
    report["by head size"] = {}
    for k, _ in sizes + [(str(len(head_ids)), None)]:
        suffix = "" if int(k) == len(head_ids) else "_" + k
        own = {n: windows.role(held[n][1][:, 1:]) != FORCED for n in score}
        mean = lambda key: float(np.concatenate([score[n][key + suffix][own[n]] for n in score]).mean())
        tokens = evaluate.per_round(score, held, "match" + suffix)
        per_layer = sum(p.numel() for p in body.blocks[0].parameters())
        bits = {"q4_1": 5 / 8, "q8_0": 34 / 32, "f32": 4}
        size = per_layer * n_layers * bits[matrix_kind] + int(k) * cfg.hidden * bits[head_kind]
        whole = evaluate.weight_bytes(target.file)
        gain = evaluate.predicted_gain(tokens, size / whole, evaluate.V_CPU)
        report["by head size"][k] = {"agree": round(mean("agree"), 4), "min1": round(mean("min1"), 4),
                                     "tokens per round": tokens, "bytes": int(size),
                                     "cost": round(size / whole, 4), "predicted CPU gain, g": gain}
    stored = report["stored"]
    log(f"[{name}] {step} steps, {seen / 1e6:.0f} M tokens in {took:.0f} s")
    for key in ("all written by the model", "assistant", "assistant by temperature", "assistant by kind"):
        log(f"[{name}] {key}: {json.dumps(stored[key])}")
    log(f"[{name}] per round {stored['tokens per round, greedy answers, g = 1..8']['all']}")
    log(f"[{name}] depth {json.dumps(report['stored']['long windows by depth'])}")
    log(f"[{name}] heads {json.dumps(report['by head size'])}")
    with open(os.path.join(args.out, name + ".json"), "w") as f:
        json.dump(report, f)
    write_size = args.write_head or len(head_ids)
    keep = np.flatnonzero(np.isin(head_ids, order[:write_size]))
    about = {"general.name": f"Tandem default draft, {n_layers} layers, head of {len(keep)}",
             "general.description": "Speculative-decoding draft for SmolLM2-135M-Instruct (Q4_1), distilled from its"
                                    " own self-chat; needs that target's embedding and tokenizer."}
    write_draft(os.path.join(args.out, name + ".gguf"), target.file, tensors, n_layers, head_ids[keep],
                own_head.cpu().numpy()[keep], (matrix_kind, head_kind), about)
    return report


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, help="the target's GGUF file")
    p.add_argument("--data", required=True, help="folder of generate.py's shards")
    p.add_argument("--out", required=True, help="folder for GGUF files, tables and the held-out sample")
    p.add_argument("--checkpoints", help="folder for f32 checkpoints (default none)")
    p.add_argument("--runs", default="draft:4:600", help="name:layers:seconds[:key=value...] of each run, separated by "
                   "commas, one after the other; keys kl tv sharp lr optimizer (default draft:4:600)")
    p.add_argument("--head", type=int, default=16384, help="rows of the head that is trained (default 16384)")
    p.add_argument("--write-head", type=int, help="rows of it that are written, the most frequent (default all)")
    p.add_argument("--quant", default="q4_1,q4_1", help="stored type of the layers' matrices and of the head")
    p.add_argument("--quant-from", type=float, default=.6, help="progress from which the forward is quantised")
    p.add_argument("--decay-from", type=float, default=.3, help="progress from which the learning rate falls")
    p.add_argument("--kl-fall", type=float, default=.5, help="share of the KL weight lost by the end")
    p.add_argument("--sharp-temperature", type=float, default=.4)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--warm-up", type=int, default=100, help="steps")
    p.add_argument("--micro-tokens", type=int, default=32768, help="tokens of a microbatch; a step has one per length")
    p.add_argument("--long", type=int, default=8192, help="length of the long windows")
    p.add_argument("--long-share", type=float, default=.3,
                   help="share of the sequences up to 1,024 tokens that go into long windows (default .3)")
    p.add_argument("--tokens", type=int, help="cap on training tokens")
    p.add_argument("--held-tokens", type=int, default=800000, help="held-out tokens used here")
    p.add_argument("--weights", default=".1,.3,1", help="of template, user and assistant positions in the loss")
    p.add_argument("--save-held-out", help="also write a small held-out file here")
    p.add_argument("--seed", type=int, default=7)
    p.add_argument("--log-every", type=int, default=100)
    p.add_argument("--max-steps", type=int, help="instead of seconds (for tests)")
    p.add_argument("--device", default="cuda")
    p.add_argument("--deadline", type=float, help="Unix time after which no further run is begun")
    args = p.parse_args()
    begin = time.time()

    def log(text):
        print(f"{time.time() - begin:7.1f} {text}", flush=True)

    os.makedirs(args.out, exist_ok=True)
    if args.checkpoints:
        os.makedirs(args.checkpoints, exist_ok=True)
    torch.manual_seed(args.seed)
    torch._dynamo.config.recompile_limit = 64  # target and drafts share the code of a layer
    cuda = args.device.startswith("cuda")
    target = Target(args.target, args.device, torch.float16 if cuda else torch.float32)
    if cuda:
        target.body.compile()
    shards = windows.load(args.data)
    rng = np.random.default_rng(args.seed)
    packed = windows.pack(shards, False, rng, args.long, args.long_share, args.tokens)
    held = windows.pack(shards, True, rng, args.long, .5, args.held_tokens)
    del shards
    for n, x in held.items():  # whole microbatches: other shapes would be compiled anew
        whole = max(1, args.micro_tokens // n)
        held[n] = tuple(a[:len(a) // whole * whole] for a in x)
    held = {n: x for n, x in held.items() if len(x[0])}
    log("training windows " + str({n: len(x[0]) for n, x in packed.items()}) + ", held out " +
        str({n: len(x[0]) for n, x in held.items()}))
    if args.save_held_out:
        windows.save_held_out(args.save_held_out, held, 64, 5)
    head_ids, order, share = frequent_tokens(packed, args.head, target.cfg.vocab)
    log(f"share of the model's text covered by the most frequent tokens: {share}")
    weights = [float(x) for x in args.weights.split(",")]
    assert len(weights) == 3 and (FORCED, USER, ASSISTANT) == (0, 1, 2)
    teacher = Teacher(target, packed, weights, args.micro_tokens, log)
    reports = {"data": {"windows": {str(n): len(x[0]) for n, x in packed.items()}, "tokens": teacher.n_tokens,
                        "head coverage": share}}
    for run in args.runs.split(","):
        name, n_layers, seconds, *rest = run.split(":")
        if args.deadline and time.time() + float(seconds) > args.deadline:
            log(f"[{name}] left out: no time")
            continue
        o = {"kl": 1.0, "tv": 1.0, "sharp": .3, "lr": args.lr, "optimizer": "muon"}
        o.update(x.split("=") for x in rest)
        reports[name] = train_one(name, int(n_layers), teacher, held, head_ids, order, args, log, float(seconds),
                                  float(o["kl"]), float(o["tv"]), float(o["sharp"]), o["optimizer"], float(o["lr"]))
    with open(os.path.join(args.out, "data.json"), "w") as f:
        json.dump(reports["data"], f)
    log("done")


if __name__ == "__main__":
    main()
