"""Files for images of one size: nothing is decided at run time, and results are equal in every runtime."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgt.inference.export as files
from dgt.inference import Source, encode_onnx, open_onnx, open_openvino
from dgt.inference.export import export
from dgt.runs import load_run
from dgt.utils.errors import UserError
from dgt_command import main

onnx = pytest.importorskip("onnx", reason="onnx, onnxscript and onnxruntime are not installed")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="onnx, onnxscript and onnxruntime are not installed"
)

DECIDES_LATE = {"If", "Loop", "Scan", "Shape", "NonZero", "Unique", "Compress"}
needs_openvino = pytest.mark.skipif(
    not importlib.util.find_spec("openvino"), reason="openvino is not installed"
)
RUNTIMES = [open_onnx, pytest.param(open_openvino, marks=needs_openvino)]


def is_static(content: bytes) -> bool:
    """Whether every tensor of a valid file has known sizes and no operator makes decisions at run time."""
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    known = {
        value.name: value.type.tensor_type
        for value in (*graph.value_info, *graph.output, *graph.input)
    }
    sizes = [side.HasField("dim_value") for node in graph.node for out in node.output if out in known
             for side in known[out].shape.dim]  # fmt: skip
    unknown = [out for node in graph.node for out in node.output if out and out not in known]
    return all(sizes) and not unknown and not DECIDES_LATE & {node.op_type for node in graph.node}


@functools.cache
def encoded(steps: nn.Module, size: tuple[int, int]) -> bytes:
    return encode_onnx(Source(steps, ("groups", "keys", "output"), fixed=(2, *size)))


# 4 tokens are fewer than k; 30 = 2 (k + G) attend densely under a mask; 221 use tiles, with keys
# selected by runs.
@pytest.mark.parametrize("size", [(2, 2), (5, 6), (13, 17)])
@pytest.mark.parametrize("start", RUNTIMES)
def test_steps_are_equal_to_eager(steps, same_as_eager, start, size) -> None:
    content = encoded(steps, size)
    assert is_static(content)
    run = start(content)
    torch.manual_seed(1)
    # Large and empty groups.
    near = torch.randn(2, 3, 1, 1).expand(2, 3, *size) + 0.01 * torch.randn(2, 3, *size)
    for images in (torch.randn(2, 3, *size), near.contiguous()):
        same_as_eager(run, images)


@pytest.mark.parametrize(("threads", "expected"), [(3, 3), (None, 0)])  # 0: onnxruntime's choice
def test_onnxruntime_is_asked_for_the_threads(
    steps, monkeypatch: pytest.MonkeyPatch, threads: int | None, expected: int
) -> None:
    opened = []
    start = onnxruntime.InferenceSession

    def keep(*arguments, **options):
        opened.append(start(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", keep)
    open_onnx(encoded(steps, (5, 6)), threads)
    (session,) = opened
    assert session.get_session_options().intra_op_num_threads == expected


@pytest.mark.parametrize("start", RUNTIMES)
def test_ties(steps, same_as_eager, start) -> None:
    """Ties between groups go to the lowest; among keys of equal score onnxruntime takes the lowest, OpenVINO any."""
    run = start(encoded(steps, (5, 6)))
    images = torch.randint(-2, 3, (2, 3, 5, 6), generator=torch.Generator().manual_seed(0)).float()
    if start is open_onnx:
        same_as_eager(run, images)
    with torch.no_grad():
        groups, keys, _ = steps(images)
    found_groups, found_keys, _ = run(images)
    assert torch.equal(found_groups, groups)
    tokens = images.flatten(2)
    scores = steps.centroids @ torch.stack([tokens.flip(1), tokens], 1)
    for chosen in (found_keys, keys):
        best = scores.topk(steps.top_k).values.flip(-1)
        torch.testing.assert_close(scores.gather(-1, chosen).sort(-1).values, best)


@pytest.fixture(scope="module")
def fixed_file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fixed") / "model.onnx"
    assert main(["export", str(run), str(path), "--size", "96", "160", "--batch", "2"]) == 0
    return path.read_bytes()


@pytest.mark.parametrize("start", RUNTIMES)
def test_logits_are_those_of_the_checkpoint(run: Path, fixed_file: bytes, start) -> None:
    assert is_static(fixed_file)
    images = torch.randn(2, 3, 96, 160)
    with torch.no_grad():
        expected = load_run(run).network(images)
    (found,) = start(fixed_file)(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(found.argmax(1), expected.argmax(1))
    with pytest.raises(
        UserError, match=r"exported for images of 2 x 3 x 96 x 160, got 2 x 3 x 96 x 128: export it"
    ):
        start(fixed_file)(images[..., :128])


class Rolled(nn.Module):
    """Tokens whose position matters: they must stay in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.LayerNorm(8)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.conv(images).permute(0, 2, 3, 1))
        return F.gelu(self.conv.weight.sum() * tokens.roll(1, 1)).permute(0, 3, 1, 2)


class ByColumn(nn.Module):
    """Adds what is of the column of a token, or normalizes all tokens of a row together."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.conv, self.columns = nn.Conv2d(3, 8, 1), nn.Parameter(torch.randn(5, 8))
        self.norm = nn.LayerNorm((5, 8)) if together else nn.LayerNorm(8, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.conv(images).permute(0, 2, 3, 1)) + self.columns
        return tokens.permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "build",
    [
        Rolled,
        functools.partial(ByColumn, together=False),
        functools.partial(ByColumn, together=True),
    ],
)
def test_tokens_that_are_used_as_images_stay_images(build) -> None:
    module, images = build().eval(), torch.randn(1, 3, 6, 5)
    with torch.no_grad():
        expected = module(images)
    (found,) = open_onnx(encode_onnx(Source(module, fixed=(1, 6, 5))))(images)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_sizes_that_cannot_be(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--batch needs --size"):
        export(run, tmp_path / "model.onnx", batch=2)
    with pytest.raises(UserError, match="a folder for timm works with any"):
        export(run, tmp_path / "model", size=(64, 64))
    monkeypatch.setattr(files, "source_of_run", lambda *_: Source(nn.Identity(), size=64))
    with pytest.raises(UserError, match=r"takes only images of 64 x 64 pixels, got 96 x 64"):
        export(run, tmp_path / "model.onnx", size=(96, 64))
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "openvino" else name
    )
    with pytest.raises(
        UserError, match=r"needs openvino, which is not installed: pip install '.*\[openvino\]'"
    ):
        open_openvino(b"")
