"""The backend "torch" in all its attention modes, including CUDA's, with a loop in place of flash attention."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dgt.ops import attention, reference, torch_backend

pytestmark = pytest.mark.skipif(
    not torch_backend.HAS_VARLEN,
    reason="this version of PyTorch has no flash attention of variable lengths",
)
ROUTES = ("dense", "padded", "padded by sevens", "varlen", "varlen by sevens")


class Case(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    centroids: Tensor
    top_k: int
    key_mask: Tensor | None


def draw_case(seed: int) -> Case:
    """Random inputs: normal, with many ties, or with nearly all queries in one group; a third have a mask."""
    dice = random.Random(seed)
    batch, heads = dice.choice([1, 2, 3]), dice.choice([1, 2])
    groups, channels = dice.choice([1, 2, 7, 20]), dice.choice([1, 4, 8, 16])
    queries = dice.choice([1, 5, 16, 31, 64, 77, 130, 200])
    keys = queries if seed % 5 else dice.choice([1, 12, 90])
    top_k = dice.choice([1, 2, 5, 16, 50, keys, keys + 3])
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query = normal(batch, heads, queries, channels)
    key = normal(batch, heads, keys, channels)
    value = normal(batch, heads, keys, channels)
    centroids = F.normalize(normal(heads, groups, channels), dim=-1)
    if seed % 4 == 1:  # three different keys, integer queries, half of the centroids equal
        query = query.round()
        key = key[:, :, :1] * (torch.arange(keys) % 3 - 1)[:, None]
        centroids[:, groups // 2 :] = centroids[:, :1]
    elif seed % 4 == 2:
        query = centroids[:, dice.randrange(groups)][None, :, None] + 0.01 * query
    key_mask = None
    if seed % 3 == 0:
        real = dice.choice([0.0, 0.1, 0.5, 0.9])  # 0.0: the last image is all padding
        key_mask = torch.rand(batch, keys, generator=generator) < real
        key_mask[:-1, 0] = True
    return Case(query, key, value, centroids, top_k, key_mask)


def choose(case: Case) -> tuple[Tensor, Tensor]:
    """The groups and keys of a case, from the reference."""
    query_mask = case.key_mask if case.query.shape[2] == case.key.shape[2] else None
    group_ids = reference.group_queries(case.query, case.centroids, query_mask)
    return group_ids, reference.select_keys(case.centroids, case.key, case.top_k, case.key_mask)


def emulate_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
) -> Tensor:
    """Variable-length flash attention as a loop, which also checks the kernel's unchecked assumptions."""
    assert scale > 0
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert len(bounds) == len(key_bounds)
    assert 0 <= int(bounds.diff().min()) <= int(bounds.diff().max()) <= max_q
    assert 0 <= int(key_bounds.diff().min()) <= int(key_bounds.diff().max()) <= max_k
    cuts, key_cuts = bounds.tolist(), key_bounds.tolist()
    assert (cuts[0], cuts[-1]) == (0, len(query))
    assert (key_cuts[0], key_cuts[-1]) == (0, len(key))
    parts = []
    for (start, stop), (first, last) in zip(pairwise(cuts), pairwise(key_cuts), strict=True):
        if stop > start:
            assert last > first
            weights = (query[start:stop, 0] @ key[first:last, 0].mT * scale).softmax(-1)
            parts.append(weights @ value[first:last, 0])
    return torch.cat(parts)[:, None]


def take(route: str, monkeypatch) -> None:
    """Use one attention mode in every call, whatever its size and device."""
    monkeypatch.setattr(torch_backend, "is_dense_masked", lambda heads: route == "dense")
    if route.endswith("by sevens"):
        monkeypatch.setattr(torch_backend, "PADDED", 7)
        monkeypatch.setattr(torch_backend, "SEQUENCE", 7)
    if route.startswith("varlen"):
        monkeypatch.setattr(torch_backend, "_takes_varlen", lambda query, with_sums: not with_sums)
        monkeypatch.setattr(torch_backend, "varlen_attn", emulate_varlen)


@pytest.mark.parametrize("route", ROUTES)
def test_each_way_equals_the_reference(route, monkeypatch, close, with_gradients) -> None:
    """Output, gradients, and log-sum-exps."""
    take(route, monkeypatch)
    for seed in range(40):
        case = draw_case(seed)
        tokens = (case.query, case.key, case.value)
        ids = choose(case)
        scale = -0.3 if seed % 7 == 6 else case.query.shape[-1] ** -0.5
        ours = with_gradients(torch_backend.attend, tokens, *ids, scale)
        dense = with_gradients(reference.attend, tokens, *ids, scale)
        for what, actual, expected in zip(
            ("output", "query", "key", "value"), ours, dense, strict=True
        ):
            close(actual, expected, f"{what} of seed {seed}")
        sums = torch_backend.attend_with_logsumexp(*tokens, *ids, scale)[1]
        torch.testing.assert_close(sums, reference.attend_with_logsumexp(*tokens, *ids, scale)[1])


