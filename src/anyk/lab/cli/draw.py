"""`anyk draw`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from anyk.lab.cli.words import Flag, say


def command(
    what: Annotated[Literal["network", "matrix", "loss"], tyro.conf.Positional] = "network",
    *,
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    interactive: Flag = False,
    kind: str = "splitter",
    n: int = 16,
    k: int = 5,
    packed: Flag = False,
    operators: tuple[str, ...] = (),
    scores: tuple[float, ...] = (3.0, 2.5, 2.2, 1.5, 1.0, 0.5, 0.0, -1.0),
    temperatures: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0),
    p_k: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 1.0),
    temperature: float = 0.5,
) -> int:
    """Pictures: a network; P as heat maps over temperatures; the loss over the target's score; or a page to play with.

    Args:
        what: the picture.
        out: the .png, .svg or .pdf file; by default WHAT.svg. The .html file of --interactive; by default explore.html.
        interactive: instead of a picture, one page with everything: drag scores, choose operator, temperature and P_K there.
        kind: network: odd_even, bitonic, splitter, or a selection network.
        n: network: wires.
        k: network and matrix: ranks.
        packed: network: each comparator as early as it can go.
        operators: matrix and loss: which; by default all.
        scores: matrix: of the classes.
        temperatures: matrix: the columns.
        p_k: loss: P_K.
        temperature: loss: of all operators.
    """
    if interactive:
        from anyk.lab import explore

        say(f"{explore.write(out or Path('explore.html'))}")
        return 0
    from anyk.lab import network_pictures, pictures

    path = out or Path(f"{what}.svg")
    if what == "network":
        network_pictures.network(kind, n, k, path, packed=packed)
    elif what == "matrix":
        pictures.matrix(operators or None, scores, k, temperatures, path)
    else:
        pictures.loss_curves(path, operators=operators or None, p_k=p_k, temperature=temperature)
    say(f"{path}")
    return 0
