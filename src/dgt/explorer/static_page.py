"""`dgt explore --export FOLDER`: the page of the explorer as files, for any file host or none, with
chosen images.

All server responses are computed in advance: for every image, block and head the groups at a row
of numbers of keys. A page that is opened as a file may fetch nothing and import no module, but may
run scripts. So its modules are joined to one script, and its answers are scripts too: `answers.js`
has the model and the images, `data/` a file for each image and block, which the page loads when it
is looked at.
"""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgt.explorer.album import encode_jpeg
from dgt.explorer.views import Explorer
from dgt.utils.atomic_write import json_text, replacing
from dgt.utils.class_names import some
from dgt.utils.errors import UserError

STATIC = Path(__file__).with_name("static")
MODULES = ("server.js", "painter.js", "charts.js", "explorer.js")
ANSWERS = "answers.js"
PARTS = {"index.html", "explorer.css", "explorer.js", "icon.svg", ANSWERS, "data"}
"""What an export consists of."""
SIDE = 768  # of the images


def export_page(explorer: Explorer, folder: str | Path) -> int:
    """Write the page with all images of the album, atomically.

    Args:
        explorer: the model and the album.
        folder: to write; an earlier export in it is replaced.

    Returns:
        The number of bytes.

    Raises:
        UserError: the folder holds something else.
        OSError: it cannot be written.
    """
    folder = Path(folder)
    check_folder(folder)
    with replacing(folder) as partial:
        (partial / "data").mkdir(parents=True)
        for name in ("explorer.css", "icon.svg"):
            shutil.copyfile(STATIC / name, partial / name)
        page = re.sub(
            r'<link rel="modulepreload"[^>]*>\n', "", (STATIC / "index.html").read_text("utf-8")
        )
        page = page.replace('type="module" src="explorer.js"', 'defer src="explorer.js"')
        page = page.replace(
            "<script defer", f'<script defer src="{ANSWERS}"></script>\n<script defer'
        )
        (partial / "index.html").write_text(page, encoding="utf-8")
        (partial / "explorer.js").write_text(joined_modules(), encoding="utf-8")
        keys = [list(_key_counts(explorer, block)) for block in range(len(explorer.blocks))]
        images = [{"id": key, "title": title} for key, title in explorer.album.names()]
        content: dict[str, Any] = {
            "model": {**explorer.describe(), "sizes": [explorer.size]},
            "images": images,
        }
        pictures = {each["id"]: _picture(explorer, each["id"]) for each in images}
        content |= {"keys": keys, "pictures": pictures, "parts": {}}
        (partial / ANSWERS).write_text(
            f"globalThis.exported = {json_text(content)};\n", encoding="utf-8"
        )
        for each in images:
            for block, counts in enumerate(keys):
                name = f"{each['id']}-{block}"
                part = json_text(_answers(explorer, each["id"], block, counts))
                (partial / "data" / f"{name}.js").write_text(
                    f"exported.parts[{name!r}] = {part};\n", encoding="utf-8"
                )
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_folder(folder: Path) -> None:
    """Raise UserError where something other than an earlier export would be replaced, or the folder
    one is in.
    """
    if folder.resolve() == Path.cwd():
        raise UserError(
            f"the folder is replaced as a whole: it must not contain the current directory, got {str(folder)!r}"
        )
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(names - PARTS if ANSWERS in names else names)
    if folder.is_file() or others:
        raise UserError(
            f"{str(folder)!r} contains something other than an exported page: name a new folder "
            f"({some(others) if others else 'it is a file'})"
        )


def joined_modules() -> str:
    """The page's modules as one script, in the order of their imports."""
    text = "\n".join((STATIC / name).read_text("utf-8") for name in MODULES)
    text = re.sub(r"^import .*;\n", "", text, flags=re.MULTILINE)
    return f'(async () => {{\n"use strict";\n{re.sub(r"^export ", "", text, flags=re.MULTILINE)}\n}})();\n'


def _key_counts(explorer: Explorer, block: int) -> Iterator[int]:
    """Numbers of keys that are computed: powers of two to twice the block's own, its own, at most
    what a view holds.
    """
    top_k = explorer.blocks[block].layer.top_k
    most = explorer.view(explorer.album.names()[0][0], explorer.size, block, 0, 1)["max_k"]
    yield from sorted(
        {min(count, most) for count in (top_k, *(2**i for i in range((2 * top_k).bit_length())))}
    )


def _answers(explorer: Explorer, image: str, block: int, counts: list[int]) -> dict[str, Any]:
    """Every view, by head and number of keys, and every curve, by head, of one block on one image."""
    views: dict[str, Any] = {}
    at = [
        (image, explorer.size, block, head)
        for head in range(explorer.blocks[block].layer.num_heads)
    ]
    for place in at:
        views |= {
            f"{place[3]} {k}": {**explorer.view(*place, k), "max_k": counts[-1]} for k in counts
        }
    return {"views": views, "curves": [explorer.curve(*place) for place in at]}


def _picture(explorer: Explorer, image: str) -> str:
    """The image as the page shows it, inside an address: the pixels of another file would be out of
    its reach.
    """
    content = encode_jpeg(explorer.album.image(image), explorer.size, explorer.step, SIDE)
    return "data:image/jpeg;base64," + base64.b64encode(content).decode("ascii")
