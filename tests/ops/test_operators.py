"""The registered operators keep PyTorch's contracts: schemas, fake tensors, autograd, compilation, autocast."""

from __future__ import annotations

import pytest
import torch

import dgt


def operands(draw, tokens: int, masked: bool) -> tuple:
    query, key, value, centroids = draw(2, 2, tokens, 8, 4)
    key_mask = torch.rand(2, tokens) < 0.7 if masked else None
    return query, key, value, centroids, key_mask


@pytest.mark.parametrize(
    ("tokens", "with_bias", "backend"),
    [(5, False, "auto"), (5, True, "torch"), (80, True, "auto"), (80, False, "torch")],
)
def test_attend_passes_the_checks_of_pytorch(tokens, with_bias, backend, draw) -> None:
    query, key, value, centroids, _ = operands(draw, tokens, masked=False)
    group_ids = dgt.group_queries(query, centroids)
    key_ids = dgt.select_keys(centroids, key, 7)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    more = {"backend": backend}
    if with_bias:
        bias = torch.randn(2, 2, tokens, requires_grad=True)
        more |= {"key_bias": bias, "with_logsumexp": True}
    torch.library.opcheck(torch.ops.dgt.attend.default, (*inputs, group_ids, key_ids, 0.4), more)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [5, 80])
def test_steps_and_seeding_pass_the_checks_of_pytorch(tokens, masked, draw) -> None:
    query, key, _, centroids, mask = operands(draw, tokens, masked)
    torch.library.opcheck(torch.ops.dgt.group_queries.default, (query, centroids, mask))
    torch.library.opcheck(torch.ops.dgt.select_keys.default, (centroids, key, 7, mask))
    for updates in (torch.tensor(0), torch.tensor(3)):
        arguments = (centroids, torch.tensor(False), updates, query, mask)
        torch.library.opcheck(torch.ops.dgt.seed_from_batch.default, arguments)


@pytest.mark.parametrize("residual_keys", [0, 1])
@pytest.mark.parametrize("tokens", [12, 150])
def test_compiles_without_a_break_and_gives_the_same(
    tokens, residual_keys, fast, draw, with_gradients
) -> None:
    *inputs, centroids = draw(2, 2, tokens, 8, 4)

    def attention(query, key, value):
        return dgt.dynamic_group_attention(
            query, key, value, centroids, 9, backend=fast, residual_keys=residual_keys
        ).output

    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for plain, same in zip(
        with_gradients(attention, inputs), with_gradients(compiled, inputs), strict=True
    ):
        assert torch.equal(plain, same)


def test_autocast_leaves_groups_and_keys_alone(draw) -> None:
    query, key, value, centroids = draw(2, 3, 400, 32, 48)
    plain = dgt.dynamic_group_attention(query, key, value, centroids, 30)
    with torch.autocast("cpu", torch.bfloat16):
        cast = dgt.dynamic_group_attention(query, key, value, centroids, 30)
        updated = dgt.update_centroids(centroids, query, cast.group_ids, 0.5)
        seeded = dgt.seed_centroids(query[0], 8)
    assert torch.equal(cast.group_ids, plain.group_ids)
    assert torch.equal(cast.key_ids, plain.key_ids)
    assert torch.equal(updated, dgt.update_centroids(centroids, query, plain.group_ids, 0.5))
    assert torch.equal(seeded, dgt.seed_centroids(query[0], 8))


def test_meta_tensors_give_shapes() -> None:
    query = torch.empty(2, 3, 50, 8, device="meta")
    centroids = torch.empty(3, 4, 8, device="meta")
    out = dgt.dynamic_group_attention(query, query, query, centroids, 60)
    assert [tuple(tensor.shape) for tensor in out] == [(2, 3, 50, 8), (2, 3, 50), (2, 3, 4, 50)]


def test_an_error_inside_a_compiled_graph_says_the_same(fast, draw) -> None:
    query, key, value, centroids = draw(1, 1, 10, 4, 2)
    torch.compiler.reset()
    compiled = torch.compile(dgt.dynamic_group_attention, backend="aot_eager")
    with pytest.raises(ValueError, match=r"query must not contain NaN"):
        compiled(query * torch.nan, key, value, centroids, 3, backend=fast)


def test_autocast_leaves_the_output_alone(backend, draw) -> None:
    query, key, value, centroids = draw(1, 2, 40, 8, 4)
    plain = dgt.dynamic_group_attention(query, key, value, centroids, 9, backend=backend).output
    with torch.autocast("cpu", torch.bfloat16):
        cast = dgt.dynamic_group_attention(query, key, value, centroids, 9, backend=backend).output
    assert torch.equal(plain, cast)
