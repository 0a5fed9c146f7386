"""Whatever is wrong with one argument of a public function, the error names that argument."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dgt
from dgt.ops.attention_mass import attention_mass, attention_mass_curve
from dgt.runs import load_recipe
from dgt.runs.recipe import recipe_keys

Values = st.SearchStrategy[Any]

THINGS = st.sampled_from([object(), 1j, [[0.5]]])
"""What no argument is."""
NUMBERS = st.integers() | st.floats() | THINGS
NO_NUMBERS = st.text() | st.just({"a": 1}) | THINGS
FRACTIONS = st.floats().filter(lambda number: not 0 <= number <= 1) | st.booleans() | NO_NUMBERS
SCALES = st.sampled_from([math.nan, math.inf, -math.inf, True]) | NO_NUMBERS
NAMES = st.text() | NUMBERS


def counts_below(least: int) -> Values:
    """Integers below `least`, and what is no integer."""
    return st.integers(max_value=least - 1) | st.booleans() | st.floats() | NO_NUMBERS


def counts_outside(least: int, most: int) -> Values:
    """Integers below `least` or above `most`, and what is no integer."""
    return counts_below(least) | st.integers(min_value=most + 1)


@st.composite
def tensors_unlike(draw: st.DrawFn, good: Tensor, free: str = "") -> Any:
    """No tensor, or one of another type, on another device, or of other dimensions or sizes.

    Of the axes named in `free`, such as "02", any size but 0 fits.
    """
    kind = draw(st.sampled_from(["thing", "type", "device", "dimensions", "size"]))
    if kind == "thing":
        return draw(NUMBERS | NO_NUMBERS | st.just(good.numpy()))
    if kind == "type":
        others = {torch.float32, torch.int32, torch.bool, torch.complex64} - {good.dtype}
        return good.to(draw(st.sampled_from(sorted(others, key=str))))
    if kind == "device":
        return good.to("meta")
    if kind == "dimensions":
        return draw(st.sampled_from([good[0], good[None], good.flatten(), good.sum()]))
    axis = draw(st.integers(0, good.dim() - 1))
    fitting = good.shape[axis]
    size = 0 if str(axis) in free else draw(st.integers(0, 20).filter(fitting.__ne__))
    shape = [size if at == axis else other for at, other in enumerate(good.shape)]
    return torch.zeros(shape, dtype=good.dtype)


def is_here(value: object) -> bool:
    """Whether a value is not a tensor of another device, for what takes any."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def ids_unlike(good: Tensor, most: int, free: str = "") -> Values:
    """Ids above `most` or below -1, and no tensors of ids."""
    wrong = st.integers(most + 1, 99) | st.integers(-99, -2)
    return tensors_unlike(good, free) | wrong.map(partial(torch.full_like, good))


class Call(NamedTuple):
    """Arguments that a function takes, and for each of some what it must refuse."""

    function: Callable[..., Any]
    good: dict[str, Any]
    wrong: dict[str, Values]


def settings_of_attention(function: Callable[..., Any], good: dict[str, Any]) -> Call:
    """The settings that a layer and a model of it have in common."""
    wrong = {
        "top_k": counts_below(1),
        "residual_keys": counts_below(0),
        "tau": FRACTIONS,
        "tau_weighs": NAMES,
        "backend": NAMES,
    }
    return Call(function, good, wrong)


QUERY, KEY, VALUE = torch.randn(3, 2, 3, 10, 4)
CENTROIDS = nn.functional.normalize(torch.randn(3, 5, 4), dim=-1)
GROUP_IDS, KEY_IDS = torch.zeros(2, 3, 10, dtype=torch.int64), torch.arange(4).repeat(2, 3, 5, 1)
MASK = torch.ones(2, 10, dtype=torch.bool)
OPERANDS = {"query": QUERY, "key": KEY, "value": VALUE}
CHOICE = {"group_ids": GROUP_IDS, "key_ids": KEY_IDS}
MAP = torch.randn(2, 3, 4, 8)
CONTEXT = torch.randn(2, 5, 8)
LAYER = dgt.DGAttention(8, 2, 3, 4)
CROSS_LAYER = dgt.DGCrossAttention(8, 2, 3, 4)
SIZES = {"dims": (8, 8, 8, 8), "depths": (0, 1, 1, 1), "num_heads": (1, 1, 2, 2)}

