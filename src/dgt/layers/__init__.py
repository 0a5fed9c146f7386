"""The modules a Dynamic Group Transformer is made of (Eqs. 8-10).

Tensors are channels-last in and out: (B, H, W, C).
"""

from dgt.layers.attention import DGAttention, GlobalAttention
from dgt.layers.block import Block, FeedForward
from dgt.layers.centroid_steps import (
    convert_sync_centroids,
    renormalize_centroids,
    step_centroids,
)
from dgt.layers.convolution import (
    ConditionalPositionEncoding,
    ConvStem,
    InvertedResidualFFN,
    PatchMerging,
    mask_padding,
)
from dgt.layers.cross_attention import DGCrossAttention
from dgt.layers.head import Head

__all__ = [
    "Block",
    "ConditionalPositionEncoding",
    "ConvStem",
    "DGAttention",
    "DGCrossAttention",
    "FeedForward",
    "GlobalAttention",
    "Head",
    "InvertedResidualFFN",
    "PatchMerging",
    "convert_sync_centroids",
    "mask_padding",
    "renormalize_centroids",
    "step_centroids",
]
