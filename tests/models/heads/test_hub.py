"""Segmenters and detectors as folders: rebuilt with equal outputs, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgt
from dgt.models import PaddedMaskRCNN, UperNet
from dgt.models.heads.backbone import build_backbone
from dgt.weights import find_weights

NARROW: dict[str, Any] = {"fpn_channels": 16, "box_channels": 16, "mask_channels": (16,)}


def segmenter(**arguments: Any) -> UperNet:
    """A narrow UperNet with five classes."""
    return dgt.build_upernet("dgt_nano", 5, channels=16, auxiliary_channels=8, **arguments)


def detector() -> PaddedMaskRCNN:
    """A narrow Mask R-CNN with three classes."""
    return dgt.build_mask_rcnn(
        "dgt_nano", 4, image_size=64, options={"box_score_thresh": 0.0}, **NARROW
    )


def answers(network: Any) -> list[Tensor]:
    """What a network makes of an image."""
    image = torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        if isinstance(network, UperNet):
            return [network.eval()(image[None])]
        (found,) = network.eval()([image])
        return list(found.values())


@pytest.mark.parametrize("build", [segmenter, detector])
def test_a_saved_network_is_rebuilt_with_equal_answers(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    network = build()
    dgt.set_attention(network, top_k=3, residual_keys=1)  # not what it was built with
    network.save_pretrained(tmp_path)
    again = type(network).from_pretrained(tmp_path)
    assert not again.training
    torch.testing.assert_close(answers(again), answers(network), rtol=0, atol=0)
    again.save_pretrained(tmp_path / "again")
    config = (tmp_path / "config.json").read_text()
    assert (tmp_path / "again" / "config.json").read_text() == config


def test_pretrained_weights_are_not_fetched_again(tmp_path: Path) -> None:
    segmenter(pretrained=False).save_pretrained(tmp_path)
    assert "pretrained" not in json.loads((tmp_path / "config.json").read_text())


def test_shipped_weights_open_as_a_network() -> None:
    folder = find_weights("dgt_nano.camvid")
    image = torch.randn(1, 3, 64, 96)
    with torch.inference_mode():
        expected = dgt.runs.load_run(folder).network(image)
        assert torch.equal(UperNet.from_pretrained(folder)(image), expected)


def test_what_cannot_be_rebuilt_is_not_saved(tmp_path: Path) -> None:
    network = dgt.build_upernet(build_backbone("dgt_nano", top_k=8), 5, channels=16)
    with pytest.raises(ValueError, match="backbone must be a JSON value"):
        network.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    detector().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must hold a UperNet.*got 'mask_rcnn'"):
        UperNet.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got None"):
        UperNet.from_pretrained(find_weights("dgt_nano.scenes"))
    config = json.loads((tmp_path / "config.json").read_text())
    changes = {
        "weights that do not fit": {"num_classes": 9},
        "6 values each of .*got 1 of 'top_k'": {"attention": {"top_k": [9]}},
    }
    for message, change in changes.items():
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            PaddedMaskRCNN.from_pretrained(tmp_path)
