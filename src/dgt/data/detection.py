"""The data module of detection: COCO files, or the built-in scenes, as images with boxes and masks.

Batches are `(images, targets)`: a list of float images (3, H, W) in 0 to 1, each of its own size (the network resizes
them), and a list of dicts. In training these hold `boxes` float32 (N, 4) x0 y0 x1 y1, `labels` int64 (N,) from 1 on
(0 is background) and `masks` uint8 (N, H, W); in validation `image_id`, since what counts there is the ground truth of
`DetectionData.ground_truth`, as COCO's evaluation defines it, with its crowd regions.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from dgt.data.coco import CocoAnnotations, Entry, draw_masks, encode_masks, read_annotations
from dgt.data.dataset import Drawn, Key, SeededDataset
from dgt.data.image_io import BrokenImage, BrokenImages, try_decode
from dgt.data.loader import Batch
from dgt.data.module import ImageData, subset_indices
from dgt.data.scenes import Scenes
from dgt.utils.errors import UserError, check_range


class Objects(NamedTuple):
    """The objects of one image to train on.

    `boxes` float32 (N, 4) x0 y0 x1 y1; `labels` int64 (N,) from 1 on; `masks` uint8 (N, H, W).
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    masks: NDArray[np.uint8]


class CocoImages:
    """Images and objects of a COCO file; a sample is an image and its index. Label l is `category_ids[l - 1]`.

    Args:
        folder: where the images lie.
        annotations: from `read_annotations`.

    Raises:
        FileNotFoundError: `folder` is not there.
    """

    def __init__(self, folder: Path, annotations: CocoAnnotations) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder of images {str(folder)!r}")
        self.folder, self.annotations = folder, annotations
        self.class_names = tuple(str(entry["name"]) for entry in annotations.categories)
        self.category_ids = tuple(int(entry["id"]) for entry in annotations.categories)
        self.image_ids = [entry["id"] for entry in annotations.images]
        self._labels = {number: label for label, number in enumerate(self.category_ids, start=1)}

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Image.Image, int] | BrokenImage:
        """Decode one image, upright where its EXIF data say how to turn it: annotations are of the upright image.

        One of another size than annotated is broken: its objects would lie elsewhere.
        """
        entry = self.annotations.images[index]
        path = self.folder / entry["file_name"]
        image = try_decode(path, str(path))
        if isinstance(image, BrokenImage):
            return image
        if image.size != (entry["width"], entry["height"]):
            width, height = image.size
            return BrokenImage(str(path), f"is {width} x {height}, annotated as {entry['width']} x {entry['height']}")
        return image, index

    def objects(self, index: int) -> Objects:
        """What of one image can be trained on: neither crowd regions nor boxes without area."""
        image = self.annotations.images[index]
        entries = self._trainable(image["id"])
        x, y, width, height = np.array([entry["bbox"] for entry in entries], np.float32).reshape(-1, 4).T
        return Objects(
            np.stack([x, y, x + width, y + height], axis=1),
            np.array([self._labels[entry["category_id"]] for entry in entries], np.int64),
            draw_masks(entries, image["height"], image["width"]),
        )

    def with_objects(self) -> list[int]:
        """Indices of the images that hold anything to train on."""
        return [index for index, number in enumerate(self.image_ids) if self._trainable(number)]

    def ground_truth(self) -> dict[str, list[Entry]]:
        """All usable annotations, in COCO's format."""
        return self.annotations.ground_truth()

    def _trainable(self, image_id: int) -> list[Entry]:
        entries = self.annotations.by_image[image_id]
        return [entry for entry in entries if not entry["iscrowd"] and min(entry["bbox"][2:]) > 0]


class SceneObjects:
    """The built-in scenes with their boxes and masks; a scene's number is its image id, kind c is category c + 1."""

    def __init__(self, split: str, length: int, image_size: int) -> None:
        self.scenes = Scenes(split, length, image_size)
        self.class_names = self.scenes.class_names
        self.category_ids = tuple(range(1, len(self.class_names) + 1))
        self.image_ids = list(range(length))

    def __len__(self) -> int:
        return len(self.scenes)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.scenes[index].to_pil(), index

    def objects(self, index: int) -> Objects:
        """The objects of one scene, as far as they can be seen."""
        scene = self.scenes[index]
        return Objects(scene.boxes.numpy(), scene.categories.numpy() + 1, scene.masks.numpy().astype(np.uint8))

    def with_objects(self) -> list[int]:
        """All scenes: each holds an object."""
        return self.image_ids

    def ground_truth(self) -> dict[str, list[Entry]]:
        """Boxes and masks of all scenes, in COCO's format."""
        return self._ground_truth

    @cached_property
    def _ground_truth(self) -> dict[str, list[Entry]]:
        size = self.scenes.image_size
        annotations: list[Entry] = []
        for number in self.image_ids:
            boxes, labels, masks = self.objects(number)
            boxes[:, 2:] -= boxes[:, :2]
            for box, label, mask, code in zip(boxes.tolist(), labels.tolist(), masks, encode_masks(masks), strict=True):
                entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "iscrowd": 0}
                annotations.append({**entry, "bbox": box, "area": int(mask.sum()), "segmentation": code})
        return {
            "images": [{"id": n, "file_name": f"{n}.png", "width": size, "height": size} for n in self.image_ids],
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in enumerate(self.class_names, start=1)],
        }


