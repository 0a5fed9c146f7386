"""Checks the architecture: import graph, no cycles, no private names of other libraries, one registry, a light import.

`EXCEPTIONS` lists allowed exceptions with their reasons. An exception that is no longer needed is
an error.
"""

from __future__ import annotations

import ast
import graphlib
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

TASK_NAMES = {"classify", "segment", "detect"}
BACKENDS = ("reference", "native", "torch", "triton")
PUBLIC_UNDERSCORES = {
    "_asdict",
    "_replace",
    "_fields",
    "_make",
    "_exit",
}  # of named tuples and `os`, documented
PUBLIC_UNDERSCORES |= {
    "_version"
}  # of tensors: how often they were written to in place, in the notes on autograd

# Allowed because no public name does the same. Exceptions that are no longer needed must be
# removed.
EXCEPTIONS: dict[str, set[str]] = {
    "cycles": set(),
    "private names": {
        # no public way to ask whether a module has hooks or torch.func traces it
        "layers: _forward_hooks",
        "layers: _forward_pre_hooks",
        "layers: _backward_hooks",
        "layers: _backward_pre_hooks",
        "layers: _C",
        "layers: _are_functorch_transforms_active",
        "models: _native_batch_norm_legit_no_training",  # an operator whose FLOPs are counted
        "models: timm.models._features.feature_take_indices",  # what timm's own models import
        "ops: torch._subclasses.fake_tensor.FakeTensor",
        "training: torch.utils._pytree.tree_leaves",
    },
    "overrides": {
        "CentroidState._apply",
        "CentroidState._load_from_state_dict",
    },  # torch's way to cast and load
    "task names": set(),
    "reference": set(),
    "scripting": set(),
    "plain errors": set(),
    "renames": set(),
}
STRICT = True  # whether an exception that is no longer needed is an error

Function = ast.FunctionDef | ast.AsyncFunctionDef
SOURCE_ROOT = PACKAGE.parent
SOURCES = sorted(SOURCE_ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in SOURCES}


