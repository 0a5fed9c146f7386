"""The Lightning data module of detection: COCO files, or the built-in scenes, as pictures with boxes and masks.

Batches are `(images, targets)`: a list of float images (3, H, W) in 0 to 1, each of its own size (the network resizes
them), and a list of dicts. In training these hold `boxes` float32 (N, 4) x0 y0 x1 y1, `labels` int64 (N,) from 1 on
(0 is background) and `masks` uint8 (N, H, W); in validation `image_id`, since what counts there is the ground truth of
`DetectionData.ground_truth`, as COCO's evaluation defines it, with its crowd regions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from dgt.data.coco import CocoAnnotations, Entry, draw_masks, encode_masks, read_annotations
from dgt.data.decoding import BrokenImage, BrokenImages, try_decode
from dgt.data.loading import Batch, Key
from dgt.data.module import ImageData, check_at_least, subset_indices
from dgt.data.scenes import Scenes
from dgt.utils.seeding import seeded

DATASETS = ("coco", "scenes")
SCENES_SIZE = {"train": 4000, "val": 500}


class Objects(NamedTuple):
    """The objects of one picture to train on.

    `boxes` float32 (N, 4) x0 y0 x1 y1; `labels` int64 (N,) from 1 on; `masks` uint8 (N, H, W).
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    masks: NDArray[np.uint8]


class AnnotatedImages(Protocol):
    """What a reader of pictures with objects offers; label l is the category `category_ids[l - 1]`."""

    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    image_ids: list[int]

    def picture(self, index: int) -> Image.Image | BrokenImage:
        """One picture in RGB."""
        ...

    def objects(self, index: int) -> Objects:
        """What of one picture can be trained on."""
        ...

    def with_objects(self) -> list[int]:
        """Indices of the pictures that hold anything to train on."""
        ...

    def ground_truth(self) -> dict[str, list[Entry]]:
        """What detections are compared with, in COCO's format."""
        ...


class CocoImages:
    """Pictures and objects of a COCO file. Crowd regions and boxes without area are left out of `objects`.

    Args:
        folder: where the pictures lie.
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

    def picture(self, index: int) -> Image.Image | BrokenImage:
        """Decode one picture, upright where its EXIF data say how to turn it: annotations are of the upright picture.

        One of another size than annotated is broken: its objects would lie elsewhere.
        """
        entry = self.annotations.images[index]
        path = self.folder / entry["file_name"]
        picture = try_decode(path, str(path))
        if isinstance(picture, Image.Image) and picture.size != (entry["width"], entry["height"]):
            width, height = picture.size
            return BrokenImage(str(path), f"is {width} x {height}, annotated as {entry['width']} x {entry['height']}")
        return picture

    def objects(self, index: int) -> Objects:
        """What of one picture's annotations can be trained on."""
        image = self.annotations.images[index]
        entries = self._trainable(image["id"])
        x, y, width, height = np.array([entry["bbox"] for entry in entries], np.float32).reshape(-1, 4).T
        return Objects(
            np.stack([x, y, x + width, y + height], axis=1),
            np.array([self._labels[entry["category_id"]] for entry in entries], np.int64),
            draw_masks(entries, image["height"], image["width"]),
        )

    def with_objects(self) -> list[int]:
        """Indices of the pictures that hold anything to train on."""
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

    def picture(self, index: int) -> Image.Image:
        """Draw one scene."""
        return Image.fromarray(self.scenes[index].image.permute(1, 2, 0).numpy())

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
            for (x0, y0, x1, y1), label, mask, code in zip(
                boxes.tolist(), labels.tolist(), masks, encode_masks(masks), strict=True
            ):
                entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "iscrowd": 0}
                box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": int(mask.sum()), "segmentation": code}
                annotations.append({**entry, **box})
        return {
            "images": [{"id": n, "file_name": f"{n}.png", "width": size, "height": size} for n in self.image_ids],
            "annotations": annotations,
            "categories": [
                {"id": number, "name": name} for number, name in zip(self.category_ids, self.class_names, strict=True)
            ],
        }


