"""Files appear complete or not at all, in folders with one writing process."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dgt.utils.atomic_write import (
    atomic_write,
    check_writable,
    exclusive_lock,
    remove_leftovers,
    replacing,
    write_json,
)


def test_a_file_is_written_and_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    atomic_write(target, "größer")
    atomic_write(target, b"two")
    assert target.read_bytes() == b"two"
    assert os.listdir(target.parent) == ["file.txt"]


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file.txt"
    atomic_write(target, "old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("named", [str, Path])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, named: type) -> None:
    """A library may open the partial file by its path, or by its name as a string."""
    target = tmp_path / "figure.png"
    with pytest.raises(OSError, match=f"'{target}'"), replacing(target) as partial:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), named(partial))


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    for content in ("one", "two"):
        atomic_write(tmp_path / "link", content)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "two"
    (tmp_path / "folder").symlink_to(tmp_path / "there")
    with replacing(tmp_path / "folder") as partial:
        partial.mkdir()
        (partial / "new").touch()
    assert (tmp_path / "folder").is_symlink()
    assert os.listdir(tmp_path / "there") == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "there"]


def test_nothing_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    """As root a rename would: `/dev/null` would be a file from then on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable(pipe, "--out")
    atomic_write(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_place_that_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "file", "--out")
    assert not os.listdir(tmp_path)
    (tmp_path / "file").touch()
    check_writable(tmp_path / "file", "--out")
    with pytest.raises(ValueError, match=r"^--out '.*' cannot be written: it is a folder"):
        check_writable(tmp_path, "--out")
    with pytest.raises(ValueError, match=r"^--out '.*' cannot be written: no file can be created"):
        check_writable(tmp_path / "file" / "below", "--out")


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with replacing(tmp_path / "folder") as partial:
            partial.mkdir()
            (partial / "file").write_text(content)
    assert (tmp_path / "folder" / "file").read_text() == "two"
    (tmp_path / ".folder.12.partial").mkdir()
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_second_process_is_kept_out_until_the_first_is_gone(
    tmp_path: Path, at_work: Callable[[Path], int]
) -> None:
    """If the first process is killed, no lock remains, even though its child lives on."""
    first = at_work(tmp_path / "run")
    with (
        pytest.raises(FileExistsError, match=r"another process is using .*run"),
        exclusive_lock(tmp_path / "run"),
    ):
        pass
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    os.killpg(first, 0)  # the child exists
    for _ in range(2):
        with exclusive_lock(tmp_path / "run"):
            pass


def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with exclusive_lock(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [1, None]}
    write_json(tmp_path / "a.json", {"a": [math.nan, math.inf, 0.1]})
    assert (tmp_path / "a.json").read_text().split() == [
        "{",
        '"a":',
        "[",
        "null,",
        "null,",
        "0.1",
        "]",
        "}",
    ]
