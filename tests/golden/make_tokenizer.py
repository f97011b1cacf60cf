#!/usr/bin/env python3
"""Make the tokenizer goldens, and check our tokenizers on the full vocabularies on the way.

  python3 tests/golden/make_tokenizer.py --vocabs LLAMA_CPP/models \\
      --target models/SmolLM2-135M-Instruct.Q4_1.gguf --tool build/release/tests/tool_tokenize

Needs the packages gguf and tokenizers. --vocabs is the folder of the llama.cpp source that holds
ggml-vocab-*.gguf with their test vectors (.inp, .out). Nothing is written with --check.

For each vocabulary: a `tokenizers` object is built from its tokens and merges with the published
pattern; its ids of 10,000 texts (tests/texts.c) must equal ours, from the GGUF and from the
tokenizer.json that the object saves; the vocabulary's own vectors must equal ours too. Then the
vocabulary is pruned to the tokens that occur in the texts and the vectors, renumbered, and
written."""
import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile

import gguf
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors)

N_TEXTS = 10000
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


class Vocab:
    def __init__(self, path):
        self.path = path
        fields = gguf.GGUFReader(path).fields

        def get(key, default=None):
            return fields[KEY + key].contents() if KEY + key in fields else default
        self.model, self.pre = get("model"), get("pre")
        self.tokens, self.types = get("tokens"), get("token_type")
        self.scores, self.merges = get("scores"), get("merges")
        self.ids = {k: get(k) for k in ("bos_token_id", "eos_token_id", "unknown_token_id")}
        self.flags = {k: get(k) for k in ("add_bos_token", "add_eos_token", "add_space_prefix")}
        self.merges = self.merges and [tuple(m.split(" ", 1)) for m in self.merges]


def spm_merges(v):
    """Merges of a scored vocabulary, in the order in which transformers' converter writes them."""
    entries = {t: i for i, t in enumerate(v.tokens)}
    out = []
    for token, i in entries.items():
        if v.types[i] != NORMAL:
            continue
        pairs = [(token[:k], token[k:]) for k in range(1, len(token))
                 if token[:k] in entries and token[k:] in entries]
        pairs.sort(key=lambda p: (entries[p[0]], entries[p[1]]))
        out += [(v.scores[i], *p) for p in pairs]
    out.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    return [m[1:] for m in out]


def reference(v, kind):
    entries = {t: i for i, t in enumerate(v.tokens)}
    if kind == "llama-spm":
        t = Tokenizer(models.BPE(entries, spm_merges(v), unk_token="<unk>", fuse_unk=True,
                                 byte_fallback=True))
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                             normalizers.Replace(" ", "\u2581")])
        t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                       decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        t = Tokenizer(models.BPE(entries, v.merges, ignore_merges=kind in ("llama-bpe", "tekken")))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt-2",
                                                                                         "smollm"))
        steps = {"gpt-2": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}
        for name, pattern in (("llama-bpe", LLAMA3), ("qwen2", QWEN2), ("tekken", TEKKEN)):
            steps[name] = [pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)]
        steps = steps[kind] + [byte_level]
        t.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else byte_level
        t.decoder = decoders.ByteLevel()
        if kind == "qwen2":
            t.normalizer = normalizers.NFC()
    return t


def add_special(t, v):
    """After the reference ids were taken: specials are always parsed there, ours on request."""
    for i, token in enumerate(v.tokens):
        if v.types[i] in (UNKNOWN, CONTROL, USER):
            t.add_tokens([AddedToken(token, special=v.types[i] != USER, normalized=False)])


