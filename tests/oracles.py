"""Slow, obvious references. Plain Python or one-line torch, nothing shared with the library."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath  # sympy, which torch needs, brings it
import torch
from torch import Tensor


def run_network(network, values: list) -> list:
    """What a network does to plain numbers."""
    values = list(values)
    for layer in network.layers:
        for i, j in layer:
            if values[i] < values[j]:
                values[i], values[j] = values[j], values[i]
    return [values[wire] for wire in network.outputs]


def soft_network(network, scores: list[float], swap, scale: float) -> list[list[float]]:
    """P of a soft network, comparator by comparator, with one share for each (wire, class)."""
    n = network.n
    values = [float(s) for s in scores]
    shares = [[float(wire == c) for c in range(n)] for wire in range(n)]
    for layer in network.layers:
        for i, j in layer:
            alpha = swap((values[i] - values[j]) / scale)
            a, b = values[i], values[j]
            values[i], values[j] = alpha * a + (1 - alpha) * b, (1 - alpha) * a + alpha * b
            p, q = shares[i], shares[j]
            shares[i] = [alpha * x + (1 - alpha) * y for x, y in zip(p, q, strict=True)]
            shares[j] = [(1 - alpha) * x + alpha * y for x, y in zip(p, q, strict=True)]
    return [shares[wire] for wire in network.outputs]


SWAPS = {
    "logistic": lambda v: 1 / (1 + math.exp(-v)),
    "logistic_art": lambda v: 1 / (1 + math.exp(-math.copysign(math.sqrt(abs(v)), v))),
    "cauchy": lambda v: 0.5 + math.atan(v) / math.pi,
    "gaussian": lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))),
    "reciprocal": lambda v: (v / (2 + abs(v)) + 1) / 2,
    "optimal": lambda v: v + 0.5 if abs(v) <= 0.25 else (1 - 1 / (16 * v) if v > 0 else -1 / (16 * v)),
}


def neuralsort(scores: list[float], t: float) -> list[list[float]]:
    n = len(scores)
    rows = []
    for r in range(1, n + 1):
        exponents = [((n + 1 - 2 * r) * scores[c] - sum(abs(scores[c] - scores[j]) for j in range(n))) / t for c in range(n)]
        rows.append(softmax(exponents))
    return rows


def softsort(scores: list[float], t: float, q: float = 1.0) -> list[list[float]]:
    ordered = sorted(scores, reverse=True)
    return [softmax([-(abs(best - s) ** q) / t for s in scores]) for best in ordered]


def softmax(exponents: list[float]) -> list[float]:
    top = max(exponents)
    weights = [math.exp(e - top) for e in exponents]
    return [w / sum(weights) for w in weights]


def lapsum_inclusion(scores: list[float], t: float, j: int) -> list[float]:
    """T_j of every class, the threshold by bisection."""
    if j == len(scores):
        return [1.0] * j

    def cdf(x: float) -> float:
        return 0.5 * math.exp(x) if x < 0 else 1 - 0.5 * math.exp(-x)

    low, high = min(scores) - 100 * t, max(scores) + 100 * t
    for _ in range(200):
        middle = (low + high) / 2
        if sum(cdf((s - middle) / t) for s in scores) > j:
            low = middle
        else:
            high = middle
    return [cdf((s - low) / t) for s in scores]


def ksubset_inclusion(scores: list[float], t: float, j: int) -> list[float]:
    """T_j of every class, by enumeration of all j-subsets."""
    subsets = list(itertools.combinations(range(len(scores)), j))
    weights = softmax([sum(scores[c] for c in subset) / t for subset in subsets])
    return [sum(w for w, subset in zip(weights, subsets, strict=True) if c in subset) for c in range(len(scores))]


def sinkhorn_plan(scores: Tensor, t: float, iterations: int = 20000) -> Tensor:
    """P by plain log-domain Sinkhorn iterations, in float64."""
    n = len(scores)
    anchors = -torch.arange(1, n + 1, dtype=torch.float64)
    log_kernel = -((scores.double()[None, :] - anchors[:, None]) ** 2) / t
    f, g = torch.zeros(n, 1, dtype=torch.float64), torch.zeros(1, n, dtype=torch.float64)
    for _ in range(iterations):
        f = -torch.logsumexp(log_kernel + g, 1, keepdim=True)
        g = -torch.logsumexp(log_kernel + f, 0, keepdim=True)
    return (log_kernel + f + g).exp()


def smooth_topk(scores: list[float], y: int, k: int, t: float, margin: float = 1.0) -> float:
    """The smooth top-k SVM loss by enumeration of all k-subsets."""

    def log_sum(values: list[float]) -> float:
        top = max(values)
        return top + math.log(sum(math.exp(v - top) for v in values))

    everything, right = [], []
    for subset in itertools.combinations(range(len(scores)), k):
        mean = sum(scores[c] for c in subset) / k
        everything.append(((y not in subset) * margin + mean) / t)
        if y in subset:
            right.append(mean / t)
    return t * (log_sum(everything) - log_sum(right))


def ranking_metric(
    scores: list[list[float]], target: list[int], gain: Callable[[int], float], average: str, ignored: int = -100
) -> float:
    """The mean of a gain for each rank over the targets, or over the classes among them; rows of scores, one for each."""
    groups: dict[int, list[float]] = {}
    for row, y in zip(scores, target, strict=True):
        if y != ignored:
            rank = 1 + sum(other >= row[y] for c, other in enumerate(row) if c != y)
            groups.setdefault(y if average == "macro" else 0, []).append(gain(rank))
    means = [sum(gains) / len(gains) for gains in groups.values()]
    return sum(means) / len(means) if means else math.nan


def leads_in_order(scores: Tensor, y: int) -> Tensor:
    """How far the other classes are ahead of class y, all of them sorted, padding left out."""
    others = torch.cat([scores[:y], scores[y + 1 :]])
    return others[others != -torch.inf].sort(descending=True).values - scores[y]


def topk_hinge(scores: Tensor, y: int, k: int, variant: str, margin: float = 1.0) -> Tensor:
    margins = torch.cat([leads_in_order(scores, y) + margin, scores.new_zeros(1)]).sort(descending=True).values[:k]
    return (margins.sum() / k).clamp(min=0) if variant == "alpha" else margins.clamp(min=0).sum() / k


def truncated_topk_entropy(scores: Tensor, y: int, k: int) -> Tensor:
    return torch.cat([scores.new_zeros(1), leads_in_order(scores, y)[k - 1 :]]).logsumexp(0)


def softmax_at_k(scores: Tensor, y: int, k: int, t: float = 1.0) -> Tensor:
    """The threshold is a number: it has no gradient."""
    threshold = sorted(scores.tolist(), reverse=True)[k - 1]
    behind = (threshold - scores[y]) / t
    return -scores.log_softmax(0)[y] * (-torch.logaddexp(behind, torch.zeros_like(behind))).exp()  # 1 / (1 + e^behind)


def smooth_topk_by_recursion(
    scores: Tensor, y: int, k: int, t: float, margin: float = 1.0, hard_threshold: float | None = 1e3
) -> Tensor:
    """The smooth top-k SVM loss, class by class, in logarithms; for rows too long to enumerate."""
    leads = leads_in_order(scores, y)
    if len(leads) < k:
        return 0 * scores[y]
    logs = [scores.new_zeros(()), *[scores.new_tensor(-1e300)] * k]
    for lead in leads:
        logs = [logs[0], *(torch.logaddexp(logs[j], logs[j - 1] + lead / (k * t)) for j in range(1, k + 1))]
    everyone = torch.cat([leads, scores.new_zeros(1)]).sort(descending=True).values
    if hard_threshold is not None and everyone[k - 1] - everyone[k] >= k * t * math.log(hard_threshold):
        return (margin + leads[k - 1] / k).clamp(min=0)
    return t * torch.nn.functional.softplus(margin / t + logs[k] - logs[k - 1])


def topk_loss(inclusion: list[float], softmax_y: float, p_k: list[float], top1: str) -> float:
    """The loss of one example from T_1..T_k, as the formulae have it."""
    k = len(p_k)
    if top1 == "operator":
        return -math.log(min(1.0, sum(p_k[j] * inclusion[j] for j in range(k))))
    later = sum(p_k[j] * inclusion[j] for j in range(1, k))
    if top1 == "mixed":
        return -math.log(min(1.0, p_k[0] * softmax_y + later))
    rest = 1 - p_k[0]
    second = rest * math.log(min(1.0, later / rest)) if rest > 1e-12 else 0.0
    return -p_k[0] * math.log(softmax_y) - second


def topk_error(inclusion: list[float], softmax: float, p_k: list[float], ce_weight: float, q: float) -> float:
    """The bounded loss of one example, from the formula."""
    capped = [min(1.0, t) for t in inclusion]
    errors = [(1 - t**q) / q if q else -math.log(t) for t in capped]
    bounded = sum(p * error for p, error in zip(p_k, errors, strict=True))
    return ce_weight * -math.log(softmax) + (1 - ce_weight) * bounded


def exact_ksubset(scores: list[Any], target: int, k: int) -> Any:
    """T_k of KSubset by listing the subsets, in whatever numbers the scores are."""
    total = with_target = 0
    for chosen in itertools.combinations(range(len(scores)), k):
        weight = mpmath.exp(sum(scores[c] for c in chosen))
        total += weight
        with_target += weight if target in chosen else 0
    return with_target / total


def exact_lapsum(scores: list[Any], target: int, k: int) -> Any:
    """T_k of LapSum with the threshold found by bisection."""

    def inclusion(score: Any, threshold: Any) -> Any:
        x = score - threshold
        return 1 - mpmath.exp(-x) / 2 if x > 0 else mpmath.exp(x) / 2

    low, high = min(scores) - 100, max(scores) + 100
    for _ in range(220):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(inclusion(s, middle) for s in scores) > k else (low, middle)
    return inclusion(scores[target], (low + high) / 2)
