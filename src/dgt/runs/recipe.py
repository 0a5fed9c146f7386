"""Recipes: one YAML file per experiment, checked key by key before anything runs.

Whatever a recipe leaves out has the default written here; `data` takes the arguments of the task's
data module. `base` names another recipe whose keys it takes and changes, section by section. Every
key but `base` can be set on the command line as `--section.key value`. Values have the type of their
key: a text is taken as it is written, with the home folder for a leading `~/` of a place; numbers,
true, false and null are those of YAML 1.2. Any mistake is one sentence that names the key, a
`UserError`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from dgt.data.classification import ClassificationData
from dgt.data.module import ImageData
from dgt.runs import settings
from dgt.runs.settings import Key
from dgt.tasks import TASKS
from dgt.tasks.network import ModelSettings
from dgt.tasks.optim import OptimizerSettings, ScheduleSettings, unused_settings
from dgt.utils.errors import UserError, check_range

RECIPES = Path(__file__).parents[1] / "recipes"
NOT_INHERITED = ("name", "out")  # a recipe's own, never those of its base
PLACES = ("out", "data.root", "model.init_from")  # keys of files and folders
SPLITS = ("data.train_split", "data.val_split")
REPLACED_BY: dict[str, tuple[str, int | None]] = {
    "schedule.epochs": ("schedule.steps", None),
    "schedule.warmup_epochs": ("schedule.warmup_steps", None),
    "data.augmentation.color_jitter": ("data.augmentation.rand_augment", None),
    "data.augmentation.min_scale": ("data.augmentation.pad_crop", 0),
}
"""Keys, and those that take their place unless they have the value beside them."""


@dataclass(frozen=True)
class EmaSettings:
    """Exponential moving average of the weights, which is then what is evaluated and exported.

    Args:
        decay: share kept at each step, stated at batch 1024: its power (global batch / 1024) is
            used; null for none. The weights before the first step are no part of the average.
    """

    decay: float | None = None


@dataclass(frozen=True)
class TrainerSettings:
    """Where and how the training runs.

    Args:
        accelerator: auto, cpu, gpu or another that Lightning knows.
        devices: number of devices on each machine, or auto for all.
        num_nodes: number of machines.
        precision: auto is bf16-mixed on a GPU that has it and 32-true elsewhere; 16-mixed is 32-true
            on a CPU, and bf16-mixed on one without units for bfloat16. The run's results say which
            was used.
        strategy: auto, ddp, fsdp2 (the weights are shared out among the processes) or another that
            Lightning knows.
        sync_batchnorm: let BatchNorm count over the batches of all processes, not of each alone; on
            GPUs.
        accumulate: batches per optimizer step.
        check_val_every: epochs between two validations; the last epoch is always validated.
        deterministic: use deterministic algorithms alone; an error where an operation has none, as of
            segmenters on GPUs.
        compile: run the network through torch.compile.
        max_skipped: steps in a row, less than an epoch's, that may be not finite and skipped; null
            looks at nothing.
        pictures_every: epochs between two drawings of predictions and groups for TensorBoard; null
            draws none.
        tracker: a tracker that gets the numbers and the recipe, beside TensorBoard: wandb or
            trackio, whose package must be installed; null for none.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "auto"
    strategy: str = "auto"
    sync_batchnorm: bool = False
    accumulate: int = 1
    check_val_every: int = 1
    deterministic: bool = False
    compile: bool = False
    max_skipped: int | None = 10
    pictures_every: int | None = 10
    tracker: Literal["wandb", "trackio"] | None = None

    def __post_init__(self) -> None:
        check_range(
            1,
            section="trainer",
            num_nodes=self.num_nodes,
            accumulate=self.accumulate,
            check_val_every=self.check_val_every,
            pictures_every=self.pictures_every,
        )
        check_range(0, section="trainer", max_skipped=self.max_skipped)


