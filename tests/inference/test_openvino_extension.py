"""DG-Attention as one operator of OpenVINO: equal to PyTorch, in files, and a clear error if it is unavailable."""

from __future__ import annotations

import functools
import io
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from dgt.inference import (
    Source,
    add_openvino_extension,
    encode_onnx,
    open_onnx,
    open_openvino,
    openvino_extension,
    openvino_extension_path,
)
from dgt.inference.export import export
from dgt.layers import DGAttention
from dgt.ops import attend, clustered_attention, dynamic_group_attention
from dgt.runs import load_run
from dgt.utils.errors import UserError
from dgt_command import main

onnx = pytest.importorskip("onnx", reason="onnx, onnxscript and onnxruntime are not installed")
pytest.importorskip("onnxscript", reason="onnx, onnxscript and onnxruntime are not installed")
openvino = pytest.importorskip("openvino", reason="openvino is not installed")

TOLERANCE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module", autouse=True)
def extension(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, compiled once into a cache folder of these tests; skips the test if that fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            path = openvino_extension_path()
        except UserError as error:
            pytest.skip(str(error))
        yield path


class OneLayer(nn.Module):
    """An image's pixels as tokens, through one layer of DG-Attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen = nn.Conv2d(3, 12, 1)
        self.attention = DGAttention(12, num_heads=2, num_groups=4, top_k=5, **options)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.widen(images).permute(0, 2, 3, 1)
        return self.attention(tokens).permute(0, 3, 1, 2)


def operators(content: bytes) -> Counter[str]:
    """The number of nodes of each operator in a file."""
    return Counter(node.op_type for node in onnx.load_from_string(content).graph.node)


STANDARD = {"TopK", "ArgMax", "Softmax", "GatherND", "ScatterElements", "If"}
"""Operators of an attention that is not one."""


@functools.cache
def any_size_file(cosine: bool, residual_keys: int) -> bytes:
    """One layer for images of any size, exported once."""
    layer = OneLayer(cosine=cosine, residual_keys=residual_keys).eval()
    return encode_onnx(Source(layer, extended=True))


@pytest.mark.parametrize(("cosine", "residual_keys"), [(False, 0), (True, 0), (False, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_is_one_operator_and_equal_to_pytorch_at_any_size(
    cosine: bool, residual_keys: int, threads: int
) -> None:
    module = OneLayer(cosine=cosine, residual_keys=residual_keys).eval()
    content = any_size_file(cosine, residual_keys)
    found = operators(content)
    assert found["DGAttention"] == 1
    assert not found.keys() & STANDARD
    run = open_openvino(content, threads, extended=True)
    # 3 tokens are fewer than k.
    for batch, height, width in (
        (1, 7, 9),
        (3, 7, 9),
        (2, 1, 3),
        (1, 40, 30),
    ):
        images = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            torch.testing.assert_close(run(images), [module(images)], **TOLERANCE)


def test_a_layer_in_openvinos_own_precision_differs_by_no_more_than_bfloat16() -> None:
    run = open_openvino(any_size_file(False, 1), extended=True, in_float32=False)
    module = OneLayer(cosine=False, residual_keys=1).eval()
    images = torch.randn(1, 3, 7, 9)
    with torch.no_grad():
        torch.testing.assert_close(run(images), [module(images)], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("residual_keys", "cosine", "size"),
    [
        (1, False, (3, 40, 30)),
        (1, True, (1, 5, 7)),
        (16, False, (1, 5, 7)),
        (16, True, (3, 40, 30)),
    ],
)
def test_residual_keys_at_one_size(
    residual_keys: int, cosine: bool, size: tuple[int, int, int]
) -> None:
    """Also in few heads, whose steps threads share."""
    module = OneLayer(cosine=cosine, residual_keys=residual_keys).eval()
    content = encode_onnx(Source(module, extended=True, fixed=size))
    assert operators(content)["DGAttention"] == 1
    assert not operators(content).keys() & STANDARD
    images = torch.randn(size[0], 3, *size[1:])
    for threads in (1, 2):
        run = open_openvino(content, threads, extended=True)
        with torch.no_grad():
            torch.testing.assert_close(run(images), [module(images)], **TOLERANCE)


class GivenClusters(nn.Module):
    """Attention to residual keys of clusters that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.centroids = nn.Parameter(torch.eye(3)[None])

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(2).transpose(1, 2)[:, None]
        clusters = (tokens[..., 0] > 0).long()
        return dynamic_group_attention(
            tokens, tokens, tokens, self.centroids, 2, residual_keys=2, key_cluster_ids=clusters
        ).output


@pytest.mark.parametrize("extended", [False, True])
def test_clusters_of_keys_that_are_given_are_refused(extended: bool) -> None:
    with pytest.raises(UserError, match=r"residual_keys must be 0 or 1 .*got 2|has no attention"):
        encode_onnx(Source(GivenClusters().eval(), extended=extended, fixed=(1, 4, 4)))


def test_residual_keys_in_bfloat16() -> None:
    convert = openvino.opset13.convert
    module = OneLayer(residual_keys=4).eval()
    content = encode_onnx(Source(module, extended=True, fixed=(2, 9, 8)))
    core = openvino.Core()
    add_openvino_extension(core)
    model = core.read_model(io.BytesIO(content))
    node = next(n for n in model.get_ops() if n.get_type_name() == "DGAttention")
    for user in node.output(0).get_target_inputs():
        user.replace_source_output(convert(node.output(0), "f32").output(0))
    for tokens in node.inputs()[:-1]:
        tokens.replace_source_output(convert(tokens.get_source_output(), "bf16").output(0))
    model.validate_nodes_and_infer_types()
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    images = torch.randn(2, 3, 9, 8)
    found = torch.from_numpy(compiled(images.numpy())[0])
    with torch.no_grad():
        expected = module(images)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_projections_are_read_as_they_are() -> None:
    """Nothing is transposed between the projections and the operator, or after it."""
    node = next(
        n for n in onnx.load_from_string(layer_file()).graph.node if n.op_type == "DGAttention"
    )
    assert len(node.input) == 2
    assert operators(layer_file())["Transpose"] == 2  # pixels to tokens, and back


@functools.cache
def layer_file() -> bytes:
    """One layer for images of 6 x 8 pixels, exported once."""
    return encode_onnx(Source(OneLayer().eval(), extended=True, fixed=(1, 6, 8)))


def test_steps_whose_ids_are_asked_for_keep_them(steps: nn.Module, same_as_eager: Any) -> None:
    content = encode_onnx(Source(steps, ("groups", "keys", "output"), extended=True))
    assert operators(content)["DGAttention"] == 1
    run = open_openvino(content, extended=True)
    same_as_eager(run, torch.randn(2, 3, 9, 8))


class OtherGroups(nn.Module):
    """Attention over given groups and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.one * images.flatten(2).transpose(1, 2)[:, None]
        groups = tokens[..., 0].gt(0).long()
        keys = torch.arange(2)[:, None].expand(len(images), 1, 2, 1)
        return attend(tokens, tokens, tokens, groups, keys)


def test_a_model_without_dg_attention_is_refused() -> None:
    with pytest.raises(UserError, match="a OtherGroups has no attention supported by the OpenVINO"):
        encode_onnx(Source(OtherGroups().eval(), extended=True, fixed=(1, 6, 8)))


def test_the_command_writes_a_file_that_openvino_reads(
    run: Path, tmp_path: Path, extension: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    assert main(["export", str(run), str(path), "--openvino-extension"]) == 0
    assert f"OpenVINO reads it after core.add_extension('{extension}')" in capsys.readouterr().out
    network = load_run(run).network
    layers = sum(isinstance(module, DGAttention) for module in network.modules())
    assert operators(path.read_bytes())["DGAttention"] == layers
    images = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        expected = network(images)
    core = openvino.Core()
    core.add_extension(str(extension))
    compiled = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = torch.from_numpy(compiled(images.numpy())["logits"])
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_openvinos_own_format_keeps_the_operator(tmp_path: Path) -> None:
    core = openvino.Core()
    add_openvino_extension(core)
    (tmp_path / "model.onnx").write_bytes(layer_file())
    openvino.save_model(
        core.read_model(tmp_path / "model.onnx"), tmp_path / "model.xml", compress_to_fp16=False
    )
    compiled = core.compile_model(
        tmp_path / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    module, images = OneLayer().eval(), torch.randn(1, 3, 6, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.from_numpy(compiled(images.numpy())[0]), module(images), **TOLERANCE
        )


def test_other_runtimes_and_openvino_without_it_refuse_the_file() -> None:
    with pytest.raises(RuntimeError, match="DGAttention"):
        open_openvino(layer_file())
    with pytest.raises(Exception, match="DGAttention"):  # an exception of onnxruntime's own
        open_onnx(layer_file())


def test_nan_is_found() -> None:
    run = open_openvino(layer_file(), extended=True)
    with pytest.raises(RuntimeError, match="DGAttention: query must be finite, got NaN"):
        run(torch.full((1, 3, 6, 8), torch.nan))


def test_a_library_that_cannot_be_used_is_reported(
    extension: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = openvino.Core()
    with pytest.raises(
        UserError,
        match=r"OpenVINO extension .*missing\.so does not exist; dgt\.openvino_ext",
    ):
        add_openvino_extension(core, tmp_path / "missing.so")
    _, version, *rest = extension.name.split("-", 2)
    other = tmp_path / f"dgt_openvino-2024.0.1-{'-'.join(rest)}"
    shutil.copy(extension, other)
    with pytest.raises(
        UserError,
        match=rf"is for OpenVINO 2024\.0\.1, but {version} is installed; dgt\.openvino_ext",
    ):
        add_openvino_extension(core, other)
    another = tmp_path / extension.name.replace(openvino_extension._level(), "x86-64-v9")
    shutil.copy(extension, another)
    with pytest.raises(UserError, match="needs a processor with x86-64-v9, which this one lacks"):
        add_openvino_extension(core, another)
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(
        UserError, match=rf"OpenVINO {version} cannot load the extension .*broken\.so"
    ):
        add_openvino_extension(core, broken)


def test_why_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, .*: install g\+\+"):
        openvino_extension_path()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(UserError, match=r"compiler '/nowhere/c\+\+' cannot be run: No such file"):
        openvino_extension_path()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UserError, match=r"false cannot compile the extension .*: exit status 1"):
        openvino_extension_path()
    assert not list(tmp_path.rglob("*.so"))
    monkeypatch.setattr(openvino_extension, "HEADER", "include/nothing.hpp")
    with pytest.raises(UserError, match=r"no C\+\+ headers or libraries .*: install the wheel"):
        openvino_extension_path()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "openvino" else name
    )
    with pytest.raises(UserError, match=r"needs openvino, which is not installed: pip install"):
        openvino_extension_path()


def test_only_onnx_files_take_it(run: Path, tmp_path: Path) -> None:
    for name in ("model.pt2", "model"):
        with pytest.raises(UserError, match=r"--openvino-extension needs a file .* in \.onnx"):
            export(run, tmp_path / name, openvino_extension=True)


class Clustered(nn.Module):
    """A pretrained timm attention in groups found in its tokens."""

    def __init__(self, attention: Any, normed: bool, **settings: Any) -> None:
        super().__init__()
        self.attention = attention
        self.normed = normed
        self.settings = settings

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        qkv = self.attention.qkv(x).reshape(*x.shape[:2], 3, self.attention.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.normed:
            key = key * 0.5  # no longer the unchanged projection
        output = clustered_attention(query, key, value, **self.settings).reshape(query.shape)
        return self.attention.proj(output.transpose(1, 2).reshape(x.shape))


PRETRAINED = {
    "residual": {"num_groups": 8, "top_k": 12, "residual_keys": 4, "num_prefix_tokens": 1},
    "one": {"num_groups": 8, "top_k": 12, "residual_keys": 1, "scale": 0.2},
    "sharp": {"num_groups": 60, "top_k": 300, "residual_keys": 0, "num_prefix_tokens": 1},
}


def make_vit(settings: dict[str, Any]) -> Any:
    """Two blocks: the first reads the projection as it is, the second a key that was changed."""
    torch.manual_seed(0)
    vit: Any = timm.create_model("vit_tiny_patch16_224", img_size=128, depth=2, num_classes=7)
    for block, normed in zip(vit.blocks, (False, True), strict=True):
        block.attn = Clustered(block.attn, normed, **settings)
    return vit.eval()


@pytest.mark.parametrize("settings", PRETRAINED.values(), ids=PRETRAINED)
def test_pretrained_attention_in_groups_is_one_operator(settings: dict[str, Any]) -> None:
    vit = make_vit(settings)
    content = encode_onnx(Source(vit, size=128, extended=True))
    nodes = [node for node in onnx.load_from_string(content).graph.node if node.domain == "dgt"]
    operators = [(node.op_type, len(node.input)) for node in nodes]
    assert operators == [("DGClusteredAttention", 1), ("DGClusteredAttention", 3)]
    run = open_openvino(content, extended=True)
    for batch in (1, 3):
        images = torch.randn(batch, 3, 128, 128)
        with torch.no_grad():
            torch.testing.assert_close(run(images), [vit(images)], **TOLERANCE)


def test_standard_operators_do_not_have_it() -> None:
    with pytest.raises(UserError, match=r"cannot be expressed in standard ONNX operators: export"):
        encode_onnx(Source(make_vit(PRETRAINED["residual"]), fixed=(1, 128, 128)))


class Padded(nn.Module):
    """Clustered attention with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.one * images.flatten(2).transpose(1, 2)[:, None]
        mask = images[:, 0].flatten(1) > 0
        return clustered_attention(
            tokens, tokens, tokens, num_groups=2, top_k=3, query_mask=mask, key_mask=mask
        )


def test_padding_in_pretrained_attention_is_refused() -> None:
    with pytest.raises(UserError, match="clustered attention with a padding mask cannot be"):
        encode_onnx(Source(Padded().eval(), extended=True, fixed=(1, 6, 8)))


def test_a_plan_from_the_command_is_one_operator_a_layer(
    accelerated_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, plan = accelerated_folder(tmp_path)
    file = tmp_path / "vit.onnx"
    options = ["--openvino-extension", "--plan", str(plan), "--size", "64", "64"]
    assert main(["export", str(saved), str(file), *options]) == 0
    assert "OpenVINO takes" in capsys.readouterr().out
    operators = Counter(node.op_type for node in onnx.load(file).graph.node if node.domain == "dgt")
    assert operators == {"DGClusteredAttention": 2}
