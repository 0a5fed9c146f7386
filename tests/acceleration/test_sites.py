"""The call sites of models: what is grouped, what stays and why, and where prefix tokens are."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import dgt
from dgt.acceleration import inspect_model, intercept
from dgt.acceleration.intercept import installed_processors

from .small_models import Heads, Reader, difference


@pytest.mark.usefixtures("slow_attention")
def test_what_cannot_be_grouped_stays_and_says_why() -> None:
    torch.manual_seed(0)
    model = Reader()
    report = dgt.accelerate(model, torch.randn(4, 8, 16, 16), 0.9)
    assert {layer.title: layer.reason for layer in report.layers} == {
        "kinds.0": "",
        "kinds.1": "a pairwise mask or bias",
        "kinds.2": "causal",
        "kinds.3": "",
        "kinds.4": "",
        "kinds.5": "few tokens",
        "kinds.6": "",
        "shared": "",
    }
    grouped = set(installed_processors(model))
    assert grouped == {"kinds.0", "kinds.3", "kinds.4", "kinds.6", "shared"}
    assert all(module.training for module in model.modules())
    assert "kinds.0" in str(report)
    assert "a pairwise mask or bias" in str(report)


@pytest.mark.usefixtures("slow_attention")
def test_grouped_key_heads_of_a_model_that_is_one_attention() -> None:
    model, x = Heads(), torch.randn(2, 256, 8)
    report = dgt.accelerate(model, x, 0.9)
    assert [layer.setting.choice for layer in report.layers] == ["groups"]
    assert list(installed_processors(model)) == [""]
    grouped = model(x)
    with dgt.exact_attention(model):
        assert 0 < difference(grouped, model(x)) < 0.9


class Outer(Heads):
    """An attention module that contains another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = Heads(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.down(self.inner(x)))


@pytest.mark.usefixtures("slow_attention")
def test_groups_do_not_answer_for_attention_inside() -> None:
    report = dgt.accelerate(Outer(), torch.randn(2, 256, 8), 0.9)
    assert {layer.name: layer.reason for layer in report.layers} == {
        "inner": "",
        "": "contains other attention",
    }


