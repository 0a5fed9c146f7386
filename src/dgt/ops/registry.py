"""How an operator is registered with PyTorch, and which module computes it."""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dgt.ops import torch_backend
from dgt.ops.cpu import backend as native
from dgt.ops.native_loader import can_run_native

NAMESPACE = "dgt"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(
    *,
    fake: Callable[[SimpleNamespace], Any],
    flops: Callable[[SimpleNamespace], int],
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function of tensors as an operator, and return that.

    ``torch.library.custom_op`` does the same, but wraps the function: 6 us more a call.

    Args:
        fake: given the arguments of a call by their names, returns empty tensors of the results' shapes and strides.
        flops: given the same, but shapes for tensors, counts the floating-point operations.
        name: of the operator; None, that of the function.
    """

    def register(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)

        def by_name(*arguments: Any, **named: Any) -> SimpleNamespace:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            return SimpleNamespace(**bound.arguments)

        def make_fake(*arguments: Any, **named: Any) -> Any:
            return fake(by_name(*arguments, **named))

        def count(*arguments: Any, out_shape: Any, **named: Any) -> int:
            return flops(by_name(*arguments, **named))

        called = name or function.__name__
        schema = torch.library.infer_schema(function, mutates_args=())
        LIBRARY.define(called + schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(called, function, "CompositeExplicitAutograd")
        packet = getattr(getattr(torch.ops, NAMESPACE), called)
        torch.library.register_fake(packet.default, make_fake, lib=LIBRARY)
        register_flop_formula(packet)(count)
        return packet.default

    return register


def differentiate(
    target: Any,
    gradients: Callable[..., dict[str, Tensor | None]],
    save: Callable[[Any, SimpleNamespace, Any], None],
) -> None:
    """Register how the gradients of an operator are computed.

    ``torch.library.register_autograd`` does the same, but reads the schema once for each argument in every call: 100 to
    200 us for thirteen of them.

    Args:
        target: the operator.
        gradients: given a context and the gradients of the results, returns those of arguments by their names.
        save: given the context, the arguments of a call by their names, and its results, keeps what gradients need.
    """
    arguments = target._schema.arguments
    names = [argument.name for argument in arguments]
    defaults = [argument.default_value for argument in arguments]
    below = torch._C._after_autograd_keyset

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                results = target.redispatch(keyset & below, *arguments)
            ctx.given = names[: len(arguments)]
            every = (*arguments, *defaults[len(arguments) :])
            save(ctx, SimpleNamespace(**dict(zip(names, every, strict=True))), results)
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            found = gradients(ctx, *grads)
            return None, *(found.get(name) for name in ctx.given)

    def call(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return Gradients.apply(keyset, *arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return target.redispatch(keyset & below, *arguments)

    LIBRARY.impl(target, call, "Autograd", with_keyset=True)


def gradients_by_autograd(
    output: Tensor, of: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor | None]:
    """Ask autograd for gradients that have gradients themselves, of those tensors that need any.

    Args:
        output: what an operator gives, computed again by differentiable operations.
        of: arguments by their names.
        grad: gradient of the output.
    """
    asked = {name: tensor for name, tensor in of.items() if tensor.requires_grad}
    found = torch.autograd.grad(output, list(asked.values()), grad, create_graph=True)
    return dict(zip(asked, found, strict=True))


KERNELS: dict[str, ModuleType] = {"native": native, "torch": torch_backend}


def load_kernels(backend: str, tokens: Tensor) -> ModuleType:
    """Return the module that computes an operator for these tokens."""
    if backend == "auto":
        return native if can_run_native(tokens) else torch_backend
    return load_triton() if backend == "triton" else KERNELS[backend]


def can_run_triton(tokens: Tensor) -> bool:
    """Tell whether the Triton kernels are here and take these (B, H, L, D) tokens."""
    if not tokens.is_cuda or not _has_triton():
        return False
    return bool(load_triton().can_run(tokens))


@torch.compiler.assume_constant_result
def _has_triton() -> bool:
    """Tell whether Triton is installed and can be imported."""
    return _loads_triton()


@functools.cache
def _loads_triton() -> bool:
    try:
        load_triton()
    except ValueError:
        return False
    return True


def load_triton() -> ModuleType:
    """Return :mod:`dgt.ops.triton.backend`.

    Raises:
        ValueError: if Triton is not installed.
    """
    try:
        from dgt.ops.triton import backend
    except ImportError as error:
        raise ValueError(
            'backend="triton" needs Triton, which is not installed: pip install triton, '
            'or use backend="torch"'
        ) from error
    return backend
