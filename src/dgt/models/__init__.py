"""The models: DGT-T, -S, -B, a small one, and those of the paper's comparisons.

They are registered with timm when this package is imported.
"""

from dgt.models import from_transformers as from_transformers  # registers them
from dgt.models.cost import Cost, cost
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.heads.mask_rcnn import PaddedMaskRCNN, build_mask_rcnn
from dgt.models.heads.upernet import UperNet, build_upernet
from dgt.models.inspect import (
    BlockDiagnosis,
    GroupRecord,
    capture,
    diagnose,
    group_records,
    set_attention,
)
from dgt.models.replace import calibrate, replace_attention
from dgt.models.variants import dgt_base, dgt_nano, dgt_small, dgt_tiny

__all__ = [
    "BlockDiagnosis",
    "Cost",
    "DynamicGroupTransformer",
    "GroupRecord",
    "PaddedMaskRCNN",
    "UperNet",
    "build_mask_rcnn",
    "build_upernet",
    "calibrate",
    "capture",
    "cost",
    "dgt_base",
    "dgt_nano",
    "dgt_small",
    "dgt_tiny",
    "diagnose",
    "group_records",
    "replace_attention",
    "set_attention",
]
