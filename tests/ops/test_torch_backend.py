"""The backend "torch" as run on accelerators: nothing of size L x L, no reading of data, any size, special values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dgt
from dgt.ops import attention, reference, residual_keys, torch_backend

pytestmark = pytest.mark.skipif(
    not torch_backend.HAS_VARLEN,
    reason="this version of PyTorch has no flash attention of variable lengths",
)
TOKENS = 4096


def attended(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The operator with 32 groups and 98 keys."""
    centroids = torch.empty(query.shape[1], 32, query.shape[3], device=query.device)
    return dgt.dynamic_group_attention(
        query, key, value, centroids, 98, backend="torch", **options
    ).output


CALLS: dict[str, Callable[..., Tensor]] = {
    "clusters": lambda q, k, v: dgt.clustered_attention(
        q, k, v, num_groups=32, top_k=98, residual_keys=64, num_prefix_tokens=5, backend="torch"
    ),
    "one residual key": lambda q, k, v: attended(q, k, v, residual_keys=1, num_prefix_tokens=5),
    "residual keys": lambda q, k, v: attended(q, k, v, residual_keys=64),
    "plain": attended,
}


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return found


def fake_tokens(requires_grad: bool = False) -> list[Tensor]:
    """Query, key, and value of two heads on CUDA without data, inside FakeTensorMode."""
    like: dict[str, Any] = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "requires_grad": requires_grad,
    }
    return [torch.empty(1, 2, TOKENS, 64, **like) for _ in range(3)]


@pytest.mark.parametrize("name", CALLS)
def test_on_cuda_nothing_is_as_large_as_all_pairs_of_a_head(name: str) -> None:
    with torch.no_grad(), FakeTensorMode(), LargestTensor() as largest:
        output = CALLS[name](*fake_tokens())
    assert output.shape == (1, 2, TOKENS, 64)
    assert output.is_cuda
    assert largest.elements < TOKENS**2 / 4


def kept_for_gradients(call: Callable[..., Tensor]) -> int:
    """Bytes of all tensors that a forward pass saves; views of one storage count once."""
    sizes: dict[int, int] = {}
    storages = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.append(storage)  # holding it keeps its address from being reused
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode(), saved_tensors_hooks(pack, lambda tensor: tensor):
        call(*fake_tokens(requires_grad=True))
    return sum(sizes.values())


@pytest.mark.parametrize("name", ["clusters", "one residual key"])
def test_gradients_keep_no_scores_of_groups_with_keys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they do not fit in memory at once, they are recomputed."""
    whole = kept_for_gradients(CALLS[name])
    monkeypatch.setattr(residual_keys, "SCORE_ELEMENTS_ELSEWHERE", 32 * TOKENS)
    scores = 4 * 2 * 32 * TOKENS
    assert kept_for_gradients(CALLS[name]) < whole - scores


@pytest.mark.parametrize("count", [1, 3])
def test_summed_up_in_parts_it_is_the_same(
    count: int, draw: Any, close: Any, with_gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of heads, and of the groups of one head."""
    query, key, value, centroids = draw(2, 2, 60, 8, 5)

    def call(*tokens: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            *tokens, centroids, 9, backend="torch", residual_keys=count
        ).output

    whole = with_gradients(call, (query, key, value))
    for elements in (900, 200):
        monkeypatch.setitem(residual_keys.SCORE_ELEMENTS, "cpu", elements)
        for ours, theirs in zip(with_gradients(call, (query, key, value)), whole, strict=True):
            close(ours, theirs)


LOOKS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "unique_dim",
    "is_nonzero",
    "equal",
    "bincount",
)


