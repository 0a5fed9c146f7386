"""Attention with a decomposed bias, as SAM and ViTDet have it, without making the bias of all pairs.

There a module adds to the score of each query and key what the query has for the key's row and for its
column: products with learned relative positions (MViTv2, arXiv:2112.01526, Eq. 4). Its own forward makes
a number for every pair of tokens of that, 805 MB in a global layer of SAM ViT-B at 1024 px. Here the
module's forward is replaced by one that hands the two tables to :func:`dgt.dense_attention`.

A module is found by its class (:data:`FORMS`), and compared with what replaces it when that is
installed, on a small grid and with relative positions drawn at random: one of another version that
computes something else is left alone.
"""

import copy
import threading
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.acceleration.calls import SDPA
from dgt.acceleration.exact import EXACT_GAIN, MOST_SCORES, median_ratio, rounded_sizes
from dgt.acceleration.intercept import (
    AttentionProcessor,
    InterceptedModule,
    install_processors,
    original_class,
)
from dgt.acceleration.settings import Setting
from dgt.acceleration.sites import AttentionSite, Measurement
from dgt.ops import dense_attention
from dgt.ops.checks import is_exporting, is_plain, needs_gradients
from dgt.ops.dense import join_tables

CHECKED_GRID = (5, 7)  # rows and columns of tokens of the comparison
SCALE_OF_POSITIONS = 0.25  # of those that are drawn: large enough to show in the output
NEAR = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far the output may be from the module's own, relative to that: rounding."""

_may_replace: dict[type[nn.Module], bool] = {}
"""Whether the forward of classes of transformers may be replaced, as the first module of each was found."""
_timing = threading.Lock()
_is_faster: dict[Hashable, bool] = {}
"""Whether tables are faster than PyTorch's attention with a mask, by shape, type and threads."""


class Form(NamedTuple):
    """How a class that is known is called, and what it returns."""

    tokens: str
    """The argument of its forward that has (B, rows, columns, C) tokens."""
    heads: str = "num_heads"
    switch: str = "use_rel_pos"
    others: tuple[None, ...] | None = None
    """What stands behind the tokens in the tuple that it returns; None where it returns tokens alone."""


TIMM = Form("x")
META = Form("x")
HUGGING_FACE = Form("hidden_states", heads="num_attention_heads", others=(None,))
VITDET = Form("hidden_state", switch="use_relative_position_embeddings", others=())
FORMS = {
    "timm.models.vision_transformer_sam.Attention": TIMM,
    "segment_anything.modeling.image_encoder.Attention": META,
    "segment_anything_hq.modeling.image_encoder.Attention": META,
    "mobile_sam.modeling.image_encoder.Attention": META,
    "detectron2.modeling.backbone.vit.Attention": META,
    "transformers.models.sam.modeling_sam.SamVisionSdpaAttention": HUGGING_FACE,
    "transformers.models.sam_hq.modeling_sam_hq.SamHQVisionSdpaAttention": HUGGING_FACE,
    "transformers.models.deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention": HUGGING_FACE,
    "transformers.models.vitdet.modeling_vitdet.VitDetAttention": VITDET,
}
"""The classes that are known, by where they are from."""


def has_decomposed_bias(module: nn.Module) -> bool:
    """Whether a module has relative positions of rows and of columns, as those of SAM are named."""
    tables = (getattr(module, name, None) for name in ("rel_pos_h", "rel_pos_w"))
    return all(isinstance(table, Tensor) and table.dim() == 2 for table in tables)


def form_of(module: nn.Module) -> Form | None:
    """The form of a module's class; None where that is not known, or has no bias."""
    kind = original_class(module)
    form = FORMS.get(f"{kind.__module__}.{kind.__qualname__}")
    if form is None or not has_decomposed_bias(module):
        return None
    return form if getattr(module, form.switch, False) else None


def reasons_against_replacing(model: nn.Module) -> dict[str, str]:
    """Why the forward of modules with a decomposed bias is not replaced, by name; empty where it is."""
    return {
        name: reason_against(module)
        for name, module in model.named_modules()
        if has_decomposed_bias(module)
    }