def dotted(path: Path) -> list[str]:
    """The parts of a module's name: src/dgt/ops/reference.py is ["dgt", "ops", "reference"]."""
    parts = list(path.relative_to(SOURCE_ROOT).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def where(path: Path, node: ast.AST | None = None) -> str:
    """A location for a message: file, and line if known."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imported(path: Path, tree: ast.Module) -> Iterator[tuple[ast.AST, list[str]]]:
    """All of our names that a module imports, at its top level or inside functions, with relative imports resolved."""
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
        yield from ((node, name) for name in names if name[0] in ("dgt", "dgt_command"))


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
    return any(
        inspect.getdoc(getattr(base, method)) for base in owner.__mro__[1:] if hasattr(base, method)
    )


def package(parts: list[str]) -> str:
    """The package that a module or a name in it belongs to, by the names of the graph in CONTRIBUTING.md."""
    if parts[0] != "dgt":
        return "recipe_files" if parts[1:2] == ["recipe_files"] else "dgt_command"
    return parts[1] if parts[1:] not in ([], ["__version__"]) else "__init__"


def check(rule: str, found: dict[str, str]) -> None:
    """Compare violations of a rule, as {key: line of the message}, with the rule's exceptions."""
    excused = EXCEPTIONS[rule]
    wrong = [text for key, text in found.items() if key not in excused]
    assert not wrong, "\n".join(["", *wrong])
    if STRICT:
        assert excused <= set(found), (
            f"no longer needed, remove from EXCEPTIONS: {sorted(excused - set(found))}"
        )


def written_graph() -> dict[str, set[str]]:
    """The graph in section "Architecture" of CONTRIBUTING.md: each package with what it imports."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    house = text.partition("## Architecture")[2]
    lines = re.findall(r"^(\w+) .*?-> (.+)$", house, flags=re.M)
    graph: dict[str, set[str]] = {}
    for name, targets in lines:  # a package may have more than one line
        graph.setdefault(name, set()).update(set(targets.split(", ")) - {"nothing"})
    return graph


def test_packages_import_exactly_what_contributing_says() -> None:
    """The graph of section "Architecture", edge by edge: none is undocumented, and none is missing."""
    written = written_graph()
    places: dict[str, str] = {}
    for path, tree in TREES.items():
        own = package(dotted(path))
        for node, name in imported(path, tree):
            other = package(name)
            if other != own and name != ["dgt", "__version__"]:
                places[f"{own} -> {other}"] = f"{where(path, node)} {own} imports {'.'.join(name)}"
    drawn = {f"{own} -> {other}" for own, targets in written.items() for other in targets}
    missing = [text for edge, text in places.items() if edge not in drawn]
    assert not missing, "\n".join(["not in CONTRIBUTING.md:", *missing])
    assert sorted(drawn - set(places)) == [], "drawn in CONTRIBUTING.md, but nothing imports so"
    assert {package(dotted(path)) for path in SOURCES} <= set(written)


def test_no_module_imports_itself_through_others() -> None:
    """No cycles, including imports inside functions and under `if TYPE_CHECKING`."""
    modules = {".".join(dotted(path)) for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for path, tree in TREES.items():
        own = ".".join(dotted(path))
        names = (".".join(name) for _, name in imported(path, tree))
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[own] = {
            target for target in targets if f"{own} -> {target}" not in EXCEPTIONS["cycles"]
        }
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def own_private_names(tree: ast.Module) -> set[str]:
    """Names with one leading underscore that a module defines: functions, classes, variables, attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_buffer"):
            names.add(
                ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
            )
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    """Whether a name has leading underscores and is neither `__special__` nor a documented exception."""
    return (
        name.startswith("_")
        and not name.endswith("__")
        and name != "_"
        and name not in PUBLIC_UNDERSCORES
    )


def foreign_roots(tree: ast.Module) -> set[str]:
    """Names under which a module imports things from elsewhere."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (alias.asname or alias.name).split(".")[0]
                for alias in node.names
                if alias.name[:3] != "dgt"
            }
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and (node.module or "")[:3] != "dgt"
        ):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def private_uses(tree: ast.Module, own: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Private names of other libraries that a module imports, reads, sets, or accesses with `getattr` and the like.

    A name counts as ours if the same module defines it (`own`), unless it is accessed on something
    imported from elsewhere. Private names of our own objects may only be used in their module.
    """
    roots = foreign_roots(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            modules = []
        yield from (
            (node, name) for name in modules if any(is_private(part) for part in name.split("."))
        )
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if node.attr not in own or (isinstance(root, ast.Name) and root.id in roots):
                yield node, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        ):
            names = [part.value for part in node.args[1:2] if isinstance(part, ast.Constant)]
            yield from ((node, name) for name in names if is_private(name) and name not in own)


def test_no_private_name_of_another_library_is_used() -> None:
    """Private names of other libraries can change in any of their releases."""
    found = {}
    for path, tree in TREES.items():
        for node, name in private_uses(tree, own_private_names(tree)):
            found[f"{package(dotted(path))}: {name}"] = f"{where(path, node)} {name}"
    check("private names", found)


def test_no_private_method_of_another_library_is_overridden() -> None:
    """One of our classes that overrides a private name of its base class depends on it as well."""
    found = {}
    for path, tree in TREES.items():
        classes = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and importable(path)
        ]
        for node in classes:
            given = {
                member.name
                for member in node.body
                if isinstance(member, Function) and is_private(member.name)
            }
            owner = (
                getattr(importlib.import_module(".".join(dotted(path))), node.name)
                if given
                else object
            )
            for base in owner.__mro__[1:]:
                if not base.__module__.startswith("dgt"):
                    for name in given & set(vars(base)):
                        found[f"{node.name}.{name}"] = (
                            f"{where(path, node)} {node.name}.{name} overrides {base}"
                        )
    check("overrides", found)


