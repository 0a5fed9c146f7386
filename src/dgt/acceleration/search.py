"""`dgt.accelerate`: a trained model's global attention by groups, with an error that the user chooses.

Every layer that attends globally is offered a few settings (how many groups, how many keys). What each costs is
measured on images: its time on this machine, its error in the layer's output, and how far the layer's errors reach the
model's output. Errors of layers add up like independent ones, so the fastest model of a given error has one price of
squared error for all layers: every layer takes what costs least, time and error together, its own attention among the
choices. The price is found by bisection, with the error of the model's output measured each time.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.acceleration.doors import Inputs, call_model, count_images, count_prefix_tokens, take
from dgt.acceleration.report import LayerReport, Report, install_plan
from dgt.acceleration.sdpa import Call, GroupedCall, exact_attention, grouped_calls, uninstall_all, watch_calls, why_not
from dgt.ops import seed_centroids
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import LOGGER, UserError

GROUPS = (8, 24, 64, 160)
KEYS = (8, 32, 96, 256)
LEAST_TOKENS = 192  # fewer are not even tried: choosing keys alone takes as long as attention there
TOKENS_PER_GROUP = 32  # of the sample that centroids are found in
GAIN = 0.9  # a setting must take less than this share of the layer's own time
ERROR_IMAGES = 2  # for the error of a layer's settings, which steers; the model's is measured on all
ROUNDS = 3  # the least time of so many counts
NO_PREFIX = "nothing tells of class or register tokens: all are taken for patches (num_prefix_tokens=)"
BISECTIONS = 24  # of the price, over PRICES
PRICES = (-6.0, 14.0)  # powers of ten, seconds for a squared error of one
_Choice: TypeAlias = "dict[str, _Setting]"


@torch.no_grad()
def accelerate(model: nn.Module, images: Inputs, error: float = 0.01, num_prefix_tokens: int | None = None) -> Report:
    """Have a trained model's global attention done by groups, in place and without training.

    Every attention that ends in ``F.scaled_dot_product_attention`` is looked at: those of timm, Hugging Face's with
    ``attn_implementation="sdpa"`` (or "dgt", :func:`dgt.register_attention`), ``nn.MultiheadAttention``, and whatever
    else calls that function. One with a mask or bias of pairs, causal, in windows, across sequences or called more
    than once stays as it is, as does one that groups do not make faster. The weights stay the model's, under their
    names; ``with dgt.exact_attention(model):`` has its own attention back.

    Args:
        model: any module called as ``model(images)``; its mode stays.
        images: (N, ...) what the model is called with, N >= 2, of the kind and size that it will see: a dozen or
            more. Of every four one gives centroids, one is kept aside to measure the error, by two it is chosen. Or a
            mapping for ``model(**images)``, as a processor of Hugging Face returns it; tensors as long as its first one
            are then an image's each, others all images'.
        error: largest relative error of the model's output, ``|after - before| / |before|``, in (0, 1).
        num_prefix_tokens: class and register tokens; None asks the model, and takes 0 if it does not say.

    Returns:
        The :class:`Report`; it prints as a table, and :meth:`Report.save` keeps the plan.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; for a model that fails on the
            images, is accelerated already or has no attention. Whatever is raised, the model is as it was.
    """
    _check_model(model)
    count = count_images(images)
    if isinstance(images, Tensor) and images.is_meta:
        raise TypeError(f"images must hold values, got {describe(images)}")
    if count < 2:
        raise UserError(f"images must be at least 2, some to choose by and some to check with, got {count}")
    if isinstance(error, bool) or not isinstance(error, float | int) or not 0 < error < 1:
        raise UserError(f"error must be above 0 and below 1, got {error!r}")
    check_count("num_prefix_tokens", 0 if num_prefix_tokens is None else num_prefix_tokens, least=0)
    with _in_evaluation(model):
        try:
            return _accelerate(model, images, error, num_prefix_tokens)
        except BaseException:
            uninstall_all(model)
            raise


@torch.no_grad()
def inspect_model(
    model: nn.Module, images: Inputs, num_prefix_tokens: int | None = None, least_tokens: int = LEAST_TOKENS
) -> list[LayerReport]:
    """What :func:`accelerate` would find, without measuring: every attention, "groups" if it could be done so.

    Args:
        model, images, num_prefix_tokens: as in :func:`accelerate`; one image is enough, and both may be of the "meta"
            device, which has no values.
        least_tokens: fewer are reported as dense.
    """
    _check_model(model)
    with _in_evaluation(model):
        found = _find_layers(model, images, num_prefix_tokens, least_tokens).values()
    return [replace(one.report(None), choice="dense" if one.reason else "groups", reason=one.reason) for one in found]


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    if grouped_calls(model):
        raise UserError("model must not be accelerated already: take a fresh one, or apply_plan on one")
    for module in model.modules():  # torch.compile(model), or model.compile() in place
        if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None:
            raise UserError("model must not be compiled yet: torch.compile comes after accelerate")


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Have a model in evaluation mode while this is entered; what was added to it takes the mode of what it is in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
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
    note: str = ""

    def best(self, price: float) -> _Setting | None:
        """What costs least where a squared error of one costs ``price`` seconds; None for the layer's own attention."""
        costs = [(setting.seconds + price * (self.reach * setting.error) ** 2, setting) for setting in self.settings]
        cost, setting = min(costs, key=lambda pair: pair[0], default=(self.seconds, None))
        return setting if cost < self.seconds else None

    def report(self, setting: _Setting | None) -> LayerReport:
        sizes = {name: getattr(self, name) for name in ("heads", "tokens", "channels", "prefix", "note")}
        before = 1000 * self.seconds
        if setting is None:
            reason = self.reason or "no setting within the error is faster"
            return LayerReport(self.name, "dense", reason, **sizes, ms_before=before, ms_after=before)
        chosen: dict[str, Any] = {"groups": setting.groups, "keys": setting.keys, "error": setting.error}
        return LayerReport(self.name, "groups", **sizes, **chosen, ms_before=before, ms_after=1000 * setting.seconds)


