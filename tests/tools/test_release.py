"""The release tool names files that are there, and refuses what a release must not have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_that_it_names_is_under_git() -> None:
    named = [*release.TESTED, *release.LEFT_OUT]
    found = subprocess.run(
        ["git", "ls-files", "--error-unmatch", *named],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("members", "mistakes"),
    [
        (["x-1/PKG-INFO", "x-1/a.py", "x-1/b/c.py"], []),
        (["x-1/PKG-INFO", "x-1/a.py"], ["lacks b/c.py"]),
        (["x-1/a.py", "x-1/b/c.py", "x-1/.env"], ["holds .env, which git does not know"]),
    ],
)
def test_an_sdist_has_what_git_tracks_and_nothing_else(
    members: list[str], mistakes: list[str]
) -> None:
    assert (
        release.sdist_mistakes(
            [".gitignore", "benchmarks/results/x.json", "a.py", "b/c.py"], members
        )
        == mistakes
    )


def test_notes_are_the_section_of_the_version() -> None:
    changelog = "# Changelog\n\n## [0.2.0], 2027\n\nNew.\n\n## [0.1.0], 2026\n\nFirst.\n"
    assert release.notes(changelog, "0.2.0") == "New.\n"
    assert release.notes(changelog, "0.1.0") == "First.\n"
    with pytest.raises(RuntimeError, match=r"0\.3\.0"):
        release.notes(changelog, "0.3.0")


def test_the_version_is_the_same_everywhere(tmp_path: Path) -> None:
    version = release.check_versions(ROOT)
    for name in ("src/dgt/__init__.py", "CHANGELOG.md", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert release.check_versions(tmp_path) == version
    assert release.notes_of_tag(tmp_path, f"v{version}").startswith("The first release.")
    with pytest.raises(RuntimeError, match=f"must be v{version}, got v9"):
        release.notes_of_tag(tmp_path, "v9")
    (tmp_path / "CITATION.cff").write_text("version: 9.9\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"CITATION\.cff 9\.9"):
        release.check_versions(tmp_path)
