"""Keeps the house in order: one-way imports, documented names, small parts, a true README, a light import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dgt"

# Each may import only itself and what stands before it. A new top-level module takes its place here.
LAYERS = (
    *("utils", "ops", "layers", "models", "data", "tasks", "recipes", "training", "export"),
    *("figures", "demo", "explorer", "bench", "cli", "__main__"),
)
NOT_FROM = {"data": {"models"}}
BACKENDS = ("reference", "eager", "triton")
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef
SOURCES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in SOURCES}


def dotted(path: Path) -> list[str]:
    """The parts of a module's name: src/dgt/ops/eager.py is ["dgt", "ops", "eager"]."""
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def where(path: Path, node: ast.AST | None = None) -> str:
    """A place for a message: file, and line where there is one."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imported(path: Path, tree: ast.Module) -> Iterator[tuple[ast.AST, list[str]]]:
    """Every `dgt...` name that a module imports, at its top or anywhere inside, with relative imports resolved."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        yield from ((node, name) for name in names if name[0] == "dgt")


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Public functions, classes and methods of public classes, with their qualified names."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, Function) and not member.name.startswith("_"):
                        yield f"{node.name}.{member.name}", member


def inherits_docstring(path: Path, name: str) -> bool:
    """Whether the method `Class.method` overrides one that has a docstring, which `help()` then shows."""
    class_name, method = name.split(".")
    owner = getattr(importlib.import_module(".".join(dotted(path))), class_name)
    return any(inspect.getdoc(getattr(base, method)) for base in owner.__mro__[1:] if hasattr(base, method))


def test_every_top_level_module_has_its_place() -> None:
    """A module outside the list of layers would escape the rule of one-way imports."""
    found = {dotted(path)[1] for path in SOURCES if len(dotted(path)) > 1}
    assert found <= set(LAYERS)


def test_layers_import_only_from_the_layers_above_them() -> None:
    """Imports go one way: ops, layers, models, data, tasks, training, figures, explorer, cli."""
    wrong = []
    for path, tree in TREES.items():
        own = dotted(path)[1] if len(dotted(path)) > 1 else None
        for node, name in imported(path, tree) if own in LAYERS else ():
            if len(name) < 2 or name[1] not in LAYERS:
                allowed = name[1:] == ["__version__"]
            else:
                allowed = LAYERS.index(name[1]) <= LAYERS.index(own) and name[1] not in NOT_FROM.get(own, ())
            if not allowed:
                wrong.append(f"{where(path, node)} {own} imports {'.'.join(name)}")
    assert not wrong, "\n".join(["", *wrong])


def test_backends_never_import_each_other() -> None:
    """The oracle and the fast paths share no code, or an error could hide in both."""

    def backend(parts: list[str]) -> str | None:
        stem = parts[2].split("_")[0] if len(parts) > 2 and parts[1] == "ops" else None
        return stem if stem in BACKENDS else None

    wrong = [
        f"{where(path, node)} imports {'.'.join(name)}"
        for path, tree in TREES.items()
        for node, name in imported(path, tree)
        if backend(dotted(path)) and backend(name) not in (None, backend(dotted(path)))
    ]
    assert not wrong, "\n".join(["", *wrong])


def test_every_public_name_has_a_docstring() -> None:
    """Modules, functions, classes, and methods that inherit no documentation."""
    missing = []
    for path, tree in TREES.items():
        if not ast.get_docstring(tree):
            missing.append(f"{where(path)} module")
        for name, node in public_definitions(tree):
            if ast.get_docstring(node) or ("." in name and is_overload_or_setter(node)):
                continue
            if "." not in name or not importable(path) or not inherits_docstring(path, name):
                missing.append(f"{where(path, node)} {name}")
    assert not missing, "\n".join(["", *missing])


def is_overload_or_setter(node: Function | ast.ClassDef) -> bool:
    """`@overload` stubs and property setters are documented by their main definition."""
    return any(ast.unparse(mark).endswith(("overload", ".setter", ".deleter")) for mark in node.decorator_list)


def importable(path: Path) -> bool:
    """GPU kernels can be imported only where Triton is."""
    return "triton" not in dotted(path) or importlib.util.find_spec("triton") is not None


