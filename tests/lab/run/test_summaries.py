"""Reports: what is grouped, what is left out and said, every format, the plots."""

import csv
import io
import json

import pytest
import torch

import made
from anyk.lab import tables
from anyk.lab.errors import LabError
from anyk.lab.plots import plot
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from anyk.lab.run.summaries import collect, curves, table

BASE = Config(data="some_data", loss="splitter")
ERROR = "Traceback\n  ...\nValueError: scores are NaN\n"


@pytest.fixture
def runs(tmp_path):
    """Two losses of three seeds each, one failed and one unfinished run."""
    for loss, top1 in (("splitter", 0.61), ("softmax", 0.60)):
        for seed in range(3):
            test = {"top1": top1 + seed / 100, "top5": 0.8 + seed / 100, "top10": 0.9}
            made.run_folder(tmp_path / f"{loss}-{seed}", BASE.replace(loss=loss, seed=seed), test, seconds=50 + 10.0 * seed)
    made.run_folder(tmp_path / "deep" / "er" / "failed", BASE.replace(seed=7), error=ERROR)
    made.run_folder(tmp_path / "unfinished", BASE.replace(seed=8))
    return tmp_path


def cells(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_table(runs):
    summaries = collect([runs])
    assert sorted(run.state for run in summaries) == ["failed"] + 6 * ["finished"] + ["unfinished"]
    found = table(summaries)
    assert [column.key for column in found.columns] == ["loss", "top1", "top5", "top10", "seeds", "seconds"]
    assert [row[0] for row in found.rows] == ["softmax", "splitter"]
    assert found.rows[1][1].values == pytest.approx((0.61, 0.62, 0.63))
    assert found.rows[1][4] == 3
    assert found.notes[0] == "Runs that are not in the table: 1 failed, 1 unfinished."
    assert found.notes[1:] == (
        f"failed: {runs / 'deep' / 'er' / 'failed'}: ValueError: scores are NaN",
        f"unfinished: {runs / 'unfinished'}",
    )


def test_runs_of_a_tuning_are_left_out_where_others_were_tested(runs):
    for rate in (0.1, 0.2):
        made.run_folder(runs / f"tuning-{rate}", BASE.replace(learning_rate=rate, tested=False), {})
    found = table(collect([runs]))
    assert [column.key for column in found.columns] == ["loss", "top1", "top5", "top10", "seeds", "seconds"]
    assert len(found.rows) == 2
    assert found.notes[0] == "Runs of a tuning, which are not tested, are left out: 2. --metrics validation_top1 shows all."
    assert len(table(collect([runs]), metrics=["top1"]).rows) == 2
    alone = table(collect([runs / "tuning-0.1", runs / "tuning-0.2"]))
    assert (len(alone.rows), alone.notes) == (2, ())


def test_ranking_metrics_follow_and_older_runs_have_none(runs):
    test = {"top1": 0.7, "top5": 0.8, "mrr": 0.75, "ndcg10": 0.76, "ndcg5": 0.7, "macro_top1": 0.6, "mean": 0.7}
    made.run_folder(runs / "newer", BASE.replace(loss="lapsum"), test)
    found = table(collect([runs]))
    assert [column.title for column in found.columns][1:6] == ["top-1", "top-5", "top-10", "MRR", "NDCG@10"]
    rows = {row[0]: row for row in found.rows}
    assert rows["lapsum"][3:6] == (None, tables.Measured((0.75,)), tables.Measured((0.76,)))
    assert rows["softmax"][4:6] == (None, None)
    chosen = table(collect([runs]), metrics=["macro_top1", "validation_mrr", "ndcg5"], sort="ndcg5")
    assert [column.title for column in chosen.columns][1:4] == ["macro top-1", "validation MRR", "NDCG@5"]
    assert chosen.rows[0][0] == "lapsum"
    with pytest.raises(LabError, match="there are top1, top5, top10, mean, mrr, macro_top1, ndcg5, ndcg10, validation_top1"):
        table(collect([runs]), metrics=["ndcg7"])


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("terminal", ["62.00 ± 1.00   81.00 ± 1.00   90.00 ± 0.00       3   1.0 min", "ValueError: scores are NaN"]),
        (
            "markdown",
            [
                "| loss | top-1 % | top-5 % | top-10 % | seeds | time |\n| :-- | --: | --: | --: | --: | --: |\n",
                "| splitter | 62.00 ± 1.00 | 81.00 ± 1.00 | 90.00 ± 0.00 | 3 | 1.0 min |\n",
            ],
        ),
        (
            "latex",
            [
                "\\begin{tabular}{lrrrrr}\n\\toprule\nloss & top-1 \\% & top-5 \\% & top-10 \\% & seeds & time \\\\\n",
                r"splitter & 62.00 $\pm$ 1.00 & 81.00 $\pm$ 1.00 & 90.00 $\pm$ 0.00 & 3 & 1.0 min \\",
                "\\bottomrule\n\\end{tabular}\n% Runs that are not in the table",
            ],
        ),
    ],
)
def test_what_people_read(runs, format, expected):
    shown = tables.render(table(collect([runs])), format)
    assert [part for part in [*expected, "Runs that are not in the table: 1 failed, 1 unfinished."] if part not in shown] == []


