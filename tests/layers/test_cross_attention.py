"""Groups of queries of one image and keys of another: the same attention as within one, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt

Layer = Callable[..., dgt.DGAttention]
Tokens = Callable[..., Tensor]


def make_cross(**options: Any) -> dgt.DGCrossAttention:
    """A layer of two heads and five groups over 16 channels; the same weights every time."""
    torch.manual_seed(7)
    settings = {"num_groups": 5, "top_k": 6, "tau": 0.3, "tau_weighs": "new", **options}
    return dgt.DGCrossAttention(16, 2, **settings)


def copy_weights(source: dgt.DGAttention) -> dgt.DGCrossAttention:
    """A cross-attention with the settings, weights and centroids of an attention."""
    options = {
        "top_k": source.top_k,
        "residual_keys": source.residual_keys,
        "cosine": source.cosine,
        "backend": source.backend,
        "dtype": source.proj.weight.dtype,
    }
    cross = make_cross(**options)
    state = source.state_dict()
    for kind in ("weight", "bias"):
        joined = state.pop(f"qkv.{kind}")
        state[f"q.{kind}"], state[f"kv.{kind}"] = joined[:16], joined[16:]
    cross.load_state_dict(state)
    return cross.train(source.training)


OPTIONS = [{}, {"residual_keys": 1}, {"residual_keys": 4}, {"cosine": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("training", [False, True])
def test_given_the_same_it_is_attention_within_an_image(options, training, layer, tokens) -> None:
    """To the bit from queries, keys and values on, statistics included; the whole but for rounding."""
    within = layer(**options).train(training)
    within(tokens(0))
    within.num_updates.fill_(1)  # its centroids are known
    cross = copy_weights(within)
    assert cross.learns() is training
    query, key, value = within.split_heads(tokens(1))
    real = torch.rand(4, 30, generator=torch.Generator().manual_seed(0)) < 0.8
    within.observed.clear()
    outputs = [part.attend(query, key, value, real, real) for part in (within, cross)]
    assert torch.equal(*outputs)
    assert torch.equal(within.observed.sums, cross.observed.sums)
    mask = real.view(4, 6, 5)
    found = cross(tokens(1), tokens(1), mask, mask)
    torch.testing.assert_close(found, within(tokens(1), mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_the_reference(options, tokens) -> None:
    gradients = []
    for backend in ("auto", "reference"):
        cross = make_cross(dtype=torch.float64, backend=backend, **options).eval()
        x, context = tokens(1).double(), tokens(2, 4, 4, 9).double()
        inputs = [x.requires_grad_(), context.requires_grad_(), *cross.parameters()]
        output = cross(x, context).square().sum()
        gradients.append(torch.autograd.grad(output, inputs))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)
        assert expected.abs().sum() > 0


def test_all_keys_make_the_textbook_formula(tokens) -> None:
    cross = make_cross(top_k=99)
    x, context = tokens(1).flatten(1, 2), tokens(2, 4, 3, 3).flatten(1, 2)
    key, value = cross.kv(context).chunk(2, dim=-1)
    query, key, value = (
        part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (cross.q(x), key, value)
    )
    attended = F.scaled_dot_product_attention(query, key, value)
    expected = cross.proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(cross(x, context), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_padding_of_either_side_changes_nothing(options, tokens) -> None:
    cross = make_cross(**options).eval()
    x, context = tokens(1, 1).flatten(1, 2), tokens(2, 1, 4, 4).flatten(1, 2)
    more, more_context = tokens(3, 1, 2, 2).flatten(1, 2), tokens(4, 1, 3, 3).flatten(1, 2)
    padded = torch.cat([x, more], 1)
    padded_context = torch.cat([context, more_context], 1)
    real = torch.arange(34)[None] < 30
    real_context = torch.arange(25)[None] < 16
    expected = cross(x, context)
    found = cross(padded, padded_context, real, real_context)
    torch.testing.assert_close(found[:, :30], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[:, 30:], cross.proj.bias.expand(1, 4, 16))
    by_query = cross(padded, context, real)
    torch.testing.assert_close(by_query[:, :30], expected, rtol=0, atol=1e-5)
    by_key = cross(x, padded_context, context_mask=real_context)
    torch.testing.assert_close(by_key, expected, rtol=0, atol=1e-5)


def test_centroids_are_of_the_queries_alone(tokens, step) -> None:
    """Eqs. 3 and 4: the same queries move them the same way, whatever the context."""

    def moved(context: Tensor) -> Tensor:
        cross = make_cross()
        optimizer = torch.optim.SGD(cross.q.parameters(), lr=0.0)
        for _ in range(2):
            cross(tokens(1), context).sum().backward()
            optimizer.step()
        assert cross.num_updates == 2
        return cross.centroids

    expected = moved(tokens(2, 4, 3, 3))
    assert torch.equal(moved(10 * tokens(5, 4, 7, 7)), expected)
    assert not torch.equal(make_cross().centroids, expected)


@pytest.mark.parametrize("options", [{}, {"residual_keys": 1}, {"cosine": True}])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 3), (3, 1), (4, 30), (30, 4)])
def test_fewer_tokens_than_groups_or_keys(queries, keys, training, options) -> None:
    """Each query then sees all keys."""
    cross = make_cross(**options).train(training)
    everywhere = make_cross(**options, backend="reference").eval()
    everywhere.top_k = 99
    x, context = torch.randn(2, queries, 16), torch.randn(2, keys, 16)
    if keys <= cross.top_k:
        torch.testing.assert_close(cross(x, context), everywhere(x, context), rtol=0, atol=1e-5)
    assert cross(x, context).isfinite().all()


@pytest.mark.parametrize("training", [False, True])
def test_without_tokens(training, tokens) -> None:
    """No queries have no output; where there is nothing to attend to the attention is zero."""
    cross = make_cross().train(training)
    x, nothing = tokens(1), torch.zeros(4, 0, 16)
    assert cross(nothing, x).shape == (4, 0, 16)
    assert cross(torch.zeros(0, 5, 16), torch.zeros(0, 6, 16)).shape == (0, 5, 16)
    expected = cross.proj.bias.expand(4, 6, 5, 16)
    torch.testing.assert_close(cross(x, nothing), expected)
    hidden = torch.zeros(4, 30, dtype=torch.bool)
    torch.testing.assert_close(cross(x, x, context_mask=hidden), expected)
    cross(x, nothing).sum().backward()
    assert torch.equal(cross.proj.bias.grad, torch.full((16,), 120.0))


@pytest.mark.parametrize("options", [{}, {"residual_keys": 3}])
@pytest.mark.parametrize("broken", ["x", "context"])
def test_a_broken_image_leaves_the_others_alone(broken, options, tokens) -> None:
    cross = make_cross(**options).eval()
    inputs = {"x": tokens(1), "context": tokens(2, 4, 4, 9)}
    real = {"context_mask": torch.ones(4, 36, dtype=torch.bool)}
    expected = cross(**inputs, **real)
    inputs[broken][1, 2, 3, 4] = torch.nan
    found = cross(**inputs, **real)
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert found[1].isnan().all()
    with pytest.raises(ValueError, match="must not contain NaN"):
        cross.train()(**inputs)


def test_inspecting_shows_groups_and_keys(tokens) -> None:
    cross = make_cross().train()
    seen = cross.inspect(tokens(1), tokens(2, 4, 3, 3))
    assert seen.group_ids.shape == (4, 2, 30)
    assert seen.key_ids.shape == (4, 2, 5, 6)
    assert not cross.seeded
    assert torch.equal(
        cross.merge_heads(seen.output, tokens(1)),
        make_cross().eval()(tokens(1), tokens(2, 4, 3, 3)),
    )


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({"context": torch.zeros(2, 5, 8)}, ValueError, r"context must be .*16\).*\(2, 5, 8\)"),
        (
            {"context": torch.zeros(3, 5, 16)},
            ValueError,
            r"context must have as many images as x, 2",
        ),
        ({"context": torch.zeros(2, 5, 16).int()}, TypeError, r"context must be .*int32"),
        ({"x": torch.zeros(2, 4, 8)}, ValueError, r"x must be .*16\).*\(2, 4, 8\)"),
        ({"mask": torch.ones(2, 5).bool()}, ValueError, r"mask must .*\(2, 4\)"),
        ({"context_mask": torch.ones(2, 4).bool()}, ValueError, r"context_mask must .*\(2, 5\)"),
        ({"context_mask": torch.ones(2, 5)}, TypeError, r"context_mask must be a bool"),
    ],
)
def test_inputs_that_do_not_fit(inputs, error, message) -> None:
    given = {"x": torch.zeros(2, 4, 16), "context": torch.zeros(2, 5, 16), **inputs}
    with pytest.raises(error, match=f"^{message}"):
        make_cross()(**given)


def test_more_residual_keys_than_tokens_of_the_context(tokens) -> None:
    with pytest.raises(ValueError, match=r"residual_keys must be at most the 9 keys .*, got 10"):
        make_cross(residual_keys=10)(tokens(1), tokens(2, 4, 3, 3))


@torch.no_grad()
def test_exported_it_takes_other_numbers_of_tokens() -> None:
    cross = make_cross().eval()
    queries, keys = torch.export.Dim("queries", min=2), torch.export.Dim("keys", min=8)
    given = (torch.randn(1, 30, 16), torch.randn(1, 20, 16))
    shapes = ({1: queries}, {1: keys})
    program = torch.export.export(cross, given, dynamic_shapes=shapes).module()
    for lengths in ((30, 20), (11, 40)):
        x, context = (torch.randn(1, length, 16) for length in lengths)
        torch.testing.assert_close(program(x, context), cross(x, context))


def test_copies_and_files_hold_all(tokens, tmp_path) -> None:
    cross = make_cross(residual_keys=1)
    cross(tokens(0), tokens(1))
    torch.save(cross, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False).eval()
    assert torch.equal(loaded(tokens(0), tokens(1)), cross.eval()(tokens(0), tokens(1)))
    assert {name for name in cross.state_dict() if "centroid" not in name} == {
        "q.weight",
        "q.bias",
        "kv.weight",
        "kv.bias",
        "proj.weight",
        "proj.bias",
        "num_updates",
    }