def _accelerate(model: nn.Module, images: Inputs, error: float, prefix: int | None) -> Report:
    own, aside, *others = [take(images, slice(start, None, 4)) for start in range(min(count_images(images), 4))]

    def outputs() -> list[Tensor]:  # of others than centroids come from, whose own errors are smaller
        return [tensor for part in others or [own] for tensor in _outputs(call_model(model, part))]

    layers = _find_layers(model, own, prefix, LEAST_TOKENS)
    before = outputs()
    if not before or not all(tensor.isfinite().all() for tensor in before):
        raise UserError("model must return floating point tensors, free of NaN and infinities: the error is theirs")
    _measure(model, own, layers)

    def error_of(chosen: _Choice) -> float:
        uninstall_all(model)
        install_plan(model, *_plan(layers, chosen))
        return _difference(outputs(), before)

    tell = _progress(len(layers))
    for name, layer in layers.items():
        tell(f"how far errors of {name} reach")
        if layer.settings:
            probe = min(layer.settings, key=lambda setting: setting.seconds)
            layer.reach = error_of({name: probe}) / max(probe.error, 1e-12)
    chosen, predicted = _choose(layers, error, error_of)
    rows, centroids = _plan(layers, chosen)
    uninstall_all(model)
    original = _outputs(call_model(model, aside))
    install_plan(model, rows, centroids)
    measured = _difference(_outputs(call_model(model, aside)), original)
    seconds_before, seconds_after = _in_turns(model, take(aside, slice(1)))
    if not chosen or seconds_after >= seconds_before:  # what single layers gained was lost around them
        uninstall_all(model)
        for name in chosen:
            layers[name].reason = "the whole model was not faster"
        (rows, centroids), predicted, measured, seconds_after = _plan(layers, {}), 0.0, 0.0, seconds_before
    attention = [sum(getattr(row, name) for row in rows.values()) / 1000 for name in ("ms_before", "ms_after")]
    bound = 1 / (1 - min(attention[0] / seconds_before, 0.999))
    speedups = (attention[0] / attention[1] if attention[1] else 1.0, seconds_before / seconds_after, bound)
    return Report(error, predicted, measured, *speedups, list(rows.values()), centroids)


def _find_layers(model: nn.Module, images: Inputs, prefix: int | None, least_tokens: int) -> dict[str, _Layer]:
    """Every module that calls the function, in their order, with what it may not be grouped for."""
    layers, count = dict[str, _Layer](), count_images(images)

    def look(name: str, call: Call) -> None:
        layer = layers.setdefault(name, _Layer(name))
        layer.calls += 1
        layer.heads = call.query.shape[1] if call.query.dim() == 4 else 0
        layer.tokens, layer.channels = call.query.shape[-2:]
        found = count_prefix_tokens(model, name) if prefix is None else prefix
        layer.prefix, layer.note = found or 0, "" if found is not None else NO_PREFIX
        windows, rest = divmod(len(call.query), count)
        layer.reason = call.reason or why_not({
            "not image by image": rest > 0,
            f"in windows, {windows} an image": windows != 1,
            "called more than once": layer.calls > 1,
            "few tokens": layer.tokens - layer.prefix < least_tokens,
            "inside of nn.TransformerEncoderLayer, which passes it by in evaluation":
                isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer),
        }) or layer.reason  # fmt: skip

    try:
        with watch_calls(model, look):
            call_model(model, images)
    except UserError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as failed:
        raise UserError(f"model must take the images, got {describe(images)}: {failed}") from failed
    if not layers:
        told = any(hasattr(module, "set_attn_implementation") for module in model.modules())
        advice = 'does not: of transformers, load it with attn_implementation="sdpa"' if told else "does not"
        raise UserError(f"model must call F.scaled_dot_product_attention, got a {type(model).__name__} that {advice}")
    for name, layer in layers.items():  # whose groups would answer the calls within as well
        if any(other != name and f".{other}".startswith(f".{name}.".replace("..", ".")) for other in layers):
            layer.reason = layer.reason or "other attention inside of it"
    return layers