def test_tasks_are_told_apart_in_their_registry_alone() -> None:
    """Outside `tasks/` nothing is compared with a task's name, and no other table has tasks as its keys."""
    found = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree) if package(dotted(path)) != "tasks" else ():
            if isinstance(node, ast.Compare):
                parts: list[ast.AST] = [node.left, *node.comparators]
            elif isinstance(node, ast.Dict):
                parts = [key for key in node.keys if key]
            elif isinstance(node, ast.MatchValue):
                parts = [node.value]
            else:
                continue
            constants = [
                leaf.value
                for part in parts
                for leaf in ast.walk(part)
                if isinstance(leaf, ast.Constant)
            ]
            if any(isinstance(value, str) and value in TASK_NAMES for value in constants):
                found[package(dotted(path))] = (
                    f"{where(path, node)} tells tasks apart by their names"
                )
    check("task names", found)


def test_the_reference_stands_alone() -> None:
    """The oracle shares only the argument checks with the code under test, or an error could hide in both."""

    def backend(parts: list[str]) -> str | None:
        stem = parts[2].split("_")[0] if len(parts) > 2 and parts[1] == "ops" else None
        return stem if stem in BACKENDS else None

    found = {}
    for path, tree in TREES.items():
        for node, name in imported(path, tree):
            own, other = backend(dotted(path)), backend(name)
            if (own and other not in (None, own)) or (
                own == "reference" and name[:3] != ["dgt", "ops", "checks"]
            ):
                found[".".join(name[:3])] = f"{where(path, node)} imports {'.'.join(name)}"
    check("reference", found)


def test_scripting_is_asked_for_in_one_file() -> None:
    """TorchScript's special cases are all in `layers/scripting.py`."""
    paths = [path for path, tree in TREES.items() for node in ast.walk(tree) if is_scripting(node)]
    found = {
        package(dotted(path)): where(path) for path in paths if dotted(path)[-1] != "scripting"
    }
    check("scripting", found)


def is_scripting(node: ast.AST) -> bool:
    """Whether a node names `torch.jit.is_scripting`."""
    return "is_scripting" in (
        getattr(node, "attr", ""),
        getattr(node, "id", ""),
        getattr(node, "name", ""),
    )


def test_errors_for_users_are_user_errors() -> None:
    """Above `layers` wrong input is a `UserError`: the command shows any other exception as a bug."""
    found = {}
    for path, tree in TREES.items():
        for node in (
            ast.walk(tree) if package(dotted(path)) not in ("utils", "ops", "layers") else ()
        ):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ValueError":
                found[package(dotted(path))] = f"{where(path, node)} raises a plain ValueError"
    check("plain errors", found)


def test_files_are_renamed_into_place_by_utils_alone() -> None:
    """`os.replace` and its relatives: one module is responsible for atomic writes."""
    found = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree) if package(dotted(path)) != "utils" else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, plain = node.func.attr, len(node.args) == 1 and not node.keywords
                module = ast.unparse(node.func.value) in ("os", "shutil")
                if (module and name in ("replace", "rename", "renames", "move")) or (
                    plain
                    and name in ("replace", "rename")
                    and ast.unparse(node.func.value) != "dataclasses"
                ):
                    found[package(dotted(path))] = f"{where(path, node)} renames a file"
    check("renames", found)


def test_every_public_name_has_a_docstring() -> None:
    """Modules, functions, classes, and methods that inherit no docstring."""
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
    return any(
        ast.unparse(mark).endswith(("overload", ".setter", ".deleter"))
        for mark in node.decorator_list
    )


def importable(path: Path) -> bool:
    """GPU kernels can only be imported if Triton is installed."""
    return "triton" not in dotted(path) or importlib.util.find_spec("triton") is not None


def test_every_public_function_is_annotated() -> None:
    """All arguments and the result; kernels are exempt, since their arguments are Triton's pointers and constants."""
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
    """Whether a function is compiled by Triton, directly or under `autotune` and the like."""
    return any(re.search(r"\bjit\b", ast.unparse(mark)) for mark in node.decorator_list)


