"""Bytes and kernels of a step on a GPU, counted from shapes: no GPU is needed.

    python benchmarks/traffic.py --out FILE.json
    python benchmarks/traffic.py --models dgt_tiny --step training --places

Models run in bfloat16 autocast on the meta device, channels last, and every operator counts the
bytes of its inputs and outputs once (a dimension of stride 0 counts once). Kernels that are known to
read again count so: BatchNorm in training, and gradients of the weights of LayerNorm and of
convolutions. A convolution with a bias is two kernels on CUDA, the bias is added in place; a custom
operator is one, however many launches it has. The optimizer is left out. A GPU needs more time than
its bandwidth allows for these bytes, never less.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dgt
from dgt.layers import convolution
from dgt.models.cost import size_option
from dgt.utils.records import markdown_table, write_record
from dgt_command.measures import machine

BANDWIDTH = 4.8e12  # bytes per second, an H200
LOW = torch.bfloat16
MODELS = ("swin_tiny_patch4_window7_224", "dgt_tiny")
STEPS = ("inference", "training", "snapshot")
WITHOUT_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_reshape_alias",
    "_unsafe_view",
    "detach",
    "lift_fresh",
}
KINDS = {
    "casts": {"_to_copy"},
    "copies": {"clone", "copy_", "cat", "roll", "constant_pad_nd", "index", "index_put_"},
    "LayerNorm": {"native_layer_norm", "native_layer_norm_backward"},
    "BatchNorm": {
        "_native_batch_norm_legit_no_training",
        "native_batch_norm",
        "native_batch_norm_backward",
    },
    "GELU": {"gelu", "gelu_backward"},
    "convolutions": {"convolution", "convolution_backward"},
    "products": {"addmm", "baddbmm", "bmm", "mm"},
    "attention": {
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    },
    "sums": {"mean", "sum"},
}
PACKAGES = (Path(dgt.__file__).parent, Path(timm.__file__).parent)  # whose layers call operators
OPERATORS = Path(dgt.ops.__file__).parent
KIND = {name: kind for kind, names in KINDS.items() for name in names}
BIASES = "biases of convolutions"


class Row(NamedTuple):
    """What one operator moves, in bytes, with how many kernels, and where the code calls it."""

    kind: str
    operator: str
    moved: int
    kernels: int
    place: str


class Recorder(TorchDispatchMode):
    """Writes down every operator on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        space, name = func._schema.name.split("::")
        is_free = name in WITHOUT_KERNEL or func.is_view
        if space == "prim" or is_free or (name == "_to_copy" and result is args[0]):
            return result
        result = laid_out(name, args, result)
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        if any(tensor.is_meta for tensor in inputs + outputs):
            self.record(name if space == "aten" else f"{space}.{name}", func, args, inputs, outputs)
        return result

    def record(
        self, name: str, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Add the rows of one operator."""
        place = calling_place()
        moved = sum(map(size, inputs)) + sum(map(size, outputs))
        kernels = 1
        if name == "native_batch_norm" and args[5]:  # in training: statistics, then all again
            moved, kernels = moved + size(args[0]), 2
        elif name == "native_batch_norm_backward":
            moved, kernels = moved + 2 * size(args[1]), 2
        elif name == "native_layer_norm_backward":  # gradient and input again for the weights
            moved, kernels = moved + 2 * size(args[0]), 2
        elif name == "convolution" and args[2] is not None:
            self.rows.append(Row(BIASES, "add_", 2 * size(outputs[0]), 1, place))
        elif name == "convolution_backward":
            moved, kernels = moved + size(args[0]), 2
            if args[-1][2]:
                self.rows.append(Row(BIASES, "sum", size(args[0]), 1, place))
        kind = "attention" if name.startswith("dgt.") else KIND.get(name, "elementwise")
        self.rows.append(Row(kind, name, moved, kernels, place))


def laid_out(name: str, args: Any, result: Any) -> Any:
    """Results in the layout that kernels write, which operators on the meta device forget."""
    if name in ("convolution_backward", "native_batch_norm_backward") and result[0] is not None:
        return (like(result[0], args[1]), *result[1:])
    if name == "convolution" and args[0].is_contiguous(memory_format=torch.channels_last):
        return result.contiguous(memory_format=torch.channels_last)
    if "batch_norm" in name and "backward" not in name:
        return (like(result[0], args[0]), *result[1:])
    return result


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """An empty tensor with another's strides."""
    return torch.empty_strided(
        tensor.shape, other.stride(), dtype=tensor.dtype, device=tensor.device
    )


def size(tensor: Tensor) -> int:
    """Bytes of memory that a tensor covers."""
    count = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else 1
    return count


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def calling_place() -> str:
    """`folder/file:line` of the layer that calls an operator, or the node of autograd."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return "backward of " + node.name()
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = Path(frame.f_code.co_filename)
        is_of_layer = any(file.is_relative_to(package) for package in PACKAGES)
        if is_of_layer and not file.is_relative_to(OPERATORS):
            return f"{file.parent.name}/{file.name}:{line}"
    return "?"


class Autocast(TorchFunctionMode):
    """CUDA's autocast to bfloat16 for the meta device, which has none.

    It has its lists of functions, as far as these models need them, and its cache of weights, and
    code may switch it off.
    """

    TO_LOW = frozenset(
        {"__matmul__", "addmm", "baddbmm", "bmm", "conv2d", "linear", "matmul", "mm"}
    )
    TO_FLOAT32 = frozenset({"cross_entropy", "layer_norm", "log_softmax", "softmax"})

    def __init__(self) -> None:
        super().__init__()
        self.enabled = True
        self.cache: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        cast = None
        if self.enabled and name in self.TO_LOW:
            cast = self.low
        elif self.enabled and name in self.TO_FLOAT32:
            cast = self.float32
        if cast is not None:
            args = [cast(value) for value in args]
            kwargs = {key: cast(value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def low(self, value: Any) -> Any:
        """A float32 tensor in bfloat16; weights once a step."""
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(LOW)
        if id(value) not in self.cache:
            self.cache[id(value)] = value.to(LOW)
        return self.cache[id(value)]

    @staticmethod
    def float32(value: Any) -> Any:
        """A bfloat16 tensor in float32."""
        return value.float() if isinstance(value, Tensor) and value.dtype == LOW else value

    @contextlib.contextmanager
    def switched(self, _device: str, *_: Any, enabled: bool = True, **__: Any) -> Iterator[None]:
        """What `torch.autocast` is to code inside."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before

    @contextlib.contextmanager
    def as_on_cuda(self) -> Iterator[None]:
        """This mode, and what code asks PyTorch about autocast or lets it choose by device."""
        with (
            patch.object(torch, "autocast", self.switched),
            patch.object(convolution, "is_autocast_on", lambda _: self.enabled),
            patch.object(F, "scaled_dot_product_attention", flash_or_efficient),
            self,
        ):
            yield


def flash_or_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's attention with the kernel that CUDA picks: flash, or the efficient one for a mask."""
    query, key, value = query.to(LOW), key.to(LOW), value.to(LOW)
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    mask = attn_mask.to(LOW).expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    with_sums = torch.is_grad_enabled()
    return efficient(query, key, value, mask, with_sums, dropout_p, is_causal, scale=scale)[0]


def build(name: str, step: str, pixels: int) -> nn.Module:
    """A model as it runs on a GPU, on the meta device."""
    model = timm.create_model(name, num_classes=1000, **size_option(name, pixels))
    model = model.to(memory_format=torch.channels_last)
    if name.startswith("dgt"):
        dgt.set_attention(model, backend="triton")
    model = model.to("meta").train(step == "training")
    for module in model.modules():
        if isinstance(module, dgt.DGAttention):  # as after a first step
            module.seeded.fill_(True)
            module.step_is_known = True
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # a tiny kernel each, in training
            module.num_batches_tracked = None
    return dgt.optimize_for_inference(model, dtype=LOW) if step == "snapshot" else model


def trace(name: str, step: str, batch: int, pixels: int = 224) -> list[Row]:
    """The operators of one step of a model."""
    model = build(name, step, pixels)
    images = torch.empty(batch, 3, pixels, pixels, device="meta")
    images = images.to(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    recorder, autocast = Recorder(), Autocast()
    if step == "training":
        with recorder:
            with autocast.as_on_cuda():
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
        return recorder.rows
    with torch.no_grad():
        with Autocast().as_on_cuda():  # what is kept from a first call is no part of a step
            model(images)
        with recorder, autocast.as_on_cuda():
            model(images)
    return recorder.rows


def totals(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Bytes and kernels of every kind, and of all."""
    moved: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for row in rows:
        for kind in (row.kind, "all"):
            moved[kind] += row.moved
            kernels[kind] += row.kernels
    return {kind: {"bytes": moved[kind], "kernels": kernels[kind]} for kind in moved}


def print_places(rows: Iterable[Row]) -> None:
    """Print the largest places in the code."""
    moved: Counter[tuple[str, str, str]] = Counter()
    kernels: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        key = (row.place, row.kind, row.operator)
        moved[key] += row.moved
        kernels[key] += row.kernels
    cells = [["GB", "kernels", "kind", "operator", "place"]]
    for key, count in moved.most_common(60):
        place, kind, operator = key
        cells.append([f"{count / 1e9:.3f}", str(kernels[key]), kind, operator, place])
    print(markdown_table(cells[0], cells[1:]))


def main(arguments: list[str] | None = None) -> int:
    """Trace the models' steps, print them, and write them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="of timm")
    parser.add_argument(
        "--step",
        nargs="+",
        choices=STEPS,
        default=STEPS,
        help="snapshot: inference of what dgt.optimize_for_inference makes of a DGT model",
    )
    parser.add_argument("--batch", type=int, default=128, help="images")
    parser.add_argument("--pixels", type=int, default=224, help="side of an image")
    parser.add_argument("--places", action="store_true", help="print bytes by place in the code")
    parser.add_argument("--out", type=Path, help="file of the totals")
    options = parser.parse_args(arguments)
    rows = []
    for step in options.step:
        for name in options.models:
            if step == "snapshot" and not name.startswith("dgt"):
                continue
            traced = trace(name, step, options.batch, options.pixels)
            rows.append({"model": name, "step": step, "kinds": totals(traced)})
            whole = rows[-1]["kinds"]["all"]
            took = f"{whole['bytes'] / BANDWIDTH * 1e3:.1f} ms at {BANDWIDTH / 1e12} TB/s"
            print(
                f"{name}, {step}: {whole['bytes'] / 1e9:.1f} GB, {took}, {whole['kernels']} kernels"
            )
            if options.places:
                print_places(traced)
    if options.out is not None:
        document: dict[str, Any] = {"machine": machine(), "batch": options.batch}
        write_record(options.out, document | {"pixels": options.pixels, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
