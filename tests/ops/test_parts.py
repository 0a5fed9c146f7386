"""Parts of the work that threads share: each is done once, errors arrive, and nothing of PyTorch's settings changes."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import dgt
from dgt.ops import eager, parts

CPU = torch.device("cpu")
MANY = 1 << 20  # tokens


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def many_small_parts(monkeypatch, three_threads):
    monkeypatch.setattr(parts, "LEAST", 64)
    monkeypatch.setattr(parts, "MOST", 512)
    for module in (parts, eager):
        monkeypatch.setattr(module, "MOST_SCORES", 512)
    monkeypatch.setattr(parts, "SHARED", 0)
    monkeypatch.setattr(eager, "SHARED", 0)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("most", [0, 1, 3, 1000])
def test_cuts_are_whole_and_even(count, most) -> None:
    pieces = [range(count)[piece] for piece in parts.cut(count, most)]
    assert [item for piece in pieces for item in piece] == list(range(count))
    assert max(map(len, pieces)) <= max(1, most)
    assert len(pieces) <= -(-count // max(1, most))


def test_every_part_is_done_once_by_threads_of_one_core_each(three_threads) -> None:
    done, met = [], threading.Barrier(3)

    def work(part: int) -> None:
        if part < 3:
            met.wait(60)  # three parts are under way at once
        done.append((part, torch.get_num_threads(), torch.is_inference_mode_enabled()))

    with torch.inference_mode():
        parts.run_parts(work, list(range(20)), CPU, MANY)

    assert sorted(done) == [(part, 1, True) for part in range(20)]
    found: list[int] = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert (torch.get_num_threads(), found) == (3, [3])  # here, and in what a program starts later


def test_a_single_part_keeps_all_threads_of_pytorch(three_threads) -> None:
    seen: list = []
    parts.run_parts(lambda part: seen.append((threading.current_thread(), torch.get_num_threads())), [0], CPU, MANY)
    assert seen == [(threading.main_thread(), 3)]


def test_errors_arrive_and_the_next_call_works(three_threads) -> None:
    def work(part: int) -> None:
        if part == 5:
            raise KeyError("five")

    with pytest.raises(KeyError, match="five"):
        parts.run_parts(work, list(range(9)), CPU, MANY)
    parts.run_parts(lambda part: None, list(range(9)), CPU, MANY)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(three_threads) -> None:
    parts.run_parts(lambda part: None, [0, 1], CPU, MANY)
    child = os.fork()
    if child == 0:
        parts.run_parts(lambda part: None, [0, 1], CPU, MANY)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("tokens", [50, 300])
@pytest.mark.parametrize("kind", ["plain", "masked", "remainder"])
def test_parts_change_nothing(tokens, kind, draw, close, with_gradients, many_small_parts) -> None:
    """Queries, groups and heads cut into many parts: the reference's result and gradients; the same every time."""
    assert tokens * tokens < 512 or len({part[2].start for part in parts.head_parts(2, 3, tokens, tokens)}) > 1
    query, key, value, centroids = draw(2, 3, tokens, 8, 7)
    mask = torch.rand(2, tokens) < 0.7 if kind == "masked" else None

    def run(*qkv, backend):
        settings = {"top_k": 20, "key_mask": mask, "backend": backend, "remainder": kind == "remainder"}
        return dgt.dynamic_group_attention(*qkv, centroids, **settings)

    def output(*qkv, backend):
        return run(*qkv, backend=backend).output

    ours, truth = run(query, key, value, backend="eager"), run(query, key, value, backend="reference")
    assert torch.equal(ours.group_ids, truth.group_ids)
    assert torch.equal(ours.key_ids, truth.key_ids)
    inputs = (query, key, value)
    fast, again, dense = (
        with_gradients(lambda *qkv, b=backend: output(*qkv, backend=b), inputs)
        for backend in ("eager", "eager", "reference")
    )
    for what, actual, other, expected in zip(("output", "query", "key", "value"), fast, again, dense, strict=True):
        close(actual, expected, what)
        assert torch.equal(actual, other)
