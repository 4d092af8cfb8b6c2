"""Data sets by name or path."""

from dataclasses import fields
from pathlib import Path

from anyk.lab.data import in_memory, table_files
from anyk.lab.data.in_memory import keep
from anyk.lab.data.sets import Dataset, Parts, Split, split
from anyk.lab.data.tables import Log, Options
from anyk.lab.errors import LabError

__all__ = ["Dataset", "Parts", "Split", "keep", "load", "split"]

_SEQUENCES = {"sequences": "sequences:FILE", "movielens": "movielens:PATH", "words": "words:PATH"}


def load(
    spec: str,
    image_size: int = 0,
    split: str = "auto",
    shares: tuple[float, float] = (0.1, 0.2),
    options: Options | None = None,
    log: Log | None = None,
) -> Dataset:
    """The data set that a config's ``data`` names.

    Args:
        spec: the word or path.
        image_size: height and width of its images; 0: 32 for a folder of images, others as they are.
        split: of sequences: last, lines or auto.
        shares: of sequences that are split by lines: the fractions for validation and the test.
        options: of a table, what its columns are.
        log: of sequences in a table, which columns are the user, the item and the order.
    """
    options = options or Options()
    is_table, is_log = _is_table(spec), spec.startswith("sequences:") and _is_table(spec.removeprefix("sequences:"))
    if options != Options() and not is_table:
        name = next(field.name for field in fields(options) if getattr(options, field.name) != field.default)
        raise LabError(f"{name} is for a table, a file such as DATA.csv or DATA.parquet, but data is {spec}: leave it out.")
    if log is not None and not is_log:
        raise LabError(f"user, item and order are for a log, sequences:LOG.csv, but data is {spec}: leave them out.")
    dataset = _load(spec, image_size, split, shares, options, log)
    if not image_size:
        return dataset
    from anyk.lab.data import images

    return images.resized(dataset, image_size)


def _is_table(spec: str) -> bool:
    return spec.startswith("hf:") or Path(spec).suffix.lower() in table_files.SUFFIXES


def _load(spec: str, image_size: int, split: str, shares: tuple[float, float], options: Options, log: Log | None) -> Dataset:
    # Each source needs packages of its own, so each is imported only when it is asked for.
    name, colon, rest = spec.partition(":")
    path = Path(spec).expanduser()
    if name in ("glyphs", "completion"):
        if rest and not (rest.isascii() and rest.isdigit()):
            raise LabError(f"{name}:CLASSES wants a number of classes, such as {name}:500, but got {spec!r}.")
        if name == "completion":
            if split != "auto":
                raise LabError(f"split {split} is for files of sequences; completion is divided by module: leave it out.")
            from anyk.lab.data import completion

            return completion.load(int(rest)) if rest else completion.load()
        from anyk.lab.data import glyphs

        return glyphs.load(int(rest)) if rest else glyphs.load()
    if name == "cifar100":
        from anyk.lab.data import cifar

        return cifar.load(Path(rest).expanduser() if rest else None)
    if name in _SEQUENCES and colon:
        if not rest:
            raise LabError(f"{name}: wants a path, {_SEQUENCES[name]}.")
        from anyk.lab.data import movielens, sequences

        if name == "sequences" and _is_table(rest):
            return sequences.load_log(Path(rest).expanduser(), log, split, shares)
        read = {"sequences": sequences.load, "words": sequences.load_words, "movielens": movielens.load}[name]
        return read(Path(rest).expanduser(), split, shares)
    if name == "hf" and colon:
        if not rest:
            raise LabError("hf: wants a path or a name, hf:PATH or hf:NAME.")
        from anyk.lab.data import hf

        return hf.load(rest, image_size, options)
    if path.is_dir():
        if (path / in_memory.IMAGES).is_file():
            return in_memory.read_images(path / in_memory.IMAGES)
        if (path / "dataset.json").exists() or any(path.glob("train*.safetensors")):
            from anyk.lab.data import embeddings

            return embeddings.read(path)
        from anyk.lab.data import image_folders, images

        return image_folders.load(path, size=image_size or images.SIZE)
    from anyk.lab.data import arrays

    if path.suffix.lower() in arrays.SUFFIXES and path.exists():
        return arrays.read(path, options)
    problem = "is a file of another kind" if path.exists() else "does not exist"
    raise LabError(
        f"{spec} {problem}; DATA may be glyphs, glyphs:CLASSES, completion, completion:CLASSES, cifar100, cifar100:PATH, "
        f"{', '.join(_SEQUENCES.values())}, hf:PATH, a folder of embeddings (dataset.json or train*.safetensors), a folder of "
        "images (FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg and FOLDER/test/CLASS/*.jpg), or an array file or table "
        f"({', '.join(arrays.SUFFIXES)})."
    )
