"""The training loop: batches, accumulation, backward, clip, optimizer, average, log, validation,
checkpoints.

"Between two steps" is one place here, `Training.between_steps`: a training is saved there, and
stopped where SIGTERM, SIGUSR1 or Ctrl-C asks for it. A step that is not finite is undone, and the
last of too many followed to where it begins. All randomness is a function of (seed, epoch, batch,
process): the loop keeps no random state.
"""

from __future__ import annotations

import copy
import math
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dgt.data.image_io import BrokenImage, BrokenImages
from dgt.data.loader import STOP_SIGNALS, Key
from dgt.layers import renormalize_centroids
from dgt.models.annealing import TopKAnnealing
from dgt.runs.checkpoints import BEST
from dgt.runs.recipe import Recipe
from dgt.tasks import TASKS, Losses
from dgt.tasks.base import LoadedRun
from dgt.tasks.optim import batch_scale, build_schedule
from dgt.tasks.parts import hold_still, trained_centroids
from dgt.training.evaluation import measure, to_precision
from dgt.training.log import Report
from dgt.training.nonfinite import all_finite, nan_debug, snapshot_state
from dgt.training.state import Checkpoints, TrainingState
from dgt.utils.distributed import gather_objects
from dgt.utils.errors import LOGGER, NonFiniteInput, UserError
from dgt.utils.seeding import reseed

Draw = Callable[[LoadedRun, list[Tensor]], dict[str, NDArray[np.uint8]]]
"""A copy of the network, on the CPU, and uint8 images (3, H, W) as it gets them -> images (H, W, 3)
by name.
"""

DRAWN_IMAGES = 4
ADVICE = "lower optimizer.lr or set optimizer.clip_grad"
LOG_EVERY = 20  # steps between two rows of numbers


class Preempted(SystemExit):
    """The training was asked to stop, and its state is saved; ends the process if it is not caught.

    The exit status is 0 (130 after Ctrl-C), or 1 where the state could not be written.
    """


class Batch:
    """Images and targets of one batch.

    Opaque to Fabric, which would round their floats to bfloat16, boxes too.
    """

    def __init__(self, images: Any, targets: Any) -> None:
        self.images, self.targets = images, targets


class Objective(nn.Module):
    """The network with its task's losses: batch -> losses, the one forward that DDP and FSDP2 wrap."""

    def __init__(self, network: nn.Module, losses: Callable[..., Losses]) -> None:
        super().__init__()
        self.network, self.losses = network, losses

    def forward(self, batch: Batch) -> Losses:
        """Losses of one batch; "loss" is what is minimized."""
        try:
            return self.losses(self.network, batch.images, batch.targets)
        except NonFiniteInput:
            # of the attention: a loss of NaN, of all weights, as DDP waits for each
            weights = [weight for weight in self.network.parameters() if weight.requires_grad]
            return {
                "loss": torch.stack(
                    [weight.flatten()[:1].sum() * torch.nan for weight in weights]
                ).sum()
            }


