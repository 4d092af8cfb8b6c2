"""What the runs say: differences with their tests, and the rule for the default, as it was written down before them."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anyk.lab import statistics
from anyk.lab.statistics import Paired
from pays.plan import DECIDE, METHODS, NOISY, SETS
from pays.summaries import Summaries

#: the loss of top-1 that the interval must exclude, and the p that a gain of top-k must have
MARGIN, SURE = 0.002, 0.01
#: the sets on which top-k must be gained
ENOUGH = 3
#: the error losses that are asked everywhere; pixels, whose runs are long, have one of them
CANDIDATES = tuple(
    name
    for name in METHODS
    if name.startswith("error:") and all(name in SETS[each].methods for each in DECIDE if each != "pixels")
)
#: a page asks for the same ones many times
two_way = functools.cache(statistics.two_way)
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Tested:
    """A difference with its p after Holm."""

    paired: Paired
    p: float | None

    @property
    def sure(self) -> bool:
        """Whether p is below the rule's level."""
        return self.p is not None and self.p < SURE


def difference(summaries: Summaries, one: str, other: str, metric: str) -> Paired | None:
    """Two rows, by what their runs are for; None where there is no count."""
    counted = summaries.contrast(one, other, metric)
    return None if counted is None else two_way(counted)


def family(
    summaries: Summaries, pairs: Sequence[tuple[str, str]], metrics: Sequence[str]
) -> dict[tuple[str, str, str], Tested]:
    """The differences of some pairs of rows in some metrics, as one family of tests."""
    found = {
        (one, other, metric): paired
        for one, other in pairs
        for metric in metrics
        if (paired := difference(summaries, one, other, metric)) is not None
    }
    return corrected(found)


def corrected(found: Mapping[Key, Paired]) -> dict[Key, Tested]:
    """Differences as one family of tests, with Holm's correction over all of them."""
    p_values = statistics.holm([paired.p for paired in found.values()])
    return {name: Tested(paired, p) for (name, paired), p in zip(found.items(), p_values, strict=True)}


def main_differences(summaries: Summaries, against: str) -> dict[tuple[str, int], Tested]:
    """Every method of a set against one of them, at 1 and at K: by method and k; none before all were measured, since the
    correction is over all of them."""
    if not complete(summaries):
        return {}
    pairs = [(f"main: {name}", f"main: {against}") for name in summaries.set.methods if name != against]
    tested = family(summaries, pairs, summaries.set.metrics)
    return {(one.removeprefix("main: "), int(metric.removeprefix("top"))): found for (one, _, metric), found in tested.items()}


@dataclass(frozen=True)
class Judged:
    """What the rule says of a candidate. ``passes`` is None while a set is not measured."""

    method: str
    passes: bool | None
    reasons: tuple[str, ...]
    """why it does not pass, or what is missing"""
    gained: tuple[str, ...]
    """the sets on which top-k is gained for sure"""
    mean: float | None
    """the mean of both differences to softmax, over the sets that all candidates have"""


def complete(summaries: Summaries) -> bool:
    """Whether all methods of a set were measured on all seeds: Holm's correction is over all of them."""
    counted = [
        summaries.contrast(f"main: {name}", "main: softmax", "top1") for name in summaries.set.methods if name != "softmax"
    ]
    return all(each is not None and len(each.by_seed) >= len(summaries.set.seeds) for each in counted)


def judge(sets: Mapping[str, Summaries], candidates: Sequence[str] = CANDIDATES) -> list[Judged]:
    """The rule, for every candidate."""
    softmax = {name: main_differences(sets[name], "softmax") for name in DECIDE}
    gce = {name: main_differences(sets[name], "gce") for name in DECIDE}
    shared = [name for name in DECIDE if all(method in SETS[name].methods for method in candidates)]
    judged = []
    for method in candidates:
        failed, missing, gained, against_gce = [], [], [], []
        for name in DECIDE:
            k = SETS[name].k
            top1, topk = softmax[name].get((method, 1)), softmax[name].get((method, k))
            controls = [gce[name].get((method, each)) for each in (1, k)]
            if method not in SETS[name].methods:
                failed.append(f"{name}: not among its methods")
                continue
            if top1 is None or topk is None or None in controls or not complete(sets[name]):
                missing.append(f"{name}: not measured")
                continue
            against_gce += [one.paired.difference for one in controls if one is not None]
            if top1.paired.low is None or top1.paired.low <= -MARGIN:
                failed.append(f"{name}: top-1 may lose {100 * MARGIN:g} points")
            if topk.sure and topk.paired.difference > 0:
                gained.append(name)
        if len(gained) + len(missing) < ENOUGH:
            failed.append(f"the list is gained on {len(gained)} of the four sets only")
        if not missing and statistics.mean(against_gce) < 0:
            failed.append("the mean of both is below gce's")
        both = [
            found.paired.difference
            for name in shared
            for k in (1, SETS[name].k)
            if (found := softmax[name].get((method, k))) is not None
        ]
        mean = statistics.mean(both) if len(both) == 2 * len(shared) and both else None
        passes = False if failed else None if missing else True
        judged.append(Judged(method, passes, (*failed, *missing), tuple(gained), mean))
    return judged


