"""Ablations: the table matches the runs, resumes after a kill, and rejects whatever would make it wrong."""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm

from dgt.runs import load_recipe, shipped_recipes
from dgt.runs.settings import plain_values
from dgt_command.ablate import ablate
from dgt_command.tables import TABLES, load_table, tables_text

TABLE = """
title: Two small peers
paper: nothing that was printed
sizes:
  small: {recipe: scenes, set: {model.args.drop_rate: 0.1}}
  other: {recipe: scenes}
rows:
  - {name: "Peer, as it is", paper: 81.25, small: {model.name: test_resnet}}
  - {name: Peer with heavy decay, small: {model.name: test_resnet, optimizer.weight_decay: 0.5}}
"""
SMALL = [
    "--data.image_size=32",
    "--data.batch_size=16",
    "--data.train_size=32",
    "--data.val_size=40",
]
SMALL += ["--schedule.epochs=1", "--schedule.warmup_epochs=0.5", "--trainer.accelerator=cpu"]
SLUGS = ("peer-as-it-is", "peer-with-heavy-decay")


def write_table(folder: Path, text: str = TABLE) -> Path:
    path = folder / "peers.yaml"
    path.write_text(text)
    return path


def read_table(folder: Path) -> dict[str, Any]:
    """The table without times and commands, which differ between any two runs."""
    table = json.loads((folder / "table.json").read_text())
    for row in table["rows"]:
        del row["seconds"]
        for run in row["runs"]:
            del run["seconds"], run["command"], run["device"]
    return table


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the two peers with two seeds."""
    place = tmp_path_factory.mktemp("table")
    return ablate(write_table(place), SMALL, seeds=2, out=place / "peers")


def test_the_table_says_what_the_runs_say(done: Path) -> None:
    table = json.loads((done / "table.json").read_text())
    assert (table["table"], table["size"], table["recipe"], table["metric"]) == (
        "peers",
        "small",
        "scenes",
        "top1",
    )
    assert [row["name"] for row in table["rows"]] == ["Peer, as it is", "Peer with heavy decay"]
    for row, slug in zip(table["rows"], SLUGS, strict=True):
        runs = [
            json.loads((done / "runs" / slug / f"seed-{seed}" / "results.json").read_text())
            for seed in (0, 1)
        ]
        assert row["runs"] == runs
        assert [run["seed"] for run in runs] == [0, 1]
        values = [run["metrics"]["top1"] for run in runs]
        assert row["mean"] == pytest.approx(statistics.fmean(values))
        assert row["spread"] == pytest.approx(statistics.stdev(values))
        assert row["parameters"] == runs[0]["parameters"] > 0
        assert row["flops"] > 0
        assert row["diverged"] == 0
    decays = [
        load_recipe(done / "runs" / slug / "seed-0" / "recipe.yaml").optimizer.weight_decay
        for slug in SLUGS
    ]
    assert decays == [0.05, 0.5]


def test_one_process_trains_each_row(done: Path) -> None:
    settings = load_recipe(done / "runs" / SLUGS[0] / "seed-0" / "recipe.yaml").trainer
    assert (settings.devices, settings.num_nodes, settings.strategy) == (1, 1, "auto")


def test_the_page_has_the_papers_number_and_the_spread(done: Path) -> None:
    lines = (done / "table.md").read_text().splitlines()
    row = json.loads((done / "table.json").read_text())["rows"][0]
    assert lines[0] == "# Two small peers"
    cells = next(line for line in lines if line.startswith("| Peer, as it is")).split(" | ")
    assert f"{100 * row['mean']:.2f} ± {100 * row['spread']:.2f}" in cells
    assert cells[-1] == "81.2 |"
    assert next(line for line in lines if "heavy" in line).endswith("| - |")
    assert any("nothing that was printed" in line for line in lines)


def test_what_is_finished_is_kept_and_more_seeds_are_added(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    shutil.copytree(done, folder)
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("results.json")}
    before = read_table(folder)
    ablate(write_table(tmp_path), SMALL, seeds=2, out=folder)
    assert read_table(folder) == before
    ablate(write_table(tmp_path), SMALL, seeds=3, out=folder)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert [[run["seed"] for run in row["runs"]] for row in read_table(folder)["rows"]] == [
        [0, 1, 2]
    ] * 2
    ablate(write_table(tmp_path), SMALL, seeds=2, out=folder)
    assert read_table(folder) == before


KILLED = """
import os, signal, sys
from dgt.training.loop import Training
from dgt_command import main
begin, begun = Training.__init__, []
def begin_or_die(*arguments, **keys):
    begun.append(1)
    if len(begun) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin(*arguments, **keys)
