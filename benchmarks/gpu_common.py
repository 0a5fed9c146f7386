"""What the GPU benchmarks share: rows that are on disk as soon as they are measured, times of the
device, and inputs.

Imports nothing but torch, Triton, timm and the parts of `dgt` that need no more, so that no missing
package of training or serving can cost a result.
"""

import contextlib
import datetime
import faulthandler
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import timm
import torch
import triton
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

import dgt
from dgt.data.scenes import draw_scene
from dgt.utils.atomic_write import write_json

PIXELS = {
    196: (224, 224),
    784: (224, 224),
    3136: (224, 224),
    16384: (512, 512),
    64000: (1000, 1024),
}
DIFFERENT = 8  # images; a larger batch has them several times
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Date, device, versions and command."""
    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "capability": list(torch.cuda.get_device_capability()) if on_gpu else [],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": shlex.join(sys.argv),
    }


# What must not differ between the rows of a file.
SAME = ("device", "torch", "triton", "cuda", "kernels")
OUT_OF_TIME = 3  # exit status of a part that goes on where it stopped when it is called again

Named = dict[str, Any]


class Rows:
    """A JSON file of measured rows, whole after every row.

    An earlier file of the same part on the same device, versions and kernels is gone on with;
    another is replaced. While a row is measured, the file names it as ``begun``: where that is
    still there, the process ended with the row, and a new one has to go on.

    Args:
        path: the file.
        part: what all its rows are part of.
        again: whether a process of this very call was there before. What failed in it stays, and is
            not tried again; failures of an earlier call are.
    """

    def __init__(self, path: Path, part: str, again: bool = False) -> None:
        self.path, self.part, self.again = path, part, again
        self.document: dict[str, Any] = {"machine": machine(), "rows": []}
        with contextlib.suppress(OSError, ValueError):
            earlier = json.loads(path.read_text(encoding="utf-8"))
            alike = all(
                earlier["machine"].get(name) == self.document["machine"][name] for name in SAME
            )
            if alike and all(row["part"] == part for row in earlier["rows"]):
                self.go_on(earlier)

    def go_on(self, earlier: dict[str, Any]) -> None:
        """Take over the rows of an earlier process."""
        kept = [row for row in earlier["rows"] if self.again or not has_failed(row)]
        self.document["rows"] = kept
        begun = earlier.get("begun")
        if not self.again or begun is None:
            return
        if self.has(**begun):
            write_json(self.path, self.document)
        else:
            error = "the process ended, or was ended, while this was measured"
            self.add(begun | {"row_error": error})

    def has(self, **named: Any) -> bool:
        """Tell whether there is a row with these values."""
        return any(
            all(row.get(name) == value for name, value in named.items())
            for row in self.document["rows"]
        )

    def begin(self, named: Named) -> None:
        """Keep on disk which row is measured from here on."""
        self.document["begun"] = named
        write_json(self.path, self.document)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row on disk, then print it."""
        self.document["rows"].append({"part": self.part, **row})
        if not is_broken(row):
            self.document.pop("begun", None)
        write_json(self.path, self.document)
        print(
            *(f"{name}={value}" for name, value in row.items() if not isinstance(value, dict)),
            flush=True,
        )

    def measure(
        self,
        planned: Iterable[tuple[Named, Callable[[], dict[str, Any]]]],
        seconds: float,
        row_seconds: float,
    ) -> int:
        """Measure the planned rows that are not there yet.

        Args:
            planned: what a row is named by, and how to measure it.
            seconds: no row is begun after so many.
            row_seconds: the process ends, with a trace of where it was, if a row takes longer.

        Returns:
            The exit status: 1 where something failed, 3 where time ran out before all was begun.
        """
        started = time.monotonic()
        for named, step in planned:
            if self.has(**named):
                continue
            if time.monotonic() - started > seconds:
                print("out of time: call again to go on")
                return OUT_OF_TIME
            self.begin(named)
            # Not by Python, which waits for a kernel that never ends.
            faulthandler.dump_traceback_later(row_seconds, exit=True)
            row = named | attempt("row", step)
            faulthandler.cancel_dump_traceback_later()
            self.add(row)
            if is_broken(row):
                print("the device takes nothing more from this process: another one has to go on")
                return 1
        return int(any(map(has_failed, self.document["rows"])))


def has_failed(row: dict[str, Any]) -> bool:
    """Tell whether anything in a row is an error."""
    return any(name.endswith("_error") for name in row)


