"""Where the time of a model goes, part by part: grouping, selection, attention, convolutions, norms.

Parts are modules, and the operators of this package inside them; the time of a part does not hold that of another
part inside it. Any timm model can be profiled: what has no name here goes by the kind of its layers.
"""

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dgt.bench.candidates import Candidate
from dgt.inference.form import FoldedFFN, FoldedStem, TokenLinear
from dgt.inference.fuse_bn import FoldedConv
from dgt.layers import (
    ConditionalPositionEncoding,
    ConvStem,
    DGAttention,
    GlobalAttention,
    Head,
    InvertedResidualFFN,
    PatchMerging,
)

PARTS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((ConvStem, FoldedStem), "stem"),
    ((PatchMerging,), "patch merging"),
    ((InvertedResidualFFN, FoldedFFN), "IRFFN"),
    ((ConditionalPositionEncoding, FoldedConv), "CPE"),
    ((Head,), "head"),
    ((DGAttention, GlobalAttention), "attention, around its steps"),
    ((nn.Linear, TokenLinear), "linears"),
    ((nn.LayerNorm, nn.BatchNorm2d), "norms"),
    ((nn.GELU, nn.SiLU, nn.ReLU), "activations"),
    ((nn.Conv2d,), "convolutions"),
)
WHOLE = ("stem", "patch merging", "IRFFN", "CPE", "head")  # their layers are not told apart
OPERATORS = {
    "dgt::group_queries": "grouping",
    "dgt::select_keys": "selection",
    "dgt::attend": "attention in groups",
    "dgt::attention": "grouping, selection and attention of few tokens",
    "aten::scaled_dot_product_attention": "attention over all keys",
}
MARK = "part: "


def profile_models(
    names: tuple[str, ...], image_size: int = 224, batch_size: int = 8, device: str = "cpu", rounds: int = 7
) -> list[dict[str, Any]]:
    """Tell the parts of the inference time of models.

    Args:
        names, image_size, batch_size, device, rounds: as in :func:`dgt.bench.bench_models`; the mean of so many rounds
            is reported. The profiler itself takes some microseconds at every step, more at batch 1.

    Returns:
        One row a part of a model, longest first: ``model``, ``part``, ``ms_per_image``, ``share``.

    Raises:
        TypeError, ValueError: as in :func:`dgt.bench.bench_models`.
    """
    rows = []
    for name in names:
        candidate = Candidate.parse(name, image_size)
        model = candidate.build(device)
        images = torch.randn(batch_size, 3, candidate.size, candidate.size, device=device)
        times = _times_of_parts(model, images, rounds)
        total = sum(times.values())
        for part, taken in times.most_common():
            ms = taken / 1e3 / rounds / batch_size
            rows.append({"model": name, "part": part, "ms_per_image": ms, "share": taken / total})
    return rows


def profile_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows of :func:`profile_models` out as Markdown tables, one a model."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        total = sum(row["ms_per_image"] for row in own)
        lines += [f"| {model} | ms per image | share |", "| --- | ---: | ---: |"]
        lines += [f"| {r['part']} | {r['ms_per_image']:.2f} | {100 * r['share']:.1f} % |" for r in own]
        lines += [f"| together | {total:.2f} | |", ""]
    return "\n".join(lines).strip()


@torch.inference_mode()
def _times_of_parts(model: nn.Module, images: torch.Tensor, rounds: int) -> Counter[str]:
    """Microseconds of every part over all rounds."""
    hooks = contextlib.ExitStack()
    for module, part in _parts(model):
        hooks.enter_context(_marked(module, part))
    on_gpu = images.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with hooks:
        model(images)
        with profile(activities=activities) as recorded:
            for _ in range(rounds):
                with record_function(f"{MARK}everything else"):
                    model(images)
    times: Counter[str] = Counter()
    for event in recorded.events() or ():
        own = _part_of(event)
        if own is None:
            continue
        taken = event.device_time_total if on_gpu else event.cpu_time_total
        times[own] += taken
        around = event.cpu_parent
        while around is not None and _part_of(around) is None:
            around = around.cpu_parent
        if around is not None:
            times[str(_part_of(around))] -= taken
    return times


def _part_of(event: Any) -> str | None:
    """The part an event of the profiler is the whole of."""
    name = str(event.name)
    return name.removeprefix(MARK) if name.startswith(MARK) else OPERATORS.get(name)


def _parts(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every module that is a part, without those inside a part that stands for all of its layers."""
    found = []
    for child in module.children():
        part = next((part for kinds, part in PARTS if isinstance(child, kinds)), None)
        if part is not None:
            found.append((child, part))
        if part not in WHOLE:
            found += _parts(child)
    return found


@contextlib.contextmanager
def _marked(module: nn.Module, part: str) -> Any:
    """Put a mark around every call of a module."""
    marks: list[Any] = []

    def begin(*_: Any) -> None:
        marks.append(record_function(MARK + part))
        marks[-1].__enter__()

    def end(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    yield
    for handle in handles:
        handle.remove()