Training.__init__ = begin_or_die
main(sys.argv[1:])
"""


def test_killed_in_the_middle_it_ends_with_the_same_table(done: Path, tmp_path: Path) -> None:
    """SIGKILL after the first run finished and the second started; then the same command again."""
    folder = tmp_path / "peers"
    words = ["ablate", str(write_table(tmp_path)), *SMALL, "--seeds=2", f"--out={folder}"]
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *words], stdout=subprocess.DEVNULL, check=False
    )
    assert process.returncode == -signal.SIGKILL
    first, second = (folder / "runs" / slug / "seed-0" for slug in SLUGS)
    assert (second / "recipe.yaml").exists()
    kept = (first / "results.json").stat().st_mtime_ns
    assert not (folder / "runs" / SLUGS[0] / "seed-1").exists()
    ablate(tmp_path / "peers.yaml", SMALL, seeds=2, out=folder)
    assert (first / "results.json").stat().st_mtime_ns == kept
    assert read_table(folder) == read_table(done)


def test_a_training_that_diverges_stands_in_the_table(tmp_path: Path) -> None:
    text = TABLE.replace(
        "optimizer.weight_decay: 0.5", "optimizer.lr: 1.0e+30, optimizer.clip_grad: null"
    )
    words = [*SMALL, "--schedule.epochs=2", "--trainer.max_skipped=0"]
    folder = ablate(write_table(tmp_path, text), words, seeds=1, out=tmp_path / "peers")
    good, bad = json.loads((folder / "table.json").read_text())["rows"]
    assert (good["diverged"], bad["diverged"]) == (0, 1)
    assert (len(good["runs"]), bad["runs"], bad["mean"]) == (1, [], None)
    assert "| 1 diverged |" in (folder / "table.md").read_text()
    stamp = (folder / "runs" / SLUGS[1] / "seed-0" / "diverged.json").stat().st_mtime_ns
    ablate(tmp_path / "peers.yaml", words, seeds=1, out=folder)
    assert (folder / "runs" / SLUGS[1] / "seed-0" / "diverged.json").stat().st_mtime_ns == stamp


def test_groups_and_selection_are_measured_where_the_table_asks(tmp_path: Path) -> None:
    text = "diagnose: true\nsizes: {small: {recipe: scenes, set: {model.name: dgt_nano, model.args.stem_stride: 1}}}\n"
    text += "rows: [{name: few keys, small: {model.args.top_k: 4}}]\n"
    folder = ablate(write_table(tmp_path, text), SMALL, seeds=1, out=tmp_path / "nano")
    measures = json.loads((folder / "table.json").read_text())["rows"][0]["measures"]
    assert measures["random"] < measures["best_for_group"] <= measures["best_for_query"] < 1
    assert measures["selected"] <= measures["best_for_group"]
    assert "| mass on selected keys |" in (folder / "table.md").read_text()
    (
        folder / "runs" / "few-keys" / "seed-0" / "diagnosis.json"
    ).unlink()  # killed between the two files
    ablate(tmp_path / "peers.yaml", SMALL, seeds=1, out=folder)
    assert json.loads((folder / "table.json").read_text())["rows"][0]["measures"] == measures


def test_another_setting_than_the_finished_runs_is_refused(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "peers"
    shutil.copytree(done, folder)
    table, before = write_table(tmp_path), sorted(folder.rglob("*"))
    with pytest.raises(FileExistsError, match=r"lr 0\.002, but now optimizer\.lr is 0\.1"):
        ablate(table, [*SMALL, "--optimizer.lr=0.1"], seeds=2, out=folder)
    assert sorted(folder.rglob("*")) == before
    shutil.rmtree(folder / "runs" / SLUGS[0])
    shutil.rmtree(folder / "runs" / SLUGS[1])
    # No finished run contradicts it.
    ablate(table, [*SMALL, "--optimizer.lr=0.1"], seeds=1, out=folder)


def test_a_second_process_is_kept_out(tmp_path: Path, at_work: Callable[[Path], int]) -> None:
    at_work(tmp_path / "peers" / "runs")
    with pytest.raises(FileExistsError, match="another process is using"):
        ablate(write_table(tmp_path), SMALL, seeds=1, out=tmp_path / "peers")


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"seeds": 0}, "seeds must be at least 1, got 0"),
        ([], {"size": "huge"}, "size must be one of small, other for table 'peers', got 'huge'"),
        (["--seed=3"], {}, "'seed' cannot be changed for table 'peers': it is set by the rows"),
        (["--model.name", "test_vit"], {}, r"'model\.name' cannot be changed for table 'peers'"),
        (["--trainer.devices=2"], {}, r"trainer\.devices must be 1, since one process .* got 2"),
    ],
)
def test_mistakes(
    tmp_path: Path, overrides: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ablate(write_table(tmp_path), [*SMALL, *overrides], out=tmp_path / "peers", **options)
    assert not (tmp_path / "peers").exists()


def test_a_model_that_cannot_be_built_is_reported_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    table = write_table(
        tmp_path, TABLE.replace("test_resnet, optimizer.weight_decay: 0.5", "swin_tinny")
    )
    with pytest.raises(ValueError, match="swin_tinny"):
        ablate(table, SMALL, seeds=1, out=tmp_path / "peers")
    assert not (tmp_path / "peers").exists()


def test_a_diagnosis_is_of_classifiers(tmp_path: Path) -> None:
    text = "diagnose: true\nsizes: {small: {recipe: scenes_segment}}\nrows: [{name: few keys, small: {seed: 0}}]\n"
    with pytest.raises(ValueError, match=r"diagnose of table 'peers' must .* got 'segment'"):
        ablate(write_table(tmp_path, text), SMALL, seeds=1, out=tmp_path / "peers")
    assert not (tmp_path / "peers").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    with pytest.raises(FileExistsError, match="contains files that do not belong to a table"):
        ablate(table, SMALL, out=tmp_path)
    with pytest.raises(NotADirectoryError, match="out must be a folder"):
        ablate(table, SMALL, out=table)


SCENES = "sizes: {a: {recipe: scenes}}\nrows: "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not valid UTF-8 YAML"),
        ("", "sizes of table 'peers' must be a mapping of keys, got None"),
        ("- a", "table .*peers.* must be a mapping of keys, got list"),
        ("size: {}", "has an unknown key 'size'; known are title"),
        ("sizes: {a: {}}\nrows: [{name: x}]", "size 'a' of table 'peers' must be a mapping"),
        (
            "sizes: {a: {recipe: scenes, set: 3}}\nrows: [{name: x, a: {}}]",
            "set of size 'a' of .* a mapping",
        ),
        ("sizes: {a: {set: {}}}\nrows: [{name: x, a: {}}]", "must name a recipe, got None"),
        (SCENES + "[]", "rows of table 'peers' must be a list of at least one row"),
        (SCENES + "[{name: x}]", "size 'a' of row 'x' of table 'peers' must be a mapping"),
        (SCENES + "[{a: {}}]", "must be a mapping of name, paper, a, got"),
        (SCENES + "[{name: x, a: {}, b: {}}]", "must be a mapping of name, paper, a, got"),
        (SCENES + "[{name: x, paper: y, a: {}}]", "paper of row 'x' .* must be a number"),
        (SCENES + "[{name: x, a: {}}, {name: X!, a: {}}]", "must have different names"),
    ],
)
def test_a_table_with_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_table(write_table(tmp_path, text))


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no table 'block': did you mean blocks"):
        load_table("block")
    with pytest.raises(FileNotFoundError, match="or the path of a YAML file"):
        load_table(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in shipped_recipes(TABLES)
        for size in ("nano", "tiny")[name == "imagenette" :]
    ],
)
def test_shipped_tables_fit_their_recipes(name: str, size: str) -> None:
    table = load_table(name, size)
    assert table.title in tables_text()
    for row in table.rows:
        recipe = load_recipe(table.recipe, table.changes(row))
        model = timm.create_model(recipe.model.name, device="meta", **recipe.model.args)
        assert sum(parameter.numel() for parameter in model.parameters()) > 0


def test_the_papers_numbers_are_those_printed() -> None:
    printed = {
        name: [row.paper for row in load_table(name).rows if row.paper]
        for name in shipped_recipes(TABLES)
    }
    assert printed["blocks"] == [82.8, 83.0, 83.4, 83.8]
    assert printed["hybrids"] == [81.3, 82.5, 82.7, 83.4]
    assert printed["groups_and_keys"] == [83.8, 83.6, 83.7]
    assert printed["imagenette"] == [85.77, 91.57, 93.55, 94.24]  # the public record
    tiny = {
        row.paper: plain_values(row.changes)
        for row in load_table("groups_and_keys", "tiny").rows
        if row.paper
    }
    assert tiny[83.6] == {"model.args.num_groups": 24}  # k 98
    assert tiny[83.7] == {"model.args.top_k": 49}  # G 48
