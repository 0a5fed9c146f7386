"""The data module of detection: COCO files, or the built-in scenes, as images with boxes and masks.

Batches are `(images, targets)`: a list of float images (3, H, W) in 0 to 1, each of its own size (the network resizes
them), and a list of dicts. In training these hold `boxes` float32 (N, 4) x0 y0 x1 y1, `labels` int64 (N,) from 1 on
(0 is background) and `masks` uint8 (N, H, W); in validation `image_id`, since what counts there is the ground truth of
`DetectionData.ground_truth`, as COCO's evaluation defines it, with its crowd regions.
"""

import warnings
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from dgt.data.coco import CocoAnnotations, Entry, draw_masks, encode_masks, read_annotations
from dgt.data.dataset import Key, SeededDataset
from dgt.data.image_io import BrokenImage, BrokenImages, try_decode
from dgt.data.module import ImageData
from dgt.data.scenes import Scenes
from dgt.utils.errors import UserError, check_range

Objects = dict[str, Tensor]
"""What to train on: `boxes` float32 (N, 4) x0 y0 x1 y1; `labels` int64 (N,) from 1 on; `masks` uint8 (N, H, W)."""


class CocoImages:
    """Images of a COCO file in a folder, with their indices, and their objects. Label l is category
    `category_ids[l - 1]`. FileNotFoundError where there is no such folder.
    """

    def __init__(self, folder: Path, annotations: CocoAnnotations) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder of images {str(folder)!r}")
        self.folder, self.annotations = folder, annotations
        self.class_names = tuple(str(entry["name"]) for entry in annotations.categories)
        self.category_ids = tuple(int(entry["id"]) for entry in annotations.categories)
        self.image_ids = [entry["id"] for entry in annotations.images]

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Image.Image, int] | BrokenImage:
        """One image, upright where its EXIF data say how to turn it: annotations are of the upright image.

        One of another size than annotated is broken: its objects would lie elsewhere.
        """
        entry = self.annotations.images[index]
        path = str(self.folder / entry["file_name"])
        sample = try_decode(path, path, index)
        if not isinstance(sample, BrokenImage) and sample[0].size != (entry["width"], entry["height"]):
            width, height = sample[0].size
            return BrokenImage(path, f"is {width} x {height}, annotated as {entry['width']} x {entry['height']}")
        return sample

    def objects(self, index: int) -> Objects:
        """What of one image can be trained on: neither crowd regions nor boxes without area."""
        image = self.annotations.images[index]
        entries = self._trainable(image["id"])
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [1 + self.category_ids.index(entry["category_id"]) for entry in entries]
        masks = draw_masks(entries, image["height"], image["width"])
        return {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), "masks": torch.from_numpy(masks)}

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
        return {"boxes": scene.boxes, "labels": scene.categories + 1, "masks": scene.masks.byte()}

    def with_objects(self) -> list[int]:
        """All scenes: each holds an object."""
        return self.image_ids

    @lru_cache(maxsize=1)  # noqa: B019  # as many readers live as a run has splits
    def ground_truth(self) -> dict[str, list[Entry]]:
        """Boxes and masks of all scenes, in COCO's format."""
        size = self.scenes.image_size
        annotations: list[Entry] = []
        for number in self.image_ids:
            boxes, labels, masks = self.objects(number).values()
            boxes[:, 2:] -= boxes[:, :2]
            codes = encode_masks(masks.numpy())
            for box, label, mask, code in zip(boxes.tolist(), labels.tolist(), masks, codes, strict=True):
                entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "iscrowd": 0}
                annotations.append({**entry, "bbox": box, "area": int(mask.sum()), "segmentation": code})
        return {
            "images": [{"id": n, "file_name": f"{n}.png", "width": size, "height": size} for n in self.image_ids],
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in enumerate(self.class_names, start=1)],
        }


def _validated(reader: CocoImages | SceneObjects, image: Image.Image, index: int) -> tuple[Tensor, Objects]:
    """An image as bytes (3, H, W), and its id."""
    return v2.functional.pil_to_tensor(image), {"image_id": torch.tensor(reader.image_ids[index])}


def _trained(reader: CocoImages | SceneObjects, flip: float, image: Image.Image, index: int) -> tuple[Tensor, Objects]:
    """An image as bytes (3, H, W), and its objects, flipped at random.

    Boxes end at the image's border; objects whose box is then thinner than a pixel go.
    """
    boxes, labels, masks = reader.objects(index).values()
    boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(image.height, image.width))
    pixels, boxes, masks = v2.RandomHorizontalFlip(flip)(tv_tensors.Image(image), boxes, tv_tensors.Mask(masks))
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

    Raises UserError for a value out of its range, and where nothing says which data set is meant.
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

    def open_part(self, part: str) -> tuple[SeededDataset, str]:
        """As of all tasks. Raises UserError, too, where nothing is to be trained on or compared with, or more
        annotations are unusable than `max_broken_share` allows.
        """
        reader = self._read(part)
        useful = reader.with_objects()
        if part == "train" and not useful and not self.keep_empty:
            raise UserError(f"{part} holds no image with an object to train on")
        chosen = self.subset(part, part, useful if part == "train" and not self.keep_empty else range(len(reader)))
        if part == "val" and not set(chosen).intersection(useful):
            raise UserError(f"the {len(chosen)} images of {part} hold no object to compare detections with")
        transform = partial(_trained, reader, self.flip) if part == "train" else partial(_validated, reader)
        return SeededDataset(reader, transform, self.seed, chosen), part

    def collate(self, part: str, key: Key, samples: list[Any]) -> tuple[Any, Any]:
        """Lists of images and targets."""
        return [image for image, _ in samples], [target for _, target in samples]

    def finish(self, part: str, key: Key, images: list[Tensor], targets: Any) -> tuple[list[Tensor], Any]:
        """Bytes to 0 to 1."""
        return [v2.functional.to_dtype(image, torch.float32, scale=True) for image in images], targets

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The data set's category numbers; label l is number l - 1 of them. After `setup`."""
        return tuple(self.reader.category_ids)

    def ground_truth(self) -> dict[str, list[Entry]]:
        """What the validation's detections are compared with, in COCO's format; after `setup`."""
        reader: Any = self.datasets["val"].reader
        return dict(reader.ground_truth())

    def _read(self, part: str) -> CocoImages | SceneObjects:
        """The reader of one part; reports annotations that cannot be used."""
        if self.root is None:
            return SceneObjects(part, self.scene_count(part), self.image_size)
        folder, file = (Path(self.root, getattr(self, f"{part}_{what}")) for what in ("images", "annotations"))
        annotations = read_annotations(file)
        reader = CocoImages(folder, annotations)
        if self.datasets and (self.class_names, self.category_ids) != (reader.class_names, reader.category_ids):
            raise UserError(f"{file} has other categories than the training split's file")
        report = BrokenImages(part, annotations.total, self.max_broken_share, "annotations", "cannot be used")
        self.broken_images[f"{part} annotations"] = report
        report.record(annotations.bad)
        if annotations.bad:
            count, (first, reason) = f"{len(annotations.bad)} of {annotations.total}", annotations.bad[0]
            told = f"{count} annotations in {file} cannot be used and are left out; the first: {Path(first).name}"
            warnings.warn(f"{told}: {reason}", stacklevel=2)
        return reader
