"""The data module of detection: COCO files, or the built-in scenes, as images with boxes and masks.

Batches are `(images, targets)`: a list of float images (3, H, W) in 0 to 1, each of its own size (the network resizes
them), and a list of dicts. In training these hold `Objects`; in validation `image_id`, since what counts there is the
reader's `ground_truth`, as COCO's evaluation defines it: with crowd regions, boxes without area and images without any,
which only training has no use for. An annotation that contradicts its file, such as by a category that it does not list
or by a polygon of two points, which COCO's own code would read as a box, is set aside with its reason.
"""

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from dgt.data.image_io import BrokenImage, BrokenImages, StrPath, try_decode
from dgt.data.loader import Key
from dgt.data.module import ImageData
from dgt.data.scenes import Scenes
from dgt.utils.errors import UserError, check_range

Entry = dict[str, Any]
Rules = dict[str, tuple[str, Callable[[Any], bool]]]
"""Keys that an entry must have: what is expected there, for a message, and whether a value is that."""
Objects = dict[str, Tensor]
"""What to train on: `boxes` float32 (N, 4) x0 y0 x1 y1; `labels` int64 (N,) from 1 on; `masks` uint8 (N, H, W)."""
Sample = tuple[Image.Image, int, Callable[[], Objects]]
"""An image, its id, and a function for its objects, which only training needs."""


def _is_id(value: Any) -> bool:
    """An integer as NumPy and COCO's code hold it."""
    return type(value) is int and -(2**63) <= value < 2**63


def _numbers(values: Any) -> bool:
    """A list of finite numbers."""
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)


ID = ("a 64-bit integer", _is_id)
TEXT = ("a text", lambda value: isinstance(value, str) and value != "")
SIDE = ("an integer above 0", lambda value: _is_id(value) and value > 0)
MASK = "polygons [x, y, ...] of at least 3 points, or a run-length code that fills its image"
# The lists of a file, and what each of their entries must have: else the file is not read at all.
SECTIONS: dict[str, Rules] = {
    "images": {"id": ID, "file_name": TEXT, "width": SIDE, "height": SIDE},
    "annotations": {"id": ID},
    "categories": {"id": ID, "name": TEXT},
}


class CocoImages:
    """Images of a COCO file of instances, which lie in `folder`: JSON with `images`, `annotations` and `categories`.

    `images` in the file's order; `categories` by rising id: label l is category `category_ids[l - 1]`; `by_image` the
    usable annotations of each image id, crowd among them; `bad` the others, each with its reason; `total` all of them.
    FileNotFoundError for no such file or folder; UserError for what is not JSON, a missing list, an entry without what
    `SECTIONS` tells, two entries of a list with one id, two categories of one name.
    """

    def __init__(self, path: StrPath, folder: StrPath = ".") -> None:
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder of images {str(folder)!r}")
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not JSON: {error}") from error
        self.folder = folder
        self.images, annotations, categories = (_section(content, name, path) for name in SECTIONS)
        self.categories = sorted(categories, key=lambda entry: entry["id"])
        self.class_names = tuple(str(entry["name"]) for entry in self.categories)
        self.category_ids = tuple(int(entry["id"]) for entry in self.categories)
        images, known = {entry["id"]: entry for entry in self.images}, set(self.category_ids)
        self.by_image: dict[int, list[Entry]] = {number: [] for number in images}
        self.bad, self.total = list[BrokenImage](), len(annotations)
        for entry in annotations:
            problem = annotation_problem(entry, images, known)
            if problem is None:
                self.by_image[entry["image_id"]].append({"iscrowd": 0, **entry})
            else:
                self.bad.append(BrokenImage(f"{path}: annotation {entry['id']}", problem))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample | BrokenImage:
        """One image, upright as its annotations are; of another size than annotated it is broken."""
        entry = self.images[index]
        path = os.path.join(self.folder, entry["file_name"])
        found = try_decode(path, path, entry["id"])
        if isinstance(found, BrokenImage):
            return found
        width, height = found[0].size
        if (width, height) != (entry["width"], entry["height"]):
            return BrokenImage(path, f"is {width} x {height}, annotated as {entry['width']} x {entry['height']}")
        return *found, partial(self.objects, index)

    def objects(self, index: int) -> Objects:
        """What of one image can be trained on: neither crowd regions nor boxes without area."""
        image, entries = self.images[index], self._trainable(index)
        boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [1 + self.category_ids.index(entry["category_id"]) for entry in entries]
        masks = draw_masks(entries, image["height"], image["width"])
        return {"boxes": boxes, "labels": torch.tensor(labels, dtype=torch.int64), "masks": torch.from_numpy(masks)}

    def with_objects(self) -> list[int]:
        """Indices of the images that hold anything to train on."""
        return [index for index in range(len(self)) if self._trainable(index)]

    def ground_truth(self) -> dict[str, list[Entry]]:
        """The file again, without the annotations that cannot be used: what detections are compared with."""
        annotations = [entry for entries in self.by_image.values() for entry in entries]
        return {"images": self.images, "annotations": annotations, "categories": self.categories}

    def _trainable(self, index: int) -> list[Entry]:
        entries = self.by_image[self.images[index]["id"]]
        return [entry for entry in entries if not entry["iscrowd"] and min(entry["bbox"][2:]) > 0]


