"""Gradients of query, key and value that are side by side are the gradient of what these were cut from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dgt
from dgt.ops.gradients import new_gradients, split_gradients, split_projection


class Joins(TorchDispatchMode):
    """Counts how often tensors are put together."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.cat.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys", [7, 11])
def test_gradients_are_views_of_one_tensor(keys: int) -> None:
    query, key = torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, keys, 4)
    joined = new_gradients(query, key)
    for number, part in enumerate(split_gradients(joined, query.shape, key.shape)):
        assert part.shape == (query if number == 0 else key).shape
        assert part.stride(-1) == 1
        part.fill_(number)
    assert sorted(joined.unique().tolist()) == [0, 1, 2]
    assert joined.numel() == query.numel() + 2 * key.numel()


@pytest.mark.parametrize("shape", [(2, 5, 12), (1, 5, 12), (2, 1, 12), (1, 1, 3), (2, 0, 6)])
def test_what_is_side_by_side_is_not_copied(shape: tuple[int, ...]) -> None:
    projection = torch.randn(shape, requires_grad=True)
    parts = split_projection(projection)
    for part, expected in zip(parts, projection.chunk(3, dim=-1), strict=True):
        assert torch.equal(part, expected)
    whole = torch.randn(shape)
    with Joins() as joins:
        (found,) = torch.autograd.grad(parts, projection, whole.chunk(3, dim=-1))
    assert torch.equal(found, whole)
    assert joins.count == (0 if whole.numel() else 1)


def order_changed(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(3, dim=-1)[::-1]


def of_a_wider_one(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.cat([part, part], -1)[..., : part.shape[-1]] for part in x.chunk(3, dim=-1))


def with_a_gap(x: Tensor) -> tuple[Tensor, ...]:
    return torch.cat([x, x], -1).chunk(6, dim=-1)[::2]


def turned(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.transpose(0, 1).contiguous().transpose(0, 1) for part in x.chunk(3, dim=-1))


def one_expanded(x: Tensor) -> tuple[Tensor, ...]:
    return x[..., :4], x[..., :4], x.new_ones(()).expand(2, 5, 4)


@pytest.mark.parametrize("cut", [order_changed, of_a_wider_one, with_a_gap, turned, one_expanded])
def test_others_are_put_together(cut: Any) -> None:
    projection = torch.randn(2, 5, 12, requires_grad=True)
    grads = cut(torch.randn(2, 5, 12))
    parts = split_projection(projection)
    (found,) = torch.autograd.grad(parts, projection, grads)
    assert torch.equal(found, torch.cat(grads, dim=-1))


def test_gradients_of_gradients() -> None:
    x = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True)

    def function(projection: Tensor) -> Tensor:
        query, key, value = split_projection(projection)
        return query * key.sin() + value.exp() * query

    torch.autograd.gradcheck(function, x)
    torch.autograd.gradgradcheck(function, x)


def gradients_of(layer: torch.nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Gradients of input and weights, and how often something was put together for them."""
    leaf = x.clone().requires_grad_()
    output = layer(leaf)
    leaves = [leaf, *layer.parameters()]
    with Joins() as joins:
        found = torch.autograd.grad(output.square().sum(), leaves)
    return list(found), joins.count


LAYERS = {
    "groups": {},
    "groups and a residual key": {"residual_keys": 1},
    "groups, many tokens": {"num_groups": 20},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_layer_puts_nothing_together(options: dict[str, Any], monkeypatch: Any) -> None:
    layer = dgt.DGAttention(16, num_heads=2, **{"num_groups": 3, "top_k": 5, **options})
    x = torch.randn(2, 400 if "num_groups" in options else 30, 16)
    layer(x)  # starts the centroids
    found, joins = gradients_of(layer, x)
    monkeypatch.setattr(
        "dgt.layers.attention.split_projection", lambda projected: projected.chunk(3, dim=-1)
    )
    expected, joins_before = gradients_of(layer, x)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    if dgt.native_status().available:
        assert (joins, joins_before) == (0, 1)


def test_dense_attention_puts_nothing_together() -> None:
    layer = dgt.GlobalAttention(16, num_heads=2)
    _, joins = gradients_of(layer, torch.randn(2, 30, 16))
    if dgt.native_status().available:
        assert joins == 0


@pytest.mark.parametrize("change", ["hook", "adapter", "frozen", "used twice"])
def test_what_acts_on_the_projection_still_acts(change: str) -> None:
    """A hook that changes a gradient, an adapter in the projection's place, a further use of the projection."""
    torch.manual_seed(0)
    layer = dgt.DGAttention(16, num_heads=2, num_groups=3, top_k=30).eval().double()
    exact = dgt.GlobalAttention(16, num_heads=2).double()
    exact.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    results = []
    for module in (layer, exact):
        seen: list[Tensor] = []
        if change == "hook":
            module.qkv.register_forward_hook(
                lambda _module, _inputs, output: (
                    output.register_hook(lambda grad: 2 * grad) and None
                )
            )
        elif change == "adapter":
            module.qkv = torch.nn.Sequential(module.qkv, torch.nn.Tanh())
        elif change == "frozen":
            module.qkv.weight.requires_grad_(False)
        else:
            module.qkv.register_forward_hook(
                lambda _module, _inputs, output, to=seen: to.append(output)
            )
        leaf = x.clone().requires_grad_()
        loss = module(leaf).square().sum() + sum(output.sin().sum() for output in seen)
        asked = [leaf, *(weight for weight in module.parameters() if weight.requires_grad)]
        results.append(torch.autograd.grad(loss, asked))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
