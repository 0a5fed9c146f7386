"""Where the time of a model goes, part by part: grouping, selection, attention, convolutions,
norms.

Parts are modules, by the names of their classes, and the operators of this package inside them. The
time of a part does not include that of another part inside it. Any timm model can be profiled.

    python benchmarks/model_parts.py --models dgt_tiny dgt_tiny+inference [--size 224] [--batch 8] [--rounds 7] [--json]
"""

import argparse
import json
from collections import Counter, defaultdict
from typing import Any

import torch
from bench_models import Candidate
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dgt.bench import machine

PARTS = {
    "ConvStem": "stem", "FoldedStem": "stem", "PatchMerging": "patch merging", "Head": "head",
    "InvertedResidualFFN": "IRFFN", "FoldedFFN": "IRFFN", "ConditionalPositionEncoding": "CPE", "FoldedConv": "CPE",
    "DGAttention": "attention, around its steps", "GlobalAttention": "attention, around its steps",
    "Linear": "linears", "TokenLinear": "linears", "Conv2d": "convolutions",
    "LayerNorm": "norms", "BatchNorm2d": "norms",
    "GELU": "activations", "SiLU": "activations", "ReLU": "activations",
}  # fmt: skip
WHOLE = ("stem", "patch merging", "IRFFN", "CPE", "head")  # their layers are not listed separately
OPERATORS = {
    "dgt::group_queries": "grouping",
    "dgt::select_keys": "selection",
    "dgt::attend": "attention in groups",
    "dgt::native_group_queries": "grouping",
    "dgt::native_select_keys": "selection",
    "dgt::native_attend": "attention in groups",
    "dgt::native_attention": "grouping, selection and attention",
    "aten::scaled_dot_product_attention": "attention over all keys",
}
MARK = "part: "


def profile_models(
    names: tuple[str, ...],
    image_size: int = 224,
    batch_size: int = 8,
    device: str = "cpu",
    rounds: int = 7,
) -> list[dict[str, Any]]:
    """Measure the parts of the inference time of models.

    Args:
        names, image_size, batch_size, device, rounds: as in `bench_models`; the mean over rounds is
            reported. The profiler itself takes some microseconds at every step, more at batch 1.

    Returns:
        One row per part of a model, longest first: ``model``, ``part``, ``ms_per_image``, ``share``.

    Raises:
        UserError: as in `bench_models`.
    """
    rows = []
    for name in names:
        candidate = Candidate.parse(name, image_size)
        images = torch.randn(batch_size, 3, candidate.size, candidate.size, device=device)
        times = _times_of_parts(candidate.build(device), images, rounds)
        for part, taken in times.most_common():
            row = {
                "ms_per_image": taken / 1e3 / rounds / batch_size,
                "share": taken / sum(times.values()),
            }
            rows.append({"model": name, "part": part, **row})
    return rows


def profile_table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows of :func:`profile_models` out as Markdown tables, one per model."""
    by_model: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(row)
    return "\n\n".join(table_of(model, own) for model, own in by_model.items())


def table_of(model: str, rows: list[dict[str, Any]]) -> str:
    """The rows of a model as a Markdown table."""
    lines = [f"| {model} | ms per image | share |", "| --- | ---: | ---: |"]
    for row in rows:
        share = f"{100 * row['share']:.1f} %"
        lines.append(f"| {row['part']} | {row['ms_per_image']:.2f} | {share} |")
    total = sum(row["ms_per_image"] for row in rows)
    return "\n".join([*lines, f"| together | {total:.2f} | |"])


@torch.inference_mode()
def _times_of_parts(model: nn.Module, images: torch.Tensor, rounds: int) -> Counter[str]:
    """Microseconds of every part over all rounds."""
    _mark_parts(model)
    on_gpu = images.device.type == "cuda"
    model(images)
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        for _ in range(rounds):
            with record_function(f"{MARK}everything else"):
                model(images)
    times: Counter[str] = Counter()
    for event in recorded.events() or ():
        part = _part_of(event)
        if part is None:
            continue
        taken = event.device_time_total if on_gpu else event.cpu_time_total
        times[part] += taken
        outer = _outer_part_of(event)
        if outer is not None:
            times[outer] -= taken
    return times


def _part_of(event: Any) -> str | None:
    """The part whose call an event of the profiler is; None if it is not a call of a part."""
    name = str(event.name)
    return name.removeprefix(MARK) if name.startswith(MARK) else OPERATORS.get(name)


def _outer_part_of(event: Any) -> str | None:
    """The innermost part around an event; None if there is none."""
    outer = event.cpu_parent
    while outer is not None:
        part = _part_of(outer)
        if part is not None:
            return part
        outer = outer.cpu_parent
    return None


def _mark_parts(module: nn.Module) -> None:
    """Mark every call of the modules that are parts, except inside one whose layers are not listed
    separately.
    """
    for child in module.children():
        kinds = (kind.__name__ for kind in type(child).__mro__)
        part = next((PARTS[kind] for kind in kinds if kind in PARTS), None)
        if part is not None:
            _mark_calls(child, part)
        if part not in WHOLE:
            _mark_parts(child)


def _mark_calls(module: nn.Module, part: str) -> None:
    """Mark every call of a module, for the profiler, as one of a part."""
    marks: list[Any] = []  # of calls that have not ended

    def begin(*_: Any) -> None:
        marks.append(record_function(MARK + part))
        marks[-1].__enter__()

    def end(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["dgt_tiny", "dgt_tiny+inference"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print a table for each model, or machine and rows as JSON."""
    options = parse_arguments()
    rows = profile_models(
        tuple(options.models), options.size, options.batch, options.device, options.rounds
    )
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
    else:
        print(profile_table(rows))


if __name__ == "__main__":
    main()
