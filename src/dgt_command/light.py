"""Modules of `dgt` without its `__init__.py`, which loads PyTorch and timm: for commands that only
read files.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dgt_command.parameters import Mistake

PACKAGES = ("dgt", "dgt.runs")
"""The packages that are left out: what they import at once needs PyTorch."""


@contextmanager
def without_pytorch() -> Iterator[None]:
    """Inside, `import dgt.weights` and the like run that module, but not the packages around it.

    Afterwards, `import dgt` is the whole package again. Where it has been imported already, nothing
    is left out.

    Raises:
        Mistake: instead of a UserError, whose class ends with the modules.
    """
    if "dgt" in sys.modules:
        yield
        return
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
        sys.modules[name] = importlib.util.module_from_spec(spec)
    from dgt.utils.errors import UserError

    try:
        yield
    except UserError as error:
        raise Mistake(str(error)) from error
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "dgt"]:
            del sys.modules[name]
