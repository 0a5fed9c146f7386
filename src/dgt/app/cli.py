"""What each `dgt` command does, once `dgt_command` has parsed it. Modules are imported where they are needed."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dgt.utils.errors import Disagreement, LostProcess, UserError


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    """Run a command that `dgt_command` parsed, with the recipe's keys among its words, and return the exit status."""
    try:
        status: int | None = globals()[f"run_{options.command}"](options, overrides)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # who reads has closed, as `head` does
            sys.stdout = None  # which Python would flush at its end, and complain
            return 1
        raise
    except (UserError, OSError, LostProcess, Disagreement, FloatingPointError) as error:
        print(f"dgt: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError | OSError) else 1


def run_demo(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt demo`: trains, draws, and prints what to look at."""
    from dgt.app import demo

    _quiet()
    print(demo.run(options.out, seed=options.seed, epochs=options.epochs))


def run_train(options: argparse.Namespace, overrides: list[str]) -> None:
    """`dgt train`: prints the help, or trains and prints where the results are."""
    from dgt.app.visualize import draw_training
    from dgt.tasks import TASKS
    from dgt.training import fit, load_recipe
    from dgt.training.recipe import help_text
    from dgt.utils.distributed import rank

    if options.help:
        print(help_text(load_recipe(options.recipe).task))
        return
    _quiet()
    recipe = load_recipe(options.recipe, overrides)
    result = fit(recipe, options.resume == "auto", draw_training)
    if rank() == 0:
        print(f"{TASKS[recipe.task].summary(result.metrics)}  in {result.folder}")


def run_status(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt status`: prints how a run stands."""
    from dgt.training.log import run_status, status_text

    status = run_status(options.folder)
    print(json.dumps(status, indent=2) if options.json else status_text(status))


def run_ablate(options: argparse.Namespace, overrides: list[str]) -> None:
    """`dgt ablate`: trains what is missing and prints the table; without one, which there are."""
    if options.table in options.experiments:
        return _experiment(options, overrides)
    from dgt.experiments.ablate import ablate
    from dgt.experiments.tables import tables_text

    if options.table is None:
        print("\n".join([tables_text(), *(f"{name:<18}{title}" for name, title in options.experiments.items())]))
        return
    _quiet()
    folder = ablate(options.table, overrides, options.seeds, options.out, options.size)
    print((folder / "table.md").read_text(encoding="utf-8") + f"\n{folder / 'table.json'}")


def _experiment(options: argparse.Namespace, words: list[str]) -> None:
    from dgt.experiments.fixed_weights import key_choice, replacement
    from dgt.experiments.like_to_like import like_to_like
    from dgt.experiments.retrieval import retrieval
    from dgt.figures import save_figure
    from dgt.figures.choices import figure_choices
    from dgt.figures.retrieval import figure_retrieval

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows: dict[str, tuple[Callable[..., Path], Callable[..., Any] | None]] = {
        **{"retrieval": (retrieval, figure_retrieval), "like_to_like": (like_to_like, None)},
        **{"key_choice": (key_choice, figure_choices), "replacement": (replacement, figure_choices)},
    }
    measure, draw = rows[options.table]
    path = measure(words, options.seeds, options.out) / f"{options.table}.png"
    if draw is not None:
        save_figure(draw(json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))), path, dpi=130)
    print(path.with_suffix(".md").read_text(encoding="utf-8") + f"\n{path if draw else path.with_suffix('.json')}")


def run_evaluate(options: argparse.Namespace, overrides: list[str]) -> None:
    """`dgt evaluate`: prints the metrics."""
    from dgt.tasks import TASKS
    from dgt.training import evaluate, load_run

    _quiet()
    run = options.checkpoint
    if options.plan is not None:
        from dgt.acceleration import apply_plan

        run = load_run(run)
        apply_plan(run.network, options.plan)
    metrics = evaluate(run, overrides, options.predictions)
    shown = [summary for row in TASKS.values() if (summary := row.summary(metrics))]
    shown += [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    read = f"{metrics['images']} images, {metrics['broken_images']} unreadable"
    print(json.dumps(metrics) if options.json else f"{'  '.join(shown)}\n{read}")


def run_predict(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt predict`: prints what is in each image; exit status 1 where one could not be read."""
    from dgt.app.predict import predict_files, prediction_lines
    from dgt.training import load_run
    from dgt.weights import default_models

    model = options.checkpoint
    if model is None:
        model, line = next(default_models())
        print(line, file=sys.stderr)
    found = predict_files(load_run(model), options.images, options.out, options.top_k)
    if options.json:
        print(json.dumps(found, indent=2))
    for prediction in found:
        if prediction["error"] is not None:
            print(f"dgt: error: {prediction['error']}", file=sys.stderr)
        elif not options.json:
            print("\n".join([prediction["image"], *prediction_lines(prediction)]))
    return int(any(prediction["error"] is not None for prediction in found))


def run_visualize(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt visualize`: writes the figure."""
    from dgt.app.visualize import visualize

    choice = (options.block, options.head, options.groups, options.map, options.all_blocks)
    visualize(options.checkpoints, [options.image], options.out, *choice)
    print(options.out)


def run_diagnose(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt diagnose`: writes the figure and prints the numbers."""
    from dgt.app.visualize import diagnose_run
    from dgt.figures.diagnosis import diagnosis_table

    blocks = diagnose_run(options.checkpoint, options.images, options.out)
    rows = [block._asdict() for block in blocks]
    print(json.dumps(rows, indent=2) if options.json else f"{diagnosis_table(blocks)}\n{options.out}")


def run_explore(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt explore`: serves the page until interrupted, or writes it as files."""
    from dgt.explorer import export, serve

    _quiet()
    if options.export is not None:
        print(export(options.export, options.checkpoint, options.image))
        return
    serve(options.checkpoint, options.image, options.host, options.port)


def run_accelerate(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt accelerate`: prints what was chosen and measured, and writes the plan."""
    from dgt.app.accelerate import accelerate_model, check_places

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    check_places({"--out": options.out, "--plot": options.plot})
    report = accelerate_model(options.model, options.images, options.error, options.size, options.count)
    report.save(options.out)
    if options.plot:
        report.plot(options.plot)
    print(json.dumps(report.to_json(), indent=2) if options.json else f"{report}\n{options.out}")


def run_export(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt export`: writes the file, and prints its size and how it agreed with the checkpoint."""
    from dgt.export import export

    size = tuple(options.size) if options.size else None
    print(export(options.checkpoint, options.out, options.features, size, options.batch))


def run_weights(options: argparse.Namespace, overrides: list[str]) -> None:
    """`dgt weights`: packs a run, or lists, checks or publishes folders of weights."""
    from dgt.app.weights import make_weights, weights_line
    from dgt.weights import check_weights, list_weights
    from dgt.weights.publish import publish

    _quiet()
    if options.what == "make":
        print(make_weights(options.folder, options.out, options.half, overrides, options.about, options.plan))
    elif options.what == "publish":
        print(publish(options.folder, options.repo, options.dry_run))
    else:
        folders = [options.folder] if options.what == "check" else list_weights().values()
        found = {Path(folder): check_weights(folder) for folder in folders}
        told = {folder.resolve().name: results for folder, results in found.items()}
        print(json.dumps(told, indent=2) if options.json else "\n".join(weights_line(*each) for each in found.items()))


def run_info(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt info`: prints the table, and which native kernels are in use."""
    from dgt.app.info import comparator_rows, model_rows, model_table, native_line

    size = tuple(options.size) if options.size else None
    rows = comparator_rows(options.task) if options.comparators else model_rows(options.model, size, options.task)
    print(json.dumps(rows, indent=2) if options.json else f"{model_table(rows)}\n\n{native_line()}")


def run_bench(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt bench`: prints the table."""
    from dgt.bench import report

    print(report(options))


def run_profile(options: argparse.Namespace, _: list[str]) -> None:
    """`dgt profile`: prints a row for each way of attending, and a sentence on what to take."""
    from dgt.bench import attention
    from dgt.bench.measures import machine, table

    if (options.model is None) == (options.shape is None):
        raise UserError("name a timm model, or give --shape B,H,L,D: one of both")
    given = (options.shape, options.groups, options.top_k)
    cases = [given] if options.shape else attention.cases_of_model(options.model, options.size, *given[1:])
    rows = [attention.time_ways(case, options.device, options.rounds) for case in cases]
    flat = [row for each in rows for row in each]
    text = "\n".join([table(flat, attention.COLUMNS_OF_WAYS), *map(attention.advice, rows)])
    print(json.dumps({"machine": machine(), "rows": flat}, indent=2) if options.json else text)


def _quiet() -> None:
    """Keep Fabric's notes about hardware out of the output; its warnings and errors stay."""
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