class NoLooks(TorchDispatchMode):
    """Rejects operations that would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        assert not name.startswith(LOOKS), name
        if name in ("index", "index_put", "index_put_"):
            assert all(each is None or each.dtype != torch.bool for each in args[1]), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [60, 300])
@pytest.mark.parametrize(
    "options", [{}, {"residual_keys": 1}, {"residual_keys": 3, "num_prefix_tokens": 2}], ids=str
)
def test_no_look_at_data_forward_and_backward(
    options: dict[str, Any], tokens: int, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward on CUDA; PyTorch without CUDA has no backward there, so that is an accelerator's on a CPU."""

    def attend(query: Tensor, key: Tensor, value: Tensor, centroids: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            query, key, value, centroids, 20, backend="torch", **options
        ).output

    *operands, centroids = draw(2, 2, tokens, 8, 5)
    leaves = [tensor.requires_grad_() for tensor in operands]
    with FakeTensorMode(), NoLooks():
        on_cuda = [torch.empty(leaf.shape, device="cuda", requires_grad=True) for leaf in leaves]
        attend(*on_cuda, torch.empty(centroids.shape, device="cuda"))
    monkeypatch.setattr("dgt.ops.dispatch.load_steps", lambda backend, tokens: torch_backend)
    output = attend(*leaves, centroids)
    with NoLooks():
        gradients = torch.autograd.grad(output.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("options", "route", "lengths"),
    [
        ({"residual_keys": 1}, "dense", (50, 81)),
        # Its sample of tokens fixes their number in a graph.
        ({"residual_keys": 3, "num_prefix_tokens": 2}, "padded", (50,)),
    ],
    ids=str,
)
def test_compilers_make_one_graph(
    options: dict[str, Any],
    route: str,
    lengths: tuple[int, ...],
    draw: Any,
    close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps as an accelerator takes them, without a break; with one residual key for any number of tokens."""
    monkeypatch.setattr("dgt.ops.dispatch.load_steps", lambda backend, tokens: torch_backend)
    monkeypatch.setattr(torch_backend, "is_dense_masked", lambda heads: route == "dense")
    torch.compiler.reset()
    counters.clear()

    def call(query: Tensor, key: Tensor, value: Tensor, centroids: Tensor) -> Tensor:
        return attention.dynamic_group_attention(
            query, key, value, centroids, 9, backend="torch", **options
        ).output

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for tokens in lengths:
        inputs = draw(2, 2, tokens, 8, 5)
        close(compiled(*inputs), call(*inputs))
    assert counters["stats"]["unique_graphs"] == 1


class Attention(torch.nn.Module):
    """The operator with centroids and options of its own."""

    def __init__(self, centroids: Tensor, **options: Any) -> None:
        super().__init__()
        self.centroids, self.options = centroids, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens = (query, key, value)
        return dgt.dynamic_group_attention(
            *tokens, self.centroids, 9, backend="torch", **self.options
        ).output


FREE = {0: torch.export.Dim("images", min=1), 2: torch.export.Dim("tokens", min=12)}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("options", [{}, {"residual_keys": 1}, {"num_prefix_tokens": 2}], ids=str)
def test_it_is_exported_with_any_number_of_images_and_tokens(
    options: dict[str, Any], strict: bool, draw: Any, close: Any
) -> None:
    """Few tokens and many through one program, with the steps as operators that a file can name."""
    layer = Attention(draw(1, 2, 1, 8, 5).centroids, **options)
    example = tuple(draw(2, 2, 50, 8, 5)[:3])
    program = torch.export.export(layer, example, dynamic_shapes=(FREE, FREE, FREE), strict=strict)
    for images, tokens in ((1, 13), (3, 81), (2, 1500)):
        inputs = draw(images, 2, tokens, 8, 5)[:3]
        close(program.module()(*inputs), layer(*inputs))


def test_several_residual_keys_are_exported_with_fixed_sizes_alone(draw: Any, close: Any) -> None:
    layer = Attention(draw(1, 2, 1, 8, 5).centroids, residual_keys=3)
    example = tuple(draw(2, 2, 50, 8, 5)[:3])
    with pytest.raises(ValueError, match=r"key must have fixed sizes .* several residual keys"):
        torch.export.export(layer, example, dynamic_shapes=(FREE, FREE, FREE))
    close(torch.export.export(layer, example).module()(*example), layer(*example))


@pytest.mark.parametrize("route", ["dense", "padded"])
def test_a_constant_of_keys_has_its_gradient(
    route: str, draw: Any, close: Any, with_gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "is_dense_masked", lambda heads: route == "dense")
    query, key, value, centroids = draw(2, 2, 77, 8, 5)
    group_ids = reference.group_queries(query, centroids, None)
    key_ids = reference.select_keys(centroids, key, 20, None)
    bias = torch.randn(key.shape[:3])

    def through(steps: Any) -> Callable[..., Tensor]:
        return lambda q, k, v, b: steps.attend(q, k, v, group_ids, key_ids, -0.3, b)

    tensors = (query, key, value, bias)
    for ours, theirs in zip(
        with_gradients(through(torch_backend), tensors),
        with_gradients(through(reference), tensors),
        strict=True,
    ):
        close(ours, theirs)


@pytest.mark.parametrize("route", ["dense", "padded"])
@pytest.mark.parametrize("odd", [torch.inf, torch.nan])
def test_odd_keys_that_a_group_does_not_see_do_it_no_harm(
    odd: float,
    route: str,
    draw: Any,
    close: Any,
    with_gradients: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are in the output of a group that sees them, and in no other group's output or gradient."""
    monkeypatch.setattr(torch_backend, "is_dense_masked", lambda heads: route == "dense")
    query, key, value, centroids = draw(1, 2, 70, 8, 5)
    group_ids = reference.group_queries(query, centroids, None)
    key_ids = reference.select_keys(centroids, key, 20, None)
    key_ids[..., 17:] = -1  # places that point to other keys
    chosen = torch.zeros(1, 2, 5, 71, dtype=torch.bool).scatter_(-1, key_ids.remainder(71), True)[
        ..., :-1
    ]
    free = ~chosen.any(2)[..., None]
    assert free.any()
    call: Callable[..., Tensor] = torch_backend.attend
    plain = with_gradients(call, (query, key, value), group_ids, key_ids, 0.3)
    ours = with_gradients(
        call,
        (query, key.masked_fill(free, odd), value.masked_fill(free, odd)),
        group_ids,
        key_ids,
        0.3,
    )
    for found, expected in zip(ours, plain, strict=True):
        close(found, expected)

    of_one = chosen[:, :, 0] & (chosen.sum(2) == 1)  # keys selected only by the first group
    assert of_one.any()
    output = call(query, key, value.masked_fill(of_one[..., None], odd), group_ids, key_ids, 0.3)
    assert torch.equal(output.isfinite().all(-1), (group_ids != 0) | ~of_one.any(-1)[..., None])
