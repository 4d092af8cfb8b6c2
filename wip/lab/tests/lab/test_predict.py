import csv
import io
import json

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from anyk.lab import models, train
from anyk.lab.config import DataFields, RunConfig
from anyk.lab.data.prepare import prepare
from anyk.lab.errors import LabError
from anyk.lab.predict import predict

CONFIG = RunConfig(loss="softmax", epochs=3)


def model_of(data, folder, **fields):
    config = {name: fields.pop(name) for name in list(fields) if name in RunConfig.__dataclass_fields__}
    prepared = prepare(data, DataFields(**fields), folder)
    train.train(CONFIG.replace(**config), prepared, folder / "run")
    return models.load(folder / "run")


def guesses(model, *files, **options):
    problems, notes = [], []
    found = list(predict(model, files, unreadable=problems.append, note=notes.append, **options))
    return found, problems, notes


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": rng.normal(size=200), "colour": rng.choice(list("rgb"), 200)})
    frame["y"] = np.where(frame.a > 0, frame.colour, "none")
    return model_of(frame, tmp_path, learning_rate=0.1, epochs=30), frame, tmp_path


def test_a_table_is_predicted_by_the_names_of_its_columns(table):
    model, frame, folder = table
    frame[["colour", "a"]].assign(more=1).to_csv(folder / "new.csv", index=False)
    frame[["a", "colour", "y"]].to_parquet(folder / "same.parquet")
    one, _, notes = guesses(model, folder / "new.csv")
    same, _, _ = guesses(model, folder / "same.parquet")
    assert [each.guesses for each in one] == [each.guesses for each in same] and [each.row for each in one] == list(range(200))
    assert any("more" in note for note in notes)
    right = sum(each.guesses[0][0] == label for each, label in zip(one, frame.y, strict=True))
    assert right > 180


def test_unseen_categories_and_missing_columns(table):
    model, frame, folder = table
    pandas.DataFrame({"a": [1.0], "colour": ["violet"]}).to_csv(folder / "odd.csv", index=False)
    found, problems, notes = guesses(model, folder / "odd.csv")
    assert len(found) == 1 and not problems and any("colour" in note for note in notes)
    frame[["a"]].assign(b=1).to_csv(folder / "bad.csv", index=False)
    found, problems, _ = guesses(model, folder / "bad.csv", folder / "odd.csv")
    assert len(found) == 1 and "colour" in problems[0]
    np.save(folder / "rows.npy", np.zeros((2, 4)))
    assert "table" in guesses(model, folder / "rows.npy")[1][0]


def test_lists_of_a_promised_coverage(table):
    model, frame, folder = table
    frame[["a", "colour"]].to_csv(folder / "new.csv", index=False)
    found, _, _ = guesses(model, folder / "new.csv", coverage=0.8)
    covered = sum(label in dict(each.guesses) for each, label in zip(found, frame.y, strict=True)) / 200
    assert covered >= 0.7 and len({len(each.guesses) for each in found}) >= 1
    with pytest.raises(LabError, match="contradict"):
        guesses(model, folder / "new.csv", coverage=0.8, k=3)
    with pytest.raises(LabError, match="promised"):
        guesses(model, folder / "new.csv", coverage=0.999)


def test_arrays_and_images(tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 3
    model = model_of((X, y), tmp_path / "a")
    np.save(tmp_path / "n.npy", X[:5])
    np.savez(tmp_path / "n.npz", X=X[:5], y=y[:5])
    first, second = (guesses(model, tmp_path / name)[0] for name in ("n.npy", "n.npz"))
    assert [one.guesses for one in first] == [one.guesses for one in second]
    pixels = (rng.integers(0, 60, (60, 3, 8, 8)) + 90 * (y % 3)[:, None, None, None]).astype(np.uint8)
    images = model_of((pixels, y), tmp_path / "i", model="cnn")
    Image.fromarray(pixels[1].transpose(1, 2, 0)).save(tmp_path / "one.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nonsense")
    found, problems, _ = guesses(images, tmp_path / "one.png", tmp_path / "broken.png", tmp_path / "nowhere.png")
    want = images.guesses(torch.from_numpy(pixels[1:2]))[0]
    assert [name for name, _ in found[0].guesses] == [name for name, _ in want]
    assert len(problems) == 2 and "broken.png" in problems[0] and "does not exist" in problems[1]


def test_sequences_go_on(tmp_path):
    (tmp_path / "s.txt").write_text("\n".join(" ".join("abcd"[(i + j) % 4] for j in range(8)) for i in range(60)))
    model = model_of(f"sequences:{tmp_path / 's.txt'}", tmp_path, epochs=20)
    (tmp_path / "new.txt").write_text("a b c\nd a\nz z\n")
    found, _, _ = guesses(model, tmp_path / "new.txt", k=1)
    assert [one.guesses[0][0] for one in found[:2]] == ["d", "b"] and len(found) == 3


def test_the_command(table, anyk):
    _, frame, folder = table
    frame[["a", "colour"]].head(3).to_csv(folder / "new.csv", index=False)
    code, out, err = anyk("predict", folder / "run", folder / "new.csv", "--k", 2)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and len(rows) == 6 and rows[0].keys() == {"file", "row", "rank", "class", "probability"} and err == ""
    code, _, _ = anyk("predict", folder / "run", folder / "new.csv", "--json", "-o", folder / "out.json")
    assert code == 0 and len(json.loads((folder / "out.json").read_text())) == 3
    code, _, err = anyk("predict", folder / "run", folder / "new.csv", "--json", "-o", folder / "out.json")
    assert code == 2 and "--force" in err
    code, _, err = anyk("predict", folder / "run", folder / "nowhere.csv")
    assert code == 1 and "does not exist" in err
