"""Run timm's own tests/test_models.py on the models of this package: `python tests/timm_suite/run.py [pytest options]`.

The tests are those of the installed timm version, from its source distribution, which pip fetches
once and `build/` caches. They run unchanged, with timm's own pytest settings; the plugin next to
this file selects the models.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / "build" / "timm_suite"
WANTED = ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/test_models.py")


def fetch_suite(release: str) -> Path:
    """Return the folder with the tests of this timm release, downloading them in the first call.

    Raises `RuntimeError` if pip cannot fetch the source distribution or it has no tests: a missing
        suite is a failure.
    """
    folder = CACHE / release
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        archive = _download(release, Path(scratch))
        _unpack(archive, Path(scratch) / "suite")
        (Path(scratch) / "suite").rename(folder)
    return folder


def _download(release: str, into: Path) -> Path:
    """Fetch the source distribution with pip, and return the archive's path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--no-binary", "timm", "--dest", str(into), f"timm=={release}"]
    result = subprocess.run(pip + what, capture_output=True, text=True, check=False)
    archives = sorted(into.glob("timm-*.tar.gz"))
    if result.returncode or len(archives) != 1:
        raise RuntimeError(
            f"pip could not fetch the source distribution of timm {release}:\n{result.stderr.strip()}"
        )
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    """Copy only the wanted files out of the archive, ignoring the members' own paths."""
    with tarfile.open(archive) as tar:
        for name in WANTED:
            member = f"{archive.name.removesuffix('.tar.gz')}/{name}"
            try:
                source = tar.extractfile(member)
            except KeyError:
                source = None
            if source is None:
                raise RuntimeError(f"{archive.name} has no {name}: timm's own tests cannot run")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file)


def main(arguments: list[str]) -> int:
    """Run the suite with these extra pytest options; return pytest's exit status."""
    try:
        suite = fetch_suite(version("timm"))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    environment = dict(os.environ)
    # Timm skips tests and models there; here nothing is skipped.
    environment.pop("GITHUB_ACTIONS", None)
    paths = [str(HERE), str(ROOT / "src"), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    pytest = [sys.executable, "-m", "pytest", "-p", "narrow_to_dgt", "-p", "no:cacheprovider"]
    command = [*pytest, *arguments, "tests/test_models.py"]
    return subprocess.run(command, cwd=suite, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
