"""From what was measured of a model to the report of it."""

from dataclasses import replace

from dgt.acceleration.capture import Capture, split_inputs
from dgt.acceleration.confirm import Outcome
from dgt.acceleration.plan import count_alike
from dgt.acceleration.report import Report
from dgt.acceleration.statistics import half_interval, relative_error
from dgt.acceleration.task import Task


def report_of(task: Task, found: Capture, outcome: Outcome) -> Report:
    """Put together what is reported; nothing was gained where there is no choice.

    Args:
        task: what was asked for.
        found: what was captured of the model.
        outcome: what was done with it.

    Returns:
        The report.
    """
    rows, confirmed, times = outcome.rows, outcome.confirmed, outcome.times
    bound = found.bound
    if times is not None:
        whole = times[0].ms
        bound = whole / max(whole - times[0].attention_ms, 1e-9)
    report = Report(
        requested_error=task.error,
        predicted_error=0.0,
        measured_error=0.0,
        attention_speedup=1.0,
        model_speedup=1.0,
        bound=bound,
        layers=rows,
        matching_modules=count_alike(task.model, [row.name for row in rows]),
        special_tokens_detected=task.special_tokens is None,
        measured=task.measured,
        metric_before=None if confirmed is None else found.metric,
        inputs=len(task.items),
        verdict=found.verdict or "",
    )
    if confirmed is None or times is None:
        return report
    choosing, held_out = split_inputs(len(task.items))
    return replace(
        report,
        predicted_error=relative_error(confirmed.squares[choosing]),
        predicted_margin=half_interval(confirmed.squares[choosing]),
        measured_error=relative_error(confirmed.squares[held_out]),
        measured_margin=half_interval(confirmed.squares[held_out]),
        error_bound=confirmed.bound,
        cosine_mean=float(confirmed.cosines.mean()),
        cosine_low=float(confirmed.cosines.quantile(0.01)),
        attention_speedup=times[0].attention_ms / max(times[1].attention_ms, 1e-9),
        model_speedup=times[0].ms / times[1].ms,
        metric_after=task.measure(confirmed.raw),
    )
