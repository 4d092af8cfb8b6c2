"""A small many-class problem, trained with softmax cross-entropy and with a top-k loss, side by side.

200 classes come in 40 families of 5 that look alike: the family is easy to see, the member is not. That is where the first
few guesses matter. Same data, same start, same steps for both losses; three seeds.

    python examples/quickstart.py [--seeds N] [--steps N]
"""

import argparse
import statistics

import torch
from tqdm import tqdm

import anyk

FAMILIES, MEMBERS, WIDTH = 40, 5, 32
CLASSES = FAMILIES * MEMBERS


def make_data(generator: torch.Generator, per_class: int, centres: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(CLASSES).repeat_interleave(per_class)
    return centres[labels] + torch.randn(len(labels), WIDTH, generator=generator), labels


def train(criterion: torch.nn.Module, seed: int, steps: int, progress: tqdm) -> dict[int, float]:
    generator = torch.Generator().manual_seed(seed)
    families = torch.randn(FAMILIES, 1, WIDTH, generator=generator) * 0.8
    centres = (families + torch.randn(FAMILIES, MEMBERS, WIDTH, generator=generator) * 0.25).reshape(CLASSES, WIDTH)
    x, y = make_data(generator, 20, centres)
    x_test, y_test = make_data(generator, 50, centres)

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(steps):
        batch = torch.randint(len(x), (256,), generator=generator)
        optimizer.zero_grad()
        loss = criterion(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        progress.update()
    with torch.no_grad():
        accuracy = anyk.topk_accuracy(model(x_test), y_test, ks=(1, 5))
    return {k: 100 * value.item() for k, value in accuracy.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small matrices: more threads wait for each other

    losses = {
        "softmax cross-entropy": torch.nn.CrossEntropyLoss(),
        "top-k, P_K=[.2]*5": anyk.TopKCrossEntropyLoss([0.2] * 5, m=16),
    }
    results: dict[str, list[dict[int, float]]] = {name: [] for name in losses}
    with tqdm(total=len(losses) * arguments.seeds * arguments.steps, unit="step", smoothing=0) as progress:
        for seed in range(arguments.seeds):
            for name, criterion in losses.items():
                progress.set_description(f"{name}, seed {seed}")
                results[name].append(train(criterion, seed, arguments.steps, progress))

    print(f"\n{CLASSES} classes, {arguments.seeds} seeds, test accuracy in percent (mean and standard deviation)\n")
    print(f"{'loss':24}{'top-1':>16}{'top-5':>16}")
    for name, runs in results.items():
        cells = []
        for k in (1, 5):
            values = [run[k] for run in runs]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}")
        print(f"{name:24}{cells[0]:>16}{cells[1]:>16}")
    softmax, topk = results.values()
    differences = [[b[k] - a[k] for a, b in zip(softmax, topk, strict=True)] for k in (1, 5)]
    print(f"{'difference, same seeds':24}{_signed(differences[0]):>16}{_signed(differences[1]):>16}")
    print("\nA difference within the spread of the seeds is luck until more seeds say otherwise: --seeds 10")


def _signed(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.2f}{spread}"


if __name__ == "__main__":
    main()
