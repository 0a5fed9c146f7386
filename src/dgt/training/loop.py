"""The training loop: batches, accumulation, backward, clip, optimizer, average, log, validation, checkpoints.

"Between two steps" is one place here, `Training.between_steps`: a training is saved there, and stopped where a signal
asks for it. All randomness is a function of (seed, epoch, batch, process), so that the loop keeps no random state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from dgt.tasks import TASKS, Losses
from dgt.tasks.optim import batch_scale, schedule_factor
from dgt.training.evaluate import measure, to_precision
from dgt.training.log import MetricsLog, ProgressBar, StatusFile, Throughput, duration, memory_in_use
from dgt.training.nonfinite import BufferGuard, all_finite, first_not_finite, write_report
from dgt.training.objective import Batch
from dgt.training.parallel import any_process, join_ledgers
from dgt.training.pictures import Draw, draw_validation
from dgt.training.preemption import Preempted, PreemptionHandler
from dgt.training.recipe import Recipe
from dgt.training.state import Checkpoints, TrainingState
from dgt.utils.errors import LOGGER
from dgt.utils.seeding import reseed


@dataclass
class Training:
    """One training under way.

    Args:
        recipe: the complete recipe.
        folder: the run's folder.
        fabric: launched.
        state: where it begins or goes on.
        data: the data module, set up.
        checkpoints: what writes them.
        status: the run's.
        draw: makes images for TensorBoard, or None.
    """

    recipe: Recipe
    folder: Path
    fabric: Fabric
    state: TrainingState
    data: Any
    checkpoints: Checkpoints
    status: StatusFile
    draw: Draw | None = None

    def __post_init__(self) -> None:
        """Build what follows from the arguments: loaders, lengths, logs."""
        self.task, self.settings, self.progress = TASKS[self.recipe.task], self.recipe.trainer, self.state.progress
        self.loader, self.val_loader = self.data.train_dataloader(), self.data.val_dataloader()
        self.steps_per_epoch = math.ceil(len(self.loader) / self.settings.accumulate)
        schedule = self.recipe.schedule
        self.steps = schedule.steps or schedule.epochs * self.steps_per_epoch
        self.epochs = math.ceil(self.steps / self.steps_per_epoch)
        self.factor = schedule_factor(self.steps, self.recipe.optimizer, schedule)
        global_batch = self.data.batch_size * self.fabric.world_size * self.settings.accumulate
        self.highest_rate = self.recipe.optimizer.lr * batch_scale(self.recipe.optimizer, global_batch)
        self.guard = BufferGuard(self.state.network)
        self.throughput = Throughput(self.data.batch_size * self.fabric.world_size, self.progress.seconds)
        place = self.folder, self.progress.step, self.progress.epoch
        self.metrics_log = MetricsLog(*place) if self.fabric.is_global_zero else None
        self.status.facts = self.facts
        self.bar = ProgressBar(self.steps, self.fabric.is_global_zero)
        self.stop = PreemptionHandler()
        self.loss: float | None = None
        self.in_optimizer = False

    def run(self) -> None:
        """Train to the end.

        Raises:
            Preempted: a signal asked to stop, and all is saved.
            FloatingPointError: too many steps in a row were not finite.
        """
        try:
            with self.stop, self.bar:
                self.status.write("training")
                self.state.objective.train()
                for epoch in range(self.progress.epoch, self.epochs):
                    self.train_epoch(epoch)
                    self.end_epoch(epoch)
        except Exception as error:
            self.rescue(error)
            raise
        finally:
            if self.metrics_log is not None:
                self.metrics_log.close()

    def train_epoch(self, epoch: int) -> None:
        """All steps of an epoch that are still to do."""
        self.epoch_start = time.perf_counter()
        self.loader.device = self.fabric.device
        self.loader.load_state_dict({"epoch": epoch, "batch": self.progress.batch})
        batches = map(self.to_device, self.loader)
        for step_batches in islice(_groups(batches, self.settings.accumulate), self.steps - self.progress.step):
            self.train_step(step_batches)
            if self.progress.batch < len(self.loader) and self.progress.step < self.steps:
                self.between_steps()  # after an epoch's last step comes its validation

    def to_device(self, batch: tuple[Any, Any]) -> Batch:
        """A batch where the network is, the images in its precision."""
        images, targets = self.fabric.to_device(batch)
        return Batch(to_precision(self.fabric, images), targets)

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Forward, backward, clip, optimizer, average; or, where something is not finite, skip and count."""
        self.guard.begin()
        losses = self.backward(batches)
        optimizer, precision = self.state.optimizer, self.fabric.strategy.precision
        for group in optimizer.param_groups:
            group["lr"] = self.highest_rate * self.factor(self.progress.step)
        precision.unscale_gradients(optimizer)
        finite = self.is_finite(losses)
        self.in_optimizer = True
        if finite:
            if (limit := self.recipe.optimizer.clip_grad) is not None:
                weights = [weight for group in optimizer.param_groups for weight in group["params"]]
                torch.nn.utils.clip_grad_norm_(weights, limit)
            optimizer.step()
            if self.state.average is not None:
                self.state.average.update(self.state.network)
        self.progress.batch += len(batches)
        self.progress.step += 1
        self.progress.skipped_in_a_row *= not finite
        if not finite:
            self.skip(batches, losses)
        optimizer.zero_grad()
        self.guard.end()
        self.in_optimizer = False
        self.throughput.count(len(batches))
        self.log_step(losses, len(batches))

    def backward(self, batches: Sequence[Batch]) -> list[Losses]:
        """Add up the gradients of a step's batches; returns their losses."""
        found = []
        for index, batch in enumerate(batches):
            reseed("step", self.recipe.seed, self.progress.epoch, self.progress.batch + index, self.fabric.global_rank)
            torch.manual_seed(torch.initial_seed())  # devices too
            with self.fabric.no_backward_sync(self.state.objective, enabled=index + 1 < len(batches)):
                losses = self.state.objective(batch)
                self.fabric.backward(losses["loss"] / self.settings.accumulate)
            found.append({name: value.detach() for name, value in losses.items()})
            if_finite = losses["loss"].detach().isfinite() * len(batch.images)
            value = losses["loss"].detach().float().nan_to_num(0.0, 0.0, 0.0)
            self.state.loss_sums += torch.stack([value, torch.ones_like(value)]) * if_finite
        return found

    def is_finite(self, losses: Sequence[Losses]) -> bool:
        """Whether a step may be taken: losses, gradients and BatchNorm's statistics are finite, in all processes."""
        if self.settings.max_skipped is None:
            return True
        gradients = [each.grad for each in self.state.network.parameters() if each.grad is not None]
        finite = all_finite([*(each["loss"] for each in losses), *gradients, *self.guard.statistics])
        return not any_process(self.fabric, not finite)

    def skip(self, batches: Sequence[Batch], losses: Sequence[Losses]) -> None:
        """Undo what the forward of a step that is not finite changed, tell of it, and stop where there are too many.

        Raises:
            FloatingPointError: too many in a row, or a whole epoch of them.
        """
        progress, scaler = self.progress, getattr(self.fabric.strategy.precision, "scaler", None)
        values = [float(each["loss"]) for each in losses]
        progress.skipped += 1
        if scaler is None or scaler.get_scale() <= 1 or not all(map(math.isfinite, values)):
            progress.skipped_in_a_row += 1
        if scaler is not None:
            scaler.update()  # lowers the scale
        self.guard.rewind()
        if self.fabric.is_global_zero:
            kind = "gradient, or a running statistic," if all(map(math.isfinite, values)) else "loss"
            place = f"epoch {progress.epoch + 1}, batch {progress.batch}"
            LOGGER.warning(f"step {progress.step} ({place}) was skipped, its {kind} is not finite")
        whole_epoch = max(1, len(self.loader) // self.settings.accumulate - 1)
        if progress.skipped_in_a_row > min(self.settings.max_skipped or 0, whole_epoch):
            self.give_up(batches, values)

    def give_up(self, batches: Sequence[Batch], losses: Sequence[float]) -> None:
        """Find where it begins, write the report, and stop.

        Raises:
            FloatingPointError: always.
        """
        self.guard.begin()
        found = (first_not_finite(self.state.objective, self.state.network, batch) for batch in batches)
        blamed = next((each for each in found if each is not None), "nothing in the last batch, run again")
        self.guard.rewind()
        where = {"epoch": self.progress.epoch, "step": self.progress.step, "losses": list(losses), "first": blamed}
        written = write_report(self.folder, where, batches)
        raise FloatingPointError(
            f"{self.progress.skipped_in_a_row} steps in a row had a loss or gradient that is not finite, the training "
            f"diverged: lower optimizer.lr or set optimizer.clip_grad. The first not finite: {blamed}. "
            f"The batch is in {written}"
        )

    def between_steps(self) -> None:
        """Save where it is time, and stop where a signal asked for it.

        Raises:
            Preempted: then.
        """
        if any_process(self.fabric, bool(self.stop) or self.checkpoints.is_due(self.progress.step)):
            self.save()
            self.stop_if_asked()

    def end_epoch(self, epoch: int) -> None:
        """Validate where it is time, write the epoch's line, save, and stop where a signal asked for it.

        Raises:
            Preempted: then.
        """
        last, number = epoch + 1 == self.epochs, epoch + 1
        join_ledgers(self.data.ledgers)
        validated = last or number % self.settings.check_val_every == 0
        if validated:
            if any_process(self.fabric, bool(self.stop)):
                self.save()
                self.stop_if_asked()
            self.progress.metrics = self.validate(number)
            join_ledgers(self.data.ledgers)
        loss = self.mean_loss()
        self.progress.epoch, self.progress.batch = number, 0
        self.state.loss_sums.zero_()
        self.log_epoch(loss, validated)
        if validated:
            self.keep_best()
        due = self.checkpoints.is_due(self.progress.step, number) or bool(self.stop)
        if any_process(self.fabric, last or due):
            self.save()
            if not last:
                self.stop_if_asked()

    def validate(self, epoch: int) -> dict[str, float]:
        """Measure the network, or its average, on the validation images.

        Raises:
            Preempted: a signal asked to stop; several processes stop at the end.
        """
        every = self.settings.pictures_every
        if self.draw is not None and every is not None and (epoch in (1, self.epochs) or epoch % every == 0):
            self.show_images()

        def stop() -> None:
            if self.status.is_due():
                self.status.write("validating")
            if self.stop and self.fabric.world_size == 1:
                self.save()
                self.stop_if_asked()

        metrics = self.task.metrics(self.data)
        measure(self.fabric, metrics, self.state.evaluated, self.val_loader, stop)
        self.state.objective.train()
        return metrics.compute()

    def keep_best(self) -> None:
        """Save the checkpoint of the best validation."""
        score = self.progress.metrics[next(iter(self.task.headline))]
        if self.progress.best is None or score > self.progress.best:
            self.progress.best = score
            self.checkpoints.write(self.state, self.folder / "checkpoints" / "best.ckpt")

    def save(self) -> None:
        """Write a checkpoint of here; a matter of all processes."""
        join_ledgers(self.data.ledgers)
        self.progress.seconds = self.throughput.seconds
        self.checkpoints.save(self.state)

    def stop_if_asked(self) -> None:
        """Stop, in all processes, where one was asked to; what is here is saved.

        Raises:
            Preempted: then.
        """
        if not any_process(self.fabric, bool(self.stop)):
            return
        failed = any_process(self.fabric, self.checkpoints.failure is not None)
        place = f"after step {self.progress.step} (epoch {min(self.progress.epoch + 1, self.epochs)})"
        kept = "its state could NOT be saved" if failed else f"saved in {self.checkpoints.folder}"
        LOGGER.info(f"stopped by {self.stop.name} {place}, {kept}; `--resume auto` goes on from the last checkpoint")
        raise Preempted(1 if failed else self.stop.exit_status)

    def rescue(self, error: Exception) -> None:
        """Save what an error in the middle of a step or a validation leaves whole, if this is the only process."""
        broken = isinstance(error, FloatingPointError) or self.in_optimizer or self.progress.step == 0
        if not broken and self.fabric.world_size == 1:
            self.guard.rewind()
            self.state.optimizer.zero_grad()
            self.save()

    def show_images(self) -> None:
        """Draw from the first process; a drawing that fails costs a warning, not the training."""
        if self.metrics_log is None or self.checkpoints.sharded or self.draw is None:
            return
        try:
            images = draw_validation(self.draw, self.state.evaluated, self.recipe, self.data, self.folder)
        except Exception as error:  # whatever a drawing library raises: the training is worth more than its images
            LOGGER.warning(f"no images were drawn: {error!r}")
            return
        for name, image in images.items():
            self.metrics_log.add_image(name, image, self.progress.step)

    def mean_loss(self) -> float:
        """Of the epoch's images that had a finite loss, in all processes.

        Raises:
            FloatingPointError: there is none.
        """
        sums = cast(Tensor, self.fabric.all_reduce(self.state.loss_sums.clone(), reduce_op="sum"))
        total, count = sums.tolist()
        if not count or not math.isfinite(total):
            raise FloatingPointError(
                f"the training loss became {total / count if count else math.nan} in epoch {self.progress.epoch + 1}: "
                "lower optimizer.lr or set optimizer.clip_grad"
            )
        return total / count

    @property
    def learning_rate(self) -> float:
        """Of the last step."""
        return float(self.state.optimizer.param_groups[0]["lr"])

    def log_step(self, losses: Sequence[Losses], batches: int) -> None:
        """Write a row of numbers every few steps, and the bar and the status now and then."""
        every = min(20, self.steps_per_epoch)
        if self.metrics_log is None:
            return
        if self.progress.step % every == 0:
            means = {name: float(sum(each[name] for each in losses)) / batches for name in losses[0]}
            self.loss = means.pop("loss")
            numbers = {"train/loss_step": self.loss, **{f"train/{name}": value for name, value in means.items()}}
            self.metrics_log.write({"step": self.progress.step, **numbers, "lr": self.learning_rate})
        shown = {
            "loss": "" if self.loss is None else f"{self.loss:.4f}",
            "lr": f"{self.learning_rate:.2e}",
            "images/s": f"{self.throughput.images_per_second:.0f}",
            "memory": f"{memory_in_use() / 2**30:.1f}GiB",
            "left": duration(self.seconds_left or 0.0),
        }
        self.bar.show(self.progress.step, f"Epoch {self.progress.epoch + 1}/{self.epochs}", shown)
        if self.status.is_due():
            self.status.write("training")

    def log_epoch(self, loss: float, validated: bool) -> None:
        """Write the epoch's row of numbers and its line."""
        if self.metrics_log is None:
            return
        number, metrics = self.progress.epoch, self.progress.metrics if validated else {}
        found = {f"val/{name}": value for name, value in metrics.items()}
        self.metrics_log.write({"step": self.progress.step, "epoch": number, "train/loss_epoch": loss, **found})
        parts = [f"epoch {number}/{self.epochs}", f"loss {loss:.4f}"]
        parts += [self.task.summary(metrics)] if validated else []
        parts += [f"lr {self.learning_rate:.2e}", f"{time.perf_counter() - self.epoch_start:.1f} s"]
        parts += [f"{self.throughput.images_per_second:.0f} images/s", f"{memory_in_use() / 2**30:.2f} GiB"]
        LOGGER.info("  ".join(parts))
        self.throughput.recent.clear()
        self.status.write("training")

    @property
    def seconds_left(self) -> float | None:
        """Of the whole training, at the speed so far."""
        return self.throughput.seconds_left((self.steps - self.progress.step) * self.settings.accumulate)

    def facts(self) -> dict[str, Any]:
        """What `status.json` says of the training."""
        left = self.seconds_left
        return {
            "epoch": min(self.progress.epoch + 1, self.epochs),
            "epochs": self.epochs,
            "step": self.progress.step,
            "steps": self.steps,
            "loss": self.loss,
            "metrics": self.progress.metrics,
            "images_per_second": round(self.throughput.images_per_second, 2),
            "memory_bytes": memory_in_use(),
            "seconds": round(self.throughput.seconds, 1),
            "seconds_left": left and round(left, 1),
        }


def _groups(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """The batches of each step; the last step may have fewer."""
    while group := list(islice(batches, size)):
        yield group
