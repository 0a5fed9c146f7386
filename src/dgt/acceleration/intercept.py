"""Attention calls of a model's modules, traced, or computed by something else.

A module whose calls are intercepted gets a subclass of its class, of the same name, that enters a
:class:`SDPAInterceptMode` around whatever runs when the module is called. So hooks, patched
forwards, copies, pickles and the replicas of ``DataParallel`` work as with any module, and the
module works through any method of the model. Where ``torch.fx`` traces it symbolically, its calls
are recorded with what computes them.

All calls of a module share what computes them: no model is known that would gain by a setting for each.
Differential attention makes two, whose values are wider than its keys; matchers make one for each
image and direction, which are alike.
"""

import contextlib
import copyreg
import functools
import threading
import warnings
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from dgt.acceleration.bypass import bypass_of
from dgt.acceleration.calls import SDPA, UNREADABLE, Call, read_call, read_multi_head
from dgt.utils.errors import UserError

_thread = threading.local()  # how many traces it is in
_counting = threading.Lock()  # of AttentionProcessor.num_exact


class SDPAInterceptMode(TorchFunctionMode):
    """While it is entered, ``answer(call)`` computes attention; where it returns None the function
    runs as ever.

    Args:
        answer: returns the output of a call, of the shape ``call.shape``, or None.
        module: the accelerated module whose calls these are; None where they are of any.
    """

    def __init__(
        self,
        answer: Callable[[Call], Any],
        module: "InterceptedModule | None" = None,
    ) -> None:
        super().__init__()
        self.answer = answer
        self.module = module
        self.has_seen_calls = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not SDPA and func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        self.has_seen_calls = True
        if any(isinstance(it, Tensor) and it.is_nested for it in (*args, *kwargs.values())):
            return func(*args, **kwargs)  # of no sizes that could be read
        if types and any(issubclass(kind, Proxy) for kind in types):
            if self.module is not None and func is SDPA:
                return self.module._record(*args, **kwargs)
            return func(*args, **kwargs)
        read = read_call if func is SDPA else read_multi_head
        call = read(*args, **kwargs)
        answer = self.answer(call)
        if answer is None:
            if call.reason is UNREADABLE and self.module is not None:
                warn_of_graph(self.module)
            if call.finish is None:
                return func(*args, **kwargs)
            answer = call.run()  # what was projected to be read is not projected again
        return answer if call.finish is None else call.finish(answer)


class AttentionProcessor:
    """Computes the attention calls of a module in which it is installed."""

    mixin: "type[InterceptedModule] | None" = None
    """What is mixed into the class of a module whose forward is replaced; None where it stays."""

    def __init__(self) -> None:
        self.num_exact = 0  # how many exact_attention are entered, in all threads

    def process(self, call: Call) -> Tensor | None:
        """Return a call's output, of the shape ``call.shape``; None where it is to run as ever."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_exact": 0}  # nothing would end exact_attention for a copy


class InterceptedModule(nn.Module):
    """Mixed into the class of a module whose attention calls a processor computes."""

    attention_processor: AttentionProcessor | None = None
    name_in_model = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps classes that are made here out of registries of the classes that they are made of."""

    # Not __call__: where a class overrides that to compute parts again in the backward pass, it
    # keeps what comes below.
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        processor = self.attention_processor
        if processor is None or processor.num_exact:
            return super()._call_impl(*args, **kwargs)
        mode = SDPAInterceptMode(processor.process, self)
        with mode:
            output = super()._call_impl(*args, **kwargs)
        if not torch.compiler.is_compiling() and not mode.has_seen_calls:
            warn_of_bypass(self)
        return output

    def _record(self, *args: Any, **kwargs: Any) -> Proxy:
        """Record a call that ``torch.fx`` traces symbolically, with what computes it."""
        processor: Any = self.attention_processor
        graph_call: Proxy = attend_in_graph(processor, *args, **kwargs)
        return graph_call

    def __prepare_scriptable__(self) -> Any:
        raise UserError(
            "an accelerated model cannot be scripted by torch.jit.script, which reads forward alone: trace it with "
            "torch.jit.trace, or export it with torch.export"
        )

    def extra_repr(self) -> str:
        """Adds how attention is computed."""
        words = [super().extra_repr(), str(self.attention_processor or "")]
        return ", ".join(word for word in words if word)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *state = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            return new_intercepted, (original_class(self), mixin_of(self)), *state
        return function, arguments, *state


def attend_in_graph(processor: AttentionProcessor, *args: Any, **kwargs: Any) -> Any:
    """A call of an accelerated module in a graph of ``torch.fx``.

    While one is traced, also again, as when it is loaded from a file, the call is recorded, and the
    processor as an attribute of what has it.

    Args:
        processor: of the module.
        args, kwargs: those of ``F.scaled_dot_product_attention``.
    """
    proxies = (operand for operand in (*args, *kwargs.values()) if isinstance(operand, Proxy))
    traced = next(proxies, None)
    if traced is not None:
        tracer: Any = traced.tracer
        holder = next(
            name
            for name, module in tracer.root.named_modules()
            if vars(module).get("attention_processor") is processor
        )
        name = ".".join(filter(None, (holder, "attention_processor")))
        constant = tracer.create_proxy("get_attr", name, (), {})
        return tracer.create_proxy("call_function", attend_in_graph, (constant, *args), kwargs)
    call = read_call(*args, **kwargs)
    output = None if processor.num_exact else processor.process(call)
    return call.run() if output is None else output


@functools.cache
def intercepted_class(
    kind: type[nn.Module], mixin: type[InterceptedModule] = InterceptedModule
) -> type[nn.Module]:
    """The subclass that a module of this class gets when its calls are intercepted."""
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    metaclass: Any = type(kind)
    # Not by calling it: a metaclass may keep a registry of what it makes.
    make: Any = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
    return make(metaclass, kind.__name__, (mixin, kind), names)


