"""Array files as data sets: .npz, pairs of .npy, tables, and the .p and .pt files of pickle and torch.

Rows of numbers are features. Arrays of uint8 with three or four dimensions are images, as MedMNIST has them.

No code from a file is ever run, and no size that a file claims is believed: see :mod:`anyk.lab.data.pickles` and
:mod:`anyk.lab.data.untrusted`.
"""

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
import torch
from torch import Tensor

from anyk.lab import files
from anyk.lab.data import embeddings, images, labels, pickles, table_files, tables, untrusted
from anyk.lab.data.sets import Dataset, Split, check_classes, with_statistics
from anyk.lab.errors import LabError, first_line
from anyk.lab.warn_once import warn_once

SUFFIXES = (".npz", ".npy", *table_files.SUFFIXES, ".p", ".pkl", ".pickle", ".pt", ".pth")
"""The files that `read` and `import_file` take."""

_EMBEDDING_WORDS = {"x", "embedding", "embeddings", "feature", "features", "data", "inputs", "image", "images"}
_CLASS_WORDS = {"classes", "class_names", "names"}
_ROLES = {"embeddings": _EMBEDDING_WORDS, "labels": tables.LABEL_WORDS, "groups": {tables.GROUPS}}
_VALIDATION_WORDS = ("val", "valid", "validation")
_TEST_WORDS = ("test", *_VALIDATION_WORDS)
_LONGEST_PREFIX = 250  # characters of the names of dicts around an array


class Pair(NamedTuple):
    """Examples, their labels, and the numbers of their groups where these are known."""

    examples: Tensor
    labels: labels.Array
    groups: Tensor | None = None


def import_file(
    source: str | Path,
    *more: str | Path,
    out: str | Path,
    name: str | None = None,
    classes_file: str | Path | None = None,
    test: str | Path | None = None,
    label_column: str | None = None,
    drop: Iterable[str] = (),
    categories: Iterable[str] = (),
    missing: Literal["mean", "refuse"] = "mean",
    row_numbers: bool = False,
    half: bool = False,
    force: bool = False,
    note: labels.Note | None = None,
) -> Path:
    """Make an embedding set of an array file.

    Args:
        source: .npz, .npy, .csv, .parquet, .feather, .p or .pt; `name.npy` goes with `name_labels.npy`
        more: the labels, where embeddings and labels are two .npy files
        out: the folder of the new set
        name: what to call it; None: like the file
        classes_file: the class names in the order of the labels, one on a line or a JSON list
        test: a file of the same form with the test examples
        label_column: of a table, the column with the label; None: the last one
        drop: of a table, columns to leave out
        categories: of a table, columns of numbers that are categories, to be one-hot encoded as texts are
        missing: of a table, what becomes of missing values: the mean of their column, or a refusal
        row_numbers: of a table, whether columns that only count the rows are taken
        half: store float16
        force: replace a set that is there
        note: called with each remark about what was done to the data

    Returns:
        The folder.
    """
    embeddings.refuse_to_overwrite(Path(out), force)
    notes: list[str] = []
    options = tables.Options(label_column, tuple(drop), tuple(categories), missing, row_numbers)
    dataset = _load(Path(source), [Path(path) for path in more], name, classes_file, test, options, notes.append)
    notes += dataset.remarks
    if dataset.kind == "images":
        raise LabError(f"{source} holds images, but import makes embedding sets: give the file itself to train or compare.")
    stored = dataset.train.parts[0].dtype
    if stored not in (torch.float16, torch.float32):
        notes.append(f"{str(stored).removeprefix('torch.')} was converted to {'float16' if half else 'float32'}")
    if note is not None:
        for remark in notes:
            note(remark)
    about = {"source": Path(source).name, "notes": notes}
    return embeddings.write(out, dataset, dtype=torch.float16 if half else None, about=about, force=force)


def read(source: str | Path, options: tables.Options | None = None) -> Dataset:
    """An array file as a data set, in memory.

    Args:
        source: the file
        options: of a table, what its columns are
    """
    return finished(_load(Path(source), options=options or tables.Options()))


