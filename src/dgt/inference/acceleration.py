"""`dgt.accelerate`: a trained model's global attention by groups, with an error that the user chooses.

Every layer that attends globally is offered a few settings (how many groups, how many keys). What each costs is
measured on images: its time on this machine, its error in the layer's output, and how far the layer's errors reach the
model's output. Errors of layers add up like independent ones, so the fastest model of a given error has one price of
squared error for all layers: every layer takes what costs least, time and error together, its own attention among the
choices. The price is found by bisection, with the error of the model's output measured each time.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dgt.inference.sdpa import Call, GroupedCall, exact_attention, grouped_calls, install, uninstall, watch_calls
from dgt.ops import seed_centroids
from dgt.ops.checks import describe
from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import UserError

GROUPS = (8, 24, 64, 160)
KEYS = (8, 32, 64, 128, 256, 512)
STEPS = 1  # of k-means on the image at hand
LEAST_TOKENS = 192  # fewer are never faster in groups
TOKENS_PER_GROUP = 32  # of the sample that centroids are found in
GAIN = 0.95  # a setting must take less than this share of the layer's own time
ROUNDS = 3  # the least time of so many counts
BISECTIONS = 24  # of the price, over PRICES
PRICES = (-6.0, 14.0)  # powers of ten, seconds for a squared error of one
FORMAT = "dgt-plan-1"


@dataclass(frozen=True)
class LayerReport:
    """One attention of the model: what it does now, and what was measured.

    ``choice`` is "groups" or "dense", ``reason`` why it is dense; ``error`` relative, of this layer's attention alone;
    times in milliseconds for one image.
    """

    name: str
    choice: str
    reason: str = ""
    heads: int = 0
    tokens: int = 0
    channels: int = 0
    prefix: int = 0
    groups: int = 0
    keys: int = 0
    error: float = 0.0
    ms_before: float = 0.0
    ms_after: float = 0.0


@dataclass(frozen=True)
class Report:
    """What :func:`accelerate` found and did; errors are relative, of the model's output, speedups ratios of times.

    ``predicted_error`` was measured on the images that the settings were chosen by, ``measured_error`` on images kept
    aside; ``bound`` is the speedup of the model if attention took no time at all.
    """

    asked_error: float
    predicted_error: float
    measured_error: float
    attention_speedup: float
    model_speedup: float
    bound: float
    layers: list[LayerReport]
    centroids: dict[str, Tensor] = field(repr=False, default_factory=dict)

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        lines = [f"{'layer':{width}}  tokens  choice                    error       before     after"]
        for layer in self.layers:
            grouped = layer.choice == "groups"
            choice = f"{layer.groups} groups of {layer.keys} keys" if grouped else f"dense: {layer.reason}"
            times = f"{layer.error:8.1e}  {layer.ms_before:8.1f} ms {layer.ms_after:8.1f} ms" if grouped else ""
            lines.append(f"{layer.name:{width}}  {layer.tokens:6d}  {choice:24}  {times}".rstrip())
        return "\n".join([
            *lines,
            f"error: asked {self.asked_error:.2g}, predicted {self.predicted_error:.2g}, "
            f"on images kept aside {self.measured_error:.2g}",
            f"speed: attention {self.attention_speedup:.2f} times, model {self.model_speedup:.2f} times "
            f"(no attention at all: {self.bound:.2f})",
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All but the centroids."""
        values = {name: value for name, value in vars(self).items() if name not in ("layers", "centroids")}
        return {**values, "layers": [asdict(layer) for layer in self.layers]}

    def save(self, path: str | Path) -> None:
        """Write the plan, report and centroids in one safetensors file, for :func:`apply_plan`."""
        metadata = {"format": FORMAT, "report": json.dumps(self.to_json())}
        atomic_write(Path(path), safetensors.torch.save(self.centroids, metadata=metadata))


