"""The draft's GGUF file: a llama model that borrows its target's embedding (and tokenizer), with a reduced head.

Keys beside the usual ones:
    tandem.draft.borrow_embedding  bool    true: no token_embd.weight, the target's is used
    tandem.draft.embedding_xxh3    string  XXH3-64 of the bytes of that tensor in the target's file, hexadecimal
    tandem.draft.head_ids          [u32]   ascending: the tokens that the rows of output.weight stand for; without
                                           output.weight the rows are the target's tied ones
"""
import numpy as np

import gguf_io as gg


def embedding_hash(file):
    import xxhash
    return xxhash.xxh3_64_hexdigest(file.raw("token_embd.weight"))


STORE = {"q4_1": (gg.Q4_1, gg.quantize_q4_1), "q8_0": (gg.Q8_0, gg.quantize_q8_0),
         "f32": (gg.F32, lambda a: np.ascontiguousarray(a, np.float32).tobytes())}


def write_draft(path, target_file, tensors, n_layers, head_ids, head, kinds, about):
    """Write the draft's GGUF. tensors: name -> f32 array; head: f32 [len(head_ids), hidden] or None (rows of the
    target's tied head); kinds: (type of the layers' matrices, type of the head); about: extra string keys."""
    t = target_file.keys
    keys = [("general.architecture", gg.STRING, "llama"), ("general.type", gg.STRING, "model")]
    keys += [(k, gg.STRING, v) for k, v in about.items()]
    keys += [("general.license", gg.STRING, "apache-2.0"), ("general.quantization_version", gg.U32, 2),
             ("general.file_type", gg.U32, {"q4_1": 3, "q8_0": 7, "f32": 0}[kinds[0]]),
             ("llama.block_count", gg.U32, n_layers)]
    for name in ["context_length", "embedding_length", "feed_forward_length", "attention.head_count",
                 "attention.head_count_kv", "vocab_size", "rope.dimension_count"]:
        keys.append(("llama." + name, gg.U32, int(t["llama." + name])))
    for name in ["rope.freq_base", "attention.layer_norm_rms_epsilon"]:
        keys.append(("llama." + name, gg.FLOAT, float(t["llama." + name])))
    head_ids = np.asarray(head_ids, np.uint32)
    assert (np.diff(head_ids.astype(np.int64)) > 0).all()
    keys += [("tandem.draft.borrow_embedding", gg.BOOL, True),
             ("tandem.draft.embedding_xxh3", gg.STRING, embedding_hash(target_file)),
             ("tandem.draft.head_ids", (gg.ARRAY, gg.U32), head_ids)]
    out = []
    for name, a in tensors.items():
        kind, pack = STORE["f32" if a.ndim == 1 else kinds[0]]
        out.append((name, kind, a.shape, pack(a)))
    if head is not None:
        kind, pack = STORE[kinds[1]]
        out.append(("output.weight", kind, head.shape, pack(head)))
    gg.write(path, keys, out)


def copy_with_rows(file, path, keep, name):
    """Write `file` (a gguf_io.File of a draft with its own head) to `path` with the head rows `keep` (ascending
    indexes) alone, all bytes as they are."""
    kinds = {bool: gg.BOOL, str: gg.STRING, int: gg.U32, float: gg.FLOAT}
    keys = []
    for k, v in file.keys.items():
        if k == "tandem.draft.head_ids":
            keys.append((k, (gg.ARRAY, gg.U32), v[keep]))
        else:
            keys.append((k, kinds[type(v)], name if k == "general.name" else v))
    tensors = []
    for n, (kind, shape, _) in file.tensors.items():
        raw = file.raw(n)
        if n == "output.weight":
            raw = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)[keep].tobytes()
            shape = (len(keep), shape[1])
        tensors.append((n, kind, shape, raw))
    gg.write(path, keys, tensors)