def test_every_public_function_is_annotated() -> None:
    """All arguments and the result; kernels are exempt, their arguments are pointers and constants of Triton."""
    missing = []
    for path, tree in TREES.items():
        for name, node in public_definitions(tree):
            if isinstance(node, ast.ClassDef) or is_kernel(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments = arguments[1:] if "." in name and not is_static(node) else arguments
            arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra]
            if node.returns is None or any(argument.annotation is None for argument in arguments):
                missing.append(f"{where(path, node)} {name}")
    assert not missing, "\n".join(["", *missing])


def is_static(node: Function) -> bool:
    """Whether a method takes no `self` or `cls`."""
    return any(ast.unparse(mark) == "staticmethod" for mark in node.decorator_list)


def is_kernel(node: Function) -> bool:
    """Whether a function is compiled by Triton, bare or under `autotune` and the like."""
    return any(re.search(r"\bjit\b", ast.unparse(mark)) for mark in node.decorator_list)


def test_modules_and_functions_stay_small() -> None:
    """At most 400 lines in a module and 60 in a function, docstrings counted, kernels exempt."""
    large = []
    for path, tree in TREES.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_MODULE_LINES:
            large.append(f"{where(path)} has {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, Function) and not is_kernel(node):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    large.append(f"{where(path, node)} {node.name} has {length} lines")
    assert not large, "\n".join(["", *large])


def readme_tree() -> dict[str, list[str]]:
    """The README's tree: its top-level entries, each with the entries indented under it.

    The tree is a fenced block whose first line starts with `src/dgt/`. Two spaces before a name make a top-level entry,
    four an entry inside the folder above; more is the rest of a description. A name ends at the first blank; folders
    end in `/`.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
    blocks = [block for block in fenced if block.startswith("src/dgt/")]
    assert len(blocks) == 1, "README.md needs exactly one fenced block that starts with `src/dgt/`"
    entries: dict[str, list[str]] = {}
    for line in blocks[0].splitlines()[1:]:
        match = re.match(r"( {2}| {4})(\S+)", line)
        if match and len(match[1]) == 2:
            entries[match[2]] = []
        elif match:
            entries[list(entries)[-1]].append(match[2])
    return entries


def test_the_tree_in_the_readme_is_true() -> None:
    """Top level: exactly what is there. Inside folders: whatever is named exists."""
    entries = readme_tree()
    files = {path.name for path in PACKAGE.glob("*.py")}
    folders = {path.name + "/" for path in PACKAGE.iterdir() if path.is_dir() and holds_files(path)}
    assert set(entries) - {"py.typed"} == files | folders
    inside = [parent + name for parent, names in entries.items() for name in names]
    assert [name for name in inside if not (PACKAGE / name).exists()] == []


def holds_files(folder: Path) -> bool:
    """Whether a folder is more than compiled leftovers."""
    return any(path.is_file() and "__pycache__" not in path.parts for path in folder.rglob("*"))


def run_python(code: str) -> str:
    """What a fresh interpreter prints for this code."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    """`import dgt` loads, of the training and drawing libraries, none."""
    training = "lightning", "pytorch_lightning", "torchmetrics", "jsonargparse", "tensorboard", "rich", "transformers"
    heavy = (*training, "matplotlib")
    assert run_python(f"import dgt; print([name for name in {heavy} if name in sys.modules])") == "[]"


def test_import_works_where_nothing_optional_is_installed() -> None:
    """`import dgt` needs no Triton (which torch loads itself where it can), Lightning or matplotlib."""
    blocked = "for name in ('triton', 'lightning', 'matplotlib', 'jsonargparse', 'rich'): sys.modules[name] = None\n"
    assert run_python(f"\n{blocked}import dgt; print(dgt.__version__)")


def tracked_files() -> list[Path]:
    """The files git knows, without those deleted in the working tree."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a git checkout: no list of tracked files")
    return [ROOT / name for name in result.stdout.split("\0") if name and (ROOT / name).is_file()]


# Written with brackets so that this file does not match itself.
FOREIGN = {
    "a path of one machine": r"(?<![\w.~-])/(?:wor[k]|hom[e]|roo[t]|User[s]|op[t]|mn[t])/\w",
    "a registry's host": r"pyp[i]\.org|pythonhoste[d]\.org|download\.pytorc[h]\.org",
    "a choice of registry": r"--(?:extra-)?inde[x]-url|--find-link[s]",
}


def test_no_file_names_a_machine_or_a_registry() -> None:
    """What is installed from where is the user's own configuration."""
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for what, pattern in FOREIGN.items():
            found += [f"{path.relative_to(ROOT)}: {what}: {match[0]}" for match in re.finditer(pattern, text)]
    assert not found, "\n".join(["", *found])
