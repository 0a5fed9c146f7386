"""Feed a thousand corrupted images and as many corrupted recipes to the package: `python tests/fuzz/run.py [COUNT]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from check import check_image, check_recipe


def main() -> int:
    """Print the results by kind and every failing file; return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "count", nargs="?", type=int, default=1000, help="of each kind (default: %(default)s)"
    )
    count = parser.parse_args().count
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for what, check in (
            ("images", check_image),
            ("recipes", lambda seed: check_recipe(seed, Path(folder))),
        ):
            outcomes = []
            for seed in range(count):
                outcome, fault = check(seed)
                outcomes.append("wrong" if fault else outcome)
                if fault:
                    wrong.append(fault)
                    print(fault, flush=True)
            print(what, dict(Counter(outcomes)), flush=True)
    return min(len(wrong), 255)


if __name__ == "__main__":
    sys.exit(main())
