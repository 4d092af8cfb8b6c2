"""Run by torchrun in the tests: trains the recipes of a JSON file, one after the other, in all ranks together.

The file is a list of {"folder", "recipe", "kill"}: "kill" is [rank, step], where that rank kills itself on the first start.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

import lab_data
from anyk.lab import ranks, training
from anyk.lab.recipes import Recipe


def load_or_make(data):
    return lab_data.image_set() if data == "images" else LOAD(data)


def kill(number, step, rank, progress):
    if (progress.step, rank) == (step, number) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


LOAD, training.load = training.load, load_or_make
training.CHECKPOINT_SECONDS = 0.0
torch.use_deterministic_algorithms(True)
with ranks.joined("cpu") as together:
    for run in json.loads(Path(sys.argv[1]).read_text()):
        watch = partial(kill, *run["kill"], together.rank) if "kill" in run else lambda progress: None
        training.train(Recipe.from_json(run["recipe"]), run["folder"], on_progress=watch, ranks=together)
