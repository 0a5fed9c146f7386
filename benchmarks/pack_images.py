"""Pack image folders into one `.npz` that every recipe reads as `data.root`: one file to carry, no images re-encoded.

python benchmarks/pack_images.py IMAGENETTE imagenette128.npz      (folders train/CLASS and val/CLASS)
"""

import argparse
import io
from pathlib import Path

import numpy as np

from dgt.data.images import ImageFolder, folder_names
from dgt.training.files import write_whole


def main() -> None:
    """Read the folders, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    options = parser.parse_args()
    if options.out.suffix != ".npz":
        parser.error(f"OUT.npz must end in .npz, got {options.out}")
    splits = folder_names(options.root) if options.root.is_dir() else ()
    if not splits:
        parser.error(f"FOLDER must hold a folder for each split, {options.root} does not")
    arrays: dict[str, np.ndarray] = {}
    for split in splits:
        images = ImageFolder(options.root, split)
        arrays["classes"] = np.array(images.class_names)
        files = [Path(path).read_bytes() for path, _ in images.samples]
        arrays[f"{split}_jpg"] = np.frombuffer(b"".join(files), np.uint8)
        arrays[f"{split}_off"] = np.cumsum([0, *map(len, files)], dtype=np.int64)
        arrays[f"{split}_y"] = np.array([label for _, label in images.samples], np.int64)
        print(f"{split}: {len(files)} images of {len(images.class_names)} classes")
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    write_whole(options.out, content.getvalue())
    print(f"{options.out}: {len(content.getvalue()) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
