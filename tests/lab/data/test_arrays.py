"""Array files: every form that people have, labels of every kind, and pickles that try to run something."""

import csv
import io
import json
import os
import pickle

import numpy as np
import pytest
import torch

from anyk.lab.data import arrays, embeddings, tables
from anyk.lab.errors import LabError

X = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
Y = np.array([0, 1, 2, 3] * 2)
T = X[:4] + 1


def same(dataset, x=X, y=Y):
    assert torch.equal(dataset.train.parts[0], torch.from_numpy(np.asarray(x)))
    assert dataset.train.labels.tolist() == list(y)
    assert dataset.train.labels.dtype == torch.int64


# --- .npz and .npy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [("x", "y"), ("embeddings", "labels"), ("X_train", "y_train"), ("trainFeatures", "trainLabels"), ("data", "target")],
)
def test_npz(tmp_path, names):
    np.savez(tmp_path / "a.npz", **dict(zip(names, (X, Y), strict=True)))
    dataset = arrays.read(tmp_path / "a.npz")
    same(dataset)
    assert (dataset.name, dataset.kind, dataset.classes, dataset.test) == ("a", "embeddings", ("0", "1", "2", "3"), None)


def test_npz_with_a_test_and_class_names(tmp_path):
    names = np.array(["ant", "bee", "cat", "dog"])
    np.savez_compressed(tmp_path / "a.npz", X_train=X, y_train=Y, X_test=T, y_test=Y[:4], classes=names)
    dataset = arrays.read(tmp_path / "a.npz")
    same(dataset)
    assert torch.equal(dataset.test.parts[0], torch.from_numpy(T))
    assert dataset.classes == ("ant", "bee", "cat", "dog")


def test_groups_of_examples_that_belong_together(tmp_path):
    users = np.array(["b", "a", "b", "c", "c", "c", "a", "a"])
    np.savez(tmp_path / "a.npz", X_train=X, y_train=Y, X_test=T, y_test=Y[:4], groups_train=users, test_groups=[7, 7, 0, 3])
    dataset = arrays.read(tmp_path / "a.npz")
    same(dataset)
    assert dataset.train.groups.tolist() == [1, 0, 1, 2, 2, 2, 0, 0]
    assert dataset.test.groups.tolist() == [2, 2, 0, 1]
    assert dataset.test.groups.dtype == torch.int64
    np.savez(tmp_path / "a.npz", X_train=X, y_train=Y, X_test=T, y_test=Y[:4], groups_train=users, test_groups=[7, 7, 0, 0])
    assert arrays.read(tmp_path / "a.npz").fingerprint != dataset.fingerprint
    imported = embeddings.read(arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set"))
    assert imported.train.groups.tolist() == dataset.train.groups.tolist()
    for groups, message in ((users[:3], r"groups in .*a.npz should have the shape \(8,\)"), (X[:, 0], "integers or texts")):
        np.savez(tmp_path / "a.npz", x=X, y=Y, groups=groups)
        with pytest.raises(LabError, match=message):
            arrays.read(tmp_path / "a.npz")


@pytest.mark.parametrize("place", [0, 2, 4])
def test_groups_in_a_column(tmp_path, place):
    users = ["b", "a", "b", "c", "c", "c", "a", "a"]
    rows = [[*map(str, x), str(y)] for x, y in zip(X, Y, strict=True)]
    lines = [["one", "two", "three", "kind"], *rows]
    for line, user in zip(lines, ["groups", *users], strict=True):
        line.insert(place, user)
    (tmp_path / "a.csv").write_text("\n".join(map(",".join, lines)))
    dataset = arrays.read(tmp_path / "a.csv", tables.Options("kind"))
    same(dataset)
    assert dataset.train.groups.tolist() == [1, 0, 1, 2, 2, 2, 0, 0]


def test_validation_examples_are_the_test_where_there_is_no_other(tmp_path):
    notes = []
    np.savez(tmp_path / "a.npz", X_train=X, y_train=Y, X_val=T, y_val=Y[:4])
    assert len(arrays.read(tmp_path / "a.npz").test) == 4
    np.savez(tmp_path / "a.npz", X_train=X, y_train=Y, X_val=T, y_val=Y[:4], X_test=X, y_test=Y)
    arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", note=notes.append)
    assert notes == ["the examples called val were left out: those called test are the test"]
    assert len(embeddings.read(tmp_path / "set").test) == 8


def test_npy_pairs(tmp_path):
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(LabError, match=r"a.npy needs its labels: give a second .npy file, or name it a_labels.npy"):
        arrays.read(tmp_path / "a.npy")
    np.save(tmp_path / "other.npy", Y)
    same(embeddings.read(arrays.import_file(tmp_path / "a.npy", tmp_path / "other.npy", out=tmp_path / "set")))
    np.save(tmp_path / "a_labels.npy", Y)
    same(arrays.read(tmp_path / "a.npy"))
    with pytest.raises(LabError, match=r"only a pair of .npy files takes two paths"):
        arrays.import_file(tmp_path / "a.npy", tmp_path / "other.npy", tmp_path / "third.npy", out=tmp_path / "set2")


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "f2", "u1", "u2", "i8", "?"])
def test_dtypes(tmp_path, dtype):
    x = (np.arange(24).reshape(8, 3) % 5).astype(dtype)
    np.savez(tmp_path / "a.npz", x=x, y=Y)
    dataset = arrays.read(tmp_path / "a.npz")
    assert dataset.train.parts[0].dtype == (torch.float16 if dtype == "f2" else torch.float32)
    assert dataset.train.parts[0].tolist() == x.astype(float).tolist()


