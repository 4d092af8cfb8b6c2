"""What killing and long running do: the same bits after any number of kills, finite losses, and memory that stays flat.

    python benchmarks/endurance.py kills [--number 50] [--seed 0]                 of a comparison and of a training on sequences
    python benchmarks/endurance.py soak [--minutes 20]                            one `anyk train`, its memory once a second
    python benchmarks/endurance.py steps [--steps 20000] [--only KSubset]         one small problem with each operator

kills: the command runs once undisturbed. Then it is started again and again and killed by SIGKILL at a moment drawn from the
seed, with its workers or without them, which then notice by themselves. Whenever it comes to its end, its folder must be that
of the undisturbed run, byte for byte but for times; then it begins anew.
soak: the memory of the last quarter of the time against that of the second.
steps: a linear model on a problem that it can separate, two wrong labels included. Those are far behind at first; later the
loss reaches zero while the scores keep growing, which is where losses go bad late in training. Adam at a high rate gets there
early.

Each puts its section into benchmarks/endurance.md (--out). For Linux. Exit code 1 if something differs, grows or is not finite.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import markdown_table, record, resident_megabytes
from torch import nn
from torture import SUBJECTS, Subject

import anyk

SECTIONS = ("kills", "soak", "steps")
ENDS = (0, 3)
"""exit codes of a comparison that came to its end, decided or not"""
ALLOWED_GROWTH = {"soak": 16.0, "steps": 8.0}
"""megabytes; the allocator's own coming and going is smaller"""
NOT_COMPARED = {"seconds", "seconds_in_model", "environment"}
"""what may differ between two runs with the same bits"""
ANYK = (sys.executable, "-m", "anyk")

Section = tuple[list[str], bool]
"""the lines of a section, and whether all went well"""


# Kills ---------------------------------------------------------------------------------------------------------------------


def points(file: Path, examples: int) -> str:
    random_numbers = np.random.default_rng(0)
    centres, labels = random_numbers.normal(size=(30, 16)), random_numbers.integers(30, size=examples)
    np.savez(file, features=(centres[labels] + 1.2 * random_numbers.normal(size=(examples, 16))).astype("f4"), labels=labels)
    return str(file)


def sequences(file: Path) -> str:
    """Of 50 items, each with four that may follow it."""
    random_numbers = np.random.default_rng(0)
    lines = []
    for _ in range(600):
        line = [int(random_numbers.integers(50))]
        for step in random_numbers.integers(4, size=random_numbers.integers(6, 20)):
            line.append((3 * line[-1] + int(step)) % 50)
        lines.append(" ".join(map(str, line)))
    file.write_text("\n".join(lines))
    return f"sequences:{file}"


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(entry) for name, entry in value.items() if name not in NOT_COMPARED}
    return [without_times(entry) for entry in value] if isinstance(value, list) else value


