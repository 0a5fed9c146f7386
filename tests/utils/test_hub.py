"""Names that may be paths or repositories on the Hub: told apart with at most one question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from dgt.utils.hub import check_on_hub


@pytest.fixture
def answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Exception | None], list[str]]]:
    """Sets what the Hub answers; gives the names that it is asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    check_on_hub.cache_clear()

    def set_answer(error: Exception | None) -> list[str]:
        asked: list[str] = []

        def repo_info(_: Any, name: str, **__: Any) -> None:
            asked.append(name)
            if error is not None:
                raise error

        monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)
        return asked

    yield set_answer
    check_on_hub.cache_clear()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HfHubHTTPError("404", response=SimpleNamespace(headers={}, request=None)), "has no such"),
        (ConnectionError("no network"), r"cannot be asked \(no network\)"),
        (OfflineModeIsEnabled("offline"), "was not downloaded before, and HF_HUB_OFFLINE is set"),
    ],
)
def test_what_is_neither_here_nor_there_is_asked_for_once(
    answer: Callable[[Exception | None], list[str]], error: Exception, reason: str
) -> None:
    asked = answer(error)
    with pytest.raises(ValueError, match=rf"^root nobody/pest: there is no such folder.*{reason}"):
        check_on_hub("root", "nobody/pest", "dataset")
    assert asked == ["nobody/pest"]


def test_a_path_or_what_was_downloaded_is_not_asked_for(
    answer: Callable[[Exception | None], list[str]], tmp_path: Path
) -> None:
    asked = answer(None)
    (tmp_path / "photos").mkdir()
    with pytest.raises(FileNotFoundError, match="root photos/pest: there is no such file"):
        check_on_hub("root", "photos/pest", "dataset")
    (tmp_path / "cache" / "models--somebody--vit").mkdir(parents=True)
    check_on_hub("model", "somebody/vit", "model")
    assert asked == []
    check_on_hub("root", "somebody/vit", "dataset")
    assert asked == ["somebody/vit"]