def test_import_says_what_it_converts(tmp_path):
    np.savez(tmp_path / "a.npz", x=X.astype(np.float64), y=Y)
    notes = []
    arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", name="mine", note=notes.append)
    assert notes == ["float64 was converted to float32"]
    assert json.loads((tmp_path / "set" / "dataset.json").read_text())["notes"] == notes
    dataset = embeddings.read(tmp_path / "set")
    same(dataset)
    assert dataset.name == "mine"
    arrays.import_file(tmp_path / "a.npz", out=tmp_path / "half", half=True)
    assert embeddings.read(tmp_path / "half").train.parts[0].dtype == torch.float16


@pytest.mark.parametrize(
    ("factor", "half", "message"),
    [
        (1e38, False, r"beyond 3.40282e\+38, the largest of float32: scale the embeddings down\.$"),
        (1e38, True, r"beyond 65504, the largest of float16: scale the embeddings down\.$"),
        (1e5, True, r"beyond 65504, the largest of float16: store float32"),
    ],
)
def test_values_too_large_for_what_is_stored(tmp_path, factor, half, message):
    np.savez(tmp_path / "a.npz", x=4 * factor * X.astype(np.float64), y=Y)
    with pytest.raises(LabError, match=message):
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", half=half)


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "classes", "numbers"),
    [
        ([1, 2, 3, 4] * 2, ("1", "2", "3", "4"), [0, 1, 2, 3] * 2),
        (["-1", "1"] * 4, ("-1", "1"), [0, 1] * 4),
        ([7, 900_000_000_000] * 4, ("7", "900000000000"), [0, 1] * 4),
        ([0, 900_000_000_000] * 4, ("0", "900000000000"), [0, 1] * 4),  # counting up to it would fill the memory
        ([0.0, 1.0] * 4, ("0", "1"), [0, 1] * 4),
        ([True, False] * 4, ("0", "1"), [1, 0] * 4),
        (["9", "10"] * 4, ("9", "10"), [0, 1] * 4),
        (["09", "10"] * 4, ("09", "10"), [0, 1] * 4),
        (["dog", "ant"] * 4, ("ant", "dog"), [1, 0] * 4),
        ([b"dog", b"ant"] * 4, ("ant", "dog"), [1, 0] * 4),
        ([[3], [1]] * 4, ("1", "3"), [1, 0] * 4),
    ],
)
def test_labels_of_every_kind(tmp_path, given, classes, numbers):
    np.savez(tmp_path / "a.npz", x=X, y=np.asarray(given))
    dataset = arrays.read(tmp_path / "a.npz")
    assert dataset.classes == classes
    same(dataset, y=numbers)


@pytest.mark.parametrize("text", ["dog\nant\n\n", '["dog", "ant"]'])
def test_class_names_from_a_file(tmp_path, text):
    (tmp_path / "names").write_text(text)
    for labels in ([0, 1] * 4, ["dog", "ant"] * 4):
        np.savez(tmp_path / "a.npz", x=X, y=np.asarray(labels))
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", classes_file=tmp_path / "names", force=True)
        dataset = embeddings.read(tmp_path / "set")
        assert dataset.classes == ("dog", "ant")
        same(dataset, y=[0, 1] * 4)


