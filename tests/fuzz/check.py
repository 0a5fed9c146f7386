"""What must hold for every fuzzed file: an answer in time, and for user errors a message, never a traceback."""

from __future__ import annotations

import contextlib
import io
import signal
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from images import image_file, intact_file
from PIL import Image
from recipes import recipe_text

import dgt.training
import dgt_command
from dgt.data.image_io import decode_image
from dgt.data.transforms import Augmentation, evaluation_transform, training_transform
from dgt.runs.recipe import Recipe, build_data
from dgt.tasks import TASKS

SECONDS = 20  # CPU time per file
TRANSFORMS = (
    training_transform(32, Augmentation()),
    training_transform(32, Augmentation(min_scale=1.0)),
    training_transform(32, Augmentation(pad_crop=4)),
    evaluation_transform(32),
)


class Hang(Exception):
    """A file took too long."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise Hang in code that takes longer."""

    def stop(*_: Any) -> None:
        raise Hang(f"more than {seconds} s of work")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check_image(seed: int) -> tuple[str, str | None]:
    """Decode and transform one image file.

    Returns:
        The result ("read" or "refused"), and what is wrong with it, or None.
    """
    content, about = image_file(seed)
    try:
        with within(SECONDS), warnings.catch_warnings(record=True):
            try:
                image = decode_image(content)
            except ValueError as error:
                must = (
                    about.startswith(("none", "exif", "doubled"))
                    and " I " not in about
                    and " F " not in about
                )
                return (
                    "refused",
                    f"image {seed} ({about}): a good file is refused: {error}" if must else None,
                )
            wrong = _wrong_image(image, seed, about)
            if wrong is None:
                wrong = next(
                    (text for text in map(_wrong_tensor, TRANSFORMS, [image] * 4) if text), None
                )
    except (Exception, Hang):
        wrong = traceback.format_exc()
    return "read", wrong and f"image {seed} ({about}): {wrong}"


def _wrong_image(image: Image.Image, seed: int, about: str) -> str | None:
    """Whether an image is not RGB or, if only its end was cut off, differs from the complete file."""
    if image.mode != "RGB" or min(image.size) < 1:
        return f"mode {image.mode}, size {image.size}"
    if about.startswith("cut") and not np.array_equal(
        np.asarray(image), np.asarray(decode_image(intact_file(seed)))
    ):
        return "a file cut off shows another image than the whole file"
    return None


def _wrong_tensor(transform: Any, image: Image.Image) -> str | None:
    tensor = transform(image)
    right = tensor.shape == (3, 32, 32) and tensor.dtype == torch.uint8
    return None if right else f"became {tuple(tensor.shape)} of {tensor.dtype}"


def check_recipe(seed: int, folder: Path) -> tuple[str, str | None]:
    """Start training with one recipe file, up to the point where data would be read.

    Returns:
        The result ("read" or "refused"), and what is wrong with it, or None.
    """
    content, about = recipe_text(seed)
    path = folder / "recipe.yaml"
    path.write_bytes(content)
    printed = io.StringIO()
    kept = dgt.training.fit
    dgt.training.fit = _prepare
    try:
        with (
            within(SECONDS),
            contextlib.redirect_stderr(printed),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            status = dgt_command.main(["train", str(path)])
    except (Exception, Hang):
        return "refused", f"recipe {seed} ({about}): {traceback.format_exc()}"
    finally:
        dgt.training.fit = kept
    sentence = printed.getvalue()
    if status == 0:
        return "read", None
    told = (
        status == 2
        and sentence.startswith("dgt: error: ")
        and sentence.count("\n") == 1
        and len(sentence) < 5000
    )
    return "refused", None if told else f"recipe {seed} ({about}): status {status}, {sentence!r}"


def _prepare(recipe: Recipe, *_: Any) -> Any:
    """What training does before it opens its data: build the data module and the network."""
    build_data(recipe)
    with torch.device("meta"):
        TASKS[recipe.task].build(recipe.model, 10, recipe.data.image_size)
    return SimpleNamespace(metrics={}, folder=".")
