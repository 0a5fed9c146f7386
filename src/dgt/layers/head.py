"""The classifier head: CMT's 1x1 convolution to a wide layer, pooling, and a linear classifier.

Without the wide layer it is the head of Swin and CSWin: LayerNorm, pooling, linear classifier.
"""

from typing import Any

from timm.layers import LayerNorm2d, SelectAdaptivePool2d
from torch import Tensor, nn

from dgt.layers.convolution import PixelConv2d


class Head(nn.Module):
    """1x1 convolution, BatchNorm, SiLU, global pooling, linear classifier (CMT's head).

    Args:
        in_dim, hidden: channels in, and of the convolution; None for LayerNorm in place of it, BatchNorm and SiLU.
        num_classes: classes; 0 leaves the classifier out.
        pool: timm's name of the pooling; "" leaves it out, and the classifier becomes a 1x1 convolution.
        drop: dropout rate before the classifier.
    """

    def __init__(
        self, in_dim: int, hidden: int | None, num_classes: int, pool: str = "avg", drop: float = 0.0, **factory: Any
    ) -> None:
        super().__init__()
        self.num_features = in_dim if hidden is None else hidden
        self.conv: nn.Module = nn.Identity()
        self.norm: nn.Module = LayerNorm2d(in_dim, **factory)
        self.act: nn.Module = nn.Identity()
        if hidden is not None:
            self.conv, self.norm = PixelConv2d(in_dim, hidden, 1, **factory), nn.BatchNorm2d(hidden, **factory)
            self.act = nn.SiLU()
        self.drop = nn.Dropout(drop)
        self.reset(num_classes, pool, **factory)

    def reset(self, num_classes: int, pool: str | None = None, **factory: Any) -> None:
        """Replace classifier and, if ``pool`` is given, pooling."""
        if pool is not None:
            self.global_pool = SelectAdaptivePool2d(pool_type=pool, flatten=bool(pool)).train(self.training)
        width = self.num_features * self.global_pool.feat_mult()
        if num_classes == 0:
            self.fc: nn.Module = nn.Identity()
        elif self.global_pool.is_identity():
            self.fc = nn.Conv2d(width, num_classes, 1, **factory)
        else:
            self.fc = nn.Linear(width, num_classes, **factory)
        self.fc.train(self.training)

    def remove_hidden(self, in_dim: int) -> None:
        """Drop convolution and BatchNorm, leaving pooling: for a backbone that only yields features."""
        self.conv, self.norm, self.act, self.num_features = nn.Identity(), nn.Identity(), nn.Identity(), in_dim
        self.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """Map (B, C, H, W) to (B, num_classes); with ``pre_logits`` to what the classifier gets.

        ``mask``, bool (B, H, W), has the average taken over real places alone; ValueError for a pooling but "avg".
        """
        x = self.act(self.norm(self.conv(x)))
        if mask is not None:
            if self.global_pool.pool_type != "avg":
                raise ValueError(f"mask needs global_pool 'avg', got '{self.global_pool.pool_type}'")
            real = mask.unsqueeze(1).to(x.dtype)
            x = x * (real / real.mean(dim=(2, 3), keepdim=True).clamp(min=1e-6))  # the pool then averages what is real
        x = self.drop(self.global_pool(x))
        return x if pre_logits else self.fc(x)
