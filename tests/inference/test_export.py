"""`dgt export`: files that other programs run at any size, equal to the checkpoint, written atomically."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import dgt
import dgt.inference.export as files
from dgt.inference import Source, encode_onnx, encode_program, open_onnx, open_program
from dgt.inference.export import export, source_of_run
from dgt.layers.baselines.swin import WindowAttention
from dgt.ops import clustered_attention
from dgt.runs import LoadedRun, load_recipe, load_run
from dgt.utils.errors import UserError
from dgt_command import main

onnx = pytest.importorskip("onnx", reason="onnx, onnxscript and onnxruntime are not installed")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="onnx, onnxscript and onnxruntime are not installed"
)

NARROW = {"dims": [16, 32], "num_heads": [1, 2], "depths": [1, 1]}
SIZES = [(1, 33, 33), (3, 97, 65), (1, 224, 320), (3, 128, 128)]


class ClusteredPixels(nn.Module):
    """Pixels that attend to each other in groups, like the tokens of a pretrained model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = (self.scale * images.flatten(2)).transpose(1, 2)[:, None]
        return clustered_attention(
            tokens, tokens * 2, tokens, num_groups=4, top_k=6, residual_keys=3
        )


def test_clustered_attention_is_one_operator_of_a_program() -> None:
    module = ClusteredPixels().eval()
    content = encode_program(Source(module, fixed=(2, 9, 8)))
    program = torch.export.load(io.BytesIO(content))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.dgt.attend_in_clusters.default) == 1
    images = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        assert torch.equal(program.module()(images), module(images))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def logits_file(run: Path, folder: Path) -> Path:
    return export(run, folder / "classes.onnx").path