def content(folder: Path) -> dict[str, str]:
    """A digest of each file of a run or a comparison, times left out. The report is made of results.json, with its times."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.name in ("environment.json", "report.html"):
            continue
        told = file.read_bytes()
        if file.suffix in (".json", ".jsonl"):
            lines = [told] if file.suffix == ".json" else told.splitlines()
            told = json.dumps([without_times(json.loads(line)) for line in lines]).encode()
        found[str(file.relative_to(folder))] = hashlib.sha256(told).hexdigest()
    return found


def start(command: list[str], out: Path) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that its workers can be killed with it."""
    with open(out, "ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def kill(name: str, command: list[str], folder: Path, number: int, draw: random.Random) -> tuple[list[object], bool]:
    """One row of the table, and whether all went well."""
    log, out = folder / f"{name}.log", folder / name.replace(" ", "-")
    command = [*ANYK, *command, "--quiet", "--out", str(out)]
    began = time.monotonic()
    if start(command, log).wait() not in ENDS:
        raise SystemExit(f"{name}: the undisturbed run failed:\n{log.read_text()}")
    whole, expected = time.monotonic() - began, content(out)
    killed = alone = ended = wrong = 0
    anew = True
    while killed < number or not anew:  # after the last kill it goes on to its end
        if anew:
            shutil.rmtree(out)
        process = start(command, log)
        try:
            code = process.wait(draw.uniform(0.1, 0.5) * whole if killed < number else None)
        except subprocess.TimeoutExpired:
            killed, anew = killed + 1, False
            if draw.random() < 0.5:
                alone += 1
                os.kill(process.pid, signal.SIGKILL)
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            continue
        ended, anew = ended + 1, True
        now = content(out)
        if code not in ENDS or now != expected:
            wrong += 1
            others = sorted(file for file in now | expected if now.get(file) != expected.get(file))
            print(f"{name}: exit code {code}, other content in {others[:8]}\n{log.read_text()[-2000:]}", flush=True)
    words = " ".join(command[3:-3]).replace(f"{folder}/", "")
    return [f"`anyk {words}`", f"{whole:.0f}", killed, alone, ended, ended - wrong], not wrong


def kills(folder: Path, number: int, seed: int) -> Section:
    draw = random.Random(seed)
    of_points = f"compare {points(folder / 'points.npz', 6000)} --losses softmax error --seeds 2 --epochs 20 --jobs 2"
    of_sequences = f"train {sequences(folder / 'sequences.txt')} --model attention --epochs 20"
    rows, well = zip(
        kill("compare", of_points.split(), folder, number, draw),
        kill("sequence run", of_sequences.split(), folder, number, draw),
        strict=True,
    )
    head = ["", "seconds undisturbed", "kills", "of these without its workers", "times at its end", "with the same bits"]
    return [markdown_table(head, rows)], all(well)


# Long runs -----------------------------------------------------------------------------------------------------------------

CLASSES, FEATURES, EXAMPLES, K = 8, 6, 32, 3


def soak(folder: Path, minutes: float) -> Section:
    words = ["train", points(folder / "points.npz", 20_000), "--epochs", "1000000", "--model", "mlp"]
    process = start([*ANYK, *words, "--quiet", "--out", str(folder / "run")], folder / "log")
    used: list[float] = []
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            used.append(resident_megabytes("RssAnon", process.pid))
            continue
        raise SystemExit(f"the run ended by itself:\n{(folder / 'log').read_text()}")
    process.send_signal(signal.SIGINT)
    code = process.wait(60)
    metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    peaks = [max(used[len(used) * number // 4 : len(used) * (number + 1) // 4]) for number in range(4)]
    growth = peaks[3] - peaks[1]
    row = [f"{minutes:g}", f"{json.loads(metrics[-1])['step']:,}", f"{len(metrics):,}", *(f"{peak:.1f}" for peak in peaks)]
    head = ["minutes", "steps", "evaluations", *(f"peak of quarter {number}, MB" for number in (1, 2, 3, 4)), "4th - 2nd"]
    command = f"`anyk {' '.join(words)}`".replace(f"{folder}/", "")
    return [
        f"{command}, the anonymous memory once a second, then SIGINT (exit code {code}).",
        "",
        markdown_table(head, [[*row, f"{growth:+.1f}"]]),
    ], growth <= ALLOWED_GROWTH["soak"] and code == 130


def steps(number: int, only: str | None) -> Section:
    found = [train(subject, number) for subject in SUBJECTS if only in (None, subject.name)]
    head = ["operator", "last loss", "largest weight", "MB at the start", "in the middle", "at the end", "seconds", ""]
    about = f"{number} steps of Adam, {EXAMPLES} examples, {CLASSES} classes, k = {K}, float32, one thread."
    return [about, "", markdown_table(head, [row for row, _ in found])], all(well for _, well in found)


def train(subject: Subject, number: int) -> tuple[list[object], bool]:
    """One row of the table, and whether all went well."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    labels = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(-1)
    labels[:2] = (labels[:2] + 3) % CLASSES
    torch.manual_seed(1)
    model = nn.Linear(FEATURES, CLASSES)
    criterion = anyk.TopKCrossEntropyLoss([1 / K] * K, subject.make(1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, fused=True)
    total, started, used = torch.zeros(()), time.perf_counter(), []
    for step in range(number):
        # Measured after the warm-up: the first steps fill caches.
        if step in (min(100, number // 4), number // 2):
            used.append(resident_megabytes("VmRSS"))
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.detach()  # one number that is not finite stays so
    used.append(resident_megabytes("VmRSS"))
    finite = bool(total.isfinite()) and all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    flat = used[-1] - used[-2] <= ALLOWED_GROWTH["steps"]
    largest = max(parameter.abs().max().item() for parameter in model.parameters())
    verdict = "" if finite and flat else "memory grew" if finite else "not finite"
    sizes, seconds = (f"{size:.1f}" for size in used), time.perf_counter() - started
    return [subject.name, f"{loss.item():.4f}", f"{largest:.3g}", *sizes, f"{seconds:.0f}", verdict], not verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--number", type=int, default=50, help="kills of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--steps", type=int, default=20_000, help="of each operator, at least 4")
    parser.add_argument("--only", choices=[subject.name for subject in SUBJECTS], help="steps: one operator")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if given.section == "kills":
            lines, well = kills(Path(name), given.number, given.seed)
        elif given.section == "soak":
            lines, well = soak(Path(name), given.minutes)
        else:
            lines, well = steps(given.steps, given.only)
    record(given.out, "Kills and long runs", SECTIONS, given.section, lines)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
