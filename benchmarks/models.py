"""Whole models in turns: inference or a training step, time and peak memory.

    python benchmarks/models.py --models dgt_tiny convnext_tiny --runtime eager compile

Candidates take turns, and medians are compared, so that background load slows all of them alike.
Each runs in a process of its own, because memory that one leaves behind would speed the next one
up. Every model runs in every runtime that takes it: eager PyTorch, `torch.compile` (at inference with
frozen weights, which inductor then packs), and as an ONNX file for images of that one size in
onnxruntime and OpenVINO, checked first; ours also with DG-Attention as one operator of OpenVINO.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn

from dgt.inference import optimize_for_inference
from dgt.inference.export import verify
from dgt.inference.formats import (
    Runner,
    Source,
    check_libraries,
    encode_onnx,
    open_onnx,
)
from dgt.inference.openvino_extension import open_openvino, openvino_extension_path
from dgt.layers import DGAttention
from dgt.models.cost import attention_share, cost, size_option
from dgt.ops.checks import check_count
from dgt.utils.allocator import keep_freed_memory
from dgt.utils.errors import LostProcess, UserError, check_range
from dgt.utils.records import processor, record_text
from dgt_command.measures import (
    QUIET_ALLOCATOR,
    machine,
    medians,
    memory_peak,
    milliseconds,
    own_process,
    table,
)

BASELINE = "swin_tiny_patch4_window7_224"
MODELS = ("dgt_tiny", BASELINE, "convnext_tiny", "deit_small_patch16_224", "dgt_tiny+inference")
FORMS = ("inference", "global", "checkpointing", "bfloat16", "kept")
EXTENSION = "openvino-extension"  # OpenVINO with DG-Attention as one operator
RUNTIMES = ("eager", "compile", "onnxruntime", "openvino", EXTENSION)
BASELINE_RUNTIMES = {
    EXTENSION: "openvino"
}  # where the baseline runs; elsewhere in the same runtime
FREEZING = {"TORCHINDUCTOR_FREEZING": "1"}
COLUMNS = {
    "model": "{model}",
    "runtime": "{runtime}",
    "px": "{image_size}",
    "ms per image": "{ms_per_image:.1f}",
    "images/s": "{images_per_second:.1f}",
    "relative time": "**{relative_time:.2f}**",
    "peak MiB": "{peak_mib:.0f}",
    "processor": "{processor}",
}


def require_openvino() -> None:
    """Raise UserError, with the remedy, unless OpenVINO and its converters are installed."""
    check_libraries("OpenVINO", ("onnx", "onnxscript", "openvino"), "openvino")


class Candidate(NamedTuple):
    """A timm model, the side of its images in pixels, and the forms in which it runs, read from
    ``NAME[@PIXELS][+FORM...]``.

    ``inference``: :func:`dgt.optimize_for_inference`; ``global``: global attention in all stages of
    a DGT; ``checkpointing``: of gradients, in a training step; ``bfloat16``: weights of that type,
    in a training step autocast to it; ``kept``: :func:`dgt.keep_freed_memory`.
    """

    text: str
    name: str
    size: int
    forms: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, image_size: int) -> Candidate:
        """Read a candidate.

        Args:
            text: ``NAME[@PIXELS][+FORM...]``.
            image_size: pixels per side if the text has none.

        Raises:
            UserError: the text names no candidate.
        """
        match = re.fullmatch(r"([^@+]+)(?:@(\d+))?((?:\+\w+)*)", text)
        if match is None:
            raise UserError(f"models must look like NAME[@PIXELS][+FORM...], got {text!r}")
        name = match[1]
        size = int(match[2] or image_size)
        forms = tuple(match[3].split("+")[1:])
        if not timm.is_model(name):
            raise UserError(f"models must be timm models, got {name}")
        check_range(32, image_size=size)
        candidate = cls(text, name, size, forms)
        for form in forms:
            candidate.check_form(form)
        return candidate

    def check_form(self, form: str) -> None:
        """Raise UserError unless the model can run in a form."""
        if form not in FORMS:
            known = ", ".join(FORMS)
            raise UserError(
                f"the form of a model must be one of {known}, got {form!r} in {self.text!r}"
            )
        is_ours = timm.model_entrypoint(self.name).__module__.startswith("dgt.")
        if form in ("inference", "global") and not is_ours:
            raise UserError(f"the form {form!r} is one of DGT models, got {self.text!r}")

    def build(self, device: str = "cpu", training: bool = False) -> nn.Module:
        """Create the model, with random weights of seed 0.

        Raises:
            UserError: a form does not fit the mode.
        """
        purpose = "training" if training else "inference"
        wrong = "inference" if training else "checkpointing"
        if wrong in self.forms:
            raise UserError(f"the form {wrong!r} is not one for {purpose}: {self.text}")
        options: dict[str, Any] = size_option(self.name, self.size)
        if "global" in self.forms:
            options["attention"] = ("global",) * 4
        torch.manual_seed(0)
        model: Any = timm.create_model(self.name, **options).to(device).train(training)
        if "checkpointing" in self.forms:
            model.set_grad_checkpointing()
        dtype = torch.bfloat16 if self.is_half and not training else None
        if "inference" in self.forms:
            return optimize_for_inference(model, dtype)
        return model if dtype is None else model.to(dtype)

    @property
    def is_half(self) -> bool:
        """Whether the candidate computes in bfloat16."""
        return "bfloat16" in self.forms

    @property
    def baseline(self) -> str:
        """The candidate whose time is the unit."""
        return f"{BASELINE}+bfloat16" if self.is_half else BASELINE

    def step(
        self, batch_size: int, device: str = "cpu", training: bool = False, runtime: str = "eager"
    ) -> Callable[[], object]:
        """Return the function that is timed: one inference, or one training step (forward, backward,
        AdamW), on random images.
        """
        if "kept" in self.forms and not keep_freed_memory():
            raise UserError(
                f"the form 'kept' needs glibc, and an environment that does not set it up: {self.text}"
            )
        model = self.build(device, training)
        run: Any = model
        if runtime == "compile":
            run = torch.compile(model)
        elif runtime in OPENERS:
            run = self._open(model, batch_size, runtime)
        images = torch.randn(batch_size, 3, self.size, self.size, device=device)
        if not training:
            images = images.to(torch.bfloat16 if self.is_half else torch.float32)
            return torch.inference_mode()(lambda: run(images))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        labels = torch.arange(batch_size, device=device)
        cast = partial(torch.autocast, torch.device(device).type, torch.bfloat16, self.is_half)

        def train() -> None:
            optimizer.zero_grad()
            with cast():
                logits = run(images)
            F.cross_entropy(logits.float(), labels).backward()
            optimizer.step()

        return train

    def _open(self, model: nn.Module, batch_size: int, runtime: str) -> Runner:
        """The model in another runtime, as a checked ONNX file for images of this one size."""
        for form in {"inference", "bfloat16"}.intersection(self.forms):
            raise UserError(f"the form {form!r} is for PyTorch, export {self.name} itself")
        fixed = (batch_size, self.size, self.size)
        file = encode_onnx(Source(model, fixed=fixed, extended=runtime == EXTENSION))
        runner = OPENERS[runtime](file, torch.get_num_threads())
        verify(model, runner, [(self.size, self.size)], batch=batch_size)
        return runner


@dataclass(frozen=True)
class Settings:
    """How models are timed.

    Args:
        image_size: pixels per side, for names without a size.
        batch_size: images in a batch.
        device: where it runs.
        rounds: how often the candidates take turns; medians over turns of one step are reported.
        training: time a training step instead of inference.
        memory: also measure peaks of memory (Linux, CPU): the weights, and what the step adds to
            them.
    """

    image_size: int = 224
    batch_size: int = 8
    device: str = "cpu"
    rounds: int = 7
    training: bool = False
    memory: bool = False


DEFAULTS = Settings()


def time_models(
    names: tuple[str, ...] = MODELS,
    runtimes: tuple[str, ...] = ("eager",),
    settings: Settings = DEFAULTS,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time the inference, or a training step, of whole models in several runtimes, in turns.

    Args:
        names: as `Candidate` reads them; times are relative to plain Swin-T in the same runtime and
            type, or to the first model without it; in OpenVINO with our extension, to Swin-T in
            OpenVINO.
        runtimes: "eager", "compile", "onnxruntime", "openvino" or "openvino-extension", all with
            the same number of threads.
        settings: how they are timed.

    Returns:
        One row for each model and runtime: its name, size, times, the settings, the processor, peak
        memory in MiB (None if not measured), and what it saves compared with global attention. And a
        line for each runtime that refused a model.

    Raises:
        UserError: something cannot be timed.
        LostProcess: the process of a model failed; the message has the reason.
    """
    check_count("batch_size", settings.batch_size)
    candidates = {name: Candidate.parse(name, settings.image_size) for name in names}
    _check_runtimes(runtimes, settings)
    with ExitStack() as stack:
        timers, refused = _start(stack, candidates, runtimes, settings)
        median = medians(settings.rounds, timers)
    rows = []
    for (name, runtime), ms in median.items():
        peers = {peer: peer_ms for (peer, where), peer_ms in median.items() if where == runtime}
        baseline_runtime = BASELINE_RUNTIMES.get(runtime, runtime)
        baseline = median.get((candidates[name].baseline, baseline_runtime))
        row = {
            "model": name,
            "ms_per_image": ms / settings.batch_size,
            "images_per_second": 1e3 * settings.batch_size / ms,
            "relative_time": ms / (baseline or next(iter(peers.values()))),
            "peak_mib": _peak_in_own_process(candidates[name], runtime, settings),
            "batch_size": settings.batch_size,
            "training": settings.training,
            "image_size": candidates[name].size,
            "runtime": runtime,
            "processor": processor(),
        }
        whole = peers.get(f"{name}+global")
        if whole is not None:
            row["time_of_global"] = ms / whole
            row |= _beside_global(candidates[name])
        rows.append(row)
    return rows, refused


