"""Where the time of a model goes, part by part: grouping, selection, attention, convolutions,
norms.

Parts are modules, by the names of their classes, and the operators of this package inside them; the
time of a part does not hold that of another part inside it. Any timm model can be profiled.

    python benchmarks/model_parts.py --models dgt_tiny dgt_tiny+inference [--size 224] [--batch 8] [--rounds 7] [--json]
"""

import argparse
import json
from collections import Counter
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
WHOLE = ("stem", "patch merging", "IRFFN", "CPE", "head")  # their layers are not told apart
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
    """Tell the parts of the inference time of models.

    Args:
        names, image_size, batch_size, device, rounds: as in `bench_models`; the mean of so many
            rounds is reported. The profiler itself takes some microseconds at every step, more at
            batch 1.

    Returns:
        One row a part of a model, longest first: ``model``, ``part``, ``ms_per_image``, ``share``.

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
    """Lay the rows of :func:`profile_models` out as Markdown tables, one a model."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        lines += [f"| {model} | ms per image | share |", "| --- | ---: | ---: |"]
        lines += [
            f"| {r['part']} | {r['ms_per_image']:.2f} | {100 * r['share']:.1f} % |" for r in own
        ]
        lines += [f"| together | {sum(row['ms_per_image'] for row in own):.2f} | |", ""]
    return "\n".join(lines).strip()


@torch.inference_mode()
def _times_of_parts(model: nn.Module, images: torch.Tensor, rounds: int) -> Counter[str]:
    """Microseconds of every part over all rounds."""
    _mark_parts(model)
    on_gpu = images.device.type == "cuda"
    model(images)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as recorded:
        for _ in range(rounds):
            with record_function(f"{MARK}everything else"):
                model(images)
    times: Counter[str] = Counter()
    for event in recorded.events() or ():
        part = _part_of(event)
        if part is not None:
            taken = event.device_time_total if on_gpu else event.cpu_time_total
            around = event.cpu_parent
            while around is not None and _part_of(around) is None:
                around = around.cpu_parent
            times[part] += taken
            if around is not None:
                times[str(_part_of(around))] -= taken
    return times


def _part_of(event: Any) -> str | None:
    """The part an event of the profiler is the whole of."""
    name = str(event.name)
    return name.removeprefix(MARK) if name.startswith(MARK) else OPERATORS.get(name)


def _mark_parts(module: nn.Module) -> None:
    """Put a mark around every call of the modules that are parts, but not inside one that stands
    for all its layers.
    """
    for child in module.children():
        kinds = (kind.__name__ for kind in type(child).__mro__)
        part = next((PARTS[kind] for kind in kinds if kind in PARTS), None)
        if part is not None:
            marks: list[Any] = []  # of calls that have not ended

            def begin(*_: Any, marks: list[Any] = marks, part: str = part) -> None:
                marks.append(record_function(MARK + part))
                marks[-1].__enter__()

            child.register_forward_pre_hook(begin)
            child.register_forward_hook(
                lambda *_, marks=marks: marks.pop().__exit__(None, None, None)
            )
        if part not in WHOLE:
            _mark_parts(child)


def main() -> None:
    """Print a table for each model, or machine and rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["dgt_tiny", "dgt_tiny+inference"])
    for name, number in (("size", 224), ("batch", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = profile_models(
        tuple(options.models), options.size, options.batch, options.device, options.rounds
    )
    print(
        json.dumps({"machine": machine(), "rows": rows}, indent=2)
        if options.json
        else profile_table(rows)
    )


if __name__ == "__main__":
    main()
