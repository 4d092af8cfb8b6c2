"""A plain PyTorch loop, once with softmax cross-entropy and once with a top-k loss: same data, same start, same steps.

200 classes come in 40 families of 5 that look alike: the family is easy to see, the member is not. That is where the first
few guesses matter.

    pip install anyk
    python examples/quickstart.py [--seeds N] [--steps N]
"""

import argparse
import statistics

import torch

import anyk

FAMILIES, MEMBERS, WIDTH = 40, 5, 32
CLASSES = FAMILIES * MEMBERS


def train(criterion: torch.nn.Module, seed: int, steps: int) -> dict[int, float]:
    generator = torch.Generator().manual_seed(seed)
    families = torch.randn(FAMILIES, 1, WIDTH, generator=generator) * 0.8
    centres = (families + torch.randn(FAMILIES, MEMBERS, WIDTH, generator=generator) * 0.25).reshape(CLASSES, WIDTH)
    y, y_test = (torch.arange(CLASSES).repeat_interleave(number) for number in (20, 50))
    x, x_test = (centres[labels] + torch.randn(len(labels), WIDTH, generator=generator) for labels in (y, y_test))

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    for _ in range(steps):
        batch = torch.randint(len(x), (256,), generator=generator)
        optimizer.zero_grad()
        loss = criterion(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = anyk.topk_accuracy(model(x_test), y_test, ks=(1, 5))
    return {k: 100 * value.item() for k, value in accuracy.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # small matrices: more threads wait for each other

    print(f"{CLASSES} classes, test accuracy in percent")
    differences: dict[int, list[float]] = {1: [], 5: []}
    for seed in range(arguments.seeds):
        softmax = train(torch.nn.CrossEntropyLoss(), seed, arguments.steps)
        topk = train(anyk.TopKErrorLoss({1: 0.5, 5: 0.5}), seed, arguments.steps)
        for k, values in differences.items():
            values.append(topk[k] - softmax[k])
            print(f"seed {seed}, top-{k}: softmax {softmax[k]:.2f}, top-k loss {topk[k]:.2f}")
    for k, values in differences.items():
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        print(f"difference, same seeds, top-{k}: {statistics.mean(values):+.2f}{spread}")
    print("A difference within the spread of the seeds is luck until more seeds say otherwise: --seeds 10")


if __name__ == "__main__":
    main()
