"""Dense attention: the same contract as PyTorch's for every implementation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import dgt
from dgt.ops import dense
from dgt.ops.cpu import library

needs_native = pytest.mark.skipif(
    library.load() is None, reason="the native kernels are not built here"
)

SHAPES = [(5, 3), (2, 40, 16), (2, 3, 77, 40), (2, 2, 2, 33, 24), (1, 2, 300, 256)]


def random_mask(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    torch.manual_seed(1)
    if kind == "none":
        return None
    if kind == "bool":
        sees = torch.rand(shape) < 0.6
        sees[..., 0] = True
        return sees
    return torch.randn(shape)


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_pytorch(shape, kind):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = random_mask(kind, (shape[-2], shape[-2]))
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    output = dgt.dense_attention(*inputs, attn_mask=mask)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=wide_mask)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, grad)
    for ours, theirs in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_other_numbers_of_queries_keys_and_heads():
    torch.manual_seed(0)
    query = torch.randn(2, 6, 50, 16, requires_grad=True)
    key = torch.randn(2, 2, 31, 16, requires_grad=True)
    value = torch.randn(2, 2, 31, 16, requires_grad=True)
    inputs = (query, key, value)
    ours = dgt.dense_attention(*inputs, scale=0.3, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(*inputs, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(ours)
    for mine, yours in zip(
        torch.autograd.grad(ours, inputs, grad),
        torch.autograd.grad(theirs, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_is_zero_with_no_gradient():
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    mask = torch.ones(20, 20, dtype=torch.bool)
    mask[4] = False
    output = dgt.dense_attention(*inputs, attn_mask=mask)
    assert not output[:, :, 4].any()
    in_query = torch.autograd.grad(output.sum(), inputs[0])[0]
    assert in_query.isfinite().all()
    assert not in_query[:, :, 4].any()


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_pytorch(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 200, 32).to(dtype) for _ in range(3)]
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in inputs))
    ours = (dgt.dense_attention(*inputs).double() - exact).abs().max()
    theirs = (F.scaled_dot_product_attention(*inputs).double() - exact).abs().max()
    assert ours <= 1.5 * theirs


@needs_native
def test_infinite_and_nan_inputs_come_through():
    query, key, value = torch.randn(3, 1, 1, 40, 16)
    value[0, 0, 7, 2] = torch.nan
    assert dgt.dense_attention(query, key, value)[..., 2].isnan().all()
    query[0, 0, 3] = torch.nan
    assert dgt.dense_attention(query, key, value)[0, 0, 3].isnan().all()


CALLS = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "causal": {"is_causal": True},
    "mask with gradient": {"attn_mask": torch.zeros(40, 40, requires_grad=True)},
}


@needs_native
@pytest.mark.parametrize("name", CALLS)
def test_who_computes_it(name, monkeypatch):
    calls = []
    monkeypatch.setattr(
        dense.F,
        "scaled_dot_product_attention",
        lambda *_, **__: calls.append(name) or torch.zeros(1),
    )
    query, key, value = torch.randn(3, 1, 1, 40, 16)
    dgt.dense_attention(query, key, value, **CALLS[name])
    assert bool(calls) == (name != "plain")


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 7), torch.randn(1, 2, 9, 7)),
        (torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8).double(), torch.randn(1, 2, 9, 8)),
        (torch.randn(1, 4, 9, 8), torch.randn(1, 3, 9, 8), torch.randn(1, 3, 9, 8)),
    ],
)
def test_wrong_calls_are_refused_as_pytorch_does(tensors):
    with pytest.raises(RuntimeError):
        dgt.dense_attention(*tensors)


def attend_exactly(*inputs: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's attention in plain operations."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask)


def assert_equal_to_pytorch(mask: Tensor, dtype: torch.dtype, queries: int = 20, keys: int = 30):
    """Forward and backward, beside PyTorch's plain operations in float64."""
    torch.manual_seed(0)
    sizes = (queries, keys, keys)
    inputs = [torch.randn(2, 3, size, 16).to(dtype).requires_grad_() for size in sizes]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wide_mask = mask if mask.dtype == torch.bool else mask.double()
    expected = attend_exactly(*wide, mask=wide_mask)
    output = dgt.dense_attention(*inputs, attn_mask=mask)
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    if (mask == torch.finfo(torch.float16).min).any():
        near = max(near, 2.0**-8)  # the step of float32 there, by which scores are rounded
    torch.testing.assert_close(output.double(), expected, rtol=near, atol=near)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(output, inputs, grad.to(dtype))
    for ours, theirs in zip(found, torch.autograd.grad(expected, wide, grad), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * near, atol=4 * near)


