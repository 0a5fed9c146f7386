"""Compute an accelerated module's attention calls in groups or by the native dense kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dgt.acceleration.settings import LayerReport, scale_split
from dgt.ops import clustered_attention, dense_attention
from dgt.swap import Call, CallAnswer, install_answer, installed_answers, special_places
from dgt.swap.special_tokens import front_order


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
    output = clustered_attention(
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


class GroupedSDPA(CallAnswer):
    """Computes the attention calls of a module, each by its call site's choice.

    A module that is called several times in one forward pass of the model has a row for each of its
    calls, in their order, or one row for all of them.

    Args:
        rows: those of its call sites.
        calls: how many calls one forward pass of the model makes; 1 where one row is for all.
    """

    def __init__(self, rows: Sequence[LayerReport], calls: int = 1) -> None:
        super().__init__()
        self.rows = {row.call: row for row in rows}
        self.calls = calls
        self.count = 0

    def forward(self, call: Call) -> Tensor | None:
        """The attention's output, of ``call.shape``; None if the call runs unchanged."""
        row = self.rows.get(0)
        if self.calls > 1:
            row = self.rows.get(self.count)
            self.count = (self.count + 1) % self.calls
        if row is None or not fits(row, call):
            return None
        return answer_call(call, row)

    def extra_repr(self) -> str:
        """Describes how its calls are computed."""
        return ", ".join(f"{row.title}: {choice_in_words(row)}" for row in self.rows.values())


def fits(row: LayerReport, call: Call) -> bool:
    """Whether a row applies to a call: not shorter, no larger batch, and of the same kind."""
    if row.most_batch is not None and call.query.shape[0] > row.most_batch:
        return False
    if row.choice == "exact":
        return call.arguments is not None
    if row.choice != "groups" or call.reason is not None:
        return False
    is_within = row.tokens == row.key_tokens
    if is_within != (call.query.shape[2] == call.key.shape[2]):
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
    by_module: dict[str, list[LayerReport]] = {}
    for row in rows:
        by_module.setdefault(row.name, []).append(row)
    for name, own in by_module.items():
        chosen = [row for row in own if row.choice in ("groups", "exact")]
        if chosen:
            is_one_for_all = len(own) == 1
            install_answer(
                model.get_submodule(name),
                GroupedSDPA(chosen, calls=1 if is_one_for_all else len(own)),
            )


def grouped_calls(model: nn.Module) -> dict[str, GroupedSDPA]:
    """The handlers installed in an accelerated model, by module name."""
    answers = installed_answers(model)
    return {name: answer for name, answer in answers.items() if isinstance(answer, GroupedSDPA)}