@torch.no_grad()
def accelerate(model: nn.Module, images: Tensor, error: float = 0.01, num_prefix_tokens: int | None = None) -> Report:
    """Have a trained model's global attention done by groups, in place and without training.

    Every attention that ends in ``F.scaled_dot_product_attention`` is looked at: those of timm, of Hugging Face (with
    its default ``attn_implementation="sdpa"``), and most others. One with a mask or bias of pairs, causal, in windows,
    across sequences or called more than once stays as it is, as does one that groups do not make faster. The weights
    stay the model's, under their names; ``with dgt.exact_attention(model):`` has its own attention back.

    Args:
        model: any module called as ``model(images)``; its mode stays.
        images: (N, ...) what the model is called with, N >= 2, of the kind and size that it will see: half choose, half
            are kept aside to measure the error.
        error: largest relative error of the model's output, ``|after - before| / |before|``, in (0, 1).
        num_prefix_tokens: class and register tokens; None asks the model, and takes 0 if it does not say.

    Returns:
        The :class:`Report`; it prints as a table, and :meth:`Report.save` keeps the plan.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; for a model without attention, or
            one that is accelerated already. Whatever is raised, the model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    if not isinstance(images, Tensor) or images.dim() < 2:
        raise TypeError(f"images must be a tensor (N, ...), got {describe(images)}")
    if len(images) < 2:
        raise UserError(f"images must be at least 2, some to choose by and some to check with, got {len(images)}")
    if isinstance(error, bool) or not isinstance(error, float | int) or not 0 < error < 1:
        raise UserError(f"error must be above 0 and below 1, got {error!r}")
    if grouped_calls(model):
        raise UserError("model must not be accelerated already: take a fresh one, or apply_plan on one")
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _accelerate(model, images, error, num_prefix_tokens)
    except BaseException:
        _undo(model)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, call in grouped_calls(model).items():
            call.training = model.get_submodule(name).training


def apply_plan(model: nn.Module, path: str | Path) -> Report:
    """Accelerate a model as :func:`accelerate` did another with the same layers, from what its report saved.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no plan, or its layers are not the model's. The model is then as it was.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no plan {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, centroids = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != FORMAT:
            raise UserError(f"{str(path)!r} is no plan of this version ({FORMAT}), but {metadata.get('format')!r}")
        values = json.loads(metadata["report"])
        report = Report(**{**values, "layers": [LayerReport(**row) for row in values["layers"]]}, centroids=centroids)
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as broken:
        raise UserError(f"{str(path)!r} is no plan: {broken}") from broken
    if grouped_calls(model):
        raise UserError("model must not be accelerated already")
    modules = dict(model.named_modules())
    missing = [name for name in centroids if name not in modules]
    if missing:
        raise UserError(f"model must have the plan's layers, but has no {missing[0]!r}")
    _install(model, {layer.name: layer for layer in report.layers}, centroids)
    return report


@dataclass
class _Setting:
    """What a layer may do: so many groups and keys, its error there and its time in seconds for an image."""

    groups: int
    keys: int
    error: float
    seconds: float


@dataclass
class _Layer:
    """What is known of a layer: sizes, its own time for an image, the share of its error that reaches the model's
    output, its centroids by number of groups, and its settings."""

    name: str
    reason: str = ""
    heads: int = 0
    tokens: int = 0
    channels: int = 0
    prefix: int = 0
    seconds: float = 0.0
    calls: int = 0
    reach: float = 1.0
    centroids: dict[int, Tensor] = field(default_factory=dict)
    settings: list[_Setting] = field(default_factory=list)

    def best(self, price: float) -> _Setting | None:
        """What costs least where a squared error of one costs ``price`` seconds; None for the layer's own attention."""
        faster = (setting for setting in self.settings if setting.seconds < GAIN * self.seconds)
        costs = [(setting.seconds + price * (self.reach * setting.error) ** 2, setting) for setting in faster]
        cost, setting = min(costs, key=lambda pair: pair[0], default=(self.seconds, None))
        return setting if cost < self.seconds else None

    def report(self, setting: _Setting | None) -> LayerReport:
        sizes = {name: getattr(self, name) for name in ("heads", "tokens", "channels", "prefix")}
        before = 1000 * self.seconds
        if setting is None:
            reason = self.reason or "no setting within the error is faster"
            return LayerReport(self.name, "dense", reason, **sizes, ms_before=before, ms_after=before)
        chosen = {"groups": setting.groups, "keys": setting.keys, "error": setting.error}
        return LayerReport(
            self.name, "groups", **sizes, **chosen, ms_before=before, ms_after=1000 * setting.seconds
        )


