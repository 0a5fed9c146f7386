"""Every bad argument: a TypeError or ValueError with its name, what was expected, and what was passed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dgt

GOOD = {
    "query": torch.randn(2, 3, 10, 4),
    "key": torch.randn(2, 3, 10, 4),
    "value": torch.randn(2, 3, 10, 4),
    "centroids": torch.nn.functional.normalize(torch.randn(3, 5, 4), dim=-1),
    "top_k": 4,
}
IDS = {
    "group_ids": torch.zeros(2, 3, 10, dtype=torch.int64),
    "key_ids": torch.arange(4).repeat(2, 3, 5, 1),
}
MASK = torch.ones(2, 10, dtype=torch.bool)

WHOLE = [
    # rank
    (
        {"query": torch.randn(3, 10, 4)},
        ValueError,
        r"query must be a \(B, H, L, D\).*got a \(3, 10, 4\) tensor",
    ),
    (
        {"centroids": torch.randn(5, 4)},
        ValueError,
        r"centroids must be a \(H, G, D\).*got a \(5, 4\) tensor",
    ),
    # type
    (
        {"query": np.zeros((2, 3, 10, 4))},
        TypeError,
        r"(?s)query must be a \(B, H, L, D\).*type ndarray",
    ),
    (
        {"query": torch.zeros(2, 3, 10, 4, dtype=torch.int64)},
        TypeError,
        r"query must be .*floating.*torch\.int64",
    ),
    (
        {"key": torch.randn(2, 3, 10, 4).double()},
        TypeError,
        r"key must have query's type .*float32, got .*float64",
    ),
    ({"centroids": None}, TypeError, r"centroids must be a \(H, G, D\).*got None"),
    # device
    (
        {"key": torch.empty(2, 3, 10, 4, device="meta")},
        ValueError,
        r"key must be on query's device cpu, got meta",
    ),
    (
        {"centroids": GOOD["centroids"].to("meta")},
        ValueError,
        r"centroids must be on query's device cpu, got meta",
    ),
    ({"key_mask": MASK.to("meta")}, ValueError, r"key_mask must be on .* device cpu, got meta"),
    # shapes against each other
    ({"key": torch.randn(2, 3, 9, 4)}, ValueError, r"must have shape .*got \(2, 3, "),
    (
        {"key": torch.randn(1, 3, 10, 4)},
        ValueError,
        r"key must have shape .*\(2, 3, 10, 4\) to match query, got \(1, ",
    ),
    (
        {"value": torch.randn(2, 3, 10, 5)},
        ValueError,
        r"value must have shape .*10, 4\) to match key, got .*5\)",
    ),
    (
        {"centroids": torch.randn(3, 5, 6)},
        ValueError,
        r"centroids must have query's 4 channels .*got \(3, 5, 6\)",
    ),
    (
        {"centroids": torch.randn(2, 5, 4)},
        ValueError,
        r"centroids must have query's 3 heads .*got \(2, 5, 4\)",
    ),
    (
        {"centroids": torch.randn(3, 0, 4)},
        ValueError,
        r"centroids must hold at least one group .*got \(3, 0, 4\)",
    ),
    (
        {name: torch.randn(2, 3, 0, 4) for name in ("query", "key", "value")},
        ValueError,
        r"query .*must not be empty",
    ),
    # counts
    ({"top_k": 0}, ValueError, r"top_k must be at least 1, got 0"),
    ({"top_k": True}, TypeError, r"top_k must be an int of at least 1, got True of type bool"),
    # masks
    (
        {"key_mask": MASK.float()},
        TypeError,
        r"key_mask must be a bool \(B, L\) = \(2, 10\).*torch\.float32",
    ),
    (
        {"key_mask": MASK[:, :9]},
        ValueError,
        r"key_mask must be a bool \(B, L\) = \(2, 10\).*\(2, 9\)",
    ),
    ({"key_mask": [[True] * 10] * 2}, TypeError, r"key_mask must be a bool \(B, L\).*type list"),
    ({"backend": "cuda"}, ValueError, r"backend must be one of auto, .*torch.*got 'cuda'"),
]


@pytest.mark.parametrize(("change", "error", "message"), WHOLE)
def test_the_whole_operator(change, error, message) -> None:
    with pytest.raises(error, match=message):
        dgt.dynamic_group_attention(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"group_ids": IDS["group_ids"].int()},
            TypeError,
            r"group_ids must be a \(B, H, L\) int64.*torch\.int32",
        ),
        (
            {"group_ids": IDS["group_ids"][0]},
            ValueError,
            r"group_ids must be a \(B, H, L\).*\(3, 10\)",
        ),
        (
            {"group_ids": IDS["group_ids"][..., :9]},
            ValueError,
            r"group_ids must have shape .*match query, got .*9\)",
        ),
        (
            {"group_ids": IDS["group_ids"].to("meta")},
            ValueError,
            r"group_ids must be on query's device cpu, got meta",
        ),
        (
            {"key_ids": IDS["key_ids"].float()},
            TypeError,
            r"key_ids must be a \(B, H, G, K\) int64.*torch\.float32",
        ),
        (
            {"key_ids": IDS["key_ids"][:, :2]},
            ValueError,
            r"key_ids must have shape .*to match key, got \(2, 2, 5, 4\)",
        ),
        ({"backend": "fast"}, ValueError, r"backend must be one of .*got 'fast'"),
    ],
)
def test_attention_inside_groups(change, error, message) -> None:
    good = {name: GOOD[name] for name in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        dgt.attend(**{**good, **IDS, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rate": 1.1}, ValueError, r"rate must be between 0 and 1, got 1\.1"),
        ({"rate": float("nan")}, ValueError, r"rate must be between 0 and 1, got nan"),
        (
            {"group_ids": IDS["group_ids"][:, :, :4]},
            ValueError,
            r"group_ids must have shape .*got \(2, 3, 4\)",
        ),
        (
            {"centroids": torch.randn(3, 5, 6)},
            ValueError,
            r"centroids must have query's 4 channels.*got \(3, 5, 6\)",
        ),
    ],
)
def test_updating_centroids(change, error, message) -> None:
    good = {
        "centroids": GOOD["centroids"],
        "query": GOOD["query"],
        "group_ids": IDS["group_ids"],
        "rate": 0.1,
    }
    with pytest.raises(error, match=message):
        dgt.update_centroids(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"tokens": torch.randn(10, 4)},
            ValueError,
            r"tokens must be a \(H, N, D\).*got a \(10, 4\) tensor",
        ),
        (
            {"tokens": torch.randn(2, 0, 4)},
            ValueError,
            r"tokens must not be empty .*got shape \(2, 0, 4\)",
        ),
        ({"num_groups": 0}, ValueError, r"num_groups must be at least 1, got 0"),
        ({"steps": -1}, ValueError, r"steps must be at least 0, got -1"),
    ],
)
def test_seeding(change, error, message) -> None:
    with pytest.raises(error, match=message):
        dgt.seed_centroids(**{"tokens": torch.randn(2, 9, 4), "num_groups": 3, **change})


@pytest.mark.parametrize(
    ("name", "bad", "most"), [("group_ids", 5, 4), ("key_ids", 10, 9), ("key_ids", -2, 9)]
)
@pytest.mark.parametrize("top_k", [1, 4])
def test_ids_out_of_range(backend, name, bad, most, top_k) -> None:
    """On the CPU, never reading another head's tokens."""
    ids = {"group_ids": IDS["group_ids"].clone(), "key_ids": IDS["key_ids"][..., :top_k].clone()}
    ids[name].view(-1)[3] = bad
    with pytest.raises(ValueError, match=rf"{name} must .*{most}.*{bad}"):
        dgt.attend(GOOD["query"], GOOD["key"], GOOD["value"], **ids, backend=backend)


