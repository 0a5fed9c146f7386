"""What users may get wrong with kernels: one message each, which says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

import dgt


def refused(case: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        dgt.dynamic_group_attention(*case[:5], backend="triton")


def test_cpu_tensors_without_the_interpreter(
    make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(1, 1, 8, 8, 2, 3)
    cpu = tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in case)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    refused(cpu, ValueError, 'query must be on a CUDA device.*use backend="torch"')


def test_a_gpu_that_is_too_old(make_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgt.ops.triton import launch

    class Old:
        dtype, shape, is_cuda, device = torch.float32, (1, 1, 8, 8), True, torch.device("cuda", 0)

    monkeypatch.setattr(launch, "_capability", lambda _: (7, 5))
    with pytest.raises(
        ValueError, match=r'8\.0 or later, but query is on one with 7\.5; use backend="torch"'
    ):
        launch.check_runnable("query", Old())  # type: ignore[arg-type]


def test_too_many_channels(make_case: Any) -> None:
    refused(make_case(1, 1, 8, 129, 2, 3), ValueError, "at most 128 channels per head.*got 129")


def test_float64(make_case: Any) -> None:
    refused(
        make_case(1, 1, 8, 8, 2, 3, dtype=torch.float64),
        TypeError,
        'got torch.float64; use backend="torch"',
    )


def test_bfloat16_in_the_interpreter(make_case: Any, device: str) -> None:
    if device == "cpu":
        case = make_case(1, 1, 8, 8, 2, 3, dtype=torch.bfloat16)
        refused(
            case,
            TypeError,
            'bfloat16 products are wrong, got torch.bfloat16; use one of these, or backend="torch"',
        )


def test_wrong_arguments_of_the_whole_operator(make_case: Any) -> None:
    """The same checks as those of the separate steps."""
    case = make_case(1, 1, 8, 8, 2, 3)
    refused(
        case._replace(centroids=case.centroids[:, :, :4]),
        ValueError,
        "centroids must have query's 8 channels",
    )
    refused(case._replace(top_k=0), ValueError, "top_k must be at least 1")
    with pytest.raises(ValueError, match="key_mask"):
        dgt.dynamic_group_attention(
            *case[:5], key_mask=torch.ones(1, 9, dtype=torch.bool), backend="triton"
        )