def _measure(model: nn.Module, images: Inputs, layers: dict[str, _Layer]) -> None:
    """Centroids, error on what a few images give it, and time on what one does, of every setting of every layer."""
    count, tell = count_images(images), _progress(sum(layer.calls for layer in layers.values()))

    def answer(name: str, call: Call) -> Tensor | None:
        tell(f"settings of {name}")
        layer = layers[name]
        if layer.reason:  # the call as it is, of all images
            layer.seconds += _seconds(call.run) / count if call.run else 0.0
            return None
        q, k, v = (tensor[: max(1, len(tensor) // count)] for tensor in (call.query, call.key, call.value))
        one = Call(q, k, v, call.scale, call.reason)
        layer.seconds = _seconds(lambda: _dense(one))
        whole = _dense(call)
        few = call._replace(**{name: getattr(call, name)[:ERROR_IMAGES] for name in ("query", "key", "value")})
        size = max(float(whole[:ERROR_IMAGES].float().norm()), 1e-30)
        patches = call.query[:, :, layer.prefix :].float().transpose(0, 1).flatten(1, 2)  # (H, B L, D)
        for groups in (number for number in GROUPS if 8 * number <= layer.tokens):
            places = torch.arange(sample := TOKENS_PER_GROUP * groups, device=q.device) * patches.shape[1] // sample
            centroids = layer.centroids[groups] = seed_centroids(patches[:, places], groups)
            for keys in (number for number in KEYS if 4 * number <= layer.tokens):
                grouped = GroupedCall(centroids, keys, layer.prefix, 0)
                seconds = _seconds(partial(grouped, one))
                if seconds >= GAIN * layer.seconds:
                    break  # more keys only take longer
                difference = cast(Tensor, grouped(few)) - whole[:ERROR_IMAGES]
                layer.settings.append(_Setting(groups, keys, float(difference.float().norm()) / size, seconds))
        return whole

    with watch_calls(model, answer):
        call_model(model, images)


def _choose(layers: dict[str, _Layer], error: float, error_of: Callable[[_Choice], float]) -> tuple[_Choice, float]:
    """The choice at the lowest price of error whose error is at most that asked for, and its error."""
    (low, high), known, tell = PRICES, dict[tuple[Any, ...], float](), _progress(BISECTIONS)
    best: tuple[_Choice, float] = ({}, 0.0)
    for _ in range(BISECTIONS):
        tell("a choice of settings")
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


def _progress(total: int) -> Callable[[str], None]:
    """What tells the log what is done next of so many like it, and about how long these take together."""
    start, past = time.monotonic(), list[str]()

    def tell(work: str) -> None:
        done = len(past)
        past.append(work)
        left = f"; about {(time.monotonic() - start) * (total / done - 1):.0f} s left" if done else ""
        LOGGER.info("%d of %d: %s%s", done + 1, total, work, left)

    return tell


def _plan(layers: dict[str, _Layer], chosen: _Choice) -> tuple[dict[str, LayerReport], dict[str, Tensor]]:
    """The report of every layer, and the centroids of those in groups."""
    rows = {name: layer.report(chosen.get(name)) for name, layer in layers.items()}
    return rows, {name: layers[name].centroids[setting.groups] for name, setting in chosen.items()}


def _dense(call: Call) -> Tensor:
    fewer_keys = call.query.shape[1] != call.key.shape[1]
    return F.scaled_dot_product_attention(*call[:3], scale=call.scale, enable_gqa=fewer_keys)


def _seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The least time of a few rounds."""
    from torch.utils.benchmark import timer  # waits for a GPU; only here, for it loads torch's compilers

    times = []
    for _ in range(rounds):
        start = timer()
        work()
        times.append(timer() - start)
    return min(times)


def _in_turns(model: nn.Module, images: Inputs) -> tuple[float, float]:
    """The least times of a model with its own attention and with groups, a turn of each at a time."""
    before = after = float("inf")
    for _ in range(ROUNDS):
        with exact_attention(model):
            before = min(before, _seconds(lambda: call_model(model, images), 1))
        after = min(after, _seconds(lambda: call_model(model, images), 1))
    return before, after


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