@pytest.mark.parametrize(("scale", "error"), [("a", TypeError), (float("nan"), ValueError)])
def test_scale(scale, error) -> None:
    with pytest.raises(error, match=r"scale must be .*, got"):
        dgt.attend(GOOD["query"], GOOD["key"], GOOD["value"], **IDS, scale=scale)


def test_a_key_named_twice_in_one_list() -> None:
    key_ids = IDS["key_ids"].clone()
    key_ids[0, 0, 0, 1] = key_ids[0, 0, 0, 0]
    with pytest.raises(ValueError, match="key_ids must not repeat a key in one list, got"):
        dgt.attend(GOOD["query"], GOOD["key"], GOOD["value"], IDS["group_ids"], key_ids)


@pytest.mark.parametrize(("name", "bad"), [("group_ids", 99), ("key_ids", 99), ("key_ids", -2)])
def test_products_check_ids_too(name, bad) -> None:
    ids = {key: value.clone() for key, value in IDS.items()}
    ids[name].view(-1)[0] = bad
    with pytest.raises(ValueError, match=f"{name} must lie in -1 to .*, got {bad}"):
        dgt.group_matmul(1, GOOD["query"], GOOD["key"], **ids)


def test_an_update_with_ids_of_no_group() -> None:
    ids = IDS["group_ids"].clone()
    ids[0, 0, 0] = 5
    with pytest.raises(ValueError, match="group_ids must lie in -1 to 4, got 5"):
        dgt.update_centroids(GOOD["centroids"], GOOD["query"], ids, 0.5)
    with pytest.raises(TypeError, match="rate must be between 0 and 1, got 'a'"):
        dgt.update_centroids(GOOD["centroids"], GOOD["query"], IDS["group_ids"], "a")
