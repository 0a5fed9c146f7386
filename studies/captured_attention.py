"""Queries, keys, and values of a real model: the inputs of its attention on photographs.

The weights of DINOv2-S are a safetensors file under timm's names, such as `studies.dinov2_weights`
writes.
"""

from __future__ import annotations

import bz2
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from dgt.utils.errors import UserError

MODEL = "vit_small_patch14_dinov2"
PATCH = 14
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RACCOON = (768, 1024, 3)  # rows, columns, and channels of SciPy's `face.dat`
EXACT = F.scaled_dot_product_attention


class Captured(NamedTuple):
    """One attention call of a model: operands (1, H, L, D) exactly as they are passed to the attention.

    The first ``prefix`` tokens are class and register tokens; the others are patches, row by row on
    a ``grid`` of rows and columns.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grid: tuple[int, int]
    prefix: int


def load_dinov2(weights: str | Path) -> nn.Module:
    """DINOv2-S/14 for images of any size, in evaluation mode.

    Raises:
        UserError: If there is no such file.
    """
    import timm

    if not Path(weights).is_file():
        raise UserError(f"--weights must be a safetensors file of {MODEL}, got {str(weights)!r}")
    model: nn.Module = timm.create_model(MODEL, num_classes=0, dynamic_img_size=True)
    own = model.state_dict().keys()
    model.load_state_dict({name: part for name, part in load_file(weights).items() if name in own})
    return model.eval()


def read_photograph(path: str | Path) -> Image.Image:
    """An RGB image from an image file, or from `face.dat`, the raccoon of SciPy before 1.12.

    Raises:
        UserError: If there is no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"a photograph is missing: {str(path)!r}")
    if Path(path).suffix == ".dat":
        pixels = np.frombuffer(bz2.decompress(Path(path).read_bytes()), dtype=np.uint8)
        return Image.fromarray(pixels.reshape(RACCOON))
    return Image.open(path).convert("RGB")


def middle_of(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle of an image, scaled until it fills (height, width) pixels."""
    factor = max(height / image.height, width / image.width)
    size = (round(image.width * factor), round(image.height * factor))
    scaled = image.resize(size, Image.Resampling.BICUBIC)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return scaled.crop((left, top, left + width, top + height))


def to_tensor(image: Image.Image) -> Tensor:
    """(1, 3, H, W), normalized by channel as DINOv2 expects."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    means, deviations = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return ((pixels - means) / deviations)[None]


@contextmanager
def attention_as(answer: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Context in which ``answer(index of the call, q, k, v)`` replaces PyTorch's attention."""
    calls = iter(range(1_000_000))

    def instead(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        # For calls made by `answer` itself.
        with patch.object(F, "scaled_dot_product_attention", EXACT):
            return answer(next(calls), query, key, value)

    with patch.object(F, "scaled_dot_product_attention", instead):
        yield


@torch.no_grad()
def capture(model: nn.Module, image: Tensor, layers: tuple[int, ...]) -> dict[int, Captured]:
    """The operands of the given layers for one image (1, 3, H, W).

    Raises:
        UserError: If the model has no such layer.
    """
    found: dict[int, Captured] = {}
    grid = (image.shape[2] // PATCH, image.shape[3] // PATCH)
    prefix = int(getattr(model, "num_prefix_tokens", 0))

    def keep(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if number in layers:
            found[number] = Captured(query.clone(), key.clone(), value.clone(), grid, prefix)
        return EXACT(query, key, value)

    with attention_as(keep):
        model.forward_features(image)  # type: ignore[operator]
    if missing := set(layers) - found.keys():
        raise UserError(f"--layers must be layers of the model, got {min(missing)}")
    return found
