"""A model folder that timm or Hugging Face transformers wrote, read as if it were a run: as a classifier of its images.

`timm.models.save_for_hf` and transformers' `save_pretrained` of a timm model write `config.json` and
`model.safetensors`. The recipe is what the file tells: the model, its size, and how its images are prepared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dgt.training.run import RECORD_FORMAT
from dgt.utils.errors import UserError

WRAPPER = "timm_model."  # transformers' name for the model inside its own


def read_timm_folder(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights under timm's names, and a record as :func:`dgt.training.run.make_record` makes one.

    Args:
        path: the file `config.json`.
        config: what it holds.
        weights: those of `model.safetensors`.

    Raises:
        ValueError: it describes no model of timm.
    """
    prepared = config.get("pretrained_cfg") or config  # timm before 1.0 wrote one level
    architecture, count = config.get("architecture"), prepared.get("num_classes", config.get("num_classes"))
    if not architecture or not count:
        raise UserError(
            f"{path} was not written by `dgt train` nor by timm: it has neither an entry 'dgt' with the recipe nor "
            "'architecture' and 'num_classes' of a classifier"
        )
    data: dict[str, Any] = {"image_size": int(prepared["input_size"][-1])} if "input_size" in prepared else {}
    data |= {ours: prepared[key] for ours, key in (("crop_ratio", "crop_pct"), ("mean", "mean"), ("std", "std"))
             if key in prepared}  # fmt: skip
    if "interpolation" in prepared:
        data["augmentation"] = {"interpolation": prepared["interpolation"]}
    arguments = {key: value for key, value in (config.get("model_args") or {}).items() if key != "num_classes"}
    names = config.get("label_names")
    names = names if isinstance(names, list) and len(names) == count else list(map(str, range(count)))
    recipe = {
        "name": path.parent.name or architecture,
        "model": {"name": architecture, "args": arguments},
        "data": data,
    }
    weights = {key.removeprefix(WRAPPER): value for key, value in weights.items()}
    return weights, {"format": RECORD_FORMAT, "recipe": recipe, "class_names": names}
