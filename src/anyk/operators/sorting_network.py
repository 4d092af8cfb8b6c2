"""SortingNetwork: comparator networks with soft comparators. One engine runs all networks and all swaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from anyk import autograd, checks, kernels, networks
from anyk._compat import constant_when_traced
from anyk.docstrings import documented
from anyk.kernels.loss_description import GIVEN, MOST_WIRES, NETWORK, SORTED, TARGET, OperatorDescription, Wiring
from anyk.kernels.loss_description import SWAPS as KERNEL_SWAPS
from anyk.operators.base import FARTHEST, Operator, by_class, expected_ranks, expected_scores, in_order, rows_from_inclusion
from anyk.registry import NETWORKS, SWAPS
from anyk.swaps import Swap

# log T continues along this plus the swap's tail where T falls below it. To T itself that adds 1e-13 at most.
LOG_TAIL_WEIGHT = -30.0

MOST_COMPARATORS = 150_000
"""of a network whose mask is made by a kernel: of 16 rows it keeps three numbers for each"""

Wires = Literal["target", "sorted", "given"]
_KERNEL_WIRES = {"target": TARGET, "sorted": SORTED, "given": GIVEN}
_KERNEL_SWAPS = {SWAPS[name]: number for number, name in enumerate(KERNEL_SWAPS)}


@dataclass(frozen=True)
class Kind:
    """A family of networks.

    Args:
        title: what to call it.
        build: (n, k) -> network with the k best on its outputs.
        target_wire: number of classes of each row -> the wire on which ``wires="target"`` starts the target.
        active: (n, number) -> first and last + 1 layer that a row of ``number`` <= n classes runs through, so that a padded
            row is treated as the network for its own number would; None when all layers fit anyway.
    """

    title: str
    build: Callable[[int, int], networks.Network]
    target_wire: Callable[[Tensor], Tensor]
    active: Callable[[int, Tensor], tuple[Tensor | int, Tensor]] | None = None

    def network(self, n: int, k: int) -> networks.Network:
        """The network as it is run: in the fewest layers, unless something counts them."""
        network = self.build(n, k)
        return network.packed() if self.active is None else network


def _active_odd_even(n: int, number: Tensor) -> tuple[Tensor, Tensor]:
    first = (n - number) % 2
    return first, first + number


def _active_bitonic(n: int, number: Tensor) -> tuple[int, Tensor]:
    exponents = torch.arange(max(n - 1, 1).bit_length(), device=number.device)
    blocks = (number[..., None] > 2**exponents).sum(-1)
    return 0, blocks * (blocks + 1) // 2


def _start_wire(wire: int) -> Callable[[Tensor], Tensor]:
    return lambda number: (number // 2).clamp(max=wire)


# The start wires are those that shift T least against the sorted order; benchmarks/wires.py measures them.
NETWORKS["splitter"] = Kind("Splitter network", networks.splitter, _start_wire(1))
NETWORKS["bitonic"] = Kind("Bitonic network", lambda n, k: networks.bitonic(n).top(k), _start_wire(4), _active_bitonic)
NETWORKS["odd_even"] = Kind("Odd-even network", lambda n, k: networks.odd_even(n).top(k), _start_wire(4), _active_odd_even)


@documented
class SortingNetwork(Operator):
    """Differentiable sorting and selection networks.

    Every comparator of the network mixes its two values instead of swapping them: with a the value on the wire that is to
    get the larger one, b the other, and ``alpha = swap((a - b) / t)``, for ``"logistic_art"`` ``swap((a - b) / t^2)``,

        larger = alpha a + (1 - alpha) b,    smaller = (1 - alpha) a + alpha b.

    A class is carried along by the same mixtures; the share of it that ends on the r-th output is P[r, c]. For T only the
    target's share is pushed forward, beside the scores: the cost is that of the comparators, with no factor k.

    Cost, in comparators: splitter about n (1 + log2 k), bitonic n log2(n)^2 / 4, odd-even n^2 / 2. Where gradients are
    recorded, T keeps about 6 numbers per row and comparator. The matrix keeps 8 k; with ``wires="target"`` it is computed
    column by column, with each class in turn on the target's wire, and keeps 7 n: 5 MB for each row of 256 scores at k = 5.

    Args:
        kind: ``"splitter"`` (selection network), ``"bitonic"`` or ``"odd_even"`` (sorting networks).
        {temperature}
        swap: the soft comparator, which decides how fast T of a class far behind decays: exponentially for ``"logistic"``,
            faster for ``"gaussian"``, as exp(-sqrt(distance)) for ``"logistic_art"``, as 1 / distance for ``"cauchy"``,
            ``"reciprocal"`` and ``"optimal"``.
        wires: where the classes start, which matters to a network. ``"target"``: the target on one fixed wire, the others
            in descending order on the rest, so that T is continuous in the scores and does not depend on the order of the
            classes. ``"sorted"``: all in descending order. ``"given"``: in the order of the classes, the last class on the
            first wire, as published (candidates that the loss has cut down to m < n come in descending order). Only with
            the last two do the rows of the matrix sum to 1: with ``"target"`` each column has its own arrangement, and of 16
            normal scores of any spread the sums lie between .6 and 1.4 (splitter; .05 from 1 in the mean), .5 and 2.5
            (bitonic), .7 and 1.9 (odd-even; up to 5 with 64 scores). The mask, the ranks and the sort always start in
            descending order, whatever ``wires`` is; the mask jumps where two scores cross.

    Example:
        >>> scores = torch.tensor([1.0, 3.0, 2.0, 0.0])
        >>> anyk.SortingNetwork("splitter", temperature=0.1).inclusion(scores, torch.tensor(2), k=2).round()
        tensor([0., 1.])

    Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022.
    """

    kernel_code = NETWORK

    def __init__(
        self,
        kind: str = "splitter",
        temperature: float | Tensor = 1.0,
        swap: str = "logistic",
        wires: Wires = "target",
    ) -> None:
        super().__init__(temperature)
        self.kind = kind
        self.swap = swap
        self.wires = wires

    def __setattr__(self, name: str, value: Any) -> None:
        known = {"kind": NETWORKS, "swap": SWAPS, "wires": get_args(Wires)}.get(name)
        if known is not None:
            checks.one_of(name, value, known)
        super().__setattr__(name, value)

    @property
    def sorts(self) -> bool:  # type: ignore[override]
        return self.wires != "given"

    @property
    def scale_power(self) -> float:  # type: ignore[override]
        return SWAPS[self.swap].power

    def extra_repr(self) -> str:
        return f"{self.kind!r}, {super().extra_repr()}, swap={self.swap!r}, wires={self.wires!r}"

    def kernel_description(self, m: int, k: int) -> OperatorDescription | str:
        described = super().kernel_description(m, k)
        if isinstance(described, str):
            return described
        swap = _KERNEL_SWAPS.get(SWAPS[self.swap])
        if swap is None:
            return f"the swap {self.swap!r} is not one of anyk's own"
        if m > MOST_WIRES:
            return f"a network of {m} wires is too large"
        return described._replace(swap=swap, wires=_KERNEL_WIRES[self.wires], wiring=_wiring(NETWORKS[self.kind], m, k))

    def kernel_settings(self) -> tuple[object, ...]:
        # the entries, not their names: others may have taken these
        return *super().kernel_settings(), NETWORKS[self.kind], SWAPS[self.swap], self.wires

    def _mask_by_kernel(self, scores: Tensor, k: int | Tensor) -> Tensor | None:
        n = scores.shape[-1]
        swap = _KERNEL_SWAPS.get(SWAPS[self.swap])
        if type(self)._mask is not SortingNetwork._mask or swap is None or not kernels.uses_native(scores):
            return None
        if not isinstance(k, int) or not 0 < k < n <= MOST_WIRES:
            return None
        wiring = _wiring(NETWORKS[self.kind], n, k)
        if len(wiring.comparators) > MOST_COMPARATORS:
            return None
        described = OperatorDescription(NETWORK, 1.0, swap=swap, wiring=wiring)
        operator, scores = self._apart(scores)
        plain = operator._plain_mask
        return kernels.network_mask(described, self.scale_power, scores, operator.temperature, k, lambda: plain(scores, k))

    def _mask(self, scores: Tensor, real: Tensor | None, k: int | Tensor) -> Tensor:
        """The sum of the first k rows of P, pushed back through the network at once. All classes start in descending order.

        Entries of tied scores are averaged, so that permuting the scores permutes the mask. Where two scores cross, it jumps.
        """
        assert isinstance(k, int)
        n = scores.shape[-1]
        ordered, present, classes = in_order(scores, real)
        number = n if present is None else present.sum(-1)
        kth = torch.full_like(classes[..., 0], k - 1).clamp(max=number - 1).clamp(min=0)
        ordered = self._scaled(ordered, kth, present).clamp(-FARTHEST, FARTHEST)  # +inf is a score, too
        rows = ordered.reshape(-1, n).t()
        shares = _soft_rows(self._schedule(scores, k), SWAPS[self.swap], rows, self._frozen(present, n), summed=True)
        mask = shares.squeeze(0).t().reshape(scores.shape)
        apart = ordered.detach().diff(dim=-1) != 0
        if present is not None:
            apart = apart | present.diff(dim=-1)  # padding has a score that means nothing
        apart = torch.nn.functional.pad(apart, (1, 0), value=True)
        tied = apart.long().cumsum(-1) - 1
        sums = torch.zeros_like(mask).scatter_add(-1, tied, mask)
        counts = torch.zeros_like(mask).scatter_add(-1, tied, torch.ones_like(mask))
        mask = (sums / counts.clamp(min=1)).gather(-1, tied) + (0 * ordered).sum(-1, keepdim=True)
        mask = torch.zeros_like(mask).scatter(-1, classes, mask)
        return mask if real is None else torch.where(real.sum(-1, keepdim=True) <= k, torch.ones_like(mask), mask)

    def _ranks(self, scores: Tensor, real: Tensor | None) -> Tensor:
        within_reach = self._scaled(scores, None, real).clamp(-FARTHEST, FARTHEST)  # +inf is a score, too
        return expected_ranks(self._matrix_of_sorted(within_reach, real, scores.shape[-1]))

    def _sort(self, scores: Tensor, real: Tensor | None) -> Tensor:
        matrix = self._matrix_of_sorted(self._scaled(scores, None, real), real, scores.shape[-1])
        return expected_scores(matrix, scores, real)

    def _matrix(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        if self.wires == "target":
            return self._matrix_by_columns(scores, real, k)
        if self.wires == "sorted":
            return self._matrix_of_sorted(scores, real, k)
        return self._matrix_of(scores, real, k, _as_given(scores, real))

    def _matrix_of_sorted(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        return self._matrix_of(scores, real, k, in_order(scores, real)[2])

    def _matrix_of(self, scores: Tensor, real: Tensor | None, k: int, classes: Tensor) -> Tensor:
        """P with these classes on the wires."""
        n = scores.shape[-1]
        if n == 1:  # no comparator carries the graph
            return 1 + 0 * scores[..., None, :]
        rows = scores.gather(-1, classes).reshape(-1, n).t()
        shares = _soft_rows(self._schedule(scores, k), SWAPS[self.swap], rows, self._frozen(real, n))
        return by_class(shares.movedim(-1, 0).reshape(*scores.shape[:-1], k, n), classes)

    def _matrix_by_columns(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        """P with each class in turn as the target, on the target's wire."""
        ordered, ordered_real, in_place = in_order(scores, real)
        position = torch.arange(scores.shape[-1], device=scores.device).expand_as(in_place)
        each_real = None if ordered_real is None else ordered_real[..., None, :].expand(*position.shape, -1)
        each = ordered[..., None, :].expand(*position.shape, -1)
        classes, starts = self._wires(each, position, each_real)
        inclusion = self._inclusion(each.gather(-1, classes), starts, each_real, k)
        return by_class(rows_from_inclusion(inclusion.mT), in_place)

    def _log_inclusion(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        m = scores.shape[-1]
        classes, starts = self._wires(scores, position, real)
        # One gather for all that is needed of the scores: each would have a gradient of all of them.
        rivals = self._rivals(scores, position, real, k)
        taken = scores.gather(-1, torch.cat([classes, position[..., None], rivals], -1))
        arranged, target, ahead = taken.split_with_sizes((m, 1, rivals.shape[-1]), -1)
        lead = target - ahead
        if real is not None:
            lead = lead.masked_fill(~real.gather(-1, rivals), 0)  # behind padding nobody can fall
        return self._log_with_tail(self._inclusion(arranged, starts, real, k), lead)

    def _ranks_all_at_once(self) -> bool:
        return self.wires != "target" and super()._ranks_all_at_once()

    def _every_log_inclusion(self, scores: Tensor, real: Tensor | None, k: int) -> Tensor:
        """From the k rows of the matrix, which go through the network once; each class as the target would be m columns."""
        inclusion = self._matrix(scores, real, k).mT.cumsum(-1)
        # To the j-th of all, not of the others: the two differ for classes that are among the first j, whose T needs no tail.
        ordered, present, _ = in_order(scores, real)
        lead = scores[..., None] - ordered[..., None, :k]
        if present is not None:
            lead = lead.masked_fill(~present[..., None, :k], 0)
        return self._log_with_tail(inclusion, lead)

    def _wires(self, scores: Tensor, position: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The class that starts on each wire, and whether it is the target."""
        m = scores.shape[-1]
        if self.wires == "given":
            classes = _as_given(scores, real)
            starts = classes == position[..., None]
        elif self.wires == "sorted":
            classes = torch.arange(m, device=scores.device).expand_as(scores)
            starts = classes == position[..., None]
        else:
            build = _cached_order if checks.eager(scores) and real is None else _order
            number = m if real is None else real.sum(-1)
            starts, other = build(NETWORKS[self.kind], m, number, scores.device)
            classes = torch.where(starts, position[..., None], other + (other >= position[..., None]))
        return classes, starts

    def _inclusion(self, arranged: Tensor, starts: Tensor, real: Tensor | None, k: int) -> Tensor:
        """T from the scores on the wires, and the wire where the target starts."""
        m = arranged.shape[-1]
        column = starts.to(arranged.dtype).expand_as(arranged).reshape(-1, m)
        # Traced or transformed, the plain form is the better one: it has every derivative, and it fuses.
        run = _SoftColumn.apply if checks.eager(arranged) else _soft_column
        schedule = self._schedule(arranged, k)
        inclusion: Tensor = run(arranged.reshape(-1, m), column, schedule, SWAPS[self.swap], self._frozen(real, m))
        return inclusion.reshape(*arranged.shape[:-1], k)

    def _rivals(self, scores: Tensor, position: Tensor, real: Tensor | None, k: int) -> Tensor:
        """Where the k best of the others stand (all of them, if there are fewer), padding last."""
        m = scores.shape[-1]
        in_order = self.sorts and real is None
        place = torch.arange(min(k, m - 1) if in_order else m - 1, device=scores.device)
        others = place + (place >= position[..., None])
        if in_order:
            return others
        keys = scores.detach() if real is None else scores.detach().masked_fill(~real, -torch.inf)
        return others.gather(-1, keys.gather(-1, others).topk(min(k, m - 1), dim=-1).indices)

    def _log_with_tail(self, inclusion: Tensor, lead: Tensor) -> Tensor:
        """log T, continued where T underflows.

        Far behind, T is a product of many small shares and vanishes in floating point, and its gradient with it. To T is
        added e^-30 times a tail that decays more slowly than T, in the distance to the j-th of the others: too little to be
        seen above T = 1e-6, and below T = 1e-13 or so a slope that keeps the target moving.
        """
        missing = inclusion.shape[-1] - lead.shape[-1]  # with k = m, the last T is 1
        tail = SWAPS[self.swap].log_tail(lead) + LOG_TAIL_WEIGHT
        if missing:
            tail = torch.nn.functional.pad(tail, (0, missing), value=LOG_TAIL_WEIGHT)
        add = _LogSum.apply if checks.eager(inclusion) else _log_sum
        return add(inclusion, tail)

    def _schedule(self, scores: Tensor, k: int) -> Schedule:
        n = scores.shape[-1]
        if checks.eager(scores):
            return _cached_schedule(self.kind, NETWORKS[self.kind], n, k, scores.device)
        # a network needs definite numbers, also in a trace with symbolic sizes
        n, k = len(list(range(n))), len(list(range(k)))
        return _schedule(_plan(self.kind, n, k), n, scores.device)  # what a trace makes must not outlive it

    def _frozen(self, real: Tensor | None, n: int) -> Callable[[int, Tensor], Tensor] | None:
        """Which comparators (layer, lower wire) -> (comparators, rows) leave padded rows as they are; None: none does."""
        if real is None:
            return None
        number = real.sum(-1).reshape(-1)
        active = NETWORKS[self.kind].active
        first, end = (0, None) if active is None else active(n, number)

        def frozen(layer: int, lower_wire: Tensor) -> Tensor:
            padded = lower_wire[:, None] >= number
            return padded if end is None else padded | (layer < first) | (layer >= end)

        return frozen


def _order(kind: Kind, m: int, number: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """``wires="target"`` for rows of ``number`` classes: where the target starts, and which of the others, counted without
    the target, starts on each of the other wires."""
    wire = torch.arange(m, device=device)
    number = number if isinstance(number, Tensor) else wire.new_full((), number)
    start = kind.target_wire(number)[..., None]
    return wire == start, wire - (wire > start).long()


@lru_cache(maxsize=128)
def _cached_order(kind: Kind, m: int, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _order(kind, m, number, device)


class Step(NamedTuple):
    """One layer of the schedule.

    The state before it is re-ordered by ``gather``: first the upper wires of its ``comparators`` comparators, then their
    lower wires, then the wires that are idle now but needed later. Wires that are never needed again have gone.
    """

    layer: int
    comparators: int
    lower_wires: Tensor
    gather: Tensor
    dropped: Tensor
    """what the gather leaves behind"""
    gather_with_partners: Tensor
    """the same from a state with partners to a state with partners, see :class:`_SoftColumn`"""
    back_with_partners: Tensor
    """and for the gradients, from the state after the next step (or the outputs); a row of zeros ends each of these states,
    for the wires that the next step does not need"""


class Schedule(NamedTuple):
    steps: tuple[Step, ...]
    outputs: Tensor
    """where the network's outputs stand after the last step, best first"""
    dropped: Tensor
    """where the wires stand there that are no outputs"""
    outputs_with_partners: Tensor
    back: Tensor
    """where the gradients of all wires stand in the end"""


class _Plan(NamedTuple):
    """A schedule in plain numbers."""

    steps: tuple[tuple[int, tuple[int, ...], int, tuple[int, ...]], ...]
    """for each step: its layer, gather, number of comparators, lower wires"""
    outputs: tuple[int, ...]


@constant_when_traced  # building a network is nothing to trace
def _plan(kind: str, n: int, k: int) -> _Plan:
    network = NETWORKS[kind].network(n, k)
    needed = set(network.outputs)
    orders: list[tuple[int, list[int], int]] = []
    for layer in reversed(range(network.depth)):
        pairs = network.layers[layer]
        if not pairs:
            continue
        upper, lower = [i for i, _ in pairs], [j for _, j in pairs]
        idle = sorted(needed.difference(upper, lower))
        orders.append((layer, upper + lower + idle, len(pairs)))
        needed.update(upper, lower)
    steps, state = [], list(range(n))
    for layer, order, comparators in reversed(orders):
        steps.append((layer, _places(order, state), comparators, tuple(order[comparators : 2 * comparators])))
        state = order
    return _Plan(tuple(steps), _places(network.outputs, state))


def _schedule(plan: _Plan, n: int, device: torch.device) -> Schedule:
    def tensor(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=device)

    def without(places: Sequence[int], width: int) -> list[int]:
        kept = set(places)
        return [place for place in range(width) if place not in kept]

    def with_partners(places: Sequence[int], pairs: int) -> list[int]:
        return [*places[: 2 * pairs], *places[pairs : 2 * pairs], *places[:pairs], *places[2 * pairs :]]

    numbers = list(range(n))
    gathers = []
    for _, gather, pairs, _ in plan.steps:
        gathers.append(with_partners([numbers[place] for place in gather], pairs))
        numbers = [*range(2 * pairs), *range(4 * pairs, len(gather) + 2 * pairs)]
    last_outputs = [numbers[place] for place in plan.outputs]

    backs, after, zeros = [], {place: number for number, place in enumerate(plan.outputs)}, len(plan.outputs)
    for _, gather, pairs, _ in reversed(plan.steps):
        width = len(gather)
        backs.append(with_partners([after.get(place, zeros) for place in [*range(width), -1]], pairs))
        after = dict(zip(gather, [*range(2 * pairs), *range(4 * pairs, width + 2 * pairs)], strict=True))
        zeros = width + 2 * pairs
    widths = [n, *(len(gather) for _, gather, _, _ in plan.steps)]
    steps = [
        Step(layer, pairs, tensor(lower_wires), tensor(gather), tensor(without(gather, width)), tensor(forth), tensor(back))
        for (layer, gather, pairs, lower_wires), width, forth, back in zip(
            plan.steps, widths[:-1], gathers, list(reversed(backs)), strict=True
        )
    ]
    return Schedule(
        steps=tuple(steps),
        outputs=tensor(plan.outputs),
        dropped=tensor(without(plan.outputs, widths[-1])),
        outputs_with_partners=tensor(last_outputs),
        back=tensor([after.get(wire, zeros) for wire in range(n)]),
    )


@lru_cache(maxsize=128)
def _cached_schedule(kind: str, which: Kind, n: int, k: int, device: torch.device) -> Schedule:
    # by the kind itself too: another may have taken its name
    with torch.inference_mode(False):  # a first call without gradients must not spoil the later ones
        return _schedule(_plan(kind, n, k), n, device)


def _places(wires: Sequence[int], state: list[int]) -> tuple[int, ...]:
    place = {wire: number for number, wire in enumerate(state)}
    return tuple(place[wire] for wire in wires)


@lru_cache(maxsize=128)
def _wiring(kind: Kind, m: int, k: int) -> Wiring:
    """The network as the kernels take it."""
    network = kind.network(m, k)
    comparators = [(i, j, layer) for layer, pairs in enumerate(network.layers) for i, j in pairs]
    with torch.inference_mode(False):
        number = torch.arange(m + 1, device="cpu")  # not the default device: the kernels read these tables
        first, end = (0, torch.full_like(number, len(network.layers))) if kind.active is None else kind.active(m, number)
        starts = [kind.target_wire(number), torch.as_tensor(first, device="cpu").expand_as(number), end]
        return Wiring(
            torch.tensor(comparators, dtype=torch.int32, device="cpu").reshape(-1, 3),
            torch.tensor(network.outputs[:k], dtype=torch.int32, device="cpu"),
            torch.stack([column.to(torch.int32) for column in starts], -1).contiguous(),
        )


Frozen = Callable[[int, Tensor], Tensor] | None


def _mix_scores(scores: Tensor, step: Step, swap: Swap, frozen: Frozen) -> tuple[Tensor, Tensor, Tensor]:
    """One layer for the scores (wires, rows); and the shares of the larger output that come from the upper and from the lower
    wire, as all that starts on these wires is mixed."""
    upper, lower, idle = _parts(scores.index_select(0, step.gather), step, dim=0)
    difference = upper - lower
    keep, cross = swap.value(difference), swap.value(-difference)
    if frozen is not None:
        still = frozen(step.layer, step.lower_wires)
        keep, cross = keep.masked_fill(still, 1), cross.masked_fill(still, 0)
    # keep + cross = 1 only up to rounding: in keep * upper + cross * lower all scores would drift by that, and what counts is
    # their differences, which may be much smaller. Each output is a step away from the input that it is nearer to: a step
    # from the other one would round by as much as the two are apart.
    turned = cross > keep
    moved = torch.where(turned, keep, cross) * difference
    outputs = torch.where(turned, lower + moved, upper - moved), torch.where(turned, upper - moved, lower + moved)
    return torch.cat([*outputs, idle]), keep, cross


def _parts(state: Tensor, step: Step, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Upper wires, lower wires, idle wires."""
    pairs = step.comparators
    return (
        state.narrow(dim, 0, pairs),
        state.narrow(dim, pairs, pairs),
        state.narrow(dim, 2 * pairs, state.shape[dim] - 2 * pairs),
    )


def _soft_column(arranged: Tensor, column: Tensor, schedule: Schedule, swap: Swap, frozen: Frozen) -> Tensor:
    """Pushes scores and the target's share, both (rows, wires), forward through the network: T (rows, k).

    Where T is near 1 it is 1 less the shares that ended elsewhere: its slope is theirs, in all digits.
    """
    scores, share = arranged.t(), column.t()
    elsewhere = _left_behind(share, schedule.steps[0].dropped if schedule.steps else schedule.dropped)
    for number, step in enumerate(schedule.steps):
        scores, keep, cross = _mix_scores(scores, step, swap, frozen)
        upper, lower, idle = _parts(share.index_select(0, step.gather), step, dim=0)
        # A sum of non-negative terms: upper - cross (upper - lower) would lose the digits of small shares.
        share = torch.cat([keep * upper + cross * lower, cross * upper + keep * lower, idle])
        last = number + 1 == len(schedule.steps)
        elsewhere = elsewhere + _left_behind(share, schedule.dropped if last else schedule.steps[number + 1].dropped)
    ends = share.index_select(0, schedule.outputs)
    behind = torch.nn.functional.pad(ends[1:].flip(0).cumsum(0).flip(0), (0, 0, 0, 1))
    inclusion = ends.cumsum(0)
    return torch.where(inclusion > 0.5, 1 - (elsewhere + behind), inclusion).t()


def _left_behind(share: Tensor, dropped: Tensor) -> Tensor:
    """The share on the wires that are not needed any more."""
    return share.index_select(0, dropped).sum(0)


class _SoftColumn(torch.autograd.Function):
    """:func:`_soft_column` with the backward pass written out: the same values, a third of the time.

    A layer is a handful of operations on few numbers, so that it is their count that costs. The state is (2, wires, rows):
    scores and share, each with whole layers in one piece. After the comparators' upper and lower wires come copies of their
    partners, lower and upper: then d = wire - partner has both signs, swap(d) is the share that stays and the share that
    crosses, and both wires of a comparator are mixed at once. With the incoming gradients g, the backward pass is the same
    mixture of g, plus, on the scores, swap'(d_scores) times the sum over scores and share of (g_wire - g_partner) d_upper.
    """

    @staticmethod
    def forward(ctx: Any, arranged: Tensor, column: Tensor, schedule: Schedule, swap: Swap, frozen: Frozen) -> Tensor:
        saved = []
        state = torch.stack([arranged.t(), column.t()])
        for step in schedule.steps:
            state = state.index_select(1, step.gather_with_partners)
            wires, partners = _wires_and_partners(state, step.comparators)
            difference = wires - partners
            score_difference = difference[0]
            weights = swap.value(score_difference)
            if frozen is not None:
                still = frozen(step.layer, step.lower_wires)
                weights = torch.stack([weights[0].masked_fill(still, 1), weights[1].masked_fill(still, 0)])
            keep, cross = weights.unbind()
            scores, share = wires.unbind()
            turned = cross > keep  # see _mix_scores
            torch.where(turned, partners[0], scores, out=scores)
            scores.addcmul_(score_difference, torch.where(turned, -keep, cross), value=-1)
            share.mul_(keep).addcmul_(partners[1], cross)
            if ctx.needs_input_grad[0]:
                saved += [difference, weights]
        ends = state[1].index_select(0, schedule.outputs_with_partners)
        ctx.save_for_backward(arranged, column, ends, *saved)
        ctx.schedule, ctx.swap, ctx.frozen = schedule, swap, frozen
        return ends.cumsum(0).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        arranged, column, ends, *saved = ctx.saved_tensors
        schedule: Schedule = ctx.schedule
        plain = autograd.plain_gradients(
            lambda arranged: _soft_column(arranged, column, schedule, ctx.swap, ctx.frozen), [arranged], [gradient]
        )
        if plain is not None:
            return plain[0], None, None, None, None
        rows, k = gradient.shape
        state = gradient.new_zeros(2, k + 1, rows)
        state[1, :k] = gradient.t().flip(0).cumsum(0).flip(0)
        # No share is lost in a comparator: a constant added to the gradients of all wires changes nothing. It is chosen such
        # that they vanish where most of the share has ended; their differences, all that counts, then keep their digits.
        most = torch.cat([ends, 1 - ends.sum(0, keepdim=True)]).argmax(0, keepdim=True)
        state[1] -= state[1].gather(0, most)
        for number in range(len(schedule.steps) - 1, -1, -1):
            step = schedule.steps[number]
            difference, weights = saved[2 * number : 2 * number + 2]
            state = state.index_select(1, step.back_with_partners)
            wires, partners = _wires_and_partners(state, step.comparators)
            apart = wires - partners
            keep, cross = weights.unbind()
            wires.mul_(keep).addcmul_(partners, cross)
            upper = difference[:, :1]
            slope = ctx.swap.derivative(upper[0, 0])
            if ctx.frozen is not None:
                slope = slope.masked_fill(ctx.frozen(step.layer, step.lower_wires), 0)
            by_score, by_share = apart.mul_(upper * slope).unbind()
            wires[0].add_(by_score).add_(by_share)
        return state[0].index_select(0, schedule.back).t(), None, None, None, None


def _wires_and_partners(state: Tensor, pairs: int) -> tuple[Tensor, ...]:
    """The comparators' wires, and their partners: (scores and share, upper and lower, comparators, rows)."""
    return state.narrow(1, 0, 4 * pairs).view(2, 2, 2, pairs, state.shape[-1]).unbind(1)


def _soft_rows(schedule: Schedule, swap: Swap, scores: Tensor, frozen: Frozen, summed: bool = False) -> Tensor:
    """P from back to front: scores (wires, rows) -> shares (k, wires, rows), or their sum over k, (1, wires, rows)."""
    rows = scores.shape[1]
    state = scores
    weights = []
    for step in schedule.steps:
        width = len(state)
        state, keep, cross = _mix_scores(state, step, swap, frozen)
        weights.append((width, keep, cross))
    k = 1 if summed else len(schedule.outputs)
    which = torch.zeros_like(schedule.outputs) if summed else torch.arange(k, device=scores.device)
    shares = scores.new_zeros(k, len(state), 1).index_put((which, schedule.outputs), scores.new_ones(()))
    shares = shares.expand(-1, -1, rows)
    for step, (width, keep, cross) in reversed(list(zip(schedule.steps, weights, strict=True))):
        larger, smaller, idle = _parts(shares, step, dim=1)
        mixed = torch.cat([keep * larger + cross * smaller, cross * larger + keep * smaller, idle], dim=1)
        shares = mixed.new_zeros(k, width, rows).index_copy(1, step.gather, mixed)
    return shares


def _log_sum(inclusion: Tensor, tail: Tensor) -> Tensor:
    """log(T + e^tail), with T down to 0."""
    tiny = inclusion <= 1e-36  # 1 / T is still finite in float32
    logarithm = torch.where(tiny, -torch.inf, torch.where(tiny, 1.0, inclusion).log())
    return torch.stack([logarithm, tail]).logsumexp(0)


class _LogSum(torch.autograd.Function):
    """:func:`_log_sum` in few operations. The backward pass is itself differentiable."""

    @staticmethod
    def forward(ctx: Any, inclusion: Tensor, tail: Tensor) -> Tensor:
        result = torch.logaddexp(inclusion.log(), tail)
        ctx.save_for_backward(tail, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        tail, result = ctx.saved_tensors
        # 1 / (T + e^tail); where that overflows, the slope of T is smaller still
        return gradient * (-result).clamp(max=80).exp(), gradient * (tail - result).exp()


def _as_given(scores: Tensor, real: Tensor | None) -> Tensor:
    """The class on each wire: from the last to the first, padding at the end."""
    n = scores.shape[-1]
    classes = torch.arange(n - 1, -1, -1, device=scores.device).expand(scores.shape)
    if real is None:
        return classes
    return classes.gather(-1, (~real).flip(-1).int().sort(dim=-1, stable=True).indices)
