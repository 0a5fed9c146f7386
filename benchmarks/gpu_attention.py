"""The whole operator on a GPU against what users would pick instead, with the share of the floor it
reaches.

    python benchmarks/gpu_attention.py first|forward|backward|profile|accelerated --out FILE.json [--cases 3136,196]
        [--inputs random,scenes] [--seconds 280] [--dry-run]

Grouping, selection and attention in bfloat16, D 32, G 48, on random numbers and on what DGT-T makes
of images (the built-in scenes), beside compiled FlexAttention over gathered keys, SDPA over all
keys, as PyTorch picks its kernel and as flash attention, SDPA in windows of 49 keys (what Swin
does; the windows are cut beforehand), the steps launched one by one, and the products of the
paper's appendix with P in memory. Every case is first checked: its groups and keys against scores
in float64, its output against dense attention under a mask. A row is on disk as soon as it is
measured, and says what failed in it. The floor is the larger of the fewest bytes over the memory's
rate and the operations over the matrix units' rate, both measured at the start.

`first` is for the first minutes on a new machine: times of the operator, of flash attention and of
the backend `torch`, and every kernel's time beside the model's prediction; what the check finds
wrong is told beside the times, not instead of them. `profile` lists every kernel of forward and
backward with its time; kernels are counted once. `accelerated` is forward of what `dgt.accelerate`
puts into a vision transformer: D 64, a prefix of 5 tokens, a remainder, beside SDPA.

No case is begun after ``--seconds`` (exit status 3); the same call again goes on where it stopped.
A case that hangs ends the process, and one that breaks the device does: with ``--again`` the next
process leaves it out.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import Rows, attempt, device_rates, predicted, ratios, scene_inputs, times
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

import dgt
from dgt.ops.triton import operators as kernels

CASES = ((128, 2, 3136, 98), (128, 8, 196, 98), (32, 2, 16384, 512), (8, 2, 64000, 500), (128, 4, 784, 98),
         (32, 2, 16384, 513))  # fmt: skip
ACCELERATED, PREFIX = ((8, 6, 4096, 98), (8, 6, 16384, 98)), 5
ROW_SECONDS = {"first": 100}  # of a case, with compiling its kernels, at most
OTHER_ROW_SECONDS = 200
# times as fast as flash attention over all keys
TARGETS = {3136: 5.0, 16384: 8.0, 64000: 25.0, 196: 1 / 1.5}
CHANNELS, GROUPS, WINDOW = 32, 48, 49

Case = tuple[int, int, int, int]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure one part, case by case; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["first", "forward", "backward", "profile", "accelerated"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", help="numbers of tokens, comma-separated (default: all)")
    parser.add_argument(
        "--inputs", default="random,scenes", help="random, scenes or both (default)"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="begin no case after so many (default: 540)"
    )
    parser.add_argument(
        "--again", action="store_true", help="a process of this call failed: go on behind that"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list what would be measured")
    options = parser.parse_args()
    planned = list(plan(options.part, options.cases, options.inputs.split(",")))
    if options.dry_run:
        print(*(f"{options.part}: {name_of(case)}, {inputs}" for case, inputs in planned), sep="\n")
        return
    torch.manual_seed(0)
    rows, measured = Rows(options.out, options.part, options.again), device_rates()
    rows.document["machine"] |= {
        "bytes_per_second": measured[0],
        "operations_per_second": measured[1],
    }
    step = partial(alone, part=options.part, measured=measured)
    if options.part == "accelerated":
        step = accelerated
    steps = (
        ({"case": name_of(case), "inputs": inputs}, partial(step, case, inputs))
        for case, inputs in planned
    )
    row_seconds = ROW_SECONDS.get(options.part, OTHER_ROW_SECONDS)
    sys.exit(rows.measure(steps, options.seconds, row_seconds))


def name_of(case: Case) -> str:
    """A case as rows name it."""
    batch, heads, tokens, top_k = case
    return f"B{batch} H{heads} L{tokens} k{top_k} G{GROUPS} bfloat16"


def plan(part: str, cases: str | None, inputs: list[str]) -> Iterator[tuple[Case, str]]:
    """What a part measures: cases of interest first, each on all inputs."""
    if part == "accelerated":
        wanted, inputs = ACCELERATED, ["random"]
    else:
        wanted = CASES[:4] if part == "first" else CASES
    for case in wanted:
        if not cases or str(case[2]) in cases.split(","):
            for name in inputs:
                yield case, name


def alone(case: Case, inputs: str, part: str, measured: tuple[float, float]) -> dict[str, Any]:
    """The row of a part: times of all candidates, or of kernels."""
    batch, heads, tokens, top_k = case
    *tensors, centroids = (
        random_inputs(batch, heads, tokens) if inputs == "random" else scene_inputs(batch, tokens)
    )
    attend = candidates(case, centroids)
    names = list(attend)
    backward = part == "backward"
    model = predicted(tokens, top_k, inputs, "backward" if backward else "forward")
    row: dict[str, Any] = {"model_us": model}
    checked = partial(check, *(tensor[:1] for tensor in tensors), centroids, top_k)
    row |= attempt_check(checked, part)
    if part in ("profile", "first"):
        found = partial(kernel_times, attend["triton"], *tensors, backward=part == "profile")
        row |= attempt("kernels", found)
    if part == "profile":
        return row
    if part == "first":
        attend = {name: attend[name] for name in ("triton", "flash", "torch")}
    for name, function in attend.items():
        given = [windowed(tensor) for tensor in tensors] if name == "windows" else tensors
        # No capture of a block mask that every call makes anew, and in the first minutes none that
        # may fail and cost a process.
        graph = name != "flex" and (part, name) != ("first", "torch")
        row |= attempt(name, partial(timings, name, function, backward, graph, *given))
        del given
    floor = floor_ms(case, *measured, backward)
    row |= {"floor_ms": floor, "target": TARGETS.get(tokens), **shares_of_floor(row, floor)}
    return row | ratios(row, names[1:])


def attempt_check(checked: Callable[[], Any], part: str) -> dict[str, Any]:
    """Compare with the reference: in the first minutes a wrong result stands beside the times, in
    all other parts it stops the case.
    """
    if part == "first":
        return attempt("check", checked)
    checked()
    return {}


def shares_of_floor(row: dict[str, Any], floor: float) -> dict[str, float]:
    """The floor over the kernels' times, with and without a graph, where there are any."""
    ways = [way for way in ("", "_graph") if f"triton{way}_ms" in row]
    return {f"share_of_floor{way}": floor / row[f"triton{way}_ms"] for way in ways}


