"""`dgt.accelerate`: a trained model's global attention by groups, with an error that the user chooses.

Every layer that attends globally is offered a few settings (how many groups, how many keys). What each costs is
measured on images: its time on this machine, its error in the layer's output, and how far the layer's errors reach the
model's output. Errors of layers add up like independent ones, so the fastest model of a given error has one price of
squared error for all layers: every layer takes what costs least, time and error together, its own attention among the
choices. The price is found by bisection, by the error of the model's output on a few images, checked on many.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dgt.acceleration.doors import Inputs, call_model, count_images, count_prefix_tokens, take
from dgt.acceleration.report import LayerReport, Report, check_model, count_alike, install_plan
from dgt.acceleration.sdpa import Call, GroupedCall, grouped_calls, in_turns, timed, uninstall_all, watch_calls, why_not
from dgt.ops import seed_centroids
from dgt.ops.checks import check_count, describe
from dgt.utils.errors import LOGGER, UserError

GROUPS = (8, 24, 64, 160)
KEYS = (8, 32, 96, 256)
LEAST_TOKENS = 192  # fewer are not even tried: choosing keys alone takes as long as attention there
TOKENS_PER_GROUP = 32  # of the sample that centroids are found in
GAIN = 0.9  # a setting must take less than this share of the layer's own time
ERROR_IMAGES = 2  # for the error of a layer's settings, which only ranks them
STEERING_IMAGES = 8  # for the error of the model at a price; where the bisection ends it is measured on all
CENTROID_IMAGES = 8  # at most: all give as many queries together
ROUNDS = 3  # the least time of so many counts
NO_PREFIX = "nothing tells of class or register tokens: all are taken for patches (num_prefix_tokens=)"
BISECTIONS = 24  # of the price, over PRICES
CHECKS = 5  # of what bisections end at
PRICES = (-3.0, 17.0)  # powers of ten, ms for a squared error of one
_Choice: TypeAlias = dict[str, LayerReport]


@torch.no_grad()
def accelerate(model: nn.Module, images: Inputs, error: float = 0.01, num_prefix_tokens: int | None = None) -> Report:
    """Have a trained model's global attention done by groups, in place and without training.

    Every attention that ends in ``F.scaled_dot_product_attention`` is looked at: timm's, Hugging Face's with
    ``attn_implementation="sdpa"`` (or "dgt", :func:`dgt.register_attention`), ``nn.MultiheadAttention``, any other.
    One with a mask or bias of pairs, causal, in windows, across sequences, called more than once, or not made faster by
    groups stays as it is. The weights do; ``with dgt.exact_attention(model):`` has the model's own attention back.

    Args:
        model: any module called as ``model(images)``; its mode stays.
        images: (N, ...) what the model is called with, N >= 2, of the kind and size that it will see, and none that it
            was trained on: a dozen, or 200 where their errors differ much, as a classifier's (the report tells). One in
            four gives centroids (8 at most), one is kept aside to measure the error, others choose. Or a mapping for
            ``model(**images)``, as Hugging Face's processors return; tensors as long as its first are an image's each.
        error: largest relative error of the model's output, ``|after - before| / |before|``, in (0, 1).
        num_prefix_tokens: class and register tokens; None asks the model, and takes 0 if it does not say.

    Returns:
        The :class:`Report`; it prints as a table, and :meth:`Report.save` keeps the plan.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; for a model that fails on the
            images, is accelerated already or has no attention. Whatever is raised, the model is as it was.
    """
    check_model(model)
    if isinstance(images, Tensor) and images.is_meta:
        raise TypeError(f"images must hold values, got {describe(images)}")
    if (count := count_images(images)) < 2:
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
    check_model(model)
    with _in_evaluation(model):
        layers = _find_layers(model, images, num_prefix_tokens, least_tokens).values()
    return [replace(layer.row, choice="dense" if layer.row.reason else "groups") for layer in layers]


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
class _Layer:
    """What is known of a layer: its row of the report as it is, the share of its error that reaches the model's output,
    its centroids by number of groups, and rows of whatever else it may do, with their times for an image."""

    row: LayerReport
    calls: int = 0
    reach: float = 1.0
    centroids: dict[int, Tensor] = field(default_factory=dict)
    settings: list[LayerReport] = field(default_factory=list)

    def best(self, price: float) -> LayerReport | None:
        """What costs least where a squared error of one costs ``price`` ms; None for the layer's own attention."""
        costs = [(row.ms_after + price * (self.reach * row.error) ** 2, row) for row in self.settings]
        cost, row = min(costs, key=lambda pair: pair[0], default=(0.0, None))
        return row if row is not None and cost < row.ms_before else None