@dataclass(frozen=True)
class CheckpointSettings:
    """How often the state of the training is saved. The best validation and the end are saved always.

    Args:
        every_epochs: epochs between two checkpoints; null for none at the end of epochs.
        every_steps: optimizer steps between two; null for none.
        every_minutes: minutes between two, at the next step that ends; null for none.
        keep: how many are kept, the newest; where the newest is damaged the one before serves.
    """

    every_epochs: int | None = 1
    every_steps: int | None = None
    every_minutes: float | None = 30.0
    keep: int = 2

    def __post_init__(self) -> None:
        check_range(
            1,
            section="checkpoint",
            every_epochs=self.every_epochs,
            every_steps=self.every_steps,
            keep=self.keep,
        )
        minutes = self.every_minutes
        if minutes is not None and not minutes > 0:
            raise UserError(f"checkpoint.every_minutes must be null or above 0, got {minutes}")


@dataclass(frozen=True)
class Recipe:
    """One experiment, complete.

    Args:
        name: file name of the recipe without its ending.
        task: classify, segment or detect.
        seed: every random choice follows from it.
        out: folder of the run; null for runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ...
            that is free.
        data: the task's data module as `build_data` copies it, never set up itself.
    """

    name: str = "recipe"
    task: str = "classify"
    seed: int = 0
    out: str | None = None
    model: ModelSettings = field(default_factory=ModelSettings)
    data: ImageData = field(default_factory=ClassificationData)
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
        values = {key: attrgetter(key)(self) for key in recipe_keys(self.task)}
        # nested tuples and restricted numbers as what YAML and JSON can hold
        return dict(json.loads(json.dumps(settings.nested(values), default=str)))


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
    return sorted(path.stem for path in folder.glob("*.yaml"))


def recipe_keys(task: str) -> dict[str, Key]:
    """All keys of a task's recipes."""
    if task not in TASKS:
        raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    return settings.keys_of(Recipe, skip=["data.seed"], data=TASKS[task].data)


def help_text(task: str = "classify") -> str:
    """The help text of `dgt train RECIPE --help`: all keys of the recipe's task. `dgt train --help`
    lists the recipes.
    """
    usage = "usage: dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]"
    return f"{usage}\n\nkeys of task {task!r}:\n{settings.help_text(recipe_keys(task))}"


def load_recipe(recipe: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Read a recipe and apply the command line's changes.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: as on the command line, `["--data.root", "images", "--schedule.epochs=5"]`, or
            values by key, `{"data.root": "images", "schedule.epochs": 5}`.

    Returns:
        The recipe, all keys checked.

    Raises:
        FileNotFoundError: there is no such recipe.
        TypeError: `overrides` is one string.
        UserError: the file is no YAML in UTF-8 or no mapping; a key is unknown; a value has a wrong
            type or is out of range.

    Example:
        >>> from dgt.runs import load_recipe
        >>> load_recipe("scenes", ["--schedule.epochs=5"]).schedule.epochs
        5
    """
    path, values = read_yaml("recipe", recipe)
    seen, own = {path.resolve()}, set[str]()
    while "base" in values:
        base = home(str(values.pop("base")))
        beside = path.parent / base
        path, below = read_yaml("recipe", beside if base.endswith((".yaml", ".yml")) else base)
        if path.resolve() in seen:
            raise UserError(f"recipe {str(recipe)!r} has itself as a base, through {str(path)!r}")
        seen.add(path.resolve())
        inherited = {key: value for key, value in below.items() if key not in NOT_INHERITED}
        own.update(flatten(values))
        values = _merged(inherited, values)
    parsed = parse_recipe({"name": Path(recipe).stem, **values}, overrides)
    _check_effects(parsed, own.union(changes_of(overrides)))
    return parsed


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above` in place of its own, section by section.

    An empty one inherits nothing.
    """
    merged = {**below, **above}
    for key, value in above.items():
        inherited = below.get(key)
        if value and isinstance(value, Mapping) and isinstance(inherited, Mapping):
            merged[key] = _merged(inherited, value)
    return merged


def read_yaml(what: str, name: str | Path, folder: Path = RECIPES) -> tuple[Path, dict[str, Any]]:
    """Find and read a YAML file.

    Args:
        what: what it is, for messages: "recipe", "table".
        name: name of one shipped in `folder`, or path of a file.
        folder: where the shipped ones are.

    Returns:
        The file and what it holds, with `settings.Plain` for scalars without quotes.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: it is no YAML in UTF-8, or no mapping.
    """
    path = Path(home(str(name)))
    if not path.is_file():
        known = shipped_recipes(folder)
        if str(name) not in known:
            expected = f"expected one of {', '.join(known)}, or the path of a YAML file"
            hint = _did_you_mean(str(name), known)
            raise FileNotFoundError(f"there is no {what} {str(name)!r}: {hint}{expected}")
        path = folder / f"{name}.yaml"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), settings.Loader)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{what} {str(path)!r} is not valid UTF-8 YAML: {reason}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        came = values.value() if isinstance(values, settings.Plain) else values
        raise UserError(
            f"{what} {str(path)!r} must be a mapping of keys, got {type(came).__name__}"
        )
    return path, values


