"""Learning to rank on 251 queries: `ndcg_loss` beside LightGBM's lambdarank and a listwise softmax.

    pip install "anyk[lab]" lightgbm
    python evidence/lambdarank.py FOLDER --runs RUNS.jsonl

FOLDER has LightGBM's example data (examples/lambdarank in its repository): rank.train and rank.test in LIBSVM's form, and
beside each a .query with the number of documents of each query. A run that has ended is in RUNS.jsonl and is not made again:
the command may be killed at any moment. It writes evidence/summaries/lambdarank.json and the table in docs/operators.md.
LightGBM is no dependency of anyk. Some 20 minutes on one core.

Written before the runs:

What is asked. Does a network trained by `ndcg_loss(k=10)` rank better than LightGBM's lambdarank, or than the same network
trained by ListNet's softmax? NDCG@10 with gain 2^rel - 1, the mean over queries; queries without a relevant document have no
NDCG and are left out. "Better" is a p below 0.05 of the paired t test over queries (each query's NDCG@10 the mean over five
seeds), after Holm's correction over the seven comparisons of `ndcg_loss(k=10)` with the others. Anything else is "no difference
was found".

Methods. The networks differ in the loss alone: `ndcg_loss` with the cut at 10 and without it (LapSum), approxNDCG with logistic
ranks, ListNet (the target is softmax(rel), or the gains' shares: tuned), the pairwise logistic loss weighted by the change of
NDCG@10 (lambdarank's), squared error of rel. LightGBM with lambdarank, and with squared error. So there are controls for the
cut, for the relaxation, for the model and for a loss that knows nothing of ranks.

Tuning. All 251 queries in five folds by a fixed shuffle. For each test fold, settings and the number of epochs (rounds of
trees) are those of the best mean NDCG@10 in a cross-validation over the other four folds; then five seeds train on these four.
Each method has 12 tries. The networks share the draws of learning rate, width, dropout and weight decay; what else a loss has
(temperature, target) is drawn beside them, without more tries. Each try has a curve of 30 points, an epoch or ten trees each: a
length set after a look at one untuned run of each method on one split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn

from anyk.lab.statistics import holm, mean, std
from anyk.ranking import ndcg_loss

SUMMARY = Path(__file__).parent / "summaries" / "lambdarank.json"
GUIDE = Path(__file__).parents[1] / "docs" / "operators.md"
FOLDS, SEEDS, TRIES, POINTS = 5, 5, 12, 30
EPOCHS_A_POINT, ROUNDS_A_POINT, BATCH = 1, 10, 32
BASE = "ndcg_loss, k=10"
NETWORKS = (BASE, "ndcg_loss, all places", "approxNDCG, logistic", "ListNet", "lambdarank", "squared error")
TREES = {"LightGBM, lambdarank": "lambdarank", "LightGBM, squared error": "regression"}


# Data ----------------------------------------------------------------------------------------------------------------------


class Queries(NamedTuple):
    """Documents, padded to the longest query."""

    features: Tensor
    """(queries, documents, features)"""
    relevance: Tensor
    """(queries, documents), 0 where there is none"""
    there: Tensor
    """(queries, documents), whether there is one"""

    def take(self, which: Any) -> Queries:
        return Queries(*(part[which] for part in self))


def read(folder: Path) -> Queries:
    """The queries of both parts; features that never occur are dropped."""
    queries = list[list[tuple[float, dict[int, float]]]]()
    for part in ("rank.train", "rank.test"):
        lines = (line.split() for line in (folder / part).read_text().splitlines())
        documents = [
            (float(label), {int(n): float(v) for n, v in (pair.split(":") for pair in pairs)}) for label, *pairs in lines
        ]
        rest = iter(documents)
        queries += [list(itertools.islice(rest, int(n))) for n in (folder / f"{part}.query").read_text().split()]
    width = 1 + max(number for query in queries for _, found in query for number in found)
    longest = max(map(len, queries))
    data = Queries(
        torch.zeros(len(queries), longest, width),
        torch.zeros(len(queries), longest),
        torch.zeros(len(queries), longest, dtype=torch.bool),
    )
    for place, query in enumerate(queries):
        for row, (label, found) in enumerate(query):
            data.features[place, row, list(found)] = torch.tensor(list(found.values()))
            data.relevance[place, row], data.there[place, row] = label, True
    return data._replace(features=data.features[..., data.features.flatten(0, 1).any(0)])


def gains_and_discounts(relevance: Tensor, k: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """2^rel - 1, the discount of each place (0 after k), and the best DCG@k."""
    places = torch.arange(1, relevance.shape[-1] + 1)
    discounts = torch.where(places <= k, 1 / torch.log2(1.0 + places), 0)
    gains = 2**relevance - 1
    return gains, discounts, (gains.sort(-1, descending=True).values * discounts).sum(-1)


def ndcg(scores: Tensor, data: Queries) -> Tensor:
    """NDCG@10 of each query, NaN for those without a relevant document."""
    gains, discounts, best = gains_and_discounts(data.relevance)
    order = scores.masked_fill(~data.there, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return (gains.gather(-1, order) * discounts).sum(-1) / torch.where(best > 0, best, torch.nan)


# Methods -------------------------------------------------------------------------------------------------------------------


def loss_of(method: str, scores: Tensor, data: Queries, settings: dict[str, Any]) -> Tensor:
    relevance, there = data.relevance, data.there
    if method.startswith("ndcg_loss"):
        k = 10 if method == BASE else None
        return ndcg_loss(scores, relevance, k, temperature=settings["temperature"], where=there)
    if method == "squared error":
        return (scores - relevance)[there].square().mean()
    if method == "ListNet":
        logits = relevance if settings["target"] == "softmax" else (2**relevance - 1).log()
        some = (relevance > 0).any(-1)
        target = logits.masked_fill(~there, -torch.inf)[some].softmax(-1)
        return -(target * scores.masked_fill(~there, -1e9)[some].log_softmax(-1)).sum(-1).mean()
    gains, discounts, best = gains_and_discounts(relevance)
    pairs = there[..., :, None] & there[..., None, :]
    if method == "approxNDCG, logistic":
        beaten = ((scores[..., None, :] - scores[..., :, None]) / settings["temperature"]).sigmoid() * pairs
        ranks = 0.5 + beaten.sum(-1)  # each ties with itself
        places = torch.arange(1, relevance.shape[-1] + 1)
        best = (gains.sort(-1, descending=True).values / torch.log2(1.0 + places)).sum(-1)
        share = (gains / torch.log2(1 + ranks)).sum(-1) / best.clamp(min=1e-9)
        return 1 - share[best > 0].mean()
    ranks = scores.detach().masked_fill(~there, -torch.inf).argsort(-1, descending=True).argsort(-1)
    discount = discounts[ranks]
    swap = (gains[..., :, None] - gains[..., None, :]) * (discount[..., :, None] - discount[..., None, :])
    weight = swap.abs() / best.clamp(min=1e-9)[..., None, None] * (relevance[..., :, None] > relevance[..., None, :]) * pairs
    apart = (scores[..., :, None] - scores[..., None, :]) / settings["temperature"]
    return (weight * nn.functional.softplus(-apart)).sum((-2, -1)).mean()


def draws(method: str) -> list[dict[str, Any]]:
    """The settings of the tries."""
    shared, own = random.Random(0), random.Random(method)
    if method in TREES:
        return [
            {
                "learning_rate": round(math.exp(own.uniform(math.log(0.01), math.log(0.2))), 4),
                "num_leaves": own.choice([4, 8, 16, 31]),
                "min_data_in_leaf": own.choice([5, 20, 50]),
                "feature_fraction": own.choice([0.1, 0.3, 0.6, 1.0]),
                "bagging_fraction": own.choice([0.5, 0.8, 1.0]),
                "lambda_l2": own.choice([0.0, 1.0, 10.0]),
                **({"lambdarank_truncation_level": own.choice([10, 13, 30])} if method == "LightGBM, lambdarank" else {}),
            }
            for _ in range(TRIES)
        ]
    tries = []
    for _ in range(TRIES):
        settings: dict[str, Any] = {
            "learning_rate": round(math.exp(shared.uniform(math.log(3e-4), math.log(1e-2))), 5),
            "width": shared.choice([0, 32, 64]),
            "dropout": shared.choice([0.0, 0.3, 0.6]),
            "weight_decay": shared.choice([1e-3, 1e-1, 1.0]),
        }
        if method == "ListNet":
            settings["target"] = own.choice(["softmax", "gains"])
        elif method != "squared error":
            settings["temperature"] = round(math.exp(own.uniform(math.log(0.03), math.log(3.0))), 3)
        tries.append(settings)
    return tries


def network_curve(method: str, settings: dict[str, Any], train: Queries, test: Queries, seed: int, points: int) -> list[Tensor]:
    """NDCG@10 of each test query, at each point of the training."""
    torch.manual_seed(seed)
    known = train.features[train.there]
    centre, scale = known.mean(0), known.std(0).clamp(min=1e-3)
    train, test = (part._replace(features=((part.features - centre) / scale).clamp(-3, 3)) for part in (train, test))
    inputs, width = known.shape[-1], settings["width"]
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(settings["dropout"]), nn.Linear(width, 1)]
    drop = nn.Dropout(settings["dropout"] / 2)  # of features
    model = nn.Sequential(drop, *layers) if width else nn.Sequential(drop, nn.Linear(inputs, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"])

    def scores(data: Queries) -> Tensor:
        return torch.zeros(data.there.shape).masked_scatter(data.there, model(data.features[data.there]))

    curve = []
    for _ in range(points):
        model.train()
        for batch in itertools.chain(*(torch.randperm(len(train.there)).split(BATCH) for _ in range(EPOCHS_A_POINT))):
            part = train.take(batch)
            optimizer.zero_grad()
            loss_of(method, scores(part), part, settings).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            curve.append(ndcg(scores(test), test))
    return curve


def tree_curve(method: str, settings: dict[str, Any], train: Queries, test: Queries, seed: int, points: int) -> list[Tensor]:
    """The same of LightGBM."""
    import lightgbm

    shared = {"objective": TREES[method], "verbosity": -1, "num_threads": 1, "seed": seed, "bagging_freq": 1}
    rows, labels = train.features[train.there].numpy(), train.relevance[train.there].numpy()
    given = lightgbm.Dataset(rows, labels, group=train.there.sum(-1).numpy())
    booster = lightgbm.train({**shared, **settings}, given, num_boost_round=points * ROUNDS_A_POINT)
    rows = test.features[test.there].numpy()
    curve, total = [], torch.zeros(len(rows))
    for point in range(points):
        more = booster.predict(rows, start_iteration=point * ROUNDS_A_POINT, num_iteration=ROUNDS_A_POINT)
        total = total + torch.tensor(more, dtype=torch.float32)
        curve.append(ndcg(torch.zeros(test.there.shape).masked_scatter(test.there, total), test))
    return curve


# Study ---------------------------------------------------------------------------------------------------------------------


class Runs:
    """What has ended, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.found: dict[str, Any] = {}
        for line in lines:
            try:
                self.found.update(json.loads(line))
            except json.JSONDecodeError:  # it was killed while it wrote
                continue

    def get(self, make: Any, *key: Any) -> Any:
        name = json.dumps(key)
        if name not in self.found:
            self.found[name] = make()
            with self.path.open("a") as file:
                file.write("\n" + json.dumps({name: self.found[name]}))
        return self.found[name]


