"""The `dgt` command: parses and calls. What the commands do stands in modules that are imported when they are called.

Exit status: 0 done; 1 something failed on the way (an image that cannot be read, a loss that is no longer a number);
2 bad usage or bad input, told in one sentence on standard error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Command = Callable[[argparse.Namespace, list[str]], int]

MODEL_HELP = "a checkpoint (.ckpt), a run folder, or a model folder (config.json, model.safetensors)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; `arguments` are its words, None for those of this process."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not options.takes_keys:
        parser.error(f"unknown arguments for `dgt {options.command}`: {' '.join(rest)}")
    try:
        status: int = options.run(options, rest)
    except (ValueError, TypeError, OSError, RuntimeError, FloatingPointError) as error:
        if not isinstance(error, OSError) and not _raised_here(error.__traceback__):
            raise
        print(f"dgt: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | TypeError | OSError) else 1
    except KeyboardInterrupt:
        print("dgt: interrupted", file=sys.stderr)
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dgt",
        description="Dynamic Group Transformer: train, use and look into vision transformers with dynamic groups.",
        epilog="`dgt COMMAND --help` tells more. Start with `dgt demo`.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adders = (
        _add_demo,
        _add_train,
        _add_status,
        _add_ablate,
        _add_evaluate,
        _add_predict,
        _add_visualize,
        _add_diagnose,
        _add_explore,
        _add_shard,
        _add_export,
        _add_info,
        _add_bench,
    )
    for add in adders:
        add(commands)
    return parser


def _add(
    commands: Commands,
    name: str,
    run: Command,
    help_text: str,
    takes_keys: bool = False,
    **more: object,
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=help_text,
        description=help_text,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,  # type: ignore[arg-type]
    )
    command.set_defaults(run=run, takes_keys=takes_keys)
    return command


def _add_demo(commands: Commands) -> None:
    command = _add(commands, "demo", run_demo, "train, evaluate and draw on the built-in scenes, in a few minutes")
    command.add_argument("--out", default="runs/demo", metavar="DIR", help="folder to write (default: %(default)s)")
    command.add_argument("--epochs", type=int, metavar="N", help="passes over the scenes (default: the recipe's)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the training (default: 0)")


def _add_train(commands: Commands) -> None:
    about = "train a recipe and write its run folder"
    usage = "dgt train RECIPE [--resume auto] [--data.root DIR] [--section.key value ...]"
    command = _add(commands, "train", run_train, about, takes_keys=True, add_help=False, usage=usage)
    command.add_argument("-h", "--help", action="store_true", help="show this text, the recipes and all their keys")
    command.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    command.add_argument("--resume", choices=("never", "auto"), default="never", help="auto: go on where it stopped")


def _add_status(commands: Commands) -> None:
    command = _add(commands, "status", run_status, "tell how a training stands: running, stopped, killed, finished")
    command.add_argument("folder", metavar="RUN", help="folder of the run")
    command.add_argument("--json", action="store_true", help="print it as JSON")


def _add_ablate(commands: Commands) -> None:
    about = "train the rows of a table with several seeds and write it beside the paper's numbers"
    usage = "dgt ablate TABLE [--seeds N] [--size NAME] [--out DIR] [--data.root DIR] [--section.key value ...]"
    command = _add(commands, "ablate", run_ablate, about, takes_keys=True, usage=usage)
    command.add_argument("table", nargs="?", metavar="TABLE", help="a shipped table (none: list them), or a YAML file")
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of each row (default: %(default)s)")
    command.add_argument("--size", metavar="NAME", help="size of the models (default: the table's first)")
    command.add_argument("--out", metavar="DIR", help="folder (default: runs/ablate-TABLE-SIZE); goes on where it was")


def _add_evaluate(commands: Commands) -> None:
    command = _add(
        commands,
        "evaluate",
        run_evaluate,
        "measure a trained model on the validation images",
        takes_keys=True,
        usage="dgt evaluate CHECKPOINT [--json] [--data.root DIR] [--data.key value ...]",
        epilog="Of the recipe's keys, data.*, trainer.accelerator and trainer.precision can be changed.",
    )
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("--predictions", metavar="FILE", help="also write a detector's results as COCO's JSON")
    command.add_argument("--json", action="store_true", help="print the metrics as JSON")


def _add_predict(commands: Commands) -> None:
    about = "print the most probable classes of image files, or draw their label maps, boxes and masks"
    command = _add(commands, "predict", run_predict, about)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image file")
    command.add_argument("--top-k", type=int, default=5, metavar="N", help="classes for each image (default: 5)")
    command.add_argument("--out", default="predictions", metavar="DIR", help="folder of the drawings (%(default)s)")
    command.add_argument("--json", action="store_true", help="print a list of {image, error, classes or files} as JSON")


def _add_visualize(commands: Commands) -> None:
    command = _add(
        commands,
        "visualize",
        run_visualize,
        "draw query groups and the keys they chose over an image",
        epilog="Several checkpoints of one training show how groups move: a row for each, or the frames of a .gif.",
    )
    command.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("image", metavar="IMAGE", help="image file")
    command.add_argument("--block", type=int, metavar="N", help="block, from 0 (default: the last one of each stage)")
    command.add_argument("--head", type=int, default=0, metavar="N", help="attention head, from 0 (default: 0)")
    command.add_argument("--groups", type=int, default=3, metavar="N", help="groups to show (default: 3)")
    command.add_argument("--map", action="store_true", help="colour all groups at once instead")
    command.add_argument("--all-blocks", action="store_true", help="one sheet with the map of every block")
    command.add_argument("--out", default="groups.png", metavar="FIG", help="PNG, SVG, PDF, GIF (default: %(default)s)")


def _add_diagnose(commands: Commands) -> None:
    about = "measure and draw how much of global attention a model's selected keys hold, and how balanced groups are"
    command = _add(commands, "diagnose", run_diagnose, about)
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image file")
    command.add_argument("--out", default="diagnosis.png", metavar="FIG", help="PNG, SVG, PDF (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print a list of blocks as JSON")


def _add_explore(commands: Commands) -> None:
    command = _add(commands, "explore", run_explore, "see groups and keys live, in a web page")
    command.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=f"{MODEL_HELP} (default: the demo's)")
    command.add_argument("--image", metavar="PATH", help="image file, or folder of them, to show besides the scenes")
    command.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address (default: %(default)s)")
    command.add_argument("--port", type=int, default=7860, metavar="N", help="0 for a free one (default: %(default)s)")


def _add_shard(commands: Commands) -> None:
    command = _add(commands, "shard", run_shard, "pack folders of images into checksummed tar files, or check those")
    command.add_argument("source", metavar="DIR", help="folder with SPLIT/CLASS/ folders; with --verify, of the shards")
    command.add_argument("out", nargs="?", metavar="OUT", help="folder of the shards; a second run goes on there")
    command.add_argument("--samples", type=int, default=4096, metavar="N", help="images a shard (default: %(default)s)")
    command.add_argument("--workers", type=int, metavar="N", help="shards written at a time (default: one a core)")
    command.add_argument("--no-check", action="store_true", help="do not try to decode the images on the way")
    command.add_argument("--verify", action="store_true", help="read all shards and compare their checksums")


def _add_export(commands: Commands) -> None:
    command = _add(commands, "export", run_export, "write a trained model for other programs, and check the result")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=MODEL_HELP)
    command.add_argument("out", metavar="OUT", help="file ending in .onnx or .pt2; without ending, a folder for timm")
    command.add_argument("--features", action="store_true", help="the backbone's feature maps instead of its task")


def _add_info(commands: Commands) -> None:
    command = _add(commands, "info", run_info, "print parameters and FLOPs of models beside the paper's")
    command.add_argument("model", nargs="?", metavar="MODEL", help="any timm model (default: all of this package)")
    command.add_argument("--task", default="classify", metavar="TASK", help="classify (default), segment, ...")
    command.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="default: that of the paper's FLOPs")
    command.add_argument("--json", action="store_true", help="print a list of rows as JSON")


def _add_bench(commands: Commands) -> None:
    command = _add(commands, "bench", run_bench, "time the attention, or whole models, beside the alternatives")
    command.add_argument("what", choices=("attention", "models"), help="what to time")
    command.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: %(default)s)")
    command.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each candidate (default: 7)")
    forms = "timm models, each NAME[@PIXELS][+inference|+global|+checkpointing] (default: DGT-T and peers)"
    command.add_argument("--models", nargs="+", metavar="NAME", help=forms)
    command.add_argument("--size", type=int, default=224, metavar="PIXELS", help="models: side of images (224)")
    command.add_argument("--batch", type=int, default=8, metavar="N", help="models: images a batch (default: 8)")
    command.add_argument("--compile", action="store_true", help="models: run them through torch.compile")
    command.add_argument("--train", action="store_true", help="models: time training steps, not inference")
    command.add_argument("--memory", action="store_true", help="models: measure peaks of memory as well")
    command.add_argument("--profile", action="store_true", help="models: tell where the time of each goes instead")
    command.add_argument("--plot", metavar="FIG", help="models: draw speed against published accuracy as well")
    command.add_argument("--json", action="store_true", help="print the machine and a list of rows as JSON")


def run_demo(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt demo`: trains, draws, and prints what to look at."""
    from dgt.demo import run

    _quiet()
    print(run(options.out, seed=options.seed, epochs=options.epochs))
    return 0


