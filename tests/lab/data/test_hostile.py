"""Files that claim more than they hold, unpack to more than they should, or are made to fill the memory: each is refused in a
line. `hostile.py` makes them, and `benchmarks/fuzz.py` looks for more."""

import io
import json
import pickle
import re
import resource
import struct
import warnings
import zipfile
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file
from torch import nn

import hostile
from anyk.lab import data, files, warn_once
from anyk.lab.data import arrays, cifar, completion, image_folders, images, labels, pickles, sets, untrusted
from anyk.lab.errors import LabError
from anyk.lab.run import losses, models
from anyk.lab.run.config import Config
from anyk.lab.run.run_folder import Run
from hostile import DEEP, X, Y

CASES = {
    "npz": (hostile.npz_files(12), arrays.read),
    "npy": (hostile.npy_files(), arrays.read),
    "pickle": (hostile.pickle_files(), arrays.read),
    "torch": (hostile.torch_files(12), arrays.read),
}


@pytest.fixture
def little(monkeypatch):
    """A megabyte is much to unpack to: bombs are made faster."""
    monkeypatch.setattr(untrusted, "FREE", 1 << 20)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (made, _) in CASES.items() for name in made])
def test_refused_in_a_line(tmp_path, little, kind, name):
    (contents, message), read = CASES[kind][0][name], CASES[kind][1]
    for file, content in contents.items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(LabError, match=message) as caught:
        read(tmp_path / next(iter(contents)))
    assert next(iter(contents)) in str(caught.value)
    assert len(str(caught.value)) < 2000


# --- .npz and .csv ----------------------------------------------------------------------------------------------------


