"""Looking inside a model: what its DG-Attention layers grouped and selected, and what that selection is worth.

:func:`capture` serves all, records (:func:`group_records`), measures (:func:`diagnose`), the figures and the explorer,
for any module that holds such layers: a DGT as well as a model of timm after :func:`dgt.replace_attention`.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.layers.centroids import check_tau, check_tau_weighs
from dgt.ops import DynamicGroupAttentionOutput
from dgt.ops.attention_mass import attention_mass_of_choices
from dgt.ops.backends import check_backend
from dgt.ops.checks import check_count
from dgt.utils.errors import UserError

Value = TypeVar("Value")

CHECKS: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda value: check_count("top_k", value),
    "backend": check_backend,
    "tau": check_tau,
    "tau_weighs": check_tau_weighs,
}


class LayerInput(NamedTuple):
    """One DG-Attention layer and what it is about to get.

    ``name`` is the layer's in the model, e.g. ``stages.0.blocks.0.attn``; ``x`` its input, (B, H, W, C) or (B, L, C);
    ``mask`` bool, of the shape of ``x`` without channels, True where a token is real. ``grid`` has the rows and columns
    of the tokens without prefix; None where neither layer nor model tells.
    """

    name: str
    layer: DGAttention
    x: Tensor
    mask: Tensor | None
    grid: tuple[int, int] | None

    @property
    def prefix(self) -> int:
        """Class and register tokens before those of the grid; they belong to no group."""
        return int(getattr(self.layer, "num_prefix_tokens", 0))


class GroupRecord(NamedTuple):
    """Groups and keys of the DG-Attention layer ``name`` for a batch of images, on a ``grid`` of rows and columns.

    ``attention`` has ``group_ids`` (B, H, L), ``key_ids`` (B, H, G, K), and the output before projection, of the grid's
    tokens: class and register tokens, which belong to no group and are keys of all, are left out.
    """

    name: str
    grid: tuple[int, int]
    attention: DynamicGroupAttentionOutput


class BlockDiagnosis(NamedTuple):
    """The DG-Attention layer ``name`` for images of so many ``tokens``, prefix tokens (class, registers) aside.

    Masses are shares of global attention, means over images, heads and queries: on the keys that the query's group
    ``selected``; on as many drawn at ``random``, in expectation; on as many in a square ``window`` around the query
    (clipped at the border and grown to the same number; None where the layer gets tokens without a grid); on the k keys
    that hold most for all queries of a head together, the most that one group could reach, for the queries of the group
    together, the most that any choice for groups could, and for every query alone. Where ``top_k`` reaches ``tokens``,
    all are 1. ``perplexity`` is exp(entropy) of the group sizes of all images together,
    G where all are of one size, or image by image; ``groups_in_use`` have a query in any image: means over heads.
    """

    name: str
    tokens: int
    groups: int
    top_k: int
    selected: float
    random: float
    window: float | None
    best_for_all: float
    best_for_group: float
    best_for_query: float
    perplexity: float
    perplexity_per_image: float
    groups_in_use: float


def attention_layers(model: nn.Module) -> dict[str, DGAttention]:
    """The DG-Attention layers of a model by name, in order; TypeError for no module, ValueError where it has none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DGAttention)}
    if not layers:
        raise UserError(f"model must contain DGAttention layers, got a {type(model).__name__} without any")
    return layers


def set_attention(model: nn.Module, **settings: Any) -> int:
    """Set attributes of every DG-Attention layer of a model, e.g. ``set_attention(model, top_k=500, backend="torch")``.

    ``settings`` are ``top_k`` (int >= 1), ``backend``, ``tau`` (None, or from 0 to 1) and ``tau_weighs`` ("old" or
    "new"). Returns the number of layers set.

    Raises:
        TypeError: for an unknown setting, or a value of a wrong type.
        ValueError: for a value out of range, or a model without such a layer; nothing is set then.
    """
    layers = attention_layers(model).values()
    for name, value in settings.items():
        if name not in CHECKS:
            raise TypeError(f"settings must be among {', '.join(CHECKS)}, got {name!r}")
        CHECKS[name](value)
    if "backend" in settings:
        settings["backend"] = check_backend(settings["backend"])  # by its name of today
    for layer, (name, value) in product(layers, settings.items()):
        setattr(layer, name, value)
    return len(layers)