def accelerated(case: Case, _: str) -> dict[str, Any]:
    """The row of an accelerated call: with the layer's centroids, with the image's own, SDPA, the
    plain path.
    """
    batch, heads, tokens, top_k = case
    qkv = torch.randn(batch, PREFIX + tokens, 3, heads, 64, device="cuda", dtype=torch.bfloat16)
    query, key, value = tensors = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    centroids = F.normalize(torch.randn(heads, GROUPS, 64, device="cuda"), dim=-1)

    def groups(centers: Tensor, backend: str, *given: Tensor) -> Tensor:
        options = {"backend": backend, "num_prefix_tokens": PREFIX, "remainder": True}
        return dgt.dynamic_group_attention(*(given or tensors), centers, top_k, **options).output

    steps = {
        "triton": lambda: groups(centroids, "triton"),
        "own_centroids": lambda: groups(
            dgt.find_centroids(query[:, :, PREFIX:], centroids, 1), "triton"
        ),
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value),
        "flash": lambda: flash(query, key, value),
        "torch": lambda: groups(centroids, "torch"),
    }
    # In float32: in bfloat16 the plain path rounds the remainder's constant, 1 % of its result at
    # 16,384 tokens.
    found, plain = (
        steps["triton"]().float(),
        groups(centroids, "torch", *(tensor.float() for tensor in tensors)),
    )
    error = float((found - plain).square().mean().sqrt() / plain.square().mean().sqrt())
    if not error <= 0.01:
        raise RuntimeError(
            f"wrong result before timing: {error:.2e} of its size from the plain path"
        )
    row: dict[str, Any] = {"channels": 64, "prefix": PREFIX, "remainder": True, "error": error}
    with torch.no_grad():
        for name, step in steps.items():
            row |= attempt(name, partial(times, name, step, graph=name != "torch"))
    return row | ratios(row, list(steps)[1:])


