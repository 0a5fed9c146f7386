"""The mode of a model, training or evaluation, changed for a while."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside this context; then every module has its own mode again.

    Modules that do more in ``train`` than to note the mode, as adapters that merge their weights in
    evaluation, are asked to go back.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode and type(module).train is not nn.Module.train:
                module.train(mode)
            module.training = mode