@pytest.mark.parametrize("route", ["padded", "varlen"])
@pytest.mark.parametrize("crowded", [False, True])
def test_segments_as_long_as_shipped(route, crowded, monkeypatch, draw, close) -> None:
    """3,136 tokens, in groups of similar size or nearly all in one."""
    take(route, monkeypatch)
    query, key, value, centroids = draw(1, 2, 3136, 8, 48)
    if crowded:
        query[:, :, 400:] += 20.0 * centroids[:, :1]
    ids = choose(Case(query, key, value, centroids, 98, None))
    close(
        torch_backend.attend(query, key, value, *ids, 0.3),
        reference.attend(query, key, value, *ids, 0.3),
    )


@pytest.mark.parametrize("route", ["padded", "varlen"])
def test_many_heads_attend_in_parts(route, monkeypatch, draw, close) -> None:
    """A head with 77 queries and 7 groups has at most 7 segments, so two heads attend in a call of 15."""
    take(route, monkeypatch)
    query, key, value, centroids = draw(5, 1, 77, 8, 7)
    ids = choose(Case(query, key, value, centroids, 20, None))
    whole = torch_backend.attend(query, key, value, *ids, 0.3)

    monkeypatch.setattr(torch_backend, "MOST_SEGMENTS_ON_CPU", 15)
    close(torch_backend.attend(query, key, value, *ids, 0.3), whole)


def test_ties_go_to_the_first_keys_whichever_topk_takes(monkeypatch) -> None:
    """PyTorch does not specify which of several equal scores ``topk`` takes; here it takes the last."""

    def take_the_last(self: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best, ids = self.flip(-1).sort(dim=-1, descending=True, stable=True)
        return best[..., :count], self.shape[-1] - 1 - ids[..., :count]

    monkeypatch.setattr(Tensor, "topk", take_the_last)
    for seed in range(120):
        case = draw_case(seed)
        arguments = (case.centroids, case.key, case.top_k, case.key_mask)
        assert torch.equal(
            torch_backend.select_keys(*arguments), reference.select_keys(*arguments)
        ), seed


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [196, 3136, 16384])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_it_looks_at_no_data(dtype, tokens, masked) -> None:
    """Fake tensors hold no data: a copy to the host, or a data-dependent shape, would raise an error.

    For CUDA tensors only forward: without a device the autograd engine does not start.
    """
    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, 2, tokens, 32, device="cuda", dtype=dtype) for _ in range(3)
        )
        centroids = torch.empty(2, 48, 32, device="cuda")
        key_mask = torch.empty(2, tokens, device="cuda", dtype=torch.bool) if masked else None
        for residual_keys in (0, 1):
            found = attention.dynamic_group_attention(
                query,
                key,
                value,
                centroids,
                98,
                key_mask=key_mask,
                backend="torch",
                residual_keys=residual_keys,
            )
            assert found.output.shape == query.shape
            assert found.output.device.type == "cuda"
            assert found.output.dtype == dtype


@pytest.mark.parametrize("route", ["dense", "padded", "varlen"])
def test_its_gradients_look_at_no_data(route, monkeypatch) -> None:
    take(route, monkeypatch)
    if route == "varlen":  # the operator itself, which only has to provide its shapes
        monkeypatch.undo()
        monkeypatch.setattr(torch_backend, "_takes_varlen", lambda query, with_sums: True)
    with FakeTensorMode():
        tokens = [torch.empty(2, 2, 3136, 32, requires_grad=True) for _ in range(3)]
        group_ids = torch.empty(2, 2, 3136, dtype=torch.int64)
        key_ids = torch.empty(2, 2, 48, 98, dtype=torch.int64)
        output = torch_backend.attend(*tokens, group_ids, key_ids, 0.2)
        gradients = torch.autograd.grad(output, tokens, torch.empty_like(output))
    assert [tensor.shape for tensor in (output, *gradients)] == [
        tensor.shape for tensor in (tokens[0], *tokens)
    ]


def steps_in_turn(query: Tensor, key: Tensor, value: Tensor, centroids: Tensor) -> Tensor:
    """The three steps as run on an accelerator: no operator hides them from a compiler."""
    group_ids = torch_backend.group_queries(query, centroids, None)
    key_ids = torch_backend.select_keys(centroids, key, 9, None)
    return torch_backend.attend(query, key, value, group_ids, key_ids, 0.3)


def test_the_way_of_cuda_is_exported_with_one_flash_attention(monkeypatch, draw) -> None:
    """Traced completely in strict mode, where reading data would fail; it is not run here."""
    monkeypatch.setattr(torch_backend, "_takes_varlen", lambda query, with_sums: True)

    class Steps(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, centroids: Tensor) -> Tensor:
            return steps_in_turn(query, key, value, centroids)

    program = torch.export.export(Steps(), tuple(draw(2, 2, 2000, 16, 20)), strict=True)
    graphs = [
        part.graph
        for part in program.graph_module.modules()
        if isinstance(part, torch.fx.GraphModule)
    ]
    called = [
        str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"
    ]
    assert sum("_varlen_attn" in name for name in called) == 1
    assert not any("dgt" in name for name in called)
