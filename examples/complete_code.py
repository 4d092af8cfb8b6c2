"""Complete a line of Python: the first guesses for its next token, by a small model trained on Python's own library.

Without the folder of a run, a model is trained first, with a loss for the first five guesses; that takes half a minute.

    pip install "anyk[lab]"
    python examples/complete_code.py [--run FOLDER] [--train-fraction SHARE] ["for i in"]
"""

import argparse
import tempfile
from pathlib import Path

SHOWN = {"<newline>": "⏎", "<indent>": "⇥", "<dedent>": "⇤", "<number>": "0", "<string>": '""'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line", nargs="?", default="for i in")
    parser.add_argument("--run", type=Path, help="the folder of `anyk train completion`")
    parser.add_argument(
        "--train-fraction", type=float, default=0.1, help="share of the library to train with, where there is no run"
    )
    arguments = parser.parse_args()
    try:
        from anyk.lab.data.completion import python_tokens
        from anyk.lab.run.config import Config
        from anyk.lab.run.models import load
        from anyk.lab.run.training import train
    except ImportError as error:
        raise SystemExit(f'{error.name} is missing: pip install "anyk[lab]"') from None

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.run
        if folder is None:
            folder = Path(temporary)
            hyperparameters = {"train_fraction": arguments.train_fraction, "epochs": 2, "learning_rate": 0.015}
            test = train(Config(data="completion", loss="error", ks=(1, 5), **hyperparameters), folder)["test"]
            print(f"trained: top-1 {100 * test['top1']:.1f} %, top-5 {100 * test['top5']:.1f} % on modules it has not seen")
        model = load(folder)
    tokens = list(python_tokens(arguments.line.encode(), unfinished=True))
    [guesses] = model.guesses(model.tokens([tokens]), 5)
    print(arguments.line)
    for guess, chance in guesses:
        print(f"    {SHOWN.get(guess, guess):12} {100 * chance:5.1f} %")


if __name__ == "__main__":
    main()