class Training:
    """A running training, starting from `state`; `draw` makes images for TensorBoard.

    UserError where an epoch has fewer batches than a step accumulates, or none.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: TrainingState,
        checkpoints: Checkpoints,
        report: Report,
        draw: Draw | None = None,
    ) -> None:
        self.recipe = recipe
        self.state = state
        self.checkpoints = checkpoints
        self.report = report
        self.draw = draw
        self.task = TASKS[recipe.task]
        self.settings = recipe.trainer
        self.fabric = state.fabric
        self.data = state.data
        self.progress = state.progress
        self.loader = self.data.train_dataloader()
        self.val_loader = self.data.val_dataloader()
        if self.settings.accumulate > len(self.loader):
            raise UserError(
                f"trainer.accumulate must be at most {len(self.loader)}, the batches of an epoch, got "
                f"{self.settings.accumulate}: no step goes on into the next epoch"
            )
        self.steps_per_epoch = math.ceil(len(self.loader) / self.settings.accumulate)
        self.steps = recipe.schedule.steps or recipe.schedule.epochs * self.steps_per_epoch
        self.epochs = math.ceil(self.steps / self.steps_per_epoch)
        # finite at the start: a step that changes that is undone
        self.statistics = [buffer for buffer in state.network.buffers() if all_finite([buffer])]
        self.moving_centroids = (
            trained_centroids(state.average.module, state.frozen) if state.average else []
        )
        self.logged_remarks: set[str] = set()
        self.stops: list[signal.Signals] = []
        self.in_step = True  # whether the state is not one between two steps
        self.schedule = build_schedule(
            state.optimizer.optimizer,
            self.steps,
            recipe.optimizer,
            recipe.schedule,
            batch_scale(recipe.optimizer, state.global_batch),
        )
        if self.progress.step:
            # Building it has set the rates of the start. Where no step is left, those of the last stay.
            self.schedule.step_update(self.progress.step - 1)
        self.annealing = TopKAnnealing(
            state.network, recipe.model.top_k_schedule, recipe.model.top_k_start
        )

    def run(self) -> None:
        """Train to the end; Preempted where a signal asked to stop, FloatingPointError as `skip`
        and `end_epoch`.
        """
        self.report.begin(self.progress, self.steps, self.epochs, self.state.global_batch)
        self.train_mode()
        self.first_whole_epoch = self.progress.epoch + (self.progress.batch > 0)
        here = threading.current_thread() is threading.main_thread()  # which alone signals reach
        usual = {number: signal.signal(number, self.stop) for number in STOP_SIGNALS if here}
        try:
            epochs = range(self.progress.epoch, self.epochs)
            if self.progress.step >= self.steps:  # with fewer images there may be no step left
                epochs = epochs[-1:]
            for epoch in epochs:
                self.train_epoch(epoch)
                self.end_epoch(epoch + 1)
        except Exception as error:
            if not (
                self.in_step or self.fabric.world_size > 1 or isinstance(error, FloatingPointError)
            ):
                # not `save`, which raises again for too many broken images
                self.checkpoints.save(self.state)
            raise
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)
            self.loader.close()
            self.val_loader.close()

    def train_mode(self) -> None:
        """Put the network into training mode, but for its frozen parts."""
        self.state.objective.train()
        hold_still(self.state.network, self.state.frozen)

    def stop(self, number: int, _: Any) -> None:
        """Record that a signal asks this process to stop.

        A second Ctrl-C interrupts at once.
        """
        if number == signal.SIGINT and signal.SIGINT in self.stops:
            raise KeyboardInterrupt
        self.stops.append(signal.Signals(number))
        hint = " (Ctrl-C again to stop now)" if number == signal.SIGINT else ""
        with suppress(RuntimeError):  # of a stream that was being written to when the signal came
            LOGGER.warning(f"{self.stops[-1].name}: saving after this step{hint}")

    def train_epoch(self, epoch: int) -> None:
        """All remaining steps of an epoch."""
        self.report.begin_epoch()
        self.loader.device = self.fabric.device
        self.loader.load_state_dict({"epoch": epoch, "batch": self.progress.batch})
        batches = (
            Batch(to_precision(self.fabric, images), targets) for images, targets in self.loader
        )
        while self.progress.step < self.steps and (
            of_one_step := list(islice(batches, self.settings.accumulate))
        ):
            self.train_step(of_one_step)
            self.between_steps(self.checkpoints.is_due(self.progress.step))

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Take a step: forward, backward, clip, optimizer, average.

        If anything is not finite, the step is undone, skipped and counted.
        """
        optimizer, network, progress = self.state.optimizer, self.state.network, self.progress
        self.annealing.progress = progress.step / self.steps
        self.schedule.step_update(progress.step)
        undo, sums = snapshot_state(network), self.state.loss_sums.clone()
        try:
            losses = self.backward(batches)
        except Exception:
            undo()
            self.state.loss_sums = sums
            raise
        self.in_step = True
        # the one that a scaler steps
        self.fabric.strategy.precision.unscale_gradients(optimizer.optimizer)
        watched = [
            losses["loss"],
            *(weight.grad for weight in network.parameters()),
            *self.statistics,
        ]
        progress.batch += len(batches)
        progress.step += 1
        if self.settings.max_skipped is None or not self.any_process(not all_finite(watched)):
            if (limit := self.recipe.optimizer.clip_grad) is not None:
                nn.utils.clip_grad_norm_(network.parameters(), limit)
            optimizer.step()
            if self.state.average is not None:
                self.state.average.update(network, progress.step - progress.skipped)
                for layer in self.moving_centroids:
                    renormalize_centroids(layer)
            progress.skipped_in_a_row = 0
        else:
            undo()
            self.skip(batches, losses)
        optimizer.zero_grad()
        self.in_step = False
        self.report.step(losses, self.rate, every=min(LOG_EVERY, self.steps_per_epoch))

    @property
    def rate(self) -> float:
        """The highest learning rate of the parts of the network."""
        return float(max(group["lr"] for group in self.state.optimizer.optimizer.param_groups))

    def backward(self, batches: Sequence[Batch]) -> Losses:
        """Add up the gradients of a step's batches; returns the means of their losses.

        A mean over all that the losses of the batches, of all processes, are means over: images,
        or labeled pixels, which one batch may have more of than another.
        """
        parts: list[Losses] = []
        weigh, network = TASKS[self.recipe.task].weight, self.state.network
        weights = torch.stack([weigh(network, each.images, each.targets) for each in batches])
        total = weights.sum()
        if self.fabric.world_size > 1:  # whose gradients are averaged
            total = cast(Tensor, self.fabric.all_reduce(total, reduce_op="mean"))
        shares = weights / total
        for index, batch in enumerate(batches):
            reseed(
                "step",
                self.recipe.seed,
                self.progress.epoch,
                self.progress.batch + index,
                self.fabric.global_rank,
            )
            torch.manual_seed(torch.initial_seed())  # devices too
            with self.fabric.no_backward_sync(
                self.state.objective, enabled=index + 1 < len(batches)
            ):
                losses = self.state.objective(batch)
                self.fabric.backward(losses["loss"] * shares[index])
            parts.append({name: value.detach().float() for name, value in losses.items()})
            loss_and_one = torch.stack([parts[-1]["loss"], torch.ones_like(parts[-1]["loss"])])
            self.state.loss_sums += torch.where(
                loss_and_one[0].isfinite(), loss_and_one * weights[index], 0.0
            )
        common = [name for name in parts[0] if all(name in each for each in parts)]
        return {
            name: torch.stack([each[name] for each in parts]) @ (weights / weights.sum())
            for name in common
        }

    def skip(self, batches: Sequence[Batch], losses: Losses) -> None:
        """Count a non-finite step, and log it.

        Raises:
            FloatingPointError: there are too many in a row, or a whole epoch's.
        """
        progress, finite_loss = self.progress, math.isfinite(losses["loss"])
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        progress.skipped += 1
        if scaler is None or scaler.get_scale() <= 1 or not finite_loss:
            progress.skipped_in_a_row += 1
        if scaler is not None:
            scaler.update()  # lowers the scale
        place = f"step {progress.step} (epoch {progress.epoch + 1}, batch {progress.batch})"
        if self.fabric.is_global_zero:
            kind = "gradient, or a running statistic," if finite_loss else "loss"
            LOGGER.warning(f"{place} was skipped: its {kind} is not finite")
        whole_epoch = max(1, len(self.loader) // self.settings.accumulate - 1)
        if progress.skipped_in_a_row > min(self.settings.max_skipped or 0, whole_epoch):
            traced = (
                nan_debug(self.state.objective, self.state.network, batch) for batch in batches
            )
            first = next(filter(None, traced), "not reproduced when the last batch was run again")
            many = f"{progress.skipped_in_a_row} steps in a row had a non-finite loss or gradient"
            raise FloatingPointError(
                f"training diverged: {many}, up to {place}; {ADVICE}. First non-finite: {first}"
            )

    def any_process(self, decision: bool) -> bool:
        """Whether the decision is true in any process; all processes must call this at the same point."""
        votes = torch.tensor(float(decision), device=self.fabric.device)
        return (
            bool(self.fabric.all_reduce(votes, reduce_op="sum"))
            if self.fabric.world_size > 1
            else decision
        )

    def between_steps(self, due: bool) -> None:
        """Save a checkpoint when one is due; if a signal asked any process to stop, save and raise
        Preempted.
        """
        if not self.any_process(due or bool(self.stops)):
            return
        self.save()
        if not self.any_process(bool(self.stops)):
            return
        failed = self.any_process(self.checkpoints.failure is not None)
        by = self.stops[-1].name if self.stops else "another process"
        kept = "its state could NOT be saved" if failed else f"saved in {self.checkpoints.folder}"
        place = f"step {self.progress.step} (epoch {min(self.progress.epoch + 1, self.epochs)})"
        LOGGER.info(
            f"stopped by {by} after {place}, {kept}; use `--resume auto` to resume from the last checkpoint"
        )
        if failed:
            raise Preempted(1)
        raise Preempted(130 if signal.SIGINT in self.stops else 0)

    def save(self) -> None:
        """Write a checkpoint of the current state; all processes must call it."""
        join_broken_images(self.data.broken_images)
        self.checkpoints.save(self.state)

    def end_epoch(self, epoch: int) -> None:
        """Validate where it is time, write the epoch's line, save, and stop as `between_steps`.

        Raises FloatingPointError where none of the epoch's images, in any process, had a finite
        loss, or the weights are not finite.
        """
        loss = self._epoch_loss(epoch)
        if self.any_process(not all_finite(self.state.network.parameters())):
            raise FloatingPointError(
                f"training diverged: NaN or infinity in the weights after epoch {epoch}; {ADVICE}"
            )
        metrics: dict[str, float] = {}
        if epoch == self.epochs or epoch % self.settings.check_val_every == 0:
            if self.draw is not None and self._pictures_are_due(epoch):
                self.show_images(self.draw)
            metrics = self.validate()
            self.progress.metrics = metrics
        join_broken_images(self.data.broken_images)
        remarks = self.data.remarks() if epoch == self.first_whole_epoch + 1 else []
        for remark in remarks if self.fabric.is_global_zero else ():
            LOGGER.warning(remark)
        self.progress.epoch = epoch
        self.progress.batch = 0
        self.state.loss_sums.zero_()
        self.report.epoch(loss, self.rate, metrics, self.task.summary(metrics))
        self._keep_best(metrics)
        if epoch == self.epochs:
            self.save()
        else:
            self.between_steps(self.checkpoints.is_due(self.progress.step, epoch))

    def _pictures_are_due(self, epoch: int) -> bool:
        """Whether predictions are drawn after an epoch: the first, the last, and every n-th."""
        every = self.settings.pictures_every
        return every is not None and (epoch in (1, self.epochs) or epoch % every == 0)

    def _epoch_loss(self, epoch: int) -> float | None:
        """The mean loss of the epoch's images, over all processes; None for an epoch without a step,
        as with fewer images than before a resumption.

        FloatingPointError where it is not finite.
        """
        if self.progress.batch == 0:
            return None
        total, count = cast(
            Tensor, self.fabric.all_reduce(self.state.loss_sums.clone(), reduce_op="sum")
        ).tolist()
        loss = total / count if count else math.nan
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"training diverged: the loss became {loss} in epoch {epoch}; {ADVICE}"
            )
        return float(loss)

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Write the checkpoint of the best validation, if this was one and is the best so far."""
        score = metrics.get(next(iter(self.task.headline)))
        if score is None:
            return
        before = self.progress.best
        if before is None or score > before:
            self.progress.best = score
            self.checkpoints.write(self.state, self.checkpoints.folder / BEST)
            if self.any_process(self.checkpoints.failure is not None):
                self.progress.best = before  # what lies there: the next that is better is written

    def validate(self) -> dict[str, float]:
        """Measure the network, or its average, on the validation images.

        One process stops there as `between_steps`.
        """

        def between_batches() -> None:
            self.report.write_status("validating")
            if self.fabric.world_size == 1 and self.stops:
                self.between_steps(due=False)

        metrics = self.task.metrics(self.data)
        measure(self.fabric, metrics, self.state.evaluated, self.val_loader, between_batches)
        self.train_mode()
        values = metrics.compute()
        for remark in metrics.remarks if self.fabric.is_global_zero else ():
            if remark not in self.logged_remarks:  # by an earlier validation
                LOGGER.warning(remark)
        self.logged_remarks.update(metrics.remarks)
        return values

    def show_images(self, draw: Draw) -> None:
        """Draw the first validation images in the first process; a failure is only a warning."""
        if self.report.folder is None or self.state.sharded:
            return
        try:
            network = copy.deepcopy(self.state.evaluated).cpu().eval()
            dataset = self.data.datasets["val"]
            samples = [
                dataset[Key(0, 0, index)] for index in range(min(DRAWN_IMAGES, len(dataset)))
            ]
            images = [sample[0] for sample in samples if not isinstance(sample, BrokenImage)]
            run = LoadedRun(network, self.recipe, list(self.data.class_names), self.report.folder)
            for name, image in draw(run, images).items():
                self.report.write_image(name, image)
        except Exception as error:  # whatever a drawing library raises
            LOGGER.warning(f"the validation images were not drawn: {error!r}")


def join_broken_images(reports: dict[str, BrokenImages]) -> None:
    """Share the broken images found by any process with all; BrokenImagesError where they are too many."""
    for of_one in gather_objects({part: report.broken for part, report in reports.items()}):
        for part, report in reports.items():
            report.record(BrokenImage(*each) for each in of_one[part].items())