@torch.no_grad()
def reason_against(module: nn.Module) -> str:
    """Why the forward of a module with a decomposed bias may not be replaced; empty where it may."""
    kind = original_class(module)
    form = form_of(module)
    if form is None:
        return f"its bias of all pairs is made, as its class {kind.__qualname__} is not known"
    table: Any = module.rel_pos_h
    if table.is_meta or table.dtype not in NEAR:
        return f"its bias of all pairs is made, as its weights are {table.dtype} on {table.device}"
    error = difference(module, form)
    if not error <= NEAR[table.dtype]:
        return (
            f"its bias of all pairs is made, as its class {kind.__qualname__} is of another version: "
            f"on a small input the replacement differs by {error:.1g}"
        )
    return ""


def difference(module: Any, form: Form) -> float:
    """How far the replacement is from a module's own forward, relative to that, on random tokens with
    random relative positions; infinity where that fails.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ours: Any = copy.copy(module)  # with the same layers, and relative positions of its own
        ours._parameters = dict(module._parameters)
        for name in ("rel_pos_h", "rel_pos_w"):
            table = getattr(module, name)
            drawn = SCALE_OF_POSITIONS * torch.randn(table.shape, device="cpu").to(table)
            ours._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        tokens = torch.randn(2, *CHECKED_GRID, module.qkv.in_features, device="cpu").to(table)
        outputs = []
        for forward in (original_class(module).forward, partial(attend, form=form)):
            torch.manual_seed(0)  # both draw the same dropout
            try:
                outputs.append(forward(ours, tokens))
            except (AttributeError, RuntimeError, TypeError, ValueError):
                return float("inf")
    theirs, mine = ((raw if form.others is None else raw[0]).double() for raw in outputs)
    if theirs.shape != mine.shape:
        return float("inf")
    return float((mine - theirs).norm() / theirs.norm())


def attend(module: Any, tokens: Tensor, form: Form, is_timed: bool = False) -> Any:
    """What the forward of a module returns for (B, rows, columns, C) tokens.

    Args:
        module: of a class with a form.
        tokens: (B, rows, columns, C).
        form: of the class.
        is_timed: whether a mask of all pairs is used at shapes where that is faster.
    """
    batch, rows, columns, _ = tokens.shape
    heads = getattr(module, form.heads)
    projected = module.qkv(tokens).reshape(batch, rows * columns, 3, heads, -1)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    if form is TIMM:
        query, key = module.q_norm(query), module.k_norm(key)
    grid = query.unflatten(2, (rows, columns))
    of_rows = relative_positions(module.rel_pos_h, rows)
    of_columns = relative_positions(module.rel_pos_w, columns)
    bias_rows = torch.einsum("bnhwc,hkc->bnhwk", grid, of_rows).flatten(2, 3)
    bias_columns = torch.einsum("bnhwc,wkc->bnhwk", grid, of_columns).flatten(2, 3)
    attention = attend_to_grid
    if is_timed and not is_faster(query, key, value, bias_rows, bias_columns):
        attention = attend_under_mask
    output = attention(query, key, value, bias_rows, bias_columns)
    output = module.proj(output.transpose(1, 2).reshape(batch, rows, columns, -1))
    if form is TIMM:
        output = module.proj_drop(output)
    return output if form.others is None else (output, *form.others)


def relative_positions(table: Tensor, size: int) -> Tensor:
    """(size, size, D): of a row, or column, of queries, the vectors of those of keys. A (2 M - 1, D)
    table for another size is interpolated.
    """
    count = 2 * size - 1
    if len(table) != count:
        table = F.interpolate(table.T[None], size=count, mode="linear")[0].T
    places = torch.arange(size, device=table.device)
    return table[places[:, None] - places + size - 1]


def attend_to_grid(
    query: Tensor, key: Tensor, value: Tensor, bias_rows: Tensor, bias_columns: Tensor
) -> Tensor:
    """Attention with the tables of a decomposed bias."""
    output: Tensor = dense_attention(
        query, key, value, bias_rows=bias_rows, bias_columns=bias_columns
    )
    return output


def attend_under_mask(
    query: Tensor, key: Tensor, value: Tensor, bias_rows: Tensor, bias_columns: Tensor
) -> Tensor:
    """The same by PyTorch's attention, with a bias of all pairs."""
    output: Tensor = SDPA(query, key, value, attn_mask=join_tables(bias_rows, bias_columns))
    return output