def is_broken(row: dict[str, Any]) -> bool:
    """Tell whether nothing after this row can be measured in the same process.

    After an illegal access a device refuses all that a process asks for; after a capture that
    failed PyTorch may refuse all others.
    """
    if any(name.endswith("_graph_error") for name in row):
        return True
    if not has_failed(row) or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def device_rates() -> tuple[float, float]:
    """Bytes a second, read and written, of a large copy, and bfloat16 operations a second of a
    large product.
    """
    source, matrix = (
        torch.empty(2**30, dtype=torch.int8),
        torch.randn(8192, 8192, dtype=torch.bfloat16),
    )
    source, matrix = source.cuda(), matrix.cuda()
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    product = do_bench(lambda: matrix @ matrix, return_mode="median")
    return 2e3 * source.nbytes / copy, 2e3 * 8192**3 / product


def times(name: str, step: Callable[[], object], graph: bool = True) -> dict[str, Any]:
    """Median milliseconds of a step: launched by the host, after the L2 cache was cleared, and
    replayed one after the other as a CUDA graph, without host time and with what is in the cache.

    A step that synchronises cannot be captured, and torch 2.11 may capture nothing more after one
    that failed: `graph` is False for it.
    """
    row: dict[str, Any] = {f"{name}_ms": do_bench(step, warmup=25, rep=200, return_mode="median")}
    if graph:
        row |= attempt(
            f"{name}_graph",
            lambda: {f"{name}_graph_ms": do_bench_cudagraph(step, rep=50, return_mode="median")},
        )
    return row


def attempt(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a measurement gives, or its error, which costs no other measurement."""
    try:
        return measure()
    except Exception as error:
        return {f"{name}_error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def ratios(row: dict[str, Any], names: list[str]) -> dict[str, float]:
    """How many times as fast the kernels are as others, by either way of launching, where both were
    measured.
    """
    found = {}
    for name in names:
        for way in ("_ms", "_graph_ms"):
            if f"triton{way}" in row and f"{name}{way}" in row:
                found[f"times_as_fast_as_{name}{way.removesuffix('_ms')}"] = (
                    row[f"{name}{way}"] / row[f"triton{way}"]
                )
    return found


class EnoughError(Exception):
    """Raised to end a forward pass whose later layers nobody needs."""


def scene_inputs(batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and centroids of DGT-T's first layer of so many tokens, on the built-in scenes.

    Its weights are random and its centroids seeded on these images. Neighboring tokens are alike
    and groups unequal, as on photographs: what random numbers never show.
    """
    rows, columns = PIXELS[tokens]
    side = max(rows, columns)
    images = [
        draw_scene(number, image_size=side).image[:, :rows, :columns]
        for number in range(min(batch, DIFFERENT))
    ]
    torch.manual_seed(0)
    model = timm.create_model("dgt_tiny").cuda().eval()
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def keep(layer: Any, arguments: tuple[Tensor, ...]) -> None:
        query, key, value = layer.split_heads(arguments[0])
        layer.seed(query, None, True)
        if query.shape[2] == tokens:
            found.append((query, key, value, layer.unit_centroids()))
            raise EnoughError

    for layer in model.modules():
        if isinstance(layer, dgt.DGAttention):
            layer.register_forward_pre_hook(keep)
            layer.backend = "torch"
    with torch.no_grad(), contextlib.suppress(EnoughError):
        pixels = torch.stack([image.float() / 255 for image in images]).cuda()
        model((pixels - 0.45) / 0.225)
    *heads, centroids = found[0]
    turns = -(-batch // len(heads[0]))
    # As a projection leaves them: heads interleaved.
    query, key, value = (
        head.bfloat16().transpose(1, 2).contiguous().repeat(turns, 1, 1, 1)[:batch].transpose(1, 2)
        for head in heads
    )
    return query, key, value, centroids


def predicted(tokens: int, top_k: int, inputs: str, name: str) -> dict[str, float]:
    """Microseconds of every step by the cycle model, where it has been asked.

    "all" is their sum. Where there are predictions for this version of Triton, whose machine code
    is not that of another, it is those.
    """
    version = "".join(triton.__version__.split(".")[:2])
    own, newest = RESULTS / f"gpu_model_triton{version}.json", RESULTS / "gpu_model.json"
    predictions = own if own.exists() else newest
    if not predictions.exists():
        return {}
    rows = json.loads(predictions.read_text(encoding="utf-8"))["rows"]
    wanted = (f"L{tokens} k{top_k}", "random" if inputs == "random" else "photographs", name)
    return {
        row["step"]: row["us"]
        for row in rows
        if (row["shape"], row["inputs"], row["pass"]) == wanted
    }