def test_labels_that_do_not_fit_the_names(tmp_path):
    (tmp_path / "names").write_text("dog\nant\nbee")
    np.savez(tmp_path / "a.npz", x=X, y=np.asarray(["dog", "elk"] * 4))
    with pytest.raises(LabError, match=r"a.npz has the label 'elk' in train, which no class name has"):
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", classes_file=tmp_path / "names")
    np.savez(tmp_path / "a.npz", x=X, y=np.asarray([0, 1] * 4))
    with pytest.raises(LabError, match=r"a.npz has no training example of class 2 \(bee\)"):
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", classes_file=tmp_path / "names")
    (tmp_path / "names").write_text("\n")
    with pytest.raises(LabError, match=r"names has no class names"):
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", classes_file=tmp_path / "names")
    assert not (tmp_path / "set").exists()


def test_a_test_in_another_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=np.asarray(["b", "a"] * 4))
    np.savez(tmp_path / "b.npz", x=T, y=np.asarray(["a", "b"] * 2))
    arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", test=tmp_path / "b.npz")
    assert embeddings.read(tmp_path / "set").test.labels.tolist() == [0, 1] * 2
    np.savez(tmp_path / "b.npz", x=T, y=np.asarray(["a", "z"] * 2))
    with pytest.raises(LabError, match=r"the label 'z' in test, which no training example has"):
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set2", test=tmp_path / "b.npz")


# --- .csv -------------------------------------------------------------------------------------------------------------


def write_csv(path, header, rows, delimiter=",", encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(([header] if header else []) + rows)


ROWS = [[*map(repr, map(float, x)), "abcd"[y]] for x, y in zip(X, Y, strict=True)]


@pytest.mark.parametrize("header", [None, ["one", "two", "three", "label"], ["0", "1", "2", "label"]])
@pytest.mark.parametrize(("delimiter", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-8")])
def test_csv(tmp_path, header, delimiter, encoding):
    write_csv(tmp_path / "a.csv", header, ROWS, delimiter, encoding)
    dataset = arrays.read(tmp_path / "a.csv")
    same(dataset)
    assert dataset.classes == ("a", "b", "c", "d")


def test_csv_with_a_named_label_and_quotes(tmp_path):
    write_csv(tmp_path / "a.csv", ["kind", "x", "y", "z"], [['a, "b"' if row[3] == "a" else row[3], *row[:3]] for row in ROWS])
    arrays.import_file(tmp_path / "a.csv", out=tmp_path / "set", label_column="kind")
    dataset = embeddings.read(tmp_path / "set")
    same(dataset)
    assert dataset.classes[0] == 'a, "b"'
    with pytest.raises(LabError, match=r"a.csv has no column 'sort': its columns are, the likeliest first, kind, x, y, z\."):
        arrays.import_file(tmp_path / "a.csv", out=tmp_path / "set2", label_column="sort")
    with pytest.raises(LabError, match=r"column 'z' of .*a.csv was taken for the labels, .*; the others are kind, x, y\."):
        arrays.read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a.csv is empty"),
        ("x,y,label\n", r"a.csv has no rows of numbers"),
        ("1,2,a\n1,a\n", r"a.csv has 2 cells in line 2, but 3 before"),
        ("1,nan,a\n1,2,a\n", r"a.csv has no value in column '2', line 1: fill it in"),
        ("1\n2\n", r"a.csv has one column only"),
        (b"1,2,\xff\n", r"a.csv is not text in columns"),
        ("1,2,a\n1,3,\n1,4,a\n1,5, \n", r"a.csv has 2 examples with an empty label \(the first: line 2\): remove them"),
        ("1,2,0\n1,3,-1\n1,4,0\n", r'a.csv has 1 example with a negative label, .* "no label" \(the first: line 2\)'),
        ("k,x,y\n1,2,.25\n0,3,.25\n", r"column 'y' of .*a.csv was taken .* fraction, such as .25: .*--label-column; .* k, x\."),
        ("1,2,.25\n0,3,.25\n", r"last column of .*a.csv was taken .*--label-column; after a line of titles"),
        ("k,x,id\n0,2,9\n0,3,8\n", r"column 'id' of .* but has no value twice: name .*--label-column; the others are k, x\."),
    ],
)
def test_bad_csv(tmp_path, text, message):
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LabError, match=message):
        arrays.read(tmp_path / "a.csv", tables.Options(missing="refuse"))


