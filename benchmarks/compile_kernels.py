"""Compile every Triton kernel for GPUs that need not be there: `python benchmarks/compile_kernels.py`.

The operator, its gradients and the products of the appendix are walked on meta tensors with the
shapes of DGT-T's stages, of dense prediction and of an accelerated model, and all that they would
launch is compiled for sm_80 and sm_90. The exit status is 1 where a kernel does not compile, needs
more shared memory than the chip has, or spills registers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dgt.ops.triton import backend, products
from dgt.ops.triton.launch import Launch, interpreting, recording
from dgt.ops.triton.passes import sort_queries

# Images, heads, tokens, channels of a head, and k.
STAGES = {
    "stage 1": (128, 2, 3136, 32, 98),
    "stage 2": (128, 4, 784, 32, 98),
    "stage 3": (128, 8, 196, 32, 98),
    "dense": (32, 2, 16384, 32, 512),
    "k 513": (32, 2, 16384, 32, 513),
    "large": (8, 2, 64000, 32, 500),
    "wide": (8, 6, 4096, 128, 98),
    "accelerated": (8, 6, 4101, 64, 98),
}
GROUPS = 48
PREFIX = 5  # tokens of an accelerated model
CLUSTERS = 100  # of keys, each with a residual key
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # the most of a program, by architecture
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.bool: "i1",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def walk(stage: str) -> list[Launch]:
    """Record all launches of the operator and its gradients on the shape of a stage."""
    batch, heads, tokens, channels, top_k = STAGES[stage]
    # Heads interleaved, as a layer's projection leaves them.
    qkv = torch.empty(batch, tokens, 3, heads, channels, device="meta", dtype=torch.bfloat16)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    centroids = torch.empty(heads, GROUPS, channels, device="meta")
    mask = torch.empty(batch, tokens, device="meta", dtype=torch.bool)
    steps = accelerated if stage == "accelerated" else plain
    with recording() as launches:
        steps(query, key, value, centroids, mask, top_k)
    return launches


def plain(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, mask: Tensor, top_k: int
) -> None:
    """Forward without ids, with, and with padding, each step by itself, gradients, the same with a residual key,
    products of the appendix.
    """
    for real, with_ids in ((None, False), (None, True), (mask, True)):
        output, sums, group_ids, key_ids, residual = backend.attention(
            query,
            key,
            value,
            centroids,
            top_k=top_k,
            scale=1.0,
            query_mask=real,
            key_mask=real,
            num_prefix_tokens=0,
            residual_keys=0,
            key_cluster_ids=None,
            return_ids=with_ids,
        )
        backend.select_keys(centroids, key, top_k, real)
        backend.group_queries(query, centroids, real)
    tokens, ids = (query, key, value), (group_ids, key_ids)
    backward(output, *tokens, output, sums, residual, *ids)
    backend.group_statistics(query, group_ids, GROUPS)
    output, sums, residual = backend.attend(*tokens, *ids, scale=1.0, residual_keys=1)
    backward(output, *tokens, output, sums, residual, *ids, residual_keys=1)
    counts = torch.empty(len(centroids), GROUPS, device="meta")
    updates = torch.empty((), dtype=torch.int64, device="meta")
    backend.move_centroids(centroids, torch.empty_like(centroids), counts, updates, 0.5)
    segments = sort_queries(group_ids, GROUPS)
    weights = products.by_rows(1, query, key, segments, key_ids)
    products.by_rows(2, weights, value, segments, key_ids)
    products.by_columns(weights, output, segments, key_ids, key.shape[2])


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    residual: Tensor,
    group_ids: Tensor,
    key_ids: Tensor,
    *,
    grad_logsumexp: Tensor | None = None,
    key_bias: Tensor | None = None,
    key_cluster_ids: Tensor | None = None,
    residual_keys: int = 0,
) -> None:
    """Gradients of attention with and without residual keys, of clusters or of all, and with biases."""
    backend.attend_backward(
        grad,
        query,
        key,
        value,
        output,
        sums,
        grad_logsumexp=grad_logsumexp,
        residual=residual,
        group_ids=group_ids,
        key_ids=key_ids,
        key_bias=key_bias,
        key_cluster_ids=key_cluster_ids,
        scale=1.0,
        residual_keys=residual_keys,
    )


def accelerated(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, mask: Tensor, top_k: int
) -> None:
    """Forward and gradients with a prefix and padding, with a bias, and with residual keys of clusters."""
    patches = query[:, :, PREFIX:]
    group_ids = backend.group_queries(patches, centroids, mask[:, PREFIX:])
    key_ids = backend.select_keys(centroids, key[:, :, PREFIX:], top_k, mask[:, PREFIX:])
    bias = torch.empty(key.shape[:3], device="meta")
    tokens, ids = (patches, key, value), (group_ids, key_ids)
    output, sums, residual = backend.attend(*tokens, *ids, scale=1.0, key_bias=bias)
    backward(output, *tokens, output, sums, residual, *ids, key_bias=bias, grad_logsumexp=sums)
    clusters = torch.empty(key.shape[:3], device="meta", dtype=torch.int64)
    backend.sum_groups(key, clusters, CLUSTERS)
    output, sums, residual = backend.attend(
        *tokens, *ids, scale=1.0, residual_keys=CLUSTERS, key_cluster_ids=clusters
    )
    backward(
        output,
        *tokens,
        output,
        sums,
        residual,
        *ids,
        residual_keys=CLUSTERS,
        key_cluster_ids=clusters,
    )


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """A kernel specialized for the arguments of a launch as Triton would, and compiler options."""
    names = launch.kernel.arg_names
    options = {name: value for name, value in launch.options.items() if name not in names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(names):
        if place >= len(launch.arguments):
            signature[name], constants[(place,)] = "constexpr", launch.options[name]
            continue
        value = launch.arguments[place]
        signature[name] = type_of(value)
        if signature[name] == "constexpr":
            constants[(place,)] = value
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes), options


def type_of(value: Any) -> str:
    """The type of an argument in a kernel's signature."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if value is None or value == 1:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def bytes_of_stack(cubin: bytes) -> int:
    """Bytes of a thread's stack, which in these kernels holds nothing but spilled registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", found)))


def fault_of(launch: Launch, arch: int) -> str:
    """What is wrong with a kernel, compiled for an architecture; empty where nothing is."""
    source, options = source_of(launch)
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # whatever the compiler trips over is what is looked for
        return f"{type(error).__name__}: {error}".splitlines()[0]
    if built.metadata.shared > SHARED_BYTES[arch]:
        return f"needs {built.metadata.shared} bytes of shared memory, has {SHARED_BYTES[arch]}"
    spilled = bytes_of_stack(built.asm["cubin"])
    return f"spills {spilled} bytes" if spilled else ""


def distinct(launches: list[Launch]) -> Iterator[Launch]:
    """Each launch that differs from all before it."""
    seen = set()
    for launch in launches:
        source, options = source_of(launch)
        mark = (source.hash(), tuple(sorted(options.items())))
        if mark not in seen:
            seen.add(mark)
            yield launch


def check(arch: int, stage: str) -> list[tuple[str, str]]:
    """Every kernel of a stage, and what is wrong with it."""
    return [(launch.kernel.__name__, fault_of(launch, arch)) for launch in distinct(walk(stage))]


def main() -> int:
    """Compile everything and print what is wrong; 1 if anything is."""
    if interpreting():
        sys.exit("TRITON_INTERPRET is set: nothing can be compiled; unset it")
    targets = list(product(SHARED_BYTES, STAGES))
    failed = False
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        for (arch, stage), kernels in zip(
            targets, processes.map(check, *zip(*targets, strict=True)), strict=True
        ):
            print(f"Triton {triton.__version__}, sm_{arch}, {stage}: {len(kernels)} kernels")
            for name, fault in kernels:
                if fault:
                    failed = True
                    print(f"  {name} {fault}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
