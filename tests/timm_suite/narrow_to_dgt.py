"""A pytest plugin that restricts the generic tests in timm's tests/test_models.py to this package's models.

That file gets the models of every generic test from `timm.list_models`, which it binds at import;
pytest loads this plugin first. Tests of single timm models or of downloaded weights are deselected,
as they do not use our models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import dgt  # noqa: F401  (registers our models with timm)

# The generic tests of timm 1.0.20 and later. One that goes missing is an error, not a shorter run.
GENERIC_TESTS = {
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs",
    "test_model_forward_features",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_model_forward_fx",
    "test_model_backward_fx",
}

# PyTorch has deprecated TorchScript; timm, too, has models without it.
TORCHSCRIPT_TESTS = {"test_model_forward_torchscript", "test_model_forward_fx_torchscript"}

_list_models = timm.list_models
_modules = {name: timm.models.model_entrypoint(name).__module__ for name in _list_models()}
OUTSIDE = "dgt.models.from_transformers"  # timm's and transformers' own code
LARGER = {  # other sizes of models that run
    "dgt_small",
    "dgt_tiny_cmt_block",
    "dgt_tiny_cswin_block",
    "dgt_tiny_swin_block",
    "swin_tiny_dga",
    "cswin_tiny_dga",
    "cswin_small",
    "cswin_base",
    "vil_medium",
    "vil_base",
    "crossformer_base",
    "crossformer_large",
}
# A test that timm leaves out of its own CI because it is slow: only these models run it.
SLOW_TEST = "test_prune_intermediate_layers_contract"
RUN_SLOW_TEST = {"dgt_tiny", "cswin_tiny"}
OURS = {
    name for name, module in _modules.items() if module.startswith("dgt.") and module != OUTSIDE
} - LARGER


def list_our_models(
    filter: Any = "", module: Any = "", pretrained: bool = False, **kwargs: Any
) -> list[str]:
    """`timm.list_models` restricted to our models, and empty for tests that download weights.

    `module` is ignored, because timm's lists of module names do not include ours.
    """
    if pretrained:
        return []
    return [name for name in _list_models(filter, **kwargs) if name.partition(".")[0] in OURS]


timm.list_models = list_our_models


DRAWN = 65_521  # numbers, a prime: rows of a weight differ


def _drawn_in_part(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make large tensors repeat their first random numbers: drawing all took half the time of building a model."""

    def filled(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if self.numel() < 2 * DRAWN or not self.is_contiguous():
            return draw(self, *arguments, **options)
        numbers = draw(self.detach().new_empty(DRAWN), *arguments, **options)
        flat = self.detach().view(-1)
        for part in flat.split(DRAWN):
            part.copy_(numbers[: len(part)])
        return self

    return filled


for _name in ("uniform_", "normal_"):
    setattr(Tensor, _name, _drawn_in_part(getattr(Tensor, _name)))


def _model_of(item: pytest.Item) -> str:
    """The architecture that a test item is parametrized with, or an empty string."""
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("model_name") if callspec else None
    return name.partition(".")[0] if isinstance(name, str) else ""


@pytest.hookimpl(tryfirst=True)  # before -k and -m narrow further
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of our models, and check that every generic test has all of them."""
    models_of_test: dict[str, set[str]] = {}
    kept, dropped = [], []
    for item in items:
        model = _model_of(item)
        is_slow = item.originalname == SLOW_TEST and model not in RUN_SLOW_TEST
        is_left_out = is_slow or item.originalname in TORCHSCRIPT_TESTS
        (kept if model in OURS and not is_left_out else dropped).append(item)
        if model in OURS:
            models_of_test.setdefault(item.originalname, set()).add(model)
    for test in sorted(GENERIC_TESTS | set(models_of_test) - TORCHSCRIPT_TESTS):
        missing = sorted(OURS - models_of_test.get(test, set()))
        if missing or not OURS:
            lacking = ", ".join(missing) or "any model: none is registered"
            raise pytest.UsageError(f"timm's {test} does not run on {lacking}")
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_runtest_setup() -> None:
    """Give every test the same random numbers in every run.

    A traced model sums in a different order than the native kernels. With random weights a query
    between two groups may then change its group, which occasionally changes the output by more than
    timm's tolerance.
    """
    torch.manual_seed(0)


def pytest_report_header() -> str:
    """Print which tests run on which models."""
    return f"timm {timm.__version__}: its own tests on {', '.join(sorted(OURS)) or 'no model'}"