@pytest.mark.parametrize("size", [*SIZES, (2, 32, 32)])
def test_onnx_gives_the_logits_of_the_checkpoint_at_any_size(
    run: Path, logits_file: Path, size
) -> None:
    batch, height, width = size
    images = torch.randn(batch, 3, height, width)
    with torch.no_grad():
        expected = load_run(run).network(images).numpy()
    found = onnxruntime.InferenceSession(logits_file).run(["logits"], {"images": images.numpy()})[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_the_onnx_file_is_one_valid_self_describing_file(run: Path, logits_file: Path) -> None:
    model = onnx.load(logits_file, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain for entry in model.opset_import} == {""}  # only standard operators
    assert [
        d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim
    ] == ["batch", 3, "height", "width"]
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(facts["classes"]) == load_run(run).class_names
    assert json.loads(facts["mean"]) == pytest.approx([0.485, 0.456, 0.406])
    # No local paths.
    assert str(Path(files.__file__).parents[1]).encode() not in logits_file.read_bytes()
    assert sorted(path.name for path in logits_file.parent.glob("classes*")) == ["classes.onnx"]


def test_feature_maps(run: Path, folder: Path) -> None:
    path = export(run, folder / "maps.onnx", features=True).path
    session = onnxruntime.InferenceSession(path)
    model = timm.create_model(
        f"local-dir:{run}", pretrained=True, features_only=True, out_indices=(0, 1)
    ).eval()
    for batch, height, width in SIZES:
        images = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            expected = model(images)
        found = session.run(["map_0", "map_1"], {"images": images.numpy()})
        for ours, theirs in zip(expected, found, strict=True):
            np.testing.assert_allclose(theirs, ours.numpy(), rtol=0, atol=1e-4)


def test_torch_export_in_a_fresh_process(run: Path, folder: Path) -> None:
    path = export(run, folder / "classes.pt2").path
    images = torch.randn(3, 3, 97, 65)
    torch.save(images, folder / "images.pt")
    code = (
        "import sys, torch, dgt; images = torch.load(sys.argv[2]); "
        "torch.save(torch.export.load(sys.argv[1]).module()(images), sys.argv[3])"
    )
    arguments = [str(path), str(folder / "images.pt"), str(folder / "logits.pt")]
    source = str(Path(files.__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    with torch.no_grad():
        expected = load_run(run).network(images)
    torch.testing.assert_close(torch.load(folder / "logits.pt"), expected)
    assert b"stack_trace" not in path.read_bytes() or str(source).encode() not in path.read_bytes()


def test_a_folder_for_timm(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(folder / "timm")]) == 0
    assert "equal for 18 of 18 images, largest difference 0.0e+00" in capsys.readouterr().out
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        found = timm.create_model(f"local-dir:{folder / 'timm'}", pretrained=True).eval()(images)
        torch.testing.assert_close(found, load_run(run).network(images), rtol=0, atol=0)


def test_a_residual_key_is_exported(write_run: Callable[..., Path], tmp_path: Path) -> None:
    """Also where fewer tokens than keys leave nothing for it: in 97 x 65 pixels."""
    options = {"num_groups": 5, "top_k": 120, "residual_keys": 1, **NARROW}
    found = export(write_run(tmp_path / "run", **options), tmp_path / "model.pt2")
    assert found.verification.equal == found.verification.images


@pytest.mark.parametrize(
    ("residual_keys", "name", "options", "message"),
    [
        (4, "a.onnx", {}, "residual_keys must be 0 or 1 in standard .* got 4: .* with --size"),
        (4, "a.onnx", {"size": (96, 64)}, "residual_keys must be 0 or 1 in standard .* got 4"),
        (4, "a.onnx", {"openvino_extension": True}, "got 4: a file of one size, with --size"),
        (4, "a.pt2", {}, "must have fixed sizes .* with several residual keys"),
    ],
)
def test_residual_keys_that_a_file_cannot_have(
    residual_keys: int,
    name: str,
    options: dict[str, Any],
    message: str,
    write_run: Callable[..., Path],
    tmp_path: Path,
) -> None:
    if "openvino_extension" in options:
        pytest.importorskip("openvino")
    run = write_run(tmp_path / "run", residual_keys=residual_keys, **NARROW)
    with pytest.raises(UserError, match=message):
        export(run, tmp_path / name, **options)
    assert not (tmp_path / name).exists()


def test_windows_keep_the_size_of_the_recipe(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    windows = write_run(tmp_path / "run", "dgt_nano_swin_block", depths=[1, 1, 1, 1])
    assert source_of_run(load_run(windows)).size == 64
    assert export(windows, tmp_path / "windows.pt2").verification.equal == 6


def test_an_unequal_file_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "classes.pt2"
    path.write_bytes(b"the file before")
    sources: list[Source] = []

    def encode(source: Source) -> bytes:
        sources.append(source)
        return b"a new file"

    def open_slightly_wrong(content: bytes) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        return lambda images: [sources[0].module(images) * 1.001]

    monkeypatch.setitem(files.FORMATS, ".pt2", (encode, open_slightly_wrong))
    with pytest.raises(
        RuntimeError, match=r"does not match its source: images of 64 x 64 pixels differ by up to"
    ):
        export(run, path)
    assert path.read_bytes() == b"the file before"
    assert list(tmp_path.iterdir()) == [path]


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that `dgt export` prints for a mistake; it must exit with status 2."""
    assert main(["export", *map(str, arguments)]) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("dgt: error: ")
    assert "\n" not in text
    return text


def test_mistakes_are_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "OUT must end in .onnx or .pt2, or be a folder for timm" in fails(
        capsys, run, tmp_path / "model.tflite"
    )
    assert "there is no checkpoint" in fails(capsys, tmp_path / "none", tmp_path / "model.onnx")
    assert "contains the model to export" in fails(capsys, run, run)
    assert "--features needs a file" in fails(capsys, run, tmp_path / "out", "--features")
    (tmp_path / "folder.onnx").mkdir()
    assert "is a folder" in fails(capsys, run, tmp_path / "folder.onnx")
    (tmp_path / "file").touch()
    assert "is a file" in fails(capsys, run, tmp_path / "file")
    assert "is a file" in fails(capsys, run, tmp_path / "file" / "model.onnx")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "no permission to write" in fails(capsys, run, tmp_path / "model.onnx")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "onnxscript" else name
    )
    assert "ONNX needs onnxscript, which is not installed: pip install" in fails(
        capsys, run, tmp_path / "model.onnx"
    )


@pytest.mark.parametrize("encode", [encode_onnx, encode_program])
def test_a_model_in_training_mode_is_refused(encode: Callable[[Source], bytes]) -> None:
    with pytest.raises(UserError, match="the model must be in evaluation mode"):
        encode(Source(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout()).train()))
    in_part = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout()).eval()
    in_part[1].train()
    with pytest.raises(UserError, match="got training mode at '1'"):
        encode(Source(in_part))


def test_every_output_has_a_name() -> None:
    with pytest.raises(UserError, match=r"outputs must name the 1 outputs, got \('a', 'b'\)"):
        encode_onnx(Source(nn.Conv2d(3, 3, 1).eval(), ("a", "b")))


class Named(nn.Conv2d):
    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"maps": super().forward(images)}


def test_a_mapping_is_no_list_of_outputs() -> None:
    run = open_program(encode_program(Source(Named(3, 3, 1).eval())))
    with pytest.raises(TypeError, match="a tensor or a list of tensors, got a dict"):
        run(torch.randn(1, 3, 8, 8))


def test_images_of_bytes_are_refused() -> None:
    content = encode_onnx(Source(nn.Conv2d(3, 3, 1).eval(), ("maps",)))
    run, images = open_onnx(content), torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    with pytest.raises(TypeError, match="images must be a floating point tensor, got a"):
        run(images)
    assert run(images.double() / 255)[0].dtype == torch.float32


def test_of_a_detector_only_the_maps_of_its_backbone() -> None:
    backbone = nn.Conv2d(3, 4, 3)
    backbone.channels = [4]
    run = LoadedRun(
        nn.ModuleDict({"backbone": backbone}), load_recipe("scenes_detect"), ["disc"], Path("run")
    )
    with pytest.raises(ValueError, match=r"models of task 'detect' cannot be .* --features"):
        source_of_run(run)
    source = source_of_run(run, features=True)
    assert source.module is backbone
    assert source.outputs == ("map_0",)
    backbone.attn = WindowAttention(8, 2)
    with pytest.raises(ValueError, match=r"uses windows, which a graph .* cannot express"):
        source_of_run(run, features=True)


def timm_folder(folder: Path, layout: str) -> timm.models.resnet.ResNet:
    """A small timm model with random weights, saved as timm or as transformers does."""
    model = timm.create_model("test_resnet", num_classes=5).eval()
    save_for_hf(
        model,
        str(folder),
        {"label_names": list("abcde")} if layout == "timm" else None,
        safe_serialization=True,
    )
    if layout == "transformers":  # the wrapper's prefix for the weights
        weights = {f"timm_model.{key}": value for key, value in model.state_dict().items()}
        safetensors.torch.save_file(
            weights, folder / "model.safetensors", metadata={"format": "pt"}
        )
    return model


@pytest.mark.parametrize("layout", ["timm", "transformers"])
def test_a_folder_that_timm_wrote_is_opened_and_exported(layout: str, tmp_path: Path) -> None:
    model = timm_folder(tmp_path / "saved", layout)
    run = load_run(tmp_path / "saved")
    images = torch.randn(2, 3, 96, 128)
    with torch.no_grad():
        torch.testing.assert_close(run.network(images), model(images), rtol=0, atol=0)
    assert run.class_names == (list("abcde") if layout == "timm" else list("01234"))
    assert run.recipe.data.mean == pytest.approx(model.pretrained_cfg["mean"])
    assert run.recipe.data.image_size == model.pretrained_cfg["input_size"][1]
    if layout == "timm" and torch.__version__ >= "2.11":  # 2.10 limits the sizes, which is refused
        result = export(tmp_path / "saved", tmp_path / "saved.pt2")
        assert result.verification.equal == result.verification.images == 18


def test_a_folder_of_no_classifier_says_what_it_lacks(tmp_path: Path) -> None:
    timm_folder(tmp_path, "timm")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        ValueError, match="no entry 'dgt' with the recipe, nor 'architecture' and 'num_classes'"
    ):
        load_run(tmp_path)


def test_an_accelerated_model_is_exported_by_its_plan(
    accelerated_folder: Any, tmp_path: Path
) -> None:
    saved, plan = accelerated_folder(tmp_path)
    result = export(saved, tmp_path / "vit.pt2", size=(64, 64), batch=2, plan=plan)
    assert result.verification.equal == result.verification.images
    assert "times as fast" in str(result)
    program = torch.export.load(tmp_path / "vit.pt2")
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.dgt.attend_in_clusters.default) == 2
    images = torch.randn(2, 3, 64, 64)
    network = load_run(saved).network
    with torch.no_grad():
        dgt.apply_plan(network, plan)
        torch.testing.assert_close(program.module()(images), network(images), rtol=0, atol=1e-5)


def test_mistakes_with_a_plan_are_one_sentence(
    accelerated_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, plan = accelerated_folder(tmp_path)
    size = ("--size", 64, 64)
    file = tmp_path / "vit.onnx"
    program = tmp_path / "vit.pt2"
    none = tmp_path / "none.json"
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    (tmp_path / "dense").mkdir()
    _, dense = accelerated_folder(tmp_path / "dense", choice="exact")
    (tmp_path / "other").mkdir()
    _, other = accelerated_folder(tmp_path / "other", name="blocks.7.attn")
    for words, *arguments in (
        ("--plan goes with a file, .onnx or .pt2", tmp_path / "folder", "--plan", plan),
        ("--plan needs --size H W", program, "--plan", plan),
        ("cannot be expressed in standard ONNX operators", file, "--plan", plan, *size),
        ("does not exist", program, "--plan", none, *size),
        ("is not a valid plan", program, "--plan", broken, *size),
        ("has no grouped layer: export the model without", program, "--plan", dense, *size),
        ("has no 'blocks.7.attn'", program, "--plan", other, *size),
        ("takes only images of 64 x 64 pixels", program, "--plan", plan, "--size", 96, 96),
    ):
        assert words in fails(capsys, saved, *arguments)
    assert not file.exists()
    assert not program.exists()
