"""Attention calls of a model's modules, traced, or computed by something else.

A module whose calls are intercepted gets a subclass of its class, of the same name, that enters a
:class:`SDPAInterceptMode` around whatever runs when the module is called. So hooks, patched
forwards, copies, pickles and the replicas of ``DataParallel`` work as with any module, and the
module works through any method of the model. Where ``torch.fx`` traces it symbolically, its calls
are recorded with what computes them.

A module that makes one attention call in a forward pass needs no state. Where it makes several, each
with settings of its own, the calls are numbered: by thread, from 0 in every outermost call of the
model, or of a part of it that contains the module.
"""

import contextlib
import copyreg
import functools
import itertools
import threading
import warnings
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
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
from dgt.acceleration.padding import hides_queries
from dgt.utils.errors import UserError

_thread = threading.local()  # its forward passes whose calls are numbered, and the traces it is in
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
        self.hides_queries = module is not None and module.hides_queries
        """Whether masks hide tokens as queries, too: :func:`dgt.acceleration.padding.hides_queries`."""
        self.has_seen_calls = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not SDPA and func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        self.has_seen_calls = True
        if types and any(issubclass(kind, Proxy) for kind in types):
            if self.module is not None and func is SDPA:
                return self.module._record(*args, **kwargs)
            return func(*args, **kwargs)
        if func is SDPA:
            call = read_call(*args, **kwargs, hides_queries=self.hides_queries)
        else:
            call = read_multi_head(*args, **kwargs)
        answer = self.answer(call)
        if answer is None:
            if call.reason is UNREADABLE and self.module is not None:
                warn_of_graph(self.module)
            return func(*args, **kwargs)
        return answer if call.finish is None else call.finish(answer)


class AttentionProcessor:
    """Computes the attention calls of a module in which it is installed.

    Args:
        calls: how many calls the module makes in a forward pass of the model, where each has
            settings of its own; 1 where all have the same.
    """

    def __init__(self, calls: int = 1) -> None:
        self.calls = calls
        self.num_exact = 0  # how many exact_attention are entered, in all threads

    def process(self, call: Call, number: int) -> Tensor | None:
        """Compute a call.

        Args:
            call: a call of the module.
            number: which of its calls in this forward pass it is, from 0; 0 where all are alike.

        Returns:
            The output, of the shape ``call.shape``; None where the call is to run as ever.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "num_exact": 0}  # nothing would end exact_attention for a copy


class InterceptedModule(nn.Module):
    """Mixed into the class of a module whose attention calls a processor computes, and into those
    of modules around one whose calls are numbered.
    """

    attention_processor: AttentionProcessor | None = None
    name_in_model = ""
    hides_queries = False
    """Whether masks of its calls hide tokens as queries, too."""
    call_numbers: "CallNumbers | None" = None
    """Where calls are numbered: all modules of a model share one."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keeps classes that are made here out of registries of the classes that they are made of."""

    # Not __call__: where a class overrides that to compute parts again in the backward pass, it
    # keeps what comes below.
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if self.call_numbers is None:
            return self._intercept(*args, **kwargs)
        forward_pass = ForwardPass(self)
        with forward_pass:
            if forward_pass.is_recursive:  # this is within the mode of the call around it
                return super()._call_impl(*args, **kwargs)
            return self._intercept(*args, **kwargs)

    def _intercept(self, *args: Any, **kwargs: Any) -> Any:
        processor = self.attention_processor
        if processor is None or processor.num_exact:
            return super()._call_impl(*args, **kwargs)
        answer: Callable[[Call], Any] = partial(processor.process, number=0)
        if processor.calls > 1:
            answer = partial(self._process, processor)
        mode = SDPAInterceptMode(answer, self)
        with mode:
            output = super()._call_impl(*args, **kwargs)
        if not torch.compiler.is_compiling() and not mode.has_seen_calls:
            warn_of_bypass(self)
        return output

    def _process(self, processor: AttentionProcessor, call: Call) -> Tensor | None:
        return processor.process(call, self._next_number(processor.calls))

    def _next_number(self, calls: int) -> int:
        return _passes()[self.call_numbers].next_number(self, calls)

    def _record(self, *args: Any, **kwargs: Any) -> Proxy:
        """Record a call that ``torch.fx`` traces symbolically, with what computes it."""
        processor: Any = self.attention_processor
        number = self._next_number(processor.calls) if processor.calls > 1 else 0
        graph_call: Proxy = attend_in_graph(processor, number, self.hides_queries, *args, **kwargs)
        return graph_call

    def extra_repr(self) -> str:
        """Adds how attention is computed."""
        words = [super().extra_repr(), str(self.attention_processor or "")]
        return ", ".join(word for word in words if word)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        function, arguments, *state = reduced
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            return new_intercepted, (original_class(self),), *state
        return function, arguments, *state


