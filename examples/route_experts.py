"""Routing tokens to experts: exactly k experts a token, or exactly `capacity` tokens an expert; beside softmax gates.

A token needs two of eight skills, some more often than others: its target is the sum of two linear maps of it. Each expert is a
linear map. Equal weights fit that sum: straight-through (equal weights, softmax's gradient) is the control. The balance loss is
Switch Transformer's. "Largest load" is the share of the busiest expert, 12.5 % where all are equal.

    pip install anyk
    python examples/route_experts.py [--seeds N] [--steps N] [--tune]
"""

import argparse
import itertools

import torch
from torch import nn

import anyk

WIDTH, EXPERTS, K, TOKENS = 16, 8, 2, 256
CAPACITY = TOKENS * K // EXPERTS
# What --tune tries, on data of its own: learning rate; temperature, or the weight of the balance loss. And what it found.
LR, OTHER = (3e-3, 1e-2, 3e-2), (0.1, 0.3, 1.0)
TUNED = {"softmax gates": (3e-2, 1.0), "softmax gates, balance loss": (3e-2, 0.1), "straight-through": (1e-2, 0.3)}
TUNED |= {"soft_topk over experts": (3e-2, 0.3), "soft_topk over tokens": (3e-2, 0.1)}


def route(way: str, scores: torch.Tensor, other: float) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The weight of each expert for each token, (tokens, experts); and what is added to the loss."""
    if way == "soft_topk over experts":
        return anyk.soft_topk(scores, K, temperature=other, hard=True), 0.0
    if way == "soft_topk over tokens":
        return anyk.soft_topk(scores, CAPACITY, temperature=other, dim=0, hard=True), 0.0
    soft = (scores if way.endswith("balance loss") else scores / other).softmax(-1)
    chosen = torch.zeros_like(soft).scatter(1, soft.topk(K).indices, 1.0)
    if way == "straight-through":
        return chosen + (soft - soft.detach()), 0.0
    balance = other * EXPERTS * (chosen.mean(0) / K * soft.mean(0)).sum() if way.endswith("balance loss") else 0.0
    return K * soft * chosen / (soft * chosen).sum(-1, keepdim=True), balance


def train(way: str, lr: float, other: float, seed: int, steps: int) -> torch.Tensor:
    """In percent: squared error (of the variance), the largest load (of all), tokens without an expert (of all)."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(EXPERTS, WIDTH, generator=generator)
    maps = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    often = 1 / torch.arange(1.0, EXPERTS + 1).expand(TOKENS, -1)
    torch.manual_seed(seed)
    router, experts = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
    optimizer = torch.optim.Adam([*router.parameters(), experts], lr=lr)
    results = []
    for step in range(steps + 20):
        skills = torch.multinomial(often, K, generator=generator)
        x = centres[skills].sum(1) + torch.randn(TOKENS, WIDTH, generator=generator)
        y = torch.einsum("nd,nkde->ne", x, maps[skills])
        weights, balance = route(way, router(x), other)
        error = ((weights.T[..., None] * (x @ experts)).sum(0) - y).square().mean()
        if step < steps:
            optimizer.zero_grad()
            (error + balance).backward()
            optimizer.step()
        else:
            load = (weights > 0).float()
            results.append(torch.stack([error / y.var(), load.sum(0).max() / load.sum(), (load.sum(1) == 0).float().mean()]))
    return 100 * torch.stack(results).detach().mean(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for way, tuned in TUNED.items():
        if asked.tune:
            tuned = min(itertools.product(LR, OTHER), key=lambda tried: train(way, *tried, 1000, asked.steps)[0].item())
        found = torch.stack([train(way, *tuned, seed, asked.steps) for seed in range(asked.seeds)])
        error, load, none = (f"{part.mean():.1f} ± {part.std():.1f} %" for part in found.T)
        print(f"{way}: error {error}, largest load {load}, no expert {none} (lr, t {tuned})", flush=True)
