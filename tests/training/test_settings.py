"""Values of recipes: texts stay what they are, and numbers are those of YAML 1.2."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dgt.runs import load_recipe
from dgt.runs.recipe import Recipe, parse_recipe
from dgt.runs.settings import QUOTED_NULLS, to_yaml
from dgt.utils.errors import UserError
from dgt_command.training import train

TRAPS = (
    *("photos #2", "a: b", "- x", "010", "0o17", "1e5", "1:30", "1_000", "2026-01-31", "no", "on"),
    *("true", "~", "Null", "=", "<<", "!x", "&a", "*a", "%", "@", "`", "|", ">", " a ", "\n", "\0"),
    *(".inf", "-.5", "0x1F", "[a, b]", "{a: b}", '"quoted"', "it's", "?", "---", "...", "\x85"),
    *("\ufeff", "\udce9", "\u2028", "猫", "--out", "a=b"),
)
TEXTS = st.one_of(st.text(min_size=1), st.sampled_from(TRAPS)).filter(
    lambda text: text != "~" and not text.startswith("~/")
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS, st.just("null")
)
VALUES = st.recursive(
    SCALARS,
    lambda each: st.one_of(st.lists(each, max_size=3), st.dictionaries(TEXTS, each, max_size=3)),
    max_leaves=6,
)


def written(text: str) -> Recipe:
    """A recipe read from a file with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.yaml")
        path.write_bytes(text.encode())
        return load_recipe(path)


@given(TEXTS | st.just("null"), VALUES)
def test_any_value_goes_into_a_recipe_and_comes_out_of_what_the_run_wrote(
    text: str, value: Any
) -> None:
    model = {"init_from": text, "args": {"of_model": value, text: text}}
    values = {"task": "segment", "out": text, "model": model, "data": {"classes": [text, text]}}
    recipe = parse_recipe(values)
    assert (recipe.out, recipe.model.init_from) == (text, text)
    assert recipe.data.classes == [text, text]
    assert recipe.model.args == model["args"]
    again = written(to_yaml(recipe.to_dict()))
    assert again == recipe
    # nobody else's reader takes a text for something else
    assert yaml.safe_load(to_yaml({"out": text})) == {"out": text}


@given(TEXTS)
def test_any_text_goes_through_the_command_line(text: str) -> None:
    if text in ("null", *QUOTED_NULLS):
        return
    recipe = load_recipe(
        "scenes", [f"--out={text}", f"--model.init_from={text}", f"--name=x{text}"]
    )
    assert (recipe.out, recipe.model.init_from, recipe.name) == (text, text, f"x{text}")
    context = train.make_context("train", ["scenes", f"--out={text}", "--resume", "auto"])
    assert context.params["keys"] == (f"--out={text}",)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+7", 7),
        ("-0", 0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5E-3", -0.0015),
        (".inf", math.inf),
        ("-.INF", -math.inf),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_numbers_are_those_of_yaml_1_2(text: str, number: float, in_file: bool) -> None:
    key = f"model: {{args: {{x: {text}}}}}"
    recipe = written(key) if in_file else load_recipe("scenes", [f"--model.args.x={text}"])
    found = recipe.model.args["x"]
    assert (found, type(found)) == (number, type(number))


@pytest.mark.parametrize("text", ["1:30", "1_000", "0b11", "1e", "٣", "yes", "2026-01-31", "+ 1"])
def test_what_is_no_number_of_yaml_1_2_is_a_text(text: str) -> None:
    assert load_recipe("scenes", [f"--model.args.x={text}"]).model.args["x"] == text
    assert written(f"model: {{args: {{x: {text}}}}}").model.args["x"] == text
    for overrides in (["--schedule.epochs", text], {"schedule.epochs": text}):
        with pytest.raises(UserError, match=r"schedule\.epochs must be an integer"):
            load_recipe("scenes", overrides)


def test_texts_of_a_file_need_no_quotes() -> None:
    recipe = written(
        "task: segment\nname: 010\nout: 1:30\nmodel: {name: no, init_from: 2026-01-31}\n"
        "data: {root: photos#2, classes: [0, no, 1e3, null], train_split: true}\n"
    )
    assert (recipe.name, recipe.out, recipe.model.name) == ("010", "1:30", "no")
    assert recipe.model.init_from == "2026-01-31"
    assert recipe.data.classes == ["0", "no", "1e3", "null"]
    assert (recipe.data.root, recipe.data.train_split) == ("photos#2", "true")


def test_null_is_none_without_quotes_and_a_text_with_them() -> None:
    for words in (["--out=null"], {"out": None}):
        assert load_recipe("scenes", words).out is None
    for words in (['--out="null"'], ["--out='null'"], {"out": "null"}):
        assert load_recipe("scenes", words).out == "null"
    assert written("out: null").out is None
    assert written("out: 'null'").out == written('out: "null"').out == "null"
    assert written("name: null").name == "null"
    assert load_recipe("scenes", ["--data.val_size=null"]).data.val_size is None
    for value in ("", "~", '"null"'):
        with pytest.raises(UserError, match=r"data\.val_size must be an integer or null, got"):
            load_recipe("scenes", [f"--data.val_size={value}"])


def test_a_leading_tilde_of_a_place_is_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "base.yaml").write_text("seed: 3\n")
    words = ["--data.root=~/a #2", "--out", "~/b", "--model.init_from=~/c", "--name=~d"]
    recipe = load_recipe("cifar10", words)
    places = (recipe.data.root, recipe.out, recipe.model.init_from)
    assert places == tuple(str(tmp_path / name) for name in ("a #2", "b", "c"))
    assert recipe.name == "~d"
    recipe = written("base: ~/base.yaml\nout: ~/e\n")
    assert (recipe.seed, recipe.out) == (3, str(tmp_path / "e"))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("out", "path"),
        ("data.root", "path"),
        ("model.init_from", "path"),
        ("data.val_split", "name"),
    ],
)
def test_an_empty_place_is_refused(key: str, kind: str) -> None:
    """As of a variable of the shell that is not set: it would be the folder that one is in, or the
    usual split.
    """
    with pytest.raises(UserError, match=f"{key} must be a {kind} or null, got an empty text"):
        load_recipe("scenes", [f"--{key}="])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data.classes=[a] #b"], "data.classes cannot be read as YAML, .* '#b'"),
        (["--data.classes=[a #b]"], "data.classes cannot be read as YAML"),
        (['--model.args.x="a'], r"model\.args\.x cannot be read as YAML"),
        (["--model.args={a: 1, a: 2}"], "the key 'a' is there twice"),
    ],
)
def test_nothing_of_a_word_is_left_out(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_recipe("scenes_segment", words)


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"mine\.yaml.* the key 'data' is there twice"):
        written("data: {root: a}\nseed: 1\ndata: {image_size: 64}\n")
    shared = "model: &m {args: {a: 1, b: 2}}\n"
    merged = written(f"{shared}data: {{augmentation: {{flip: 0.5}}}}\n")
    assert merged.model.args == {"a": 1, "b": 2}


def test_the_last_of_repeated_words_counts() -> None:
    words = ["--model.args={a: 1}", "--model.args.b=2", "--model.args={c: [3, x #4]}"]
    with pytest.raises(UserError, match="cannot be read as YAML"):
        load_recipe("scenes", words)
    words[-1] = '--model.args={c: [3, "x #4"], d: "5"}'
    assert load_recipe("scenes", words).model.args == {"c": [3, "x #4"], "d": "5"}
