"""`anyk train`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyk.lab.cli.words import Flag, Group, WholeConfig, say, say_json, warn
from anyk.lab.files import slug
from anyk.lab.run import processes
from anyk.lab.run.loggers import LoggerName


@dataclass(frozen=True)
class Output:
    """Where the results go."""

    out: Path | None = None
    """the run folder; by default anyk-runs/DATA-LOSS-seedSEED"""
    log: tuple[LoggerName, ...] = ()
    """also send the metrics to tensorboard, wandb or mlflow, or to several of them"""
    quiet: Flag = False
    """show no progress"""
    json: Flag = False
    """print the result as JSON instead of text"""


def command(config: WholeConfig, *, output: Group[Output]) -> int:
    """Train one model, with every hyperparameter as an option. After an interruption, the same command goes on.

    torchrun --nproc-per-node N -m anyk train … makes the same run in N processes.
    """
    from anyk.lab import stopping
    from anyk.lab.progress import watched
    from anyk.lab.run import evaluation, loggers, training
    from anyk.lab.run.run_folder import Run
    from anyk.lab.run.summaries import RANKING
    from anyk.lab.tables import percent

    log = output.log
    out = output.out or Path("anyk-runs") / f"{slug(config.data)}-{config.loss}-seed{config.seed}"
    with processes.joined(config.device) as group:
        group.broadcast(lambda: loggers.check(log))
        training.check(config, group)
        group.broadcast(Run(out).refuse_other_files)
        group.broadcast(lambda: Run(out).refuse_other_config(config))
        had_ended = (out / "result.json").exists()
        with (
            watched(1, output.quiet or not group.first, log if group.first else ()) as display,
            stopping.asked_first(),
        ):
            result = training.train(
                config, out, on_progress=partial(display.show, out), should_stop=stopping.requested, group=group
            )
            display.show(out, training.Progress(1, 1))  # one that had ended before has made no progress now
    if not group.first:
        return 0
    if had_ended:
        warn(f"{out} had already finished: its result is shown, and nothing was trained.")
    if output.json:
        say_json(result)
        return 0
    for part in ("validation", "test") if result["test"] else ("validation",):
        shown = (one for one in result[part].items() if one[0].startswith("top") or one[0] in RANKING)
        say(f"{part:10}  {'  '.join(f'{name} {percent(value)} %' for name, value in shown)}")
    used = result["config"]
    rate = f"learning rate {used['learning_rate']:g} ({used['schedule']})"
    say(f"loss {used['loss']}, {rate}, batch size {used['batch_size']}, model {used['model']}")
    say(f"epochs: {result['epochs']:g}; {result['seconds']:.1f} s; folder: {out}")
    advice = evaluation.unfinished(result, Run(out).metrics())
    if advice and not (config.epochs and config.learning_rate):  # who gives both has chosen them
        say(f"{advice} `anyk train` does not tune, `anyk compare` does.")
    return 0