def finished(dataset: Dataset) -> Dataset:
    """A data set in memory with a digest of all its values; features as float16 or float32. Its remarks are told."""
    for remark in dataset.remarks:
        warn_once(remark)
    hashed = hashlib.sha256(json.dumps(dataset.classes).encode())
    splits = {}
    for split, examples in dataset.splits.items():
        if dataset.kind == "embeddings":
            rows = (part if part.dtype in (torch.float16, torch.float32) else part.float() for part in examples.parts)
            examples = dataclasses.replace(examples, parts=tuple(rows))
        stored = [*examples.parts, examples.labels, *([examples.groups] if examples.groups is not None else [])]
        hashed.update("".join(embeddings.digest(tensor, dataset.name) for tensor in stored).encode())
        splits[split] = examples
    if dataset.validation is not None:
        hashed.update(embeddings.digest(dataset.validation, dataset.name).encode())
    fingerprint = hashed.hexdigest()[:16]
    dataset = dataclasses.replace(dataset, train=splits["train"], test=splits.get("test"))
    return dataclasses.replace(dataset, fingerprint=fingerprint, remarks=())


def blocks(
    source: Path,
    shape: tuple[int, ...],
    rows: int,
    options: tables.Options | None = None,
    schema: tables.Schema | None = None,
    note: labels.Note = lambda _: None,
) -> Iterator[Tensor]:
    """The examples of a file, with labels or without, in blocks of at most ``rows``.

    Args:
        source: a file as :func:`read` takes, or a .safetensors file of an embedding set; .npz and pickles may hold one
            array of examples only
        shape: of one example
        rows: of a block
        options: of a table: what to leave out; by default the last column, where there is one more than the examples have
        schema: the columns of the table that the model was trained on, which are then found by their names
        note: called with remarks about what was done to the data
    """
    if not source.stat().st_size:
        raise LabError(f"{source} is empty: copy it or make it again.")
    suffix = source.suffix.lower()
    if suffix in table_files.SUFFIXES and len(shape) != 1:
        raise LabError(f"{source} has rows of numbers, but the model takes examples of the shape {shape}.")
    if suffix in table_files.SUFFIXES:
        yield from tables.blocks(source, shape[0] if schema is None else schema, rows, options, note)
        return
    if suffix == ".safetensors":
        found = _safetensors_blocks(source, shape, rows)
    else:
        found = iter(torch.split(_find(source, shape), rows))
    first = 0
    for block in found:
        if len(shape) == 3:
            yield _fit(block, shape, source)
            continue
        finite = block.float().isfinite().flatten(1)
        if not bool(finite.all()):
            row, column = (~finite).nonzero()[0].tolist()
            raise LabError(f"{source} has a NaN or an infinite number in row {first + row}, column {column} (from 0).")
        yield block
        first += len(block)


def _safetensors_blocks(source: Path, shape: tuple[int, ...], rows: int) -> Iterator[Tensor]:
    try:
        with safetensors.safe_open(source, "pt") as file:
            stored = file.get_slice("embeddings")
            count, *found = stored.get_shape()
            if tuple(found) != shape:
                raise LabError(
                    f"embeddings in {source} should have the shape {_of_examples(shape)}, but have {(count, *found)}."
                )
            for first in range(0, count, rows):
                yield stored[first : first + rows]
    except safetensors.SafetensorError as error:
        raise LabError(f'{source} cannot be read as embeddings ({error}): it should have the tensor "embeddings".') from None


def _fit(block: Tensor, shape: tuple[int, ...], source: Path) -> Tensor:
    """Images in the shape that a model takes."""
    if block.dtype == torch.uint8 and block.shape[1:] == shape:
        return block
    block = images.channels_first(block, source)
    return block if block.shape[1:] == shape else images.resize(block, shape[1])


def _load(
    source: Path,
    more: Iterable[Path] = (),
    name: str | None = None,
    classes_file: str | Path | None = None,
    test: str | Path | None = None,
    options: tables.Options = tables.Options(),  # noqa: B008, it is frozen
    note: labels.Note = lambda _: None,
) -> Dataset:
    found = _read_pairs(source, list(more), options, note)
    pairs, names, remarks = found.pairs, found.names, found.remarks
    if test is not None:
        if "test" in pairs:
            raise LabError(f"{source} has test examples of its own: leave out {test}.")
        tested = _read_pairs(Path(test), [], options, note, is_test=True, like=found.schema)
        pairs["test"], remarks = tested.pairs["train"], [*remarks, *tested.remarks]
    if classes_file is not None:
        names = labels.read_names(Path(classes_file))
    if _are_images(pairs["train"].examples):
        shaped = {split: images.channels_first(pair.examples, f"{source} ({split})") for split, pair in pairs.items()}
        pairs = {split: pair._replace(examples=shaped[split]) for split, pair in pairs.items()}
    dataset = dataset_of(pairs, names, name or source.stem, {"train": str(source), "test": str(test or source)}, note)
    return dataclasses.replace(dataset, table=found.schema, remarks=tuple(remarks))


