"""Recipes: one YAML file per experiment, checked key by key before anything runs.

A recipe has the sections `model`, `data`, `optimizer`, `schedule`, `ema`, `trainer` and `checkpoint` and the keys
`task`, `seed` and `out`. Whatever it leaves out has the default written here; `data` takes the arguments of the task's
data module. Every key can be set on the command line as `--section.key value`. An unknown key or a wrong type is one
sentence that names the key, as a `ValueError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml

from dgt.tasks import TASKS
from dgt.tasks.network import ModelSettings
from dgt.tasks.optim import OptimizerSettings, ScheduleSettings
from dgt.utils.errors import UserError

Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]


@dataclass(frozen=True)
class EmaSettings:
    """Exponential moving average of the weights, which is then what is evaluated and exported.

    Args:
        decay: share of the average kept at each step, stated at batch 1024: the power (global batch / 1024) of it is
            used. Null for no average.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        if self.decay is not None and not 0 <= self.decay < 1:
            raise UserError(f"ema.decay must be null or in [0, 1), got {self.decay!r}")


@dataclass(frozen=True)
class TrainerSettings:
    """Where and how the training runs.

    Args:
        accelerator: auto, cpu, gpu or another that Lightning knows.
        devices: number of devices on each machine, or auto for all.
        num_nodes: number of machines.
        precision: auto is bf16-mixed on a GPU that has it and 32-true elsewhere.
        strategy: auto; ddp, every process holds the whole network; fsdp2, the weights are shared out among the
            processes; or another that Lightning knows.
        sync_batchnorm: let BatchNorm count over the batches of all processes, not of each alone.
        accumulate: batches per optimizer step.
        check_val_every: epochs between two validations; the last epoch is always validated.
        deterministic: use deterministic algorithms alone.
        compile: run the network through torch.compile.
        max_skipped: steps in a row, less than an epoch's, that may be skipped as their loss or gradient is not finite;
            null looks at nothing.
        pictures_every: epochs between two drawings of predictions and groups for TensorBoard; null draws none.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    precision: Precision = "auto"
    strategy: str = "auto"
    sync_batchnorm: bool = False
    accumulate: int = 1
    check_val_every: int = 1
    deterministic: bool = False
    compile: bool = False
    max_skipped: int | None = 10
    pictures_every: int | None = 10

    def __post_init__(self) -> None:
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        for key in ("num_nodes", "accumulate", "check_val_every"):
            if getattr(self, key) < 1:
                raise UserError(f"trainer.{key} must be at least 1, got {getattr(self, key)!r}")
        if self.max_skipped is not None and self.max_skipped < 0:
            raise UserError(f"trainer.max_skipped must be null or at least 0, got {self.max_skipped!r}")
        if self.pictures_every is not None and self.pictures_every < 1:
            raise UserError(f"trainer.pictures_every must be null or at least 1, got {self.pictures_every!r}")


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
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        for key in ("every_epochs", "every_steps", "every_minutes"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise UserError(f"checkpoint.{key} must be null or above 0, got {value!r}")
        if self.keep < 1:
            raise UserError(f"checkpoint.keep must be at least 1, got {self.keep!r}")


@dataclass(frozen=True)
class Recipe:
    """One experiment, complete.

    Args:
        name: file name of the recipe without its ending.
        task: a key of `dgt.tasks.TASKS`.
        seed: every random choice follows from it.
        out: folder of the run; null for runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free.
        model: which model.
        data: arguments of the task's data module, as plain values.
        optimizer: AdamW.
        schedule: length and learning rates.
        ema: average of the weights.
        trainer: devices and precision.
        checkpoint: how often the training is saved.
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
        """Raise ValueError, naming the recipe's key, for a value out of range."""
        _check_task(self.task)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be at least 0 and less than 2**32, got {self.seed!r}")
        if self.trainer.strategy == "fsdp2" and self.ema.decay is not None:
            raise UserError("ema.decay must be null under trainer.strategy fsdp2: shared-out weights have no average")

    def to_dict(self) -> dict[str, Any]:
        """The recipe as nested plain values, ready for YAML or JSON."""
        values: dict[str, Any] = _plain(asdict(self))
        return values

    def to_yaml(self) -> str:
        """The recipe as YAML, with every default filled in, which `load_recipe` reads back."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def shipped_recipes() -> list[str]:
    """Names of the recipes inside the package, sorted."""
    folder = resources.files("dgt.recipes")
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def help_text(task: str = "classify") -> str:
    """What `dgt train --help` prints: the shipped recipes, each with the first line of its header, and all keys."""
    folder = resources.files("dgt.recipes")
    lines = [
        "usage: dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]\n",
        "Train a recipe, shipped by name or the path of a YAML file, and write its run folder (runs/NAME).\n",
        "recipes:",
    ]
    for name in shipped_recipes():
        header = (folder / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  {name:<20} {header.lstrip('# ')}")
    lines.append(f"\nkeys of task {task!r} (those of another: `dgt train RECIPE --help`), each with its default:")
    return "\n".join(lines) + "\n" + recipe_parser(task).format_help()


def recipe_parser(task: str = "classify") -> jsonargparse.ArgumentParser:
    """The parser of recipes of one task: it knows every key with its type, default and description.

    Args:
        task: a key of `dgt.tasks.TASKS`.

    Raises:
        ValueError: no such task.
    """
    _check_task(task)
    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False, usage=jsonargparse.SUPPRESS)
    parser.add_argument("--name", type=str, default="recipe", help="name of the experiment, and of its run folder")
    parser.add_argument("--task", type=str, default=task, help="what is trained: " + ", ".join(TASKS))
    parser.add_argument("--seed", type=int, default=0, help="every random choice follows from it")
    parser.add_argument("--out", type=str | None, default=None, help="folder of the run; null for runs/NAME")
    parser.add_class_arguments(ModelSettings, "model")
    parser.add_class_arguments(TASKS[task].data, "data", skip={"seed"})
    parser.add_class_arguments(OptimizerSettings, "optimizer")
    parser.add_class_arguments(ScheduleSettings, "schedule")
    parser.add_class_arguments(EmaSettings, "ema")
    parser.add_class_arguments(TrainerSettings, "trainer")
    parser.add_class_arguments(CheckpointSettings, "checkpoint")
    return parser


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply the command line's changes.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: as on the command line: `["--data.root", "images", "--schedule.epochs=5"]`.

    Returns:
        The complete, checked recipe.

    Raises:
        FileNotFoundError: neither a shipped recipe nor a file.
        ValueError: not UTF-8, not YAML, an unknown key, a wrong type or a value out of range.
    """
    name, text = _read(recipe)
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(f"recipe {str(recipe)!r} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"recipe {str(recipe)!r} must be a mapping of keys, got {type(values).__name__}")
    return parse_recipe({"name": name, **values}, overrides)


def parse_recipe(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Check the nested values of a recipe and apply the command line's changes.

    Args:
        values: nested mapping, as in YAML.
        overrides: as in `load_recipe`.

    Raises:
        ValueError: an unknown key, a wrong type or a value out of range.
    """
    task = str(values.get("task", "classify"))
    parser = recipe_parser(task)
    known = set(_leaves(parser.get_defaults().as_dict()))
    base = dict(values)
    _check_keys(base, known)
    changed = _override_keys(overrides, known)
    if "model.name" in changed and isinstance(base.get("model"), dict):
        base["model"] = {**base["model"], "args": {}}
    try:
        parsed = parser.parse_args(list(overrides), namespace=parser.parse_object(base))
    except jsonargparse.ArgumentError as error:
        raise UserError(_sentence(str(error))) from error
    settings = parsed.as_dict()
    if settings["task"] != task:  # the keys of `data` are the task's
        raise UserError(f"task must stay the recipe's, {task!r}, got {settings['task']!r}: take a recipe of that task")
    return Recipe(
        **{key: settings[key] for key in ("name", "task", "seed", "out")},
        data=_plain(settings["data"]),
        model=ModelSettings(**settings["model"]),
        optimizer=OptimizerSettings(**settings["optimizer"]),
        schedule=ScheduleSettings(**settings["schedule"]),
        ema=EmaSettings(**settings["ema"]),
        trainer=TrainerSettings(**settings["trainer"]),
        checkpoint=CheckpointSettings(**settings["checkpoint"]),
    )


def build_data(recipe: Recipe) -> Any:
    """The recipe's data module, not yet set up; its seed is the recipe's.

    Raises:
        ValueError: an argument of the data module is out of range, or the images' place is not given.
    """
    if recipe.data["root"] is None and recipe.data.get("dataset") != "scenes":
        raise UserError(f"recipe {recipe.name!r} needs images: give --data.root, {TASKS[recipe.task].data.root_holds}")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TASKS[recipe.task].data, "data")
    return parser.instantiate(parser.parse_object({"data": {**recipe.data, "seed": recipe.seed}}))["data"]


def _check_task(task: str) -> None:
    if task not in TASKS:
        raise UserError(f"task must be one of {', '.join(TASKS)}, got {task!r}")


def _read(recipe: str | Path) -> tuple[str, str]:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise FileNotFoundError(f"there is no recipe file {str(recipe)!r}")
        try:
            return path.stem, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"recipe {str(recipe)!r} is not a text in UTF-8: {error}") from error
    shipped = shipped_recipes()
    if str(recipe) not in shipped:
        near = difflib.get_close_matches(str(recipe), shipped, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise FileNotFoundError(
            f"there is no recipe {str(recipe)!r}: {hint}shipped are {', '.join(shipped)}; "
            "any other is the path of a YAML file"
        )
    return str(recipe), (resources.files("dgt.recipes") / f"{recipe}.yaml").read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Nested tuples, mappings and paths as lists, dicts and strings: what YAML and JSON can hold."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _check_keys(values: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    """Raise ValueError at the first key that is not known, or that is a value where a section belongs."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        is_section = any(name.startswith(f"{path}.") for name in known)
        if is_section and not isinstance(value, Mapping):
            raise UserError(f"recipe key {path!r} must be a section of keys, got {value!r}")
        if is_section:
            _check_keys(value, known, f"{path}.")
        elif path not in known:
            raise _unknown(path, known)


def _override_keys(overrides: Sequence[str], known: set[str]) -> set[str]:
    keys = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
    for key in sorted(keys):
        section = any(name.startswith(f"{key}.") for name in known)
        if key not in known and not section and not key.startswith(("model.args.", "model.head.")):
            raise _unknown(key, known)
    return keys


def _unknown(key: str, known: set[str]) -> UserError:
    by_last = {name.rpartition(".")[2]: name for name in sorted(known)}
    near = difflib.get_close_matches(key, sorted(known), n=2, cutoff=0.75)
    near += [by_last[last] for last in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1, cutoff=0.75)]
    hint = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else "; `dgt train --help` lists all keys"
    return UserError(f"unknown recipe key {key!r}{hint}")


def _sentence(message: str) -> str:
    """The parser's message as one line that names the key, what was expected and what came."""
    message = re.sub(r"<class '(\w+)'>", r"\1", message).replace("typing.", "")
    found = re.match(r'Parser key "([^"]+)":\s*(.*)', message, flags=re.DOTALL)
    if found is None:
        return f"recipe: {' '.join(message.split())}"
    expected = " ".join(found[2].split()).replace("Expected", "expected").replace(". Got value:", ", got")
    return f"recipe key {found[1]!r}: {expected}"
