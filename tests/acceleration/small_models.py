"""Small models whose attention is not uniform, and images for them."""

from __future__ import annotations

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 96  # 6 x 6 patches of 16, or 24 x 24 of 4


SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": SIZE, "num_classes": 5}


def vit(name: str = "vit_tiny_patch16_224", spread: float = 0.15, **options) -> nn.Module:
    """A small timm model whose attention is not uniform."""
    torch.manual_seed(3)
    model = timm.create_model(name, **{**SMALL, "patch_size": 4, **options}).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, 0, spread)
    return model


class Heads(nn.Module):
    """A model that calls the function itself, with fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(8, 32), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        key, value = self.rest(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return (
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


def smooth_images(count: int, seed: int = 0) -> Tensor:
    """Images whose neighboring pixels are similar."""
    draws, options = torch.Generator().manual_seed(seed), {"size": SIZE, "mode": "bilinear"}
    sides = (torch.randn(count, 3, side, side, generator=draws) for side in (12, 24, 48))
    return sum((F.interpolate(side, **options) for side in sides), torch.zeros(()))


def difference(after: Tensor, before: Tensor) -> float:
    return float(((after - before).norm() / before.norm()).detach())


class Reader(nn.Module):
    """Every kind of attention that groups cannot replace, and one that they can."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(
            Kind(kind) for kind in ("plain", "mask", "causal", "cross", "windows", "few", "3d")
        )
        self.shared = Kind("plain")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = images.flatten(2).transpose(1, 2)
        for kind in self.kinds:
            x = x + kind(x)
        return {"tokens": self.shared(self.shared(x)), "count": torch.tensor(3)}


class Kind(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        options = {
            "mask": {"attn_mask": torch.randn(x.shape[1], x.shape[1])},
            "causal": {"is_causal": True},
        }
        if self.kind == "cross":
            key, value = key[:, :, ::2], value[:, :, ::2]
        if self.kind == "few":
            query, key, value = (t[:, :, :9] for t in (query, key, value))
        if self.kind == "windows":
            parts = (t.unflatten(2, (-1, 32)) for t in (query, key, value))
            query, key, value = (t.permute(0, 2, 1, 3, 4).flatten(0, 1) for t in parts)
        if self.kind == "3d":
            query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, **options.get(self.kind, {}))
        if self.kind == "windows":
            out = out.unflatten(0, (len(x), -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
        if self.kind == "few":
            return F.pad(out, (0, 0, 0, x.shape[1] - 9)).transpose(1, 2).flatten(2)
        return out.view(len(x), 2, x.shape[1], 4).transpose(1, 2).flatten(2)
