"""Whole models in turns, each in a process of its own: inference or a training step, time and peak memory.

Every model runs in every runtime that takes it: eager PyTorch, `torch.compile` (at inference with frozen weights, which
inductor then packs), and as an ONNX file for images of that one size in onnxruntime and OpenVINO, checked first.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn

from dgt.bench.measures import QUIET_ALLOCATOR, medians, memory_peak, milliseconds, own_process, processor
from dgt.bench.runtimes import OPENERS, check_runtime
from dgt.inference import optimize_for_inference
from dgt.inference.export import verify
from dgt.inference.formats import Source, encode_onnx
from dgt.layers import DGAttention
from dgt.models.cost import attention_share, cost
from dgt.ops.checks import check_count
from dgt.utils.errors import LostProcess, UserError

BASELINE = "swin_tiny_patch4_window7_224"
MODELS = ("dgt_tiny", BASELINE, "convnext_tiny", "deit_small_patch16_224", "dgt_tiny+inference")
FORMS = ("inference", "global", "checkpointing")
RUNTIMES = ("eager", "compile", *OPENERS)
FREEZING = {"TORCHINDUCTOR_FREEZING": "1"}
BESIDE_GLOBAL = (
    "{model} at {image_size} px in {runtime}: {time_of_global:.2f} of its time with global attention, "
    "{work_of_global:.2f} of its multiply-adds; by Eq. 7 of the attention's by stage:"
)
COLUMNS = {
    **{"model": "{model}", "runtime": "{runtime}", "px": "{image_size}", "ms per image": "{ms_per_image:.1f}"},
    **{"images/s": "{images_per_second:.1f}", "relative time": "**{relative_time:.2f}**", "peak MiB": "{peak_mib:.0f}"},
    "processor": "{processor}",
}


class Candidate(NamedTuple):
    """A timm model, its pixels a side and the forms in which it runs, read from ``NAME[@PIXELS][+FORM...]``.

    ``inference``: :func:`dgt.optimize_for_inference`; ``global``: global attention in all stages of a DGT;
    ``checkpointing``: of gradients, in a training step.
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
        for form in set(self.forms).intersection(("inference",) if training else ("checkpointing",)):
            raise UserError(f"the form {form!r} is not one for {'training' if training else 'inference'}: {self.text}")
        options: dict[str, Any] = {"attention": ("global",) * 4} if "global" in self.forms else {}
        if timm.get_pretrained_cfg_value(self.name, "fixed_input_size"):
            options["img_size"] = self.size
        torch.manual_seed(0)
        model: Any = timm.create_model(self.name, **options).to(device).train(training)
        if "checkpointing" in self.forms:
            model.set_grad_checkpointing()
        return optimize_for_inference(model) if "inference" in self.forms else model

    def step(
        self, batch_size: int, device: str = "cpu", training: bool = False, runtime: str = "eager"
    ) -> Callable[[], object]:
        """Return what is timed: one inference, or one training step (forward, backward, AdamW), on random images."""
        model = self.build(device, training)
        run: Any = torch.compile(model) if runtime == "compile" else model
        images = torch.randn(batch_size, 3, self.size, self.size, device=device)
        if runtime in OPENERS:
            if "inference" in self.forms:
                raise UserError(f"the form 'inference' is for PyTorch, export {self.name} itself")
            file = encode_onnx(Source(model, fixed=(batch_size, self.size, self.size)))
            run = OPENERS[runtime](file, torch.get_num_threads())
            verify(model, run, [(self.size, self.size)], batch=batch_size)
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
    runtimes: tuple[str, ...] = ("eager",),
    training: bool = False,
    memory: bool = False,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time the inference, or with ``training`` the training step, of whole models in several runtimes, in turns.

    Args:
        names: as :class:`Candidate` reads them; times are relative to plain Swin-T in the same runtime if it is among
            them, else to the first model.
        image_size: pixels a side, where a name does not tell.
        rounds: how often the candidates take turns; medians of a step a turn are reported.
        runtimes: of `RUNTIMES`, each with as many threads.
        memory: measure peaks of memory as well (Linux, CPU): weights, and whatever the step adds to them.

    Returns:
        One row a model and runtime: its name, size, times, the settings, the processor, peak memory in MiB (None where
        not measured), and :func:`_beside_global`. And a line for each runtime that does not take a model.

    Raises:
        TypeError, ValueError: for a name that cannot be read, a size or batch out of range, a runtime that cannot be.
        RuntimeError: where the process of a model failed; with the reason.
    """
    check_count("batch_size", batch_size)
    candidates = {name: Candidate.parse(name, image_size) for name in names}
    for runtime in set(runtimes).intersection(OPENERS):
        check_runtime(runtime, training, device)
    task, refused = {"batch_size": batch_size, "training": training}, []
    with ExitStack() as stack:
        asks = {}
        for name, runtime in ((name, runtime) for name in names for runtime in runtimes):
            frozen = FREEZING if runtime == "compile" and not training else None
            ask = stack.enter_context(own_process(f"{name} in {runtime}", frozen))
            try:
                ask(_prepare, candidates[name], device, {**task, "runtime": runtime})
                asks[name, runtime] = ask
            except LostProcess as error:
                if runtime == "eager" or not isinstance(error.__cause__, UserError):
                    raise
                refused.append(f"{runtime} does not take {name}: {error.__cause__}")
        median = medians(rounds, {pair: partial(ask, _time, *pair) for pair, ask in asks.items()})
    rows = []
    for (name, runtime), ms in median.items():
        peak = None
        if memory and device == "cpu":
            with own_process(name, QUIET_ALLOCATOR | FREEZING) as ask:
                peak = ask(_peak, candidates[name], {**task, "runtime": runtime})
        peers = {peer: peer_ms for (peer, where), peer_ms in median.items() if where == runtime}
        row = {"model": name, "ms_per_image": ms / batch_size, "images_per_second": 1e3 * batch_size / ms}
        row |= {"relative_time": ms / peers.get(BASELINE, next(iter(peers.values()))), "peak_mib": peak, **task}
        row |= {"image_size": candidates[name].size, "runtime": runtime, "processor": processor()}
        rows.append(row | _beside_global(candidates[name], ms, peers))
    return rows, refused


def _beside_global(candidate: Candidate, ms: float, peers: dict[str, float]) -> dict[str, Any]:
    """Beside the model with global attention, if it was timed: the share of its time, of its multiply-adds, and Eq. 7.

    The last is the share that Eq. 7 gives to the attention of each stage that attends in groups.
    """
    if (twin := f"{candidate.text}+global") not in peers:
        return {}
    plain, whole = (candidate._replace(forms=forms).build() for forms in ((), ("global",)))
    size = (candidate.size, candidate.size)
    parts: Any = plain
    shares = []
    for stage, stride in zip(parts.stages, parts.strides[1:], strict=True):
        layer, tokens = stage.blocks[0].attn, (-(-candidate.size // stride)) ** 2
        if isinstance(layer, DGAttention):
            shares.append(attention_share(tokens, layer.qkv.in_features, layer.top_k, layer.centroids.shape[1]))
    work = cost(plain, size).flops / cost(whole, size).flops
    return {"time_of_global": ms / peers[twin], "work_of_global": work, "eq7_by_stage": shares}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines to read first: every model in its best runtime, the fastest first, and what groups save."""
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["ms_per_image"])):
        best.setdefault("{model} at {image_size} px".format(**row), row)
    lines = [f"best of {name}: {row['runtime']}, {row['ms_per_image']:.1f} ms" for name, row in best.items()]
    for row in rows:
        if "time_of_global" in row:
            shares = ", ".join(f"{share:.2f}" for share in row["eq7_by_stage"])
            lines.append(f"{BESIDE_GLOBAL.format(**row)} {shares}")
    return lines


# What runs in the process of a candidate, which keeps its step here.
_steps: dict[tuple[str, str], Callable[[], object]] = {}


def _prepare(candidate: Candidate, device: str, task: dict[str, Any]) -> None:
    step = _steps[candidate.text, task["runtime"]] = candidate.step(device=device, **task)
    step()


def _time(name: str, runtime: str) -> float:
    _steps[name, runtime]()  # brings the model back into the caches, which the others have used since
    return milliseconds(_steps[name, runtime])


def _peak(candidate: Candidate, task: dict[str, Any]) -> float | None:
    Candidate.parse("test_resnet", 64).step(1, training=task["training"])()  # loads code and starts threads

    def run() -> None:
        step = candidate.step(**task)
        step()
        step()

    return memory_peak(run)
