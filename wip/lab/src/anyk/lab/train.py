"""Train one config in one run folder, from wherever the folder stands.

Nothing random is remembered from step to step: the order of an epoch and the augmentation of a step follow from the seed and
their number. A run that goes on from a checkpoint therefore takes exactly the steps it would have taken.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyk import info
from anyk.lab import losses, models
from anyk.lab.config import RunConfig
from anyk.lab.data.prepare import Prepared, open_prepared
from anyk.lab.engines import Outcome
from anyk.lab.errors import Diverged, LabError, Stopped, explain, first_line
from anyk.lab.evaluate import GUESSES, KS, Evaluation, conformity, evaluate
from anyk.lab.folder import FolderTaken, Run
from anyk.lab.models import Calibration, ModelSpec

CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 10.0, 50
"""a checkpoint is written when the last one is older than this, or than so many times what it took to write"""
TRAIN_EXAMPLES = 5_000
"""of the training examples, so many are measured at the end"""
LEAVING_SECONDS = 10.0
"""to wait for a former process of the same run to leave the folder"""

OnStep = Callable[[int, int], None]
OnMetrics = Callable[[int, Mapping[str, Any]], None]


def train(
    config: RunConfig,
    data: Prepared,
    folder: str | Path,
    *,
    device: str = "cpu",
    threads: int = 1,
    on_step: OnStep = lambda step, steps: None,
    on_metrics: OnMetrics = lambda step, metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
    timeout: float = 0.0,
) -> dict[str, Any]:
    """Train a config to its end and return the content of ``result.json``.

    Args:
        config: what to train.
        data: what to train on.
        folder: the run folder; a run that was interrupted there goes on, one that has ended is not run again.
        device: where.
        threads: CPU threads; another number may change the last digits.
        on_step: called after each step with its number and how many there are.
        on_metrics: called after each evaluation with the number of the step and what was measured, for loggers.
        should_stop: asked before each step; True saves a checkpoint and raises :class:`Stopped`.
        timeout: seconds to wait for another process to leave the folder.
    """
    run = Run(folder)
    config = config.resolved(data.kind, len(data.split.train), len(data.classes))
    with run.locked(timeout):
        run.begin(config, info.environment())
        result = run.result()
        if result is not None:
            return result
        try:
            with _alone(threads):
                return _Training(config, data, run, device, on_metrics).to_the_end(on_step, should_stop)
        except Exception as error:
            if not isinstance(error, Stopped):
                run.fail(explain(error))
            raise


def work(
    folder: str,
    fields: Mapping[str, Any],
    data: str,
    device: str,
    threads: int,
    on_step: OnStep,
    should_stop: Callable[[], bool],
    imports: Sequence[str] = (),
) -> Outcome:
    """A run in a process of its own: its outcome, whatever happens.

    Args:
        folder: of the run.
        fields: of its config, as JSON values.
        data: the folder of the prepared data.
        device: where.
        threads: CPU threads.
        on_step: called with where the run stands.
        should_stop: asked before each step.
        imports: modules that bring losses, imported first.
    """
    try:
        losses.import_modules(imports)
        prepared = open_prepared(Path(data))
        config = RunConfig.from_json(fields)
        settings = {"device": device, "threads": threads, "on_step": on_step, "should_stop": should_stop}
        return Outcome(result=train(config, prepared, folder, timeout=LEAVING_SECONDS, **settings))
    except (Stopped, FolderTaken) as error:
        return Outcome() if should_stop() else Outcome(error=explain(error))
    except Exception as error:
        return Outcome(error=explain(error), diverged=isinstance(error, Diverged))


def check(config: RunConfig, data: Prepared, device: str) -> None:
    """Raise what :func:`train` would raise about a config, its data and its device, before a folder is made for it."""
    with _alone(1):
        _Training(config.resolved(data.kind, len(data.split.train), len(data.classes)), data, Run(""), device)


def describe(data: Prepared) -> dict[str, Any]:
    """What a result says of its data."""
    sizes = {name: len(getattr(data.split, name)) for name in ("train", "validation", "test")}
    return {"name": data.name, "kind": data.kind, "classes": len(data.classes), "shape": list(data.shape), **sizes} | {
        "fingerprint": data.fingerprint
    }


def keep_model(run: Path, folder: Path, chose: Sequence[str]) -> None:
    """Write a run's model to another folder, with what its validation examples have chosen beside what the run says."""
    spec, weights = models.read(run)
    if spec.calibration is not None:
        calibration = dataclasses.replace(spec.calibration, chose=(*spec.calibration.chose, *chose))
        spec = dataclasses.replace(spec, calibration=calibration)
    Run(folder).save_tensors("model.safetensors", weights, spec.to_json())


