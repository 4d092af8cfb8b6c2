import numpy as np
import pytest
import torch
from scipy import sparse

from anyk.lab.config import DataFields
from anyk.lab.data import readers
from anyk.lab.data.prepare import open_prepared, prepare
from anyk.lab.errors import LabError

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
y = np.arange(60) % 3
IMAGES = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)


def get(data, folder, **fields):
    return prepare(data, DataFields(**fields), folder)


def test_arrays_mappings_and_datasets_are_alike(tmp_path):
    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return len(X)

        def __getitem__(self, place):
            return torch.from_numpy(X[place]), int(y[place])

    both = (get((X, y), tmp_path), get({"X": X, "y": torch.from_numpy(y)}, tmp_path / "b"), get(Own(), tmp_path / "c"))
    for one in both:
        assert np.array_equal(one.examples.parts[0], X) and one.labels.tolist() == y.tolist()
        assert one.split.test.equal(both[0].split.test)


def test_a_test_set_of_its_own(tmp_path):
    found = get((X[:40], y[:40], X[40:], y[40:]), tmp_path)
    assert found.split.test.tolist() == list(range(40, 60)) and "own" in found.how_split


def test_files_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", X=X, y=y)
    np.savez(tmp_path / "m.npz", train_images=IMAGES[:30], train_labels=y[:30, None], val_images=IMAGES[30:45], val_labels=y[30:45, None],
             test_images=IMAGES[45:], test_labels=y[45:, None])  # fmt: skip
    np.save(tmp_path / "n.npy", X)
    np.save(tmp_path / "n_labels.npy", y)
    torch.save({"X": torch.from_numpy(X), "y": torch.from_numpy(y)}, tmp_path / "t.pt")
    for name in ("a.npz", "n.npy", "t.pt"):
        assert np.array_equal(get(str(tmp_path / name), tmp_path / name[0]).examples.parts[0], X)
    medmnist = get(str(tmp_path / "m.npz"), tmp_path / "m")
    assert medmnist.shape == (3, 8, 8) and len(medmnist.split.validation) == 15 and len(medmnist.split.test) == 15


def test_groups_and_times_in_memory(tmp_path):
    found = get({"X": X, "y": y, "groups": [f"u{i // 2}" for i in range(60)]}, tmp_path)
    sets = [set(found.groups[part].tolist()) for part in (found.split.train, found.split.validation, found.split.test)]
    assert not sets[0] & sets[2] and not sets[1] & sets[2] and not sets[0] & sets[1]
    again = found.split_again(7)
    assert not set(found.groups[again.train].tolist()) & set(found.groups[again.validation].tolist())
    assert again.test.equal(found.split.test) and not again.validation.equal(found.split.validation)
    timed = get({"X": X, "y": y, "times": np.arange(60)[::-1]}, tmp_path / "t")
    assert timed.split.test.tolist() == list(range(12)) and timed.split_again(3).validation.equal(timed.split.validation)


def test_images_resized_and_standardised_by_the_training_part(tmp_path):
    found = get((IMAGES, y), tmp_path, image_size=4)
    assert found.shape == (3, 4, 4) and found.examples.take(torch.tensor([0])).dtype == torch.uint8
    train = found.examples.take(found.split.train).double() / 255
    assert torch.allclose(found.mean.double(), train.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(found.std.double(), train.transpose(0, 1).flatten(1).std(1, correction=0), atol=1e-6)


def test_the_data_are_read_once(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", X=X, y=y)
    first = get(str(tmp_path / "a.npz"), tmp_path)
    monkeypatch.setattr(readers, "read", None)
    assert get(str(tmp_path / "a.npz"), tmp_path).fingerprint == first.fingerprint == open_prepared(first.folder).fingerprint
    with pytest.raises(TypeError):
        get(str(tmp_path / "a.npz"), tmp_path, split_seed=5)


def test_wrong_labels_are_for_training_and_validation_alone(tmp_path):
    found = get((X.repeat(20, 0), y.repeat(20)), tmp_path, label_noise=0.5)
    noisy = found.noisy_labels(found.split)
    wrong = noisy != found.labels
    assert not wrong[found.split.test].any()
    assert 0.4 < float(wrong[found.split.train].float().mean()) < 0.6


class NotData:
    pass


BAD = {
    "sparse": (lambda: (sparse.csr_matrix(X), y), "sparse"),
    "texts": (lambda: (np.array([["a", "b"]] * 60), y), "should hold numbers"),
    "lengths": (lambda: (X, y[:10]), "10 labels"),
    "fractions": (lambda: (X, y + 0.5), "fraction"),
    "negative": (lambda: (X, y - 1), "negative"),
    "one class": (lambda: (X, 0 * y), "one class"),
    "shape": (lambda: (X[0], y), "features"),
    "nan": (lambda: (np.where(X > 1, np.nan, X), y), "NaN"),
    "float images": (lambda: (IMAGES / 7.0, y), "uint8"),
    "an object": (lambda: NotData(), "NotData"),
    "three": (lambda: (X, y, X), "tuple of 3"),
    "unknown key": (lambda: {"X": X, "y": y, "labelss": y}, "labelss"),
    "no y": (lambda: {"X": X}, "no y"),
    "groups": (lambda: {"X": X, "y": y, "groups": [1, 2]}, "groups"),
    "a path": (lambda: "nowhere.csv", "does not exist"),
    "a word": (lambda: "glyphs:x", "number of classes"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_data_gets_a_line(tmp_path, name):
    make, says = BAD[name]
    with pytest.raises(LabError, match=says):
        get(make(), tmp_path)
    assert not any((tmp_path / "data").glob("*")) if (tmp_path / "data").exists() else True


def test_whole_numbers_that_look_like_tokens_are_told(tmp_path):
    found = get((np.random.default_rng(0).integers(0, 5000, (60, 4)), y), tmp_path)
    assert any("token ids" in one for one in found.remarks)


@pytest.mark.parametrize("name", ["a.pkl", "a.p", "notes.txt", "a.doc"])
def test_files_of_other_kinds_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"hello")
    with pytest.raises(LabError, match=r"own-data|another kind|text"):
        get(str(tmp_path / name), tmp_path)


def test_hostile_files_are_refused_and_run_nothing(tmp_path):
    import pickle
    import zipfile

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    torch.save({"X": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "evil.npz").write_bytes(b"PK\x03\x04 nonsense")
    with zipfile.ZipFile(tmp_path / "objects.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + pickle.dumps(Evil()))
    for name in ("evil.pt", "evil.npz", "objects.npz"):
        with pytest.raises(LabError):
            get(str(tmp_path / name), tmp_path / "o")
    assert not (tmp_path / "pwned").exists()


def test_options_of_tables_are_refused_for_arrays(tmp_path):
    with pytest.raises(LabError, match="--group-column is for a table"):
        get((X, y), tmp_path, group_column="a")
