"""`anyk train`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyk.lab import embed, files, losses, train
from anyk.lab.cli.parsing import Parser, say
from anyk.lab.config import DataFields, Fields, LossFields, ModelFields, RunConfig, TrainingFields
from anyk.lab.data.prepare import prepare
from anyk.lab.engines.local import cores_of_this_process
from anyk.lab.progress import shown
from anyk.lab.verdict import percent, title


@dataclass(frozen=True)
class OneRun(Fields):
    """Which loss, and where the run goes."""

    loss: str = "error"
    """softmax; gce; error or error:OPERATOR; an operator such as splitter for the paper's loss with it; or smooth, hinge, truncated,
    softmax_at_k"""
    seed: int = 0
    """initial weights, order of the examples, augmentation"""
    out: str | None = None
    """folder of the run; by default anyk-runs/DATA-LOSS-SEED"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps"""
    threads: int = 0
    """CPU threads; 0: one for each core"""
    quiet: bool = False
    """show no progress"""


def run(words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Train one loss on some data and say how well it does."""
    parser = Parser(
        "train", "Train one loss on some data. Nothing is tuned. A run that was interrupted goes on where it stopped."
    )
    parser.add_fields(DataFields, positional=("data",))
    for fields in (OneRun, ModelFields, LossFields, TrainingFields):
        parser.add_fields(fields)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of text")
    given = parser.fields(words)
    as_json = given.pop("json")
    own = OneRun(**{name: given.pop(name) for name in list(given) if name in OneRun.__annotations__})
    data = DataFields(**{name: given.pop(name) for name in list(given) if name in DataFields.__annotations__})
    config = RunConfig.from_json({**given, "loss": own.loss, "seed": own.seed}, "train")
    losses.check(own.loss)
    folder = Path(own.out) if own.out else Path("anyk-runs") / f"{files.slug(data.data)}-{files.slug(own.loss)}-{own.seed}"
    with shown(own.quiet) as (tell, on_progress):
        prepared = prepare(embed.of_photos(data.data, config.model, folder), data, folder)
        tell(f"{prepared.name}: {len(prepared.split.train):,} examples to train with; {prepared.how_split}")
        result = train.train(
            config,
            prepared,
            folder,
            device=own.device,
            threads=own.threads or cores_of_this_process(),
            on_step=lambda step, steps: on_progress(step / steps, 1.0),
            on_metrics=lambda step, line: tell(_line(line)),
            should_stop=should_stop,
        )
    say(json.dumps(result, indent=1) if as_json else _summary(result, folder))
    return 0


def _line(line: Any) -> str:
    shown_metrics = [
        f"{title(name)} {percent(value)} %" for name, value in line["validation"].items() if name.startswith("top")
    ]
    return f"epoch {line['epoch']:g}: loss {line['train_loss']:.4f}, validation {', '.join(shown_metrics[:3])}"


def _summary(result: Any, folder: Path) -> str:
    test = ", ".join(f"{title(name)} {percent(value)} %" for name, value in result["test"].items() if name.startswith("top"))
    return f"Test: {test}\nModel: {folder / 'model.safetensors'}"
