"""Export trained models to files, each verified against its source before it is moved into place."""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from dgt.acceleration import apply_plan
from dgt.inference import formats
from dgt.inference.accelerated import Speed, check_plan, time_beside_dense
from dgt.inference.formats import Runner, Source, as_list
from dgt.inference.openvino_extension import open_openvino, openvino_extension_path
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.swin import WindowAttention
from dgt.runs import LoadedRun, load_run
from dgt.runs.model import export_model, make_record
from dgt.tasks import TASKS
from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import Disagreement, UserError

FORMATS: dict[str, tuple[Callable[[Source], bytes], Callable[[bytes], Runner]]] = {
    ".onnx": (formats.encode_onnx, formats.open_onnx),
    ".pt2": (formats.encode_program, formats.open_program),
}
# How images of all tasks are decoded (`dgt.data.image_io.decode_image`), in the words of the page
DECODING = {
    "orientation": "EXIF, applied",
    "alpha": "laid on white",
    "depth": "gray of 16 bits is scaled to 8 from as many as 'bits' says",
}
# many tokens in the first stages; odd, with fewer tokens than keys
FURTHER_SIZES = ((160, 224), (97, 65))
LARGEST_SIDE = 512  # of the images that a file is checked with
BATCH = 3
LEAST_EQUAL = 0.5  # share of the images of a size
TOLERANCE = 1e-4
"""Largest difference of equal outputs, relative to the largest output or 1."""


@dataclass(frozen=True)
class Verification:
    """How well an exported file agrees with its source.

    Images were run one by one and in batches.

    Attributes:
        images: how many were compared.
        equal: for how many all outputs were within `TOLERANCE`, and the largest logit was the same.
        difference: largest difference of all, relative to the largest output or 1.
    """

    images: int
    equal: int
    difference: float

    def __str__(self) -> str:
        return f"equal for {self.equal} of {self.images} images, largest difference {self.difference:.1e}"


@dataclass(frozen=True)
class Export:
    """An exported model.

    Attributes:
        path: the file or the folder.
        size: bytes of the file, or of the weights in the folder.
        verification: how well it agrees with its source.
        extension: the library that OpenVINO needs to read the file; None where it needs none.
        speed: of an accelerated model's file, relative to dense attention; None for others.
    """

    path: Path
    size: int
    verification: Verification
    extension: Path | None = None
    speed: Speed | None = None

    def __str__(self) -> str:
        line = f"{self.path}  {self.size / 2**20:.1f} MiB  {self.verification}"
        if self.extension is not None:
            line = f"{line}\nOpenVINO reads it after core.add_extension({str(self.extension)!r})"
        return line if self.speed is None else f"{line}\n{self.speed}"


def export(
    checkpoint: str | Path,
    out: str | Path,
    features: bool = False,
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    openvino_extension: bool = False,
    plan: str | Path | None = None,
) -> Export:
    """Export a trained model, and verify it against its source before it is moved into place.

    Args:
        checkpoint: checkpoint, run folder or model folder, as `load_run` takes them: also any
            folder that timm wrote.
        out: a file ending in `.onnx` or `.pt2`, replaced if it is there; or, without an ending, a
            folder for `timm.create_model("local-dir:FOLDER", pretrained=True)`.
        features: the feature maps of the backbone instead of what the task predicts; for files.
        size: the height and width of all images, for a file in which nothing is decided any more
            where it runs.
        batch: how many images it then takes at a time; 1 by default.
        openvino_extension: write every DG-Attention as one operator, for OpenVINO on CPUs alone,
            which reads such a file with :func:`dgt.openvino_extension_path`; for ONNX files.
        plan: of :func:`dgt.accelerate`, for a file of one size: attention in groups as it says,
            without the guard; in ONNX for OpenVINO's extension alone.

    Returns:
        What was written, and how it agreed with its source.

    Raises:
        UserError, OSError: as `load_run`, :func:`source_of_run` and, for the extension,
            :func:`dgt.openvino_extension_path`; an unknown ending, a missing library, a
            model that the format cannot hold; `out` cannot be written.
        Disagreement: what was exported is not equal to its source; nothing is written then.

    Example:
        >>> export("runs/scenes", "scenes.onnx").verification.equal
    """
    path = Path(out)
    _check_place(path, features)
    _check_options(path, size, batch, openvino_extension)
    if plan is not None:
        check_plan(plan, path, size is not None, openvino_extension)
    # before a model is opened, which takes longer than to see that nothing compiles
    extension = openvino_extension_path() if openvino_extension else None
    run = load_run(checkpoint)
    if plan is not None:
        apply_plan(run.network, plan, guard=False)  # decides by values, which no graph does
    if path.suffix:
        fixed = None if size is None else (batch or 1, *size)
        source = replace(source_of_run(run, features), fixed=fixed, extended=openvino_extension)
        exported = _export_file(run, source, path, is_accelerated=plan is not None)
        return replace(exported, extension=extension)
    return _export_folder(run, path)