class Detectable(NamedTuple):
    """An image (3, H, W) in 0 to 1 with its target."""

    image: Tensor
    target: dict[str, Tensor]


class DetectionImages:
    """Some pictures of a reader as tensors; in training flipped at random and with objects, else with their image id.

    Args:
        images: the reader.
        indices: which of its pictures.
        flip: probability of a horizontal flip in training.
        seed: flips are a function of (seed, epoch, item).
        training: whether objects are wanted.
    """

    def __init__(self, images: AnnotatedImages, indices: list[int], flip: float, seed: int, training: bool) -> None:
        self.images, self.indices, self.seed, self.training = images, indices, seed, training
        self.class_names = images.class_names
        self.flip = v2.RandomHorizontalFlip(flip)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, key: Key) -> Detectable | BrokenImage:
        index = self.indices[key.item]
        picture = self.images.picture(index)
        if isinstance(picture, BrokenImage):
            return picture
        image = v2.functional.to_image(picture)
        if not self.training:
            target = {"image_id": torch.tensor(self.images.image_ids[index])}
            return Detectable(_pixels(image), target)
        boxes, labels, masks = self.images.objects(index)
        size = (picture.height, picture.width)
        sample = {
            "image": image,
            "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=size),
            "masks": tv_tensors.Mask(torch.from_numpy(masks)),
        }
        with seeded("augment", self.seed, key.epoch, key.item):
            sample = self.flip(sample)
        return _detectable(sample, torch.from_numpy(labels))


def _pixels(image: Tensor) -> Tensor:
    """A uint8 image as a plain float tensor in 0 to 1."""
    return v2.functional.to_dtype(image, torch.float32, scale=True).as_subclass(Tensor)


def _detectable(sample: dict[str, Any], labels: Tensor) -> Detectable:
    """Boxes cut at the image's border; without those that are then thinner than a pixel."""
    boxes = v2.functional.clamp_bounding_boxes(sample["boxes"])
    boxes, valid = v2.functional.sanitize_bounding_boxes(boxes)
    target = {"boxes": boxes, "labels": labels[valid], "masks": sample["masks"][valid]}
    return Detectable(_pixels(sample["image"]), {key: value.as_subclass(Tensor) for key, value in target.items()})


def collate_images(items: list[Detectable | BrokenImage]) -> Batch:
    """A batch of images of several sizes: lists of images and targets, and the broken ones."""
    samples = [item for item in items if isinstance(item, Detectable)]
    broken = [item for item in items if isinstance(item, BrokenImage)]
    return Batch([sample.image for sample in samples], [sample.target for sample in samples], broken)


