"""`dgt.accelerate`: grouped attention in a trained model, within a user-chosen error.

One pass over the inputs captures the model's outputs and measures the time and error of settings at
every attention call (``sites``, ``measure``). A second measures how far the errors of single
layers propagate (``sensitivity``). A choice of settings (``choose``) is confirmed by running the
model, in three passes at most (``confirm``), put into it and timed (``install``).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dgt.acceleration.decomposed_bias import reasons_against_replacing
from dgt.acceleration.exact import exact_sites
from dgt.acceleration.grouped import install_sites
from dgt.acceleration.inputs import Inputs, read_items
from dgt.acceleration.install import install_fastest
from dgt.acceleration.intercept import (
    exact_attention,
    install_processors,
    installed_processors,
    uninstall_processors,
)
from dgt.acceleration.measure import measure_model
from dgt.acceleration.plan import count_alike
from dgt.acceleration.prefix_tokens import PrefixTokens
from dgt.acceleration.report import Report
from dgt.acceleration.search import (
    Forward,
    check_error,
    check_model,
    check_prefix_tokens,
    read_search,
)
from dgt.acceleration.sites import LEAST_TOKENS, AttentionSite, find_sites
from dgt.ops.checks import describe
from dgt.utils.errors import UserError
from dgt.utils.modes import in_evaluation


@torch.no_grad()
def accelerate(
    model: nn.Module,
    inputs: Inputs | None = None,
    error: float = 0.01,
    *,
    forward: Forward | None = None,
    metric: Callable[[list[Any]], float] | None = None,
    approximate: str | Sequence[str] | None = None,
    num_prefix_tokens: PrefixTokens | None = None,
    guard: bool = True,
    first_order: bool = True,
) -> Report:
    """Accelerate a trained model's attention in place, without training, within an error.

    Every attention that ends in ``F.scaled_dot_product_attention`` is looked at: timm's, Hugging
    Face's with ``attn_implementation="sdpa"`` (or "dgt", :func:`dgt.register_attention`),
    ``nn.MultiheadAttention``, any other. It is done in groups (:func:`dgt.clustered_attention`), by
    the native dense kernel (:func:`dgt.dense_attention`), or stays as it is, whichever is fastest
    within the error; the report says why. Weights stay as they are; ``with
    dgt.exact_attention(model):`` has the original attention back. The model is run at most six
    times an input.

    Args:
        model: any module; its mode stays. What was applied to it before is replaced.
        inputs: at least 2, of the kind and size that the model will see, and none that it was
            trained on: a dozen, or 200 where errors differ much between inputs, as a classifier's
            do (the report says which). A tensor (N, ...), each of whose N is one input; a mapping
            for ``model(**inputs)``, as Hugging Face's processors return, whose tensors, all of them
            (N, ...), are split; or a sequence with one item per call: a tensor, a mapping of
            arguments by name, or a tuple of arguments in their order. Random numbers that a model draws
            in evaluation are the same whenever an input is run. None with ``error=0`` alone:
            every module whose code calls attention then has it done by the native dense kernel at
            shapes where that is faster on this processor, which the first call of a shape finds out
            in about a second.
        error: relative error, ``|after - before| / |before|``, in [0, 1). The search aims at one
            unseen input in twenty above it at most, and hardly any above twice as much: an upper
            bound, at 95 %, of the error of many together is kept below half of it. 0 allows exact
            attention alone, which is equal up to rounding.
        forward: ``forward(model, item)`` returns the tensors whose error counts, in tuples, lists
            or mappings. By default what the model returns, at padding, too; of a model of timm
            without a head, all its tokens.
        metric: ``metric(outputs)``, a number: a figure of the task for the list of what
            ``forward`` returned, one an input; the report has it before and after.
        approximate: which attention may be in groups: a pattern of module names as shells have
            them, such as ``"*.cross_attn"``, or several. Each is for a module and all inside it; all
            other attention stays exact, by the native dense kernel where that is faster. None for all.
        num_prefix_tokens: class and register tokens, which belong to no group: how many are at the
            start of every sequence; or a list of their positions; or :class:`dgt.FrameTokens` for some
            in every frame. None asks the model, and takes none if it does not say.
        guard: whether accelerated attention checks itself on every input: up to 48 queries are
            attended exactly, and where they differ by more than on ``inputs``, the attention is done again
            with more keys, or densely (:func:`dgt.guard_counts` says how often). Compiled and
            exported models run without it.
        first_order: whether groups may have what residual keys lose to first order added
            (:func:`dgt.clustered_attention`): at 5,000 tokens half the error.

    Returns:
        The :class:`Report`; it prints as a table, and :meth:`Report.save` keeps the plan.

    Raises:
        TypeError, ValueError: with the argument's name, what was expected, and what was passed; for
            a model that fails on the inputs, is compiled already or has no attention. Whatever is
            raised, the model is as it was, settings of before included.

    Example:
        >>> model = timm.create_model("vit_small_patch14_dinov2", pretrained=True, img_size=1036)
        >>> report = dgt.accelerate(model, images, error=0.05)
        >>> report.save("plan.json")
        >>> dgt.accelerate(another_model, error=0)  # exact, at once
    """
    if inputs is None:
        of_inputs = {"forward": forward, "metric": metric, "approximate": approximate}
        return accelerate_exactly(model, error, of_inputs)
    search = read_search(
        model,
        inputs,
        error,
        forward=forward,
        metric=metric,
        num_prefix_tokens=num_prefix_tokens,
        guard=guard,
        first_order=first_order,
        approximate=approximate,
    )
    with in_prediction(model), original_or_unchanged(model):
        measure_model(search)
        return install_fastest(search)


def accelerate_exactly(model: nn.Module, error: float, of_inputs: Mapping[str, Any]) -> Report:
    """Exact attention by the faster kernel without inputs. Raises as :func:`accelerate`.

    Args:
        model, error: as there.
        of_inputs: the arguments that mean nothing without inputs, by name; all must be None.
    """
    check_model(model)
    check_error(error)
    if error != 0:
        raise UserError(f"inputs must be given where error is above 0, got None and {error!r}")
    for name, value in of_inputs.items():
        if value is not None:
            raise UserError(f"{name} must be None without inputs, got {describe(value)}")
    sites = exact_sites(model, reasons_against_replacing(model))
    install_sites(model, sites)
    matching = count_alike(model, [site.name for site in sites])
    return Report(asked_error=0.0, layers=sites, matching_modules=matching)


@torch.no_grad()
def inspect_model(
    model: nn.Module,
    inputs: Inputs,
    num_prefix_tokens: PrefixTokens | None = None,
    least_tokens: int = LEAST_TOKENS,
) -> list[AttentionSite]:
    """List the call sites that :func:`dgt.accelerate` would find, without measuring.

    Args:
        model: as in :func:`dgt.accelerate`.
        inputs: as there; one is enough, and both may be of the "meta" device, which has no values.
            The first is given to the model.
        num_prefix_tokens: as there.
        least_tokens: call sites of fewer are reported as dense.

    Returns:
        Every call site, in the order of the calls; where ``reason`` is not empty it could not be done
        in groups.

    Raises:
        TypeError, ValueError: as :func:`dgt.accelerate`.

    Example:
        >>> [site.reason for site in inspect_model(model, images)]
        ['', '']
    """
    check_model(model)
    prefix = check_prefix_tokens(num_prefix_tokens)
    item = read_items(inputs)[0]
    with in_prediction(model), exact_attention(model):
        return find_sites(model, item, prefix, least_tokens)


@contextlib.contextmanager
def original_or_unchanged(model: nn.Module) -> Iterator[None]:
    """Take out of a model what is installed, and put it back if an error is raised."""
    before = installed_processors(model)
    uninstall_processors(model)
    try:
        yield
    except BaseException:
        install_processors(model, before)
        raise


@contextlib.contextmanager
def in_prediction(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode inside this context, and leave no trace of it in random generators."""
    devices = {tensor.get_device() for tensor in model.parameters() if tensor.is_cuda}
    with in_evaluation(model), torch.random.fork_rng(devices=devices):
        yield
