"""Where this package keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the package's folder in the user's cache folder, which may not exist yet.

    It is `$XDG_CACHE_HOME/dgt`, or `~/.cache/dgt`.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgt"
