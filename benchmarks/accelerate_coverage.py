"""Which models `dgt.accelerate` can have done in groups: timm's pretrained ones, and the encoders
of transformers.

`coverage_timm.py` and `coverage_transformers.py` look; this writes JSON and a page. An attention
counts as one that can be grouped however few tokens it has there: whether groups are faster is a
matter of the size, and of the machine. What the file has from the same versions is kept; `--again`
looks at everything again.

    python benchmarks/accelerate_coverage.py [--only 'vit_small*'] [--again] [--out FILE]
    python benchmarks/accelerate_coverage.py --page            (docs/accelerate_models.md again)

All of it takes an hour of one core.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coverage_page import page
from coverage_timm import architectures, look_at_architecture
from coverage_transformers import look_at_encoder, registered

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accelerate_coverage.json"
PAGE = ROOT / "docs" / "accelerate_models.md"
PARTS = ("architectures", "encoders")
EVERY = 25  # rows after which the file is written


def read_earlier(path: Path, again: bool) -> dict[str, Any]:
    """What an earlier run found with the same versions."""
    versions = {name: version(name) for name in ("timm", "transformers", "torch")}
    found: dict[str, Any] = {**versions, "architectures": {}, "encoders": {}}
    if again or not path.is_file():
        return found
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if all(earlier.get(name) == number for name, number in versions.items()):
        found.update({part: earlier[part] for part in PARTS})
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """A row a line, sorted by name."""
    head = json.dumps({name: value for name, value in found.items() if name not in PARTS}, indent=1)
    parts = []
    for part in PARTS:
        rows = [
            f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found[part].items())
        ]
        parts.append(f' "{part}": {{\n' + ",\n".join(rows) + "\n }")
    text = head.removesuffix("\n}") + ",\n" + ",\n".join(parts) + "\n}\n"
    path.write_text(text, encoding="utf-8")


def look_at_all(found: dict[str, Any], only: str, path: Path) -> None:
    """Add what is missing, and write it from time to time."""
    found["registered"] = {"architectures": len(architectures()), "encoders": len(registered())}
    work: list[tuple[str, str, Any]] = [
        ("architectures", name, look_at_architecture) for name in architectures()
    ]
    work += [("encoders", kind, look_at_encoder) for kind in registered()]
    left = [
        (part, name, look)
        for part, name, look in work
        if name not in found[part] and fnmatch.fnmatch(name, only)
    ]
    for done, (part, name, look) in enumerate(left, start=1):
        found[part][name] = look(name)
        print(f"{done} of {len(left)}: {name} {found[part][name]}", flush=True)
        if done % EVERY == 0 or done == len(left):
            write(path, found)


def main() -> None:
    """Look at what is missing, or only write the page again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of architectures and encoders")
    parser.add_argument("--again", action="store_true", help="look at everything again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--page", action="store_true", help="write the page from the results that are there"
    )
    options = parser.parse_args()
    if not options.page:
        look_at_all(read_earlier(options.out, options.again), options.only, options.out)
    if options.out == RESULTS:
        PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
