#!/usr/bin/env python3
"""Rows of a CSV from the JSON of `tandem eval`: one for each column of each run; where there are several kinds of
needles or lengths, for each of these, too.

    python3 target/recipe/rows.py big.json choose.json ... > rows.csv
    python3 target/recipe/rows.py late=late_1.json,late_2.json,late_text.json

Several files with commas between are one run by the name in front of them: needles of different seeds are added up,
running text is that of the file that has some.
"""
import json
import math
import pathlib
import sys

HEAD = ("run,select_layer,column,kind,tokens,prompts,found,found_low,found_high,minus_dense,standard_error,low,high,"
        "better,worse,texts,loss,rise,rise_standard_error,rise_low,rise_high,agree,recall,mass")
DIFFERENCE = ("minus_dense", "standard_error", "minus_dense_low", "minus_dense_high")
Z95 = 1.959963984540054


def points(x):
    return "" if x is None else f"{round(100 * x, 3):g}"


def nats(x):
    return "" if x is None else f"{x:.5g}"


def pool(groups):
    """Groups of right or wrong answers as one, by the formulas of cmd/eval_stats.c."""
    n, better, worse = (sum(g[k] for g in groups) for k in ("n", "better", "worse"))
    if n == 0:
        return groups[0]
    mean, d = sum(round(g["mean"] * g["n"]) for g in groups) / n, (better - worse) / n
    z2 = Z95 * Z95
    middle = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    out = {"n": n, "mean": mean, "low": max(middle - half, 0), "high": min(middle + half, 1), "minus_dense": d,
           "better": better, "worse": worse, "standard_error": None}
    if n > 1:
        out["standard_error"] = math.sqrt((better + worse - n * d * d) / (n - 1) / n)
    m, b, w = n + 2, better + .5, worse + .5
    half = Z95 * math.sqrt(b + w - (b - w) ** 2 / m) / m
    out["minus_dense_low"], out["minus_dense_high"] = max((b - w) / m - half, -1), min((b - w) / m + half, 1)
    return out


def needles(groups):
    group = pool(groups)
    share = [f"{group[k]:.4f}" for k in ("mean", "low", "high")]
    return [str(group["n"])] + share + [points(group[k]) for k in DIFFERENCE] + [str(group["better"]),
                                                                                 str(group["worse"])]


def text(column):
    if not column:
        return [""] * 9
    keys = ("mean",) + DIFFERENCE + ("agreement", "recall", "mass")
    return [str(column["n"])] + [nats(column[k]) for k in keys]


def rows(name, runs):
    asked = [r for r in runs if r.get("needles", {}).get("prompts")]
    texts = {c["name"]: c for r in runs for c in r.get("text", {}).get("columns", [])}
    tokens = " ".join(str(n) for n in asked[0]["lengths"])
    for i, column in enumerate(asked[0]["needles"]["columns"]):
        columns = [r["needles"]["columns"][i] for r in asked]
        if any(c["name"] != column["name"] for c in columns):
            sys.exit(f"{name}: runs of other columns than {column['name']}")
        head = [name, str(asked[0]["select_layer"]), column["name"]]
        kinds, lengths, of_text = column["by_kind"], column["by_tokens"], texts.get(column["name"])

        def group(by, key, value):
            return [g for c in columns for g in c[by] if g[key] == value]

        yield head + ["all" if len(kinds) > 1 else kinds[0]["kind"], tokens] + needles(columns) + text(of_text)
        for k in kinds if len(kinds) > 1 else []:
            yield head + [k["kind"], tokens] + needles(group("by_kind", "kind", k["kind"])) + text(None)
        for g in lengths if len(lengths) > 1 else []:
            own = [t for t in (of_text or {}).get("by_tokens", []) if t["tokens"] == g["tokens"]]
            yield head + ["all", str(g["tokens"])] + needles(group("by_tokens", "tokens", g["tokens"])) + text(
                own[0] if own else None)


if __name__ == "__main__":
    print(HEAD)
    for word in sys.argv[1:]:
        run, _, names = word.rpartition("=")
        paths = [pathlib.Path(p) for p in names.split(",")]
        for row in rows(run or paths[0].stem, [json.loads(p.read_text()) for p in paths]):
            print(",".join(row))
