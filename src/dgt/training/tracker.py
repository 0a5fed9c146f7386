"""Experiment trackers: Weights & Biases or Trackio, which both have `init`, `log` and `finish`.

They get the numbers of `metrics.jsonl`, by optimizer step, and the recipe as the run's settings.
Without a network they write files of their own: WANDB_MODE=offline; Trackio always does.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from dgt.runs.recipe import Recipe
from dgt.utils.atomic_write import atomic_write
from dgt.utils.errors import LOGGER, UserError

RUN_ID = "tracker_id.txt"  # in a run's folder, so that a resumed training goes on in its tracker


def load_tracker(name: str | None) -> Any:
    """Import the tracker of a recipe; None for none.

    Raises:
        UserError: its package is not installed.
    """
    if name is None:
        return None
    module: Any = None
    with suppress(ImportError):
        module = _import(name)
    # a folder of that name, as trackers leave one where they run, is imported, too
    if not all(hasattr(module, function) for function in ("init", "log", "finish")):
        raise UserError(
            f"trainer.tracker {name} needs the package {name}: `pip install {name}`, or set "
            "trainer.tracker to null"
        )
    return module


def _import(name: str) -> Any:
    if name == "wandb":
        import wandb

        return wandb
    import trackio

    return trackio


class Tracker:
    """One run in a tracker; what goes wrong there is logged once and ends nothing."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.module = load_tracker(recipe.trainer.tracker)
        self.failed = False
        if self.module is not None:
            self._try("init", **self._settings(recipe, folder))

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Add numbers of an optimizer step."""
        if numbers:
            self._try("log", numbers, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._try("finish")

    def _settings(self, recipe: Recipe, folder: Path) -> dict[str, Any]:
        """Arguments of `init`: runs of one recipe are a project, and have the names of their folders."""
        place = folder / RUN_ID
        if not place.is_file():
            atomic_write(place, uuid.uuid4().hex)
        identity = place.read_text(encoding="utf-8")
        settings: dict[str, Any] = {
            "project": recipe.name,
            "config": recipe.to_dict(),
            "resume": "allow",
        }
        if recipe.trainer.tracker == "wandb":
            return settings | {"name": folder.name, "id": identity, "dir": str(folder)}
        # which resumes by name: other folders may have the same
        return settings | {"name": f"{folder.name}-{identity[:8]}"}

    def _try(self, function: str, *arguments: Any, **named: Any) -> None:
        if self.module is None or self.failed:
            return
        try:
            getattr(self.module, function)(*arguments, **named)
        except Exception as error:  # of a network, a disk, a login: whatever a tracker raises
            self.failed = True
            LOGGER.warning(
                f"the tracker {self.module.__name__} could not {function}, training continues "
                f"without it: {error!r}"
            )
