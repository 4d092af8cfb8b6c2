"""Train one config in one run folder, from wherever the folder stands.

Nothing random is remembered from step to step: the order of an epoch and the augmentation of a step follow from the seed
and their number. A run that goes on from a checkpoint therefore takes exactly the steps it would have taken.

Several processes train one config as one does: the batches are cut as for one, each rank takes a part of each, and the
gradients are averaged with the weights of the parts. The folder does not know how many they were.
"""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyk import _compat, info
from anyk.lab.data import Dataset, Split, label_noise
from anyk.lab.data.streaming import block_order
from anyk.lab.data.tokens import IGNORED, SequenceSplit
from anyk.lab.errors import Diverged, LabError, Stopped, explain
from anyk.lab.run import batches, losses, models, own_models
from anyk.lab.run.batches import Reader, find_device, read_data
from anyk.lab.run.calibration import Calibration
from anyk.lab.run.config import Config
from anyk.lab.run.evaluation import GUESSES, KS, Examined, conformity, examine
from anyk.lab.run.processes import ALONE, ProcessGroup, synchronise_batch_norm
from anyk.lab.run.run_folder import Run

#: a checkpoint is written when the last one is older than this, or than so many times what it took to write
CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 10.0, 50


@dataclass(frozen=True)
class Progress:
    """Where a run stands; ``line`` is the newest evaluation, if one was just made."""

    step: int
    steps: int
    line: dict[str, Any] | None = None


OnProgress = Callable[[Path, Progress], None]
"""Called with a run's folder and where it stands."""


