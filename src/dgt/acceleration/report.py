"""What accelerating a model found and did, as a table, as JSON, and as a plan that does it again."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dgt.acceleration.doors import count_prefix_tokens
from dgt.acceleration.sdpa import GroupedCall, grouped_calls, install
from dgt.ops.checks import describe
from dgt.utils.atomic_write import atomic_write, replacing
from dgt.utils.errors import UserError

FORMAT = "dgt-plan-1"
SIZES = {"heads": ("num_heads", "num_attention_heads"), "channels": ("head_dim", "attention_head_size")}  # if told
WRAPPERS = re.compile(r"(^|\.)(_orig_mod|module)(?=\.|$)")  # torch.compile's and data parallelism's part of a name
COLOURS = {"before": "#b8b8b8", "groups": "#2a78b5", "dense": "#707070"}


@dataclass(frozen=True)
class LayerReport:
    """One attention of the model: what it does now, and what was measured.

    ``choice`` is "groups" or "dense", ``reason`` why it is dense; ``error`` relative, of this layer's attention alone;
    times in milliseconds for one image; ``note`` what was assumed.
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
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`accelerate` found and did; errors are relative, of the model's output, speedups ratios of times.

    ``predicted_error`` was measured on the images that settings were chosen by, ``measured_error`` on those kept aside,
    each with half of its 95 % interval over images; ``bound`` is the model's speedup had attention taken no time.
    """

    asked_error: float
    predicted_error: float
    measured_error: float
    attention_speedup: float
    model_speedup: float
    bound: float
    layers: list[LayerReport]
    centroids: dict[str, Tensor] = field(repr=False, default_factory=dict)
    predicted_half: float | None = None
    measured_half: float | None = None
    alike: int | None = None  # modules of its layers' classes in the whole model: a plan is for one with as many
    prefix_told: bool = False  # by the model, which a plan's must then tell, too; not where the user gave the number

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [f"{'layer':{width}}  tokens  choice                    error       before     after"]
        for layer in self.layers:
            grouped = layer.choice == "groups"
            choice = f"{layer.groups} groups of {layer.keys} keys" if grouped else f"dense: {layer.reason}"
            times = f"{layer.error:8.1e}  {layer.ms_before:8.1f} ms {layer.ms_after:8.1f} ms" if grouped else ""
            lines.append(f"{layer.name:{width}}  {layer.tokens:6d}  {choice:24}  {times}".rstrip())
        halves = [f" ± {half:.1g}" if half else "" for half in (self.predicted_half, self.measured_half)]
        wide = (self.predicted_half or 0.0) / max(self.predicted_error, self.asked_error / 100)  # rounding: none
        lines += [f"note: {25 * wide**2:.2g} times as many images would tell the error to 20 %"] if wide > 0.2 else []
        return "\n".join([
            *lines,
            *sorted({f"note: {layer.note}" for layer in self.layers if layer.note}),
            f"error: asked {self.asked_error:.2g}, predicted {self.predicted_error:.2g}{halves[0]}, "
            f"on images kept aside {self.measured_error:.2g}{halves[1]}",
            f"speed: attention {self.attention_speedup:.2f} times, model {self.model_speedup:.2f} times "
            f"(no attention at all: {self.bound:.2f})",
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """All but the centroids."""
        values = {name: value for name, value in vars(self).items() if name not in ("layers", "centroids")}
        return {**values, "layers": [asdict(layer) for layer in self.layers]}

    def plot(self, path: str | Path) -> None:
        """Draw the layers, in the order of their calls: time before and after, what was chosen, and its error."""
        from matplotlib.figure import Figure  # only here: `import dgt` does without

        figure = Figure(figsize=(10, 1.8 + 0.34 * len(self.layers)), layout="constrained")
        times, errors = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        for place, row in enumerate(self.layers):
            times.barh(place - 0.2, row.ms_before, 0.38, color=COLOURS["before"])
            times.barh(place + 0.2, row.ms_after, 0.38, color=COLOURS[row.choice])
            errors.barh(place, 100 * row.error, 0.6, color=COLOURS["groups"])
            text = row.reason or f"{row.groups} groups of {row.keys} keys"
            times.annotate(text, (row.ms_after, place + 0.2), (4, 0), textcoords="offset points", va="center", size=7)
        for label, colour in COLOURS.items():
            times.barh(0, 0, color=colour, label=label)
        times.set_yticks(range(len(self.layers)), [row.name or "(the model)" for row in self.layers], size=7)
        times.invert_yaxis()
        times.set(xlabel="attention, ms an image", xmargin=0.45)  # for the words
        figure.legend(loc="outside lower center", ncols=3)
        errors.set_xlabel("error of this attention, %")
        figure.suptitle(f"model {self.model_speedup:.2f} times faster, error {self.measured_error:.2g}")
        with replacing(path) as partial:
            figure.savefig(partial, format=Path(path).suffix[1:] or "png", dpi=150)

    def save(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write the plan for :func:`apply_plan`, a safetensors file; with centroids of a ``model`` trained since.

        The model may be compiled or wrapped by now; UserError where other layers of it are in groups than the plan's.
        """
        centroids = self.centroids
        if model is not None:
            calls = {name: call.unit_centroids() for name, call in grouped_calls(model).items()}
            own = {name if name in centroids else WRAPPERS.sub("", name).strip("."): calls[name] for name in calls}
            if others := sorted(own.keys() ^ centroids.keys()):
                raise UserError(f"model must have the plan's layers in groups, and no others: not so {others[0]!r}")
            centroids = own
        metadata = {"format": FORMAT, "report": json.dumps(self.to_json())}
        atomic_write(Path(path), safetensors.torch.save(centroids, metadata=metadata))


