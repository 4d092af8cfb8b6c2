"""New examples of every kind, through a trained model: as many as there are, a batch at a time."""

import csv
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from PIL import Image

import lab_data
from anyk.lab.data.images import read_pixels
from anyk.lab.errors import LabError
from anyk.lab.prediction import predict
from anyk.lab.run import models, training
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return lab_data.trained_on_every_kind(tmp_path_factory.mktemp("kinds"))


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def guesses(rows: list[dict[str, str]], k: int) -> list[list[tuple[str, float]]]:
    return [[(row[f"guess_{n}"], float(row[f"probability_{n}"])) for n in range(1, k + 1)] for row in rows]


def expected(run: Path, examples: torch.Tensor, k: int) -> list[list[tuple[str, float]]]:
    found = models.load(run).guesses(examples, k)
    return [[(name, pytest.approx(p, rel=1e-4, abs=1e-6)) for name, p in each] for each in found]


def test_embeddings_in_every_file_that_holds_them(runs, anyk, tmp_path):
    x, y = lab_data.examples(6, 3, 16, seed=5)
    np.save(tmp_path / "plain.npy", x.numpy())
    np.savez(tmp_path / "labelled.npz", x=x.numpy(), y=y.numpy())
    np.savez(tmp_path / "split.npz", X_train=x[:4].numpy(), X_test=x.numpy(), y_test=y.numpy())
    torch.save(x, tmp_path / "tensor.pt")
    torch.save({"embeddings": x.half(), "labels": y}, tmp_path / "half.pt")
    safetensors.torch.save_file({"embeddings": x}, tmp_path / "set.safetensors")
    lines = [",".join(f"{value:.8f}" for value in row) for row in x.tolist()]
    (tmp_path / "bare.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "titled.csv").write_text("\n".join([",".join(f"x{n}" for n in range(16)), *lines]) + "\n")
    (tmp_path / "labelled.csv").write_text("\n".join(f"{line},a" for line in lines) + "\n")
    (tmp_path / "first.csv").write_text("\n".join(["name," + ",".join(f"x{n}" for n in range(16)), *(f"a,{r}" for r in lines)]))
    titles = ",".join(f"x{n}" for n in range(16))
    (tmp_path / "grouped.csv").write_text("\n".join([f"groups,{titles},kind", *(f"g1,{line},a" for line in lines)]) + "\n")
    want = expected(runs["embeddings"], x, 3)
    names = ["plain.npy", "labelled.npz", "split.npz", "tensor.pt", "set.safetensors", "bare.csv", "titled.csv", "labelled.csv"]
    names.append("grouped.csv")
    code, out, err = anyk("predict", runs["embeddings"], *names, "--k", "3", "--batch-size", "4")
    assert (code, err) == (0, "")
    rows = table(out)
    assert [row["file"] for row in rows] == [name for name in names for _ in x]
    assert [row["row"] for row in rows] == [str(number) for _ in names for number in range(len(x))]
    assert guesses(rows, 3) == want * len(names)
    rows = table(anyk("predict", runs["embeddings"], "first.csv", "--k", "3", "--label-column", "name")[1])
    assert guesses(rows, 3) == want
    rows = table(anyk("predict", runs["embeddings"] / "model.safetensors", "half.pt", "--k", "3")[1])
    assert guesses(rows, 3) == expected(runs["embeddings"], x.half(), 3)


def test_a_table_and_a_set_as_they_were_trained_on(runs, anyk, tmp_path):
    data = runs["table"].parent.parent
    code, out, _ = anyk("predict", runs["table"], data / "table.csv", "--k", "9")
    assert code == 0
    assert len(table(out)) == 40
    assert "guess_4" in out
    assert "guess_5" not in out  # there are four classes
    code, out, _ = anyk("predict", runs["embeddings"], data / "points")
    assert (code, len(table(out))) == (0, 240)
    assert {Path(row["file"]).name for row in table(out)} == {"train.safetensors", "test.safetensors"}
    x, y = lab_data.examples(6, 1, 16, seed=5)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "some.npy", x.numpy())
    np.save(tmp_path / "folder" / "some_labels.npy", y.numpy())
    code, out, err = anyk("predict", runs["embeddings"], "folder")
    assert (code, err, len(table(out))) == (0, "", 6)


