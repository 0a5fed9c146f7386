"""docs/accelerate_models.md from what `accelerate_coverage.py` found."""

from __future__ import annotations

import collections
import textwrap
from typing import Any

from coverage_timm import NONE

Row = dict[str, Any]
WIDTH = 118
INTRODUCTION = (
    "All of timm's architectures with pretrained weights, and all encoders of images and video that "
    "transformers registers, by what `dgt.accelerate` finds in them. An attention that can be done in "
    "groups is, where that is faster within the error: at their own size many models have too few "
    "tokens for that. Written by `benchmarks/accelerate_coverage.py` from "
    "`benchmarks/results/accelerate_coverage.json`"
)
ENCODERS = (
    "have attention that can be grouped. Each was built with random weights from its own "
    "configuration, two layers deep where that works, and called with one image or clip. Names are "
    "those of the registry; models that take text, too, are left out, and their encoders stand here by "
    "themselves."
)
HEADS = (
    "family",
    "architectures",
    "pretrained tags",
    "all attention, or all but a pooling head",
    "some of it",
    "none",
)
WORDS = {  # what is known under another name than its file's
    "vision_transformer": "ViT, CLIP, SigLIP, DINO, DINOv2, AIM and their like",
    "eva": "EVA, EVA-02, DINOv3, Perception Encoder, ViT with rotary positions",
    "deit": "DeiT and DeiT III",
    "beit": "BEiT and BEiT v2",
    "naflexvit": "NaFlex ViT",
    "vision_transformer_sam": "SAM's encoder",
    "hieradet_sam2": "SAM 2's encoder",
    "hiera": "Hiera",
    "swin_transformer": "Swin",
    "swin_transformer_v2": "Swin v2",
    "twins": "Twins",
    "gemma4_vit": "Gemma 4's encoder",
    "qwen3_vit": "the encoder of Qwen3-VL and Qwen3.5",
    "deepseek_vit": "DeepSeek's encoder",
}


def verdict(row: Row) -> str:
    """In words, what `dgt.accelerate` can do for a model."""
    reasons = ", ".join(sorted(row["reasons"]))
    if not row["grouped"]:
        return f"refused: {reasons}"
    return "every attention" if not reasons else f"some of its attentions; the others: {reasons}"


def share(row: Row) -> str:
    """How much of a model's attention can be grouped.

    A pooling head is one attention at the end.
    """
    if not row["grouped"]:
        return "none"
    return "all" if row["attentions"] - row["grouped"] <= 1 else "some"


def title(family: str) -> str:
    """A family as the page calls it."""
    return WORDS.get(family, f"`{family}`")


def page(results: Row) -> str:
    """The page of the documentation: totals by family, the names behind them, and transformers'
    encoders.
    """
    families: dict[str, dict[str, Row]] = {}
    for name, row in results["architectures"].items():
        families.setdefault(row["family"], {})[name] = row
    with_groups = {
        family: rows
        for family, rows in families.items()
        if any(row["grouped"] for row in rows.values())
    }
    lines = [
        "# What can be accelerated",
        "",
        *wrap(INTRODUCTION + versions(results)),
        "",
        "- [timm](#timm)",
        "- [transformers](#transformers)",
        "",
        "## timm",
        "",
        *table(with_groups),
        "",
        *refused_families(families, with_groups),
    ]
    for family in sorted(with_groups, key=lambda family: -len(with_groups[family])):
        lines += ["", f"### {title(family)}", *names_by_verdict(with_groups[family])]
    lines += ["", "## transformers", "", *encoders(results["encoders"])]
    return "\n".join(lines) + "\n"


def versions(results: Row) -> str:
    """What was looked at."""
    found = ", ".join(f"{name} {results[name]}" for name in ("timm", "transformers", "torch"))
    left = sum(count - len(results[part]) for part, count in results["registered"].items())
    rest = f" {left} models have not been looked at yet." if left else ""
    return f" ({found}); no weights were used.{rest}"


def table(families: dict[str, dict[str, Row]]) -> list[str]:
    """A row for every family that has something to be grouped."""
    lines = ["| " + " | ".join(HEADS) + " |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    totals = [0, 0, 0, 0, 0]
    for family in sorted(families, key=lambda family: -len(families[family])):
        own = families[family].values()
        tags = collections.Counter(share(row) for row in own for _ in range(row["tags"]))
        counts = [len(own), tags.total(), tags["all"], tags["some"], tags["none"]]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(f"| {title(family)} | " + " | ".join(map(str, counts)) + " |")
    lines.append("| all | " + " | ".join(f"**{total}**" for total in totals) + " |")
    return lines


def refused_families(
    families: dict[str, dict[str, Row]], with_groups: dict[str, dict[str, Row]]
) -> list[str]:
    """The families in which nothing can be grouped: those with attention and why, then those
    without.
    """
    reasons: dict[str, list[str]] = {}
    for family in sorted(set(families) - set(with_groups)):
        found = collections.Counter(
            reason for row in families[family].values() for reason in row["reasons"]
        )
        attention = [reason for reason in found if reason != NONE]
        words = ", ".join(sorted(attention)) or NONE
        reasons.setdefault(words, []).append(f"`{family}` ({len(families[family])})")
    lines = [
        "Families in which nothing can be grouped, with how many architectures, by the reason:",
        "",
    ]
    for words in sorted(reasons, key=lambda words: (words == NONE, words)):
        lines += item(f"{words}: {', '.join(reasons[words])}")
    return lines


def item(text: str) -> list[str]:
    """A wrapped item of a list."""
    wrapped = wrap(text, WIDTH - 2)
    return [f"- {wrapped[0]}", *(f"  {line}" for line in wrapped[1:])]


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Lines that break at blanks alone."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def names_by_verdict(members: dict[str, Row]) -> list[str]:
    """A paragraph for each verdict on the architectures of a family, with their names."""
    by_verdict = collections.defaultdict(list)
    for name, row in members.items():
        by_verdict[verdict(row)].append(name)
    lines = []
    for words, names in sorted(by_verdict.items()):
        tags = sum(members[name]["tags"] for name in names)
        listed = ", ".join(listed_name(name, members[name]) for name in names)
        text = f"**{words[0].upper()}{words[1:]}** ({tags} tags): {listed}."
        lines += ["", *wrap(text)]
    return lines


def listed_name(name: str, row: Row) -> str:
    """A name in the page, with how much of its attention can be grouped if that is a part."""
    shown = name if name.startswith("test_") else f"`{name}`"  # those are timm's own, for its tests
    if 0 < row["grouped"] < row["attentions"]:
        shown += f" ({row['grouped']} of {row['attentions']})"
    return shown


def encoders(found: dict[str, Row]) -> list[str]:
    """transformers' encoders by verdict, the handled ones first."""
    by_verdict: dict[str, list[str]] = {}
    for kind, row in found.items():
        by_verdict.setdefault(verdict(row), []).append(f"`{kind}`")
    handled = sum(row["grouped"] > 0 for row in found.values())
    lines = wrap(f"{handled} of {len(found)} kinds in its registry {ENCODERS}")
    order = sorted(by_verdict, key=lambda words: (words.startswith("refused"), words))
    for words in order:
        kinds = by_verdict[words]
        verdict_of_all = f"**{words[0].upper()}{words[1:]}** ({len(kinds)})"
        lines += ["", *wrap(f"{verdict_of_all}: {', '.join(kinds)}.")]
    return lines
