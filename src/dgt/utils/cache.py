"""Where this package keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The package's folder in the user's cache folder: `$XDG_CACHE_HOME/dgt`, or `~/.cache/dgt`; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgt"
