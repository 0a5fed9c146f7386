"""Commands that use a trained model: `evaluate`, `predict`, `accelerate`, `weights`, `export`."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from dgt_command.light import without_pytorch
from dgt_command.output import print_json
from dgt_command.parameters import AT_LEAST_1, FOLDER, WITH_KEYS, Mistake, no_option
from dgt_command.training import prepare_process

MODEL_ENDINGS = (".ckpt", ".safetensors", ".bin", ".json")
MODEL_PARTS = (
    "recipe.yaml",
    "config.json",
    "*.safetensors",
    "*.bin",
    "*.ckpt",
    "checkpoints/*.ckpt",
)
"""What a folder has that is a run or a model, and no folder of images."""
OTHER_MODELS = (".onnx", ".pt", ".pt2", ".pth", ".xml")
"""Endings of models that are not read, such as those of `dgt export`."""


@click.command(context_settings=WITH_KEYS)
@click.argument("checkpoint", callback=no_option)
@click.argument("keys", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--predictions", metavar="FILE", help="Also write a detector's results as COCO JSON.")
@click.option("--plan", metavar="FILE", help="Apply a plan from `dgt accelerate` first.")
def evaluate(
    checkpoint: str, keys: tuple[str, ...], as_json: bool, predictions: str | None, plan: str | None
) -> None:
    """Measure a trained model on the validation images.

    CHECKPOINT is a checkpoint (.ckpt), a run folder, a model folder, or the name of weights
    (`dgt weights list`). Of the recipe's KEYS,
    data.*, trainer.accelerator and trainer.precision can be changed: --data.root DIR, --data.key
    value.
    """
    from dgt.runs import load_run
    from dgt.tasks import TASKS
    from dgt.training import evaluate as measure

    prepare_process()
    if plan is None:
        metrics = measure(checkpoint, keys, predictions)
    else:
        from dgt.acceleration import apply_plan

        run = load_run(checkpoint, keys)
        apply_plan(run.network, plan)
        metrics = measure(run, keys, predictions)
    if as_json:
        print_json(metrics, indent=None)
        return
    summaries = [task.summary(metrics) for task in TASKS.values()]
    shown = [summary for summary in summaries if summary]
    if "loss" in metrics:
        shown.append(f"loss {metrics['loss']:.4f}")
    print("  ".join(shown))
    print(f"{metrics['images']} images, {metrics['broken_images']} unreadable")


@click.command()
@click.argument("words", metavar="[CHECKPOINT] IMAGE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--top-k", metavar="N", type=AT_LEAST_1, help="Of a classifier: classes per image (default: 5)."
)
@click.option(
    "--out", metavar="DIR", help="Of any other: folder for the drawings (default: predictions)."
)
def predict(words: tuple[str, ...], as_json: bool, top_k: int | None, out: str | None) -> int:
    """Print the most probable classes of images, or draw their label maps, boxes and masks.

    CHECKPOINT is a checkpoint (.ckpt), a run folder, a model folder, or the name of weights
    (default: the newest run, else dgt_nano.imagenette); IMAGE a file, or a folder of which all
    images are taken.
    """
    model, images = _model_and_images(words)
    if model is not None and not images:
        raise Mistake(f"{model!r} is interpreted as the model: add image files after it")

    from dgt.runs import load_run
    from dgt.tasks import TASKS
    from dgt.weights import default_models
    from dgt_command.output import json_list
    from dgt_command.predict import predict_files, prediction_lines

    place: str | Path
    if model is None:
        place, line = next(default_models())
        print(line, file=sys.stderr)
    else:
        place = model
    failed = False
    prepare_process()
    run = load_run(place)
    draws = TASKS[run.recipe.task].files is not None
    if not draws and out is not None:
        raise Mistake(f"--out is for drawings, but {run.source} is a classifier: leave it out")
    if draws and top_k is not None:
        raise Mistake(f"--top-k is for classifiers, but {run.source} is none: leave it out")
    with json_list() if as_json else nullcontext() as add:
        for prediction in predict_files(run, images, out or "predictions", top_k or 5):
            if add is not None:
                add(prediction)
            if prediction["error"] is not None:
                failed = True
                print(f"dgt: error: {prediction['error']}", file=sys.stderr)
            elif add is None:
                lines = [prediction["image"], *prediction_lines(prediction)]
                print("\n".join(lines), flush=True)
    return int(failed)


def _model_and_images(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Tell whether the first word names a model: a file of one, a folder that has parts of one, or
    weights.

    Raises:
        Mistake: it is none of these, nor a file or a folder; or a model that is not read, in place of
            which another would be taken.
    """
    from dgt.weights import list_weights

    first = Path(words[0])
    if not os.path.lexists(first):
        weights = list_weights()
        if words[0] in weights:
            return words[0], list(words[1:])
        if len(words) == 1:
            raise Mistake(f"there is no image file or folder {words[0]!r}")
        raise Mistake(
            f"there is no model, image file or folder {words[0]!r}; "
            f"a model is a run, a checkpoint, or the name of weights, {', '.join(weights)}"
        )
    if first.suffix in OTHER_MODELS:
        raise Mistake(
            f"{words[0]!r} is no model that is read: give a run, a checkpoint ({MODEL_ENDINGS[0]}) or a "
            "model folder"
        )
    is_model = first.suffix in MODEL_ENDINGS
    if first.is_dir():
        is_model = any(any(first.glob(part)) for part in MODEL_PARTS)
    return (words[0], list(words[1:])) if is_model else (None, list(words))


