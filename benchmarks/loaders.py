"""Images per second of the training loader: from folders, from `datasets`, and with timm's own
loader on the same images.

    python benchmarks/loaders.py --data-root IMAGENETTE --out benchmarks/results/loaders.json

All take turns in one process, with the paper's augmentation for ImageNet (random resized crop,
flip, rand-augment, random erasing, mixup and cutmix) at 224 px and as many workers. timm's loader
runs as its own training script sets it up on a CPU: with its prefetcher, which normalizes and
erases whole batches in the main process and mixes 8-bit images (`FastCollateMixup`), and without,
where workers do all but mixing. A copy of the images may be enlarged first (`--enlarge 375`: the
shorter side, about ImageNet's), since decoding is most of the work.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from PIL import Image
from timm.data import FastCollateMixup, Mixup, create_dataset, create_loader

from dgt.data.classification import ClassificationData
from dgt.data.readers import ImageFolder, open_images
from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Augmentation, allow_zero_bits
from dgt.utils.records import write_record
from dgt_command.measures import machine

AUGMENTATION = Augmentation()
Batches = Callable[[], Iterable[Any]]


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-root", type=Path, required=True, help="folder with train/CLASS/ folders of images"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--images", type=int, default=512, help="images per turn, spread evenly over the set"
    )
    parser.add_argument(
        "--enlarge", type=int, help="shorter side of the images in pixels; their own if left out"
    )
    parser.add_argument(
        "--size", type=int, default=224, help="side of the training crops in pixels"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Prepare the images, time every loader in turns, print and write the medians."""
    options = parse_arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepare(options, Path(folder))
        rates = time_in_turns(candidates(Path(folder), options), options.rounds)
    rows = [row_of(name, values) for name, values in rates.items()]
    for row in rows:
        print(f"{row['loader']:<28}{row['images_per_second']:>8} images/s   {row['turns']}")
    if options.out:
        write(options, rows)


def time_in_turns(loaders: dict[str, Batches], rounds: int) -> dict[str, list[float]]:
    """Images per second of every loader in every turn."""
    for batches in loaders.values():  # starts the workers
        rate(batches())
    turns = [{name: rate(batches()) for name, batches in loaders.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in loaders}


def row_of(name: str, rates: list[float]) -> dict[str, Any]:
    """A row of the results: the median of a loader, and all its turns."""
    return {
        "loader": name,
        "images_per_second": round(statistics.median(rates), 1),
        "turns": [round(rate, 1) for rate in rates],
    }


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write machine, options and rows, without the paths of this machine."""
    settings = {
        key: value for key, value in vars(options).items() if key not in ("data_root", "out")
    }
    where = {**machine(), "command": "python benchmarks/loaders.py"}
    content = {"machine": where, "options": settings, "rows": rows}
    write_record(options.out, content)


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Copy some of the images into class folders in `folder`/images, enlarged if that is wanted, and
    save them as a data set in `folder`/datasets.
    """
    found = ImageFolder(options.data_root, "train")
    for number in range(options.images):
        index = number * len(found) // options.images
        path, label = found.samples[index]
        target = folder / "images" / "train" / found.class_names[label] / Path(path).name
        target.parent.mkdir(parents=True, exist_ok=True)
        if options.enlarge is None:
            shutil.copyfile(path, target)
        else:
            enlarged(Image.open(path), options.enlarge).save(target, "JPEG", quality=90)
    load_dataset("imagefolder", data_dir=str(folder / "images")).save_to_disk(folder / "datasets")


def enlarged(image: Image.Image, side: int) -> Image.Image:
    """An image in RGB whose shorter side has so many pixels."""
    scale = side / min(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def candidates(folder: Path, options: argparse.Namespace) -> dict[str, Batches]:
    """By name, what starts a pass over the batches of a loader; workers stay alive between passes."""
    return {
        "dgt, folders": own_loader(folder / "images", options),
        "dgt, datasets": own_loader(folder / "datasets", options),
        # without transforms and workers, where their difference shows
        "reading alone, folders": reading(open_images(folder / "images", "train")),
        "reading alone, datasets": reading(open_images(folder / "datasets", "train")),
        "timm, with prefetcher": timm_loader(folder / "images", True, options),
        "timm, without prefetcher": timm_loader(folder / "images", False, options),
    }


def own_loader(root: Path, options: argparse.Namespace) -> Batches:
    """The training loader of this package."""
    data = ClassificationData(
        str(root),
        image_size=options.size,
        batch_size=options.batch,
        num_workers=options.workers,
        augmentation=AUGMENTATION,
        val_split="train",
    )
    data.setup()
    return data.train_dataloader().__iter__


def reading(reader: Any) -> Batches:
    """Passes over a reader in a random order, each image as a batch of one."""
    order = torch.randperm(len(reader), generator=torch.Generator().manual_seed(0)).tolist()
    return lambda: (([image], label) for image, label in map(reader.__getitem__, order))


def timm_loader(root: Path, prefetcher: bool, options: argparse.Namespace) -> Batches:
    """timm's dataset, loader and mixing with the same augmentation."""
    mixing: dict[str, Any] = {
        "mixup_alpha": AUGMENTATION.mixup,
        "cutmix_alpha": AUGMENTATION.cutmix,
        "switch_prob": AUGMENTATION.mixup_switch_prob,
        "label_smoothing": AUGMENTATION.smoothing,
        "num_classes": len(ImageFolder(root, "train").class_names),
    }
    loader = create_loader(
        create_dataset("", str(root), split="train"),
        (3, options.size, options.size),
        options.batch,
        is_training=True,
        use_prefetcher=prefetcher,
        re_prob=AUGMENTATION.erasing,
        re_mode="pixel",
        scale=(AUGMENTATION.min_scale, 1.0),
        hflip=AUGMENTATION.flip,
        color_jitter=AUGMENTATION.color_jitter,
        auto_augment=AUGMENTATION.rand_augment,
        interpolation=AUGMENTATION.interpolation,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        num_workers=options.workers,
        collate_fn=FastCollateMixup(**mixing) if prefetcher else None,
        device=torch.device("cpu"),
        persistent_workers=options.workers > 0,
    )
    allow_zero_bits(loader.dataset.transform)  # else timm's rand-augment fails with Pillow 13
    if prefetcher:
        return loader.__iter__
    mixer = Mixup(**mixing)
    return lambda: (mixer(images, labels) for images, labels in loader)


def rate(batches: Iterable[Any]) -> float:
    """Images per second of one pass, from its start to its last batch."""
    start = time.perf_counter()
    images = sum(len(images) for images, _ in batches)
    return images / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
