"""Reduce a COCO annotation file to its first images with an object, to let a detector overfit them.

    python benchmarks/coco_subset.py COCO/annotations/instances_train2017.json 16 sixteen.json
    dgt train coco_mini_cpu --data.root COCO --data.train_annotations "$PWD/sixteen.json" \
        --data.val_annotations "$PWD/sixteen.json" --data.val_images train2017 --data.flip 0 \
        --data.batch_size 4 --optimizer.lr_batch 4 --optimizer.weight_decay 0 --schedule.epochs 100 \
        --schedule.warmup_epochs 5 --trainer.check_val_every 25
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dgt.data.coco import CocoImages
from dgt.utils.atomic_write import write_json


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("annotations", type=Path)
    parser.add_argument("images", type=int)
    parser.add_argument("out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Write the smaller file, and print how many images and annotations it has."""
    options = parse_arguments()
    whole = CocoImages(options.annotations)
    images = [image for image in whole.images if whole.by_image[image["id"]]][: options.images]
    entries = [entry for image in images for entry in whole.by_image[image["id"]]]
    write_json(
        options.out, {"images": images, "annotations": entries, "categories": whole.categories}
    )
    print(f"{len(images)} images, {len(entries)} annotations")


if __name__ == "__main__":
    main()
