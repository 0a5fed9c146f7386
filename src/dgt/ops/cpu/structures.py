"""The structures of the native kernels' C interface, field by field as in ``kernels/interface.h`` and ``maps.h``."""

import ctypes

from torch import Tensor


class Tokens(ctypes.Structure):
    """``dgt_tokens``: a (B, H, N, D) tensor whose channels stand side by side."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("image_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
    ]


class TokenClusters(ctypes.Structure):
    """``dgt_clusters``: how tokens are clustered, and where the result goes."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("every", ctypes.c_int64),
        ("order", ctypes.c_void_p),
        ("order_image_stride", ctypes.c_int64),
        ("centroids", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("ids_image_stride", ctypes.c_int64),
        ("ids_head_stride", ctypes.c_int64),
    ]


class Problem(ctypes.Structure):
    """``dgt_problem``: what a kernel reads and writes; fields that are not set are zero or null."""

    operands: list[Tensor]  # copies that it points to
    _fields_ = [
        ("images", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("list_length", ctypes.c_int64),
        ("prefix", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("query", Tokens),
        ("key", Tokens),
        ("value", Tokens),
        ("centroids", ctypes.c_void_p),
        ("query_mask", ctypes.c_void_p),
        ("key_mask", ctypes.c_void_p),
        ("key_bias", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("mask_type", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 4),
        ("bias_rows", Tokens),
        ("bias_columns", Tokens),
        ("grid_columns", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("group_ids", ctypes.c_void_p),
        ("key_ids", ctypes.c_void_p),
        ("output", Tokens),
        ("logsumexp", ctypes.c_void_p),
        ("query_clusters", TokenClusters),
        ("key_clusters", TokenClusters),
        ("first_order", ctypes.c_int64),
        ("residual_keys", ctypes.c_void_p),
        ("residual_biases", ctypes.c_void_p),
        ("group_sums", ctypes.c_void_p),
        ("group_counts", ctypes.c_void_p),
        ("grad_type", ctypes.c_int64),
        ("grad_output", Tokens),
        ("grad_logsumexp", ctypes.c_void_p),
        ("grad_query", Tokens),
        ("grad_key", Tokens),
        ("grad_value", Tokens),
        ("grad_key_bias", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


class MapProblem(ctypes.Structure):
    """``dgt_map_problem``: what an operator on maps reads and writes; fields that are not set are zero or null."""

    operands: list[Tensor]  # that it points to
    _fields_ = [
        ("images", ctypes.c_int64),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("epsilon", ctypes.c_double),
        ("input", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("grad_output", ctypes.c_void_p),
        ("grad_input", ctypes.c_void_p),
        ("grad_weight", ctypes.c_void_p),
        ("grad_bias", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("parallel_for", ctypes.c_void_p),
    ]


SIZES = {
    "dgt_problem_size": Problem,
    "dgt_map_problem_size": MapProblem,
}
"""The function of a library that tells the bytes of a structure there."""
