"""Write the numbers of the documentation from the raw results: `python benchmarks/tables.py`.

Nobody types a measured number: change the JSON in `benchmarks/results`, then run this. With `--check`
nothing is written, and the exit status is 1 if a page and its JSON differ or a page has a number,
setting or processor without a source (`tables_audit.py` lists the rules). `make docs` runs this
check. A page has two kinds of marks, which neither GitHub nor the site shows.

A table is between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a function registered by
`@table` in one of the `tables_*.py`, which reads JSON and returns lists of cells, the heads first.

A number of the text is followed by its source, with no blank between, in one of three forms:

    91.0 ± 0.2<!-- is retrieval: global; right, % -->    TABLE: ROW; COLUMN, a cell of a table, or
                                                         with `; 2` the second number in it
    48<!-- is runtimes_batch8.json: rows/model=dgt_tiny&runtime=openvino/ms_per_image; 0 -->
                                                         FILE: PATH; DECIMALS; FACTOR, a value of JSON
    98.5 ± 1.7<!-- is labels: key_choice_demo; groups; 4 -->
                                                         NAME: ARGUMENT; ..., a function registered by
                                                         `@number_of_text` in one of the `tables_*.py`

Numbers that nobody measured here are marked `<!-- paper -->` (the paper prints it),
`<!-- printed: SOURCE -->` (another publication does), both as `printed.json` has them, or
`<!-- setting: FILE -->` (FILE sets it). docs/accelerate_models.md is one large table, which
`accelerate_coverage.py --page` writes; here it is only compared.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import coverage_page
import tables_accelerate  # noqa: F401 (tables register themselves)
import tables_audit
import tables_choice  # noqa: F401
import tables_clusters  # noqa: F401
import tables_content  # noqa: F401
import tables_dinov2  # noqa: F401
import tables_entropy  # noqa: F401
import tables_history  # noqa: F401
import tables_learning  # noqa: F401
import tables_models  # noqa: F401
import tables_predicted  # noqa: F401
import tables_promises  # noqa: F401
import tables_rivals  # noqa: F401
import tables_speed  # noqa: F401
import tables_text
from tables_shared import NUMBERS, ROOT, TABLES, USED, read

from dgt.utils.records import markdown_table

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "accelerate_models.md"),
]
COVERAGE = ROOT / "docs" / "accelerate_models.md"
MARKED = re.compile(r"<!-- table: ([\w -]+) -->\n\n(.*?)<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- is ([^:]+?)(?:: (.*?))? -->", re.DOTALL)
ONE = tables_audit.ONE


def written(text: str) -> str:
    """A page with all its tables and numbers as they should be.

    Raises:
        KeyError: a mark names a table, number, row, column or value that does not exist.
        ValueError: the text before a mark does not have the form of its number.
    """
    text = MARKED.sub(
        lambda found: f"<!-- table: {found[1]} -->\n\n{render(found[1])}\n<!-- end -->", text
    )
    for start, end, value in reversed(list(numbers(text))):
        if " ".join(text[start:end].split()) != value:
            text = text[:start] + value + text[end:]
    return text


def numbers(text: str) -> Iterator[tuple[int, int, str]]:
    """The start and end of each marked number of a page, and what it should be."""
    last = 0
    for mark in MARK.finditer(text):
        value = number_at(mark)
        parts = re.split(ONE, value)
        form = ONE.join(r"\s+".join(map(re.escape, part.split(" "))) for part in parts)
        old = re.search(rf"(?<![\d.]){form}$", text[last : mark.start()])
        if old is None:
            came = text[last : mark.start()][-30:]
            raise ValueError(f"before {mark[0]} there should be {value}, not {came!r}")
        yield last + old.start(), mark.start(), value
        last = mark.end()


def number_at(mark: re.Match[str]) -> str:
    """The number that a mark names, as it is to be written."""
    name, arguments = " ".join(mark[1].split()), " ".join((mark[2] or "").split())
    words = arguments.split("; ") if arguments else []
    if name.endswith(".json"):
        return tables_text.value(name.removesuffix(".json"), *words)
    return NUMBERS[name](*words) if name in NUMBERS else tables_text.cell(name, *words)


def render(name: str) -> str:
    """A table in Markdown."""
    heads, *rows = TABLES[name]()
    return markdown_table(heads, rows)


def unmarked(text: str) -> str:
    """A page without its generated tables and without the numbers that have a source."""
    text = MARKED.sub("", text)
    for start, end, _ in reversed(list(numbers(text))):
        text = text[:start] + text[end:]
    return text


def update(page: Path, check: bool) -> bool:
    """Write a page, or only report that it differs.

    Returns:
        Whether it differed.
    """
    text = page.read_text(encoding="utf-8")
    new = written(text)
    if new == text:
        return False
    print(f"{page.relative_to(ROOT)}: {'differs' if check else 'written'}")
    if not check:
        page.write_text(new, encoding="utf-8")
    return True


def problems() -> Iterator[str]:
    """What is wrong with the pages and the raw results, apart from numbers that differ."""
    texts = {page.relative_to(ROOT): page.read_text(encoding="utf-8") for page in PAGES}
    for name, text in texts.items():
        found = tables_audit.problems(unmarked(written(text)), name.name != "CHANGELOG.md")
        yield from (f"{name}: {problem}" for problem in found)
    if COVERAGE.read_text(encoding="utf-8") != coverage_page.page(read("accelerate_coverage")):
        yield "docs/accelerate_models.md: run python benchmarks/accelerate_coverage.py --page"
    for result in tables_audit.unused_results("\n".join(texts.values()), USED):
        yield f"benchmarks/results/{result}.json: no page shows or names it"


def main() -> int:
    """Write the pages, or report which are not as they should be.

    Returns:
        The exit status: 1 if something is wrong that was not repaired.
    """
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if something is wrong"
    )
    check = parser.parse_args().check
    different = [page for page in PAGES if update(page, check)]
    found = list(problems())
    if found:
        print(*found, sep="\n")
    return int(bool(found) or (check and bool(different)))


if __name__ == "__main__":
    raise SystemExit(main())
