"""Whether ``backend="auto"`` may use the kernels: checked once, remembered, never during graph capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dgt.ops.triton import fallback, operators, self_check


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No verdicts, in memory or in a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fallback, "_verdicts", {})
    yield
    fallback.failures.clear()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The types that would be checked, without checking them."""
    found: list[torch.dtype] = []

    def pretend(device: torch.device, dtype: torch.dtype) -> str:
        found.append(dtype)
        return ""

    monkeypatch.setattr(self_check, "find_reason", pretend)
    return found


def wrong_keys(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """The operator's result with one wrong id."""
    result = list(operators.attention(*arguments))
    result[3] = result[3].clone()
    result[3][0, 0, 3, -1] += 1
    return tuple(result)


def wrong_gradient(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """The operator's result with an extra term that only affects gradients."""
    output, *rest = operators.attention(*arguments)
    return (output + (arguments[1] - arguments[1].detach()), *rest)


def wrong_residual_keys(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """The operator's result with one wrong residual value."""
    result = list(operators.summarize_clusters(*arguments))
    result[1] = result[1].clone()
    result[1][0, 0, 3, 2] += 0.1
    return tuple(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernels_are_right(device: str, dtype: torch.dtype) -> None:
    """The small cases pass, forward and backward, for few tokens and many."""
    assert self_check.find_reason(torch.device(device), dtype) == ""


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        ("attention", wrong_keys, "wrong keys"),
        ("attention", wrong_gradient, "gradient of key"),
        ("summarize_clusters", wrong_residual_keys, "residual values"),
    ],
)
def test_wrong_results_are_told_once_and_remembered(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, words: str
) -> None:
    both = {"attention": operators.attention, "summarize_clusters": operators.summarize_clusters}
    members = {key: staticmethod(function) for key, function in (both | {name: broken}).items()}
    monkeypatch.setattr(self_check, "SIZES", ((97, 20),))
    monkeypatch.setattr(self_check, "operators", type("Broken", (), members))
    with pytest.warns(RuntimeWarning, match=f"do not work on {device}.*{words}"):
        assert not fallback.can_trust(device, torch.float32)
    assert not fallback.can_trust(device, torch.float32)  # a second warning would be an error


def test_a_verdict_is_found_by_the_next_process(
    device: str, tried: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fallback.can_trust(device, torch.float32)
    monkeypatch.setattr(fallback, "_verdicts", {})
    assert fallback.can_trust(device, torch.float32)
    assert tried == [torch.float32]
    assert fallback.can_trust(device, torch.float16)  # another type is checked separately
    assert tried == [torch.float32, torch.float16]
    monkeypatch.setattr(fallback, "_verdicts", {})
    monkeypatch.setattr(self_check, "kernels_digest", lambda: "other kernels")
    assert fallback.can_trust(device, torch.float32)
    assert tried[2:] == [torch.float32]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{"])
def test_a_file_that_nobody_can_read_is_no_verdict(
    device: str, tried: list[torch.dtype], content: str
) -> None:
    self_check.cache_file().parent.mkdir(parents=True)
    self_check.cache_file().write_text(content, encoding="utf-8")
    assert fallback.can_trust(device, torch.float32)
    assert tried == [torch.float32]


def test_a_folder_that_cannot_be_written_to(
    device: str, tried: list[torch.dtype], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert fallback.can_trust(device, torch.float32)
    assert len(tried) == 1


def test_nothing_is_tried_while_a_graph_is_made(
    device: str, tried: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fallback.can_trust(device, torch.float32)
    monkeypatch.undo()
    assert tried == []


def test_a_kernel_that_fails_is_told_but_not_remembered(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise fallback.KernelError("the Triton kernel pick_all failed")

    monkeypatch.setattr(self_check, "find_reason", fail)
    with pytest.warns(RuntimeWarning, match="pick_all failed"):
        assert not fallback.can_trust(device, torch.float32)
    assert not self_check.cache_file().exists()
