"""The linear layer and the loss in one, for so many classes that the scores of all of them do not fit into memory.

The scores are made chunk by chunk. A first pass keeps of each row the m best and the log-sum-exp; the loss is a function of
these. The backward makes each chunk again and turns it into its part of the gradients. If the loss sees nothing but the
candidates, the backward visits their rows of the weight and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from anyk import candidates, checks
from anyk.checks import working_dtype
from anyk.conventions import Conventions
from anyk.losses import Spec, TopKLoss, check_is_topk_loss, row_losses
from anyk.rows import Rows, smoothed_rows

__all__ = ["LinearHead"]


class LinearHead(nn.Module):
    """``nn.Linear`` followed by a loss, without ever storing the scores of all n classes.

    Same values and gradients as the two, up to rounding. Beyond the parameters and their gradients a step takes memory for
    B x (chunk_size + a few m) numbers instead of several times B x n, and the time of one more product of inputs and weights.

    Where the loss depends on the m candidates of each row only (``softmax_over="candidates"`` or ``top1="operator"``; for
    :class:`TopKErrorLoss`, ``ce_weight=0``), the backward pass is cheap, and the gradients of weight and bias are zero except
    in at most B m rows; ``sparse=True`` gives them as sparse tensors, for ``torch.optim.SparseAdam`` or
    ``torch.optim.SGD``.

    Second derivatives are not supported and raise an error. Under ``torch.compile`` the head runs in eager mode, with a graph
    break.

    Args:
        in_features: d, the size of the inputs.
        num_classes: n.
        loss: a :class:`TopKLoss`. Its ``weight`` is that of the classes; the layer has
            ``linear.weight`` and ``linear.bias``. With ``m=None`` or n all classes are ranked, for which the scores do have
            to be stored: nothing is saved then.
        bias: whether the layer has a bias. A bias of -inf marks a class as padding.
        chunk_size: how many classes to score at once.
        sparse: whether the gradients of weight and bias are sparse tensors.
        device: of the parameters.
        dtype: of the parameters.

    Shape:
        x (B, d), (d,) or (B, d1, …, d); target class indices of the shape of x without the last dimension (no probabilities);
        example_p_k, if given by keyword, (B, k), (k,) or (B, d1, …, k), as for the losses.

    Example:
        >>> head = anyk.LinearHead(16, 1000, anyk.TopKErrorLoss({1: 0.5, 5: 0.5}))
        >>> x, target = torch.randn(8, 16, requires_grad=True), torch.randint(1000, (8,))
        >>> head(x, target).backward()
        >>> scores, classes = head.predict(x, k=5)
        >>> classes.shape
        torch.Size([8, 5])
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        loss: TopKLoss,
        *,
        bias: bool = True,
        chunk_size: int = 16384,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_features = checks.at_least_one("in_features", in_features)
        n = checks.at_least_one("num_classes", num_classes)
        self.chunk_size = checks.at_least_one("chunk_size", chunk_size)
        check_is_topk_loss(loss)
        if loss.m is not None and loss.m != "auto":
            checks.count("m", loss.m, 1, n, "num_classes")
        if loss.weight is not None and len(loss.weight) != n:
            raise ValueError(f"weight: expected shape ({n},), one for each class, got {tuple(loss.weight.shape)}")
        self.linear = nn.Linear(in_features, n, bias, device=device, dtype=dtype)
        self.criterion = loss
        self.sparse = sparse
        self._check_sparse(candidates.number(loss.m, n, 1 if loss.spec.p_k is None else loss.spec.p_k.k))
        if device is not None:
            self.criterion.to(device)

    def _sees_all(self) -> bool:
        """Whether the loss depends on more than the candidates."""
        return self.criterion.spec.uses_softmax or self.criterion.label_smoothing > 0

    def _check_sparse(self, m: int | None) -> None:
        if self.sparse and (self._sees_all() or m in (None, self.linear.out_features)):
            raise ValueError(
                'sparse: expected a loss of the candidates alone (softmax_over="candidates", top1="operator" or ce_weight=0, '
                "with label_smoothing=0 and m below num_classes): otherwise every class has a gradient"
            )

    def forward(
        self, x: Float[Tensor, "*batch d"], target: Int[Tensor, "*batch"], *, example_p_k: Tensor | None = None
    ) -> Tensor:
        loss = self._loss
        if torch.compiler.is_compiling():  # not a decorator: that would import the compiler for everyone
            loss = torch.compiler.disable(loss)  # type: ignore[no-untyped-call]
        return loss(x, target, example_p_k)

    def _loss(self, x: Tensor, target: Tensor, example_p_k: Tensor | None) -> Tensor:
        """As :func:`anyk.losses.topk_loss`, with candidates that come out of the chunks."""
        x, loss, n = self._checked(x), self.criterion, self.linear.out_features
        if checks.tensor("target", target).dtype.is_floating_point:
            raise TypeError(
                "target: expected class indices of an integer dtype, got floating-point numbers; class probabilities are as "
                "large as the scores that this module avoids: use as_linear() and the loss"
            )
        spec, conventions = loss.arguments()
        if example_p_k is not None:
            spec = spec.for_examples()
        target = checks.class_indices(target, x.shape[:-1], n, conventions.ignore_index)
        p_k, k, m = spec.fit(self._like(x), n, target.shape, example_p_k)
        self._check_sparse(m)
        if spec.is_cross_entropy(k):
            m = k = 1  # nothing is ranked
        if m is None or m == n:
            scores = self.linear(x)
            return loss(scores.movedim(-1, 1) if x.ndim > 1 else scores, target, example_p_k=example_p_k)
        rows = self._rows(x, target, spec, conventions, m, k)
        return rows.reduce(row_losses(spec, rows, k, p_k))

    def _rows(self, x: Tensor, target: Tensor, spec: Spec, conventions: Conventions, m: int, k: int) -> Rows:
        """What the loss may depend on, from one pass over the classes."""
        n, amount, inputs = self.linear.out_features, conventions.label_smoothing, x.reshape(-1, x.shape[-1])
        weight = conventions.class_weights(n, self._like(x))
        flat, counted = conventions.count(target, weight, self._like(x))
        inputs = counted.only(inputs)
        smoothing = self._smoothing() if amount else None
        layer = _Layer(self._precision(x), self.chunk_size, self._sees_all(), self.sparse)
        scores, log_sum_exp, mean, classes, position = _Candidates.apply(  # type: ignore[no-untyped-call]
            # Where labels are smoothed by 1, the target is no more than any other class.
            inputs, self.linear.weight, self.linear.bias, flat if amount < 1 or spec.added_smoothing(amount) else None,
            smoothing, m, layer,
        )  # fmt: skip
        if smoothing is None:
            cross_entropy = log_sum_exp - candidates.at(scores, position) if spec.uses_softmax else None
            return Rows.of(scores, position, flat, cross_entropy, counted, k)
        return smoothed_rows(
            *(scores, classes, position, flat),
            counted,
            log_sum_exp[:, None] - scores,
            smoothing[classes],
            smoothing.sum() * log_sum_exp - mean,
            spec,
            k,
            weight,
        )

    def _smoothing(self) -> Float[Tensor, " n"]:
        """The uniform distribution over the classes that are not padding, each times its weight in the loss."""
        weight, bias = self.linear.weight, self.linear.bias
        dtype = working_dtype(weight)
        uniform = torch.ones(len(weight), dtype=dtype, device=weight.device) if bias is None else (bias != -torch.inf).to(dtype)
        uniform /= uniform.sum()
        return uniform if self.criterion.weight is None else uniform * self.criterion.weight.to(dtype)

    @torch.no_grad()
    def predict(self, x: Float[Tensor, "*batch d"], k: int) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
        """The k best scores of each row in descending order and their classes, as ``torch.topk`` of all scores; no gradient.

        Example:
            >>> head = anyk.LinearHead(2, 3, anyk.TopKErrorLoss({1: 1.0}), bias=False)
            >>> _ = head.load_state_dict({"linear.weight": torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 2.0]])}, strict=False)
            >>> head.predict(torch.tensor([1.0, 2.0]), k=2)
            (tensor([5., 3.]), tensor([2, 0]))
        """
        x = self._checked(x)
        k = checks.count("k", k, 1, self.linear.out_features, "num_classes")
        layer = _Layer(self._precision(x), self.chunk_size)
        found = layer.search(x.reshape(-1, x.shape[-1]), self.linear.weight, self.linear.bias, k)
        scores = found.scores.to(layer.dtype)
        return scores.reshape(*x.shape[:-1], k), found.classes.reshape(*x.shape[:-1], k)

    def as_linear(self) -> nn.Linear:
        """The layer alone, as a plain ``nn.Linear`` that shares its parameters with this module.

        Example:
            >>> head = anyk.LinearHead(16, 1000, anyk.TopKErrorLoss({1: 0.5, 5: 0.5}))
            >>> head.as_linear()(torch.randn(8, 16)).shape
            torch.Size([8, 1000])
        """
        return self.linear

    def _checked(self, x: object) -> Tensor:
        x = checks.tensor("x", x)
        if x.ndim == 0 or x.shape[-1] != self.linear.in_features:
            raise ValueError(f"x: expected shape (…, {self.linear.in_features}), got {tuple(x.shape)}")
        if not torch.is_autocast_enabled(x.device.type) and x.dtype != self.linear.weight.dtype:
            raise TypeError(f"x: expected dtype {self.linear.weight.dtype} like the weight, got {x.dtype}")
        return x

    def _precision(self, x: Tensor) -> torch.dtype:
        """What ``nn.Linear`` would compute in."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device) and self.linear.weight.dtype != torch.float64
        return torch.get_autocast_dtype(device) if autocast else self.linear.weight.dtype

    def _like(self, x: Tensor) -> Tensor:
        """A tensor with the device and the precision of the scores."""
        return x.new_empty(0, dtype=self._precision(x))

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}, sparse={self.sparse}"


class _Found(NamedTuple):
    """What one pass over the classes finds, at least float32."""

    scores: Float[Tensor, "rows m"]
    """the m best in descending order"""
    classes: Int[Tensor, "rows m"]
    target_score: Float[Tensor, " rows"]
    best: Float[Tensor, " rows"] | None
    log_sum: Float[Tensor, " rows"] | None
    """log of the sum of exp(score - best) over all classes"""


class _Layer(NamedTuple):
    """How scores are made and differentiated."""

    dtype: torch.dtype
    """of the product of inputs and weights"""
    chunk_size: int
    sees_all: bool = False
    """whether the log-sum-exp over all classes is wanted"""
    sparse: bool = False
    """whether the gradients of weight and bias shall be sparse"""

    def scored(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        """The scores of the classes first, …, last - 1, in at least float32, chunk after chunk."""
        n = len(weight)
        for first in range(0, n, self.chunk_size):
            last = min(first + self.chunk_size, n)
            some = None if bias is None else bias[first:last].to(self.dtype)
            scores = functional.linear(x, weight[first:last].to(self.dtype), some)
            yield first, last, scores.to(working_dtype(scores))

    def search(self, x: Tensor, weight: Tensor, bias: Tensor | None, m: int, target: Tensor | None = None) -> _Found:
        """One pass over the classes."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.dtype)
            best_scores = x.new_empty(len(x), 0, dtype=working_dtype(x))
            classes = torch.empty(len(x), 0, dtype=torch.long, device=x.device)
            target_score = best_scores.new_zeros(len(x))
            tops, sums = [], []
            for first, last, scores in self.scored(x, weight, bias):
                if target is not None:
                    inside = (target >= first) & (target < last)
                    here = candidates.at(scores, (target - first).clamp(0, last - first - 1))
                    target_score = torch.where(inside, here, target_score)
                here = candidates.best(scores, min(m, last - first))
                best_scores = torch.cat([best_scores, scores.gather(-1, here)], -1)
                classes = torch.cat([classes, here + first], -1)
                if first > 0:
                    kept = candidates.best(best_scores, min(m, best_scores.shape[-1]))
                    best_scores, classes = best_scores.gather(-1, kept), classes.gather(-1, kept)
                if self.sees_all:
                    top = scores.amax(-1).clamp(min=torch.finfo(scores.dtype).min)  # -inf - -inf is NaN
                    tops.append(top)
                    sums.append(scores.sub_(top[:, None]).exp_().sum(-1))
            best = log_sum = None
            if self.sees_all:
                each = torch.stack(tops)
                best = each.amax(0)
                log_sum = (torch.stack(sums) * (each - best).exp()).sum(0).log()
            return _Found(best_scores, classes, target_score, best, log_sum)