def test_csv(runs):
    rows = cells(tables.render(table(collect([runs])), "csv"))
    assert [row["loss"] for row in rows] == ["softmax", "splitter"]
    assert float(rows[1]["top1_mean"]) == pytest.approx(0.62)
    assert float(rows[1]["top1_std"]) == pytest.approx(0.01)
    assert float(rows[1]["seconds_mean"]) == 60
    with pytest.raises(LabError, match="no format 'html'"):
        tables.render(table(collect([runs])), "html")


def test_names_are_escaped(tmp_path):
    name = r"a_b|c&d%e [red]$x$ \f,g"
    for seed, data in enumerate((name, r"$\nosuch$")):
        made.run_folder(tmp_path / str(seed), BASE.replace(data=data), {"top1": 0.5})
    found = table(collect([tmp_path]))
    assert name in tables.render(found)
    assert r"| a\_b\|c&d%e \[red]$x$ \\f,g |" in tables.render(found, "markdown")
    assert r"a\_b|c\&d\%e [red]\$x\$ \textbackslash{}f,g &" in tables.render(found, "latex")
    assert {row["data"] for row in cells(tables.render(found, "csv"))} == {name, r"$\nosuch$"}
    plot(found, tmp_path / "plot.svg")


def test_fields_metrics_and_sort(tmp_path):
    for number, (rate, top5) in enumerate([(1e-2, 0.7), (1e-3, 0.9), (1e-4, 0.8)]):
        made.run_folder(tmp_path / str(number), BASE.replace(learning_rate=rate), {"top1": 0.5, "top5": top5})
    summaries = collect([tmp_path])
    assert [row[0] for row in table(summaries).rows] == [1e-4, 1e-3, 1e-2]
    assert [row[0] for row in table(summaries, sort="-learning_rate").rows] == [1e-2, 1e-3, 1e-4]
    assert [row[0] for row in table(summaries, sort="top5").rows] == [1e-3, 1e-4, 1e-2]
    assert [row[0] for row in table(summaries, sort="-top5").rows] == [1e-2, 1e-4, 1e-3]
    found = table(summaries, fields=["loss"], metrics=["validation_top5"])
    assert [column.title for column in found.columns] == ["loss", "validation top-5", "seeds", "time"]
    assert len(found.rows) == 3
    assert found.notes[0] == "Rows that look equal differ in learning_rate."
    for option, message in (({"fields": ["lr"]}, "no field 'lr'"), ({"metrics": ["top3"]}, "no metric 'top3'")):
        with pytest.raises(LabError, match=message):
            table(summaries, **option)
    with pytest.raises(LabError, match="no column 'speed'"):
        table(summaries, sort="speed")


def test_a_repeated_seed_counts_once(tmp_path):
    for name in ("a", "b"):
        made.run_folder(tmp_path / name, BASE, {"top1": 0.5})
    found = table(collect([tmp_path, tmp_path / "a"]))
    assert found.rows[0][1] == 1
    assert found.notes == ("Runs that repeat a seed of the same setting: 1; the first one counts.",)


def test_other_data_of_the_same_name_are_other_data(tmp_path):
    for seed in (0, 1):
        made.run_folder(tmp_path / str(seed), BASE.replace(seed=seed), {"top1": 0.5}, fingerprint=f"data {seed}")
    found = table(collect([tmp_path]))
    assert [row[0] for row in found.rows] == ["data 0", "data 1"]


def test_few_classes_and_no_finished_run(tmp_path):
    made.run_folder(tmp_path / "a", BASE.replace(loss="softmax"), {"top1": 0.5})
    made.run_folder(tmp_path / "b", BASE, {"top1": 0.5, "top5": 0.9})
    found = table(collect([tmp_path]))
    assert "–" in tables.render(found)
    assert cells(tables.render(found, "csv"))[0]["top5_mean"] == ""
    plot(found, tmp_path / "plot.png")
    made.run_folder(tmp_path / "c" / "only", BASE)
    found = table(collect([tmp_path / "c"]))
    assert found.rows == ()
    assert "not in the table: 0 failed, 1 unfinished." in tables.render(found)
    with pytest.raises(LabError, match="nothing to plot"):
        plot(found, tmp_path / "plot.png")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "",
        '{"format": 9}',
        '{"format": 1, "config": {"x": 1}, "test": {}}',
    ],
)
def test_a_corrupt_result_is_named(runs, content):
    file = runs / "softmax-1" / "result.json"
    file.write_text(content)
    with pytest.raises(LabError, match=r"softmax-1.result\.json"):
        collect([runs])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"validation": {"top1": [1]}}, r"has a validation value that is not a number"),
        ({"test": {"top1": 10**400}}, r"has a test value that is not a number"),
        ({"data": {"fingerprint": {}}}, r"does not say how long the run took, and on what data"),
    ],
)
def test_a_result_that_no_run_wrote(runs, change, match):
    file = runs / "softmax-1" / "result.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps({**result, **change}))
    with pytest.raises(LabError, match=match):
        table(collect([runs]))


