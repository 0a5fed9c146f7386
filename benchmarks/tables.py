"""Write the generated tables of the documentation: `python benchmarks/tables.py`.

A table is between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a function of one of the
modules in `page_tables`, which reads `benchmarks/results/*.json` and returns lists of cells, the
heads first. With `--check`, as in `make docs`, nothing is written; the exit status is 1 if a table
is stale, or if the text of a page has a measured number that no table of the page, or of a page
that the same section links to, contains (rounded as in the text).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from page_tables import (  # noqa: F401 (tables register themselves)
    accelerate_models,
    dinov2,
    error,
    experiments,
    export,
    gpu,
    matching,
    paper,
    results,
    scaling,
)
from page_tables.shared import ROOT, TABLES

from dgt.utils.records import markdown_table

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_NUMBERS_CHECKED = ("log.md",)  # dated entries, of commits of their own
TABLE = re.compile(r"<!-- table: ([\w -]+) -->\n+(.*?)<!-- end -->", re.DOTALL)

NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r"%|[mnu]?s|seconds|minutes|hours|[KMG]i?B|images/s|T?FLOPs?(?:/s)?|points|times|[MG]"
MEASURED = re.compile(
    rf"((?:{NUMBER}(?:, | to | and | or | ± |, [-+]| / ))*{NUMBER})\s?(?:{UNIT})(?!\w)"
)
CODE = re.compile(
    r"^```.*?^```|^ {4,}\S[^\n]*$|`[^`]*`|\]\([^)]*\)|<[^>]*>", re.DOTALL | re.MULTILINE
)
OF_THE_PAPER = re.compile(r"\bpaper", re.IGNORECASE)
CONFIDENCE = "95 %"
LINKED = re.compile(r"\]\(([\w./-]+\.md)")


def written(text: str) -> str:
    """A page with its tables as they should be."""
    return TABLE.sub(
        lambda found: f"<!-- table: {found[1]} -->\n\n{render(found[1])}\n<!-- end -->", text
    )


def render(name: str) -> str:
    """A table in Markdown."""
    heads, *rows = TABLES[name]()
    return markdown_table(heads, rows)


def unfounded(page: Path, text: str) -> Iterator[str]:
    """Numbers with a unit in the text that no table of the page, or of one linked in the section, has."""
    own = numbers_of_tables(text)
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        known = set(own)
        for name in LINKED.findall(section):
            linked = page.parent / name
            if linked.is_file():
                known |= numbers_of_tables(linked.read_text(encoding="utf-8"))
        prose = CODE.sub("", TABLE.sub("", section)).replace(CONFIDENCE, "")
        sentences = re.split(r"(?<=[.!?])\s+|\n(?=[|*-])|\n\n", prose)
        for sentence in (found for found in sentences if not OF_THE_PAPER.search(found)):
            for measured in MEASURED.finditer(" ".join(sentence.split())):
                for number in re.findall(NUMBER, measured[1]):
                    digits = len(number.partition(".")[2])
                    wanted = number.replace(",", "")
                    if all(f"{value:.{digits}f}" != wanted for value in known):
                        yield f"no table has {measured[0]!r}"


def numbers_of_tables(text: str) -> set[float]:
    """All numbers in the generated tables of a page."""
    tables = "".join(table[2] for table in TABLE.finditer(text))
    return {float(number.replace(",", "")) for number in re.findall(NUMBER, tables)}


def main() -> int:
    """Write the pages, or report which are not as they should be."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if something is wrong"
    )
    check = parser.parse_args().check
    status = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = written(text)
        problems = (
            ["a table is stale: run python benchmarks/tables.py"] if check and new != text else []
        )
        if page.name not in NO_NUMBERS_CHECKED:
            problems += unfounded(page, new)
        for problem in problems:
            print(f"{page.relative_to(ROOT)}: {problem}")
            status = 1
        if not check and new != text:
            page.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
