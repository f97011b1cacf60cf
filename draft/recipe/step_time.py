"""Time of one decode step of the target and of drafts on a GPU, each replayed as a CUDA graph of PyTorch operations and
the recipe's own attention kernel: a relative figure, not the engine's."""
import argparse
import json

import torch

from generate import Decoder
from llama import Draft, Target


@torch.no_grad()
def step_ms(model, rows, position, repeats=50):
    """Median milliseconds of a step of `rows` sequences at `position`, head included."""
    d = Decoder(model, rows, position + 1)
    for t in d.k + d.v:
        t.normal_()
    ids = torch.randint(17, 40000, (rows,), device=model.embedding.device)
    d.logits(ids, position)
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        d.graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[repeats // 2]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--target", required=True)
    p.add_argument("--drafts", nargs="+", required=True)
    p.add_argument("--json", required=True)
    a = p.parse_args()
    torch._dynamo.config.recompile_limit = 64
    target = Target(a.target, "cuda", torch.float16)
    out = {"device": torch.cuda.get_device_name(), "dtype": "float16"}
    for position in (256, 1024):
        for rows in (1, 2, 5):
            out[f"target, {rows} rows, at {position}"] = round(step_ms(target, rows, position), 4)
        for path in a.drafts:
            draft = Draft(path, target, "cuda", torch.float16)
            name = f"{draft.cfg.n_layers} layers, head {len(draft.head_ids)}, at {position}"
            out[name] = round(step_ms(draft, 1, position), 4)
    print(json.dumps(out, indent=1), flush=True)
    with open(a.json, "w") as f:
        json.dump(out, f, indent=1)


if __name__ == "__main__":
    main()
