"""UperNet: the paper's parameters and FLOPs, any backbone and size, and padding that does not leak."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

import dgt
from dgt.models.heads.backbone import build_backbone
from dgt_command.info import model_rows


def small(backbone: str = "dgt_nano", **arguments: object) -> dgt.models.UperNet:
    """A narrow UperNet with five classes, in evaluation mode."""
    return dgt.build_upernet(backbone, 5, channels=16, auxiliary_channels=8, **arguments).eval()


def padded(
    sizes: list[tuple[int, int]], noise: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Images of several sizes in one batch, their mask, and the single images; padding is noise, to reveal leaks."""
    images = [torch.randn(3, *size) for size in sizes]
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    batch = noise * torch.randn(len(sizes), 3, height, width)
    mask = torch.zeros(len(sizes), height, width, dtype=torch.bool)
    for index, image in enumerate(images):
        batch[index, :, : image.shape[1], : image.shape[2]] = image
        mask[index, : image.shape[1], : image.shape[2]] = True
    return batch, mask, images


@pytest.mark.parametrize(
    ("name", "params", "flops"),
    [("dgt_tiny", 52.5, 954), ("dgt_small", 81.9, 1074), ("dgt_base", 122.2, 1234)],
)
def test_parameters_and_flops_are_the_papers(name: str, params: float, flops: float) -> None:
    row = model_rows(name, task="segment")[0]
    assert round(row["params"] / 1e6, 1) == params
    assert row["flops"] / 1e9 == pytest.approx(flops, rel=0.01)
    assert row["image_size"] == [512, 2048]
    assert (row["paper_params"], row["paper_flops"]) == (round(params * 1e6), flops * 10**9)
    assert [stage["name"] for stage in row["stages"]] == [
        "backbone",
        "decode_head",
        "auxiliary_head",
    ]


def test_a_dgt_chooses_the_papers_number_of_keys_unless_given() -> None:
    def keys(model: dgt.models.UperNet) -> set[int]:
        return {module.top_k for module in model.modules() if isinstance(module, dgt.DGAttention)}

    assert keys(small()) == {512}
    assert keys(small(top_k=7)) == {7}
    assert keys(small("swin_nano")) == set()  # our architecture, without groups
    finished = build_backbone("dgt_nano", top_k=9)
    assert keys(dgt.build_upernet(finished, 5, channels=16)) == {9}


@pytest.mark.parametrize("backbone", ["dgt_nano", "test_resnet", "resnet10t"])
@pytest.mark.parametrize("size", [(32, 32), (47, 95)])
def test_logits_have_the_images_size(backbone: str, size: tuple[int, int]) -> None:
    with torch.no_grad():
        assert small(backbone)(torch.randn(1, 3, *size)).shape == (1, 5, *size)


def settle(model: nn.Module) -> None:
    """Give every BatchNorm its own statistics and offset: with the initial ones, zeros would stay zeros."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.normal_(module.bias, std=0.3)


@pytest.mark.parametrize("sizes", [[(41, 90), (97, 33), (41, 90)], [(32, 120)]])
@pytest.mark.parametrize("backbone", ["dgt_nano", "test_resnet"])
def test_a_padded_image_gives_the_label_map_it_gives_alone(
    backbone: str, sizes: list[tuple[int, int]]
) -> None:
    model = small(backbone, **({"top_k": 20} if backbone == "dgt_nano" else {}))
    settle(model)
    batch, mask, images = padded(sizes)
    with torch.no_grad():
        together = model(batch, mask)
        for index, image in enumerate(images):
            alone = model(image[None])[0]
            cut = together[index, :, : image.shape[1], : image.shape[2]]
            assert torch.allclose(cut, alone, atol=1e-4 * float(alone.abs().max()))
            assert (cut.argmax(dim=0) == alone.argmax(dim=0)).float().mean() >= 0.999
            assert not together[index][:, ~mask[index]].any()


def test_what_is_padded_does_not_matter_in_training_either() -> None:
    model = small(top_k=20).train()
    batch, mask, _ = padded([(96, 96), (64, 80)])
    other = torch.where(mask[:, None], batch, 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = model.forward_both(batch, mask)
    model.load_state_dict(before)
    second = model.forward_both(other, mask)
    assert torch.equal(first.main, second.main)
    assert first.auxiliary.shape == first.main.shape == (2, 5, 96, 96)


def test_every_parameter_learns() -> None:
    model = small(top_k=20).train()
    logits = model.forward_both(torch.randn(2, 3, 64, 64))
    (logits.main.square().mean() + logits.auxiliary.square().mean()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_compiling_reaches_the_way_that_training_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    asked: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, *_, **__: asked.append(self))
    model.compile()
    assert asked == [model.backbone, model.decode_head, model.auxiliary_head]


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("num_classes", 0, "lie in 1 to 255, got 0"),
        ("num_classes", 256, "lie in 1 to 255, got 256"),
        ("auxiliary_channels", "8", "be an integer of at least 1, got '8'"),
        ("backbone", timm.create_model("test_resnet"), "be the name of a timm model"),
    ],
)
def test_bad_arguments(argument: str, value: object, expected: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{argument} must {expected}"):
        dgt.build_upernet(**{"backbone": "test_resnet", "num_classes": 3, argument: value})


def test_bad_masks() -> None:
    model, images = small(top_k=8), torch.randn(2, 3, 64, 64)
    mask = torch.ones(2, 64, 64, dtype=torch.bool)
    with pytest.raises((TypeError, ValueError), match="mask must"):
        model(images, mask[:, :32])
    hole, empty = mask.clone(), mask.clone()
    hole[0, 10, 10], empty[1] = False, False
    for wrong in (hole, empty):
        with pytest.raises(ValueError, match="mask must be a rectangle of real pixels in the"):
            model(images, wrong)


def test_info_refuses_other_tasks() -> None:
    with pytest.raises(ValueError, match="task must be one of classify, segment"):
        model_rows(task="fly")
