"""UperNet for semantic segmentation (section 4.2), over any hierarchical backbone.

The heads are those of transformers, which are mmsegmentation's, parameter for parameter: pyramid
pooling at scales 1, 2, 3 and 6 over the last map, a feature pyramid over all four, and an auxiliary
fully convolutional head on the third map for training. In evaluation a ``mask`` of real pixels makes every image of a
padded batch give what it gives alone: DGT leaves padding out, and the head, whose pooling and
interpolation know nothing of padding, runs on each image's own part of the maps. Training pads in
the same way but keeps the batch whole, for BatchNorm's statistics.
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from dgt.models.heads.backbone import build_backbone
from dgt.models.heads.hub import HubModel
from dgt.models.padding import check_images, real_sizes
from dgt.utils.errors import UserError
from dgt.utils.extras import require

TOP_K = 512  # the paper's k for segmentation


class UperNetLogits(NamedTuple):
    """What training needs: logits of both heads, (B, num_classes, H, W)."""

    main: Tensor
    auxiliary: Tensor


class UperNet(nn.Module, HubModel):
    """A backbone, UperNet's head and its auxiliary head.

    Args:
        backbone, image_size, arguments: as in :func:`dgt.models.heads.backbone.build_backbone`. A
            DGT named here chooses 512 keys, as in the paper, unless ``top_k`` says otherwise.
        num_classes: classes of the label maps, 1 to 255.
        channels: width of the head; 512 in the paper's models.
        auxiliary_channels: width of the auxiliary head.

    Raises:
        UserError: a number out of its range; or transformers, which has the heads, is not
            installed: the extra `transformers`.
        TypeError, ValueError: for the backbone as :func:`build_backbone`.

    Example:
        >>> segmenter = UperNet("dgt_nano", num_classes=12, channels=64, top_k=16).eval()
        >>> segmenter(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 12, 64, 64])
        >>> segmenter.save_pretrained("segmenter")
        >>> same = UperNet.from_pretrained("segmenter")
    """

    head = "upernet"
    # Entry points of the model other than `forward`, for code that shards its weights.
    forward_methods = ("forward_both",)
    # What a pixel of each class counts in training, where they differ.
    class_weights: list[float] | None = None

    def __init__(
        self,
        backbone: str | nn.Module,
        num_classes: int,
        channels: int = 512,
        auxiliary_channels: int = 256,
        image_size: int | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.arguments = {
            "backbone": backbone,
            "num_classes": num_classes,
            "channels": channels,
            "auxiliary_channels": auxiliary_channels,
            "image_size": image_size,
            **arguments,
        }
        require("UperNet", ("transformers",), "transformers")
        from transformers.models.upernet.configuration_upernet import UperNetConfig
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        if not 1 <= num_classes <= 255:
            raise UserError(f"num_classes must lie in 1 to 255, got {num_classes}")
        for name, value in (("channels", channels), ("auxiliary_channels", auxiliary_channels)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be an integer of at least 1, got {value!r}")
        config = UperNetConfig(  # type: ignore[call-arg]
            hidden_size=channels,
            auxiliary_channels=auxiliary_channels,
            num_labels=num_classes,
        )
        self.num_classes = num_classes
        self.backbone = build_backbone(backbone, image_size, TOP_K, **arguments)
        self.decode_head = UperNetHead(config, in_channels=self.backbone.channels)
        self.auxiliary_head = UperNetFCNHead(config, in_channels=self.backbone.channels)
        self._init_heads()

    def _init_heads(self) -> None:
        """Initialize the heads: Kaiming's normal before a ReLU, a small normal for classifiers."""
        for head in (self.decode_head, self.auxiliary_head):
            for module in head.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.normal_(head.classifier.weight, std=0.01)
            if head.classifier.bias is not None:
                nn.init.zeros_(head.classifier.bias)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map images to logits of the same height and width.

        Args:
            images: (B, 3, H, W), normalized, at least 32 x 32 pixels.
            mask: bool (B, H, W), True where a pixel is real, or None. Each image's real part must
                be a rectangle in its upper left corner, in evaluation of at least 32 x 32 pixels.

        Returns:
            (B, num_classes, H, W) logits; in evaluation they are 0 where a pixel is padding.

        Raises:
            TypeError, ValueError: images or a mask of another type or shape.
        """
        if mask is None or self.training:
            return self._decode(self.backbone(images, mask), images)
        check_images(images, 3, mask)
        sizes = real_sizes(mask)
        takes_mask = self.backbone.takes_mask
        maps = self.backbone(images, mask) if takes_mask else []
        logits = images.new_zeros(len(images), self.num_classes, *images.shape[2:])
        for height, width in dict.fromkeys(sizes):
            members = [index for index, size in enumerate(sizes) if size == (height, width)]
            alone = images[members, :, :height, :width]
            if takes_mask:
                own = [
                    x[members, :, : -(-height // stride), : -(-width // stride)]
                    for x, stride in zip(maps, self.backbone.strides, strict=True)
                ]
            else:
                own = self.backbone(alone)
            logits[members, :, :height, :width] = self._decode(own, alone).to(logits.dtype)
        return logits

    def forward_both(self, images: Tensor, mask: Tensor | None = None) -> UperNetLogits:
        """Map images to the logits of both heads, for training; arguments as in :meth:`forward`."""
        maps = self.backbone(images, mask)
        auxiliary = _to_size_of(images, self.auxiliary_head(maps))
        return UperNetLogits(self._decode(maps, images), auxiliary)

    def _decode(self, maps: list[Tensor], images: Tensor) -> Tensor:
        return _to_size_of(images, self.decode_head(maps))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile backbone and heads in place, so that every way through the model is compiled."""
        for part in (self.backbone, self.decode_head, self.auxiliary_head):
            part.compile(*args, **kwargs)


def build_upernet(
    backbone: str | nn.Module,
    num_classes: int,
    channels: int = 512,
    auxiliary_channels: int = 256,
    image_size: int | None = None,
    **arguments: Any,
) -> UperNet:
    """Build UperNet over a backbone: ``build_upernet("dgt_tiny", num_classes=150)`` is the paper's.

    Args:
        backbone, num_classes, channels, auxiliary_channels, image_size, arguments: as in
            :class:`UperNet`.

    Returns:
        The segmenter, with random weights in everything but a pretrained backbone.

    Raises:
        TypeError, ValueError: as :class:`UperNet`, naming the argument.

    Example:
        >>> segmenter = dgt.build_upernet("dgt_nano", num_classes=12, channels=64).eval()
        >>> segmenter(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 12, 64, 64])
    """
    return UperNet(backbone, num_classes, channels, auxiliary_channels, image_size, **arguments)


def _to_size_of(images: Tensor, logits: Tensor) -> Tensor:
    return F.interpolate(logits, size=images.shape[2:], mode="bilinear", align_corners=False)
