"""Whole models in turns, each in a process of its own: inference or a training step, time and peak memory.

Every model runs in every runtime that takes it: eager PyTorch, `torch.compile` (at inference with frozen weights, which
inductor then packs), and as an ONNX file for images of that one size in onnxruntime and OpenVINO, checked first.
"""

import io
import itertools
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.bench.measures import QUIET_ALLOCATOR, medians, memory_peak, milliseconds, own_process
from dgt.inference import optimize_for_inference
from dgt.inference.export import verify
from dgt.inference.formats import Runner, Source, check_libraries, check_size, encode_onnx, open_onnx
from dgt.layers import DGAttention
from dgt.models.cost import attention_share, cost, size_option
from dgt.ops.checks import check_count
from dgt.utils.errors import LostProcess, UserError, check_range
from dgt.utils.records import processor

BASELINE = "swin_tiny_patch4_window7_224"
MODELS = ("dgt_tiny", BASELINE, "convnext_tiny", "deit_small_patch16_224", "dgt_tiny+inference")
FORMS = ("inference", "global", "checkpointing")
OPENVINO = ("OpenVINO", ("onnx", "onnxscript", "openvino"), "openvino")
FREEZING = {"TORCHINDUCTOR_FREEZING": "1"}
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
        check_range(32, image_size=size)
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
        options |= size_option(self.name, self.size)
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

    TypeError, ValueError for what cannot be timed; LostProcess, with the reason, where the process of a model failed.

    Args:
        names: as `Candidate` reads them; times are relative to plain Swin-T in the same runtime, else to the first.
        image_size: pixels a side, where a name does not tell.
        rounds: how often the candidates take turns; medians of a step a turn are reported.
        runtimes: "eager", "compile", "onnxruntime" or "openvino", each with as many threads.
        memory: measure peaks of memory as well (Linux, CPU): weights, and whatever the step adds to them.

    Returns:
        One row a model and runtime: its name, size, times, the settings, the processor, peak memory in MiB (None where
        not measured), and what it saves beside global attention. And a line for each runtime that takes no such model.
    """
    check_count("batch_size", batch_size)
    candidates = {name: Candidate.parse(name, image_size) for name in names}
    for runtime in set(runtimes).intersection(OPENERS):
        if training or device != "cpu":
            raise UserError(f"{runtime} runs inference on a CPU: leave out --train and --device, or {runtime}")
        check_libraries(*(OPENVINO if runtime == "openvino" else ()))
    refused, timed = [], {}
    with ExitStack() as stack:
        for name, runtime in itertools.product(names, runtimes):
            ask = stack.enter_context(own_process(f"{name} in {runtime}", None if training else FREEZING))
            time = partial(ask, _time, candidates[name], batch_size, device, training, runtime)
            try:
                time()
                timed[name, runtime] = time
            except LostProcess as error:
                if runtime == "eager" or not isinstance(error.__cause__, UserError):
                    raise
                refused.append(f"{runtime} does not take {name}: {error.__cause__}")
        median = medians(rounds, timed)
    rows = []
    for (name, runtime), ms in median.items():
        peak = None
        if memory and device == "cpu":
            with own_process(name, QUIET_ALLOCATOR | FREEZING) as ask:
                peak = ask(_peak, candidates[name], batch_size, device, training, runtime)
        peers = {peer: peer_ms for (peer, where), peer_ms in median.items() if where == runtime}
        row = {"model": name, "ms_per_image": ms / batch_size, "images_per_second": 1e3 * batch_size / ms}
        row |= {"relative_time": ms / peers.get(BASELINE, next(iter(peers.values()))), "peak_mib": peak}
        row |= {"batch_size": batch_size, "training": training, "image_size": candidates[name].size}
        row |= {"runtime": runtime, "processor": processor()}
        if whole := peers.get(f"{name}+global"):
            row |= {"time_of_global": ms / whole, **_beside_global(candidates[name])}
        rows.append(row)
    return rows, refused


def _beside_global(candidate: Candidate) -> dict[str, Any]:
    """Beside the model with global attention: the share of its multiply-adds, and by Eq. 7 of each grouped stage's."""
    model: Any = candidate._replace(forms=()).build()
    pair = (model, candidate._replace(forms=("global",)).build())
    plain, whole = (cost(each, (candidate.size, candidate.size)).flops for each in pair)
    shares = []
    for stage, stride in zip(model.stages, model.strides[1:], strict=True):
        layer, tokens = stage.blocks[0].attn, (-(-candidate.size // stride)) ** 2
        if isinstance(layer, DGAttention):
            shares.append(attention_share(tokens, layer.qkv.in_features, layer.top_k, layer.centroids.shape[1]))
    return {"work_of_global": plain / whole, "eq7_by_stage": shares}


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines to read first: every model in its best runtime, the fastest first, and what groups save."""
    best: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: float(row["ms_per_image"])):
        best.setdefault("{model} at {image_size} px".format(**row), row)
    lines = [f"best of {name}: {row['runtime']}, {row['ms_per_image']:.1f} ms" for name, row in best.items()]
    beside = "{model} at {image_size} px in {runtime}: {time_of_global:.2f} of its time with global attention, "
    beside += "{work_of_global:.2f} of its multiply-adds; by Eq. 7 of the attention's by stage: "
    grouped = [(row, ", ".join(map("{:.2f}".format, row["eq7_by_stage"]))) for row in rows if "time_of_global" in row]
    return lines + [beside.format(**row) + shares for row, shares in grouped]


def open_openvino(content: bytes, threads: int | None = None) -> Runner:
    """Return a function that runs an ONNX file in OpenVINO, on the CPU, in float32."""
    check_libraries(*OPENVINO)
    import openvino

    core = openvino.Core()
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads or 0}
    compiled = core.compile_model(core.read_model(io.BytesIO(content)), "CPU", options)
    request, shape = compiled.create_infer_request(), compiled.input(0).partial_shape
    sizes = [side.get_length() if side.is_static else None for side in shape]

    def run(images: Tensor) -> list[Tensor]:
        check_size(images, sizes)
        found = request.infer([images.numpy()], share_inputs=True)
        return [torch.from_numpy(found[output].copy()) for output in compiled.outputs]

    return run


OPENERS: dict[str, Callable[[bytes, int | None], Runner]] = {"onnxruntime": open_onnx, "openvino": open_openvino}


_kept_step = cache(Candidate.step)  # in the process of a candidate


def _time(candidate: Candidate, *task: Any) -> float:
    _kept_step(candidate, *task)()  # brings the model back into the caches, which the others have used since
    return milliseconds(_kept_step(candidate, *task))


def _peak(candidate: Candidate, batch_size: int, device: str, training: bool, runtime: str) -> float | None:
    Candidate.parse("test_resnet", 64).step(1, training=training)()  # loads code and starts threads

    def run() -> None:
        step = candidate.step(batch_size, device, training, runtime)
        step()
        step()

    return memory_peak(run)
