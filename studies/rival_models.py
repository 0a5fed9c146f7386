"""The trained models whose attention `studies.residual_rivals` approximates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import Tensor, nn

from dgt.training import load_run
from studies.captured_attention import MEAN, PATCH, STD, load_dinov2, middle_of, to_tensor
from studies.replacement import SHAPE, load_camvid_vit


class RivalModel(NamedTuple):
    """A trained model, and what is measured in it.

    Attributes:
        load: opens the model, in evaluation mode, from the path of its weights.
        patch: side of a patch in pixels.
        aspect: columns and rows of its images, as a ratio.
        sizes: heights of the images in pixels.
        layers: layers whose attention is measured by itself.
        global_layers: layers that stay dense with windows, one in three as in ViTDet.
        mean: of every channel, which is subtracted from images in [0, 1].
        std: of every channel, by which they are divided then.
    """

    load: Callable[[str | Path], nn.Module]
    patch: int
    aspect: tuple[int, int]
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    global_layers: tuple[int, ...]
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def shape(self, size: int) -> tuple[int, int]:
        """Height and width in pixels of images of a size."""
        columns, rows = self.aspect
        return size, size * columns // rows

    def tokens(self, size: int) -> int:
        """Number of patches of images of a size."""
        height, width = self.shape(size)
        return (height // self.patch) * (width // self.patch)

    def image(self, photograph: Image.Image, size: int) -> Tensor:
        """The middle of a photograph as input of the model, (1, 3, H, W)."""
        return to_tensor(middle_of(photograph, *self.shape(size)), self.mean, self.std)


def load_imagenette_vit(run: str | Path) -> nn.Module:
    """The ViT that `tools/make_weights.sh DATA OUT vit` trains, from the folder of its run."""
    return load_run(run).network.eval()


DINOV2 = "dinov2_small"
MODELS = {
    DINOV2: RivalModel(
        load=load_dinov2,
        patch=PATCH,
        aspect=(1, 1),
        sizes=(518, 784, 1036),
        layers=(0, 4, 8, 11),
        global_layers=(2, 5, 8, 11),
    ),
    "camvid_vit": RivalModel(
        load=load_camvid_vit,
        patch=SHAPE["patch_size"],
        aspect=(4, 3),
        sizes=(360,),
        layers=(0, 1, 2, 3),
        global_layers=(3,),
        mean=(0.45, 0.45, 0.45),
        std=(0.25, 0.25, 0.25),
    ),
    "imagenette_vit": RivalModel(
        load=load_imagenette_vit,
        patch=4,
        aspect=(1, 1),
        sizes=(256,),
        layers=(0, 1, 2, 3),
        global_layers=(3,),
    ),
}
