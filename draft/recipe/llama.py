"""A llama-family transformer in PyTorch for batches of whole windows (teacher forcing), and its way from and to
GGUF. The draft is a smaller one of the same kind: its input embedding is the target's, its output head may hold
some of the vocabulary's rows only."""
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import gguf_io as gg
from draft_file import embedding_hash


@dataclass(frozen=True)
class Config:
    n_layers: int
    hidden: int
    n_heads: int
    n_kv: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope_base: float
    context: int

    @staticmethod
    def of(file):
        k = lambda name: file.keys["llama." + name]
        heads = k("attention.head_count")
        return Config(k("block_count"), k("embedding_length"), heads, k("attention.head_count_kv"),
                      k("embedding_length") // heads, k("feed_forward_length"), k("vocab_size"),
                      k("attention.layer_norm_rms_epsilon"), k("rope.freq_base"), k("context_length"))

    def with_layers(self, n):
        return replace(self, n_layers=n)


def rms_norm(x, w, eps):
    """x [..., hidden] f32 -> f32"""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rope_tables(cfg, n, device):
    """cos, sin [n, head_dim / 2] f32 of positions 0..n-1, angles taken in f64."""
    freq = cfg.rope_base ** (-torch.arange(0, cfg.head_dim, 2, dtype=torch.float64, device=device) / cfg.head_dim)
    angle = torch.arange(n, dtype=torch.float64, device=device)[:, None] * freq
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """Rotate neighbouring pairs (GGUF's llama order). x [..., heads, head_dim], cos and sin [..., 1, head_dim/2]."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


# Tensor names inside a block, in the order of Block.parameters_by_name().
MATRICES = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
NORMS = ["attn_norm", "ffn_norm"]


class Block(nn.Module):
    """One layer. Matrices are kept in `dtype`, the arithmetic type of the products; norms and the residual
    stream in f32."""

    def __init__(self, cfg, dtype, device):
        super().__init__()
        self.cfg, self.dtype = cfg, dtype
        kv = cfg.n_kv * cfg.head_dim
        shapes = {"attn_q": (cfg.hidden, cfg.hidden), "attn_k": (kv, cfg.hidden), "attn_v": (kv, cfg.hidden),
                  "attn_output": (cfg.hidden, cfg.hidden), "ffn_gate": (cfg.ffn, cfg.hidden),
                  "ffn_up": (cfg.ffn, cfg.hidden), "ffn_down": (cfg.hidden, cfg.ffn)}
        for name in MATRICES:
            setattr(self, name, nn.Parameter(torch.empty(shapes[name], dtype=dtype, device=device)))
        for name in NORMS:
            setattr(self, name, nn.Parameter(torch.empty(cfg.hidden, dtype=torch.float32, device=device)))

    def forward(self, x, cos, sin):
        """x [windows, n, hidden] f32, cos and sin [n, 1, head_dim / 2]."""
        c, dt = self.cfg, self.dtype
        b, n, _ = x.shape
        h = rms_norm(x, self.attn_norm, c.eps).to(dt)
        qkv = F.linear(h, torch.cat([self.attn_q, self.attn_k, self.attn_v]))
        q, k, v = qkv.split([c.hidden, c.n_kv * c.head_dim, c.n_kv * c.head_dim], -1)
        q = rotate(q.view(b, n, c.n_heads, c.head_dim), cos, sin).to(dt)
        k = rotate(k.view(b, n, c.n_kv, c.head_dim), cos, sin).to(dt)
        group = c.n_heads // c.n_kv
        k = k[:, :, :, None].expand(-1, -1, -1, group, -1).reshape(b, n, c.n_heads, c.head_dim)
        v = v.view(b, n, c.n_kv, 1, c.head_dim).expand(-1, -1, -1, group, -1).reshape(b, n, c.n_heads, c.head_dim)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + F.linear(o.transpose(1, 2).reshape(b, n, c.hidden), self.attn_output).float()
        h = rms_norm(x, self.ffn_norm, c.eps).to(dt)
        gate, up = F.linear(h, torch.cat([self.ffn_gate, self.ffn_up])).split(c.ffn, -1)
        return x + F.linear(F.silu(gate) * up, self.ffn_down).float()


class Body(nn.Module):
    """All layers and the last norm: embedded tokens to the state that the output head reads."""

    def __init__(self, cfg, dtype, device):
        super().__init__()
        self.cfg = cfg
        self.blocks = nn.ModuleList(Block(cfg, dtype, device) for _ in range(cfg.n_layers))
        self.output_norm = nn.Parameter(torch.empty(cfg.hidden, dtype=torch.float32, device=device))
        cos, sin = rope_tables(cfg, cfg.context, device)
        self.register_buffer("cos", cos[:, None], persistent=False)
        self.register_buffer("sin", sin[:, None], persistent=False)

    def forward(self, x):
        n = x.shape[1]
        cos, sin = self.cos[:n], self.sin[:n]
        for block in self.blocks:
            x = block(x, cos, sin)
        return rms_norm(x, self.output_norm, self.cfg.eps)

    def compile(self):
        """Compiled layer by layer: the layers share one piece of code per shape."""
        for block in self.blocks:
            block.compile(dynamic=False)
        return self

    def named_gguf(self):
        """(GGUF name, parameter) of everything that a file holds of this body."""
        for i, block in enumerate(self.blocks):
            for name in NORMS + MATRICES:
                yield f"blk.{i}.{name}.weight", getattr(block, name)
        yield "output_norm.weight", self.output_norm

    @torch.no_grad()
    def load(self, file, layers=None):
        """Take the weights from a GGUF file; `layers` names the file's layers that become ours."""
        for name, p in self.named_gguf():
            if name.startswith("blk.") and layers is not None:
                _, i, rest = name.split(".", 2)
                name = f"blk.{layers[int(i)]}.{rest}"
            p.copy_(torch.from_numpy(file.f32(name)))
        return self


