"""SortingNetwork: comparator networks with soft comparators. One engine runs all networks and all swaps.

What is pushed through a network is a state (numbers, wires, rows): the scores, and what is carried along with them. In each
layer every wire has a partner, the wire that it is compared with, and takes a mixture of its own value and the partner's:

    value = keep own + cross partner's,    keep = swap(-u),    cross = swap(u),    u = ± (partner's score - own score)

with a plus on the wire that is to get the larger score. An idle wire is its own partner. What is carried is a sum of
non-negative terms, so that small shares keep their digits.
"""

from __future__ import annotations

import operator
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from anyk import checks, kernels
from anyk._compat import Function, constant_when_traced, is_eager
from anyk.kernels.abi import LOG_TAIL_WEIGHT
from anyk.networks import KINDS, Kind
from anyk.operators.base import Inclusion, Mask, Ranks, Sort, register
from anyk.operators.masks import OUT_OF_REACH, FromKernel, relative
from anyk.operators.ordering import descending, finite, in_order, is_padding, places, unsorted
from anyk.swaps import SWAPS, Swap

# of a network that the kernels run
MOST_WIRES = 4096

Wires = Literal["target", "given"]


class SortingNetwork(Inclusion, Mask, Ranks, Sort):
    """Differentiable sorting and selection networks.

    Every comparator of the network mixes its two values instead of swapping them: with a the value on the wire that is to
    get the larger one, b the other, and ``alpha = swap((a - b) / t)``, for ``"logistic_art"`` ``swap((a - b) / t^2)``,

        larger = alpha a + (1 - alpha) b,    smaller = (1 - alpha) a + alpha b.

    A class is carried along by the same mixtures; the share of it that ends on the r-th output is P[r, c]. For T only the
    target's share is pushed forward, beside the scores: the cost is that of the comparators, with no factor k. Mask, ranks and
    sort are as cheap: a row of ones, or of ranks, is pulled back, and the scores that end on the outputs are the sort.

    Cost, in comparators: splitter about n (1 + log2 k), bitonic n log2(n)^2 / 4, odd-even n^2 / 2. Where gradients are
    recorded, T keeps 2 numbers per row, layer and wire. The matrix takes k times, with ``wires="target"`` n times that.

    Args:
        kind: ``"splitter"`` (selection network), ``"bitonic"`` or ``"odd_even"`` (sorting networks).
        temperature: t. The smaller, the closer to exact sorting. A positive number, or a floating-point tensor with one element or,
            for masks, ranks, sorts and thresholds, one for each row (of a shape that broadcasts to ``scores.shape[:-1]``); an
            ``nn.Parameter`` is learned, another tensor is a buffer. A number may be assigned at any time.
        swap: the soft comparator, which decides how fast T of a class far behind decays: exponentially for ``"logistic"``,
            faster for ``"gaussian"``, as exp(-sqrt(distance)) for ``"logistic_art"``, as 1 / distance for ``"cauchy"``,
            ``"reciprocal"`` and ``"optimal"``.
        wires: where the classes start, which matters to a network. ``"target"``: the target on one fixed wire, the others
            in descending order on the rest, so that T is continuous in the scores and does not depend on the order of the
            classes. ``"given"``: in the order of the classes, the last class on the first wire, as published (candidates that
            the loss has cut down to m < n come in descending order). Only with ``"given"`` do the rows of the matrix sum to 1:
            with ``"target"`` each column has its own arrangement, and of 16 normal scores of any spread the sums lie between .6
            and 1.4 (splitter; .05 from 1 in the mean), .5 and 2.5 (bitonic), .7 and 1.9 (odd-even; up to 5 with 64 scores). The
            mask, the ranks and the sort always start in descending order; the mask jumps where two scores cross.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> anyk.SortingNetwork("splitter", temperature=0.1).inclusion(scores, torch.tensor(2), k=2).round()
        tensor([0., 1.])

    Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022.
    """

    def __init__(
        self, kind: str = "splitter", temperature: float | Tensor = 1.0, swap: str = "logistic", wires: Wires = "target"
    ) -> None:
        super().__init__(temperature)
        self.kind = kind
        self.swap = swap
        self.wires = wires

    def __setattr__(self, name: str, value: Any) -> None:
        known: Any = {"kind": KINDS, "swap": SWAPS, "wires": get_args(Wires)}.get(name)
        if known is not None:
            checks.one_of(name, value, known)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, {super().extra_repr()}, swap={self.swap!r}, wires={self.wires!r}"

    @property
    def descending(self) -> bool:  # type: ignore[override]
        return self.wires == "target"

    def kernel(self, m: int, k: int) -> tuple[Any, ...] | None:
        if not self._is_built_in() or isinstance(self.temperature, Tensor) or m > MOST_WIRES:
            return None
        scale = self.temperature ** SWAPS[self.swap].power
        # padding is at -1e30, which must not come back into reach
        return ("network", scale, self.kind, self.swap, self.wires) if 1e-25 < scale < 1e25 else None

    def _is_built_in(self) -> bool:
        """Whether the kernels may have it: what a subclass computes is its own, and a name may have been given to another."""
        same = KINDS[self.kind] is _BUILT_IN.get(self.kind) and SWAPS[self.swap] is _BUILT_IN.get(self.swap)
        return same and type(self) is SortingNetwork

    def compute_log_inclusion(
        self, scores: Float[Tensor, "*batch m"], position: Int[Tensor, "*batch"], k: int
    ) -> Float[Tensor, "*batch k"]:
        return self._log_inclusion(scores, position, k, checks.temperature_for(self.temperature, scores))

    def compute_matrix(self, scores: Float[Tensor, "*batch n"], k: int) -> Float[Tensor, "*batch k n"]:
        n, temperature = scores.shape[-1], checks.temperature_for(self.temperature, scores)
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = temperature[..., None]
        order = in_order(scores)[1] if self.descending else torch.arange(n, device=scores.device).expand_as(scores)
        each = scores.gather(-1, order)[..., None, :].expand(*scores.shape, n)  # each class in turn is the target
        position = torch.arange(n, device=scores.device).expand_as(scores)
        inclusion = self._log_inclusion(each, position, k, temperature).exp().mT
        matrix = inclusion - pad(inclusion[..., :-1, :], (0, 0, 1, 0))
        return unsorted(matrix, order[..., None, :].expand_as(matrix)) * (scores > -torch.inf)[..., None, :]

    def _log_inclusion(self, scores: Tensor, position: Tensor, k: int, temperature: float | Tensor) -> Tensor:
        network, start = self._network(scores, k)
        position = position[..., None]
        if self.wires == "given":  # from the last class to the first, padding at the end
            padding = (scores.flip(-1) == -torch.inf).to(torch.uint8)
            classes = scores.shape[-1] - 1 - padding.sort(dim=-1, stable=True).indices
            is_start = classes == position
        else:  # the target on its wire, the others in descending order on the rest
            wire = torch.arange(scores.shape[-1], device=scores.device)
            is_start, others = wire == start, wire - (wire > start).long()
            classes = torch.where(is_start, position, others + (others >= position))
        own = finite(scores.to(checks.working_dtype(scores)))
        x = relative(own.gather(-1, classes), own.gather(-1, position), network.scale(temperature))
        lead = -x.masked_fill(is_start, -OUT_OF_REACH).topk(min(k, scores.shape[-1] - 1), dim=-1).values
        tail = network.swap.log_tail(lead) + LOG_TAIL_WEIGHT
        if lead.shape[-1] < k:  # with k = m, the last T is 1
            tail = pad(tail, (0, 1), value=LOG_TAIL_WEIGHT)
        push: Any = _LogInclusion.run if is_eager(x) or torch.compiler.is_compiling() else _plain_log_inclusion
        share = is_start.to(x.dtype).expand_as(x)
        result: Tensor = push(*map(_wires_first, (x, share, tail)), network)[0]
        return result.t().reshape(*scores.shape[:-1], k)

    # Mask, ranks and sort: all classes start in descending order.

    def compute_mask(self, scores: Float[Tensor, "*batch n"], k: int | Tensor) -> Float[Tensor, "*batch n"]:
        assert isinstance(k, int)
        kind, swap, temperature = self.kind, self.swap, checks.temperature_for(self.temperature, scores)
        t = temperature.detach() if isinstance(temperature, Tensor) else temperature

        def gradients(saved: Any, grad: Tensor, wants_temperature: bool) -> tuple[Tensor, Tensor | None]:
            return kernels.network_mask_backward(kind, swap, saved, k, t, grad, wants_temperature)

        serve = kernels.serve(scores) and self._is_built_in()
        made = kernels.network_mask(kind, swap, scores, k, t) if serve else None
        if made is None:
            return self._plain_mask(k, scores, temperature)
        mask: Tensor = FromKernel.run(scores, temperature, made, gradients, partial(self._plain_mask, k))
        return mask

    def _plain_mask(self, k: int, scores: Tensor, temperature: float | Tensor) -> Tensor:
        network, (ordered, order) = self._network(scores, k)[0], descending(scores)
        x = relative(ordered, ordered[..., k - 1 : k].detach(), network.scale(temperature))
        mask = network.pull(x, x.new_ones(k)) * ~is_padding(ordered)
        # Entries of tied scores are averaged, so that permuting the scores permutes the mask.
        group = pad((ordered[..., 1:] != ordered[..., :-1]).long(), (1, 0)).cumsum(-1)
        sums = torch.zeros_like(mask).scatter_add(-1, group, mask)
        counts = torch.zeros_like(mask).scatter_add(-1, group, torch.ones_like(mask))
        return unsorted((sums / counts.clamp(min=1)).gather(-1, group).clamp(0, 1), order).to(scores.dtype)

    def compute_ranks(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        network, (ordered, order) = self._network(scores, scores.shape[-1])[0], descending(scores)
        x = relative(ordered, _middle(ordered), network.scale(checks.temperature_for(self.temperature, scores)))
        ranks = network.pull(x, places(x))
        return unsorted(torch.where(is_padding(ordered), places(x) + 0 * ranks, ranks), order)

    def compute_sort(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        network, (ordered, order) = self._network(scores, scores.shape[-1])[0], descending(scores)
        middle, scale = _middle(ordered), network.scale(checks.temperature_for(self.temperature, scores))
        ends = network.push(_wires_first(relative(ordered, middle, scale))[None])[-1, 0].t().reshape(scores.shape)
        given = scores.gather(-1, order)
        return torch.where(given.isinf(), given, (ends * scale + middle).to(scores.dtype))

    def _network(self, scores: Tensor, k: int) -> tuple[SoftNetwork, Tensor]:
        """The network for these scores, and the wire where the target starts."""
        kind, swap = KINDS[self.kind], SWAPS[self.swap]
        n, k = operator.index(scores.shape[-1]), operator.index(k)  # in a trace with symbolic sizes, too
        wires, signs, by_number = _tables(self.kind, n, k, scores.device)
        network = SoftNetwork(wires, signs, swap)
        # Padding is out of reach: a comparator with it leaves the other value as it is, unless the tail of the swap is heavy.
        exact = not swap.heavy and kind.active is None and kind.target_wire(n) < 2
        if exact or (checks.readable(scores) and not bool((scores == -torch.inf).any())):
            return network, by_number[n, :1]
        # A padded row is treated as the network for its own number of classes would.
        number = (scores != -torch.inf).sum(-1)
        start, first, end = (
            by_number.index_select(0, number.reshape(-1)).view(*number.shape, 3).unbind(-1)
        )  # vmap has no [number]
        number, first, end = (each.reshape(-1) for each in (number, first, end))
        layer = torch.arange(len(wires), device=scores.device)[:, None, None]
        lower_wire = wires.reshape(-1, 2, n).amax(1)[..., None]
        still = (lower_wire >= number) | (layer < first) | (layer >= end)
        return network._replace(still=still), start[..., None]


def _wires_first(rows: Tensor) -> Tensor:
    return rows.reshape(-1, rows.shape[-1]).t()


def _middle(ordered: Tensor) -> Tensor:
    """The score in the middle. Beside the first, if that is far ahead, the others would lose their digits."""
    number = (~is_padding(ordered)).sum(-1, keepdim=True)
    return ordered.detach().gather(-1, number // 2)


# ---- the engine


@constant_when_traced  # building a network is nothing to trace
def _tables(kind: str, n: int, k: int, device: torch.device) -> tuple[Tensor, ...]:
    # what other traces than Dynamo's make must not outlive them
    build = _cached_tables if is_eager(torch.empty(0)) else _cached_tables.__wrapped__
    return build(kind, KINDS[kind], n, k, device)


@lru_cache(maxsize=128)
def _cached_tables(_: str, kind: Kind, n: int, k: int, device: torch.device) -> tuple[Tensor, ...]:
    """The first two fields of a :class:`SoftNetwork`; and, (n + 1, 3), for rows of 0, …, n classes the wire where the target
    starts, the first active layer, and the one after the last."""
    network = kind.build(n, k)
    by_number = [(kind.target_wire(c), *(kind.active(n, c) if kind.active else (0, network.depth))) for c in range(n + 1)]
    with torch.inference_mode(False):  # a first call without gradients must not spoil the later ones
        own = torch.arange(n, device=device)
        partners = torch.tensor(network.partners(), dtype=torch.long, device=device).reshape(-1, n)
        wires, signs = torch.cat([own.expand_as(partners), partners], -1), torch.where(partners < own, -1.0, 1.0)
        return wires, torch.stack([-signs, signs], 1)[..., None], torch.tensor(by_number, device=device)


class SoftNetwork(NamedTuple):
    """A network with soft comparators, on a device. In its functions, pairs are the values of each wire and of its partner."""

    wires: Int[Tensor, "depth 2n"]
    """all wires, and then the partner of each"""
    signs: Float[Tensor, "depth 2 n 1"]
    """of u, for keep and for cross"""
    swap: Swap
    still: Tensor | None = None
    """which wires, of which rows, a layer leaves as they are, (depth, n, rows); None: none"""

    def push(self, state: Float[Tensor, "numbers n rows"]) -> Float[Tensor, "states numbers n rows"]:
        """The state before each layer, and after the last."""
        states = [state]
        stills = [None] * len(self.wires) if self.still is None else self.still.unbind()
        for wires, signs, still in zip(self.wires.unbind(), self.signs.unbind(), stills, strict=True):
            pairs = state.index_select(1, wires).reshape(len(state), 2, *state.shape[1:])
            state = (self._weights(signs * (pairs[0, 1] - pairs[0, 0]), still) * pairs).sum(1)
            states.append(state)
        return torch.stack(states)

    def pull(self, x: Float[Tensor, "*batch n"], ends: Float[Tensor, "outputs"]) -> Float[Tensor, "*batch n"]:
        """Numbers on the first wires, pulled back to the wires where the relative scores x start."""
        scores = _wires_first(x)
        weights = self._weights(self._differences(self.push(scores[None]))[:, 0], self.still)
        weights = torch.where(weights > 0.5, 1 - weights.flip(1), weights)  # sums of 1, but for one rounding
        state = pad(ends[:, None].expand(-1, scores.shape[1]), (0, 0, 0, len(scores) - len(ends)))
        for wires, weight in zip(reversed(self.wires.unbind()), reversed(weights.unbind()), strict=True):
            state = (weight * state.index_select(0, wires).reshape(weight.shape)).sum(0)
        return state.t().reshape(x.shape) + 0 * x[..., :1]  # NaN, which is the first in order, is there for all of the row

    def scale(self, temperature: float | Tensor) -> float | Tensor:
        """What the scores are divided by."""
        return temperature if self.swap.power == 1 else temperature**self.swap.power

    def _weights(self, u: Float[Tensor, "*depth 2 n rows"], still: Tensor | None) -> Float[Tensor, "*depth 2 n rows"]:
        """keep and cross"""
        weights = self.swap.value(u)
        if still is None:
            return weights
        return torch.where(still.unsqueeze(-3), torch.arange(1, -1, -1, device=u.device)[:, None, None], weights)

    def _differences(self, states: Tensor) -> Float[Tensor, "depth numbers 2 n rows"]:
        """Of all layers, -u and u, and the same of what is carried."""
        states = states[:-1]
        partners = self.wires[:, None, states.shape[2] :, None].expand_as(states)
        return self.signs[:, None] * (states.gather(2, partners) - states)[:, :, None]

    def jacobians(self, states: Tensor) -> Float[Tensor, "depth 2 2 2 n rows"]:
        """Of all layers, the derivatives by the score and by what is carried on each wire, of both of these, on the same wire
        and on the partner."""
        differences = self._differences(states)
        weights, slope = self._weights(differences[:, 0], self.still), self.swap.derivative(differences[:, 0, 0].copysign(-1.0))
        moved = (slope if self.still is None else slope.masked_fill(self.still, 0))[:, None, None] * differences
        by_score, by_carried = (moved[:, 0] + weights, moved[:, 1]), (torch.zeros_like(weights), weights)
        return torch.stack([*by_score, *by_carried], 1).reshape(len(weights), 2, 2, *weights.shape[1:])


class _LogInclusion(Function):
    """log(T + e^tail), (k, rows), from the relative scores and where the target starts, (wires, rows); and the states. Not
    what autograd makes of it: of many operations, and T near 1 would have the slope of a difference."""

    @staticmethod
    def forward(scores: Tensor, share: Tensor, tail: Tensor, network: SoftNetwork) -> tuple[Tensor, Tensor]:
        states = network.push(torch.stack([scores, share]))
        inclusion = states[-1, 1, : len(tail)].cumsum(0)
        return torch.logaddexp(inclusion.log(), tail), states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.network = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        scores, share, tail, result, states = ctx.saved_tensors
        network: SoftNetwork = ctx.network
        if torch.is_grad_enabled():  # for a second derivative
            states = network.push(torch.stack([scores, share]))
        ends = states[-1, 1]
        # of T: 1 / (T + e^tail); where that overflows, the slope of T is smaller still
        slope = grad / result.clamp(min=-80).exp()
        grads = pad(slope.flip(0).cumsum(0).flip(0), (0, 0, 0, len(ends) - len(tail)))
        # No share is lost in a comparator: a constant added to the gradients of all wires changes nothing. It is chosen such
        # that they vanish where most of the share has ended; their differences, all that counts, then keep their digits.
        grads = grads - grads.gather(0, ends.argmax(0, keepdim=True))
        state = torch.stack([torch.zeros_like(grads), grads])
        for wires, jacobian in zip(reversed(network.wires.unbind()), reversed(network.jacobians(states).unbind()), strict=True):
            state = (jacobian * state.index_select(1, wires).reshape(2, 2, *state.shape[1:])).sum((1, 2))
        return state[0], None, grad * (tail - result).exp(), None


def _plain_log_inclusion(scores: Tensor, share: Tensor, tail: Tensor, network: SoftNetwork) -> tuple[Tensor]:
    """The same for functional transforms and forward mode. Where T is near 1 it is 1 less the shares that ended elsewhere: its
    slope is theirs, in all digits."""
    ends = network.push(torch.stack([scores, share]))[-1, 1]
    inclusion = ends.cumsum(0)[: len(tail)]
    elsewhere = pad(ends.flip(0).cumsum(0).flip(0)[1:], (0, 0, 0, 1))[: len(tail)]
    inclusion = torch.where(inclusion > 0.5, 1 - elsewhere, inclusion)
    is_tiny = inclusion < 1e-36  # 1 / T must be finite
    logarithm = torch.where(is_tiny, -torch.inf, torch.where(is_tiny, 1.0, inclusion).log())
    return (torch.logaddexp(logarithm, tail),)


# ---- names

_BUILT_IN: dict[str, object] = {**KINDS, **SWAPS}


def add_kind(name: str, kind: Kind) -> None:
    """Add a family of networks: ``SortingNetwork(name)``, and ``name`` wherever an operator can be given by name.

    Example:
        >>> best_first = anyk.networks.Kind(lambda n, k: anyk.networks.odd_even(n).top(k).packed(), lambda number: number // 2)
        >>> anyk.operators.network.add_kind("packed_odd_even", best_first)
        >>> anyk.operators.by_name("packed_odd_even", temperature=2.0)
        SortingNetwork('packed_odd_even', temperature=2.0, swap='logistic', wires='target')
    """

    def make(**settings: Any) -> SortingNetwork:
        return SortingNetwork(name, **settings)

    make.__qualname__ = f"SortingNetwork({name!r})"
    register(name, make)
    KINDS[name] = kind


for _name in tuple(KINDS):
    add_kind(_name, KINDS[_name])