class _Candidates(torch.autograd.Function):
    """From the inputs and the layer to what the loss depends on: the candidates' scores, and sums over all classes.

    Where there are such sums, all results are relative to the row's best score, a constant that the loss does not notice:
    log-sum-exp less the target's score then keeps its digits however large the scores are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "rows d"],
        weight: Float[Tensor, "n d"],
        bias: Float[Tensor, " n"] | None,
        target: Int[Tensor, " rows"] | None,
        smoothing: Float[Tensor, " n"] | None,
        m: int,
        layer: _Layer,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """Scores, log-sum-exp, sum of the scores weighted by ``smoothing``; the classes, and the target's place."""
        scores, classes, target_score, best, log_sum = layer.search(x, weight, bias, m, target)
        position = classes.new_zeros(len(x))
        if target is not None:
            classes, position = candidates.with_target(classes, target)
            scores = scores.scatter(-1, position[:, None], target_score[:, None])
        mean = None
        if best is not None:
            scores = scores - best[:, None]
        if best is not None and smoothing is not None:
            # The sum over classes comes first: no scores are needed. In chunks, for the copies of half-precision weights.
            chunks = zip(torch.split(smoothing, layer.chunk_size), torch.split(weight, layer.chunk_size), strict=True)
            row = torch.stack([share @ some.to(share.dtype) for share, some in chunks]).sum(0)
            mean = x.to(row.dtype) @ row - smoothing.sum() * best
            if bias is not None:
                mean += (smoothing * torch.where(smoothing > 0, bias, 0)).sum()
        ctx.layer = layer
        ctx.save_for_backward(x, weight, bias, classes, best, log_sum, smoothing)
        ctx.mark_non_differentiable(classes, position)
        return scores, log_sum, mean, classes, position

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_scores: Tensor, of_log_sum: Tensor | None, of_mean: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, classes, best, log_sum, smoothing = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        with torch.autocast(x.device.type, enabled=False):
            if best is None:
                gradients = _of_candidates(of_scores, x, weight, classes, wanted, ctx.layer.sparse)
            else:
                # d log-sum-exp / d score = exp(score - best) / exp(log_sum)
                softmax = of_log_sum * (-log_sum).exp()
                uniform = None if of_mean is None else (smoothing, of_mean)
                gradients = _of_all(of_scores, softmax, uniform, x, weight, bias, classes, best, wanted, ctx.layer)
        return *gradients, None, None, None, None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _of_all(
    of_scores: Float[Tensor, "rows m"],
    softmax: Float[Tensor, " rows"],
    uniform: tuple[Float[Tensor, " n"], Float[Tensor, " rows"]] | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: Int[Tensor, "rows m"],
    best: Float[Tensor, " rows"],
    wanted: tuple[bool, bool, bool],
    layer: _Layer,
) -> Gradients:
    """Gradients where all classes count: each chunk's scores once more, their gradient in the same memory."""
    of_x = torch.zeros_like(x, dtype=of_scores.dtype) if wanted[0] else None
    of_weight = torch.empty_like(weight) if wanted[1] else None
    of_bias = torch.empty_like(weight[:, 0]) if wanted[2] else None
    m = classes.shape[-1]
    ordered, order = classes.flatten().sort()
    starts = torch.arange(0, len(weight) + layer.chunk_size, layer.chunk_size, device=classes.device)
    bounds = torch.searchsorted(ordered, starts).tolist()  # which of the candidates are in which chunk
    inputs = x.to(layer.dtype)
    for chunk, (first, last, scores) in enumerate(layer.scored(inputs, weight, bias)):
        gradient = scores.sub_(best[:, None]).exp_().mul_(softmax[:, None])
        if uniform is not None:
            gradient.addr_(uniform[1], uniform[0][first:last])
        these = slice(bounds[chunk], bounds[chunk + 1])
        places = order[these].div(m, rounding_mode="floor") * (last - first) + (ordered[these] - first)
        gradient.view(-1).scatter_add_(0, places, of_scores.flatten()[order[these]])
        if of_bias is not None:
            torch.sum(gradient, 0, out=of_bias[first:last])
        gradient = gradient.to(layer.dtype)
        if of_x is not None:
            of_x += gradient @ weight[first:last].to(layer.dtype)
        if of_weight is not None and of_weight.dtype == layer.dtype:
            torch.mm(gradient.t(), inputs, out=of_weight[first:last])
        elif of_weight is not None:
            of_weight[first:last] = gradient.t() @ inputs
    return None if of_x is None else of_x.to(x.dtype), of_weight, of_bias