def home(place: str) -> str:
    """A place with the home folder for a leading `~/`, which shells put in only at the start of a
    word.
    """
    return str(Path(place).expanduser()) if place.startswith("~/") or place == "~" else place


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The start of a hint with the most similar known name; empty if none is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by the keys of a command line.

    Example:
        >>> flatten({"a": {"b": 1}})
        {'a.b': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changes_of(overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The recipe keys that the words of a command line set, or a mapping, with their values.

    TypeError for one string.
    """
    if isinstance(overrides, str):
        raise TypeError(
            f"overrides must be a sequence of words, ['--key', 'value'], got the string {overrides!r}"
        )
    if isinstance(overrides, Mapping):
        return dict(overrides)
    changes: dict[str, Any] = {}
    for key, value in settings.pairs_of(overrides):
        changes.pop(key, None)  # the last one counts, in its place among the others
        changes[key] = value
    return changes


def parse_recipe(
    values: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """Check the nested values of a recipe and apply the command line's changes.

    Args:
        values: as a YAML file holds them; what is missing has its default.
        overrides: as of `load_recipe`.

    Raises:
        TypeError, UserError: as `load_recipe`.
    """
    changes = changes_of(overrides)
    task = str(values.get("task", "classify"))
    known = recipe_keys(task)
    model = values.get("model")
    if isinstance(model, Mapping):
        name = model.get("name", known["model.name"].default)
        if changes.get("model.name", name) != name:
            values = {**values, "model": {**model, "args": {}}}
    checked = settings.check_values(values, known, changes.items())
    for key in (*PLACES, *SPLITS):
        # of which Python makes the folder that one is in, and a data module the usual split
        if checked[key] == "":
            kind = "path" if key in PLACES else "name"
            raise UserError(f"{key} must be a {kind} or null, got an empty text")
    for key in PLACES:
        if checked[key] is not None:
            checked[key] = home(checked[key])
    if checked["task"] != task:  # the keys of `data` are the task's
        raise UserError(
            f"task must stay the recipe's, {task!r}, got {checked['task']!r}: take a recipe of that task"
        )
    recipe = settings.build(Recipe, settings.nested(checked), data=TASKS[task].data)
    _check_effects(recipe, changes)
    return recipe


def _check_effects(recipe: Recipe, given: Iterable[str]) -> None:
    """UserError for one of the keys that somebody gave beside what a recipe has, where it has no effect
    there.
    """
    given = set(given)
    for key, (other, unset) in REPLACED_BY.items():
        if key in given and other not in given and attrgetter(other)(recipe) != unset:
            raise UserError(
                f"{key} has no effect while {other} is {attrgetter(other)(recipe)}: change that, or set it "
                f"to {'null' if unset is None else unset}"
            )
    for name in unused_settings(recipe.optimizer):
        if f"optimizer.{name}" in given:
            raise UserError(
                f"optimizer.{name} has no effect: the optimizer {recipe.optimizer.name!r} does not take it; "
                "optimizer.args holds further arguments of an optimizer"
            )


def build_data(recipe: Recipe) -> Any:
    """A data module as the recipe's, not yet set up; its seed is the recipe's.

    UserError where the images' place is not given.
    """
    data = recipe.data
    if data.root is None and data.dataset != "scenes":
        raise UserError(f"recipe {recipe.name!r} needs images: give --data.root, {data.root_holds}")
    return replace(data, seed=recipe.seed)
