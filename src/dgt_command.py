"""The `dgt` command: parses, refuses what it can already see is wrong, and only then loads the package.

Loading PyTorch takes seconds, so this module stands beside `dgt` and imports nothing but the standard library: help and
wrong arguments are answered at once. What the commands do is `dgt.app.cli`.

Exit status: 0 done; 1 something failed on the way (an image that cannot be read, a loss that is no longer a number);
2 bad usage or bad input, told in one sentence on standard error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Argument = tuple[tuple[str, ...], dict[str, Any]]

RECIPES = Path(__file__).with_name("dgt") / "recipes"
EXPERIMENTS = {
    "retrieval": "Retrieval at a distance: what groups reach and windows do not, and the law of G and k",
    "key_choice": "Which keys, at fixed weights: a trained run's layers with other choices of k keys; --run RUN",
    "replacement": "Other attentions in a trained global ViT; --weights FILE --data.root CAMVID",
    "like_to_like": "Labels of groups and of their keys, in a trained model; --run RUN",
}
MODEL_ENDINGS = (".ckpt", ".safetensors", ".json")
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
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
    if options.command == "predict":
        options.checkpoint, options.images = _model_and_images(options.images)
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
    if options.command == "info" and options.comparators and (options.model or options.size):
        yield "--comparators lists the paper's models at the paper's sizes: name no model and no --size"
    if experiment and options.size is not None:
        yield f"{options.table} is no table and has no sizes: leave --size out"
    for what, folder in (("recipe", RECIPES), ("table", RECIPES / "tables")):
        name = getattr(options, what, None)
        shipped = sorted([*_shipped(folder), *(EXPERIMENTS if what == "table" else ())])
        if name is not None and name not in shipped and not Path(name).is_file():
            near = difflib.get_close_matches(name, shipped, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = f"{hint}shipped are {', '.join(shipped)}; any other is the path of a YAML file"
            yield f"there is no {what} {name!r}: {known}"
    for word in keys if not experiment else ():
        section, dot, key = word[2:].partition("=")[0].partition(".")
        if word.startswith("--") and section not in SECTIONS:
            near = difflib.get_close_matches(section, SECTIONS, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}{dot}{key}?" if near else "`dgt train RECIPE --help` lists all keys"
            yield f"unknown recipe key {section + dot + key!r}; {hint}"
    if options.command == "weights":
        yield from _weights_mistakes(options, keys)
    if options.command == "status" and not (Path(options.folder) / "recipe.yaml").is_file():
        yield f"{options.folder!r} is not the folder of a run: it has no recipe.yaml"
    if options.command == "predict" and not options.images:
        yield f"{options.checkpoint!r} is taken as the model: name image files after it"
    one = getattr(options, "checkpoint", None)
    for checkpoint in getattr(options, "checkpoints", [one] if one else []):
        if not Path(checkpoint).exists():
            yield f"there is no checkpoint, run folder or model folder {checkpoint!r}"


def _model_and_images(words: list[str]) -> tuple[str | None, list[str]]:
    """The first word apart where it names a model: a file of one, or neither a file nor called like an image."""
    first = Path(words[0])
    image = first.suffix.lower() in IMAGE_ENDINGS and not first.is_dir()
    given = first.suffix in MODEL_ENDINGS or not (image or first.is_file())
    return (words[0], words[1:]) if given else (None, words)


def _weights_mistakes(options: argparse.Namespace, keys: list[str]) -> Iterator[str]:
    needed = {"make": ("folder", "out"), "check": ("folder",), "publish": ("folder", "repo")}.get(options.what, ())
    for name in (name for name in needed if getattr(options, name) is None):
        yield f"`dgt weights {options.what}` needs {'FOLDER' if name == 'folder' else f'--{name}'}"
    if needed and not Path(options.folder or ".").is_dir():
        yield f"there is no folder {options.folder!r}"
    if keys and options.what != "make":
        yield f"unknown arguments for `dgt weights {options.what}`: {' '.join(keys)}"


def _shipped(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _train_help() -> str:
    """What `dgt train --help` prints: the shipped recipes, each with the first line of its header, and the sections."""
    lines = ["usage: dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]", ""]
    lines += ["Train a recipe, shipped by name or the path of a YAML file, and write its run folder (runs/NAME).", ""]
    lines += ["options:", "  --resume auto        resume what an earlier `dgt train` began", "", "recipes:"]
    for name in _shipped(RECIPES):
        header = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        lines.append(f"  {name:<20} {header.lstrip('# ')}")
    lines += ["", "sections of a recipe (`dgt train RECIPE --help` lists every key with its default):"]
    return "\n".join(lines + [f"  --{name:<18} {about}" for name, about in SECTIONS.items()])


def _whole(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return int(text)

    return number


def _share(text: str) -> float:
    """The type of an argument above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text!r}")
    return value