LOWEST = torch.finfo(torch.float32).min


@needs_native  # without it PyTorch computes it, whose gradients of such rows are its own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "row",
    [
        [torch.finfo(torch.float32).min] * 30,
        [torch.finfo(torch.bfloat16).min] * 30,
        [torch.finfo(torch.float16).min] * 30,
        [LOWEST] * 13 + [-torch.inf] * 17,
        [-torch.inf] * 29 + [LOWEST],
        [LOWEST] * 10 + [-(2.0**127)] * 20,
        [0.0] * 7 + [torch.finfo(torch.float32).max] * 23,
    ],
    ids=["float32", "bfloat16", "float16", "some -inf", "one key", "two numbers", "highest"],
)
def test_numbers_that_absorb_the_scores_weigh_equal_keys_alike(row, dtype):
    mask = torch.randn(20, 30)
    mask[4] = torch.tensor(row)
    mask[11, :29] = LOWEST  # one key that is seen
    assert_equal_to_pytorch(mask, dtype)


@needs_native
def test_rows_of_the_lowest_number_in_long_masks_of_every_head():
    mask = torch.zeros(2, 3, 70, 700)
    mask[1, 2, 5:9] = LOWEST
    mask[0, :, :, 300:] = LOWEST
    assert_equal_to_pytorch(mask, torch.float32, queries=70, keys=700)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("queries", "keys"), [(20, 30), (20, 20), (1, 30)])
def test_causal_biases_are_read_as_pytorch_reads_them(make, queries, keys):
    query, key, value = (torch.randn(2, 1, size, 16) for size in (queries, keys, keys))
    bias = make(queries, keys)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    torch.testing.assert_close(dgt.dense_attention(query, key, value, attn_mask=bias), expected)


def test_other_subclasses_decide_for_themselves():
    class Logged(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls += function is F.scaled_dot_product_attention
            return super().__torch_function__(function, types, args, kwargs or {})

    query = torch.randn(1, 2, 9, 8).as_subclass(Logged)
    assert isinstance(dgt.dense_attention(query, query, query), Logged)
    assert Logged.calls == 1
    assert type(dgt.dense_attention(*[nn.Parameter(torch.randn(1, 2, 9, 8))] * 3)) is Tensor


@needs_native
def test_backends_that_the_caller_leaves_out_are_left_out(monkeypatch):
    calls = []
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1))
    inputs = torch.randn(3, 1, 2, 9, 8)
    dgt.dense_attention(*inputs)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        dgt.dense_attention(*inputs)
    assert not calls
    with sdpa_kernel(SDPBackend.MATH):
        dgt.dense_attention(*inputs)
    assert len(calls) == 1


def test_a_scale_is_a_number_as_in_pytorch():
    inputs = torch.randn(3, 1, 2, 9, 8)
    expected = dgt.dense_attention(*inputs, scale=0.25)
    torch.testing.assert_close(dgt.dense_attention(*inputs, scale=torch.tensor(0.25)), expected)
    for wrong in (torch.tensor(0.25, requires_grad=True), torch.tensor([0.25])):
        with pytest.raises(TypeError, match="scale"):
            dgt.dense_attention(*inputs, scale=wrong)


def test_transforms_of_torch_func():
    query, key, value = torch.randn(3, 2, 2, 9, 8)

    def loss(attention, query):
        return attention(query, key, value).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        ours = transform(lambda query: loss(dgt.dense_attention, query))(query)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = transform(lambda query: loss(F.scaled_dot_product_attention, query))(query)
        torch.testing.assert_close(ours, theirs)
    singly = torch.vmap(lambda query: dgt.dense_attention(query, key[0], value[0]))(query)
    torch.testing.assert_close(singly[1], dgt.dense_attention(query[1], key[0], value[0]))


