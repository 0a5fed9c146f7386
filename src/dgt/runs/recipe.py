"""Recipes: one YAML file per experiment, checked key by key before anything runs.

Whatever a recipe leaves out has the default written here; `data` takes the arguments of the task's
data module. `base` names another recipe whose keys it takes and changes, section by section. Every
key but `base` can be set on the command line as `--section.key value`. Any mistake is one sentence
that names the key, a `UserError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jsonargparse
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from dgt.tasks import TASKS
from dgt.tasks.network import ModelSettings
from dgt.tasks.optim import OptimizerSettings, ScheduleSettings
from dgt.utils.errors import UserError, check_range
from dgt_command import recipe_files
from dgt_command.recipe_files import RECIPES, flatten, override_keys

__all__ = ["RECIPES", "flatten", "override_keys"]


@dataclass(frozen=True)
class EmaSettings:
    """Exponential moving average of the weights, which is then what is evaluated and exported.

    Args:
        decay: share kept at each step, stated at batch 1024: its power (global batch / 1024) is
            used; null for none.
    """

    decay: float | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """Where and how the training runs.

    Args:
        accelerator: auto, cpu, gpu or another that Lightning knows.
        devices: number of devices on each machine, or auto for all.
        num_nodes: number of machines.
        precision: auto is bf16-mixed on a GPU that has it and 32-true elsewhere.
        strategy: auto, ddp, fsdp2 (the weights are shared out among the processes) or another that
            Lightning knows.
        sync_batchnorm: let BatchNorm count over the batches of all processes, not of each alone; on
            GPUs.
        accumulate: batches per optimizer step.
        check_val_every: epochs between two validations; the last epoch is always validated.
        deterministic: use deterministic algorithms alone.
        compile: run the network through torch.compile.
        max_skipped: steps in a row, less than an epoch's, that may be not finite and skipped; null
            looks at nothing.
        pictures_every: epochs between two drawings of predictions and groups for TensorBoard; null
            draws none.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: PositiveInt = 1
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "auto"
    strategy: str = "auto"
    sync_batchnorm: bool = False
    accumulate: PositiveInt = 1
    check_val_every: PositiveInt = 1
    deterministic: bool = False
    compile: bool = False
    max_skipped: NonNegativeInt | None = 10
    pictures_every: PositiveInt | None = 10


@dataclass(frozen=True)
class CheckpointSettings:
    """How often the state of the training is saved. The best validation and the end are saved always.

    Args:
        every_epochs: epochs between two checkpoints; null for none at the end of epochs.
        every_steps: optimizer steps between two; null for none.
        every_minutes: minutes between two, at the next step that ends; null for none.
        keep: how many are kept, the newest; where the newest is damaged the one before serves.
    """

    every_epochs: PositiveInt | None = 1
    every_steps: PositiveInt | None = None
    every_minutes: PositiveFloat | None = 30.0
    keep: PositiveInt = 2