def default(judged: Sequence[Judged]) -> Judged | None:
    """What the rule makes the default: what passes, the best of several by the mean of both; if nothing passes, the best of
    all by it. None while that is open."""
    passed = [one for one in judged if one.passes]
    ranked = [one for one in passed or judged if one.mean is not None]
    if any(one.passes is None for one in judged) or len(ranked) < len(passed or judged):
        return None
    return max(ranked, key=lambda one: one.mean if one.mean is not None else 0.0)


# Wrong labels --------------------------------------------------------------------------------------------------------------

#: the sets of the rule for wrong labels, and the sets on which a loss must gain
WRONG = tuple(name for name in NOISY if not name.startswith("pixels"))
ENOUGH_WRONG = 4
#: what all of them have beside softmax
CONTENDERS = tuple(name for name in METHODS if name != "softmax" and all(name in NOISY[each].methods for each in WRONG))


@dataclass(frozen=True)
class Helped:
    """What the rule for wrong labels says of a loss. ``helps`` is None while a set is not measured."""

    method: str
    helps: bool | None
    gained: tuple[str, ...]
    """the sets on which top-1 or top-K is gained for sure"""
    lost: tuple[str, ...]
    """the sets on which one of them is lost for sure"""
    mean: float | None
    """the mean of both differences to softmax over all sets"""
    beyond_gce: tuple[str, ...]
    """the sets on which one of both is surely better than gce's"""
    behind_gce: tuple[str, ...]
    """the sets on which one of both is surely worse than gce's"""


def judge_wrong(sets: Mapping[str, Summaries]) -> list[Helped]:
    """The rule for wrong labels, for every loss that all of its sets have."""
    softmax, gce = ({name: main_differences(sets[name], control) for name in WRONG} for control in ("softmax", "gce"))
    judged = []
    for method in CONTENDERS:
        pairs = {name: [softmax[name].get((method, k)) for k in NOISY[name].ks] for name in WRONG}
        known = {name: [one for one in pair if one is not None] for name, pair in pairs.items()}
        gained = tuple(name for name in WRONG if any(one.sure and one.paired.difference > 0 for one in known[name]))
        lost = tuple(name for name in WRONG if any(one.sure and one.paired.difference < 0 for one in known[name]))
        # Holm over both k alone: whether k adds something to being bounded is asked of each loss by itself.
        beside = {
            name: corrected({k: gce[name][method, k].paired for k in NOISY[name].ks if (method, k) in gce[name]}).values()
            for name in WRONG
        }
        beyond, behind = (
            tuple(name for name in WRONG if any(one.sure and sign * one.paired.difference > 0 for one in beside[name]))
            for sign in (1, -1)
        )
        complete_ = all(len(pair) == 2 for pair in known.values()) and all(complete(sets[name]) for name in WRONG)
        every = [one.paired.difference for pair in known.values() for one in pair]
        judged.append(
            Helped(
                method,
                (len(gained) >= ENOUGH_WRONG and not lost) if complete_ else None,
                gained,
                lost,
                statistics.mean(every) if complete_ else None,
                beyond,
                behind,
            )
        )
    return judged


def line_for_wrong_labels(judged: Sequence[Helped]) -> Helped | None:
    """What README shows for wrong labels: of what helps, the best by the mean of both; None if nothing does, or while that is
    open."""
    helping = [one for one in judged if one.helps and one.mean is not None]
    if any(one.helps is None for one in judged) or not helping:
        return None
    return max(helping, key=lambda one: one.mean if one.mean is not None else 0.0)
