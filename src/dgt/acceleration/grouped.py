"""Compute an accelerated module's attention calls in groups or by the native dense kernel."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dgt.acceleration.calls import Call
from dgt.acceleration.intercept import AttentionProcessor, install_processors
from dgt.acceleration.settings import LayerReport, scale_split
from dgt.acceleration.special_tokens import front_order, special_places
from dgt.ops import dense_attention
from dgt.ops.clustered import attend_in_clusters


def answer_call(call: Call, row: LayerReport) -> Tensor:
    """Compute a call's output by its call site's choice, "groups" or "exact"."""
    if row.choice == "exact":
        exact: Tensor = dense_attention(**(call.arguments or {}))
        return exact
    return attend_in_groups(call, row)


def attend_in_groups(call: Call, row: LayerReport) -> Tensor:
    """Compute a call's output, of ``call.shape``, in groups; special tokens see, and are seen by, all tokens."""
    query, key, value = _as_autocast(call)
    tokens = query.shape[2]
    is_within = tokens == key.shape[2]
    places = special_places(row.special, tokens) if is_within else []
    key_mask = call.key_mask
    is_at_start = places == list(range(len(places)))
    order = None
    if not is_at_start:
        order = front_order(places, tokens, query.device)
        query, key, value = (tensor[:, :, order] for tensor in (query, key, value))
        key_mask = None if key_mask is None else key_mask[:, order]
    split = scale_split(row, tokens, key.shape[2])
    patches = key.shape[2] - len(places)
    output = attend_in_clusters(
        query,
        key,
        value,
        num_groups=min(split.groups, tokens - len(places)),
        top_k=min(split.keys, patches),
        residual_keys=min(split.residual_keys, patches),
        num_prefix_tokens=len(places),
        scale=call.scale,
        key_mask=key_mask,
        share_key_clusters=row.shared_clusters,
    )
    if order is not None:
        output = output[:, :, order.argsort()]
    return output.reshape(call.shape)


def _as_autocast(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """A call's operands, cast as autocast would cast them."""
    operands = (call.query, call.key, call.value)
    device = call.query.device.type
    if call.query.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return operands
    kind = torch.get_autocast_dtype(device)
    return (call.query.to(kind), call.key.to(kind), call.value.to(kind))


class GroupedSDPA(AttentionProcessor):
    """Computes the attention calls of a module, each by its call site's choice.

    Args:
        rows: those of the module's call sites: one for each of its calls in a forward pass of the
            model, or one for all of them.
    """

    def __init__(self, rows: Sequence[LayerReport]) -> None:
        super().__init__(calls=max(row.call for row in rows) + 1)
        self.rows = {row.call: row for row in rows}

    def process(self, call: Call, number: int) -> Tensor | None:
        """The attention's output, of ``call.shape``; None if the call runs unchanged."""
        row = self.rows.get(number if self.calls > 1 else 0)
        if row is None or not fits(row, call):
            return None
        return answer_call(call, row)

    def __str__(self) -> str:
        chosen = [row for row in self.rows.values() if row.choice != "dense"]
        return ", ".join(f"{row.title}: {choice_in_words(row)}" for row in chosen)


def fits(row: LayerReport, call: Call) -> bool:
    """Whether a row applies to a call: not shorter, no larger batch, and of the same kind."""
    if row.most_batch is not None and call.query.shape[0] > row.most_batch:
        return False
    if row.choice == "exact":
        return call.arguments is not None
    if row.choice != "groups" or call.reason is not None:
        return False
    is_within = row.tokens == row.key_tokens
    if is_within is not bool(call.query.shape[2] == call.key.shape[2]):  # tensors in a trace
        return False
    return min(call.query.shape[2], call.key.shape[2]) >= row.least_tokens


def choice_in_words(row: LayerReport) -> str:
    """A row's choice, formatted for the report."""
    if row.choice == "groups":
        residual = f" + {row.residual_keys} residual" if row.residual_keys else ""
        return f"{row.groups} groups, {row.keys}{residual} keys"
    if row.choice == "exact":
        return "exact, native kernel"
    return f"dense: {row.reason}"


def install_rows(model: nn.Module, rows: Sequence[LayerReport]) -> None:
    """Install the choices of the rows in a model; dense call sites are unchanged."""
    install_processors(model, processors_of(rows))


def processors_of(rows: Sequence[LayerReport]) -> dict[str, GroupedSDPA]:
    """What computes the calls of these call sites, by module name; none where all are dense."""
    by_module: dict[str, list[LayerReport]] = defaultdict(list)
    for row in rows:
        by_module[row.name].append(row)
    return {
        name: GroupedSDPA(own)
        for name, own in by_module.items()
        if any(row.choice != "dense" for row in own)
    }