def roles(count: int) -> tuple[int, list[int], list[int]]:
    """Every which of so many images gives centroids (their errors are smaller); who choose; who are kept aside."""
    every = 4 * math.ceil(count / (4 * CENTROID_IMAGES))
    others = [at for at in range(count) if at % every or count == 2]
    return every, [at for at in others if at % 4 != 1], [at for at in others if at % 4 == 1]


def _accelerate(model: nn.Module, images: Inputs, error: float, prefix: int | None) -> Report:
    every, choosing, aside = roles(count := count_images(images))
    own, most = take(images, slice(None, None, every)), len(choosing)
    others = [take(images, slice(at, at + 1)) for at in choosing + aside]
    layers, few = _find_layers(model, own, prefix, LEAST_TOKENS), min(STEERING_IMAGES, most)
    LOGGER.info("outputs of %d images with the model's own attention", len(others))
    before, kept = [_outputs(call_model(model, image)) for image in others], dict[Any, list[Tensor]]()
    if not before[0] or not all(tensor.isfinite().all() for tensors in before for tensor in tensors):
        raise UserError("model must return floating point tensors, free of NaN and infinities: the error is theirs")
    _measure(model, own, layers)

    def attempt(chosen: _Choice, count: int) -> Tensor:
        """Have the model do what is chosen; :func:`_squares` of the first of the others, (count, 2), run once."""
        uninstall_all(model)
        install_plan(model, *_plan(layers, chosen))
        found = kept.setdefault(tuple(chosen.items()), [])
        for image, whole in zip(others[len(found) : count], before[len(found) : count], strict=True):
            found.append(_squares(_outputs(call_model(model, image)) if chosen else whole, whole))
        return torch.stack(found[:count])

    tell = _progress(len(layers))
    for name, layer in layers.items():
        tell(f"how far errors of {name} reach")
        if layer.settings:
            probe = min(layer.settings, key=lambda row: row.ms_after)
            layer.reach = relative_error(attempt({name: probe}, few)) / max(probe.error, 1e-12)
    chosen = _choose(layers, error, lambda choice, on_all: relative_error(attempt(choice, most if on_all else few)))
    attempt(chosen, most)
    (whole, own_ms), (whole_after, ms) = in_turns(model, lambda: call_model(model, others[-1]), ROUNDS)
    if not chosen or whole_after >= whole:  # what single layers gained was lost around them
        for name in chosen:
            layers[name].row = replace(layers[name].row, reason="the whole model was not faster")
        chosen, whole_after, ms = {}, whole, own_ms
    squares, (rows, centroids), attention = attempt(chosen, count), _plan(layers, chosen), sum(own_ms.values())
    layers_of = [replace(row, ms_before=own_ms[name], ms_after=ms[name]) for name, row in rows.items()]
    parts, speedup = (squares[:most], squares[most:]), attention / sum(ms.values()) if chosen else 1.0
    return Report(
        error, relative_error(parts[0]), relative_error(parts[1]), speedup, whole / whole_after,
        whole / max(whole - attention, 1e-9), layers_of, centroids, half_interval(parts[0]), half_interval(parts[1]),
        count_alike(model, layers), prefix is None,
    )  # fmt: skip


def _find_layers(model: nn.Module, images: Inputs, prefix: int | None, least_tokens: int) -> dict[str, _Layer]:
    """Every module that calls the function, in their order, with what it may not be grouped for."""
    layers, count = dict[str, _Layer](), count_images(images)

    def look(name: str, call: Call) -> None:
        layer = layers.setdefault(name, _Layer(LayerReport(name, "dense")))
        layer.calls += 1
        heads, (tokens, channels) = call.query.shape[1] if call.query.dim() == 4 else 0, call.query.shape[-2:]
        found = count_prefix_tokens(model, name) if prefix is None else prefix
        windows, rest = divmod(len(call.query), count)
        reason = call.reason or why_not({
            "not image by image": rest > 0,
            f"in windows, {windows} an image": windows != 1,
            "called more than once": layer.calls > 1,
            "few tokens": tokens - (found or 0) < least_tokens,
            "inside of nn.TransformerEncoderLayer, which passes it by in evaluation":
                isinstance(model.get_submodule(name.rpartition(".")[0]), nn.TransformerEncoderLayer),
        }) or layer.row.reason  # fmt: skip
        note = "" if found is not None else NO_PREFIX
        layer.row = LayerReport(name, "dense", reason, heads, tokens, channels, found or 0, note=note)

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
            layer.row = replace(layer.row, reason=layer.row.reason or "other attention inside of it")
    return layers


