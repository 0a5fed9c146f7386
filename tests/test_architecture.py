"""The import graph, from the source alone; and that importing `dgt` is light and needs no extra."""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from dgt.utils.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PATHS = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
"""Every module of ours by its name."""


def named_modules(module: str, tree: ast.Module) -> Iterator[str]:
    """The names that a module imports anywhere: at its top, in functions, for types, by `import_module`."""
    package = module.split(".")
    if PATHS[module].name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *filter(None, [node.module])]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            written = ast.unparse(node.args[0])
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)
            elif written.startswith("f'{__name__}."):  # a package that opens its parts when asked
                yield from (name for name in PATHS if name.startswith(f"{module}."))
            else:
                raise AssertionError(f"{module}: import_module({written}) hides what it imports")


def imports(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    found = set()
    for name in named_modules(module, ast.parse(PATHS[module].read_text(encoding="utf-8"))):
        if name in PATHS:
            found.add(name)
        elif name.rpartition(".")[0] in PATHS and name != "dgt.__version__":
            found.add(name.rpartition(".")[0])
    return found


GRAPH = {module: imports(module) for module in PATHS}


def package_of(module: str) -> str:
    """The package of a module, as the tree names it: a package or a file of `dgt`, or a package beside it."""
    parts = module.split(".")
    if parts[0] != "dgt":
        return f"../{parts[0]}"
    return parts[1] if len(parts) > 1 else "__init__"


def test_calls_of_the_operators_name_their_arguments() -> None:
    """A reader who has to count commas reads the wrong argument; Triton's kernels take no names."""
    calls = [
        (module, call)
        for module, path in PATHS.items()
        if module.startswith("dgt.ops") and not module.startswith("dgt.ops.triton")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
    ]
    assert calls
    many = [f"{module}:{call.lineno}" for module, call in calls if len(call.args) > 6]
    assert not many, f"calls with more than six arguments by position: {many}"


def packages_in_order() -> list[str]:
    """The packages in CONTRIBUTING.md's tree, from the top down."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^src/dgt/\n((?: +\S.*\n)+)", text, flags=re.MULTILINE)
    return re.findall(r"^  (\S+?)(?:\.py|/)? ", tree, flags=re.MULTILINE)


def test_a_package_imports_only_from_packages_below_it() -> None:
    order = {name: place for place, name in enumerate(packages_in_order())}
    unlisted = {package_of(module) for module in PATHS} - set(order)
    assert not unlisted, f"not in the tree of CONTRIBUTING.md: {sorted(unlisted)}"
    upward = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        for other in sorted(others)
        if order[package_of(other)] < order[package_of(module)]
    ]
    assert not upward


def test_no_module_imports_itself_through_others() -> None:
    try:
        list(graphlib.TopologicalSorter(GRAPH).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


LIGHT = """
import contextlib, io, json, sys
extras, heavy = json.loads(sys.argv[1])
opened = []
sys.addaudithook(lambda event, about: opened.append(str(about)) if event == "ctypes.dlopen" else None)
sys.modules["triton"] = None  # as if it were not installed
from dgt_command import main
def answer(words):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        return [main(words), text.getvalue()]

seen = {"status": answer(["status", "run"]), "list": answer(["weights", "list"])}
seen["loaded to read files"] = [name for name in ("torch", "timm") if name in sys.modules]
import dgt
seen["imported"] = [name for name in heavy if name in sys.modules]
seen["kernels loaded"] = [name for name in opened if "dgt_native" in name]
for name in extras:
    sys.modules[name] = None

for command in ("predict dgt_nano.scenes image.png --json", "train scenes", "explore"):
    words = command.split()
    seen[words[0]] = answer(words)
print(json.dumps(seen))
"""


def test_importing_is_light_and_extras_are_asked_for_when_needed(tmp_path: Path) -> None:
    """One process tells it all, as each takes seconds."""
    Image.effect_noise((64, 64), 60).convert("RGB").save(tmp_path / "image.png")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    (tmp_path / "run" / "status.json").write_text("{")
    extras = sorted(set(EXTRAS) - {"tqdm"})  # which timm's own dependencies import
    heavy = [*extras, "rich", "torch.utils.cpp_extension"]
    run = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps([extras, heavy])],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["status"][0] == 2
    assert "status.json is damaged" in seen["status"][1]
    assert seen["list"][0] == 0
    assert "dgt_nano.scenes" in seen["list"][1]
    assert seen["loaded to read files"] == []
    assert seen["imported"] == []
    assert seen["kernels loaded"] == []
    assert seen["predict"][0] == 0
    for command, library, extra in (
        ("train", "lightning_fabric", "train"),
        ("explore", "uvicorn", "explore"),
    ):
        status, sentence = seen[command]
        assert status == 2
        assert sentence.startswith("dgt: error: ")
        assert f" needs {library}, which is not installed: pip install '.[{extra}]'" in sentence


def test_every_library_is_in_the_extra_that_is_named_for_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for library, extra in EXTRAS.items():
        found = re.search(
            rf"^{extra} = \[(.*?)\]\s*(?:#.*)?$", text, flags=re.MULTILINE | re.DOTALL
        )
        assert found is not None, extra
        assert f'"{library.replace("_", "-")}>=' in found[1], f"{extra} does not install {library}"
