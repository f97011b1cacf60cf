#!/usr/bin/env python3
"""Make tests/golden/families/: a tiny random model of every family that we read, and what transformers
computes with it. Goal and use: tests/test_families.c.

  make_families.py [--only NAME] [--converter LLAMA_CPP_DIR]

Of each family: a Hugging Face folder <name>/ (config.json as published models write it, safetensors),
for most the same weights as <name>.gguf, and <name>.logits. The logits are those of the folder as
transformers loads it, weights widened to f64 after rounding to the file's type, attention "eager".
(Norms, softmax and rope angles are f32 there: that is part of the models.)

The models are made so that mistakes show: Q and K are scaled until attention is peaked (the script
prints and checks the mean of the largest weight), norm weights and biases are far from 1 and 0, the
embedding is small so that the epsilon of the norms counts, and the ids go on far past the original
context of 64 where there is a rope scaling.

With --converter the GGUF files are compared, tensor by tensor and key by key, with what llama.cpp's own
converter makes of the folders.

Needs torch, transformers, safetensors, gguf, numpy. Made with torch 2.15.0, transformers 5.24.0,
gguf 0.19.0; compared with the converter of llama-cpp-python 0.3.36.

<name>.logits, little endian: "TFAM"; i32 n_ids, vocab, n_wrong; f32 bf16_kl; i32 ids[n_ids]; f32
logits[n_ids][vocab]; f32 wrong[n_wrong][vocab], the last rows as they would be if Q and K were normed
after the rotation instead of before it (Qwen3 alone). bf16_kl: mean KL of the logits that transformers
computes in bf16. Printed besides: how far its logits move in f32, and with the angles of the rotation
(position times frequency, f32 there) in f64: what a right implementation may differ by."""
import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from transformers.models.qwen3 import modeling_qwen3

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "families")
N_IDS, ORIGINAL, N_WRONG = 136, 64, 16
SHAPE = {"hidden_act": "silu", "vocab_size": 96, "num_hidden_layers": 2, "attention_dropout": 0.0,
         "initializer_range": 0.02, "use_cache": True, "bos_token_id": 1, "eos_token_id": 2}


def shape(hidden, ffn, heads, kv_heads=None, **more):
    out = dict(SHAPE, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads, **more)
    if kv_heads:
        out["num_key_value_heads"] = kv_heads
    return out


