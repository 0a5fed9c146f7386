"""The pure functions of `make release`, and the files it would build; the script itself tests the rest."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def release(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    """tools/release.py."""
    return load_script(ROOT / "tools" / "release.py")


def test_package_changelog_and_citation_are_of_one_version(
    release: ModuleType, tmp_path: Path
) -> None:
    version = release.check_versions(ROOT)
    (tmp_path / "src" / "dgt").mkdir(parents=True)
    (tmp_path / "src" / "dgt" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [9.0.0]\n\n## [8.0.0]\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\n")
    with pytest.raises(
        RuntimeError, match=rf"__init__\.py {version}, CHANGELOG\.md 9\.0\.0, CITATION\.cff none"
    ):
        release.check_versions(tmp_path)


def test_a_file_that_the_sdist_lacks_or_has_too_many_is_named(release: ModuleType) -> None:
    members = ["dgt-0.2.0/src/dgt/__init__.py", "dgt-0.2.0/PKG-INFO", "dgt-0.2.0/notes.txt"]
    tracked = ["src/dgt/__init__.py", ".ci/run", "docs/paper.md"]
    assert release.sdist_mistakes(tracked, members) == [
        "lacks docs/paper.md",
        "holds notes.txt, which git does not know",
    ]


def test_two_wheels_are_compared_file_by_file(release: ModuleType, tmp_path: Path) -> None:
    for name, content in (
        ("first", {"a": "1", "b": "2"}),
        ("second", {"a": "1", "b": "3", "c": ""}),
    ):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as wheel:
            for path, text in content.items():
                wheel.writestr(path, text)
        (tmp_path / name).write_bytes(buffer.getvalue())
    first, second = (release.members_of_wheel(tmp_path / name) for name in ("first", "second"))
    assert release.differences(first, first) == []
    assert release.differences(first, second) == ["b", "c"]


def test_the_programs_that_are_tried_are_python(release: ModuleType) -> None:
    tour = release.lines_of_notebook(ROOT / "examples" / "attention_tour.ipynb")
    assert "group_records" in tour
    for program in (tour, release.lines_of_readme(ROOT / "README.md")):
        compile(program, "program", "exec")


def test_the_table_tells_what_failed(release: ModuleType) -> None:
    rows = [
        release.Passed("build", 1.25, True, "two files"),
        release.Passed("try", 0.5, False, "no"),
    ]
    first, second = release.table(rows).splitlines()
    assert first.split() == ["passed", "1.2", "s", "build", "two", "files"]
    assert second.startswith("FAILED")


def test_a_command_that_fails_says_its_last_words(release: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exited with 3:.*the end"):
        release.run(sys.executable, "-c", "import sys; print('the end'); sys.exit(3)")


def test_the_citation_names_the_paper_and_the_software() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Liu", "Wu", "Liu", "Guo"]
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version"} <= set(citation)
