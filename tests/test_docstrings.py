"""Docstrings of public functions and classes have the required sections, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

import dgt

PACKAGES = (
    "dgt",
    "dgt.ops",
    "dgt.layers",
    "dgt.models",
    "dgt.runs",
    "dgt.tasks",
    "dgt.training",
    "dgt.export",
)
PACKAGES += (
    "dgt.acceleration",
    "dgt.figures",
    "dgt.explorer",
    "dgt.bench",
    "dgt.weights",
    "dgt.native",
)
NOT_YET: tuple[str, ...] = ()
"""Docstrings that lack a section: nothing may be added, and entries that are no longer needed must be removed."""
RUN = (
    "dgt.layers.attention",
    "dgt.layers.block",
    "dgt.layers.centroids",
    "dgt.layers.convolution",
    "dgt.models.cost",
    "dgt.models.heads.upernet",
    "dgt.models.inspect",
    "dgt.ops.dense",
    "dgt.ops.group_matmul",
    "dgt.ops.grouping",
)
"""Modules whose examples are complete and fast."""


def public() -> Iterator[Any]:
    """Functions and classes of ours that a package exports, each once."""
    found: dict[str, Any] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            is_ours = getattr(value, "__module__", "").startswith("dgt")
            if is_ours and (inspect.isfunction(value) or inspect.isclass(value)):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    yield from found.values()


def missing_sections(value: Any) -> list[str]:
    """Sections that a docstring should have and does not."""
    text = inspect.getdoc(value) or ""
    if hasattr(value, "_fields") or hasattr(value, "__dataclass_fields__"):
        has_fields = "Attributes:" in text or "Args:" in text
        documents_each = inspect.getsource(value).count('"""') > 2
        return [] if has_fields or documents_each else ["Attributes"]
    constructor = value.__dict__.get("__init__") if inspect.isclass(value) else value
    needed = []
    if inspect.isfunction(constructor):
        signature = inspect.signature(constructor)
        if set(signature.parameters) - {"self"}:
            needed.append("Args")
        nothing = (None, "None", inspect.Signature.empty)
        if inspect.isfunction(value) and signature.return_annotation not in nothing:
            needed.append("Returns")
    if inspect.isfunction(value) or "Args" in needed:
        needed.append("Example")
    also = {"Returns": "Yields"}
    return [
        name for name in needed if f"{name}:" not in text and f"{also.get(name, name)}:" not in text
    ]


def test_public_docstrings_have_their_sections() -> None:
    lacking = {value.__name__: missing_sections(value) for value in public()}
    assert {
        name: missing for name, missing in lacking.items() if missing and name not in NOT_YET
    } == {}
    assert [name for name in NOT_YET if not lacking.get(name)] == [], "remove from NOT_YET"


@pytest.mark.parametrize("name", RUN)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    names = {
        "dgt": dgt,
        "timm": timm,
        "torch": torch,
        "F": F,
        "nn": torch.nn,
        "DGAttention": dgt.DGAttention,
    }
    tests = [
        each for each in doctest.DocTestFinder().find(module, extraglobs=names) if each.examples
    ]
    assert tests
    runner = doctest.DocTestRunner(verbose=False)
    torch.manual_seed(0)
    for test in tests:
        reported: list[str] = []
        runner.run(test, out=reported.append)
        assert not reported, "".join(reported)
