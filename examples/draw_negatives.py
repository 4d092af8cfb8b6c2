"""Negatives for a softmax over many items: k distinct ones by `sample_k_subset`, or k drawn with replacement.

A query's item is drawn from softmax(W x + log popularity). The loss is cross-entropy among the item and k negatives, the score
of each less the logarithm of how often it is expected among them: k p with replacement, and for distinct ones their exact
inclusion probability, which `soft_topk` with KSubset gives. Negatives are drawn by popularity or by the model's own scores.

    pip install anyk
    python examples/draw_negatives.py [--seeds N] [--steps N] [--tune]
"""

import argparse

import torch
from torch import nn

import anyk

WIDTH, ITEMS, K, BATCH = 16, 300, 10, 64
LR = (3e-3, 1e-2, 3e-2, 1e-1)  # what --tune tries, on data of its own; and what it found
TUNED = {"all items": 3e-2, "popularity, with replacement": 1e-2, "popularity, distinct": 1e-2}
TUNED |= {"model, with replacement": 3e-2, "model, distinct": 3e-2}


def draw(way: str, scores: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """k items for each row, (rows, k), and the logarithm of how often each item is expected, (rows, items)."""
    if way.endswith("distinct"):
        mask = anyk.sample_k_subset(scores, K, generator=generator)
        return mask.topk(K).indices, anyk.soft_topk(scores, K, "ksubset").log()
    p = scores.softmax(-1)
    return p.multinomial(K, replacement=True, generator=generator), (K * p).log()


def train(way: str, lr: float, seed: int, steps: int) -> torch.Tensor:
    """Test cross-entropy over all items, recall@10 in percent, and how many of the k negatives are distinct."""
    generator = torch.Generator().manual_seed(seed)
    popularity = -torch.arange(1.0, ITEMS + 1).log()
    weights = torch.randn(WIDTH, ITEMS, generator=generator) * 0.5

    def queries(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(number, WIDTH, generator=generator)
        return x, (x @ weights + popularity).softmax(-1).multinomial(1, generator=generator)

    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, ITEMS)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    distinct = []
    for _ in range(steps):
        x, item = queries(BATCH)
        logits = model(x)
        if way != "all items":
            with torch.no_grad():
                others = (popularity.expand_as(logits) if way.startswith("popularity") else logits).scatter(1, item, -torch.inf)
                negatives, expected = draw(way, others, generator)
            distinct.append(1 + (negatives.sort(-1).values.diff() > 0).sum(-1).float().mean())
            corrected = (logits - expected).gather(1, negatives)
            logits, item = torch.cat([logits.gather(1, item), corrected], 1), torch.zeros_like(item)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, item[:, 0]).backward()
        optimizer.step()
    x, item = queries(5000)
    with torch.no_grad():
        logits = model(x)
    recall = 100 * (logits.topk(10).indices == item).any(1).float().mean()
    loss, unlike = nn.functional.cross_entropy(logits, item[:, 0]), torch.tensor(distinct or [ITEMS - 1.0]).mean()
    return torch.stack([loss, recall, unlike])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for way, lr in TUNED.items():
        if asked.tune:
            lr = min(LR, key=lambda tried: train(way, tried, 1000, asked.steps)[0].item())
        found = torch.stack([train(way, lr, seed, asked.steps) for seed in range(asked.seeds)])
        loss, recall, distinct = (f"{part.mean():.3f} ± {part.std():.3f}" for part in found.T)
        print(f"{way}: cross-entropy {loss}, recall@10 {recall} %, distinct negatives {distinct} (lr {lr})", flush=True)
