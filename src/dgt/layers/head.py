"""The classifier head: CMT's 1x1 convolution to a wide layer, pooling, and a linear classifier.

Without the wide layer it is the head of Swin and CSWin: LayerNorm, pooling, linear classifier.
"""

from typing import Any

from timm.layers import LayerNorm2d, SelectAdaptivePool2d
from torch import Tensor, nn


class Head(nn.Module):
    """1x1 convolution, BatchNorm, SiLU, global pooling, linear classifier (CMT's head).

    Args:
        in_dim: channels in.
        hidden: channels of the convolution; None for LayerNorm in place of convolution, BatchNorm
            and SiLU.
        num_classes: classes; 0 leaves the classifier out.
        pool: timm's name of the pooling; "" leaves it out, and the classifier becomes a 1x1
            convolution.
        drop: dropout rate before the classifier.
        factory: ``device`` and ``dtype``.

    Example:
        >>> Head(512, hidden=1280, num_classes=1000)(torch.randn(2, 512, 7, 7)).shape
        torch.Size([2, 1000])
    """

    def __init__(
        self,
        in_dim: int,
        hidden: int | None,
        num_classes: int,
        pool: str = "avg",
        drop: float = 0.0,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.num_features = in_dim if hidden is None else hidden
        self.conv: nn.Module = nn.Identity()
        self.norm: nn.Module = LayerNorm2d(in_dim, **factory)
        self.act: nn.Module = nn.Identity()
        if hidden is not None:
            self.conv = nn.Conv2d(in_dim, hidden, 1, **factory)
            self.norm = nn.BatchNorm2d(hidden, **factory)
            self.act = nn.SiLU()
        self.drop = nn.Dropout(drop)
        self.reset(num_classes, pool, **factory)

    def reset(self, num_classes: int, pool: str | None = None, **factory: Any) -> None:
        """Replace the classifier, and the pooling if ``pool`` is given.

        Args:
            num_classes: classes; 0 leaves the classifier out.
            pool: timm's name of the pooling, or None to keep it.
            factory: ``device`` and ``dtype``.
        """
        if pool is not None:
            pooling = SelectAdaptivePool2d(pool_type=pool, flatten=bool(pool))
            self.global_pool = pooling.train(self.training)
        width = self.num_features * self.global_pool.feat_mult()
        if num_classes == 0:
            self.fc: nn.Module = nn.Identity()
        elif self.global_pool.is_identity():
            self.fc = nn.Conv2d(width, num_classes, 1, **factory)
        else:
            self.fc = nn.Linear(width, num_classes, **factory)
        self.fc.train(self.training)

    def remove_hidden(self, in_dim: int) -> None:
        """Leave only the pooling, for a backbone that yields features of ``in_dim`` channels."""
        self.conv = nn.Identity()
        self.norm = nn.Identity()
        self.act = nn.Identity()
        self.num_features = in_dim
        self.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False, mask: Tensor | None = None) -> Tensor:
        """Map features to logits.

        Args:
            x: (B, C, H, W).
            pre_logits: return what the classifier gets.
            mask: bool (B, H, W), True where a place is real; the average is taken over those alone.

        Returns:
            (B, num_classes), or (B, num_features) with ``pre_logits``.

        Raises:
            ValueError: a mask with another pooling than "avg".
        """
        x = self.act(self.norm(self.conv(x)))
        if mask is not None:
            if self.global_pool.pool_type != "avg":
                raise ValueError(
                    f"mask needs global_pool 'avg', got '{self.global_pool.pool_type}'"
                )
            real = mask.unsqueeze(1).to(x.dtype)
            share = real.mean(dim=(2, 3), keepdim=True).clamp(min=1e-6)
            x = x * (real / share)  # the pooling then averages what is real
        x = self.drop(self.global_pool(x))
        return x if pre_logits else self.fc(x)
