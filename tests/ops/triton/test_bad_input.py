"""What users may get wrong with kernels: one message each, which says what to do."""

from __future__ import annotations

from collections.abc import Iterator
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

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
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


def test_second_derivatives(make_case: Any) -> None:
    """Kernels are differentiable once."""
    case = make_case(1, 1, 8, 8, 2, 3)
    output = dgt.dynamic_group_attention(*case[:5], backend="triton").output
    (grad,) = torch.autograd.grad(output.square().sum(), case.query, create_graph=True)
    with pytest.raises(
        NotImplementedError, match='differentiable only once; use backend="reference"'
    ):
        torch.autograd.grad(grad.square().sum(), case.query)


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


def test_auto_is_the_plain_path_on_the_cpu() -> None:
    from dgt.ops.backends import resolve_backend

    assert resolve_backend("auto", torch.zeros(1, 1, 2, 2)) in ("native", "torch")


class Broken:
    """A kernel that does not compile."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, _: object) -> object:
        raise RuntimeError("Failed to find C compiler")


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel that does not compile, with tensors for which ``auto`` would use it."""
    from dgt.ops import backends
    from dgt.ops.triton import fallback, selection

    def resolve(backend: str, *_: object) -> str:
        return backend if backend != "auto" else "torch" if fallback.failures else "triton"

    monkeypatch.setattr(selection, "pick_all", Broken("pick_all"))
    monkeypatch.setattr(backends, "resolve_backend", resolve)
    yield
    fallback.failures.clear()


@pytest.mark.usefixtures("_no_compiler")
def test_a_kernel_that_does_not_compile(make_case: Any, recwarn: pytest.WarningsRecorder) -> None:
    """``auto`` warns once and uses the plain path from then on; ``triton`` raises an error with the kernel's name."""
    case = make_case(1, 1, 8, 8, 2, 3)
    plain = dgt.dynamic_group_attention(*case[:5], backend="torch")
    for _ in range(2):
        found = dgt.dynamic_group_attention(*case[:5])
        assert torch.equal(found.output, plain.output)
    (warning,) = recwarn
    assert 'backend="auto" uses "torch" from now on' in str(warning.message)
    refused(
        case,
        RuntimeError,
        'kernel pick_all failed: RuntimeError: Failed to find C compiler; use backend="torch"',
    )


@pytest.mark.parametrize(("tokens", "prefix"), [(60, 0), (300, 0), (300, 3)])
def test_a_kernel_of_the_backward_pass_that_does_not_compile(
    make_case: Any,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    tokens: int,
    prefix: int,
) -> None:
    """With ``auto`` it finishes on the plain path with one warning; with a named backend it raises an error."""
    from dgt.ops import backends
    from dgt.ops.triton import dense, fallback, gathered

    monkeypatch.setattr(dense, "query_gradient_densely", Broken("query_gradient_densely"))
    monkeypatch.setattr(gathered, "query_gradient", Broken("query_gradient"))
    monkeypatch.setattr(
        backends, "resolve_backend", lambda backend, *_: "triton" if backend == "auto" else backend
    )
    case = make_case(1, 1, tokens, 16, 3, 20)
    gradients = {}
    for backend in ("auto", "torch"):
        given = {"backend": backend, "num_prefix_tokens": prefix}
        output = dgt.dynamic_group_attention(*case[:5], **given).output
        gradients[backend] = torch.autograd.grad(output.square().sum(), case[:3])
    for ours, theirs in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (warning,) = recwarn
    assert 'uses "torch" from now on' in str(warning.message)
    output = dgt.dynamic_group_attention(*case[:5], backend="triton").output
    with pytest.raises(RuntimeError, match=r"the Triton kernel query_gradient\w* failed"):
        output.sum().backward()
    fallback.failures.clear()
