"""Retrieval at a distance: can groups find keys outside any window, and what do G and k determine?

A map of S x S tokens has two halves with empty columns between them. In one half, chosen at random
    for every map, each of M codes appears once together with a value: a source. The tokens of the
        other half, the probes, hold only a code and must output the value that its source has in
        this map. A correct answer therefore requires attending to one specific distant token.

Every row is a small network; rows differ only in their attention. A group of DG-Attention can
answer for at most k codes, so G groups for at most k G of them. The figure compares the
measurements with the law

    accuracy = chance + min(1, k G / M) (accuracy of global attention - chance),

where equality requires that groups share the codes evenly. `served` measures this for the actual
    grouping: the fraction of probes whose source is among the keys of their group, in either head.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgt.layers import Block, DGAttention, GlobalAttention, step_centroids
from dgt.layers.baselines.cmt import ReducedAttention
from dgt.layers.baselines.cswin import StripeAttention
from dgt.layers.baselines.swin import WindowAttention
from dgt.models.annealing import annealed_top_k
from dgt.utils.errors import LOGGER, UserError, check_range
from dgt.utils.records import interval, markdown_table, number
from dgt.utils.seeding import seeded
from studies.command import read_words, run_study, write_results
from studies.figure_retrieval import figure_retrieval

CODE = 16  # channels of a code and of a value; two more mark sources and probes
NOISE = 0.3
STRENGTH = 2.0
LEARNING_RATE = 4e-3
FEWER_KEYS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # k at which the trained weights are measured
LAST_BATCHES, REPEATS = (1, 2, 16), 8


@dataclass(frozen=True)
class Settings:
    """Sizes of the task, the network, and its training, which can be reduced for a quick look.

    Raises UserError for a value out of range.
    """

    side: int = 16  # S; even
    gap: int = 4  # empty columns between the halves; even
    # M, at most three quarters of the positions in a half, so that every code is asked for
    codes: int = 64
    values: int = 8  # number of values; a guess is correct with probability 1 / values
    dim: int = 64  # channels of the network, half for each of its two heads
    # optimizer steps, at least 20; in two thirds of them k still decreases from L to the row's
    steps: int = 600
    batch_size: int = 16  # maps per step
    test_maps: int = 128  # for the accuracy, the same for all rows and seeds

    def __post_init__(self) -> None:
        least = {"steps": 20, "gap": 0, "values": 2}
        for name, value in asdict(self).items():
            if value < least.get(name, 1):
                raise UserError(f"{name} must be at least {least.get(name, 1)}, got {value}")
        if self.side % 2 or self.gap % 2 or self.dim % 4:
            raise UserError(
                f"side and gap must be even and dim a multiple of 4, got {self.side, self.gap, self.dim}"
            )
        if self.codes > self.places * 3 // 4:
            raise UserError(
                f"codes must be at most {self.places * 3 // 4} for this side and gap, got {self.codes}"
            )

    @property
    def places(self) -> int:
        """Number of tokens in one half."""
        return max(self.side * (self.side - self.gap) // 2, 0)


class Batch(NamedTuple):
    """Maps of the task."""

    tokens: Tensor  # (B, S, S, 34)
    target: Tensor  # (B, S S) int64: the value that a probe must output, -100 at other tokens
    source: Tensor  # (B, S S) int64: the token that holds it, -1 at other tokens


def make_batch(settings: Settings, size: int, generator: torch.Generator) -> Batch:
    """Draw maps. Codes and values are the same unit vectors times 2 for every generator."""
    side, half, maps = settings.side, settings.places, torch.arange(size)[:, None]
    fixed = torch.Generator().manual_seed(2022)
    codes = STRENGTH * F.normalize(torch.randn(settings.codes, CODE, generator=fixed), dim=-1)
    values = STRENGTH * F.normalize(torch.randn(settings.values, CODE, generator=fixed), dim=-1)
    tokens = NOISE * torch.randn(size, side * side, 2 * CODE + 2, generator=generator)
    mirrored = torch.rand(size, 1, generator=generator) < 0.5

    def somewhere(count: int, far: bool) -> Tensor:
        """(B, count) different tokens of one half, numbered by columns from the left or the right edge."""
        place = torch.rand(size, half, generator=generator).argsort(1)[:, :count]
        row, column = place % side, place // side
        return row * side + torch.where(mirrored ^ far, side - 1 - column, column)

    source, probe = somewhere(settings.codes, False), somewhere(half * 3 // 4, True)
    value = torch.randint(settings.values, (size, settings.codes), generator=generator)
    asked = torch.arange(probe.shape[1]) % settings.codes
    tokens[maps, source] += torch.cat(
        [codes.expand(size, -1, -1), values[value], torch.zeros(size, len(codes), 2)], 2
    )
    tokens[maps, source, 2 * CODE] += STRENGTH
    tokens[maps, probe, :CODE] += codes[asked]
    tokens[maps, probe, 2 * CODE + 1] += STRENGTH
    target, where = torch.full((2, size, side * side), -1)
    target[maps, probe], where[maps, probe] = value[:, asked], source[:, asked]
    return Batch(tokens.view(size, side, side, -1), target.masked_fill(target < 0, -100), where)


class ChosenKeys(GlobalAttention):
    """Controls for the selection: each query has its own `top_k` keys, redrawn in every call, or its best."""

    def __init__(self, dim: int, num_heads: int, best: bool, top_k: int) -> None:
        super().__init__(dim, num_heads)
        self.best, self.top_k = best, top_k

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map (B, H, W, C) to the same shape; there is no padding in this task."""
        query, key, value = self.split_heads(x)
        scores = query @ key.transpose(-1, -2) * self.scale
        rank = scores.detach() if self.best else torch.rand_like(scores)
        last = rank.topk(min(self.top_k, rank.shape[-1])).values[..., -1:]
        return self.merge_heads(scores.masked_fill(rank < last, -torch.inf).softmax(-1) @ value, x)


