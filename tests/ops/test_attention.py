"""Properties of the whole operator: limits, symmetries, padding, ties, and independence of batch items."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import dgt


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 5), (50, 50), (50, 51), (300, 1000)])
def test_all_keys_make_global_attention(
    backend, tokens, top_k, draw, close, with_gradients
) -> None:
    query, key, value, centroids = draw(2, 3, tokens, 16, 7)

    def ours(*qkv):
        return dgt.dynamic_group_attention(*qkv, centroids, top_k, backend=backend).output

    theirs = with_gradients(F.scaled_dot_product_attention, (query, key, value))
    for actual, expected in zip(with_gradients(ours, (query, key, value)), theirs, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("scale", [1.7, 0.0, -0.6])
def test_scale_and_bias_make_the_scores(scale, backend, draw, close) -> None:
    query, key, value, centroids = draw(1, 2, 30, 8, 3)
    actual = dgt.dynamic_group_attention(
        query, key, value, centroids, 30, scale=scale, backend=backend
    )
    close(actual.output, F.scaled_dot_product_attention(query, key, value, scale=scale))
    bias = key[..., 0]
    biased = dgt.attend(query, key, value, *actual[1:], scale, backend, key_bias=bias)
    mask = bias[:, :, None]
    close(biased, F.scaled_dot_product_attention(query, key, value, mask, scale=scale))


@pytest.mark.parametrize("tokens", [40, 500])
def test_each_query_sees_the_keys_of_its_group_and_no_others(backend, tokens, draw, close) -> None:
    """Query by query, only from the returned ids."""
    query, key, value, centroids = draw(2, 2, tokens, 8, 5)
    out = dgt.dynamic_group_attention(query, key, value, centroids, 6, backend=backend)
    for b, h, i in [(0, 0, 0), (0, 1, tokens - 1), (1, 0, 7), (1, 1, tokens // 2)]:
        ids = out.key_ids[b, h, out.group_ids[b, h, i]]
        weight = (key[b, h, ids] @ query[b, h, i] * 8**-0.5).softmax(0)
        close(out.output[b, h, i], weight @ value[b, h, ids])


@pytest.mark.parametrize("tokens", [40, 500])
def test_a_permutation_of_tokens_permutes_the_result(backend, tokens, draw, close) -> None:
    query, key, value, centroids = draw(2, 3, tokens, 16, 6)
    order = torch.randperm(tokens)
    plain = dgt.dynamic_group_attention(query, key, value, centroids, 10, backend=backend)
    shuffled = dgt.dynamic_group_attention(
        query[:, :, order], key[:, :, order], value[:, :, order], centroids, 10, backend=backend
    )
    close(shuffled.output, plain.output[:, :, order])
    assert torch.equal(shuffled.group_ids, plain.group_ids[:, :, order])
    assert torch.equal(order[shuffled.key_ids].sort(-1).values, plain.key_ids)


@pytest.mark.parametrize("tokens", [40, 500])
def test_an_image_alone_gives_what_it_gives_in_a_batch(backend, tokens, draw, close) -> None:
    query, key, value, centroids = draw(4, 2, tokens, 16, 6)
    together = dgt.dynamic_group_attention(query, key, value, centroids, 10, backend=backend)
    for i in range(4):
        alone = dgt.dynamic_group_attention(
            query[i : i + 1], key[i : i + 1], value[i : i + 1], centroids, 10, backend=backend
        )
        close(alone.output[0], together.output[i])
        assert torch.equal(alone.group_ids[0], together.group_ids[i])
        assert torch.equal(alone.key_ids[0], together.key_ids[i])


@pytest.mark.parametrize(("tokens", "real"), [(40, 33), (40, 5), (500, 300)])
def test_padding_is_as_if_it_were_not_there(backend, tokens, real, draw, close) -> None:
    query, key, value, centroids = draw(2, 2, tokens, 16, 6)
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[0] = True
    mask[1, torch.randperm(tokens)[:real]] = True
    padded = dgt.dynamic_group_attention(
        query, key, value, centroids, 10, query_mask=mask, key_mask=mask, backend=backend
    )
    where = mask[1].nonzero()[:, 0]
    alone = dgt.dynamic_group_attention(
        *(tensor[1:, :, where] for tensor in (query, key, value)), centroids, 10, backend=backend
    )
    close(padded.output[1][:, where], alone.output[0])
    assert not padded.output[1][:, ~mask[1]].any()
    assert (padded.group_ids[1][:, ~mask[1]] == -1).all()
    assert torch.equal(padded.group_ids[1][:, where], alone.group_ids[0])
    count = alone.key_ids.shape[-1]
    assert torch.equal(padded.key_ids[1][..., :count], where[alone.key_ids[0]])
    assert (padded.key_ids[1][..., count:] == -1).all()


@pytest.mark.parametrize("tokens", [10, 400])
def test_an_image_of_padding_alone_gives_zeros(backend, tokens, draw) -> None:
    query, key, value, centroids = draw(2, 2, tokens, 8, 4)
    mask = torch.stack([torch.zeros(tokens), torch.ones(tokens)]).bool()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = dgt.dynamic_group_attention(
        *inputs, centroids, 3, query_mask=mask, key_mask=mask, backend=backend
    )
    assert not out.output[0].any()
    assert (out.key_ids[0] == -1).all()
    assert (out.group_ids[0] == -1).all()
    for grad in torch.autograd.grad(out.output.square().sum(), inputs):
        assert grad.isfinite().all()
        assert not grad[0].any()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 99),
)
def test_shapes_and_types_of_the_result(batch, heads, tokens, channels, groups, top_k) -> None:
    query = torch.randn(batch, heads, tokens, channels)
    centroids = F.normalize(torch.randn(heads, groups, channels), dim=-1)
    out = dgt.dynamic_group_attention(query, query, query, centroids, top_k)
    assert (out.output.shape, out.output.dtype) == (query.shape, torch.float32)
    assert (out.group_ids.shape, out.group_ids.dtype) == (query.shape[:3], torch.int64)
    assert (out.key_ids.shape, out.key_ids.dtype) == (
        (batch, heads, groups, min(top_k, tokens)),
        torch.int64,
    )
    assert out.key_ids.diff(dim=-1).gt(0).all()
    assert out.key_ids.min() >= 0
    assert out.key_ids.max() < tokens
    assert out.group_ids.min() >= 0
    assert out.group_ids.max() < groups


def test_arguments_stay_as_they_are(draw) -> None:
    inputs = draw(2, 2, 90, 8, 4)
    copies = [tensor.clone() for tensor in inputs]
    mask = torch.rand(2, 90) < 0.5
    dgt.dynamic_group_attention(*inputs, 5, query_mask=mask, key_mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_centroids_get_no_gradient(draw) -> None:
    query, key, value, centroids = draw(1, 1, 12, 4, 3)
    centroids.requires_grad_()
    output = dgt.dynamic_group_attention(query.requires_grad_(), key, value, centroids, 4).output
    (grad,) = torch.autograd.grad(output.sum(), [centroids], allow_unused=True)
    assert grad is None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [60, 600])
def test_half_precision_is_as_good_as_attention_under_a_mask(
    dtype, tokens, biased, fast, draw, with_gradients
) -> None:
    """At most 1.5 times the error of PyTorch's own attention at the same precision, against float64."""
    *inputs, centroids = draw(2, 2, tokens, 32, 8, dtype=dtype)
    group_ids = dgt.group_queries(inputs[0], centroids)
    key_ids = dgt.select_keys(centroids, inputs[1], 20)
    chosen = torch.zeros(2, 2, 8, tokens, dtype=torch.bool).scatter(-1, key_ids, True)
    mask = torch.take_along_dim(chosen, group_ids[..., None], dim=2)
    # As large as that of a residual key.
    bias = torch.linspace(6, 12, tokens).expand(2, 2, tokens) if biased else None
    added = mask if bias is None else torch.where(mask, bias[:, :, None], -torch.inf)

    def masked(query, key, value):
        attn_mask = added.double() if biased and query.dtype == torch.double else added
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)

    exact = with_gradients(masked, tuple(tensor.double() for tensor in inputs))
    theirs = with_gradients(masked, tuple(inputs))
    ours = with_gradients(dgt.attend, tuple(inputs), group_ids, key_ids, None, fast, bias)
    for what, truth, their, our in zip(
        ("output", "query", "key", "value"), exact, theirs, ours, strict=True
    ):
        assert our.dtype == dtype
        for measure in (lambda error: error.square().mean().sqrt(), lambda error: error.max()):
            assert measure((our - truth).abs()) <= 1.5 * measure((their - truth).abs()), what
