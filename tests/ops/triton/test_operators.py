"""The operators as PyTorch sees them: library checks, compilation, autocast, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dgt
from dgt.ops.triton import backend as kernels  # registers the operators


@pytest.mark.parametrize("tokens", [20, 260])
def test_opcheck(make_case: Any, tokens: int) -> None:
    """Schema, fake tensors, autograd and AOT dispatch of every operator, in both regimes."""
    case = make_case(1, 1, tokens, 16, 2, 5, masked=True)
    group_ids, key_ids = case.ids()
    ops = torch.ops.dgt
    by = {"backend": "triton"}
    tokens_of = (case.query, case.key, case.value)
    query, key, value = (each.detach() for each in tokens_of)
    ids = (group_ids, key_ids)
    masks = {"query_mask": case.query_mask, "key_mask": case.key_mask}
    torch.library.opcheck(ops.group_queries.default, (query, case.centroids, case.query_mask), by)
    torch.library.opcheck(ops.group_statistics.default, (query, group_ids, 2), by)
    chosen = (case.centroids, key, case.top_k, case.key_mask)
    torch.library.opcheck(ops.select_keys.default, chosen, by)
    torch.library.opcheck(ops.attend.default, (*tokens_of, *ids, 0.25), by)
    whole = {**masks, "num_prefix_tokens": 0, "residual_keys": 0, "key_cluster_ids": None, **by}
    arguments = (*tokens_of, case.centroids, case.top_k, 0.25)
    torch.library.opcheck(ops.attention.default, arguments, {**whole, "return_ids": True})
    output, logsumexp, residual = ops.attend(query, key, value, *ids, 0.25, **by)
    saved = {
        "grad_logsumexp": None,
        "query": query,
        "key": key,
        "value": value,
        "output": output,
        "logsumexp": logsumexp,
        "residual": residual,
        "group_ids": group_ids,
        "key_ids": key_ids,
        "key_bias": None,
        "scale": 0.25,
        **whole,
    }
    torch.library.opcheck(ops.attend_backward.default, (torch.randn_like(output),), saved)


@pytest.mark.parametrize("form", [1, 2, 3, 4])
def test_opcheck_of_the_forms(make_case: Any, form: int) -> None:
    case = make_case(1, 1, 20, 16, 2, 5)
    weights = torch.randn(1, 1, 20, 5, device=case.query.device, requires_grad=True)
    pair = {
        1: (case.query, case.key),
        2: (weights, case.value),
        3: (case.query, weights),
        4: (weights, case.query),
    }
    torch.library.opcheck(
        torch.ops.dgt.group_matmul.default, (form, *pair[form], *case.ids(), 20, "triton")
    )


@pytest.mark.parametrize(("tokens", "residual_keys"), [(20, 0), (260, 0), (20, 1)])
def test_compiles_without_a_graph_break(make_case: Any, tokens: int, residual_keys: int) -> None:
    case = make_case(1, 1, tokens, 16, 2, 5)

    def attention(query: torch.Tensor) -> torch.Tensor:
        result = dgt.dynamic_group_attention(
            query,
            case.key,
            case.value,
            case.centroids,
            5,
            backend="triton",
            residual_keys=residual_keys,
        )
        return result.output * 2

    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    plain, traced = attention(case.query), compiled(case.query)
    assert torch.equal(plain, traced)
    (one,), (two,) = (
        torch.autograd.grad(out.square().sum(), case.query) for out in (plain, traced)
    )
    assert torch.equal(one, two)


def test_autocast_changes_nothing(make_case: Any, device: str) -> None:
    """Scores stay float32, and the output keeps the query's type, forward and backward."""
    case = make_case(1, 2, 60, 16, 4, 9)
    with torch.autocast(device, torch.bfloat16):
        cast = dgt.dynamic_group_attention(*case[:5], backend="triton")
    plain = dgt.dynamic_group_attention(*case[:5], backend="triton")
    assert torch.equal(cast.output, plain.output)
    assert torch.equal(cast.key_ids, plain.key_ids)


def test_gradient_of_an_expanded_tensor(make_case: Any) -> None:
    """``sum().backward()`` passes a gradient with zero strides."""
    case = make_case(1, 1, 30, 16, 3, 5)
    for backend in ("triton", "reference"):
        output = dgt.dynamic_group_attention(*case[:5], backend=backend).output
        output.sum().backward()
    torch.testing.assert_close(case.value.grad.sum(), torch.tensor(2.0 * 30 * 16).to(output))


def test_flops_equal_those_of_the_plain_path(make_case: Any) -> None:
    """A model's cost does not depend on the backend."""
    case = make_case(1, 2, 40, 16, 3, 5)
    counts = []
    for backend in ("triton", "torch"):
        device = case.query.device if backend == "triton" else "cpu"  # there it is operators, too
        *tensors, top_k = (*(tensor.to(device) for tensor in case[:4]), case.top_k)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            dgt.dynamic_group_attention(*tensors, top_k, backend=backend)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_backward_counts_five_products(make_case: Any) -> None:
    case = make_case(1, 2, 40, 16, 3, 5)
    ids = case.ids()
    with FlopCounterMode(display=False) as counter:
        dgt.attend(case.query, case.key, case.value, *ids, backend="triton").sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 40 * 16 * 5


def test_opcheck_with_a_residual_key(make_case: Any) -> None:
    case = make_case(1, 1, 20, 16, 2, 5)
    tokens = (case.query, case.key, case.value)
    by = {"backend": "triton", "residual_keys": 1}
    torch.library.opcheck(torch.ops.dgt.attend.default, (*tokens, *case.ids(), 0.25), by)


@torch.no_grad()
def test_the_output_alone_is_the_same(make_case: Any) -> None:
    for tokens in (60, 300):
        case = make_case(1, 2, tokens, 16, 4, 9, masked=True)
        masks = {"query_mask": case.query_mask, "key_mask": case.key_mask}
        whole = dgt.dynamic_group_attention(*case[:5], **masks, backend="triton")
        alone = dgt.dynamic_group_attention(*case[:5], **masks, backend="triton", return_ids=False)
        assert torch.equal(alone.output, whole.output)
        assert alone.group_ids.numel() == alone.key_ids.numel() == 0


def test_steps_alone_equal_the_whole(make_case: Any) -> None:
    case = make_case(1, 2, 60, 16, 4, 9, masked=True)
    groups = kernels.group_queries(case.query, case.centroids, case.query_mask)
    keys = kernels.select_keys(case.centroids, case.key, 9, case.key_mask)
    output = dgt.attend(case.query, case.key, case.value, groups, keys, backend="triton")
    masks = {"query_mask": case.query_mask, "key_mask": case.key_mask}
    whole = dgt.dynamic_group_attention(*case[:5], **masks, backend="triton")
    assert torch.equal(groups, whole.group_ids)
    assert torch.equal(keys, whole.key_ids)
    torch.testing.assert_close(output, whole.output, rtol=0, atol=1e-5)
