"""Tables of docs/accelerate_models.md: SAM's encoder; every family of timm, every encoder of
transformers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from dgt.utils.records import number

from .shared import Cells, read, table

Row = dict[str, Any]
LIBRARIES = {"timm": "timm", "transformers": "transformers", "meta": "Meta"}
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
EXACT = "no, exact at once"
NO_ATTENTION = "no attention found"
OWN_SOFTMAX = "a softmax of its own, not F.scaled_dot_product_attention"
OUTCOMES = ("yes", "in part", EXACT, "no", "not tried")
NOT_TRIED = ("it was not called", "it could not be built")


@table
def exact_attention_in_sam() -> Cells:
    """SAM's encoder with exact attention, in shares of its own."""
    heads = [
        "class",
        "type",
        "threads",
        "own, s",
        "exact",
        "its global attention",
        "its windows",
        "own peak, MB",
        "exact peak",
        "difference: own, exact",
        "compiled",
        "OpenVINO",
    ]
    asked = ["asked, at most", "", "", "", "0.78", "0.42", "", "", "0.55", "0, 1e-05", "", ""]
    rows = sorted(read("sam_encoder")["rows"], key=_order_of_encoder)
    return [heads, asked, *map(_beside_own, rows)]


def _order_of_encoder(row: Row) -> tuple[bool, int, int]:
    return row["type"] == "bfloat16", row["threads"], list(LIBRARIES).index(row["library"])


def _beside_own(row: Row) -> list[str]:
    """A row of the table of SAM's encoder."""
    arms = row["arms"]
    own = arms["own"]

    def share(arm: str, measure: str = "ms") -> str:
        return number(arms[arm][measure] / own[measure], 2) if arm in arms else ""

    return [
        LIBRARIES[row["library"]],
        row["type"],
        str(row["threads"]),
        number(own["ms"], 1, 1e-3),
        share("exact"),
        share("exact", "global_attention_ms"),
        share("exact", "windows_attention_ms"),
        number(own["peak_mb"], 0),
        share("exact", "peak_mb"),
        ", ".join(f"{arms[arm]['difference']:.1g}" for arm in ("own", "exact")),
        share("compiled"),
        share("openvino"),
    ]


@table
def models_that_can_be_accelerated() -> Cells:
    """Families of timm and encoders of transformers, together where the same can be grouped."""
    alike: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for library, grouped, reasons, name in (*_families_of_timm(), *_encoders_of_transformers()):
        alike[library, grouped, reasons].append(name)
    order = sorted(alike, key=lambda key: (key[0], OUTCOMES.index(key[1]), key[2]))
    heads = [
        "library",
        "grouped",
        "families (their weights) or model types",
        "what cannot be grouped",
    ]
    return [heads, *[[*key[:2], ", ".join(sorted(alike[key])), key[2]] for key in order]]


def _families_of_timm() -> Cells:
    """How many pretrained weights of a family can be grouped, and why others cannot."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in read("accelerate_coverage")["architectures"].values():
        families[row["family"]].append(row)
    rows = []
    for family, own in families.items():
        reasons = {reason for row in own for reason in row["reasons"]} - {NO_ATTENTION}
        if not reasons and not any(row["grouped"] for row in own):
            continue
        weights = sum(row["tags"] for row in own)
        whole, part, exact = (
            sum(row["tags"] for row in own if _share(row) == share)
            for share in ("yes", "in part", EXACT)
        )
        grouped = "yes" if whole else "in part" if part else EXACT if exact else "no"
        known = f", {KNOWN_AS[family]}" if family in KNOWN_AS else ""
        name = f"`{family}`{known} ({whole or part or exact} of {weights})"
        rows.append(["timm", grouped, _text(reasons), name])
    return rows


def _encoders_of_transformers() -> Cells:
    """Whether an encoder of images or video can be grouped, and why not."""
    rows = []
    for kind, row in read("accelerate_coverage")["encoders"].items():
        reasons = _text(row["reasons"])
        if NO_ATTENTION in reasons:
            continue
        grouped = _share(row)
        if any(sign in reasons for sign in NOT_TRIED):
            grouped, reasons = "not tried", ""
        rows.append(["transformers", grouped, reasons, f"`{kind}`"])
    return rows


def _text(reasons: Iterable[str]) -> str:
    """Reasons in alphabetical order."""
    return ", ".join(sorted(reasons)).replace(OWN_SOFTMAX, "its own softmax")


def _share(row: Row) -> str:
    """How much of a model's attention can be grouped; a single pooling head does not count."""
    if not row["grouped"]:
        return EXACT if row.get("exact") else "no"
    return "yes" if row["attentions"] - row["grouped"] <= 1 else "in part"