def test_a_file_may_unpack_to_a_hundred_times_its_size(tmp_path, little):
    path = tmp_path / "a.npz"
    path.write_bytes(hostile.npz_files(12)["bomb"][0]["data.npz"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("rest", bytes(1 << 18))  # stored as it is, which makes the whole a hundredth of what it unpacks to
    assert arrays._read_numpy(path)["x"].shape == (2**20, 3)


def test_one_long_label_is_not_as_long_for_all(tmp_path):
    rows = "".join(f"{row},1,{'ab'[row % 2]}\n" for row in range(10_000))
    (tmp_path / "a.csv").write_text(rows + f"1,1,{'c' * 100_000}\n")  # in an array of texts, 4 GB
    assert arrays.read(tmp_path / "a.csv").classes == ("a", "b", "c" * 100_000)
    tree = {"x": np.zeros((10_001, 1)), "y": ["a", "b"] * 5_000 + ["c" * 100_000]}
    (tmp_path / "a.p").write_bytes(pickle.dumps(tree))
    assert len(arrays.read(tmp_path / "a.p").classes) == 3


# --- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", hostile.MEMO)
def test_a_number_to_remember_by_is_only_a_name(tmp_path, piece):
    """The unpickler in C would make room for as many things as it says, which is 64 GB."""
    whole = pickle.dumps({"x": X, "y": Y}, protocol=2)
    (tmp_path / "a.p").write_bytes(whole[:2] + b"N" + piece + b"0" + whole[2:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(arrays.read(tmp_path / "a.p").train) == 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_a_long_name_is_not_repeated_for_all_below_it(tmp_path):
    for below in ({"k" * 100_000: dict.fromkeys(range(1000))}, {"k" * 200: {"k" * 200: dict.fromkeys(range(1000))}}):
        (tmp_path / "a.p").write_bytes(pickle.dumps({"x": X, "y": Y, "about": below}))
        assert len(arrays.read(tmp_path / "a.p").train) == 8
        assert len(list(arrays._flatten(below))) == 1
    (tmp_path / "a.p").write_bytes(pickle.dumps({"sets": {"train": {"x": X, "y": Y}}}))
    assert len(arrays.read(tmp_path / "a.p").train) == 8


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ([1.5, 2], ("1.5", "2.0")),
        ([7, -(2**63)], ("7", str(-(2**63)))),
        ([b"a", "b"], ("a", "b")),
        ([True, False], ("True", "False")),
    ],
)
def test_class_names_that_are_no_texts(tmp_path, classes, names):
    (tmp_path / "a.p").write_bytes(pickle.dumps({"x": X, "y": Y, "classes": classes}))
    assert arrays.read(tmp_path / "a.p").classes == names


@pytest.mark.parametrize("name", ["many sets of one list", "many arrays of one list"])
def test_one_list_of_which_many_things_are_made(name, monkeypatch):
    made, new = [], pickles._Making._new
    monkeypatch.setattr(pickles._Making, "_new", lambda self, value: made.append(1) or new(self, value))
    with pytest.raises(ValueError, match="unfolds to more than"):
        pickles.load(hostile.pickle_files()[name][0]["data.p"])
    assert len(made) < 3000


def test_objects_that_are_short_in_the_file():
    """Labels in an array of objects take two bytes there, and eight in memory."""
    labels = np.array(["a", "b"] * 400_000, dtype=object)
    assert pickles.load(pickle.dumps(labels)) == labels.tolist()


def test_a_tensor_of_many_dimensions(tmp_path):
    note = pickles._Tensor(pickles._Storage(torch.zeros(4, dtype=torch.uint8), torch.uint8), 0, (1,) * 65, (1,) * 65)
    with pytest.raises(ValueError, match=r"a tensor of 65 dimensions"):
        pickles._Making(100).made(note)


def test_a_storage_that_is_read_again_and_again():
    out = io.BytesIO()
    torch.save(torch.zeros(50_000, dtype=torch.uint8).untyped_storage(), out, _use_new_zipfile_serialization=False)
    held = out.getvalue()
    content = b"\x80\x03B" + struct.pack("<I", len(held)) + held + b"q\x000"
    content += b"](" + b"ctorch.storage\n_load_from_bytes\nh\x00\x85R" * 1000 + b"e."
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        inner = pickles._of_old_torch
        patch.setattr(pickles, "_of_old_torch", lambda of: calls.append(1) or inner(of))
        with pytest.raises(ValueError, match=r"unfolds to more than"):
            pickles.load(content)
    assert len(calls) < 15  # each counts twice: as what is read, and as what is made of it


@pytest.mark.parametrize("frozen", [dict, set, frozenset])
def test_numbers_that_get_into_each_other_s_way_as_keys(frozen):
    """Python's hash of an integer is the rest after a division by 2^61 - 1."""
    keys = [n * (2**61 - 1) for n in range(20)]
    tree = dict.fromkeys(keys) if frozen is dict else frozen(keys)
    with pytest.raises(pickles.NotDataError, match=r"an integer beyond 64 bits as a key"):
        pickles.load(pickle.dumps(tree, 4))
    assert pickles.load(pickle.dumps({2**63: 1, -(2**63): 2})) == {2**63: 1, -(2**63): 2}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_are_as_python_reads_them(protocol):
    trees = [{"a": [1, 2.5, "text", None, True, 10**30, -1], "b": ["é" * 300] * 3}, list(range(5000)), {1: {2: {}}}, "x"]
    trees += [[str(number) for number in range(1000)] * 2, {b"k": [b"bytes", 0], 2.5: None}, [bytearray(b"9")]]
    for tree in trees:
        assert pickles.load(pickle.dumps(tree, protocol)) == tree
    content = pickle.dumps(trees[0], protocol)
    for cut in range(len(content) - 1):
        with pytest.raises((EOFError, pickle.UnpicklingError, ValueError, IndexError)):
            pickles.load(content[:cut])


# --- torch ------------------------------------------------------------------------------------------------------------


def same(found, wanted):
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted.detach())
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_are_read_as_torch_reads_them(tmp_path, zipped):
    numbers = torch.arange(24).view(4, 6)
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    kinds += [torch.uint16] if zipped else []  # of which torch itself does not read the old files
    tree = {
        "kinds": [numbers.to(dtype) for dtype in kinds],
        "views": (numbers.T, numbers[1:3, ::2], numbers[:0], numbers[2, 3]),
        "model": nn.Linear(3, 2).state_dict(),  # an OrderedDict with an attribute
        "parameter": nn.Parameter(torch.ones(2)),
        "plain": {"a": None, "b": [1, 2.5, True, "text"], "size": numbers.shape},
    }
    torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    wanted = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(pickles.read(tmp_path / "a.pt"), wanted)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_stands_beside_the_tensors_in_files_of_torch(tmp_path, zipped):
    about = {"dtypes": [torch.float32, torch.bool, torch.complex64], "set": {1, "a", None}, "none": set()}
    about |= {"counts": Counter("abba"), "size": torch.Size([2, 3])}
    devices = {"device": [torch.device("cpu"), torch.device("cuda", 1)]}
    torch.save(
        about | devices | {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)},
        tmp_path / "a.pt",
        _use_new_zipfile_serialization=zipped,
    )
    assert len(arrays.read(tmp_path / "a.pt").train) == 8
    found = pickles.read(tmp_path / "a.pt")
    assert {name: found[name] for name in about} == about | {"size": [2, 3]}
    assert found["device"] == ["cpu", "cuda"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_in_any_order_of_their_axes(protocol):
    plain = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    for array in (plain, plain.transpose(0, 2, 3, 1), plain.transpose(3, 1, 0, 2), plain.T, plain[:, ::2], plain[:0]):
        found = pickles.load(pickle.dumps(array, protocol))
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


# --- archives and images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bomb beside", "bomb inside", "long", "cut", "sparse"])
def test_archives_that_are_refused(tmp_path, little, name):
    sound = {path.name: path.read_bytes() for path in sorted(cifar.write_small(tmp_path / "c", 1, classes=2).iterdir())}
    contents, message = hostile.archive_files(sound, 40)[name]
    (tmp_path / "a.tar.gz").write_bytes(contents["cifar.tar.gz"])
    with pytest.raises(LabError, match=message):
        cifar.read(tmp_path / "a.tar.gz")


def test_images_that_unpack_to_more_than_they_should(tmp_path, little, monkeypatch, caplog):
    monkeypatch.setattr(images, "_FREE_PIXELS", 1_000_000)
    path = tmp_path / "a.png"
    for mode, megabytes in (("RGB", 16), ("RGBA", 16), ("L", 4), ("1", 4), ("P", 4)):
        Image.new(mode, (2000, 2000)).save(path)
        for read in (images.read_pixels, images.read_image):
            with pytest.raises(LabError, match=f"a.png would unpack to {megabytes} MB"):
                read(path)
    Image.new("RGB", (1000, 1000)).save(path)
    assert images.read_pixels(path, 8).shape == (3, 8, 8)
    for place in ("1", "2"):
        (tmp_path / "set" / place).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "set" / place / "1.png")
    Image.new("L", (2000, 2000)).save(tmp_path / "set" / "1" / "2.png")
    for _ in range(2):  # made, and from the cache
        caplog.clear()
        monkeypatch.setattr(warn_once, "_warned", set())
        image_folders.load(tmp_path / "set", size=8)
        assert re.search(r"left out \(1\): \S+2\.png \(would unpack to 4 MB, .*save it unpacked\.\)$", caplog.messages[0])