@contextmanager
def _alone(threads: int) -> Iterator[None]:
    """A number of threads, and a random generator that the caller does not notice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(before)


class _Training:
    def __init__(
        self,
        config: RunConfig,
        data: Prepared,
        run: Run,
        device: str,
        on_metrics: OnMetrics = lambda step, metrics: None,
    ) -> None:
        self.config, self.data, self.run, self.on_metrics = config, data, run, on_metrics
        self.device = find_device(device)
        self.split = data.split if config.split == 0 else data.split_again(config.split)
        self.labels = data.noisy_labels(self.split)
        if config.augment and data.kind != "images":
            raise LabError(f"augment changes images, but {data.name} holds {data.kind}: leave it out.")
        self.steps_per_epoch = math.ceil(len(self.split.train) / config.batch_size)
        self.steps = max(1, round(config.length * config.epochs * self.steps_per_epoch))
        torch.manual_seed(_seed(config.seed, "weights"))
        self.spec = ModelSpec.of(config, data)
        self.model = self.spec.build().to(self.device)
        self.mean = None if data.mean is None else _shaped(data.mean, data.kind).to(self.device)
        self.std = None if data.std is None else _shaped(data.std, data.kind).to(self.device)
        classes = len(data.classes)
        self.criterion = losses.criterion(config, classes).to(self.device)
        ks = {*KS, *config.measure, *config.ks, *losses.trained_ks(config)}
        self.ks = sorted(k for k in ks if k < classes) or [1]
        self.optimizer = _optimizer(config, self.model)
        self.step = self.evaluations = self.loss_count = 0
        self.best: dict[str, dict[str, Any]] = {}
        self.unsaved: dict[str, dict[str, Tensor]] = {}
        self.loss_sum = torch.zeros((), device=self.device)
        self.seconds = 0.0
        self.saved_at, self.pause = time.monotonic(), CHECKPOINT_SECONDS

    # The loop --------------------------------------------------------------------------------------------------------------

    def to_the_end(self, on_step: OnStep, should_stop: Callable[[], bool]) -> dict[str, Any]:
        self._restore()
        started = time.perf_counter() - self.seconds
        order, order_epoch = torch.empty(0, dtype=torch.long), -1
        self.model.train()
        while self.step < self.steps:
            if should_stop():
                self.seconds = time.perf_counter() - started
                self._save()
                raise Stopped(f"stopped at step {self.step} of {self.steps}")
            epoch, place = divmod(self.step, self.steps_per_epoch)
            if epoch != order_epoch:
                generator = torch.Generator().manual_seed(_seed(self.config.seed, "order", epoch))
                order, order_epoch = self.data.examples.order(self.split.train, generator), epoch
            torch.manual_seed(_seed(self.config.seed, "step", self.step))  # of augmentation and dropout
            # Batches of nearly one size: a last one of a single example would be too small for batch normalisation.
            start, end = (number * len(order) // self.steps_per_epoch for number in (place, place + 1))
            self._take_step(order[start:end])
            if self.step % self.steps_per_epoch == 0 or self.step == self.steps:
                self.seconds = time.perf_counter() - started
                self._evaluate()
            if time.monotonic() - self.saved_at > self.pause:
                self.seconds = time.perf_counter() - started
                self._save()
            on_step(self.step, self.steps)
        self.seconds = time.perf_counter() - started
        return self._conclude(started)

    def _take_step(self, index: Tensor) -> None:
        config, progress = self.config, self.step / self.steps
        inputs, target = self.inputs(index), self.labels[index].to(self.device)
        if config.augment:
            inputs = models.augment(inputs, config.augment)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, progress)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.amp):
            scores = self.mask(self.model(inputs), index)
            try:
                loss: Tensor = self.criterion(scores, target)
            except ValueError:  # a loss may refuse what is not a number before it comes to one itself
                if bool(scores.isfinite().all()):
                    raise
                raise self._diverged("the scores are not finite") from None
        loss.backward()
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(target)
        self.loss_count += len(target)
        self.step += 1

    def inputs(self, index: Tensor) -> Tensor:
        """The examples at some positions as the model takes them: on the device, normalised."""
        taken = self.data.examples.take(index).to(self.device)
        if self.data.kind == "sequences":
            return taken
        taken = taken.float()
        return taken if self.mean is None else (taken - self.mean) / self.std

    def mask(self, scores: Tensor, index: Tensor) -> Tensor:
        """-inf for what the sequences have had before, but never for the target, where the data say so."""
        if not self.data.mask_seen:
            return scores
        rows, classes = self.data.examples.seen(index)
        others = classes != self.data.labels[index][rows]
        seen = torch.zeros(scores.shape, dtype=torch.bool)
        seen[rows[others], classes[others]] = True
        return scores.masked_fill(seen.to(scores.device), -torch.inf)

    def _diverged(self, sign: str) -> Diverged:
        advice = f"lower the learning rate ({self.config.learning_rate:g}) or raise the temperature."
        return Diverged(f"{sign} at step {self.step}: {advice}")

    # Evaluation ------------------------------------------------------------------------------------------------------------

    def _measure(self, positions: Tensor, guesses: int = 0, noisy: bool = False) -> Evaluation:
        labels = self.labels if noisy else self.data.labels
        return evaluate(self.model, self.inputs, labels, positions, self.mask, guesses, self.config.amp)

    def _evaluate(self) -> None:
        train_loss = float(self.loss_sum) / max(self.loss_count, 1)
        self.loss_sum.zero_()
        self.loss_count = 0
        if not math.isfinite(train_loss):
            raise self._diverged(f"the training loss is {train_loss}")
        validation = self._measure(self.split.validation, noisy=True).metrics(self.ks, self.config.ks)
        line = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "train_loss": train_loss,
            "validation": validation,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "seconds": round(self.seconds, 3),
        }
        self.run.add_metrics(line)
        self.on_metrics(self.step, line)
        self.evaluations += 1
        for metric in self._selecting(validation):
            best, value = self.best.get(metric), validation[metric]
            # On few examples many evaluations tie, and the first of them is of a model that has hardly been trained.
            tied = best is not None and value == best["value"] and validation["mrr"] >= best["validation"]["mrr"]
            if best is None or self.config.select == "last" or value > best["value"] or tied:
                self.best[metric] = {"value": value, "epoch": line["epoch"], "validation": validation}
                self.unsaved[metric] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _selecting(self, validation: Mapping[str, float]) -> list[str]:
        """The metrics that have a best evaluation of their own."""
        if self.config.select == "each":
            return [metric for metric in validation if metric.startswith("top")]
        return ["mean" if self.config.select == "last" else self.config.select]

    # Saving and going on ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """First the best weights, then the checkpoint: a kill in between leaves best weights that the rest of the run makes
        again, bit for bit."""
        started = time.monotonic()
        for metric, weights in self.unsaved.items():
            self.run.save_tensors(f"best-{metric}.safetensors", weights, {})
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{number}/{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        tensors["loss_sum"] = self.loss_sum
        state = {name: getattr(self, name) for name in ("step", "evaluations", "best", "loss_count", "seconds")}
        self.run.save_tensors("checkpoint.safetensors", tensors, {**state, "data": self.data.fingerprint})
        self.unsaved.clear()
        self.saved_at = time.monotonic()
        self.pause = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (self.saved_at - started))

    def _restore(self) -> None:
        found = self.run.load_tensors("checkpoint.safetensors")
        if found is not None and found[1]["data"] != self.data.fingerprint:
            raise LabError(f"the data have changed since {self.run.folder} was begun: choose another folder.")
        self.run.cut_metrics(0 if found is None else found[1]["evaluations"])
        if found is None:
            return
        tensors, state = found
        self.step, self.evaluations, self.best = state["step"], state["evaluations"], state["best"]
        self.loss_count, self.seconds = state["loss_count"], state["seconds"]
        self.loss_sum.copy_(tensors.pop("loss_sum"))
        self.model.load_state_dict({name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model/")})
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, number, key = name.split("/", 2)
                moments.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})

    def _conclude(self, started: float) -> dict[str, Any]:
        """Measure the chosen weights on the test examples, once, if the config says so."""
        config = self.config
        test: dict[str, float] = {}
        on_train: dict[str, float] = {}
        kept: dict[str, Tensor] = {}
        calibration = None
        weights = {metric: self.unsaved.get(metric) or self._saved_weights(metric) for metric in self.best}
        for metric, chosen in weights.items() if config.tested else ():
            self.model.load_state_dict(chosen)
            evaluation = self._measure(self.split.test, min(GUESSES, len(self.data.classes)))
            measured = evaluation.metrics(self.ks, config.ks)
            if config.select == "each":
                test[metric] = measured[metric]
                continue
            test, kept = measured, {"ranks": evaluation.ranks, "guesses": evaluation.guesses}
            some = self.split.train[:: max(1, math.ceil(len(self.split.train) / TRAIN_EXAMPLES))]
            on_train = self._measure(some, noisy=True).metrics(self.ks, config.ks)
            if not self.data.label_noise:  # wrong labels would promise another coverage than that of the right ones
                scores = conformity(self.model, self.inputs, self.data.labels, self.split.validation, self.mask)
                groups = None if self.data.groups is None else self.data.groups[self.split.validation]
                calibration = Calibration.of(scores, () if config.select == "last" else ("the epoch",), groups)
        self.seconds = time.perf_counter() - started
        first = next(iter(self.best.values()))["validation"]
        each = {metric: best["value"] for metric, best in self.best.items()}
        result = {
            "config": config.to_json(),
            "data": describe(self.data),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "epochs": self.step / self.steps_per_epoch,
            "seconds": round(self.seconds, 3),
            "selected": {metric: best["epoch"] for metric, best in self.best.items()},
            "validation": each if config.select == "each" else first,
            "train": on_train,
            "test": test,
        }
        spec = dataclasses.replace(self.spec, calibration=calibration)
        self.run.finish(result, next(iter(weights.values())), spec.to_json(), kept)
        return self.run.result() or {}

    def _saved_weights(self, metric: str) -> dict[str, Tensor]:
        saved = self.run.load_tensors(f"best-{metric}.safetensors")
        if saved is None:
            raise LabError(f"best-{metric}.safetensors is gone: delete {self.run.folder} and run again.")
        return saved[0]


def learning_rate(config: RunConfig, progress: float) -> float:
    """The learning rate after this fraction of the run."""
    if config.schedule == "constant":
        return config.learning_rate
    warm = 0.3 if config.schedule == "onecycle" else 0.0
    if progress < warm:
        low = 0.04
        return config.learning_rate * (low + (1 - low) * (1 - math.cos(math.pi * progress / warm)) / 2)
    return config.learning_rate * (1 + math.cos(math.pi * (progress - warm) / (1 - warm))) / 2


def find_device(name: str) -> torch.device:
    """The device of this name, if it can be used here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LabError(f"device {name!r} cannot be used here ({first_line(error)}): try cpu.") from None
    return device


def _shaped(numbers: Tensor, kind: str) -> Tensor:
    """Those of features as they are; those of the channels of images for pixels from 0 to 255."""
    return numbers[:, None, None] * 255 if kind == "images" else numbers


def _optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    weights, rate, decay = list(model.parameters()), config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(weights, rate, momentum=0.9, weight_decay=decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(weights, rate, weight_decay=decay)


def _seed(*parts: int | str) -> int:
    """A number for torch's generators that depends on all the parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")