def study(method: str, data: Queries, folds: list[Tensor], runs: Runs) -> dict[str, Any]:
    """One method: what was chosen for each test fold, and NDCG@10 of each query and seed."""
    curve = tree_curve if method in TREES else network_curve
    tries = draws(method)

    def held_out(settings: dict[str, Any], left: tuple[int, ...]) -> list[list[float]]:
        """The sum of NDCG@10 in each of two folds, at each point, trained on the other three."""
        train = torch.cat([folds[f] for f in range(FOLDS) if f not in left])
        parts = [len(folds[f]) for f in left]
        found = curve(method, settings, data.take(train), data.take(torch.cat([folds[f] for f in left])), 0, POINTS)
        return [[part.nansum().item() for part in one.split(parts)] for one in found]

    pairs = list(itertools.combinations(range(FOLDS), 2))
    validation = torch.tensor(
        [[runs.get(lambda s=s, p=p: held_out(s, p), method, s, p) for p in pairs] for s in tries]  # type: ignore[misc]
    )  # (tries, pairs, points, 2)
    chosen, values = [], torch.full((SEEDS, len(data.there)), torch.nan)
    for fold in range(FOLDS):
        # trained without the folds (fold, other), measured on other
        totals = sum(validation[:, n, :, 1 - pair.index(fold)] for n, pair in enumerate(pairs) if fold in pair)
        assert isinstance(totals, Tensor)
        one, point = divmod(int(totals.argmax()), POINTS)
        chosen.append({**tries[one], "points": point + 1})
        train = data.take(torch.cat([folds[f] for f in range(FOLDS) if f != fold]))
        for seed in range(SEEDS):

            def final(
                seed: int = seed, fold: int = fold, one: int = one, point: int = point, train: Queries = train
            ) -> list[float]:
                return curve(method, tries[one], train, data.take(folds[fold]), seed, point + 1)[-1].tolist()

            values[seed, folds[fold]] = torch.tensor(runs.get(final, method, tries[one], point, fold, seed))
    print(f"{method}: {values.nanmean():.4f}", flush=True)
    return {"chosen": chosen, "ndcg": [round(value, 5) for value in values.nanmean(1).tolist()], "queries": values.mean(0)}