class Parts(nn.Module):
    """torch's own module, in all the ways of calling it that hide its attention."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 32))
        kinds = "plain", "bare", "apart", "mask", "weights", "probe"
        options = {"bare": {"bias": False}, "apart": {"kdim": 16, "vdim": 16}}
        self.parts = nn.ModuleDict(
            {
                kind: nn.MultiheadAttention(32, 2, batch_first=batch_first, **options.get(kind, {}))
                for kind in kinds
            }
        )
        for part in self.parts.values():
            nn.init.normal_(
                part.in_proj_weight if part.in_proj_weight is not None else part.q_proj_weight,
                0,
                0.2,
            )
        self.encoder = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), images], dim=1)
        batch_first = self.parts["plain"].batch_first
        x = x if batch_first else x.transpose(0, 1)
        for kind in ("plain", "bare"):
            x = x + self.parts[kind](x, x, x, need_weights=False)[0]
        x = x + self.parts["apart"](x, x[..., :16], x[..., 16:], need_weights=False)[0]
        mask = torch.ones(images.shape[1] + 1, images.shape[1] + 1, dtype=torch.bool).triu(1)
        x = x + self.parts["mask"](x, x, x, attn_mask=mask, need_weights=False)[0]
        x = x + self.parts["weights"](x, x, x)[0]
        x = x if batch_first else x.transpose(0, 1)
        probe = x[:, :1] if batch_first else x[:, :1].transpose(0, 1)
        rest = x if batch_first else x.transpose(0, 1)
        probe = self.parts["probe"](probe, rest, rest, need_weights=False)[0]
        return self.encoder(x) + (probe if batch_first else probe.transpose(0, 1))


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_multi_head_attention_of_torch(batch_first) -> None:
    torch.manual_seed(0)
    model, images = Parts(batch_first).eval(), torch.randn(2, 256, 32)
    runs = []
    with torch.no_grad():
        before = model(images)
        # As in the timing.
        with intercept.trace_sdpa(
            model, lambda _, number, call: runs.append(call.run()) or runs[-1]
        ):
            torch.testing.assert_close(model(images), before)
        assert [isinstance(output, tuple) for output in runs] == [
            False,
            False,
            True,
            True,
            True,
            False,
            False,
        ]
        report = dgt.accelerate(model, images, 0.9)
        assert {layer.name: layer.reason for layer in report.layers} == {
            "parts.plain": "",
            "parts.bare": "",
            "parts.apart": "extra keys, or separate projections",
            "parts.mask": "a pairwise mask or bias",
            "parts.weights": "called with need_weights",
            "parts.probe": "few tokens",
            "encoder.self_attn": "inside nn.TransformerEncoderLayer, which bypasses it in eval mode",
        }
        assert {
            (layer.heads, layer.tokens, layer.channels, layer.num_prefix_tokens)
            for layer in report.layers[:5]
        } == {(2, 257, 16, 1)}
        after = model(images)
        assert difference(after[:1], before[:1]) == pytest.approx(report.predicted_error, rel=1e-3)
        assert report.predicted_error > 0
        with dgt.exact_attention(model):
            assert torch.equal(model(images), before)
        for answer in installed_processors(model).values():  # with all keys groups are exact
            answer.site.measurement.setting = dataclasses.replace(answer.site.setting, keys=257)
        torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-4)


def test_a_vit_of_torchvision() -> None:
    model = torchvision.models.VisionTransformer(64, 4, 2, 2, 32, 32, num_classes=3)
    rows = inspect_model(model, torch.randn(1, 3, 64, 64))
    assert [(row.reason, row.tokens, row.num_prefix_tokens, row.note) for row in rows] == [
        ("", 257, 1, "")
    ] * 2
    assert model.training


def test_what_would_be_found_needs_no_values() -> None:
    with torch.device("meta"):
        model, images = timm.create_model("vit_small_patch16_dinov3"), torch.empty(1, 3, 256, 256)
    rows = inspect_model(model, images)
    assert [(row.reason, row.tokens, row.num_prefix_tokens) for row in rows] == [("", 261, 5)] * 12
    assert {row.reason for row in inspect_model(model, images, least_tokens=300)} == {"few tokens"}
    with pytest.raises(TypeError, match=r"inputs must not be empty, got a \(1, 3, 256, 256\)"):
        dgt.accelerate(model, images)


class Registers(nn.Module):
    """Tokens under the names in other implementations of DINO, and attributes that are no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.storage_tokens, self.head = nn.Parameter(torch.zeros(1, 4, 8)), nn.Module()
        self.patch_embed, self.blocks = nn.Module(), Heads()
        self.patch_embed.cls_token = nn.Parameter(torch.zeros(8))
        self.head.cls_token = nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.blocks(x)


def test_class_and_register_tokens_are_found() -> None:
    model, x = Registers(), torch.randn(1, 256, 8)
    assert [(row.num_prefix_tokens, row.note) for row in inspect_model(model, x)] == [(5, "")]
    assert [row.num_prefix_tokens for row in inspect_model(model, x, num_prefix_tokens=2)] == [2]
    (row,) = inspect_model(model.blocks, x)
    assert row.num_prefix_tokens == 0
    assert "no class or register tokens were detected" in row.note


