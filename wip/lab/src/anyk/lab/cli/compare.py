"""`anyk compare`."""

import json
from collections.abc import Callable, Sequence

from anyk.lab import experiment, verdict
from anyk.lab.cli.parsing import Parser, command_line, say
from anyk.lab.config import ComparisonConfig, ComparisonFields, DataFields, LossFields, ModelFields, TrainingFields
from anyk.lab.progress import shown

NOT_DECIDED = 3
"""the exit code of a comparison that has no answer yet"""
DESCRIPTION = """Find out whether top-k training helps on your data, with which loss, by how much, and whether that may be luck. Every
loss is tuned with equally many trials, then trained with several seeds and compared on the test set. Writes results.json, report.html
and the model to use. The exit code is 0 if there is an answer ("no difference" is one), 3 if there is none yet, 1 if runs failed, 2
for bad input. After an interruption, the same command goes on where it stopped."""


def run(words: Sequence[str], should_stop: Callable[[], bool]) -> int:
    """Make a comparison and say what it shows."""
    parser = Parser("compare", DESCRIPTION)
    parser.add_fields(DataFields, positional=("data",))
    for fields in (ComparisonFields, ModelFields, LossFields, TrainingFields):
        parser.add_fields(fields)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of text")
    given = parser.fields(words)
    as_json = given.pop("json")
    config = ComparisonConfig.from_json(given, "compare")
    with shown(config.quiet) as (tell, on_progress):
        found = experiment.run(
            config, tell=tell, on_progress=on_progress, command=command_line("compare", words), should_stop=should_stop
        )
    if as_json:
        say(json.dumps(found.to_json(), indent=1))
    else:
        for line in verdict.terminal(found, str(config.folder / "report.html")):
            say(line)
    failed = found.failures or any(not method.runs and not method.ended for method in found.losses)
    return 1 if failed else 0 if found.decided else NOT_DECIDED
