#!/usr/bin/env python3
"""`tandem serve` and `tandem chat` on the default target, as a person runs them: an answer over the
Unix socket and over TCP with a token, a second turn from the prefix cache, equal greedy texts alone
and among others, a long prompt refused with its numbers, exit codes and messages of wrong starts,
a drain in the middle of an answer.

  python3 tests/test_end_to_end.py BUILD_FOLDER
"""
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from client_py import Client, Refused  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
# One that the default target answers on every CPU: "What is the capital of France?" hangs on the last bits.
QUESTION = "Name the capital city of France."
TOKEN = "a-token"


def check(ok, what):
    if not ok:
        raise AssertionError(what)


class Server:
    def __init__(self, tandem, folder, *flags):
        self.path = os.path.join(folder, "socket")
        self.log = []
        self.process = subprocess.Popen(
            [tandem, "serve", "-m", MODEL, "--socket", self.path, "--kv-memory", "256M", *flags],
            stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if "ready after" in line:
                break
        else:
            raise AssertionError("did not start: " + " | ".join(self.log))
        self.reader = threading.Thread(target=self.drain_log, daemon=True)
        self.reader.start()

    def drain_log(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def port(self):
        return int(re.search(r"listening on 127\.0\.0\.1:(\d+)", "\n".join(self.log)).group(1))


def run(*command, stdin=""):
    p = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)
    return p.returncode, p.stdout, p.stderr


def test_start_lines(tandem, server):
    text = "\n".join(server.log)
    for what in ("# model ", "KV pool", "listening on unix:" + server.path, "(token needed)"):
        check(what in text, f"no {what!r} in {text}")


def test_chat_command(tandem, server):
    rc, out, err = run(tandem, "chat", "--socket", server.path, "--temp", "0", QUESTION)
    check(rc == 0 and "Paris" in out, (rc, out, err))
    check(re.search(r"# \d+ tokens, .*tokens/s, first after \d+ ms, prompt \d+ tokens", err), err)
    rc, piped, _ = run(tandem, "chat", "--socket", server.path, "--temp", "0", "-q",
                       stdin=QUESTION)
    check((rc, piped) == (0, out), (rc, piped, out))


def test_tcp_and_token(tandem, server):
    where = f"127.0.0.1:{server.port()}"
    rc, out, err = run(tandem, "chat", "--connect", where, "--api-key", TOKEN, "--temp", "0", QUESTION)
    check(rc == 0 and "Paris" in out, (rc, out, err))
    rc, out, err = run(tandem, "chat", "--connect", where, "--api-key", "wrong", QUESTION)
    check(rc == 1 and not out and "unauthorized" in err, (rc, out, err))


def test_second_turn_is_cached(tandem, server):
    c = Client(server.path, timeout=120)
    messages = [{"role": "user", "content": "Rain. " * 300 + "What did I repeat?"}]
    answer = c.text("chat", messages, {"max_tokens": 20, "temperature": 0}).decode()
    first = c.done["usage"]
    check(first["prompt_tokens"] > 300 and first["completion_tokens"] <= 20, first)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Again?"}]
    c.text("chat", messages, {"max_tokens": 5, "temperature": 0})
    check(c.done["usage"]["cached_tokens"] > first["prompt_tokens"] - 128, c.done["usage"])
    c.close()


def test_alone_or_among_others(tandem, server):
    """Greedy and seeded texts are the same whoever else runs."""
    asks = [("Write about rivers.", {"temperature": 0}), ("Name three birds.", {"temperature": 0.8, "seed": 5}),
            ("Why is the sky blue?", {"temperature": 1.0, "top_p": 0.9, "seed": 6})]

    def ask(text, options):
        c = Client(server.path, timeout=120)
        out = c.text("chat", [{"role": "user", "content": text}],
                     {"max_tokens": 24, "prefix_cache": False, **options})
        c.close()
        return out
    alone = [ask(*a) for a in asks]
    together = [None] * 9

    def work(i):
        together[i] = ask(*asks[i % 3])
    threads = [threading.Thread(target=work, args=(i,)) for i in range(9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check(together == alone * 3, (alone, together))


def test_too_long(tandem, server):
    c = Client(server.path, timeout=120)
    try:
        c.call("generate", "word " * 20000)
        check(False, "not refused")
    except Refused as e:
        check(e.data["name"] == "too_long" and e.data["n_ctx"] == 8192, e.data)
        check(e.data["n_prompt"] > 8192, e.data)
    check(c.call("tokenize", "What is the capital of France?")["count"] == 7, "the connection goes on")
    c.close()


def test_wrong_starts(tandem, server):
    for want, words, flags in (
            (1, "no/such/model.gguf", ["-m", "no/such/model.gguf"]),
            (1, "already listens on", ["-m", MODEL, "--kv-memory", "64M", "--socket", server.path]),
            (1, "needs a token", ["-m", MODEL, "--kv-memory", "64M", "--no-unix-socket",
                                  "--host", "0.0.0.0", "--port", "0"]),
            (2, "did you mean --model", ["--modle", MODEL]),
            (2, "--model is needed", [])):
        rc, out, err = run(tandem, "serve", *flags)
        check(rc == want and words in err, (flags, rc, err[-400:]))
    rc, out, err = run(tandem, "serve", "--help")
    check(rc == 0 and "--drain-timeout" in out and not err, (rc, err))


def test_resident(tandem, server):
    """After all that was asked: resident memory is at most weights, pool and 100 MB."""
    c = Client(server.path)
    memory = c.call("memory")
    lines = {line["name"]: line["bytes"] for line in memory["plan"]["lines"]}
    most = lines["target weights"] + lines["KV pool"] + 100_000_000
    check(lines["target weights"] < memory["resident_bytes"] <= most,
          (memory["resident_bytes"], most))
    c.close()


def test_drain(tandem, server):
    c = Client(server.path, timeout=120)
    n = 0
    for t in c.stream("generate", "Once upon a time", {"max_tokens": 60, "ignore_eos": True}):
        n += len(t["tokens"])
        if n == len(t["tokens"]):
            server.process.send_signal(signal.SIGTERM)
    check(n == 60 and c.done["finish_reason"] == "length", (n, c.done))
    check(server.process.wait(10) == 0, "exit code")
    check(not os.path.exists(server.path), "socket file is still there")
    server.reader.join(5)
    check(any("served " in line for line in server.log), server.log[-3:])


TESTS = [test_start_lines, test_chat_command, test_tcp_and_token, test_second_turn_is_cached,
         test_alone_or_among_others, test_too_long, test_wrong_starts, test_resident,
         test_drain]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tandem = os.path.join(os.path.abspath(sys.argv[1]), "tandem")
    n_ok = n_fail = 0
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder:
        server = Server(tandem, folder, "--port", "0", "--api-key", TOKEN)
        for test in TESTS:
            start = time.monotonic()
            try:
                test(tandem, server)
                n_ok += 1
                print(f"ok   {test.__name__} ({(time.monotonic() - start) * 1e3:.0f} ms)")
            except Exception as e:  # a test that fails in any way
                n_fail += 1
                print(f"FAIL {test.__name__}: {type(e).__name__} {e}")
        if server.process.poll() is None:
            server.process.kill()
    print(f"{n_ok} passed, {n_fail} failed, 0 skipped")
    return 1 if n_fail else 0


if __name__ == "__main__":
    sys.exit(main())