def _section(content: Any, name: str, path: StrPath) -> list[Entry]:
    """One of the file's lists, checked by `SECTIONS`; no two ids or names are the same, metrics are told by them."""
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, list) or not (found or name == "annotations"):
        raise UserError(f"{path} is not in COCO's format: it has no list {name!r}, or an empty one")
    for place, entry in enumerate(found):
        if fault := _fault(entry, SECTIONS[name]):
            raise UserError(f"{path}: {name}[{place}] {fault}")
    for key in {"id", "name"}.intersection(SECTIONS[name]):
        for value, times in Counter(entry[key] for entry in found).most_common(1):
            if times > 1:
                raise UserError(f"{path}: two entries of {name!r} have the {key} {value!r}")
    return found


def _fault(entry: Any, rules: Rules) -> str | None:
    """The first rule that an entry breaks, as a message; None where it keeps them all."""
    for key, (wanted, fits) in rules.items():
        value = entry.get(key) if isinstance(entry, dict) else None
        if not fits(value):
            return f"must have {wanted} as its {key}, got {value!r:.100}"
    return None


def annotation_problem(entry: Entry, images: Mapping[int, Entry], categories: set[int]) -> str | None:
    """Why an annotation cannot be used, or None where it can, by the file's images by id and its category ids."""
    rules: Rules = {
        "image_id": ("one of the file's images", lambda value: _is_id(value) and value in images),
        "category_id": ("one of the file's categories", lambda value: _is_id(value) and value in categories),
        "bbox": ("[x, y, width, height]", lambda box: _numbers(box) and len(box) == 4 and min(box[2:]) >= 0),
        "area": ("a finite number", lambda area: _numbers([area])),
        "iscrowd": ("0 or 1", lambda value: value in (0, 1)),
        "segmentation": (MASK, lambda mask: _drawable(mask, images[entry["image_id"]])),
    }
    return _fault({"iscrowd": 0, **entry}, rules)


def _drawable(mask: Any, image: Entry) -> bool:
    """Whether a mask is a `MASK` of an image."""
    height, width = image["height"], image["width"]
    if isinstance(mask, list):
        return mask != [] and all(_numbers(part) and len(part) >= 6 and len(part) % 2 == 0 for part in mask)
    if not isinstance(mask, dict) or mask.get("size") != [height, width]:
        return False
    coco_mask = _coco_mask()
    try:
        return coco_mask.decode(coco_mask.segmToRle(mask, width, height)) is not None
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False


def _coco_mask() -> Any:
    """COCO's own code for masks, of the extra `train`: what only builds or exports a detector does without."""
    from faster_coco_eval.core import mask

    return mask


def draw_masks(entries: Sequence[Entry], height: int, width: int) -> NDArray[np.uint8]:
    """uint8 (N, height, width), 1 inside: masks of polygons or run-length codes, as COCO's own code draws them."""
    if not entries:
        return np.zeros((0, height, width), dtype=np.uint8)
    coco_mask = _coco_mask()
    codes = [coco_mask.segmToRle(entry["segmentation"], width, height) for entry in entries]
    return np.ascontiguousarray(coco_mask.decode(codes).transpose(2, 0, 1))