def test_csv_labels_that_look_odd_and_are_meant(tmp_path):
    (tmp_path / "a.csv").write_text("1,2,1.0\n1,3,2.0\n1,4,1.0\n1,5,none-1\n")
    assert arrays.read(tmp_path / "a.csv").classes == ("1.0", "2.0", "none-1")
    (tmp_path / "b.csv").write_text("1,2,2.0\n1,3,1.0\n")  # one of each is enough for a test
    arrays.import_file(tmp_path / "a.csv", out=tmp_path / "set", test=tmp_path / "b.csv")
    assert embeddings.read(tmp_path / "set").test.labels.tolist() == [1, 0]


# --- torch and pickle -------------------------------------------------------------------------------------------------

TENSORS = (torch.from_numpy(X), torch.from_numpy(Y))
OFFICIAL = {
    "ImageNet-1K": ["train_embeddings", "train_labels", "test_embeddings", "test_labels"],
    "EfficientNet-L2": ["train_embeddings", "train_labels", "val_embeddings", "val_labels"],
    "ImageNet21K-P": [f"imagenet21k_{n}" for n in ("train_embeddings", "train_labels", "val_embeddings", "val_labels")],
}


@pytest.mark.parametrize("form", OFFICIAL)
@pytest.mark.parametrize("zipped", [True, False])
def test_the_official_embeddings(tmp_path, form, zipped):
    values = (*TENSORS, torch.from_numpy(T), TENSORS[1][:4])
    torch.save(dict(zip(OFFICIAL[form], values, strict=True)), tmp_path / "a.p", _use_new_zipfile_serialization=zipped)
    arrays.import_file(tmp_path / "a.p", out=tmp_path / "set")
    dataset = embeddings.read(tmp_path / "set")
    same(dataset)
    assert torch.equal(dataset.test.parts[0], torch.from_numpy(T))
    same(arrays.read(tmp_path / "a.p"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "tree",
    [
        {"embeddings": X, "labels": Y},
        {"embeddings": np.asfortranarray(X), "labels": list(Y)},
        {"embeddings": X.astype(">f4"), "labels": np.array(list("abcd") * 2, dtype=object)},
        {"x": X.tolist(), "y": np.array(list("abcd") * 2)},
        {"train": {"x": TENSORS[0], "y": TENSORS[1]}, "test": {"x": T, "y": Y[:4]}},
        {"features": list(TENSORS[0]), "labels": list(TENSORS[1])},
        TENSORS,
        [X, Y, T, Y[:4]],
        ((X, Y), (T, Y[:4])),
    ],
    ids=range(9),
)
def test_plain_pickles(tmp_path, tree, protocol):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(tree, protocol=protocol))
    same(arrays.read(tmp_path / "a.pkl"))


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "write",
    [
        lambda tree, path: path.write_bytes(pickle.dumps(tree)),
        lambda tree, path: path.write_bytes(pickle.dumps(tree, protocol=0)),
        lambda tree, path: torch.save(tree, path),
        lambda tree, path: torch.save(tree, path, _use_new_zipfile_serialization=False),
        lambda tree, path: np.savez(path.with_suffix(".npz"), x=X, y=np.array([tree], dtype=object)),
    ],
    ids=["pickle", "protocol 0", "torch", "old torch", "npz"],
)
@pytest.mark.parametrize("function", [os.mkdir, eval], ids=lambda f: f.__name__)
def test_nothing_in_a_file_is_run(tmp_path, write, function):
    harm = tmp_path / "harm"
    argument = str(harm) if function is os.mkdir else f"__import__('os').mkdir({str(harm)!r})"
    write({"x": X, "y": Runs(function, argument)}, tmp_path / "a.p")
    (path,) = tmp_path.iterdir()
    with pytest.raises(LabError, match=r"which is not data: nothing was run|numpy strings, not objects"):
        arrays.read(path)
    assert not harm.exists()


def _storage_pickle(harm):
    """A tensor whose storage is a pickle of its own: torch's function for it would run what is inside."""
    inner = io.BytesIO()
    torch.save(Runs(os.mkdir, harm), inner, _use_new_zipfile_serialization=False)
    return {"x": Runs(torch.storage._load_from_bytes, inner.getvalue()), "y": Y}


