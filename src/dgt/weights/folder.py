"""A folder of weights: what belongs into it, its checksums, and where such folders are found.

```
NAME/model.safetensors, config.json  the model; a classifier's opens in timm: "local-dir:NAME"
NAME/README.md                       the model card: data, license, training, metrics, limits
NAME/recipe.yaml                     what was trained
NAME/log.txt, metrics.jsonl          how the training went
NAME/results.json                    its result
NAME/plan.json                       of some: a plan of `dgt.accelerate`, for `dgt.apply_plan`
NAME/SHA256SUMS                      the checksums of all these files, for `sha256sum --check`
```

NAME is ARCHITECTURE.TAG, as in timm. Looked for are the folders in the one that `DGT_WEIGHTS`
names, and the shipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import UserError
from dgt.weights.card import check_card

VARIABLE = "DGT_WEIGHTS"
SHIPPED = {
    "dgt_nano.camvid": "a segmenter trained on photographs of streets",
    "dgt_nano.imagenette": "trained on photographs of ten classes",
    "dgt_nano.scenes": "trained on generated scenes",
}
"""The weights that the package includes, and what they were trained on."""
SUMS, CARD, MODEL = "SHA256SUMS", "README.md", ("model.safetensors", "config.json")
PLAN = "plan.json"
STORY = ("recipe.yaml", "log.txt", "metrics.jsonl", "results.json")
FILES = (*MODEL, CARD, *STORY)


def write_sums(folder: Path) -> None:
    """Write the checksums of a folder's files."""
    names = [*FILES, *([PLAN] if (folder / PLAN).is_file() else [])]
    atomic_write(folder / SUMS, "".join(f"{_digest(folder / name)}  {name}\n" for name in names))


def check_sums(folder: Path, names: Sequence[str] | None = None) -> list[str]:
    """Check files of a folder of weights against its checksums.

    Args:
        folder: with SHA256SUMS.
        names: files to check; None for all that belong to a folder of weights.

    Returns:
        The names.

    Raises:
        UserError: SHA256SUMS or a file is missing, or a file has another checksum.

    Example:
        >>> check_sums(find_weights("dgt_nano.scenes"), ["model.safetensors"])
        ['model.safetensors']
    """
    if not (folder / SUMS).is_file():
        raise UserError(
            f"{str(folder)!r} is not a weights folder: it has no {SUMS}, "
            "which `tools/weights.py` writes"
        )
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = [*FILES, *({PLAN} & set(sums))] if names is None else list(names)
    for name in names:
        if name not in sums:
            raise UserError(f"{folder / SUMS} lacks the checksum of {name}")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing")
        if (found := _digest(folder / name)) != sums[name]:
            told = f"SHA-256 {sums[name][:12]}... expected, {found[:12]}... found"
            raise UserError(f"{folder / name} does not match its checksum in {SUMS}: {told}")
    return names


def check_weights(folder: str | Path) -> dict[str, Any]:
    """Check a folder of weights.

    Args:
        folder: with checksums, card and results.json.

    Returns:
        What results.json says.

    Raises:
        UserError: a checksum is wrong, the card lacks a section or a metric, or results.json lacks
            the evaluation.

    Example:
        >>> check_weights(find_weights("dgt_nano.scenes"))["evaluation"]["metrics"]["top1"]["value"]
        0.973
    """
    folder = Path(folder)
    check_sums(folder)
    results: Any = json.loads((folder / STORY[-1]).read_text(encoding="utf-8"))
    measured = results.get("evaluation", {}).get("metrics", {})
    if not measured:
        raise UserError(f"{folder / STORY[-1]} has no evaluation of the weights")
    check_card(folder / CARD, list(measured))
    return dict(results)


def find_weights(name: str) -> Path:
    """Find the folder of weights by name.

    Args:
        name: ARCHITECTURE.TAG.

    Returns:
        The folder; the checksum of its model has been checked.

    Raises:
        UserError: there is none, or its model has another checksum.

    Example:
        >>> find_weights("dgt_nano.scenes").name
        'dgt_nano.scenes'
    """
    found = list_weights()
    if name not in found:
        chosen = os.environ.get(VARIABLE)
        hint = (
            f"{chosen!r}, set by {VARIABLE}, has none"
            if chosen
            else f"set {VARIABLE} to a folder with weights"
        )
        raise UserError(
            f"no weights {name!r} were found ({hint}); available are {', '.join(found)}"
        )
    check_sums(found[name], MODEL)
    return found[name]


def list_weights() -> dict[str, Path]:
    """List the folders of weights that are found.

    Returns:
        Folders by name.

    Example:
        >>> "dgt_nano.scenes" in list_weights()
        True
    """
    chosen = os.environ.get(VARIABLE)
    paths = [path.parent for path in sorted(Path(chosen).glob(f"*/{SUMS}"))] if chosen else []
    shipped = {name: Path(__file__).with_name(name) for name in SHIPPED}
    return shipped | {path.name: path for path in paths}


def default_models(
    runs: str | Path = "runs", shipped: str = "dgt_nano.imagenette"
) -> Iterator[tuple[Path, str]]:
    """Yield the models to use where none is given.

    Finished runs come first, newest first, then weights of SHIPPED.

    Args:
        runs: the folder of runs.
        shipped: the name of these weights.

    Returns:
        Folders, each with a line that says why it is used.

    Example:
        >>> folder, reason = next(default_models())
    """
    dated = [(path.stat().st_mtime, path) for path in Path(runs).glob(f"*/model/{MODEL[0]}")]
    now = time.time()
    for written, model in sorted(dated, reverse=True):
        run = model.parents[1]
        ahead = written > now + 60
        hint = " (by its date, which is in the future: check the clock)" if ahead else ""
        yield run, f"no model given: using the newest suitable run, {run}{hint}"
    yield (
        find_weights(shipped),
        f"no model given and no suitable run in {runs}/: using {shipped}, {SHIPPED[shipped]}",
    )


def weights_line(folder: str | Path, results: Mapping[str, Any]) -> str:
    """Describe a folder of weights in a line: name, bytes, metrics, place.

    Args:
        folder: the folder, already checked.
        results: what its results.json says.

    Returns:
        The line.

    Example:
        >>> print(weights_line(folder, check_weights(folder)))
    """
    path = Path(folder)
    metrics = results["evaluation"]["metrics"].values()
    summary = "  ".join(f"{row['label']} {100 * row['value']:.2f} %" for row in metrics)
    size = (path / MODEL[0]).stat().st_size / 1e6
    return f"{path.resolve().name:<28}{size:>7.1f} MB  {summary}  {path}"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
