"""The report of an acceleration, as a table, as JSON, or as a figure."""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dgt.acceleration.grouped import choice_in_words
from dgt.acceleration.settings import LayerReport
from dgt.utils.atomic_write import atomic_write, replacing

FORMAT = "dgt-plan-2"
WIDE = 0.2  # of an error: an interval wider than this to either side wants more inputs
FILE_KEYS = {  # fields that plans and result files hold under their earlier names
    "requested_error": "asked_error",
    "matching_modules": "alike",
    "special_tokens_detected": "prefix_told",
    "predicted_margin": "predicted_half",
    "measured_margin": "measured_half",
}
COLORS = {"before": "#b8b8b8", "groups": "#2a78b5", "exact": "#3a9d5d", "dense": "#707070"}


@dataclass(frozen=True)
class Report:
    """The result of :func:`dgt.accelerate`.

    Errors are relative, of ``measured``: ``|after - before| / |before|``. Speedups are ratios of
    times.
    """

    requested_error: float
    predicted_error: float
    """On the inputs used to choose settings."""
    measured_error: float
    """On the held-out inputs."""
    attention_speedup: float
    model_speedup: float
    bound: float
    """The model's speedup if attention took no time."""
    layers: list[LayerReport]
    """One row for every call site, in the order of the calls."""
    predicted_margin: float | None = None
    """Half of the 95 % interval of the predicted error over inputs."""
    measured_margin: float | None = None
    matching_modules: int | None = None
    """Modules of its layers' classes in the whole model: a plan is for a model with as many."""
    special_tokens_detected: bool = False
    """Whether special tokens were detected from the model, as they then must be for a plan's model."""
    error_bound: float = 0.0
    """An upper bound, at 95 %, of the error over unseen inputs of the same kind."""
    measured: str = "the model's output"
    """What the error refers to."""
    cosine_mean: float = 1.0
    """Of the rows of the output, before and after."""
    cosine_low: float = 1.0
    """That of the lowest hundredth of the rows."""
    metric_before: float | None = None
    metric_after: float | None = None
    inputs: int = 0
    verdict: str = ""
    """Why there is no speedup, if so."""

    def __getattr__(self, name: str) -> Any:
        for field, old in FILE_KEYS.items():
            if name == old:
                warnings.warn(f"{old} was renamed to {field}", DeprecationWarning, stacklevel=2)
                return getattr(self, field)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __str__(self) -> str:
        return "\n".join([*self._table(), *self._notes(), *self._summary()])

    def _table(self) -> list[str]:
        """A line for every call site."""
        width = max((len(layer.title) for layer in self.layers), default=0)
        words = [choice_in_words(layer) for layer in self.layers]
        column = min(48, max((len(choice) for choice in words), default=6))
        lines = [f"{'layer':{width}}  tokens  {'choice':{column}}     error       before     after"]
        for layer, choice in zip(self.layers, words, strict=True):
            times = ""
            if layer.choice != "dense":
                times = f"{layer.error:8.1e}  {layer.ms_before:8.1f} ms {layer.ms_after:8.1f} ms"
            lines.append(
                f"{layer.title:{width}}  {layer.tokens:6d}  {choice:{column}}  {times}".rstrip()
            )
        return lines

    def _notes(self) -> list[str]:
        notes = sorted({f"note: {layer.note}" for layer in self.layers if layer.note})
        if self.verdict:
            notes.append(f"nothing gained: {self.verdict}")
        # an error below a hundredth of the requested one comes from rounding
        wide = (self.predicted_margin or 0.0) / max(
            self.predicted_error, self.requested_error / 100, 1e-30
        )
        if wide > WIDE:
            times = (wide / WIDE) ** 2
            notes.insert(
                0,
                f"note: {times:.2g} times as many inputs would narrow the error's interval to 20 %",
            )
        return notes

    def _summary(self) -> list[str]:
        predicted = f"{self.predicted_error:.2g}{_half(self.predicted_margin)}"
        held_out = f"{self.measured_error:.2g}{_half(self.measured_margin)}"
        lines = [
            f"error of {self.measured}: requested {self.requested_error:.2g}, predicted {predicted}, "
            f"on held-out inputs {held_out}, at most {self.error_bound:.2g} on unseen inputs (95 %)",
            f"cosine: mean {self.cosine_mean:.5f}, lowest hundredth {self.cosine_low:.5f}",
        ]
        if self.metric_before is not None and self.metric_after is not None:
            lines.append(f"metric: {self.metric_before:.6g} before, {self.metric_after:.6g} after")
        lines.append(
            f"speedup: attention {self.attention_speedup:.2f}x, model {self.model_speedup:.2f}x "
            f"(without any attention: {self.bound:.2f}x)"
        )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values; some keys have an earlier name (`FILE_KEYS`)."""
        return {FILE_KEYS.get(field, field): value for field, value in asdict(self).items()}

    def plot(self, path: str | Path) -> None:
        """Plot the call sites in order: time before and after, the chosen setting, and its error.

        Args:
            path: a file whose ending Matplotlib knows.

        Raises:
            ValueError: for another ending.
        """
        from matplotlib.figure import Figure  # only here: `import dgt` does without

        figure = Figure(figsize=(10, 1.8 + 0.34 * len(self.layers)), layout="constrained")
        times, errors = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        for place, row in enumerate(self.layers):
            times.barh(place - 0.2, row.ms_before, 0.38, color=COLORS["before"])
            times.barh(place + 0.2, row.ms_after, 0.38, color=COLORS[row.choice])
            errors.barh(place, 100 * row.error, 0.6, color=COLORS["groups"])
            times.annotate(
                choice_in_words(row).removeprefix("dense: "),
                (row.ms_after, place + 0.2),
                (4, 0),
                textcoords="offset points",
                va="center",
                size=7,
            )
        for label, color in COLORS.items():
            times.barh(0, 0, color=color, label=label)
        times.set_yticks(range(len(self.layers)), [row.title for row in self.layers], size=7)
        times.invert_yaxis()
        times.set(xlabel="attention, ms per input", xmargin=0.45)  # for the words
        figure.legend(loc="outside lower center", ncols=len(COLORS))
        errors.set_xlabel("error of this attention, %")
        figure.suptitle(f"model {self.model_speedup:.2f}x as fast, error {self.measured_error:.2g}")
        with replacing(path) as partial:
            figure.savefig(partial, format=Path(path).suffix[1:] or "png", dpi=150)

    def save(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Write the plan for :func:`dgt.apply_plan`, a JSON file.

        Args:
            path: where to.
            model: no longer needed, for a plan holds nothing that training changes; it warns.
        """
        if model is not None:
            warnings.warn(
                "model is ignored: saving a plan no longer needs it",
                DeprecationWarning,
                stacklevel=2,
            )
        text = json.dumps({"format": FORMAT, "report": self.to_json()}, indent=1)
        atomic_write(Path(path), text.encode())


def _half(half: float | None) -> str:
    return f" ± {half:.1g}" if half else ""
