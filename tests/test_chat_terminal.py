#!/usr/bin/env python3
"""`tandem chat` on a pseudo-terminal against the server on a fake engine, whose answer repeats the
whole conversation: turns, commands, history, Ctrl-C while an answer runs and at the prompt, Ctrl-D,
UTF-8 typed, control characters in answers.

  python3 tests/test_chat_terminal.py BUILD_FOLDER [TANDEM]
"""
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PROMPT = "> "


class Terminal:
    def __init__(self, command, env):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, env)
        self.seen = ""

    def expect(self, text, seconds=20):
        """Read until `text` was printed; what came before it is returned and forgotten."""
        end = time.monotonic() + seconds
        while text not in self.plain():
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                raise AssertionError(f"no {text!r} in {self.plain()!r}")
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {text!r}: {self.plain()!r}")
        plain = self.plain()
        at = plain.index(text)
        self.seen = plain[at + len(text):]
        return plain[:at]

    def plain(self):
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen).replace("\r", "")

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self, seconds=20):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.02)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("does not end")


def check(got, want):
    if got != want:
        raise AssertionError(f"got {got!r}, want {want!r}")


def test_turns(t):
    t.expect("context 4096. /help lists the commands, Ctrl-D leaves.\n" + PROMPT)
    t.type("hi\n")
    t.expect("hi\n")     # the echo
    t.expect("hi\n")     # the answer
    t.expect("prompt 3 tokens (0 cached)")
    t.expect(PROMPT)
    t.type("you\n")      # hi + hi + you: the conversation goes along
    t.expect("you\n")
    t.expect("hihiyou\n")
    t.expect(PROMPT)
    t.type("/reset\n")
    t.expect("forgotten\n" + PROMPT)
    t.type("/system S.\n")
    t.expect("a new conversation under this system message\n" + PROMPT)
    t.type("\u00e9\u20ac\n")
    t.expect("\u00e9\u20ac\n")
    t.expect("S.\u00e9\u20ac\n")
    t.expect(PROMPT)
    t.type("\x04")
    check(t.end(), 0)


def test_commands(t):
    t.expect(PROMPT)
    t.type("/help\n")
    t.expect("/reset")
    t.expect(PROMPT)
    t.type("/stats\n")
    t.expect("running 0, waiting 0, paused 0, connections 1\n")
    t.expect(PROMPT)
    t.type("/stast\n")
    t.expect("no command /stast, did you mean /stats; /help lists them\n" + PROMPT)
    t.type("//stats\n")
    t.expect("//stats\n")
    t.expect("/stats\n")
    t.expect(PROMPT)
    t.type("\n")
    t.expect(PROMPT)
    t.type("/quit\n")
    check(t.end(), 0)


def test_interrupt_answer(t):
    t.expect(PROMPT)
    t.type("/system " + "x" * 900 + "\n")
    t.expect(PROMPT)
    t.type("go\n")
    t.expect("xxxxxxxxxx")
    t.expect("xxxxxxxxxx")
    t.type("\x03")
    t.expect("ended by: cancelled")
    t.expect(PROMPT)
    t.type("/quit\n")
    check(t.end(), 0)


def test_interrupt_prompt(t):
    t.expect(PROMPT)
    t.type("half a line")
    t.expect("half a line")
    t.type("\x03")
    t.expect("(Ctrl-C again or Ctrl-D leaves)\n" + PROMPT)
    t.type("ok\n")       # the half line is gone
    t.expect("ok\n")
    t.expect("ok\n")
    t.expect(PROMPT)
    t.type("\x03")
    t.expect(PROMPT)
    t.type("\x03")
    check(t.end(), 0)


def test_history(t):
    t.expect(PROMPT)
    t.type("\x1b[A")     # up: the last line of the tests before
    t.expect("ok")
    t.type("\n")
    t.expect("ok\n")
    t.expect(PROMPT)
    t.type("\x04")
    check(t.end(), 0)