_Choice: TypeAlias = dict[str, _Setting]


def _accelerate(model: nn.Module, images: Tensor, error: float, prefix: int | None) -> Report:
    choosing, aside = images[: (len(images) + 1) // 2], images[(len(images) + 1) // 2 :]
    layers = _find_layers(model, choosing, prefix)
    if not layers:
        raise UserError(f"model must call F.scaled_dot_product_attention, got a {type(model).__name__} that does not")
    before = _outputs(model(choosing))
    _measure(model, choosing, layers)

    def error_of(chosen: _Choice) -> float:
        _undo(model)
        _install(model, *_plan(layers, chosen))
        return _difference(_outputs(model(choosing)), before)

    for name, layer in layers.items():
        if layer.settings:
            probe = min(layer.settings, key=lambda setting: setting.seconds)
            layer.reach = error_of({name: probe}) / max(probe.error, 1e-12)
    chosen, predicted = _choose(layers, error, error_of)
    _undo(model)
    original, seconds_before = _outputs(model(aside)), _seconds(lambda: model(aside[:1]))
    rows, centroids = _plan(layers, chosen)
    reports = list(rows.values())
    _install(model, rows, centroids)
    measured, seconds_after = _difference(_outputs(model(aside)), original), _seconds(lambda: model(aside[:1]))
    attention = [sum(getattr(row, name) for row in reports) / 1000 for name in ("ms_before", "ms_after")]
    share = min(attention[0] / seconds_before, 0.999)
    return Report(
        asked_error=error,
        predicted_error=predicted,
        measured_error=measured,
        attention_speedup=attention[0] / attention[1] if attention[1] else 1.0,
        model_speedup=seconds_before / seconds_after,
        bound=1 / (1 - share),
        layers=reports,
        centroids=centroids,
    )


def _find_layers(model: nn.Module, images: Tensor, prefix: int | None) -> dict[str, _Layer]:
    """Every module that calls the function, with what it may not be grouped for, and centroids for those that may."""
    layers: dict[str, _Layer] = {}

    def look(name: str, call: Call) -> None:
        layer = layers.setdefault(name, _Layer(name))
        layer.calls += 1
        layer.heads = call.query.shape[1] if call.query.dim() == 4 else 0
        layer.tokens, layer.channels = call.query.shape[-2:]
        layer.prefix = _prefix_of(model, name) if prefix is None else prefix
        if call.reason is not None:
            layer.reason = call.reason
        elif len(call.query) != len(images):
            layer.reason = f"in windows, {len(call.query) // len(images)} an image"
        elif layer.calls > 1:
            layer.reason = "called more than once"
        elif layer.tokens - layer.prefix < LEAST_TOKENS:
            layer.reason = "few tokens"
        else:
            patches = call.query[:, :, layer.prefix :].float().transpose(0, 1).flatten(1, 2)  # (H, B L, D)
            for groups in (count for count in GROUPS if 8 * count <= layer.tokens):
                places = torch.arange(TOKENS_PER_GROUP * groups, device=patches.device) * patches.shape[1]
                layer.centroids[groups] = seed_centroids(patches[:, places // (TOKENS_PER_GROUP * groups)], groups)

    with watch_calls(model, look):
        model(images)
    return layers


def _measure(model: nn.Module, images: Tensor, layers: dict[str, _Layer]) -> None:
    """Error, on what all images give it, and time, on what one does, of every setting of every layer."""

    def answer(name: str, call: Call) -> Tensor | None:
        layer, one = layers[name], Call(*(x[: len(x) // len(images)] for x in call[:3]), *call[3:])
        if layer.reason:
            layer.seconds += 0.0 if call.reason else _seconds(lambda: _dense(one))
            return None
        layer.seconds = _seconds(lambda: _dense(one))
        whole = _dense(call)
        for groups, centroids in layer.centroids.items():
            for keys in (count for count in KEYS if 4 * count <= layer.tokens):
                grouped = GroupedCall(centroids, keys, STEPS, layer.prefix, 0)
                seconds = _seconds(lambda grouped=grouped: grouped(one))
                if seconds > layer.seconds:
                    break  # more keys only take longer
                error = float((grouped(call) - whole).norm() / whole.norm())
                layer.settings.append(_Setting(groups, keys, error, seconds))
        return whole

    with watch_calls(model, answer):
        model(images)


def _choose(
    layers: dict[str, _Layer], error: float, error_of: Callable[[_Choice], float]
) -> tuple[_Choice, float]:
    """The choice at the lowest price of error whose error is at most that asked for, and its error."""
    (low, high), best, known = PRICES, ({}, 0.0), {}
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        chosen = {name: setting for name, layer in layers.items() if (setting := layer.best(10**middle)) is not None}
        key = tuple((name, setting.groups, setting.keys) for name, setting in chosen.items())
        if key not in known:
            known[key] = error_of(chosen) if chosen else 0.0
        if known[key] <= error:
            high, best = middle, (chosen, known[key])
        else:
            low = middle
    return best


def _plan(layers: dict[str, _Layer], chosen: _Choice) -> tuple[dict[str, LayerReport], dict[str, Tensor]]:
    """The report of every layer, and the centroids of those in groups."""
    rows = {name: layer.report(chosen.get(name)) for name, layer in layers.items()}
    return rows, {name: layers[name].centroids[setting.groups] for name, setting in chosen.items()}


def _install(model: nn.Module, rows: dict[str, LayerReport], centroids: dict[str, Tensor]) -> None:
    modules = dict(model.named_modules())
    device = next((parameter.device for parameter in model.parameters()), None)
    for name, found in centroids.items():
        row = rows[name]
        grouped = GroupedCall(found.to(device), row.keys, STEPS, row.prefix, (row.tokens + 1) // 2)
        install(modules[name], grouped)


def _undo(model: nn.Module) -> None:
    modules = dict(model.named_modules())
    for name in grouped_calls(model):
        uninstall(modules[name])


def _dense(call: Call) -> Tensor:
    return F.scaled_dot_product_attention(call.query, call.key, call.value, scale=call.scale)


def _seconds(work: Callable[[], Any]) -> float:
    """The least time of a few rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        best = min(best, time.perf_counter() - start)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _outputs(output: Any) -> list[Tensor]:
    """All floating tensors of what a model returns: a tensor, or tensors in tuples, lists, mappings."""
    return list(_tensors(output))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach().float()
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _difference(after: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """|after - before| / |before| over all tensors together."""
    squares = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    return float((squares / max(sum(float(b.square().sum()) for b in before), 1e-30)) ** 0.5)


def _prefix_of(model: nn.Module, name: str) -> int:
    """Class and register tokens, as the innermost part around a module tells them, or a Hugging Face configuration."""
    while name:
        name = name.rpartition(".")[0]
        count = getattr(model.get_submodule(name), "num_prefix_tokens", None)
        if isinstance(count, int):
            return count
    config = getattr(model, "config", None)
    registers = getattr(config, "num_register_tokens", 0)
    return 0 if config is None else 1 + (registers if isinstance(registers, int) else 0)


__all__ = ["LayerReport", "Report", "accelerate", "apply_plan", "exact_attention"]
