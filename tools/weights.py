"""Pack finished runs with card, log, and checksums, and publish them on the Hugging Face hub.

    python -m tools.weights make RUN --out DIR [--half] [--about FILE] [--plan FILE] [--image-size N]
        [--data.KEY VALUE ...]
    python -m tools.weights publish FOLDER --repo USER/NAME [--dry-run]

`dgt.weights` and `dgt weights` find, list, check, and open these folders.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from dgt.utils.errors import UserError
from dgt_command.parameters import AT_LEAST_1, FOLDER, WITH_KEYS
from dgt_command.training import quiet_fabric
from tools.weights_pack import Packing, make_weights
from tools.weights_publish import publish as upload


@click.group(help=str(__doc__).partition("\n")[0])
def weights() -> None:
    """The commands."""


@weights.command(context_settings=WITH_KEYS)
@click.argument("run", type=FOLDER)
@click.argument("keys", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--out", metavar="DIR", required=True, help="The folder to write, named ARCHITECTURE.TAG."
)
@click.option("--half", is_flag=True, help="Keep matrices and convolutions in float16.")
@click.option(
    "--about",
    metavar="FILE",
    help="YAML on your data for the card: data, license, license_id, limits.",
)
@click.option(
    "--plan", metavar="FILE", help="A plan of `dgt accelerate` for this model, measured and added."
)
@click.option(
    "--image-size",
    metavar="N",
    type=AT_LEAST_1,
    help="Side in pixels of the images that the weights are for (default: the training's).",
)
def make(
    run: str,
    keys: tuple[str, ...],
    out: str,
    half: bool,
    about: str | None,
    plan: str | None,
    image_size: int | None,
) -> None:
    """Pack the folder of a finished RUN, and measure the packed weights.

    KEYS are --data.KEY VALUE, as of `dgt evaluate`.
    """
    quiet_fabric()
    print(make_weights(run, out, Packing(half, keys, about, plan, image_size)))


@weights.command()
@click.argument("folder", type=FOLDER)
@click.option("--repo", metavar="USER/NAME", required=True, help="Where on the Hugging Face hub.")
@click.option("--dry-run", is_flag=True, help="Check everything, upload nothing.")
def publish(folder: str, repo: str, dry_run: bool) -> None:
    """Upload a FOLDER of weights."""
    print(upload(folder, repo, dry_run))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, 2 for bad input."""
    try:
        weights.main(arguments, prog_name="python -m tools.weights", standalone_mode=False)
    except click.ClickException as error:
        print(f"weights: error: {error.format_message()}", file=sys.stderr)
        return 2
    except (UserError, OSError) as error:
        print(f"weights: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