def test_columns_of_a_table_are_found_by_their_names(runs, anyk, tmp_path):
    """In any order, of any format; what is missing or unknown is named, and then nothing is written."""
    made = pd.read_csv(runs["table"].parent.parent / "table.csv")
    features = torch.tensor(made.drop(columns="kind").to_numpy(), dtype=torch.float32)
    want = expected(runs["table"], features, 3)
    other = made[["x3", "kind", "x0", "x4", "x2", "x1"]]
    other.to_csv(tmp_path / "other.csv", index=False)
    other.drop(columns="kind").to_parquet(tmp_path / "bare.parquet")
    other.to_feather(tmp_path / "other.feather")
    np.save(tmp_path / "plain.npy", features.numpy())
    names = ["other.csv", "bare.parquet", "other.feather", "plain.npy"]
    code, out, err = anyk("predict", runs["table"], *names, "--k", "3", "--batch-size", "7")
    assert (code, err) == (0, "")
    assert guesses(table(out), 3) == want * len(names)
    torch.testing.assert_close(models.load(runs["table"]).features(other), features)
    torch.testing.assert_close(models.load(runs["table"]).features(tmp_path / "other.csv"), features)
    with pytest.raises(ValueError, match="table: expected a model that was trained on a table"):
        models.load(runs["embeddings"]).features(other)

    other.assign(more=1).to_csv(tmp_path / "more.csv", index=False)
    other.rename(columns={"x2": "X2"}).to_csv(tmp_path / "less.csv", index=False)
    code, out, err = anyk("predict", runs["table"], "more.csv", "less.csv", "--out", "guesses.csv")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "more.csv has 'more', which the training table had not: --drop leaves columns out.",
        "less.csv has no column 'x2', and has 'X2', which the training table had not: the columns are x0, x1, x2, x3, x4.",
    ]
    assert not (tmp_path / "guesses.csv").exists()
    code, out, err = anyk("predict", runs["table"], "more.csv", "--drop", "more", "--k", "3")
    assert (code, err, guesses(table(out), 3)) == (0, "", want)
    other.assign(x0=[None, *other["x0"][1:]]).to_csv(tmp_path / "gap.csv", index=False)
    code, out, err = anyk("predict", runs["table"], "gap.csv", "--k", "3")
    assert (code, guesses(table(out), 3)[1:]) == (0, want[1:])
    assert "gap.csv: Missing values that are filled" in err
    code, out, err = anyk("predict", runs["table"], "gap.csv", "--missing", "refuse")
    assert (code, err) == (
        1,
        "gap.csv has no value in column 'x0', line 2: fill it in, or remove the row, or give --missing mean.\n",
    )


def test_a_process_trains_on_a_frame_with_an_index_and_another_predicts(tmp_path):
    """A column that counts the rows, texts and gaps, from the command line to the guesses."""
    random = np.random.default_rng(0)
    kinds = np.arange(120) % 4
    made = pd.DataFrame(
        {"size": kinds + 0.1 * random.standard_normal(120), "colour": np.array([*"rgby"])[kinds], "kind": kinds}
    )
    made.loc[7, "size"] = np.nan
    made.sort_values("kind").reset_index(drop=True).to_csv(tmp_path / "made.csv")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ANYK_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "anyk", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run(
        *["train", "made.csv", "--loss", "softmax", "--epochs", "20", "--learning-rate", "0.1", "--out", "run", "--quiet"]
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "The label is 'kind', the last column; --label-column names another.",
        "Only the rows are counted in '', so it is left out; --row-numbers takes it.",
        "Columns of texts that are one-hot encoded, with the number of their categories: 'colour' 4.",
        "Missing values that are filled, a number with the mean of its column, a text with no category: 'size' 1.",
    ]
    made[["colour", "size"]].to_parquet(tmp_path / "new.parquet")
    done = run("predict", "run", "new.parquet", "--k", "1")
    assert done.returncode == 0, done.stderr
    assert [int(row["guess_1"]) for row in table(done.stdout)] == kinds.tolist()


def test_images_for_a_model_of_embeddings_want_their_backbone(runs, anyk, tmp_path):
    lab_data.write_photos(tmp_path / "new", classes=2, per_class=1)
    for given in ("new", "new/kind 0/0.png"):
        code, _, err = anyk("predict", runs["embeddings"], given)
        assert code in (1, 2)
        assert "for a model of embeddings name the --backbone that made them, such as efficientnet-lite0." in err


