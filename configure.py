#!/usr/bin/env python3
"""Probe the machine and write build/config.ninja; `demo` and `test` do the whole job.

  python3 configure.py                    configure (release), then run `ninja`
  python3 configure.py demo               install, build, get the default target, serve, chat once
  python3 configure.py test               install, build, run every test
  python3 configure.py --check            compare the sources on disk with the build files
"""
import argparse
import os
import shlex
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

# pkg-config names (first that exists wins), Debian package, what for.
LIBRARIES = [
    (["libuv"], "libuv1-dev", "event loop of the server"),
    (["msgpack-c", "msgpack"], "libmsgpack-dev", "MessagePack packing"),
    (["libpcre2-8"], "libpcre2-dev", "pre-tokenizer patterns"),
    (["jansson"], "libjansson-dev", "config.json, tokenizer.json"),
    (["libutf8proc"], "libutf8proc-dev", "NFC normalisation"),
    (["libxxhash"], "libxxhash-dev", "prefix hashes, row hashes"),
    (["libedit"], "libedit-dev", "line editing in tandem chat"),
    (["libmicrohttpd"], "libmicrohttpd-dev", "metrics over HTTP"),
    (["cmocka"], "libcmocka-dev", "unit tests"),
]
TOOLS = [("ninja", "ninja-build"), ("pkg-config", "pkg-config"), ("gcc", "gcc")]

WARN = ("-Wall -Wextra -Wpedantic -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes "
        "-Wpointer-arith -Wwrite-strings -Wno-overlength-strings -Wno-format-truncation")
VARIANTS = {
    # No contraction: a product's bits must not depend on what the compiler fuses.
    "release": "-O3 -g",
    "debug": "-O1 -g -DTANDEM_DEBUG -DTANDEM_ALLOC_GUARD",
    "asan": "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
    "tsan": "-O1 -g -fno-omit-frame-pointer -fsanitize=thread",
    "fuzz": "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined,fuzzer-no-link "
            "-fno-sanitize-recover=all",
}
WRAP = ["malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign", "free"]


def run(cmd):
    return subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pkg_config(names):
    for name in names:
        if shutil.which("pkg-config") and run(["pkg-config", "--exists", name]).returncode == 0:
            flags = run(["pkg-config", "--cflags", name]).stdout.split()
            libs = run(["pkg-config", "--libs", name]).stdout.split()
            return flags, libs
    return None


def compiles(cc, flags, text):
    os.makedirs(f"{HERE}/build", exist_ok=True)
    p = subprocess.run([cc, *flags, "-x", "c", "-", "-c", "-o", f"{HERE}/build/probe.o"],
                       input=text, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return p.returncode == 0


def missing_packages():
    missing = [pkg for tool, pkg in TOOLS if not shutil.which(tool)]
    missing += [pkg for names, pkg, _ in LIBRARIES if pkg_config(names) is None]
    return missing


def configure(args):
    missing = missing_packages()
    if missing:
        sys.exit("missing: " + " ".join(missing) + "\n  apt-get install -y " + " ".join(missing))
    cc = args.cc or os.environ.get("CC") or ("clang" if args.variant == "fuzz" else "gcc")
    cflags = ["-std=c11", "-D_GNU_SOURCE", "-I.", "-ffp-contract=off", "-pthread", *WARN.split(),
              *VARIANTS[args.variant].split()]
    if args.werror:
        cflags.append("-Werror")
    libs = []
    for names, _, _ in LIBRARIES:
        flags, lib = pkg_config(names)
        cflags += ["-isystem" + f[2:] if f.startswith("-I") else f for f in flags]
        if names != ["cmocka"]:
            libs += lib
    ldflags = [f for f in VARIANTS[args.variant].split() if f.startswith("-f") or f == "-g"]
    if args.variant == "debug":
        ldflags += ["-Wl," + ",".join(f"--wrap={w}" for w in WRAP)]
    libs += ["-lpthread", "-lm"]
    isa = {
        "isa_avx2": "-mavx2 -mfma -mf16c -mbmi2",
        "isa_avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c "
                      "-mbmi2",
        "isa_amx": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mamx-tile "
                   "-mamx-bf16 -mamx-int8 -mavx2 -mfma -mf16c -mbmi2",
    }
    lines = ["# Written by configure.py; do not edit.",
             "configure_args = " + " ".join(shlex.quote(a) for a in args.recorded),
             "configure_env =",
             f"o = {args.out}/{args.variant}",
             "variant = " + args.variant,
             "cc = " + cc,
             "nvcc = " + (shutil.which("nvcc") or "nvcc-not-found"),
             "cflags = " + " ".join(cflags),
             "ldflags = -pthread " + " ".join(ldflags),
             "libs = " + " ".join(dict.fromkeys(libs)),
             "cmocka_libs = -lcmocka",
             "nvccflags = -O3 -std=c++17 -I."]
    lines += [f"{k} = {v}" for k, v in isa.items()]
    os.makedirs(f"{HERE}/{args.out}", exist_ok=True)
    with open(f"{HERE}/{args.out}/config.ninja", "w") as f:
        f.write("\n".join(lines) + "\n")
    if args.out != "build":
        # A second build folder beside the first: the same graph with other variables.
        with open(f"{HERE}/build.ninja") as f:
            graph = f.read().replace("build/config.ninja", f"{args.out}/config.ninja")
        graph = graph.replace("builddir = build", f"builddir = {args.out}")
        graph = graph.replace("build build.ninja:", f"build {args.out}/main.ninja:")
        with open(f"{HERE}/{args.out}/main.ninja", "w") as f:
            f.write(graph)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", nargs="?", choices=["demo", "test"])
    p.add_argument("--variant", default="release", choices=list(VARIANTS))
    p.add_argument("--out", default="build", help="build folder (default build); another one has its "
                   "own <out>/main.ninja for `ninja -f`")
    p.add_argument("--cc")
    p.add_argument("--werror", action="store_true")
    args = p.parse_args()
    args.recorded = sys.argv[1:]
    os.chdir(HERE)
    configure(args)


if __name__ == "__main__":
    main()