def encode_masks(masks: NDArray[np.uint8]) -> list[Entry]:
    """Masks (N, H, W) of 0 and 1 as compressed run-length codes that JSON can hold: `size` and `counts`."""
    codes = _coco_mask().encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return [{"size": [int(side) for side in code["size"]], "counts": str(code["counts"], "ascii")} for code in codes]


def coco_places(boxes: Sequence[Sequence[float]], masks: NDArray[np.uint8]) -> list[Entry]:
    """Boxes x0 y0 x1 y1 and masks uint8 (N, H, W) as COCO has them: `bbox` and `segmentation`."""
    codes = zip(boxes, encode_masks(masks), strict=True)
    return [{"bbox": [x0, y0, x1 - x0, y1 - y0], "segmentation": code} for (x0, y0, x1, y1), code in codes]


class SceneObjects(Scenes):
    """The built-in scenes with their boxes and masks; a scene's number is its image id, kind c is category c + 1."""

    category_ids = tuple(range(1, len(Scenes.class_names) + 1))

    def __getitem__(self, index: int) -> Sample:
        return super().__getitem__(index).to_pil(), index, partial(self.objects, index)

    def objects(self, index: int) -> Objects:
        """The objects of one scene, as far as they can be seen."""
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
                entry = {"id": len(annotations) + 1, "image_id": number, "category_id": label, "iscrowd": 0}
                annotations.append({**entry, **place, "area": int(mask.sum())})
        return {
            "images": [{"id": n, "file_name": f"{n}.png", "width": size, "height": size} for n in range(self.length)],
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in enumerate(self.class_names, start=1)],
        }


@dataclass(eq=False)
class DetectionData(ImageData):
    """Images with boxes and masks for training and validation; raises as `ImageData`.

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
    scenes = SceneObjects
    scenes_size = {"train": 4000, "val": 500}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(0, 1, flip=self.flip)

    def open_root(self, root: str, part: str) -> tuple[str, CocoImages]:
        """As of all tasks; warns of annotations that cannot be used, and raises BrokenImagesError for too many."""
        folder, file = (Path(root, getattr(self, f"{part}_{what}")) for what in ("images", "annotations"))
        reader = CocoImages(file, folder)
        if self.datasets and (self.class_names, self.reader.category_ids) != (reader.class_names, reader.category_ids):
            raise UserError(f"{file} has other categories than the training split's file")
        report = BrokenImages(part, reader.total, self.max_broken_share, "annotations", "cannot be used")
        self.broken_images[f"{part} annotations"] = report
        report.record(reader.bad)
        if reader.bad:
            left_out = f"{len(reader.bad)} of {reader.total} annotations are left out"
            warnings.warn(f"{left_out}; the first: {': '.join(reader.bad[0])}", stacklevel=2)
        return part, reader

    def choose(self, part: str, split: str, reader: Any, indices: Sequence[int] = ()) -> Sequence[int]:
        """As of all tasks; for training those with an object. UserError, too, where none of the images holds one."""
        useful = reader.with_objects()
        chosen = super().choose(part, split, reader, useful if part == "train" and not self.keep_empty else ())
        if not set(chosen).intersection(useful):
            raise UserError(f"the {len(chosen)} images of {part} hold no object to train on or to compare with")
        return chosen

    def transform(self, part: str, sample: Any) -> tuple[Tensor, Objects]:
        """An image as bytes (3, H, W), and its id; in training flipped at random, and its objects.

        Their boxes end at the image's border; objects whose box is then thinner than a pixel go.
        """
        image, image_id, objects = sample
        if part == "val":
            return v2.functional.pil_to_tensor(image), {"image_id": torch.tensor(image_id)}
        boxes, labels, masks = objects().values()
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(image.height, image.width))
        flip = v2.RandomHorizontalFlip(self.flip)
        pixels, boxes, masks = flip(tv_tensors.Image(image), boxes, tv_tensors.Mask(masks))
        boxes, valid = v2.functional.sanitize_bounding_boxes(v2.functional.clamp_bounding_boxes(boxes))
        target = {"boxes": boxes, "labels": labels[valid], "masks": masks[valid]}
        return pixels.as_subclass(Tensor), {key: value.as_subclass(Tensor) for key, value in target.items()}

    def finish(self, part: str, key: Key, images: list[Tensor], targets: Any) -> tuple[list[Tensor], Any]:
        """Bytes to 0 to 1."""
        return [v2.functional.to_dtype(image, torch.float32, scale=True) for image in images], targets
