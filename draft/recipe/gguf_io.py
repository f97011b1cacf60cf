"""Reading and writing GGUF v3 files, as far as the recipe needs it: F32, F16, Q8_0 and Q4_1 tensors.

Numpy only. Shapes are given as numpy has them ([rows, columns], the file's order reversed). The layout of a
tensor in memory and in the file is the same: blocks of 32 consecutive columns, row after row.
"""
import struct

import numpy as np

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
BLOCK = 32
BLOCK_BYTES = {Q4_1: 20, Q8_0: 34}  # f16 d, f16 m, 16 bytes of nibbles; f16 d, 32 int8
ALIGNMENT = 32

# Value types of GGUF metadata, and how struct spells them.
U8, I8, U16, I16, U32, I32, FLOAT, BOOL, STRING, ARRAY, U64, I64, DOUBLE = range(13)
SCALARS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", FLOAT: "f", BOOL: "?",
           U64: "Q", I64: "q", DOUBLE: "d"}


def tensor_bytes(kind, n):
    if kind in BLOCK_BYTES:
        assert n % BLOCK == 0
        return n // BLOCK * BLOCK_BYTES[kind]
    return n * {F32: 4, F16: 2}[kind]


def quantize_q8_0(x):
    """[rows, columns] f32 -> the bytes of Q8_0 blocks."""
    b = np.ascontiguousarray(x, np.float32).reshape(-1, BLOCK)
    d = (np.abs(b).max(1) / 127).astype(np.float16)
    inv = np.where(d > 0, 1 / np.maximum(d.astype(np.float32), 1e-30), 0)
    q = np.clip(np.rint(b * inv[:, None]), -127, 127).astype(np.int8)
    return np.concatenate([d[:, None].view(np.uint8), q.view(np.uint8)], 1).tobytes()


def quantize_q4_1(x):
    """[rows, columns] f32 -> the bytes of Q4_1 blocks: x = d * nibble + m. Column j of a block sits in the low
    nibble of byte j, column j + 16 in the high one. Rounds as llama.fake_quant_q4_1 does, so that a model
    trained under that function is stored without a further loss."""
    b = np.ascontiguousarray(x, np.float32).reshape(-1, BLOCK)
    low, high = b.min(1), b.max(1)
    d = ((high - low) / np.float32(15)).astype(np.float16)
    m = low.astype(np.float16)
    inv = np.where(d > 0, 1 / np.maximum(d.astype(np.float32), 1e-30), 0).astype(np.float32)
    q = np.clip(np.rint((b - m.astype(np.float32)[:, None]) * inv[:, None]), 0, 15).astype(np.uint8)
    packed = q[:, :16] | q[:, 16:] << 4
    return np.concatenate([d[:, None].view(np.uint8), m[:, None].view(np.uint8), packed], 1).tobytes()


def dequantize(raw, kind, shape):
    """The f32 values of a tensor's bytes."""
    if kind == F32:
        return np.frombuffer(raw, np.float32).reshape(shape).copy()
    if kind == F16:
        return np.frombuffer(raw, np.float16).astype(np.float32).reshape(shape)
    b = np.frombuffer(raw, np.uint8).reshape(-1, BLOCK_BYTES[kind])
    d = b[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return (d * b[:, 2:].view(np.int8).astype(np.float32)).reshape(shape)
    m = b[:, 2:4].copy().view(np.float16).astype(np.float32)
    q = np.concatenate([b[:, 4:] & 15, b[:, 4:] >> 4], 1).astype(np.float32)
    return (d * q + m).reshape(shape)


class File:
    """An open GGUF file: `keys` (name -> value), `tensors` (name -> (kind, shape, absolute offset))."""

    def __init__(self, path):
        self.path = path
        with open(path, "rb") as f:
            self.keys, self.tensors = self._header(f)

    def _header(self, f):
        def scalar(fmt):
            return struct.unpack("<" + fmt, f.read(struct.calcsize(fmt)))[0]

        def string():
            return f.read(scalar("Q")).decode("utf-8", "surrogateescape")

        def value(kind):
            if kind == STRING:
                return string()
            if kind == ARRAY:
                item, n = scalar("I"), scalar("Q")
                if item in SCALARS:
                    return np.frombuffer(f.read(n * struct.calcsize(SCALARS[item])),
                                         "<" + SCALARS[item])
                return [value(item) for _ in range(n)]
            return scalar(SCALARS[kind])

        if f.read(4) != b"GGUF" or scalar("I") != 3:
            raise ValueError(f"{self.path}: not a GGUF v3 file")
        n_tensors, n_keys = scalar("Q"), scalar("Q")
        keys = {}
        for _ in range(n_keys):
            name = string()
            keys[name] = value(scalar("I"))
        found = []
        for _ in range(n_tensors):
            name = string()
            shape = tuple(scalar("Q") for _ in range(scalar("I")))[::-1]
            found.append((name, shape, scalar("I"), scalar("Q")))
        align = int(keys.get("general.alignment", ALIGNMENT))
        start = -(-f.tell() // align) * align
        return keys, {n: (k, s, start + o) for n, s, k, o in found}

    def raw(self, name):
        kind, shape, offset = self.tensors[name]
        with open(self.path, "rb") as f:
            f.seek(offset)
            return f.read(tensor_bytes(kind, int(np.prod(shape))))

    def f32(self, name):
        kind, shape, _ = self.tensors[name]
        return dequantize(self.raw(name), kind, shape)


def write(path, keys, tensors):
    """keys: list of (name, type, value), an array's type being (ARRAY, item type);
    tensors: list of (name, kind, shape, bytes)."""
    def string(s):
        b = s.encode()
        return struct.pack("<Q", len(b)) + b

    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    for name, kind, value in keys:
        head.append(string(name))
        if isinstance(kind, tuple):
            item = kind[1]
            head.append(struct.pack("<IIQ", ARRAY, item, len(value)))
            head.append(b"".join(string(v) for v in value) if item == STRING else
                        np.asarray(value, "<" + SCALARS[item]).tobytes())
        elif kind == STRING:
            head.append(struct.pack("<I", STRING) + string(value))
        else:
            head.append(struct.pack("<I" + SCALARS[kind], kind, value))
    offset = 0
    for name, kind, shape, raw in tensors:
        assert len(raw) == tensor_bytes(kind, int(np.prod(shape))), name
        head.append(string(name) + struct.pack("<I", len(shape)))
        head.append(struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", kind, offset))
        offset += -(-len(raw) // ALIGNMENT) * ALIGNMENT
    data = b"".join(head)
    with open(path, "wb") as f:
        f.write(data + b"\0" * (-len(data) % ALIGNMENT))
        for *_, raw in tensors:
            f.write(raw + b"\0" * (-len(raw) % ALIGNMENT))


def tokenizer(file):
    """The tokenizer that a GGUF file of the `smollm` pre-tokenizer carries, by the `tokenizers` package."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    tokens = file.keys["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in file.keys["tokenizer.ggml.merges"]]
    kinds = file.keys["tokenizer.ggml.token_type"]
    t = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(tokens)}, merges=merges))
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False, special=True)
                          for s, k in zip(tokens, kinds) if k == 3])
    return t
