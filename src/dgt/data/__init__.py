"""Data: the built-in scenes, readers of labelled images, transforms, and the data modules of the tasks."""

from dgt.data.image_io import BrokenImage, BrokenImages, BrokenImagesError, decode_image, write_broken_images
from dgt.data.readers import CifarImages, HubImages, ImageFolder, available_splits, open_images
from dgt.data.scenes import Scene, SceneOptions, Scenes, draw_scene
from dgt.data.transforms import Augmentation, evaluation_transform, training_transform

__all__ = [
    "Augmentation",
    "BrokenImage",
    "BrokenImages",
    "BrokenImagesError",
    "CifarImages",
    "HubImages",
    "ImageFolder",
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
