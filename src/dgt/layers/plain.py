"""Whether a module does just what its class does, so that something faster may stand in for a call.

What a module does can be changed in many ways: by hooks of its own or of all modules, which adapters, pruning and
profilers use; by a subclass or a parametrization, which take the place of the class; by another ``forward``; by a
compiler. A module that is not called would obey none of them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules import module as all_modules

_Class = TypeVar("_Class", bound=type[nn.Module])
_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {}
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_HOOKS_OF_ALL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def can_be_skipped(cls: _Class) -> _Class:
    """Register a class whose calls something faster may stand in for; a decorator."""
    _FORWARDS[cls] = cls.forward
    return cls


for _class in (nn.GELU, nn.BatchNorm2d, nn.Conv2d, nn.Linear, nn.Dropout):
    can_be_skipped(_class)


def is_unchanged(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Tell whether a module is of exactly this class, and nothing changes what a call of it does.

    Args:
        module: any module.
        cls: one that :func:`can_be_skipped` took, of this package or of PyTorch.

    Returns:
        False also for hooks that only see state dicts: whoever has them watches the module.

    Example:
        >>> is_unchanged(nn.GELU(), nn.GELU)
        True
    """
    if type(module) is not cls or cls.forward is not _FORWARDS[cls]:
        return False
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    if any(getattr(module, name) for name in _HOOKS):
        return False
    return not any(getattr(all_modules, name) for name in _HOOKS_OF_ALL)
