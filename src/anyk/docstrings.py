"""What docstrings share: an argument of many functions and classes is documented here, once."""

from __future__ import annotations

import re
from textwrap import indent
from typing import TypeVar

Thing = TypeVar("Thing")

_PARTS = {
    # losses
    "scores": "scores: (B, n), (n,) or (B, n, d1, …), as for ``torch.nn.functional.cross_entropy``. -inf marks padding.",
    "p_k": """\
p_k: P_K, the weights of top-1, …, top-k, which sum to 1: a list ``[.5, 0, 0, 0, .5]``, a mapping ``{1: .5, 5: .5}``, an
    integer k for ``{k: 1}``, a tensor (k,), or (n, k) with one distribution for each class. Zeros at the end of a list are
    dropped: k is the largest k with a weight; a tensor keeps its length. May be None if each call has ``example_p_k``, a
    tensor (B, k), (k,) or (B, d1, …, k) with one distribution for each example, which takes the place of ``p_k``.""",
    "m": """\
m: number of candidates: only the m best scores of each row are ranked, the target always among them. ``"auto"`` means
    min(n, max(64, 4 k)), None means all n.""",
    "operator_network": """\
operator: the relaxation of sorting, or its name, such as ``"lapsum"``; None means ``SortingNetwork("splitter")``, as in
    the paper that introduced this loss; no other operator did better with it.""",
    "operator_lapsum": """\
operator: the relaxation of sorting, or its name, such as ``"splitter"``; None means ``LapSum()``, the cheapest of those that
    did best with this loss.""",
    "top1_softmax_over": """\
top1: the top-1 part: ``"separate"``, softmax cross-entropy as its own term; ``"mixed"``, softmax inside the logarithm;
    ``"operator"``, the operator's own T_1.
softmax_over: what the softmax is taken over: ``"all"`` classes, or the m ``"candidates"``.""",
    "ce_weight_q": """\
ce_weight: the share of softmax cross-entropy, between 0 and 1. 1 is cross-entropy alone, 0 has no softmax.
q: the exponent in ``(1 - T^q) / q``, between 0 and 1: 1 is the expected top-k error, 0 the limit ``-log T``.""",
    "reduction_ignore_index_weight": """\
reduction: ``"mean"``, ``"sum"`` or ``"none"``.
ignore_index: a target value that is ignored, in the loss and in its gradient.
weight: (n,) weight of each class.""",
    "label_smoothing": """\
label_smoothing: how much of the target is spread evenly over the classes that are not padding, between 0 and 1.""",
    "ce_smoothing": """\
label_smoothing: between 0 and 1, of the cross-entropy term alone; the error term is not smoothed. Needs ``ce_weight`` > 0.""",
    "example_p_k": "example_p_k: (B, k), (k,) or (B, d1, …, k), one distribution for each example, instead of ``p_k``.",
    "loss": 'The loss, in at least float32: a scalar, or of the shape of the class indices with ``reduction="none"``.',
    "shape": """\
Shape:
    scores (B, n), (n,) or (B, n, d1, …); target class indices (B,), () or (B, d1, …), or probabilities of the shape of scores.
    The loss is a scalar, or with ``reduction="none"`` of the shape of the class indices.""",
    # ranking losses
    "query_scores": "scores: (..., n), the scores of the n items of each query.",
    "relevant": "relevant: (..., n) bool, which items are relevant.",
    "temperature_where_reduction_of_queries": """\
temperature: t, for an operator given by name; an ``Operator`` has its own.
where: (..., n) bool, False for padding, for queries of different lengths; None means all items.
reduction: ``"mean"``, ``"sum"`` or ``"none"``, over the queries. A query without a relevant item has loss 0 and is left out of
    the mean.""",
    "loss_of_queries": 'The loss, in at least float32: a scalar, or one for each query with ``reduction="none"``.',
    # operators
    "temperature": """\
temperature: t, a positive number or a one-element tensor; an ``nn.Parameter`` is learned. The smaller, the closer to exact
    sorting.""",
    # metrics
    "metric_scores_target": """\
scores: (B, n), (n,) or (B, n, d1, …), with the classes in the same dimension as for the losses.
target: class indices, (B,), () or (B, d1, …).""",
    "ks": "ks: the values of k; a k above the number of classes counts every target.",
    "ignore_index": "ignore_index: a target value that is ignored.",
    "average": """\
average: ``"micro"``, the mean over the targets; ``"macro"``, the mean over the classes that occur, of the mean in each.""",
    # sharded classes
    "sharded_scores_target": """\
local_scores: (B, n_local), the scores of this process's classes; the slices may differ in size or be empty. Or a
    ``DTensor`` with ``Shard(1)`` on one dimension of its mesh, ``Shard(0)`` on at most one, ``Replicate()`` on the others: the
    result is then that of the whole batch, and a loss is a DTensor.
target: (B,), indices among all classes, the same in every process. With a DTensor whose batch is sharded: a DTensor, or
    the targets of this process's rows.""",
    "group_slices": """\
group: the processes that share the classes; None means all, or those of the DTensor's mesh.
slices: how many classes each process has, in the order of the ranks. None exchanges this at each call, and checks that all
    processes have the same arguments. If given, that exchange and that check are left out, and with them the wait of the host
    for the device.""",
}


def documented(thing: Thing) -> Thing:
    """Fills in the docstring of a function or class: a line ``{name}`` stands for the part of that name."""
    if thing.__doc__ is not None:  # None with python -OO
        filled = re.sub(r"^( *)\{(\w+)\}$", lambda found: indent(_PARTS[found[2]], found[1]), thing.__doc__, flags=re.MULTILINE)
        thing.__doc__ = filled
    return thing