def test_control_characters(t):
    t.expect(PROMPT)
    t.type("a\x16\x1b]0;title\x16\x07b\n")  # Ctrl-V takes the next key as it is
    t.expect("b\n")
    if "\x1b]0;title\x07b" in t.expect("tokens"):
        raise AssertionError("an escape sequence reached the terminal")
    t.expect(PROMPT)
    t.type("\x04")
    check(t.end(), 0)


def test_paste(t):
    """A paste of several lines is one message; no key of it is a command."""
    t.expect(PROMPT)
    t.type("\x1b[200~one\ntwo\rthr\tee\x1b[A\x1b[201~!")
    t.expect("one\u2424two\u2424thr")
    t.type("\n")
    t.expect("one\ntwo\nthr\tee")
    t.expect("!\n")
    t.expect("tokens")
    t.expect(PROMPT)
    t.type("\x1b[A")     # it comes back whole
    t.expect("one\u2424two\u2424thr")
    t.type("\n")
    t.expect("one\ntwo\nthr\tee")
    t.expect(PROMPT)
    t.type("\x04")
    check(t.end(), 0)


def test_typing_while_answering(t):
    """What is typed amid an answer is not echoed into it, and is there at the next prompt."""
    t.expect(PROMPT)
    t.type("/system " + "x" * 900 + "\n")
    t.expect(PROMPT)
    t.type("go\n")
    t.expect("xxxxxxxxxx")
    t.type("/stats\n")
    answer = t.expect("tokens")
    if "stats" in answer:
        raise AssertionError("typed keys stand in the answer")
    t.expect(PROMPT)
    t.expect("running 0, waiting 0")
    t.expect(PROMPT)
    t.type("\x04")
    check(t.end(), 0)


def test_full_context(t):
    """Where the context is full the oldest turns may go; the system message stays."""
    t.expect(PROMPT)
    t.type("/system " + "s" * 1000 + "\n")
    t.expect(PROMPT)
    for word in "abc":   # each answer repeats the whole conversation
        t.type(word + "\n")
        t.expect("tokens")
        t.expect(PROMPT)
    t.type("d\n")
    t.expect("Forget its older half and ask again? [Y/n] ")
    t.type("n\n")
    t.expect("not sent; /reset begins another conversation\n" + PROMPT)
    t.type("e\n")
    t.expect("Forget its older half and ask again? [Y/n] ")
    t.type("\n")
    t.expect("prompt 1091 tokens")   # s, c with its answer of 88, e
    t.expect(PROMPT)
    t.type("\x04")
    check(t.end(), 0)


TESTS = [test_turns, test_commands, test_interrupt_answer, test_interrupt_prompt, test_history,
         test_control_characters, test_paste, test_typing_while_answering, test_full_context]


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    build = os.path.abspath(sys.argv[1])
    tandem = os.path.abspath(sys.argv[2]) if len(sys.argv) == 3 else os.path.join(build, "tandem")
    folder = tempfile.mkdtemp(prefix="tandem-test-")
    path = os.path.join(folder, "socket")
    server = subprocess.Popen([os.path.join(build, "tests", "tool_serve_fake"), path],
                              stdout=subprocess.PIPE, text=True)
    server.stdout.readline()
    env = {"TERM": "xterm", "PATH": os.environ.get("PATH", ""), "HOME": folder}
    n_ok = n_fail = 0
    for test in TESTS:
        try:
            test(Terminal([tandem, "chat", "--socket", path], env))
            n_ok += 1
            print(f"ok   {test.__name__}")
        except Exception as e:  # a test that fails in any way
            n_fail += 1
            print(f"FAIL {test.__name__}: {type(e).__name__} {e}")
    server.send_signal(signal.SIGTERM)
    server.wait(10)
    shutil.rmtree(folder)
    print(f"{n_ok} passed, {n_fail} failed, 0 skipped")
    return 1 if n_fail else 0


if __name__ == "__main__":
    sys.exit(main())