@dataclass(frozen=True)
class Row:
    """One network."""

    name: str
    attention: Callable[[int, int, int], nn.Module]  # of dim, heads, and the index of the block
    depth: int = 1  # blocks
    top_k: int | None = None  # at the end of training; None if the attention has none
    # whether k decreases from L to `top_k` in training, or is `top_k` from the first step
    annealed: bool = True
    # Whether the centroids are then also replaced by those of other batches.
    last_batch: bool = False


def _groups(count: int, top_k: int, words: str = "", annealed: bool = True, **eq4: Any) -> Row:
    name, last_batch = f"DG, G {count}, k {top_k}{words}", (count, top_k) == (16, 4)
    return Row(
        name,
        lambda dim, heads, _: DGAttention(dim, heads, count, top_k, **eq4),
        1,
        top_k,
        annealed,
        last_batch,
    )


ROWS = (
    Row("global", lambda dim, heads, _: GlobalAttention(dim, heads)),
    *(_groups(groups, 16) for groups in (1, 4, 16, 48)),
    *(_groups(groups, top_k) for groups, top_k in ((1, 64), (4, 64), (16, 4), (48, 2))),
    *(_groups(16, top_k, " from the start", annealed=False) for top_k in (16, 64)),
    _groups(16, 4, ", tau = 0.1 lr on the new mean", tau_weighs="new"),
    _groups(16, 4, ", tau = 0.05 on the new mean", tau_weighs="new", tau=0.05),
    Row(
        "best keys of each query, k 16",
        lambda dim, heads, _: ChosenKeys(dim, heads, True, 16),
        top_k=16,
    ),
    Row("random keys, k 16", lambda dim, heads, _: ChosenKeys(dim, heads, False, 16), top_k=16),
    Row("windows 4 x 4", lambda dim, heads, _: WindowAttention(dim, heads, window=4)),
    Row(
        "windows, two blocks, shifted",
        lambda dim, heads, i: WindowAttention(dim, heads, 4, 2 * (i % 2)),
        depth=2,
    ),
    Row("stripes", lambda dim, heads, _: StripeAttention(dim, heads, width=1)),
    Row("stripes, two blocks", lambda dim, heads, _: StripeAttention(dim, heads, width=1), depth=2),
    Row("reduced 4 x 4 (CMT)", lambda dim, heads, _: ReducedAttention(dim, heads, ratio=4)),
)


