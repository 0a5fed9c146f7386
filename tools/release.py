"""`make release`: build the sdist and the wheel, and test them as a user would, without a network.

    python tools/release.py [--reuse] [--photo FILE]
    python tools/release.py --notes v0.1.0

`build` makes both, `twine` and `check-wheel-contents` read them. The wheel is installed into a
fresh environment with all its dependencies (about 6 GB), outside the checkout; `--reuse` takes the
dependencies from the environment of this interpreter instead. The tests there can only open
connections to this machine. At the end a table shows what passed; if everything did, `dist/`
contains the two files, their SHA-256 checksums, and the notes of the release, which `--notes` prints
for a tag.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("build", "twine", "check-wheel-contents")
# run from the sdist: they read most files
TESTED = ("tests/test_architecture.py", "tests/test_pages.py", "tests/weights")
# files and folders that git tracks and the sdist leaves out
LEFT_OUT = (".gitignore", "benchmarks/results/")
NATIVE = {**os.environ, "DGT_REQUIRE_NATIVE": "1"}  # a compiler error fails the release
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
GUARD = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network in this trial: {address[0]}")
    return _connect(self, address)
socket.socket.connect = connect
"""


@dataclass(frozen=True)
class Passed:
    """One row of the table: the step, its seconds, whether it passed, and a remark."""

    what: str
    seconds: float
    passed: bool
    message: str


def table(rows: Iterable[Passed]) -> str:
    """The rows as text."""
    lines = [
        f"{'passed' if row.passed else 'FAILED'}  {row.seconds:7.1f} s  {row.what:<40}  {row.message}"
        for row in rows
    ]
    return "\n".join(lines)


def check_versions(root: Path) -> str:
    """The version in package, changelog, and citation; RuntimeError if they disagree."""
    places = {
        "src/dgt/__init__.py": r'^__version__ = "(.+)"$',
        "CHANGELOG.md": r"^## \[(\d[^\]]*)\]",
        "CITATION.cff": r"^version: (.+)$",
    }
    found = {}
    for name, pattern in places.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), flags=re.M)
        found[name] = match[1] if match else "none"
    if len(set(found.values())) != 1:
        raise RuntimeError(
            "versions differ: " + ", ".join(f"{name} {version}" for name, version in found.items())
        )
    return found["CITATION.cff"]


def notes(changelog: str, version: str) -> str:
    """The changelog's section on a version; RuntimeError if it has none."""
    match = re.search(
        rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, flags=re.M | re.S
    )
    if match is None or not match[1].strip():
        raise RuntimeError(f"the changelog says nothing of {version}")
    return match[1].strip() + "\n"


def notes_of_tag(root: Path, tag: str) -> str:
    """The notes for a tag; RuntimeError unless it is `v` and the version."""
    version = check_versions(root)
    if tag != f"v{version}":
        raise RuntimeError(f"the tag must be v{version}, got {tag}")
    return notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)


def sdist_mistakes(tracked: Iterable[str], members: Iterable[str]) -> list[str]:
    """The tracked files that an sdist lacks, and its untracked files; members start with its folder."""
    held, known = {name.partition("/")[2] for name in members}, set(tracked)
    lacking = [name for name in sorted(known - held) if not name.startswith(LEFT_OUT)]
    return [f"lacks {name}" for name in lacking] + [
        f"holds {name}, which git does not know" for name in sorted(held - known - {"PKG-INFO"})
    ]


