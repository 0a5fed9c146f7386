"""What `benchmarks/tables.py` refuses in a page: numbers, processors and settings without a source.

- A number that looks measured (a deviation, a decimal fraction, a number with a unit, "3 of 4") has
  a source: it is in a generated table, or a mark follows it. Headings, descriptions of images, and
  comments in blocks of code are text like any other.
- A number that others print, `<!-- paper -->` or `<!-- printed: SOURCE -->`, is in `printed.json`.
- A setting names the file that sets it, `<!-- setting: benchmarks/native_attention.py -->`, and the
  number is in that file. So nothing measured passes for a setting.
- A fraction in words ("a quarter") is a number, too, and so is "twice as fast".
- A processor ("Zen 5") is marked with the raw results that were measured on it,
  `<!-- is ran on: attention_cpu -->`, which is checked against what these files record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tables_shared import RESULTS, ROOT

ONE = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
JOINT = r"(?:,? and|,? to|,? or|,|;| /|)\s+"  # a list has one mark, after its last number
UNITS = r"%|[mun]?s|seconds|minutes|hours|[KMGT]i?B|images/s|[GT]?FLOPs?(?:/s)?|times|points|[MG]"
MEASURED = re.compile(
    rf"(?<![\w.-])(?:{ONE}\s±\s{ONE}|[-+]?\d[\d,]*\.\d+(?:e-?\d+)?(?![\w.]*\.\d)"
    rf"|\d(?:[\d,]*\d)?\s(?:{UNITS})(?![\w/])"
    r"|\d[\d,]*\sof\s(?:the\s|its\s|our\s|as\smany\s)?\d[\d,]*(?![\d,]|\skeys))"
)
BLOCK = re.compile(r"^```.*?^```|(?<=\n\n)(?:    [^\n]*\n?)+", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"\s#\s[^\n]*")
NO_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
NO_MEASURES = re.compile(
    r"tau = [\d.]+|\bsections? \d[\d., ]*|95\s%\s+(?:confidence\s+)?interval|\d+ GiB, Python [\d.]+"
    r"|(?:Python|Triton|transformers|timm|onnxruntime|[Nn]um[Pp]y|torch|torchvision|capability)"
    r"(?: below)?\s\d[\d.]*(?:\s(?:and|to)\s\d[\d.]*)*"
)
PARTS = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twentieth|hundredth"
WORDS = "half|one and a half|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|hundred|thousand"
FRACTION = re.compile(
    rf"\b(?:(?:an?|one|two|three)\s(?:{PARTS})s?"
    rf"|(?<!up\sto\s)(?:{WORDS})\s(?:times(?!\sat\smost)|percent|points|(?<!ten\s)(?<!five\s)minutes|hours)"
    r"|(?:twice|half)\sas\s(?:fast|many|much|large|long))\b",
    re.IGNORECASE,
)
MARKED_FRACTION = re.compile(rf"{FRACTION.pattern}<!-- (?:is|paper|setting)[^>]*-->", re.IGNORECASE)
PROCESSOR = re.compile(r"\bZen\s\d\b")
SETTING = re.compile(
    rf"(?<![\w.])((?:{ONE}{JOINT})*{ONE})<!-- setting(?:: ([\w./-]+))? -->", re.DOTALL
)
UNMEASURED = re.compile(
    rf"(?<![\w.])(?:{ONE}{JOINT})*{ONE}<!-- (?:paper|printed: \w+|setting: [\w./-]+) -->"
)
PREDICTED = re.compile(rf"(?<![\w.])(?:{ONE}{JOINT})*{ONE}<!-- predicted -->")  # of older versions
PRINTED = re.compile(
    rf"(?<![\w.])(?<!Table\s)((?:{ONE}{JOINT})*{ONE})<!-- (paper|printed: \w+) -->", re.DOTALL
)


def problems(text: str, of_today: bool = True) -> Iterator[str]:
    """What is wrong with a page, given without its generated tables and its marked numbers.

    A page that is not `of_today`, the changelog, may name processors, fractions in words, and what a
    model of older versions predicted.
    """
    if not of_today:
        text = PREDICTED.sub("", text)
    yield from (f"no source for {found}" for found in typed_numbers(text))
    yield from unfounded_settings(text)
    yield from unprinted_numbers(text)
    if not of_today:
        return
    plain = prose(MARKED_FRACTION.sub("", text))
    yield from (f"no raw result named for {found}" for found in PROCESSOR.findall(plain))
    yield from (f"no source for {' '.join(found.split())}" for found in FRACTION.findall(plain))


def typed_numbers(text: str) -> list[str]:
    """Numbers that look measured and have no source."""
    text = NO_MEASURES.sub("", prose(UNMEASURED.sub("", text)))
    return [" ".join(found.split()) for found in MEASURED.findall(text)]


def prose(text: str) -> str:
    """The text of a page, with the comments of blocks of code, without code, links, and marks."""
    comments_alone = BLOCK.sub(lambda found: "\n".join(COMMENT.findall(found[0])) + "\n", text)
    return NO_TEXT.sub("", comments_alone)


def unprinted_numbers(text: str) -> Iterator[str]:
    """Numbers that are not in the publication they name, as far as `printed.json` knows."""
    for found in PRINTED.finditer(text):
        source = found[2].removeprefix("printed: ")
        for value in re.findall(ONE, found[1]):
            if value.lstrip("+").rstrip(",") not in printed(source):
                yield f"{value} is not printed in {source}"


@cache
def printed(source: str) -> set[str]:
    """The numbers of a publication, as it prints them."""
    content = json.loads((ROOT / "benchmarks" / "printed.json").read_text(encoding="utf-8"))
    lists = (value for value in content.get(source, {}).values() if isinstance(value, list))
    return {number for numbers in lists for number in numbers}


def unfounded_settings(text: str) -> Iterator[str]:
    """Settings that name no file, or that are not in the file that they name."""
    for found in SETTING.finditer(text):
        values, file = " ".join(found[1].split()), found[2]
        if file is None:
            yield f"a setting without its file: {values}"
        elif not (ROOT / file).is_file():
            yield f"the file of a setting is not there: {file}"
        else:
            yield from (
                f"{value} is no setting in {file}"
                for value in re.findall(ONE, values)
                if not stands_in(ROOT / file, value)
            )


def stands_in(path: Path, value: str) -> bool:
    """Whether a number is in a file: as it is, as a share (of %), or in thousands (of KB)."""
    wanted = float(value.replace(",", ""))
    text = path.read_text(encoding="utf-8").replace("_", "")
    found = {float(one) for one in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)}
    return any(abs(wanted * factor - one) < 1e-12 for factor in (1, 0.01, 1000) for one in found)


def unused_results(text: str, read_files: set[str]) -> list[str]:
    """Raw results that no page shows or names."""
    names = {path.stem for path in RESULTS.glob("*.json")}
    return sorted(name for name in names - read_files if name not in text)
