"""From shards of sequences to windows: short ones that start at position 0 with one or two sequences, long ones
of the full context into which conversations are packed one after the other, positions running on."""
import glob
import os

import numpy as np

from prompts import KINDS

SHORT = 1024
TEMPERATURES = ["greedy", "below .75", ".75 and above"]


def load(folder):
    """-> list of (tokens u16, meta u8, held bool) per shard. meta: role | kind << 2 | temperature class << 6, the
    class being that of the assistant's turns."""
    out = []
    for path in sorted(glob.glob(os.path.join(folder, "shard-*.npz"))):
        with np.load(path) as z:
            t = z["temps"][:, 1]
            cls = np.where(t == 0, 0, np.where(t < .75, 1, 2)).astype(np.uint8)
            out.append((z["tokens"], z["meta"] | cls[:, None] << 6, z["held"]))
    if not out:
        raise FileNotFoundError(f"no shards in {folder}")
    return out


def role(meta):
    return meta & 3


def kind(meta):
    return meta >> 2 & 15


def temperature_class(meta):
    return meta >> 6


def pack(shards, held_out, rng, long_length, long_share, limit=None):
    """Windows of the training or the held-out sequences: {length: (tokens [n, length], meta [n, length])}.
    `long_share` of the sequences up to 1,024 tokens and all longer ones go into long windows; `limit` caps the
    number of tokens."""
    long_parts, short_parts = [], []
    for tokens, meta, held in shards:
        rows = rng.permutation(np.flatnonzero(held == held_out))
        n_long = len(rows) if tokens.shape[1] > SHORT else int(len(rows) * long_share)
        for chosen, parts in ((rows[:n_long], long_parts), (rows[n_long:], short_parts)):
            parts.append((tokens[chosen], meta[chosen]))
    return {long_length: _pack(long_parts, long_length, rng, limit and limit // 2),
            SHORT: _pack(short_parts, SHORT, rng, limit and limit // 2)}


def _pack(parts, length, rng, limit):
    """Join rows to units that start where a sequence starts, shuffle the units, join them to windows."""
    unit = min(length, 2 * SHORT)
    tokens, meta = [], []
    for t, m in parts:
        n = len(t) * t.shape[1] // unit * unit
        tokens.append(t.reshape(-1)[:n].reshape(-1, unit))
        meta.append(m.reshape(-1)[:n].reshape(-1, unit))
    tokens, meta = np.concatenate(tokens), np.concatenate(meta)
    order = rng.permutation(len(tokens))
    if limit:
        order = order[:max(limit, length) // unit]
    order = order[:len(order) * unit // length * length // unit]
    return tokens[order].reshape(-1, length), meta[order].reshape(-1, length)


def save_held_out(path, packed, n_short, n_long):
    """A small file of held-out windows for repeated measurement."""
    out = {}
    for length, n in ((SHORT, n_short), (max(packed), n_long)):
        tokens, meta = packed[length]
        out[f"tokens_{length}"], out[f"meta_{length}"] = tokens[:n], meta[:n]
    np.savez_compressed(path, kinds=np.array(KINDS), temperatures=np.array(TEMPERATURES), **out)


def load_held_out(path):
    with np.load(path) as z:
        lengths = [int(k.split("_")[1]) for k in z.files if k.startswith("tokens_")]
        return {n: (z[f"tokens_{n}"], z[f"meta_{n}"]) for n in sorted(lengths)}