INSIDE_GROUPS = Call(
    dgt.attend,
    OPERANDS | CHOICE,
    {
        "query": tensors_unlike(QUERY),
        "key": tensors_unlike(KEY),
        "value": tensors_unlike(VALUE),
        "group_ids": ids_unlike(GROUP_IDS, 4),
        "key_ids": ids_unlike(KEY_IDS, 9, free="23"),
        "key_bias": tensors_unlike(torch.zeros(2, 3, 10)),
        "scale": SCALES,
        "backend": NAMES,
    },
)
LAYER_SETTINGS = settings_of_attention(dgt.DGAttention, {"dim": 8, "num_heads": 2})
CROSS_SETTINGS = settings_of_attention(dgt.DGCrossAttention, {"dim": 8, "num_heads": 2})
OF_LAYERS = {
    "dim": counts_below(1) | st.just(9),
    "num_heads": counts_below(1) | st.just(3),
    "num_groups": counts_below(1),
}
MODEL_SETTINGS = settings_of_attention(
    partial(timm.create_model, "dgt_nano", device="meta"), {"num_groups": 3, "top_k": 4, **SIZES}
)

CALLS = {
    "dynamic_group_attention": Call(
        dgt.dynamic_group_attention,
        {**OPERANDS, "centroids": CENTROIDS, "top_k": 4, "residual_keys": 2},
        {
            "query": tensors_unlike(QUERY, free="2"),
            "key": tensors_unlike(KEY),
            "value": tensors_unlike(VALUE),
            "centroids": tensors_unlike(CENTROIDS, free="1"),
            "top_k": counts_below(1),
            "scale": SCALES,
            "query_mask": tensors_unlike(MASK),
            "key_mask": tensors_unlike(MASK),
            "num_prefix_tokens": counts_outside(0, 9),
            "residual_keys": counts_outside(0, 10),
            "key_cluster_ids": ids_unlike(GROUP_IDS, 1),
            "backend": NAMES,
        },
    ),
    "attend": INSIDE_GROUPS,
    "attend_with_logsumexp": INSIDE_GROUPS._replace(function=dgt.attend_with_logsumexp),
    "clustered_attention": Call(
        dgt.clustered_attention,
        {**OPERANDS, "num_groups": 3, "top_k": 4},
        {
            "query": tensors_unlike(QUERY, free="12"),
            "key": tensors_unlike(KEY),
            "value": tensors_unlike(VALUE),
            "num_groups": counts_outside(1, 10),
            "top_k": counts_below(1),
            "residual_keys": counts_outside(0, 10),
            "num_prefix_tokens": counts_outside(0, 9),
            "scale": SCALES,
            "query_mask": tensors_unlike(MASK),
            "key_mask": tensors_unlike(MASK),
            "first_order": NUMBERS | NO_NUMBERS,
            "backend": NAMES,
        },
    ),
    "cluster_tokens": Call(
        dgt.cluster_tokens,
        {"tokens": KEY, "num_clusters": 3},
        {
            "tokens": tensors_unlike(KEY, free="0123").filter(is_here),
            "num_clusters": counts_outside(1, 10),
            "steps": counts_below(0),
            "every": counts_below(1),
            "mask": tensors_unlike(MASK),
            "backend": NAMES,
        },
    ),
    "find_centroids": Call(
        dgt.find_centroids,
        {"query": QUERY, "centroids": CENTROIDS},
        {
            "query": tensors_unlike(QUERY, free="02"),
            "centroids": tensors_unlike(CENTROIDS, free="1"),
            "steps": counts_below(0),
        },
    ),
    "group_queries": Call(
        dgt.group_queries,
        {"query": QUERY, "centroids": CENTROIDS},
        {
            "query": tensors_unlike(QUERY, free="02"),
            "centroids": tensors_unlike(CENTROIDS, free="1"),
            "query_mask": tensors_unlike(MASK),
            "backend": NAMES,
        },
    ),
    "select_keys": Call(
        dgt.select_keys,
        {"centroids": CENTROIDS, "key": KEY, "top_k": 4},
        {
            "centroids": tensors_unlike(CENTROIDS, free="1"),
            "key": tensors_unlike(KEY, free="02"),
            "top_k": counts_below(1),
            "key_mask": tensors_unlike(MASK),
            "backend": NAMES,
        },
    ),
    "seed_centroids": Call(
        dgt.seed_centroids,
        {"tokens": QUERY[0], "num_groups": 3},
        {
            "tokens": tensors_unlike(QUERY[0], free="012").filter(is_here),
            "num_groups": counts_below(1),
            "steps": counts_below(0),
        },
    ),
    "update_centroids": Call(
        dgt.update_centroids,
        {"centroids": CENTROIDS, "query": QUERY, "group_ids": GROUP_IDS, "rate": 0.1},
        {
            "centroids": tensors_unlike(CENTROIDS, free="1"),
            "query": tensors_unlike(QUERY),
            "group_ids": ids_unlike(GROUP_IDS, 4),
            "rate": FRACTIONS,
        },
    ),
    "group_matmul": Call(
        dgt.group_matmul,
        {"form": 1, "left": QUERY, "right": KEY, **CHOICE},
        {
            "form": (NUMBERS | NO_NUMBERS).filter(lambda form: form not in (1, 2, 3, 4)),
            "left": tensors_unlike(QUERY),
            "right": tensors_unlike(KEY, free="2"),
            "group_ids": ids_unlike(GROUP_IDS, 4),
            "key_ids": ids_unlike(KEY_IDS, 9, free="23"),
            "tokens": NUMBERS | NO_NUMBERS,
            "backend": NAMES,
        },
    ),
    "attention_mass": Call(
        attention_mass,
        {"query": QUERY, "key": KEY, **CHOICE},
        {
            "query": tensors_unlike(QUERY),
            "key": tensors_unlike(KEY),
            "group_ids": tensors_unlike(GROUP_IDS),
            "key_ids": tensors_unlike(KEY_IDS, free="23"),
        },
    ),
    "attention_mass_curve": Call(
        attention_mass_curve,
        {
            "query": QUERY,
            "key": KEY,
            "centroids": CENTROIDS,
            "group_ids": GROUP_IDS,
            "counts": [3, 4],
        },
        {
            "query": tensors_unlike(QUERY),
            "key": tensors_unlike(KEY),
            "centroids": tensors_unlike(CENTROIDS, free="1"),
            "group_ids": tensors_unlike(GROUP_IDS),
            "counts": NUMBERS | st.lists(counts_outside(1, 10), max_size=3),
        },
    ),
    "DGAttention": LAYER_SETTINGS._replace(wrong={**OF_LAYERS, **LAYER_SETTINGS.wrong}),
    "DGCrossAttention": CROSS_SETTINGS._replace(wrong={**OF_LAYERS, **CROSS_SETTINGS.wrong}),
    "DGAttention.forward": Call(
        LAYER,
        {"x": MAP},
        {
            "x": NUMBERS
            | NO_NUMBERS
            | st.sampled_from([MAP.int(), MAP.flatten(), MAP[..., :7], MAP[:, :0]]),
            "mask": tensors_unlike(MAP[..., 0] > 0).filter(is_here),
        },
    ),
    "DGCrossAttention.forward": Call(
        CROSS_LAYER,
        {"x": MAP, "context": CONTEXT},
        {
            "x": NUMBERS | NO_NUMBERS | st.sampled_from([MAP.int(), MAP.flatten(), MAP[..., :7]]),
            "context": NUMBERS
            | NO_NUMBERS
            | st.sampled_from([CONTEXT.int(), CONTEXT[0], CONTEXT[..., :7], CONTEXT[:1]]),
            "mask": tensors_unlike(MAP[..., 0] > 0).filter(is_here),
            "context_mask": tensors_unlike(CONTEXT[..., 0] > 0).filter(is_here),
        },
    ),
    "set_attention": settings_of_attention(partial(dgt.set_attention, LAYER), {}),
    "step_centroids": Call(
        dgt.step_centroids,
        {"model": LAYER, "learning_rate": 0.1},
        {"model": NUMBERS | NO_NUMBERS, "learning_rate": NO_NUMBERS},
    ),
    "create_model": MODEL_SETTINGS._replace(
        wrong={
            "in_chans": counts_below(1),
            "num_classes": counts_below(0),
            "stem_width": counts_below(1),
            "stem_stride": (NUMBERS | NO_NUMBERS).filter(lambda stride: stride not in (1, 2)),
            "head_width": counts_below(1),
            "dims": NUMBERS | st.tuples(st.just(8)) | st.tuples(counts_below(1), *[st.just(8)] * 3),
            "depths": NUMBERS | st.tuples(counts_below(0), *[st.just(1)] * 3),
            "num_heads": NUMBERS | st.tuples(*[st.just(1)] * 3, counts_below(1)),
            "mlp_ratio": st.floats(max_value=0) | st.just(math.nan) | NO_NUMBERS,
            "drop_rate": FRACTIONS,
            "proj_drop_rate": FRACTIONS,
            "drop_path_rate": FRACTIONS,
            **MODEL_SETTINGS.wrong,
        }
    ),
    "cost": Call(
        dgt.cost,
        {"model": LAYER},
        {"model": NUMBERS, "image_size": NUMBERS | NO_NUMBERS | st.just((0, 8))},
    ),
    "optimize_for_inference": Call(
        dgt.optimize_for_inference, {"model": LAYER}, {"model": NUMBERS, "dtype": NUMBERS}
    ),
    "accelerate": Call(
        dgt.accelerate,
        {"model": nn.Linear(4, 4), "inputs": torch.randn(2, 4), "error": 0.1},
        {
            "model": NUMBERS | NO_NUMBERS,
            "inputs": NUMBERS | NO_NUMBERS,
            "error": FRACTIONS | st.just(1),
            "forward": NUMBERS | NO_NUMBERS,
            "metric": NUMBERS | NO_NUMBERS,
            "approximate": NUMBERS | THINGS,
            "num_prefix_tokens": counts_below(0) | st.lists(counts_below(0), min_size=1),
            "guard": NUMBERS | NO_NUMBERS,
            "first_order": NUMBERS | NO_NUMBERS,
        },
    ),
    "register_attention": Call(
        dgt.register_attention,
        {"name": "dgt-3-4", "num_groups": 3, "top_k": 4},
        {
            "name": NUMBERS | st.sampled_from(["eager", "sdpa"]),
            "num_groups": counts_below(1),
            "top_k": counts_below(1),
            "num_prefix_tokens": counts_below(0),
            "residual_keys": counts_below(0),
            "exact": NUMBERS | NO_NUMBERS,
        },
    ),
    "load_recipe": Call(
        lambda **changes: load_recipe("scenes", changes),
        {},
        dict.fromkeys(recipe_keys("classify"), THINGS),
    ),
}


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, call in CALLS.items() for argument in call.wrong],
)
@settings(max_examples=10)
@given(data=st.data())
def test_a_wrong_argument_is_named(name: str, argument: str, data: st.DataObject) -> None:
    function, good, wrong = CALLS[name]
    arguments = good | {argument: data.draw(wrong[argument])}
    with pytest.raises((ValueError, TypeError), match=rf"\b{re.escape(argument)}\b"):
        function(**arguments)
