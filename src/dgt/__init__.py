"""Dynamic Group Transformer: attention over dynamic groups of queries, and the vision backbones built on it.

Importing the package registers its models with timm: ``timm.create_model("dgt_tiny")``.
"""

from dgt.acceleration import (
    FrameTokens,
    accelerate,
    apply_plan,
    check_plan,
    exact_attention,
    guard_counts,
    register_attention,
)
from dgt.inference import (
    add_openvino_extension,
    openvino_extension_path,
    optimize_for_inference,
)
from dgt.inference.export import export
from dgt.layers import (
    DGAttention,
    DGCrossAttention,
    GlobalAttention,
    convert_sync_centroids,
    step_centroids,
)
from dgt.models import (
    DynamicGroupTransformer,
    build_mask_rcnn,
    build_upernet,
    calibrate,
    cost,
    diagnose,
    group_records,
    replace_attention,
    set_attention,
)
from dgt.ops import (
    Clusters,
    DynamicGroupAttentionOutput,
    attend,
    attend_with_logsumexp,
    cluster_tokens,
    clustered_attention,
    dense_attention,
    dynamic_group_attention,
    find_centroids,
    group_matmul,
    group_queries,
    merge_attention,
    seed_centroids,
    select_keys,
    update_centroids,
)
from dgt.ops.cpu.library import status as native_status
from dgt.utils.allocator import keep_freed_memory

__version__ = "0.1.0"

__all__ = [
    "Clusters",
    "DGAttention",
    "DGCrossAttention",
    "DynamicGroupAttentionOutput",
    "DynamicGroupTransformer",
    "FrameTokens",
    "GlobalAttention",
    "accelerate",
    "add_openvino_extension",
    "apply_plan",
    "attend",
    "attend_with_logsumexp",
    "build_mask_rcnn",
    "build_upernet",
    "calibrate",
    "check_plan",
    "cluster_tokens",
    "clustered_attention",
    "convert_sync_centroids",
    "cost",
    "dense_attention",
    "diagnose",
    "dynamic_group_attention",
    "exact_attention",
    "export",
    "find_centroids",
    "group_matmul",
    "group_queries",
    "group_records",
    "guard_counts",
    "keep_freed_memory",
    "merge_attention",
    "native_status",
    "openvino_extension_path",
    "optimize_for_inference",
    "register_attention",
    "replace_attention",
    "seed_centroids",
    "select_keys",
    "set_attention",
    "step_centroids",
    "update_centroids",
]
