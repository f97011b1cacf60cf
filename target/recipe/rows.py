#!/usr/bin/env python3
"""Rows of a CSV from the JSON of `tandem eval`: one for each column of each run; where there are several kinds of
needles or lengths, for each of these, too.

    python3 target/recipe/rows.py big.json choose.json ... > rows.csv
"""
import json
import pathlib
import sys

HEAD = ("run,select_layer,column,kind,tokens,prompts,found,found_low,found_high,minus_dense,standard_error,low,high,"
        "better,worse,texts,loss,rise,rise_standard_error,rise_low,rise_high,agree,recall,mass")
DIFFERENCE = ("minus_dense", "standard_error", "minus_dense_low", "minus_dense_high")


def points(x):
    return "" if x is None else f"{round(100 * x, 3):g}"


def nats(x):
    return "" if x is None else f"{x:.5g}"


def needles(group):
    share = [f"{group[k]:.4f}" for k in ("mean", "low", "high")]
    return [str(group["n"])] + share + [points(group[k]) for k in DIFFERENCE] + [str(group["better"]),
                                                                                 str(group["worse"])]


def text(column):
    if not column:
        return [""] * 9
    keys = ("mean",) + DIFFERENCE + ("agreement", "recall", "mass")
    return [str(column["n"])] + [nats(column[k]) for k in keys]


def rows(path):
    run = json.loads(path.read_text())
    texts = {c["name"]: c for c in run.get("text", {}).get("columns", [])}
    tokens = " ".join(str(n) for n in run["lengths"])
    for column in run["needles"]["columns"]:
        head = [path.stem, str(run["select_layer"]), column["name"]]
        kinds, lengths, of_text = column["by_kind"], column["by_tokens"], texts.get(column["name"])
        yield head + ["all" if len(kinds) > 1 else kinds[0]["kind"], tokens] + needles(column) + text(of_text)
        for group in kinds if len(kinds) > 1 else []:
            yield head + [group["kind"], tokens] + needles(group) + text(None)
        for group in lengths if len(lengths) > 1 else []:
            own = [g for g in (of_text or {}).get("by_tokens", []) if g["tokens"] == group["tokens"]]
            yield head + ["all", str(group["tokens"])] + needles(group) + text(own[0] if own else None)


if __name__ == "__main__":
    print(HEAD)
    for name in sys.argv[1:]:
        for row in rows(pathlib.Path(name)):
            print(",".join(row))
