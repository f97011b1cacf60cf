#!/usr/bin/env python3
"""The mechanical rules of the house, read off the sources. Each rule is one test; the last is that
every rule finds what it should in a small tree made to break it.

  python3 tests/lint.py            check this tree; last line: N passed, N failed, N skipped
  python3 tests/lint.py --report   also list the functions longer than a screen
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WIDTH, PYTHON_WIDTH, FILE_LINES, FUNCTION_LINES = 100, 120, 800, 80

# A folder may include its own headers and the public ones of folders with a smaller number.
LAYER = {"base": 0, "kernels": 1, "kvpool": 2, "model": 3, "draft": 4, "target": 4, "verify": 4,
         "engine": 5, "serve": 6, "cmd": 7, "bench": 8, "tests": 9}
PUBLIC = {"base/*", "kernels/kernels.h", "kvpool/kvpool.h", "kvpool/plan.h", "model/model.h", "model/batch.h",
          "model/config.h", "model/source.h", "model/tokenizer.h", "model/chat.h", "model/gguf.h",
          "model/safetensors.h", "draft/draft.h", "target/target.h", "target/gain.h",
          "target/scorer.h", "target/trace.h", "target/train.h", "verify/verify.h",
          "engine/engine.h", "serve/client.h", "serve/rpc.h", "serve/serve.h"}

# function -> where it may be called all the same (path prefixes)
TALKS = ("cmd/", "bench/", "tests/")
BANNED = {name: () for name in ("strcpy", "strcat", "sprintf", "vsprintf", "atoi", "atol", "atof",
                                "gets", "alloca", "strtok", "rand", "srand")}
BANNED.update({name: TALKS for name in ("printf", "vprintf", "puts", "putchar", "exit", "_exit",
                                        "quick_exit", "perror")})
BANNED.update({name: TALKS + ("base/err.c", "base/log.c", "base/allocguard.c")
               for name in ("fprintf", "vfprintf", "fputs", "abort")})
# Numbers in text are base/number.h's; the kernel's own files of numbers need no care.
BANNED.update({name: ("tests/", "base/number.c", "kernels/cpu/context.c")
               for name in ("strtol", "strtoll", "strtoul", "strtoull", "strtof", "strtod", "strtold",
                            "sscanf")})
BANNED["getenv"] = ("cmd/",)
BANNED["cudaMalloc"] = ("kernels/cuda/context",)

C_EXT = (".c", ".h", ".cu", ".cuh")
# In pieces, so that this file does not find itself.
MARKS = re.compile(r"\b(" + "|".join(["FIX" + "ME", "TO" + "DO", "XX" + "X"]) + r")\b")


def strip(text):
    """C text with comments and literals blanked, line structure kept."""
    def blank(m):
        s = m.group(0)
        if s.startswith("/"):
            return re.sub(r"[^\n]", " ", s)
        return s[0] + re.sub(r"[^\n]", " ", s[1:-1]) + s[-1]
    token = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(token, blank, text, flags=re.S)


def sources(tree, ext=C_EXT):
    return sorted(p for p in tree if p.endswith(ext))


def lines_matching(text, pattern):
    for number, line in enumerate(text.split("\n"), 1):
        for m in re.finditer(pattern, line):
            yield number, m


# ---- Rules: tree (path -> text) to a list of "path:line: what" ----

def includes(tree):
    for path in sources(tree):
        folder = path.split("/")[0]
        for number, m in lines_matching(tree[path], r'^\s*#\s*include\s+"([^"]+)"'):
            yield path, number, folder, m.group(1)


def rule_include_direction(tree):
    """includes point down: cmd, serve, engine, draft|target|verify, model, kvpool, kernels, base"""
    for path, number, folder, name in includes(tree):
        other = name.split("/")[0]
        if folder in ("tests", "bench") or folder == other or folder not in LAYER:
            continue
        if other not in LAYER:
            if name not in tree:
                yield f"{path}:{number}: \"{name}\" is not named from the root"
        elif LAYER[other] >= LAYER[folder]:
            yield f"{path}:{number}: {folder}/ may not include {name}"


def rule_private_headers(tree):
    """nobody includes another folder's private header"""
    for path, number, folder, name in includes(tree):
        other = name.split("/")[0]
        if folder in ("tests", "bench") or folder == other or other not in LAYER:
            continue
        if name not in PUBLIC and other + "/*" not in PUBLIC:
            yield f"{path}:{number}: {name} is private to {other}/"