@pytest.mark.parametrize("kind", ["photos", "cifar100", "glyphs"])
def test_images(runs, anyk, kind, tmp_path):
    photos = lab_data.write_photos(tmp_path / "new", classes=2, per_class=3, size=(40, 30))
    code, out, err = anyk("predict", runs[kind], "new", "new/kind 0/1.png", "--k", "2", "--batch-size", "4")
    assert (code, err) == (0, "")
    files = [*sorted(photos.rglob("*.png")), photos / "kind 0" / "1.png"]
    rows = table(out)
    assert [tmp_path / row["file"] for row in rows] == files
    assert {row["row"] for row in rows} == {""}
    size = 20 if kind == "glyphs" else 32
    pixels = torch.stack([read_pixels(file, size) for file in files])
    if kind == "glyphs":
        grey = [np.asarray(Image.fromarray(each.permute(1, 2, 0).numpy()).convert("L")) for each in pixels]
        pixels = torch.from_numpy(np.stack(grey))[:, None]
    assert guesses(rows, 2) == expected(runs[kind], pixels, 2)
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    assert guesses(table(anyk("predict", runs[kind], "pixels.npy", "--k", "2")[1]), 2) == expected(runs[kind], pixels, 2)


def test_what_follows_a_sequence_of_items(runs, anyk, tmp_path):
    """What a line has had is no guess of this model, however long it is; an unknown item is any other."""
    lines = ["3 1 4 1 5 9 2 6", "", " 7\tnew  8 ", " ".join(map(str, range(28)))]
    (tmp_path / "new.txt").write_text("\n".join(lines) + "\n")
    code, out, err = anyk("predict", runs["items"], "new.txt", "--k", "4", "--batch-size", "2")
    assert (code, err) == (0, "")
    rows = table(out)
    assert [(row["file"], row["row"]) for row in rows] == [("new.txt", "0"), ("new.txt", "2"), ("new.txt", "3")]
    model = models.load(runs["items"])
    assert len(model.classes) == 30
    for row, line in zip(rows, (lines[0], lines[2], lines[3]), strict=True):
        numbers = [model.classes.index(item) if item in model.classes else 30 for item in line.split()]
        contexts = torch.tensor([[31] * 5 + numbers])[:, -5:]
        with torch.no_grad():
            scores = model.model(contexts)[0]
        scores[[number for number in numbers if number < 30]] = -torch.inf
        best = scores.softmax(0).topk(4)
        left = min(4, 30 - len({number for number in numbers if number < 30}))
        assert [row[f"guess_{n}"] for n in range(1, left + 1)] == [model.classes[c] for c in best.indices.tolist()[:left]]
        shown = [float(row[f"probability_{n}"]) for n in range(1, left + 1)]
        assert shown == pytest.approx(best.values.tolist()[:left], rel=1e-4)
        assert {row[f"{what}_{n}"] for what in ("guess", "probability") for n in range(left + 1, 5)} <= {""}
    assert left == 2
    everything = [" ".join(model.classes)]
    (tmp_path / "all.txt").write_text(everything[0])
    assert json.loads(anyk("predict", runs["items"], "all.txt", "--json")[1]) == [{"file": "all.txt", "row": 0, "guesses": []}]


def test_sequences_that_the_model_knows_nothing_of_are_told(runs, anyk, tmp_path):
    (tmp_path / "new.txt").write_text("no such\n1 2\nas these 1 too far back\n")
    code, out, err = anyk("predict", runs["items"], "new.txt", "--k", "2")
    assert (code, len(table(out))) == (0, 3)
    assert err == (
        "new.txt: of 3 sequences, 1 have nothing that the model knows, such as 'such': "
        "their guesses are the same whatever they hold.\n"
    )


