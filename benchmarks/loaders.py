"""Images per second of the training loader: from folders, from `datasets`, and timm's own loader on
the same images.

    python benchmarks/loaders.py --data-root IMAGENETTE --out benchmarks/results/loaders.json

All take turns in one process, with the paper's augmentation for ImageNet (random resized crop,
flip, rand-augment, random erasing, mixup and cutmix) at 224 px and as many workers. timm's loader
runs as its own training script sets it up on a CPU: with its prefetcher, which normalizes and
erases whole batches in the main process and mixes 8-bit images (`FastCollateMixup`), and without,
where workers do all but mixing. A copy of the images may be enlarged first (`--enlarge 375`: the
shorter side, about ImageNet's), since decoding is most of the work.
"""

import argparse
import json
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

from dgt.bench import machine
from dgt.data.classification import ClassificationData
from dgt.data.readers import ImageFolder, open_images
from dgt.data.transforms import IMAGENET_MEAN, IMAGENET_STD, Augmentation, allow_zero_bits

AUGMENTATION = Augmentation()
Batches = Callable[[], Iterable[Any]]


def main() -> None:
    """Prepare the images, time every loader in turns, print and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-root", type=Path, required=True, help="folder with train/CLASS/ folders of images"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--images", type=int, default=512, help="images of a turn, evenly over the set"
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = prepare(options, Path(folder))
        loaders = candidates(root, options)
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for batches in loaders.values():  # starts the workers
            rate(batches())
        for _ in range(options.rounds):
            for name, batches in loaders.items():
                rates[name].append(rate(batches()))
    rows = [
        {
            "loader": name,
            "images_per_second": round(statistics.median(values), 1),
            "turns": [round(v, 1) for v in values],
        }
        for name, values in rates.items()
    ]
    for row in rows:
        print(f"{row['loader']:<28}{row['images_per_second']:>8} images/s   {row['turns']}")
    if options.out:
        settings = {
            key: value for key, value in vars(options).items() if key not in ("data_root", "out")
        }
        where = {**machine(), "command": "python benchmarks/loaders.py"}
        options.out.write_text(
            json.dumps({"machine": where, "options": settings, "rows": rows}, indent=1) + "\n"
        )


def prepare(options: argparse.Namespace, folder: Path) -> Path:
    """Some of the images as class folders, enlarged where wanted, in `folder`/images, and as a data
    set beside them.
    """
    found = ImageFolder(options.data_root, "train")
    for number in range(options.images):
        index = number * len(found) // options.images
        path, label = found.samples[index]
        target = folder / "images" / "train" / found.class_names[label] / Path(path).name
        target.parent.mkdir(parents=True, exist_ok=True)
        if options.enlarge is None:
            target.write_bytes(Path(path).read_bytes())
            continue
        image = Image.open(path).convert("RGB")
        scale = options.enlarge / min(image.size)
        larger = image.resize(
            (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
        )
        larger.save(target, "JPEG", quality=90)
    load_dataset("imagefolder", data_dir=str(folder / "images")).save_to_disk(folder / "datasets")
    return folder


def candidates(folder: Path, options: argparse.Namespace) -> dict[str, Batches]:
    """For each loader, what starts a pass over its batches; workers stay alive between passes."""
    found: dict[str, Batches] = {}
    for kind in ("images", "datasets"):
        data = ClassificationData(
            str(folder / kind),
            image_size=options.size,
            batch_size=options.batch,
            num_workers=options.workers,
            augmentation=AUGMENTATION,
            val_split="train",
        )
        data.setup()
        found[f"dgt, {'folders' if kind == 'images' else kind}"] = data.train_dataloader().__iter__
    # without transforms and workers, where their difference shows
    for name in ("images", "datasets"):
        reader = open_images(folder / name, "train")
        found[f"reading alone, {'folders' if name == 'images' else name}"] = reading(reader)
    for prefetcher in (True, False):
        name = f"timm, {'with' if prefetcher else 'without'} prefetcher"
        found[name] = timm_loader(folder / "images", prefetcher, options)
    return found


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
    mixer = Mixup(**mixing)
    return (
        loader.__iter__
        if prefetcher
        else lambda: (mixer(images, labels) for images, labels in loader)
    )


def rate(batches: Iterable[Any]) -> float:
    """Images per second of one pass, from its start to its last batch."""
    start = time.perf_counter()
    images = sum(len(images) for images, _ in batches)
    return images / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
