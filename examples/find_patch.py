"""Find the patch that matters: one digit in an 8 x 8 grid of distractors, and a classifier that sees k patches.

Only the digit's class is known in training, not its place; a distractor is a digit with its pixels shuffled. A scorer rates
each patch. Attention sees all 64 patches, also at the test; "with 4 patches alone" it is cut to its best four there.

    pip install anyk
    python examples/find_patch.py [--seeds N] [--steps N] [--tune]
"""

import argparse

import torch
from torch import nn

import anyk

PATCHES, K = 64, 4
DIGITS = (0xE8C62E, 0x46108E, 0x1E0BA1F, 0x1E0983E, 0x1297C42, 0x1F8783E, 0xE87A2E, 0x1F08884, 0xE8BA2E, 0xE8BC2E)
GLYPHS = (torch.tensor(DIGITS)[:, None] >> torch.arange(24, -1, -1) & 1).float()  # 5 x 5 pixels
LR, TEMPERATURE = (3e-3, 1e-2), (0.1, 0.3, 1.0)  # what --tune tries, on two seeds of its own; and what it found
TUNED = {"random": (1e-2, 1.0), "attention": (1e-2, 1.0), "straight-through": (1e-2, 0.3), "select_topk": (1e-2, 0.3)}


def distractors(generator: torch.Generator) -> torch.Tensor:
    pixels = torch.rand(20000, 25, generator=generator).argsort(-1)
    return GLYPHS[torch.randint(10, (20000,), generator=generator)].gather(-1, pixels)


def images(number: int, pool: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    patches = pool[torch.randint(len(pool), (number, PATCHES), generator=generator)]
    place, digit = (torch.randint(most, (number,), generator=generator) for most in (PATCHES, 10))
    patches[torch.arange(number), place] = GLYPHS[digit]
    return [patches + 0.3 * torch.randn(patches.shape, generator=generator), place, digit]  # (number, 64, 25)


def train(way: str, lr: float, temperature: float, seed: int, steps: int) -> torch.Tensor:
    """In percent: accuracy, accuracy with k patches alone, how often the digit is among the k."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    scorer = nn.Sequential(nn.Linear(25, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(1))
    see, classify = nn.Sequential(nn.Linear(25, 64), nn.ReLU()), nn.Linear(64, 10)
    optimizer = torch.optim.Adam(nn.ModuleList([scorer, see, classify]).parameters(), lr=lr)

    def logits_and_chosen(patches: torch.Tensor, cut: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.rand(patches.shape[:2]) if way == "random" else scorer(patches)
        if way == "select_topk":
            seen, chosen = anyk.select_topk(see(patches), scores, K, temperature=temperature)
            return classify(seen.mean(1)), chosen
        soft, chosen = (scores / temperature).softmax(-1), scores.topk(K).indices
        hard = torch.zeros_like(scores).scatter(1, chosen, 1 / K)
        attention = hard * soft / (hard * soft).sum(-1, keepdim=True) if cut else soft
        weights = {"random": hard, "straight-through": hard + soft - soft.detach(), "attention": attention}[way]
        return classify((weights[..., None] * see(patches)).sum(1)), chosen

    pool = distractors(generator)
    for _ in range(steps):
        patches, _, digit = images(128, pool, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits_and_chosen(patches)[0], digit).backward()
        optimizer.step()
    patches, place, digit = images(1000, distractors(generator), generator)
    (logits, _), (few, chosen) = logits_and_chosen(patches), logits_and_chosen(patches, cut=True)
    right = [logits.argmax(1) == digit, few.argmax(1) == digit, (chosen == place[:, None]).any(1)]
    return 100 * torch.stack(right).float().mean(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tune", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for way, tuned in TUNED.items():
        if asked.tune:
            tries = [(lr, t) for lr in LR for t in (TEMPERATURE if way != "random" else (1.0,))]
            tuned = max(tries, key=lambda tried: sum(train(way, *tried, seed, asked.steps)[0].item() for seed in (1000, 1001)))
        found = torch.stack([train(way, *tuned, seed, asked.steps) for seed in range(asked.seeds)])
        right, few, among = (f"{part.mean():.1f} ± {part.std():.1f} %" for part in found.T)
        print(f"{way}: accuracy {right}, with {K} patches alone {few}, digit among the {K} {among} (lr, t {tuned})", flush=True)