def test_what_a_result_may_hold(runs):
    """A loss over no token is NaN; a metric may have any name."""
    for place in runs.iterdir():
        if (file := place / "result.json").exists():
            result = json.loads(file.read_text())
            odd = {"loss": float("nan"), "top" + "9" * 5000: 0.5, "top\N{SUPERSCRIPT TWO}": 0.5}
            file.write_text(json.dumps({**result, "test": {**result["test"], **odd}}))
    assert "top1" in [column.key for column in table(collect([runs])).columns]


def test_folders_without_runs(tmp_path):
    with pytest.raises(LabError, match="nowhere is not a folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "config.json").write_text("not of this program")
    with pytest.raises(LabError, match="There is no run in"):
        collect([tmp_path])
    (tmp_path / "environment.json").write_text("{}")
    with pytest.raises(LabError, match=r"config\.json cannot be read as JSON"):
        collect([tmp_path])


def test_what_a_loss_does_not_take_tells_no_runs_apart(tmp_path):
    for loss, m in (("softmax", 8), ("softmax", 16), ("splitter", 8), ("splitter", None)):
        made.run_folder(tmp_path / f"{loss}{m}", BASE.replace(loss=loss, m=m), {"top1": 0.5})
    found = table(collect([tmp_path]))
    assert [column.key for column in found.columns[:2]] == ["m", "loss"]
    assert [row[:2] for row in found.rows] == [(8, "splitter"), ("none", "splitter"), (None, "softmax")]
    assert "repeat a seed of the same setting: 1" in found.notes[0]


def test_curves_have_a_row_for_each_evaluation(tmp_path):
    for seed, loss in enumerate(("softmax", "lapsum")):
        folder = made.run_folder(
            tmp_path / loss, BASE.replace(loss=loss, seed=seed, m=8 + seed), {"top1": 0.5} if seed else None
        )
        lines = [
            {"step": step, "epoch": step / 2, "train_loss": 1 / step, "validation": {"top1": 0.1 * step}, "temperature": None}
            for step in (1, 2)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = cells(tables.csv_of(curves(collect([tmp_path]))))
    assert [row["run"] for row in rows] == [str(tmp_path / loss) for loss in ("lapsum", "lapsum", "softmax", "softmax")]
    assert [(row["loss"], row["seed"], row["step"], row["epoch"]) for row in rows[1:3]] == [
        ("lapsum", "1", "2", "1.0"),
        ("softmax", "0", "1", "0.5"),
    ]
    assert [float(row["validation_top1"]) for row in rows] == [0.1, 0.2, 0.1, 0.2]
    assert rows[0]["temperature_now"] == ""
    assert tables.csv_of([]) == "\n"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(LabError, match=r"metrics.jsonl has a line without validation"):
        curves(collect([tmp_path]))


def test_how_many_guesses_cover_the_test_examples(runs):
    for loss, shift in (("splitter", 0), ("softmax", 1)):
        for seed in range(3):
            ranks = torch.arange(100, dtype=torch.int32) // 10 + 1 + shift * (seed > 0)
            Run(runs / f"{loss}-{seed}").save_tensors("test.safetensors", {"ranks": ranks}, {})
    found = table(collect([runs]))
    assert [column.key for column in found.columns] == ["loss", "top1", "top5", "top10", "guesses", "seeds", "seconds"]
    assert [row[4] for row in found.rows] == [(6, 9, 10, 11, 11), (5, 8, 9, 10, 10)]
    assert " guesses for 50, 80, 90, 95, 99 % " in tables.render(found)
    assert "   5, 8, 9, 10, 10 " in tables.render(found)
    [softmax, _] = cells(tables.render(found, "csv"))
    assert [softmax[f"guesses_{share}"] for share in (50, 80, 90, 95, 99)] == ["6", "9", "10", "11", "11"]
    assert "guesses" not in [column.key for column in table(collect([runs]), metrics=["top1"]).columns]
    (runs / "softmax-0" / "test.safetensors").unlink()  # a run of before
    assert table(collect([runs])).rows[0][4] == (6, 9, 10, 11, 11)
