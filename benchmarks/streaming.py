"""Training on sets larger than the memory: what it holds, what it costs, and what the block shuffle does to the result.

    python benchmarks/streaming.py memory [--gigabytes 10]       an epoch over a set of that size: anonymous and mapped memory
    python benchmarks/streaming.py speed [--gigabytes 1]         streamed against the same examples in memory, in turns
    python benchmarks/streaming.py plan [--steps 6]              the first steps on a set of ImageNet-21K-P's size
    python benchmarks/streaming.py shuffle DATA [--seeds 6]      final accuracy on an embedding set, stored class by class

Each puts its section into benchmarks/streaming.md (--out). The sets are made in --folder and removed afterwards; the page
cache is warm. 2048 dimensions in float16, batch 500, one thread, everything through `anyk.lab.run.training`.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import scipy.stats
import torch
from measuring import markdown_table, record, resident_megabytes

from anyk.lab.data import Dataset, Split, embeddings
from anyk.lab.errors import Stopped
from anyk.lab.run import training
from anyk.lab.run.config import Config
from anyk.lab.statistics import mean, std

WIDTH, BATCH = 2048, 500
SHARD_ROWS = 32_768
SECTIONS = ("memory", "plan", "speed", "shuffle")
EXAMPLES_21K, CLASSES_21K = 11_060_223, 10_450


def make(folder: Path, gigabytes: float, classes: int) -> int:
    """A set of that size in shards of 128 MiB, stored class by class: noise, for its size and not for what it teaches."""
    rows = max(4 * classes, int(gigabytes * 1e9 / (2 * WIDTH)))
    noise = torch.randn(SHARD_ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).half()
    labels = torch.arange(rows) * classes // rows
    folder.mkdir(parents=True)
    for number, first in enumerate(range(0, rows, SHARD_ROWS)):
        count = min(SHARD_ROWS, rows - first)
        part = Split((noise[:count].roll(number, 1),), labels[first : first + count])
        with open(folder / f"train-{number:05d}.safetensors", "wb") as file:
            embeddings.write_split(file, part, None, "made")
    with open(folder / "test.safetensors", "wb") as file:
        embeddings.write_split(file, Split((noise[:classes],), torch.arange(classes)), None, "made")
    (folder / "dataset.json").write_text(json.dumps({"name": "made", "classes": [str(number) for number in range(classes)]}))
    return rows


class Watch:
    """The largest anonymous and mapped memory of this process, looked at a hundred times a second."""

    def __enter__(self) -> "Watch":
        self.before = self.anonymous = resident_megabytes("RssAnon")
        self.files_before = self.files = resident_megabytes("RssFile")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            self.anonymous = max(self.anonymous, resident_megabytes("RssAnon"))
            self.files = max(self.files, resident_megabytes("RssFile"))


def memory(folder: Path, gigabytes: float) -> list[str]:
    classes = 10
    rows = make(folder / "set", gigabytes, classes)
    config = Config(data=str(folder / "set"), loss="softmax", epochs=1, batch_size=BATCH, shuffle="block")
    table = []
    for name, change in (("first start: reads all for NaN and the digest", {}), ("second start", {"seed": 1})):
        with Watch() as watch:
            started = time.perf_counter()
            result = training.train(config.replace(**change), folder / name.split(":")[0])
            seconds = time.perf_counter() - started
        # Weights, gradient, two moments, and the best weights so far.
        model = result["parameters"] * 4 * 5 / 2**20
        anonymous, mapped = watch.anonymous - watch.before - model, watch.files - watch.files_before
        examples = f"{result['data']['train']:,} / {result['data']['validation']:,}"
        table.append([name, f"{anonymous:,.0f} MiB", f"{mapped:,.0f} MiB", examples, f"{seconds:.0f}"])
    about = result["shuffle"]
    files = len(list((folder / "set").glob("train*")))
    size = sum(file.stat().st_size for file in (folder / "set").glob("train*")) / 1e9
    return [
        f"{rows:,} x {WIDTH} in float16, {size:.1f} GB in {files} files, one epoch with validation and test. Blocks of "
        f"{about['shuffle_block']} and windows of {about['shuffle_window']:,} examples. Peaks beyond the process before the "
        "run, after the set was made; the model (with gradient, moments and best weights) is taken off.",
        "",
        markdown_table(["", "anonymous (RssAnon)", "mapped (RssFile)", "train / validation examples", "seconds"], table),
    ]


def first_steps(config: Config, folder: Path, steps: int) -> list[str]:
    moments: list[tuple[float, float]] = []

    def tick(_: object = None) -> None:
        moments.append((time.perf_counter(), time.process_time()))

    tick()
    with Watch() as watch, suppress(Stopped):
        training.train(config, folder, on_progress=tick, should_stop=lambda: len(moments) > steps)
    wall, used = zip(*moments, strict=True)
    after = len(moments) - 2
    return [
        f"{watch.anonymous - watch.before:,.0f} MiB",
        f"{wall[1] - wall[0]:.0f} s, {used[1] - used[0]:.0f} s of the processor",
        f"{(wall[-1] - wall[1]) / after:.2f} s, {(used[-1] - used[1]) / after:.2f} s of the processor",
    ]


def plan(folder: Path, examples: int, steps: int) -> list[str]:
    """On files that are holes, as many and of the same shapes as the real ones: all is 0, the disk holds the labels."""
    place = folder / "set"
    place.mkdir()
    labels = torch.arange(examples) * CLASSES_21K // examples
    for number, first in enumerate(range(0, examples, 1_000_000)):
        part = labels[first : first + 1_000_000]
        with open(place / f"train-{number:05d}.safetensors", "wb") as file:
            ends = 8 * len(part), 8 * len(part) + 2 * WIDTH * len(part)
            about = {
                "labels": {"dtype": "I64", "shape": [len(part)], "data_offsets": [0, ends[0]]},
                "embeddings": {"dtype": "F16", "shape": [len(part), WIDTH], "data_offsets": ends},
            }
            header = json.dumps(about).encode()
            header += b" " * (-len(header) % 8)
            file.write(len(header).to_bytes(8, "little") + header + part.numpy().tobytes())
            file.truncate(8 + len(header) + ends[1])
    classes = [str(number) for number in range(CLASSES_21K)]
    (place / "dataset.json").write_text(json.dumps({"name": "holes", "classes": classes}))
    config = Config(data=str(place), m=50, batch_size=BATCH, epochs=1, validation=0.02, test=0.01)
    names = ("first start: reads all for NaN and the digest", "second start")
    table = [[name, *first_steps(config, folder / name.split(":")[0], steps)] for name in names]
    return [
        f"{examples:,} x {WIDTH} in float16, {2 * WIDTH * examples / 1e9:.1f} GB that are holes, {CLASSES_21K:,} classes, "
        f"`--m 50 --batch-size {BATCH} --validation 0.02`, stopped after {steps} steps. Memory is beyond "
        "the process before the run.",
        "",
        markdown_table(["", "peak, anonymous (RssAnon)", "until the first step is done", "a step after it"], table),
    ]


@contextmanager
def loading(dataset: Dataset) -> Iterator[None]:
    kept, training.load = training.load, lambda _: dataset
    try:
        yield
    finally:
        training.load = kept


def speed(folder: Path, gigabytes: float, rounds: int, heads: list[int]) -> list[str]:
    table = []
    for classes in heads:
        size = gigabytes / 2 if classes > 100 else gigabytes  # a large head takes its time
        place = folder / f"set-{classes}"
        rows = make(place, size, classes)
        streamed = embeddings.read(place)
        copied = Split((torch.cat(streamed.train.parts),), streamed.train.labels)
        in_memory = Dataset("made", "embeddings", streamed.classes, copied, streamed.test, streamed.fingerprint)
        seconds: dict[str, list[tuple[float, float]]] = {"full": [], "block": []}
        for number in range(rounds + 1):
            for shuffle, dataset in (("full", in_memory), ("block", streamed)):
                # An epoch of training; evaluations are few examples and the same for both.
                config = Config(
                    data=str(place), loss="softmax", epochs=1, batch_size=BATCH, shuffle=shuffle, seed=number, validation=0.01,
                    shuffle_window=16_384,
                )  # fmt: skip
                with loading(dataset):
                    processor = time.process_time()
                    result = training.train(config, folder / f"{classes}-{shuffle}-{number}")
                    processor = time.process_time() - processor
                if number:  # the first one warms everything up
                    seconds[shuffle].append((result["seconds"], processor))
        full, block = (min(wall for wall, _ in seconds[shuffle]) for shuffle in ("full", "block"))
        full_cpu, block_cpu = (min(cpu for _, cpu in seconds[shuffle]) for shuffle in ("full", "block"))
        ratios = [f"{full / block:.0%}", f"{full_cpu / block_cpu:.0%}"]
        examples = f"{WIDTH} to {classes} classes, {rows:,} examples"
        table.append([examples, f"{rows / full:,.0f}", f"{rows / block:,.0f}", *ratios])
    return [
        f"A linear head, softmax, one epoch; in memory: one float16 tensor, fully shuffled; streamed: from files of 128 MiB in "
        f"windows of 16,384 examples, several of them an epoch. The best of {rounds} rounds in turns; target 70 %.",
        "",
        markdown_table(
            ["", "in memory, examples/s", "streamed, examples/s", "speed against memory", "by processor time"], table
        ),
    ]


def shuffle(folder: Path, data: Path, seeds: int, epochs: int) -> list[str]:
    given = embeddings.read(data)
    order = given.train.labels.argsort(stable=True)
    by_class = Split((given.train.take(order),), given.train.labels[order])
    embeddings.write(folder / "set", Dataset(given.name, "embeddings", given.classes, by_class, given.test, ""))
    classes, count = len(given.classes), len(order)
    window = count // 20
    arms = {"full": Config(shuffle="full")}
    for blocks in (2 * classes, classes, classes // 4):
        arms[f"window {window:,}, {blocks} blocks in it"] = Config(
            shuffle="block", shuffle_window=window, shuffle_block=max(1, window // blocks)
        )
    tests: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for seed in range(seeds):
        for number, (name, arm) in enumerate(arms.items()):
            config = arm.replace(
                data=str(folder / "set"), loss="softmax", epochs=epochs, seed=seed, evaluate_every=10**9, batch_size=BATCH
            )
            tests[name].append(training.train(config, folder / f"{number}-{seed}")["test"])
            print(seed, name, tests[name][-1], flush=True)
    table = []
    for name, measured in tests.items():
        row = [name]
        for metric in ("top1", "top5"):
            values, base = ([100 * test[metric] for test in part] for part in (measured, tests["full"]))
            row.append(f"{mean(values):.2f} ± {std(values) or 0:.2f}")
            found = scipy.stats.ttest_rel(values, base)
            low, high = found.confidence_interval()
            gain = f"{mean(values) - mean(base):+.2f} [{low:+.2f}, {high:+.2f}], p = {found.pvalue:.2f}"
            row.append("" if name == "full" else gain)
        table.append(row)
    return [
        f"{given.name}, {count:,} x {given.train.shape[0]}, {classes} classes, written class by class: the worst case. "
        f"Softmax, {epochs} epochs, {seeds} seeds, the last epoch's test accuracy in percent; difference to the full shuffle "
        "on the same seeds with its 95 % interval and the p of the paired t-test. A window is a twentieth of the set; by "
        "default it has at least as many blocks as there are classes.",
        "",
        markdown_table(["", "top-1", "against full", "top-5", "against full"], table),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("data", nargs="?", type=Path, help="shuffle: a folder of embeddings")
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--examples", type=int, default=EXAMPLES_21K, help="plan: of the set")
    parser.add_argument("--steps", type=int, default=6, help="plan: after which the run is stopped")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--classes", type=int, nargs="+", default=[1000, 10], help="speed: sizes of the head")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the sets are made; the system's temporary folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    if given.steps < 2:
        parser.error("--steps: expected at least 2")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        os.environ["ANYK_CACHE"] = str(Path(name) / "cache")
        if given.section == "memory":
            lines = memory(Path(name), given.gigabytes or 10)
        elif given.section == "speed":
            lines = speed(Path(name), given.gigabytes or 1, given.rounds, given.classes)
        elif given.section == "plan":
            lines = plan(Path(name), given.examples, given.steps)
        elif given.data is None:
            parser.error("shuffle needs DATA, a folder of embeddings")
        else:
            lines = shuffle(Path(name), given.data, given.seeds, given.epochs)
    record(given.out, "Sets larger than the memory", SECTIONS, given.section, lines)


if __name__ == "__main__":
    main()
