"""What a model finds in one image, and what it is found in: the same types for every task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from dgt.data.image_io import decode_image
from dgt.data.transforms import Normalize
from dgt.utils.errors import UserError

Source = str | Path | Tensor
"""An image file, or the bytes (3, H, W) of an image as the network gets it: cropped, not yet normalised."""


class Run(Protocol):
    """What a task needs to know of a trained model, in evaluation mode."""

    @property
    def network(self) -> nn.Module:
        """The network, on the CPU."""

    @property
    def recipe(self) -> Any:
        """What it was trained as; `data` holds the settings of the data."""

    @property
    def class_names(self) -> list[str]:
        """Name of each class."""

    @property
    def source(self) -> Path:
        """Where the weights came from."""


@dataclass(frozen=True)
class Prediction:
    """What a model finds in one image.

    Args:
        image: path as it was given; empty where there is none.
        classes: (class name, probability, or share of the pixels), the largest first; empty where there are none.
        error: why the image could not be read, or None.
        objects: of a detector, {category, score, box (x0, y0, x1, y1)}, by falling score.
        pixels: uint8 (H, W, 3), what the network looked at.
        found: what the task draws over it: a label map, or detections.
    """

    image: str
    classes: list[tuple[str, float]] = field(default_factory=list)
    error: str | None = None
    objects: list[dict[str, Any]] | None = None
    pixels: Any = field(default=None, repr=False, compare=False)
    found: Any = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: `image`, `error`, and `classes` or `objects`."""
        told = {"classes": self.classes} if self.objects is None else {"objects": self.objects}
        return {"image": self.image, "error": self.error, **told}


def open_image(path: str | Path) -> Image.Image:
    """An image file as RGB.

    Raises:
        FileNotFoundError: there is none.
        UserError: it cannot be decoded.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no image file {str(path)!r}")
    try:
        return decode_image(path)
    except ValueError as error:
        raise UserError(f"{str(path)!r} cannot be read as an image: {error}") from error


def read_bytes(image: Source) -> Tensor:
    """uint8 (3, H, W) of an image file, or of an image as it is. Raises as `open_image`."""
    if isinstance(image, Tensor):
        return image
    return torch.from_numpy(np.array(open_image(image))).permute(2, 0, 1).contiguous()


def to_array(pixels: Tensor) -> NDArray[np.uint8]:
    """uint8 (3, H, W) to (H, W, 3)."""
    array: NDArray[np.uint8] = pixels.permute(1, 2, 0).contiguous().numpy()
    return array


def normalized(pixels: Tensor, data: dict[str, Any]) -> Tensor:
    """uint8 (3, H, W) as the network gets it, by `mean` and `std` of a recipe's data."""
    return Normalize(data["mean"], data["std"])(pixels)


def name_of(image: Source) -> str:
    """The path of an image file; nothing for an image without one."""
    return "" if isinstance(image, Tensor) else str(image)