def new_intercepted(
    kind: type[nn.Module], mixin: type[InterceptedModule] = InterceptedModule
) -> nn.Module:
    """An intercepted module of this original class, whose state is yet to be set."""
    intercepted = intercepted_class(kind, mixin)  # type: ignore[arg-type]
    return intercepted.__new__(intercepted)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before parametrizations, and before its calls were intercepted."""
    kind = parametrize.type_before_parametrizations(module)
    return kind.__bases__[1] if issubclass(kind, InterceptedModule) else kind


def mixin_of(module: InterceptedModule) -> type[InterceptedModule]:
    """What is mixed into the class of an intercepted module."""
    kind: Any = parametrize.type_before_parametrizations(module)
    return kind.__bases__[0]


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make a module one of another class.

    The class that parametrizations have given it, which has their properties, stays the outermost:
    PyTorch looks for it there when they are removed.
    """
    if parametrize.is_parametrized(module):
        top = type(module)
        names = {
            name: value
            for name, value in vars(top).items()
            if name not in ("__dict__", "__weakref__")
        }
        kind = type.__new__(type(top), top.__name__, (kind,), names)
    module.__class__ = kind


def warn_of_bypass(module: InterceptedModule) -> None:
    """Warn that an accelerated module has made no call that could be intercepted."""
    advice = bypass_of(module)
    warnings.warn(
        f"the attention of {module.name_in_model!r} is not accelerated: it did not call "
        f"F.scaled_dot_product_attention{f' ({advice})' if advice else ''}",
        RuntimeWarning,
        stacklevel=4,
    )


def warn_of_graph(module: InterceptedModule) -> None:
    """Warn that a graph holds a module's attention as it was, as its mask is not known to be one of keys."""
    if torch.compiler.is_dynamo_compiling():
        return
    warnings.warn(
        f"the attention of {module.name_in_model!r} is not accelerated in this graph: the values of its mask say "
        "whether it hides keys alone (pass a bool mask of the shape (B, 1, 1, S) for that)",
        RuntimeWarning,
        stacklevel=4,
    )


def install_processors(model: nn.Module, processors: Mapping[str, AttentionProcessor]) -> None:
    """Have the attention calls of some modules computed by processors from now on, and of no others.

    Args:
        model: what contains them.
        processors: by the modules' names.
    """
    uninstall_processors(model)
    for name, processor in processors.items():
        module: Any = model.get_submodule(name)
        if not isinstance(module, InterceptedModule):
            kind = original_class(module)
            mixin = processor.mixin or InterceptedModule
            set_class(module, intercepted_class(kind, mixin))  # type: ignore[arg-type]
            module.name_in_model = name
        module.attention_processor = processor


def uninstall_processors(model: nn.Module) -> None:
    """Make a model what it was before any :func:`install_processors`."""
    for module in model.modules():
        if isinstance(module, InterceptedModule):
            for name in ("attention_processor", "name_in_model"):
                vars(module).pop(name, None)
            set_class(module, original_class(module))


def is_accelerated(module: nn.Module) -> bool:
    """Whether a processor computes a module's own attention calls."""
    return isinstance(module, InterceptedModule) and module.attention_processor is not None


def installed_processors(model: nn.Module) -> dict[str, AttentionProcessor]:
    """What computes the attention calls of a model, by the names of the modules that make them."""
    return {
        name: module.attention_processor
        for name, module in model.named_modules()
        if isinstance(module, InterceptedModule) and module.attention_processor is not None
    }


@contextlib.contextmanager
def exact_attention(model: nn.Module) -> Iterator[None]:
    """Run an accelerated model with its original attention while this is entered, in all threads.

    Args:
        model: after :func:`dgt.accelerate` or :func:`dgt.apply_plan`.

    Returns:
        A context manager.

    Example:
        >>> with dgt.exact_attention(model):
        ...     before = model(images)
    """
    with switched_off(list(installed_processors(model).values())):
        yield


@contextlib.contextmanager
def switched_off(processors: Sequence[AttentionProcessor]) -> Iterator[None]:
    """Have no calls computed by these processors while this is entered, in all threads."""
    with _counting:
        for processor in processors:
            processor.num_exact += 1
    try:
        yield
    finally:
        with _counting:
            for processor in processors:
                processor.num_exact -= 1


def is_traced() -> bool:
    """Whether the calls of some model are being traced in this thread."""
    return getattr(_thread, "num_traces", 0) > 0


@contextlib.contextmanager
def trace_sdpa(model: nn.Module, answer: Callable[[str, int, Call], Any]) -> Iterator[None]:
    """While it is entered, ask ``answer`` for every call, with the name of the innermost module
    that makes it, and which of this module's calls it is, from 0.

    Args:
        model: its modules are hooked until this is left.
        answer: returns a call's output, or None to run the call.
    """
    inside: list[str] = []  # names of modules
    counts: dict[str, int] = defaultdict(int)
    hooks: list[Any] = []

    def enter(name: str, *_: Any) -> None:
        inside.append(name)

    def leave(*_: Any) -> None:  # nothing is returned: it would be the module's output
        inside.pop()

    def ask(call: Call) -> Any:
        name = inside[-1] if inside else ""
        number = counts[name]
        counts[name] += 1
        return answer(name, number, call)

    _thread.num_traces = getattr(_thread, "num_traces", 0) + 1
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with SDPAInterceptMode(ask):
            yield
    finally:
        _thread.num_traces -= 1
        for hook in hooks:
            hook.remove()
