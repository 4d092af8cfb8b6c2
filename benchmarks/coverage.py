"""What `anyk predict --coverage` keeps of its promise, where the validation examples that calibrate it have chosen the model.

    python benchmarks/coverage.py

Classes that overlap, linear models: for each split, models with many learning rates and weight decays are trained and looked at
after each epoch, and the best on validation by the mean of top-1 and top-5 is taken, as `anyk compare` does with a loss. Lists
for it are calibrated on the validation examples, and on as many others that chose nothing. Both are measured on the same new
examples, and the table has the mean over the splits.
"""

import argparse
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

import anyk

CLASSES, FEATURES, NEW = 20, 16, 4000
RATES, DECAYS, EPOCHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), (0.0, 0.01, 0.1), 12
ROWS = list(itertools.product((100, 400, 1600), (0.9, 0.95)))


def draw(count: int, centers: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centers[labels] + 1.3 * torch.randn(count, FEATURES, generator=generator), labels


def models(x: Tensor, y: Tensor) -> Tensor:
    """The weights of every model after every epoch, (candidates, features, classes)."""
    points = list(itertools.product(RATES, DECAYS))
    weights = [torch.zeros(FEATURES, CLASSES, requires_grad=True) for _ in points]
    groups = [{"params": [one], "lr": rate, "weight_decay": decay} for one, (rate, decay) in zip(weights, points, strict=True)]
    optimizer, found = torch.optim.AdamW(groups), []
    for _ in range(EPOCHS):
        for part in torch.arange(len(x)).chunk(4):
            scores = torch.einsum("bf,mfc->mbc", x[part], torch.stack(weights))
            loss = torch.nn.functional.cross_entropy(scores.movedim(2, 1), y[part].expand(len(points), -1), reduction="sum")
            optimizer.zero_grad()
            (loss / len(part)).backward()
            optimizer.step()
        found += [one.detach().clone() for one in weights]
    return torch.stack(found)


def split(seed: int) -> Iterator[tuple[float, float]]:
    """For each row of the table the coverage of lists that the validation examples calibrate, and that others calibrate."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(CLASSES, FEATURES, generator=generator)
    candidates = models(*draw(600, centers, generator))
    new, labels = draw(NEW, centers, generator)
    for validation, coverage in ROWS:
        chosen, others = (draw(validation, centers, generator) for _ in range(2))
        ranks = anyk.target_ranks((chosen[0] @ candidates).movedim(2, 1), chosen[1].expand(len(candidates), -1))
        best = candidates[((ranks <= 1).sum(1) + (ranks <= 5).sum(1)).argmax()]
        sets = (anyk.PredictionSets(x @ best, y, coverage)(new @ best) for x, y in (chosen, others))
        first, second = (float(shown[torch.arange(NEW), labels].double().mean()) for shown in sets)
        yield first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=400, help="how many (default: %(default)s)")
    splits = parser.parse_args().splits
    found = torch.tensor([list(split(seed)) for seed in range(splits)], dtype=torch.float64)
    means, errors = 100 * found.mean(0), 100 * found.std(0) / splits**0.5
    print(f"{len(RATES) * len(DECAYS) * EPOCHS} candidates, {splits} splits; percent, mean ± standard error over the splits\n")
    print("| validation examples | asked | calibrated by those that chose | by others |")
    print("|--:|--:|--:|--:|")
    for (validation, coverage), mean, error in zip(ROWS, means.tolist(), errors.tolist(), strict=True):
        cells = [f"{one:.2f} ± {off:.2f}" for one, off in zip(mean, error, strict=True)]
        print(f"| {validation:,} | {100 * coverage:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