def _check_runtimes(runtimes: tuple[str, ...], settings: Settings) -> None:
    for runtime in set(runtimes).intersection(OPENERS):
        if settings.training or settings.device != "cpu":
            raise UserError(
                f"{runtime} runs inference on a CPU: leave out --train and --device, or {runtime}"
            )
        if runtime == "onnxruntime":
            check_libraries()
        else:
            require_openvino()
    if EXTENSION in runtimes:
        openvino_extension_path()  # compiled here, once, not in the process of every model


Timers = dict[tuple[str, str], Callable[[], float]]


def _start(
    stack: ExitStack,
    candidates: dict[str, Candidate],
    runtimes: tuple[str, ...],
    settings: Settings,
) -> tuple[Timers, list[str]]:
    """Start a process for each model and runtime.

    Returns:
        The functions that time a step there, and a line for each model that is refused.
    """
    timers: Timers = {}
    refused = []
    environment = None if settings.training else FREEZING
    for name, runtime in itertools.product(candidates, runtimes):
        ask = stack.enter_context(own_process(f"{name} in {runtime}", environment))
        time = partial(ask, _time, candidates[name], runtime, settings)
        try:
            time()
        except LostProcess as error:
            if runtime == "eager" or not isinstance(error.__cause__, UserError):
                raise
            refused.append(f"{runtime} does not take {name}: {error.__cause__}")
        else:
            timers[name, runtime] = time
    return timers, refused