def test_what_follows_words_and_titles(runs, anyk, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the cat, and HE said: it's\r\n\r\na mat\n")
    (tmp_path / "texts" / "b.md").write_text("sat.")
    (tmp_path / "texts" / "c.csv").write_text("1,2")
    words = [["the", "cat", ",", "and", "HE", "said", ":", "it's"], ["a", "mat"], ["sat", "."]]
    code, out, err = anyk("predict", runs["words"], "texts", "texts/c.csv", "--k", "3")
    assert (code, err) == (0, "")
    model = models.load(runs["words"])
    assert [row["row"] for row in table(out)] == ["0", "2", "0", "0"]
    assert guesses(table(out), 3) == expected(runs["words"], model.tokens([*words, ["1", ",", "2"]]), 3)

    titles = ("Emma (1996)", "Heat (1995)", "Clue (1985)")
    run = lab_data.write_untrained(tmp_path / "movies", "attention", titles, tokens="items")
    (tmp_path / "seen.txt").write_text("Heat (1995)\t Emma (1996)\nHeat (1995) Emma (1996)\n")
    rows = table(anyk("predict", run, "seen.txt", "--k", "3")[1])
    seen = models.load(run).tokens([["Heat (1995)", "Emma (1996)"], ["no such"]])
    assert seen.tolist() == [[4, 4, 4, 4, 1, 0], [4, 4, 4, 4, 4, 3]]
    assert guesses(rows, 3) == expected(run, seen, 3)


def test_what_follows_the_end_of_python_source(anyk, tmp_path):
    names = ("self", ".", "(", ")", ":", "return", "<newline>", "<indent>", "<number>", "def")
    run = lab_data.write_untrained(tmp_path / "run", "context", names, tokens="python")
    sources = {
        "open.py": "class A:\n    def f(self):\n        return g(self.",
        "ended.py": "def f(self):\n    return 1  # one\n",
        "block.py": "def f(self):\n    ",
        "line.py": "    return self.f",
        "text.txt": "return (1,\n  2",
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    tokens = {
        "open.py": ["<indent>", "return", "…", "(", "self", "."],
        "ended.py": [":", "<newline>", "<indent>", "return", "<number>", "<newline>"],
        "block.py": ["…", "(", "self", ")", ":", "<newline>"],
        "line.py": ["<indent>", "return", "self", ".", "…"],
        "text.txt": ["return", "(", "<number>", "…", "<number>"],
    }
    code, out, err = anyk("predict", run, *sources, "--k", "2")
    assert (code, err) == (0, "")
    rows = table(out)
    assert [(row["file"], row["row"]) for row in rows] == [(name, "") for name in sources]
    assert guesses(rows, 2) == expected(run, models.load(run).tokens(list(tokens.values())), 2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.py").write_text(sources["open.py"])
    (tmp_path / "folder" / "notes.txt").touch()
    code, out, err = anyk("predict", run, "folder", "--k", "2")
    assert (code, err) == (0, "")
    assert [row["file"] for row in table(out)] == ["folder/b.py"]


def test_sequences_that_cannot_be_read(runs, anyk, tmp_path):
    (tmp_path / "good.txt").write_text("1 2 3")
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes("1 2\nMünchen".encode("latin-1"))
    (tmp_path / "nothing").mkdir()
    code, out, err = anyk("predict", runs["items"], "empty.txt", "latin.txt", "gone.txt", "nothing", "good.txt")
    assert (code, [row["file"] for row in table(out)]) == (1, ["good.txt"])
    assert err.splitlines() == [
        "empty.txt is empty: it should have one sequence on each line.",
        "latin.txt is not in UTF-8 (the byte 0xFC in line 2): save it as UTF-8.",
        "gone.txt does not exist.",
        "nothing has no files that end in .txt or .md in it.",
    ]
    run = lab_data.write_untrained(tmp_path / "run", "gru", ("a", "b"), tokens="python")
    code, _, err = anyk("predict", run, "empty.txt", "nothing")
    assert (code, err.splitlines()[0]) == (1, "empty.txt has no tokens of Python in it.")
    for option in ("--backbone", "--label-column"):
        code, _, err = anyk("predict", runs["items"], "good.txt", option, "x")
        name = option[2:].replace("-", "_")
        assert (code, err) == (2, f"anyk: {name} is for other data, but this model takes sequences of tokens: leave it out.\n")
    with pytest.raises(TypeError, match="sequences: expected lists of tokens, got the text '1 2 3'"):
        models.load(runs["items"]).tokens(["1 2 3"])
    with pytest.raises(ValueError, match="tokens: expected a model of sequences, got linear"):
        models.load(runs["embeddings"]).tokens([["1"]])


def test_images_for_a_model_of_embeddings_need_the_backbone(runs, anyk, tmp_path, monkeypatch):
    lab_data.write_photos(tmp_path / "new", classes=1, per_class=3)
    code, out, err = anyk("predict", runs["embeddings"], "new/kind 0/0.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is an image, but the model takes arrays of the shape (16,)" in err
    (tmp_path / "tiny_backbone.py").write_text(
        "import torch, numpy\n"
        "def make(side=4):\n"
        "    grey = lambda image: torch.tensor(numpy.array(image.convert('L').resize((side, side))) / 255.0).float()[None]\n"
        "    return torch.nn.Flatten(), grey\n"
        "def small():\n    return make(2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = anyk("predict", runs["embeddings"], "new", "--backbone", "tiny_backbone:make", "--k", "2")
    assert (code, err) == (0, "")
    assert len(table(out)) == 3
    code, _, err = anyk("predict", runs["embeddings"], "new", "--backbone", "tiny_backbone:small")
    assert code == 2
    assert "gives 4 numbers for an image, but the model takes 16" in err
    assert "leave it out" in anyk("predict", runs["photos"], "new", "--backbone", "tiny_backbone:make")[2]


def test_what_cannot_be_read_is_named_and_the_rest_is_predicted(runs, anyk, tmp_path):
    photos = lab_data.write_photos(tmp_path / "new", classes=1, per_class=3)
    (photos / "kind 0" / "0.png").write_bytes(b"nonsense")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "nothing").mkdir()
    code, out, err = anyk("predict", runs["photos"], "new", "gone.png", "notes.txt", "nothing", "--json")
    assert code == 1
    assert [each["file"] for each in json.loads(out)] == ["new/kind 0/1.png", "new/kind 0/2.png"]
    lines = sorted(err.splitlines())
    assert len(lines) == 4
    assert lines[0] == "gone.png does not exist."
    assert lines[1].startswith("new/kind 0/0.png cannot be read as an image (")
    assert lines[2].startswith("notes.txt has an unknown format")
    assert lines[3] == "nothing has no images in it."
    x = lab_data.examples(6, 1, 16, seed=5)[0].numpy()
    np.save(tmp_path / "good.npy", x)
    np.save(tmp_path / "wide.npy", np.hstack([x, x]))
    np.save(tmp_path / "nan.npy", np.where(np.arange(6)[:, None] == 4, np.nan, x))
    np.savez(tmp_path / "two.npz", a=x, b=x)
    (tmp_path / "empty.csv").touch()
    (tmp_path / "word.csv").write_text("1," * 15 + "1\n" + "1," * 15 + "x\n")
    (tmp_path / "inf.csv").write_text(("1," * 15 + "1\n") * 3 + "1," * 15 + "inf\n")
    (tmp_path / "narrow.csv").write_text("1,2,3\n")
    (tmp_path / "bad.safetensors").write_bytes(b"1234567890")
    bad = ["wide.npy", "nan.npy", "two.npz", "empty.csv", "word.csv", "inf.csv", "narrow.csv", "bad.safetensors"]
    code, out, err = anyk("predict", runs["embeddings"], *bad, "good.npy", "--batch-size", "2")
    assert code == 1
    assert [row["row"] for row in table(out) if row["file"] == "good.npy"] == [*"012345"]
    assert [row["row"] for row in table(out) if row["file"] == "nan.npy"] == [*"0123"]  # the batches before the bad one
    lines = err.splitlines()
    assert [line.split()[0] for line in lines] == bad
    for line, message in zip(
        lines,
        (
            "should have one array of the shape (examples, 16), but has (6, 32).",
            "has a NaN or an infinite number in row 4, column 0 (from 0).",
            "but has a (6, 16), b (6, 16).",
            "is empty",
            "should have numbers in column '16', but has 'x' in line 2.",
            "has the number inf in column '16', line 4",
            "has 3 columns of numbers, but the model takes 16.",
            "cannot be read as embeddings",
        ),
        strict=True,
    ):
        assert message in line


def test_out_is_whole_and_not_overwritten(runs, anyk, tmp_path):
    np.save(tmp_path / "x.npy", lab_data.examples(6, 1, 16, seed=5)[0].numpy())
    assert anyk("predict", runs["embeddings"], "x.npy", "-o", "out.csv") == (0, "", "")
    written = (tmp_path / "out.csv").read_text()
    assert len(table(written)) == 6
    code, _, err = anyk("predict", runs["embeddings"], "x.npy", "--out", "out.csv", "--json")
    assert (code, err) == (2, "anyk: out.csv already exists: name another file, or give --force to replace it.\n")
    assert (tmp_path / "out.csv").read_text() == written
    assert anyk("predict", runs["embeddings"], "x.npy", "--out", "out.csv", "--json", "--force")[0] == 0
    rows = json.loads((tmp_path / "out.csv").read_text())
    assert [row["row"] for row in rows] == list(range(6))
    assert [(g["class"], g["probability"]) for g in rows[0]["guesses"]] == guesses(table(written), 5)[0]
    assert json.loads(anyk("predict", runs["embeddings"], "gone.npy", "--json")[1]) == []
    # Of a failure no file is left that would be in the way, and one that is there stays.
    kept = (tmp_path / "out.csv").read_bytes()
    assert anyk("predict", runs["embeddings"], "gone.npy", "--out", "out.csv", "--force")[0] == 1
    assert (tmp_path / "out.csv").read_bytes() == kept
    for words, code in ((("gone.npy",), 1), (("gone.npy", "x.npy"), 1)):
        assert not (tmp_path / "other.csv").exists()
        assert anyk("predict", runs["embeddings"], *words, "--out", "other.csv")[0] == code
    assert (tmp_path / "other.csv").exists()
    for words, message in (
        (("--k", "0"), "k should be at least 1, but is 0."),
        (("--out", "no/where.csv"), "no should be a folder that exists"),
        (("--out", "."), ". is a folder"),
        (("--device", "nonsense"), "device 'nonsense' cannot be used here"),
    ):
        code, out, err = anyk("predict", runs["embeddings"], "x.npy", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
    assert "a run writes it when it ends" in anyk("predict", tmp_path, "x.npy")[2]


def test_a_file_is_not_read_whole(runs, tmp_path):
    """Of a file of ten batches, the first is predicted before the last is read."""
    lines = [",".join("1" * 16)] * 99 + ["this is not a number"]
    (tmp_path / "long.csv").write_text("\n".join(lines))
    said: list[str] = []
    found = predict(models.load(runs["embeddings"]), [tmp_path / "long.csv"], batch_size=10, unreadable=said.append)
    assert [next(found).row for _ in range(30)] == list(range(30))
    assert said == []
    assert len(list(found)) == 60
    assert len(said) == 1
    with pytest.raises(LabError, match="give the files"):
        predict(models.load(runs["embeddings"]), [], unreadable=said.append)


def test_a_model_of_ones_own_is_named(anyk, tmp_path):
    """A file alone imports no code."""
    (tmp_path / "own_layers.py").write_text(
        "from torch import nn\ndef make(shape, classes):\n    return nn.Sequential(nn.Linear(shape[0], classes))\n"
    )
    data = lab_data.write_embedding_set(tmp_path / "points")
    assert anyk("train", data, "--model", "own_layers:make", "--epochs", "1", "--out", "run", "--quiet")[0] == 0
    x = torch.zeros(2, 16)
    np.save(tmp_path / "new.npy", x.numpy())
    code, _, told = anyk("predict", "run", "new.npy")
    assert code == 2
    assert "own_layers:make" in told
    code, said, _ = anyk("predict", "run", "new.npy", "--model", "own_layers:make", "--k", "2")
    assert code == 0
    assert len(table(said)) == 2


# Lists of a promised coverage ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A run on classes that overlap, of which nothing was chosen, and new examples with their classes."""
    folder = tmp_path_factory.mktemp("crowded")
    x, y = lab_data.examples(12, 400, 8, seed=0, noise=2.0)
    np.savez(folder / "old.npz", x=x[::4].numpy(), y=y[::4].numpy())
    config = Config(data=str(folder / "old.npz"), loss="softmax", epochs=12, learning_rate=0.03, select="last", validation=0.4)
    training.train(config, folder / "run")
    new = torch.arange(len(x)) % 4 != 0
    np.save(folder / "new.npy", x[new].numpy())
    return folder, x[new], y[new]


def test_each_example_gets_its_own_list_and_the_promise_is_kept(crowded, anyk):
    folder, _, y = crowded
    code, written, told = anyk("predict", folder / "run", folder / "new.npy", "--coverage", "0.8")
    assert code == 0
    rows = table(written)
    lists = [[name for place in range(1, 13) if (name := row.get(f"guess_{place}"))] for row in rows]
    hits = [str(target) in names for names, target in zip(lists, y.tolist(), strict=True)]
    examples = models.load(folder / "run").plan.calibration.examples
    assert abs(np.mean(hits) - 0.8) < 4 * (0.16 * (1 / examples + 1 / len(hits))) ** 0.5
    lengths = set(map(len, lists))
    assert min(lengths) == 1
    assert len(lengths) > 3
    assert f"guess_{max(lengths)}" in rows[0]  # as many columns as the longest list has
    assert f"guess_{max(lengths) + 1}" not in rows[0]
    assert {line.count(",") for line in written.splitlines()} == {1 + 2 * max(lengths)}
    luck = 100 * (0.16 / examples) ** 0.5
    assert told == (
        f"For examples like the {examples} that the model had for validation, the right class is in 80 % of the lists, "
        f"give or take {luck:.1f} points (one standard deviation).\n"
    )


def test_lists_are_the_same_as_json_and_in_python_and_grow_with_the_coverage(crowded, anyk):
    folder, x, _ = crowded
    model, before = models.load(folder / "run"), None
    for coverage in (0.3, 0.7, 0.9):
        _, written, _ = anyk(
            "predict", folder / "run", folder / "new.npy", "--coverage", coverage, "--json", "--batch-size", 100
        )
        found = [[guess["class"] for guess in one["guesses"]] for one in json.loads(written)]
        assert found == [[name for name, _ in one] for one in model.guesses(x, coverage=coverage)]
        fixed = model.guesses(x, 12)
        assert all(names == [name for name, _ in first][: len(names)] for names, first in zip(found, fixed, strict=True))
        assert before is None or all(len(few) <= len(many) for few, many in zip(before, found, strict=True))
        before = found


def test_coverage_is_refused_before_anything_is_read(crowded, runs, anyk):
    folder = crowded[0]
    for words, message in (
        (["--coverage", "0.9", "--k", "3"], "k and coverage contradict each other"),
        (["--coverage", "90"], "coverage: expected a number above 0 and below 1, got 90."),
        (["--coverage", "0.999"], "validation examples, and needs 999; ask for at most 0.99"),
    ):
        code, written, told = anyk("predict", folder / "run", folder / "no such.npy", *words)
        assert (code, written) == (2, "")
        assert message in told
        assert told.count("\n") == 1
    plan, weights = models.read(folder / "run")
    Run(folder).save_tensors("before.safetensors", weights, dataclasses.replace(plan, calibration=None).to_json())
    code, _, told = anyk("predict", folder / "before.safetensors", folder / "new.npy", "--coverage", "0.9")
    assert code == 2
    assert "was saved without what coverage needs, as one of --label-noise always is: train it again" in told


def test_what_validation_has_chosen_is_told(runs, anyk, tmp_path):
    x, _ = lab_data.examples(6, 3, 16, seed=5)
    np.save(tmp_path / "x.npy", x.numpy())
    models.keep(runs["embeddings"], tmp_path, ("the hyperparameters", "the loss", "the seed"))
    for model, chosen in (
        (runs["embeddings"], "the epoch"),
        (tmp_path / "model.safetensors", "the epoch, the hyperparameters, the loss and the seed"),
    ):
        _, _, told = anyk("predict", model, tmp_path / "x.npy", "--coverage", "0.8")
        assert told.endswith(
            f" points (one standard deviation). The same examples were used to choose {chosen}, so it may be a little less.\n"
        )


def test_lists_of_what_may_be_guessed(runs, anyk, tmp_path):
    lines = ["1 2 3 4", " ".join(map(str, range(29)))]
    (tmp_path / "items.txt").write_text("\n".join(lines) + "\n")
    _, written, _ = anyk("predict", runs["items"], tmp_path / "items.txt", "--coverage", "0.5", "--json")
    for line, one in zip(lines, json.loads(written), strict=True):
        names = [guess["class"] for guess in one["guesses"]]
        assert names
        assert not set(names) & set(line.split())
