"""Look inside a model: the groups and selected keys of its DG-Attention layers, and their quality.

:func:`capture` serves records (:func:`group_records`), measures (:func:`diagnose`), the figures and
the explorer, for any module that holds such layers: a DGT as well as a timm model after
:func:`dgt.replace_attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dgt.layers import DGAttention
from dgt.layers.centroids import check_tau, check_tau_weighs
from dgt.ops import DynamicGroupAttentionOutput
from dgt.ops.attention_mass import attention_mass_of_choices, residual_share
from dgt.ops.checks import check_count
from dgt.ops.dispatch import check_backend
from dgt.utils.errors import UserError
from dgt.utils.modes import in_evaluation

Value = TypeVar("Value")

CHECKS: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda value: check_count("top_k", value),
    "backend": check_backend,
    "tau": check_tau,
    "tau_weighs": check_tau_weighs,
    "residual_keys": lambda value: check_count("residual_keys", value, least=0),
}


class LayerInput(NamedTuple):
    """One DG-Attention layer and its input.

    Attributes:
        name: of the layer in the model, e.g. ``stages.0.blocks.0.attn``.
        layer: the layer.
        x: its input, (B, H, W, C) or (B, L, C).
        mask: bool, of the shape of ``x`` without channels, True where a token is real, or None.
        grid: rows and columns of the tokens without prefix; None where neither layer nor model
            tells.
    """

    name: str
    layer: DGAttention
    x: Tensor
    mask: Tensor | None
    grid: tuple[int, int] | None

    @property
    def prefix(self) -> int:
        """Class and register tokens before those of the grid; they belong to no group."""
        return self.layer.num_prefix_tokens


class GroupRecord(NamedTuple):
    """Groups and keys of one DG-Attention layer for a batch of images.

    Attributes:
        name: of the layer in the model.
        grid: rows and columns of the tokens.
        attention: ``group_ids`` (B, H, L), ``key_ids`` (B, H, G, K), and the output before
            projection, of the grid's tokens: class and register tokens, which belong to no group
            and are keys of all, are left out.
        residual_share: (B, H, L), the share of every query's attention that goes to residual keys;
            None for a layer without them.
    """

    name: str
    grid: tuple[int, int]
    attention: DynamicGroupAttentionOutput
    residual_share: Tensor | None = None


class BlockDiagnosis(NamedTuple):
    """How good the selection of one DG-Attention layer is, on a batch of images.

    Masses are shares of global attention, means over images, heads and queries. Where ``top_k``
    reaches ``tokens``, all are 1.

    Attributes:
        name: of the layer in the model.
        tokens: number of tokens, without prefix tokens (class, registers).
        groups: G.
        top_k: k.
        selected: mass on the keys that the query's group selected.
        random: mass on as many random keys, in expectation.
        window: mass on as many keys in a square window around the query (clipped at the border and
            grown to the same number); None where the layer gets tokens without a grid.
        best_for_all: mass on the k keys that hold most for all queries of a head together.
        best_for_group: mass on the k keys that hold most for the queries of the group together, the
            most that any selection by group could reach.
        best_for_query: mass on the k keys that hold most for every query alone.
        perplexity: exp(entropy) of the group sizes of all images together, G where all are of one
            size; mean over heads.
        perplexity_per_image: the same, image by image.
        groups_in_use: groups with a query in any image; mean over heads.
        distinct_keys: different keys that the groups of an image select together, of groups with a
            query; mean over images and heads.
        overlap: share of its keys that a group has in common with another one of the same image and
            head; mean over all pairs of groups with a query, NaN where there are none. 1: all groups
            select the same keys.
        residual: share of the layer's own attention that goes to residual keys; None without them.
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
    distinct_keys: float
    overlap: float
    residual: float | None = None


