"""`torch.onnx.export` on our models, as timm, Lightning, and Optimum call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import dgt

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


class Selects(nn.Module):
    """DG-Attention between tokens, some of which are padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("centroids", F.normalize(torch.randn(2, 5, 8), dim=-1))
        self.options = options

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        return dgt.dynamic_group_attention(
            tokens,
            tokens,
            tokens,
            self.centroids,
            top_k=6,
            query_mask=real,
            key_mask=real,
            **self.options,
        ).output


def run_file(model: nn.Module, inputs: tuple[Tensor, ...], path: Path, **options: Any) -> Any:
    """Export, and return a function that runs the file."""
    torch.onnx.export(model, inputs, str(path), dynamo=True, verbose=False, **options)
    session = onnxruntime.InferenceSession(path)
    names = [node.name for node in session.get_inputs()]

    def run(*tensors: Tensor) -> Tensor:
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


@pytest.mark.parametrize("residual_keys", [0, 1])
def test_a_model_of_any_size(residual_keys: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    two_stages = {"dims": (16, 32), "num_heads": (1, 2), "depths": (1, 1)}
    model = timm.create_model(
        "dgt_nano", num_classes=5, residual_keys=residual_keys, **two_stages
    ).eval()
    free = {0: Dim("batch", min=1), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    images = torch.randn(2, 3, 96, 160)
    run = run_file(model, (images,), tmp_path / "model.onnx", dynamic_shapes=(free,))
    for size in ((2, 3, 96, 160), (1, 3, 64, 64), (3, 3, 97, 65)):
        images = torch.randn(size)
        torch.testing.assert_close(run(images), model(images).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual_keys", [0, 1])
def test_padding_and_an_image_without_tokens(residual_keys: int, tmp_path: Path) -> None:
    model = Selects(residual_keys=residual_keys).eval()
    tokens = torch.randn(3, 2, 20, 8)
    real = torch.rand(3, 20) < 0.6
    real[1] = False
    run = run_file(model, (tokens, real), tmp_path / "attention.onnx")
    torch.testing.assert_close(run(tokens, real), model(tokens, real), rtol=1e-5, atol=1e-5)
    assert not run(tokens, real)[1].any()


def test_several_residual_keys_say_which_file_can_hold_them(tmp_path: Path) -> None:
    model = Selects(residual_keys=2).eval()
    inputs = (torch.randn(1, 2, 20, 8), torch.ones(1, 20, dtype=torch.bool))
    with pytest.raises(Exception, match="dgt export RUN"):
        run_file(model, inputs, tmp_path / "attention.onnx")


def test_an_accelerated_model_says_which_file_can_hold_it(tmp_path: Path) -> None:
    class Clusters(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return dgt.clustered_attention(tokens, tokens, tokens, num_groups=3, top_k=4)

    tokens = torch.randn(1, 2, 30, 8)
    with torch.no_grad():
        exported = torch.export.export(Clusters(), (tokens,)).module()
        torch.testing.assert_close(exported(tokens), Clusters()(tokens))
    with pytest.raises(Exception, match="dgt export RUN"):
        run_file(Clusters(), (tokens,), tmp_path / "clusters.onnx")
