"""Which optional library belongs to which extra of the package, and what to say where one is
missing.
"""

import importlib.util
from collections.abc import Sequence

from dgt.utils.errors import UserError

EXTRAS = {
    "lightning_fabric": "train",
    "torchmetrics": "train",
    "tensorboard": "train",
    "tqdm": "train",
    "transformers": "transformers",
    "datasets": "hub",
    "faster_coco_eval": "detect",
    "matplotlib": "explore",
    "fastapi": "explore",
    "uvicorn": "explore",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "openvino": "openvino",
}
"""Import name of each optional library, and the extra that installs it."""


def install_command(extra: str) -> str:
    """The command that installs an extra of this package."""
    return f"pip install '.[{extra}]' in the checkout"


def explain_missing(error: ModuleNotFoundError, what: str) -> str | None:
    """Say in a sentence which extra to install.

    Args:
        error: of an import that failed.
        what: what needs the library, as the sentence starts.

    Returns:
        The sentence, or None for a module that no extra of ours installs.
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    return f"{what} needs {library}, which is not installed: {install_command(EXTRAS[library])}"


def require(what: str, libraries: Sequence[str], extra: str) -> None:
    """Check that libraries are installed, without importing them.

    Args:
        what: what needs them, as the error message starts.
        libraries: their import names.
        extra: the extra that installs them.

    Raises:
        UserError: one of them is missing; the message has the command that installs it.
    """
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"{what} needs {', '.join(missing)}, which {verb} not installed: {install_command(extra)}"
        )