class Pair(nn.Module):
    """A matcher: one attention called for each of two point sets, and one across, in nested mappings."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.across = Points(), Points()

    def forward(self, data: dict[str, dict[str, Tensor]]) -> dict[str, list[Tensor]]:
        first, second = (data[side]["points"] for side in ("first", "second"))
        first, second = (
            x + self.within(x, x, data[s].get("real"))
            for x, s in ((first, "first"), (second, "second"))
        )
        return {"points": [first + self.across(first, second), second + self.across(second, first)]}


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor, other: Tensor, real: Tensor | None = None) -> Tensor:
        query = self.query(x).unflatten(-1, (2, 8)).transpose(1, 2)
        key, value = self.rest(other).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = None if real is None else real[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)


def pair(seed: int) -> tuple[dict[str, dict[str, Tensor]]]:
    draws = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(1, count, 16, generator=draws) for count in (96, 120))
    real = torch.arange(96)[None] < 80
    return (
        {
            "first": {"points": first, "real": real},
            "second": {"points": second, "real": torch.ones(1, 120, dtype=torch.bool)},
        },
    )


@pytest.mark.usefixtures("slow_attention")
def test_modules_called_more_than_once_across_two_sets(tmp_path) -> None:
    """A setting suits both sizes and directions; padding is respected; a plan reproduces it."""
    torch.manual_seed(0)
    model, items = Pair(), [pair(seed) for seed in range(4)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = dgt.accelerate(model, items, 0.5)
    sizes = {(row.title, row.calls, row.tokens, row.key_tokens) for row in report.layers}
    assert sizes == {("within", 2, 96, 96), ("across", 2, 96, 120)}
    assert {row.setting.choice for row in report.layers} == {"groups"}
    report.save(tmp_path / "plan.json")
    again = Pair()
    again.load_state_dict(weights)
    dgt.apply_plan(again, tmp_path / "plan.json")
    with torch.no_grad():
        for _ in range(2):
            for new, old in zip(
                again(*items[0])["points"], model(*items[0])["points"], strict=True
            ):
                assert torch.equal(new, old)
        checked = {name: counts.checked for name, counts in dgt.guard_counts(again).items()}
        assert checked == {"within": 4, "across": 4}
        points = torch.randn(1, 100, 16)
        again({"first": {"points": points}, "second": {"points": points.flip(1)}})
        again({"first": {"points": points[:, :40]}, "second": {"points": points}})  # too few of one
        checked = {name: counts.checked for name, counts in dgt.guard_counts(again).items()}
        assert checked == {"within": 7, "across": 6}
    items[1][0]["second"].pop("real")
    expected = r"inputs must all have the structure of the first one, .* but number 1 is"
    with pytest.raises(ValueError, match=expected) as caught:
        dgt.accelerate(Pair(), items, 0.5)
    assert "tensor([" not in str(caught.value)


class Packed(nn.Module):
    """The vision tower of a language model: images of different sizes in one sequence, one attention call each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Points()
        self.inner = Sequences(self.attention)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        return tokens + self.inner(tokens, lengths)


class Sequences(nn.Module):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self.query, self.rest = points.query, points.rest

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        return torch.cat(
            [Points.forward(self, part, part) for part in x.split(lengths, dim=1)], dim=1
        )


@pytest.mark.usefixtures("slow_attention")
def test_packed_sequences() -> None:
    """All calls of a module share a row, whatever their lengths; short sequences stay dense."""
    torch.manual_seed(0)
    model = Packed()
    packs = [[60, 70], [64, 80, 90], [100], [60, 10, 60, 60, 60, 60]]
    items = [
        {"tokens": torch.randn(1, sum(lengths), 16), "lengths": tuple(lengths)} for lengths in packs
    ]
    report = dgt.accelerate(model, items, 0.5)
    (row,) = report.layers
    assert (row.name, row.calls, row.setting.choice) == ("inner", 6, "groups")
    with torch.no_grad():
        after = model(**items[3])
        with dgt.exact_attention(model):
            before = model(**items[3])
    changed = (after - before).abs().amax((0, 2)) > 0
    assert changed[:60].any()
    assert not changed[60:70].any()


@pytest.mark.usefixtures("slow_attention")
@pytest.mark.parametrize("prefix", [[5, 0, 100], dgt.FrameTokens(2, 64)])
def test_prefix_tokens_at_positions(prefix, tmp_path) -> None:
    """They attend to everything and everything attends to them: a class token is exact in any position."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(4, 256, 8)
    positions = [0, 5, 100] if isinstance(prefix, list) else [0, 1, 64, 65, 128, 129, 192, 193]
    with torch.no_grad():
        before = model(x)
        report = dgt.accelerate(model, x, 0.9, num_prefix_tokens=prefix)
        after = model(x)
        assert report.layers[0].num_prefix_tokens == len(positions)
        torch.testing.assert_close(after[:, positions], before[:, positions], rtol=1e-4, atol=1e-5)
        others = [position for position in range(256) if position not in positions]
        assert not torch.allclose(after[:, others], before[:, others], rtol=1e-3, atol=1e-3)
        report.save(tmp_path / "plan")
        other = Heads()
        other.load_state_dict(model.state_dict())
        dgt.apply_plan(other, tmp_path / "plan")
        assert torch.equal(other(x), after)


@pytest.mark.usefixtures("slow_attention")
def test_inputs_by_name() -> None:
    model, x = Registers(), torch.randn(4, 256, 8)
    report = dgt.accelerate(model, {"x": x, "scale": 2.0}, 0.9)
    other = Registers()
    other.load_state_dict(model.state_dict())
    assert report.predicted_error == pytest.approx(
        dgt.accelerate(other, x, 0.9).predicted_error, rel=1e-4
    )
    assert report.layers[0].setting.choice == "groups"