def train(
    config: Config,
    folder: str | Path,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
    patience: float = 0.0,
    group: ProcessGroup = ALONE,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Train a config to its end and return the content of ``result.json``.

    Args:
        config: what to train.
        folder: the run folder; a run that was interrupted there goes on, one that has ended is not run again.
        on_progress: called after each step and each evaluation, in each rank.
        should_stop: asked before each step; True saves a checkpoint and raises :class:`Stopped`.
        patience: seconds to wait for another process to leave the folder.
        group: the processes that train together, all of which call this; see :func:`anyk.lab.run.processes.joined`.
        dataset: the config's data; None: they are read.
    """
    run = Run(folder)
    with ExitStack() as folder_is_ours:

        def begin() -> dict[str, Any] | None:
            folder_is_ours.enter_context(run.locked(patience))
            run.begin(config, info.environment())
            return run.result()

        result = group.broadcast(begin)
        if result is not None:
            return result
        try:
            with _alone(config), group.readable_errors():
                training = group.run_on_all(lambda: _Training(config, run, group, dataset))
                return training.to_the_end(on_progress, should_stop)
        except Exception as error:
            if group.first and not isinstance(error, Stopped):
                run.fail(explain(error))
            raise


def check(config: Config, group: ProcessGroup = ALONE) -> None:
    """Raise what :func:`train` would raise about the config and its data, before a folder is made for it."""
    with _alone(config):
        group.run_on_all(lambda: _Training(config, Run(""), group))


@contextmanager
def _alone(config: Config) -> Iterator[None]:
    """The config's number of threads, and a random generator that the caller does not notice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)


class _Batch(NamedTuple):
    inputs: Tensor
    target: Tensor
    asked: dict[str, Any]
    """keyword arguments of the model: ``where`` there are targets, if it is causal; ``scored=False``, if the loss makes the
    scores"""
    mask: Callable[[Tensor], Tensor]
    """of the scores, what is no guess"""


class _Training:
    def __init__(self, config: Config, run: Run, group: ProcessGroup, dataset: Dataset | None = None) -> None:
        self.run = run
        self.group = group
        self.device = find_device(group.device(config.device))
        self.dataset = group.local_first(lambda: read_data(config)) if dataset is None else dataset
        # By the first rank's machine: how the examples are shuffled may depend on its memory.
        self.given_shuffle = batches.shuffle_of(config)
        self.config = config = group.broadcast(lambda: batches.resolved(config, self.dataset))
        batches.check_data(config, self.dataset)
        self.parts = batches.divide(self.dataset, config)
        batches.check_batches(config, self.dataset, self.parts)
        mean, std = group.broadcast(lambda: batches.standardization(self.dataset, self.parts, config))
        self.dataset = dataclasses.replace(self.dataset, feature_mean=mean, feature_std=std)
        self.dataset = label_noise.noisy(self.dataset, self.parts, config.label_noise, config.noise_seed)
        self.windows = batches.windows_of(self.dataset, self.parts, config)
        self.steps_per_epoch = batches.steps_per_epoch(config, self.parts, self.windows)
        self.steps = config.epochs * self.steps_per_epoch
        self.reader = Reader(self.dataset, self.device, config)

        torch.manual_seed(_seed(config.seed, "weights"))
        self.model = synchronise_batch_norm(models.build(config, self.dataset).to(self.device), group)
        classes = len(self.dataset.classes)
        self.criterion = losses.criterion(config, classes).to(self.device)
        self.head = losses.head(self.criterion, self.model, config)
        trained_ks = losses.trained_ks(self.criterion, config)
        batches.check_seen(config, self.dataset, self.parts, max(trained_ks))
        ks = {*KS, *config.measure, *config.ks, *trained_ks}
        self.ks = sorted(k for k in ks if k < classes) or [1]
        self.optimizer = _optimizer(config, self.model)

        self.step = 0
        self.evaluations = 0
        self.best: dict[str, dict[str, Any]] = {}
        self.unsaved: dict[str, dict[str, Tensor]] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64 if self.device.type != "mps" else torch.float32, device=self.device)
        self.loss_count = 0
        self.seconds = 0.0
        self.saved_at = time.monotonic()
        self.pause = CHECKPOINT_SECONDS

    # The loop --------------------------------------------------------------------------------------------------------------

    def to_the_end(self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]) -> dict[str, Any]:
        self._restore()
        self.replica = self.group.replicate(self.model, self.reader(self.dataset.train, self.parts.train[:1]))
        started = time.perf_counter() - self.seconds
        own = self.config.model not in own_models.BUILT_IN  # which may have any dropout in it
        random_steps = bool(self.config.augment or self.config.mixup or self.config.dropout or own)
        every = self.config.evaluate_every or self.steps_per_epoch
        order, order_epoch = torch.empty(0), -1
        self.model.train()
        [stop] = self.group.all_reduce_any(should_stop())
        while self.step < self.steps and not self._gave_up():
            if stop:
                self.seconds = time.perf_counter() - started
                self._save()
                raise Stopped(f"stopped at step {self.step} of {self.steps}")
            epoch, place = divmod(self.step, self.steps_per_epoch)
            if epoch != order_epoch:
                order = torch.empty(0)  # the old one goes before the new one is made: of millions of examples they are large
                order, order_epoch = self._order(epoch), epoch
            if random_steps:
                torch.manual_seed(_seed(self.config.seed, "step", self.step, *([self.group.rank] if self.group.rank else [])))
            # Batches of nearly one size: a last one of a single example would be too small for batch normalisation.
            start, end = (number * len(order) // self.steps_per_epoch for number in (place, place + 1))
            self.reader.expect(self.dataset.train, order[start + self.config.shuffle_window : end + self.config.shuffle_window])
            self._take_step(order[start:end])
            line = None
            if self.step % every == 0 or self.step == self.steps:
                self.seconds = time.perf_counter() - started
                line = self._evaluate()
            stop, save = self.group.all_reduce_any(should_stop(), time.monotonic() - self.saved_at > self.pause)
            if save:
                self.seconds = time.perf_counter() - started
                self._save()
            on_progress(Progress(self.step, self.steps, line))
        self.seconds = time.perf_counter() - started
        return self._conclude(started)

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(_seed(self.config.seed, "order", epoch))
        train, config = self.parts.train, self.config
        if self.windows is not None:
            windows = self.windows.shifted(generator)
            return windows[torch.randperm(len(windows), generator=generator)]
        if config.shuffle != "block":
            return train[torch.randperm(len(train), generator=generator)]
        order = block_order(train, self.dataset.train.starts, config.shuffle_block, config.shuffle_window, generator)
        # From here on, each step announces what comes a window later.
        start = self.step % self.steps_per_epoch * len(order) // self.steps_per_epoch
        self.reader.expect(self.dataset.train, order[start : start + config.shuffle_window])
        return order

    def _take_step(self, index: Tensor) -> None:
        config, progress = self.config, self.step / self.steps
        part = self.group.shard(index)
        inputs, target, asked, mask = self._batch(part)
        if config.augment and len(part):
            inputs = models.augment(inputs, config.augment)
        if config.mixup:
            share = _mixup_share(config.mixup, _seed(config.seed, "mixup", self.step))
            inputs, target = _mixup(inputs, target, share, len(self.dataset.classes))
        losses.reschedule(self.criterion, config, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, progress) * group["factor"]
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.amp):
            scores = self.replica(inputs, **asked)
            loss: Any = self._loss(scores, mask, target) if len(target) else self._no_loss(scores)
        whole = len(target) if self.group.world_size == 1 else self._count(index)
        (loss * self.group.shard_weight(len(target), whole)).backward()
        if config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(target)
        self.loss_count += whole
        self.step += 1

    def _batch(self, part: Tensor) -> "_Batch":
        """What a step of this rank shows to the model."""
        train = self.dataset.train
        asked: dict[str, Any] = {} if self.head is None else {"scored": False}
        if self.windows is None:
            inputs, target = self.reader(train, part), train.labels[part]
            places = train.places[part] if isinstance(train, SequenceSplit) else part
        else:
            tokens, labels, places = self.windows.take(part)
            where = labels != IGNORED
            inputs, target, places = tokens.to(self.device), labels[where], places[where]
            asked["where"] = where.to(self.device)

        def mask(scores: Tensor) -> Tensor:
            if self.config.mask_seen and isinstance(train, SequenceSplit):
                return batches.mask_seen(scores, train, places, target)
            return scores

        return _Batch(inputs, target.to(self.device), asked, mask)

    def _count(self, index: Tensor) -> int:
        """How many targets a batch has."""
        return len(index) if self.windows is None else int((self.windows.take(index)[1] != IGNORED).sum())

    def _loss(self, scores: Tensor, mask: Callable[[Tensor], Tensor], target: Tensor) -> Tensor:
        try:
            loss: Tensor = self.criterion(mask(scores), target) if self.head is None else self.head(scores, target)
        except ValueError:  # a loss may refuse what is not a number before it comes to one itself
            if bool(scores.isfinite().all()):
                raise
            raise self._diverged("the scores are not finite") from None
        return loss

    def _no_loss(self, scores: Tensor) -> Tensor:
        """0, of all parameters: a rank without targets takes part in the averaging all the same."""
        return scores.sum() if self.head is None else self.head.linear(scores).sum()

    def _diverged(self, sign: str) -> Diverged:
        advice = f"lower the learning rate ({self.config.learning_rate:g}) or raise the temperature."
        return Diverged(f"{sign} at step {self.step}: {advice}")

    def _gave_up(self) -> bool:
        """Whether no metric that counts has improved for as long as the config's patience."""
        if not self.config.patience or not self.best:
            return False
        return self.evaluations - max(best["evaluation"] for best in self.best.values()) >= self.config.patience

    # Evaluation ------------------------------------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, Any]:
        train_loss = float(self.group.all_reduce(self.loss_sum)) / max(self.loss_count, 1)
        self.loss_sum.zero_()
        self.loss_count = 0
        validation = self._examine(self.dataset.train, self.parts.validation).accuracies(self.ks, self.config.ks)
        line = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "train_loss": train_loss,
            "validation": validation,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "temperature": _current_temperature(self.criterion),
            "seconds": round(self.seconds, 3),
        }
        self.group.run_on_all(lambda: self._note(line))
        return line

    def _note(self, line: dict[str, Any]) -> None:
        """Write an evaluation down, and keep the weights if it is the best so far."""
        if not math.isfinite(line["train_loss"]):
            raise self._diverged(f"the training loss is {line['train_loss']}")
        validation = line["validation"]
        if self.group.first:
            self.run.add_metrics(line)
        self.evaluations += 1
        for metric in self._counting_metrics(validation):
            best, value = self.best.get(metric), validation[metric]
            if best is None or self.config.select == "last" or value > best["value"]:
                improved = self.evaluations
            # On few examples many evaluations tie, and the first of them is of a model that has hardly been trained.
            elif value == best["value"] and validation["mrr"] >= best["validation"]["mrr"]:
                improved = best["evaluation"]  # a tie is no improvement: patience goes on counting
            else:
                continue
            self.best[metric] = {"value": value, "epoch": line["epoch"], "evaluation": improved, "validation": validation}
            self.unsaved[metric] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def _counting_metrics(self, validation: dict[str, float]) -> list[str]:
        """The metrics that have a best evaluation of their own."""
        if self.config.select == "each":
            return [metric for metric in validation if metric.startswith("top")]
        return ["mean" if self.config.select == "last" else self.config.select]

    def _examine(self, examples: Split, index: Tensor, guesses: int = 0) -> Examined:
        return examine(self.model, examples, index, self.reader, guesses, self.config.amp, self.group)

    # Saving and going on ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        # The sum of each rank, not the total: it would be rounded in another place than without a restart.
        started = time.monotonic()
        loss_sums = self.group.all_gather(self.loss_sum.cpu())
        self.group.run_on_all(lambda: self._write_checkpoint(torch.stack(loss_sums)) if self.group.first else None)
        self.unsaved.clear()
        self.saved_at = time.monotonic()
        self.pause = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (self.saved_at - started))

    def _write_checkpoint(self, loss_sums: Tensor) -> None:
        """First the best weights, then the checkpoint: a kill in between leaves best weights that the rest of the run makes
        again, bit for bit."""
        for metric, weights in self.unsaved.items():
            self.run.save_tensors(f"best-{metric}.safetensors", weights, {})
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{number}/{name}"] = value
        tensors["loss_sum"] = loss_sums
        state = {
            "step": self.step,
            "evaluations": self.evaluations,
            "best": self.best,
            "loss_count": self.loss_count,
            "seconds": self.seconds,
            "data": self.dataset.fingerprint,
            "shuffle": batches.shuffle_of(self.config),
        }
        self.run.save_tensors("checkpoint.safetensors", tensors, state)

    def _read_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        found = self.run.load_tensors("checkpoint.safetensors")
        if found is not None and found[1]["data"] != self.dataset.fingerprint:
            raise LabError(f"{self.config.data} has changed since {self.run.folder} was begun: choose another folder.")
        self.run.keep_metrics(0 if found is None else found[1]["evaluations"])
        return found

    def _restore(self) -> None:
        found = self.group.broadcast(self._read_checkpoint)
        if found is None:
            return
        tensors, state = found
        # "auto" depends on the memory of the machine. The order that was begun is the one to go on with.
        self.config = self.config.replace(**state["shuffle"])
        self.reader = Reader(self.dataset, self.device, self.config)
        self.step, self.evaluations, self.best = state["step"], state["evaluations"], state["best"]
        self.loss_count, self.seconds = state["loss_count"], state["seconds"]
        loss_sums = tensors.pop("loss_sum")
        if len(loss_sums) == self.group.world_size:
            self.loss_sum.copy_(loss_sums[self.group.rank])
        elif self.group.first:  # there were more or fewer ranks: one takes the total
            self.loss_sum.copy_(loss_sums.sum())
        self.model.load_state_dict({name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model/")})
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, number, key = name.split("/", 2)
                moments.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})

    def _conclude(self, started: float) -> dict[str, Any]:
        """Measure the chosen weights on the test examples, once, if the config says so."""
        test: dict[str, float] = {}
        chosen: dict[str, Tensor] = {}
        each: dict[str, Tensor] = {}
        guesses = min(GUESSES, len(self.dataset.classes))
        for metric in self.best:
            weights = self.unsaved.get(metric) or self.group.broadcast(partial(self._best_weights, metric))
            chosen = chosen or weights
            if not self.config.tested:
                continue
            self.model.load_state_dict(weights)
            examined = self._examine(self.parts.test, self.parts.test_index, guesses)
            measured = examined.accuracies(self.ks, self.config.ks)
            if self.config.select == "each":
                test[metric] = measured[metric]
            else:
                test = measured
                each = {"ranks": examined.ranks, "guesses": examined.guesses}
                if self.parts.test.groups is not None:
                    each["groups"] = self.parts.test.groups[self.parts.test_index]
        # Wrong labels would promise another coverage than that of the right ones.
        calibration = self._calibrate(chosen) if self.config.tested and not self.config.label_noise else None
        self.seconds = time.perf_counter() - started
        validation = (
            {metric: best["value"] for metric, best in self.best.items()}
            if self.config.select == "each"
            else next(iter(self.best.values()))["validation"]
        )
        result = {
            # What "auto" came to stands beside it: a machine with other memory makes no other config.
            "config": self.config.replace(**self.given_shuffle).to_json(),
            "shuffle": batches.shuffle_of(self.config),
            "data": batches.describe(self.dataset, self.parts, self.config),
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "epochs": self.step / self.steps_per_epoch,
            "seconds": round(self.seconds, 3),
            "selected": {metric: best["epoch"] for metric, best in self.best.items()},
            "validation": validation,
            "test": test,
        }

        def finish() -> dict[str, Any]:
            plan = dataclasses.replace(models.Plan.of(self.config, self.dataset), calibration=calibration)
            self.run.finish(result, chosen, plan.to_json(), each)
            return self.run.result() or {}

        return self.group.broadcast(finish)

    def _calibrate(self, weights: dict[str, Tensor]) -> Calibration:
        """What `anyk predict --coverage` needs, from the validation examples."""
        self.model.load_state_dict(weights)
        found = conformity(self.model, self.dataset.train, self.parts.validation, self.reader, self.group)
        chosen = self.config.select != "last" or bool(self.config.patience)
        groups = self.dataset.train.groups
        held = None if groups is None else groups[self.parts.validation]
        return Calibration.of(found, ("the epoch",) if chosen else (), held)

    def _best_weights(self, metric: str) -> dict[str, Tensor]:
        saved = self.run.load_tensors(f"best-{metric}.safetensors")
        if saved is None:
            raise LabError(f"best-{metric}.safetensors is gone: delete {self.run.folder} and run again.")
        return saved[0]


