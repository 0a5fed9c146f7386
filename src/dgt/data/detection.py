"""The data module of detection: COCO's files, Pascal VOC's, Hugging Face data sets, or the built-in
scenes, as images with boxes and masks.

Batches are `(images, targets)`: a list of float images (3, H, W) in 0 to 1 of different sizes
(the network resizes them), and a list of dicts. In training these hold `Objects`; in validation
`image_id`, since what counts there is the reader's `ground_truth`, as COCO's evaluation defines it:
with crowd regions, boxes without area and images without any, which only training has no use for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from dgt.data.coco import CocoImages, Entry, Objects, Sample, coco_places
from dgt.data.folders import split_lists
from dgt.data.hub_objects import BOX_FORMATS, HubObjects
from dgt.data.image_io import BrokenImages, StrPath
from dgt.data.loader import Key
from dgt.data.module import ImageData, note_on_one_split
from dgt.data.readers import available_splits, is_hub
from dgt.data.scenes import Scenes
from dgt.data.voc import ANNOTATIONS, DIFFICULT, IMAGES, LISTS, VocImages, is_voc
from dgt.utils.class_names import changes
from dgt.utils.errors import UserError, check_range


class SceneObjects(Scenes):
    """The built-in scenes with their boxes and masks.

    A scene's number is its image id, kind c is category c + 1.
    """

    category_ids = tuple(range(1, len(Scenes.class_names) + 1))

    def __getitem__(self, index: int) -> Sample:
        return super().__getitem__(index).to_pil(), index, partial(self.objects, index)

    def objects(self, index: int) -> Objects:
        """The visible objects of one scene."""
        scene = super().__getitem__(index)
        return {"boxes": scene.boxes, "labels": scene.categories + 1, "masks": scene.masks.byte()}

    def with_objects(self) -> range:
        """All scenes: each holds an object."""
        return range(self.length)

    @lru_cache(maxsize=1)  # noqa: B019  # as many readers live as a run has splits
    def ground_truth(self) -> dict[str, list[Entry]]:
        """Boxes and masks of all scenes, in COCO's format."""
        size, annotations = self.image_size, list[Entry]()
        for number in range(self.length):
            boxes, labels, masks = self.objects(number).values()
            places = coco_places(boxes.tolist(), masks.numpy())
            for label, mask, place in zip(labels.tolist(), masks, places, strict=True):
                entry = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label,
                    "iscrowd": 0,
                }
                annotations.append({**entry, **place, "area": int(mask.sum())})
        return {
            "images": [
                {"id": n, "file_name": f"{n}.png", "width": size, "height": size}
                for n in range(self.length)
            ],
            "annotations": annotations,
            "categories": [
                {"id": number, "name": name}
                for number, name in enumerate(self.class_names, start=1)
            ],
        }


COCO, VOC, HUB = "COCO's files", "Pascal VOC's layout", "a Hugging Face data set"
# What each of them takes, of what the others do not
OPTIONS = {
    COCO: ("train_images", "train_annotations", "val_images", "val_annotations"),
    VOC: ("difficult", "train_split", "val_split"),
    HUB: ("box_format", "image_column", "objects_column", "train_split", "val_split"),
}


