"""Which temperature trains a mask: made tasks whose answer is known, from far too small to far too large.

python benchmarks/temperature.py            runs what is missing, then writes benchmarks/temperature.md
python benchmarks/temperature.py --table    writes the table of what is there

Asked before the runs:

1. Does the best temperature shift with n, k, the spread of the scores and the operator?
2. Does the undecided mass at the start, sum m (1 - m), as a share of k, shift less at the best temperature? The test: one
   temperature for all settings, one multiple of the scores' standard deviation, and one share of undecided mass, each chosen
   as well as possible: which loses least against the best temperature of each setting?
3. Does it help to let the temperature fall, how far, and does the schedule matter? hard=True? A learned temperature?
4. A small entry of the mask can be made up for by a large weight behind it; then nothing presses the mask to decide. How much
   does a penalty on these weights matter?

Two tasks. "features": a vector of n scores is learned; the target is a weighted sum of k of n features; a small network sees
the features times the mask, its first weights W penalised by 0.01 sum W^2. "patches": a linear layer scores the n patches of
each example; the target is the sum of what the k marked patches hold; the others hold as much, which does not count. Measured
at the end, on new data: the *recall*, the share of the k right ones among the k best scores; and the *error* of the model as it
would be used, with the exact k in the place of the soft mask, as a share of the target's variance. 400 steps of Adam, one rate
for everything, new data at every step, five seeds. Every temperature and seed of a setting is a problem of its own in one
batch: a mask of scores / t at temperature 1 is that of the scores at t.

First trials, before this was written down, had no penalty, and no temperature found more than 0.6 of the features: question 4
comes from there. Added after the first runs had been seen: the undecided mass at a quarter and at the half of the steps, the
rule that is made of it, and temperatures above 100.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from measuring import markdown_table
from torch import Tensor

import anyk

RUNS, PAGE = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")
SEEDS, STEPS, HIDDEN, WIDTH, MARK = 5, 400, 16, 16, 6.0
BATCH = {"features": 64, "patches": 16}
MOMENTS = {"start": 0, "quarter": STEPS // 4, "half": STEPS // 2, "end": STEPS - 1}
"""when the undecided mass is recorded"""


@dataclass(frozen=True)
class Setting:
    task: str
    n: int
    k: int
    operator: str = "lapsum"
    falls: float = 1.0
    """the temperature at the end as a share of that at the start"""
    schedule: str = "geometric"
    hard: bool = False
    spread: float = 1.0
    """standard deviation of the scores at the start"""
    rate: float = 0.03
    penalty: float = 0.01
    """of the first weights behind the mask; "features" alone"""

    @property
    def temperatures(self) -> list[float]:
        """at the start: to 1000 for what the rule is about, to 100 for what stands beside it"""
        asked = (self.falls, self.schedule, self.hard) == (0.01, "geometric", False)
        return [10 ** (half / 2) for half in range(-6, 7 if asked else 5)]


SIZES = (("features", 32, 2), ("features", 32, 8), ("features", 256, 2), ("features", 256, 16), ("features", 1024, 16),
         ("patches", 32, 2), ("patches", 32, 8), ("patches", 256, 2), ("patches", 256, 16))  # fmt: skip


def settings() -> Iterator[Setting]:
    bases = [Setting(task, n, k, falls=0.01) for task, n, k in SIZES]
    small = [base for base in bases if base.n < 1024]
    yield from bases
    for base in bases:
        if (base.n, base.k) == (256, 16):
            yield from (replace(base, spread=spread) for spread in (0.1, 10.0))
            yield from (replace(base, rate=rate) for rate in (0.01, 0.1))
    yield from (replace(base, operator="permutahedron") for base in small)
    yield from (replace(base, penalty=0.0) for base in small if base.task == "features")
    for falls, hard in ((0.01, True), (1.0, False), (1.0, True)):
        yield from (replace(base, falls=falls, hard=hard) for base in bases)
    for falls, schedule in ((0.1, "geometric"), (0.001, "geometric"), (0.01, "linear"), (1.0, "learned")):
        yield from (replace(base, falls=falls, schedule=schedule) for base in small)
    for base in small:
        if base.task == "features" or (base.n, base.k) == (32, 2):  # its plain code takes long
            yield replace(base, operator="ksubset")


# --- the tasks: shapes (temperatures, seeds, …) -----------------------------------------------------------------------


class Features:
    """One mask for all examples."""

    def __init__(self, setting: Setting, random: torch.Generator) -> None:
        n, k = setting.n, setting.k
        self.right = torch.rand(SEEDS, n, generator=random).argsort(-1) < k
        signs = torch.randint(0, 2, (SEEDS, n), generator=random) * 2.0 - 1
        self.truth = self.right * signs * k**-0.5
        start = [
            setting.spread * torch.randn(SEEDS, n, generator=random),
            torch.randn(SEEDS, n, HIDDEN, generator=random) * 0.1 * k**-0.5,
            torch.zeros(SEEDS, 1, HIDDEN),
            torch.randn(SEEDS, HIDDEN, 1, generator=random) * HIDDEN**-0.5,
        ]
        self.parameters = [one.expand(len(setting.temperatures), *one.shape).clone().requires_grad_() for one in start]

    def draw(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(SEEDS, BATCH["features"], self.right.shape[-1], generator=random)
        return x, (x * self.truth[:, None]).sum(-1)

    def scores(self, x: Tensor) -> Tensor:
        return self.parameters[0]

    def weights(self) -> Tensor:
        return self.parameters[1]

    def predict(self, x: Tensor, mask: Tensor) -> Tensor:
        _, inner, shift, outer = self.parameters
        return (torch.tanh(x @ (mask[..., None] * inner) + shift) @ outer).squeeze(-1)


class Patches:
    """A mask for each example. The first direction says which patches count, the second what they hold."""

    def __init__(self, setting: Setting, random: torch.Generator) -> None:
        self.n, self.k = setting.n, setting.k
        self.basis = torch.linalg.qr(torch.randn(SEEDS, WIDTH, WIDTH, generator=random)).Q
        start = [
            setting.spread * torch.randn(SEEDS, WIDTH, generator=random) * WIDTH**-0.5,
            torch.randn(SEEDS, WIDTH, generator=random) * WIDTH**-0.5,
        ]
        self.parameters = [one.expand(len(setting.temperatures), *one.shape).clone().requires_grad_() for one in start]

    def draw(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(SEEDS, BATCH["patches"], self.n, WIDTH, generator=random)
        self.right = torch.rand(x.shape[:-1], generator=random).argsort(-1) < self.k
        x[..., 0] += MARK * self.right
        held = (x[..., 1] * self.right).sum(-1) * self.k**-0.5
        return torch.einsum("sbnd,sde->sbne", x, self.basis), held

    def scores(self, x: Tensor) -> Tensor:
        return torch.einsum("sbnd,tsd->tsbn", x, self.parameters[0])

    def weights(self) -> Tensor:
        return torch.zeros(())

    def predict(self, x: Tensor, mask: Tensor) -> Tensor:
        return (mask * torch.einsum("sbnd,tsd->tsbn", x, self.parameters[1])).sum(-1) * self.k**-0.5


def undecided(mask: Tensor, k: int) -> Tensor:
    """sum m (1 - m) as a share of k, (temperatures, seeds)."""
    return ((mask * (1 - mask)).sum(-1) / k).flatten(2).mean(-1) if mask.ndim > 3 else (mask * (1 - mask)).sum(-1) / k


def run(setting: Setting) -> dict[str, list[float]]:
    """Train one setting at all temperatures, with all seeds."""
    random = torch.Generator().manual_seed(0)
    task = (Features if setting.task == "features" else Patches)(setting, random)
    first = torch.tensor(setting.temperatures).log()[:, None].expand(-1, SEEDS).clone()
    learned = [first.requires_grad_()] if setting.schedule == "learned" else []
    shares: dict[int, Tensor] = {}
    optimizer = torch.optim.Adam([*task.parameters, *learned], setting.rate)
    for step in range(STEPS):
        x, target = task.draw(random)
        done = step / (STEPS - 1)
        if setting.schedule == "linear":
            temperature = first.exp() * (1 + done * (setting.falls - 1))
        else:
            temperature = first.exp() * setting.falls**done
        scores = task.scores(x)
        scaled = scores / temperature.reshape(*temperature.shape, *[1] * (scores.ndim - 2))
        if step in MOMENTS.values():
            with torch.no_grad():
                shares[step] = undecided(anyk.soft_topk(scaled, setting.k, setting.operator), setting.k)
        if step == 0:
            deviation = scores.detach().std(-1).mean().item()
        mask = anyk.soft_topk(scaled, setting.k, setting.operator, hard=setting.hard)
        loss = (task.predict(x, mask) - target).square().mean(-1).sum() + setting.penalty * task.weights().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    recalls, errors = [], []
    with torch.no_grad():
        for _ in range(10):
            x, target = task.draw(random)
            exact = anyk.soft_topk(task.scores(x), setting.k, hard=True)
            found = (exact * task.right).sum(-1) / setting.k
            recalls.append(found.flatten(2).mean(-1) if found.ndim > 2 else found)
            errors.append((task.predict(x, exact) - target).square().mean(-1))
    recall, error = torch.stack(recalls).mean(0), torch.stack(errors).mean(0)  # the target has variance 1
    row = {"recall": recall.mean(1), "recall_sd": recall.std(1), "error": error.mean(1), "error_sd": error.std(1)}
    row |= {name: shares[step].mean(1) for name, step in MOMENTS.items()}
    return {"deviation": deviation} | {name: [float(f"{value:.3g}") for value in one.tolist()] for name, one in row.items()}  # type: ignore[dict-item]


# --- the table --------------------------------------------------------------------------------------------------------

START = 30.0
"""a temperature to begin with, in standard deviations of the scores at the start"""
LEFT = 0.99
"""the rule: as much of the largest undecided mass, k (1 - k/n), is left after a quarter of the steps"""
MODES = (("falls to 1/100", 0.01, "geometric"), ("falls to 1/10", 0.1, "geometric"), ("falls to 1/1000", 0.001, "geometric"),
         ("falls to 1/100, straight", 0.01, "linear"), ("learned", 1.0, "learned"), ("fixed", 1.0, "geometric"))  # fmt: skip
RULES: dict[str, Callable[[Setting, dict], list[float]]] = {
    "temperature": lambda s, row: s.temperatures,
    "temperature / standard deviation of the scores": lambda s, row: [t / row["deviation"] for t in s.temperatures],
    "temperature / (learning rate times steps)": lambda s, row: [t / (s.rate * STEPS) for t in s.temperatures],
    "undecided mass / k at the start": lambda s, row: row["start"],
    "undecided mass / k (1 - k/n) at the start": lambda s, row: [share / (1 - s.k / s.n) for share in row["start"]],
    "undecided mass / k (1 - k/n) at a quarter": lambda s, row: [share / (1 - s.k / s.n) for share in row["quarter"]],
    "undecided mass / k (1 - k/n) at the half": lambda s, row: [share / (1 - s.k / s.n) for share in row["half"]],
}
Kept = list[tuple[Setting, dict]]


def mean_and_worst(values: list[float], worst: Callable[[list[float]], float]) -> str:
    return f"{sum(values) / len(values):.2f} ({worst(values):.2f})"


def nearest(values: list[float], goal: float) -> int:
    """The place of the value nearest to a goal by its logarithm."""
    return min(range(len(values)), key=lambda place: abs(math.log(max(values[place], 1e-9) / goal)))


def from_start(setting: Setting, row: dict) -> int:
    return nearest(RULES["temperature / standard deviation of the scores"](setting, row), START)


def by_rule(setting: Setting, row: dict) -> int:
    """The smallest temperature that leaves enough; the largest, if none does."""
    shares = RULES["undecided mass / k (1 - k/n) at a quarter"](setting, row)
    return next((place for place, share in enumerate(shares) if share >= LEFT), len(shares) - 1)


def best(setting: Setting, row: dict) -> int:
    return min(range(len(row["error"])), key=row["error"].__getitem__)


def outcome(kept: Kept, choose: Callable[[Setting, dict], int]) -> list[str]:
    """Recall and error, each as mean (worst) over the settings."""
    places = [choose(setting, row) for setting, row in kept]
    recalls, errors = ([row[name][place] for (_, row), place in zip(kept, places, strict=True)] for name in ("recall", "error"))
    return [mean_and_worst(recalls, min), mean_and_worst(errors, max)]


def one_value_for_all(kept: Kept, rule: Callable[[Setting, dict], list[float]]) -> list[str]:
    """The value that costs least error, in the mean over the settings, and what it gives."""
    values = [value for s, row in kept for value in rule(s, row)]
    goals = sorted({float(f"{value:.2g}") for value in values if value > 1e-6})
    cost = [sum(row["error"][nearest(rule(s, row), goal)] for s, row in kept) for goal in goals]
    goal = goals[cost.index(min(cost))]
    return [f"{goal:.2g}", *outcome(kept, lambda s, row: nearest(rule(s, row), goal))]


def table() -> str:
    kept: Kept = [(Setting(**line["setting"]), line["row"]) for line in map(json.loads, RUNS.read_text().splitlines())]

    def chosen(falls: float = 0.01, schedule: str = "geometric", hard: bool = False, **others: object) -> Kept:
        wanted = {"operator": "lapsum", "spread": 1.0, "rate": 0.03, "penalty": 0.01} | others
        wanted |= {"falls": falls, "schedule": schedule, "hard": hard}
        return [(s, row) for s, row in kept if all(getattr(s, name) == value for name, value in wanted.items())]

    parts = [f"# Which temperature trains a mask\n\n{__doc__}"]
    measured = ["recall (worst)", "error (worst)"]

    parts.append("## By the temperature at the start")
    parts.append(
        "LapSum, soft, falling to 1/100, scores that start with a standard deviation of 1. Mean (worst) of the nine sizes; of "
        "the undecided mass as a share of k (1 - k/n), mean (least)."
    )
    rows, runs = [], chosen()
    for place, temperature in enumerate(runs[0][0].temperatures):
        shares = [[row[name][place] / (1 - s.k / s.n) for s, row in runs] for name in MOMENTS]
        spread = sum(row["recall_sd"][place] for _, row in runs) / len(runs)
        rows.append([f"{temperature:.2g}", *(f"{sum(one) / len(one):.2f} ({min(one):.2f})" for one in shares),
                     *outcome(runs, lambda s, row, place=place: place), f"{spread:.2f}"])  # fmt: skip
    header = [
        "temperature",
        *(f"undecided at the {name}" for name in MOMENTS),
        *measured,
        "recall, sd over seeds",
    ]
    parts.append(markdown_table(header, rows))

    parts.append("## How it goes on")
    parts.append(
        f"LapSum, mean (worst) of the sizes: from {START:g} standard deviations of the scores, and from the "
        "temperature with the least error of each size."
    )
    rows = []
    for (name, falls, schedule), hard in itertools.product(MODES, (False, True)):
        runs = chosen(falls, schedule, hard)
        if runs:
            name = f"{name}, hard=True" if hard else name
            rows.append([name, str(len(runs)), *outcome(runs, from_start), *outcome(runs, best)])
    header = [
        "temperature",
        "sizes",
        *(f"{name}, from {START:g}" for name in measured),
        *(f"{name}, from the best" for name in measured),
    ]
    parts.append(markdown_table(header, rows))

    parts.append("## What else was varied")
    parts.append(
        f"Soft, falling to 1/100: from {START:g} standard deviations; by the rule, the smallest temperature that leaves "
        f"{LEFT:.0%} undecided after a quarter of the steps; from the best."
    )
    rows = []
    for name, others in (
        ("LapSum", {}),
        ("Permutahedron", {"operator": "permutahedron"}),
        ("KSubset", {"operator": "ksubset"}),
        ("scores start 10 times smaller", {"spread": 0.1}),
        ("scores start 10 times larger", {"spread": 10.0}),
        ("learning rate 3 times smaller", {"rate": 0.01}),
        ("learning rate 3 times larger", {"rate": 0.1}),
        ("no penalty on the weights", {"penalty": 0.0}),
    ):
        runs = chosen(**others)
        if runs:
            found = (outcome(runs, choose) for choose in (from_start, by_rule, best))
            rows.append([name, str(len(runs)), *itertools.chain(*found)])
    ways = (f"from {START:g}", "by the rule", "from the best")
    header = ["setting", "sizes", *(f"{name}, {way}" for way in ways for name in measured)]
    parts.append(markdown_table(header, rows))

    parts.append("## One value for all settings")
    runs = [(s, row) for s, row in kept if (s.falls, s.schedule, s.hard) == (0.01, "geometric", False) and s.penalty]
    parts.append(
        f"Each number with the value that has the least error in the mean over the {len(runs)} settings that are soft, fall to "
        "1/100 and have a penalty: sizes, operators, spreads, rates."
    )
    rows = [[rule, *one_value_for_all(runs, values)] for rule, values in RULES.items()]
    rows.append([f"(the rule: {LEFT:.0%} undecided after a quarter)", "", *outcome(runs, by_rule)])
    rows.append(["(the best of each setting)", "", *outcome(runs, best)])
    parts.append(markdown_table(["the same", "value", *measured], rows))

    parts.append("## Each setting")
    parts.append(
        "By the temperature at the start: recall ± standard deviation over five seeds, error with the exact k, undecided share "
        "of k at the start and at the end."
    )
    for (name, falls, schedule), hard in itertools.product(MODES, (False, True)):
        rows = []
        for s, row in kept:
            if (s.falls, s.schedule, s.hard) != (falls, schedule, hard):
                continue
            others = [one for one in fields(s) if one.name in ("spread", "rate", "penalty")]
            more = "".join(f", {one.name} {getattr(s, one.name):g}" for one in others if getattr(s, one.name) != one.default)
            cells = zip(*(row[one] for one in ("recall", "recall_sd", "error", "start", "end")), strict=True)
            rows.append([f"{s.task} {s.k} of {s.n}, {s.operator}{more}",
                         *(f"{r:.2f} ± {sd:.2f}, {e:.2g}, {u:.2g}, {v:.1g}" for r, sd, e, u, v in cells)])  # fmt: skip
        if rows:
            parts.append(f"### {name}, {'hard' if hard else 'soft'}")
            parts.append(
                markdown_table(["", *(f"{t:.2g}" for t in Setting("", 1, 1, "", falls, schedule, hard).temperatures)], rows)
            )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="nothing is run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = {json.dumps(json.loads(line)["setting"]) for line in RUNS.read_text().splitlines()} if RUNS.exists() else set()
    for setting in [] if given.table else settings():
        if json.dumps(asdict(setting)) in done:
            continue
        row = run(setting)
        with RUNS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"setting": asdict(setting), "row": row}) + "\n")
        print(setting, row["recall"], flush=True)
    PAGE.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
