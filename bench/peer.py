#!/usr/bin/env python3
"""Tandem beside llama.cpp on the same file, threads and points, interleaved A B A B, medians.

Each turn is a burst: a pass or two to wake threads and warm caches, then the median of the passes behind them, as
decoding does one step after another. Between turns both rest, so that neither's spinning threads take the other's core.

  python3 bench/peer.py --model MODEL.gguf --llama-include DIR --llama-lib DIR [--threads 2] [--reps 7]
                        [--kv-type q8_0]

The llama.cpp build is yours (its own README says how; use its native CPU options; clang before 15 wants -D__AMX_INT8__
too, or its AMX kernels are left out). DIRs hold llama.h, ggml.h and
libllama.so. Every setting of flash attention and of its repacked buffers is tried first, with --kv-type q8_0 its 8-bit
caches beside those of f16, and the peer's best one at each point is the one that is compared. Writes one CSV row a
point with the floors that bench_step measures in the same run beside it (bytes over read bandwidth, products over
register-only loops); needs ninja's bench_step built.
A setting in which the peer crashes or fails is named and left out."""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BURST = {"gen": 12, "prompt": 3}
REST_S = 0.05
POINTS = ["gen:1:0", "gen:5:0", "prompt:512:0", "gen:1:7168", "gen:5:7168"]
TARGETS = {"gen:1:0": 1.7, "gen:5:0": 2.0, "prompt:512:0": 2.0, "gen:1:7168": 6.0}


class Side:
    def __init__(self, cmd, env=None):
        self.p = subprocess.Popen(
            cmd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env)

    def burst(self, point):
        time.sleep(REST_S)
        n = BURST[point.split(":")[0]]
        times = [self.time(point) for _ in range(n)]
        return statistics.median(times[n // 4:])

    def time(self, point):
        return float(self.ask(point))

    def ask(self, line_out):
        try:
            self.p.stdin.write(line_out + "\n")
            self.p.stdin.flush()
            line = self.p.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"exit {self.p.wait()}")
        return line

    def close(self):
        self.p.stdin.close()
        self.p.wait()


def floors(side, point):
    """Byte floor and product floor in ms, GB/s of the sweep behind the first."""
    return [float(x) for x in side.ask("floors " + point).split()]


def build_peer(args, folder):
    out = os.path.join(folder, "llama_step")
    inc = [f"-I{d}" for d in args.llama_include]
    subprocess.run(["gcc", "-O2", "-o", out, os.path.join(HERE, "peer", "llama_step.c"), *inc,
                    f"-L{args.llama_lib}", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu",
                    f"-Wl,-rpath,{os.path.abspath(args.llama_lib)}"], check=True)
    return out


def peer_settings(peer, args):
    """The settings that run, by point: the best of a first timing."""
    best = {}
    kinds = [(f, x, "f16") for f in (0, 1) for x in (0, 1)]
    if args.kv_type != "f16":
        # Its values of 8 bits need flash attention.
        kinds += [(1, x, args.kv_type) for x in (0, 1)]
    for flash, extra, kv in kinds:
        if f"{flash}:{extra}" not in args.peer_settings:
            continue
        side = Side([peer, args.model, str(args.threads), str(flash), str(extra), kv])
        try:
            for point in args.points:
                side.time(point)
                t = side.burst(point)
                if point not in best or t < best[point][0]:
                    best[point] = (t, (flash, extra, kv))
            side.close()
        except RuntimeError as e:
            print(
                f"# peer with flash attention {flash}, extra buffers {extra}, {kv}: {e}",
                file=sys.stderr)
    return {point: setting for point, (_, setting) in best.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--llama-include", required=True, action="append")
    p.add_argument("--llama-lib", required=True)
    p.add_argument("--bench-step", default="build/release/bench/bench_step")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--reps", type=int, default=7)
    p.add_argument("--peer-settings", default="0:0,0:1,1:0,1:1", type=lambda s: s.split(","),
                   help="flash attention:extra buffers to try (default all)")
    p.add_argument("--kv-type", default="f16", choices=("f16", "q8_0"),
                   help="of our caches; the peer's may be f16 all the same where that is faster")
    p.add_argument("--points", default=",".join(POINTS), type=lambda s: s.split(","))
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peer = build_peer(args, folder)
        settings = peer_settings(peer, args)
        print(
            "point,kv,threads,reps,tandem_ms,peer_ms,peer_over_tandem,ratio_min,ratio_max,wanted,peer_flash,"
            "peer_extra_buffers,peer_kv,byte_floor_ms,mac_floor_ms,read_gbs,tandem_over_floor,peer_over_floor")
        for point in args.points:
            if point not in settings:
                print(f"# {point}: no peer setting ran", file=sys.stderr)
                continue
            flash, extra, kv = settings[point]
            ours = Side([args.bench_step, args.model, "--threads", str(args.threads), "--kv-type",
                         args.kv_type, "--serve"])
            theirs = Side([peer, args.model, str(args.threads), str(flash), str(extra), kv])
            ours.time(point), theirs.time(point)
            before = floors(ours, point)
            pairs = [(ours.burst(point), theirs.burst(point)) for _ in range(args.reps)]
            # Best of a reading before and one behind: the host's speed drifts.
            after = floors(ours, point)
            ours.close(), theirs.close()
            bytes_ms, macs_ms = min(before[0], after[0]), min(before[1], after[1])
            gbs, floor = max(before[2], after[2]), max(bytes_ms, macs_ms)
            a, b = statistics.median(x for x, _ in pairs), statistics.median(y for _, y in pairs)
            ratios = [y / x for x, y in pairs]
            print(
                f"{point},{args.kv_type},{args.threads},{args.reps},{a:.3f},{b:.3f},{statistics.median(ratios):.2f},"
                f"{min(ratios):.2f},{max(ratios):.2f},{TARGETS.get(point, '')},{flash},{extra},{kv},"
                f"{bytes_ms:.3f},{macs_ms:.3f},{gbs:.1f},{a / floor:.2f},{b / floor:.2f}", flush=True)


if __name__ == "__main__":
    main()
