"""What the lab costs beside a bare training loop, and where the time of a comparison goes.

    python benchmarks/lab.py [--rounds N]        writes benchmarks/lab.md

50,000 x 512 embeddings of 100 classes, batch 500, one thread. The bare loop is what a person would write: tensors in memory,
shuffled, a linear layer, Adam, CrossEntropyLoss. The lab's run does the same and also reads its data from the disk,
evaluates on validation after each epoch and on test at the end, and writes its run folder.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from measuring import machine
from safetensors.torch import save_file

from anyk.lab.comparison.config import ComparisonConfig
from anyk.lab.comparison.search import search
from anyk.lab.run import training
from anyk.lab.run.config import Config

EXAMPLES, WIDTH, CLASSES, BATCH, EPOCHS = 50_000, 512, 100, 500, 4
LIMIT, SHARE = 1.3, 0.8


def make(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, WIDTH, generator=generator)
    sets = {}
    for part, count in (("train", EXAMPLES), ("test", EXAMPLES // 5)):
        labels = torch.randint(CLASSES, (count,), generator=generator)
        inputs = centres[labels] + 4 * torch.randn(count, WIDTH, generator=generator)
        save_file({"embeddings": inputs, "labels": labels}, folder / f"{part}.safetensors")
        sets[part] = inputs, labels
    names = [f"class {number}" for number in range(CLASSES)]
    (folder / "dataset.json").write_text(json.dumps({"name": "made", "classes": names}))
    return sets["train"]


def bare_loop(inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds for the same number of training examples as the lab's run, which keeps a tenth for validation."""
    inputs, labels = inputs[: EXAMPLES * 9 // 10], labels[: EXAMPLES * 9 // 10]
    started = time.perf_counter()
    model = torch.nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    criterion = torch.nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for index in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            criterion(model(inputs[index]), labels[index]).backward()
            optimizer.step()
    return time.perf_counter() - started


def lab_run(data: Path, folder: Path, loss: str) -> tuple[float, float]:
    """Seconds of a run, and the part of them in the model and the loss."""
    config = Config.from_json({"data": str(data), "loss": loss, "epochs": EPOCHS, "batch_size": BATCH, "m": 16})
    started = time.perf_counter()
    result = training.train(config, folder)
    return time.perf_counter() - started, result["seconds_in_model"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    lines = ["# What the lab costs", "", f"`make bench`, on {machine()}", ""]
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        data.mkdir()
        inputs, labels = make(data)
        bare_loop(inputs, labels)
        times: dict[str, list[float]] = {"bare loop": [], "softmax": [], "splitter": [], "lapsum": []}
        in_model: dict[str, list[float]] = {name: [] for name in times}
        for number in range(rounds):  # side by side, so that a busy moment hits all of them
            times["bare loop"].append(bare_loop(inputs, labels))
            for loss in ("softmax", "splitter", "lapsum"):
                seconds, inside = lab_run(data, Path(name) / f"{loss}-{number}", loss)
                times[loss].append(seconds)
                in_model[loss].append(inside / seconds)
        bare = min(times["bare loop"])
        lines += [
            f"{EXAMPLES:,} x {WIDTH} embeddings, {CLASSES} classes, batch {BATCH}, {EPOCHS} epochs, one thread.",
            f"The best of {rounds}.",
            "",
            "| | seconds | against the bare loop | in the model and the loss |",
            "|---|--:|--:|--:|",
            f"| bare loop with CrossEntropyLoss | {bare:.2f} | 1 | |",
        ]
        for loss in ("softmax", "splitter", "lapsum"):
            target = f" (target {LIMIT})" if loss == "softmax" else ""
            best = min(times[loss])
            lines.append(f"| lab, {loss} | {best:.2f} | {best / bare:.2f}{target} | {max(in_model[loss]):.0%} |")

        started = time.perf_counter()
        out = str(Path(name) / "out")
        shared = {"data": str(data), "epochs": 10, "batch_size": BATCH, "m": 16}
        done = search(ComparisonConfig(**shared, losses=("splitter",), seeds=2, budget=2, jobs=2, out=out))
        wall = time.perf_counter() - started
        folders = list((Path(name) / "out" / "runs").iterdir())
        ended = [folder / "result.json" for folder in folders if (folder / "result.json").exists()]  # a try may diverge
        results = [json.loads(file.read_text()) for file in ended]
        inside = sum(result["seconds_in_model"] for result in results)
        busy = sum(result["seconds"] for result in results)
    lines += [
        "",
        f"A comparison of {len(done.methods)} losses ({len(results)} runs of 2 to 20 epochs, two at a time, {wall:.0f} s): "
        f"{inside / busy:.0%} of the runs' time is in the model and the loss (target {SHARE:.0%}); "
        f"{inside / (2 * wall):.0%} of the time of both cores, with the start of the processes and the report.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (Path(__file__).parent / "lab.md").write_text(text)


if __name__ == "__main__":
    main()