def test_scans_and_smooth_photographs_are_read(tmp_path):
    """A white page at 600 dpi is a small file, and so is a photograph of the sky."""
    Image.new("1", (4960, 7016), 1).save(tmp_path / "a.tif", compression="group4")
    Image.new("RGB", (6000, 4000), "skyblue").save(tmp_path / "a.jpg")
    for name in ("a.tif", "a.jpg"):
        assert images.read_image(tmp_path / name).size in ((4960, 7016), (6000, 4000))
        assert images.read_pixels(tmp_path / name, 8).shape == (3, 8, 8)


@pytest.mark.parametrize("name", hostile.image_files())
def test_no_images(tmp_path, monkeypatch, name):
    """Pillow would start Ghostscript for a program, and open anything in an envelope, whatever the name says."""
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1) or Image.core.new("RGB", (9, 9)))
    contents, message = hostile.image_files()[name]
    assert Image.open(io.BytesIO(contents["1.png"])).format in ("EPS", "IPTC", "ICO")
    (tmp_path / "a.png").write_bytes(contents["1.png"])
    for read in (images.read_pixels, images.read_image):
        with pytest.raises(OSError, match=message):
            read(tmp_path / "a.png")
    assert not started


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_images_are_what_they_are_whatever_their_name(tmp_path, kind):
    if kind in ("AVIF", "WEBP", "JPEG2000") and kind not in Image.SAVE:
        pytest.skip("this Pillow does not have it")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.jpg", kind)
    assert images.read_pixels(tmp_path / "a.jpg", 8).float().mean((1, 2)).tolist() == pytest.approx([255, 0, 0], abs=3)


# --- descriptions -----------------------------------------------------------------------------------------------------