def random_inputs(batch: int, heads: int, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value with heads interleaved, as a projection leaves them, and centroids."""
    qkv = torch.randn(batch, tokens, 3, heads, CHANNELS, device="cuda", dtype=torch.bfloat16)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return (
        query,
        key,
        value,
        F.normalize(torch.randn(heads, GROUPS, CHANNELS, device="cuda"), dim=-1),
    )


def candidates(case: Case, centroids: Tensor) -> dict[str, Attend]:
    """Ours, and what it is set against."""
    batch, heads, tokens, top_k = case
    found: dict[str, Attend] = {
        "triton": lambda q, k, v: (
            dgt.dynamic_group_attention(q, k, v, centroids, top_k, backend="triton").output
        ),
        "sdpa": F.scaled_dot_product_attention,
        "flash": flash,
        "windows": F.scaled_dot_product_attention,
        "steps": lambda q, k, v: dgt.attend(
            q, k, v, *ids_of(q, k, centroids, top_k), backend="triton"
        ),
    }
    if batch * heads * tokens * top_k * 2 < 16e9:  # P must fit
        found["forms"] = lambda q, k, v: forms(q, k, v, *ids_of(q, k, centroids, top_k))
    # Last what may end a capture in an error, behind which PyTorch may capture nothing more.
    found["flex"] = partial(flex_over_gathered, centroids, top_k)
    found["torch"] = lambda q, k, v: (
        dgt.dynamic_group_attention(q, k, v, centroids, top_k, backend="torch").output
    )
    return found


def ids_of(query: Tensor, key: Tensor, centroids: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Groups and keys, by operators of their own."""
    return kernels.group_queries(query, centroids, None), kernels.select_keys(
        centroids, key, top_k, None
    )


def forms(query: Tensor, key: Tensor, value: Tensor, group_ids: Tensor, key_ids: Tensor) -> Tensor:
    """Attention of the products of the paper's appendix, P in memory."""
    scores = dgt.group_matmul(1, query * CHANNELS**-0.5, key, group_ids, key_ids, backend="triton")
    return dgt.group_matmul(2, scores.softmax(-1), value, group_ids, key_ids, backend="triton")


@functools.cache
def compiled_flex() -> Any:
    """FlexAttention, compiled once for all shapes that are alike."""
    return torch.compile(flex_attention)


def flex_over_gathered(
    centroids: Tensor, top_k: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """What one would write with FlexAttention: queries sorted by group, keys gathered, a block mask
    of groups.

    Groups and keys come from our operators, so that the attention alone is another.
    """
    group_ids, key_ids = ids_of(query, key, centroids, top_k)
    groups, order = group_ids.sort(-1)
    rows = order[..., None].expand(-1, -1, -1, CHANNELS)
    chosen = key_ids.flatten(2)[..., None].expand(-1, -1, -1, CHANNELS)

    def same_group(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return groups[b, h, q] == kv // top_k

    batch, heads, tokens = group_ids.shape
    mask = create_block_mask(
        same_group, batch, heads, tokens, GROUPS * top_k, device=query.device, _compile=True
    )
    gathered = [tensor.gather(2, chosen) for tensor in (key, value)]
    found = compiled_flex()(query.gather(2, rows), *gathered, block_mask=mask)
    return torch.empty_like(found).scatter(2, rows, found)


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """SDPA over all keys by its flash attention, whatever PyTorch would pick."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value)


def windowed(tensor: Tensor) -> Tensor:
    """Cut into windows of 49 tokens, (B H windows, 1, 49, D).

    Tokens that fill no window are left out.
    """
    whole = tensor.shape[2] // WINDOW * WINDOW
    return tensor[:, :, :whole].unflatten(2, (-1, WINDOW)).flatten(0, 2)[:, None].contiguous()


def check(
    query: Tensor, key: Tensor, value: Tensor, centroids: Tensor, top_k: int
) -> dict[str, Any]:
    """Compare the ids of one image with scores in float64, and 512 of its queries with dense
    attention in float32.

    The error, as a share of the output; RuntimeError where anything is wrong.
    """
    result = dgt.dynamic_group_attention(query, key, value, centroids, top_k, backend="triton")
    group_ids, key_ids = result.group_ids, result.key_ids
    in_range = 0 <= int(group_ids.min()) <= int(group_ids.max()) < GROUPS
    in_range &= 0 <= int(key_ids.min()) <= int(key_ids.max()) < key.shape[2]
    if not (in_range and (key_ids.diff(dim=-1) > 0).all()):
        raise RuntimeError("wrong result before timing: ids out of range or not in ascending order")
    score = torch.einsum("bhld,hgd->bhlg", query.double(), centroids.double())
    lost = (score.amax(-1) - score.gather(-1, group_ids[..., None])[..., 0]).amax()
    score = torch.einsum("hgd,bhld->bhgl", centroids.double(), key.double())
    lost = torch.maximum(
        lost, (score.topk(top_k).values[..., -1] - score.gather(-1, key_ids).amin(-1)).amax()
    )
    if not lost <= 1e-5:
        raise RuntimeError(
            f"wrong result before timing: a group or key whose score is {float(lost):.2e} too low"
        )
    some = torch.randperm(query.shape[2], device=query.device)[:512]
    ids = torch.take_along_dim(key_ids, group_ids[:, :, some, None], dim=2)
    mask = torch.zeros(*ids.shape[:3], key.shape[2], dtype=torch.bool, device=ids.device).scatter_(
        -1, ids, True
    )
    exact = F.scaled_dot_product_attention(
        query[:, :, some].float(), key.float(), value.float(), attn_mask=mask
    )
    ratio = (
        result.output[:, :, some].float() - exact
    ).square().mean().sqrt() / exact.square().mean().sqrt()
    if not ratio <= 0.005:
        raise RuntimeError(f"wrong result before timing: error {ratio:.2e} of its size")
    return {"difference": float(ratio)}


def timings(
    name: str, attend: Attend, backward: bool, graph: bool, *tensors: Tensor
) -> dict[str, Any]:
    """Median milliseconds of forward, or of forward with backward and its peak of memory."""
    if not backward:
        with torch.no_grad():
            return times(name, lambda: attend(*tensors), graph)
    leaves = [t.detach().requires_grad_() for t in tensors]
    grad = torch.randn_like(attend(*leaves))
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attend(*leaves), leaves, grad)
    row = {f"{name}_peak_bytes": torch.cuda.max_memory_allocated()}
    return row | times(name, lambda: torch.autograd.grad(attend(*leaves), leaves, grad), graph)


def floor_ms(case: Case, bandwidth: float, rate: float, backward: bool) -> float:
    """The least time: each input read once, each output written once, every operation on the matrix
    units.
    """
    heads, tokens, top_k = case[0] * case[1], case[2], case[3]
    rows, ids = heads * tokens * CHANNELS * 2, heads * (tokens + GROUPS * top_k) * 8
    attend, scores = 4 * heads * tokens * top_k * CHANNELS, 4 * heads * tokens * GROUPS * CHANNELS
    moved, operations = 4 * rows + ids + heads * tokens * 4, attend + scores
    seconds = max(moved / bandwidth, operations / rate)
    if backward:
        seconds += max((8 * rows + ids + heads * tokens * 4) / bandwidth, 2.5 * attend / rate)
    return 1e3 * seconds


def kernel_times(attend: Attend, *tensors: Tensor, backward: bool) -> dict[str, Any]:
    """Microseconds of every kernel in one forward pass, or forward and backward, the largest first."""
    leaves = [t.detach().requires_grad_(backward) for t in tensors]
    grad = torch.randn_like(attend(*leaves))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(5):
            output = attend(*leaves)
            if backward:
                torch.autograd.grad(output, leaves, grad)
        torch.cuda.synchronize()
    on_device = [event for event in trace.key_averages() if event.device_type == DeviceType.CUDA]
    if not on_device:
        raise RuntimeError("the profiler saw no kernel")
    found = {event.key: event.self_device_time_total / 5 for event in on_device}
    largest = sorted(found.items(), key=lambda item: -item[1])[:25]
    return {"kernels_us": {name: time for name, time in largest if time > 0}}


if __name__ == "__main__":
    main()
