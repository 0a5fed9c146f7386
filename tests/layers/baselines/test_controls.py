"""The controls of the hybrids: windows without a position table, and random keys."""

import pytest
import torch

from dgt.layers.baselines.random_keys import RandomKeyAttention
from dgt.layers.baselines.swin import WindowAttention


def seen_by(layer: torch.nn.Module, x: torch.Tensor, query: int) -> torch.Tensor:
    """(L,) bool: the tokens that the output of one token depends on."""
    x = x.clone().requires_grad_()
    layer(x).flatten(1, 2)[0, query].sum().backward()
    return x.grad.flatten(1, 2)[0].abs().sum(-1) > 0


def test_windows_without_a_table_know_no_positions() -> None:
    torch.manual_seed(0)
    layer = WindowAttention(8, 2, window=4, table=False)
    x = torch.randn(1, 4, 4, 8)
    assert not layer.position_bias(4, 4, x).any()
    assert not list(layer.buffers())  # none that `to_empty` would leave without numbers
    order = torch.randperm(16)
    shuffled = x.flatten(1, 2)[:, order].view_as(x)
    torch.testing.assert_close(layer(shuffled).flatten(1, 2), layer(x).flatten(1, 2)[:, order])


def test_random_keys_are_as_many_as_asked_and_the_same_in_every_image() -> None:
    torch.manual_seed(0)
    layer = RandomKeyAttention(8, 1, top_k=5)
    first, second = (seen_by(layer, torch.randn(1, 6, 6, 8), 7) for _ in range(2))
    first[7] = second[7] = False  # the query itself, key or not
    assert torch.equal(first, second)
    assert 4 <= first.sum() <= 5
    assert RandomKeyAttention(8, 2, top_k=50)(torch.randn(1, 3, 3, 8)).isfinite().all()


def test_random_keys_are_the_same_after_an_export() -> None:
    torch.manual_seed(0)
    layer = RandomKeyAttention(8, 2, top_k=4).eval()
    x = torch.randn(1, 5, 4, 8)
    exported = torch.export.export(layer, (x,)).module()  # before the layer has drawn any
    outputs = [layer(x), exported(x), exported(x)]
    assert all(type(output) is torch.Tensor for output in outputs)
    torch.testing.assert_close(outputs[1:], outputs[:1] * 2)


def test_padding_is_no_key_where_another_was_drawn() -> None:
    torch.manual_seed(0)
    layer = RandomKeyAttention(8, 2, top_k=30)
    x, mask = torch.randn(1, 6, 6, 8), torch.ones(1, 6, 6, dtype=torch.bool)
    mask[:, :, 4:] = False
    other = torch.where(mask[..., None], x, 9.0)
    torch.testing.assert_close(layer(other, mask)[mask], layer(x, mask)[mask])
    with pytest.raises(ValueError, match="top_k"):
        RandomKeyAttention(8, 2, top_k=0)