def _shape(text: str) -> tuple[int, ...]:
    """The type of an argument B,H,L,D."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*){3}", text):
        raise argparse.ArgumentTypeError(f"must be four whole numbers B,H,L,D, got {text!r}")
    return tuple(map(int, text.split(",")))


def _flag(name: str, about: str) -> Argument:
    return (name,), {"action": "store_true", "help": about}


def _value(name: str, metavar: str, about: str, **how: object) -> Argument:
    return (name,), {"metavar": metavar, "help": about, **how}


def _number(name: str, least: int, default: int | None, about: str, metavar: str = "N") -> Argument:
    return _value(name, metavar, about, type=_whole(least), default=default)


MODEL = _value("checkpoint", "CHECKPOINT", "a checkpoint (.ckpt), a run folder, or a model folder")
JSON = _flag("--json", "print what is found as JSON")
IMAGES = _value("images", "IMAGE", "image file", nargs="+")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dgt",
        description="Dynamic Group Transformer: train, use and look into vision transformers with dynamic groups.",
        epilog="`dgt COMMAND --help` tells more. Start with `dgt demo`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_training, _add_using, _add_looking, _add_measuring):
        add(partial(_add, commands))
    return parser


def _add(commands: Commands, name: str, about: str, *arguments: Argument, takes_keys: bool = False, **how: Any) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=about, description=about, allow_abbrev=False, formatter_class=shape, **how)
    command.set_defaults(takes_keys=takes_keys, experiments=EXPERIMENTS)
    for names, settings in arguments:
        command.add_argument(*names, **settings)


def _add_training(add: Callable[..., None]) -> None:
    add(
        *("demo", "train, evaluate and draw on the built-in scenes, in a few minutes"),
        _value("--out", "DIR", "folder to write (default: %(default)s)", default="runs/demo"),
        _number("--epochs", 1, None, "passes over the scenes (default: the recipe's)"),
        _number("--seed", 0, 0, "seed of the training (default: 0)"),
    )
    add(
        *("train", "train a recipe and write its run folder"),
        (("-h", "--help"), {"action": "store_true", "help": "show this text, the recipes and all their keys"}),
        _value("recipe", "RECIPE", "name of a shipped recipe, or path of a YAML file", nargs="?"),
        (("--resume",), {"choices": ("never", "auto"), "default": "never", "help": "auto: resume where it stopped"}),
        takes_keys=True,
        add_help=False,
        usage="dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]",
    )
    add(
        *("status", "tell how a training stands: running, stopped, killed, finished"),
        *(_value("folder", "RUN", "folder of the run"), JSON),
    )
    tables = f"a shipped table (none: list them), a YAML file, or {', '.join(EXPERIMENTS)}"
    add(
        *("ablate", "train the rows of a table with several seeds and write it beside the paper's numbers"),
        _value("table", "TABLE", tables, nargs="?"),
        _number("--seeds", 1, 3, "seeds of each row (default: %(default)s)"),
        _value("--size", "NAME", "size of the models (default: the table's first)"),
        _value("--out", "DIR", "folder (default: runs/ablate-TABLE-SIZE); resumes where it was"),
        takes_keys=True,
        usage="dgt ablate TABLE [--seeds N] [--size NAME] [--out DIR] [--data.root DIR] [--section.key value ...]",
    )


def _add_using(add: Callable[..., None]) -> None:
    add(
        *("evaluate", "measure a trained model on the validation images"),
        *(MODEL, JSON),
        _value("--predictions", "FILE", "also write a detector's results as COCO's JSON"),
        _value("--plan", "FILE", "with its attention as a plan of `dgt accelerate` has it"),
        takes_keys=True,
        usage="dgt evaluate CHECKPOINT [--json] [--data.root DIR] [--data.key value ...]",
        epilog="Of the recipe's keys, data.*, trainer.accelerator and trainer.precision can be changed.",
    )
    add(
        *("predict", "print the most probable classes of image files, or draw their label maps, boxes and masks"),
        _value("images", "[CHECKPOINT] IMAGE", f"{MODEL[1]['help']} (default: the newest run), then images", nargs="+"),
        *(JSON, _number("--top-k", 1, 5, "classes for each image (default: 5)")),
        _value("--out", "DIR", "folder of the drawings (%(default)s)", default="predictions"),
        usage="dgt predict [CHECKPOINT] IMAGE [IMAGE ...] [--json] [--top-k N] [--out DIR]",
    )
    add(
        *("accelerate", "have a pretrained model's attention done by groups, within an error, where that is faster"),
        _value("model", "MODEL", "a model of timm or transformers: its name, or a folder of either"),
        *(_value("--images", "DIR", "folder of images of the kind that it will see", required=True), JSON),
        _value("--error", "E", "relative error of the output (default: %(default)s)", type=_share, default=0.01),
        _number("--size", 1, None, "side of the images (default: the model's)", "PIXELS"),
        _number("--count", 2, 32, "images to choose and to check by (default: 32)"),
        _value("--out", "FILE", "where the plan goes, for dgt.apply_plan (%(default)s)", default="plan.safetensors"),
        _value("--plot", "FILE", "a picture of what was chosen, .png, .pdf or .svg"),
    )
    add(
        *("weights", "pack a finished run with its story: checksums, card, log; list, check, publish such folders"),
        (("what",), {"choices": ("make", "list", "check", "publish"), "help": "what to do"}),
        _value("folder", "FOLDER", "make: a run; check and publish: a folder of weights", nargs="?"),
        _flag("--json", "list and check: print what is found as JSON"),
        _value("--out", "DIR", "make: the folder to write, named ARCHITECTURE.TAG"),
        _flag("--half", "make: keep matrices and convolutions in float16"),
        _value("--about", "FILE", "make: YAML with what the card says of your data: data, licence, licence_id, limits"),
        _value("--plan", "FILE", "make: a plan of `dgt accelerate` for this model, measured and added"),
        _value("--repo", "USER/NAME", "publish: where on the Hugging Face hub"),
        _flag("--dry-run", "publish: check everything, upload nothing"),
        takes_keys=True,
        epilog="`make` takes --data.KEY as `evaluate` does; listed are also the folders in that of DGT_WEIGHTS.",
    )
    add(
        *("export", "write a trained model for other programs, and check the result"),
        MODEL,
        _value("out", "OUT", "file ending in .onnx or .pt2; without ending, a folder for timm"),
        _flag("--features", "the backbone's feature maps instead of its task"),
        (("--size",), {"type": _whole(1), "nargs": 2, "metavar": ("H", "W"), "help": "images of this size alone"}),
        _number("--batch", 1, None, "with --size: so many images at a time alone (default: 1)"),
    )


def _add_looking(add: Callable[..., None]) -> None:
    add(
        *("visualize", "draw query groups and the keys they chose over an image"),
        _value("checkpoints", "CHECKPOINT", str(MODEL[1]["help"]), nargs="+"),
        _value("image", "IMAGE", "image file"),
        _number("--block", 0, None, "block, from 0 (default: the last one of each stage)"),
        _number("--head", 0, 0, "attention head, from 0 (default: 0)"),
        _number("--groups", 1, 3, "groups to show (default: 3)"),
        _flag("--map", "colour all groups at once instead"),
        _flag("--all-blocks", "one sheet with the map of every block"),
        _value("--out", "FIG", "PNG, SVG, PDF, GIF (default: %(default)s)", default="groups.png"),
        epilog="Several checkpoints of one training show how groups move: a row for each, or the frames of a .gif.",
    )
    add(
        "diagnose",
        "measure and draw how much of global attention a model's selected keys hold, and how balanced groups are",
        *(MODEL, IMAGES, JSON),
        _value("--out", "FIG", "PNG, SVG, PDF (default: %(default)s)", default="diagnosis.png"),
    )
    add(
        *("explore", "see groups and keys live, in a web page"),
        _value("checkpoint", "CHECKPOINT", f"{MODEL[1]['help']} (default: the newest run)", nargs="?"),
        _value("--image", "PATH", "image file, or folder of them, to show besides the scenes"),
        _value("--export", "FOLDER", "write the page with the images, or the scenes, as files for any host"),
        _value("--host", "HOST", "address (default: %(default)s)", default="127.0.0.1"),
        _number("--port", 0, 7860, "0 for a free one (default: %(default)s)"),
    )


def _add_measuring(add: Callable[..., None]) -> None:
    add(
        *("info", "print parameters and FLOPs of models beside the paper's"),
        _value("model", "MODEL", "any timm model (default: all of this package)", nargs="?"),
        *(_value("--task", "TASK", "classify (default), segment, ...", default="classify"), JSON),
        (("--size",), {"type": _whole(1), "nargs": 2, "metavar": ("H", "W"), "help": "default: the paper's"}),
        _flag("--comparators", "instead, every row of the paper's table of this task"),
    )
    forms = "timm models, each NAME[@PIXELS][+inference|+global|+checkpointing] (default: DGT-T and peers)"
    runtimes = {"choices": ("eager", "compile", "onnxruntime", "openvino")}
    add(
        *("bench", "time the attention, or whole models, beside the alternatives"),
        *((("what",), {"choices": ("attention", "models"), "help": "what to time"}), JSON),
        _value("--device", "NAME", "cpu or cuda (default: %(default)s)", default="cpu"),
        _number("--rounds", 1, 7, "turns of each candidate (default: 7)"),
        _value("--models", "NAME", forms, nargs="+"),
        _number("--size", 1, 224, "models: side of images (224)", "PIXELS"),
        _number("--batch", 1, 8, "models: images a batch (default: 8)"),
        (("--runtime",), {**runtimes, "nargs": "+", "default": ["eager"], "help": "models: where (default: eager)"}),
        _flag("--train", "models: time training steps, not inference"),
        _flag("--memory", "models: measure peaks of memory as well"),
    )
    add(
        *("profile", "tell which way of attending pays at one size on this machine"),
        *(_value("model", "MODEL", "a timm model, instead of --shape: all sizes in it", nargs="?"), JSON),
        _value("--shape", "B,H,L,D", "batch, heads, tokens, channels of a head", type=_shape),
        *(_number("--groups", 1, 48, "G (default: 48)"), _number("--top-k", 1, 98, "k (default: 98)")),
        _value("--device", "NAME", "cpu or cuda (default: %(default)s)", default="cpu"),
        *(_number("--rounds", 1, 7, "turns (default: 7)"), _number("--size", 1, 224, "side of MODEL's images (224)")),
    )