@dataclass
class DetectionData(ImageData):
    """Images with boxes and masks for training and validation; raises as `ImageData`.

    Args:
        root: folder that the four paths below start from, a folder in Pascal VOC's layout, which is
            recognized by its folders, or a Hugging Face data set (its folder or name); left out for
            the built-in scenes.
        dataset: "coco" to read `root`, whose objects are read as those of COCO's files, or "scenes".
        image_size: length that the shorter side of an image is resized to, the longer one being at
            most 1333 / 800 of it; the side of a scene.
        max_broken_share: share of a split's unreadable images, and likewise of its unusable
            annotations, above which the run stops; up to it they are left out and listed.
        flip: probability of a horizontal flip in training.
        keep_empty: train on images without an object too; their only lesson is what background is.
        train_images: folder of the training images.
        train_annotations: their COCO file.
        val_images: folder of the validation images.
        val_annotations: their COCO file.
        box_format: of a Hugging Face data set, "xywh" for left, top, width and height in pixels, or
            "xyxy" for corners; no data set says.
        image_column: its column with the images; null to find it.
        objects_column: its column with their objects; null to find it.
        difficult: of Pascal VOC's layout, what objects marked as difficult are: "ignore" for regions
            that are not trained on and in which detections count neither as right nor as wrong, or
            "keep" for objects as others are; null where none is marked.
        train_split: training split of a Hugging Face data set or of Pascal VOC's layout; by default
            "train" or "training", whichever is found.
        val_split: validation split of these; by default "val", "validation", "valid" or "test", the
            first found.
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
    box_format: str | None = None
    image_column: str | None = None
    objects_column: str | None = None
    difficult: str | None = None
    train_split: str | None = None
    val_split: str | None = None

    root_holds = (
        "a folder with train2017, val2017 and annotations as in COCO (data.train_images ... set other "
        "names), a folder in Pascal VOC's layout, or a Hugging Face data set"
    )
    scenes = SceneObjects
    scenes_size = {"train": 4000, "val": 500}  # noqa: RUF012
    root_options = tuple(sorted({name for names in OPTIONS.values() for name in names}))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trained_on: StrPath | None = None
        check_range(0, 1, section="data", flip=self.flip)
        if self.difficult not in (None, *DIFFICULT):
            raise UserError(
                f"data.difficult must be null or one of {', '.join(DIFFICULT)}, got {self.difficult!r}"
            )

    def open_root(self, root: str, part: str) -> tuple[str, CocoImages]:
        """As of all tasks; BrokenImagesError for too many annotations that cannot be used."""
        reader, place = self._open(root, part)
        if self.datasets and (
            changes(self.class_names, reader.class_names)
            or self.reader.category_ids != reader.category_ids
        ):
            raise UserError(f"the categories of {place} differ from those of the training split")
        if part == "train":
            self.trained_on = place
        elif place == self.trained_on:
            self.notes.append(note_on_one_split(str(place)))
        report = BrokenImages(
            part, reader.total, self.max_broken_share, "annotations", "cannot be used"
        )
        self.broken_images[f"{part} annotations"] = report
        report.record(reader.bad)
        return part, reader

    def _open(self, root: str, part: str) -> tuple[CocoImages, StrPath]:
        """The reader of a split, and where its annotations lie; UserError for options that what lies
        there does not have, and where nothing says what the boxes of a Hugging Face data set are.
        """
        kind = self._kind(root)
        for name in self.root_options:
            if name not in OPTIONS[kind] and self.is_named(name):
                takes = " or ".join(other for other, names in OPTIONS.items() if name in names)
                raise UserError(f"data.{name} is for {takes}, not for {kind}")
        classes = self.class_names if self.datasets else None
        if kind == COCO:
            folder, file = (
                Path(root, getattr(self, f"{part}_{what}")) for what in ("images", "annotations")
            )
            return CocoImages(file, folder, self.bits, classes), file
        if kind == VOC:
            lists = Path(root, LISTS)
            split = self.choose_split(part, split_lists(lists))
            found = VocImages(root, split, self.difficult, classes, self.bits)
            return found, lists / f"{split}.txt"
        if self.box_format not in BOX_FORMATS:
            raise UserError(
                f"data.box_format must be one of {', '.join(BOX_FORMATS)} for a Hugging Face data set: "
                f"no data set says what its boxes are, got {self.box_format!r}"
            )
        split = self.choose_split(part, available_splits(root))
        columns = {"image_column": self.image_column, "objects_column": self.objects_column}
        objects = HubObjects(root, split, self.box_format, classes, self.bits, **columns)
        return objects, f"{root}[{split}]"

    def _kind(self, root: str) -> str:
        """Which of `OPTIONS` lies in `root`: its folders say whether it is Pascal VOC's layout, unless
        other paths than COCO's own are named; UserError for both.
        """
        if is_hub(Path(root)):
            return HUB
        if any(map(self.is_named, OPTIONS[COCO])) or not is_voc(root):
            return COCO
        if Path(root, self.train_annotations).is_file():
            raise UserError(
                f"data.root: {root} has the folders of several layouts, {IMAGES} and {ANNOTATIONS}, and "
                f"{self.train_annotations}: leave one of them"
            )
        return VOC

    def choose(
        self, part: str, split: str, reader: Any, indices: Sequence[int] = ()
    ) -> Sequence[int]:
        """As of all tasks; for training the images with an object, and UserError where none holds one."""
        useful = reader.with_objects()
        leaves_out = part == "train" and not self.keep_empty
        if leaves_out and len(useful) < len(reader):
            self.notes.append(
                f"{len(reader) - len(useful)} of {len(reader)} training images have no object to train "
                "on and are left out: data.keep_empty takes them, too"
            )
        chosen = super().choose(part, split, reader, useful if leaves_out else ())
        if not set(chosen).intersection(useful):
            ignored = getattr(reader, "ignored", 0)
            but = (
                f", but {ignored} regions to ignore (iscrowd or ignore 1, or difficult)"
                if ignored
                else ""
            )
            raise UserError(f"the {len(chosen)} images of {part} contain no annotated object{but}")
        return chosen

    def transform(self, part: str, sample: Any) -> tuple[Tensor, Objects]:
        """An image as bytes (3, H, W), and its id; in training flipped at random, and its objects.

        Their boxes end at the image's border; objects whose box is then thinner than a pixel go.
        """
        image, image_id, objects = sample
        if part == "val":
            return v2.functional.pil_to_tensor(image), {"image_id": torch.tensor(image_id)}
        boxes, labels, masks = objects().values()
        boxes = tv_tensors.BoundingBoxes(
            boxes, format="XYXY", canvas_size=(image.height, image.width)
        )
        flip = v2.RandomHorizontalFlip(self.flip)
        pixels, boxes, masks = flip(tv_tensors.Image(image), boxes, tv_tensors.Mask(masks))
        boxes, valid = v2.functional.sanitize_bounding_boxes(
            v2.functional.clamp_bounding_boxes(boxes)
        )
        target = {"boxes": boxes, "labels": labels[valid], "masks": masks[valid]}
        return pixels.as_subclass(Tensor), {
            key: value.as_subclass(Tensor) for key, value in target.items()
        }

    def finish(
        self, part: str, key: Key, images: list[Tensor], targets: Any
    ) -> tuple[list[Tensor], Any]:
        """Bytes to 0 to 1."""
        return [
            v2.functional.to_dtype(image, torch.float32, scale=True) for image in images
        ], targets
