"""A guard for every input: accelerated attention compared with exact attention of a few queries.

No error measured on other inputs says how large it is on the one at hand. So each accelerated call
attends a few queries exactly, an estimate of its error on this input. Where that is above what the
plan allows at this call site, more queries are looked at; where it still is, the attention is done
again with more keys, and where that is not enough, densely. Each image of a batch is decided by
itself.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dgt.acceleration.calls import Call, is_graph_kept
from dgt.acceleration.prefix_tokens import prefix_positions
from dgt.acceleration.sites import AttentionSite
from dgt.ops import dense_attention

SAMPLED = 20
"""One query in so many is attended exactly in every head of an image, but at least and at most as many as
follow: in early layers the error is in few queries, and 16 of 5,477 may miss it.
"""
LEAST_SAMPLED = 16
MOST_SAMPLED = 48
CLOSELY = 4  # times as many, before attention is done again: an estimate of few is often too large by chance
MORE_KEYS = 2  # times as many groups, keys and residual keys before attention is dense


@dataclass
class GuardCounts:
    """How often the guard of a call site has checked an image, and what it did."""

    checked: int = 0
    checked_closely: int = 0
    """Images of which more queries were looked at."""
    more_keys: int = 0
    """Images whose attention took more keys."""
    dense: int = 0
    """Images whose attention was dense."""
    largest_error: float = 0.0
    """The largest estimate so far, relative."""

    @property
    def acted(self) -> int:
        """Images whose attention was done again."""
        return self.more_keys + self.dense

    def add(self, other: "GuardCounts") -> None:
        """Add counts of other calls."""
        self.checked += other.checked
        self.checked_closely += other.checked_closely
        self.more_keys += other.more_keys
        self.dense += other.dense
        self.largest_error = max(self.largest_error, other.largest_error)


def can_check(call: Call) -> bool:
    """Whether a decision can depend on values: not while a graph is recorded."""
    return not torch.compiler.is_compiling() and not is_graph_kept() and not call.query.is_meta


def num_sampled(tokens: int, closely: bool = False) -> int:
    """How many queries of a head are attended exactly, at first or closely."""
    count = min(max(LEAST_SAMPLED, tokens // SAMPLED), MOST_SAMPLED)
    return min(count * CLOSELY if closely else count, tokens)


def sampled_positions(site: AttentionSite, tokens: int, closely: bool = False) -> list[int]:
    """Evenly spaced positions of queries, those of prefix tokens left out."""
    count = num_sampled(tokens, closely)
    spaced = [(2 * number + 1) * tokens // (2 * count) for number in range(count)]
    prefix = set(prefix_positions(site.prefix_tokens, tokens)) if site.is_within else set()
    return [position for position in spaced if position not in prefix]


@torch.no_grad()
def estimate_errors(
    call: Call, output: Tensor, site: AttentionSite, closely: bool = False
) -> list[float]:
    """The relative error of each image's attention output, from the sampled queries.

    Args:
        call: the call.
        output: what was computed for it.
        site: its call site.
        closely: whether to look at more queries.
    """
    output = output.reshape(call.query.shape)
    positions = sampled_positions(site, call.query.shape[2], closely)
    exact = attend_densely(call._replace(query=call.query[:, :, positions])).float()
    error = output[:, :, positions].float() - exact
    squares = error.square().sum((1, 2, 3)) / exact.square().sum((1, 2, 3)).clamp(min=1e-30)
    return [math.sqrt(square) for square in squares.tolist()]


def attend_densely(call: Call) -> Tensor:
    """(B, H, L, D): exact attention of a call's queries."""
    mask = None if call.key_mask is None else call.key_mask[:, None, None]
    is_grouped = call.key.shape[1] != call.query.shape[1]
    return dense_attention(
        call.query, call.key, call.value, mask, scale=call.scale, enable_gqa=is_grouped
    )


def select_images(call: Call, images: list[int]) -> Call:
    """The call for some images of its batch."""
    query = call.query[images]
    return call._replace(
        query=query,
        key=call.key[images],
        value=call.value[images],
        key_mask=None if call.key_mask is None else call.key_mask[images],
        shape=query.shape,
    )


def replace_images(output: Tensor, images: list[int], replacement: Tensor) -> Tensor:
    """An output (B, H, L, D) with that of some images replaced."""
    index = torch.tensor(images, device=output.device)
    return output.index_copy(0, index, replacement.to(output.dtype))