def test_a_pickle_in_a_pickle_is_not_run(tmp_path):
    (tmp_path / "a.p").write_bytes(pickle.dumps(_storage_pickle(str(tmp_path / "harm"))))
    with pytest.raises(LabError, match=r"which is not data"):
        arrays.read(tmp_path / "a.p")
    assert not (tmp_path / "harm").exists()


def test_dtypes_with_pointers_are_refused(tmp_path):
    """An array of objects made from raw bytes would hand out pointers of the file's choice."""
    objects = b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI63\ntb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
    make = array + b"(I1\n(I1\nt" + objects + b"I00\nS'12345678'\ntb."
    (tmp_path / "a.p").write_bytes(make)
    with pytest.raises(LabError, match=r"an array of objects, which is not data"):
        arrays.read(tmp_path / "a.p")


@pytest.mark.parametrize("kind", ["pickle", "torch", "npz"])
def test_damaged_files_never_give_a_traceback(tmp_path, kind):
    path = tmp_path / {"pickle": "a.p", "torch": "a.pt", "npz": "a.npz"}[kind]
    tree = {"x": X, "y": Y}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(tree))
    elif kind == "torch":
        torch.save(dict(zip("xy", TENSORS, strict=True)), path)
    else:
        np.savez(path, **tree)
    whole = path.read_bytes()
    places = np.linspace(0, len(whole) - 1, 60, dtype=int)
    changed = [whole[:place] for place in places]
    changed += [whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :] for place in places]
    refused = []
    for content in changed:
        path.write_bytes(content)
        try:
            arrays.read(path)
        except LabError as error:
            refused.append(str(error))
    assert len(refused) >= 60
    assert not any("\n" in message for message in refused)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": X, "b": Y}, r"has no embeddings and labels for train \(it has a, b\): name the arrays x and y"),
        ({"x": X, "y": Y, "x_test": T}, r"has no labels for test \(it has x, y, x_test\)"),
        ({"x": X, "embeddings": X, "y": Y}, r"has x and embeddings: keep one array of embeddings for train"),
        ({"x": X, "y": Y[:5]}, r"has 8 embeddings, but labels of shape \(5,\)"),
        ({"x": X[:, :, None], "y": Y}, r"should have the shape \(examples, dimensions\), but have \(8, 3, 1\)"),
        (
            {"x": X, "y": Y - 1},
            r'has 2 examples with a negative label, .* "no label" \(the first: row 0\): number .* or remove them',
        ),
        ({"x": X, "y": np.where(np.arange(8) == 5, "", "a")}, r"has 1 example with an empty label \(the first: row 5\)"),
        ({"x": X, "y": Y.astype(complex)}, r"should be integers or texts, but are complex128"),
        ({"x": np.full((8, 3), "a"), "y": Y}, r"should be numbers, but are <U1"),
        (
            {"x": np.where(X > 1, np.inf, X), "y": Y},
            r"has the value inf in row \d, column \d \(from 0\): fill it in, or remove such rows",
        ),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, tree, message):
    np.savez(tmp_path / "a.npz", **tree)
    with pytest.raises(LabError, match=rf"a.npz.*{message}|^.*{message}"):
        arrays.read(tmp_path / "a.npz")


def test_other_files(tmp_path):
    with pytest.raises(LabError, match=r"none.npz is not a file"):
        arrays.read(tmp_path / "none.npz")
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(LabError, match=r"a.xlsx has an unknown format"):
        arrays.read(tmp_path / "a.xlsx")
    (tmp_path / "a.p").write_bytes(pickle.dumps(3))
    with pytest.raises(LabError, match=r"a.p holds a int"):
        arrays.read(tmp_path / "a.p")
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    with pytest.raises(
        LabError,
        match=r"a.npz has no columns with names: a label column and the like go with a table \(\.csv, \.tsv, \.parquet",
    ):
        arrays.import_file(tmp_path / "a.npz", out=tmp_path / "set", label_column="y")


def test_fingerprint_follows_the_content(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    np.savez_compressed(tmp_path / "b.npz", embeddings=X, labels=Y)
    np.savez(tmp_path / "c.npz", x=X, y=Y[::-1])
    a, b, c = (arrays.read(tmp_path / f"{name}.npz").fingerprint for name in "abc")
    assert a == b != c
