"""The paper's four forms: against dense products, as each other's gradients, and composed into attention."""

from __future__ import annotations

import pytest
import torch

import dgt


def draw(batch: int, queries: int, keys: int, channels: int, width: int) -> dict[str, torch.Tensor]:
    """Queries, keys, weights and ids with padding, an empty place and an empty group; float64."""
    group_ids = torch.randint(0, 3, (batch, 2, queries))
    group_ids[0, :, 4] = -1
    key_ids = torch.rand(batch, 2, 4, keys).argsort(-1)[..., :width].sort(-1).values
    key_ids[-1, 1, 0, width - 2 :] = -1
    like = {"dtype": torch.float64, "requires_grad": True}
    return {
        "queries": torch.randn(batch, 2, queries, channels, **like),
        "keys": torch.randn(batch, 2, keys, channels, **like),
        "weights": torch.randn(batch, 2, queries, width, **like),
        "group_ids": group_ids,
        "key_ids": key_ids,
    }


@pytest.fixture
def operands() -> dict[str, torch.Tensor]:
    """Two images with eleven queries and thirteen keys, five keys per group."""
    return draw(2, 11, 13, 6, 5)


def pair(form: int, operands: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left and right operands of a form."""
    queries, keys, weights = operands["queries"], operands["keys"], operands["weights"]
    return {1: (queries, keys), 2: (weights, keys), 3: (queries, weights), 4: (weights, queries)}[
        form
    ]


def multiply(form: int, operands: dict[str, torch.Tensor], *pair: torch.Tensor) -> torch.Tensor:
    """The form under test."""
    tokens = operands["keys"].shape[2] if form > 2 else None
    return dgt.group_matmul(form, *pair, operands["group_ids"], operands["key_ids"], tokens=tokens)


def one_hot(operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B, H, L, K, M): one where key j is at place p for query i."""
    groups, keys = operands["group_ids"], operands["key_ids"]
    ids = torch.take_along_dim(keys, groups.clamp(min=0)[..., None], dim=2)
    ids = ids.masked_fill((groups < 0)[..., None], -1)
    return (ids[..., None] == torch.arange(13)).double()


@pytest.mark.parametrize("form", [1, 2, 3, 4])
def test_equals_the_dense_product(form: int, operands: dict[str, torch.Tensor]) -> None:
    left, right = pair(form, operands)
    formula = {1: "bhld,bhmd,bhlkm->bhlk", 2: "bhlk,bhmd,bhlkm->bhld", 3: "bhld,bhlk,bhlkm->bhdm",
               4: "bhlk,bhld,bhlkm->bhmd"}[form]  # fmt: skip
    torch.testing.assert_close(
        multiply(form, operands, left, right), torch.einsum(formula, left, right, one_hot(operands))
    )


@pytest.mark.parametrize("form", [1, 2, 3, 4])
def test_gradients_of_first_and_second_order(form: int) -> None:
    operands = draw(1, 6, 7, 3, 4)

    def product(*arguments: torch.Tensor) -> torch.Tensor:
        return multiply(form, operands, *arguments)

    assert torch.autograd.gradcheck(product, pair(form, operands))
    assert torch.autograd.gradgradcheck(product, pair(form, operands))


@pytest.mark.parametrize("form", [1, 2, 3, 4])
def test_opcheck(form: int, operands: dict[str, torch.Tensor]) -> None:
    ids = operands["group_ids"], operands["key_ids"]
    torch.library.opcheck(
        torch.ops.dgt.group_matmul.default, (form, *pair(form, operands), *ids, 13, "torch")
    )


def attention_of_forms(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group_ids: torch.Tensor,
    key_ids: torch.Tensor,
) -> torch.Tensor:
    """Eq. 2 as composed in the paper's appendix; P (L x k) goes through memory several times."""
    scores = dgt.group_matmul(1, queries * queries.shape[-1] ** -0.5, keys, group_ids, key_ids)
    exist = torch.take_along_dim(key_ids, group_ids.clamp(min=0)[..., None], dim=2) >= 0
    weights = scores.masked_fill(~exist, -1e4).softmax(-1)
    return dgt.group_matmul(2, weights, values, group_ids, key_ids)


def test_attention_of_forms_equals_the_reference(operands: dict[str, torch.Tensor]) -> None:
    """The paper's system: P = form 1, a softmax, form 2; its gradients are forms 1 to 4 again."""
    queries, keys = operands["queries"], operands["keys"]
    ids = operands["group_ids"], operands["key_ids"]
    results = []
    oracle = dgt.attend(queries, keys, keys, *ids, backend="reference")
    for output in (attention_of_forms(queries, keys, keys, *ids), oracle):
        results.append((output, *torch.autograd.grad(output.square().sum(), (queries, keys))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_group_without_keys_yields_zero(operands: dict[str, torch.Tensor]) -> None:
    operands["key_ids"][:, :, 1] = -1
    arguments = (
        operands["queries"],
        operands["keys"],
        operands["keys"],
        operands["group_ids"],
        operands["key_ids"],
    )
    output = attention_of_forms(*arguments)
    assert not output[operands["group_ids"] == 1].any()
