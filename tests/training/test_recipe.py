"""Recipes: the shipped ones match their headers, and every mistake gives one sentence that names the key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dgt.runs.recipe import help_text, load_recipe, parse_recipe, shipped_recipes
from dgt.runs.settings import nested, to_yaml
from dgt.tasks import TASKS
from dgt.utils.errors import UserError


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_parses_and_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    classes = len(getattr(recipe.data, "classes", None) or range(10))
    with torch.device("meta"):
        network = TASKS[recipe.task].build(recipe.model, classes, recipe.data.image_size)
    assert recipe.name == name
    assert sum(parameter.numel() for parameter in network.parameters()) > 0


def test_the_command_line_changes_any_key() -> None:
    recipe = load_recipe(
        "scenes",
        [
            "--optimizer.lr=3e-4",
            "--data.augmentation.mixup",
            "0.8",
            "--model.args.top_k",
            "7",
            "--model.args.pretrained_cfg_overlay.mean",
            "[0]",
            "--model.args.pretrained_cfg_overlay.std",
            "[1]",
        ],
    )
    assert recipe.optimizer.lr == 3e-4
    assert recipe.data.augmentation.mixup == 0.8
    assert recipe.data.dataset == "scenes"
    overlay = {"mean": [0], "std": [1]}
    assert recipe.model.args == {"top_k": 7, "pretrained_cfg_overlay": overlay}


def test_another_model_does_not_inherit_the_recipes_own_arguments() -> None:
    assert load_recipe("cifar10").model.args == {"stem_stride": 1}
    assert load_recipe("cifar10", ["--model.name", "resnet50"]).model.args == {}
    same = load_recipe("cifar10").model
    assert load_recipe("cifar10", {"model.name": same.name}).model == same
    assert load_recipe("cifar10", ["--model.name", same.name]).model == same
    swapped = load_recipe(
        "cifar10", ["--model.name", "resnet50", "--model.args", "{drop_rate: 0.1}"]
    )
    assert swapped.model.args == {"drop_rate": 0.1}
    assert swapped.model.drop_path_rate == 0.05


@pytest.mark.parametrize(
    ("name", "key", "value", "sentence"),
    [
        ("ade20k_dgt_tiny", "schedule.epochs", 1, r"while schedule\.steps is 160000"),
        ("imagenet_dgt_tiny", "data.augmentation.color_jitter", 1.0, r"while .* is rand-m9"),
        (
            "cifar10",
            "data.augmentation.min_scale",
            0.5,
            r"while .*pad_crop is 4: .* or set it to 0",
        ),
        ("cifar10", "optimizer.momentum", 0.95, r"the optimizer 'adamw' does not take it"),
    ],
)
def test_keys_without_an_effect_are_refused(
    tmp_path: Path, name: str, key: str, value: float, sentence: str
) -> None:
    (tmp_path / "mine.yaml").write_text(to_yaml({"base": name, **nested({key: value})}))
    with pytest.raises(ValueError, match=f"{key} has no effect.* {sentence}"):
        load_recipe(name, [f"--{key}={value}"])
    with pytest.raises(ValueError, match=f"{key} has no effect.* {sentence}"):
        load_recipe(tmp_path / "mine.yaml")


def test_keys_have_an_effect_beside_those_that_took_their_place(tmp_path: Path) -> None:
    in_epochs = ["--schedule.steps=null", "--schedule.warmup_steps=null"]
    words = ["--schedule.epochs=9", "--schedule.warmup_epochs=1", *in_epochs]
    assert load_recipe("ade20k_dgt_tiny", words).schedule.epochs == 9
    (tmp_path / "mine.yaml").write_text("base: ade20k_dgt_tiny\nschedule: {epochs: 9}\n")
    assert load_recipe(tmp_path / "mine.yaml", ["--schedule.steps=9000"]).schedule.epochs == 9
    assert load_recipe("cifar10", ["--optimizer.name=sgd"]).optimizer.momentum == 0.9


def test_a_recipe_written_out_reads_back_the_same(tmp_path: Path) -> None:
    recipe = load_recipe(
        "imagenet_dgt_small", ["--data.root", "images", "--optimizer.betas", "[0.9, 0.95]"]
    )
    (tmp_path / "copy.yaml").write_text(to_yaml(recipe.to_dict()))
    assert load_recipe(tmp_path / "copy.yaml") == recipe


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--optimiser.lr 1", r"unknown recipe key 'optimiser.lr'; did you mean optimizer\.lr"),
        ("--data.augmentation.mixupp 1", "unknown recipe key .* mean data.augmentation.mixup"),
        ("--qqqq 1", "unknown recipe key 'qqqq'; `dgt train RECIPE --help` lists all keys"),
        ("--optimizer.lr fast", 'optimizer.lr must be a number, got "fast"'),
        ("--schedule.epochs 2.5", 'schedule.epochs must be an integer, got "2.5"'),
        (
            "--schedule.epochs 10",
            r"schedule.warmup_epochs must .* than schedule.epochs \(10; fewer epochs",
        ),
        ("--trainer.precision fp8", 'trainer.precision must be one of auto, .*, got "fp8"'),
        ("--trainer.tracker mlflow", "trainer.tracker must be one of wandb, trackio or null, got"),
        ("--trainer.accumulate 0", "trainer.accumulate must be at least 1, got 0"),
        ("--trainer.max_skipped -1", "trainer.max_skipped must be at least 0, got -1"),
        ("--checkpoint.every_minutes .nan", "checkpoint.every_minutes must .* above 0, got nan"),
        ("--ema.decay 1.5", r"ema.decay must be null or in \[0, 1\), got 1.5"),
        ("--model.top_k_schedule 1.5", r"model.top_k_schedule must .* at most 1, got 1\.5"),
        ("--model.top_k_start 50", "model.top_k_start must be null or, with .* above 0, got 50"),
        ("--model.top_k_schedule=1 --trainer.compile=true", "model.top_k_schedule must be null"),
        ("--task detect", "task must stay the recipe's, 'classify', got 'detect': take a recipe"),
        ("--name=", "name must be a valid folder name, got ''"),
        ("--seed -1", r"seed must lie in \[0, 4294967295\], got -1"),
        ("--seed 4294967296", r"seed must lie in \[0, 4294967295\], got 4294967296"),
        ("--seed", "recipe key 'seed' needs a value after it"),
        ("stray", "keys of a recipe are written --section.key value, got 'stray'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}") as raised:
        load_recipe("imagenet_dgt_tiny", words.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer": {"lrr": 1.0}}, r"unknown recipe key 'optimizer.lrr'; did you mean optim"),
        ({"optimizer": 3}, "recipe key 'optimizer' must be a section of keys, got 3"),
        ({"data": {"augmentation": None}}, "recipe key 'data.augmentation' must .*, got null"),
        ({"data": {"image_size": "large"}}, 'data.image_size must be an integer, got "large"'),
        ({"data": {"seed": 3}}, "unknown recipe key 'data.seed'"),
        ({"optimizer": {"lr": 1}, "optimizer.lr": 2}, "recipe key 'optimizer.lr' is there twice"),
        ({"task": "detekt"}, "task must be one of classify, segment, detect, got 'detekt'"),
        ({"seed": None}, "seed must be an integer, got null"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer.betas must be 2 numbers, got \[0.9\]"),
        ({"optimizer": {"betas": None}}, "optimizer.betas must be 2 numbers, got null"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse_recipe(values)


@pytest.mark.parametrize(
    ("key", "written", "sentence"),
    [
        ("data.classes", "road", 'a list of texts or null, got "road"$'),
        ("data.classes", "[[a], b]", r'a list of texts or null, got \[\["a"\], "b"\]$'),
        ("trainer.devices", "[0, 1]", r"an integer or text, got \[0, 1\]$"),
        ("ema.decay", "[0.9]", r"a number or null, got \[0.9\]$"),
        ("data.zero_is_ignored", "1", "true or false or null, got 1$"),
        ("data.test.scales", "large", 'a list of numbers, got "large"$'),
    ],
)
def test_a_value_of_none_of_several_types_is_explained_without_jargon(
    tmp_path: Path, key: str, written: str, sentence: str
) -> None:
    section, _, name = key.rpartition(".")
    lines = f"{section}: {{{name}: {written}}}"
    if section.count("."):
        outer, inner = section.split(".")
        lines = f"{outer}: {{{inner}: {{{name}: {written}}}}}"
    (tmp_path / "mine.yaml").write_text(f"task: segment\n{lines}\n")
    with pytest.raises(UserError, match=rf"^{key} must be {sentence}"):
        load_recipe(tmp_path / "mine.yaml")


def test_changes_are_words_and_not_one_string() -> None:
    with pytest.raises(TypeError, match=r"overrides must be a sequence of words, .* the string"):
        load_recipe("scenes", "--schedule.epochs=5")


def test_texts_of_a_command_line_take_the_type_of_their_key() -> None:
    words = ["--name", "5", "--out=null", "--trainer.devices", "2", "--data.dataset=auto"]
    words += [
        "--data.classes",
        '["0", "no"]',
        "--model.args.a.b",
        "1e-3",
        "--schedule",
        "{epochs: 7}",
    ]
    recipe = load_recipe("scenes_segment", words)
    assert (recipe.name, recipe.out, recipe.trainer.devices) == ("5", None, 2)
    assert recipe.data.classes == ["0", "no"]
    assert recipe.model.args["a"] == {"b": 0.001}
    assert recipe.schedule.epochs == 7


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a: [1", "is not valid UTF-8 YAML"),
        ("name: größer".encode("latin-1"), "is not valid UTF-8 YAML"),
        (b"- 1", "must be a mapping of keys"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=rf"mine\.yaml' {sentence}"):
        load_recipe(tmp_path / "mine.yaml")


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="there is no recipe 'cifar': did you mean cifar10"):
        load_recipe("cifar")
    with pytest.raises(FileNotFoundError, match=r"there is no recipe 'nowhere\.yaml'"):
        load_recipe("nowhere.yaml")


def test_a_recipe_of_ones_own_needs_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"optimizer": {"lr": "5e-4"}, "data": {"dataset": "scenes"}})
    )
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert (recipe.name, recipe.optimizer.lr, recipe.schedule.epochs) == ("mine", 5e-4, 300)


def test_a_recipe_takes_the_keys_of_its_base_and_changes_some(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "base: cifar10\nmodel: {args: {top_k: 7}}\ndata: {augmentation: {flip: 0.1}}\n"
    )
    (tmp_path / "again.yaml").write_text("base: mine.yaml\nseed: 3\nema: {decay: null}\n")
    whole, again = (
        load_recipe("cifar10"),
        load_recipe(tmp_path / "again.yaml", ["--optimizer.lr=0.5"]),
    )
    assert again.model.args == {"stem_stride": 1, "top_k": 7}
    augmentation = replace(whole.data.augmentation, flip=0.1)
    assert again.data == replace(whole.data, augmentation=augmentation)
    assert (again.name, again.seed, again.ema.decay, again.optimizer.lr) == ("again", 3, None, 0.5)
    assert again.schedule == whole.schedule
    # A run's record is self-contained.
    (tmp_path / "record.yaml").write_text(yaml.safe_dump(again.to_dict()))
    assert "base" not in again.to_dict()
    assert load_recipe(tmp_path / "record.yaml") == again
    (tmp_path / "of_run.yaml").write_text("base: record.yaml\n")
    assert load_recipe(tmp_path / "of_run.yaml").name == "of_run"
    (tmp_path / "other.yaml").write_text("base: mine.yaml\nmodel: {name: resnet10t, args: {}}\n")
    assert load_recipe(tmp_path / "other.yaml").model.args == {}


@pytest.mark.parametrize(
    ("base", "error", "sentence"),
    [
        ("cifar", FileNotFoundError, "there is no recipe 'cifar': did you mean cifar10"),
        ("none.yaml", FileNotFoundError, "there is no recipe .*none.yaml"),
        ("mine.yaml", ValueError, "mine.yaml' has itself as a base"),
        ("[1]", FileNotFoundError, "there is no recipe "),
        ("scenes_detect", ValueError, "unknown recipe key 'data.crop_ratio'"),
    ],
)
def test_a_wrong_base_is_one_sentence(
    tmp_path: Path, base: str, error: type[Exception], sentence: str
) -> None:
    (tmp_path / "mine.yaml").write_text(f"base: {base}\ndata: {{crop_ratio: 1.0}}\n")
    with pytest.raises(error, match=sentence):
        load_recipe(tmp_path / "mine.yaml")


def test_the_help_tells_every_key() -> None:
    text = help_text()
    for word in ("--data.root", "--optimizer.lr_batch", "--ema.decay", "--trainer.devices"):
        assert word in text
