"""A backend is used for all three steps, and the reference shares no code with the others."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dgt
from dgt.ops import (
    attention,
    clustered,
    dispatch,
    grouping,
    native_loader,
    reference,
    selection,
    torch_backend,
)
from dgt.utils.errors import NonFiniteInput

STEPS = (
    "group_queries",
    "select_keys",
    "attend",
    "attend_with_logsumexp",
    "summarize_clusters",
    "cluster_tokens",
    "group_statistics",
)


class Steps:
    """Steps that record which of them are called."""

    def __init__(self, steps: ModuleType) -> None:
        self.steps = steps
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return getattr(self.steps, name)


@pytest.mark.parametrize("asked", ["native", "torch", "triton", "reference"])
def test_every_step_runs_on_the_backend_asked_for(asked, draw, monkeypatch) -> None:
    query, key, value, centroids = draw(2, 2, 30, 8, 4)
    recorded = Steps(reference)
    for module in (attention, grouping, selection):
        monkeypatch.setattr(
            module, "choose_steps", lambda name, *_: recorded if name == asked else None
        )

    group_ids = dgt.group_queries(query, centroids, backend=asked)
    key_ids = dgt.select_keys(centroids, key, 5, backend=asked)
    dgt.attend(query, key, value, group_ids, key_ids, backend=asked)
    dgt.attend_with_logsumexp(query, key, value, group_ids, key_ids, backend=asked)
    grouping.group_statistics(query, group_ids, 4, backend=asked)
    each = ["group_queries", "select_keys", "attend", "attend_with_logsumexp", "group_statistics"]
    assert recorded.called == each

    recorded.called.clear()
    dgt.dynamic_group_attention(query, key, value, centroids, 5, backend=asked, residual_keys=1)
    assert recorded.called == ["group_queries", "select_keys", "summarize_clusters", "attend"]


def test_without_the_native_kernel_auto_is_torch_and_its_name_an_error_with_the_reason(
    draw, monkeypatch
) -> None:
    monkeypatch.setattr(native_loader, "_reason", lambda: "no compiler was found")
    *inputs, centroids = draw(1, 2, 30, 8, 4)
    assert dispatch.resolve_backend("auto", inputs[0]) == "torch"
    with pytest.raises(
        ValueError, match='"native" cannot run here: no compiler was found; use backend="torch"'
    ):
        dgt.dynamic_group_attention(*inputs, centroids, 5, backend="native")


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (
            torch.zeros(1, 1, 5, 8).double(),
            TypeError,
            "float32, float16 or bfloat16 for .*got torch.float64",
        ),
        (torch.zeros(1, 1, 5, 300), ValueError, "at most 256 channels per head .*got 300"),
    ],
)
def test_what_the_native_kernel_does_not_take_is_left_to_torch(
    tokens, error, message, monkeypatch
) -> None:
    monkeypatch.setattr(native_loader, "_reason", lambda: None)
    assert dispatch.resolve_backend("auto", tokens) == "torch"
    assert dispatch.resolve_backend("auto", tokens[..., :8].float()) == "native"
    with pytest.raises(error, match=message):
        dispatch.resolve_backend("native", tokens)


@pytest.mark.parametrize(
    ("change", "capability", "expected"),
    [
        ({}, (9, 0), "triton"),
        ({}, (7, 5), "torch"),
        ({"dtype": torch.float64}, (9, 0), "torch"),
        ({"shape": (1, 1, 5, 200)}, (9, 0), "torch"),
    ],
    ids=["recent", "old", "float64", "many channels"],
)
def test_auto_on_cuda_is_triton_where_it_runs(change, capability, expected, monkeypatch) -> None:
    launch = pytest.importorskip("dgt.ops.triton.launch", exc_type=ImportError)
    monkeypatch.setattr(launch, "_capability", lambda _: capability)
    of_tokens = {"dtype": torch.float16, "shape": (1, 1, 5, 8), **change}
    device = torch.device("cuda:0")
    tokens = SimpleNamespace(is_cuda=True, is_meta=False, device=device, **of_tokens)
    assert dispatch.resolve_backend("auto", tokens) == expected
    assert dispatch.resolve_backend("triton", tokens) == "triton"
    monkeypatch.setattr(dispatch, "is_writing_file", lambda: True)  # files hold no Triton
    assert dispatch.resolve_backend("auto", tokens) == "torch"


@pytest.mark.parametrize(("channels", "expected"), [(64, "triton"), (128, "torch")])
def test_clustered_attention_chooses_keys_by_a_channel_more(channels, expected, monkeypatch):
    """Triton takes 128 channels, and would refuse 129."""
    launch = pytest.importorskip("dgt.ops.triton.launch", exc_type=ImportError)
    monkeypatch.setattr(launch, "_capability", lambda _: (9, 0))
    chosen = []

    def see(backend: str, tokens: torch.Tensor, *others: torch.Tensor) -> Any:
        chosen.append(dispatch.resolve_backend(backend, tokens))
        return dispatch.choose_steps(backend, tokens, *others)

    monkeypatch.setattr(clustered, "choose_steps", see)
    with FakeTensorMode():
        tokens = (torch.empty(1, 2, 60, channels, device="cuda") for _ in range(3))
        found = dgt.clustered_attention(*tokens, num_groups=4, top_k=5, residual_keys=2)
    assert chosen == [expected]
    assert found.shape == (1, 2, 60, channels)


def test_without_triton_the_error_says_what_to_do(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dgt.ops.triton", None)
    monkeypatch.delattr("dgt.ops.triton", raising=False)
    with pytest.raises(ValueError, match="pip install triton"):
        dispatch.load_triton()


def test_the_reference_takes_no_step_of_another_backend(draw, monkeypatch) -> None:
    """It gives the same result when every step of the others is broken."""
    inputs = draw(2, 2, 40, 8, 5)
    mask = torch.rand(2, 40) < 0.8
    plain = dgt.dynamic_group_attention(*inputs, 6, query_mask=mask, key_mask=mask, backend="torch")

    def broken(*_: object) -> None:
        raise AssertionError("the reference took a step of another backend")

    for name in STEPS:
        monkeypatch.setattr(torch_backend, name, broken)
    with pytest.raises(AssertionError, match="another backend"):
        dgt.dynamic_group_attention(*inputs, 6, query_mask=mask, key_mask=mask, backend="torch")
    oracle = dgt.dynamic_group_attention(
        *inputs, 6, query_mask=mask, key_mask=mask, backend="reference"
    )
    assert torch.equal(oracle.group_ids, plain.group_ids)
    assert torch.equal(oracle.key_ids, plain.key_ids)
    torch.testing.assert_close(oracle.output, plain.output)


@pytest.mark.parametrize("name", ["query", "key"])
def test_nan_is_an_error_of_its_own_class(backend, name, draw) -> None:
    query, key, value, centroids = draw(1, 2, 20, 4, 3)
    given = {"query": query, "key": key, "value": value}
    given[name][0, 1, 7, 2] = torch.nan
    with pytest.raises(NonFiniteInput, match=f"{name} must not contain NaN"):
        dgt.dynamic_group_attention(**given, centroids=centroids, top_k=4, backend=backend)


def test_compiled_code_is_not_taken_for_a_file() -> None:
    """PyTorch 2.11 says of all of it that it is exported."""
    compiled = torch.compile(lambda x: x + dispatch.is_writing_file(), backend="eager")
    assert compiled(torch.zeros(1)).item() == 0
    program = torch.export.export(Exported(), (torch.zeros(1),))
    assert program.module()(torch.zeros(1)).item() == 1


class Exported(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + dispatch.is_writing_file()
