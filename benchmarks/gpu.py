"""What a GPU makes of it: `python benchmarks/gpu.py --out FILE.json [--only WORD ...] [--images FOLDER]`.

Rows are measured in this order, the most telling first; `--minutes` ends it between two.

`profile`: wall time, time in kernels, and every kernel by name, of a step of DGT-T and of timm's
Swin-T at 224 px. `compiled` and `eager`: time and memory of the same; `snapshot`: of what
`dgt.optimize_for_inference` makes in bfloat16. `px`: DGT-T on larger images, beside its form in which
all stages attend to all keys. `residual key`: DGT-T with one residual key, in Triton and in PyTorch's
operations, beside itself without. `accelerated`: DINOv2-S in bfloat16, plain and by the plan for such
images that comes with the package; the weights are random, which changes no shape, and the guard is
off. `peers`: other models, compiled.

`forward` and `backward`: our attention in PyTorch's operations and in Triton, without and with one
residual key, beside flash attention and compiled FlexAttention over the gathered keys, bfloat16, on
random tensors and on queries and keys of images: in DGT-T with random weights and seeded centroids,
whose groups are unequal and whose neighbors are alike.

Every row is measured in a process of its own, within `--seconds`, and is in the file at once: one
that hangs or breaks the device costs no other. With `--here` all are measured in this process, one
after the other. Called again, the script measures what the file lacks and what failed.
`--device cpu` tries it all on small sizes, with any Triton kernels left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

import dgt
from dgt.data.image_io import open_image
from dgt.data.scenes import draw_scene
from dgt.models import capture
from dgt.models.cost import size_option
from dgt.utils.records import write_record
from dgt_command.measures import machine, medians, milliseconds

GROUPS, CHANNELS = 48, 32
OURS = {  # attentions: backend, and residual keys
    "torch": ("torch", 0),
    "triton": ("triton", 0),
    "torch_residual": ("torch", 1),
    "triton_residual": ("triton", 1),
}
ATTENTIONS = ("all_keys", "all_keys_cudnn", *OURS, "flex")
DISTINCT = 8  # images; a larger batch has them several times
GLOBAL = {"attention": ("global",) * 4}
DINOV2 = "vit_small_patch14_dinov2"
MOST_KERNELS = 100  # of a profile


class Case(NamedTuple):
    """Sizes of one attention, and the image that has so many tokens in DGT-T."""

    batch: int
    heads: int
    tokens: int
    top_k: int
    pixels: tuple[int, int]


class Size(NamedTuple):
    """Models and sizes that a device is measured with."""

    models: dict[str, tuple[str, str]]
    """Models, and the backend of their attention."""
    peers: tuple[str, ...]
    """Other models, to be compared with."""
    cases: tuple[Case, ...]
    batch: int
    """Images of a model's step."""
    pixels: int
    """Side of these images."""
    large: tuple[tuple[int, int], ...]
    """Images, and their side, where the form with all keys stands beside ours."""
    accelerated: int
    """Side of the image for DINOv2-S."""
    low: torch.dtype
    """Type that models compute in: float32 on CPUs, of which many have no units for bfloat16."""


SIZES = {
    "cuda": Size(
        {
            "dgt": ("dgt_tiny", "torch"),
            "dgt_triton": ("dgt_tiny", "triton"),
            "swin": ("swin_tiny_patch4_window7_224", ""),
        },
        ("convnext_tiny", "pvt_v2_b2", "caformer_s18"),
        (
            Case(128, 2, 3136, 98, (224, 224)),
            Case(128, 4, 784, 98, (224, 224)),
            Case(128, 8, 196, 98, (224, 224)),
            Case(32, 2, 16384, 512, (512, 512)),
            Case(8, 2, 64000, 500, (1000, 1024)),
        ),
        128,
        224,
        ((32, 512), (8, 1024)),
        1036,
        torch.bfloat16,
    ),
    "cpu": Size(  # the smallest that timm has
        {"dgt": ("dgt_nano", "torch"), "swin": ("test_vit", "")},
        ("test_convnext",),
        (Case(2, 2, 64, 8, (32, 32)),),
        2,
        64,
        ((1, 96),),
        518,
        torch.float32,
    ),
}