def our_ids(tool, path, texts, *flags):
    p = subprocess.run([tool, "ids", path, *flags], input=b"\0".join(texts) + b"\0",
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if p.returncode:
        sys.exit(p.stderr.decode())
    print("   ", p.stderr.decode().strip().replace("\n", "; "))
    return [[int(i) for i in line.split()] for line in p.stdout.split(b"\n")[:-1]]


def compare(what, texts, want, got):
    bad = [i for i in range(len(want)) if want[i] != got[i]]
    print(f"  {what}: {len(want) - len(bad)} of {len(want)} equal")
    for i in bad[:5]:
        a, b = want[i], got[i]
        k = next((k for k in range(min(len(a), len(b))) if a[k] != b[k]), min(len(a), len(b)))
        print(f"    text {i}: {texts[i][:60]!r}... at {k}: want {a[k:k + 6]} got {b[k:k + 6]}")
    return len(bad)


def fnv(ids):
    h = 0xcbf29ce484222325
    for i in ids:
        h = ((h ^ i) * 0x100000001b3) & 0xffffffffffffffff
    return h


def occurring(t, kind, texts, tokens):
    """Tokens that occur inside a piece that the reference cuts out of a text."""
    longest = max(len(x) for x in tokens)
    pieces, found = set(), set()
    for text in texts:
        text = text.decode()
        if t.normalizer:
            text = t.normalizer.normalize_str(text)
        if t.pre_tokenizer:
            pieces.update(p for p, _ in t.pre_tokenizer.pre_tokenize_str(text))
        else:
            pieces.add(text)
    for piece in pieces:
        for a in range(len(piece)):
            for b in range(a + 1, min(len(piece), a + longest) + 1):
                if piece[a:b] in tokens:
                    found.add(piece[a:b])
    return found


def prune(v, t, kind, texts, longest=10000):
    """The vocabulary with only the tokens of `texts`, renumbered; .keep maps new id -> old id.
    Merging sees the same candidates in the same order as with the full vocabulary, because every
    merge whose result occurs in a text is kept and so are its parts."""
    tokens = {x: i for i, x in enumerate(v.tokens)}
    found = {x for x in occurring(t, kind, texts, tokens) if len(x) <= longest}
    special = [i for i in range(len(v.tokens)) if v.types[i] in (CONTROL, UNKNOWN, USER)]
    small = object.__new__(Vocab)
    small.keep = [i for i, x in enumerate(v.tokens)
                  if i in special[:40] or v.types[i] == BYTE or v.types[i] == NORMAL and
                  (len(x) == 1 or x in found)]
    new = {old: k for k, old in enumerate(small.keep)}
    small.model, small.pre, small.flags = v.model, v.pre, v.flags
    small.tokens = [v.tokens[i] for i in small.keep]
    small.types = [int(v.types[i]) for i in small.keep]
    small.scores = v.scores and [float(v.scores[i]) for i in small.keep]
    kept = set(small.tokens)
    small.merges = v.merges and [m for m in v.merges if m[0] in kept and m[1] in kept and
                                 m[0] + m[1] in kept]
    small.ids = {k: new[i] for k, i in v.ids.items() if i is not None and i in new}
    return small


def write_gguf(v, path):
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model(v.model)
    w.add_tokenizer_pre(v.pre)
    w.add_token_list(v.tokens)
    w.add_token_types(v.types)
    if v.scores:
        w.add_token_scores(v.scores)
    if v.merges:
        w.add_token_merges([f"{a} {b}" for a, b in v.merges])
    for key, value in v.ids.items():
        w.add_uint32(KEY + key, value)
    for key, value in v.flags.items():
        if value is not None:
            w.add_bool(KEY + key, bool(value))
    w.add_array("tandem.original_ids", [int(i) for i in v.keep])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()


def write_tiny_json(v, t, kind, texts, path):
    """A tokenizer.json as the tokenizers package saves it, with added tokens of every sort, and
    under the key "expected" that package's own ids of some texts."""
    tiny = prune(v, t, kind, texts, longest=16)
    small = reference(tiny, kind)
    add_special(small, tiny)
    for text, flags in (("<both>", {"lstrip": True, "rstrip": True, "special": True}),
                        ("<left>", {"lstrip": True, "special": True}),
                        ("<right>", {"rstrip": True, "special": True}),
                        ("<tool>", {"special": False}), ("<tool><tool>!", {"special": False})):
        small.add_tokens([AddedToken(text, normalized=False, **flags)])
    if kind == "llama-spm":
        small.post_processor = processors.TemplateProcessing(single="<s> $A",
                                                             special_tokens=[("<s>", 1)])
    texts = texts + [x.encode() for x in (
        "a <both> b", "a\u00a0\n<both>\t\u3000<both> b", "<left>  <left> x", "<right>  <right> x",
        "x<tool>y<tool><tool>!z<tool><tool>", "<tool>", " <tool> ", "<both", "<<both>>")]
    with open(path, "w") as f:
        data = json.loads(small.to_str())
        texts = [x.decode() for x in texts]
        data["expected"] = [{"text": x, "ids": small.encode(x).ids} for x in texts]
        json.dump(data, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--vocabs", required=True)
    p.add_argument("--target", required=True)
    p.add_argument("--tool", required=True)
    p.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)))
    p.add_argument("--check", action="store_true")
    p.add_argument("--only")
    args = p.parse_args()
    texts = subprocess.run([args.tool, "texts", str(N_TEXTS)], stdout=subprocess.PIPE,
                           check=True).stdout.split(b"\0")[:-1]
    assert len(texts) == N_TEXTS
    bad = 0
    for kind in ("smollm", "gpt-2", "llama-bpe", "qwen2", "llama-spm", "tekken"):
        if args.only and kind != args.only:
            continue
        # Tekken's pattern has no vocabulary here; any byte-level one shows where it cuts.
        source = "gpt-2" if kind == "tekken" else kind
        path = args.target if kind == "smollm" else f"{args.vocabs}/ggml-vocab-{source}.gguf"
        print(f"{kind}: {os.path.basename(path)}")
        v = Vocab(path)
        t = reference(v, kind)
        encoded = t.encode_batch([x.decode() for x in texts], add_special_tokens=False)
        want = [e.ids for e in encoded]
        if kind != "tekken":
            bad += compare("GGUF", texts, want, our_ids(args.tool, path, texts))
        folder = tempfile.mkdtemp()
        t.save(f"{folder}/tokenizer.json", pretty=False)
        bad += compare("tokenizer.json", texts, want, our_ids(args.tool, folder, texts))
        # With the special tokens marked as such, ours must not parse them in plain text.
        full = Tokenizer.from_file(f"{folder}/tokenizer.json")
        add_special(full, v)
        full.save(f"{folder}/tokenizer.json", pretty=False)
        bad += compare("tokenizer.json with special tokens", texts, want,
                       our_ids(args.tool, folder, texts))
        if kind == "tekken":
            continue
        vectors = []
        if kind != "smollm":
            with open(path + ".inp", "rb") as f:
                vectors = f.read().split(b"\n__ggml_vocab_test__\n")
            with open(path + ".out", "rb") as f:
                vector_ids = [[int(i) for i in line.split()] for line in f.read().split(b"\n")]
            vector_ids = vector_ids[:len(vectors)]
            bad += compare("own vectors", vectors, vector_ids, our_ids(args.tool, path, vectors))
        if args.check:
            continue
        with open(f"{args.out}/tokenizer_{kind}.hashes", "wb") as f:
            f.write(struct.pack(f"<{N_TEXTS}Q", *(fnv(ids) for ids in want)))
        tiny = f"{args.out}/hf_{kind}.json"
        write_tiny_json(v, t, kind, (vectors or texts[:40]) + texts[40:50], tiny)
        print(f"  {os.path.basename(tiny)}: {os.path.getsize(tiny)} bytes")
        if kind == "smollm":
            continue
        out = f"{args.out}/vocab_{kind}.gguf"
        small = prune(v, t, kind, texts + vectors)
        write_gguf(small, out)
        got = [[small.keep[i] for i in ids] for ids in our_ids(args.tool, out, texts)]
        bad += compare("pruned", texts, want, got)
        got = [[small.keep[i] for i in ids] for ids in our_ids(args.tool, out, vectors)]
        bad += compare("own vectors, pruned", vectors, vector_ids, got)
        with open(f"{args.out}/tokenizer_{kind}.json", "w") as f:
            rows = [{"text": x.decode(), "ids": ids} for x, ids in zip(vectors, vector_ids)]
            f.write("[\n" + ",\n".join(json.dumps(r, ensure_ascii=True) for r in rows) + "\n]\n")
        print(f"  pruned to {len(small.keep)} tokens, {os.path.getsize(out)} bytes")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
