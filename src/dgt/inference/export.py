"""The files that a trained model is exported to, each checked against its source before it takes its place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm

from dgt.inference.formats import Runner, check_libraries, encode_onnx, encode_program, open_onnx, open_program
from dgt.inference.source import Source, backbone_of, source_of_run
from dgt.inference.verify import Verification, verify
from dgt.training.load import LoadedRun, load_run
from dgt.training.run import export_model, make_record
from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import UserError

FORMATS: dict[str, tuple[Callable[[Source], bytes], Callable[[bytes], Runner]]] = {
    ".onnx": (encode_onnx, open_onnx),
    ".pt2": (encode_program, open_program),
}
FURTHER_SIZES = ((160, 224), (97, 65))  # many tokens in the first stages; odd, with fewer tokens than keys
LARGEST_SIDE = 512  # of the images that a file is checked with


@dataclass(frozen=True)
class Export:
    """An exported model.

    Args:
        path: the file, or the folder.
        size: bytes of the file, or of the weights in the folder.
        verification: how it agreed with its source.
    """

    path: Path
    size: int
    verification: Verification

    def __str__(self) -> str:
        return f"{self.path}  {self.size / 2**20:.1f} MiB  {self.verification}"


def export(checkpoint: str | Path, out: str | Path, features: bool = False) -> Export:
    """Write a trained model for other programs, and check it against its source before it takes its place.

    Args:
        checkpoint: checkpoint, run folder or model folder, as `load_run` takes them: also any folder that timm wrote.
        out: a file ending in `.onnx` or `.pt2`, replaced if it is there; or, without an ending, a folder for
            `timm.create_model("local-dir:FOLDER", pretrained=True)`.
        features: the feature maps of the backbone instead of what the task predicts; for files.

    Raises:
        FileNotFoundError, ValueError: as `load_run` and :func:`source_of_run` do; for an unknown ending, a missing
            library, and a model that the format cannot hold.
        OSError: `out` cannot be written.
        RuntimeError: what was exported is not equal to its source; nothing is written then.
    """
    path = Path(out)
    _check_place(path, features)
    run = load_run(checkpoint)
    if path.suffix:
        return _export_file(run, path, features)
    return _export_folder(run, path)


def _check_place(path: Path, features: bool) -> None:
    """Check all that can be known of the place before a model is opened."""
    if path.suffix and path.suffix not in FORMATS:
        endings = " or ".join(FORMATS)
        raise UserError(f"OUT must end in {endings}, or have no ending and name a folder for timm, got {str(path)!r}")
    if path.suffix == ".onnx":
        check_libraries()
    if path.suffix and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not path.suffix and features:
        raise UserError("feature maps are exported to a file, .onnx or .pt2; a folder for timm has them as they are")
    if not path.suffix and path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file: name a folder, or a file ending in {' or '.join(FORMATS)}")
    above = next(place for place in (path if path.is_dir() else path.parent, *path.parents) if place.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write in {above}")


def _export_file(run: LoadedRun, path: Path, features: bool) -> Export:
    source = source_of_run(run, features)
    encode, reopen = FORMATS[path.suffix]
    content = encode(source)
    verification = verify(source.module, reopen(content), _sizes(run, source))
    atomic_write(path, content)
    return Export(path, len(content), verification)


def _export_folder(run: LoadedRun, folder: Path) -> Export:
    if backbone_of(run) is not None:
        raise UserError(
            f"a folder for timm holds a classifier, this is a model of the task {run.recipe.task!r}; "
            "a run's folder `model` has its weights as safetensors"
        )
    if (folder / "model.safetensors").resolve() == run.source.resolve():
        raise UserError(f"{folder} is where the model comes from: name another folder")
    source = source_of_run(run)
    record = make_record(run.recipe, run.class_names)
    with tempfile.TemporaryDirectory() as trial:
        export_model(Path(trial), run.network, record)
        opened = timm.create_model(f"local-dir:{trial}", pretrained=True).eval()
        verification = verify(source.module, lambda images: [opened(images)], _sizes(run, source))
    export_model(folder, run.network, record)
    return Export(folder, (folder / "model.safetensors").stat().st_size, verification)


def _sizes(run: LoadedRun, source: Source) -> list[tuple[int, int]]:
    """Heights and widths to check: the recipe's, and others where the model takes any."""
    if source.size is not None:
        return [(source.size, source.size)]
    side = min(max(run.recipe.data["image_size"], 33), LARGEST_SIDE)
    return [(side, side), *FURTHER_SIZES]
