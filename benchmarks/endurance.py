"""What killing and long running do: the same bits after any number of kills, finite losses, and memory that stays flat.

    python benchmarks/endurance.py kills [--number 50] [--seed 0]                 of a comparison and of a training on sequences
    python benchmarks/endurance.py signals [--cases 50] [--seed 0] [--only train] of compare, reproduce, embed and train
    python benchmarks/endurance.py soak [--minutes 20]                            one `anyk train`, its memory once a second
    python benchmarks/endurance.py steps [--steps 20000] [--only KSubset]         one small problem with each operator

kills: the command runs once undisturbed. Then it is started again and again and killed by SIGKILL at a moment drawn from the
seed, with its workers or without them, which then notice by themselves. Whenever it comes to its end, its folder must be that
of the undisturbed run, byte for byte but for times; then it begins anew.
signals: the same with one to three of SIGINT and SIGTERM, to the process or to its group, gaps of 0 to 0.5 s, from the import
of torch to its last file: a number of finished runs is drawn to wait for, and a moment after it. Some cases have steps of 12 s,
a worker that is stopped and cannot answer, or as many busy processes as the machine has cores. It must end within ten seconds,
with the exit code of a signal that it got, no traceback and no process left over. In some cases a worker, or the process that
forks them, is killed, and the command must come to its end, or end when it is told to after that. The comparison takes a loss
for a winner whose learning rate is not softmax's, so that there are controls.
soak: the memory of the last quarter of the time against that of the second.
steps: a linear model on a problem that it can separate, two wrong labels included. Those are far behind at first; later the
loss reaches zero while the scores keep growing, which is where losses go bad late in training. Adam at a high rate gets there
early.

Each puts its section into benchmarks/endurance.md (--out). For Linux. Exit code 1 if something differs, grows or is not finite.
"""

import argparse
import contextlib
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
from PIL import Image
from torch import nn
from torture import SUBJECTS, Subject

import anyk

SECTIONS = ("kills", "signals", "soak", "steps")
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


# Signals -------------------------------------------------------------------------------------------------------------------

SECONDS = 10.0
"""for a command that was told to end"""
SLOW_SECONDS = 12.0
"""of a step that takes longer than that"""
SLOW = """
import os, time
import torch
from torch import nn
from anyk import candidates
from anyk.baselines import FixedKLoss
from anyk.lab.comparison.outcome import Comparison

class Slow(nn.Sequential):
    def forward(self, x):
        time.sleep(float(os.environ.get("PAUSE", 0.01)))
        return super().forward(x)

def model(shape, classes):
    return Slow(nn.Linear(shape[0], classes))

class Steep(FixedKLoss, name="steep"):
    def _loss(self, scores, position, best):
        return torch.logsumexp(50 * scores, -1) - 50 * candidates.at(scores, position)

# A gain that is significant would take hundreds of runs.
Comparison.significant = lambda self, method, sign: {"top1": None} if (method.name, sign) == ("steep", 1) else {}

def backbone():
    torch.manual_seed(0)
    return Slow(nn.Flatten(), nn.Linear(192, 8)), lambda image: torch.tensor(list(image.tobytes())).view(3, 8, 8) / 255
"""


def images(folder: Path) -> str:
    random_numbers = np.random.default_rng(0)
    for number in range(240):
        place = folder / ("train" if number % 4 else "test") / f"class {number % 3}" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_numbers.integers(256, size=(8, 8, 3), dtype="u1")).save(place)
    return str(folder)


