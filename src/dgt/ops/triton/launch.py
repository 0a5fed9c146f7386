"""Launching kernels: whether Triton can be used here, planned launches, and a launch recorder.

A launch follows from how its tensors lie in memory, so it is planned once for all that lie alike: a
kernel takes first what a call gives, tensors and scales, and then the numbers of the plan.

With the recorder `benchmarks/compile_kernels.py` walks the code that runs on a GPU, on meta tensors,
and compiles every kernel.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

MAX_CHANNELS = 128
OLDEST = (8, 0)  # compute capability of the first GPUs with bfloat16 matrix units
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Bytes of the largest temporary buffer: more heads are done in turns. A launch costs the host more
# than a turn whose buffer fits the L2 cache gains, and this much keeps the peak near SDPA's.
WORKSPACE = 128 << 20
MOST_PLANS = 256  # of a step, those used last: a model needs one for each of its shapes
ALIGNED = 128  # numbers of four bytes: every buffer begins where an allocation could


class Layout(NamedTuple):
    """How a (B, H, L, D) tensor with contiguous channels lies in memory: what launches are planned by."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of batch, head and token."""
    dtype: torch.dtype


class LaunchPlan(NamedTuple):
    """A launch but for what a call gives: nothing in it is of any one tensor."""

    kernel: Any
    programs: int
    numbers: tuple[int, ...]
    options: dict[str, Any]


class Launch(NamedTuple):
    """One launch of a kernel, as :func:`recording` keeps it."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Attended(NamedTuple):
    """What the forward pass read and wrote, as its gradients need it."""

    query: Tensor
    """(B, H, L, D)."""
    key: Tensor
    """(B, H, M, D)."""
    value: Tensor
    """(B, H, M, D)."""
    output: Tensor
    """(B, H, L, D) of the query's type."""
    logsum: Tensor
    """(B, H, L) float32, base 2."""

    def in_rows(self) -> "Attended":
        """Return tensors with contiguous channels."""
        return Attended(
            rows_of(self.query),
            rows_of(self.key),
            rows_of(self.value),
            rows_of(self.output),
            self.logsum.contiguous(),
        )


