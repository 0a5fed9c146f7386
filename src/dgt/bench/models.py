"""Whole models in turns, each in a process of its own: inference or a training step, time and peak memory."""

import re
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn

from dgt.bench.measures import QUIET_ALLOCATOR, memory_peak, milliseconds, own_process
from dgt.inference import optimize_for_inference, pack_weights
from dgt.ops.checks import check_count
from dgt.utils.errors import LostProcess, UserError

BASELINE = "swin_tiny_patch4_window7_224"
MODELS = ("dgt_tiny", BASELINE, "convnext_tiny", "deit_small_patch16_224", "dgt_tiny+inference", f"{BASELINE}+packed")
FORMS = ("inference", "packed", "global", "checkpointing")


class Candidate(NamedTuple):
    """A timm model and the form in which it runs, read from ``NAME[@PIXELS][+FORM...]``."""

    text: str
    """As it was written; the name of its row."""
    name: str
    """timm's name."""
    size: int
    """Pixels a side."""
    forms: tuple[str, ...]
    """``inference``: :func:`dgt.optimize_for_inference`; ``packed``: of any model the weights packed as there, nothing
    else; ``global``: global attention in all stages of a DGT; ``checkpointing``: of gradients, in a training step."""

    @classmethod
    def parse(cls, text: str, image_size: int) -> "Candidate":
        """Read a candidate; without ``@PIXELS`` it runs at ``image_size``.

        Raises:
            TypeError, UserError: for a name timm does not know, an unknown form, or a size out of range.
        """
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
        """Create the model in its form, with random weights of seed 0, in training or evaluation mode.

        Raises:
            UserError: for a form that does not go with the mode.
        """
        for form in ("inference", "packed") if training else ("checkpointing",):
            if form in self.forms:
                mode = "training" if training else "inference"
                raise UserError(f"the form {form!r} is not one for {mode}: {self.text}")
        options: dict[str, Any] = {}
        if timm.get_pretrained_cfg_value(self.name, "fixed_input_size"):
            options["img_size"] = self.size
        if "global" in self.forms:
            options["attention"] = ("global",) * 4
        torch.manual_seed(0)
        model: Any = timm.create_model(self.name, **options).to(device).train(training)
        if "checkpointing" in self.forms:
            model.set_grad_checkpointing()
        if "inference" in self.forms:
            model = optimize_for_inference(model)
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
        labels = torch.arange(batch_size, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def train() -> None:
            optimizer.zero_grad()
            F.cross_entropy(run(images), labels).backward()
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
    """Time the inference, or the training step, of whole models in turns.

    Args:
        names: ``NAME[@PIXELS][+FORM...]`` each, as :class:`Candidate` reads them; the times of all are compared to
            those of plain Swin-T if it is among them, else to those of the first.
        image_size: pixels a side, where a name does not tell.
        batch_size: images a batch.
        device: where to run.
        rounds: how often the candidates take turns; medians of two steps a turn are reported.
        compiled: run ``torch.compile``d models.
        training: time training steps (forward, backward, AdamW) instead of inference.
        memory: measure peaks of memory as well (Linux, CPU): weights, and whatever the step adds to them.

    Returns:
        One row a model: ``model``, milliseconds per image, images per second, time relative to the baseline, peak
        memory in MiB (None where not measured), and the settings.

    Raises:
        TypeError, UserError: for a name that cannot be read, or a size or batch out of range.
        RuntimeError: where the process of a model failed; with the reason.
    """
    check_count("batch_size", batch_size)
    candidates = [Candidate.parse(name, image_size) for name in names]
    task = {"batch_size": batch_size, "training": training, "compiled": compiled}
    times: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    with ExitStack() as stack:
        processes = {candidate: stack.enter_context(own_process()) for candidate in candidates}
        for candidate, process in processes.items():
            _ask(process, candidate, _prepare, candidate, device, task)
        for _ in range(rounds):
            for candidate, process in processes.items():
                times[candidate] += _ask(process, candidate, _time_twice, device)
    median = {candidate: statistics.median(taken) for candidate, taken in times.items()}
    baseline = median[next((c for c in candidates if c.name == BASELINE and not c.forms), candidates[0])]
    return [
        {
            "model": c.text,
            "ms_per_image": median[c] / batch_size,
            "images_per_second": 1e3 * batch_size / median[c],
            "relative_time": median[c] / baseline,
            "peak_mib": _peak_of(c, task) if memory and device == "cpu" else None,
            "image_size": c.size,
            **task,
        }
        for c in candidates
    ]


def models_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows of :func:`bench_models` out as a Markdown table."""
    peaks = any(r["peak_mib"] is not None for r in rows)
    lines = [
        "| model | px | ms per image | images/s | relative time |" + (" peak MiB |" if peaks else ""),
        "| --- | ---: | ---: | ---: | ---: |" + (" ---: |" if peaks else ""),
    ]
    for r in rows:
        times = f"{r['ms_per_image']:.1f} | {r['images_per_second']:.1f} | **{r['relative_time']:.2f}**"
        peak = "" if not peaks else f" {r['peak_mib']:.0f} |" if r["peak_mib"] is not None else " |"
        lines.append(f"| {r['model']} | {r['image_size']} | {times} |{peak}")
    if any("+inference" in r["model"] for r in rows):
        lines += ["", "+inference has its weights packed for oneDNN: its like among other models is NAME+packed."]
    return "\n".join(lines)


def _ask(process: ProcessPoolExecutor, candidate: Candidate, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives in the process of a candidate."""
    try:
        return process.submit(function, *arguments).result()
    except Exception as error:  # of many kinds: whatever a model raises, or the end of its process
        reason = f"{type(error).__name__}: {error}"
        raise LostProcess(f"the process of {candidate.text} ended early: {reason}") from error


def _peak_of(candidate: Candidate, task: dict[str, Any]) -> float | None:
    """Peak memory in MiB of a fresh process that builds the model and makes two steps; None where nothing can tell."""
    with own_process(QUIET_ALLOCATOR) as process:
        peak: float | None = _ask(process, candidate, _measure_peak, candidate, task)
    return peak


# What runs in the process of a candidate, which keeps its step here.
_steps: list[Callable[[], None]] = []


def _prepare(candidate: Candidate, device: str, task: dict[str, Any]) -> None:
    _steps.append(candidate.step(device=device, **task))
    for _ in range(2):
        _steps[0]()


def _time_twice(device: str) -> list[float]:
    _steps[0]()  # brings the model back into the caches, which the others have used since
    return [milliseconds(_steps[0], torch.device(device)) for _ in range(2)]


def _measure_peak(candidate: Candidate, task: dict[str, Any]) -> float | None:
    Candidate.parse("test_resnet", 64).step(1, training=task["training"])()  # loads code and starts threads

    def run() -> None:
        step = candidate.step(**task)
        step()
        step()

    return memory_peak(run)