def _peak_in_own_process(candidate: Candidate, runtime: str, settings: Settings) -> float | None:
    if not settings.memory or settings.device != "cpu":
        return None
    with own_process(candidate.text, QUIET_ALLOCATOR | FREEZING) as ask:
        peak: float | None = ask(_peak, candidate, runtime, settings)
        return peak


def _beside_global(candidate: Candidate) -> dict[str, Any]:
    """Compared with the model with global attention: the share of its multiply-adds, and the share
    that Eq. 7 gives for the attention of each grouped stage.
    """
    model: Any = candidate._replace(forms=()).build()
    whole_model = candidate._replace(forms=("global",)).build()
    side = candidate.size
    plain = cost(model, (side, side)).flops
    whole = cost(whole_model, (side, side)).flops
    shares = []
    for stage, stride in zip(model.stages, model.strides[1:], strict=True):
        layer = stage.blocks[0].attn
        tokens = math.ceil(side / stride) ** 2
        if isinstance(layer, DGAttention):
            shares.append(
                attention_share(
                    tokens, layer.qkv.in_features, layer.top_k, layer.centroids.shape[1]
                )
            )
    return {"work_of_global": plain / whole, "eq7_by_stage": shares}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The lines to read first: every model in its best runtime, the fastest first, and what groups
    save.
    """
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["ms_per_image"])):
        best.setdefault(f"{row['model']} at {row['image_size']} px", row)
    lines = [
        f"best of {name}: {row['runtime']}, {row['ms_per_image']:.1f} ms"
        for name, row in best.items()
    ]
    return lines + [saving(row) for row in rows if "time_of_global" in row]


def saving(row: dict[str, Any]) -> str:
    """What groups save of the time and work of a model with global attention, in a line."""
    shares = ", ".join(f"{share:.2f}" for share in row["eq7_by_stage"])
    return (
        f"{row['model']} at {row['image_size']} px in {row['runtime']}: "
        f"{row['time_of_global']:.2f} of its time with global attention, "
        f"{row['work_of_global']:.2f} of its multiply-adds; "
        f"by Eq. 7 of the attention's by stage: {shares}"
    )


OPENERS: dict[str, Callable[[bytes, int | None], Runner]] = {
    "onnxruntime": open_onnx,
    "openvino": open_openvino,
    EXTENSION: partial(open_openvino, extended=True),
}


_kept_step = cache(Candidate.step)  # in the process of a candidate


def _time(candidate: Candidate, runtime: str, settings: Settings) -> float:
    step = _kept_step(candidate, settings.batch_size, settings.device, settings.training, runtime)
    step()  # brings the model back into the caches, which the others have used since
    return milliseconds(step)


def _peak(candidate: Candidate, runtime: str, settings: Settings) -> float | None:
    small = Candidate.parse("test_resnet", 64)
    small.step(1, training=settings.training)()  # loads code and starts threads

    def run() -> None:
        step = candidate.step(settings.batch_size, settings.device, settings.training, runtime)
        step()
        step()

    return memory_peak(run)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    forms = "timm models, each NAME[@PIXELS][+inference|+global|+checkpointing|+bfloat16|+kept]"
    found.add_argument("--models", metavar="NAME", nargs="+", default=MODELS, help=forms)
    found.add_argument("--size", metavar="PIXELS", type=at_least_1, default=224, help="of images")
    found.add_argument("--batch", type=at_least_1, default=8, help="images per batch (default: 8)")
    found.add_argument("--runtime", choices=RUNTIMES, nargs="+", default=["eager"])
    found.add_argument("--rounds", type=at_least_1, default=7, help="turns of each (default: 7)")
    found.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    found.add_argument("--train", action="store_true", help="time training steps, not inference")
    found.add_argument("--memory", action="store_true", help="also measure peaks of memory")
    found.add_argument("--json", action="store_true", help="print machine and rows as JSON")
    return found


def at_least_1(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def report(options: argparse.Namespace) -> str:
    """Time what was asked for; return its table, or machine and rows as JSON."""
    settings = Settings(
        image_size=options.size,
        batch_size=options.batch,
        device=options.device,
        rounds=options.rounds,
        training=options.train,
        memory=options.memory,
    )
    rows, refused = time_models(tuple(options.models), tuple(options.runtime), settings)
    notes = [*summary(rows), *refused]
    if options.json:
        return record_text({"machine": machine(), "rows": rows, "notes": notes}).rstrip()
    return "\n".join([table(rows, COLUMNS), *notes]).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 2 for bad input, 1 for a lost process.
    """
    options = parser().parse_args(arguments)
    try:
        print(report(options))
    except (UserError, LostProcess) as error:
        print(f"models.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