def check_model(model: nn.Module) -> None:
    """Refuse what is no module, or cannot be accelerated any more."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {describe(model)}")
    if grouped_calls(model):
        raise UserError("model must not be accelerated already: take a fresh one, or apply_plan on one")
    for module in model.modules():  # torch.compile(model), or model.compile() in place
        if type(module).__name__ == "OptimizedModule" or vars(module).get("_compiled_call_impl") is not None:
            raise UserError("model must not be compiled yet: torch.compile comes after accelerate")


def apply_plan(model: nn.Module, path: str | Path) -> Report:
    """Accelerate a model as :func:`accelerate` did another with the same layers, from what its report saved.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: the model is no module, the file is no plan, or its layers are not the model's. The model
            is then as it was.
    """
    check_model(model)
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no plan {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, centroids = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != FORMAT:
            raise UserError(f"{str(path)!r} is no plan of this version ({FORMAT}), but {metadata.get('format')!r}")
        values = json.loads(metadata["report"])
        report = Report(**{**values, "layers": [LayerReport(**row) for row in values["layers"]]}, centroids=centroids)
        rows = {layer.name: layer for layer in report.layers}
        for name, found in centroids.items():
            if found.shape != (rows[name].heads, rows[name].groups, rows[name].channels):
                raise UserError(f"{str(path)!r} is no plan: centroids of {name!r} are {tuple(found.shape)}")
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as broken:
        raise UserError(f"{str(path)!r} is no plan: {broken}") from broken
    modules = dict(model.named_modules())
    if missing := [name for name in rows if name not in modules]:
        raise UserError(f"model must have the plan's layers, but has no {missing[0]!r}")
    if report.alike not in (None, found := count_alike(model, rows)):
        raise UserError(f"model must have the plan's {report.alike} modules that attend, got {found}")
    for name in centroids:
        if report.prefix_told and (told := count_prefix_tokens(model, name) or 0) != (wanted := rows[name].prefix):
            raise UserError(f"model must have the plan's {wanted} class and register tokens at {name!r}, got {told}")
        for size, words in SIZES.items():
            wanted, counts = getattr(rows[name], size), [getattr(modules[name], word, None) for word in words]
            if any(isinstance(count, int) and count != wanted for count in counts):
                raise UserError(f"model must have the plan's {wanted} {size} at {name!r}, got {counts[0] or counts[1]}")
    install_plan(model, rows, centroids)
    return report


def count_alike(model: nn.Module, names: Iterable[str]) -> int:
    """How many modules a model has of the classes that those of these names are of."""
    kinds = {type(model.get_submodule(name)) for name in names}
    return sum(type(module) in kinds for module in model.modules())


@torch.inference_mode(False)  # else what is made here could not be trained
def install_plan(model: nn.Module, rows: dict[str, LayerReport], centroids: dict[str, Tensor]) -> None:
    """Have the layers that have centroids answered by groups, as their rows say."""
    modules = dict(model.named_modules())
    for name, found in centroids.items():
        row = rows[name]
        places = (modules[name], model)  # parts of a model may be on other devices
        device = next((parameter.device for place in places for parameter in place.parameters()), None)
        install(modules[name], GroupedCall(found.to(device), row.keys, row.prefix, (row.tokens + 1) // 2))
