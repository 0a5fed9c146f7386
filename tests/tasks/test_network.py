"""Any timm model by name, at any image size of a recipe."""

from __future__ import annotations

import pytest
import torch

from dgt.tasks.network import ModelSettings, build_classifier, model_arguments


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "test_vit", "test_resnet"])
def test_peers_run_at_the_recipes_size(name: str) -> None:
    network = build_classifier(ModelSettings(name), 7, 96).eval()
    assert network(torch.zeros(1, 3, 96, 96)).shape == (1, 7)


def test_a_size_that_the_recipe_gives_itself_stays() -> None:
    assert model_arguments(ModelSettings("test_vit", args={"img_size": 160}), 96)["img_size"] == 160


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (ModelSettings("resnet5O"), "a registered .*, got 'resnet5O'; did you mean resnet50"),
        (ModelSettings("resnet50", args={"stem_stride": 1}), r"built with .*: 1\}: .*stem_stride"),
        (ModelSettings("test_resnet", args={"act_layer": "rel"}), r"built with .*'rel'\}: 'rel'; "),
        (ModelSettings("test_convnext", args={"depths": [1]}), r"built with .*\[1\]\}: list index"),
        (ModelSettings("test_vit", args={"num_heads": 0}), r"built with .*: integer .* by zero"),
    ],
)
def test_what_cannot_be_built_is_reported(model: ModelSettings, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^model(\.name)? .*{sentence}"):
        build_classifier(model, 10, 64)


def test_drop_path_rate_has_a_range() -> None:
    with pytest.raises(ValueError, match=r"model\.drop_path_rate must be .*\[0, 1\), got 1"):
        ModelSettings(drop_path_rate=1)
