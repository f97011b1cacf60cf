#!/usr/bin/env python3
"""Rows of a CSV from the JSON of `tandem eval`: one for each column of each run, and for each kind of needle where there are several.

    python3 target/recipe/rows.py big.json choose.json ... > rows.csv
"""
import json
import pathlib
import sys

HEAD = ("run,select_layer,column,kind,tokens,prompts,found,found_low,found_high,minus_dense,standard_error,low,high,better,worse,"
        "texts,loss,rise,rise_standard_error,rise_low,rise_high,agree,recall,mass")


def points(x):
    return "" if x is None else f"{round(100 * x, 3):g}"


def nats(x):
    return "" if x is None else f"{x:.5g}"


def needles(group):
    share = [f"{group[k]:.4f}" for k in ("mean", "low", "high")]
    return [str(group["n"])] + share + [points(group[k]) for k in ("minus_dense", "standard_error", "minus_dense_low", "minus_dense_high")] + [
        str(group["better"]), str(group["worse"])]


def text(column):
    if not column:
        return [""] * 9
    return [str(column["n"])] + [nats(column[k]) for k in ("mean", "minus_dense", "standard_error", "minus_dense_low", "minus_dense_high")] + [
        nats(column[k]) for k in ("agreement", "recall", "mass")]


def rows(path):
    run = json.loads(path.read_text())
    texts = {c["name"]: c for c in run.get("text", {}).get("columns", [])}
    tokens = " ".join(str(n) for n in run["lengths"])
    for column in run["needles"]["columns"]:
        head = [path.stem, str(run["select_layer"]), column["name"]]
        yield head + ["all" if len(column["by_kind"]) > 1 else column["by_kind"][0]["kind"], tokens] + needles(column) + text(texts.get(column["name"]))
        for group in column["by_kind"] if len(column["by_kind"]) > 1 else []:
            yield head + [group["kind"], tokens] + needles(group) + [""] * 9
        for group in column["by_tokens"] if len(column["by_tokens"]) > 1 else []:
            of_text = [g for g in texts.get(column["name"], {}).get("by_tokens", []) if g["tokens"] == group["tokens"]]
            yield head + ["single", str(group["tokens"])] + needles(group) + text(of_text[0] if of_text else None)


if __name__ == "__main__":
    print(HEAD)
    for name in sys.argv[1:]:
        for row in rows(pathlib.Path(name)):
            print(",".join(row))
