"""JSON files that we wrote, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dgt.utils.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