def learning_rate(config: Config, progress: float) -> float:
    """The learning rate after this fraction of the run."""
    if config.schedule == "constant":
        return config.learning_rate
    warm = 0.3 if config.schedule == "onecycle" else 0.0
    if progress < warm:
        low = 0.04
        return config.learning_rate * (low + (1 - low) * (1 - math.cos(math.pi * progress / warm)) / 2)
    return config.learning_rate * (1 + math.cos(math.pi * (progress - warm) / (1 - warm))) / 2


def _mixup_share(alpha: float, seed: int) -> float:
    """A Beta variable, the same for the whole batch, from two Gamma variables."""
    generator = torch.Generator().manual_seed(seed)
    first, second = _compat.gamma(alpha, 2, generator)
    return first / max(first + second, 1e-300)


def _mixup(inputs: Tensor, target: Tensor, share: float, classes: int) -> tuple[Tensor, Tensor]:
    """Mix each example with another of the batch (of this rank's part of it); the targets become probabilities."""
    other = torch.randperm(len(inputs), device=inputs.device)
    probabilities = functional.one_hot(target, classes).to(inputs.dtype)
    return torch.lerp(inputs[other], inputs, share), torch.lerp(probabilities[other], probabilities, share)


def _optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    weights, rate, decay = models.parameter_groups(model, config), config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(weights, rate, momentum=0.9, weight_decay=decay)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(weights, rate, weight_decay=decay, fused=find_device(config.device).type in ("cpu", "cuda"))


def _current_temperature(criterion: nn.Module) -> float | None:
    temperature = getattr(getattr(criterion, "operator", criterion), "temperature", None)
    return temperature if isinstance(temperature, (float, int)) else None


def _seed(*parts: int | str) -> int:
    """A number for torch's generators that depends on all the parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")