class DetectionTransform:
    """An image to bytes (3, H, W) and its target: in training flipped at random, with objects; else its image id.

    Args:
        reader: tells the objects of an image.
        flip: probability of a horizontal flip; None outside training.
    """

    def __init__(self, reader: CocoImages | SceneObjects, flip: float | None) -> None:
        self.reader, self.flip = reader, None if flip is None else v2.RandomHorizontalFlip(flip)

    def __call__(self, image: Image.Image, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        pixels = tv_tensors.Image(image)
        if self.flip is None:
            return pixels.as_subclass(Tensor), {"image_id": torch.tensor(self.reader.image_ids[index])}
        boxes, labels, masks = (torch.from_numpy(part) for part in self.reader.objects(index))
        size = (image.height, image.width)
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size)
        pixels, boxes, masks = self.flip(pixels, boxes, tv_tensors.Mask(masks))
        # Boxes end at the image's border; those that are then thinner than a pixel go.
        boxes, valid = v2.functional.sanitize_bounding_boxes(v2.functional.clamp_bounding_boxes(boxes))
        target = {"boxes": boxes, "labels": labels[valid], "masks": masks[valid]}
        return pixels.as_subclass(Tensor), {key: value.as_subclass(Tensor) for key, value in target.items()}


@dataclass(eq=False)
class DetectionData(ImageData):
    """Images with boxes and masks for training and validation.

    Args:
        root: folder that the four paths below start from; left out for the built-in scenes.
        dataset: "coco" for annotation files in COCO's format, or "scenes".
        image_size: length that the shorter side of an image is resized to, the longer one being at most 1333 / 800 of
            it; the side of a scene.
        max_broken_share: share of a split's unreadable images, and likewise of its unusable annotations, above which
            the run stops; up to it they are left out and listed.
        flip: probability of a horizontal flip in training.
        keep_empty: train on images without an object too; their only lesson is what background is.
        train_images: folder of the training images.
        train_annotations: their COCO file.
        val_images: folder of the validation images.
        val_annotations: their COCO file.

    Raises:
        UserError: a value out of its range; no root where one is needed, or one where none is.
    """

    dataset: str = "coco"
    image_size: int = 800
    batch_size: int = 2
    flip: float = 0.5
    keep_empty: bool = False
    train_images: str = "train2017"
    train_annotations: str = "annotations/instances_train2017.json"
    val_images: str = "val2017"
    val_annotations: str = "annotations/instances_val2017.json"

    root_holds = "a folder with train2017, val2017 and annotations as COCO has them (data.train_images ... name others)"
    scenes_size = {"train": 4000, "val": 500}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(0, 1, flip=self.flip)
        self.readers: dict[str, CocoImages | SceneObjects] = {}

    def open_part(self, part: str) -> tuple[SeededDataset, str]:
        """Open "train" or "val".

        Raises:
            FileNotFoundError, UserError: as `read_annotations` and `CocoImages` do; another list of categories than
                training's; a subset larger than its split; nothing to train on or to compare with; more annotations
                are unusable than `max_broken_share` allows.
        """
        reader = self._read(part)
        useful, indices = reader.with_objects(), list(range(len(reader)))
        if part == "train" and not self.keep_empty:
            indices = useful
            if not indices:
                raise UserError(f"{part} holds no image with an object to train on")
        chosen = subset_indices(part, part, len(indices), self.size(part))
        indices = indices if chosen is None else [indices[place] for place in chosen]
        if part == "val" and not set(indices).intersection(useful):
            raise UserError(f"the {len(indices)} images of {part} hold no object to compare detections with")
        self.readers[part] = reader
        transform = DetectionTransform(reader, self.flip if part == "train" else None)
        return SeededDataset(reader, transform, self.seed, indices), part

    def collate(self, part: str, drawn: Drawn) -> Batch:
        """Lists of images and targets."""
        key, samples, broken = drawn
        return Batch(key, [image for image, _ in samples], [target for _, target in samples], broken)

    def finish(self, part: str, key: Key, images: list[Tensor], targets: Any) -> tuple[list[Tensor], Any]:
        """Bytes to 0 to 1."""
        return [v2.functional.to_dtype(image, torch.float32, scale=True) for image in images], targets

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The data set's category numbers; label l is number l - 1 of them. After `setup`."""
        return next(iter(self.readers.values())).category_ids

    def ground_truth(self) -> dict[str, list[Entry]]:
        """What the validation's detections are compared with, in COCO's format; after `setup`."""
        return self.readers["val"].ground_truth()

    def _read(self, part: str) -> CocoImages | SceneObjects:
        """The reader of one part; reports annotations that cannot be used."""
        if self.root is None:
            return SceneObjects(part, self.size(part) or self.scenes_size[part], self.image_size)
        folder, file = (Path(self.root, getattr(self, f"{part}_{what}")) for what in ("images", "annotations"))
        annotations = read_annotations(file)
        reader = CocoImages(folder, annotations)
        for other in self.readers.values():
            if (other.class_names, other.category_ids) != (reader.class_names, reader.category_ids):
                raise UserError(f"{file} has other categories than the training split's file")
        ledger = BrokenImages(part, annotations.total, self.max_broken_share, "annotations", "cannot be used")
        self.ledgers[f"{part} annotations"] = ledger
        ledger.record(annotations.bad)
        if annotations.bad:
            warnings.warn(
                f"{len(annotations.bad)} of {annotations.total} annotations in {file} cannot be used and are left out; "
                f"the first: {Path(annotations.bad[0].path).name}: {annotations.bad[0].reason}",
                stacklevel=2,
            )
        return reader