def run(
    *command: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    limit: float = 1800,
) -> str:
    """The output of a command; RuntimeError with its last lines if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=limit
    )
    if done.returncode:
        output = "\n".join([*done.stdout.splitlines()[-15:], *done.stderr.splitlines()[-15:]])
        raise RuntimeError(f"{' '.join(words)} exited with {done.returncode}:\n{output}")
    return done.stdout.strip()


class Release:
    """The steps of a release, run in `scratch`, a folder outside the checkout.

    Each returns one line about its result.
    """

    def __init__(self, scratch: Path, reuse: bool, photo: Path | None) -> None:
        self.scratch, self.reuse, self.photo = scratch, reuse, photo
        self.dist, self.outside = scratch / "dist", scratch / "outside"
        self.bin = scratch / "installed" / ("Scripts" if os.name == "nt" else "bin")
        (scratch / "guard").mkdir()
        (scratch / "guard" / "sitecustomize.py").write_text(GUARD, encoding="utf-8")
        self.outside.mkdir()
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "DGT_WEIGHTS")
        }
        self.env = {
            **kept,
            "PYTHONPATH": str(scratch / "guard"),
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "Agg",
        }

    def build(self) -> str:
        """Build the sdist from the checkout and the wheel from the sdist, in isolated environments."""
        run(sys.executable, "-m", "venv", self.scratch / "tools")
        self.tools = self.scratch / "tools" / self.bin.name
        run(self.tools / "python", *PIP, *TOOLS)
        run(self.tools / "python", "-m", "build", "--outdir", self.dist, ROOT, env=NATIVE)
        (self.sdist,), (self.wheel,) = self.dist.glob("*.tar.gz"), self.dist.glob("*.whl")
        return ", ".join(
            f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in (self.sdist, self.wheel)
        )

    def unpack(self) -> str:
        """Check that the sdist has every tracked file, and no other."""
        with tarfile.open(self.sdist) as archive:
            names = [member.name for member in archive.getmembers() if member.isfile()]
            archive.extractall(self.scratch / "sdist", filter="data")
        if mistakes := sdist_mistakes(run("git", "ls-files", cwd=ROOT).splitlines(), names):
            raise RuntimeError(f"the sdist {'; '.join(mistakes)}")
        (self.source,) = (self.scratch / "sdist").iterdir()
        return f"{len(names)} files"

    def check(self) -> str:
        """Check what the index will read, and that the wheel has every file of the packages."""
        run(self.tools / "twine", "check", "--strict", self.sdist, self.wheel)
        run(self.tools / "check-wheel-contents", self.wheel, cwd=self.source)
        return "twine, check-wheel-contents"

    def test_sdist(self) -> str:
        """Run some tests of the unpacked sdist with this interpreter."""
        env = {**self.env, "PYTHONPATH": str(self.source / "src")}
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTED)
        return run(*command, cwd=self.source, env=env).splitlines()[-1]

    def install(self) -> str:
        """Install the wheel into an environment with nothing else, or with reused dependencies only."""
        run(sys.executable, "-m", "venv", self.scratch / "installed")
        what = ["--no-deps", self.wheel] if self.reuse else [f"{self.wheel}[all]"]
        run(self.bin / "python", *PIP, *what)
        own = run(
            self.bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
        )
        if self.reuse:
            (Path(own) / "reused.pth").write_text(
                sysconfig.get_path("purelib") + "\n", encoding="utf-8"
            )
        code = "import dgt; print(dgt.__version__, dgt.__file__)"
        said = run(self.bin / "python", "-c", code, cwd=self.outside, env=self.env)
        version, place = said.splitlines()[-1].split(maxsplit=1)
        if not Path(place).is_relative_to(own):
            raise RuntimeError(f"dgt was imported from {place}, not from the wheel")
        return (
            f"{version}, {'its dependencies reused' if self.reuse else 'with all its dependencies'}"
        )

    def dgt(self, *words: str | Path) -> str:
        """Run the installed command outside the checkout and without a network."""
        return run(self.bin / "dgt", *words, cwd=self.outside, env=self.env)

    def native(self) -> str:
        """Check the native CPU kernels, which the wheel for this platform contains."""
        line = self.dgt("info").splitlines()[-1]
        if not line.startswith("native CPU kernels: ") or ": none" in line:
            raise RuntimeError(f"dgt info says: {line}")
        return line.partition(": ")[2]

    def predict(self) -> str:
        """Run the shipped weights on a photograph."""
        image = self.photo or self.source / "docs" / "images" / "detections.jpg"
        return " ".join(self.dgt("predict", image, "--top-k", "1").split()[1:])

    def weights(self) -> str:
        """Check the included folders, their checksums, and their cards."""
        return f"{len(self.dgt('weights', 'list').splitlines())} folders"

    def explore(self) -> str:
        """Check that the web page starts, answers, and stops cleanly."""
        command = [str(self.bin / "dgt"), "explore", "--port", "0"]
        with subprocess.Popen(
            command, cwd=self.outside, env=self.env, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                lines = iter(server.stdout or ())
                address = next(
                    match[0] for line in lines if (match := re.search(r"http://\S+/", line))
                )
                with urllib.request.urlopen(f"{address}api/model", timeout=60) as answer:
                    model = json.load(answer)
                server.send_signal(signal.SIGINT)
                if server.wait(60):
                    raise RuntimeError(f"dgt explore exited with {server.returncode}")
            finally:
                server.kill()
        return f"answered with {len(model)} facts of the model"

    def demo(self) -> str:
        """Run a short demo of one epoch."""
        return self.dgt("demo", "--epochs", "1").split("\n\n")[1].strip()

    def sums(self) -> str:
        """Put the built files, their checksums and the notes of the release into dist/."""
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(self.dist, ROOT / "dist")
        files = [
            path for path in sorted((ROOT / "dist").iterdir()) if path.suffix in (".gz", ".whl")
        ]
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files
        ]
        (ROOT / "dist" / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
        text = notes_of_tag(ROOT, f"v{check_versions(ROOT)}")
        (ROOT / "dist" / "NOTES.md").write_text(text, encoding="utf-8")
        return "dist/SHA256SUMS, dist/NOTES.md"

    def steps(self) -> dict[str, Callable[[], str]]:
        """All steps in order; if one of the first five fails, the others cannot run."""
        return {
            "versions agree": lambda: check_versions(ROOT),
            "sdist and wheel": self.build,
            "sdist complete": self.unpack,
            "sdist and wheel in order": self.check,
            "wheel installed": self.install,
            "shipped weights in order": self.weights,
            "dgt info": lambda: self.dgt("info").splitlines()[1],
            "native CPU kernels": self.native,
            "dgt predict PHOTO": self.predict,
            "dgt explore": self.explore,
            "dgt export": lambda: self.dgt("export", "dgt_nano.scenes", "model.onnx"),
            "dgt demo --epochs 1": self.demo,
            "some tests of the sdist": self.test_sdist,
        }


def main() -> int:
    """Run the steps, print the table, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="take the dependencies from this interpreter's environment",
    )
    parser.add_argument(
        "--photo", type=Path, help="image for dgt predict (default: one of the documentation's)"
    )
    parser.add_argument("--notes", metavar="TAG", help="only print the notes for this tag")
    options = parser.parse_args()
    if options.notes:
        print(notes_of_tag(ROOT, options.notes), end="")
        return 0
    rows: list[Passed] = []
    with tempfile.TemporaryDirectory(prefix="dgt-release-") as scratch:
        release = Release(Path(scratch), options.reuse, options.photo and options.photo.resolve())
        steps = release.steps()
        for number, (what, step) in enumerate([*steps.items(), ("checksums", release.sums)]):
            if any(not row.passed for row in rows) and (number < 5 or number == len(steps)):
                break
            start = time.perf_counter()
            try:
                passed, message = True, step()
            except Exception as error:  # of any kind, depending on the step
                passed, message = False, str(error)
            rows.append(Passed(what, time.perf_counter() - start, passed, message))
            print(table(rows[-1:]), flush=True)
    failed = [row.what for row in rows if not row.passed]
    short = [
        Passed(row.what, row.seconds, row.passed, row.message.partition("\n")[0][:100])
        for row in rows
    ]
    print(f"\n{table(short)}\n{'FAILED: ' + ', '.join(failed) if failed else 'everything passed'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
