"""`dgt ablate like_to_like`: labels of groups and of their keys."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from dgt.models.inspect import LayerInput
from dgt.training import load_recipe
from studies import like_to_like as module
from studies.like_to_like import like_to_like, measure


def layer_input(group_ids: list[int], key_ids: list[list[int]]) -> LayerInput:
    """A layer with one head on a map of 2 x 4 tokens, whose queries weight all keys equally."""
    chosen = torch.zeros(1, 1, 8, 2), torch.tensor([[group_ids]]), torch.tensor([[key_ids]])
    heads = (torch.zeros(1, 1, 8, 2),) * 3
    layer: Any = SimpleNamespace(scale=1.0, inspect=lambda _: chosen, split_heads=lambda _: heads)
    return LayerInput("attn", layer, torch.zeros(1, 2, 4, 2), None, (2, 4))


LEFT, RIGHT = [0, 1, 4, 5], [2, 3, 6, 7]
LABELS = (
    torch.tensor([[0, 0, 1, 1]] * 2).repeat_interleave(3, 0).repeat_interleave(3, 1)
)  # 6 x 12 pixels


def shares(sums: dict[str, Any]) -> dict[str, float]:
    return {name: float(sums[name].sum() / sums["queries"].sum()) for name in module.SHARES}


@pytest.mark.parametrize(
    ("keys", "like"), [([LEFT, RIGHT], 1.0), ([RIGHT, LEFT], 0.0), ([[0, 1, 2, 3]] * 2, 0.5)]
)
def test_keys_of_the_same_label_are_counted(keys: list[list[int]], like: float) -> None:
    name, sums = measure(layer_input([0, 0, 1, 1] * 2, keys), LABELS, 2, 3)
    found = shares(sums)
    assert (name, found["like"], found["pure"], sums["top_k"]) == ("attn", like, 1.0, 4)
    assert found["random"] == found["attention"] == 0.5
    assert 0.5 <= found["random_pure"] < 1
    assert found["window"] > 0.5


def test_mixed_groups_are_less_pure_and_unlabeled_tokens_count_for_nothing() -> None:
    labels = LABELS.clone()
    labels[:, -3:] = 255
    sums = measure(layer_input([0, 0, 0, 1] * 2, [[0, 3], [3, 7]]), labels, 2, 1)[1]
    assert sums["queries"].tolist() == [4, 2]
    assert sums["pure"].tolist() == [4, 0]
    assert sums["like"].tolist() == [4, 0]  # of keys 0 and 3, only 0 has a label
    assert sums["attention"].tolist() == pytest.approx(
        [4 * 4 / 6, 2 * 2 / 6]
    )  # six of the eight keys have one


def test_patches_of_neighbors_are_as_many_as_groups() -> None:
    """Four patches of 2 x 4 tokens are 1 x 2 tokens each; for 2, which is not a square, there is one patch."""
    labels = LABELS.clone()
    labels[:, 6:9] = 0  # 0, 0, 0, 1 in either row
    found = [
        measure(layer_input([0] * 8, [[0]] * groups), labels, 2, 1)[1]["patch_pure"].tolist()
        for groups in (2, 4)
    ]
    assert found == [[6, 0], [5, 1]]  # one label in a patch, or two that tie and count in part


def test_distances_are_in_tokens() -> None:
    sums = measure(layer_input([0] * 8, [[0, 4]]), LABELS, 2, 1)[1]
    columns = [0, 1, 2, 3]
    expected = sum((c + (c * c + 1) ** 0.5) / 2 for c in columns) / 4
    assert float(sums["far"]) == pytest.approx(expected)


def test_a_table_of_scenes_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    run = SimpleNamespace(
        network=timm.create_model("dgt_nano", num_classes=8).eval(), recipe=load_recipe("scenes")
    )
    monkeypatch.setattr(module, "load_run", lambda _: run)
    words = ["--run", "runs/demo", "--images", "2"]
    folder = like_to_like(words, 1, tmp_path)
    text = (folder / "like_to_like.md").read_text("utf-8")
    content = json.loads((folder / "like_to_like.json").read_text("utf-8"))
    assert [row["images"] for row in content["rows"]] == [2] * 6
    assert {"background", "object"} == set(content["rows"][0]["by_label"])
    monkeypatch.setattr(module, "load_run", lambda _: pytest.fail("measured again"))
    assert (like_to_like(words, 1, tmp_path) / "like_to_like.md").read_text("utf-8") == text
    with pytest.raises(ValueError, match="other settings"):
        like_to_like([*words[:-1], "3"], 1, tmp_path)


def test_keys_of_the_data_are_heeded() -> None:
    for recipe, key, size in (
        ("scenes", "image_size=96", (96, 96)),
        ("scenes_segment", "scale=[64,48]", (48, 48)),
    ):
        image, _ = next(module._labeled(load_recipe(recipe), [f"--data.{key}"], 1)[1])
        assert image.shape == (1, 3, *size)


def test_masks_of_coco_are_labels(tmp_path: Path) -> None:
    (tmp_path / "val2017").mkdir()
    Image.new("RGB", (80, 40), "white").save(tmp_path / "val2017" / "a.png")
    (tmp_path / "val2017" / "b.png").write_bytes(b"no image")
    annotations = [
        {"id": number, "image_id": 1, "category_id": category, "iscrowd": 0, "area": width * 40}
        | {"bbox": [x, 0, width, 40], "segmentation": [[x, 0, x + width, 0, x + width, 40, x, 40]]}
        for number, category, x, width in ((1, 7, 40, 10), (2, 3, 40, 40))
    ]
    images = [
        {"id": n, "file_name": f"{name}.png", "width": 80, "height": 40}
        for n, name in ((1, "a"), (2, "b"))
    ]
    categories = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
    (tmp_path / "annotations").mkdir()
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    recipe: Any = SimpleNamespace(
        task="classify", data={"crop_ratio": 1.0, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    )
    names, pairs = module._coco(str(tmp_path), 20, recipe, [], 5)
    ((image, labels),) = pairs  # without the broken one
    assert names == ["background", "cat", "dog"]
    assert image.shape == (1, 3, 20, 20)
    assert torch.allclose(image, torch.tensor(2.0))
    assert labels[10].tolist() == [0] * 10 + [2] * 5 + [1] * 5  # the smaller object is on top
    with pytest.raises(ValueError, match="takes no --data keys"):
        module._coco(str(tmp_path), 20, recipe, ["--data.flip", "0"], 5)


def test_what_it_cannot_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="give --run RUN"):
        like_to_like([], 1, tmp_path)
    run = SimpleNamespace(network=None, recipe=load_recipe("cifar10", ["--data.root=images"]))
    monkeypatch.setattr(module, "load_run", lambda _: run)
    with pytest.raises(ValueError, match="a classifier of scenes or a segmenter"):
        like_to_like(["--run", "x"], 1, tmp_path)
