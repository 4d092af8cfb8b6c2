"""`anyk draw`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from anyk.lab.cli.words import Flag, Group, say


@dataclass(frozen=True)
class NetworkOptions:
    """Of the picture of a network."""

    kind: str = "splitter"
    """odd_even, bitonic, splitter, or a selection network"""
    n: int = 16
    """wires"""
    packed: Flag = False
    """each comparator as early as it can go"""


@dataclass(frozen=True)
class MatrixOptions:
    """Of the heat maps."""

    scores: tuple[float, ...] = (3.0, 2.5, 2.2, 1.5, 1.0, 0.5, 0.0, -1.0)
    """of the classes"""
    temperatures: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    """the columns"""


@dataclass(frozen=True)
class LossOptions:
    """Of the curves."""

    p_k: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 1.0)
    """P_K: the weight of top-1, top-2, ..."""
    temperature: float = 0.5
    """of all operators"""


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """the .png, .svg or .pdf file; by default WHAT.svg. The .html file of --interactive; by default explore.html"""
    force: Flag = False
    """replace a file that is there"""


def command(
    what: Annotated[Literal["network", "matrix", "loss"], tyro.conf.Positional] = "network",
    *,
    interactive: Flag = False,
    k: int = 5,
    operators: tuple[str, ...] = (),
    network: Group[NetworkOptions],
    matrix: Group[MatrixOptions],
    loss: Group[LossOptions],
    output: Group[Output],
) -> int:
    """Pictures: a network; P as heat maps over temperatures; the loss over the target's score; or a page to play with.

    Args:
        what: the picture.
        interactive: instead of a picture, one page with everything: drag scores, choose operator, temperature and P_K there.
        k: network and matrix: ranks.
        operators: matrix and loss: which; by default all.
    """
    from anyk.lab import explore, files, network_pictures, pictures

    path = output.out or Path("explore.html" if interactive else f"{what}.svg")
    files.refuse_to_overwrite(path, output.force)
    if interactive:
        explore.write(path)
    elif what == "network":
        network_pictures.network(network.kind, network.n, k, path, packed=network.packed)
    elif what == "matrix":
        pictures.matrix(operators or None, matrix.scores, k, matrix.temperatures, path)
    else:
        pictures.loss_curves(path, operators=operators or None, p_k=loss.p_k, temperature=loss.temperature)
    say(f"{path}")
    return 0