def rows(device: str) -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    """How to measure each row, by name."""
    found: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {}
    steps = ("inference", "training")
    size = SIZES[device]
    mode = "compiled" if device == "cuda" else "eager"
    for step in steps:
        found[f"profile {step}"] = functools.partial(profiles, step)
    for each in dict.fromkeys((mode, "eager")):
        for step in steps:
            found[f"{step} {each}"] = functools.partial(models, step, each)
        found["inference snapshot"] = snapshots  # behind what is compiled
    for step in steps:
        found[f"{step} residual key"] = functools.partial(with_residual_key, step)
    found |= rows_of_attention(size, "images")
    for batch, pixels in size.large:
        for step in steps:
            name = f"{step} B{batch} {pixels} px"
            found[name] = functools.partial(large, step, batch, pixels)
    found[f"accelerated {size.accelerated} px"] = functools.partial(accelerated, size.accelerated)
    for step in steps:
        found[f"peers {step} {mode}"] = functools.partial(peers, step, mode)
    return found | rows_of_attention(size, "random")


def rows_of_attention(
    size: Size, inputs: str
) -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    """How to measure each row of attention on such inputs, by name."""
    return {
        f"{direction} {inputs} B{case.batch} H{case.heads} L{case.tokens} k{case.top_k}": (
            functools.partial(attention, case, inputs, direction)
        )
        for case in size.cases
        for direction in ("forward", "backward")
    }