class Target:
    """The target with everything that teacher forcing needs. `embedding` [vocab, hidden] is in the arithmetic type;
    the head is tied to it."""

    def __init__(self, path, device, dtype):
        self.file = gg.File(path)
        self.cfg = Config.of(self.file)
        self.body = Body(self.cfg, dtype, device).load(self.file).requires_grad_(False)
        self.embedding = torch.from_numpy(self.file.f32("token_embd.weight")).to(device, dtype)
        self.head = self.embedding

    @torch.no_grad()
    def hidden(self, ids):
        """ids [windows, n] -> state before the head [windows, n, hidden] f32."""
        return self.body(F.embedding(ids, self.embedding).float())


class TargetEmbedding:
    """As much of the target as a draft borrows."""

    def __init__(self, path):
        self.file = gg.File(path)
        self.embedding = torch.from_numpy(self.file.f32("token_embd.weight"))


class Draft:
    """A draft out of a GGUF file, for evaluation. `head_ids` i64 [rows], `head` [rows, hidden]."""

    def __init__(self, path, target, device, dtype):
        f = gg.File(path)
        self.file, self.cfg, self.embedding = f, Config.of(f), target.embedding
        ours = f.keys.get("tandem.draft.embedding_xxh3")
        theirs = embedding_hash(target.file)
        if ours != theirs:
            raise ValueError(f"{path}: made for a target with embedding {ours}, this one has {theirs}")
        self.body = Body(self.cfg, dtype, device).load(f).requires_grad_(False)
        self.head_ids = torch.from_numpy(f.keys["tandem.draft.head_ids"].astype(np.int64)).to(device)
        if "output.weight" in f.tensors:
            self.head = torch.from_numpy(f.f32("output.weight")).to(device, dtype)
        else:
            self.head = target.embedding[self.head_ids]


def fake_quant_q4_1(w):
    """What Q4_1 makes of w [rows, columns] f32: per 32 columns one f16 scale and one f16 minimum, 16 levels."""
    b = w.reshape(-1, gg.BLOCK)
    low, high = b.amin(1, keepdim=True), b.amax(1, keepdim=True)
    d = ((high - low) / 15).half().float()
    m = low.half().float()
    inv = torch.where(d > 0, 1 / d.clamp_min(1e-30), torch.zeros_like(d))
    q = ((b - m) * inv).round().clamp(0, 15)
    return (q * d + m).view_as(w)


def fake_quant_q8_0(w):
    """What Q8_0 makes of w: per 32 columns one f16 scale, signed bytes."""
    b = w.reshape(-1, gg.BLOCK)
    d = (b.abs().amax(1, keepdim=True) / 127).half().float()
    inv = torch.where(d > 0, 1 / d.clamp_min(1e-30), torch.zeros_like(d))
    return ((b * inv).round().clamp(-127, 127) * d).view_as(w)


FAKE_QUANT = {"q4_1": fake_quant_q4_1, "q8_0": fake_quant_q8_0, "f32": lambda w: w}
