"""A choice of backend governs all three steps, and the reference shares no code with what it judges."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch

import dgt
from dgt.ops import backends, grouping, reference, selection
from dgt.utils.errors import NonFiniteInput


@pytest.mark.parametrize(
    ("backend", "expected"), [("triton", ["group", "select"]), ("auto", []), ("eager", []), ("reference", [])]
)
def test_grouping_and_selection_run_on_the_backend_asked_for(backend, expected, draw, monkeypatch) -> None:
    """Where Triton is asked for, its kernels are reached, whatever the step; nowhere else."""
    query, key, _, centroids = draw(2, 2, 30, 8, 4)
    called: list[str] = []

    def kernel(name: str, result: torch.Tensor):
        return lambda *_: called.append(name) or result

    group_ids, key_ids = dgt.group_queries(query, centroids), dgt.select_keys(centroids, key, 5)
    kernels = SimpleNamespace(group_queries=kernel("group", group_ids), select_keys=kernel("select", key_ids))
    for module in (grouping, selection):
        monkeypatch.setattr(module, "load_triton", lambda: kernels)
    assert torch.equal(dgt.group_queries(query, centroids, backend=backend), group_ids)
    assert torch.equal(dgt.select_keys(centroids, key, 5, backend=backend), key_ids)
    assert called == expected


def test_unknown_names_are_refused_by_every_step(draw) -> None:
    query, key, value, centroids = draw(1, 1, 9, 4, 3)
    group_ids, key_ids = dgt.group_queries(query, centroids), dgt.select_keys(centroids, key, 2)
    for run in (
        lambda: dgt.group_queries(query, centroids, backend="forms"),
        lambda: dgt.select_keys(centroids, key, 2, backend="forms"),
        lambda: dgt.attend(query, key, value, group_ids, key_ids, backend="forms"),
        lambda: dgt.dynamic_group_attention(query, key, value, centroids, 2, backend="forms"),
    ):
        with pytest.raises(ValueError, match="backend must be one of auto, reference, eager, triton, got 'forms'"):
            run()


def test_without_triton_the_error_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dgt.ops.triton", None)
    monkeypatch.delattr("dgt.ops.triton", raising=False)
    with pytest.raises(ValueError, match="pip install triton"):
        backends.load_triton()


def test_the_reference_takes_no_step_of_another_backend(draw, monkeypatch) -> None:
    """It gives the same result where every part of the plain path is broken."""
    inputs = draw(2, 2, 40, 8, 5)
    mask = torch.rand(2, 40) < 0.8
    plain = dgt.dynamic_group_attention(*inputs, 6, key_mask=mask, backend="eager")

    def broken(*_: object) -> None:
        raise AssertionError("the reference took the plain path")

    monkeypatch.setattr(grouping, "nearest_group", broken)
    monkeypatch.setattr(selection, "_largest", broken)
    monkeypatch.setattr("dgt.ops.eager._by_head", broken)
    with pytest.raises(AssertionError, match="plain path"):
        dgt.dynamic_group_attention(*inputs, 6, key_mask=mask, backend="eager")
    oracle = dgt.dynamic_group_attention(*inputs, 6, key_mask=mask, backend="reference")
    assert torch.equal(oracle.group_ids, plain.group_ids)
    assert torch.equal(oracle.key_ids, plain.key_ids)
    torch.testing.assert_close(oracle.output, plain.output)


def test_the_reference_imports_the_checks_alone() -> None:
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(reference))) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in nodes if (node.module or "").startswith("dgt")} == {"dgt.ops.checks"}


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("name", ["query", "key"])
def test_nan_is_an_error_of_its_own_class(backend, name, draw) -> None:
    query, key, value, centroids = draw(1, 2, 20, 4, 3)
    given = {"query": query, "key": key, "value": value}
    given[name][0, 1, 7, 2] = torch.nan
    with pytest.raises(NonFiniteInput, match=f"{name} must be free of NaN"):
        dgt.dynamic_group_attention(**given, centroids=centroids, top_k=4, backend=backend)