def attention_layers(model: nn.Module) -> dict[str, DGAttention]:
    """Return the DG-Attention layers of a model by name, in order.

    Raises:
        TypeError: ``model`` is no module.
        UserError: it has no such layer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, DGAttention)
    }
    if not layers:
        kind = type(model).__name__
        raise UserError(f"model must contain DGAttention layers, got a {kind} without any")
    return layers


def set_attention(model: nn.Module, **settings: Any) -> int:
    """Set attributes of every DG-Attention layer of a model.

    Args:
        model: any module that contains :class:`dgt.DGAttention` layers.
        settings: ``top_k`` (int >= 1), ``backend``, ``tau`` (None, or from 0 to 1),
            ``tau_weighs`` ("old" or "new") and ``residual_keys`` (int >= 0).

    Returns:
        The number of layers set.

    Raises:
        TypeError: for an unknown setting, or a value of a wrong type.
        ValueError: for a value out of range, or a model without such a layer; nothing is set then.

    Example:
        >>> dgt.set_attention(timm.create_model("dgt_tiny"), top_k=500, backend="torch")
        20
    """
    layers = attention_layers(model).values()
    for name, value in settings.items():
        if name not in CHECKS:
            raise TypeError(f"settings must be among {', '.join(CHECKS)}, got {name!r}")
        CHECKS[name](value)
    for layer in layers:
        for name, value in settings.items():
            setattr(layer, name, value)
    return len(layers)


def different_residual_keys(source: str, before: int, now: int) -> str:
    """The line for weights that were trained with another number of residual keys."""
    return (
        f"{source} was trained with residual_keys {before}, and is used with {now}: "
        "its weights fit both, but results differ"
    )


@torch.no_grad()
def capture(
    model: nn.Module,
    images: Tensor,
    look: Callable[[LayerInput], Value],
    mask: Tensor | None = None,
) -> tuple[list[Value], Tensor]:
    """Run a model once, in evaluation mode, and look at the input of every DG-Attention layer.

    Args:
        model: any module that contains :class:`dgt.DGAttention` layers; left as it was.
        images: (B, C, H, W), as the model takes them.
        look: called with each layer's input, in the order in which they run; must not change it.
        mask: bool (B, H, W), True where a pixel is real, or None; for models whose
            ``forward_features`` takes one.

    Returns:
        What ``look`` returned for each layer, and the model's output (its features with a mask).

    Raises:
        TypeError: for no module, or no tensor.
        ValueError: for a model without such layers, and what the model raises for the images.

    Example:
        >>> model = timm.create_model("dgt_nano", num_classes=10).eval()
        >>> grids, logits = capture(model, torch.randn(1, 3, 64, 64), lambda seen: seen.grid)
        >>> grids[0], logits.shape
        ((16, 16), torch.Size([1, 10]))
    """
    layers = attention_layers(model)
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor, got {type(images).__name__}")
    found: list[Value] = []

    def hook(name: str, layer: DGAttention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(look(_layer_input(name, layer, model, images, *args, **options)))

    hooks = []
    for name, layer in layers.items():
        hooks.append(layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True))
    try:
        with in_evaluation(model):
            if mask is None:
                output: Tensor = model(images)
            else:
                output = model.forward_features(images, mask)  # type: ignore[operator]
    finally:
        for handle in hooks:
            handle.remove()
    return found, output


def _layer_input(
    name: str,
    layer: DGAttention,
    model: nn.Module,
    images: Tensor,
    x: Tensor,
    second: Any = None,
    **options: Any,
) -> LayerInput:
    """Assemble a layer's input.

    Its second argument is a mask of real tokens, or in Twins the (rows, columns) of the map.
    """
    mask = options.get("mask", second)
    size = options.get("size", second)
    seen = LayerInput(name, layer, x, mask if isinstance(mask, Tensor) else None, None)
    if x.dim() == 4:
        sizes = [tuple(x.shape[1:3])]
    elif isinstance(size, tuple):
        sizes = [size]
    else:
        sizes = _patch_grids(model, images)
    tokens = x.shape[1:-1].numel() - seen.prefix
    for rows, columns in sizes:
        if rows * columns == tokens:
            return seen._replace(grid=(int(rows), int(columns)))
    return seen


def _patch_grids(model: nn.Module, images: Tensor) -> list[Any]:
    """Return the grids of a model's patches: timm's patch embeddings know them."""
    grids = []
    for module in model.modules():
        tell = getattr(module, "dynamic_feat_size", None)
        if callable(tell):
            grids.append(tell(tuple(images.shape[-2:])))
    return grids


def group_records(
    model: nn.Module, images: Tensor, mask: Tensor | None = None
) -> list[GroupRecord]:
    """Run images through a model and return what every DG-Attention layer grouped and selected.

    Args:
        model, images, mask: as in :func:`capture`.

    Returns:
        A record for each layer, in the order in which they run.

    Raises:
        TypeError, ValueError: as :func:`capture`; also for a layer whose tokens have no grid.

    Example:
        >>> model = timm.create_model("dgt_nano", num_classes=10).eval()
        >>> record = dgt.group_records(model, torch.randn(1, 3, 64, 64))[0]
        >>> record.name, record.grid
        ('stages.0.blocks.0.attn', (16, 16))
    """
    return capture(model, images, _record, mask)[0]


def _record(seen: LayerInput) -> GroupRecord:
    if seen.grid is None:
        came = tuple(seen.x.shape)
        raise UserError(f"the tokens of layer {seen.name!r} must form a grid, got {came}")
    attention = seen.layer.inspect(seen.x, seen.mask)
    residual = _residual_share(seen, attention)
    return GroupRecord(seen.name, seen.grid, _of_patches(attention, seen.prefix), residual)


def _residual_share(seen: LayerInput, attention: DynamicGroupAttentionOutput) -> Tensor | None:
    """As in :class:`GroupRecord`."""
    layer, start = seen.layer, seen.prefix
    if not layer.residual_keys:
        return None
    query, key, _ = layer.split_heads(seen.x)
    return residual_share(
        query[:, :, start:],
        key,
        attention.group_ids[:, :, start:],
        attention.key_ids,
        layer.residual_keys,
        layer.scale,
        None if seen.mask is None else seen.mask.flatten(1),
        start,
    )


def _of_patches(attention: DynamicGroupAttentionOutput, prefix: int) -> DynamicGroupAttentionOutput:
    """Leave out a layer's prefix, which is in no group and always the first keys of every one."""
    output, group_ids, key_ids = attention
    return DynamicGroupAttentionOutput(
        output[:, :, prefix:], group_ids[:, :, prefix:], key_ids[..., prefix:] - prefix
    )


