"""Publish a folder of weights on the Hugging Face hub; timm opens it as "hf-hub:USER/NAME"."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import HfApi, get_token

from dgt.utils.errors import UserError
from dgt.weights.folder import SUMS, check_sums, check_weights


def publish(folder: str | Path, repo: str, dry_run: bool = False) -> str:
    """Upload the files of a folder of weights and nothing else.

    Args:
        folder: folder of weights, as `make_weights` writes it.
        repo: USER/NAME; created as a public repository if it does not exist.
        dry_run: check what can be checked without a network, and upload nothing.

    Returns:
        A message about what was uploaded.

    Raises:
        UserError: If `check_weights` fails, the name is invalid, there is no token, or the hub
            rejects the upload.
    """
    folder = Path(folder)
    check_weights(folder)
    names = [*check_sums(folder), SUMS]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"repo must be USER/NAME, got {repo!r}")
    files = "".join(
        f"\n  {name:<20}{(folder / name).stat().st_size / 1e6:>9.3f} MB" for name in names
    )
    if dry_run:
        return f"would upload to {repo}, a dry run:{files}"
    token = get_token()
    if token is None:
        raise UserError(
            "publishing needs a token of the hub: `hf auth login`, or the environment variable HF_TOKEN"
        )
    hub = HfApi(token=token)
    try:
        hub.create_repo(repo, exist_ok=True)
        hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=names,
            commit_message=f"Weights {folder.name}",
        )
    except Exception as error:  # of any kind: from the network, the hub, or its client
        raise UserError(f"publishing to {repo} failed: {' '.join(str(error).split())}") from error
    return f"uploaded to {repo}; timm opens it as hf-hub:{repo}{files}"