def attend_in_graph(
    processor: AttentionProcessor, number: int, hides_queries: bool, *args: Any, **kwargs: Any
) -> Any:
    """A call of an accelerated module in a graph of ``torch.fx``.

    While one is traced, also again, as when it is loaded from a file, the call is recorded, and the
    processor as an attribute of what has it.

    Args:
        processor, number, hides_queries: of the module, and which of its calls this is.
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
        settled = (constant, number, hides_queries)
        return tracer.create_proxy("call_function", attend_in_graph, (*settled, *args), kwargs)
    call = read_call(*args, **kwargs, hides_queries=hides_queries)
    output = None if processor.num_exact else processor.process(call, number)
    return call.run() if output is None else output


@functools.cache
def intercepted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass that a module of this class gets when its calls are intercepted."""
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    metaclass: Any = type(kind)
    # Not by calling it: a metaclass may keep a registry of what it makes.
    make: Any = ABCMeta.__new__ if issubclass(metaclass, ABCMeta) else type.__new__
    return make(metaclass, kind.__name__, (InterceptedModule, kind), names)


def new_intercepted(kind: type[nn.Module]) -> nn.Module:
    """An intercepted module of this original class, whose state is yet to be set."""
    intercepted = intercepted_class(kind)  # type: ignore[arg-type]
    return intercepted.__new__(intercepted)


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before parametrizations, and before its calls were intercepted."""
    kind = parametrize.type_before_parametrizations(module)
    if issubclass(kind, InterceptedModule) and kind.__bases__[0] is InterceptedModule:
        return kind.__bases__[1]
    return kind


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


def _passes() -> dict[object, "ForwardPass"]:
    """The forward passes of this thread whose calls are numbered, by the model."""
    if not hasattr(_thread, "passes"):
        _thread.passes = {}
    passes: dict[object, ForwardPass] = _thread.passes
    return passes


def _graph_task() -> int:
    """The backward pass that this is called in; -1 outside of one."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


class CallNumbers:
    """Stands for a model whose calls are numbered; a plain object is no key for Dynamo of PyTorch 2.11."""


class ForwardPass:
    """A call of a model, or of a part of it; in the outermost one of a thread calls are numbered.

    Raises:
        UserError: on leaving it, where it is of a part that makes fewer calls than the model: their
            numbers are then not those that they have in the model.
    """

    def __init__(self, module: InterceptedModule) -> None:
        self.module = module
        self.counts: dict[InterceptedModule, int] = {}
        self.inside: list[InterceptedModule] = []  # modules whose call is not over
        self.graph_task = _graph_task()
        self.outermost = _passes().get(module.call_numbers, self)
        self.is_recursive = module in self.outermost.inside

    def __enter__(self) -> None:
        _passes()[self.module.call_numbers] = self.outermost
        self.outermost.inside.append(self.module)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.outermost.inside.pop()
        if self.outermost is not self:
            return
        del _passes()[self.module.call_numbers]
        is_backward = self.graph_task >= 0  # where an error may be how a checkpoint stops early
        if error is None or (is_backward and isinstance(error, Exception)):
            self._check_counts()

    def next_number(self, module: InterceptedModule, calls: int) -> int:
        """The number of the next call of a module that makes so many."""
        if _graph_task() != self.graph_task:
            raise UserError(_wrong_numbers(module, calls, RECOMPUTED))
        number = self.counts.get(module, 0)
        self.counts[module] = number + 1
        return number

    def _check_counts(self) -> None:
        if not self.module.name_in_model:
            return  # a model may make fewer calls for some inputs
        for module, count in self.counts.items():
            processor = module.attention_processor
            if processor is not None and count < processor.calls:
                where = f"{count} in this call of its part {self.module.name_in_model!r}: call the model"
                is_backward = self.graph_task >= 0
                raise UserError(
                    _wrong_numbers(module, processor.calls, RECOMPUTED if is_backward else where)
                )


