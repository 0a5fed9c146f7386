"""Apply a saved plan to another model with the same layers."""

import difflib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import nn

from dgt.acceleration.bypass import bypass_at
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.intercept import original_class
from dgt.acceleration.plan_file import FORMAT, from_json
from dgt.acceleration.prefix_tokens import count_prefix_tokens
from dgt.acceleration.report import Report
from dgt.acceleration.search import check_model
from dgt.acceleration.sites import AttentionSite
from dgt.utils.errors import UserError

SIZES = {  # of an attention, under the names that its module may have them
    "heads": ("num_heads", "num_attention_heads"),
    "channels": ("head_dim", "attention_head_size"),
}
PLANS = Path(__file__).parent / "plans"


def apply_plan(model: nn.Module, plan: str | Path, *, guard: bool = True) -> Report:
    """Apply a plan saved by a report of :func:`dgt.accelerate`, or one that comes with the package,
    to a model with the same layers.

    Args:
        model: its weights stay; what was applied to it before is replaced.
        plan: path of the plan; or the name of one of :func:`dgt.acceleration.plan_names`: the
            model's name in timm with its weights, the size of images, and the error.
        guard: whether accelerated attention checks itself on every input, as the plan says
            (:func:`dgt.accelerate`).

    Returns:
        The report of the model that the plan was found with.

    Raises:
        FileNotFoundError: there is neither such a file nor such a name; the nearest names are
            named.
        TypeError, ValueError: the model is no module, the file is no plan, its layers or tokens are
            not the model's, or their attention does not call ``F.scaled_dot_product_attention``.
            The model is then as it was, settings of before included.

    Example:
        >>> report.save("plan.json")
        >>> dgt.apply_plan(another_model, "plan.json")
    """
    check_model(model)
    report = read_plan(find_plan(plan))
    check_layers(model, report)
    if not guard:
        report = replace(report, layers=[without_guard(site) for site in report.layers])
    install_sites(model, report.layers)
    return report


def plan_names() -> list[str]:
    """The names of the plans that come with the package, for :func:`dgt.apply_plan`."""
    return sorted(file.stem for file in PLANS.glob("*.json"))


def find_plan(plan: str | Path) -> Path:
    """The file of a plan, by path or name. Raises FileNotFoundError as :func:`apply_plan`."""
    if Path(plan).is_file():
        return Path(plan)
    names = plan_names()
    if str(plan) in names:
        return PLANS / f"{plan}.json"
    nearest = difflib.get_close_matches(str(plan), names, cutoff=0.4)
    hint = f"; the nearest names are {', '.join(map(repr, nearest))}" if nearest else ""
    raise FileNotFoundError(f"plan {str(plan)!r} does not exist{hint}")


def without_guard(site: AttentionSite) -> AttentionSite:
    """A call site whose attention does not check itself."""
    setting = replace(site.setting, allowed_error=None)
    return replace(site, measurement=replace(site.measurement, setting=setting))


def read_plan(path: str | Path) -> Report:
    """Read a plan. Raises ValueError if the file is not one."""
    name = str(path)
    try:
        plan = json.loads(Path(path).read_bytes())
        if not isinstance(plan, dict) or plan.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return Report(**from_json(plan["report"]))
    except (KeyError, RecursionError, TypeError, ValueError) as broken:
        raise UserError(f"{name!r} is not a valid plan: {broken}") from broken


def check_layers(model: nn.Module, report: Report) -> None:
    """Reject a model whose layers differ from the plan's."""
    modules = dict(model.named_modules())
    missing = [site.name for site in report.layers if site.name not in modules]
    if missing:
        raise UserError(f"model must have the plan's layers, but has no {missing[0]!r}")
    count = count_alike(model, [site.name for site in report.layers])
    if report.matching_modules not in (None, count):
        raise UserError(
            f"model must have the plan's {report.matching_modules} attention modules, got {count}"
        )
    for site in report.layers:
        cause = None if site.setting.choice == "dense" else bypass_at(model, site.name)
        if cause is not None:
            raise UserError(
                f"model must call F.scaled_dot_product_attention at {site.name!r}, but {cause}"
            )
        if site.setting.choice == "groups":
            check_sizes(modules[site.name], site)
            if report.prefix_tokens_detected and site.is_within:
                check_prefix_of(model, site)
    check_image_size(model, report)


def check_image_size(model: nn.Module, report: Report) -> None:
    """Reject a model of timm that takes images of one size, of which the plan is not."""
    embedding = getattr(model, "patch_embed", None)
    patches = getattr(embedding, "num_patches", None)
    is_fixed = getattr(embedding, "strict_img_size", False)
    planned = {site.tokens - site.num_prefix_tokens for site in report.layers if site.is_within}
    planned -= {0}  # of exact attention at any size
    if not is_fixed or not isinstance(patches, int) or len(planned) != 1:
        return
    if patches not in planned:
        raise UserError(
            f"model must take images of the plan's size, {planned.pop()} patches, got one for {patches}"
        )


def check_prefix_of(model: nn.Module, site: AttentionSite) -> None:
    """Reject a model that has other class and register tokens than a call site's."""
    count = count_prefix_tokens(model, site.name) or 0
    if count != site.num_prefix_tokens:
        raise UserError(
            f"model must have the plan's {site.num_prefix_tokens} class and register tokens at "
            f"{site.name!r}, got {count}"
        )


def check_sizes(module: nn.Module, site: AttentionSite) -> None:
    """Reject attention whose heads or channels are known and differ from a call site's."""
    for size, words in SIZES.items():
        wanted = getattr(site, size)
        counts = [getattr(module, word, None) for word in words]
        for count in counts:
            if isinstance(count, int) and count != wanted:
                raise UserError(
                    f"model must have the plan's {wanted} {size} at {site.name!r}, got {count}"
                )


def count_alike(model: nn.Module, names: Iterable[str]) -> int:
    """The number of modules of the same classes as the named ones."""
    kinds = {original_class(model.get_submodule(name)) for name in names}
    return sum(original_class(module) in kinds for module in model.modules())
