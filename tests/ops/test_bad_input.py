"""Bad arguments: a TypeError or ValueError with the name, what was expected, and what was passed.

``tests/test_refusals.py`` draws what is wrong for each argument of each function; here is a row for
each sentence.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

import dgt
from dgt.ops.attention_mass import attention_mass_curve

QUERY, KEY, VALUE = torch.randn(3, 2, 3, 10, 4)
CENTROIDS = normalize(torch.randn(3, 5, 4), dim=-1)
GROUP_IDS, KEY_IDS = torch.zeros(2, 3, 10, dtype=torch.int64), torch.arange(4).repeat(2, 3, 5, 1)
MASK = torch.ones(2, 10, dtype=torch.bool)
NAN = torch.full((2, 3, 10, 4), torch.nan)
OPERANDS = {"query": QUERY, "key": KEY, "value": VALUE}
CHOICE = {"group_ids": GROUP_IDS, "key_ids": KEY_IDS}
WHOLE = {**OPERANDS, "centroids": CENTROIDS, "top_k": 4}
GOOD = {
    dgt.attend: {**OPERANDS, **CHOICE},
    dgt.clustered_attention: {**OPERANDS, "num_groups": 3, "top_k": 2, "num_prefix_tokens": 1},
    dgt.update_centroids: {
        "centroids": CENTROIDS,
        "query": QUERY,
        "group_ids": GROUP_IDS,
        "rate": 0.1,
    },
    dgt.seed_centroids: {"tokens": QUERY[0], "num_groups": 3},
    dgt.cluster_tokens: {"tokens": KEY, "num_clusters": 3},
    dgt.find_centroids: {"query": QUERY, "centroids": CENTROIDS},
    dgt.group_matmul: {"form": 1, "left": QUERY, "right": KEY, **CHOICE},
    attention_mass_curve: {
        "query": QUERY,
        "key": KEY,
        "centroids": CENTROIDS,
        "group_ids": GROUP_IDS,
        "counts": [3],
    },
}


@pytest.mark.parametrize(
    ("argument", "value", "error", "expected"),
    [
        ("query", QUERY[0], ValueError, r"a \(B, H, L, D\) .* got a \(3, 10, 4\) tensor"),
        ("query", QUERY.numpy(), TypeError, r"a \(B, H, L, D\) (.|\n)* of type ndarray"),
        ("query", QUERY.long(), TypeError, r"a \(B, H, L, D\) floating .*torch\.int64"),
        ("key", KEY.double(), TypeError, "have query's type .*float32, got .*float64"),
        ("key", KEY.to("meta"), ValueError, "on query's device cpu, got meta"),
        ("key", KEY[:1], ValueError, r"have shape .*\(2, 3, 10, 4\) to match query, got \(1, "),
        ("value", VALUE[..., :3], ValueError, r"have shape .*10, 4\) to match key, got .*3\)"),
        ("centroids", None, TypeError, r"a \(H, G, D\).*got None"),
        ("centroids", CENTROIDS[..., :3], ValueError, r"have query's 4 channels .*\(3, 5, 3\)"),
        ("centroids", CENTROIDS[:2], ValueError, r"have query's 3 heads .*got \(2, 5, 4\)"),
        ("centroids", CENTROIDS[:, :0], ValueError, r"hold at least one group .*got \(3, 0, 4\)"),
        ("centroids", CENTROIDS[None], ValueError, r"have shape .*\(2, 3, 5, 4\) to match query"),
        ("top_k", 0, ValueError, "at least 1, got 0"),
        ("top_k", True, TypeError, "an int of at least 1, got True of type bool"),
        ("key_mask", MASK.float(), TypeError, r"a bool \(B, L\) = \(2, 10\).*torch\.float32"),
        ("key_mask", MASK[:, :9], ValueError, r"a bool \(B, L\) = \(2, 10\).*\(2, 9\)"),
        ("key_mask", MASK.to("meta"), ValueError, "on key's device cpu, got meta"),
        ("num_prefix_tokens", 10, ValueError, "0, or fewer .* got 10 with 10 queries"),
        ("residual_keys", 11, ValueError, "at most the 10 keys after the prefix, got 11"),
        ("key_cluster_ids", GROUP_IDS, ValueError, "None without residual_keys"),
        ("scale", "a", TypeError, "a number or None, got 'a'"),
        ("scale", float("nan"), ValueError, "finite, got nan"),
        ("backend", "cuda", ValueError, "one of auto, .*torch.*got 'cuda'"),
    ],
)
def test_the_whole_operator(argument, value, error, expected) -> None:
    with pytest.raises(error, match=f"^{argument} must (be )?{expected}"):
        dgt.dynamic_group_attention(**{**WHOLE, argument: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict.fromkeys(OPERANDS, QUERY[:, :, :0]), "query.* must not be empty"),
        ({"query": QUERY[:, :, :9], "num_prefix_tokens": 1}, "num_prefix_tokens .* 1 with 9 que"),
        ({"key": KEY[:, :2], "value": VALUE[:, :2]}, "key's number of heads .* query's 3, got 2"),
        ({"centroids": CENTROIDS.expand(2, 3, 5, 4), "key_mask": MASK}, "key_mask must be None"),
        ({"centroids": CENTROIDS.expand(2, 3, 5, 4), "query_mask": MASK}, "query_mask must be No"),
        ({"residual_keys": 2, "key_cluster_ids": GROUP_IDS + 2}, "key_cluster_ids .* 1, got 2"),
    ],
)
def test_arguments_that_do_not_go_together(changes, message) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        dgt.dynamic_group_attention(**{**WHOLE, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"form": 3}, TypeError, "tokens must be an int of at least 1, got None"),
        ({"left": QUERY[..., :0], "right": KEY[..., :0]}, ValueError, "left.* must not be empty"),
    ],
)
def test_operands_that_do_not_go_together(changes, error, message) -> None:
    with pytest.raises(error, match=f"^{message}"):
        dgt.group_matmul(**{**GOOD[dgt.group_matmul], **changes})


@pytest.mark.parametrize(
    ("function", "argument", "value", "error", "expected"),
    [
        (dgt.attend, "group_ids", GROUP_IDS.int(), TypeError, r"a \(B, H, L\) int64.*int32"),
        (dgt.attend, "key_ids", KEY_IDS[:, :2], ValueError, r"to match key, got \(2, 2, 5, 4\)"),
        (dgt.attend, "key_ids", KEY_IDS[:, :, :0], ValueError, "at least one group and one entry"),
        (dgt.attend, "key_ids", KEY_IDS * 0, ValueError, "not repeat a key in one list, got 0"),
        (dgt.attend, "key_bias", QUERY[:, :, :9, 0], ValueError, r"match key, got \(2, 3, 9\)"),
        (dgt.clustered_attention, "query", NAN, ValueError, "not contain NaN"),
        (dgt.clustered_attention, "key", NAN, ValueError, "not contain NaN"),
        (dgt.clustered_attention, "num_groups", 10, ValueError, "at most the 9 .*, got 10"),
        (dgt.clustered_attention, "residual_keys", 10, ValueError, "at most the 9 .*, got 10"),
        (dgt.clustered_attention, "num_prefix_tokens", 10, ValueError, "fewer .* 10 with 10"),
        (dgt.clustered_attention, "first_order", 1, TypeError, "True or False, got 1"),
        (dgt.update_centroids, "rate", 1.1, ValueError, r"between 0 and 1, got 1\.1"),
        (dgt.update_centroids, "rate", "a", TypeError, "between 0 and 1, got 'a'"),
        (dgt.update_centroids, "group_ids", GROUP_IDS + 5, ValueError, "lie in -1 to 4, got 5"),
        (dgt.seed_centroids, "tokens", QUERY[:1, 0, :0], ValueError, r"not be empty .*\(1, 0, 4\)"),
        (dgt.cluster_tokens, "tokens", KEY[:, :, :0], ValueError, "not be empty"),
        (dgt.cluster_tokens, "tokens", NAN, ValueError, "not contain NaN"),
        (dgt.cluster_tokens, "num_clusters", 11, ValueError, "at most the 10 tokens, got 11"),
        (dgt.find_centroids, "query", NAN, ValueError, "not contain NaN"),
        (dgt.group_matmul, "form", 5, ValueError, "1, 2, 3 or 4, got 5"),
        (dgt.group_matmul, "right", KEY.double(), TypeError, "left's type"),
        (dgt.group_matmul, "tokens", 13, ValueError, "None for form 1"),
        (dgt.group_matmul, "group_ids", GROUP_IDS + 99, ValueError, "lie in -1 to 4, got 99"),
        (dgt.group_matmul, "key_ids", KEY_IDS - 2, ValueError, "lie in -1 to 9, got -2"),
        (dgt.group_matmul, "backend", "reference", ValueError, "one of auto, torch, triton"),
        (attention_mass_curve, "counts", 3, TypeError, "a sequence of ints, got 3"),
        (attention_mass_curve, "counts", [11], ValueError, r"none above L = 10, got \[11\]"),
    ],
)
def test_other_functions(function, argument, value, error, expected) -> None:
    with pytest.raises(error, match=f"^{argument}.* must .*{expected}"):
        function(**{**GOOD[function], argument: value})


@pytest.mark.parametrize(
    ("name", "bad", "most"), [("group_ids", 5, 4), ("key_ids", 10, 9), ("key_ids", -2, 9)]
)
@pytest.mark.parametrize("top_k", [1, 4])
def test_ids_out_of_range(backend, name, bad, most, top_k) -> None:
    """On the CPU, never reading another head's tokens."""
    ids = {"group_ids": GROUP_IDS.clone(), "key_ids": KEY_IDS[..., :top_k].clone()}
    ids[name].view(-1)[3] = bad
    with pytest.raises(ValueError, match=rf"{name} must .*{most}.*{bad}"):
        dgt.attend(**OPERANDS, **ids, backend=backend)


def test_parts_that_cannot_be_merged() -> None:
    sums = QUERY[..., 0]
    for parts, error, message in (
        ((), ValueError, "parts must be at least one pair"),
        ((QUERY,), TypeError, "parts must be pairs of output and logsumexp"),
        (((QUERY, QUERY),), ValueError, r"logsumexp must be a \(B, H, L\)"),
        (((QUERY, sums[:, :1]),), ValueError, "logsumexp must have shape .* to match output"),
        (((QUERY, sums), (QUERY[:, :, :3], sums)), ValueError, "to match the first part"),
    ):
        with pytest.raises(error, match=message):
            dgt.merge_attention(*parts)