class Network(nn.Module):
    """Linear layer, blocks, LayerNorm, linear layer: tokens (B, S, S, 34) to logits (B, S S, values)."""

    def __init__(self, row: Row, settings: Settings) -> None:
        super().__init__()
        dim = settings.dim
        self.embed = nn.Linear(2 * CODE + 2, dim)
        self.blocks = nn.Sequential(
            *(Block(dim, row.attention(dim, 2, i), ffn="mlp") for i in range(row.depth))
        )
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, settings.values))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of every token."""
        logits: Tensor = self.head(self.blocks(self.embed(tokens))).flatten(1, 2)
        return logits

    def set_top_k(self, top_k: int) -> None:
        """Set k of every attention that has one."""
        for module in self.modules():
            if isinstance(module, DGAttention | ChosenKeys):
                module.top_k = top_k


@torch.no_grad()
def measure(network: Network, batches: Sequence[Batch]) -> dict[str, float]:
    """Percentage of correct answers, and of probes that are served if the attention has groups."""
    network.eval()
    right: list[Tensor] = []
    served: list[Tensor] = []
    block: Any = network.blocks[0]
    with seeded("retrieval", "test"):
        for tokens, target, source in batches:
            asked = target >= 0
            right.append((network(tokens).argmax(-1) == target)[asked])
            if isinstance(block.attn, DGAttention):
                embedded = network.embed(tokens)
                chosen = block.attn.inspect(block.norm1(embedded + block.cpe(embedded)))
                ids = chosen.group_ids[..., None].expand(-1, -1, -1, chosen.key_ids.shape[-1])
                hit = (chosen.key_ids.gather(2, ids) == source[:, None, :, None]).any(-1).any(1)
                served.append(hit[asked])
    network.train()
    found = {"accuracy": right, **({"served": served} if served else {})}
    return {name: 100 * torch.cat(parts).float().mean().item() for name, parts in found.items()}


def train(row: Row, seed: int, settings: Settings) -> dict[str, Any]:
    """Train and measure one row with one seed.

    The same arguments give the same result on one machine.
    """
    start, tokens = time.process_time(), settings.side**2
    with seeded("retrieval", seed):
        network = Network(row, settings).train()
        optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=0.01)
        rate = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, settings.steps, pct_start=0.1
        )
        generator = torch.Generator().manual_seed(seed)
        for step in range(settings.steps):
            if row.top_k is not None and row.annealed:
                network.set_top_k(annealed_top_k(row.top_k, tokens, 1.5 * step / settings.steps))
            batch = make_batch(settings, settings.batch_size, generator)
            loss = F.cross_entropy(network(batch.tokens).flatten(0, 1), batch.target.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            rate.step()
    fixed, left = torch.Generator().manual_seed(2**31), range(settings.test_maps, 0, -16)
    test = [make_batch(settings, min(16, maps), fixed) for maps in left]
    result: dict[str, Any] = {"row": row.name, "seed": seed, **measure(network, test)}
    if row.top_k is not None:
        result["by_top_k"] = []
        for top_k in (top_k for top_k in FEWER_KEYS if top_k <= tokens):
            network.set_top_k(top_k)
            result["by_top_k"].append({"top_k": top_k, **measure(network, test)})
        network.set_top_k(row.top_k)
    more = {"last_batch": _other_last_batches(network, settings, test)} if row.last_batch else {}
    return {**result, **more, "cpu_seconds": round(time.process_time() - start, 1)}


def _other_last_batches(
    network: Network, settings: Settings, test: Sequence[Batch]
) -> list[dict[str, Any]]:
    """Accuracy with the centroids after one more step, by maps in its batch, REPEATS batches each."""
    layers = [module for module in network.modules() if isinstance(module, DGAttention)]
    before = [layer.centroids.clone() for layer in layers]
    found = []
    for size in LAST_BATCHES:
        accuracies = []
        for repeat in range(REPEATS):
            tokens = make_batch(
                settings, size, torch.Generator().manual_seed(2**32 + repeat)
            ).tokens
            with torch.no_grad():
                network(tokens)
            step_centroids(network, 0.0)  # the learning rate that a schedule ends at
            accuracies.append(measure(network, test)["accuracy"])
            for layer, centroids in zip(layers, before, strict=True):
                layer.centroids.copy_(centroids)
        found.append({"maps": size, "accuracies": accuracies})
    return found


def retrieval(words: Sequence[str] = (), seeds: int = 3, out: str | Path | None = None) -> Path:
    """Train what is missing for all rows, seed by seed; write `retrieval.json` and `retrieval.md`.

    Args:
        words: changes to `Settings`, as on the command line: `["--codes", "16", "--steps=300"]`.
        seeds: number of seeds, from 0 on.
        out: the folder, which is returned; None for runs/ablate-retrieval.

    Raises UserError for a number of seeds below 1 or a wrong option; also see
    :func:`write_results`.
    """
    options, keys = read_words(words, **asdict(Settings()))
    if keys:
        raise UserError(f"retrieval makes its own data and takes no {keys[0]}")
    settings = Settings(**options)
    check_range(1, seeds=seeds)

    def find(content: dict[str, Any]) -> Iterator[None]:
        runs = content.setdefault("runs", [])
        done = {(run["row"], run["seed"]) for run in runs}
        todo = [
            (row, seed) for seed in range(seeds) for row in ROWS if (row.name, seed) not in done
        ]
        for nth, (row, seed) in enumerate(todo, 1):
            runs.append(train(row, seed, settings))
            LOGGER.info(
                "[%d/%d] %s, seed %d: %.1f %%", nth, len(todo), row.name, seed, runs[-1]["accuracy"]
            )
            yield

    path = Path(out or "runs/ablate-retrieval") / "retrieval.json"
    return write_results(path, asdict(settings), find, lambda content: markdown(content["runs"]))


def markdown(trained: Sequence[dict[str, Any]]) -> str:
    """The runs as a table: mean and 95 % interval over seeds, each seed, and accuracy by k."""
    rows = []
    for name in dict.fromkeys(run["row"] for run in trained):
        runs = [run for run in trained if run["row"] == name]
        accuracies = [run["accuracy"] for run in runs]
        mean, half = interval(accuracies)
        cells = [
            name,
            number(mean, 1, half=half),
            ", ".join(number(value, 1) for value in accuracies),
            _mean_cell([run.get("served") for run in runs]),
        ]
        cells += [_mean_cell([_accuracy_at(run, top_k) for run in runs]) for top_k in FEWER_KEYS]
        rows.append(cells)
    return markdown_table(
        ["", "accuracy, %", "seeds", "served, %", *(f"k {top_k}" for top_k in FEWER_KEYS)], rows
    )


def _accuracy_at(run: dict[str, Any], top_k: int) -> float | None:
    """The accuracy of a run's weights with another k; None if it was not measured."""
    for measured in run.get("by_top_k", ()):
        if measured["top_k"] == top_k:
            return float(measured["accuracy"])
    return None


def _mean_cell(values: Sequence[float | None]) -> str:
    """The mean over seeds; a dash if one has no value."""
    known = [value for value in values if value is not None]
    return number(statistics.fmean(known) if len(known) == len(values) else None, 1)


if __name__ == "__main__":
    sys.exit(run_study("retrieval", str(__doc__), retrieval, figure_retrieval))
