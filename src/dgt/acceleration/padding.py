"""Modules of which it is known that their masks hide padding, as keys and as queries.

A mask of keys says nothing of queries: in cross-attention those are other tokens, also where both
sequences are equally long, and tokens that read out a sequence may be seen by no other one. So
queries count as real unless a module is known to attend within sequences that are padded.
"""

import functools
import inspect

from torch import nn

from dgt.acceleration.calls import Call
from dgt.acceleration.inputs import Paddings

LIBRARY = "transformers"
OF_ONE_SEQUENCE = frozenset(  # arguments that bring no tokens but those of ``hidden_states``
    {
        "self",
        "hidden_states",
        "attention_mask",
        "head_mask",
        "position_embeddings",
        "position_ids",
        "cache_position",
        "cu_seqlens",
        "max_seqlen",
        "interpolate_pos_encoding",
        "output_attentions",
        "kwargs",
    }
)


@functools.cache
def hides_queries(kind: type[nn.Module]) -> bool:
    """Whether the mask of a module of this class hides tokens as keys and as queries.

    True of the classes of transformers that take one sequence and nothing that could bring
    another: that library makes their masks of ``attention_mask`` and its like, which mark padding.
    The output at padding is then zero.
    """
    if kind.__module__.partition(".")[0] != LIBRARY:
        return False
    return set(inspect.signature(kind.forward).parameters) <= OF_ONE_SEQUENCE


def note_padding(call: Call, paddings: Paddings) -> None:
    """Add the padding of a call to a model's; what is real in one of several sequences of a size stays so."""
    if call.query_mask is not None:
        shape = tuple(call.query_mask.shape)
        known = paddings.get(shape)
        paddings[shape] = call.query_mask if known is None else call.query_mask | known
