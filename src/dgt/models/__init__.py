"""The models: DGT-T, -S, -B and a small one, registered with timm when this package is imported."""

from dgt.models.cost import Cost, cost
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.inspection import BlockVisit, GroupRecord, group_records, set_attention, visit_blocks
from dgt.models.variants import dgt_base, dgt_nano, dgt_small, dgt_tiny

__all__ = [
    "BlockVisit",
    "Cost",
    "DynamicGroupTransformer",
    "GroupRecord",
    "cost",
    "dgt_base",
    "dgt_nano",
    "dgt_small",
    "dgt_tiny",
    "group_records",
    "set_attention",
    "visit_blocks",
]
