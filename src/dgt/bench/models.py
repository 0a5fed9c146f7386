"""Whole models in turns, each in a process of its own: inference or a training step, time and peak memory."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from dgt.bench.measures import QUIET_ALLOCATOR, medians, memory_peak, milliseconds, own_process
from dgt.inference import optimize_for_inference, pack_weights
from dgt.ops.checks import check_count
from dgt.utils.atomic_write import replacing
from dgt.utils.errors import UserError

BASELINE = "swin_tiny_patch4_window7_224"
MODELS = ("dgt_tiny", BASELINE, "convnext_tiny", "deit_small_patch16_224", "dgt_tiny+inference", f"{BASELINE}+packed")
FORMS = ("inference", "packed", "global", "checkpointing")
COLUMNS = {
    **{"model": "{model}", "px": "{image_size}", "ms per image": "{ms_per_image:.1f}"},
    **{"images/s": "{images_per_second:.1f}", "relative time": "**{relative_time:.2f}**", "peak MiB": "{peak_mib:.0f}"},
}
PROFILE = {"model": "{model}", "operator": "{operator}", "ms per image": "{ms_per_image:.2f}", "share": "{share:.1%}"}


class Candidate(NamedTuple):
    """A timm model, its pixels a side and the forms in which it runs, read from ``NAME[@PIXELS][+FORM...]``.

    ``inference``: :func:`dgt.optimize_for_inference`; ``packed``: of any model the weights packed as there, nothing
    else; ``global``: global attention in all stages of a DGT; ``checkpointing``: of gradients, in a training step.
    """

    text: str
    name: str
    size: int
    forms: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, image_size: int) -> "Candidate":
        """Read a candidate, without ``@PIXELS`` of ``image_size``; TypeError, ValueError for what is none."""
        match = re.fullmatch(r"([^@+]+)(?:@(\d+))?((?:\+\w+)*)", text)
        if match is None:
            raise UserError(f"models must look like NAME[@PIXELS][+FORM...], got {text!r}")
        name, size, forms = match[1], int(match[2] or image_size), tuple(match[3].split("+")[1:])
        if not timm.is_model(name):
            raise UserError(f"models must be timm models, got {name}")
        check_count("image_size", size, least=32)
        for form in forms:
            if form not in FORMS:
                raise UserError(f"the form of a model must be one of {', '.join(FORMS)}, got {form!r} in {text!r}")
            if form in ("inference", "global") and not timm.model_entrypoint(name).__module__.startswith("dgt."):
                raise UserError(f"the form {form!r} is one of DGT models, got {text!r}")
        return cls(text, name, size, forms)

    def build(self, device: str = "cpu", training: bool = False) -> nn.Module:
        """Create the model, with random weights of seed 0; UserError for a form that does not go with the mode."""
        for form in set(self.forms).intersection(("inference", "packed") if training else ("checkpointing",)):
            raise UserError(f"the form {form!r} is not one for {'training' if training else 'inference'}: {self.text}")
        options: dict[str, Any] = {"attention": ("global",) * 4} if "global" in self.forms else {}
        if timm.get_pretrained_cfg_value(self.name, "fixed_input_size"):
            options["img_size"] = self.size
        torch.manual_seed(0)
        model: Any = timm.create_model(self.name, **options).to(device).train(training)
        if "checkpointing" in self.forms:
            model.set_grad_checkpointing()
        model = optimize_for_inference(model) if "inference" in self.forms else model
        return pack_weights(model) if "packed" in self.forms else model

    def step(
        self, batch_size: int, device: str = "cpu", training: bool = False, compiled: bool = False
    ) -> Callable[[], None]:
        """Return what is timed: one inference, or one training step (forward, backward, AdamW), on random images."""
        model = self.build(device, training)
        run: Any = torch.compile(model) if compiled else model
        images = torch.randn(batch_size, 3, self.size, self.size, device=device)
        if not training:
            return torch.inference_mode()(lambda: run(images))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def train() -> None:
            optimizer.zero_grad()
            F.cross_entropy(run(images), torch.arange(batch_size, device=device)).backward()
            optimizer.step()

        return train


def bench_models(
    names: tuple[str, ...] = MODELS,
    image_size: int = 224,
    batch_size: int = 8,
    device: str = "cpu",
    rounds: int = 7,
    compiled: bool = False,
    training: bool = False,
    memory: bool = False,
) -> list[dict[str, Any]]:
    """Time the inference, or with ``training`` the training step, of whole models, perhaps ``compiled``, in turns.

    Args:
        names: as :class:`Candidate` reads them; times are relative to plain Swin-T if it is among them, else the first.
        image_size: pixels a side, where a name does not tell.
        rounds: how often the candidates take turns; medians of a step a turn are reported.
        memory: measure peaks of memory as well (Linux, CPU): weights, and whatever the step adds to them.

    Returns:
        One row a model: its name, size, times, the settings, and peak memory in MiB (None where not measured).

    Raises:
        TypeError, ValueError: for a name that cannot be read, or a size or batch out of range.
        RuntimeError: where the process of a model failed; with the reason.
    """
    check_count("batch_size", batch_size)
    candidates = {name: Candidate.parse(name, image_size) for name in names}
    task = {"batch_size": batch_size, "training": training, "compiled": compiled}
    with ExitStack() as stack:
        asks = {name: stack.enter_context(own_process(name)) for name in candidates}
        for name, ask in asks.items():
            ask(_prepare, candidates[name], device, task)
        median = medians(rounds, {name: partial(ask, _time) for name, ask in asks.items()})
    baseline, rows = median[BASELINE if BASELINE in median else names[0]], []
    for name, ms in median.items():
        peak = None
        if memory and device == "cpu":
            with own_process(name, QUIET_ALLOCATOR) as ask:
                peak = ask(_peak, candidates[name], task)
        speed = {"ms_per_image": ms / batch_size, "images_per_second": 1e3 * batch_size / ms}
        facts = {"relative_time": ms / baseline, "peak_mib": peak, "image_size": candidates[name].size, **task}
        rows.append({"model": name, **speed, **facts})
    return rows


# What runs in the process of a candidate, which keeps its step here.
_steps: list[Callable[[], None]] = []


def _prepare(candidate: Candidate, device: str, task: dict[str, Any]) -> None:
    _steps.append(candidate.step(device=device, **task))
    _steps[0]()


def _time() -> float:
    _steps[0]()  # brings the model back into the caches, which the others have used since
    return milliseconds(_steps[0])


def _peak(candidate: Candidate, task: dict[str, Any]) -> float | None:
    Candidate.parse("test_resnet", 64).step(1, training=task["training"])()  # loads code and starts threads

    def run() -> None:
        step = candidate.step(**task)
        step()
        step()

    return memory_peak(run)


def profile_models(
    names: tuple[str, ...], image_size: int = 224, batch_size: int = 8, device: str = "cpu", rounds: int = 7
) -> list[dict[str, Any]]:
    """Tell the operators that inference spends its time in, without those inside them, longest first, as rows."""
    rows = []
    for name in names:
        run = Candidate.parse(name, image_size).step(batch_size, device)
        run()
        with profile() as recorded:
            for _ in range(rounds):
                run()
        key = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
        times = {event.key: getattr(event, key) / 1e3 / rounds / batch_size for event in recorded.key_averages()}
        for operator, ms in sorted(times.items(), key=lambda item: -item[1]):
            share = ms / sum(times.values())
            rows.append({"model": name, "operator": operator, "ms_per_image": ms, "share": share})
    return rows


def draw_accuracy(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Draw images per second, of rows of inference, against the accuracies of ``published.json``, at their sizes.

    Raises:
        UserError: if no row has such an accuracy, or for another suffix than .png, .svg or .pdf.
    """
    from matplotlib.figure import Figure

    kind, published = Path(path).suffix[1:], json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"path must end in .png, .svg or .pdf, got {str(path)!r}")
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="images per second here", ylabel="published ImageNet top-1, %")
    for row in sorted(rows, key=lambda row: float(row["images_per_second"])):
        _, name, size, forms = Candidate.parse(row["model"], row["image_size"])
        if published.get(name, {}).get("pixels") == size and "global" not in forms:
            place, colour = (row["images_per_second"], published[name]["top1"]), f"C{int(name.startswith('dgt'))}"
            axes.scatter(*place, color=colour)
            offset = (0, -12 if len(axes.texts) % 2 else 7)  # neighbours' labels on opposite sides
            label = "+".join([published[name]["label"], *forms])
            axes.annotate(label, place, offset, textcoords="offset points", ha="center", color=colour, fontsize=8)
    if not axes.texts:
        raise UserError("rows must hold a model with a published accuracy, at the size that it is for, got none")
    axes.margins(x=0.16, y=0.12)
    with replacing(path) as partial_file:
        figure.savefig(partial_file, format=kind, dpi=200)