def written_tree() -> dict[str, list[str]]:
    """CONTRIBUTING.md's tree: its top-level entries, each with the entries indented under it.

    The tree is a fenced block whose first line starts with `src/dgt/`. Two spaces before a name make a top-level entry,
    four an entry inside the folder above; more is the rest of a description. A name ends at the first blank; folders
    end in `/`.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
    blocks = [block for block in fenced if block.startswith("src/dgt/")]
    assert len(blocks) == 1, (
        "CONTRIBUTING.md needs exactly one fenced block that starts with `src/dgt/`"
    )
    entries: dict[str, list[str]] = {}
    for line in blocks[0].splitlines()[1:]:
        match = re.match(r"( {2}| {4})(\S+)", line)
        if match and len(match[1]) == 2:
            entries[match[2]] = []
        elif match:
            entries[list(entries)[-1]].append(match[2])
    return entries


def test_the_tree_in_contributing_is_true() -> None:
    """Top level: exactly what is there. Inside folders: whatever is named exists."""
    entries = written_tree()
    files = {path.name for path in PACKAGE.glob("*.py")} | {"../dgt_command/"}
    folders = {path.name + "/" for path in PACKAGE.iterdir() if path.is_dir() and holds_files(path)}
    assert set(entries) - {"py.typed"} == files | folders
    inside = [parent + name for parent, names in entries.items() for name in names]
    assert [name for name in inside if not (PACKAGE / name).exists()] == []


def holds_files(folder: Path) -> bool:
    """Whether a folder contains more than compiled leftovers."""
    return any(path.is_file() and "__pycache__" not in path.parts for path in folder.rglob("*"))


def run_python(code: str) -> str:
    """The output of this code in a fresh interpreter."""
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {code}",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


# An import of one of these fails as if it were not installed, and is recorded.
MISSING = """
class Missing:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        if name in {names}:
            self.asked.add(name)
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Missing())
import dgt
print(dgt.__version__, [name for name in {heavy} if name in Missing.asked or name in sys.modules])

from dgt.ops.cpu import library
print(library._loaded.cache_info().currsize)

import torch
x, c = torch.randn(1, 1, 8, 8), torch.randn(1, 2, 8)
dgt.dynamic_group_attention(x, x, x, c, 3)
try:
    dgt.dynamic_group_attention(x, x, x, c, 3, backend="triton")
except ValueError as error:
    print(error)
"""


def test_import_needs_and_loads_nothing_heavy() -> None:
    """`import dgt` does not need Triton (which torch loads itself if it can), Lightning, or matplotlib.

    It imports no library for training or drawing, and no part of torch that warns if it finds a
    compiler, and it loads no library of native kernels. Without Triton the plain path works, and
    the backend "triton" says what to install. One process tells it all, as each takes seconds.
    """
    training = (
        "lightning",
        "pytorch_lightning",
        "torchmetrics",
        "jsonargparse",
        "tensorboard",
        "rich",
        "transformers",
    )
    heavy = (*training, "matplotlib", "torch.utils.cpp_extension")
    missing = "triton", "lightning", "matplotlib", "jsonargparse", "rich"
    code = MISSING.replace("{names}", repr(missing)).replace("{heavy}", repr(heavy))
    imported, loaded, refused = run_python(f"\n{code}").splitlines()
    assert re.fullmatch(r"\d\S+ \[\]", imported)
    assert loaded == "0"
    assert 'backend="triton" needs Triton, which is not installed' in refused


def tracked_files() -> list[Path]:
    """The tracked files, except those deleted in the working tree."""
    result = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
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
    """The package index is the user's own configuration."""
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for what, pattern in FOREIGN.items():
            found += [
                f"{path.relative_to(ROOT)}: {what}: {match[0]}"
                for match in re.finditer(pattern, text)
            ]
    assert not found, "\n".join(["", *found])
