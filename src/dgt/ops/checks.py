"""Argument checks and precision of the public functions of :mod:`dgt.ops`.

Each error names the argument, what was expected and what was passed. Shapes and types are checked
everywhere; values (NaN, ids out of range) only where reading
them does not make the host wait for a device.
"""

import contextlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel

from dgt.utils.errors import NonFiniteInput

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def describe(value: object) -> str:
    """Describe a value for an error message: type, and for a tensor shape, dtype and device."""
    if isinstance(value, Tensor):
        return f"a {tuple(value.shape)} tensor of {value.dtype} on {value.device}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} of type {type(value).__name__}"


def check_tensor(name: str, value: Tensor, letters: str, floating: bool) -> None:
    """Check that ``value`` is a tensor with one dimension per letter, floating point or int64.

    Raises:
        TypeError: not a tensor, or of another type.
        ValueError: another number of dimensions.
    """
    kind = "floating point" if floating else "int64"
    expected = f"{name} must be a ({', '.join(letters)}) {kind} tensor"
    if not isinstance(value, Tensor) or value.dtype not in (FLOATS if floating else (torch.int64,)):
        raise TypeError(f"{expected}, got {describe(value)}")
    if value.dim() != len(letters):
        raise ValueError(f"{expected}, got {describe(value)}")


def check_shape(
    name: str, value: Tensor, letters: str, expected: tuple[int, ...], like: str
) -> None:
    """Check that ``value`` has the ``expected`` shape, which follows from the argument ``like``."""
    if value.shape != expected:
        wanted = f"({', '.join(letters)}) = {tuple(expected)}"
        raise ValueError(
            f"{name} must have shape {wanted} to match {like}, got {tuple(value.shape)}"
        )


def check_device(like_name: str, like: Tensor, **others: Tensor | None) -> None:
    """Check that every other tensor lives on the device of ``like``."""
    for name, value in others.items():
        if value is not None and value.device != like.device:
            raise ValueError(
                f"{name} must be on {like_name}'s device {like.device}, got {value.device}"
            )


def check_tokens(name: str, tokens: Tensor, centroids: Tensor) -> None:
    """Check a (B, H, L, D) query or key against the (H, G, D) centroids."""
    check_tensor(name, tokens, "BHLD", floating=True)
    check_tensor("centroids", centroids, "HGD", floating=True)
    heads, groups, channels = centroids.shape
    came = f"(H, G, D), got {tuple(centroids.shape)}"
    if tokens.shape[1] != heads:
        raise ValueError(f"centroids must have {name}'s {tokens.shape[1]} heads {came}")
    if tokens.shape[3] != channels:
        raise ValueError(f"centroids must have {name}'s {tokens.shape[3]} channels per head {came}")
    if groups < 1:
        raise ValueError(f"centroids must hold at least one group {came}")
    if 0 in tokens.shape:
        raise ValueError(f"{name} must not be empty, got shape {tuple(tokens.shape)}")
    check_device(name, tokens, centroids=centroids)


def check_mask(name: str, mask: Tensor | None, like_name: str, like: Tensor) -> None:
    """Check a bool (B, L) mask of (B, H, L, D) tokens, True where a token is real."""
    if mask is None:
        return
    batch, tokens = like.shape[0], like.shape[2]
    expected = (
        f"{name} must be a bool (B, L) = ({batch}, {tokens}) tensor, True where a token is real"
    )
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{expected}, got {describe(mask)}")
    if mask.shape != (batch, tokens):
        raise ValueError(f"{expected}, got {describe(mask)}")
    if mask.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {mask.device}")


def check_operands(query: Tensor, key: Tensor, value: Tensor, share_heads: bool = True) -> None:
    """Check query, key and value against each other.

    Args:
        query: (B, H, L, D).
        key, value: (B, H, S, D).
        share_heads: keys and values may have fewer heads, a divisor of H.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor, "BHLD", floating=True)
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's type {query.dtype}, got {tensor.dtype}")
    shape = key.shape
    batch, heads, _, channels = query.shape
    if share_heads and shape[1] != heads and 0 not in shape[:2]:
        if heads % shape[1]:
            raise ValueError(f"key's number of heads must divide query's {heads}, got {shape[1]}")
        heads = shape[1]
    if shape != (batch, heads, shape[2], channels):
        check_shape("key", key, "BHLD", (batch, heads, shape[2], channels), "query")
    if value.shape != shape:
        check_shape("value", value, "BHLD", tuple(shape), "key")
    if not query.device == key.device == value.device:
        check_device("query", query, key=key, value=value)
    if query.numel() == 0 or key.numel() == 0:
        raise ValueError(
            f"query and key must not be empty, got {tuple(query.shape)} and {tuple(key.shape)}"
        )


def repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat key heads that serve several heads of queries."""
    each = query.shape[1] // key.shape[1]
    if each == 1:
        return key, value
    return key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)


def check_choice(query: Tensor, key: Tensor, group_ids: Tensor, key_ids: Tensor) -> None:
    """Check (B, H, L) groups and (B, H, G, K) key ids against queries and keys, all but values."""
    check_tensor("group_ids", group_ids, "BHL", floating=False)
    check_tensor("key_ids", key_ids, "BHGK", floating=False)
    check_shape("group_ids", group_ids, "BHL", tuple(query.shape[:3]), "query")
    check_shape("key_ids", key_ids, "BHGK", (*key.shape[:2], *key_ids.shape[2:]), "key")
    if 0 in key_ids.shape:
        raise ValueError(
            f"key_ids must have at least one group and one entry, got shape {tuple(key_ids.shape)}"
        )
    check_device("query", query, group_ids=group_ids, key_ids=key_ids)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Check an integer (no bool) of at least ``least``; under tracing a symbolic integer passes."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int of at least {least}, got {describe(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_residual_keys(residual_keys: int, keys: int) -> None:
    """Check the number of residual keys of a group; ``keys`` are those after the prefix."""
    check_count("residual_keys", residual_keys, least=0)
    if residual_keys > 1 and residual_keys > keys:
        raise ValueError(
            f"residual_keys must be at most the {keys} keys after the prefix, got {residual_keys}"
        )