def rule_line_width(tree):
    """lines of C are at most 100 characters wide, of Python 120"""
    for path in sources(tree, C_EXT + (".py",)):
        for number, line in enumerate(tree[path].split("\n"), 1):
            if len(line) > (PYTHON_WIDTH if path.endswith(".py") else WIDTH):
                yield f"{path}:{number}: {len(line)} characters"


def rule_banned_calls(tree):
    """no strcpy, sprintf, atoi and the like; printing, exit and getenv only where they belong"""
    pattern = r"(?<![\w.])(?<!->)(" + "|".join(BANNED) + r")\s*\("
    for path in sources(tree):
        for number, m in lines_matching(strip(tree[path]), pattern):
            if not path.startswith(BANNED[m.group(1)] or ("\0",)):
                yield f"{path}:{number}: {m.group(1)}"


def rule_marks(tree):
    """no notes of unfinished work are left behind"""
    for path in sources(tree, C_EXT + (".py", ".ninja")):
        for number, m in lines_matching(tree[path], MARKS):
            yield f"{path}:{number}: {m.group(1)}"


def rule_sources_in_build(tree):
    """every source is named in a build.ninja, and every named source exists"""
    named = {}
    for path in sources(tree, (".ninja",)):
        text = re.sub(r"(?m)(^|\s)#.*$", "", tree[path])
        for m in re.finditer(r"(?<![\w$/.])([\w./-]+\.(?:c|cu))(?=[\s|]|$)", text):
            named.setdefault(m.group(1), path)
    for path in sources(tree, (".c", ".cu")):
        if path not in named:
            yield f"{path}: in no build.ninja"
    for name, path in sorted(named.items()):
        if name not in tree:
            yield f"{path}: names {name}, which does not exist"


def rule_file_length(tree):
    """no source file is longer than 800 lines"""
    for path in sources(tree, C_EXT + (".py",)):
        n = tree[path].count("\n")
        if n > FILE_LINES:
            yield f"{path}: {n} lines"


def guards_of(path):
    """model/config.h: TANDEM_MODEL_CONFIG_H; a repeated folder may be left out: kvpool/kvpool.h."""
    parts = re.sub(r"\.cuh?$|\.h$", "", path).split("/")
    tail = "_CUH" if path.endswith(".cuh") else "_H"
    names = {"_".join(parts)}
    if len(parts) > 1 and (parts[-1] == parts[-2] or parts[-1].startswith(parts[-2] + "_")):
        names.add("_".join(parts[:-2] + [parts[-1]]))
    return {"TANDEM_" + re.sub(r"\W", "_", n).upper() + tail for n in names}


def rule_header_guards(tree):
    """every header has a guard named after its path"""
    for path in sources(tree, (".h", ".cuh")):
        m = re.search(r"#ifndef (\w+)\s*\n#define (\w+)", tree[path])
        want = guards_of(path)
        if not m or m.group(1) != m.group(2) or m.group(1) not in want:
            got = m.group(1) if m else "missing"
            yield f"{path}: guard {got}, want {' or '.join(sorted(want))}"


def long_functions(tree):
    """(lines, path, line, name) of functions longer than a screen: a report, not a failure."""
    for path in sources(tree, (".c", ".cu")):
        lines = strip(tree[path]).split("\n")
        start = None
        for i, line in enumerate(lines):
            if start is None and line.rstrip().endswith("{") and \
                    re.match(r"\w|\s+\S.*\)\s*\{$", line):
                head = i
                while head and lines[head][:1] in (" ", "\t"):
                    head -= 1
                m = re.search(r"(\w+)\s*\(", lines[head])
                if m and "=" not in lines[head].split("(")[0]:
                    start, name = head, m.group(1)
            elif start is not None and line.startswith("}"):
                if i - start + 1 > FUNCTION_LINES:
                    yield i - start + 1, path, start + 1, name
                start = None


RULES = [rule_include_direction, rule_private_headers, rule_line_width, rule_banned_calls,
         rule_marks, rule_sources_in_build, rule_file_length, rule_header_guards]


# ---- The rules themselves, tried on a tree that breaks each in a known way ----