def run_train(options: argparse.Namespace, overrides: list[str]) -> int:
    """`dgt train`: prints the help, or trains and prints where the results are."""
    from lightning.pytorch.utilities import rank_zero_only

    from dgt.figures.training import draw_training
    from dgt.tasks import TASKS
    from dgt.training import fit, load_recipe, shipped_recipes
    from dgt.training.recipe import help_text

    if options.help:
        print(help_text(load_recipe(options.recipe).task if options.recipe else "classify"))
        return 0
    if options.recipe is None:
        raise ValueError(f"name a recipe, one of {', '.join(shipped_recipes())}, or the path of a YAML file")
    _quiet()
    recipe = load_recipe(options.recipe, overrides)
    result = fit(recipe, options.resume == "auto", draw_training)
    rank_zero_only(print)(f"{TASKS[recipe.task].summary(result.metrics)}  in {result.folder}")
    return 0


def run_status(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt status`: prints how a run stands."""
    from dgt.training.status import run_status, status_text

    status = run_status(options.folder)
    print(json.dumps(status, indent=2) if options.json else status_text(status))
    return 0


def run_ablate(options: argparse.Namespace, overrides: list[str]) -> int:
    """`dgt ablate`: trains what is missing and prints the table; without one, which there are."""
    from dgt.training.ablate import ablate
    from dgt.training.tables import tables_text

    if options.table is None:
        print(tables_text())
        return 0
    _quiet()
    folder = ablate(options.table, overrides, options.seeds, options.out, options.size)
    print((folder / "table.md").read_text(encoding="utf-8") + f"\n{folder / 'table.json'}")
    return 0


def run_evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    """`dgt evaluate`: prints the metrics."""
    from dgt.tasks import TASKS
    from dgt.training import evaluate

    _quiet()
    metrics = evaluate(options.checkpoint, overrides, options.predictions)
    if options.json:
        print(json.dumps(metrics))
    else:
        shown = [summary for row in TASKS.values() if (summary := row.summary(metrics))]
        print("  ".join([*shown, *([f"loss {metrics['loss']:.4f}"] if "loss" in metrics else [])]))
        print(f"{metrics['images']} images, {metrics['broken_images']} unreadable")
    return 0


def run_predict(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt predict`: prints what is in each image; exit status 1 where one could not be read."""
    from dataclasses import asdict

    from dgt.figures.predictions import prediction_lines, write_predictions
    from dgt.training import load_run, predict

    run = load_run(options.checkpoint)
    if run.recipe.task == "classify":
        found = [asdict(prediction) for prediction in predict(run, options.images, options.top_k)]
    else:
        found = write_predictions(run, options.images, options.out)
    if options.json:
        print(json.dumps(found, indent=2))
    for prediction in found:
        if prediction["error"] is not None:
            print(f"dgt: error: {prediction['error']}", file=sys.stderr)
        elif not options.json:
            print(prediction["image"])
            print("\n".join(prediction_lines(prediction)))
    return int(any(prediction["error"] is not None for prediction in found))


def run_visualize(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt visualize`: writes the figure."""
    from dgt.figures.visualize import visualize

    choice = (options.block, options.head, options.groups, options.map, options.all_blocks)
    visualize(options.checkpoints, [options.image], options.out, *choice)
    print(options.out)
    return 0


def run_diagnose(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt diagnose`: writes the figure and prints the numbers."""
    from dgt.figures.diagnosis import diagnose_run, diagnosis_table

    blocks = diagnose_run(options.checkpoint, options.images, options.out)
    rows = [block._asdict() for block in blocks]
    print(json.dumps(rows, indent=2) if options.json else f"{diagnosis_table(blocks)}\n{options.out}")
    return 0


def run_explore(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt explore`: serves the page until interrupted."""
    from dgt.explorer import serve

    _quiet()
    serve(options.checkpoint, options.image, options.host, options.port)
    return 0


def run_shard(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt shard`: writes shards, or checks them; prints a line for each that was written or is damaged."""
    from dgt.data.sharding import verify_shards, write_shards

    if options.verify:
        damaged = verify_shards(options.source)
        print(f"{len(damaged)} damaged: delete them and run `dgt shard` again" if damaged else "all checksums fit")
        return 1 if damaged else 0
    if options.out is None:
        raise ValueError("name the folder of the shards: dgt shard DIR OUT")
    print(write_shards(options.source, options.out, options.samples, options.workers, not options.no_check).text())
    return 0


def run_export(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt export`: writes the file, and prints its size and how it agreed with the checkpoint."""
    from dgt.export import export

    print(export(options.checkpoint, options.out, options.features))
    return 0


def run_info(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt info`: prints the table."""
    from dgt.models.info import model_rows, model_table

    rows = model_rows(options.model, tuple(options.size) if options.size else None, options.task)
    print(json.dumps(rows, indent=2) if options.json else model_table(rows))
    return 0


def run_bench(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt bench`: prints the table."""
    from dgt.bench import report

    models = (tuple(options.models or ()) or None, options.size, options.batch, options.profile, options.plot)
    choices = {"compiled": options.compile, "training": options.train, "memory": options.memory}
    print(report(options.what, options.rounds, options.device, *models, as_json=options.json, **choices))
    return 0


def _quiet() -> None:
    """Keep Lightning's notes about hardware and upgrades out of the output; its warnings and errors stay."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", message=".*treespec.*")  # Lightning's own use of torch, told to its users
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _raised_here(traceback: TracebackType | None) -> bool:
    """Whether this package raised an error itself, with a sentence for the user; anything else is a bug to be shown."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and str(traceback.tb_frame.f_globals.get("__name__", "")).startswith("dgt.")
