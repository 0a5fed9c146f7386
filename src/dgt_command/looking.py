"""Commands that look into a trained model: `visualize`, `diagnose`, `explore`."""

from __future__ import annotations

import click

from dgt_command.output import print_json
from dgt_command.parameters import AT_LEAST_0, AT_LEAST_1
from dgt_command.training import quiet_fabric


@click.command()
@click.argument("checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.argument("image")
@click.option(
    "--block",
    metavar="N",
    type=AT_LEAST_0,
    help="Block, from 0 (default: the last one of each stage).",
)
@click.option(
    "--head",
    metavar="N",
    type=AT_LEAST_0,
    default=0,
    show_default=True,
    help="Attention head, from 0.",
)
@click.option(
    "--groups", metavar="N", type=AT_LEAST_1, default=3, show_default=True, help="Groups to show."
)
@click.option("--map", "as_map", is_flag=True, help="Color all groups at once instead.")
@click.option("--all-blocks", is_flag=True, help="One sheet with the map of every block.")
@click.option(
    "--out",
    metavar="FIG",
    default="groups.png",
    show_default=True,
    help="PNG, SVG, PDF or GIF to write.",
)
def visualize(
    checkpoints: tuple[str, ...],
    image: str,
    block: int | None,
    head: int,
    groups: int,
    as_map: bool,
    all_blocks: bool,
    out: str,
) -> None:
    """Draw query groups and their selected keys over an image.

    CHECKPOINT is a checkpoint (.ckpt), a run folder, or a model folder. Several from one training
    show how groups change: one row each, or the frames of a .gif.
    """
    from dgt_command.visualize import View
    from dgt_command.visualize import visualize as draw

    draw(checkpoints, [image], out, View(block, head, groups, as_map, all_blocks))
    print(out)


@click.command()
@click.argument("checkpoint")
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--out",
    metavar="FIG",
    default="diagnosis.png",
    show_default=True,
    help="PNG, SVG or PDF to write.",
)
def diagnose(checkpoint: str, images: tuple[str, ...], as_json: bool, out: str) -> None:
    """Measure and draw how much of global attention a model's selected keys cover, and how balanced
    groups are.

    CHECKPOINT is a checkpoint (.ckpt), a run folder, or a model folder.
    """
    from dgt.figures.diagnosis import diagnosis_table
    from dgt_command.visualize import diagnose_run

    blocks = diagnose_run(checkpoint, images, out)
    if as_json:
        print_json([block._asdict() for block in blocks])
    else:
        print(f"{diagnosis_table(blocks)}\n{out}")


@click.command()
@click.argument("checkpoint", required=False)
@click.option(
    "--image", metavar="PATH", help="Image file or folder to show in addition to the scenes."
)
@click.option(
    "--export", metavar="FOLDER", help="Write the page as static files for any web server."
)
@click.option(
    "--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option(
    "--port",
    metavar="N",
    type=AT_LEAST_0,
    default=7860,
    show_default=True,
    help="Port; 0 picks a free one.",
)
def explore(
    checkpoint: str | None, image: str | None, export: str | None, host: str, port: int
) -> None:
    """Explore groups and keys interactively in a web page.

    CHECKPOINT is a checkpoint (.ckpt), a run folder, a model folder, or the name of weights
    (default: the newest run, else weights that are included: dgt_nano.imagenette with --image,
    dgt_nano.scenes without).
    """
    from dgt.explorer import export as export_page
    from dgt.explorer import serve

    quiet_fabric()
    if export is not None:
        print(export_page(export, checkpoint, image))
        return
    serve(checkpoint, image, host, port)