def of_session(leader: int) -> dict[int, str]:
    """The living processes of a session, with their command lines."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state not in "ZX":
                found[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def loads_torch(pid: int) -> bool:
    """Whether a process has begun to."""
    with contextlib.suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


def listens(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    try:
        caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def helpers(leader: int) -> tuple[list[int], list[int]]:
    """The workers of a command, and the process that forks them. Both have the command line of the latter, which is older."""
    forked = sorted(pid for pid, words in of_session(leader).items() if "forkserver" in words and pid != leader)
    return forked[1:], forked[:1]


class Told:
    """One command under signals.

    Args:
        name: of the command.
        words: the rest of its command line, without --out.
        folder: for its files.
        draw: what is random.
    """

    def __init__(self, name: str, words: str, folder: Path, draw: random.Random) -> None:
        self.name, self.draw = name, draw
        self.folder, self.out, self.log = folder, folder / f"out-{name}", folder / f"{name}.log"
        self.words = f"{name} {words}"
        self.command = [*ANYK, *self.words.split(), "--quiet", "--out", str(self.out)]
        began = time.monotonic()
        if self.start().wait() not in ENDS:
            raise SystemExit(f"{name}: the undisturbed run failed:\n{self.log.read_text()}")
        self.whole, self.expected, self.runs = time.monotonic() - began, content(self.out), self.finished()
        self.controls = 0
        if name == "compare":
            self.controls = sum(len(each["runs"]) for each in json.loads((self.out / "results.json").read_text())["controls"])
            if not self.controls:
                raise SystemExit("compare: the undisturbed run has no controls, though a loss was taken for a winner")
        shutil.rmtree(self.out)
        self.problems: list[str] = []
        self.cases = self.told = self.gently = self.killed = self.ended = self.early = self.at_work = self.in_controls = 0
        self.longest = 0.0

    def start(self, pause: float | None = None) -> "subprocess.Popen[bytes]":
        self.log.unlink(missing_ok=True)
        os.environ["PAUSE"] = "0.01" if pause is None else str(pause)
        os.environ["PYTHONFAULTHANDLER"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(self.folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        return start(self.command, self.log)

    def finished(self) -> int:
        """How many runs have ended; embed has none."""
        return len([*self.out.glob("result.json"), *self.out.glob("runs/*/result.json")])

    def case(self) -> None:
        draw = self.draw
        if 0 < self.runs == self.finished() and draw.random() < 0.8:  # else most cases would find nothing left to do
            self.to_the_end(self.start(), f"{self.name}, all runs done")
        before = self.finished()
        slow, loaded, stuck, death, early, late = (draw.random() < chance for chance in (0.15, 0.3, 0.1, 0.35, 0.1, 0.25))
        wanted = before if slow or early else draw.randint(before, min(before + 1 + self.runs // 4, self.runs))
        if late and before < self.runs - self.controls and self.controls and not (slow or early):
            wanted = draw.randrange(self.runs - self.controls, self.runs)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) * loaded)]
        process = self.start(pause=SLOW_SECONDS if slow else None)
        try:
            begun = loads_torch if early else listens
            while process.poll() is None and (self.finished() < wanted or not begun(process.pid)):
                time.sleep(0.01)
            # Of a single run or none, what comes after the imports.
            usual = 0.5 if early or wanted == self.runs > 0 else self.whole / max(self.runs, 2)
            # A slow one is long in what it tries before the first step.
            moment = draw.uniform(0, 5 * SLOW_SECONDS if slow and not early else usual)
            time.sleep(moment)
            workers, server = helpers(process.pid)
            self.at_work += bool(workers)
            what = f"{self.name}, case {self.cases}: {wanted} runs and {moment:.2f} s, {slow=} {loaded=} {early=}"
            self.early += early
            self.in_controls += self.runs - self.controls <= self.finished() < self.runs
            if death and not slow and (workers or server):
                victim = draw.choice(draw.choice([each for each in (workers, server) if each]))
                kill_if_there(victim, signal.SIGKILL)
                what += f", killed {'a worker' if victim in workers else 'the server'}"
                self.killed += 1
                if draw.random() < 0.5:
                    self.cases += 1
                    return self.to_the_end(process, what)
            elif stuck and workers:
                kill_if_there(draw.choice(workers), signal.SIGSTOP)
                what += ", stopped a worker"
            return self.tell(process, what, early)
        finally:
            for each in busy:
                each.kill()
                each.wait()

    def tell(self, process: "subprocess.Popen[bytes]", what: str, early: bool) -> None:
        """Send the signals, and look at how it ends."""
        sent: list[signal.Signals] = []
        began = time.monotonic()
        for number in range(self.draw.randint(1, 3)):
            time.sleep(self.draw.uniform(0, 0.5) * bool(number))
            if process.poll() is not None:
                break
            how = self.draw.choice((signal.SIGINT, signal.SIGTERM))
            (os.killpg if self.draw.random() < 0.5 else os.kill)(process.pid, how)
            sent.append(how)
        if not sent:
            return self.to_the_end(process, what)
        self.cases, self.told = self.cases + 1, self.told + 1
        what += f", sent {[how.name for how in sent]}"
        try:
            code = process.wait(max(SECONDS - (time.monotonic() - began), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # writes where its threads are
            time.sleep(1)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return self.problem(f"{what}: did not end within {SECONDS:g} s\n{self.log.read_text()[-3000:]}")
        # A worker that was being forked ends by itself.
        while (left := of_session(process.pid)) and time.monotonic() - began < SECONDS:
            time.sleep(0.05)
        if left:
            os.killpg(process.pid, signal.SIGKILL)
            self.problem(f"{what}: left {left}")
        took = time.monotonic() - began
        self.longest = max(self.longest, took)
        if took > SECONDS and not left:
            self.problem(f"{what}: it was {took:.1f} s until all its processes were gone")
        if code in ENDS:  # in its last moments
            return self.to_the_end(process, what)
        log = self.log.read_text()
        self.gently += len(sent) == 1
        if early and code in {-how for how in sent} and not log:  # by the signal itself, which a shell calls 128 + its number
            return None
        if code not in {128 + how for how in sent} or "Traceback" in log or log.count("Stopped. To go on") != 1:
            self.problem(f"{what}: exit code {code}\n{log[-3000:]}")
        return None

    def to_the_end(self, process: "subprocess.Popen[bytes]", what: str) -> None:
        """Wait for the end; the folder must then be that of the undisturbed run."""
        try:
            code = process.wait(60 + 20 * self.whole)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return self.problem(f"{what}: hangs")
        self.ended += 1
        found = content(self.out)
        if code not in ENDS or found != self.expected:
            others = sorted(file for file in found | self.expected if found.get(file) != self.expected.get(file))
            self.problem(f"{what}: exit code {code}, other content in {others[:8]}\n{self.log.read_text()[-3000:]}")
        return shutil.rmtree(self.out)

    def problem(self, words: str) -> None:
        print(words, flush=True)
        self.problems.append(words)

    def row(self) -> list[object]:
        command = f"`anyk {self.words.replace(f'{self.folder}/', '')}`"
        right = self.cases - len(self.problems)
        stages = [self.early, self.at_work, self.in_controls] if self.controls else [self.early, self.at_work or "–", "–"]
        counts = [self.told, self.gently, *stages, self.killed, self.ended]
        return [command, *counts, f"{self.longest:.1f}", right]


def kill_if_there(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def signals(folder: Path, cases: int, seed: int, only: str | None) -> Section:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and would hand that on
    (folder / "slow.py").write_text(SLOW)
    table = points(folder / "points.npz", 600)
    commands = {
        "compare": f"{table} --losses softmax steep --import slow --seeds 2 --budget 2 --epochs 4 --jobs 2 --model slow:model",
        "reproduce": "table5 --smoke --jobs 2",
        "embed": f"{images(folder / 'images')} --backbone slow:backbone --batch-size 2",
        "train": f"{table} --epochs 20 --model slow:model",
    }
    rows, well = [], True
    for name, words in commands.items():
        if only in (None, name):
            told = Told(name, words, folder, random.Random(f"{seed} {name}"))
            while told.cases < cases:
                told.case()
                print(f"{name}: {told.cases} of {cases}", file=sys.stderr, flush=True)
            if told.out.exists():  # after the last one it goes on to its end
                told.to_the_end(told.start(), f"{name}, after all")
            rows.append(told.row())
            well &= not told.problems
    stages = ["while importing", "workers at work", "in controls"]
    head = ["", "told to end", "by one signal", *stages, "helpers killed", "times at its end, same bits", "longest, s", "right"]
    return [markdown_table(head, rows)], well


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
    parser.add_argument("--cases", type=int, default=50, help="signals to each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--steps", type=int, default=20_000, help="of each operator, at least 4")
    parser.add_argument("--only", help="steps: one operator; signals: one command")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if given.section == "kills":
            lines, well = kills(Path(name), given.number, given.seed)
        elif given.section == "signals":
            lines, well = signals(Path(name), given.cases, given.seed, given.only)
        elif given.section == "soak":
            lines, well = soak(Path(name), given.minutes)
        else:
            lines, well = steps(given.steps, given.only)
    record(given.out, "Kills and long runs", SECTIONS, given.section, lines)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