BROKEN = {
    "base/build.ninja": """build $o/base/a.o: cc base/a.c
build $o/x: link $o/x.o
build $o/base/gone.o: cc base/gone.c
# cc base/comment.c
""",
    "base/a.c": """#include "engine/engine.h"
#include "stray.h"
/* printf( in a comment */
static const char *s = "exit(1) in a string";
void f(struct ops *o) { o->exit(1); g.exit(); }
void g(void) { printf(s); strcpy(a, b); }
// """ + "w" * 98 + "\n",
    "base/lost.c": "int x; /* " + "TO" + "DO */\n" + "y" * 101 + "\n",
    "cmd/build.ninja": "build $o/cmd/main.o: cc cmd/main.c\n",
    "cmd/main.c": """#include "kvpool/kvpool_private.h"
#include "base/anything.h"
int main(void) { printf(""); getenv(""); cudaMalloc(0); strtol("", 0, 0); }
""" + "\n" * 800,
    "kvpool/kvpool.h": "#ifndef TANDEM_KVPOOL_H\n#define TANDEM_KVPOOL_H\n#endif\n",
    "kvpool/plan.h": "#ifndef PLAN_H\n#define PLAN_H\n#endif\n",
    "draft/d.h": """#ifndef TANDEM_DRAFT_D_H
#define TANDEM_DRAFT_D_H
#include "verify/verify.h"
#endif
""",
    "tests/build.ninja": "build $o/tests/t.o: cc_avx2 tests/t.c | x.h\n",
    "tests/t.c": """#include "kvpool/kvpool_private.h"
#include "tests/odd.h"
int t(void) {
""" + "\n" * 90 + "}\n",
}
EXPECTED = {
    rule_include_direction: ["base/a.c:1:", "base/a.c:2:", "draft/d.h:3:"],
    rule_private_headers: ["cmd/main.c:1:"],
    rule_line_width: ["base/a.c", "base/lost.c:2:"],
    rule_banned_calls: ["base/a.c:6: printf", "base/a.c:6: strcpy", "cmd/main.c:3: cudaMalloc",
                        "cmd/main.c:3: strtol"],
    rule_marks: ["base/lost.c:1:"],
    rule_sources_in_build: ["base/lost.c:", "base/build.ninja: names base/gone.c"],
    rule_file_length: ["cmd/main.c:"],
    rule_header_guards: ["kvpool/plan.h:"],
}


def rule_rules_work(_):
    """every rule finds what it should, and nothing else, in a tree made to break it"""
    tree = BROKEN
    for rule in RULES:
        found, want = list(rule(tree)), EXPECTED[rule]
        if len(found) != len(want) or any(not f.startswith(w) for f, w in zip(found, want)):
            yield f"{rule.__name__}: found {found}, want {want}"
    if [f[1:] for f in long_functions(tree)] != [("tests/t.c", 3, "t")]:
        yield f"long_functions: {list(long_functions(tree))}"


def read_tree(root):
    tree = {}
    for folder, names, files in os.walk(root):
        here = os.path.relpath(folder, root).replace(os.sep, "/")
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__" and
                          not (here == "." and re.fullmatch("build|build-.*|models", n)))
        for name in files:
            path = name if here == "." else here + "/" + name
            if name.endswith(C_EXT + (".py", ".ninja")):
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as f:
                    tree[path] = f.read()
    return tree


def main():
    report = "--report" in sys.argv[1:]
    tree = read_tree(ROOT)
    # A program for another project's library is built by hand, its head says how.
    tree = {p: t for p, t in tree.items() if not p.startswith("bench/peer/")}
    counts = {True: 0, False: 0}
    for rule in RULES + [rule_rules_work]:
        found = list(rule(tree))
        counts[not found] += 1
        print(("FAIL " if found else "ok   ") + "lint_" + rule.__name__[5:] + ": " + rule.__doc__)
        for line in found:
            print("     " + line)
    long = sorted(long_functions(tree), reverse=True)
    hint = "" if report or not long else " (--report lists them)"
    print(f"# {len(long)} functions of more than {FUNCTION_LINES} lines{hint}")
    for n, path, line, name in long if report else []:
        print(f"# {path}:{line}: {name}: {n} lines")
    print(f"{counts[True]} passed, {counts[False]} failed, 0 skipped")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    sys.exit(main())
