#!/usr/bin/env python3
"""Many clients at once on a running server, with random cancels and disconnects, for as long as
asked; then: no error, nothing left running, pages free + used + cached = total in every class.

  tandem serve -m MODEL --socket S &
  python3 tests/soak.py S [--clients 32] [--seconds 300] [--seed 1]

Prints p50 and p99 between two notifications of a stream, as a client sees them, and the resident
memory at half time and at the end. Exit 1 on a finding.
"""
import argparse
import random
import sys
import threading
import time

from client_py import Client, Refused

TOPICS = ["rivers", "bread", "the moon", "old clocks", "a lighthouse", "bees", "trains", "salt"]


class Worker(threading.Thread):
    def __init__(self, args, idx, until):
        super().__init__()
        self.rng = random.Random(args.seed * 1000 + idx)
        self.path, self.until = args.socket, until
        self.gaps, self.counts, self.error = [], {}, None

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def turn(self, c, messages):
        """One answer; returns its text, None where it was cut, or False where the client left."""
        r = self.rng
        unary = r.random() < 0.1
        options = {"max_tokens": r.randint(4, 120), "seed": r.getrandbits(64),
                   "temperature": r.choice([0, 0.7, 1.0]), "stream": not unary}
        if unary:
            self.count("unary")
            return c.call("chat", messages, options).get("text", "")
        cancel_after = r.randint(1, 20) if r.random() < 0.2 else None
        leave_after = r.randint(0, 20) if r.random() < 0.1 else None
        text, last, n = "", None, 0
        if leave_after == 0:
            c.send("chat", messages, options)
            self.count("left")
            return False
        stream = c.stream("chat", messages, options)
        for t in stream:
            now = time.monotonic()
            if last is not None:
                self.gaps.append(now - last)
            last = now
            if t["seq"] != n:
                raise AssertionError(f"seq {t['seq']}, want {n}")
            n += 1
            text += t.get("text", "")
            if n == cancel_after:
                c.send("cancel", c.stream_id)
            if n == leave_after:
                self.count("left")
                return False
        self.count(c.done["finish_reason"])
        if c.done["usage"]["completion_tokens"] > options["max_tokens"]:
            raise AssertionError(f"{c.done['usage']} of {options['max_tokens']}")
        return text if c.done["finish_reason"] != "cancelled" else None

    def run(self):
        try:
            while time.monotonic() < self.until:
                c = Lenient(self.path, timeout=120)
                messages = [{"role": "user", "content": "Tell me about "
                             + self.rng.choice(TOPICS) + ". " * self.rng.randint(1, 300)}]
                for _ in range(self.rng.randint(1, 4)):
                    try:
                        text = self.turn(c, messages)
                    except Refused as e:
                        if e.data["name"] not in ("overloaded", "too_long"):
                            raise
                        self.count(e.data["name"])
                        break
                    if text is False or time.monotonic() > self.until:
                        break
                    messages += [{"role": "assistant", "content": text or ""},
                                 {"role": "user", "content": "And then?"}]
                c.close()
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"


class Lenient(Client):
    """Nobody waits for the answers to cancel: they come among a stream's notifications, or, where the stream
    had just ended by itself, before the next call's answer."""

    def response(self, msgid):
        while True:
            m = self.receive()
            if m[0] == 2:
                self.waiting.append(m)
            elif m[1] == msgid:
                if m[2] is not None:
                    raise Refused(m[2])
                return m[3]

    def notification(self):
        while True:
            m = self.waiting.pop(0) if self.waiting else self.receive()
            if m[0] == 2:
                return m


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("socket")
    p.add_argument("--clients", type=int, default=32)
    p.add_argument("--seconds", type=float, default=300)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    watch = Client(args.socket)
    start = time.monotonic()
    workers = [Worker(args, i, start + args.seconds) for i in range(args.clients)]
    for w in workers:
        w.start()
    resident = []
    while any(w.is_alive() for w in workers):
        time.sleep(min(2, args.seconds / 20))
        resident.append(watch.call("stats")["resident_bytes"])
    for w in workers:
        w.join()
    time.sleep(1)
    s = watch.call("stats")
    findings = [f"client {i}: {w.error}" for i, w in enumerate(workers) if w.error]
    if s["running"] or s["waiting"] or s["paused"]:
        findings.append(f"left over: {s['running']} {s['waiting']} {s['paused']}")
    if s["finished"]["error"]:
        findings.append(f"{s['finished']['error']} requests failed")
    for name, k in s["pool"]["classes"].items():
        print(f"{name}: {k}")
        if k["free"] + k["used"] + k["cached"] != k["total"] or k["used"] or k["reserved"]:
            findings.append(f"pages of class {name}: {k}")
    # The pool's pages are touched one after the other: only what comes on top counts as growth, and
    # only after the first half, when everything was used once.
    half, end = max(resident[:len(resident) // 2 + 1]), resident[-1]
    print(f"resident: {half / 2**20:.1f} MiB at half time, {end / 2**20:.1f} MiB at the end")
    counts = {}
    for w in workers:
        for k, v in w.counts.items():
            counts[k] = counts.get(k, 0) + v
    gaps = sorted(g for w in workers for g in w.gaps)
    print(f"{args.clients} clients, {time.monotonic() - start:.0f} s, ended: {counts}, "
          f"{s['generated_tokens']} tokens, {s['cached_prompt_tokens']} of {s['prompt_tokens']} "
          f"prompt tokens from the cache")
    if gaps:
        print(f"between notifications: p50 {gaps[len(gaps) // 2] * 1e3:.1f} ms, "
              f"p99 {gaps[len(gaps) * 99 // 100] * 1e3:.1f} ms, max {gaps[-1] * 1e3:.1f} ms")
    for f in findings:
        print("FINDING", f)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
