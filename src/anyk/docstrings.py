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
    dropped, since k is the largest k that counts; a tensor is taken as it is. None with ``example_p_k`` at the call.""",
    "m": """\
m: rank only the m best scores of each row, the target always among them: ``"auto"`` is min(n, max(64, 4 k)), None all.""",
    "operator_network": """\
operator: the relaxation of sorting, or its name, such as ``"lapsum"``; None means ``SortingNetwork("splitter")``, the one
    of the paper that this loss is from, and none did better in this family.""",
    "operator_lapsum": """\
operator: the relaxation of sorting, or its name, such as ``"splitter"``; None means ``LapSum()``, the cheapest of those that
    did best in this family, which has no paper to follow.""",
    "top1_softmax_over": """\
top1: the top-1 part: ``"separate"``, softmax cross-entropy beside the rest; ``"mixed"``, softmax inside the logarithm;
    ``"operator"``, the operator's own T_1.
softmax_over: ``"all"`` classes or the ``"candidates"``.""",
    "ce_weight_q": """\
ce_weight: the share of softmax cross-entropy, between 0 and 1. 1 is cross-entropy alone, 0 has no softmax.
q: between 0 and 1: 1 is the expected top-k error, smaller is nearer to cross-entropy, 0 its limit -log.""",
    "reduction_ignore_index_weight": """\
reduction: ``"mean"``, ``"sum"`` or ``"none"``.
ignore_index: class index of examples that do not count.
weight: (n,) weight of each class.""",
    "label_smoothing": """\
label_smoothing: mixes the target with the uniform distribution over the classes that are not padding.""",
    "ce_smoothing": """\
label_smoothing: of the cross-entropy alone: the other part takes the label as it is. Needs ``ce_weight`` above 0.""",
    "example_p_k": "example_p_k: (B, k) or (B, d1, …, k), one distribution for each example, instead of ``p_k``.",
    "loss": 'The loss, at least float32; of the shape of the class indices with ``reduction="none"``.',
    "shape": """\
Shape:
    scores (B, n), (n,) or (B, n, d1, …); target class indices (B,), (), (B, d1, …), or probabilities like scores.""",
    # ranking losses
    "query_scores": "scores: of the items of each query.",
    "relevant": "relevant: which items are relevant.",
    "temperature_where_reduction_of_queries": """\
temperature: goes with a name.
where: which items there are, for queries of different lengths; None means all.
reduction: ``"mean"``, ``"sum"`` or ``"none"``, over the queries. A query without a relevant item counts 0 and is left out of
    the mean.""",
    "loss_of_queries": 'The loss, of at least float32; for each query with ``reduction="none"``.',
    # operators
    "temperature": "temperature: t, a positive number or a one-element tensor; an ``nn.Parameter`` is learned.",
    # metrics
    "metric_scores_target": """\
scores: (B, n), (n,) or (B, n, d1, …): the classes stand where the losses have them.
target: class indices, (B,), () or (B, d1, …).""",
    "ks": "ks: the values of k; a k beyond the number of classes counts everything.",
    "ignore_index": "ignore_index: a target that does not count.",
    "average": """\
average: ``"micro"``, the mean over the targets; ``"macro"``, over the classes that occur among them, of the mean of each.""",
    # sharded classes
    "sharded_scores_target": """\
local_scores: (B, n_local), the scores of this process's classes; the slices may differ in size or be empty. Or a
    ``DTensor`` with ``Shard(1)`` on one dimension of its mesh, and ``Shard(0)`` or ``Replicate()`` on the others: what is
    returned is then of the whole batch, and a loss is a DTensor.
target: (B,), indices among all classes, the same in every process. With a DTensor whose batch is sharded: a DTensor, or
    the targets of this process's rows.""",
    "group_slices": """\
group: the processes that share the classes; None means all, or those of the DTensor's mesh.
slices: how many classes each process has, in the order of the ranks; None asks them at each call, and whether they agree in
    all arguments. With it there is one all-gather, no check, and the host does not wait for the device.""",
}


def documented(thing: Thing) -> Thing:
    """Fills in the docstring of a function or class: a line ``{name}`` stands for the part of that name."""
    if thing.__doc__ is not None:  # None with python -OO
        filled = re.sub(r"^( *)\{(\w+)\}$", lambda found: indent(_PARTS[found[2]], found[1]), thing.__doc__, flags=re.MULTILINE)
        thing.__doc__ = filled
    return thing
