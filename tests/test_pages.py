"""The pages: their generated tables are current, numbers in the text are those of tables, README's code runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import dgt
from dgt.utils.records import record_text
from dgt_command import main

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def tables(load_script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """benchmarks/tables.py; its parts are in the same folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield load_script(ROOT / "benchmarks" / "tables.py")


def test_pages_are_current(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    if not RESULTS.is_dir():
        pytest.skip("raw results are in a clone, not in a source distribution")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 0


def test_raw_results_have_a_row_a_line() -> None:
    """As their one writer lays them out, so that changes can be read, and searches are not drowned."""
    for path in RESULTS.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert text == record_text(json.loads(text)), path.name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 12.5 ms.", ["12.5"]),
        ("It takes 4.4 ms, so 2.3 times as long, in 3 of 4 runs.", ["2.3"]),
        ("Accuracies of 91.0, 17.2 and 12.5 %.", ["12.5"]),
        ("In the paper it takes 12.5 ms. Here `12.5 ms` in code, [a link](x.md#9.9)", []),
        ("    dgt demo   # 8 minutes", []),
        ("An upper bound at 95 % for Python 3.11.", []),
    ],
)
def test_a_number_that_no_table_has_is_found(
    tables: ModuleType, text: str, found: list[str]
) -> None:
    page = f"{text}\n\n<!-- table: x -->\n\n| 4.42 | 91.0 | 17.24 |\n<!-- end -->\n"
    problems = list(tables.unfounded(ROOT / "README.md", page))
    assert len(problems) == len(found)
    assert all(number in problem for number, problem in zip(found, problems, strict=True))


def snippets_of(page: str) -> list[str]:
    """The Python code of a page, as printed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def run_replaced(code: str, replaced: dict[str, str]) -> dict[str, Any]:
    """Run code in which some words are replaced, each of which must be there; the names that it sets."""
    for word, other in replaced.items():
        assert word in code, word
        code = code.replace(word, other)
    seen: dict[str, Any] = {}
    exec(code, seen)
    return seen


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for trained weights, photographs and the size of images."""
    monkeypatch.chdir(tmp_path)
    layer, exact, hugging_face, within = snippets_of("README.md")
    seen = run_replaced(layer, {})
    assert seen["result"].output.shape == seen["query"].shape
    assert seen["tokens"].shape == (1, 64, 64, 64)
    assert [tuple(part.shape[2:]) for part in seen["maps"]] == [
        (56, 56),
        (28, 28),
        (14, 14),
        (7, 7),
    ]

    small = {"pretrained=True": "pretrained=False", "1036": "224"}
    seen = run_replaced(exact, small)
    image = torch.randn(1, 3, 224, 224, dtype=torch.bfloat16)
    with torch.inference_mode():
        tokens = seen["model"].forward_features(image)
        with dgt.exact_attention(seen["model"]):
            before = seen["model"].forward_features(image)
    assert tokens.dtype == torch.bfloat16
    assert (tokens - before).norm() < 0.02 * before.norm()  # both are rounded

    settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Dinov2Model(transformers.Dinov2Config(**settings)).save_pretrained("weights")
    seen = run_replaced(hugging_face, {"facebook/dinov2-small": "weights"})
    assert seen["model"].config._attn_implementation == "dgt-exact"
    assert seen["model"](torch.randn(1, 3, 224, 224)).last_hidden_state.isfinite().all()

    Path("photographs").mkdir()
    for number in range(4):
        noise = Image.effect_noise((300, 240), 30 + 9 * number).convert("RGB")
        noise.save(f"photographs/{number}.jpg")
    seen = run_replaced(within, {**small, "PHOTOGRAPHS": "photographs"})
    assert seen["report"].asked_error == 0.05
    assert Path("plan.json").is_file()
    with torch.inference_mode():
        assert seen["model"](seen["images"][:1].bfloat16()).isfinite().all()


def test_a_detector_of_torchvision_takes_our_backbone() -> None:
    *_, last = snippets_of("docs/zoo.md")
    seen = run_replaced(last, {"dgt_tiny": "dgt_nano"})
    targets = [{"boxes": torch.tensor([[10.0, 10.0, 90.0, 80.0]]), "labels": torch.tensor([1])}]
    losses = seen["detector"]([torch.rand(3, 96, 128)], targets)
    assert all(loss.isfinite() for loss in losses.values())


def few(source: Path, out: Path, count: int = 6) -> list[str]:
    """Copy the first files of a folder; their names."""
    out.mkdir(parents=True)
    names = sorted(path.name for path in source.iterdir())[:count]
    for name in names:
        shutil.copy(source / name, out)
    return names


@pytest.fixture
def own_data(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of docs/finetune.md with a few images, as the current directory."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        for name in ("n01440764", "n03000684"):
            few(shared_data / "imagenette128" / split / name, Path("photos", split, name))
        for part in ("images", "labels"):
            few(shared_data / "camvid" / part / split, Path("streets", part, split))
        names = few(shared_data / "coco-mini" / f"{split}2017", Path("things", f"{split}2017"), 12)
        file = Path("annotations", f"instances_{split}2017.json")
        content = json.loads((shared_data / "coco-mini" / file).read_text(encoding="utf-8"))
        kept = [image for image in content["images"] if image["file_name"] in names]
        ids = {image["id"] for image in kept}
        objects = [found for found in content["annotations"] if found["image_id"] in ids]
        Path("things", "annotations").mkdir(exist_ok=True)
        content = {**content, "images": kept, "annotations": objects}
        Path("things", file).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.usefixtures("own_data")
def test_the_commands_of_the_page_on_fine_tuning_train() -> None:
    """As written, but for an epoch, on the classes of the data, from the weights that are included."""
    text = (ROOT / "docs" / "finetune.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^    (dgt train .*)$", text, flags=re.MULTILINE)
    assert len(commands) == 3
    short = "--schedule.epochs 1 --schedule.warmup_epochs 0 --data.batch_size 4"
    for command in commands:
        words = shlex.split(re.sub(r"--data.classes '.*?'", "", command))[1:]
        assert main([*words, *short.split(), "--trainer.precision", "32-true"]) == 0
