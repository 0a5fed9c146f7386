"""Data: the built-in scenes, readers of labelled images, transforms, and the classification data module.

`dgt.data.classification` is not imported here: it needs Lightning.
"""

from dgt.data.decoding import BrokenImage, BrokenImages, BrokenImagesError, decode_image, write_broken_images
from dgt.data.images import CifarImages, ImageFolder, PackedImages, available_splits, open_images
from dgt.data.scenes import Scene, SceneOptions, Scenes, draw_scene
from dgt.data.transforms import Augmentation, evaluation_transform, training_transform

__all__ = [
    "Augmentation",
    "BrokenImage",
    "BrokenImages",
    "BrokenImagesError",
    "CifarImages",
    "ImageFolder",
    "PackedImages",
    "Scene",
    "SceneOptions",
    "Scenes",
    "available_splits",
    "decode_image",
    "draw_scene",
    "evaluation_transform",
    "open_images",
    "training_transform",
    "write_broken_images",
]
