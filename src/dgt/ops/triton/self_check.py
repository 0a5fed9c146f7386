"""Check the kernels against plain PyTorch on a small case, and remember the verdict in a file."""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dgt.ops import residual_keys
from dgt.ops.triton import operators
from dgt.utils.atomic_write import write_json
from dgt.utils.cache import cache_folder

SIZES = ((784, 98), (97, 20))  # tokens and k: many, whose keys are gathered; few, under a mask
GROUPS, CHANNELS, PADDING = 7, 32, 50
CLUSTERS = 5  # of keys, each with a residual key


class Case(NamedTuple):
    """Inputs whose scores are exact in any order of summation, with ties, so that ids compare."""

    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor
    real: Tensor
    top_k: int


def make_case(tokens: int, top_k: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Multiples of 1/4 up to 2, one head, the last tokens padding; always the same."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return (torch.randint(-8, 9, shape, generator=generator) / 4).to(device)

    query, key, value = (numbers(1, 1, tokens, CHANNELS).to(dtype) for _ in range(3))
    real = (torch.arange(tokens, device=device) < tokens - PADDING)[None]
    return Case(query, key, value, numbers(1, GROUPS, CHANNELS), real, top_k)


def expected_ids(case: Case) -> tuple[Tensor, Tensor]:
    """Groups and keys by sorting scores in float64."""
    centroids = case.centroids[None].double()
    scores = centroids @ case.query.double().transpose(-1, -2)
    groups = torch.where(
        case.real[:, None], scores.sort(stable=True, dim=-2, descending=True).indices[:, :, 0], -1
    )
    scores = (centroids @ case.key.double().transpose(-1, -2)).masked_fill(
        ~case.real[:, None, None], -torch.inf
    )
    keys = scores.sort(stable=True, dim=-1, descending=True).indices[..., : case.top_k]
    return groups, keys.sort(-1).values


def expected_attention(case: Case, groups: Tensor, keys: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and three gradients by dense attention under a mask, in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in case[:3]]
    chosen = torch.zeros(
        1, 1, GROUPS, case.key.shape[2], dtype=torch.bool, device=keys.device
    ).scatter_(-1, keys, True)
    sees = chosen[0, 0, groups[0, 0].clamp(min=0)] & case.real[0, :, None]
    scores = (leaves[0] @ leaves[1].transpose(-1, -2)) * CHANNELS**-0.5
    weights = scores.masked_fill(~sees, -1e300).softmax(-1) * sees
    output = weights @ leaves[2]
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.double())]


def find_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Run forward and backward for few and many tokens; what is wrong, or nothing.

    Raises whatever the kernels raise where they cannot run.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        for tokens, top_k in SIZES:
            case = make_case(tokens, top_k, device, dtype)
            reason = _compare(case) or _compare_residual_keys(case)
            if reason:
                return f"{reason} of {tokens} tokens"
    return ""


def _compare(case: Case) -> str:
    """What differs between kernels and plain PyTorch, or nothing."""
    groups, keys = expected_ids(case)
    leaves = [tensor.detach().requires_grad_() for tensor in case[:3]]
    output, _, found_groups, found_keys, *_ = operators.attention(
        *leaves, case.centroids, case.top_k, CHANNELS**-0.5, case.real
    )
    if not torch.equal(found_groups, groups):
        return "wrong groups"
    if not torch.equal(found_keys, keys):
        return "wrong keys"
    grad = (
        torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output).to(output.dtype)
    )
    found = [output, *torch.autograd.grad(output, leaves, grad)]
    names = ("output", "gradient of query", "gradient of key", "gradient of value")
    return _too_far(names, found, expected_attention(case, groups, keys, grad))


def _compare_residual_keys(case: Case) -> str:
    """What differs in the residual keys of clusters, or nothing."""
    groups, keys = expected_ids(case)
    clusters = torch.arange(len(case.real[0]), device=keys.device) % CLUSTERS
    clusters = clusters.where(case.real, -1)[None]
    ids = (groups, keys, CHANNELS**-0.5, clusters, CLUSTERS)
    query, key, value = case[:3]
    found = operators.summarize_clusters(query, key, value, *ids)
    wide = residual_keys.summarize_clusters(query.double(), key.double(), value.double(), *ids)
    expected = wide[:3]
    return _too_far(("residual keys", "residual values", "residual biases"), found, expected)


def _too_far(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """The first result that rounding does not explain, or nothing.

    Inputs are rounded once, P and dS before each product, the result at the end: some roundings of
    the type.
    """
    limit = 4 * max(torch.finfo(found[0].dtype).eps, 1e-6)
    for name, ours, exact in zip(names, found, expected, strict=True):
        error = (ours.detach().double() - exact).square().mean().sqrt()
        relative = float(error / exact.square().mean().sqrt())
        if not relative <= limit:
            return f"an error of {relative:.1e} in the {name}"
    return ""


def cache_file() -> Path:
    """Where verdicts are kept: ``dgt/triton.json`` in the user's cache folder."""
    return cache_folder() / "triton.json"


@functools.cache
def kernels_digest() -> str:
    """A fingerprint of the code of the kernels: other code is checked again."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def driver_version() -> str:
    """The version of the kernel driver, as Linux tells it, or that of CUDA."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return f"CUDA {torch.version.cuda}"


def identity(device: torch.device, dtype: torch.dtype) -> str:
    """All that a verdict depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return " | ".join(
        (name, driver_version(), f"Triton {triton.__version__}", kernels_digest(), str(dtype))
    )


def _verdicts() -> dict[str, str]:
    """The content of the file; nothing where there is none, or none that can be read."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return (
        {key: value for key, value in found.items() if isinstance(value, str)}
        if isinstance(found, dict)
        else {}
    )


def known_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """What an earlier process found wrong: empty for nothing, None where none has looked."""
    return _verdicts().get(identity(device, dtype))


def remember(device: torch.device, dtype: torch.dtype, reason: str) -> None:
    """Keep a verdict for later processes; if the folder is not writable, they check again."""
    try:
        write_json(cache_file(), _verdicts() | {identity(device, dtype): reason})
    except OSError:
        return