def test_json_that_no_program_wrote(tmp_path):
    for text, why in ((DEEP, "nested too deeply"), ('{"a": "\\ud800"}', "surrogates not allowed"), ("[1]", "a JSON object")):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(LabError, match=why):
            files.read_object(tmp_path / "a.json", "write it again")
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(LabError, match=why):
            Run(tmp_path).config()
    for text in (DEEP, "3", '"a"'):
        (tmp_path / "metrics.jsonl").write_text(text + "\n")
        with pytest.raises(LabError, match=r"metrics.jsonl is damaged"):
            Run(tmp_path).metrics()
    (tmp_path / "p_k.json").write_text(DEEP)
    with pytest.raises(LabError, match=r"p_k_file .* nested too deeply"):
        losses.read_p_k(tmp_path / "p_k.json", 2)
    (tmp_path / "long.json").write_text("[[0.5, 0.5], [1, 1" + "0" * 400 + "]]")
    (tmp_path / "long.csv").write_text("0.5,0.5\n1," + "0" * 200_000)
    for name in ("long.json", "long.csv"):
        with pytest.raises(LabError, match=r"should hold one row of weights for each class"):
            losses.read_p_k(tmp_path / name, 2)
    with pytest.raises(LabError, match=r"cannot be read as a list of class names"):
        labels.read_names(tmp_path / "p_k.json")


def test_numbers_of_any_length_in_a_config():
    with pytest.raises(LabError, match=r"^the config: seed should be between 0 and .*, but is 1000") as caught:
        Config.from_json({"seed": 10**4000})
    assert len(str(caught.value)) < 2000
    with pytest.raises(LabError, match=r"temperature should be a number, but is 1000"):
        Config.from_json({"temperature": 10**4000})


def test_an_error_is_one_line_whatever_it_quotes():
    told = str(LabError("a\nb\ud800\x1b[31m" + "x" * 10**6 + " end."))
    assert told.startswith("a\\nb\\ud800\\x1b[31mxxx")
    assert told.endswith("xxx end.")
    assert len(told) < 1600
    assert str(LabError("é … ✓ 漢")) == "é … ✓ 漢"
    assert str(pickle.loads(pickle.dumps(LabError("a\nb")))) == "a\\nb"


@pytest.mark.parametrize(("plan", "lie", "message"), hostile.model_lies(), ids=range(len(hostile.model_lies())))
def test_a_model_file_whose_description_lies(tmp_path, plan, lie, message):
    described = json.dumps({**plan.to_json(), **lie}).replace(f'"{DEEP}"', DEEP)
    path = tmp_path / "model.safetensors"
    save_file({name: value.contiguous() for name, value in plan.build().state_dict().items()}, path, {"state": described})
    with pytest.raises(LabError, match=message):
        models.load(path)


@pytest.mark.parametrize("shape", [(1, 64, 10_000), (1, 1, 8192**2)])
def test_a_model_of_wide_images_is_read_again(tmp_path, shape):
    plan = models.Plan("resnet18", shape, ("a", "b"), hidden=4, dropout=0.0, mean=(0.5,), std=(0.2,))
    assert models.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_images_that_no_model_takes_are_refused_before_the_training():
    images = torch.zeros(1, dtype=torch.uint8).expand(4, 1, 8193, 8192)
    dataset = sets.Dataset("a", "images", ("a", "b"), sets.Split((images,), torch.arange(4) % 2), None, "", (0.5,), (0.2,))
    with pytest.raises(LabError, match=r"a has images of 8193 x 8192 pixels, but models take at most 8192 x 8192"):
        models.Plan.of(Config(model="linear"), dataset)


def test_paths_do_not_leave_their_folder(tmp_path):
    save_file({"embeddings": torch.zeros(2, 3), "labels": torch.arange(2)}, tmp_path / "train.safetensors")
    (tmp_path / "set").mkdir()
    for name in ("../train.safetensors", str(tmp_path / "train.safetensors"), "a/../../train.safetensors", "..", "x" * 300):
        described = {"name": "a", "classes": ["a", "b"], "files": [name]}
        (tmp_path / "set" / "dataset.json").write_text(json.dumps(described))
        with pytest.raises(LabError, match=r"should be a list of files in its folder|has lost"):
            data.load(str(tmp_path / "set"))


@pytest.mark.parametrize("name", ["zlib", "utf-16", "undefined"])
def test_source_in_an_encoding_that_is_none(name):
    source = f"# coding: {name}\nx = 1 \u00e9\n".encode()
    assert list(completion.python_tokens(source)) == []
    list(completion.python_tokens(source, unfinished=True))


def test_an_encoding_that_warns():
    assert list(completion.python_tokens(b"# coding: unicode_escape\nx = '\\d'\n"))[:2] == ["x", "="]


def test_nothing_warns(tmp_path):
    """A damaged picture in a folder is left out; what zlib or Pillow would say of it is not the user's to read."""
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / place / "1.png")
    whole = (tmp_path / "a" / "1.png").read_bytes()
    (tmp_path / "a" / "2.png").write_bytes(whole[:-20] + zlib.compress(b"x"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(image_folders.load(tmp_path, size=8).train) >= 2