def _measure(model: nn.Module, images: Inputs, layers: dict[str, _Layer]) -> None:
    """Centroids, error on what a few images give it, and time on what one does, of every setting of every layer."""
    tell = _progress(sum(layer.calls for layer in layers.values()))

    def answer(name: str, call: Call) -> None:
        tell(f"settings of {name}")
        layer, row = layers[name], layers[name].row
        if row.reason:
            return
        layer.row = replace(row, reason="no setting within the error is faster")
        one, few = call.first(1), call.first(ERROR_IMAGES)
        own, whole = timed(one.run, ROUNDS)[0], few.run()
        patches = call.query[:, :, row.prefix :].float().transpose(0, 1).flatten(1, 2)  # (H, B L, D)
        for groups in (number for number in GROUPS if 8 * number <= row.tokens):
            places = torch.arange(n := TOKENS_PER_GROUP * groups, device=patches.device) * patches.shape[1] // n
            centroids = layer.centroids[groups] = seed_centroids(patches[:, places], groups)
            for keys in (number for number in KEYS if 4 * number <= row.tokens):
                grouped = GroupedCall(centroids, keys, row.prefix, 0).eval()  # observes nothing
                if (least := timed(partial(grouped, one), ROUNDS)[0]) >= GAIN * own:
                    break  # more keys only take longer
                error = relative_error(_squares([grouped(few).float()], [whole.float()])[None])
                row = replace(row, choice="groups", groups=groups, keys=keys, error=error)
                layer.settings.append(replace(row, ms_before=own, ms_after=least))

    with watch_calls(model, answer):
        call_model(model, images)


def _choose(layers: dict[str, _Layer], error: float, error_of: Callable[[_Choice, bool], float]) -> _Choice:
    """The choice at the lowest price of error that was found to have at most the error asked for, on all images.

    A few images steer, by their error times the ratio of that of all to theirs at the choice before, since errors of
    choices go together over images. What the bisection ends at is measured on all, until that was done before.
    """
    known, ratio, within, tell = dict[Any, float]({(): 0.0}), 1.0, _Choice(), _progress(CHECKS)
    for _ in range(CHECKS):
        tell("choices of settings")
        (low, high), best = PRICES, _Choice()
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            found = {name: row for name, layer in layers.items() if (row := layer.best(10**middle)) is not None}
            at = tuple(found.items())
            if (known[at] if at in known else ratio * error_of(found, False)) <= error:
                high, best = middle, found
            else:
                low = middle
        if (key := tuple(best.items())) in known:
            return best
        known[key] = error_of(best, True)
        ratio, within = known[key] / (error_of(best, False) or 1.0), best if known[key] <= error else within
    return within


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
    rows = {name: chosen.get(name, layer.row) for name, layer in layers.items()}
    return rows, {name: layers[name].centroids[row.groups] for name, row in chosen.items()}


def _outputs(output: Any) -> list[Tensor]:
    """All floating tensors of what a model returns: a tensor, or tensors in tuples, lists, mappings."""
    if isinstance(output, Tensor):
        return [output.detach().float()] if output.is_floating_point() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in _outputs(value)]


def _squares(after: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """(2,): |after - before| and |before|, squared, over all tensors together."""
    pairs = [((a - b).square().sum(), b.square().sum()) for a, b in zip(after, before, strict=True)]
    return torch.tensor(pairs, dtype=torch.float64).sum(0)


def relative_error(squares: Tensor) -> float:
    """|after - before| / |before| over all images together, of (images, 2) as :func:`_squares`."""
    return float((squares[:, 0].sum() / squares[:, 1].sum().clamp(min=1e-30)).sqrt())


def half_interval(squares: Tensor) -> float | None:
    """Half of that error's 95 % interval, by the jackknife over images; None where nothing tells."""
    rest, others = squares.sum(0) - squares, len(squares) - 1
    if not others or not squares[:, 0].any():
        return None
    spread = (rest[:, 0] / rest[:, 1]).sqrt().std(correction=0) * others**0.5
    return (2 + 3 / others) * float(spread)  # about Student's t
