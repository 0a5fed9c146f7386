"""Commands that train: `demo`, `train`, `status`, `ablate`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dgt_command.light import without_pytorch
from dgt_command.output import print_json
from dgt_command.parameters import AT_LEAST_0, AT_LEAST_1, WITH_KEYS, Mistake, no_option

if TYPE_CHECKING:
    from dgt.runs.recipe import Recipe
    from dgt.training.loop import Draw

RECIPES = Path(__file__).parents[1] / "dgt" / "recipes"
SECTIONS = {
    "name": "name of the experiment, and of its run folder",
    "task": "classify, segment or detect",
    "seed": "seed of all random choices",
    "out": "folder of the run",
    "model": "timm model, its arguments and initial weights",
    "data": "images: folder, size, batches, augmentation",
    "optimizer": "optimizer and its learning rates",
    "schedule": "length and learning rates",
    "ema": "moving average of the weights",
    "trainer": "devices and precision",
    "checkpoint": "how often checkpoints are saved",
}
"""What a recipe consists of; `dgt train RECIPE --help` lists the keys."""
TRAIN_USAGE = "Usage: dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]"


@click.command()
@click.option("--out", metavar="DIR", default="runs/demo", show_default=True, help="Output folder.")
@click.option(
    "--epochs", metavar="N", type=AT_LEAST_1, help="Passes over the scenes (default: the recipe's)."
)
@click.option(
    "--seed",
    metavar="N",
    type=AT_LEAST_0,
    default=0,
    show_default=True,
    help="Seed of the training.",
)
def demo(out: str, epochs: int | None, seed: int) -> None:
    """Train, evaluate and draw on the built-in scenes, in a few minutes."""
    import dgt.training  # noqa: F401  # isort: skip  (first: without the extra, it is what is named)
    from dgt_command.demo import run

    prepare_process()
    print(run(out, seed=seed, epochs=epochs))


@click.command(context_settings={**WITH_KEYS, "help_option_names": []}, add_help_option=False)
@click.option(
    "-h",
    "--help",
    "show_help",
    is_flag=True,
    help="Show this message, the recipes and their keys.",
)
@click.option(
    "--resume",
    type=click.Choice(["never", "auto"]),
    default="never",
    help="auto: resume where it stopped",
)
@click.argument("recipe", required=False, callback=no_option)
@click.argument("keys", nargs=-1, type=click.UNPROCESSED)
def train(show_help: bool, resume: str, recipe: str | None, keys: tuple[str, ...]) -> None:
    """Train a recipe and write its run folder."""
    if recipe is None and show_help:
        print(_train_help())
        return
    if recipe is None:
        raise Mistake(f"name a recipe, one of {', '.join(_shipped())}, or the path of a YAML file")

    from dgt.runs.recipe import help_text, load_recipe

    settings = load_recipe(recipe, keys)
    if show_help:
        print(help_text(settings.task))
        return
    from dgt.training import fit  # isort: skip  (first: where the extra is missing, this is what is named)
    from dgt.tasks import TASKS
    from dgt.utils.distributed import rank

    prepare_process()
    result = fit(settings, resume == "auto", _drawing(settings))
    if rank() == 0:
        print(f"{TASKS[settings.task].summary(result.metrics)}  in {result.folder}")


def _drawing(settings: Recipe) -> Draw | None:
    """What draws validation images; None where none are asked for or, with a warning, matplotlib is
    missing.
    """
    from dgt.utils.distributed import rank
    from dgt.utils.extras import explain_missing

    if settings.trainer.pictures_every is None:
        return None
    try:
        from dgt_command.visualize import draw_training
    except ModuleNotFoundError as error:
        if (sentence := explain_missing(error, "drawing validation images")) is None:
            raise
        if rank() == 0:
            said = f"dgt: warning: {sentence}; trainer.pictures_every has no effect"
            print(said, file=sys.stderr)
        return None
    return draw_training


def _shipped() -> list[str]:
    """Names of the recipes in the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _train_help() -> str:
    """The shipped recipes, each with the first line of its header, and the sections of a recipe."""
    lines = [
        TRAIN_USAGE,
        "",
        "Train a recipe (a shipped name or the path of a YAML file) and write its run folder (runs/NAME).",
        "",
        "Options:",
        "  --resume auto        resume an earlier `dgt train`",
        "",
        "Recipes:",
    ]
    for name in _shipped():
        header = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"  {name:<20} {header.lstrip('# ')}")
    lines += [
        "",
        "Sections of a recipe (`dgt train RECIPE --help` lists every key with its default):",
    ]
    lines += [f"  --{name:<18} {about}" for name, about in SECTIONS.items()]
    return "\n".join(lines)


@click.command()
@click.argument("folder", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def status(folder: str, as_json: bool) -> None:
    """Tell how a training stands: running, stopped, killed, finished."""
    if not (Path(folder) / "recipe.yaml").is_file():
        raise Mistake(f"{folder!r} is not a run folder: it has no recipe.yaml")

    with without_pytorch():
        from dgt.runs.status import run_status, status_text

        state = run_status(folder)
        if as_json:
            print_json(state)
        else:
            print(status_text(state))


@click.command(context_settings=WITH_KEYS)
@click.argument("table", required=False, callback=no_option)
@click.argument("keys", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--seeds", metavar="N", type=AT_LEAST_1, default=3, show_default=True, help="Seeds per row."
)
@click.option("--size", metavar="NAME", help="Size of the models (default: the table's first).")
@click.option(
    "--out",
    metavar="DIR",
    help="Folder (default: runs/ablate-TABLE-SIZE); an interrupted run resumes.",
)
def ablate(
    table: str | None, keys: tuple[str, ...], seeds: int, size: str | None, out: str | None
) -> None:
    """Train the rows of a table with several seeds and write it beside the paper's numbers.

    TABLE is a shipped table (without it: list them) or a YAML file; KEYS change the recipe of all
    its rows: --data.root DIR, --section.key value.
    """
    from dgt_command.tables import tables_text

    if table is None:
        print(tables_text())
        return
    from dgt_command.ablate import ablate as make_table

    prepare_process()
    folder = make_table(table, keys, seeds, out, size)
    print((folder / "table.md").read_text(encoding="utf-8") + f"\n{folder / 'table.json'}")


def prepare_process() -> None:
    """Make this process one that trains, or predicts many images."""
    from dgt import keep_freed_memory

    keep_freed_memory()
    quiet_fabric()


def quiet_fabric() -> None:
    """Keep Fabric's notes about hardware out of the output; its warnings and errors stay."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