RECOMPUTED = (
    "are computed again in the backward pass, in another order: checkpoint the model as a whole "
    "or not at all, or train it in dgt.exact_attention"
)


def _wrong_numbers(module: InterceptedModule, calls: int, where: str) -> str:
    return f"the {calls} attention calls of {module.name_in_model!r} have settings of their own each, but {where}"


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
    """Have the attention calls of some modules computed by processors from now on.

    Args:
        model: what contains them.
        processors: by the modules' names.
    """
    call_numbers = CallNumbers()
    for name, processor in processors.items():
        _intercepted(model, name).attention_processor = processor
        if processor.calls == 1:
            continue
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            _intercepted(model, ".".join(parts[:depth])).call_numbers = call_numbers


def _intercepted(model: nn.Module, name: str) -> InterceptedModule:
    module: Any = model.get_submodule(name)
    if not isinstance(module, InterceptedModule):
        kind = original_class(module)
        set_class(module, intercepted_class(kind))  # type: ignore[arg-type]
        module.name_in_model = name
        module.hides_queries = hides_queries(kind)  # type: ignore[arg-type]
    return module


def uninstall_processors(model: nn.Module) -> None:
    """Make a model what it was before any :func:`install_processors`."""
    for module in model.modules():
        if isinstance(module, InterceptedModule):
            for name in ("attention_processor", "call_numbers", "name_in_model", "hides_queries"):
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
    processors = list(installed_processors(model).values())
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
    that makes it, and the number of the call as :class:`ForwardPass` has it.

    Args:
        model: its modules are hooked until this is left.
        answer: returns a call's output, or None to run the call.
    """
    inside: list[tuple[str, int]] = []  # names of modules, and which call of any module this is
    is_padded: list[bool] = [False]  # whether the mask of the innermost module hides queries
    serials = itertools.count()
    counts: dict[tuple[str, int], int] = defaultdict(int)
    hooks: list[Any] = []

    def enter(name: str, module: nn.Module, *_: Any) -> None:
        inside.append((name, next(serials)))
        is_padded.append(hides_queries(original_class(module)))  # type: ignore[arg-type]
        mode.hides_queries = is_padded[-1]

    def leave(*_: Any) -> None:  # nothing is returned: it would be the module's output
        inside.pop()
        is_padded.pop()
        mode.hides_queries = is_padded[-1]

    def ask(call: Call) -> Any:
        name = inside[-1][0] if inside else ""
        outermost = next((serial for part, serial in inside if contains(part, name)), -1)
        number = counts[name, outermost]
        counts[name, outermost] += 1
        return answer(name, number, call)

    mode = SDPAInterceptMode(ask)
    _thread.num_traces = getattr(_thread, "num_traces", 0) + 1
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with mode:
            yield
    finally:
        _thread.num_traces -= 1
        for hook in hooks:
            hook.remove()


def contains(name: str, other: str) -> bool:
    """Whether a module is or contains another one, by their names; the model's own name is empty."""
    return not name or other == name or other.startswith(f"{name}.")
