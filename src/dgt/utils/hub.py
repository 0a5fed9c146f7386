"""Names on the Hugging Face Hub, told from paths that are mistyped before anything waits for the
network.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from dgt.utils.errors import UserError

SECONDS = 10.0
"""How long the Hub is waited for."""


@lru_cache(maxsize=16)
def check_on_hub(what: str, name: str, kind: Literal["model", "dataset"]) -> None:
    """Ask the Hub once for a name OWNER/NAME that is no path here; what was downloaded before is not
    asked for.

    The libraries that download ask again and again for half a minute where nobody answers.

    Args:
        what: the start of a message, which the name is put behind.
        name: as it was given.
        kind: of repository.

    Raises:
        FileNotFoundError: the name begins with a folder that is here, so that it is a path.
        UserError: the Hub does not have it, or cannot be reached.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if Path(name).parent.is_dir():
        raise FileNotFoundError(f"{what} {name}: there is no such file or folder")
    downloaded = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"
    if downloaded.is_dir():
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=SECONDS)
    except HfHubHTTPError as error:
        reason = "the Hub has no such name that you may read"
        cause: Exception = error
    except OfflineModeIsEnabled as error:
        reason = "it was not downloaded before, and HF_HUB_OFFLINE is set"
        cause = error
    except Exception as error:  # of the library that it asks with: many kinds
        reason = f"the Hub cannot be asked ({error})"
        cause = error
    else:
        return
    raise UserError(f"{what} {name}: there is no such folder here, and {reason}") from cause