@dataclass(frozen=True)
class Recipe:
    """One experiment, complete.

    Args:
        name: file name of the recipe without its ending.
        task: classify, segment or detect.
        seed: every random choice follows from it.
        out: folder of the run; null for runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ...
            that is free.
        data: arguments of the task's data module, as plain values.
    """

    name: str = "recipe"
    task: str = "classify"
    seed: int = 0
    out: str | None = None
    model: ModelSettings = field(default_factory=ModelSettings)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    ema: EmaSettings = field(default_factory=EmaSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def __post_init__(self) -> None:
        if not self.name.strip("./"):
            raise UserError(f"name must be a valid folder name, got {self.name!r}")
        check_range(0, 2**32 - 1, seed=self.seed)
        if self.ema.decay is not None and not 0 <= self.ema.decay < 1:
            raise UserError(f"ema.decay must be null or in [0, 1), got {self.ema.decay!r}")
        if self.trainer.compile and self.model.top_k_schedule is not None:
            raise UserError(
                "model.top_k_schedule must be null with trainer.compile: every k would trigger a recompilation"
            )
        if self.trainer.strategy == "fsdp2" and self.ema.decay is not None:
            raise UserError(
                "ema.decay must be null with trainer.strategy fsdp2: averaging sharded weights is not supported"
            )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as nested plain values, ready for YAML or JSON."""
        return dict(_plain(asdict(self)))


def shipped_recipes(folder: Path = RECIPES) -> list[str]:
    """Names of the recipes inside the package, or of the YAML files of another folder, sorted.

    Args:
        folder: holds recipes; by default those of the package.

    Returns:
        Names without their ending.

    Example:
        >>> "imagenette_nano" in shipped_recipes()
        True
    """
    return recipe_files.shipped(folder)


def help_text(task: str = "classify") -> str:
    """The help text of `dgt train RECIPE --help`: all keys of the recipe's task. `dgt train --help`
    lists the recipes.
    """
    usage = "usage: dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]"
    return f"{usage}\n\nkeys of task {task!r}, each with its default:\n{recipe_parser(task).format_help()}"


@cache
def recipe_parser(task: str = "classify") -> jsonargparse.ArgumentParser:
    """The parser of recipes of one task: it knows every key with its type, default and description."""
    if task not in TASKS:
        raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    parser = jsonargparse.ArgumentParser(
        exit_on_error=False, add_help=False, usage=jsonargparse.SUPPRESS
    )
    parser.add_class_arguments(Recipe, skip={"data"})
    parser.add_class_arguments(TASKS[task].data, "data", skip={"seed"}, instantiate=False)
    parser.set_defaults(task=task)
    return parser


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply the command line's changes.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: as on the command line: `["--data.root", "images", "--schedule.epochs=5"]`.

    Returns:
        The recipe, all keys checked.

    Raises:
        FileNotFoundError: there is no such recipe.
        UserError: the file is no YAML in UTF-8 or no mapping; a key is unknown; a value has a wrong
            type or is out of range.

    Example:
        >>> from dgt.runs import load_recipe
        >>> load_recipe("scenes", ["--schedule.epochs=5"]).schedule.epochs
        5
    """
    try:
        values = recipe_files.read_recipe(recipe)
    except recipe_files.RecipeFileError as error:
        raise UserError(str(error)) from error
    return parse_recipe(values, overrides)


def read_yaml(what: str, name: str | Path, folder: Path = RECIPES) -> tuple[Path, dict[str, Any]]:
    """Find and read a YAML file.

    Args:
        what: what it is, for messages: "recipe", "table".
        name: name of one shipped in `folder`, or path of a file.
        folder: where the shipped ones are.

    Returns:
        The file and what it holds.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it is no YAML in UTF-8, or no mapping.
    """
    path = recipe_files.find_file(what, name, folder)
    try:
        return path, recipe_files.read_yaml(what, path)
    except recipe_files.RecipeFileError as error:
        raise UserError(str(error)) from error


def parse_recipe(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Check the nested values of a recipe and apply the command line's changes.

    Args:
        values: as a YAML file holds them; what is missing has its default.
        overrides: as on the command line.

    Raises:
        UserError: as `load_recipe`.
    """
    task = str(values.get("task", "classify"))
    parser = recipe_parser(task)
    changed = override_keys(overrides)
    given = flatten(values) | {key: {} for key in changed}
    mistake = recipe_files.wrong_key(given, flatten(parser.get_defaults().as_dict()))
    if mistake is not None:
        raise UserError(mistake)
    if "model.name" in changed and isinstance(values.get("model"), Mapping):
        values = {**values, "model": {**values["model"], "args": {}}}
    try:
        parsed = parser.parse_args(list(overrides), namespace=parser.parse_object(dict(values)))
        parser.validate(parsed, False)  # also what is null: only keys that may be
    except (jsonargparse.ArgumentError, TypeError) as error:
        message = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", str(error).removeprefix("Parser "))
        raise UserError(f"recipe: {' '.join(message.split())}") from error
    if parsed.task != task:  # the keys of `data` are the task's
        raise UserError(
            f"task must stay the recipe's, {task!r}, got {parsed.task!r}: take a recipe of that task"
        )
    sections = vars(parser.instantiate(parsed))
    sections["data"] = _plain(parsed.data.as_dict())
    return Recipe(**sections)


def build_data(recipe: Recipe) -> Any:
    """The recipe's data module, not yet set up; its seed is the recipe's.

    UserError where an argument of the data module is out of range, or the images' place is not
    given.
    """
    data = TASKS[recipe.task].data
    if recipe.data["root"] is None and recipe.data.get("dataset") != "scenes":
        raise UserError(f"recipe {recipe.name!r} needs images: give --data.root, {data.root_holds}")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(data, "data")
    return parser.instantiate(parser.parse_object({"data": {**recipe.data, "seed": recipe.seed}}))[
        "data"
    ]


def _plain(values: Any) -> Any:
    """Nested tuples, paths and restricted numbers as what YAML and JSON can hold."""
    return json.loads(json.dumps(values, default=str))
