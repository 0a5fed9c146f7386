"""How many keys reach the bound of the selection: never more than there is room for, and what happens if they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dgt
from dgt.ops.triton import backend as kernels
from dgt.ops.triton import passes, selection
from dgt.ops.triton.blocks import block_of_key, plan_keys
from dgt.ops.triton.launch import launch, layouts_of
from dgt.ops.triton.selection import Room, room_for

pytestmark = pytest.mark.usefixtures("poison")


def count_candidates(scores: Tensor, top_k: int, blocks: int) -> Tensor:
    """How many of (R, L) scores reach their row's bound, with keys in blocks as in the kernels."""
    block = block_of_key(torch.arange(scores.shape[1]), blocks)
    best = scores.new_full((len(scores), blocks), -torch.inf).scatter_reduce(
        1, block.expand_as(scores), scores, "amax"
    )
    bound = best.topk(top_k, dim=1).values[:, -1:]
    return (scores >= bound).sum(1)


def smooth_field(rows: int, columns: int, scale: int) -> Tensor:
    """(16, L) scores of 16 groups over an image that changes over about ``scale`` tokens."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(
        16, 1, max(2, rows // scale), max(2, columns // scale), generator=generator
    )
    field = F.interpolate(coarse, (rows, columns), mode="bicubic", align_corners=True)
    return (field + 0.01 * torch.randn(field.shape, generator=generator)).flatten(1)


@pytest.mark.parametrize("top_k", [98, 500])
@pytest.mark.parametrize("scale", [4, 16, 64])
@pytest.mark.parametrize(
    ("rows", "columns"), [(56, 56), (64, 64), (112, 200), (512, 64), (256, 256)]
)
def test_no_row_of_a_smooth_image_overflows(
    rows: int, columns: int, scale: int, top_k: int
) -> None:
    """Also if the image's width divides the number of blocks, so that columns are always in step with them."""
    key = torch.empty(1, 1, rows * columns, 32, dtype=torch.bfloat16, device="meta")
    blocks = plan_keys(*layouts_of(key), 16, top_k).blocks
    found = count_candidates(smooth_field(rows, columns, scale), top_k, blocks)
    assert int(found.min()) >= top_k
    assert int(found.max()) <= room_for(top_k, rows * columns).listed


@pytest.mark.parametrize("tokens", [1024, 1100, 4095])
def test_block_maxima_are_those_of_turned_blocks(make_case: Any, tokens: int) -> None:
    """An assumption of the test above: the kernel assigns keys to blocks in the same way, each to one block."""
    case = make_case(1, 1, tokens, 16, 3, 20)
    key = case.key.detach()
    (layout,) = layouts_of(key)
    keys = plan_keys(layout, 3, 20)
    best = key.new_empty(3, keys.blocks)
    unread = torch.zeros(1, dtype=torch.int64, device=key.device)  # groups of no queries
    score = passes.plan_scores(passes.no_queries(layout, 3), keys)
    launch(score, key, key, case.centroids, None, None, unread, best, None, None)
    scores = torch.einsum("gd,ld->gl", case.centroids[0].float(), key[0, 0].float())
    block = block_of_key(torch.arange(tokens, device=key.device), keys.blocks)
    expected = scores.new_full((3, keys.blocks), -torch.inf).scatter_reduce(
        1, block.expand_as(scores), scores, "amax"
    )
    assert torch.equal(best, expected)


@pytest.mark.parametrize("width", [1, 20, 98, 128, 129, 500, 513, 1024, 1025, 2100, 30000])
def test_the_best_so_far_and_a_refill_have_room(width: int) -> None:
    room = room_for(width, 64000)
    assert room.listed >= min(4 * width, 2 * width if width > 1024 else 4 * width)
    assert width + 32 * room.refill <= room.listed or room.listed >= 64000
    assert room.held <= room.listed


ROOMS = {
    "a list in memory": Room(2048, 32, 8),
    "an overflow": Room(128, 64, 2),
    "both": Room(128, 32, 1),
}


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
@pytest.mark.parametrize(
    ("dtype", "masked"), [(torch.float32, False), (torch.float16, True)], ids=str
)
def test_more_candidates_than_room(
    make_case: Any, monkeypatch: pytest.MonkeyPatch, room: Room, dtype: torch.dtype, masked: bool
) -> None:
    """Many keys tie, some with the last one selected: the same ids as on the plain path."""
    case = make_case(1, 1, 1300, 16, 3, 50, dtype=dtype, masked=masked)
    key = case.key.detach().clone()
    key[:, :, 200:900] = key[:, :, 200:201] + key[:, :, 200:900].round() / 4
    key[:, :, 950:1250] = key[:, :, 950:951]
    monkeypatch.setattr(selection, "room_for", lambda *_: room)
    monkeypatch.setattr(
        passes, "plan_selection", passes.plan_selection.__wrapped__
    )  # not a kept one
    found = kernels.select_keys(case.centroids, key, case.top_k, case.key_mask)
    assert torch.equal(
        found, dgt.select_keys(case.centroids, key, case.top_k, case.key_mask, "torch")
    )


def test_a_bound_near_zero_leaves_enough_keys(make_case: Any) -> None:
    """The bound is below the k-th best block by a fraction of the largest score, not only of itself."""
    (layout,) = layouts_of(make_case(1, 1, 2000, 8, 2, 20).key)
    plan = passes.plan_places(passes.no_queries(layout, 2), 2, 256, 20)
    best = torch.zeros(2, 256, device=make_case(1, 1, 8, 8, 2, 3).key.device)
    best[:, 0] = 8.0
    low, unread = best.new_empty(2), best.new_empty(1, dtype=torch.int32)
    launch(plan, *[unread] * 5, best, low)
    assert (low <= -8 * 2.0**-20).all()
    assert (low >= -8 * 2.0**-19).all()
