"""What killing and long running do to the lab: the same bits after any number of kills, and memory that stays flat.

    python benchmarks/endurance.py kills [--number 50] [--seed 0]     of a comparison and of a training on sequences
    python benchmarks/endurance.py soak [--minutes 20]                one `anyk train`, its memory once a second

kills: the command runs once undisturbed. Then it is started again and again and killed by SIGKILL at a moment drawn from the
seed, with its workers or without them, which then notice by themselves. Whenever it comes to its end, its folder must be that
of the undisturbed run, byte for byte but for times; then it begins anew.
soak: the memory of the last quarter of the time against that of the second.

Each puts its section into benchmarks/endurance.md (--out). For Linux. Exit code 1 if something differs or grows.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import markdown_table, record

SECTIONS = ("kills", "soak")
ENDS = (0, 3)
"""exit codes of a comparison that came to its end, decided or not"""
ALLOWED_GROWTH = 16.0  # MB; the allocator's own coming and going is smaller
NOT_COMPARED = {"seconds", "seconds_in_model", "environment"}
"""what two runs of the same bits may tell otherwise"""
ANYK = (sys.executable, "-m", "anyk")


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
    """A digest of each file of a run or a comparison; of those that tell times, of the rest."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.name == "environment.json":
            continue
        if file.suffix in (".json", ".jsonl"):
            lines = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
            told = json.dumps([without_times(json.loads(line)) for line in lines]).encode()
        elif file.name == "report.html" or not file.is_file():  # a page of results.json, with its times
            continue
        else:
            told = file.read_bytes()
        found[name] = hashlib.sha256(told).hexdigest()
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


def kills(folder: Path, number: int, seed: int) -> tuple[list[str], bool]:
    draw = random.Random(seed)
    of_points = f"compare {points(folder / 'points.npz', 6000)} --losses softmax error --seeds 2 --epochs 20 --jobs 2"
    of_sequences = f"train {sequences(folder / 'sequences.txt')} --model attention --epochs 20"
    rows, well = zip(
        kill("compare", of_points.split(), folder, number, draw),
        kill("sequence run", of_sequences.split(), folder, number, draw),
        strict=True,
    )
    head = ["", "seconds undisturbed", "kills", "of these without its workers", "times at its end", "with the same bits"]
    return [markdown_table(head, [list(map(str, row)) for row in rows])], all(well)


def megabytes(process: int) -> float:
    """The anonymous memory of a process."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) / 1024


def soak(folder: Path, minutes: float) -> tuple[list[str], bool]:
    words = ["train", points(folder / "points.npz", 20_000), "--epochs", "1000000", "--model", "mlp"]
    process = start([*ANYK, *words, "--quiet", "--out", str(folder / "run")], folder / "log")
    used: list[float] = []
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            used.append(megabytes(process.pid))
            continue
        raise SystemExit(f"the run ended by itself:\n{(folder / 'log').read_text()}")
    process.send_signal(signal.SIGINT)
    code = process.wait(60)
    metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(metrics[-1])
    quarters = [used[len(used) * number // 4 : len(used) * (number + 1) // 4] for number in range(4)]
    growth = max(quarters[3]) - max(quarters[1])
    row = [
        f"{minutes:g}",
        f"{last['step']:,}",
        f"{len(metrics):,}",
        *(f"{max(part):.1f}" for part in quarters),
        f"{growth:+.1f}",
    ]
    head = ["minutes", "steps", "evaluations", *(f"peak of quarter {number}, MB" for number in (1, 2, 3, 4)), "4th - 2nd"]
    return [
        f"`anyk {' '.join(words)}`, the anonymous memory once a second, then SIGINT (exit code {code}).".replace(
            f"{folder}/", ""
        ),
        "",
        markdown_table(head, [row]),
    ], growth <= ALLOWED_GROWTH and code == 130


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--number", type=int, default=50, help="kills of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if given.section == "kills":
            options = f"--number {given.number} --seed {given.seed}"
            lines, well = kills(Path(name), given.number, given.seed)
        else:
            options = f"--minutes {given.minutes:g}"
            lines, well = soak(Path(name), given.minutes)
    record(given.out, "Kills and long runs", SECTIONS, f"endurance.py {given.section} {options}", given.section, lines)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
