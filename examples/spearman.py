"""A regression judged by Spearman's correlation: trained by it, or by squared error of the targets, their logarithm or ranks.

The targets are exp of a function of the features and noise, so a few are huge; their order is what counts. The logarithm is the
right transformation here, for who knows it: unless the noise has a heavy tail (--heavy). The ranks in the training set need no
such knowledge.

    pip install anyk
    python examples/spearman.py [--seeds N] [--steps N] [--heavy] [--tune]
"""

import argparse
import itertools
import statistics

import torch
from torch import nn

import anyk

FEATURES, TRAIN, TEST, BATCH = 10, 1000, 5000, 128
# What --tune tries, on data of its own: learning rate; temperature, or the scale of the targets of squared error.
LR, SCALE = (3e-3, 1e-2, 3e-2), (0.3, 1.0, 3.0)
# What it found, without --heavy and with it.
TUNED = {"squared error": ((3e-2, 3.0), (3e-2, 3.0)), "of the logarithm": ((1e-2, 3.0), (1e-2, 1.0))}
TUNED |= {"of the ranks": ((1e-2, 3.0), (1e-2, 1.0)), "spearman_loss": ((1e-2, 0.3), (3e-2, 3.0))}


def data(number: int, heavy: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(number, FEATURES, generator=generator)
    signal = x[:, 0] + x[:, 1] * x[:, 2] + torch.sin(2 * x[:, 3])
    noise = torch.randn(number, generator=generator)
    if heavy:  # Student's t with two degrees of freedom
        noise = noise / torch.empty(number).exponential_(generator=generator).sqrt()
    return x, torch.exp((signal + 0.5 * noise).clamp(-20, 20))


def train(way: str, lr: float, scale: float, seed: int, steps: int, heavy: bool) -> float:
    """Spearman's correlation on new data."""
    generator = torch.Generator().manual_seed(seed)
    (x, y), (x_test, y_test) = data(TRAIN, heavy, generator), data(TEST, heavy, generator)
    target = {"of the logarithm": y.log(), "of the ranks": y.argsort().argsort().float()}.get(way, y)
    target = scale * (target - target.mean()) / target.std()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for _ in range(steps):
        batch = torch.randint(TRAIN, (BATCH,), generator=generator)
        scores = model(x[batch])
        if way == "spearman_loss":
            loss = anyk.ranking.spearman_loss(scores, y[batch], temperature=scale)
        else:
            loss = nn.functional.mse_loss(scores, target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():  # near temperature 0 the loss is that of the exact ranks
        return 1 - anyk.ranking.spearman_loss(model(x_test).double(), y_test.double(), temperature=1e-9).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--heavy", action="store_true")
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for way, both in TUNED.items():
        tuned = both[asked.heavy]
        if asked.tune:
            tries = {one: train(way, *one, 1000, asked.steps, asked.heavy) for one in itertools.product(LR, SCALE)}
            tuned = max(tries, key=tries.__getitem__)
        found = [train(way, *tuned, seed, asked.steps, asked.heavy) for seed in range(asked.seeds)]
        print(f"{way}: {statistics.mean(found):.3f} ± {statistics.stdev(found):.3f} (lr, scale {tuned})", flush=True)
