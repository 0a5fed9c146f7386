"""The `dgt` command: parses, refuses what it can already see is wrong, and only then loads the package.

Loading PyTorch takes seconds, so this module stands beside `dgt` and imports nothing but the standard library: help and
wrong arguments are answered at once. What the commands do is `dgt.app.cli`.

Exit status: 0 done; 1 something failed on the way (an image that cannot be read, a loss that is no longer a number);
2 bad usage or bad input, told in one sentence on standard error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

RECIPES = Path(__file__).with_name("dgt") / "recipes"
MODEL_HELP = "a checkpoint (.ckpt), a run folder, or a model folder (config.json, model.safetensors)"
EXPERIMENTS = {"retrieval": "Retrieval at a distance: what groups reach and windows do not, and the law of G and k"}
SECTIONS = {  # what a recipe consists of; `dgt.training` has the keys in them
    "name": "name of the experiment, and of its run folder",
    "task": "classify, segment or detect",
    "seed": "every random choice follows from it",
    "out": "folder of the run",
    "model": "which timm model, its arguments and first weights",
    "data": "the images: folder, size, batches, augmentation",
    "optimizer": "AdamW",
    "schedule": "length and learning rates",
    "ema": "average of the weights",
    "trainer": "devices and precision",
    "checkpoint": "how often the training is saved",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; `arguments` are its words, None for those of this process."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_keys:
        parser.error(f"unknown arguments for `dgt {options.command}`: {' '.join(rest)}")
    for mistake in _mistakes(options, rest):
        print(f"dgt: error: {mistake}", file=sys.stderr)
        return 2
    if options.command == "train" and options.help and options.recipe is None:
        print(_train_help())
        return 0
    try:
        from dgt.app.cli import run

        return run(options, rest)
    except KeyboardInterrupt:
        print("dgt: interrupted", file=sys.stderr)
        return 130


def _mistakes(options: argparse.Namespace, keys: list[str]) -> Iterator[str]:
    """What is wrong and can be seen without the package: names of recipes and tables, sections, checkpoints."""
    if options.command == "train" and not options.help and options.recipe is None:
        yield f"name a recipe, one of {', '.join(_shipped(RECIPES))}, or the path of a YAML file"
    experiment = getattr(options, "table", None) in EXPERIMENTS
    if experiment and options.size is not None:
        yield f"{options.table} is no table and has no sizes: leave --size out"
    for what, folder in (("recipe", RECIPES), ("table", RECIPES / "tables")):
        name = getattr(options, what, None)
        shipped = sorted([*_shipped(folder), *(EXPERIMENTS if what == "table" else ())])
        if name is not None and Path(name).suffix in (".yaml", ".yml"):
            if not Path(name).is_file():
                yield f"there is no {what} file {name!r}"
        elif name is not None and name not in shipped and not Path(name).is_file():
            near = difflib.get_close_matches(name, shipped, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield (
                f"there is no {what} {name!r}: {hint}shipped are {', '.join(shipped)}; "
                "any other is the path of a YAML file"
            )
    for word in keys if not experiment else ():
        section, dot, key = word[2:].partition("=")[0].partition(".")
        if word.startswith("--") and section not in SECTIONS:
            near = difflib.get_close_matches(section, SECTIONS, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}{dot}{key}?" if near else "`dgt train RECIPE --help` lists all keys"
            yield f"unknown recipe key {section + dot + key!r}; {hint}"
    if options.command == "status" and not (Path(options.folder) / "recipe.yaml").is_file():
        yield f"{options.folder!r} is not the folder of a run: it has no recipe.yaml"
    one = getattr(options, "checkpoint", None)
    for checkpoint in getattr(options, "checkpoints", [one] if one else []):
        if not Path(checkpoint).exists():
            yield f"there is no checkpoint, run folder or model folder {checkpoint!r}"


def _shipped(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _train_help() -> str:
    """What `dgt train --help` prints: the shipped recipes, each with the first line of its header, and the sections."""
    lines = ["usage: dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]", ""]
    lines += ["Train a recipe, shipped by name or the path of a YAML file, and write its run folder (runs/NAME).", ""]
    lines += ["options:", "  --resume auto        go on where an earlier `dgt train` into the same folder stopped", ""]
    lines += ["recipes:"]
    for name in _shipped(RECIPES):
        header = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  {name:<20} {header.lstrip('# ')}")
    lines += ["", "sections of a recipe (`dgt train RECIPE --help` lists every key with its default):"]
    return "\n".join(lines + [f"  --{name:<18} {about}" for name, about in SECTIONS.items()])


def _whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` on."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return value

    return number


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dgt",
        description="Dynamic Group Transformer: train, use and look into vision transformers with dynamic groups.",
        epilog="`dgt COMMAND --help` tells more. Start with `dgt demo`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_training, _add_using, _add_looking, _add_measuring):
        add(commands)
    return parser


def _add(
    commands: Commands, name: str, help_text: str, takes_keys: bool = False, **more: object
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help_text,
        description=help_text,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,  # type: ignore[arg-type]
    )
    command.set_defaults(takes_keys=takes_keys)
    return command


def _add_training(commands: Commands) -> None:
    command = _add(commands, "demo", "train, evaluate and draw on the built-in scenes, in a few minutes")
    command.add_argument("--out", default="runs/demo", metavar="DIR", help="folder to write (default: %(default)s)")
    command.add_argument("--epochs", type=_whole(1), metavar="N", help="passes over the scenes (default: the recipe's)")
    command.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="seed of the training (default: 0)")

    about = "train a recipe and write its run folder"
    usage = "dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]"
    command = _add(commands, "train", about, takes_keys=True, add_help=False, usage=usage)
    command.add_argument("-h", "--help", action="store_true", help="show this text, the recipes and all their keys")
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    command.add_argument("--resume", choices=("never", "auto"), default="never", help="auto: go on where it stopped")

    command = _add(commands, "status", "tell how a training stands: running, stopped, killed, finished")
    command.add_argument("folder", metavar="RUN", help="folder of the run")
    command.add_argument("--json", action="store_true", help="print it as JSON")

    about = "train the rows of a table with several seeds and write it beside the paper's numbers"
    usage = "dgt ablate TABLE [--seeds N] [--size NAME] [--out DIR] [--data.root DIR] [--section.key value ...]"
    command = _add(commands, "ablate", about, takes_keys=True, usage=usage)
    command.set_defaults(experiments=EXPERIMENTS)
    about = f"a shipped table (none: list them), a YAML file, or {', '.join(EXPERIMENTS)}"
    command.add_argument("table", nargs="?", metavar="TABLE", help=about)
    command.add_argument(
        "--seeds", type=_whole(1), default=3, metavar="N", help="seeds of each row (default: %(default)s)"
    )
    command.add_argument("--size", metavar="NAME", help="size of the models (default: the table's first)")
    command.add_argument("--out", metavar="DIR", help="folder (default: runs/ablate-TABLE-SIZE); goes on where it was")


def _add_using(commands: Commands) -> None:
    command = _add(
        commands,
        "evaluate",
        "measure a trained model on the validation images",
        takes_keys=True,
        usage="dgt evaluate CHECKPOINT [--json] [--data.root DIR] [--data.key value ...]",
        epilog="Of the recipe's keys, data.*, trainer.accelerator and trainer.precision can be changed.",
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("--predictions", metavar="FILE", help="also write a detector's results as COCO's JSON")
    command.add_argument("--json", action="store_true", help="print the metrics as JSON")

    about = "print the most probable classes of image files, or draw their label maps, boxes and masks"
    command = _add(commands, "predict", about)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image file")
    command.add_argument("--top-k", type=_whole(1), default=5, metavar="N", help="classes for each image (default: 5)")
    command.add_argument("--out", default="predictions", metavar="DIR", help="folder of the drawings (%(default)s)")
    command.add_argument("--json", action="store_true", help="print a list of {image, error, classes or files} as JSON")

    command = _add(commands, "export", "write a trained model for other programs, and check the result")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("out", metavar="OUT", help="file ending in .onnx or .pt2; without ending, a folder for timm")
    command.add_argument("--features", action="store_true", help="the backbone's feature maps instead of its task")


def _add_looking(commands: Commands) -> None:
    command = _add(
        commands,
        "visualize",
        "draw query groups and the keys they chose over an image",
        epilog="Several checkpoints of one training show how groups move: a row for each, or the frames of a .gif.",
    )
    command.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("image", metavar="IMAGE", help="image file")
    command.add_argument(
        "--block", type=_whole(0), metavar="N", help="block, from 0 (default: the last one of each stage)"
    )
    command.add_argument("--head", type=_whole(0), default=0, metavar="N", help="attention head, from 0 (default: 0)")
    command.add_argument("--groups", type=_whole(1), default=3, metavar="N", help="groups to show (default: 3)")
    command.add_argument("--map", action="store_true", help="colour all groups at once instead")
    command.add_argument("--all-blocks", action="store_true", help="one sheet with the map of every block")
    command.add_argument("--out", default="groups.png", metavar="FIG", help="PNG, SVG, PDF, GIF (default: %(default)s)")

    about = "measure and draw how much of global attention a model's selected keys hold, and how balanced groups are"
    command = _add(commands, "diagnose", about)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image file")
    command.add_argument("--out", default="diagnosis.png", metavar="FIG", help="PNG, SVG, PDF (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print a list of blocks as JSON")

    command = _add(commands, "explore", "see groups and keys live, in a web page")
    command.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=f"{MODEL_HELP} (default: the demo's)")
    command.add_argument("--image", metavar="PATH", help="image file, or folder of them, to show besides the scenes")
    command.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address (default: %(default)s)")
    command.add_argument(
        "--port", type=_whole(0), default=7860, metavar="N", help="0 for a free one (default: %(default)s)"
    )


def _add_measuring(commands: Commands) -> None:
    command = _add(commands, "info", "print parameters and FLOPs of models beside the paper's")
    command.add_argument("model", nargs="?", metavar="MODEL", help="any timm model (default: all of this package)")
    command.add_argument("--task", default="classify", metavar="TASK", help="classify (default), segment, ...")
    command.add_argument(
        "--size", type=_whole(1), nargs=2, metavar=("H", "W"), help="default: that of the paper's FLOPs"
    )
    command.add_argument("--json", action="store_true", help="print a list of rows as JSON")

    command = _add(commands, "bench", "time the attention, or whole models, beside the alternatives")
    command.add_argument("what", choices=("attention", "models"), help="what to time")
    command.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: %(default)s)")
    command.add_argument(
        "--rounds", type=_whole(1), default=7, metavar="N", help="turns of each candidate (default: 7)"
    )
    forms = "timm models, each NAME[@PIXELS][+inference|+packed|+global|+checkpointing] (default: DGT-T and peers)"
    command.add_argument("--models", nargs="+", metavar="NAME", help=forms)
    command.add_argument("--size", type=_whole(1), default=224, metavar="PIXELS", help="models: side of images (224)")
    command.add_argument("--batch", type=_whole(1), default=8, metavar="N", help="models: images a batch (default: 8)")
    command.add_argument("--compile", action="store_true", help="models: run them through torch.compile")
    command.add_argument("--train", action="store_true", help="models: time training steps, not inference")
    command.add_argument("--memory", action="store_true", help="models: measure peaks of memory as well")
    command.add_argument("--profile", action="store_true", help="models: tell where the time of each goes instead")
    command.add_argument("--plot", metavar="FIG", help="models: draw speed against published accuracy as well")
    command.add_argument("--json", action="store_true", help="print the machine and a list of rows as JSON")