def _of_candidates(
    of_scores: Float[Tensor, "rows m"],
    x: Tensor,
    weight: Tensor,
    classes: Int[Tensor, "rows m"],
    wanted: tuple[bool, bool, bool],
    sparse: bool,
) -> Gradients:
    """Gradients where only the candidates count: sums over the rows of the weight that they name, and over their inputs.

    An embedding bag is such a sum, and does not store its (rows, m, d) terms.
    """
    of_x = of_weight = of_bias = None
    if wanted[0]:
        of_x = functional.embedding_bag(classes, weight, mode="sum", per_sample_weights=of_scores.to(weight.dtype)).to(x.dtype)
    if not (wanted[1] or wanted[2]):
        return of_x, None, None
    m = classes.shape[-1]
    # An example that does not count must not wake an optimiser's old momentum in its candidates.
    counts = (of_scores != 0).any(-1, keepdim=True).expand_as(classes).flatten()
    ordered, order = torch.where(counts, classes.flatten(), len(weight)).sort(stable=True)
    order = order[: int(counts.sum())]
    touched, sizes = ordered[: len(order)].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    shares = of_scores.flatten()[order]

    def whole(rows: Tensor) -> Tensor:
        size = (len(weight), *rows.shape[1:])
        if sparse:
            return torch.sparse_coo_tensor(touched[None], rows, size, is_coalesced=True, check_invariants=False)
        return rows.new_zeros(size).index_copy_(0, touched, rows)

    if wanted[1]:
        starts = sizes.cumsum(0) - sizes
        examples = order.div(m, rounding_mode="floor")
        inputs = x.to(shares.dtype)
        rows = functional.embedding_bag(examples, inputs, starts, mode="sum", per_sample_weights=shares)
        of_weight = whole(rows.to(weight.dtype))
    if wanted[2]:
        group = torch.repeat_interleave(sizes)
        of_bias = whole(shares.new_zeros(len(touched)).index_add_(0, group, shares).to(weight.dtype))
    return of_x, of_weight, of_bias
