"""Tables of docs/accelerate_models.md: every family of timm, every encoder of transformers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from .shared import Cells, read, table

Row = dict[str, Any]
KNOWN_AS = {
    "vision_transformer": "ViT, CLIP, SigLIP, DINO, DINOv2, AIM",
    "eva": "EVA, EVA-02, DINOv3, Perception Encoder",
    "deit": "DeiT and DeiT III",
    "beit": "BEiT and BEiT v2",
    "naflexvit": "NaFlex ViT",
    "vision_transformer_sam": "SAM's encoder",
    "hieradet_sam2": "SAM 2's encoder",
    "gemma4_vit": "Gemma 4's encoder",
    "qwen3_vit": "the encoder of Qwen3-VL and Qwen3.5",
    "deepseek_vit": "DeepSeek's encoder",
}
NO_ATTENTION = "no attention found"


@table
def families_of_timm() -> Cells:
    """A row for every family with attention: how many can be grouped, and why others cannot."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in read("accelerate_coverage")["architectures"].values():
        families[row["family"]].append(row)
    rows = []
    for family, own in sorted(families.items()):
        reasons = {reason for row in own for reason in row["reasons"]} - {NO_ATTENTION}
        if not reasons and not any(row["grouped"] for row in own):
            continue
        name = f"`{family}`" + (f": {KNOWN_AS[family]}" if family in KNOWN_AS else "")
        tags = sum(row["tags"] for row in own)
        counts = [
            sum(row["tags"] for row in own if _share(row) == share) for share in ("all", "some")
        ]
        rows.append([name, str(len(own)), str(tags), *map(str, counts), ", ".join(sorted(reasons))])
    heads = ["family", "architectures", "pretrained weights", "all attention grouped", "some of it"]
    return [[*heads, "what cannot be grouped"], *rows]


def _share(row: Row) -> str:
    """How much of a model's attention can be grouped; a single pooling head does not count."""
    if not row["grouped"]:
        return "none"
    return "all" if row["attentions"] - row["grouped"] <= 1 else "some"


@table
def encoders_of_transformers() -> Cells:
    """A row for every encoder of images or video."""
    rows = []
    for kind, row in sorted(read("accelerate_coverage")["encoders"].items()):
        grouped = {"all": "yes", "some": "in part", "none": "no"}[_share(row)]
        rows.append([f"`{kind}`", grouped, ", ".join(sorted(row["reasons"]))])
    return [["model type", "grouped", "what cannot be grouped"], *rows]
