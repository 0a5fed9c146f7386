"""SAM's image encoder with exact attention at once: time, peak memory and difference, beside its own.

    pip install segment-anything  # for --library meta
    python benchmarks/sam_encoder.py --library meta --threads 1 --out sam_encoder.json
    python benchmarks/sam_encoder.py --library timm --arms own exact compiled openvino --out sam_encoder.json

ViT-B at 1024 px with random weights, relative positions among them, of timm, transformers or Meta's
package, one image at a time. Every arm has a process of its own, they take turns, and the least time of
each counts; its peak is that of its process in a call. Attention is what a layer does between its
projections: from queries, keys and values to its output; compiled and converted models do not tell.
Differences are from the model's own output in float32. Every run adds a row to the file, or replaces
that of the same library, type and threads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

import dgt
from dgt.utils.records import write_row
from dgt_command.measures import machine, milliseconds, own_process
from models import FREEZING

SIZE = 1024
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ARMS = ("own", "exact", "compiled", "openvino")
LEAST_OF_GLOBAL = 64  # relative positions of a global layer have 127 entries, of a window 27
Runner = Callable[[Tensor], Tensor]


class Encoder(NamedTuple):
    """One of the encoders, in one of the types."""

    library: str
    type: str = "float32"

    def build(self) -> nn.Module:
        """SAM's ViT-B with random weights."""
        torch.manual_seed(0)
        model: nn.Module
        if self.library == "timm":
            import timm

            model = timm.create_model("samvit_base_patch16")
        elif self.library == "transformers":
            from transformers import SamVisionConfig, SamVisionModel

            # by default weights are of 1e-10, and attention changes no digit of the output
            model = SamVisionModel(SamVisionConfig(initializer_range=0.02))
        else:
            from segment_anything import sam_model_registry

            model = sam_model_registry["vit_b"]().image_encoder
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:
                nn.init.normal_(parameter, std=0.1)
        return model.eval().to(TYPES[self.type])

    def images(self) -> Tensor:
        """One random image."""
        torch.manual_seed(1)
        return torch.randn(1, 3, SIZE, SIZE).to(TYPES[self.type])


class AttentionTimes:
    """Milliseconds between the projections of a model's attention, of global layers and of windows."""

    def __init__(self, model: nn.Module) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self.start = 0.0
        module: Any  # each library has classes of its own
        for module in model.modules():
            if hasattr(module, "rel_pos_h"):
                kind = "global" if len(module.rel_pos_h) > LEAST_OF_GLOBAL else "windows"
                module.qkv.register_forward_hook(self.begin)
                module.proj.register_forward_pre_hook(partial(self.end, kind))

    def begin(self, *_: Any) -> None:
        """A projection to queries, keys and values is done."""
        self.start = timer()

    def end(self, kind: str, *_: Any) -> None:
        """The projection of an output is about to start."""
        self.ms[f"{kind}_attention_ms"] += 1000 * (timer() - self.start)


def run_model(model: Callable[[Tensor], Any], images: Tensor) -> Tensor:
    """The tokens that a model returns."""
    output = model(images)
    return output if isinstance(output, Tensor) else output[0]


def openvino_runner(encoder: Encoder, kept: Path) -> Runner:
    """The model by OpenVINO, converted as it is by default, for latency, in the type of the others."""
    import openvino

    path = kept / f"{encoder.library}.xml"
    if not path.exists():
        convert(encoder._replace(type="float32"), path)
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[encoder.type],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(path), "CPU", options)
    return lambda images: torch.from_numpy(compiled(images.float().numpy())[0])


def convert(encoder: Encoder, path: Path) -> None:
    """Write OpenVINO's file of a model, which takes minutes."""
    import openvino

    images = encoder.images()
    converted = openvino.convert_model(encoder.build(), example_input=images)
    converted.reshape(list(images.shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(converted, path, compress_to_fp16=False)


class Arm(NamedTuple):
    """A model in the process of an arm."""

    run: Runner
    times: dict[str, float]
    """Of attention, in the last call; empty where the model does not tell."""


@cache
def open_arm(encoder: Encoder, arm: str, kept: Path) -> Arm:
    """The model of an arm, in the process of which it stays."""
    if arm == "openvino":
        return Arm(openvino_runner(encoder, kept), {})
    model = encoder.build()
    if arm == "compiled":
        return Arm(partial(run_model, torch.compile(model)), {})
    if arm == "exact":
        dgt.accelerate(model, error=0)
    return Arm(partial(run_model, model), AttentionTimes(model).ms)


@torch.no_grad()
def measure_call(encoder: Encoder, arm: str, kept: Path) -> tuple[dict[str, float], Tensor]:
    """One call of an arm, in its process: times, peak, and output."""
    run, times = open_arm(encoder, arm, kept)
    images = encoder.images()
    times.clear()
    forget_peak()
    outputs: list[Tensor] = []
    ms = milliseconds(lambda: outputs.append(run(images)))
    return {"ms": ms, "peak_mb": peak_mb(), **times}, outputs[0]


@torch.no_grad()
def expected_output(encoder: Encoder) -> Tensor:
    """The model's own output in float32."""
    in_float32 = encoder._replace(type="float32")
    return run_model(in_float32.build(), in_float32.images())


def forget_peak() -> None:
    """Give freed memory back, and let the system count the process's peak anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """The peak of this process's resident memory."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(
    encoder: Encoder, arms: list[str], rounds: int, kept: Path
) -> Iterator[dict[str, dict[str, float]]]:
    """After every round the least times of the arms, their peaks, and how far they are from the model's
    own output.
    """
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        processes = {arm: stack.enter_context(own_process(arm, FREEZING)) for arm in arms}
        expected = processes[arms[0]](expected_output, encoder).double()
        for _ in range(rounds):
            for arm, ask in processes.items():
                row, output = ask(measure_call, encoder, arm, kept)
                row["difference"] = float((output - expected).norm() / expected.norm())
                print(arm, {name: f"{value:.4g}" for name, value in row.items()}, flush=True)
                least = found.get(arm, row)
                found[arm] = {name: min(value, least[name]) for name, value in row.items()}
            yield found


def main() -> None:
    """Measure, and write a row after every round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=("timm", "transformers", "meta"), required=True)
    parser.add_argument("--type", choices=TYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["own", "exact"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kept", type=Path, default=Path("runs/sam_encoder"), help="folder of OpenVINO's files"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    encoder = Encoder(options.library, options.type)
    key = {"library": options.library, "type": options.type, "threads": options.threads}
    all_rounds = measure(encoder, options.arms, options.rounds, options.kept)
    for done, arms in enumerate(all_rounds, start=1):
        write_row(options.out, key, {"rounds": done, "machine": machine(), "arms": arms})


if __name__ == "__main__":
    main()
