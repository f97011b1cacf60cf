#!/usr/bin/env python3
"""An independent client (tests/client_py.py, written from docs/protocol.md) against the server on a
fake engine, whose answers repeat the prompt byte by byte. Where the msgpack package is installed,
everything runs a second time with its packer and its strict decoder.

  python3 tests/test_protocol.py BUILD_FOLDER
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from client_py import Client, Refused, Unpacker, pack  # noqa: E402


def check(got, want):
    if got != want:
        raise AssertionError(f"got {got!r}, want {want!r}")


def refused(name, call):
    try:
        call()
    except Refused as e:
        check(e.data["name"], name)
        return e
    raise AssertionError(f"not refused with {name}")


def test_hello(c):
    check(c.info["server"], "tandem")
    check(c.info["protocol"], 1)
    check(len(c.info["model"]["fingerprint"]), 16)
    check(c.info["limits"]["message_bytes"], 16 << 20)


def test_stream(c):
    seqs, tokens, text = [], [], ""
    for t in c.stream("generate", "h\u00e9llo \U0001f600 ", {"max_tokens": 40, "logprobs": 1}):
        seqs.append(t["seq"])
        tokens += t["tokens"]
        text += t["text"]
        check(len(t["logprobs"]), len(t["tokens"]))
    whole = ("h\u00e9llo \U0001f600 " * 4).encode()[:40]
    check(tokens, list(whole))
    check(text.encode(), whole)
    check(seqs, list(range(len(seqs))))
    check(c.done["finish_reason"], "length")
    check(c.done["usage"]["completion_tokens"], 40)
    check(sorted(c.done["timings"]),
          ["decode_ms", "queue_ms", "tokens_per_second", "total_ms", "ttft_ms"])


def test_two_streams(c):
    a = c.call("generate", "a", {"max_tokens": 30})["stream"]
    b = c.call("generate", "b", {"max_tokens": 30})["stream"]
    text = {a: "", b: ""}
    n_done = 0
    while n_done < 2:
        _, name, (stream, body) = c.notification()
        if name == "done":
            n_done += 1
        else:
            text[stream] += body["text"]
    check(text, {a: "a" * 30, b: "b" * 30})


def test_unary_and_chat(c):
    r = c.call("generate", [104, 105], {"max_tokens": 5, "stream": False, "seed": 2**64 - 1})
    check(r["text"], "hihih")
    check(r["seed"], 2**64 - 1)
    check(c.text("chat", [{"role": "user", "content": "Hello!"}]), b"Hello!")
    check(c.done["finish_reason"], "stop")
    r = c.call("generate", [200, 104], {"max_tokens": 4, "stream": False})
    check(r["bytes"], b"\xc8h\xc8h")


def test_speculation(c):
    """The fake engine's rounds: two accepted draft tokens and the target's own."""
    flags, text = [], b""
    for t in c.stream("generate", "hello ", {"max_tokens": 12, "drafted": True}):
        check(len(t["drafted"]), len(t["tokens"]))
        check(sum(t["text_bytes"]), len(t["text"].encode()))
        flags += t["drafted"]
        text += t["text"].encode()
    check(text, b"hello hello ")
    check(flags, [1, 1, 0] * 4)
    s = c.done["speculation"]
    check((s["rounds"], s["plain_rounds"], s["drafted"], s["accepted"]), (4, 0, 11, 8))
    check(s["acceptance"], 8 / 11)
    check(s["tokens_per_round"], 3.0)
    check(s["drafted_by_position"], [4, 4, 3])
    check(s["accepted_by_position"], [4, 4, 0])
    check("no_draft" in s, False)
    r = c.call("generate", "ab", {"max_tokens": 3, "stream": False, "draft_tokens": 0})
    check(r["speculation"]["no_draft"], "off")
    check(r["speculation"]["tokens_per_round"], None)
    check(c.info["model"]["draft"]["name"], "fake draft")
    check(c.info["model"]["speculation"]["draft_tokens"], "auto")
    e = refused("invalid_params", lambda: c.call("generate", "x", {"draft_tokens": 17}))
    check(e.message, 'draft_tokens is 17, allowed is "auto" or [0, 16]')
    check(c.call("stats")["speculation"]["rounds"] >= 4, True)


def test_conversation(c):
    """The next turn finds the answer of the last one, under the connection or the client's name."""
    def cached(prompt, options):
        r = c.call("generate", prompt, {"max_tokens": 4, "stream": False, **options})
        return r["usage"]["cached_tokens"]
    check([cached("abcd", {}), cached("abcdabcdx", {})], [0, 8])
    name = {"conversation": os.urandom(8).hex()}
    check([cached("abcd", name), cached("abcdabcdx", name)], [0, 8])
    check(cached("abcdabcdx", {"conversation": False}), 0)