@click.command()
@click.argument("model")
@click.option(
    "--images", metavar="DIR", required=True, help="Folder of images like those seen in deployment."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--error",
    metavar="E",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.01,
    show_default=True,
    help="Relative error of the output.",
)
@click.option(
    "--size",
    metavar="PIXELS",
    type=AT_LEAST_1,
    help="Side length of the images (default: the model's).",
)
@click.option(
    "--count",
    metavar="N",
    type=click.IntRange(min=2),
    default=32,
    show_default=True,
    help="Number of images for the search and its check.",
)
@click.option(
    "--out",
    metavar="FILE",
    default="plan.json",
    show_default=True,
    help="Plan file to write, for dgt.apply_plan.",
)
@click.option("--plot", metavar="FILE", help="Figure of the report to write, .png, .pdf or .svg.")
def accelerate(
    model: str,
    images: str,
    as_json: bool,
    error: float,
    size: int | None,
    count: int,
    out: str,
    plot: str | None,
) -> None:
    """Accelerate a pretrained model with grouped attention, within an error bound.

    MODEL is a model of timm or transformers: its name, or a folder of either.
    """
    from dgt_command.accelerate import accelerate_model, check_places

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    check_places({"--out": out, "--plot": plot})
    report = accelerate_model(model, images, error, size, count)
    report.save(out)
    if plot:
        report.plot(plot)
    if as_json:
        print_json(report.to_json())
    else:
        print(f"{report}\n{out}")


@click.group()
def weights() -> None:
    """List and check folders of trained weights: the shipped ones, and those in the folder of
    DGT_WEIGHTS.
    """


@weights.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def list_folders(as_json: bool) -> None:
    """List and verify all folders of weights that are found."""
    with without_pytorch():
        from dgt.weights import list_weights

        _print_weights([str(folder) for folder in list_weights().values()], as_json)


@weights.command("check")
@click.argument("folder", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def check_folder(folder: str, as_json: bool) -> None:
    """Check the files of a folder of weights against its checksums, and its card for completeness."""
    with without_pytorch():
        _print_weights([folder], as_json)


def _print_weights(folders: list[str], as_json: bool) -> None:
    from dgt.weights import check_weights, weights_line

    if as_json:
        results = {Path(folder).resolve().name: check_weights(folder) for folder in folders}
        print_json(results)
        return
    for folder in folders:
        print(weights_line(folder, check_weights(folder)), flush=True)


@click.command()
@click.argument("checkpoint")
@click.argument("out")
@click.option(
    "--features",
    is_flag=True,
    help="Export the backbone's feature maps instead of the task's output.",
)
@click.option(
    "--size", metavar="H W", nargs=2, type=AT_LEAST_1, help="Export for images of this size only."
)
@click.option(
    "--batch",
    metavar="N",
    type=AT_LEAST_1,
    help="With --size: the batch size (default: 1).",
)
@click.option(
    "--openvino-extension",
    is_flag=True,
    help="Export each DG-Attention as one operator: fastest on CPUs, but only for OpenVINO.",
)
@click.option(
    "--plan",
    metavar="PLAN.json",
    help="With --size: attention in groups, as `dgt accelerate` found it.",
)
def export(
    checkpoint: str,
    out: str,
    features: bool,
    size: tuple[int, int] | None,
    batch: int | None,
    openvino_extension: bool,
    plan: str | None,
) -> None:
    """Export a trained model to other formats and verify the result.

    CHECKPOINT is a checkpoint (.ckpt), a run folder, or a model folder; OUT a file ending in .onnx
    or .pt2 or, without an ending, a folder for timm.
    """
    from dgt.inference.export import export as export_run

    print(export_run(checkpoint, out, features, size, batch, openvino_extension, plan))
