"""A matcher with its attention in groups, on pairs with nothing to match, little, or something broken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgt
from dgt.acceleration import choose
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement

from .test_sites import Pair, pair

MEASURED = 64  # points of an image that the setting was for


def accelerated(**setting: int) -> Pair:
    """A matcher whose cross-attention is in groups; that within a set of points is as it was."""
    torch.manual_seed(0)
    model = Pair().eval()
    numbers = {"groups": 8, "keys": 12, "least_tokens": 1, **setting}
    sizes = {"heads": 2, "channels": 8, "tokens": MEASURED, "key_tokens": MEASURED}
    site = AttentionSite("across", measurement=Measurement(Setting("groups", **numbers)), **sizes)
    install_sites(model, [site])
    return model


class TwoPairs(nn.Module):
    """Two layers of a matcher."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Pair(), Pair()

    def forward(self, data: dict[str, Any]) -> dict[str, list[Tensor]]:
        found = self.one(data)["points"]
        sides = zip(("first", "second"), found, strict=True)
        return self.two({side: {**data[side], "points": of_side} for side, of_side in sides})


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize(
    ("approximate", "expected"),
    [
        (None, {"one.within", "one.across", "two.within", "two.across"}),
        ("*.across", {"one.across", "two.across"}),
        ("two", {"two.within", "two.across"}),  # and all inside it
        (("one.a*", "t??.within"), {"one.across", "two.within"}),
    ],
)
def test_only_what_is_named_is_grouped(approximate, expected, tmp_path) -> None:
    torch.manual_seed(0)
    model = TwoPairs().eval()
    weights = copy.deepcopy(model.state_dict())
    items = [pair(seed) for seed in range(4)]
    report = dgt.accelerate(model, items, 0.5, approximate=approximate, num_prefix_tokens=0)
    choices = {site.name: site.setting.choice for site in report.layers}
    assert {name for name, choice in choices.items() if choice == "groups"} == expected
    assert len(choices) == 4
    report.save(tmp_path / "plan.json")
    again = TwoPairs().eval()
    again.load_state_dict(weights)
    dgt.apply_plan(again, tmp_path / "plan.json")
    with torch.no_grad():
        for found, before in zip(
            again(*items[0])["points"], model(*items[0])["points"], strict=True
        ):
            assert torch.equal(found, before)


@pytest.mark.usefixtures("slow_attention")
def test_what_is_not_named_has_the_exact_kernel_where_that_is_faster(monkeypatch) -> None:
    """Self-attention of a matcher is equal up to rounding, whatever error is allowed."""
    monkeypatch.setattr(choose, "EXACT_GAIN", 1.1)  # the clock has both kernels equally fast
    torch.manual_seed(0)
    model = Pair().eval()
    within = copy.deepcopy(model.within)
    items = [pair(seed) for seed in range(4)]
    report = dgt.accelerate(model, items, 0.9, approximate="across", num_prefix_tokens=0)
    choices = {site.name: site.setting.choice for site in report.layers}
    assert choices == {"within": "exact", "across": "groups"}
    x = torch.randn(2, 230, 16)
    torch.testing.assert_close(model.within(x, x), within(x, x), rtol=0, atol=1e-6)


def points(*counts: int, images: int = 1) -> list[Tensor]:
    draws = torch.Generator().manual_seed(sum(counts))
    return [torch.randn(images, count, 16, generator=draws) for count in counts]


@torch.no_grad()
def match(model: Pair, first: Tensor, second: Tensor) -> list[Tensor]:
    return model({"first": {"points": first}, "second": {"points": second}})["points"]


@pytest.mark.parametrize("counts", [(0, 0), (0, 70), (70, 0), (1, 1), (1, 70), (70, 1)])
def test_nothing_or_one_to_match(counts) -> None:
    model = accelerated(keys=MEASURED)
    found = match(model, *points(*counts))
    with dgt.exact_attention(model):
        expected = match(model, *points(*counts))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)
    assert [part.shape[1] for part in found] == list(counts)


@pytest.mark.parametrize("counts", [(3, 5), (5, 70), (70, 5), (13, 130), (200, 90)])
def test_other_numbers_in_both_directions(counts) -> None:
    """The share of the keys stays; with all of them it is exact."""
    for keys, is_exact in ((MEASURED, True), (12, False)):
        model = accelerated(keys=keys)
        found = match(model, *points(*counts))
        with dgt.exact_attention(model):
            expected = match(model, *points(*counts))
        for one, other in zip(found, expected, strict=True):
            assert one.isfinite().all()
            if is_exact:
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        if min(counts) > MEASURED:
            assert is_exact or not torch.allclose(found[0], expected[0], rtol=0, atol=1e-4)


@torch.no_grad()
def test_equal_numbers_make_no_self_attention() -> None:
    """The same as with a key more, which is hidden: a mask of keys says nothing of queries."""
    across = accelerated().across
    x, context = points(70, 71)
    real = torch.arange(71)[None] < 60
    longer = across(x, context, real)
    equal = across(x, context[:, :70], real[:, :70])
    torch.testing.assert_close(equal, longer, rtol=0, atol=1e-6)


def test_fewer_than_are_grouped_stay_exact() -> None:
    model = accelerated(least_tokens=32)
    found = match(model, *points(31, 200))
    with dgt.exact_attention(model):
        expected = match(model, *points(31, 200))
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


@pytest.mark.parametrize("side", [0, 1])
def test_one_broken_pair_of_several(side) -> None:
    """It gets what the matcher gives it, the others what they had."""
    model = accelerated(keys=MEASURED)
    given = points(70, 90, images=3)
    whole = match(model, *given)
    given[side][1, 4, 2] = torch.nan
    found = match(model, *given)
    with dgt.exact_attention(model):
        expected = match(model, *given)
    for one, before, other in zip(found, whole, expected, strict=True):
        torch.testing.assert_close(one[[0, 2]], before[[0, 2]], rtol=0, atol=1e-5)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)
        assert one[1].isnan().any()
