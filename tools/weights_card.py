"""The model card of a folder of weights: `weights_card.md` filled in from the files of a run.

`weights_about.yaml` has the text about the data, by data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from dgt.utils.errors import UserError

TEMPLATE = Path(__file__).with_name("weights_card.md")
KNOWN_DATA = Path(__file__).with_name("weights_about.yaml")
ABOUT = ("data", "license", "license_id", "limits")
PARTS = 10
"""Number of parts of the images; the jackknife leaves out one at a time."""
STUDENT = 2.262
"""Student's 97.5 % quantile for `PARTS` values."""


def jackknife(value: float, left_out: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval for a measure over all images, from its values without each of `PARTS` parts."""
    mean = sum(left_out) / PARTS
    squares = sum((each - mean) ** 2 for each in left_out)
    half = STUDENT * math.sqrt((PARTS - 1) / PARTS * squares)
    return max(0.0, value - half), min(1.0, value + half)


def about_data(names: Sequence[str], given: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the card's text about the data.

    Args:
        names: names of the data set, its folder and the recipe; the first that starts with a known name is
            used.
        given: texts that take precedence over the known ones.

    Returns:
        One text per key of `ABOUT`.

    Raises:
        UserError: If `given` lacks a key, or nothing is known about the data.
    """
    found = _known_data(names) if given is None else given
    missing = [key for key in ABOUT if not found.get(key)]
    if missing:
        what = (
            f"what is known of the data of recipe {names[-1]!r}"
            if given is None
            else "the description"
        )
        raise UserError(
            f"{what} lacks {', '.join(missing)}: give --about FILE, YAML with {', '.join(ABOUT)}"
        )
    return {key: str(found[key]).strip() for key in ABOUT}


def _known_data(names: Sequence[str]) -> Mapping[str, Any]:
    known: dict[str, dict[str, Any]] = yaml.safe_load(KNOWN_DATA.read_text(encoding="utf-8"))
    for name in names:
        for start, about in known.items():
            if name.startswith(start):
                return about
    return {}


def card_text(
    name: str, results: Mapping[str, Any], about: Mapping[str, str], timm: bool, size: int
) -> str:
    """Write the card of a folder of weights.

    Args:
        name: name of the folder.
        results: contents of the run's `results.json`, with its `evaluation`.
        about: return value of `about_data`.
        timm: whether timm can open the weights.
        size: size of the weights in bytes.
    """
    evaluation = results["evaluation"]
    first = results.get("first_weights") or {"name": "random"}
    trained_at = f", at {evaluation['trained_at']} px" if "trained_at" in evaluation else ""
    metrics = evaluation["metrics"]
    plan = evaluation.get("plan")
    use = [f"dgt predict {name} image.jpg", f"dgt evaluate {name}"]
    tags = ["dynamic-group-transformer"]
    if timm:
        use.append(f'timm.create_model("local-dir:{name}", pretrained=True)  # after import dgt')
        tags += ["image-classification", "timm"]
    if plan:
        use.append(f'dgt.apply_plan(model, "{name}/plan.json")')
    header = ModelCardData(
        license=about["license_id"], library_name="timm" if timm else "dgt", tags=tags
    )
    versions = ", ".join(
        f"{key} {version}" for key, version in results["versions"].items() if version
    )
    values = {
        **results,
        **evaluation,
        **about,
        "name": name,
        "use": "\n    ".join(use),
        "rows": "\n".join(_row(row) for row in metrics.values()),
        "versions": versions,
        "millions": f"{results['parameters'] / 1e6:.2f}",
        "megabytes": f"{size / 1e6:.1f}",
        "first_weights": f"`{first['command']}`" if "command" in first else first["name"],
        "size": f" of {evaluation['image_size']} px" if trained_at else "",
        "trained_at": trained_at,
        "hours": f"{(results['seconds'] + first.get('seconds', 0)) / 3600:.2f}",
        "plan_text": plan_text(plan, metrics) if plan else "",
    }
    return (
        str(
            ModelCard.from_template(
                header, template_str=TEMPLATE.read_text(encoding="utf-8"), **values
            )
        )
        + "\n"
    )


def _row(row: Mapping[str, Any]) -> str:
    value, low, high = (f"{100 * row[key]:.2f}" for key in ("value", "low", "high"))
    return f"| {row['label']} | {value} % | {low} to {high} % | {100 * row['of_the_run']:.2f} % |"


def plan_text(plan: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """A paragraph about the speed and accuracy of an accelerated model's plan."""
    values = ", ".join(
        f"{metrics[key]['label']} {100 * value:.2f} %" for key, value in plan["metrics"].items()
    )
    attention, model, bound = (
        f"{1 / plan[key]:.2f}" for key in ("attention_speedup", "model_speedup", "bound")
    )
    return (
        f"\n\nWith the plan, on these images: {values}. {plan['grouped']} of {plan['attentions']} attentions "
        f"are in groups; where it was made, attention took {attention} of its time and the model {model} ({bound} "
        f"without attention). The output's relative error: {plan['measured_error']:.2g} of {plan['asked_error']:.2g}."
    )
