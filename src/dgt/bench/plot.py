"""Speed against accuracy: times of this machine beside the ImageNet accuracies that papers publish."""

from pathlib import Path
from typing import Any, NamedTuple

from dgt.bench.candidates import Candidate


class Published(NamedTuple):
    """An accuracy from print."""

    label: str
    """The model's name there."""
    top1: float
    """Top-1 on ImageNet-1k's validation images in percent, trained on ImageNet-1k alone, one crop."""
    size: int
    """Pixels a side of its images."""
    source: str
    """The paper it stands in."""


PUBLISHED = {
    "dgt_tiny": Published("DGT-T", 83.8, 224, "Liu et al., IJCAI 2022 (not reproduced here)"),
    "swin_tiny_patch4_window7_224": Published("Swin-T", 81.3, 224, "Liu et al., ICCV 2021"),
    "convnext_tiny": Published("ConvNeXt-T", 82.1, 224, "Liu et al., CVPR 2022"),
    "deit_small_patch16_224": Published("DeiT-S", 79.8, 224, "Touvron et al., ICML 2021"),
    "twins_svt_small": Published("Twins-SVT-S", 81.7, 224, "Chu et al., NeurIPS 2021"),
    "pvt_v2_b2": Published("PVTv2-B2", 82.0, 224, "Wang et al., CVMJ 2022"),
    "maxvit_tiny_tf_224": Published("MaxViT-T", 83.6, 224, "Tu et al., ECCV 2022"),
    "regnety_040": Published("RegNetY-4G", 80.0, 224, "Touvron et al., ICML 2021 (trained with DeiT's recipe)"),
    "efficientnet_b4": Published("EfficientNet-B4", 82.9, 380, "Tan and Le, ICML 2019"),
    "resnet50": Published("ResNet-50", 76.1, 224, "Paszke et al., NeurIPS 2019 (torchvision's weights)"),
}

OURS = "#c2410c"
PLACES: tuple[dict[str, Any], ...] = (  # of a label: above its point, below, right, left
    {"xytext": (0, 7), "ha": "center", "va": "bottom"},
    {"xytext": (0, -7), "ha": "center", "va": "top"},
    {"xytext": (7, 0), "ha": "left", "va": "center"},
    {"xytext": (-7, 0), "ha": "right", "va": "center"},
)


def draw_accuracy(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Draw images per second against published accuracy; every model stands at the size its accuracy is for.

    Args:
        rows: of :func:`dgt.bench.bench_models`, of inference; rows of models that have no published accuracy here, or
            ran at another size, are left out.
        path: PNG, SVG or PDF to write.

    Raises:
        ValueError: if no row is left, or for another suffix.
        FileNotFoundError: where the folder is missing.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    from dgt.figures import save_figure

    points = []
    for row in rows:
        candidate = Candidate.parse(row["model"], row["image_size"])
        known = PUBLISHED.get(candidate.name)
        if known is not None and known.size == row["image_size"] and "global" not in candidate.forms:
            points.append((row["images_per_second"], known, candidate))
    if not points:
        raise ValueError("rows must hold a model with a published accuracy, at the size that it is for, got none")
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for speed, known, candidate in points:
        axes.scatter(speed, known.top1, s=46, color=OURS if candidate.name.startswith("dgt") else "#475569", zorder=3)
    batch = rows[0]["batch_size"]
    axes.set_xlabel(f"images per second here, batches of {batch}{', compiled' if rows[0]['compiled'] else ''}")
    axes.set_ylabel("published ImageNet top-1, %")
    axes.grid(color="#e2e8f0", linewidth=0.8, zorder=0)
    axes.margins(x=0.16, y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.draw_without_rendering()  # now places on the page are known
    centres = axes.transData.transform([(speed, known.top1) for speed, known, _ in points])
    taken: list[Any] = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in centres]
    for speed, known, candidate in points:
        form = ", inference form" if "inference" in candidate.forms else ""
        label = f"{known.label}{form}" + ("" if known.size == 224 else f" ({known.size} px)")
        style: dict[str, Any] = {"color": OURS if candidate.name.startswith("dgt") else "#1e293b", "fontsize": 8}
        for place in PLACES:  # the first where nothing stands
            text = axes.annotate(label, (speed, known.top1), textcoords="offset points", **style, **place)
            box = text.get_window_extent()
            if place == PLACES[-1] or not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
    save_figure(figure, path)
