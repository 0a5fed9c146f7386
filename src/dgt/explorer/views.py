"""What the page shows of an image: one forward of the model, then a block's groups, keys and
weights as compact JSON.

The forward keeps what every DG-Attention layer got; a view calls `dgt.dynamic_group_attention` on
that again, with the number of keys that the page asks for, so another k changes the block that is
shown and none before it. Numbers travel as base64 of little-endian arrays: ids as uint16, attention
weights as bytes relative to the largest of their query.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from dgt.explorer.album import Album, fit_sides
from dgt.figures import choose_groups, distinct_colors
from dgt.layers import DGAttention
from dgt.models import DynamicGroupTransformer, capture
from dgt.ops import dynamic_group_attention
from dgt.ops.attention_mass import attention_mass_curve, diagnose_selection, residual_share
from dgt.runs import LoadedRun
from dgt.utils.class_names import readable
from dgt.utils.errors import UserError

MAX_TOKENS = 112 * 112
MAX_KEYS, MAX_WEIGHTS = 1024, 4_000_000
"""Most keys for a group, and most attention weights (tokens times keys) in one answer."""
TRACES, VIEWS = 6, 24
"""How many forwards, and how many views and curves each, are remembered."""

Answer = dict[str, Any]


class ShownBlock(NamedTuple):
    """A block with DG-Attention: its layer, its stage and place in the stage (from 0), and its
    stride in pixels.
    """

    layer: DGAttention
    stage: int
    place: int
    stride: int


class Trace(NamedTuple):
    """What one forward left: (1, h, w, C) inputs of the shown layers, sides (height, width),
    seconds, class scores.
    """

    inputs: list[Tensor]
    sides: tuple[int, int]
    seconds: float
    classes: list[tuple[str, float]]


class Explorer:
    """A trained model and images, and the data that the page requests.

    It is safe to use from several threads.

    Args:
        run: a trained classifier.
        album: images to show.

    Raises:
        UserError: for a model that is no DGT, and for one that is a part of a network for another
            task.

    Example:
        >>> Explorer(load_run("runs/scenes"), Album()).describe()
    """

    def __init__(self, run: LoadedRun, album: Album) -> None:
        self.run, self.album = run, album
        self.blocks = shown_blocks(run.network)
        if not self.blocks:
            raise UserError(
                "the explorer supports only DynamicGroupTransformer classifiers with grouped attention, "
                f"{run.source} is {run.recipe.model.name!r} of task {run.recipe.task!r}"
            )
        self.step = max(block.stride for block in self.blocks)
        self.size = max(32, round(run.recipe.data.image_size / self.step) * self.step)
        largest = int(MAX_TOKENS**0.5) * min(block.stride for block in self.blocks)
        self.sizes = sorted(
            {self.size, *(side for side in (2 * self.size, 224) if self.size < side <= largest)}
        )
        self._lock = threading.Lock()
        self._traces = lru_cache(TRACES)(self._trace)
        self._views, self._curves = lru_cache(VIEWS)(self._view), lru_cache(VIEWS)(self._curve)

    def describe(self) -> Answer:
        """The model: its name, classes, sizes of image, and for every block stage, heads, groups,
        keys and residual keys.
        """
        blocks = [
            {
                "stage": stage + 1,
                "place": place + 1,
                "stride": stride,
                "heads": layer.num_heads,
                "groups": layer.centroids.shape[1],
                "k": layer.top_k,
                "residual_keys": layer.residual_keys,
            }
            for layer, stage, place, stride in self.blocks
        ]
        most = max(block["groups"] for block in blocks)
        return {
            "name": self.run.recipe.model.name,
            "parameters": sum(parameter.numel() for parameter in self.run.network.parameters()),
            "source": self.run.recipe.name,
            "classes": len(self.run.class_names),
            "size": self.size,
            "sizes": self.sizes,
            "colors": [
                f"#{r:02x}{g:02x}{b:02x}"
                for r, g, b in (255 * distinct_colors(most)).round().astype(int)
            ],
            "threads": torch.get_num_threads(),
            "blocks": blocks,
        }

    def warm_up(self) -> None:
        """Run the model once on the first image: the first forward of a process is slow."""
        with self._lock, torch.inference_mode():
            self.run.network(self.pixels(self.album.names()[0][0], self.size))

    def view(self, image: str, size: int, block: int, head: int, top_k: int) -> Answer:
        """Groups, keys and attention weights of one head of one block, for an id of the album and
        one of `sizes`.

        `top_k`, the keys for every group, is clamped to the tokens, and to what an answer may hold.
        RefusedError where there is no such image, UserError for another argument that is out of
        range.
        """
        if top_k < 1:
            raise UserError(f"k must be at least 1, got {top_k}")
        with self._one_at_a_time(image, size, block, head):
            return self._views(image, size, block, head, top_k)

    def curve(self, image: str, size: int, block: int, head: int) -> Answer:
        """Mean share of global attention held by the best k keys, for some thirty k.

        Arguments as in `view`.
        """
        with self._one_at_a_time(image, size, block, head):
            return self._curves(image, size, block, head)

    @contextmanager
    def _one_at_a_time(self, image: str, size: int, block: int, head: int) -> Iterator[None]:
        """Check a question, then let one at a time be answered."""
        if size not in self.sizes:
            raise UserError(f"size must be one of {', '.join(map(str, self.sizes))}, got {size}")
        if not 0 <= block < len(self.blocks):
            raise UserError(f"block must lie in 0 to {len(self.blocks) - 1}, got {block}")
        heads = self.blocks[block].layer.num_heads
        if not 0 <= head < heads:
            raise UserError(f"head must lie in 0 to {heads - 1} at this block, got {head}")
        self.album.image(image)  # a deleted id stays deleted, whatever is cached
        with self._lock, torch.inference_mode():
            yield

    def _trace(self, image: str, size: int) -> Trace:
        pixels = self.pixels(image, size)
        start = time.perf_counter()
        inputs, logits = capture(self.run.network, pixels, lambda seen: seen.x.clone())
        seconds = time.perf_counter() - start
        best = logits.float().softmax(-1)[0].topk(min(3, logits.shape[-1]))
        names = [readable(self.run.class_names[index]) for index in best.indices.tolist()]
        classes = list(zip(names, best.values.tolist(), strict=True))
        return Trace(inputs, (pixels.shape[2], pixels.shape[3]), seconds, classes)

    def pixels(self, image: str, size: int) -> Tensor:
        """The (1, 3, H, W) that the model gets for an image: its middle, resized to multiples of
        the token's side.
        """
        data, shown = self.run.recipe.data, self.album.image(image)
        height, width = fit_sides(shown, size, self.step)
        shown = ImageOps.fit(shown, (width, height), Image.Resampling.BICUBIC)
        return data.normalize(pil_to_tensor(shown))[None]

    def _head(
        self, image: str, size: int, block: int, head: int
    ) -> tuple[Trace, list[Tensor], Tensor, float]:
        """Return the trace, a head's query, key and value (1, 1, L, D), its centroids (1, G, D) and its scale."""
        trace = self._traces(image, size)
        layer, place = self.blocks[block].layer, slice(head, head + 1)
        tensors = [part[:, place] for part in layer.split_heads(trace.inputs[block])]
        return trace, tensors, layer.unit_centroids()[place], layer.scale

    def _view(self, image: str, size: int, block: int, head: int, top_k: int) -> Answer:
        trace, (query, key, value), centroids, scale = self._head(image, size, block, head)
        most = min(query.shape[2], MAX_KEYS, MAX_WEIGHTS // query.shape[2])
        seen = dynamic_group_attention(query, key, value, centroids, min(top_k, most), scale)
        weights, mass = diagnose_selection(query, key, seen.group_ids, seen.key_ids, scale)
        residual_keys = self.blocks[block].layer.residual_keys
        residual = None
        if residual_keys:
            ids = (seen.group_ids, seen.key_ids)
            share = residual_share(query, key, *ids, residual_keys, scale)
            residual = _pack(share[0, 0].numpy(), "<f4")
        rows, columns = trace.inputs[block].shape[1:3]
        groups, keys = seen.group_ids[0, 0].numpy(), seen.key_ids[0, 0].numpy()
        peaks = weights[0, 0].amax(-1, keepdim=True)
        return {
            "grid": [rows, columns],
            "k": keys.shape[1],
            "max_k": most,
            "groups": keys.shape[0],
            "group_ids": _pack(groups, "<u2"),
            "key_ids": _pack(keys, "<u2"),
            "weights": _pack((255 * weights[0, 0] / peaks).round().numpy(), "u1"),
            "peaks": _pack(peaks.numpy(), "<f4"),
            "mass": _pack(mass[0, 0].numpy(), "<f4"),
            "residual": residual,
            "order": choose_groups(groups.reshape(rows, columns), keys, len(keys)),
            "forward": {"ms": 1000 * trace.seconds, "sides": trace.sides, "classes": trace.classes},
        }

    def _curve(self, image: str, size: int, block: int, head: int) -> Answer:
        _, (query, key, value), centroids, scale = self._head(image, size, block, head)
        counts = sorted({round(float(count)) for count in np.geomspace(1, query.shape[2], 32)})
        groups = dynamic_group_attention(query, key, value, centroids, 1, scale).group_ids
        mass = attention_mass_curve(query, key, centroids, groups, counts, scale)
        return {"counts": counts, "mass": [round(share, 5) for share in mass[0, 0].tolist()]}


def shown_blocks(network: nn.Module) -> list[ShownBlock]:
    """The blocks of a model that have DG-Attention, in order; none for a model that is not ours."""
    if not isinstance(network, DynamicGroupTransformer):
        return []
    return [
        ShownBlock(block.attn, i, j, network.feature_info[i]["reduction"])
        for i, stage in enumerate(network.stages)
        for j, block in enumerate(stage.blocks)  # type: ignore[arg-type]  # a ModuleList
        if isinstance(block.attn, DGAttention)
    ]


def _pack(values: NDArray[Any], kind: str) -> str:
    """Base64 of the values in row-major order, as `kind` (numpy's name of a little-endian type)."""
    return base64.b64encode(np.ascontiguousarray(values.astype(kind)).tobytes()).decode("ascii")
