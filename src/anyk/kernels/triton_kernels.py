"""The kernels of :mod:`anyk.kernels.triton`. Importing this imports triton.

A block is (rows, lanes), all in float32: a lane is a candidate's place, a wire, or a rank, and what a row has only one of is
(rows, 1). There are as many lanes as the next power of two to the m candidates. The formulae are those of the plain code, which
says why they are what they are; here is only why they are written differently. What triton's language lacks, or has in too
few digits (its exp takes 2 to the power of a rounded product), is written out: libdevice has it, but no interpreter.
"""

# Kernels are compiled from this source, without its annotations' meaning: these are triton's own.
# mypy: ignore-errors
# ruff: noqa: N803, SIM108, SIM109

import triton
import triton.language as tl

from anyk import swaps
from anyk.kernels import abi, loss_description


def _constants(enumeration):
    return (tl.constexpr(constant.value) for constant in enumeration)


# A kernel can read no other globals than constexpr.
NETWORK, LAPSUM, KSUBSET, SOFTSORT, NEURALSORT, PERMUTAHEDRON = _constants(abi.Operator)
LOGISTIC, LOGISTIC_ART, CAUCHY, GAUSSIAN, RECIPROCAL, OPTIMAL = _constants(abi.Swap)
TARGET, SORTED, GIVEN = _constants(abi.Wires)
SEPARATE, MIXED, PURE, ERROR = _constants(abi.Family)
OF_ALL, OF_CLASS, OF_ROW = _constants(abi.PKOf)
NO_OPERATOR = tl.constexpr(loss_description.NO_OPERATOR)
OVER_ALL, OVER_CANDIDATES = tl.constexpr(loss_description.OVER_ALL), tl.constexpr(loss_description.OVER_CANDIDATES)
MOST_IN_REGISTERS = tl.constexpr(loss_description.MOST_IN_REGISTERS)
LOG_ZERO = tl.constexpr(-1e37)  # as in anyk.operators.base
LOG_TAIL_WEIGHT = tl.constexpr(-30.0)  # as in anyk.operators.sorting_network
ART_ROUNDING = tl.constexpr(swaps.ART_ROUNDING)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _exp(x):
    x = tl.where(x < -110.0, -110.0, x)  # 0 there; NaN stays NaN
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    n = tl.where(n > 127.0, 127.0, n)
    # n times the first of these has no rounding: it has 9 bits. The rest is within half of log 2, where exp2 has its digits.
    r = (x - n * 0.693359375) + n * 2.12194440054690583e-4
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(n)