def check_scale(scale: float | Tensor | None, channels: int) -> float:
    """Check the factor on the scores, a finite number, and return it; for None 1 / sqrt(D).

    As in PyTorch's attention, a 0-dimensional tensor that needs no gradient is a number, too: in a
    trace of ``torch.jit.trace``, sizes and what is computed from them are such tensors.
    """
    if scale is None:
        return float(channels**-0.5)
    if isinstance(scale, Tensor) and scale.dim() == 0 and not scale.requires_grad:
        scale = scale.item()
    if isinstance(scale, Tensor) or not _is_number(scale):
        raise TypeError(f"scale must be a number or None, got {describe(scale)}")
    if not abs(scale) < torch.inf:  # written so that it can be traced
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def check_share(name: str, value: float) -> None:
    """Check a number from 0 to 1."""
    if not _is_number(value):
        raise TypeError(f"{name} must be between 0 and 1, got {describe(value)}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | torch.SymFloat | torch.SymInt) and not isinstance(
        value, bool
    )


def check_ids(name: str, ids: Tensor, count: int) -> None:
    """Check that ids lie in -1 to ``count - 1``, if they can be read without waiting for a device."""
    if not _can_check(ids):
        return
    least, most = (int(bound) for bound in ids.aminmax())
    if least < -1 or most >= count:
        raise ValueError(
            f"{name} must lie in -1 to {count - 1}, got {least if least < -1 else most}"
        )


def check_key_ids(key_ids: Tensor, count: int) -> None:
    """Check (B, H, G, K) key ids: in range, and no key twice in a list.

    Skipped where reading the values would wait for a device.
    """
    check_ids("key_ids", key_ids, count)
    if not _can_check(key_ids):
        return
    ordered = key_ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        raise ValueError(
            "key_ids must not repeat a key in one list, "
            f"got {int(ordered[..., 1:][twice][0])} again"
        )


def check_no_nan(name: str, tensor: Tensor) -> None:
    """Check that a tensor, or what was computed from it, holds no NaN.

    Skipped where reading the values would wait for a device.

    Raises:
        NonFiniteInput: a ValueError.
    """
    if _can_check(tensor) and tensor.isnan().any():
        raise nan_in(name)


def check_below_infinity(name: str, tensor: Tensor) -> None:
    """Check that a tensor holds neither NaN nor infinity, but perhaps minus infinity.

    Skipped where reading the values would wait for a device.
    """
    if _can_check(tensor) and not (tensor < torch.inf).all():
        raise ValueError(f"{name} must be below infinity, got NaN or infinity")


def nan_in(name: str) -> NonFiniteInput:
    """Return the error for NaN."""
    return NonFiniteInput(f"{name} must not contain NaN, got NaN (or infinities that cancel)")


def _can_check(tensor: Tensor) -> bool:
    """Tell whether a tensor's values can be read now without waiting for a device."""
    if torch.compiler.is_compiling() or is_transformed():
        return False
    traced = isinstance(tensor, FakeTensor) or get_proxy_mode() is not None
    return tensor.device.type == "cpu" and not traced and tensor.numel() > 0


def has_tangent(*tensors: Tensor | None) -> bool:
    """Tell whether a tensor takes part in forward-mode differentiation.

    Our operators have no rule for it.
    """
    if torch.compiler.is_compiling():
        return False
    return any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def is_exporting() -> bool:
    """Tell whether ``torch.export`` records a graph.

    Reads the flag, since all compiled code takes ``torch.compiler.is_exporting`` for true in PyTorch 2.11.
    """
    return torch.compiler._is_exporting_flag


def is_transformed() -> bool:
    """Tell whether a transform of ``torch.func`` is at work: ``grad``, ``vmap``, ``jacrev`` and their like.

    Our operators have no rules for them.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_vectorized() -> bool:
    """Tell whether ``vmap`` of ``torch.func`` is at work, which knows of no sizes that follow from values."""
    if not is_transformed():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def is_plain() -> bool:
    """Tell whether nothing but autograd looks at what is called: no compiler, trace, transform or forward mode."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def kernels_with_derivatives(*tensors: Tensor | None) -> contextlib.AbstractContextManager[object]:
    """Return the context in which PyTorch's attention has a rule for what is being transformed.

    Only its plain operations have rules for forward-mode differentiation, and efficient ones for
    ``vmap``.
    """
    if is_transformed() or has_tangent(*tensors):
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def needs_gradients(*tensors: Tensor) -> bool:
    """Tell whether gradients of what is computed from these tensors may be asked for."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context without autocast, as the steps choose their types themselves."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def check_fixed_in_exports(name: str, tensor: Tensor, what: str) -> None:
    """Check that an export has no free sizes where some operation cuts its work by them.

    Args:
        name: the tensor's name in the error.
        tensor: the tensor whose sizes must be fixed.
        what: the operation that cannot be exported with free sizes, for the error.

    Raises:
        ValueError: if a size is free.
    """
    if is_exporting() and any(isinstance(size, torch.SymInt) for size in tensor.shape):
        raise ValueError(
            f"{name} must have fixed sizes in an export with {what}, got {tuple(tensor.shape)}; "
            "leave out dynamic_shapes"
        )
