"""The models: DGT-T, -S, -B and a small one, registered with timm when this package is imported."""

from dgt.models.cost import Cost, cost
from dgt.models.dgt import DynamicGroupTransformer
from dgt.models.inspection import BlockVisit, GroupRecord, group_records, set_attention, visit_blocks

__all__ = [
    "BlockVisit",
    "Cost",
    "DynamicGroupTransformer",
    "GroupRecord",
    "cost",
    "group_records",
    "set_attention",
    "visit_blocks",
]