# name -> dtype, GGUF too?, tensors in how many files, config.json
FAMILIES = {
    "llama2": ("float16", False, 1, dict(
        shape(64, 72, 4, rms_norm_eps=1e-5, max_position_embeddings=4096, pretraining_tp=1),
        architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=False,
        rope_scaling=None)),  # MHA, and no rope_theta: 10000 is its default
    "llama3": ("bfloat16", True, 2, dict(
        shape(64, 64, 4, 2, rms_norm_eps=1e-5, max_position_embeddings=8 * ORIGINAL),
        architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=False,
        attention_bias=False, mlp_bias=False, head_dim=16, rope_theta=500000.0,
        rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": ORIGINAL, "rope_type": "llama3"})),
    "mistral": ("bfloat16", True, 1, dict(
        shape(48, 64, 4, 1, rms_norm_eps=1e-5, max_position_embeddings=1024, head_dim=24),
        architectures=["MistralForCausalLM"], model_type="mistral", tie_word_embeddings=False,
        rope_theta=1000000.0, sliding_window=None)),  # 4 x 24 is not 48, as in Nemo
    "qwen2": ("bfloat16", True, 1, dict(
        shape(64, 64, 4, 2, rms_norm_eps=1e-6, max_position_embeddings=1024),
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True,
        rope_theta=1000000.0, sliding_window=32, use_sliding_window=False, max_window_layers=1)),
    "qwen3": ("float16", True, 1, dict(
        shape(48, 64, 4, 2, rms_norm_eps=1e-6, max_position_embeddings=1024, head_dim=32),
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", tie_word_embeddings=False,
        attention_bias=False, rope_theta=1000000, rope_scaling=None, sliding_window=None,
        use_sliding_window=False, max_window_layers=2)),
    "smollm2": ("float32", False, 1, dict(
        shape(48, 64, 3, 1, rms_norm_eps=1e-5, max_position_embeddings=1024),
        architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=True,
        vocab_size=101, attention_bias=False, rope_theta=100000, rope_scaling=None,
        rope_interleaved=False)),
    "smollm3": ("bfloat16", True, 1, dict(
        shape(48, 64, 3, 1, rms_norm_eps=1e-6, max_position_embeddings=1024),
        architectures=["SmolLM3ForCausalLM"], model_type="smollm3", tie_word_embeddings=True,
        num_hidden_layers=4, attention_bias=False, mlp_bias=False, rope_theta=5000000.0,
        rope_scaling=None, no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4,
        layer_types=["full_attention"] * 4, sliding_window=None, use_sliding_window=False,
        pad_token_id=2)),
    "linear": ("bfloat16", True, 1, dict(
        shape(48, 64, 3, 3, rms_norm_eps=1e-5, max_position_embeddings=ORIGINAL),
        architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})),
    "yarn": ("bfloat16", True, 1, dict(
        shape(64, 64, 2, 1, rms_norm_eps=1e-6, max_position_embeddings=4 * ORIGINAL),
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True,
        rope_theta=10000.0, use_sliding_window=False,
        rope_scaling={"type": "yarn", "factor": 4.0,
                      "original_max_position_embeddings": ORIGINAL})),
}


# ---- Weights ----

def head_dim(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def make_weights(c, seed):
    """Names of the Hugging Face format -> f32 arrays."""
    draw = np.random.Generator(np.random.PCG64(seed))
    hidden, ffn, vocab, hd = c["hidden_size"], c["intermediate_size"], c["vocab_size"], head_dim(c)
    q, kv = c["num_attention_heads"] * hd, c.get("num_key_value_heads",
                                                 c["num_attention_heads"]) * hd
    bias, qk_norm = c["model_type"] == "qwen2", c["model_type"] == "qwen3"

    def matrix(rows, cols, gain):
        return draw.standard_normal((rows, cols)) * gain / math.sqrt(cols)

    def vector(n, mean, spread):
        return mean + spread * draw.standard_normal(n)

    w = {"model.embed_tokens.weight": draw.standard_normal((vocab, hidden)) * 0.05,
         "model.norm.weight": vector(hidden, 1, 0.3)}
    if c["tie_word_embeddings"]:
        w["model.norm.weight"] *= 2.5 / (0.05 * math.sqrt(hidden))
    else:
        w["lm_head.weight"] = matrix(vocab, hidden, 2.5)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        w[at + "input_layernorm.weight"] = vector(hidden, 1, 0.3)
        w[at + "self_attn.q_proj.weight"] = matrix(q, hidden, 2.5)
        w[at + "self_attn.k_proj.weight"] = matrix(kv, hidden, 2.5)
        w[at + "self_attn.v_proj.weight"] = matrix(kv, hidden, 1)
        w[at + "self_attn.o_proj.weight"] = matrix(hidden, q, 0.1)
        if bias:
            for name, n in (("q", q), ("k", kv), ("v", kv)):
                w[at + f"self_attn.{name}_proj.bias"] = vector(n, 0, 0.5)
        if qk_norm:
            w[at + "self_attn.q_norm.weight"] = vector(hd, 2.5, 0.6)
            w[at + "self_attn.k_norm.weight"] = vector(hd, 2.5, 0.6)
        w[at + "post_attention_layernorm.weight"] = vector(hidden, 0.7, 0.3)
        w[at + "mlp.gate_proj.weight"] = matrix(ffn, hidden, 1.5)
        w[at + "mlp.up_proj.weight"] = matrix(ffn, hidden, 1)
        w[at + "mlp.down_proj.weight"] = matrix(hidden, ffn, 0.2)
    return {name: np.ascontiguousarray(a, np.float32) for name, a in w.items()}


def write_folder(folder, c, tensors, n_files):
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        os.remove(os.path.join(folder, name))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(c, f, indent=2, sort_keys=True)
        f.write("\n")
    meta = {"format": "pt"}
    if n_files == 1:
        save_file(tensors, os.path.join(folder, "model.safetensors"), meta)
        return
    names, place = sorted(tensors), {}
    for i in range(n_files):
        part = names[i * len(names) // n_files:(i + 1) * len(names) // n_files]
        file = f"model-{i + 1:05}-of-{n_files:05}.safetensors"
        save_file({n: tensors[n] for n in part}, os.path.join(folder, file), meta)
        place.update({n: file for n in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": place}, f, indent=2)
        f.write("\n")


# ---- What transformers computes ----

def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                 attn_implementation="eager")
    return model.double().eval()


def run(model, ids, attention=False):
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=False, output_attentions=attention)
    return out.logits[0].float().numpy(), out.attentions


def exact_angles(model):
    rotary = model.model.rotary_emb

    def forward(x, position_ids, *_, **__):
        angle = position_ids[..., None].double() * rotary.inv_freq.double()
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * rotary.attention_scaling, angle.sin() * rotary.attention_scaling
    rotary.forward = forward


def norm_after_rope(model):
    """Qwen3 with its Q and K norms in the wrong place."""
    current, right = [None, None], modeling_qwen3.apply_rotary_pos_emb

    def rope_then_norm(q, k, cos, sin, *a, **kw):
        q, k = right(q, k, cos, sin, *a, **kw)
        return current[0](q), current[1](k)

    for layer in model.model.layers:
        attn = layer.self_attn
        norms, forward = (attn.q_norm, attn.k_norm), attn.forward
        attn.q_norm = attn.k_norm = torch.nn.Identity()

        def wrong(*a, norms=norms, forward=forward, **kw):
            current[:] = norms
            return forward(*a, **kw)
        attn.forward = wrong
    modeling_qwen3.apply_rotary_pos_emb = rope_then_norm
    return lambda: setattr(modeling_qwen3, "apply_rotary_pos_emb", right)


def mean_kl(want, got):
    p, q = (torch.log_softmax(torch.from_numpy(z).double(), -1) for z in (want, got))
    return ((p.exp() * (p - q)).sum(-1)).mean().item()


def write_logits(name, folder, c, seed):
    ids = np.random.Generator(np.random.PCG64(seed + 1000)).integers(0, c["vocab_size"], N_IDS)
    model = load(folder)
    logits, attention = run(model, ids.tolist(), True)
    exact_angles(model)
    exact = run(model, ids.tolist())[0]
    wrong = np.zeros((0, c["vocab_size"]))
    if c["model_type"] == "qwen3":
        model = load(folder)
        undo = norm_after_rope(model)
        wrong = run(model, ids.tolist())[0][-N_WRONG:]
        undo()
    f32 = run(load(folder).float(), ids.tolist())[0]
    bf16_kl = mean_kl(logits, run(load(folder).to(torch.bfloat16), ids.tolist())[0])
    peaks = [a[0, :, 16:].max(-1).values.mean().item() for a in attention]
    entropy = [-(a * a.clamp_min(1e-300).log()).sum(-1)[0, :, 16:].mean().item() for a in attention]
    print(f"{name:8} logits {logits.std():.2f} (most {np.abs(logits).max():.1f}); attention by layer: "
          "largest weight " + " ".join(f"{p:.2f}" for p in peaks) +
          ", entropy " + " ".join(f"{h:.2f}" for h in entropy) +
          f" nats; in bf16 KL {bf16_kl:.1e}; in f32 {np.abs(f32 - logits).max():.1e} away, "
          f"with exact angles {np.abs(exact - logits).max():.1e}")
    if min(peaks) < 0.4:
        sys.exit(f"{name}: attention is not peaked")
    with open(os.path.join(HERE, name + ".logits"), "wb") as f:
        f.write(b"TFAM" + struct.pack("<3if", N_IDS, c["vocab_size"], len(wrong), bf16_kl))
        for array, dtype in ((ids, "<i4"), (logits, "<f4"), (wrong, "<f4")):
            f.write(array.astype(dtype).tobytes())


# ---- GGUF: names and keys of its llama, qwen2, qwen3 and smollm3 architectures ----

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def interleave(a, n_heads):
    """Rows of each head: halves (i, i + d/2) become neighbours (2i, 2i + 1)."""
    return a.reshape(n_heads, 2, -1, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


def llama3_factors(c, s):
    """What divides each frequency."""
    n, old = head_dim(c), s["original_max_position_embeddings"]
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    out = []
    for i in range(n // 2):
        turns = old * c["rope_theta"] ** (-2 * i / n) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0), 1)
        out.append(1 / ((1 - blend) / s["factor"] + blend))
    return np.array(out, np.float32)


def write_gguf(path, c, tensors):
    arch = {"mistral": "llama"}.get(c["model_type"], c["model_type"])
    w = gguf.GGUFWriter(path, arch)
    w.add_name(os.path.basename(path)[:-5])
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c.get("num_key_value_heads", c["num_attention_heads"]))
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if "head_dim" in c:
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
    if arch in ("llama", "smollm3"):
        w.add_vocab_size(c["vocab_size"])
        w.add_rope_dimension_count(head_dim(c))
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    w.add_rope_freq_base(c.get("rope_theta") or scaling["rope_theta"])
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(c, scaling))
    for name, t in tensors.items():
        a = t.float().numpy()
        if arch in ("llama", "smollm3") and "q_proj" in name:
            a = interleave(a, c["num_attention_heads"])
        if arch in ("llama", "smollm3") and "k_proj" in name:
            a = interleave(a, c.get("num_key_value_heads", c["num_attention_heads"]))
        if a.ndim == 1:
            w.add_tensor(gguf_name(name), a)
        elif t.dtype == torch.float16:
            w.add_tensor(gguf_name(name), a.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            w.add_tensor(gguf_name(name), gguf.quants.quantize(a, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# The converter without a vocabulary, which these models have not.
CONVERT = """
import sys
from pathlib import Path
root, folder, out, arch, kind = sys.argv[1:]
sys.path[:0] = [root, root + "/gguf-py"]
import gguf
from conversion import get_model_class
m = get_model_class(arch)(Path(folder), getattr(gguf.LlamaFileType, kind), Path(out))
m.set_vocab = lambda: None
m.write()
"""
OF_THE_FILE = ("GGUF.", "general.", "tokenizer.")


def read_gguf(path):
    r = gguf.GGUFReader(path)
    keys = {k: f.contents() for k, f in r.fields.items() if not k.startswith(OF_THE_FILE)}
    return keys, {t.name: (t.tensor_type.name, t.data.tobytes()) for t in r.tensors}


def compare(folder, converter, c):
    """Ends the process unless the converter writes the same tensors, and the same keys where it has them."""
    kind = {"bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16"}[c["torch_dtype"]]
    with tempfile.TemporaryDirectory() as d:
        out = os.path.join(d, "x.gguf")
        subprocess.run([sys.executable, "-c", CONVERT, converter, folder, out, c["architectures"][0],
                        kind], check=True, capture_output=True)
        (keys, tensors), (want_keys, want) = read_gguf(folder + ".gguf"), read_gguf(out)
    wrong = [n for n in tensors.keys() | want.keys() if tensors.get(n) != want.get(n)]
    if "rope_freqs.weight" in wrong and "rope_freqs.weight" in want:  # computed in f32 there
        a, b = (np.frombuffer(t["rope_freqs.weight"][1], "<f4") for t in (tensors, want))
        if np.allclose(a, b, rtol=1e-6, atol=0):
            wrong.remove("rope_freqs.weight")
    wrong += [f"{k} ({keys[k]}, there {want_keys.get(k)})" for k in keys
              if keys[k] != want_keys.get(k)]
    only = sorted(set(want_keys) - set(keys))
    print(f"{'':8} GGUF: {len(want)} tensors as the converter's, it alone has the keys {only}")
    if wrong:
        sys.exit(f"{folder}: not as the converter has it: " + ", ".join(wrong))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--only", choices=list(FAMILIES))
    p.add_argument("--converter", metavar="DIR", help="compare GGUF files with this converter's")
    args = p.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for seed, (name, (dtype, with_gguf, n_files, c)) in enumerate(FAMILIES.items(), 1):
        if args.only not in (None, name):
            continue
        c = dict(c, torch_dtype=dtype)
        kind = getattr(torch, dtype)
        tensors = {n: torch.from_numpy(a).to(kind) for n, a in make_weights(c, seed).items()}
        folder = os.path.join(HERE, name)
        write_folder(folder, c, tensors, n_files)
        write_logits(name, folder, c, seed)
        if with_gguf:
            write_gguf(folder + ".gguf", c, tensors)
            if args.converter:
                compare(folder, args.converter, c)


if __name__ == "__main__":
    main()
