"""`dgt.accelerate` on DINOv2-S with trained weights: errors and speed at several target errors.

    python benchmarks/accelerate_dinov2.py --weights dinov2_small.safetensors --images PHOTOGRAPHS \
        --sizes 518 1036 --errors 0 0.02 0.05 0.1 --out accelerate_dinov2.json

The weights are a safetensors file under timm's names for `vit_small_patch14_dinov2` without a head.
Photographs are taken evenly from a folder, cropped to squares and resized. `--inputs` of them
choose the settings; an error of 0 is exact attention, the speedup to beat. One image is also timed
in bfloat16 and in OpenVINO, with the unmodified model and with the accelerated one, which needs our
extension there. After all that is timed, `--unseen` other photographs are answered with the model's
own attention, whose tokens are kept in `--references`, and as it is accelerated by the saved plan.
The error is that of all tokens. Rows are written as they are done and are not measured again.
Plans that come with the package are saved by `--plans src/dgt/acceleration/plans`.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models import VisionTransformer
from torch import Tensor, nn

import dgt
from dgt.acceleration import Report
from dgt.acceleration.bound import (
    cosines_between,
    error_bound,
    half_interval,
    relative_error,
    squares_between,
)
from dgt.acceleration.check import total_counts
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.plan import without_guard
from dgt.inference.export import verify
from dgt.inference.formats import Runner, Source, encode_onnx
from dgt.inference.openvino_extension import open_openvino
from dgt.utils.records import write_record
from dgt_command.measures import machine, medians, milliseconds

NAME = "vit_small_patch14_dinov2"
RUNS = Path("runs/accelerate_dinov2")
ENDINGS = {".jpg", ".jpeg", ".png"}
MEAN = (0.485, 0.456, 0.406)
SPREAD = (0.229, 0.224, 0.225)
MOST_BETWEEN_PROGRAMS = 0.02  # relative error of all tokens, below that of accelerating


def open_model(weights: Path, size: int) -> VisionTransformer:
    """The model with trained weights, for images of ``size`` pixels per side."""
    model: Any = timm.create_model(NAME, img_size=size, num_classes=0).eval()
    found = {
        name: part for name, part in load_file(weights).items() if not name.startswith("decoder.")
    }
    grid = size // model.patch_embed.patch_size[0]
    found["pos_embed"] = timm.layers.resample_abs_pos_embed(
        found["pos_embed"], [grid, grid], num_prefix_tokens=model.num_prefix_tokens
    )
    model.load_state_dict(found)
    return model


def read_photograph(path: Path, size: int) -> Tensor:
    """A photograph as (1, 3, size, size), normalized as for ImageNet."""
    with Image.open(path) as image:
        side = min(image.size)
        left, top = ((length - side) // 2 for length in image.size)
        square = image.convert("RGB").crop((left, top, left + side, top + side))
    return to_tensor(square.resize((size, size), Image.Resampling.BICUBIC))


def to_tensor(image: Image.Image) -> Tensor:
    """An image as (1, 3, H, W), normalized as for ImageNet."""
    pixels = torch.tensor(bytearray(image.tobytes()))
    pixels = pixels.view(image.height, image.width, 3).permute(2, 0, 1) / 255
    mean = torch.tensor(MEAN)[:, None, None]
    spread = torch.tensor(SPREAD)[:, None, None]
    return ((pixels - mean) / spread)[None]


def find_photographs(folder: Path, count: int) -> list[Path]:
    """As many image files as asked for, spread evenly over a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if len(files) < count:
        raise SystemExit(f"{folder} must hold {count} images, it has {len(files)}")
    return [files[at * len(files) // count] for at in range(count)]


def tokens_before(model: VisionTransformer, image: Tensor, kept: Path) -> Tensor:
    """The tokens of the original model, computed once for all errors that are asked for.

    Args:
        model: with or without groups.
        image: (1, 3, H, W).
        kept: file of the tokens. Where it is of another image, it is written anew.
    """
    known = torch.load(kept) if kept.is_file() else None
    if known is None or not torch.equal(known["image"], image):
        with dgt.exact_attention(model):
            known = {"image": image, "tokens": model.forward_features(image)}
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(known, kept)
    tokens: Tensor = known["tokens"]
    return tokens


def choose_photographs(options: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """The photographs that choose settings, and the others."""
    paths = find_photographs(options.images, options.inputs + options.unseen)
    every = max(1, len(paths) // options.inputs)
    choosing = paths[::every][: options.inputs]
    return choosing, [path for path in paths if path not in choosing][: options.unseen]


@torch.no_grad()
def measure_unseen(options: argparse.Namespace, size: int, error: float) -> dict[str, Any]:
    """Errors on images that chose nothing, over all of them and by image, and cosines of tokens."""
    model = open_model(options.weights, size)
    dgt.apply_plan(model, plan_file(options, size, error))
    photographs = choose_photographs(options)[1]
    squares = []
    cosines = []
    _, acted_before = total_counts(model)
    for path in photographs:
        image = read_photograph(path, size)
        before = tokens_before(model, image, options.references / f"{size}-{path.stem}.pt")
        after = model.forward_features(image)
        squares.append(squares_between([after], [before]))
        cosines.append(cosines_between([after], [before]))
    _, acted = total_counts(model)
    together = torch.stack(squares)
    each = (together[:, 0] / together[:, 1]).sqrt()
    alike = torch.cat(cosines)
    return {
        "unseen": len(photographs),
        "unseen_error": relative_error(together),
        "unseen_half": half_interval(together),
        "unseen_least": float(each.min()),
        "unseen_most": float(each.max()),
        "unseen_guard_acted": acted - acted_before,
        "unseen_spread_of_logs": float(each.log().std()),
        "unseen_own_bound": error_bound(together),
        "unseen_cosine_mean": float(alike.mean()),
        "unseen_cosine_low": float(alike.quantile(0.01)),
    }


class Tokens(nn.Module):
    """A model that returns all tokens, for a file."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model.forward_features(images)


def in_openvino(model: VisionTransformer, image: Tensor, extended: bool) -> Runner:
    """A model in OpenVINO, as a file for one image, checked; accelerated ones need the extension.

    Rounding moves tokens between clusters, so of an accelerated model the error between both
    programs is checked, not the last digits.
    """
    tokens = Tokens(model).eval()
    size = image.shape[-1]
    content = encode_onnx(Source(tokens, ("tokens",), fixed=(1, size, size), extended=extended))
    run = open_openvino(content, torch.get_num_threads(), extended)
    if not extended:
        verify(tokens, run, [(size, size)], batch=1)
        return run
    error = relative_error(squares_between(run(image), [tokens(image)])[None])
    print(f"OpenVINO beside PyTorch, both accelerated: relative error {error:.1e}", flush=True)
    if not error < MOST_BETWEEN_PROGRAMS:
        raise SystemExit("error: the accelerated model in OpenVINO is another one than in PyTorch")
    return run


def in_bfloat16(model: VisionTransformer) -> VisionTransformer:
    """A copy of a model with weights of that type."""
    return copy.deepcopy(model).to(torch.bfloat16)


@torch.no_grad()
def measure_runtimes(
    model: VisionTransformer,
    unguarded: VisionTransformer | None,
    unmodified: VisionTransformer,
    image: Tensor,
    rounds: int,
) -> dict[str, float]:
    """Milliseconds of one image, in turns: both models in eager PyTorch, also in bfloat16, and in
    OpenVINO, the unmodified one also compiled, and the accelerated one, if any layer is in groups,
    also without its guard, which OpenVINO has not.
    """
    compiled = torch.compile(unmodified.forward_features)
    half = image.to(torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "eager_before": partial(unmodified.forward_features, image),
        "eager_after": partial(model.forward_features, image),
        "compiled_before": partial(compiled, image),
        "bfloat16_before": partial(in_bfloat16(unmodified).forward_features, half),
        "bfloat16_after": partial(in_bfloat16(model).forward_features, half),
        "openvino_before": partial(in_openvino(unmodified, image, extended=False), image),
    }
    if unguarded is not None:
        calls["eager_unguarded"] = partial(unguarded.forward_features, image)
        calls["openvino_after"] = partial(in_openvino(unguarded, image, extended=True), image)
    return medians(rounds, {name: partial(milliseconds, call) for name, call in calls.items()})


@torch.no_grad()
def measure_bfloat16_errors(
    model: VisionTransformer, unmodified: VisionTransformer, image: Tensor
) -> dict[str, float]:
    """The error of all tokens of one image in bfloat16, of both models, beside the unmodified one in
    float32.
    """
    exact = unmodified.forward_features(image)
    errors = {}
    for name, network in (("before", unmodified), ("after", model)):
        tokens = in_bfloat16(network).forward_features(image.to(torch.bfloat16)).float()
        errors[name] = relative_error(squares_between([tokens], [exact])[None])
    return errors


@torch.no_grad()
def measure_batches(
    model: VisionTransformer, image: Tensor, batches: list[int], rounds: int
) -> dict[str, Any]:
    """Milliseconds of the model before and after, in turns, by the size of a batch."""
    found = {}
    for batch in batches:
        images = image.expand(batch, -1, -1, -1).contiguous()
        run = partial(model.forward_features, images)
        before = []
        after = []
        for _ in range(rounds):
            with dgt.exact_attention(model):
                before.append(milliseconds(run))
            after.append(milliseconds(run))
        found[str(batch)] = {"ms_before": min(before), "ms_after": min(after)}
    return found


def plan_file(options: argparse.Namespace, size: int, error: float) -> Path:
    """Where a plan is saved."""
    folder: Path = options.plans if error else RUNS  # exact attention needs no plan
    return folder / f"{NAME}.lvd142m@{size}-{error:g}.json"


def measure(options: argparse.Namespace, size: int, error: float) -> dict[str, Any]:
    """A row: what is chosen for a target error, how long it takes, and how fast the model is."""
    choosing, _ = choose_photographs(options)
    inputs = torch.cat([read_photograph(path, size) for path in choosing])
    model = open_model(options.weights, size)
    begin = time.perf_counter()
    report = dgt.accelerate(model, inputs, error)
    seconds = time.perf_counter() - begin
    print(report, f"{seconds:.0f} s", flush=True)
    plan = plan_file(options, size, error)
    plan.parent.mkdir(parents=True, exist_ok=True)
    report.save(plan)
    batches = measure_batches(model, inputs[:1], options.batches, options.rounds)
    runtimes = {}
    bfloat16_errors = {}
    if error in (options.errors if options.runtimes is None else options.runtimes):
        unmodified = open_model(options.weights, size)
        unguarded = None
        if any(layer.setting.choice == "groups" for layer in report.layers):
            # For a file, which cannot decide by values.
            unguarded = open_model(options.weights, size)
            install_sites(unguarded, [without_guard(site) for site in report.layers])
        runtimes = measure_runtimes(model, unguarded, unmodified, inputs[:1], options.rounds)
        bfloat16_errors = measure_bfloat16_errors(model, unmodified, inputs[:1])
    return {
        "size": size,
        "tokens": report.layers[0].tokens,
        "inputs": options.inputs,
        "seconds": seconds,
        **summary(report),
        "batches": batches,
        "runtimes": runtimes,
        "bfloat16_errors": bfloat16_errors,
        "layers": [row_of(layer) for layer in report.to_json()["layers"]],
    }


def summary(report: Report) -> dict[str, Any]:
    """A report without its layers."""
    return {name: value for name, value in report.to_json().items() if name != "layers"}


def row_of(layer: dict[str, Any]) -> dict[str, Any]:
    """The values of a layer that tables need."""
    wanted = (
        "name",
        "choice",
        "groups",
        "keys",
        "residual_keys",
        "first_order",
        "error",
        "ms_before",
        "ms_after",
        "breadth",
        "most_batch",
    )
    return {name: layer[name] for name in wanted}


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", type=Path, default=RUNS, help="folder of the plans, by name")
    parser.add_argument("--references", type=Path, default=RUNS, help="folder of original tokens")
    parser.add_argument("--sizes", type=int, nargs="+", default=[518, 1036])
    parser.add_argument("--errors", type=float, nargs="+", default=[0, 0.02, 0.05, 0.1])
    parser.add_argument("--inputs", type=int, default=12, help="photographs that choose settings")
    parser.add_argument("--unseen", type=int, default=40)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--runtimes", type=float, nargs="*", help="errors, also in other runtimes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Measure what is not in the file yet: first what is timed, then errors on unseen photographs."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"machine": machine(), "rows": []}
    if options.out.exists():
        results["rows"] = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    done = {(row["size"], row["asked_error"]) for row in results["rows"]}
    for size in options.sizes:
        for error in options.errors:
            if (size, error) not in done:
                results["rows"].append(measure(options, size, error))
                write_record(options.out, results)
    for row in results["rows"]:
        if options.unseen and "unseen_error" not in row:
            row |= measure_unseen(options, row["size"], row["asked_error"])
            write_record(options.out, results)


if __name__ == "__main__":
    main()
