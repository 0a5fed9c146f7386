"""Speed against accuracy: times of this machine beside the ImageNet accuracies that papers publish."""

from pathlib import Path
from typing import Any

from dgt.bench.models import Candidate
from dgt.utils.atomic_write import replacing
from dgt.utils.errors import UserError

PUBLISHED = {  # label, top-1 in percent (ImageNet-1k alone, one crop), pixels a side, and where it stands
    "dgt_tiny": ("DGT-T", 83.8, 224),  # Liu et al., IJCAI 2022 (not reproduced here)
    "swin_tiny_patch4_window7_224": ("Swin-T", 81.3, 224),  # Liu et al., ICCV 2021
    "convnext_tiny": ("ConvNeXt-T", 82.1, 224),  # Liu et al., CVPR 2022
    "deit_small_patch16_224": ("DeiT-S", 79.8, 224),  # Touvron et al., ICML 2021
    "twins_svt_small": ("Twins-SVT-S", 81.7, 224),  # Chu et al., NeurIPS 2021
    "pvt_v2_b2": ("PVTv2-B2", 82.0, 224),  # Wang et al., CVMJ 2022
    "maxvit_tiny_tf_224": ("MaxViT-T", 83.6, 224),  # Tu et al., ECCV 2022
    "regnety_040": ("RegNetY-4G", 80.0, 224),  # Touvron et al., ICML 2021 (trained with DeiT's recipe)
    "efficientnet_b4": ("EfficientNet-B4", 82.9, 380),  # Tan and Le, ICML 2019
    "resnet50": ("ResNet-50", 76.1, 224),  # Paszke et al., NeurIPS 2019 (torchvision's weights)
}
ABOVE: dict[str, Any] = {"xytext": (0, 7), "ha": "center", "va": "bottom"}
BELOW: dict[str, Any] = {"xytext": (0, -7), "ha": "center", "va": "top"}


def draw_accuracy(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Draw images per second against published accuracy; every model stands at the size its accuracy is for.

    Args:
        rows: of :func:`dgt.bench.bench_models`, of inference; rows of models that have no published accuracy here, or
            ran at another size, are left out.
        path: PNG, SVG or PDF to write.

    Raises:
        UserError: if no row is left, or for another suffix.
    """
    from matplotlib.figure import Figure

    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"path must end in .png, .svg or .pdf, got {str(path)!r}")
    found = [(Candidate.parse(row["model"], row["image_size"]), row["images_per_second"]) for row in rows]
    points = [
        (speed, candidate, *PUBLISHED[candidate.name][:2])
        for candidate, speed in found
        if PUBLISHED.get(candidate.name, (0,))[-1] == candidate.size and "global" not in candidate.forms
    ]
    if not points:
        raise UserError("rows must hold a model with a published accuracy, at the size that it is for, got none")
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (speed, candidate, label, top1) in enumerate(sorted(points)):  # neighbours' labels on opposite sides
        colour = "#c2410c" if candidate.name.startswith("dgt") else "#475569"
        axes.scatter(speed, top1, s=46, color=colour, zorder=3)
        text = ", ".join([label, *(f"{form} form" for form in candidate.forms)])
        text += "" if candidate.size == 224 else f" ({candidate.size} px)"
        place = (ABOVE, BELOW)[number % 2]
        axes.annotate(text, (speed, top1), textcoords="offset points", color=colour, fontsize=8, **place)
    compiled = ", compiled" if rows[0]["compiled"] else ""
    axes.set(xlabel=f"images per second here, batches of {rows[0]['batch_size']}{compiled}")
    axes.set(ylabel="published ImageNet top-1, %")
    axes.grid(color="#e2e8f0", linewidth=0.8, zorder=0)
    axes.margins(x=0.16, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as partial:
        figure.savefig(partial, format=Path(path).suffix.lstrip("."), dpi=200)