def compare(found: dict[str, dict[str, Any]]) -> None:
    """Add each method's difference to the base: mean, 95 % interval, p of the paired t test, and p after Holm's correction."""
    others = [method for method in found if method != BASE]
    for method in others:
        apart = (found[BASE]["queries"] - found[method]["queries"]).double().numpy()
        apart = apart[~np.isnan(apart)]
        test = scipy.stats.ttest_1samp(apart, 0)
        low, high = test.confidence_interval()
        found[method]["base_less_this"] = {
            **{"mean": round(float(apart.mean()), 5), "low": round(float(low), 5), "high": round(float(high), 5)},
            **{"p": float(test.pvalue), "queries": len(apart)},
        }
    for method, p in zip(others, holm([found[method]["base_less_this"]["p"] for method in others]), strict=True):
        found[method]["base_less_this"]["p_holm"] = p


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table of docs/operators.md.

    >>> less = {"mean": 0.01, "low": -0.01, "high": 0.03, "p_holm": 0.5}
    >>> print(table({BASE: {"ndcg": [0.61, 0.63]}, "ListNet": {"ndcg": [0.6, 0.62], "base_less_this": less}}))
    | method | NDCG@10 | `ndcg_loss, k=10` less this | p, Holm |
    |---|---|---|---|
    | ndcg_loss, k=10 | 0.620 ± 0.014 | | |
    | ListNet | 0.610 ± 0.014 | +0.010 (-0.010 to +0.030) | 0.50 |
    """
    lines = ["| method | NDCG@10 | `ndcg_loss, k=10` less this | p, Holm |", "|---|---|---|---|"]
    for method, one in found.items():
        spread = std(one["ndcg"])
        start = f"| {method} | {mean(one['ndcg']):.3f} ± {spread:.3f} |"
        if method == BASE:
            lines.append(f"{start} | |")
            continue
        less = one["base_less_this"]
        p = (
            "< 0.001"
            if less["p_holm"] < 0.001
            else f"{less['p_holm']:.2g}"
            if less["p_holm"] < 0.01
            else f"{less['p_holm']:.2f}"
        )
        lines.append(f"{start} {less['mean']:+.3f} ({less['low']:+.3f} to {less['high']:+.3f}) | {p} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("lambdarank-runs.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = read(arguments.folder)
    folds = list(torch.randperm(len(data.there), generator=torch.Generator().manual_seed(0)).tensor_split(FOLDS))
    runs = Runs(arguments.runs)
    found = {method: study(method, data, folds, runs) for method in (*NETWORKS, *TREES)}
    compare(found)
    for one in found.values():
        one["queries"] = [None if math.isnan(value) else round(value, 4) for value in one["queries"].tolist()]
    lines = (f"{json.dumps(method)}: {json.dumps(one)}" for method, one in found.items())
    SUMMARY.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    before, after = GUIDE.read_text(encoding="utf-8").split("<!-- lambdarank -->\n")
    GUIDE.write_text(f"{before}<!-- lambdarank -->\n{table(found)}\n{after[after.index('<!-- end -->') :]}", encoding="utf-8")


if __name__ == "__main__":
    main()