class _Found(NamedTuple):
    """What a file holds: "train" and perhaps "test" and "validation", the class names if it has them, and of a table the
    columns and what was done to them."""

    pairs: dict[str, Pair]
    names: list[str] | None = None
    schema: tables.Schema | None = None
    remarks: Sequence[str] = ()


def dataset_of(
    pairs: Mapping[str, Pair], names: list[str] | None, name: str, sources: Mapping[str, str], note: labels.Note
) -> Dataset:
    """A data set of features (N, d) or of uint8 images (N, channels, height, width), without a fingerprint.

    Images for validation follow those to train with, as a part of their own, so that nothing is copied.

    Args:
        pairs: "train", and perhaps "test"; of images perhaps "validation".
        names: the class names; None: they follow from the labels.
        name: of the data set.
        sources: for "train" and "test", what to call the examples in a message.
        note: called with each remark about what was done to the labels.
    """
    source = sources["train"]
    classes, numbers = labels.number_classes({split: pair.labels for split, pair in pairs.items()}, names, source, note)
    splits = {split: Split((pair.examples,), numbers[split], groups=pair.groups) for split, pair in pairs.items()}
    train, test = splits["train"], splits.get("test")
    if not _are_images(pairs["train"].examples):
        dataset = Dataset(name, "embeddings", classes, train, test, "")
        embeddings.check(dataset, {split: [each] for split, each in sources.items()})
        return dataset
    for split, examples in splits.items():
        count, shape = len(examples.parts[0]), tuple(examples.shape)
        if count != len(examples):
            raise LabError(f"{source} has {count} images for {split}, but {len(examples)} labels.")
        if shape != tuple(train.shape):
            message = f"{shape} for {split}, but {tuple(train.shape)} for train, as (channels, height, width)"
            raise LabError(f"images in {source} should all have one shape, but it is {message}.")
    validation = None
    if "validation" in splits:
        held, groups = splits["validation"], train.groups
        validation = torch.arange(len(train), len(train) + len(held))
        if groups is not None:  # each validation example is a group of its own: nothing is measured by these
            groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(len(held))])
        train = Split((*train.parts, *held.parts), torch.cat([train.labels, held.labels]), groups=groups)
    dataset = Dataset(name, "images", classes, train, test, "", validation=validation)
    check_classes(dataset, sources)
    return with_statistics(dataset)


def _read_pairs(
    source: Path,
    more: list[Path],
    options: tables.Options,
    note: labels.Note,
    is_test: bool = False,
    like: tables.Schema | None = None,
) -> _Found:
    if not source.is_file():
        raise LabError(f"{source} is not a file: name a file that ends in {', '.join(SUFFIXES)}.")
    if not source.stat().st_size:
        raise LabError(f"{source} is empty: copy it or make it again.")
    if more and (source.suffix != ".npy" or len(more) > 1):
        raise LabError(f"{source} was given with {more[0]}: only a pair of .npy files takes two paths.")
    if source.suffix.lower() in table_files.SUFFIXES:
        return found_in_table(tables.read(source, options, like, is_test=is_test), source)
    if options != tables.Options():
        kinds = ", ".join(table_files.SUFFIXES)
        raise LabError(f"{source} has no columns with names: a label column and the like go with a table ({kinds}).")
    if source.suffix == ".npy":
        beside = more[0] if more else source.with_name(f"{source.stem}_labels.npy")
        if not beside.is_file():
            raise LabError(f"{source} needs its labels: give a second .npy file, or name it {beside.name}.")
        return _Found({"train": _pair(_read_tree(source), _read_tree(beside), source)})
    if source.suffix in SUFFIXES:
        return _Found(*_find_pairs(_read_tree(source), source, note))
    raise LabError(f"{source} has an unknown format: name a file that ends in {', '.join(SUFFIXES)}.")


