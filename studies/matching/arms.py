"""Which keys of the other image a query of the cross-attention sees; self-attention is as it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgt
from dgt.acceleration.calls import Call
from dgt.acceleration.intercept import trace_sdpa
from studies.matching.pairs import Described, Models

PRUNING = 0.95  # kornia's `width_confidence`; -1 keeps all points
CENTROID_STEPS = 5


class Arm(NamedTuple):
    """Which keys of the other image a query sees."""

    name: str
    kind: str
    keys: int = 0
    groups: int = 0


ALL_KEYS = Arm("all", "all")
ALONE = Arm("descriptors alone, no transformer", "alone")
ARMS = (
    ALL_KEYS,
    Arm("its own best 32", "best", 32),
    Arm("those of its group: G 128, k 32", "groups", 32, 128),
    Arm("G 48, k 64", "groups", 64, 48),
    Arm("G 48, k 32", "groups", 32, 48),
    Arm("G 16, k 128", "groups", 128, 16),
    Arm("the nearest 128 by place", "nearest", 128),
    Arm("one list of 128 for all: best of the mean query", "mean query", 128),
    Arm("one list of 128 for all: largest total weight", "total weight", 128),
    Arm("64 at random", "random", 64),
    Arm("another group's 64, G 48", "another", 64, 48),
    Arm("none", "none"),
    ALONE,
)
MORE_GROUPS = (  # of 2,048 keypoints or more, where one of 48 groups has too many queries for one list
    Arm("G 128, k 128", "groups", 128, 128),
    Arm("G 256, k 64", "groups", 64, 256),
    Arm("G 256, k 128", "groups", 128, 256),
)
MANY = 8000  # keypoints from which on fewer arms are run
WITH_MANY = ("all", "nearest", "total weight", "random", "none", "alone")
TIMED = {  # the groups that are timed, by keypoints
    1024: "those of its group: G 128, k 32",
    2048: "G 128, k 128",
    4096: "G 128, k 128",
    8000: "G 256, k 128",
}


def arms_at(points: int) -> tuple[Arm, ...]:
    """The arms for so many keypoints."""
    if points < 2048:
        return ARMS
    if points < MANY:
        return (*ARMS, *MORE_GROUPS)
    return (*(arm for arm in ARMS if arm.kind in WITH_MANY), *MORE_GROUPS)


def prunes_too(arm: Arm, points: int) -> bool:
    """Whether an arm is also run with pruning: every one with few keypoints, else all keys and groups."""
    return points < 2048 or arm.kind == "all" or arm.name == TIMED[points]


class Lists(NamedTuple):
    """Whose list of keys a query has: (1, 1, L) group ids and (1, 1, G, K) key ids, int64."""

    group_ids: Tensor
    key_ids: Tensor


def find_lists(arm: Arm, query: Tensor, key: Tensor, places: tuple[Tensor, Tensor] | None) -> Lists:
    """The lists of an arm for (1, 1, L, D) queries and (1, 1, S, D) keys.

    Args:
        places: (L, 2) of the queries and (S, 2) of the keys, where the arm looks at them.
    """
    count = min(arm.keys, key.shape[2])
    if arm.kind in ("groups", "another"):
        centroids = image_centroids(query, arm.groups)
        ids = dgt.group_queries(query, centroids)
        if arm.kind == "another":
            groups = centroids.shape[1]
            ids = (ids + 1 + groups // 2) % groups
        return Lists(ids, dgt.select_keys(centroids, key, count))
    one_for_all = torch.zeros(query.shape[:3], dtype=torch.int64)
    if arm.kind == "mean query":
        scores = query.mean(2) @ key[0, 0].T
        return Lists(one_for_all, ascending(scores, count)[None])
    if arm.kind == "total weight":
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        return Lists(one_for_all, ascending(weights.sum(2), count)[None])
    own = torch.arange(query.shape[2])[None, None]
    if arm.kind == "best":
        return Lists(own, ascending(query @ key.mT, count))
    if arm.kind == "nearest" and places is not None:
        return Lists(own, ascending(-torch.cdist(*places), count)[None, None])
    if arm.kind == "random":  # a stretch of one random order, from another start for each query
        generator = torch.Generator().manual_seed(query.shape[2])
        order = torch.randperm(key.shape[2], generator=generator)
        starts = torch.randint(key.shape[2], (query.shape[2], 1), generator=generator)
        stretch = order[(starts + torch.arange(count)) % key.shape[2]]
        return Lists(own, stretch.sort(-1).values[None, None])
    raise ValueError(f"arm must be of a kind with lists, got {arm}")


def attend_in_groups(arm: Arm, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with the lists of an arm of groups, in one call."""
    centroids = image_centroids(query, arm.groups)
    found = dgt.dynamic_group_attention(query, key, value, centroids, arm.keys, return_ids=False)
    return found.output


