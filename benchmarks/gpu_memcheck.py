"""Run every kernel once on small odd shapes, forward and backward, under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python benchmarks/gpu_memcheck.py [--shape 0] [--dtype bfloat16]
"""

import argparse
import itertools

import torch
import torch.nn.functional as F

import dgt
from dgt.ops.triton import operators as kernels

SHAPES = (
    (1, 2, 97, 32, 5, 7),
    (2, 1, 196, 32, 48, 98),
    (1, 1, 799, 24, 70, 49),
    (1, 1, 5000, 128, 5, 60),
)
TYPES = ("bfloat16", "float16", "float32")


def parse_arguments() -> argparse.Namespace:
    """The options of the command line, with lists of shapes and types."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)))
    parser.add_argument("--dtype", choices=TYPES)
    options = parser.parse_args()
    options.shapes = SHAPES if options.shape is None else [SHAPES[options.shape]]
    options.dtypes = TYPES if options.dtype is None else [options.dtype]
    return options


def main() -> None:
    """Run all shapes and types, or one, as the tool makes them many times slower.

    Fails on a result that is not finite.
    """
    options = parse_arguments()
    for shape, name in itertools.product(options.shapes, options.dtypes):
        run(shape, getattr(torch, name))
    torch.cuda.synchronize()
    print("memcheck shapes done")


def run(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Run all operators on one shape.

    Raises:
        RuntimeError: a result or gradient is not finite.
    """
    batch, heads, tokens, channels, groups, top_k = sizes
    shape = (batch, heads, tokens, channels)
    leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    centroids = F.normalize(torch.randn(heads, groups, channels, device="cuda"), dim=-1)
    mask = torch.rand(batch, tokens, device="cuda") > 0.3
    result = dgt.dynamic_group_attention(*leaves, centroids, top_k, key_mask=mask, backend="triton")
    ids = result.group_ids, result.key_ids
    alone = dgt.attend(*leaves, *ids, backend="triton")
    scores = dgt.group_matmul(1, leaves[0] * channels**-0.5, leaves[1], *ids, backend="triton")
    product = dgt.group_matmul(2, scores.softmax(-1), leaves[2], *ids, backend="triton")
    (result.output + alone + product).float().square().mean().backward()
    kernels.group_statistics(leaves[0], result.group_ids, groups)
    kernels.select_keys(centroids, leaves[1], tokens // 2, mask)
    with torch.no_grad():
        whole = dgt.dynamic_group_attention(
            *leaves, centroids, top_k, key_mask=mask, backend="triton", residual_keys=1
        ).output
        part = dgt.dynamic_group_attention(
            *leaves, centroids, top_k, backend="triton", num_prefix_tokens=3, residual_keys=1
        ).output
        clustered = dgt.clustered_attention(
            *leaves, num_groups=groups, top_k=top_k, residual_keys=9, backend="triton"
        )
    if not all_finite(whole, part, clustered):
        raise RuntimeError(f"a result with a remainder that is not finite on {shape} {dtype}")
    if not all_finite(*(leaf.grad for leaf in leaves)):
        raise RuntimeError(f"gradients that are not finite on {shape} {dtype}")


def all_finite(*tensors: torch.Tensor | None) -> bool:
    """Whether all tensors are there and have no infinite numbers and no NaN."""
    return all(tensor is not None and bool(tensor.isfinite().all()) for tensor in tensors)


if __name__ == "__main__":
    main()