def on_grid(
    rows: int, columns: int, queries: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Queries, keys and values, keys on a grid, and the tables of a decomposed bias."""
    torch.manual_seed(0)
    keys = rows * columns
    queries = queries or keys
    inputs = [torch.randn(2, 3, count, 24).to(dtype) for count in (queries, keys, keys)]
    tables = {
        "bias_rows": torch.randn(2, 3, queries, rows).to(dtype),
        "bias_columns": torch.randn(2, 3, queries, columns).to(dtype),
    }
    return inputs, tables


def attend_by_the_formula(inputs: list[Tensor], tables: dict[str, Tensor]) -> Tensor:
    """``softmax(q k^T / sqrt(D) + a[q, row(k)] + b[q, column(k)]) v``, key by key, in float64."""
    query, key, value = (tensor.double() for tensor in inputs)
    columns = tables["bias_columns"].shape[-1]
    scores = torch.stack(
        [
            (query @ key[..., j, :, None])[..., 0] / query.shape[-1] ** 0.5
            + tables["bias_rows"][..., j // columns].double()
            + tables["bias_columns"][..., j % columns].double()
            for j in range(key.shape[-2])
        ],
        dim=-1,
    )
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(14, 14), (5, 37), (1, 16), (33, 1), (3, 130)])
def test_a_decomposed_bias(rows, columns, dtype):
    inputs, tables = on_grid(rows, columns, queries=29, dtype=dtype)
    near = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    output = dgt.dense_attention(*inputs, **tables)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.double(), attend_by_the_formula(inputs, tables), rtol=near, atol=near
    )


def test_a_decomposed_bias_of_views_shared_heads_and_scales():
    inputs, tables = on_grid(6, 9)
    apart = {name: table.mT.contiguous().mT for name, table in tables.items()}
    same_of_heads = {name: table[:, :1].expand_as(table) for name, table in tables.items()}
    expected = dgt.dense_attention(*inputs, **tables)
    assert torch.equal(dgt.dense_attention(*inputs, **apart), expected)
    query, key, value = inputs
    for given in (tables, same_of_heads):
        mask = (given["bias_rows"][..., None] + given["bias_columns"][..., None, :]).flatten(-2)
        arguments = (query, key[:, :1], value[:, :1])
        options = {"scale": 0.3, "enable_gqa": True}
        ours = dgt.dense_attention(*arguments, **given, **options)
        theirs = F.scaled_dot_product_attention(*arguments, attn_mask=mask, **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_beside_a_decomposed_bias(kind):
    inputs, tables = on_grid(6, 9)
    mask = random_mask(kind, (54, 54))
    bias = (tables["bias_rows"][..., None] + tables["bias_columns"][..., None, :]).flatten(-2)
    joined = bias.masked_fill(~mask, -torch.inf) if kind == "bool" else bias + mask
    torch.testing.assert_close(
        dgt.dense_attention(*inputs, mask, **tables),
        F.scaled_dot_product_attention(*inputs, joined),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rows_and_columns_that_a_decomposed_bias_hides():
    inputs, tables = on_grid(6, 9)
    tables["bias_columns"][..., 7:] = -torch.inf
    tables["bias_rows"][..., 5] = LOWEST
    tables["bias_rows"][0, 0, 3] = -torch.inf
    key, value = (tensor.unflatten(2, (6, 9))[:, :, :5, :7].flatten(2, 3) for tensor in inputs[1:])
    seen = {
        "bias_rows": tables["bias_rows"][..., :5],
        "bias_columns": tables["bias_columns"][..., :7],
    }
    seen = {name: table.contiguous() for name, table in seen.items()}
    ours = dgt.dense_attention(*inputs, **tables)
    assert not ours[0, 0, 3].any()
    torch.testing.assert_close(
        ours, dgt.dense_attention(inputs[0], key, value, **seen), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("of_tables", [True, False])
def test_gradients_with_a_decomposed_bias_are_those_of_a_mask(of_tables):
    inputs, tables = on_grid(6, 9)
    variables = [*inputs, *tables.values()] if of_tables else inputs
    for tensor in variables:
        tensor.requires_grad_()
    mask = (tables["bias_rows"][..., None] + tables["bias_columns"][..., None, :]).flatten(-2)
    theirs = F.scaled_dot_product_attention(*inputs, mask)
    ours = dgt.dense_attention(*inputs, **tables)
    grad = torch.randn_like(ours)
    for mine, yours in zip(
        torch.autograd.grad(ours, variables, grad),
        torch.autograd.grad(theirs, variables, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


def test_a_decomposed_bias_in_graphs():
    inputs, tables = on_grid(6, 9)

    class Attention(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            *inputs, rows, columns = tensors
            return dgt.dense_attention(*inputs, bias_rows=rows, bias_columns=columns)

    arguments = (*inputs, *tables.values())
    expected = Attention()(*arguments)
    torch.compiler.reset()
    compiled = torch.compile(Attention(), backend="aot_eager", fullgraph=True)
    exported = torch.export.export(Attention(), arguments).module()
    traced = torch.jit.trace(Attention(), arguments)
    for graph in (compiled, exported, traced):
        torch.testing.assert_close(graph(*arguments), expected, rtol=1e-5, atol=1e-5)
    singly = torch.vmap(Attention())(*arguments)
    torch.testing.assert_close(singly, expected, rtol=1e-5, atol=1e-5)


@needs_native
def test_the_operator_of_a_decomposed_bias_passes_the_checks_of_pytorch():
    inputs, tables = on_grid(6, 9)
    arguments = (*inputs, *tables.values(), 0.3)
    torch.library.opcheck(torch.ops.dgt.dense_on_grid.default, arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bias_rows": None}, TypeError, "bias_rows must be a tensor"),
        ({"bias_columns": [1.0]}, TypeError, "bias_columns must be a tensor"),
        (
            {"bias_rows": torch.zeros(2, 3, 54, 6).double()},
            TypeError,
            "bias_rows must be of query's",
        ),
        ({"bias_rows": torch.zeros(2, 3, 53, 6)}, ValueError, r"bias_rows .*\(2, 3, 54, rows\)"),
        ({"bias_columns": torch.zeros(3, 54, 9)}, ValueError, "bias_columns must have shape"),
        ({"bias_rows": torch.zeros(2, 3, 54, 9)}, ValueError, "54 tokens, got 9 rows and 9"),
        ({"bias_rows": torch.zeros(2, 3, 54, 6, device="meta")}, ValueError, "bias_rows"),
        ({"is_causal": True}, ValueError, "is_causal must be False"),
    ],
)
def test_tables_that_do_not_fit_are_refused(changes, error, message):
    inputs, tables = on_grid(6, 9)
    with pytest.raises(error, match=message):
        dgt.dense_attention(*inputs, **{**tables, **changes})


@pytest.mark.parametrize("size", [1e4, 1e8, 1e9])
def test_gradients_of_large_scores_are_finite(size):
    """Weights computed again are at most 1, however scores are rounded; each query sees one key."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 40, 16) * size**0.5
    inputs = [tensor.requires_grad_() for tensor in (query, key, torch.randn(1, 1, 40, 16))]
    grad = torch.randn(1, 1, 40, 16)
    ours = torch.autograd.grad(dgt.dense_attention(*inputs), inputs, grad)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(*inputs)
        theirs = torch.autograd.grad(output, inputs, grad)
    torch.testing.assert_close(ours[2].norm(), theirs[2].norm(), rtol=0.1, atol=0)
    for found, expected in zip(ours[:2], theirs[:2], strict=True):
        assert (found - expected).norm() < 1e-4 * size**0.5 * grad.norm()


@needs_native
def test_autocast_casts_as_for_pytorch():
    tokens = torch.randn(3, 1, 2, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = dgt.dense_attention(*tokens)
        assert torch.equal(output, F.scaled_dot_product_attention(*tokens))
    assert output.dtype == torch.bfloat16
