"""What the paper says, in percent: top-1 and top-5 on the test, and how it trains.

Where the paper leaves something open, the official code and its README say it. Sinkhorn's temperature is not published: the inverse
temperature 8 is ours, which gives nearly that of NeuralSort.

Reference: Petersen et al., "Differentiable Top-k Classification Learning", ICML 2022.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from anyk.lab.config import RunConfig

METHODS = ("softmax", "smooth", "neuralsort", "softsort", "sinkhorn", "diffsortnets")
SINKHORN_INVERSE_TEMPERATURE = 8.0
TOP5, EVEN = (0.0, 0.0, 0.0, 0.0, 1.0), (0.2,) * 5


@dataclass(frozen=True)
class Regime:
    """How the paper trains on one kind of data."""

    config: RunConfig
    ranked: int
    """number of classes that are ranked: m, or all"""
    inverse_temperatures: Mapping[str, float]
    """as the official README gives them"""


@dataclass(frozen=True)
class Cell:
    """One entry of a table: a method with a P_K, and what the paper gives for top-1 and top-5."""

    method: str
    p_k: tuple[float, ...] = (1.0,)
    paper: tuple[float | None, float | None] = (None, None)
    temperature: float | None = None
    """of the controls that the paper lacks; None: by the paper"""
    start: str = "torch"


CIFAR = Regime(
    RunConfig(
        model="resnet18", optimizer="adam", learning_rate=1e-3, schedule="constant", batch_size=100, epochs=200, select="each",
        augment=("crop", "flip"), m=None, wires="given", swap="logistic_art", start="torch",
    ),
    100,
    {"diffsortnets": 0.5, "neuralsort": 0.0625, "softsort": 0.0625, "smooth": 1.0},
)  # fmt: skip
IMAGENET_1K = Regime(
    RunConfig(
        model="linear", optimizer="adam", learning_rate=10**-4.5, schedule="constant", batch_size=500, epochs=100, select="each", m=16,
        top1="mixed", wires="target", swap="logistic_art", start="torch",
    ),
    16,
    {"diffsortnets": 1.0, "neuralsort": 0.5, "softsort": 0.5, "smooth": 1.0},
)  # fmt: skip
IMAGENET_21K = Regime(IMAGENET_1K.config.replace(learning_rate=1e-4, epochs=40, m=50), 50, IMAGENET_1K.inverse_temperatures)

TABLE1 = (
    Cell("softmax", (1.0,), (61.27, 85.31)),
    Cell("smooth", TOP5, (53.07, 85.23)),
    Cell("neuralsort", TOP5, (22.58, 84.41)),
    Cell("softsort", TOP5, (1.01, 5.09)),
    Cell("sinkhorn", TOP5, (55.62, 87.04)),
    Cell("diffsortnets", TOP5, (52.81, 84.21)),
    Cell("neuralsort", EVEN, (61.46, 86.03)),
    Cell("softsort", EVEN, (61.53, 82.39)),
    Cell("sinkhorn", EVEN, (61.89, 86.94)),
    Cell("diffsortnets", EVEN, (62.00, 86.73)),
)