def found_in_table(table: tables.Labelled, source: str | Path) -> _Found:
    """The rows of a table as examples to train with."""
    groups = None if table.groups is None else labels.group_numbers(table.groups, len(table.labels), source)
    return _Found({"train": Pair(table.examples, table.labels, groups)}, None, table.schema, table.remarks)


# --- which array is what ----------------------------------------------------------------------------------------------


def _find_pairs(tree: Any, source: Path, note: labels.Note) -> tuple[dict[str, Pair], list[str] | None]:
    """The arrays of train and test in a dict or a sequence, by the words in their names or by their places.

    Images may have a validation split beside them, as published sets do. Of features, it is the test where there is no other.

    >>> found, _ = _find_pairs({"X_train": torch.zeros(2, 3), "y_train": [0, 1]}, Path("some.npz"), print)
    >>> found["train"][0].shape
    torch.Size([2, 3])
    """
    arrays = _named_arrays(tree)
    if arrays is None:
        raise LabError(f"{source} holds a {type(tree).__name__}: save a dict with embeddings and labels.")
    # (split, role) -> key. What is called neither train nor test is train.
    found: dict[tuple[str, str], str] = {}
    for key in arrays:
        words = set(re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()))
        split = next((word for word in _TEST_WORDS if word in words), "train")
        for role, vocabulary in _ROLES.items():
            if words & vocabulary:
                if (split, role) in found:
                    raise LabError(f"{source} has {found[split, role]} and {key}: keep one array of {role} for {split}.")
                found[split, role] = key
    keys = ", ".join(map(files.shortened, arrays)) or "nothing"
    pairs = {}
    for split in ("train", *_TEST_WORDS):
        given = [role for role in ("embeddings", "labels") if (split, role) in found]
        if len(given) == 1 or (split == "train" and not given):
            lacking = "embeddings and labels" if not given else "labels" if given == ["embeddings"] else "embeddings"
            raise LabError(
                f"{source} has no {lacking} for {split} (it has {keys}): "
                "name the arrays x and y, or embeddings and labels, or X_train, y_train, X_test and y_test."
            )
        if given:
            pair = _pair(arrays[found[split, "embeddings"]], arrays[found[split, "labels"]], source, f" for {split}")
            if (split, "groups") in found and (groups := arrays[found[split, "groups"]]) is not None:
                pair = pair._replace(groups=labels.group_numbers(groups, len(pair.labels), source))
            pairs[split] = pair
    result = {"train": pairs["train"]}
    called: dict[str, tuple[str, ...]] = {"test": _TEST_WORDS}
    if _are_images(pairs["train"].examples):
        called = {"test": ("test",), "validation": _VALIDATION_WORDS}
    for split, names_of_it in called.items():
        present = [word for word in names_of_it if word in pairs]
        if present:
            result[split] = pairs[present[0]]
        for left_out in present[1:]:
            note(f"the examples called {left_out} were left out: those called {present[0]} are the {split}")
    names = next((arrays[key] for key in arrays if key.lower() in _CLASS_WORDS), None)
    return result, None if names is None else labels.check_names(names, source)


def _find(source: Path, shape: tuple[int, ...]) -> Tensor:
    """The one array of a file that holds examples of this shape; of several, the one that is called test."""
    tree = _read_tree(source)
    arrays = _named_arrays(tree)
    arrays = {"": tree} if arrays is None else arrays
    # A list of class names is no array of examples.
    shapes = {key: tuple(value.shape) for key, value in arrays.items() if hasattr(value, "shape")}
    fitting = [key for key, found in shapes.items() if _fits(found, shape)]
    if len(fitting) > 1:
        fitting = [key for key in fitting if "test" in re.split(r"[^a-z]+", key.lower())] or fitting
    if len(fitting) != 1:
        message = ", ".join(f"{files.shortened(key)} {found}".strip() for key, found in shapes.items()) or "no array"
        raise LabError(f"{source} should have one array of the shape {_of_examples(shape)}, but has {message}.")
    return _pair(arrays[fitting[0]], [0], source).examples


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape holds examples for a model: images may have another size, if the model's are square."""
    if found[1:] == shape:
        return True
    stored = images.image_shape(found) if len(shape) == 3 else None
    return stored is not None and stored[0] == shape[0] and (stored == shape or shape[1] == shape[2])