def attention(
    case: Case, inputs: str, direction: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of every attention on the same tensors."""
    torch.manual_seed(0)
    if inputs == "random":
        *tensors, centroids = random_inputs(case, options.device)
    else:
        *tensors, centroids = image_inputs(case, options)
    attends = candidates(case, centroids, options.device, direction)
    if options.attentions:
        attends = {name: attends[name] for name in attends if name in options.attentions}
    steps = {name: step_of(attend, direction, tensors) for name, attend in attends.items()}
    found: dict[str, Any] = {
        name: attempt(measure, step, options.device) for name, step in steps.items()
    }
    if options.device == "cuda":
        found["difference"] = attempt(difference, centroids, case.top_k, tensors)
        if "triton" in steps:  # last: little works after a failed capture
            found["triton_graph"] = attempt(measure_graph, steps["triton"])
    return found


def step_of(
    attend: Callable[..., Tensor], direction: str, tensors: list[Tensor]
) -> Callable[[], object]:
    """What is timed of an attention: forward, or forward with gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def forward() -> object:
        with torch.no_grad():
            return attend(*tensors)

    def backward() -> object:
        output = attend(*leaves)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    return forward if direction == "forward" else backward


def attempt(run: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, Any]:
    """What a measurement gives, or its error, which costs no other measurement."""
    try:
        return run(*arguments)
    except Exception as error:  # of the compiler, the driver, or too little memory
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def measure(step: Callable[[], object], device: str) -> dict[str, float]:
    """The median milliseconds of a step, and on a GPU the bytes of memory at its peak."""
    if device == "cpu":
        return {"ms": medians(1, {"step": functools.partial(milliseconds, step)})["step"]}
    from triton.testing import do_bench  # which only a GPU needs

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated()
    return {"ms": do_bench(step, rep=300, return_mode="median"), "peak_bytes": peak}


def measure_graph(step: Callable[[], object]) -> dict[str, float]:
    """The same as a CUDA graph, which leaves out the time of the host."""
    from triton.testing import do_bench_cudagraph

    return {"ms": do_bench_cudagraph(step, rep=100, return_mode="median")}


def difference(centroids: Tensor, top_k: int, tensors: list[Tensor]) -> dict[str, float]:
    """How far the Triton kernels' output is from PyTorch's on the first image, as a share of it."""
    ours, plain = (
        grouped(backend, centroids, top_k, *(tensor[:1] for tensor in tensors)).double()
        for backend in ("triton", "torch")
    )
    return {"rmse": float((ours - plain).square().mean().sqrt() / plain.square().mean().sqrt())}


def candidates(
    case: Case, centroids: Tensor, device: str, direction: str
) -> dict[str, Callable[..., Tensor]]:
    """The attentions of a row, by name: functions of query, key and value."""
    on_gpu = device == "cuda"
    found: dict[str, Callable[..., Tensor]] = {"all_keys": all_keys}
    if on_gpu:
        found["all_keys"] = functools.partial(all_keys_by, SDPBackend.FLASH_ATTENTION)
        found["all_keys_cudnn"] = functools.partial(all_keys_by, SDPBackend.CUDNN_ATTENTION)
    for name, (backend, residual_keys) in OURS.items():
        if on_gpu or backend == "torch":
            found[name] = functools.partial(
                grouped, backend, centroids, case.top_k, residual_keys=residual_keys
            )
    if on_gpu or direction == "forward":  # FlexAttention has no gradients on CPUs
        found["flex"] = functools.partial(flex, centroids, case.top_k)
    return found


def grouped(
    backend: str,
    centroids: Tensor,
    top_k: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    residual_keys: int = 0,
) -> Tensor:
    """Our attention."""
    return dgt.dynamic_group_attention(
        query, key, value, centroids, top_k, backend=backend, residual_keys=residual_keys
    ).output


def all_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's attention."""
    return F.scaled_dot_product_attention(query, key, value)


def all_keys_by(kernels: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by kernels that are named, whatever PyTorch would pick."""
    with sdpa_kernel(kernels):
        return all_keys(query, key, value)


@functools.cache
def compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A part of FlexAttention, compiled once for all shapes that are alike."""
    return torch.compile(function, dynamic=False) if device == "cuda" else function


def flex(centroids: Tensor, top_k: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What one would write with FlexAttention: queries sorted by group, keys gathered, a block mask.

    Groups and keys come from our operations, so that the attention alone is another.
    """
    group_ids = dgt.group_queries(query.detach(), centroids)
    key_ids = dgt.select_keys(centroids, key.detach(), top_k)
    groups, order = group_ids.sort(-1)
    places = order[..., None].expand_as(query)
    chosen = key_ids.flatten(2)[..., None].expand(-1, -1, -1, key.shape[-1])

    def same_group(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return groups[b, h, q] == kv // top_k

    batch, heads, tokens = group_ids.shape
    lengths = (batch, heads, tokens, chosen.shape[2])
    # Compiled, it never writes a mask of all queries and keys.
    make_mask = compiled(create_block_mask, query.device.type)
    mask = make_mask(same_group, *lengths, device=str(query.device))
    attend = compiled(flex_attention, query.device.type)
    found = attend(
        query.gather(2, places), key.gather(2, chosen), value.gather(2, chosen), block_mask=mask
    )
    return torch.empty_like(found).scatter(2, places, found)


def random_inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value with heads interleaved, as a projection leaves them, and centroids."""
    shape = (case.batch, case.tokens, 3, case.heads, CHANNELS)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    centroids = torch.randn(case.heads, GROUPS, CHANNELS, device=device)
    return query, key, value, F.normalize(centroids, dim=-1)


def image_inputs(case: Case, options: argparse.Namespace) -> tuple[Tensor, ...]:
    """The same of DGT-T's first layer of so many tokens, on images."""
    images = load_images(options.images, min(case.batch, DISTINCT), case.pixels).to(options.device)
    model = timm.create_model("dgt_tiny").to(options.device)
    with torch.no_grad():
        model(images)  # in training: seeds the centroids

        def look(seen: Any) -> tuple[Tensor, ...] | None:
            heads = seen.layer.split_heads(seen.x)
            return (
                (*heads, seen.layer.unit_centroids()) if heads[0].shape[2] == case.tokens else None
            )

        layers, _ = capture(model.eval(), images, look)
    *heads, centroids = next(found for found in layers if found is not None)
    times = -(-case.batch // len(images))
    tensors = (
        head.bfloat16().transpose(1, 2).repeat(times, 1, 1, 1)[: case.batch].transpose(1, 2)
        for head in heads
    )
    return (*tensors, centroids)


def load_images(folder: Path | None, count: int, pixels: tuple[int, int]) -> Tensor:
    """Normalized (N, 3, height, width): the first files of a folder, scaled, or scenes drawn here."""
    if folder is None:
        side = max(pixels)
        found = [draw_scene(number, image_size=side).image for number in range(count)]
        images = torch.stack(found)[:, :, : pixels[0], : pixels[1]].float()
    else:
        files = sorted(file for file in folder.rglob("*") if file.is_file())[:count]
        scaled = [np.asarray(open_image(file).resize(pixels[::-1])) for file in files]
        images = torch.from_numpy(np.stack(scaled)).permute(0, 3, 1, 2).float()
    return (images / 255 - 0.45) / 0.225


def profiles(step: str, options: argparse.Namespace) -> dict[str, Any]:
    """Where the time of DGT-T and Swin-T goes: host or kernels, and which kernels."""
    return {
        name: attempt(profile_step, step_of_model(name, step, options.device), options.device)
        for name in models_on(options.device)
    }


def profile_step(step: Callable[[], None], device: str) -> dict[str, Any]:
    """Wall milliseconds of a step, those in kernels (operators on a CPU), and each by name."""
    found: dict[str, Any] = measure(step, device)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    kernels = []
    for event in seen.key_averages():
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if own > 0:
            kernels.append({"name": event.key, "count": event.count, "ms": own / 1e3})
    kernels.sort(key=lambda kernel: -kernel["ms"])
    found["kernel_ms"] = sum(kernel["ms"] for kernel in kernels)
    found["kernel_count"] = sum(kernel["count"] for kernel in kernels)
    return found | {"kernels": kernels[:MOST_KERNELS]}


def models_on(device: str) -> list[str]:
    """DGT-T with the attention that a device runs by itself, and Swin-T."""
    return ["dgt_triton" if device == "cuda" else "dgt", "swin"]


def models(step: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds and images per second of DGT-T and Swin-T, in bfloat16 autocast."""
    size = SIZES[options.device]
    found: dict[str, Any] = {"batch": size.batch, "pixels": size.pixels}
    names = models_on(options.device)
    if mode == "eager" and "dgt" not in names:
        names.append("dgt")
    for name in names:
        found[name] = attempt(
            lambda name=name: rate(
                step_of_model(name, step, options.device, mode == "compiled"), options.device
            )
        )
    return found


def step_of_model(
    name: str, step: str, device: str, is_compiled: bool = False
) -> Callable[[], None]:
    """One step of one of the models."""
    torch.manual_seed(0)
    torch.compiler.reset()
    size = SIZES[device]
    model, backend = size.models[name]
    return build(model, backend, step, is_compiled, device, size.batch, size.pixels)


def snapshots(options: argparse.Namespace) -> dict[str, Any]:
    """The snapshot of DGT-T, beside itself and Swin-T under autocast."""
    found = models("inference", "eager", options)
    size, (name, _) = SIZES[options.device], models_on(options.device)
    model = made(*size.models[name], options.device, size.pixels).eval()
    fast = dgt.optimize_for_inference(model, dtype=size.low)
    images = random_images(size.batch, size.pixels, options.device).to(size.low)
    found["snapshot"] = attempt(rate, torch.inference_mode()(lambda: fast(images)), options.device)
    return found


def large(step: str, batch: int, pixels: int, options: argparse.Namespace) -> dict[str, Any]:
    """DGT-T on larger images, and with attention to all keys in all stages."""
    (name, _), device = models_on(options.device), options.device
    model, backend = SIZES[device].models[name]
    found: dict[str, Any] = {"batch": batch, "pixels": pixels}
    forms: dict[str, tuple[str, dict[str, Any]]] = {
        name: (backend, {}),
        "dgt_all_keys": ("", GLOBAL),
    }
    for label, (by, extra) in forms.items():
        found[label] = attempt(
            lambda by=by, extra=extra: rate(
                build(model, by, step, False, device, batch, pixels, **extra), device, batch
            )
        )
    return found


def with_residual_key(step: str, options: argparse.Namespace) -> dict[str, Any]:
    """DGT-T without and with one residual key in all stages."""
    size, device = SIZES[options.device], options.device
    (name, _) = models_on(device)
    found: dict[str, Any] = {"batch": size.batch, "pixels": size.pixels}
    forms = {name: (name, 0), f"{name}_residual": (name, 1), "dgt_residual": ("dgt", 1)}
    for label, (form, residual_keys) in forms.items():
        model, by = size.models[form]
        found[label] = attempt(
            lambda model=model, by=by, count=residual_keys: rate(
                build(model, by, step, False, device, size.batch, size.pixels, residual_keys=count),
                device,
            )
        )
    return found


def peers(step: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Other models of timm at the size of `inference` and `training`."""
    size, device = SIZES[options.device], options.device
    found: dict[str, Any] = {"batch": size.batch, "pixels": size.pixels}
    for name in size.peers:
        torch.compiler.reset()
        found[name] = attempt(
            lambda name=name: rate(
                build(name, "", step, mode == "compiled", device, size.batch, size.pixels), device
            )
        )
    return found


def accelerated(pixels: int, options: argparse.Namespace) -> dict[str, Any]:
    """DINOv2-S on one image, plain and with a plan, in bfloat16."""
    torch.manual_seed(0)
    model = timm.create_model(DINOV2, img_size=pixels, num_classes=0)
    low = SIZES[options.device].low
    model = model.to(options.device, low).eval()
    image = load_images(options.images, 1, (pixels, pixels)).to(options.device, low)
    step = torch.inference_mode()(lambda: model(image))
    found: dict[str, Any] = {"batch": 1, "pixels": pixels}
    found["dinov2"] = attempt(rate, step, options.device, 1)
    dgt.apply_plan(model, f"{DINOV2}.lvd142m@{pixels}-0.05", guard=False)
    found["dinov2_accelerated"] = attempt(rate, step, options.device, 1)
    return found


def rate(step: Callable[[], object], device: str, batch: int | None = None) -> dict[str, float]:
    """Time, memory and images per second of one model."""
    found = measure(step, device)
    return found | {"images_per_second": 1e3 * (batch or SIZES[device].batch) / found["ms"]}


def made(name: str, backend: str, device: str, pixels: int, **extra: Any) -> torch.nn.Module:
    """A model in channels-last memory, in training; a DGT has seen a batch."""
    options = size_option(name, pixels) | extra
    model = timm.create_model(name, num_classes=1000, **options).to(device)
    model = model.to(memory_format=torch.channels_last).train()
    if backend:
        dgt.set_attention(model, backend=backend)
        with torch.no_grad(), autocast(device):
            model(random_images(2, pixels, device))  # seeds the centroids, outside of a graph
    return model


def autocast(device: str) -> torch.autocast:
    """Autocast to the type that models are measured in."""
    return torch.autocast(device, torch.bfloat16, enabled=SIZES[device].low == torch.bfloat16)


def random_images(batch: int, pixels: int, device: str) -> Tensor:
    """Noise (batch, 3, pixels, pixels) in channels-last memory."""
    images = torch.randn(batch, 3, pixels, pixels, device=device)
    return images.to(memory_format=torch.channels_last)


def build(
    name: str,
    backend: str,
    step: str,
    is_compiled: bool,
    device: str,
    batch: int,
    pixels: int,
    **extra: Any,
) -> Callable[[], None]:
    """One step of a model: inference, or training with its optimizer."""
    model = made(name, backend, device, pixels, **extra).train(step == "training")
    images = random_images(batch, pixels, device)
    labels = torch.randint(1000, (batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if is_compiled else model

    def infer() -> None:
        with torch.inference_mode(), autocast(device):
            run(images)

    def train() -> None:
        with autocast(device):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train if step == "training" else infer


def in_own_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row from another process, or why there is none."""
    command = [sys.executable, __file__, "--row", name, "--device", options.device]
    if options.images:
        command += ["--images", str(options.images)]
    if options.attentions:
        command += ["--attentions", *options.attentions]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {options.seconds:g} seconds"}
    if done.returncode:
        return {
            "error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        }
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def failed(row: dict[str, Any]) -> bool:
    """Whether a row, or an attention or model in it, is an error."""
    parts = [row, *(part for part in row.values() if isinstance(part, dict))]
    return any("error" in part for part in parts)


def described() -> dict[str, Any]:
    """Device, versions, commit and command."""
    root = Path(__file__).parent
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return machine() | {"cuda": torch.version.cuda, "commit": commit}


def earlier_rows(path: Path, now: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file that hold still: of this device, these versions and this commit."""
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    then = document["machine"]
    same = all(then.get(key) == now[key] for key in now if key not in ("date", "command"))
    return [row for row in document["rows"] if same and not failed(row)]


def main(arguments: list[str] | None = None) -> int:
    """Measure all rows, or those that are named; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--out", type=Path, help="file of the rows")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name contains one")
    parser.add_argument(
        "--attentions", nargs="+", choices=ATTENTIONS, help="these alone (default: all)"
    )
    parser.add_argument("--here", action="store_true", help="in this process")
    parser.add_argument("--images", type=Path, help="folder of photographs (default: drawn scenes)")
    parser.add_argument("--seconds", type=float, default=180, help="at most for a row")
    parser.add_argument("--minutes", type=float, help="begin no row later (default: all rows)")
    parser.add_argument("--row", help="measure this one here, and print it as JSON")
    options = parser.parse_args(arguments)
    known = rows(options.device)
    if options.row:
        print(json.dumps(known[options.row](options)))
        return 0
    if options.out is None:
        parser.error("--out is missing: the file of the rows")
    document: dict[str, Any] = {"machine": described()}
    document["rows"] = earlier_rows(options.out, document["machine"])
    done = {row["name"] for row in document["rows"]}
    start = time.monotonic()
    for name in known:
        if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
            print(f"left for another call: {name} and what follows")
            break
        if any(word in name for word in options.only) and name not in done:
            torch.compiler.reset()
            found = attempt(known[name], options) if options.here else in_own_process(name, options)
            row = {"name": name} | found
            print(json.dumps(row), flush=True)
            document["rows"].append(row)
            write_record(options.out, document)
    return int(any(map(failed, document["rows"])))


if __name__ == "__main__":
    sys.exit(main())