@torch.no_grad()
def capture(
    model: nn.Module, images: Tensor, look: Callable[[LayerInput], Value], mask: Tensor | None = None
) -> tuple[list[Value], Tensor]:
    """Run a model once, in evaluation mode, and look at every DG-Attention layer's input before the layer runs.

    Args:
        model: any module that contains :class:`dgt.DGAttention` layers; left as it was.
        images: (B, C, H, W), as the model takes them.
        look: called with each layer's input, in the order in which they run; must not change it.
        mask: optional bool (B, H, W), True where a pixel is real; for models whose ``forward_features`` takes one.

    Returns:
        What ``look`` returned for each layer, and the model's output (its features with a mask).

    Raises:
        TypeError: for no module, or no tensor.
        ValueError: for a model without such layers, and what the model itself raises for the images.
    """
    layers = attention_layers(model)
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor, got {type(images).__name__}")
    found: list[Value] = []

    def hook(name: str, layer: DGAttention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(look(_layer_input(name, layer, model, images, *args, **options)))

    modes = [(module, module.training) for module in model.modules()]
    hooks = [layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        model.eval()
        output: Tensor = model(images) if mask is None else model.forward_features(images, mask)  # type: ignore[operator]
    finally:
        for module, training in modes:
            module.training = training
        for handle in hooks:
            handle.remove()
    return found, output


def _layer_input(
    name: str, layer: DGAttention, model: nn.Module, images: Tensor, x: Tensor, second: Any = None, **options: Any
) -> LayerInput:
    """What a layer gets: its second argument is a mask of real tokens, or in Twins the (rows, columns) of the map."""
    mask, size = options.get("mask", second), options.get("size", second)
    seen = LayerInput(name, layer, x, mask if isinstance(mask, Tensor) else None, None)
    sizes = [tuple(x.shape[1:3])] if x.dim() == 4 else [size] if isinstance(size, tuple) else []
    if not sizes:  # timm's patch embeddings know the grid of their patches
        size_of = (getattr(module, "dynamic_feat_size", None) for module in model.modules())
        sizes = [tell(tuple(images.shape[-2:])) for tell in size_of if callable(tell)]
    grids = [(int(rows), int(columns)) for rows, columns in sizes]
    tokens = x.shape[1:-1].numel() - seen.prefix
    return seen._replace(grid=next((grid for grid in grids if grid[0] * grid[1] == tokens), None))


def group_records(model: nn.Module, images: Tensor, mask: Tensor | None = None) -> list[GroupRecord]:
    """Run images through a model and return what every DG-Attention layer grouped and selected, in order.

    Arguments and errors as in :func:`capture`; also ValueError for a layer whose tokens have no grid.
    """
    return capture(model, images, _record, mask)[0]


def _record(seen: LayerInput) -> GroupRecord:
    if seen.grid is None:
        raise UserError(f"the tokens of layer {seen.name!r} must lie on a grid, got {tuple(seen.x.shape)}")
    return GroupRecord(seen.name, seen.grid, _of_patches(seen))


def _of_patches(seen: LayerInput) -> DynamicGroupAttentionOutput:
    """What a layer does without its prefix, which is of no group and always the first keys of every one."""
    output, group_ids, key_ids = seen.layer.inspect(seen.x, seen.mask)
    start = seen.prefix
    return DynamicGroupAttentionOutput(output[:, :, start:], group_ids[:, :, start:], key_ids[..., start:] - start)


def diagnose(model: nn.Module, images: Tensor, mask: Tensor | None = None) -> list[BlockDiagnosis]:
    """Measure what every DG-Attention layer of a model grouped and selected for a batch of images.

    The paper argues that a group's few keys hold most of what global attention would look at, and more than a window
    near the query does, or the same keys for all. Memory grows with the square of the tokens, in slices of queries.
    Arguments and errors as in :func:`capture`.
    """
    return capture(model, images, _diagnose_layer, mask)[0]


def _diagnose_layer(seen: LayerInput) -> BlockDiagnosis:
    layer = seen.layer
    query, key, _ = (tensor[:, :, seen.prefix :] for tensor in layer.split_heads(seen.x))
    _, group_ids, key_ids = _of_patches(seen)
    masses = attention_mass_of_choices(query, key, group_ids, key_ids, layer.scale, seen.grid)
    means = {choice: float(value[group_ids >= 0].mean()) for choice, value in masses.items()}
    groups = layer.centroids.shape[1]
    counts = nn.functional.one_hot(group_ids + 1, groups + 1).sum(2)[..., 1:]  # (B, H, G); padding is -1
    together = counts.sum(0)
    sizes: dict[str, Any] = {
        "perplexity": float(_perplexity(together).mean()),
        "perplexity_per_image": float(_perplexity(counts).mean()),
        "groups_in_use": float((together > 0).sum(-1).double().mean()),
    }
    return BlockDiagnosis(seen.name, query.shape[2], groups, layer.top_k, **{"window": None, **means, **sizes})


def _perplexity(counts: Tensor) -> Tensor:
    """exp(entropy) of sizes along the last axis."""
    share = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(-1).exp()
