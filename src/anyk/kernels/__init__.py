"""The same numbers, faster: C for the CPU computes losses and gradient of a batch in one call (:mod:`anyk.kernels.native`).

The plain code is the definition and serves everything that no kernel does: other devices, second derivatives, functional
transforms, float64, a temperature or a P_K that is learned. Losses and operators ask here with plain numbers and tensors; the
answer None says that the plain code is to compute it, or has the words for what is wrong.
"""

from anyk.kernels.choice import backend, report, serve
from anyk.kernels.losses import Loss
from anyk.kernels.masks import (
    best,
    draw,
    mask,
    mask_backward,
    network_mask,
    network_mask_backward,
    ranks,
    ranks_backward,
    sort,
    sort_backward,
    threshold,
    threshold_backward,
)
from anyk.kernels.ops import loss, row_losses, smooth_loss

__all__ = [
    "Loss",
    "backend",
    "best",
    "draw",
    "loss",
    "mask",
    "mask_backward",
    "network_mask",
    "network_mask_backward",
    "ranks",
    "ranks_backward",
    "report",
    "row_losses",
    "serve",
    "smooth_loss",
    "sort",
    "sort_backward",
    "threshold",
    "threshold_backward",
]
