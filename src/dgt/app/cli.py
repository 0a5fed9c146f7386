"""What each `dgt` command does, once `dgt_command` has parsed it. Modules are imported where they are needed."""

from __future__ import annotations

import argparse
import json
import sys

from dgt.utils.errors import Disagreement, LostProcess, UserError


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    """Run a parsed command and return the exit status.

    Args:
        options: what `dgt_command` parsed.
        overrides: the recipe's keys among the words, as they came.
    """
    try:
        return COMMANDS[options.command](options, overrides)
    except (UserError, OSError) as error:
        print(f"dgt: error: {error}", file=sys.stderr)
        return 2
    except (LostProcess, Disagreement, FloatingPointError) as error:
        print(f"dgt: error: {error}", file=sys.stderr)
        return 1


def run_demo(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt demo`: trains, draws, and prints what to look at."""
    from dgt.app import demo

    _quiet()
    print(demo.run(options.out, seed=options.seed, epochs=options.epochs))
    return 0


def run_train(options: argparse.Namespace, overrides: list[str]) -> int:
    """`dgt train`: prints the help, or trains and prints where the results are."""
    from dgt.app.visualize import draw_training
    from dgt.tasks import TASKS
    from dgt.training import fit, load_recipe
    from dgt.training.recipe import help_text
    from dgt.utils.distributed import rank

    if options.help:
        print(help_text(load_recipe(options.recipe).task))
        return 0
    _quiet()
    recipe = load_recipe(options.recipe, overrides)
    result = fit(recipe, options.resume == "auto", draw_training)
    if rank() == 0:
        print(f"{TASKS[recipe.task].summary(result.metrics)}  in {result.folder}")
    return 0


def run_status(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt status`: prints how a run stands."""
    from dgt.training.status import run_status, status_text

    status = run_status(options.folder)
    print(json.dumps(status, indent=2) if options.json else status_text(status))
    return 0


def run_ablate(options: argparse.Namespace, overrides: list[str]) -> int:
    """`dgt ablate`: trains what is missing and prints the table; without one, which there are."""
    if options.table in options.experiments:
        return _retrieval(options, overrides)
    from dgt.experiments.ablate import ablate
    from dgt.experiments.tables import tables_text

    if options.table is None:
        print("\n".join([tables_text(), *(f"{name:<18}{title}" for name, title in options.experiments.items())]))
        return 0
    _quiet()
    folder = ablate(options.table, overrides, options.seeds, options.out, options.size)
    print((folder / "table.md").read_text(encoding="utf-8") + f"\n{folder / 'table.json'}")
    return 0


def _retrieval(options: argparse.Namespace, words: list[str]) -> int:
    import logging

    from dgt.experiments.retrieval import retrieval
    from dgt.figures import save_figure
    from dgt.figures.retrieval import figure_retrieval

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = retrieval(words, options.seeds, options.out)
    content = json.loads((folder / "retrieval.json").read_text(encoding="utf-8"))
    save_figure(figure_retrieval(content), folder / "retrieval.png", dpi=130)
    print((folder / "retrieval.md").read_text(encoding="utf-8") + f"\n{folder / 'retrieval.png'}")
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
    from dgt.app.predict import predict_files, prediction_lines
    from dgt.training import load_run

    found = predict_files(load_run(options.checkpoint), options.images, options.out, options.top_k)
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
    from dgt.app.visualize import visualize

    choice = (options.block, options.head, options.groups, options.map, options.all_blocks)
    visualize(options.checkpoints, [options.image], options.out, *choice)
    print(options.out)
    return 0


def run_diagnose(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt diagnose`: writes the figure and prints the numbers."""
    from dgt.app.visualize import diagnose_run
    from dgt.figures.diagnosis import diagnosis_table

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


def run_export(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt export`: writes the file, and prints its size and how it agreed with the checkpoint."""
    from dgt.export import export

    print(export(options.checkpoint, options.out, options.features))
    return 0


def run_info(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt info`: prints the table."""
    from dgt.app.info import model_rows, model_table

    rows = model_rows(options.model, tuple(options.size) if options.size else None, options.task)
    print(json.dumps(rows, indent=2) if options.json else model_table(rows))
    return 0


def run_bench(options: argparse.Namespace, _: list[str]) -> int:
    """`dgt bench`: prints the table."""
    from dgt.bench import report

    print(report(options))
    return 0


def _quiet() -> None:
    """Keep Lightning's notes about hardware and upgrades out of the output; its warnings and errors stay."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", message=".*treespec.*")  # Lightning's own use of torch, told to its users
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


COMMANDS = {
    "demo": run_demo,
    "train": run_train,
    "status": run_status,
    "ablate": run_ablate,
    "evaluate": run_evaluate,
    "predict": run_predict,
    "visualize": run_visualize,
    "diagnose": run_diagnose,
    "explore": run_explore,
    "export": run_export,
    "info": run_info,
    "bench": run_bench,
}
