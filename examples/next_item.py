"""Next-item recommendation: self-attention over what a user has seen, in plain PyTorch, with a loss for the first ten guesses.

Reads MovieLens' ratings.dat, u.data or ratings.csv; without a file it makes users who go round through 200 items.

    pip install anyk
    python examples/next_item.py [ratings.dat] [--epochs N] [--softmax]
"""

import argparse
import csv
import re

import torch
from torch import nn

import anyk

LENGTH, WIDTH = 50, 48


def read(path: str) -> list[list[int]]:
    """Each user's items by time, numbered from 1."""
    with open(path, encoding="latin-1") as file:
        rows = csv.reader(re.sub("::|\t", ",", line) for line in file if line[0].isdigit())
        rated = sorted((int(user), int(float(time)), int(item)) for user, item, _, time, *_ in rows)
    users, numbers = dict[int, list[int]](), dict[int, int]()
    for user, _, item in rated:
        users.setdefault(user, []).append(numbers.setdefault(item, len(numbers) + 1))
    return list(users.values())


class SelfAttention(nn.Module):
    def __init__(self, items: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(items + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH).triu(1).bool())
        self.output = nn.Linear(WIDTH, items + 1)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(seen) + self.positions.weight
        return self.output(self.layers(hidden, mask=self.later))  # (B, LENGTH, items + 1): what comes after each place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ratings", nargs="?")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--softmax", action="store_true", help="train with cross-entropy instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.ratings:
        users = read(arguments.ratings)
    else:  # one of the twenty items that come next, round and round
        users = ((torch.randint(1, 21, (400, 40)).cumsum(1) + torch.randint(200, (400, 1))) % 200 + 1).tolist()
    # The last item of each user is the test; 0 is padding, and no target.
    rows = torch.tensor([([0] * (LENGTH + 2) + user)[-LENGTH - 2 :] for user in users if len(user) > 2])
    seen, target, test = rows[:, :-2], rows[:, 1:-1], rows[:, -1]
    model = SelfAttention(int(rows.max()))
    criterion = anyk.TopKErrorLoss({1: 0.5, 10: 0.5}, ignore_index=0)
    criterion = nn.CrossEntropyLoss(ignore_index=0) if arguments.softmax else criterion
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in (batch for _ in range(arguments.epochs) for batch in torch.randperm(len(seen)).split(64)):
        optimizer.zero_grad()
        criterion(model(seen[batch]).movedim(2, 1), target[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        scores = torch.cat([model.eval()(part)[:, -1] for part in target.split(256)])
    for k, share in anyk.topk_accuracy(scores, test, ks=(1, 10)).items():
        print(f"HR@{k} {100 * share:.2f} %")


if __name__ == "__main__":
    main()
