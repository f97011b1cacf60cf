"""A llama-family forward pass in numpy over a dequantised GGUF: the independent implementation that Tandem's
logits are checked against. Double precision, one sequence, no cache, no cleverness."""
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


class Model:
    def __init__(self, path):
        r = GGUFReader(path)
        self.arch = bytes(r.fields["general.architecture"].parts[-1]).decode()

        def key(name, default=None):
            f = r.fields.get(f"{self.arch}.{name}")
            return default if f is None else f.parts[f.data[0]][0]

        self.n_layers = int(key("block_count"))
        self.hidden = int(key("embedding_length"))
        self.n_heads = int(key("attention.head_count"))
        self.n_kv = int(key("attention.head_count_kv", self.n_heads))
        self.head_dim = int(key("attention.key_length", self.hidden // self.n_heads))
        self.eps = float(key("attention.layer_norm_rms_epsilon"))
        self.base = float(key("rope.freq_base", 10000.0))
        self.t = {x.name: x for x in r.tensors}
        self.reader = r
        self.cache = {}

    def w(self, name):
        if name not in self.cache:
            x = self.t[name]
            self.cache[name] = dequantize(x.data, x.tensor_type).astype(np.float64)
        return self.cache[name]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w(name)

    def rope(self, x):  # [n][heads][d], interleaved pairs as GGUF's llama files have them
        n, _, d = x.shape
        freq = self.base ** (-np.arange(0, d, 2) / d)
        angle = np.arange(n)[:, None] * freq
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def logits(self, ids, rows=None):
        """Logits [len(rows)][vocab] (all rows by default) of the token ids."""
        n, g = len(ids), self.n_heads // self.n_kv
        x = self.w("token_embd.weight")[ids]
        mask = np.triu(np.full((n, n), -np.inf), 1)
        for i in range(self.n_layers):
            p = f"blk.{i}."
            h = self.norm(x, p + "attn_norm.weight")
            q = (h @ self.w(p + "attn_q.weight").T).reshape(n, self.n_heads, self.head_dim)
            k = (h @ self.w(p + "attn_k.weight").T).reshape(n, self.n_kv, self.head_dim)
            v = (h @ self.w(p + "attn_v.weight").T).reshape(n, self.n_kv, self.head_dim)
            q, k = self.rope(q), self.rope(k)
            o = np.empty_like(q)
            for j in range(self.n_heads):
                s = q[:, j] @ k[:, j // g].T / np.sqrt(self.head_dim) + mask
                s = np.exp(s - s.max(-1, keepdims=True))
                o[:, j] = s / s.sum(-1, keepdims=True) @ v[:, j // g]
            x = x + o.reshape(n, -1) @ self.w(p + "attn_output.weight").T
            h = self.norm(x, p + "ffn_norm.weight")
            a = h @ self.w(p + "ffn_gate.weight").T
            x = x + (a / (1 + np.exp(-a)) * (h @ self.w(p + "ffn_up.weight").T)) \
                @ self.w(p + "ffn_down.weight").T
        x = self.norm(x if rows is None else x[rows], "output_norm.weight")
        head = "output.weight" if "output.weight" in self.t else "token_embd.weight"
        return x @ self.w(head).T


def tokenizer(model):
    """The default target's tokenizer out of the same file, by the `tokenizers` package."""
    from tokenizers import Tokenizer, AddedToken, models, pre_tokenizers, decoders
    f = model.reader.fields

    def strings(key):
        return [bytes(f[key].parts[i]).decode() for i in f[key].data]

    tokens = strings("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in strings("tokenizer.ggml.merges")]
    kinds = [int(f["tokenizer.ggml.token_type"].parts[i][0])
             for i in f["tokenizer.ggml.token_type"].data]
    t = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False, special=True)
                          for s, k in zip(tokens, kinds) if k == 3])
    return t