def _check_options(
    path: Path, size: tuple[int, int] | None, batch: int | None, openvino_extension: bool
) -> None:
    """Check that the options go together, and with the kind of the file."""
    if (size is None and batch is not None) or (size is not None and not path.suffix):
        raise UserError(
            "--batch needs --size, and both need a file, .onnx or .pt2: a folder for timm works with any size"
        )
    if openvino_extension and path.suffix != ".onnx":
        raise UserError(f"--openvino-extension needs a file that ends in .onnx, got {path}")


def _check_place(path: Path, features: bool) -> None:
    """Check all that can be known of the place before a model is opened."""
    if path.suffix:
        _check_file(path)
    else:
        _check_folder(path, features)
    place = path if path.is_dir() else path.parent
    above = next(folder for folder in (place, *path.parents) if folder.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write in {above}")


def _check_file(path: Path) -> None:
    if path.suffix not in FORMATS:
        endings = " or ".join(FORMATS)
        raise UserError(
            f"OUT must end in {endings}, or be a folder for timm, without an ending, got {str(path)!r}"
        )
    if path.suffix == ".onnx":
        formats.check_libraries()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")


def _check_folder(path: Path, features: bool) -> None:
    if features:
        raise UserError(
            "--features needs a file, .onnx or .pt2; a folder for timm already provides feature maps"
        )
    if path.is_file():
        endings = " or ".join(FORMATS)
        raise NotADirectoryError(f"{path} is a file: name a folder, or a file ending in {endings}")


def _export_file(
    run: LoadedRun, source: Source, path: Path, is_accelerated: bool = False
) -> Export:
    fixed = source.fixed
    if fixed and source.size and set(fixed[1:]) != {source.size}:
        came = " x ".join(map(str, fixed[1:]))
        raise UserError(
            f"the model takes only images of {source.size} x {source.size} pixels, got {came}"
        )
    encode, reopen = FORMATS[path.suffix]
    content = encode(source)
    opened = open_openvino(content, extended=True) if source.extended else reopen(content)
    verification = verify(
        source.module, opened, _sizes(run, source), batch=fixed[0] if fixed else None
    )
    atomic_write(path, content)
    speed = time_beside_dense(source, opened) if is_accelerated else None
    return Export(path, len(content), verification, speed=speed)


def _export_folder(run: LoadedRun, folder: Path) -> Export:
    if TASKS[run.recipe.task].has_backbone:
        wrong = (
            f"a folder for timm holds a classifier, but this is a model of task {run.recipe.task!r}"
        )
        raise UserError(f"{wrong}; the run's folder `model` has its weights as safetensors")
    if (folder / "model.safetensors").resolve() == run.source.resolve():
        raise UserError(f"{folder} contains the model to export: name another folder")
    source = source_of_run(run)
    record = make_record(run.recipe, run.class_names)
    with tempfile.TemporaryDirectory() as trial:
        export_model(Path(trial), run.network, record)
        opened = timm.create_model(f"local-dir:{trial}", pretrained=True).eval()
        verification = verify(source.module, lambda images: [opened(images)], _sizes(run, source))
    export_model(folder, run.network, record)
    return Export(folder, (folder / "model.safetensors").stat().st_size, verification)


class FeatureMaps(nn.Module):
    """A timm classifier that returns the maps of its stages instead of logits; UserError where it has none."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        if not hasattr(classifier, "forward_intermediates"):
            raise UserError(f"a {type(classifier).__name__} has no feature maps to export")
        self.classifier = classifier

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map (B, 3, H, W) images to NCHW maps, the finest first."""
        maps: list[Tensor] = self.classifier.forward_intermediates(images, intermediates_only=True)  # type: ignore[operator]
        return maps


def source_of_run(run: LoadedRun, features: bool = False) -> Source:
    """Choose what to export of a trained run.

    Args:
        run: the trained run.
        features: export the feature maps of its backbone instead of the task's output.

    Raises:
        UserError: the task's outputs are no tensors of one shape, the model has no maps, or it has
            windows (of Swin and CSWin) under the head of a task, which takes images of any size.
    """
    task = TASKS[run.recipe.task]
    data = run.recipe.to_dict()["data"]
    size = _only_size(run)
    about = {"model": run.recipe.model.name, "task": task.name, **DECODING}
    about["bits"] = str(data["bits"] or 16)
    for key in task.input_keys:
        value = data
        for part in key.split("."):
            value = value[part]
        about[part] = value if isinstance(value, str) else json.dumps(value)
    if features:
        return _source_of_features(run, size, about)
    if not task.outputs:
        why = "the number of objects is not known when the graph is built"
        hint = "export the feature maps of its backbone with --features"
        raise UserError(f"models of task {task.name!r} cannot be exported: {why}; {hint}")
    about["classes"] = json.dumps(run.class_names)
    return Source(run.network, task.outputs, size, about)


def _only_size(run: LoadedRun) -> int | None:
    """The only side of images that a run's model takes, in pixels; None where it takes any."""
    name = run.recipe.model.name
    windows = any(
        isinstance(part, WindowAttention | StripeAttention) for part in run.network.modules()
    )
    if TASKS[run.recipe.task].has_backbone:
        if windows:
            why = "uses windows, which a graph of dynamic size cannot express"
            raise UserError(
                f"a {name} {why}: only classifiers with it can be exported, for images of one size"
            )
        return None
    config = timm.get_pretrained_cfg(name)
    fixed = windows or (config is not None and config.fixed_input_size)
    return int(run.recipe.data.image_size) if fixed else None


def _source_of_features(run: LoadedRun, size: int | None, about: dict[str, str]) -> Source:
    maps: Any
    network: Any = run.network
    if TASKS[run.recipe.task].has_backbone:
        maps = network.backbone
        count = len(maps.channels)
    else:
        maps = FeatureMaps(network).eval()
        count = len(network.feature_info)
    return Source(maps, tuple(f"map_{index}" for index in range(count)), size, about)


def _sizes(run: LoadedRun, source: Source) -> list[tuple[int, int]]:
    """Heights and widths to check: the recipe's, and others where the model takes any."""
    if source.fixed:
        return [source.fixed[1:]]
    if source.size:
        return [(source.size, source.size)]
    side = min(max(run.recipe.data.image_size, 33), LARGEST_SIDE)
    return [(side, side), *FURTHER_SIZES]


@torch.inference_mode()
def verify(
    module: nn.Module,
    run: Runner,
    sizes: Sequence[tuple[int, int]],
    batch: int | None = None,
) -> Verification:
    """Compare an exported file with its source on random images.

    Where two groups (or keys) are equally near to a query (a centroid) within float32, rounding
    decides, and runtimes round differently: such an image may differ in some places. It is counted,
    and half of the images of a size may; a wrong graph fails for every one.

    Args:
        module, run: the source and the exported file.
        sizes: heights and widths of images in pixels.
        batch: images in each of three batches; by default three in one, and the same one by one.

    Returns:
        On how many images the two agreed, and by how much they differed.

    Raises:
        Disagreement: too few outputs are equal, or one is far off.

    Example:
        >>> verify(network, open_onnx(content), sizes=[(224, 224)]).difference
    """
    generator = torch.Generator().manual_seed(0)
    count, equal, largest = 0, 0, 0.0
    for height, width in sizes:
        shape = (BATCH * (batch or 1), 3, height, width)
        images = torch.randn(shape, generator=generator, device="cpu")
        parts = images.split(batch) if batch else (images, *images.split(1))
        pairs = [_compare(module, run, part) for part in parts]
        same, difference = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if same.float().mean() < LEAST_EQUAL:
            what = f"images of {height} x {width} pixels differ by up to {difference.max():.1e}"
            raise Disagreement(
                f"the exported model does not match its source: {what}; nothing was written"
            )
        count += len(same)
        equal += int(same.sum())
        largest = max(largest, float(difference.max()))
    return Verification(count, equal, largest)


def _compare(module: nn.Module, run: Runner, images: Tensor) -> tuple[Tensor, Tensor]:
    """For each image of a batch: whether the outputs are equal, and their largest relative
    difference.
    """
    expected = as_list(module(images))
    try:
        found = run(images)
    except Exception as error:  # of any kind, depending on the runtime
        what = f"images of {images.shape[2]} x {images.shape[3]} pixels: {str(error).strip().splitlines()[0]}"
        raise Disagreement(f"the exported model fails for {what}; nothing was written") from error
    same = images.new_ones(len(images), dtype=torch.bool)
    difference = images.new_zeros(len(images))
    if [output.shape for output in found] != [output.shape for output in expected]:
        return ~same, difference + torch.inf
    for ours, theirs in zip(expected, found, strict=True):
        largest = ours.flatten(1).abs().amax(1).clamp(min=1)
        difference = difference.maximum(
            (ours - theirs).flatten(1).abs().amax(1).div(largest).nan_to_num(torch.inf)
        )
        if ours.dim() == 2:
            same &= ours.argmax(1) == theirs.argmax(1)
    return same & (difference <= TOLERANCE), difference
