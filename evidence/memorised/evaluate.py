"""What the runs say: python evidence/memorised/evaluate.py [RUNS]. With RUNS, the runs' lines and the tested differences are
kept beside this file (runs.jsonl, differences.jsonl); from them come the tables (RESULTS.md) and the figure (memorised.svg)."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from anyk.lab.statistics import contrast, holm, two_way
from memorised import plan
from memorised.run import Folder, load
from memorised.train import Variant

HERE = Path(__file__).parent
Lines = dict[tuple[str, int], dict[plan.Key, dict[str, Any]]]
Differences = dict[tuple[str, str, str, int], dict[str, Any]]  # by cell, method, against, k
HEAD = """# Memorised or not: results

Written by `evaluate.py`; do not edit. What the rows are: README.md. Points of top-1 \\| top-5 (rank: \\| top-10) with half of
the two-way 95 % interval; bold: p < .05 after Holm over its family in its cell. Every p: differences.jsonl.
"""


def families(cell: str) -> dict[str, list[tuple[str, str]]]:
    """The pairs of methods that are compared, by family of tests."""
    known = [name for part in ("main", "untuned", "extra") for name in plan.methods(plan.CELLS[cell], part)]
    usual = [name for name in known if name != "ce" and not name.startswith("untuned") and name not in plan.IDENTITY]
    untuned = [name for name in known if name.startswith("untuned") and name != "untuned ce"]
    defaults = ("logistic k1+5", "error k1+5") if cell.startswith("linear") else ()
    return {
        "tuned cross-entropy": [(name, "ce") for name in usual],
        "untuned cross-entropy": [(name, "untuned ce") for name in untuned],
        "tuned cross-entropy, added later": [(name, "ce") for name in untuned],
        "each other": [(a, b) for a, b in plan.AGAINST if a in known and b.partition(":")[0] in known],
        "each other, untuned, added later": [
            (f"untuned {a}", f"untuned {b}") for a, b in plan.AGAINST if {f"untuned {a}", f"untuned {b}"} <= {*untuned}
        ],
        "the defaults": [(f"{name}: t={t}", f"{name}: t=1") for name in defaults for t in (2, 4, 8)],
    }


def read(lines: list[dict[str, Any]]) -> Lines:
    found: Lines = {}
    for line in lines:
        found.setdefault((line["cell"], line["seed"]), {})[plan.key(Variant(**line["v"]))] = line
    return found


def chosen(lines: Lines, cell: str, *methods: str) -> list[list[dict[str, Any]]]:
    """The runs that methods choose on validation, of each seed that has all of their candidates."""
    found, setting = [], plan.CELLS[cell]
    for own in (lines[name, seed] for name, seed in sorted(lines) if name == cell):
        tuned = plan.best(plan.grid(setting), own)
        variants = [plan.best(plan.candidates(setting, method, tuned), own) for method in methods]
        found += [[own[plan.key(one)] for one in variants if one]] if all(variants) else []
    return found


def mean(lines: Lines, cell: str, method: str, field: str) -> list[float]:
    runs = [one[field] for [one] in chosen(lines, cell, method)]
    return [float(each) for each in np.atleast_1d(100 * np.mean(runs, 0))] if runs else []


def test(folder: Folder, lines: Lines) -> list[dict[str, Any]]:
    """Every difference, with its interval and its p before and after Holm."""

    def hits(run: dict[str, Any]) -> Any:
        packed = np.load(folder.bits(run["cell"], run["seed"], Variant(**run["v"])))
        return np.unpackbits(packed, axis=1, count=10_000).astype(np.int8)

    tested = []
    for cell in dict.fromkeys(cell for cell, _ in lines):
        clusters = load("code", folder.path)["clusters"].numpy() if cell.startswith("code") else None
        for family, pairs in families(cell).items():
            rows: list[dict[str, Any]] = []
            for a, b in pairs:
                differences = [hits(one) - hits(other) for one, other in chosen(lines, cell, a, b)]
                for place, k in enumerate(plan.CELLS[cell].ks) if differences else ():
                    one = two_way(contrast(a, b, f"top{k}", np.stack(differences)[:, place], clusters))
                    half = None if one.high is None else round(100 * (one.high - one.difference), 3)
                    row = {"cell": cell, "family": family, "a": a, "b": b, "k": k, "seeds": one.count}
                    rows.append({**row, "points": round(100 * one.difference, 3), "half": half, "p": one.p})
            tested += [{**row, "holm": p} for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True)]
    return tested


def page(lines: Lines, differences: Differences) -> str:
    def entry(cell: str, a: str, b: str) -> str:
        found = [differences[cell, a, b, k] for k in plan.CELLS[cell].ks if (cell, a, b, k) in differences]
        bold = ["**" * (row["holm"] is not None and row["holm"] < 0.05) for row in found]
        halves = [f" ± {row['half']:.1f}" if row["half"] else "" for row in found]
        return " \\| ".join(f"{m}{row['points']:+.1f}{m}{half}" for row, m, half in zip(found, bold, halves, strict=True))

    told, order = [HEAD], sorted({cell for cell, _ in lines}, key=lambda cell: int(cell.rpartition("-")[2]))
    for group in dict.fromkeys(cell.rpartition("-")[0] for cell in order):
        cells = [cell for cell in order if cell.rpartition("-")[0] == group]
        rows: dict[str, list[str]] = {"seeds": [str(len(chosen(lines, cell, "ce"))) for cell in cells]}
        shown = [("ce", "test"), ("untuned ce", "test"), *((name, "learned") for name in ("ce", "soft", "tail", "k5"))]
        for name, field in shown if group not in ("pixels", "rank") else (shown[0], *shown[2:]):
            values = [mean(lines, cell, name, field) for cell in cells]
            rows[f"{name}, {field}, %"] = [" \\| ".join(f"{each:.1f}" for each in one) for one in values]
        for family, pairs in families(cells[0]).items():
            rows[f"*against {family}*"] = [" " for _ in cells]
            for a, b in pairs:
                rows[f"{a} - {b}"] = [entry(cell, a, b) for cell in cells]
        told += [f"## {group}", "", f"| | {' | '.join(cells)} |", f"|:--|{'--:|' * len(cells)}"]
        told += [*(f"| {name} | {' | '.join(values)} |" for name, values in rows.items() if any(values)), ""]
    return "\n".join(told)


def figure(lines: Lines, differences: Differences, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "memorised", "font.size": 8, "axes.titlesize": 8})
    picture = Figure(figsize=(9.5, 5.4), layout="constrained")
    for own, group in zip(picture.subplots(2, 3, sharex="row"), ("linear", "mlp"), strict=True):
        sizes = [size for size in (5, 10, 20, 50, 100, 450) if (f"{group}-{size}", "k5", "ce", 1) in differences]
        for number, method in enumerate(("start", "soft", "bound", "tail", "k5", "ce")):
            style: dict[str, Any] = {"color": f"C{number}", "marker": "o", "ms": 3, "lw": 1.2, "label": method}
            shifted = [size * 1.06 ** (number - 2) for size in sizes]
            for axis, k in zip(own, (1, 5) if method != "ce" else (), strict=False):
                found = [differences[f"{group}-{size}", method, "ce", k] for size in sizes]
                points, halves = ([row[name] or 0.0 for row in found] for name in ("points", "half"))
                axis.errorbar(shifted, points, halves, elinewidth=0.6, **style)
                axis.set_title(f"{group}: points of top-{k} over tuned cross-entropy")
            own[2].plot(sizes, [mean(lines, f"{group}-{size}", method, "learned")[0] for size in sizes], **style)
        own[2].set_title(f"{group}: training accuracy, %")
        for axis in own:
            axis.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="images a class")
            axis.minorticks_off()
    picture.axes[2].legend(frameon=False)
    picture.savefig(path, metadata={"Date": None})


def main(runs: str = "") -> None:
    files = [HERE / f"{name}.jsonl" for name in ("runs", "differences")]
    if runs:
        folder = Folder(Path(runs))
        found = sorted(folder.lines(), key=lambda line: (line["cell"], line["seed"], json.dumps(line["v"])))
        for path, rows in zip(files, (found, test(folder, read(found))), strict=True):
            path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    kept, tested = ([json.loads(line) for line in path.read_text().splitlines()] for path in files)
    differences = {(row["cell"], row["a"], row["b"], row["k"]): row for row in tested}
    (HERE / "RESULTS.md").write_text(page(read(kept), differences))
    figure(read(kept), differences, HERE / "memorised.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
