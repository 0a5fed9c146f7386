"""Files appear whole or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from dgt.utils.atomic_write import atomic_write, remove_leftovers, replacing, write_json


def test_a_file_is_written_and_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    atomic_write(target, "größer")
    atomic_write(target, b"two")
    assert target.read_bytes() == b"two"
    assert os.listdir(target.parent) == ["file.txt"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file.txt"
    atomic_write(target, "old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with replacing(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / "file").write_text(content)
    assert (tmp_path / "folder" / "file").read_text() == "two"
    (tmp_path / ".folder.12.partial").mkdir()
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["folder"]


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, None]}
    write_json(tmp_path / "a.json", {"a": [math.nan, math.inf, 0.1]})
    assert (tmp_path / "a.json").read_text().split() == ["{", '"a":', "[", "null,", "null,", "0.1", "]", "}"]
