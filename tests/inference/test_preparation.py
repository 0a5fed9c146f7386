"""A file says how images are prepared: the page's code gives what `dgt predict` does, for images of all kinds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from dgt.inference import Source, encode_onnx, encode_program
from dgt.inference.export import source_of_run
from dgt.runs import LoadedRun, load_run, predict

pytest.importorskip("onnxruntime", reason="onnx, onnxscript and onnxruntime are not installed")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
RNG = np.random.default_rng(0)


def photograph(width: int, height: int, channels: int = 3) -> Image.Image:
    """Smooth noise, as photographs are."""
    small = RNG.integers(0, 256, (7, 9, channels), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def save(path: Path, kind: str) -> None:
    if kind == "large":
        photograph(640, 427).save(path, "JPEG")
    elif kind == "small":
        photograph(33, 50).save(path, "PNG")
    elif kind == "turned":
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        photograph(301, 200).save(path, "JPEG", exif=exif)
    elif kind == "transparent":
        photograph(150, 90, 4).save(path, "PNG")
    elif kind == "transparent palette":
        photograph(90, 150).quantize(16).save(path, "PNG", transparency=3)
    elif kind == "gray":
        photograph(120, 70).convert("L").save(path, "PNG")
    elif kind == "12 bits":
        values = np.asarray(photograph(120, 70).convert("L")).astype(np.uint16)
        Image.fromarray(16 * values).save(path, "PNG")
    else:
        photograph(120, 70).convert("CMYK").save(path, "JPEG")


@pytest.fixture(scope="module")
def prepared(run: Path) -> LoadedRun:
    """A classifier that looks at the middle of its images."""
    return load_run(run, ["--data.crop_ratio=0.8", "--data.augmentation.interpolation=bicubic"])


@pytest.fixture(scope="module")
def content(prepared: LoadedRun) -> bytes:
    return encode_onnx(source_of_run(prepared))


@pytest.mark.parametrize(
    "kind",
    ["large", "small", "turned", "transparent", "transparent palette", "gray", "12 bits", "CMYK"],
)
def test_the_pages_code_gives_the_classes_of_predict(
    prepared: LoadedRun,
    content: bytes,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(content)
    save(Path("image.jpg"), kind)
    section = PAGE.read_text().partition("\n## onnxruntime\n")[2]
    code = re.search("```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    ((expected, probability), *_) = predict(prepared, "image.jpg")[0].classes
    assert capsys.readouterr().out.strip() == expected
    found = torch.from_numpy(names["logits"]).softmax(1).max()
    assert float(found) == pytest.approx(probability, abs=1e-3)


def test_openvino_and_programs_say_it_too(
    prepared: LoadedRun, content: bytes, tmp_path: Path
) -> None:
    facts = {"classes": ""}
    path = tmp_path / "model.pt2"
    path.write_bytes(encode_program(source_of_run(prepared)))
    torch.export.load(path, extra_files=facts)
    assert (facts["crop_ratio"], facts["interpolation"]) == ("0.8", "bicubic")
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    (tmp_path / "model.onnx").write_bytes(content)
    model = openvino.Core().read_model(tmp_path / "model.onnx")
    openvino.save_model(model, tmp_path / "model.xml")
    model = openvino.Core().read_model(tmp_path / "model.xml")
    for name in ("classes", "alpha", "depth", "orientation", "image_size", "mean", "std"):
        assert model.get_rt_info(["framework", name]).astype(str) == facts[name]


@pytest.mark.parametrize(("size", "said"), [((96, 96), 96), ((96, 160), [96, 160])])
def test_a_file_of_one_size_says_that_size(size: tuple[int, int], said: Any) -> None:
    source = Source(
        torch.nn.Identity(), about={"image_size": "64", "task": "classify"}, fixed=(1, *size)
    )
    assert json.loads(source.facts["image_size"]) == said
    assert source.facts["task"] == "classify"


def test_a_segmenter_says_how_it_scales() -> None:
    run = load_run("dgt_nano.camvid")
    about = source_of_run(run).about
    assert json.loads(about["scale"]) == list(run.recipe.data.scale)
    assert json.loads(about["test"])["scales"] == [1.0]