def image_centroids(query: Tensor, groups: int) -> Tensor:
    """(1, G, D) centroids of an image's (1, 1, L, D) queries: evenly spaced ones, moved by a few steps of
    k-means.
    """
    count = min(groups, query.shape[2])
    spaced = torch.arange(count) * query.shape[2] // count
    start = F.normalize(query[0, :, spaced], dim=-1)
    return dgt.find_centroids(query, start, CENTROID_STEPS)[0]


def ascending(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest scores of each row, ascending."""
    return scores.topk(count, -1).indices.sort(-1).values


class Replaced:
    """Computes the cross-attention of a matcher as an arm has it.

    Args:
        arm: the arm.
        described: the pair that is matched.
    """

    def __init__(self, arm: Arm, described: Described) -> None:
        self.arm = arm
        self.described = described
        self.rows: list[dict[bytes, int]] = []
        """Of each image, which keypoint has this encoding: pruning leaves some out, in every layer."""
        self.kept: list[Tensor] = []

    def look(self, layer: nn.Module, given: tuple[Tensor, ...], named: Any) -> None:
        """Find out which keypoints a layer is called with; a hook before it is called."""
        if self.arm.kind != "nearest":
            return
        encodings = [part[:, 0, 0].transpose(0, 1).flatten(1).numpy() for part in given[2:4]]
        if not self.rows:
            self.rows = [
                {row.tobytes(): at for at, row in enumerate(encoding)} for encoding in encodings
            ]
        self.kept = [
            torch.tensor([rows[row.tobytes()] for row in encoding], dtype=torch.int64)
            for rows, encoding in zip(self.rows, encodings, strict=True)
        ]

    def answer(self, name: str, number: int, call: Call) -> Tensor | None:
        """The output of a call; None where it is as it was."""
        if not name.endswith("cross_attn") or self.arm.kind == "all":
            return None
        if self.arm.kind == "none":
            return torch.zeros_like(call.query)
        if self.arm.kind == "groups":
            return attend_in_groups(self.arm, call.query, call.key, call.value)
        places = None
        if self.arm.kind == "nearest":
            here, there = (self.described.places[at][self.kept[at]] for at in (0, 1))
            places = (there, here) if number else (here, there)
        lists = find_lists(self.arm, call.query, call.key, places)
        return dgt.attend(call.query, call.key, call.value, *lists)


@torch.inference_mode()
def match(matcher: Any, described: Described, arm: Arm, prunes: bool) -> dict[str, Any]:
    """What the matcher returns with its cross-attention as an arm has it."""
    matcher.conf.width_confidence = PRUNING if prunes else -1
    replaced = Replaced(arm, described)
    hooks = [
        layer.register_forward_pre_hook(replaced.look, with_kwargs=True)
        for layer in matcher.transformers
    ]
    try:
        with trace_sdpa(matcher, replaced.answer):
            found: dict[str, Any] = matcher(described.item)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def capture_call(models: Models, described: Described, layer: int) -> Call:
    """The cross-attention of a layer from the first image of a pair to the second, with all points."""
    calls: list[Call] = []

    def keep(name: str, _: int, call: Call) -> None:
        if name.endswith(f"transformers.{layer}.cross_attn"):
            calls.append(call)

    models.matcher.conf.width_confidence = -1
    with trace_sdpa(models.matcher, keep):
        models.matcher(described.item)
    return calls[0]