def diagnose(model: nn.Module, images: Tensor, mask: Tensor | None = None) -> list[BlockDiagnosis]:
    """Measure the groups and selected keys of every DG-Attention layer of a model, for a batch of images.

    The paper argues that a group's few keys hold most of what global attention would look at, and
    more than a window near the query does, or the same keys for all. Memory grows with the square
    of the tokens, in slices of queries.

    Args:
        model, images, mask: as in :func:`capture`.

    Returns:
        A diagnosis for each layer, in the order in which they run.

    Raises:
        TypeError, ValueError: as :func:`capture`.

    Example:
        >>> model = timm.create_model("dgt_nano", num_classes=10).eval()
        >>> found = dgt.diagnose(model, torch.randn(1, 3, 64, 64))[0]
        >>> 0 < found.selected <= found.best_for_query <= 1
        True
    """
    return capture(model, images, _diagnose_layer, mask)[0]


def _diagnose_layer(seen: LayerInput) -> BlockDiagnosis:
    """Measure one layer."""
    layer = seen.layer
    query, key, _ = (tensor[:, :, seen.prefix :] for tensor in layer.split_heads(seen.x))
    attention = layer.inspect(seen.x, seen.mask)
    _, group_ids, key_ids = _of_patches(attention, seen.prefix)
    masses = attention_mass_of_choices(query, key, group_ids, key_ids, layer.scale, seen.grid)
    means = {choice: float(value[group_ids >= 0].mean()) for choice, value in masses.items()}
    groups = layer.centroids.shape[1]
    counts = nn.functional.one_hot(group_ids + 1, groups + 1).sum(2)[..., 1:]  # padding is -1
    together = counts.sum(0)  # (H, G), from (B, H, G)
    residual = _residual_share(seen, attention)
    distinct_keys, overlap = _difference_of_keys(key_ids, counts > 0, key.shape[2])
    return BlockDiagnosis(
        name=seen.name,
        tokens=query.shape[2],
        groups=groups,
        top_k=layer.top_k,
        selected=means["selected"],
        random=means["random"],
        window=means.get("window"),
        best_for_all=means["best_for_all"],
        best_for_group=means["best_for_group"],
        best_for_query=means["best_for_query"],
        perplexity=float(_perplexity(together).mean()),
        perplexity_per_image=float(_perplexity(counts).mean()),
        groups_in_use=float((together > 0).sum(-1).double().mean()),
        distinct_keys=distinct_keys,
        overlap=overlap,
        residual=None if residual is None else float(residual[group_ids >= 0].mean()),
    )


def _difference_of_keys(key_ids: Tensor, is_used: Tensor, keys: int) -> tuple[float, float]:
    """How many distinct keys groups select together, and what share of them two groups have in common.

    Of (B, H, G, K) lists, -1 in empty places, and the (B, H, G) groups that count.
    """
    flags = torch.zeros(*key_ids.shape[:3], keys + 1, device=key_ids.device)  # the last: no key
    flags.scatter_(3, torch.where(key_ids < 0, keys, key_ids), 1.0)
    selected = flags[..., :keys] * is_used[..., None]
    distinct = selected.amax(2).sum(-1)  # (B, H)
    common = selected @ selected.mT  # (B, H, G, G)
    lengths = common.diagonal(dim1=2, dim2=3)
    pairs = is_used[..., :, None] & is_used[..., None, :]
    pairs &= ~torch.eye(pairs.shape[-1], dtype=torch.bool, device=pairs.device)
    overlap = (common / lengths.clamp(min=1)[..., None])[pairs].mean()
    return float(distinct.mean()), float(overlap)


def _perplexity(counts: Tensor) -> Tensor:
    """exp(entropy) of sizes along the last axis."""
    share = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(-1).exp()
