"""Commands that count and time: `info`, `profile`."""

from __future__ import annotations

import click

from dgt_command.output import print_json
from dgt_command.parameters import AT_LEAST_1, Mistake, Shape


@click.command()
@click.argument("model", required=False)
@click.option(
    "--task",
    metavar="TASK",
    default="classify",
    show_default=True,
    help="classify, segment or detect.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--size",
    metavar="H W",
    nargs=2,
    type=AT_LEAST_1,
    help="Size of the images (default: the paper's).",
)
@click.option(
    "--comparators",
    is_flag=True,
    help="List every model of the paper's table for this task instead.",
)
def info(
    model: str | None, task: str, as_json: bool, size: tuple[int, int] | None, comparators: bool
) -> None:
    """Print parameters and FLOPs of models beside the paper's, and which kernels are in use.

    MODEL is any timm model (default: all of this package).
    """
    if comparators and (model is not None or size is not None):
        raise Mistake(
            "--comparators lists the paper's models at the paper's sizes: do not pass a model or --size"
        )

    from dgt_command.info import GPU_LINE, comparator_rows, model_rows, model_table, native_line

    rows = comparator_rows(task) if comparators else model_rows(model, size, task)
    if as_json:
        print_json(rows)
    else:
        print(f"{model_table(rows)}\n\n{GPU_LINE}\n{native_line()}")


@click.command()
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option(
    "--shape", metavar="B,H,L,D", type=Shape(), help="Batch, heads, tokens, channels of a head."
)
@click.option(
    "--groups",
    metavar="N",
    type=AT_LEAST_1,
    default=48,
    show_default=True,
    help="Number of groups, G.",
)
@click.option(
    "--top-k",
    metavar="N",
    type=AT_LEAST_1,
    default=98,
    show_default=True,
    help="Keys per group, k.",
)
@click.option("--device", metavar="NAME", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--rounds",
    metavar="N",
    type=AT_LEAST_1,
    default=7,
    show_default=True,
    help="Timing rounds per candidate.",
)
@click.option(
    "--size",
    metavar="PIXELS",
    type=AT_LEAST_1,
    default=224,
    show_default=True,
    help="Side length of the images.",
)
def profile(
    model: str | None,
    as_json: bool,
    shape: tuple[int, ...] | None,
    groups: int,
    top_k: int,
    device: str,
    rounds: int,
    size: int,
) -> None:
    """Find the fastest attention for a shape on this machine.

    MODEL is a timm model, in place of --shape: then all sizes of attention in it are timed.
    """
    if (model is None) == (shape is None):
        raise Mistake("give either a timm model or --shape B,H,L,D")

    from dgt_command import profile as profiling
    from dgt_command.measures import machine, table

    if shape is not None:
        cases = [profiling.Case(shape, groups, top_k)]
    else:
        cases = profiling.cases_of_model(str(model), size, groups, top_k)
    rows_of_cases = []
    try:
        for case in cases:
            rows_of_cases.append(profiling.time_ways(case, device, rounds))
    finally:  # interrupted, it has the cases that were timed
        rows = [row for rows_of_case in rows_of_cases for row in rows_of_case]
        if rows and as_json:
            print_json({"machine": machine(), "rows": rows})
        elif rows:
            print(table(rows, profiling.COLUMNS))
            print("\n".join(profiling.advice(rows_of_case) for rows_of_case in rows_of_cases))
