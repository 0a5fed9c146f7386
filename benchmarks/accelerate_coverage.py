"""Which of timm's pretrained vision transformers `dgt.accelerate` can have done in groups: JSON and
a page.

Every architecture that has pretrained weights is built without values (the "meta" device) and
called once at its own size; no weights are downloaded, nothing is measured. An attention counts as
one that can be grouped however few tokens it has there: whether groups are faster is a matter of
the size, and of the machine.

    python benchmarks/accelerate_coverage.py [--only 'vit_small*'] [--out FILE]     (minutes of one core)
    python benchmarks/accelerate_coverage.py --page                                 (docs/accelerate_models.md again)
"""

from __future__ import annotations

import argparse
import collections
import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accelerate_coverage.json"
PAGE = ROOT / "docs" / "accelerate_models.md"
FAMILIES = {  # files of timm in which attention is global or in windows, and what they hold
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
}


def look(name: str) -> dict[str, Any]:
    """What is found in one architecture: its attentions, those that can be grouped, and why the
    others cannot.
    """
    import timm
    import torch

    from dgt.acceleration import inspect_model

    with torch.device("meta"):
        model = timm.create_model(name).eval()
        images = torch.empty(1, *model.default_cfg["input_size"])
        try:
            rows = inspect_model(model, images, least_tokens=0)
        except ValueError as refused:
            return {
                "attentions": 0,
                "grouped": 0,
                "reasons": {str(refused).partition(", got")[0]: 1},
            }
    reasons = [reason_of(row) for row in rows]
    return {
        "pixels": images.shape[-1],
        "attentions": len(rows),
        "grouped": sum(not reason for reason in reasons),
        "tokens": max(row.tokens for row in rows),
        "prefix": max(row.prefix for row in rows),
        "reasons": dict(collections.Counter(reason for reason in reasons if reason)),
    }


def reason_of(row: Any) -> str:
    """Why an attention does not gain at any size: windows stay as small, and so does one side of a pooling head."""
    if row.tokens != row.key_tokens and not row.reason:
        return "queries and keys are of different tokens"
    if row.sequences > 1 and not row.reason:
        return "in windows"
    return str(row.reason.partition(",")[0])


def look_at_all(only: str) -> dict[str, Any]:
    """Every architecture with pretrained weights, family by family."""
    import timm
    import torch

    tags = collections.Counter(tag.split(".")[0] for tag in timm.list_pretrained())
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for name in timm.list_models(only, module=family):
            if tags[name]:
                try:
                    result = look(name)
                except Exception as error:
                    # what cannot be built without values: the table goes on, and says so
                    result = {
                        "attentions": 0,
                        "grouped": 0,
                        "reasons": {f"not tried: {type(error).__name__}": 1},
                    }
                found[name] = {"family": family, "tags": tags[name], **result}
                print(name, found[name], flush=True)
    return {"timm": timm.__version__, "torch": torch.__version__, "architectures": found}


def verdict(row: dict[str, Any]) -> str:
    """In words, what `dgt.accelerate` can do for an architecture."""
    reasons = ", ".join(sorted(row["reasons"]))
    if not row["grouped"]:
        return f"refused: {reasons}"
    return "every attention" if not reasons else f"some of its attentions; the others: {reasons}"


def share(row: dict[str, Any]) -> str:
    """How much of an architecture's attention can be grouped.

    A pooling head is one attention at the end.
    """
    if not row["grouped"]:
        return "none"
    return "all" if row["attentions"] - row["grouped"] <= 1 else "some"


def page(results: dict[str, Any]) -> str:
    """The page of the documentation: totals by family, then the names behind them."""
    rows = results["architectures"]
    lines = [
        "# What can be accelerated",
        "",
        "timm's pretrained vision transformers, by what `dgt.accelerate` finds in them. An attention that can be done",
        "in groups is, where that is faster within the error: at their own size many models have too few tokens for",
        "that. Written by `benchmarks/accelerate_coverage.py` from `benchmarks/results/accelerate_coverage.json`",
        f"(timm {results['timm']}, torch {results['torch']}); no weights were used.",
        "",
        "| family | architectures | pretrained tags | all attention, or all but a pooling head | some of it | none |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    totals = [0, 0, 0, 0, 0]
    for family, words in FAMILIES.items():
        own = [row for row in rows.values() if row["family"] == family]
        if not own:
            continue
        tags = collections.Counter(share(row) for row in own for _ in range(row["tags"]))
        counts = [len(own), tags.total(), tags["all"], tags["some"], tags["none"]]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(f"| {words} | " + " | ".join(map(str, counts)) + " |")
    lines.append("| all | " + " | ".join(f"**{total}**" for total in totals) + " |")
    for family, words in FAMILIES.items():
        members = {name: row for name, row in rows.items() if row["family"] == family}
        if members:
            lines += ["", f"## {words}", *names_by_verdict(members)]
    return "\n".join(lines) + "\n"


def names_by_verdict(members: dict[str, dict[str, Any]]) -> list[str]:
    """A paragraph for each verdict on the architectures of a family, with their names."""
    by_verdict = collections.defaultdict(list)
    for name, row in members.items():
        by_verdict[verdict(row)].append(name)
    lines = []
    for words, names in sorted(by_verdict.items()):
        tags = sum(members[name]["tags"] for name in names)
        listed = ", ".join(listed_name(name, members[name]) for name in names)
        text = f"**{words[0].upper()}{words[1:]}** ({tags} tags): {listed}."
        lines += ["", *textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)]
    return lines


def listed_name(name: str, row: dict[str, Any]) -> str:
    """A name in the page, with how much of its attention can be grouped if that is a part."""
    shown = name if name.startswith("test_") else f"`{name}`"  # those are timm's own, for its tests
    if 0 < row["grouped"] < row["attentions"]:
        shown += f" ({row['grouped']} of {row['attentions']})"
    return shown


def main() -> None:
    """Look at everything, or only write the page again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="names of architectures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--page", action="store_true", help="write the page from the results that are there"
    )
    options = parser.parse_args()
    if not options.page:
        results = look_at_all(options.only)
        rows = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(row)}"
            for name, row in results.pop("architectures").items()
        )
        text = (
            json.dumps(results, indent=1).removesuffix("\n}")
            + f',\n "architectures": {{\n{rows}\n }}\n}}\n'
        )
        options.out.write_text(text, encoding="utf-8")
    if options.out == RESULTS:
        PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
