"""Mask R-CNN with a feature pyramid over any timm backbone: the paper's detector.

The network is torchvision's `MaskRCNN`, called and trained like it, with one difference: the true
sizes of a padded batch reach the backbone as a mask, so that padding never becomes a key and never
counts in the statistics of centroids.
"""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

from dgt.models.cost import Cost, cost
from dgt.models.heads.backbone import build_backbone
from dgt.models.heads.hub import HubModel
from dgt.models.padding import real_pixels
from dgt.utils.errors import UserError

TOP_K = 500  # the paper's k for detection
LONG_OVER_SHORT = 1333 / 800
# Regions that go through the heads when FLOPs are counted.
COUNTED_BOXES = 1000
COUNTED_MASKS = 100
# Sides of a region's map of features, after pooling.
POOLED_BOX = 7
POOLED_MASK = 14

Target = dict[str, Tensor]
NOT_OPTIONS = {"self", "backbone", "num_classes", "kwargs"}
OPTIONS = frozenset(inspect.signature(MaskRCNN.__init__).parameters) - NOT_OPTIONS


class HeadSizes(NamedTuple):
    """Widths of the pyramid and the heads, and the anchors; the defaults are the paper's."""

    fpn_channels: int = 256
    """Channels of the pyramid."""
    box_channels: int = 1024
    """Width of the two linear layers of the box head."""
    mask_channels: Sequence[int] = (256, 256, 256, 256)
    """Channels of the mask head's convolutions; none for boxes alone, without a mask head."""
    anchor_sizes: Sequence[float] = (32, 64, 128, 256, 512)
    """Sides of the anchors of each of the five levels, in pixels of the resized image."""


class WideBoxCoder(BoxCoder):  # type: ignore[misc]
    """torchvision's, which gives boxes the type of the boxes that it starts from, and not that of what a head
    says, in which autocast would round places above 256 pixels to even ones, and above 1024 to multiples of 8.
    """

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        decoded: Tensor = super().decode_single(rel_codes.to(boxes.dtype), boxes)
        return decoded


