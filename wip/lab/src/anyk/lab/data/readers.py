"""From what DATA names, or what a caller has in memory, to a :class:`anyk.lab.data.prepare.Source`: by word, path and kind."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anyk.lab.config import DataFields
from anyk.lab.data.prepare import Source
from anyk.lab.errors import LabError, first_line

Array = NDArray[Any]
TABLES = (".csv", ".tsv", ".parquet", ".feather", ".arrow")
ARRAYS = (".npz", ".npy", ".pt", ".pth")
_EXAMPLES = ("x", "embeddings", "features", "data", "inputs", "images")
_LABELS = ("y", "labels", "label", "targets", "target")
_KEYS = ("X", "y", "X_test", "y_test", "train", "test", "classes", "groups", "groups_test", "times", "name")
_OLD = {".p": "pickle", ".pkl": "pickle", ".pickle": "pickle"}
MOST_CHANNELS = 4


def stamp(data: Any, config: DataFields) -> Any:
    """What tells whether data that were prepared are still the same: sizes and times of files, the content of arrays."""
    if not isinstance(data, (str, Path)):
        return ["memory", _content(_named(data))]
    path = Path(str(data).partition(":")[2] if str(data).startswith(("sequences:", "cifar100:")) else data).expanduser()
    found = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    listed = [(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in found if each.is_file()]
    return [str(data), hashlib.blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()]


def read(data: Any, config: DataFields) -> Source:
    """The source of a word, a path, or of data in memory."""
    if not isinstance(data, (str, Path)):
        return from_memory(data, config)
    # Each reader needs packages of its own, so each is imported only when it is asked for.
    word, colon, rest = str(data).partition(":")
    path = Path(data).expanduser()
    if word in ("glyphs", "completion") and not path.exists():
        if rest and not (rest.isascii() and rest.isdigit()):
            raise LabError(f"{word}:CLASSES wants a number of classes, such as {word}:500, but got {str(data)!r}.")
        if word == "completion":
            from anyk.lab.data import sequences

            return sequences.completion(int(rest) if rest else 2000)
        from anyk.lab.data import glyphs

        return glyphs.load(int(rest) if rest else 300)
    if word == "cifar100" and not path.exists():
        from anyk.lab.data import images

        return images.resized(images.cifar100(Path(rest).expanduser() if rest else None), config.image_size)
    if word == "sequences" and colon:
        from anyk.lab.data import sequences

        return sequences.load(Path(rest).expanduser(), config)
    if path.is_dir():
        if (path / "dataset.json").exists() or any(path.glob("train*.safetensors")):
            from anyk.lab.data import embeddings

            return embeddings.read(path)
        if not any(each.is_dir() for each in path.iterdir()) and any(path.glob("*.txt")):
            raise LabError(f"{path} is a folder of texts: docs/own-data.md#text says how to make features of them.")
        from anyk.lab.data import images

        return images.folder(path, config.image_size)
    suffix = path.suffix.lower()
    if not path.exists():
        raise LabError(
            f"{data} does not exist; DATA may be glyphs, completion, cifar100, sequences:FILE, a folder of images "
            "(FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg and FOLDER/test/CLASS/*.jpg), a folder of embeddings, or a file "
            f"({', '.join((*TABLES, *ARRAYS))})."
        )
    if suffix in TABLES:
        from anyk.lab.data import tables

        return _of_table(tables.labelled(tables.read(path), config, path.name), path.stem)
    _refuse_table_options(config, path.name)
    if suffix in _OLD:
        raise LabError(
            f"{path} is a pickle, which may run code when it is read: docs/own-data.md#pickles says how to convert it."
        )
    if suffix == ".txt":
        raise LabError(
            f"{path} is text: sequences:{path} takes lines of items; docs/own-data.md#text says how to make features."
        )
    if suffix not in ARRAYS:
        raise LabError(f"{path} is a file of another kind; DATA may be a file of {', '.join((*TABLES, *ARRAYS))}.")
    from anyk.lab.data import images

    return images.resized(_of_arrays(arrays(path), path.stem, str(path)), config.image_size)


def _refuse_table_options(config: DataFields, name: str) -> None:
    for option in ("label_column", "group_column", "time_column", "drop", "categories"):
        if getattr(config, option):
            raise LabError(f"--{option.replace('_', '-')} is for a table such as DATA.csv, but data is {name}: leave it out.")


def _of_table(found: Any, name: str, test: Array | None = None) -> Source:
    labels, classes = number_labels(found.labels, None, name)
    return Source(name, "features", found, labels, classes, test, None, found.groups, found.times, found.remarks)


# Files of arrays ------------------------------------------------------------------------------------------------------------


def arrays(path: Path) -> dict[str, Array]:
    """The arrays of a file by their names, in small letters. No code of a file is run."""
    try:
        if path.suffix.lower() == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {name.lower(): archive[name] for name in archive.files}
        if path.suffix.lower() == ".npy":
            labels = path.with_name(f"{path.stem}_labels.npy")
            if not labels.exists():
                raise LabError(f"{path} has no labels beside it: {labels.name} should be there, or give one .npz with both.")
            return {"x": np.load(path, allow_pickle=False), "y": np.load(labels, allow_pickle=False)}
        found = torch.load(path, map_location="cpu", weights_only=True)
    except LabError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise LabError(f"{path} cannot be read ({first_line(error)}): it is damaged, or holds more than arrays.") from None
    except Exception as error:  # of a damaged or hostile .pt file, torch raises pickle's own
        raise LabError(f"{path} cannot be read ({first_line(error)}): it should hold tensors and nothing else.") from None
    if isinstance(found, (tuple, list)) and len(found) in (2, 4):
        found = dict(zip(("x", "y", "x_test", "y_test"), found, strict=False))
    if not isinstance(found, dict):
        raise LabError(f"{path} should hold a dict of tensors, such as X and y, but holds a {type(found).__name__}.")
    return {str(name).lower(): to_numpy(value, str(name)) for name, value in found.items()}


def _of_arrays(found: dict[str, Array], name: str, source: str) -> Source:
    """Features or images of arrays by name: x, y, x_test, y_test, groups, times, classes; train_x, test_x, val_x and so on."""
    parts: dict[str, dict[str, Array]] = {"train": {}, "val": {}, "test": {}}
    others: dict[str, Array] = {}
    for key, array in found.items():
        part, role = "train", key
        for prefix in ("train", "val", "test"):
            if key.startswith(f"{prefix}_") or key.endswith(f"_{prefix}"):
                part, role = prefix, key.removeprefix(f"{prefix}_").removesuffix(f"_{prefix}")
        kind = "x" if role in _EXAMPLES else "y" if role in _LABELS else role
        if kind in ("x", "y", "groups", "times"):
            parts[part][kind] = array
        else:
            others[key] = array
    if "x" not in parts["train"] or "y" not in parts["train"]:
        raise LabError(f"{source} should have arrays X and y (or embeddings and labels), but has {', '.join(found) or 'none'}.")
    used = [part for part in ("train", "val", "test") if parts[part]]
    for part in used:
        if lacking := {"x", "y"} - parts[part].keys():
            raise LabError(f"{source} has no {'labels' if 'y' in lacking else 'examples'} for {part}: give both or none.")
    taken = [examples(parts[part]["x"], source) for part in used]
    labels = [_flat(parts[part]["y"], source) for part in used]
    for one, own in zip(taken, labels, strict=True):
        if len(one) != len(own):
            raise LabError(f"{source} has {len(one):,} examples, but {len(own):,} labels: there should be one for each.")
    starts = np.cumsum([0, *map(len, labels)])
    places = {part: np.arange(starts[i], starts[i + 1]) for i, part in enumerate(used)}
    names = [str(each) for each in others["classes"].tolist()] if "classes" in others else None
    numbers, classes = number_labels(np.concatenate(labels), names, source)
    groups = _groups([parts[part].get("groups") for part in used], starts, source)
    times = parts["train"].get("times")
    if times is not None and (len(used) > 1 or times.shape != numbers.shape or times.dtype.kind not in "iuf"):
        raise LabError(f"times in {source} should be one number for each example, without a test set of their own.")
    joined = taken[0] if len(taken) == 1 else np.concatenate(taken)
    kind: Any = "images" if joined.ndim == 4 else "features"
    remarks: tuple[str, ...] = ()
    if kind == "features" and _are_tokens(parts["train"]["x"]):
        remarks = (
            "X holds whole numbers that look like token ids or codes: they are taken as numbers. One-hot encode them, or "
            "give sequences:FILE, if they are not.",
        )
    when = None if times is None else times.astype(np.float64)
    return Source(name, kind, joined, numbers, classes, places.get("test"), places.get("val"), groups, when, remarks)


def _are_tokens(rows: Array) -> bool:
    """Whether features are integers of a wide range, as token ids are."""
    return (
        rows.dtype.kind in "iu" and rows.dtype != np.uint8 and rows.size > 0 and int(rows.max()) > 255 and int(rows.min()) >= 0
    )


def examples(rows: Array, source: str) -> Array:
    """Features (N, d) in float32 or float16, or images (N, channels, height, width) in uint8."""
    if rows.dtype.kind not in "iufb":
        raise LabError(
            f"X in {source} should hold numbers, but is {rows.dtype}: texts need features, see docs/own-data.md#text."
        )
    if rows.ndim not in (2, 3, 4) or not rows.size:
        raise LabError(
            f"X in {source} should be features (N, d) or images (N, channels, height, width) or (N, height, width, channels), "
            f"but has the shape {rows.shape}."
        )
    if rows.ndim == 2:
        return rows if rows.dtype in (np.float16, np.float32) else rows.astype(np.float32)
    images = rows if rows.ndim == 4 else rows[:, None]
    if images.dtype != np.uint8:
        scaled = images.astype(np.float32) * 255
        whole = np.rint(scaled)
        if not np.abs(scaled - whole).max() < 1e-2 or whole.min() < 0 or whole.max() > 255:
            low, high = float(images.min()), float(images.max())
            raise LabError(
                f"X in {source} should hold images as uint8, but they are {images.dtype} from {low:g} to {high:g}: leave it to "
                "the lab to normalise and to augment them."
            )
        images = whole.astype(np.uint8)
    if images.shape[1] <= MOST_CHANNELS:
        return np.ascontiguousarray(images)
    if images.shape[3] <= MOST_CHANNELS:
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    raise LabError(
        f"X in {source} should have at most {MOST_CHANNELS} channels, first or last, but has the shape {rows.shape}."
    )


def _flat(labels: Array, source: str) -> Array:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise LabError(f"labels in {source} should have the shape (examples,), but have {labels.shape}.")
    return labels


def _groups(given: list[Array | None], starts: Array, source: str) -> Array | None:
    if all(each is None for each in given):
        return None
    sizes = np.diff(starts)
    if any(each is None or each.shape != (size,) for each, size in zip(given, sizes, strict=True)):
        raise LabError(f"groups in {source} should have one value for each example, of every part.")
    values = np.concatenate([each.astype(str) if each.dtype.kind == "O" else each for each in given if each is not None])
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def number_labels(labels: Array, names: list[str] | None, source: str) -> tuple[Array, tuple[str, ...]]:
    """Labels as 0 … n-1, and the names of the classes: integers that are 0 … n-1 stay; with names, integers are places among them
    and texts are looked up."""
    if labels.dtype.kind == "f":
        if not (np.isfinite(labels).all() and (labels == np.floor(labels)).all()):
            raise LabError(f"labels in {source} should be integers or texts, but there are numbers with a fraction or NaN.")
        labels = labels.astype(np.int64)
    if labels.dtype.kind not in "iubUSO":
        raise LabError(f"labels in {source} should be integers or texts, but are {labels.dtype}.")
    if labels.dtype.kind in "USO":
        labels = np.array([each.decode() if isinstance(each, bytes) else str(each) for each in labels.tolist()], dtype=object)
        if any(not text.strip() for text in labels):
            raise LabError(f"{source} has examples with an empty label: remove them, or label them.")
        if all(text.isdecimal() and str(int(text)) == text for text in set(labels.tolist())):
            labels = labels.astype(np.int64)
    if labels.dtype.kind in "iub" and labels.min() < 0:
        count = int((labels < 0).sum())
        raise LabError(f"{source} has {count:,} negative labels, which usually mean no label: number from 0, or remove them.")
    values, numbers = np.unique(labels, return_inverse=True)
    if names is None:
        return numbers.astype(np.int64), tuple(map(str, values.tolist()))
    if labels.dtype.kind == "O":
        if unknown := sorted(set(values.tolist()) - set(names)):
            raise LabError(f"{source} has the label {unknown[0]!r}, which no class name has.")
        return np.array([names.index(text) for text in labels.tolist()], np.int64), tuple(names)
    if int(values.max()) >= len(names):
        raise LabError(
            f"{source} has the label {int(values.max())}, but {len(names)} class names: they go from 0 to {len(names) - 1}."
        )
    return labels.astype(np.int64), tuple(names)


# Data in memory -------------------------------------------------------------------------------------------------------------


def from_memory(data: Any, config: DataFields) -> Source:
    """The source of data in memory.

    Args:
        data: ``(X, y)`` or ``(X, y, X_test, y_test)``; a mapping with these names and perhaps ``groups``, ``times``, ``classes``,
            ``name``; a torch Dataset of (example, label), or two; a DataFrame, or two.
        config: of a table, what its columns are.
    """
    from anyk.lab.data import images, tables

    named = _named(data)
    if tables.is_frame(named["train"]):
        for key in ("groups", "groups_test", "times"):
            if key in named:
                raise LabError(f"data has {key} beside a table: name a column of it, group_column= or time_column=.")
        table, test = tables.of_frame(named["train"], "data"), None
        if "test" in named:
            more = tables.of_frame(named["test"], "test of data")
            if lacking := set(table.column_names) - set(more.column_names):
                raise LabError(f"test of data has no column {sorted(lacking)[0]!r}, which the training table has.")
            test = np.arange(table.num_rows, table.num_rows + more.num_rows)
            table = tables.join(table, more)
        return _of_table(tables.labelled(table, config, "data"), str(named.get("name") or "table"), test)
    _refuse_table_options(config, "data without columns")
    given: dict[str, Array] = {}
    for part, suffix in (("train", ""), ("test", "_test")):
        if part in named:
            rows, labels = _pair(named[part], part)
            given |= {f"x{suffix}": rows, f"y{suffix}": labels}
    for key in ("groups", "groups_test", "times", "classes"):
        if key in named:
            given[key] = to_numpy(named[key], key)
    if "classes" not in given and isinstance(getattr(named["train"], "classes", None), (list, tuple)):
        given["classes"] = np.array(list(map(str, named["train"].classes)))
    name = str(named.get("name") or (type(named["train"]).__name__ if _is_dataset(named["train"]) else "arrays"))
    return images.resized(_of_arrays(given, name, "data"), config.image_size)


def _named(data: Any) -> dict[str, Any]:
    """The data by the names of ``_KEYS``; pairs of examples and labels as ``train`` and ``test``."""
    from anyk.lab.data import tables

    if isinstance(data, Mapping) and not tables.is_frame(data):
        if unknown := [key for key in data if key not in _KEYS]:
            raise LabError(f"data has the key {unknown[0]!r}; the keys are {', '.join(_KEYS)}.")
        named = {key: value for key, value in data.items() if value is not None}
        for part, (x, y) in (("train", ("X", "y")), ("test", ("X_test", "y_test"))):
            if part not in named and (x in named or y in named):
                if lacking := [key for key in (x, y) if key not in named]:
                    raise LabError(f"data has no {lacking[0]}: give both {x} and {y}.")
                named[part] = (named.pop(x), named.pop(y))
        if "train" not in named:
            raise LabError(f"data should have X and y, or train; it has {', '.join(data) or 'nothing'}.")
        return named
    if _is_dataset(data) or tables.is_frame(data):
        return {"train": data}
    if isinstance(data, (list, tuple)) and len(data) == 4:
        return {"train": tuple(data[:2]), "test": tuple(data[2:])}
    if isinstance(data, (list, tuple)) and len(data) == 2:
        both = all(_is_dataset(each) or tables.is_frame(each) or _is_pair(each) for each in data)
        return {"train": data[0], "test": data[1]} if both else {"train": tuple(data)}
    kind = f"{type(data).__name__} of {len(data)}" if isinstance(data, (list, tuple)) else type(data).__name__
    raise LabError(
        f"data should be a path, (X, y), (X, y, X_test, y_test), a mapping, a DataFrame or a torch Dataset, but is a {kind}."
    )


def _is_dataset(value: Any) -> bool:
    if isinstance(value, torch.utils.data.Dataset):
        return True
    plain = isinstance(value, (list, tuple, Mapping, str, bytes)) or hasattr(value, "__array__") or _is_sparse(value)
    return not plain and hasattr(value, "__getitem__") and hasattr(value, "__len__") and not hasattr(value, "columns")


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(hasattr(each, "shape") for each in value)


def _pair(given: Any, part: str) -> tuple[Array, Array]:
    if not _is_dataset(given):
        if not (isinstance(given, (list, tuple)) and len(given) == 2):
            raise LabError(f"{part} of data should be (X, y) or a torch Dataset, but is a {type(given).__name__}.")
        return to_numpy(given[0], "X"), to_numpy(given[1], "y")
    if isinstance(given, torch.utils.data.IterableDataset) or not hasattr(given, "__len__"):
        raise LabError(f"the {part} Dataset should be map-style, with a length and an item for each number, but is iterable.")
    if not len(given):
        raise LabError(f"the {part} Dataset has no examples.")
    rows: list[Array] = []
    labels: list[Any] = []
    for place in range(len(given)):
        item = given[place]
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise LabError(f"the {part} Dataset should give (example, label), but gives a {type(item).__name__} for {place}.")
        example, label = item
        if hasattr(example, "getbands"):  # an image of Pillow
            example = np.asarray(example.convert("RGB"))
        rows.append(to_numpy(example, "an example"))
        labels.append(label.item() if hasattr(label, "item") else label)
        if rows[-1].shape != rows[0].shape:
            raise LabError(
                f"the {part} Dataset gives examples of shapes {rows[0].shape} and {rows[-1].shape}: make them of one shape."
            )
    return np.stack(rows), np.array(labels)


def _is_sparse(value: Any) -> bool:
    return type(value).__module__.startswith("scipy.sparse")


def to_numpy(values: Any, name: str) -> Array:
    """An array of whatever is one."""
    if _is_sparse(values):
        raise LabError(
            f"{name} is a sparse matrix: give {name}.toarray(), or fewer columns by TruncatedSVD where that is too large."
        )
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise LabError(f"{name} cannot be read as an array ({first_line(error)}).") from None
    if array.dtype == object and not all(isinstance(each, (str, int, np.integer)) for each in array.ravel()[:1000].tolist()):
        raise LabError(f"{name} should be an array of numbers or texts, but holds {type(array.ravel()[0]).__name__}.")
    return array


def _content(data: Any) -> str:
    """A digest of data in memory."""
    from anyk.lab.data import tables

    digest = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if tables.is_frame(value):
            table = tables.of_frame(value, "data")
            digest.update(repr(table.schema.remove_metadata()).encode())
            for column in table.columns:
                digest.update(repr(column.to_pylist()).encode())
        elif isinstance(value, Mapping):
            for key, each in value.items():
                digest.update(str(key).encode())
                add(each)
        elif _is_dataset(value):
            for array in _pair(value, "train"):
                add(array)
        elif (
            isinstance(value, (list, tuple))
            and len(value) in (2, 4)
            and any(hasattr(each, "shape") or _is_dataset(each) for each in value)
        ):
            for each in value:
                add(each)
        elif hasattr(value, "shape") or isinstance(value, (list, tuple)):
            array = to_numpy(value, "data")
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes())
        else:
            digest.update(repr(value).encode())

    add(data)
    return digest.hexdigest()