def _of_examples(shape: tuple[int, ...]) -> str:
    return f"(examples, {', '.join(map(str, shape))})"


def _named_arrays(tree: Any) -> dict[str, Any] | None:
    """What a dict, or a sequence of two or four, holds, by name; None: it is something else."""
    if isinstance(tree, (list, tuple)):
        # (x, y), (x, y, x_test, y_test) or ((x, y), (x_test, y_test))
        if len(tree) == 2 and all(isinstance(item, (list, tuple)) and len(item) == 2 for item in tree):
            tree = [*tree[0], *tree[1]]
        if len(tree) in (2, 4):
            tree = dict(zip(("x_train", "y_train", "x_test", "y_test"), tree, strict=False))
    return dict(_flatten(tree)) if isinstance(tree, Mapping) else None


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        # A long name is not repeated for all that is below it: there may be millions, and nothing there is looked for.
        if isinstance(value, Mapping) and len(name) <= _LONGEST_PREFIX:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _pair(examples: Any, given: Any, source: Path, for_split: str = "") -> Pair:
    if isinstance(examples, (list, tuple)) and examples and isinstance(examples[0], Tensor):
        examples = torch.stack(tuple(examples)) if examples[0].dim() == 1 else torch.cat(tuple(examples))
    if not isinstance(examples, Tensor):
        examples = to_tensor(labels.to_numpy(examples, source), f"embeddings in {source}")
    given = labels.to_numpy(given, source)
    if not given.ndim:
        raise LabError(f"labels in {source} should have the shape (examples,), but have ().")
    if not examples.numel() or not given.size:
        raise LabError(f"{source} has no examples{for_split}: copy it or make it again.")
    return Pair(examples.detach(), given)


def to_tensor(numbers: labels.Array, source: str) -> Tensor:
    """An array of numbers as a tensor, in a dtype and byte order that torch has."""
    if numbers.dtype.kind not in "fiub" or numbers.dtype.itemsize > 8:
        raise LabError(f"{source} should be numbers, but are {numbers.dtype}.")
    if numbers.dtype.kind == "u" and numbers.dtype.itemsize > 1 and numbers.ndim < 3:
        numbers = numbers.astype(np.float32)
    return torch.from_numpy(numbers if numbers.dtype.isnative else numbers.astype(numbers.dtype.newbyteorder("=")))


def _are_images(examples: Tensor) -> bool:
    return examples.dtype == torch.uint8 and examples.dim() in (3, 4)


# --- files ------------------------------------------------------------------------------------------------------------


def _read_tree(path: Path) -> Any:
    """What a file of numpy, torch or pickle holds: an array, or dicts and lists of arrays."""
    try:
        if path.suffix.lower() in (".npy", ".npz"):
            return _read_numpy(path)
        return pickles.read(path)
    except LabError:
        raise
    except pickles.NotDataError as error:
        message = files.shortened(str(error))
        raise LabError(f"{path} holds {message}, which is not data: nothing was run; save plain arrays or tensors.") from None
    except Exception as error:  # a damaged file makes zip, zlib, numpy and the unpickler raise anything
        kind = "numpy" if path.suffix.lower() in (".npy", ".npz") else "torch or pickle"
        remedy = "save text as numpy strings, not objects" if "allow_pickle" in str(error) else "copy it or make it again"
        raise LabError(f"{path} is damaged or not a file of {kind} ({first_line(error)}): {remedy}.") from None


def _read_numpy(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers that an old Python wrote
        if path.suffix.lower() == ".npy":
            with open(path, "rb") as file:
                untrusted.check_npy(file, path.stat().st_size)
            # Copy on write: nothing is read before it is needed, and torch wants memory that could be written to.
            return np.load(path, mmap_mode="c", allow_pickle=False)
        with untrusted.opened_zip(path) as archive:
            found = {}
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    with archive.open(member) as file:
                        untrusted.check_npy(file, member.file_size)
                    with archive.open(member) as file:
                        found[member.filename.removesuffix(".npy")] = np.lib.format.read_array(file, allow_pickle=False)
            return found
