#!/usr/bin/env python3
"""Run tests and add up what they say.

  python3 tests/run.py build/release [build/asan ...]   every test of these build folders, then
                                                        lint.py and the Python tests once
  python3 tests/run.py PROGRAM ...                      just these (binaries or .py files)

Either may end in ":quick", ":full" or ":gpu" to run the tests of one tier alone, a program also in
":quick:NAME,NAME" to run of these the ones with such a part in their names.

Each program runs with its output kept; the output of a failing one is shown. A program ends in the
line "N passed, N failed, N skipped"; one without that line counts as a single test by its exit
code. The last line here is the sum; the exit code is 0 only where nothing failed.

The tests of a build folder are those of the phonies `tests` and `gpu_tests` in tests/build.ninja. Python tests
(tests/test_*.py) get the last build folder as their argument. A fuzz_* program of the phony is run
briefly on its own."""
import argparse
import concurrent.futures
import glob
import os
import re
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SUM = re.compile(r"(\d+) passed, (\d+) failed, (\d+) skipped")
# Programs that wait for time-outs and deadlines more than they compute: beside the others, one at a time.
WAITS = re.compile(r"/test_(serve_rude|serve_time|client|chat_terminal|protocol)(\.py)?$")
CASE = re.compile(r"(?:ok  |FAIL) (\S+) \((\d+) ms\)")
SHOWN_LINES, SLOWEST = 200, 40


def tests_of(folder, tier):
    """Paths of the binaries that the phonies `tests` and, but for other tiers, `gpu_tests` name, in their order."""
    with open(os.path.join(ROOT, "tests", "build.ninja"), encoding="utf-8") as f:
        text = f.read().replace("$\n", " ")
    names = []
    for phony in ["tests"] if tier in ("quick", "full", "long") else ["gpu_tests", "tests"]:
        m = re.search(rf"^build {phony}: phony (.*)$", text, re.M)
        if not m:
            sys.exit(f"run.py: tests/build.ninja has no phony `{phony}`")
        names += m.group(1).split()
    return [os.path.join(folder, name[len("$o/"):]) for name in names]


class Job:
    """One program: what to run, and how it ended."""

    def __init__(self, command):
        self.command = command
        self.name = " ".join(c for c in command if c != sys.executable)
        self.output, self.seconds, self.why = "", 0.0, ""
        self.counts = (0, 1, 0)

    def failed(self):
        return self.counts[1] > 0

    def finish(self, rc, output):
        self.output = output
        lines = output.rstrip().split("\n")
        # stderr may come behind it: sanitizers speak at exit.
        m = next((m for m in map(SUM.fullmatch, reversed(lines)) if m), None)
        if m:
            passed, failed, skipped = (int(x) for x in m.groups())
            if rc != 0 and failed == 0:
                failed, self.why = 1, f"exit {rc} although nothing failed by its own count"
            elif rc == 0 and failed:
                self.why = "exit 0 although tests failed"
            elif passed + failed + skipped == 0 and "--tier" not in self.command:
                failed, self.why = 1, "ran no test"
            self.counts = (passed, failed, skipped)
        elif rc == 0:
            self.counts = (1, 0, 0)
        else:
            self.why = f"signal {-rc}" if rc < 0 else f"exit {rc}"


class Runner:
    """Runs jobs, each by a thread of a pool. Every thread has cores of its own: two teams of threads on the same two
    cores wait for each other at every barrier (a third to a half of the time of the real models' tests). The race
    detector's programs get all, so that their threads do meet."""

    def __init__(self, timeout, n_jobs):
        self.timeout = timeout
        self.all_cores = sorted(os.sched_getaffinity(0))
        self.own = threading.local()
        self.n_jobs, self.n_threads = n_jobs, 0
        self.lock = threading.Lock()
        self.running = set()
        self.stopping = False

    def start(self):
        """A thread of the pool begins: the next share of the cores is its own."""
        with self.lock:
            self.own.cores = self.all_cores[self.n_threads::self.n_jobs] or self.all_cores
            self.n_threads += 1

    def kill(self, child):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def stop(self):
        with self.lock:
            self.stopping = True
            for child in self.running:
                self.kill(child)

    def run(self, job):
        start = time.monotonic()
        with self.lock:
            if self.stopping:
                job.why = "not run"
                return job
            try:
                cores = self.all_cores if "/tsan/" in job.name else getattr(self.own, "cores", self.all_cores)
                os.sched_setaffinity(0, cores)  # of this thread, inherited by what it starts
                # A group of its own: whatever a test leaves running goes with it.
                child = subprocess.Popen(job.command, cwd=ROOT, stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                         start_new_session=True)
            except OSError as e:
                job.why = str(e)
                return job
            self.running.add(child)
        try:
            out, _ = child.communicate(timeout=self.timeout)
            job.finish(child.returncode, out.decode("utf-8", "replace"))
        except subprocess.TimeoutExpired:
            self.kill(child)
            out, _ = child.communicate()
            job.output, job.why = out.decode("utf-8", "replace"), f"over {self.timeout} s"
        finally:
            with self.lock:
                self.running.discard(child)
            self.kill(child)
        job.seconds = time.monotonic() - start
        return job