def is_faster(*operands: Tensor) -> bool:
    """Whether tables are faster than a mask of all pairs, for operands of such a shape: timed at the
    first call, on some images or heads of it where it is long.
    """
    query = operands[0]
    batch, heads, tokens, channels = query.shape
    threads = torch.get_num_threads()
    shape = (rounded_sizes(batch * heads, tokens), channels, query.dtype, threads)
    with _timing:
        if shape not in _is_faster:
            images = max(1, MOST_SCORES // (heads * tokens**2))
            if heads * tokens**2 > MOST_SCORES:
                heads = threads
            part = [operand[:images, :heads] for operand in operands]
            arms = (partial(attend_under_mask, *part), partial(attend_to_grid, *part))
            _is_faster[shape] = median_ratio(*arms) < EXACT_GAIN
    return _is_faster[shape]


class DecomposedModule(InterceptedModule):
    """Mixed into the class of a module whose forward a :class:`DecomposedAttention` replaces."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Past InterceptedModule: the forward that stands in makes no call that it could intercept.
        return super(InterceptedModule, self)._call_impl(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, but for tokens alone, and where nothing records or differentiates it."""
        processor: Any = self.attention_processor
        form = None if processor is None or processor.num_exact else form_of(self)
        if form is not None:
            named = dict(kwargs)
            tokens, *others = (*args, *named.values()) if args else (named.pop(form.tokens, None),)
            has_more = any(other not in (None, False) for other in (*others, *named.values()))
            if not has_more and is_replaced(self, tokens):
                return attend(self, tokens, form, is_timed=True)
        return super().forward(*args, **kwargs)


def is_replaced(module: nn.Module, tokens: Any) -> bool:
    """Whether the forward of a module is replaced for these tokens: not in graphs, nor where gradients
    are asked for, autocast casts, or weights are dropped at random.
    """
    if type(tokens) is not Tensor or tokens.device.type != "cpu" or tokens.dim() != 4:
        return False
    if not is_plain() or is_exporting() or needs_gradients(tokens, *module.parameters()):
        return False
    if torch.is_autocast_enabled("cpu") and tokens.dtype != torch.get_autocast_dtype("cpu"):
        return False
    dropout = getattr(module, "attn_drop", None)
    return not (module.training and getattr(dropout, "p", 0.0) > 0)


def register_vision_attention(name: str, is_replaced: bool) -> None:
    """Make a name of :func:`dgt.register_attention` known to models of transformers that choose the class
    of their vision attention by it, and refuse others: SAM and its HQ relative.

    Args:
        name: the name.
        is_replaced: whether the forward of that attention is replaced, where its class is not of another
            version; else it is that of "sdpa".
    """
    from transformers.models.sam import modeling_sam
    from transformers.models.sam_hq import modeling_sam_hq

    tables = ("SAM_VISION_ATTENTION_CLASSES", "SAM_HQ_VISION_ATTENTION_CLASSES")
    for file, table in zip((modeling_sam, modeling_sam_hq), tables, strict=True):
        known = getattr(file, table, {})  # of another version of transformers: nothing
        if "sdpa" in known:
            kind = known["sdpa"]
            known[name] = partial(make_replaced, kind) if is_replaced else kind


def make_replaced(kind: type[nn.Module], *args: Any) -> nn.Module:
    """A module of a class of transformers whose forward is replaced, where that may be."""
    module: Any = kind(*args)
    if kind not in _may_replace:
        _may_replace[kind] = may_replace(kind, *args)
    if _may_replace[kind] and form_of(module) is not None:
        setting = Setting("exact", where_faster=True)
        site = AttentionSite("", measurement=Measurement(setting))
        install_processors(module, {"": DecomposedAttention(site)})
    return module


def may_replace(kind: type[nn.Module], *args: Any) -> bool:
    """Whether the forward of a class may be replaced, by a module with random weights: while a model is
    loaded its own have none yet.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        module = kind(*args)
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
        return not reason_against(module)


class DecomposedAttention(AttentionProcessor):
    """Replaces the forward of a module with a decomposed bias.

    Args:
        site: the module's call site.
    """

    mixin = DecomposedModule

    def __init__(self, site: AttentionSite) -> None:
        super().__init__()
        self.site = site

    def __str__(self) -> str:
        return f"{self.site.title}: {self.site.setting}, no bias of all pairs"