@triton.jit
def _log1p(x):
    u = 1.0 + x
    rounded = u - 1.0
    return tl.where(rounded == 0.0, x, tl.log(u) * (x / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def _expm1(x):
    """For -1/2 <= x <= 0."""
    p = 1.0 + x * 0.1111111111
    p = 1.0 + x * 0.125 * p
    p = 1.0 + x * 0.1428571429 * p
    p = 1.0 + x * 0.1666666667 * p
    p = 1.0 + x * 0.2 * p
    p = 1.0 + x * 0.25 * p
    p = 1.0 + x * 0.3333333333 * p
    return x * (1.0 + x * 0.5 * p)


@triton.jit
def _log_sigmoid(x):
    return tl.where(x < 0.0, x, 0.0) - _log1p(_exp(-tl.abs(x)))


@triton.jit
def _sigmoid(x):
    e = _exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _log_add(a, b):
    """log(e^a + e^b), the second of them finite."""
    larger = tl.where(a > b, a, b)
    return larger + _log1p(_exp(-tl.abs(a - b)))


@triton.jit
def _pick(x, lane, place):
    """The value on one lane of each row."""
    return tl.sum(tl.where(lane == place, x, 0.0), axis=1, keep_dims=True)


@triton.jit
def _taken(x, index, lane, room, inside, M: tl.constexpr):
    """x[row, index[row, lane]]

    By registers up to the lanes that MOST_IN_REGISTERS says. The compiler writes out an exchange between all registers that
    hold a row: with 1024 lanes it takes minutes. Beyond them by ``room`` in memory, one row of lanes.
    """
    if M <= MOST_IN_REGISTERS:
        result = tl.gather(x, tl.broadcast_to(index, x.shape), 1)
    else:
        tl.debug_barrier()
        tl.store(room + lane, x, mask=inside)
        tl.debug_barrier()
        result = tl.load(room + tl.broadcast_to(index, x.shape), mask=inside, other=0.0).to(x.dtype)
    return result


@triton.jit
def _largest(x):
    """The maximum of each row, 0 if there is none; NaN is not seen."""
    largest = tl.max(tl.where(x == x, x, -INFINITY), axis=1, keep_dims=True)
    return tl.where(largest == -INFINITY, 0.0, largest)


@triton.jit
def _erfc(x):
    """For x >= 0, with all digits wherever it is not 0."""
    x = tl.where(x > 15.0, 15.0, x)
    t = (x - 2.0) / (x + 2.0)
    # (1 + 2 x) e^(x^2) erfc(x), a smooth function of t: fitted at Chebyshev points, within 6e-8
    p = t * -2.0055465938639827e-05 + 6.29450150881894e-05
    p = p * t + 0.00022104501840658486
    p = p * t - 0.0003567557723727077
    p = p * t - 0.0014635828556492925
    p = p * t + 0.0012162493076175451
    p = p * t + 0.008724423125386238
    p = p * t - 0.00801845733076334
    p = p * t - 0.05422024428844452
    p = p * t + 0.16404935717582703
    p = p * t - 0.1660303771495819
    p = p * t - 0.0927637591958046
    p = p * t + 1.2769783735275269
    # e^(-x^2) with a square that is not rounded: of the upper half of x's bits, and the rest
    upper = (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    far = p / (1.0 + 2.0 * x) * _exp(-upper * upper) * _exp(-(x - upper) * (x + upper))
    # Below 1/2 the series of erf rounds less.
    z = x * x
    p = z * (-0.0007692331043621475) + 0.005200275564104582
    p = p * z - 0.026863112679422083
    p = p * z + 0.11283773740601193
    p = p * z - 0.37612638517062397
    p = p * z + 1.128379167081974
    return tl.where(x < 0.5, 1.0 - p * x, far)


@triton.jit
def _cauchy_tail(a):
    """atan(1 / a) / pi for a >= 0"""
    far = a > 1.0
    q = tl.where(far, 1.0 / tl.where(far, a, 1.0), a)
    z = q * q
    p = z * 0.0010640594783033596 - 0.007063308062014107  # atan(q) / q, fitted as above, within 5e-10
    p = p * z + 0.021983219573321548
    p = p * z - 0.04401232679592155
    p = p * z + 0.06691350076372536
    p = p * z - 0.08787766667428334
    p = p * z + 0.11051517807610572
    p = p * z - 0.1427869407287111
    p = p * z + 0.19999567634275217
    p = p * z - 0.33333322789935216
    p = (p * z + 0.9999999995693973) * q
    return tl.where(far, p, 1.5707963267948966 - p) * 0.3183098861837907


@triton.jit
def _length(a):
    """hypot(a, ART_ROUNDING); the square of a may overflow"""
    small = tl.where(a > 1e15, 1e15, a)
    return tl.where(a > 1e15, a, tl.sqrt_rn(small * small + ART_ROUNDING * ART_ROUNDING))


@triton.jit
def _root(v):
    return tl.div_rn(v, tl.sqrt_rn(_length(tl.abs(v))))


@triton.jit
def _root_slope(v):
    length = _length(tl.abs(v))
    ratio = v / length
    return (1.0 - ratio * ratio * 0.5) / tl.sqrt_rn(length)


@triton.jit
def _shares(v, SWAP: tl.constexpr):
    """value(v) and value(-v) of a swap. It is the smaller one that needs its digits."""
    a = tl.abs(v)
    if SWAP == LOGISTIC:
        e = _exp(-a)
        small = e / (1.0 + e)
    elif SWAP == LOGISTIC_ART:
        e = _exp(-_root(a))
        small = e / (1.0 + e)
    elif SWAP == CAUCHY:
        small = _cauchy_tail(a)
    elif SWAP == GAUSSIAN:
        small = _erfc(a * 0.7071067811865476) * 0.5
    elif SWAP == RECIPROCAL:
        small = 1.0 / (2.0 + a)
    else:
        small = tl.where(a <= 0.25, 0.5 - a, 1.0 / (16.0 * tl.where(a <= 0.25, 0.25, a)))
    large = 1.0 - small
    return tl.where(v >= 0.0, large, small), tl.where(v >= 0.0, small, large)


@triton.jit
def _slope(v, keep, cross, SWAP: tl.constexpr):
    """The derivative of a swap's value."""
    a = tl.abs(v)
    if SWAP == LOGISTIC:
        slope = keep * cross
    elif SWAP == LOGISTIC_ART:
        slope = keep * cross * _root_slope(a)
    elif SWAP == CAUCHY:
        slope = 0.3183098861837907 / (1.0 + a * a)
    elif SWAP == GAUSSIAN:
        slope = _exp(a * a * -0.5) * 0.3989422804014327
    elif SWAP == RECIPROCAL:
        slope = 1.0 / ((2.0 + a) * (2.0 + a))
    else:
        b = tl.where(a < 0.25, 0.25, a)
        slope = 1.0 / (16.0 * (b * b))
    return slope


@triton.jit
def _log_tail(v, SWAP: tl.constexpr):
    if SWAP == LOGISTIC or SWAP == GAUSSIAN:
        tail = _log_sigmoid(v) * 0.5
    elif SWAP == LOGISTIC_ART:
        tail = _log_sigmoid(_root(v)) * 0.5
    else:
        tail = _log1p(tl.where(v > 0.0, 0.0, -v)) * -0.5
    return tail


@triton.jit
def _log_tail_slope(v, SWAP: tl.constexpr):
    if SWAP == LOGISTIC or SWAP == GAUSSIAN:
        slope = _sigmoid(-v) * 0.5
    elif SWAP == LOGISTIC_ART:
        slope = _sigmoid(-_root(v)) * _root_slope(v) * 0.5
    else:
        slope = tl.where(v > 0.0, 0.0, 0.5 / (1.0 - tl.where(v > 0.0, 0.0, v)))
    return slope


@triton.jit
def _comparators(table, layer, lane, number, first, end, M: tl.constexpr):
    """Of each wire in a layer: its partner, whether it gets the smaller value, and whether anything happens at all."""
    code = tl.load(table + layer * M + lane)
    partner, lower = code >> 1, (code & 1) == 1
    lower_wire = tl.where(lower, lane, partner)
    active = (partner != lane) & (lower_wire < number) & (layer >= first) & (layer < end)
    return partner, lower, active


@triton.jit
def _network_forward(
    d, real, position, number, lane, m, table, starts, slot, room, inside, depth, M: tl.constexpr, SWAP: tl.constexpr,
    WIRES: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """The target's share on each wire in the end; the wire that each place starts on; and the layers that count.

    All wires take part in each layer, those without a comparator in vain: a layer is then two gathers in registers, and a
    network takes as many steps as it has layers. Each layer's state before it goes to ``slot``, for the way back.
    """
    start = tl.load(starts + number * 3)
    first = tl.load(starts + number * 3 + 1)
    end = tl.load(starts + number * 3 + 2)
    if WIRES == TARGET:
        other = lane - (lane > position).to(tl.int32)
        wire = tl.where(lane == position, start, other + (other >= start).to(tl.int32))
    elif WIRES == SORTED:
        wire = tl.broadcast_to(lane, d.shape)
    else:  # from the last to the first, padding at the end
        is_real = real.to(tl.int32)
        is_padding = ((lane < m) & (real == 0)).to(tl.int32)
        real_after = tl.cumsum(is_real, axis=1, reverse=True) - is_real
        padding_after = tl.cumsum(is_padding, axis=1, reverse=True) - is_padding
        wire = tl.where(real, real_after, number + padding_after)
    wire = tl.where(lane < m, wire, lane)
    tl.store(slot + wire, d, mask=inside)
    tl.store(slot + M + wire, tl.where(lane == position, 1.0, 0.0), mask=inside)
    tl.debug_barrier()
    s = tl.load(slot + lane, mask=inside, other=0.0)
    c = tl.load(slot + M + lane, mask=inside, other=0.0)
    for layer in range(depth):
        if GRADIENT:
            before = slot + layer * (2 * M)
            tl.store(before + lane, s, mask=inside)
            tl.store(before + M + lane, c, mask=inside)
        partner, lower, active = _comparators(table, layer, lane, number, first, end, M)
        other_s = _taken(s, partner, lane, room, inside, M)
        other_c = _taken(c, partner, lane, room, inside, M)
        own = s - other_s
        keep, cross = _shares(tl.where(lower, -own, own), SWAP)
        s = tl.where(active, tl.where(cross > keep, other_s + keep * own, s - cross * own), s)
        c = tl.where(active, keep * c + cross * other_c, c)
    return c, wire, first, end


@triton.jit
def _network_backward(
    d_ends, ends, k, number, first, end, lane, table, ranks, slot, room, inside, depth, M: tl.constexpr, SWAP: tl.constexpr
):  # fmt: skip
    """The gradient of the scores on the wires that they started on, from that of the shares on the outputs."""
    # The constant that changes nothing, see _SoftColumn: most of the share has ended on this output, or on none.
    largest = tl.max(tl.where(lane < k, ends, 0.0), axis=1, keep_dims=True)
    elsewhere = 1.0 - tl.sum(tl.where(lane < k, ends, 0.0), axis=1, keep_dims=True)
    most = tl.min(tl.where((ends == largest) & (lane < k), lane, M), axis=1, keep_dims=True)
    constant = tl.where(elsewhere > largest, 0.0, _pick(d_ends, lane, most))
    rank = tl.load(ranks + lane)  # of the wires; k if it is no output
    g_c = tl.where(rank < k, _taken(d_ends, tl.where(rank < k, rank, 0), lane, room, inside, M), 0.0) - constant
    g_s = tl.zeros_like(g_c)
    tl.debug_barrier()
    for step in range(depth):
        layer = depth - 1 - step
        before = slot + layer * (2 * M)
        s = tl.load(before + lane, mask=inside, other=0.0)
        c = tl.load(before + M + lane, mask=inside, other=0.0)
        partner, lower, active = _comparators(table, layer, lane, number, first, end, M)
        own_s = s - _taken(s, partner, lane, room, inside, M)
        own_c = c - _taken(c, partner, lane, room, inside, M)
        upper_s = tl.where(lower, -own_s, own_s)
        upper_c = tl.where(lower, -own_c, own_c)
        keep, cross = _shares(upper_s, SWAP)
        slope = _slope(upper_s, keep, cross, SWAP)
        other_s = _taken(g_s, partner, lane, room, inside, M)
        other_c = _taken(g_c, partner, lane, room, inside, M)
        by_share = (g_s - other_s) * (upper_s * slope) + (g_c - other_c) * (upper_c * slope)
        g_s = tl.where(active, keep * g_s + cross * other_s + by_share, g_s)
        g_c = tl.where(active, keep * g_c + cross * other_c, g_c)
    return g_s


@triton.jit
def _thresholds(d, real, number, lane, m, k, room, inside, M: tl.constexpr):
    """The k thresholds of LapSum."""
    first = tl.minimum(2 * k + 1, m)
    rank = tl.minimum(lane + 1, number - 1)
    rank = tl.maximum(rank, 1)
    log_a = tl.full(d.shape, LOG_ZERO, tl.float32)
    log_b = tl.full(d.shape, LOG_ZERO, tl.float32)
    above = tl.zeros(d.shape, tl.int32)
    for i in range(first):
        top = _pick(d, lane, i)
        closeness = tl.where(real, _exp(-tl.abs(top - d)), 0.0)
        better = tl.sum(tl.where(lane <= i, closeness, 0.0), axis=1, keep_dims=True)
        worse = tl.sum(tl.where(lane >= i, closeness, 0.0), axis=1, keep_dims=True)
        passed = (i + 1) + (worse - 1.0 - better) * 0.5
        above += ((passed <= rank.to(tl.float32)) & (i < number)).to(tl.int32)
        log_worse = tl.log(worse) + top
        log_a = tl.where(lane == i, tl.log(better) - top, log_a)
        log_b = tl.where(lane == i, tl.where(log_worse < LOG_ZERO, LOG_ZERO, log_worse), log_b)
    a = tl.where(above > 0, _taken(log_a, tl.maximum(above - 1, 0), lane, room, inside, M), LOG_ZERO)
    b = tl.where(above < first, _taken(log_b, tl.minimum(above, first - 1), lane, room, inside, M), LOG_ZERO)
    missing = (rank - above).to(tl.float32)
    size = tl.maximum(tl.abs(missing), 1.0)
    root = tl.log(size + tl.sqrt_rn(size * size + _exp(a + b)))
    threshold = tl.where(missing > 0.0, b - root, root - a)
    threshold = tl.where(missing == 0.0, (b - a) * 0.5, threshold)
    threshold = tl.where(threshold < -1e36, -1e36, threshold)
    return tl.where(threshold > 1e36, 1e36, threshold)


@triton.jit
def _lapsum_forward(d, real, position, number, lane, m, k, room, inside, M: tl.constexpr):
    threshold = _thresholds(d, real, number, lane, m, k, room, inside, M)
    margin = _pick(d, lane, position) - threshold
    above = _log1p(-0.5 * _exp(-tl.where(margin < 0.0, 0.0, margin)))
    log_t = tl.where(margin < 0.0, margin - 0.6931471805599453, above)
    return tl.where(lane + 1 == number, 0.0, log_t), threshold, margin


@triton.jit
def _lapsum_backward(d_log_t, threshold, margin, d, real, position, number, lane, k):
    half = 0.5 * _exp(-tl.where(margin < 0.0, 0.0, margin))
    d_margin = tl.where(lane + 1 == number, 0.0, d_log_t * tl.where(margin < 0.0, 1.0, half / (1.0 - half)))
    g = tl.zeros_like(d)
    for j in range(k):
        closeness = tl.where(real, -tl.abs(d - _pick(threshold, lane, j)), -INFINITY)
        weights = _exp(closeness - _largest(closeness))
        weights = weights / tl.sum(weights, axis=1, keep_dims=True)
        g += _pick(d_margin, lane, j) * (tl.where(lane == position, 1.0, 0.0) - weights)
    return g


@triton.jit
def _ksubset_step(rest, subsets, lane, j, number, room, inside, M: tl.constexpr):
    """The j-th of the others, the weights beside it, and what these are multiplied with: the sums before each place."""
    score = _pick(rest, lane, j)
    weights = tl.where((lane >= j) & (lane < number - 1), _exp(rest - score), 0.0).to(subsets.dtype)
    before = tl.where(lane == 0, 1.0, _taken(subsets, tl.maximum(lane - 1, 0), lane, room, inside, M))
    return score, weights, before


@triton.jit
def _ksubset_forward(
    d, position, number, lane, m, k, slot, room, inside, M: tl.constexpr, WIDE: tl.constexpr, GRADIENT: tl.constexpr
):
    """The ratios of the polynomials, the others' scores, and the last sum."""
    place = lane + (lane >= position).to(tl.int32)
    rest = _taken(d, tl.minimum(place, M - 1), lane, room, inside, M) - _pick(d, lane, position)
    ratios = tl.full(d.shape, LOG_ZERO, tl.float32)
    subsets = tl.full(d.shape, 1.0, tl.float64 if WIDE else tl.float32)
    last = tl.max(subsets, axis=1, keep_dims=True)
    for j in range(tl.minimum(k, m - 1)):
        if GRADIENT:
            tl.store(slot + j * M + lane, subsets, mask=inside)
        score, weights, before = _ksubset_step(rest, subsets, lane, j, number, room, inside, M)
        subsets = tl.cumsum(weights * before, axis=1)
        grown = _pick(subsets, lane, m - 2)
        growth = (grown / tl.where(last < 1.0, 1.0, last)).to(tl.float32)
        ratio = tl.where(j < number - 1, score + tl.log(tl.where(j < number - 1, growth, 1.0)), LOG_ZERO)
        ratios = tl.where(lane == j, ratio, ratios)
        last = grown
    return ratios, rest, last


@triton.jit
def _ksubset_backward(
    d_ratios, rest, last, position, number, lane, m, k, slot, room, inside, M: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    g = tl.zeros_like(rest)
    # of the sums after a step, without those that come from their last
    g_subsets = tl.zeros(rest.shape, tl.float64 if WIDE else tl.float32)
    steps = tl.minimum(k, m - 1)
    tl.debug_barrier()
    for step in range(steps):
        j = steps - 1 - step
        subsets = tl.load(slot + j * M + lane, mask=inside, other=1.0)
        _, weights, before = _ksubset_step(rest, subsets, lane, j, number, room, inside, M)
        d_ratio = tl.where(j < number - 1, _pick(d_ratios, lane, j), 0.0)
        divisor = tl.where(last < 1.0, 1.0, last)  # 0 where there is no such ratio
        g_subsets += tl.where(lane == m - 2, d_ratio / divisor, 0.0)
        g_terms = tl.cumsum(g_subsets, axis=1, reverse=True)
        by_weight = (g_terms * before * weights).to(tl.float32)
        g += by_weight + tl.where(lane == j, d_ratio - tl.sum(by_weight, axis=1, keep_dims=True), 0.0)
        last = _pick(subsets, lane, m - 2)
        g_subsets = tl.where(lane < M - 1, _taken(g_terms * weights, tl.minimum(lane + 1, M - 1), lane, room, inside, M), 0.0)
        g_subsets -= tl.where(lane == m - 2, d_ratio / tl.where(last < 1.0, 1.0, last), 0.0)
    g = tl.where(lane < m - 1, g, 0.0)
    other = tl.maximum(lane - (lane > position).to(tl.int32), 0)
    return tl.where(lane == position, -tl.sum(g, axis=1, keep_dims=True), _taken(g, other, lane, room, inside, M))


@triton.jit
def _better(d, real, lane, room, inside, M: tl.constexpr):
    """NeuralSort's sum over the better classes, see _log_rows there."""
    gaps = (_taken(d, tl.maximum(lane - 1, 0), lane, room, inside, M) - d) * lane.to(tl.float32)
    return tl.cumsum(tl.where(real & (lane > 0), gaps, 0.0), axis=1)


@triton.jit
def _rank_softmax(d, better, real, lane, r, OPERATOR: tl.constexpr):
    """Of the r-th rank (0 is the best): the exponents of its softmax, below 0; the softmax; the logarithm of its divisor."""
    if OPERATOR == SOFTSORT:
        exponents = -tl.abs(_pick(d, lane, r) - d)
    else:
        exponents = (-1.0 - 2.0 * r) * d - 2.0 * better
    exponents = tl.where(real, exponents, -INFINITY)
    exponents -= _largest(exponents)
    softmax = _exp(exponents)
    total = tl.sum(softmax, axis=1, keep_dims=True)
    return exponents, softmax / total, tl.log(total)


@triton.jit
def _ranks_forward(d, better, real, position, lane, k, OPERATOR: tl.constexpr):
    """log T, and the logarithm of the target's column of P."""
    column = tl.zeros_like(d)
    log_t = tl.zeros_like(d)
    # The running sum, as a multiple of its largest entry so far: of equals it is exact, and T = 1 is a kink of the loss.
    largest = tl.full([d.shape[0], 1], -INFINITY, tl.float32)
    running = tl.zeros([d.shape[0], 1], tl.float32)
    for r in range(k):
        exponents, _, log_total = _rank_softmax(d, better, real, lane, r, OPERATOR)
        entry = _pick(exponents, lane, position) - log_total
        before = largest
        largest = tl.where(largest > entry, largest, entry)
        running = running * _exp(before - largest) + _exp(entry - largest)
        column = tl.where(lane == r, entry, column)
        log_t = tl.where(lane == r, largest + tl.log(running), log_t)
    return log_t, column


@triton.jit
def _ranks_backward(
    d_log_t, log_t, column, d, better, real, position, lane, k, room, inside, M: tl.constexpr, OPERATOR: tl.constexpr
):  # fmt: skip
    g = tl.zeros_like(d)
    g_better = tl.zeros_like(d)
    # the gradient of log T of this rank and, through it, of all later ones
    running = tl.zeros([d.shape[0], 1], tl.float32)
    next_log = tl.zeros([d.shape[0], 1], tl.float32)
    for step in range(k):
        r = k - 1 - step
        this_log = _pick(log_t, lane, r)
        running = _pick(d_log_t, lane, r) + running * _exp(this_log - next_log)
        next_log = this_log
        _, softmax, _ = _rank_softmax(d, better, real, lane, r, OPERATOR)
        g_entry = running * _exp(_pick(column, lane, r) - this_log)
        g_exponents = g_entry * (tl.where(lane == position, 1.0, 0.0) - softmax)
        if OPERATOR == SOFTSORT:
            ahead = _pick(d, lane, r) - d
            turned = g_exponents * ((ahead > 0.0).to(tl.float32) - (ahead < 0.0).to(tl.float32))
            g += turned - tl.where(lane == r, tl.sum(turned, axis=1, keep_dims=True), 0.0)
        else:
            g += (-1.0 - 2.0 * r) * g_exponents
            g_better -= 2.0 * g_exponents
    if OPERATOR == NEURALSORT:
        from_here = tl.cumsum(tl.where(real, g_better, 0.0), axis=1, reverse=True)
        g_gaps = tl.where(real & (lane > 0), from_here * lane.to(tl.float32), 0.0)
        g += tl.where(lane < M - 1, _taken(g_gaps, tl.minimum(lane + 1, M - 1), lane, room, inside, M), 0.0) - g_gaps
    return g


@triton.jit
def _average(log_t, p, cross_entropy, lane, k, ce_weight, rest, q, FAMILY: tl.constexpr, LIMIT: tl.constexpr):
    """Step 3, P_K and shape: the loss of each row, and its gradient by log T and by the cross-entropy.

    ``ce_weight`` and ``rest`` are the weights of the two parts of the error; ``LIMIT`` says that its q is 0.
    """
    ranked = lane < k
    if FAMILY == ERROR:
        capped = tl.where(log_t > 0.0, 0.0, log_t)
        if LIMIT:
            error = -capped
            slope = tl.full(log_t.shape, -1.0, tl.float32)
        else:
            exponent = q * capped
            t_to_q = _exp(exponent)
            near = exponent > -0.5
            error = tl.where(near, -_expm1(tl.where(near, exponent, 0.0)), 1.0 - t_to_q) / q
            slope = -t_to_q
        loss = ce_weight * cross_entropy + rest * tl.sum(tl.where(ranked, p * error, 0.0), axis=1, keep_dims=True)
        d_log_t = tl.where(ranked & ((log_t > 0.0) == 0), rest * p * slope, 0.0)
        d_cross_entropy = tl.zeros_like(cross_entropy) + ce_weight
    else:
        whole = tl.zeros_like(cross_entropy) + 1.0
        if FAMILY == SEPARATE:
            ranked = ranked & (lane > 0)
            whole = tl.sum(tl.where(ranked, p, 0.0), axis=1, keep_dims=True)
            p_one = _pick(p, lane, 0)
            p = tl.where(whole > 0.0, p / tl.where(whole > 0.0, whole, 1.0), 1.0 / tl.maximum(k - 1, 1).to(tl.float32))
        if FAMILY == MIXED:
            log_t = tl.where(lane == 0, -cross_entropy, log_t)
        terms = tl.where(ranked, tl.log(p) + log_t, -INFINITY)
        largest = _largest(terms)
        shares = _exp(terms - largest)
        total = tl.sum(shares, axis=1, keep_dims=True)
        log_mean = largest + tl.log(total)
        shares = tl.where(log_mean > 0.0, 0.0, shares / total)
        loss = -whole * tl.where(log_mean > 0.0, 0.0, log_mean)
        d_log_t = tl.where(ranked, -whole * shares, 0.0)
        d_cross_entropy = tl.zeros_like(cross_entropy)
        if FAMILY == SEPARATE:
            loss += p_one * cross_entropy
            d_cross_entropy = p_one
        if FAMILY == MIXED:
            d_cross_entropy = -_pick(d_log_t, lane, 0)
            d_log_t = tl.where(lane == 0, 0.0, d_log_t)
    return loss, d_log_t, d_cross_entropy


@triton.jit
def softmax_kernel(scores, stride_row, stride_class, n, sums, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    """Of each row: its maximum, the sum of e^(s - maximum); if smoothed, the number of classes that are not padding and the
    sum of their distances to the maximum. ``sums`` is (rows, 4)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    line = scores + row * stride_row
    largest = tl.full([BLOCK], -INFINITY, tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        s = tl.load(line + (start + lane).to(tl.int64) * stride_class, mask=inside, other=-INFINITY).to(tl.float32)
        largest = tl.where(s > largest, s, largest)
    maximum = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    behind = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        s = tl.load(line + (start + lane).to(tl.int64) * stride_class, mask=inside, other=-INFINITY).to(tl.float32)
        total += tl.where(inside, _exp(s - maximum), 0.0)
        if SMOOTHED:
            real = inside & (s != -INFINITY)
            number += tl.where(real, 1.0, 0.0)
            behind += tl.where(real, maximum - s, 0.0)
    tl.store(sums + row * 4, maximum)
    tl.store(sums + row * 4 + 1, tl.sum(total, axis=0))
    if SMOOTHED:
        tl.store(sums + row * 4 + 2, tl.sum(number, axis=0))
        tl.store(sums + row * 4 + 3, tl.sum(behind, axis=0))


# A kernel for each size would be compiled each time that a batch or a network has another one.
@triton.jit(do_not_specialize=["ignore_index", "first_row", "rows", "m", "k", "depth", "slot_size", "led"])
def candidates_kernel(
    scores, stride_row, stride_class, target, ignore_index, classes, leaders, p_k, class_weight, sums, table, starts, outputs,
    ranks, scratch, losses, gradients, coefficients, first_row, rows, m, k, depth, slot_size, led, scale, ce_weight, rest, q,
    smoothing, OPERATOR: tl.constexpr, SWAP: tl.constexpr, WIRES: tl.constexpr, FAMILY: tl.constexpr, SOFTMAX: tl.constexpr,
    OF: tl.constexpr, LIMIT: tl.constexpr, AS_GIVEN: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr,
    WIDE: tl.constexpr, GRADIENT: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """The losses of the rows from ``first_row`` on, and their gradients by the candidates' scores.

    ``losses`` is (2, rows): the losses with their weights, and the weights. ``coefficients`` is what the softmax over all
    classes counts in the gradient. ``classes`` (rows, m) gets the target in its last place where it is missing.
    """
    lane = tl.arange(0, M)[None, :]
    local = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row = first_row + local
    exists = row < rows
    y = tl.load(target + row, mask=exists, other=0)
    valid = exists & (y != ignore_index)
    y = tl.where(valid, y, 0)
    inside = exists & (lane < m)

    # 1. candidates
    if AS_GIVEN:
        kept = tl.zeros([ROWS, M], tl.int64) + lane
        position = y.to(tl.int32)
    else:
        kept = tl.load(classes + row * m + lane, mask=inside, other=-1)
        here = (kept == y) & (lane < m)
        found = tl.max(here.to(tl.int32), axis=1, keep_dims=True) > 0
        position = tl.where(found, tl.sum(tl.where(here, lane, 0), axis=1, keep_dims=True), m - 1)
        forced = inside & (found == 0) & (lane == m - 1)
        kept = tl.where(forced, y, kept)
        tl.store(classes + row * m + lane, kept, mask=forced)
    raw = tl.load(scores + row * stride_row + kept * stride_class, mask=inside, other=-INFINITY).to(tl.float32)
    real = inside & (raw != -INFINITY)
    number = tl.sum(real.to(tl.int32), axis=1, keep_dims=True)
    padded = _pick(real.to(tl.float32), lane, position) == 0.0
    own = tl.sum(tl.where(lane == position, raw, 0.0), axis=1, keep_dims=True)
    reference = tl.where(padded, _pick(raw, lane, 0), own)
    position = tl.where(padded, 0, position)  # any other stands in for it: its loss is infinite
    d = tl.where(real, tl.div_rn(raw - reference, tl.zeros_like(raw) + scale), 0.0)

    # softmax cross-entropy
    cross_entropy = tl.zeros([ROWS, 1], tl.float32)
    if SOFTMAX == OVER_ALL:
        largest = tl.load(sums + row * 4, mask=exists, other=0.0)
        cross_entropy = (largest - own) + tl.log(tl.load(sums + row * 4 + 1, mask=exists, other=1.0))
    if SOFTMAX == OVER_CANDIDATES:
        largest = _largest(raw)
        softmax = _exp(raw - largest)
        total = tl.sum(softmax, axis=1, keep_dims=True)
        softmax = softmax / total
        cross_entropy = (largest - own) + tl.log(total)

    # 2. operator
    slot = scratch + local * slot_size
    room = slot + (slot_size - M)
    if OPERATOR == NETWORK:
        share, wire, first, end = _network_forward(
            d, real, position, number, lane, m, table, starts, slot, room, exists, depth, M, SWAP, WIRES, GRADIENT
        )
        ends = tl.where(lane < k, _taken(share, tl.load(outputs + lane), lane, room, exists, M), 0.0)
        inclusion = tl.cumsum(ends, axis=1)
        # Near 1 the digits are in what is missing: the shares that ended elsewhere.
        no_output = (tl.load(ranks + lane) >= k) & (lane < m)
        elsewhere = tl.sum(tl.where(no_output, share, 0.0), axis=1, keep_dims=True)
        elsewhere += tl.cumsum(ends, axis=1, reverse=True) - ends
        log_inclusion = tl.where(inclusion > 0.5, _log1p(-elsewhere), tl.log(inclusion))
        if AS_GIVEN:  # the best of all, the target maybe among them
            leader = tl.load(leaders + row * led + lane, mask=exists & (lane < led), other=-1).to(tl.float32)
            at = tl.min(tl.where(leader == y.to(tl.float32), lane, M), axis=1, keep_dims=True)
            rival = _taken(leader, tl.minimum(lane + (lane >= at).to(tl.int32), M - 1), lane, room, exists, M).to(tl.int32)
            rival = tl.where((rival >= 0) & (rival < M), rival, 0)
        else:
            rival = tl.minimum(lane + (lane >= position).to(tl.int32), M - 1)
        has_rival = lane < tl.minimum(k, m - 1)
        is_ahead = has_rival & (_taken(real.to(tl.float32), rival, lane, room, exists, M) > 0.0)
        lead = tl.where(is_ahead, _pick(d, lane, position) - _taken(d, rival, lane, room, exists, M), 0.0)
        tail = tl.where(has_rival, _log_tail(lead, SWAP), 0.0) + LOG_TAIL_WEIGHT
        log_t = _log_add(log_inclusion, tail)
    if OPERATOR == LAPSUM:
        log_t, threshold, margin = _lapsum_forward(d, real, position, number, lane, m, k, room, exists, M)
    if OPERATOR == KSUBSET:
        ratios, others, last = _ksubset_forward(d, position, number, lane, m, k, slot, room, exists, M, WIDE, GRADIENT)
        log_t = _log_sigmoid(-ratios)
    if OPERATOR == SOFTSORT or OPERATOR == NEURALSORT:
        better = d
        if OPERATOR == NEURALSORT:
            better = _better(d, real, lane, room, exists, M)
        log_t, column = _ranks_forward(d, better, real, position, lane, k, OPERATOR)

    # 3. P_K and shape
    if OPERATOR == NO_OPERATOR:
        loss = cross_entropy
        d_cross_entropy = tl.zeros_like(cross_entropy) + 1.0
    else:
        if OF == OF_ALL:
            p = tl.load(p_k + lane, mask=lane < k, other=0.0)
            p = tl.broadcast_to(p, [ROWS, M])
        elif OF == OF_CLASS:
            p = tl.load(p_k + y * k + lane, mask=exists & (lane < k), other=0.0)
        else:
            p = tl.load(p_k + row * k + lane, mask=exists & (lane < k), other=0.0)
        loss, d_log_t, d_cross_entropy = _average(log_t, p, cross_entropy, lane, k, ce_weight, rest, q, FAMILY, LIMIT)

    # 4. loss
    weight = tl.full([ROWS, 1], 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(class_weight + y, mask=exists, other=0.0)
    weight = tl.where(valid, weight, 0.0)
    loss = weight * tl.where(padded, INFINITY, loss)
    if SMOOTHED:
        behind = tl.load(sums + row * 4 + 3, mask=exists, other=0.0) / tl.load(sums + row * 4 + 2, mask=exists, other=1.0)
        loss += smoothing * (behind + tl.log(tl.load(sums + row * 4 + 1, mask=exists, other=1.0)))
    tl.store(losses + row, tl.where(valid, loss, 0.0), mask=exists)
    tl.store(losses + rows + row, weight, mask=exists)

    if GRADIENT:
        g = tl.zeros([ROWS, M], tl.float32)
        if OPERATOR == NETWORK:
            # 1 / (T + e^tail); where that overflows, the slope of T is smaller still
            d_inclusion = d_log_t * _exp(tl.where(-log_t > 80.0, 80.0, -log_t))
            d_ends = tl.cumsum(tl.where(lane < k, d_inclusion, 0.0), axis=1, reverse=True)
            g_wires = _network_backward(
                d_ends, ends, k, number, first, end, lane, table, ranks, slot, room, exists, depth, M, SWAP
            )
            g = _taken(g_wires, wire, lane, room, exists, M)
            g_lead = tl.where(is_ahead, d_log_t * _exp(tail - log_t) * _log_tail_slope(lead, SWAP), 0.0)
            g += tl.where(lane == position, tl.sum(g_lead, axis=1, keep_dims=True), 0.0)
            if AS_GIVEN:
                for j in range(k):  # to wherever the rival stands
                    at = tl.sum(tl.where(lane == j, rival, 0), axis=1, keep_dims=True)
                    g -= tl.where(lane == at, _pick(g_lead, lane, j), 0.0)
            else:
                rank = lane - (lane > position).to(tl.int32)
                g -= tl.where(lane == position, 0.0, _taken(g_lead, tl.maximum(rank, 0), lane, room, exists, M))
        if OPERATOR == LAPSUM:
            g = _lapsum_backward(d_log_t, threshold, margin, d, real, position, number, lane, k)
        if OPERATOR == KSUBSET:
            g = _ksubset_backward(
                -d_log_t * _sigmoid(ratios), others, last, position, number, lane, m, k, slot, room, exists, M, WIDE
            )
        if OPERATOR == SOFTSORT or OPERATOR == NEURALSORT:
            g = _ranks_backward(d_log_t, log_t, column, d, better, real, position, lane, k, room, exists, M, OPERATOR)
        g = g / scale
        if SOFTMAX == OVER_CANDIDATES:
            g += d_cross_entropy * (softmax - tl.where(lane == position, 1.0, 0.0))
        if SOFTMAX == OVER_ALL:
            g -= tl.where(lane == position, d_cross_entropy, 0.0)
        counts = valid & (padded == 0)
        tl.store(gradients + row * m + lane, tl.where(counts & real, weight * g, 0.0), mask=inside)
        if SOFTMAX == OVER_ALL:
            tl.store(coefficients + row, tl.where(counts, weight * d_cross_entropy, 0.0), mask=exists)


@triton.jit
def _dense(s, maximum, total, number, coefficient, smooth, USES_SOFTMAX: tl.constexpr, SMOOTHED: tl.constexpr):
    """The part of the gradient that every class has."""
    g = tl.zeros_like(s)
    if USES_SOFTMAX:
        g = (coefficient + smooth) * (_exp(s - maximum) / total)
    if SMOOTHED:
        g -= tl.where(s == -INFINITY, 0.0, smooth / number)
    return g


@triton.jit(do_not_specialize=["ignore_index", "m", "incoming_stride"])
def gradient_kernel(
    scores, stride_row, stride_class, n, target, ignore_index, sums, classes, gradients, coefficients, m, incoming,
    incoming_stride, divisor, smoothing, result, USES_SOFTMAX: tl.constexpr, SMOOTHED: tl.constexpr, AS_GIVEN: tl.constexpr,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient (rows, n): the softmax, and the candidates' gradients on top, times the incoming gradient."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    valid = tl.load(target + row) != ignore_index
    factor = tl.load(incoming + row * incoming_stride).to(tl.float32)
    if MEAN:
        counted = tl.load(divisor)
        factor = tl.where(counted != 0.0, factor / tl.where(counted != 0.0, counted, 1.0), 0.0)
    maximum, total, number, coefficient, smooth = 0.0, 1.0, 1.0, 0.0, 0.0
    if USES_SOFTMAX:
        maximum = tl.load(sums + row * 4)
        total = tl.load(sums + row * 4 + 1)
        coefficient = factor * tl.load(coefficients + row)
    if SMOOTHED:
        number = tl.load(sums + row * 4 + 2)
        smooth = factor * smoothing
    line = scores + row * stride_row
    written = result + row * n
    if not (AS_GIVEN and not USES_SOFTMAX):
        for start in range(0, n, BLOCK):
            column = (start + lane).to(tl.int64)
            inside = column < n
            s = tl.zeros([BLOCK], tl.float32)
            if USES_SOFTMAX:
                s = tl.load(line + column * stride_class, mask=inside, other=0.0).to(tl.float32)
            g = _dense(s, maximum, total, number, coefficient, smooth, USES_SOFTMAX, SMOOTHED)
            tl.store(written + column, tl.where(valid, g, 0.0), mask=inside)
        tl.debug_barrier()  # the candidates' are written over these
    for start in range(0, m, BLOCK):
        place = (start + lane).to(tl.int64)
        inside = place < m
        column = place
        if not AS_GIVEN:
            column = tl.load(classes + row * m + place, mask=inside, other=0)
        s = tl.zeros([BLOCK], tl.float32)
        if USES_SOFTMAX:
            s = tl.load(line + column * stride_class, mask=inside, other=0.0).to(tl.float32)
        g = _dense(s, maximum, total, number, coefficient, smooth, USES_SOFTMAX, SMOOTHED)
        g += factor * tl.load(gradients + row * m + place, mask=inside, other=0.0)
        tl.store(written + column, tl.where(valid, g, 0.0), mask=inside)