class DetectionData(ImageData):
    """Pictures with boxes and masks for training and validation.

    Args:
        root: folder that the four paths below start from; left out for the built-in scenes.
        dataset: "coco" for annotation files in COCO's format, or "scenes".
        image_size: length that the shorter side of a picture is resized to, the longer one being at most 1333 / 800 of
            it; the side of a scene.
        batch_size: pictures per batch and process.
        num_workers: processes that prepare pictures; 0 for none beside the main one. Changes nothing but the speed.
        seed: order and flips are functions of it.
        train_size: number of training pictures: the first of one fixed permutation. Default all; 4000 for scenes.
        val_size: the same for validation. Default all; 500 for scenes.
        flip: probability of a horizontal flip in training.
        keep_empty: train on pictures without an object too; their only lesson is what background is.
        max_broken_share: share of a split's unreadable pictures, and likewise of its unusable annotations, above which
            the run stops; up to it they are left out and listed.
        train_images: folder of the training pictures.
        train_annotations: their COCO file.
        val_images: folder of the validation pictures.
        val_annotations: their COCO file.

    Raises:
        ValueError: a value out of its range; no root where one is needed, or one where none is.
    """

    root_holds = "a folder with train2017, val2017 and annotations as COCO has them (data.train_images ... name others)"

    def __init__(
        self,
        root: str | None = None,
        dataset: str = "coco",
        image_size: int = 800,
        batch_size: int = 2,
        num_workers: int = 4,
        seed: int = 0,
        train_size: int | None = None,
        val_size: int | None = None,
        flip: float = 0.5,
        keep_empty: bool = False,
        max_broken_share: float = 0.01,
        train_images: str = "train2017",
        train_annotations: str = "annotations/instances_train2017.json",
        val_images: str = "val2017",
        val_annotations: str = "annotations/instances_val2017.json",
    ) -> None:
        super().__init__(batch_size, num_workers, seed, max_broken_share)
        if dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}")
        if dataset == "coco" and root is None:
            raise ValueError(f"root: expected {self.root_holds}, got none")
        if dataset == "scenes" and root is not None:
            raise ValueError(
                f"root must be left out for dataset 'scenes', got {root!r}; for a folder set --data.dataset coco"
            )
        check_at_least(32, image_size=image_size)
        check_at_least(1, train_size=train_size, val_size=val_size)
        if not 0 <= flip <= 1:
            raise ValueError(f"flip must lie in [0, 1], got {flip}")
        self.root, self.dataset, self.image_size = root, dataset, image_size
        self.sizes = {"train": train_size, "val": val_size}
        self.flip, self.keep_empty = flip, keep_empty
        self.paths = {"train": (train_images, train_annotations), "val": (val_images, val_annotations)}
        self.readers: dict[str, AnnotatedImages] = {}

    def open_part(self, part: str) -> tuple[DetectionImages, str]:
        """Open "train" or "val".

        Raises:
            FileNotFoundError, ValueError: as `read_annotations` and `CocoImages` do; another list of categories than
                training's; a subset larger than its split; nothing to train on or to compare with.
            BrokenImagesError: more annotations are unusable than `max_broken_share` allows.
        """
        training = part == "train"
        reader, split = self._read(part)
        indices = list(range(len(reader.image_ids)))
        if training and not self.keep_empty:
            indices = reader.with_objects()
            if not indices:
                raise ValueError(f"{split} holds no picture with an object to train on")
        chosen = subset_indices(part, split, len(indices), self.sizes[part])
        self.readers[part] = reader
        kept = indices if chosen is None else [indices[place] for place in chosen]
        if not training and not set(kept).intersection(reader.with_objects()):
            raise ValueError(f"the {len(kept)} pictures of {split} hold no object to compare detections with")
        return DetectionImages(reader, kept, self.flip, self.seed, training), split

    def collate(self, part: str) -> Callable[[list[Any]], Batch]:
        """Lists of images and targets, the same in both parts."""
        return collate_images

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The data set's category numbers; label l is number l - 1 of them. After `setup`."""
        return next(iter(self.readers.values())).category_ids

    def ground_truth(self) -> dict[str, list[Entry]]:
        """What the validation's detections are compared with, in COCO's format; after `setup`."""
        return self.readers["val"].ground_truth()

    def _read(self, part: str) -> tuple[AnnotatedImages, str]:
        """The reader of one part, and its name for messages; takes note of annotations that cannot be used."""
        if self.dataset == "scenes":
            return SceneObjects(part, self.sizes[part] or SCENES_SIZE[part], self.image_size), part
        folder, file = (Path(self.root or "") / path for path in self.paths[part])
        annotations = read_annotations(file)
        reader = CocoImages(folder, annotations)
        for other in self.readers.values():
            if (other.class_names, other.category_ids) != (reader.class_names, reader.category_ids):
                raise ValueError(f"{file} has other categories than the training split's file")
        ledger = BrokenImages(part, annotations.total, self.max_broken_share, "annotations", "cannot be used")
        self.ledgers[f"{part} annotations"] = ledger
        ledger.record(annotations.bad)
        if annotations.bad:
            warnings.warn(
                f"{len(annotations.bad)} of {annotations.total} annotations in {file} cannot be used and are left out; "
                f"the first: {Path(annotations.bad[0].path).name}: {annotations.bad[0].reason}",
                stacklevel=2,
            )
        return reader, part