class PaddedMaskRCNN(MaskRCNN, HubModel):  # type: ignore[misc]  # torchvision is not typed
    """torchvision's Mask R-CNN with a backbone that gets a mask of the real pixels in a batch.

    Its feature pyramid has five levels: one for each map of the backbone, and one more by pooling.

    Args:
        backbone: as in :func:`build_backbone`.
        num_classes: classes, background (class 0) among them, as torchvision counts.
        image_size: length that an image's shorter side is resized to.
        max_size: largest length of its longer side; None for 1333 / 800 of `image_size`.
        options: further keyword arguments of torchvision's `MaskRCNN`, such as
            ``{"box_score_thresh": 0.01}``.
        arguments: the fields of :class:`HeadSizes` by name (``fpn_channels``, ``box_channels``,
            ``mask_channels``, ``anchor_sizes``), and arguments of the backbone. For a DGT by name
            ``top_k`` is 500 unless given.

    Raises:
        TypeError, ValueError: as :func:`build_backbone`; a number out of range; an option that
            torchvision lacks.

    Example:
        >>> detector = PaddedMaskRCNN("dgt_nano", 91, image_size=224).eval()
        >>> detections = detector([torch.rand(3, 224, 300)])
        >>> detector.save_pretrained("detector")
        >>> same = PaddedMaskRCNN.from_pretrained("detector")
    """

    head = "mask_rcnn"

    def __init__(
        self,
        backbone: str | nn.Module,
        num_classes: int,
        *,
        image_size: int = 800,
        max_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        of_heads = {name: arguments[name] for name in HeadSizes._fields if name in arguments}
        of_backbone = {name: arguments[name] for name in arguments if name not in of_heads}
        sizes = HeadSizes(**of_heads)
        _check_settings(num_classes, image_size, sizes)
        unknown = sorted(set(options or ()) - OPTIONS)
        if unknown:
            came = ", ".join(unknown)
            raise TypeError(
                f"options must be keyword arguments of torchvision's MaskRCNN, got {came}"
            )
        built = build_backbone(backbone, image_size, TOP_K, **of_backbone)
        heads = {**_heads(num_classes, image_size, max_size, sizes), **(options or {})}
        pyramid = FeaturePyramidNetwork(
            built.channels, sizes.fpn_channels, extra_blocks=LastLevelMaxPool()
        )
        pyramid.out_channels = sizes.fpn_channels  # torchvision asks a backbone for it
        super().__init__(pyramid, **heads)
        if not sizes.mask_channels:
            parts: Any = self.roi_heads  # which torchvision asks whether it has masks by the first
            parts.mask_roi_pool = parts.mask_head = parts.mask_predictor = None
        for part in (self.rpn, self.roi_heads):
            part.box_coder = WideBoxCoder(part.box_coder.weights)
        self.backbone = built
        self.pyramid = pyramid
        self.arguments = {
            "backbone": backbone,
            "num_classes": num_classes,
            "image_size": image_size,
            "max_size": max_size,
            "options": None if options is None else dict(options),
            **arguments,
        }

    def features(
        self, images: Tensor, image_sizes: Sequence[tuple[int, int]]
    ) -> OrderedDict[str, Tensor]:
        """Map a padded batch to the levels of the pyramid, in float32 at least: anchors get their type.

        Args:
            images: (B, 3, H, W).
            image_sizes: height and width of each image before padding.
        """
        padded = (images.shape[-2], images.shape[-1])
        mask = real_pixels(image_sizes, padded, images.device)
        maps = OrderedDict((str(i), x) for i, x in enumerate(self.backbone(images, mask)))
        levels = self.pyramid(maps).items()
        wide = torch.promote_types(images.dtype, torch.float32)
        return OrderedDict((name, level.to(wide)) for name, level in levels)

    def _classes(self) -> int | None:
        """How many classes its boxes have, background among them; None where a predictor of another kind does
        not say.
        """
        return getattr(
            getattr(self.roi_heads.box_predictor, "cls_score", None), "out_features", None
        )

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        """Losses of a batch in training, detections in evaluation.

        Args:
            images: (3, H, W) tensors with values in [0, 1], of any sizes; they are resized
                and normalized here.
            targets: for each image `boxes` (N, 4) x0 y0 x1 y1 in its pixels, `labels` int64 (N,)
                from 1 on, `masks` uint8 (N, H, W). Needed in training.

        Returns:
            In training a dict of scalar losses. In evaluation, for each image, `boxes`, `labels`,
            `scores` (N,) and, unless it has boxes alone, `masks` (N, 1, H, W), the probability that
            a pixel belongs to the object, all at the image's own size.

        Raises:
            UserError: no images or no targets in training; boxes that are no corners, without width or
                height, not finite, or outside of their image; labels that are not one a box, or of no class
                of objects; masks of another size than their image, or of other numbers than 0 and 1; or an
                image so thin that resizing leaves nothing of it.
        """
        sizes = [(int(image.shape[-2]), int(image.shape[-1])) for image in images]
        if self.training:
            _check_targets(targets, sizes, self._classes())
        elif not sizes:
            return []
        _check_sizes(sizes, min(self.transform.min_size), self.transform.max_size)
        given = None if targets is None else list(targets)
        batch, resized = self.transform(list(images), given)
        levels = self.features(batch.tensors, batch.image_sizes)
        with _autocast_of(batch.tensors):
            proposals, proposal_losses = self.rpn(batch, levels, resized)
            detections, box_losses = self.roi_heads(levels, proposals, batch.image_sizes, resized)
        if self.training:
            return {**box_losses, **proposal_losses}
        return self.transform.postprocess(detections, batch.image_sizes, sizes)


def _autocast_of(images: Tensor) -> AbstractContextManager[Any]:
    """Where heads of the type of these images take wider levels."""
    if images.dtype.itemsize > 2:
        return nullcontext()
    return torch.autocast(images.device.type, images.dtype)


def build_mask_rcnn(
    backbone: str | nn.Module,
    num_classes: int,
    *,
    image_size: int = 800,
    max_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> PaddedMaskRCNN:
    """Build Mask R-CNN over any timm backbone with maps at strides 4, 8, 16 and 32.

    ``build_mask_rcnn("dgt_tiny", 91)`` is the paper's detector for COCO's 91 category numbers,
    ready for torchvision's training and evaluation code.

    Args:
        backbone, num_classes, image_size, max_size, options, arguments: as in
            :class:`PaddedMaskRCNN`.

    Returns:
        The detector, with random weights in everything but a pretrained backbone.

    Raises:
        TypeError, ValueError: as :class:`PaddedMaskRCNN`.

    Example:
        >>> detector = build_mask_rcnn("dgt_nano", 91, image_size=224, fpn_channels=64).eval()
        >>> sorted(detector([torch.rand(3, 224, 300)])[0])
        ['boxes', 'labels', 'masks', 'scores']
    """
    return PaddedMaskRCNN(
        backbone,
        num_classes,
        image_size=image_size,
        max_size=max_size,
        options=options,
        **arguments,
    )


def _heads(
    num_classes: int, image_size: int, max_size: int | None, sizes: HeadSizes
) -> dict[str, Any]:
    """What torchvision's `MaskRCNN` is told of sizes, anchors and heads."""
    channels = list(sizes.mask_channels) or [1]  # a head that is built, and taken away
    return {
        "min_size": image_size,
        "max_size": max_size or round(image_size * LONG_OVER_SHORT),
        "rpn_anchor_generator": AnchorGenerator(
            tuple((size,) for size in sizes.anchor_sizes), ((0.5, 1.0, 2.0),) * 5
        ),
        "box_head": TwoMLPHead(sizes.fpn_channels * POOLED_BOX**2, sizes.box_channels),
        "box_predictor": FastRCNNPredictor(sizes.box_channels, num_classes),
        "mask_head": MaskRCNNHeads(sizes.fpn_channels, channels, 1),
        "mask_predictor": MaskRCNNPredictor(channels[-1], channels[-1], num_classes),
    }


class DenseParts(nn.Module):
    """The parts of a Mask R-CNN with a fixed cost: backbone, pyramid, and heads on some regions.

    As in mmdetection's count, 1000 regions go through the box head and 100 through the mask head.
    """

    def __init__(self, model: PaddedMaskRCNN) -> None:
        super().__init__()
        self.backbone = model.backbone
        self.pyramid = model.pyramid
        self.rpn_head = model.rpn.head
        heads = model.roi_heads
        self.box_head = nn.Sequential(heads.box_head, heads.box_predictor)
        self.mask_head = nn.Sequential(heads.mask_head, heads.mask_predictor)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Run all parts on images (B, 3, H, W) and regions of zeros."""
        maps = OrderedDict((str(i), x) for i, x in enumerate(self.backbone(images)))
        self.rpn_head([*self.pyramid(maps).values()])
        channels = self.pyramid.out_channels
        in_boxes = images.new_zeros(COUNTED_BOXES, channels, POOLED_BOX, POOLED_BOX)
        in_masks = images.new_zeros(COUNTED_MASKS, channels, POOLED_MASK, POOLED_MASK)
        scores, boxes = self.box_head(in_boxes)
        return scores, boxes, self.mask_head(in_masks)


def mask_rcnn_cost(
    backbone: str, image_size: tuple[int, int] = (800, 1280), num_classes: int = 81
) -> Cost:
    """Count the parameters and FLOPs of a Mask R-CNN by part, as :func:`dgt.cost` does.

    Args:
        backbone: name of a timm model.
        image_size: height and width in pixels.
        num_classes: classes, by default COCO's 80 and background.

    Raises:
        TypeError, ValueError: as :func:`build_backbone`.
    """
    with torch.device("meta"):
        model = build_mask_rcnn(backbone, num_classes)
    return cost(DenseParts(model), image_size)


def _check_settings(num_classes: int, image_size: int, sizes: HeadSizes) -> None:
    """Raise UserError for a number out of range."""
    if num_classes < 2:
        raise UserError(
            f"num_classes must be at least 2, including background, got {num_classes!r}"
        )
    if image_size < 32:
        raise UserError(f"image_size must be at least 32, got {image_size!r}")
    for name in ("fpn_channels", "box_channels"):
        width = getattr(sizes, name)
        if not _positive([width], int):
            raise UserError(f"{name} must be an integer of at least 1, got {width!r}")
    channels, anchors = sizes.mask_channels, sizes.anchor_sizes
    if not (_positive(channels, int) or channels in ([], ())):
        raise UserError(f"mask_channels must be integers of at least 1, got {channels!r}")
    if not _positive(anchors, int, float) or len(anchors) != 5:
        raise UserError(f"anchor_sizes must be 5 numbers of at least 1, got {anchors!r}")


def _positive(numbers: Any, *kinds: Any) -> bool:
    """Whether this is a sequence of numbers of some kinds, not empty, each at least 1."""
    if not isinstance(numbers, Sequence) or not numbers:
        return False
    return all(isinstance(number, kinds) and number >= 1 for number in numbers)


def _check_sizes(sizes: Sequence[tuple[int, int]], shorter: int, longer: int) -> None:
    """Raise UserError for an image (height, width) so thin that resizing leaves nothing of it."""
    for place, size in enumerate(sizes):
        scale = min(shorter / min(size), longer / max(size))
        if int(min(size) * scale) < 1:
            came = f"{size[0]} x {size[1]} (height x width) in images[{place}]"
            raise UserError(
                "images must keep at least one pixel when their longer side is resized to "
                f"{longer}, got {came}"
            )


def _check_targets(
    targets: Sequence[Target] | None, sizes: Sequence[tuple[int, int]], classes: int | None
) -> None:
    """Raise UserError where there is not one target an image; for boxes that are no corners, one without area,
    useless in training to torchvision and COCO, one outside of its image, or one that is not finite, which may end
    the process; where there is not one label a box; for labels of background, which an object would be trained as,
    or of no class; and for masks of another size than their image, or of 255, whose loss has no bound.
    """
    if not sizes:
        raise UserError("images must be at least one in training, got none")
    if targets is None:
        raise UserError("targets must be given in training, got None")
    if len(targets) != len(sizes):
        raise UserError(f"targets must be one an image, {len(sizes)}, got {len(targets)}")
    for place, (target, size) in enumerate(zip(targets, sizes, strict=True)):
        boxes, labels, masks = target["boxes"], target["labels"], target.get("masks")
        _check_corners(boxes, place)
        extent = boxes[:, 2:] - boxes[:, :2]
        empty = ~((extent > 0) & extent.isfinite()).all(dim=1)
        if empty.any():
            came = f"{boxes[empty][0].tolist()} in targets[{place}]"
            raise UserError(f"boxes must have positive width and height, got {came}")
        height, width = size
        right_or_below = boxes[:, :2] >= boxes.new_tensor([width, height])
        outside = (right_or_below | (boxes[:, 2:] <= 0)).any(dim=1)
        if outside.any():
            came = f"{boxes[outside][0].tolist()} in targets[{place}]"
            raise UserError(
                f"boxes must be in their image of {height} x {width} pixels, got {came}"
            )
        if labels.shape != (len(boxes),):
            came = f"{tuple(labels.shape)} in targets[{place}]"
            raise UserError(f"labels must be (N,) = ({len(boxes)},), one a box, got {came}")
        if classes is not None and (labels >= classes).any():
            came = f"{int(labels.max())} in targets[{place}]"
            raise UserError(f"labels must be below the number of classes, {classes}, got {came}")
        if (labels < 1).any():
            came = f"{int(labels.min())} in targets[{place}]"
            raise UserError(f"labels must be at least 1, as 0 is background, got {came}")
        if masks is not None and masks.shape != (len(boxes), *size):
            came = f"{tuple(masks.shape)} in targets[{place}]"
            raise UserError(f"masks must be (N, H, W) = {(len(boxes), *size)}, got {came}")
        if masks is not None and (masks > 1).any():
            came = f"{masks.max().item()} in targets[{place}]"
            raise UserError(f"masks must be 1 where their object is and 0 elsewhere, got {came}")


def _check_corners(boxes: Tensor, place: int) -> None:
    """Raise UserError for boxes of another shape than (N, 4), or that say to be no corners."""
    expected = "boxes must be (N, 4), x0 y0 x1 y1"
    if boxes.dim() != 2 or boxes.shape[1] != 4:
        raise UserError(f"{expected}, got {tuple(boxes.shape)} in targets[{place}]")
    if isinstance(boxes, BoundingBoxes) and boxes.format != BoundingBoxFormat.XYXY:
        raise UserError(f"{expected}, got {boxes.format.value} in targets[{place}]")