_recorded: list[Launch] | None = None


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches instead of running them; tensors may then be on the meta device."""
    global _recorded  # noqa: PLW0603
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def plan_launch(kernel: Any, programs: int, *numbers: int, **options: Any) -> LaunchPlan:
    """Plan to run ``programs`` programs of a kernel, with its last arguments and options."""
    options["enable_fp_fusion"] = True  # from Triton 3.10 on no longer of itself
    options["maxnreg"] = 255  # left alone, ptxas spills a few words here and there
    return LaunchPlan(kernel, programs, numbers, options)


def launch(plan: LaunchPlan, *given: Any) -> None:
    """Run a plan with a kernel's first arguments, on the device of the very first."""
    kernel, programs, numbers, options = plan
    if _recorded is not None:
        _recorded.append(Launch(kernel, programs, (*given, *numbers), dict(options)))
    elif programs:
        device = given[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                kernel[(programs,)](*given, *numbers, **options)
        else:
            kernel[(programs,)](*given, *numbers, **options)


def interpreting() -> bool:
    """Tell whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def can_run(tensor: Tensor) -> bool:
    """Tell whether kernels can work on a (B, H, L, D) tensor on a GPU."""
    fits = tensor.is_cuda and tensor.dtype in TYPES and tensor.shape[3] <= MAX_CHANNELS
    return fits and _is_recent(tensor.device.index)


@torch.compiler.assume_constant_result
def _is_recent(device: int) -> bool:
    """Tell whether a GPU is one of NVIDIA's that is recent enough."""
    return _capability(device) >= OLDEST


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    """Compute capability of a GPU of NVIDIA's; of others (0, 0)."""
    return (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


def check_runnable(name: str, tensor: Tensor) -> None:
    """Check that kernels can work on a (B, H, L, D) tensor, here and now.

    Raises:
        TypeError: for a type that kernels do not have, or that the interpreter multiplies wrongly.
        ValueError: for more than 128 channels per head, a CPU tensor without the interpreter, or
            too old a GPU.
    """
    way, ours = 'use backend="torch"', 'for backend="triton"'
    if tensor.dtype not in TYPES:
        raise TypeError(
            f"{name} must be float32, float16 or bfloat16 {ours}, got {tensor.dtype}; {way}"
        )
    if tensor.shape[3] > MAX_CHANNELS:
        most = f"{MAX_CHANNELS} channels per head {ours}"
        raise ValueError(f"{name} must have at most {most}, got {tensor.shape[3]}; {way}")
    if tensor.is_cuda:
        major, minor = _capability(tensor.device.index)
        if (major, minor) < OLDEST:
            needed = 'backend="triton" needs a GPU of compute capability 8.0 or later'
            raise ValueError(f"{needed}, but {name} is on one with {major}.{minor}; {way}")
    elif tensor.device.type == "cpu" and not interpreting():
        raise ValueError(
            f"{name} must be on a CUDA device {ours}, got a CPU tensor; {way}, "
            "or set TRITON_INTERPRET=1 before Triton is imported to try the kernels in its "
            "interpreter"
        )
    elif tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16:
        raise TypeError(
            f"{name} must be float32 or float16 in Triton's interpreter, whose bfloat16 products "
            "are wrong, "
            f"got {tensor.dtype}; use one of these, or {way[4:]}"
        )


def ceil_div(number: int, part: int) -> int:
    """Return how many parts hold a number; ``triton.cdiv`` takes the host microseconds."""
    return -(-number // part)


def power_of_two(number: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least ``number`` and ``least``."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def block_of(tokens: Layout) -> int:
    """Return the rows of a block of (B, H, L, D) tokens whose products fit a program's registers.

    Float32 is multiplied without the matrix units, which takes more of them.
    """
    channels = power_of_two(tokens.shape[3])
    if tokens.dtype.itemsize == 2:
        return 64 if channels <= 64 else 32
    return 32 if channels <= 64 else 16


def rows_of(tensor: Tensor) -> Tensor:
    """Return a (B, H, L, D) tensor with contiguous channels, copying only if needed."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def layouts_of(*tensors: Tensor) -> tuple[Layout, ...]:
    """Return how tensors of :func:`rows_of` lie in memory."""
    return tuple([Layout(rows.shape, rows.stride()[:3], rows.dtype) for rows in tensors])


def strides_of(*layouts: Layout) -> tuple[int, ...]:
    """Return the strides of batch, head and token of each."""
    return tuple(stride for layout in layouts for stride in layout.strides)


def new_rows(like: Tensor) -> Tensor:
    """Return an empty (B, H, L, D) tensor laid out as (B, L, H, D): merging heads is free."""
    batch, heads, tokens, channels = like.shape
    return like.new_empty(batch, tokens, heads, channels).transpose(1, 2)


def layout_of_new_rows(like: Layout) -> Layout:
    """Return how :func:`new_rows` lie in memory."""
    _, heads, tokens, channels = like.shape
    return like._replace(strides=(tokens * heads * channels, channels, heads * channels))


class Buffers(NamedTuple):
    """Sizes of flat buffers that share one allocation: all live as long as any of them."""

    integers: tuple[int, ...]
    floats: tuple[int, ...]

    def new(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return them on the device of a tensor: int32 ones, then float32 ones."""
        whole = like.new_empty(sum(self.integers) + sum(self.floats), dtype=torch.int32)
        *integers, rest = whole.split_with_sizes((*self.integers, sum(self.floats)))
        if not self.floats:
            return tuple(integers)
        return (*integers, *rest.view(torch.float32).split_with_sizes(self.floats))


def plan_buffers(integers: tuple[int, ...], floats: tuple[int, ...]) -> Buffers:
    """Plan buffers of at least so many int32 and float32 numbers."""
    return Buffers(*(tuple(_aligned(size) for size in sizes) for sizes in (integers, floats)))


def _aligned(size: int) -> int:
    return ceil_div(size, ALIGNED) * ALIGNED


def turns(heads: int, bytes_per_head: int) -> Iterator[tuple[int, int]]:
    """Cut heads into runs ``(first, count)`` whose temporary buffer fits the workspace."""
    count = max(1, min(heads, WORKSPACE // max(bytes_per_head, 1)))
    return ((first, min(count, heads - first)) for first in range(0, heads, count))
