"""`dgt.accelerate`: a trained model's global attention by groups, with an error that the user chooses.

Every layer that attends globally is offered a few settings (how many groups, how many keys). What each costs is
measured on images: its time on this machine, its error in the layer's output, and how far the layer's errors reach the
model's output. Errors of layers add up like independent ones, so the fastest model of a given error has one price of
squared error for all layers: every layer takes what costs least, time and error together, its own attention among the
choices. The price is found by bisection, with the error of the model's output measured each time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.acceleration.report import LayerReport, Report, install_plan
from dgt.acceleration.sdpa import Call, GroupedCall, exact_attention, grouped_calls, uninstall_all, watch_calls
from dgt.ops import seed_centroids
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import UserError

GROUPS = (8, 24, 64, 160)
KEYS = (8, 32, 96, 256)
LEAST_TOKENS = 192  # fewer are not even tried: choosing keys alone takes as long as attention there
TOKENS_PER_GROUP = 32  # of the sample that centroids are found in
GAIN = 0.9  # a setting must take less than this share of the layer's own time
ERROR_IMAGES = 2  # for the error of a layer's settings, which steers; the model's is measured on all
ROUNDS = 3  # the least time of so many counts
BISECTIONS = 24  # of the price, over PRICES
PRICES = (-6.0, 14.0)  # powers of ten, seconds for a squared error of one


@torch.no_grad()
def accelerate(model: nn.Module, images: Tensor, error: float = 0.01, num_prefix_tokens: int | None = None) -> Report:
    """Have a trained model's global attention done by groups, in place and without training.

    Every attention that ends in ``F.scaled_dot_product_attention`` is looked at: those of timm, and whatever else
    calls that function (so do Hugging Face's with ``attn_implementation="sdpa"``, not tried yet). One with a mask or
    bias of pairs, causal, in windows, across sequences or called more than once stays as it is, as does one that
    groups do not make faster. The weights stay the model's, under their names; ``with dgt.exact_attention(model):``
    has its own attention back.

    Args:
        model: any module called as ``model(images)``; its mode stays.
        images: (N, ...) what the model is called with, N >= 2, of the kind and size that it will see: the first half
            chooses, the rest is kept aside to measure the error.
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
    if not isinstance(images, Tensor) or images.dim() < 2 or images.is_meta:
        raise TypeError(f"images must be a tensor (N, ...), got {describe(images)}")
    if len(images) < 2:
        raise UserError(f"images must be at least 2, some to choose by and some to check with, got {len(images)}")
    if isinstance(error, bool) or not isinstance(error, float | int) or not 0 < error < 1:
        raise UserError(f"error must be above 0 and below 1, got {error!r}")
    if grouped_calls(model):
        raise UserError("model must not be accelerated already: take a fresh one, or apply_plan on one")
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        raise UserError("model must not be compiled yet: torch.compile comes after accelerate")
    if num_prefix_tokens is not None:
        check_count("num_prefix_tokens", num_prefix_tokens, least=0)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return _accelerate(model, images, error, num_prefix_tokens)
    except BaseException:
        uninstall_all(model)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
        for name, call in grouped_calls(model).items():
            call.training = model.get_submodule(name).training


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
        costs = [(setting.seconds + price * (self.reach * setting.error) ** 2, setting) for setting in self.settings]
        cost, setting = min(costs, key=lambda pair: pair[0], default=(self.seconds, None))
        return setting if cost < self.seconds else None

    def report(self, setting: _Setting | None) -> LayerReport:
        sizes = {name: getattr(self, name) for name in ("heads", "tokens", "channels", "prefix")}
        before = 1000 * self.seconds
        if setting is None:
            reason = self.reason or "no setting within the error is faster"
            return LayerReport(self.name, "dense", reason, **sizes, ms_before=before, ms_after=before)
        chosen: dict[str, Any] = {"groups": setting.groups, "keys": setting.keys, "error": setting.error}
        return LayerReport(self.name, "groups", **sizes, **chosen, ms_before=before, ms_after=1000 * setting.seconds)


_Choice: TypeAlias = dict[str, _Setting]


def _accelerate(model: nn.Module, images: Tensor, error: float, prefix: int | None) -> Report:
    choosing, aside = images[: (len(images) + 1) // 2], images[(len(images) + 1) // 2 :]
    layers = _find_layers(model, choosing, prefix)
    if not layers:
        raise UserError(f"model must call F.scaled_dot_product_attention, got a {type(model).__name__} that does not")
    before = _outputs(model(choosing))
    if not before or not all(tensor.isfinite().all() for tensor in before):
        raise UserError("model must return floating point tensors, free of NaN and infinities: the error is theirs")
    _measure(model, choosing, layers)

    def error_of(chosen: _Choice) -> float:
        uninstall_all(model)
        install_plan(model, *_plan(layers, chosen))
        return _difference(_outputs(model(choosing)), before)

    for name, layer in layers.items():
        if layer.settings:
            probe = min(layer.settings, key=lambda setting: setting.seconds)
            layer.reach = error_of({name: probe}) / max(probe.error, 1e-12)
    chosen, predicted = _choose(layers, error, error_of)
    rows, centroids = _plan(layers, chosen)
    uninstall_all(model)
    original = _outputs(model(aside))
    install_plan(model, rows, centroids)
    measured = _difference(_outputs(model(aside)), original)
    seconds_before, seconds_after = _in_turns(model, aside[:1])
    if not chosen or seconds_after >= seconds_before:  # what single layers gained was lost around them
        uninstall_all(model)
        for name in chosen:
            layers[name].reason = "the whole model was not faster"
        (rows, centroids), predicted, measured, seconds_after = _plan(layers, {}), 0.0, 0.0, seconds_before
    reports = list(rows.values())
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
            whole = len(call.query) % len(images) == 0
            layer.reason = f"in windows, {len(call.query) // len(images)} an image" if whole else "not image by image"
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
    for name, layer in layers.items():  # whose groups would answer the calls within as well
        if any(other != name and f".{other}".startswith(f".{name}.".replace("..", ".")) for other in layers):
            layer.reason = layer.reason or "other attention inside of it"
    return layers


def _measure(model: nn.Module, images: Tensor, layers: dict[str, _Layer]) -> None:
    """Error, on what a few images give it, and time, on what one does, of every setting of every layer."""

    def answer(name: str, call: Call) -> Tensor | None:
        layer = layers[name]
        q, k, v = (tensor[: max(1, len(tensor) // len(images))] for tensor in (call.query, call.key, call.value))
        one = Call(q, k, v, call.scale, call.reason)
        if layer.reason:
            layer.seconds += 0.0 if call.reason else _seconds(lambda: _dense(one))
            return None
        layer.seconds = _seconds(lambda: _dense(one))
        whole = _dense(call)
        few = call._replace(**{name: getattr(call, name)[:ERROR_IMAGES] for name in ("query", "key", "value")})
        size = max(float(whole[:ERROR_IMAGES].float().norm()), 1e-30)
        for groups, centroids in layer.centroids.items():
            for keys in (count for count in KEYS if 4 * count <= layer.tokens):
                grouped = GroupedCall(centroids, keys, layer.prefix, 0)
                seconds = _seconds(partial(grouped, one))
                if seconds >= GAIN * layer.seconds:
                    break  # more keys only take longer
                difference = cast(Tensor, grouped(few)) - whole[:ERROR_IMAGES]
                layer.settings.append(_Setting(groups, keys, float(difference.float().norm()) / size, seconds))
        return whole

    with watch_calls(model, answer):
        model(images)


def _choose(layers: dict[str, _Layer], error: float, error_of: Callable[[_Choice], float]) -> tuple[_Choice, float]:
    """The choice at the lowest price of error whose error is at most that asked for, and its error."""
    (low, high), known = PRICES, dict[tuple[Any, ...], float]()
    best: tuple[_Choice, float] = ({}, 0.0)
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


def _dense(call: Call) -> Tensor:
    grouped_heads = call.query.shape[1] != call.key.shape[1]
    return F.scaled_dot_product_attention(*call[:3], scale=call.scale, enable_gqa=grouped_heads)


def _seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The least time of a few rounds."""
    best = float("inf")
    for _ in range(rounds):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        best = min(best, time.perf_counter() - start)
    return best


def _in_turns(model: nn.Module, images: Tensor) -> tuple[float, float]:
    """The least times of a model with its own attention and with groups, a turn of each at a time."""
    before = after = float("inf")
    for _ in range(ROUNDS):
        with exact_attention(model):
            before = min(before, _seconds(lambda: model(images), 1))
        after = min(after, _seconds(lambda: model(images), 1))
    return before, after


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _outputs(output: Any) -> list[Tensor]:
    """All floating tensors of what a model returns: a tensor, or tensors in tuples, lists, mappings."""
    if isinstance(output, Tensor):
        return [output.detach().float()] if output.is_floating_point() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in _outputs(value)]


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
