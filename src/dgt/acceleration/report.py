"""The report of an acceleration, as a table, as JSON, or as a figure."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dgt.acceleration.bound import LEAST_INPUTS, error_bound, largest_error, single_errors
from dgt.acceleration.plan_file import FORMAT, to_json
from dgt.acceleration.sites import AttentionSite
from dgt.utils.atomic_write import replacing, write_json

WIDE = 0.2  # of an error: an interval wider than this to either side wants more inputs
COLORS = {"before": "#b8b8b8", "groups": "#2a78b5", "exact": "#3a9d5d", "dense": "#707070"}


@dataclass(frozen=True)
class Report:
    """The result of :func:`dgt.accelerate`.

    Errors are relative, of ``compared_output``: ``|after - before| / |before|``. Speedups are ratios of
    times.
    """

    asked_error: float | None
    """None in a report of :func:`dgt.check_plan`."""
    layers: list[AttentionSite]
    """Every call site, in the order of the calls."""
    predicted_error: float = 0.0
    """On the inputs used to choose settings."""
    predicted_margin: float | None = None
    """Half of the 95 % interval of the predicted error over inputs."""
    measured_error: float = 0.0
    """On the held-out inputs."""
    measured_margin: float | None = None
    error_bound: float = 0.0
    """An upper bound, at 95 %, of the error over many unseen inputs of the same kind together."""
    largest_error: float = 0.0
    """The largest of single inputs, of all that were given."""
    single_error_95: float | None = None
    """What one unseen input in twenty may exceed; None where too few inputs were given to say it."""
    single_error_999: float | None = None
    """What one in a thousand may exceed."""
    attention_speedup: float = 1.0
    model_speedup: float = 1.0
    speedup_limit: float = 1.0
    """The model's speedup if attention took no time."""
    exact_speedup: float | None = None
    """The model's speedup with exact attention alone, as times of single calls predict it; None where
    they were not measured.
    """
    compared_output: str = "the model's output"
    """What the error refers to."""
    cosine_mean: float = 1.0
    """Of the rows of the output, before and after."""
    cosine_low: float = 1.0
    """That of the lowest hundredth of the rows."""
    metric_before: float | None = None
    metric_after: float | None = None
    matching_modules: int | None = None
    """Modules of its layers' classes in the whole model: a plan is for a model with as many."""
    prefix_tokens_detected: bool = False
    """Whether prefix tokens were detected from the model, as they then must be for a plan's model."""
    inputs: int = 0
    guard_checked: int = 0
    """Attention calls of an input that were checked by a guard, over all inputs; 0 without a guard."""
    guard_acted: int = 0
    """Those that took more keys, or dense attention."""
    verdict: str = ""
    """Why there is no speedup, if so."""

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
            found = layer.measurement
            if layer.setting.choice != "dense" and found.dense_ms:
                times = f"{found.error:8.1e}  {found.dense_ms:8.1f} ms {found.setting_ms:8.1f} ms"
            lines.append(
                f"{layer.title:{width}}  {layer.tokens or 'any':>6}  {choice:{column}}  {times}".rstrip()
            )
        return lines

    def _notes(self) -> list[str]:
        notes = sorted({f"note: {layer.note}" for layer in self.layers if layer.note})
        if self.verdict:
            notes.append(f"nothing gained: {self.verdict}")
        if self.guard_checked:
            notes.append(
                f"guard: acted in {self.guard_acted} of {self.guard_checked} attention calls of these "
                "inputs; compiled and exported models run without it"
            )
        # an error below a hundredth of the requested one comes from rounding
        least_error = (self.asked_error or 0.0) / 100
        wide = (self.predicted_margin or 0.0) / max(self.predicted_error, least_error, 1e-30)
        if wide > WIDE:
            times = (wide / WIDE) ** 2
            notes.insert(
                0,
                f"note: {times:.2g} times as many inputs would narrow the error's interval to 20 %",
            )
        return notes

    def _summary(self) -> list[str]:
        if not self.inputs and any(layer.setting.where_faster for layer in self.layers):
            return [
                "exact attention, equal up to rounding, timed at the first call of every shape; "
                "dgt.check_plan measures the speed on inputs"
            ]
        predicted = f"{self.predicted_error:.2g}{_half(self.predicted_margin)}"
        errors = f"{self.measured_error:.2g}{_half(self.measured_margin)}"
        if self.asked_error is not None:
            errors = f"requested {self.asked_error:.2g}, predicted {predicted}, on held-out inputs {errors}"
        lines = [
            f"error of {self.compared_output}: {errors}, at most {self.error_bound:.2g} on many unseen inputs "
            "together (95 %)",
            *self._of_single_inputs(),
            f"cosine: mean {self.cosine_mean:.5f}, lowest hundredth {self.cosine_low:.5f}",
        ]
        if self.metric_before is not None and self.metric_after is not None:
            lines.append(f"metric: {self.metric_before:.6g} before, {self.metric_after:.6g} after")
        exact = ""
        if self.exact_speedup is not None:
            exact = f"with exact attention alone about {self.exact_speedup:.2f}x, "
        lines.append(
            f"speedup: attention {self.attention_speedup:.2f}x, model {self.model_speedup:.2f}x "
            f"({exact}without any attention {self.speedup_limit:.2f}x)"
        )
        return lines

    def _of_single_inputs(self) -> list[str]:
        """What single inputs may have; nothing where attention is exact, or for a plan that does not say."""
        if not self.error_bound or not self.inputs:
            return []
        largest = f"single inputs: at most {self.largest_error:.2g} on these"
        if self.inputs < LEAST_INPUTS:
            return [
                f"{largest}; what unseen ones may have takes {LEAST_INPUTS} inputs or more to say"
            ]
        if self.single_error_95 is None:
            return []
        return [
            f"{largest}; of unseen ones one in twenty may have {self.single_error_95:.2g} or more, "
            f"one in a thousand {self.single_error_999:.2g} (extrapolated from {self.inputs})"
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return to_json({field.name: getattr(self, field.name) for field in fields(self)})

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
        for place, layer in enumerate(self.layers):
            measurement = layer.measurement
            times.barh(place - 0.2, measurement.dense_ms, 0.38, color=COLORS["before"])
            times.barh(
                place + 0.2, measurement.setting_ms, 0.38, color=COLORS[layer.setting.choice]
            )
            errors.barh(place, 100 * measurement.error, 0.6, color=COLORS["groups"])
            times.annotate(
                choice_in_words(layer).removeprefix("dense: "),
                (measurement.setting_ms, place + 0.2),
                (4, 0),
                textcoords="offset points",
                va="center",
                size=7,
            )
        for label, color in COLORS.items():
            times.barh(0, 0, color=color, label=label)
        times.set_yticks(range(len(self.layers)), [layer.title for layer in self.layers], size=7)
        times.invert_yaxis()
        times.set(xlabel="attention, ms per input", xmargin=0.45)  # for the words
        figure.legend(loc="outside lower center", ncols=len(COLORS))
        errors.set_xlabel("error of this attention, %")
        figure.suptitle(f"model {self.model_speedup:.2f}x as fast, error {self.measured_error:.2g}")
        with replacing(path) as partial:
            figure.savefig(partial, format=Path(path).suffix[1:] or "png", dpi=150)

    def save(self, path: str | Path) -> None:
        """Write the plan for :func:`dgt.apply_plan`, a JSON file.

        Args:
            path: where to.
        """
        write_json(path, {"format": FORMAT, "report": self.to_json()})


def with_errors(report: Report, squares: Tensor, cosines: Tensor) -> Report:
    """A report with what the errors of some inputs say of many together and of single ones.

    Args:
        report: without it.
        squares: (inputs, 2), as :func:`dgt.acceleration.bound.squares_between`.
        cosines: of the rows of their outputs.
    """
    in_twenty, in_thousand = single_errors(squares)
    return replace(
        report,
        error_bound=error_bound(squares),
        largest_error=largest_error(squares),
        single_error_95=in_twenty,
        single_error_999=in_thousand,
        cosine_mean=float(cosines.mean()),
        cosine_low=float(cosines.quantile(0.01)),
    )


def choice_in_words(site: AttentionSite) -> str:
    """What was chosen for a call site, or why nothing was."""
    is_dense = site.setting.choice == "dense"
    return f"dense: {site.reason}" if is_dense else str(site.setting)


def _half(half: float | None) -> str:
    return f" ± {half:.1g}" if half else ""