def test_stop_string(c):
    check(c.text("generate", "one END two", {"stop": ["END", "nothing"]}), b"one ")
    check(c.done["stop_reason"], "END")


def test_cancel(c):
    stream = c.call("generate", "abc")["stream"]
    check(c.call("cancel", stream), {"cancelled": True})
    n_before = len(c.waiting)
    while True:
        _, name, (_, body) = c.notification()
        if name == "done":
            break
        n_before -= 1
    if n_before < 0:
        raise AssertionError("token after the answer to cancel")
    check(body["finish_reason"], "cancelled")
    check(c.call("cancel", stream), {"cancelled": False})


def test_errors(c):
    e = refused("invalid_params", lambda: c.call("generate", "x", {"top_p": 2.0}))
    check((e.code, e.data["param"]), (4, "top_p"))
    e = refused("invalid_params", lambda: c.call("generate", "x", {"max_token": 2}))
    check("did you mean \"max_tokens\"" in e.message, True)
    e = refused("too_long", lambda: c.call("generate", "x" * 5000))
    check((e.data["n_prompt"], e.data["n_ctx"]), (5000, 4096))
    refused("unknown_method", lambda: c.call("nothing"))
    check(c.call("tokenize", "hi")["tokens"], [104, 105])


def test_other_methods(c):
    check(c.call("detokenize", [104, 105])["text"], "hi")
    check(c.call("models")[0]["context"], 4096)
    check(c.call("stats")["server"]["connections"] >= 1, True)
    check(c.call("plan", {"context": 99})["context"], 99)
    check(sorted(c.call("memory")), ["plan", "pool", "resident_bytes"])


TESTS = [test_hello, test_stream, test_two_streams, test_unary_and_chat, test_speculation,
         test_conversation, test_stop_string, test_cancel, test_errors, test_other_methods]


def codecs():
    yield "own", pack, Unpacker
    try:
        import msgpack
    except ImportError:
        return

    class Strict:
        def __init__(self):
            self.u = msgpack.Unpacker(raw=False, strict_map_key=True)

        def feed(self, data):
            self.u.feed(data)

        def next(self):
            return next(iter(self.u), None)

    yield "msgpack", lambda v: msgpack.packb(v, use_bin_type=True), Strict


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tool = os.path.join(sys.argv[1], "tests", "tool_serve_fake")
    folder = tempfile.mkdtemp(prefix="tandem-test-")
    path = os.path.join(folder, "socket")
    server = subprocess.Popen([tool, path, "secret"], stdout=subprocess.PIPE, text=True)
    _, port, metrics = server.stdout.readline().split()
    n = {"ok": 0, "FAIL": 0}

    def run(name, fn):
        try:
            fn()
            word, why = "ok", ""
        except Exception as e:  # a test that fails in any way
            word, why = "FAIL", f": {type(e).__name__} {e}"
        n[word] += 1
        print(f"{word:4} {name}{why}")

    for codec, packer, unpacker in codecs():
        for address, token in ((path, None), (("127.0.0.1", int(port)), "secret")):
            for test in TESTS:
                def one():
                    c = Client(address, token, packer, unpacker)
                    test(c)
                    c.close()
                run(f"{test.__name__} ({codec}, {'unix' if token is None else 'tcp'})", one)
    run("wrong_token", lambda: refused(
        "unauthorized", lambda: Client(("127.0.0.1", int(port)), "wrong")))

    def scrape():
        url = f"http://127.0.0.1:{metrics}/metrics"
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        check("vllm:generation_tokens_total{" in text, True)
        check("vllm:spec_decode_num_accepted_tokens_per_pos_total{" in text, True)
    run("metrics", scrape)
    server.send_signal(signal.SIGTERM)
    run("drain", lambda: check(server.wait(10), 0))
    shutil.rmtree(folder)
    print(f"{n['ok']} passed, {n['FAIL']} failed, 0 skipped")
    return 1 if n["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
