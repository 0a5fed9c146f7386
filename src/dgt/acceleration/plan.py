"""Apply a saved plan to another model with the same layers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from dgt.acceleration.bypass import bypass_at
from dgt.acceleration.grouped import install_rows
from dgt.acceleration.intercept import original_class
from dgt.acceleration.report import FILE_KEYS, FORMAT, Report
from dgt.acceleration.settings import LayerReport
from dgt.acceleration.special_tokens import count_special_tokens
from dgt.acceleration.task import check_model
from dgt.utils.errors import UserError

OLD_FORMAT = "dgt-plan-1"  # a safetensors file with centroids, without residual keys
SIZES = {  # of an attention, under the names that its module may have them
    "heads": ("num_heads", "num_attention_heads"),
    "channels": ("head_dim", "attention_head_size"),
}
COUNTS = ("heads", "tokens", "key_tokens", "channels", "calls")
CHOICES = ("dense", "exact", "groups")


def apply_plan(model: nn.Module, path: str | Path) -> Report:
    """Apply a plan saved by a report of :func:`dgt.accelerate` to a model with the same layers.

    Args:
        model: as it was before; its weights stay.
        path: of the plan.

    Returns:
        The report of the model that the plan was found with.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError: the model is no module, the file is no plan or one of an older
            version, or its layers are not the model's. The model is then as it was.

    Example:
        >>> report.save("plan.json")
        >>> dgt.apply_plan(another_model, "plan.json")
    """
    check_model(model)
    if not Path(path).is_file():
        raise FileNotFoundError(f"plan {str(path)!r} does not exist")
    report = read_plan(path)
    check_layers(model, report)
    install_rows(model, report.layers)
    return report


def read_plan(path: str | Path) -> Report:
    """Read a plan. Raises ValueError if the file is not a plan, or from an older version."""
    name = str(path)
    try:
        found = json.loads(Path(path).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as broken:
        if old_format(path) == OLD_FORMAT:
            raise UserError(
                f"{name!r} is a plan from an older version, with centroids that are no longer used: "
                "run dgt.accelerate again"
            ) from broken
        raise UserError(f"{name!r} is not a valid plan: {broken}") from broken
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{name!r} is not a plan of this version ({FORMAT})")
    try:
        values = found["report"]
        layers = [LayerReport(**row) for row in values["layers"]]
        for row in layers:
            check_row(row)
        fields = {old: field for field, old in FILE_KEYS.items()}
        named = {fields.get(key, key): value for key, value in values.items()}
        return Report(**(named | {"layers": layers}))
    except (KeyError, TypeError, ValueError) as broken:
        raise UserError(f"{name!r} is not a valid plan: {broken}") from broken


def old_format(path: str | Path) -> str | None:
    """The format given in a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format")
    except (SafetensorError, OSError):
        return None


def check_row(row: LayerReport) -> None:
    """Reject an invalid row."""
    if row.choice not in CHOICES:
        raise UserError(f"the choice of {row.name!r} is {row.choice!r}")
    wanted = [*COUNTS, "groups", "keys"] if row.choice == "groups" else []
    for name in wanted:
        if not is_count(getattr(row, name), 1):
            raise UserError(f"{name} of {row.name!r} are {getattr(row, name)!r}")
    for name in ("call", "prefix", "residual_keys", "least_tokens"):
        if not is_count(getattr(row, name), 0):
            raise UserError(f"{name} of {row.name!r} are {getattr(row, name)!r}")


def is_count(value: Any, least: int) -> bool:
    """Whether a value is an integer of at least this size."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_layers(model: nn.Module, report: Report) -> None:
    """Reject a model whose layers differ from the plan's."""
    modules = dict(model.named_modules())
    missing = [row.name for row in report.layers if row.name not in modules]
    if missing:
        raise UserError(f"model must have the plan's layers, but has no {missing[0]!r}")
    found = count_alike(model, [row.name for row in report.layers])
    if report.matching_modules not in (None, found):
        raise UserError(
            f"model must have the plan's {report.matching_modules} attention modules, got {found}"
        )
    for row in report.layers:
        cause = None if row.choice == "dense" else bypass_at(model, row.name)
        if cause is not None:
            raise UserError(
                f"model must call F.scaled_dot_product_attention at {row.name!r}, but {cause}"
            )
        if row.choice == "groups":
            check_sizes(modules[row.name], row)
            told = count_special_tokens(model, row.name) or 0
            if (
                report.special_tokens_detected
                and row.tokens == row.key_tokens
                and told != row.prefix
            ):
                raise UserError(
                    f"model must have the plan's {row.prefix} class and register tokens at {row.name!r}, "
                    f"got {told}"
                )


def check_sizes(module: nn.Module, row: LayerReport) -> None:
    """Reject attention whose heads or channels are known and differ from a row's."""
    for size, words in SIZES.items():
        wanted = getattr(row, size)
        counts = [getattr(module, word, None) for word in words]
        for count in counts:
            if isinstance(count, int) and count != wanted:
                raise UserError(
                    f"model must have the plan's {wanted} {size} at {row.name!r}, got {count}"
                )


def count_alike(model: nn.Module, names: Iterable[str]) -> int:
    """The number of modules of the same classes as the named ones."""
    kinds = {original_class(model.get_submodule(name)) for name in names}
    return sum(original_class(module) in kinds for module in model.modules())
