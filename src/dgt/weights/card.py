"""The model card of a folder of weights: `card.md` filled in from what a run left behind, and checked for its parts.

What it says of the data, by data set, stands in `about.yaml`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dgt.utils.errors import UserError

HERE = Path(__file__).parent
SECTIONS = re.findall(r"^## (.+)$", (HERE / "card.md").read_text(encoding="utf-8"), flags=re.M)
ABOUT = ("data", "licence", "licence_id", "limits")
PARTS, T_95 = 10, 2.262  # parts of the images that are left out in turn, and Student's quantile for so many


def wilson(share: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval for a share that was found among `count` images."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def jackknife(value: float, left_out: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval for a measure of all images, from its values with each of `PARTS` equal parts left out."""
    mean = sum(left_out) / PARTS
    half = T_95 * math.sqrt((PARTS - 1) / PARTS * sum((each - mean) ** 2 for each in left_out))
    return max(0.0, value - half), min(1.0, value + half)


def about_data(names: Sequence[str], given: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What the card says of the data, by the keys of `ABOUT`: of the first of `names` that begins like a known one.

    `given` goes before what is known. Raises UserError where it lacks a key, or nothing is known of the data.
    """
    known = yaml.safe_load((HERE / "about.yaml").read_text(encoding="utf-8"))
    found = given or next((known[key] for name in names for key in known if name.startswith(key)), {})
    if lacking := [key for key in ABOUT if not found.get(key)]:
        what = "the description" if given else f"what is known of the data of recipe {names[-1]!r}"
        raise UserError(f"{what} lacks {', '.join(lacking)}: give --about FILE, YAML with {', '.join(ABOUT)}")
    return {key: str(found[key]).strip() for key in ABOUT}


def card_text(name: str, results: Mapping[str, Any], about: Mapping[str, str], timm: bool, size: int) -> str:
    """The card of weights of `size` bytes, from a run's `results.json` with its `evaluation`, and from `about_data`."""
    evaluation, versions = results["evaluation"], results["versions"].items()
    use = [f"dgt predict {name} image.jpg", f"dgt evaluate {name}"]
    use += [f'timm.create_model("local-dir:{name}", pretrained=True)  # after import dgt'] if timm else []
    plan = evaluation.get("plan")
    use += [f'dgt.apply_plan(model, "{name}/plan.safetensors")'] if plan else []
    rows = (
        f"| {row['label']} | {100 * row['value']:.2f} % | {100 * row['low']:.2f} to {100 * row['high']:.2f} % "
        f"| {100 * row['of_the_run']:.2f} % |"
        for row in evaluation["metrics"].values()
    )
    told = {"name": name, "use": "\n    ".join(use), "rows": "\n".join(rows), "library": "timm" if timm else "dgt"}
    told["tags"] = ", ".join(["dynamic-group-transformer", *(["image-classification", "timm"] if timm else [])])
    told["versions"] = ", ".join(f"{key} {version}" for key, version in versions if version)
    told |= {"millions": f"{results['parameters'] / 1e6:.2f}", "megabytes": f"{size / 1e6:.1f}"}
    told["hours"] = f"{results['seconds'] / 3600:.2f}"
    told["plan"] = plan_text(plan, evaluation["metrics"]) if plan else ""
    return Template((HERE / "card.md").read_text(encoding="utf-8")).substitute(
        {**results, **evaluation, **about, **told}
    )


def plan_text(plan: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """A paragraph on what the plan of an accelerated model gains and costs."""
    values = ", ".join(f"{metrics[key]['label']} {100 * value:.2f} %" for key, value in plan["metrics"].items())
    attention, model, bound = (f"{1 / plan[key]:.2f}" for key in ("attention_speedup", "model_speedup", "bound"))
    return (
        f"\n\nWith the plan, on these images: {values}. {plan['grouped']} of {plan['attentions']} attentions "
        f"are in groups; where it was made, attention took {attention} of its time and the model {model} ({bound} "
        f"without attention). The output's relative error: {plan['measured_error']:.2g} of {plan['asked_error']:.2g}."
    )


def check_card(path: Path, metrics: Sequence[str]) -> None:
    """Raise UserError where a card lacks a section, or its metrics a row for each of those that were measured."""
    parts = re.split(r"^## (.+)$", path.read_text(encoding="utf-8", errors="replace"), flags=re.M)
    told = {title.strip(): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    lacking = [section for section in SECTIONS if not told.get(section)]
    if lacking:
        raise UserError(f"the card {path} is not complete: it lacks {', '.join(map(repr, lacking))}")
    rows = re.findall(r"^\|[^|]+\| +[\d.]+ % \| +[\d.]+ to [\d.]+ % +\|", told["Metrics"], flags=re.M)
    if not metrics or len(rows) < len(metrics):
        raise UserError(f"the card {path} gives {len(rows)} metrics with an interval, {len(metrics)} were measured")