def jobs_of(args):
    jobs, folders = [], []
    for what in args.what:
        path, own_tier, names = (what + "::").split(":")[:3]
        tier = ["--tier", own_tier or args.tier] if own_tier or args.tier else []
        for name in filter(None, names.split(",")):
            tier += ["--only", name]
        if os.path.isdir(path):
            folders.append(path)
            for binary in tests_of(path, own_tier or args.tier):
                name = os.path.basename(binary)
                seeds = glob.glob(os.path.join(ROOT, "tests/fuzz/seeds", name[len("fuzz_"):], "*"))
                fuzz = [binary, "--runs", "2000", *sorted(seeds)]
                jobs.append(Job(fuzz if name.startswith("fuzz_") else [binary, *tier]))
        elif path.endswith(".py"):
            jobs.append(Job([sys.executable, path]))
        else:
            jobs.append(Job([path if "/" in path else "./" + path, *tier]))
    if folders:
        jobs.append(Job([sys.executable, "tests/lint.py"]))
        for path in sorted(glob.glob(os.path.join(ROOT, "tests", "test_*.py"))):
            jobs.append(Job([sys.executable, os.path.relpath(path, ROOT), folders[-1]]))
    return jobs


def show(job):
    passed, failed, skipped = job.counts
    what = f"{passed} passed, {failed} failed, {skipped} skipped"
    mark = "FAIL" if job.failed() else "ok  "
    print(f"{mark} {job.name}: {what} ({job.seconds:.1f} s)" + (f": {job.why}" if job.why else ""))
    lines = job.output.rstrip().split("\n")
    if job.failed() and job.output.strip():
        if len(lines) > SHOWN_LINES:
            print(f"     ... {len(lines) - SHOWN_LINES} lines more ...")
        for line in lines[-SHOWN_LINES:]:
            print("     " + line)
    elif skipped:
        for line in lines:
            if line.lower().startswith("skip"):
                print("     " + line)
    sys.stdout.flush()


def slowest(jobs):
    cases = [(float(ms) / 1000, f"{name} ({job.name})") for job in jobs
             for name, ms in CASE.findall(job.output)]
    # Programs that do not time their cases count as one.
    cases += [(job.seconds, job.name) for job in jobs if not CASE.search(job.output)]
    return sorted(cases, reverse=True)[:SLOWEST]


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="+", help="build folders or programs")
    p.add_argument("--tier", choices=["quick", "full", "gpu", "long"], help="only tests of this tier")
    p.add_argument("--jobs", type=int, default=2, help="programs at once (default 2)")
    p.add_argument("--timeout", type=float, default=900, help="seconds of a program (default 900)")
    args = p.parse_args()
    start = time.monotonic()
    args.jobs = max(args.jobs, 1)
    jobs, runner = jobs_of(args), Runner(args.timeout, args.jobs)
    with concurrent.futures.ThreadPoolExecutor(max_workers=args.jobs, initializer=runner.start) as pool, \
            concurrent.futures.ThreadPoolExecutor(max_workers=1) as beside:
        waits = [args.jobs > 1 and any(WAITS.search(word) for word in job.command) for job in jobs]
        try:
            for done in concurrent.futures.as_completed(
                    [(beside if w else pool).submit(runner.run, job) for w, job in zip(waits, jobs)]):
                show(done.result())
        except KeyboardInterrupt:
            runner.stop()
            sys.exit("run.py: interrupted")
    print("slowest:")
    for seconds, name in slowest(jobs):
        print(f"  {seconds:7.1f} s  {name}")
    failed = [job.name for job in jobs if job.failed()]
    if failed:
        print("failed:\n  " + "\n  ".join(failed))
    print(f"{time.monotonic() - start:.0f} s in all")
    total = [sum(job.counts[i] for job in jobs) for i in range(3)]
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    sys.exit(1 if total[1] or not jobs else 0)


if __name__ == "__main__":
    main()
