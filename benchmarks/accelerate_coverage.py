"""Which models `dgt.accelerate` can group: timm's pretrained ones, and the encoders of transformers.

`coverage_timm.py` and `coverage_transformers.py` inspect the models; this writes JSON. An
attention counts as one that can be grouped however few tokens it has: whether groups are faster
depends on the size and on the machine. What the file has from the same versions is kept; `--again`
inspects everything again.

    python benchmarks/accelerate_coverage.py [--only 'vit_small*'] [--again] [--out FILE]

A full run takes an hour on one core.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from coverage_timm import architectures, look_at_architecture
from coverage_transformers import look_at_encoder, registered

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accelerate_coverage.json"
PARTS = ("architectures", "encoders")
EVERY = 25  # rows after which the file is written


def read_earlier(path: Path, again: bool) -> dict[str, Any]:
    """What an earlier run found with the same versions; nothing if it is all to be done again."""
    versions = {name: version(name) for name in ("timm", "transformers", "torch")}
    found: dict[str, Any] = {**versions, "architectures": {}, "encoders": {}}
    if again or not path.is_file():
        return found
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if all(earlier.get(name) == number for name, number in versions.items()):
        found.update({part: earlier[part] for part in PARTS})
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Write the results, one row per line, sorted by name."""
    head = json.dumps({name: value for name, value in found.items() if name not in PARTS}, indent=1)
    parts = ",\n".join(text_of(part, found[part]) for part in PARTS)
    path.write_text(head.removesuffix("\n}") + ",\n" + parts + "\n}\n", encoding="utf-8")


def text_of(part: str, rows: dict[str, Any]) -> str:
    """A part of the results in JSON."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
    return f' "{part}": {{\n' + ",\n".join(lines) + "\n }"


class Work(NamedTuple):
    """A model that has not been inspected yet."""

    part: str
    name: str
    look: Callable[[str], dict[str, Any]]


def missing(found: dict[str, Any], only: str) -> list[Work]:
    """What has not been inspected yet, of the names that fit a pattern."""
    work = [Work("architectures", name, look_at_architecture) for name in architectures()]
    work += [Work("encoders", kind, look_at_encoder) for kind in registered()]
    left = [each for each in work if each.name not in found[each.part]]
    return [each for each in left if fnmatch.fnmatch(each.name, only)]


def look_at_all(found: dict[str, Any], only: str, path: Path) -> None:
    """Add what is missing, and write the results from time to time."""
    found["registered"] = {"architectures": len(architectures()), "encoders": len(registered())}
    left = missing(found, only)
    for done, (part, name, look) in enumerate(left, start=1):
        found[part][name] = look(name)
        print(f"{done} of {len(left)}: {name} {found[part][name]}", flush=True)
        if done % EVERY == 0 or done == len(left):
            write(path, found)


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of architectures and encoders")
    parser.add_argument("--again", action="store_true", help="inspect everything again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Inspect what is missing."""
    options = parse_arguments()
    look_at_all(read_earlier(options.out, options.again), options.only, options.out)


if __name__ == "__main__":
    main()
