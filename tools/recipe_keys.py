"""Write `src/dgt/recipes/keys.json`: for each task, all recipe keys with their defaults.

    python tools/recipe_keys.py

The command checks the keys of a recipe against this file before it loads PyTorch. A test compares
the two.
"""

from __future__ import annotations

import json
from typing import Any

from dgt.runs.recipe import recipe_parser
from dgt.tasks import TASKS
from dgt.utils.atomic_write import atomic_write
from dgt_command.recipe_files import KEYS, flatten


def keys() -> dict[str, dict[str, Any]]:
    """The defaults of every task's recipe by flat key, as JSON values."""
    found = {task: flatten(recipe_parser(task).get_defaults().as_dict()) for task in TASKS}
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(found, default=str))
    return plain


if __name__ == "__main__":
    atomic_write(KEYS, json.dumps(keys(), indent=1) + "\n")
