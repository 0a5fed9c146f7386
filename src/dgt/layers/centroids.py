"""The centroids of a DG-Attention layer: initialized and updated (Eqs. 3-4) in any training loop.

A training forward only *observes*: it adds up the statistics of Eq. 3. The centroids move (Eq. 4)
right after the optimizer that owns the layer's weights has made its step, through PyTorch's global
optimizer hook. So

- they change once per step, after any number of accumulated micro-batches, and only in training;
- a forward that gradient checkpointing repeats sees the same centroids. It observes twice, which
  leaves the mean of Eq. 3 as it is;
- statistics of all layers are summed over ranks in one collective, so every rank moves to the same
  centroids;
- tau follows the learning rate of that very step, as in the paper.

Centroids are float32 whatever the model is cast to, and are normalized when they are used, so
averaging weights (EMA) never moves a layer off the sphere.
"""

import itertools
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from dgt.ops.checks import check_share
from dgt.ops.dispatch import resolve_backend
from dgt.ops.grouping import blend_centroids, group_statistics, seed_centroids
from dgt.ops.registry import load_triton
from dgt.utils.distributed import world_size

SEED_TOKENS_PER_GROUP = 32  # size of the sample that seeding clusters

_layers: "weakref.WeakSet[CentroidState]" = weakref.WeakSet()
_enlisting = threading.Lock()  # layers may be built in one thread while another trains
_serials = itertools.count()


def check_tau(tau: float | None) -> None:
    """Raise TypeError or ValueError unless tau is None or a number from 0 to 1."""
    if tau is not None:
        check_share("tau, where it is not None,", tau)


def check_tau_weighs(tau_weighs: str) -> None:
    """Raise ValueError unless ``tau_weighs`` is one of the two readings of Eq. 4."""
    if tau_weighs not in ("old", "new"):
        raise ValueError(
            f"tau_weighs must be 'old' (Eq. 4 as printed) or 'new', got {tau_weighs!r}"
        )


class CentroidState(nn.Module):
    """Mixin of DG-Attention: the buffer ``centroids`` (H, G, D) and the statistics of the step."""

    def init_centroids(
        self,
        shape: tuple[int, ...],
        tau: float | None,
        tau_weighs: str,
        device: Any = None,
    ) -> None:
        """Register the buffers of shape (H, G, D); called once, from the constructor.

        ``tau`` and ``tau_weighs`` as in :class:`dgt.DGAttention`; ValueError where they are out of
        range.
        """
        check_tau(tau)
        check_tau_weighs(tau_weighs)
        self.tau, self.tau_weighs = tau, tau_weighs
        exact: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.register_buffer("centroids", torch.empty(shape, **exact))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64, device=device))
        # Statistics of the current step. No buffers: DDP would overwrite every rank's with those of
        # the first.
        self.group_sums = torch.zeros(shape, **exact)
        self.group_counts = torch.zeros(shape[:2], **exact)
        # num_updates > 0, known to the host so that no forward has to wait for a device.
        self.seeded = False
        self.reset_centroids()
        self._enlist()

    centroids: Tensor
    num_updates: Tensor
    backend: str

    def reset_centroids(self) -> None:
        """Set random unit centroids, the same for every layer and run, for a model without
        training.
        """
        if self.centroids.device.type != "meta":
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(self.centroids.shape, generator=generator, device="cpu")
            with torch.no_grad():
                self.centroids.copy_(F.normalize(noise, dim=-1))
                self.num_updates.zero_()
        self.seeded = False

    def unit_centroids(self) -> Tensor:
        """Return the (H, G, D) centroids at unit norm, also after something has averaged them."""
        return F.normalize(self.centroids, dim=-1)

    def seed(self, query: Tensor, key_mask: Tensor | None, anew: bool = False) -> None:
        """Initialize the centroids from the first batch's (B, H, L, D) queries, equally on every rank.

        Those that something copied in place (DDP from its first rank, an average) stay, but
        ``anew``.
        """
        with torch.no_grad():
            updates = torch.zeros_like(self.num_updates) if anew else self.num_updates
            self.centroids.copy_(
                torch.ops.dgt.seed_from_batch(query, self.centroids, updates, key_mask)
            )
            self.num_updates.clamp_(min=1)
        self.seeded = True

    def observe(self, query: Tensor, group_ids: Tensor) -> None:
        """Add the statistics of (B, H, L, D) queries in (B, H, L) groups to those of the step."""
        with torch.no_grad():
            groups = self.centroids.shape[1]
            sums, counts = group_statistics(query, group_ids, groups, self.backend)
            self.group_sums.add_(sums)
            self.group_counts.add_(counts)

    def update(self, learning_rate: float | Tensor) -> None:
        """Move the centroids by the step's statistics (Eq. 4), and forget those."""
        tau = 0.1 * learning_rate if self.tau is None else self.tau
        rate = tau if self.tau_weighs == "new" else 1 - tau
        with torch.no_grad():
            if self.update_at_once(rate):
                return
            self.centroids.copy_(
                blend_centroids(self.unit_centroids(), self.group_sums, self.group_counts, rate)
            )
            self.num_updates += self.group_counts.any()
            self.group_sums.zero_()
            self.group_counts.zero_()

    def update_at_once(self, rate: float | Tensor) -> bool:
        """Do :meth:`update` in one Triton kernel where the layer's backend is Triton.

        Tell whether it was done.
        """
        tensors = (self.centroids, self.group_sums, self.group_counts)
        if isinstance(rate, Tensor) and rate.device != self.centroids.device:
            rate = float(rate)
        if resolve_backend(self.backend, self.centroids[None]) != "triton" or not all(
            t.is_contiguous() for t in tensors
        ):
            return False
        load_triton().move_centroids(*tensors, self.num_updates, rate)
        # The kernel's writes are unknown to PyTorch.
        torch.autograd.graph.increment_version(self.centroids)
        return True

    def train(self, mode: bool = True) -> "CentroidState":
        """Set the mode, and notice buffers that were replaced (by averaging, by transformers)."""
        super().train(mode)
        if mode and not self.seeded and not self.num_updates.is_meta:
            self.seeded = bool(self.num_updates > 0)
        if self.group_sums.device != self.centroids.device:
            self._apply(lambda tensor: tensor, recurse=False)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the module (``.to``, ``.cuda``), but stay float32-exact when it is cast."""
        before = self.centroids
        super()._apply(fn, recurse)
        device = self.centroids.device
        if self.centroids.dtype != torch.float32:
            self.centroids = before.to(device)
        for name in ("group_sums", "group_counts"):
            found = getattr(self, name)  # on the meta device nothing was observed
            setattr(
                self,
                name,
                torch.zeros_like(found, device=device) if found.is_meta else found.to(device),
            )
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.centroids = self.centroids.float()  # `assign` takes what it is given
        self.seeded = not self.num_updates.is_meta and bool(self.num_updates > 0)
        self._apply(lambda tensor: tensor, recurse=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enlist()  # a copy (deepcopy, pickle) is a separate layer

    def _enlist(self) -> None:
        self.serial = next(_serials)  # the same order on every rank, for the collective
        with _enlisting:
            _layers.add(self)


@torch.library.custom_op("dgt::seed_from_batch", mutates_args=())
def _seed_from_batch(
    query: Tensor, centroids: Tensor, num_updates: Tensor, key_mask: Tensor | None
) -> Tensor:
    """Cluster evenly spaced tokens of the batches of all ranks.

    Every rank gets what one process with the whole batch would get.

    Centroids that have been updated stay. A rank that knows so does not come here, so nothing is
    gathered for them.
    """
    if num_updates > 0:
        return centroids.clone()
    num_groups = centroids.shape[1]
    tokens = query.detach().float().transpose(0, 1).flatten(1, 2)  # (H, B L, D)
    if key_mask is not None and key_mask.any():
        tokens = tokens[:, key_mask.flatten()]
    sample = max(1, SEED_TOKENS_PER_GROUP * num_groups // world_size())
    tokens = tokens[:, torch.arange(sample, device=query.device) * tokens.shape[1] // sample]
    if world_size() > 1:
        shares = [torch.empty_like(tokens) for _ in range(world_size())]
        dist.all_gather(shares, tokens.contiguous())
        tokens = torch.cat(shares, dim=1)
    return seed_centroids(tokens, num_groups)


@_seed_from_batch.register_fake
def _(query: Tensor, centroids: Tensor, num_updates: Tensor, key_mask: Tensor | None) -> Tensor:
    return torch.empty_like(centroids)


@torch.compiler.disable
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    """Update every training layer of this optimizer's weights, with statistics of all ranks."""
    groups = optimizer.param_groups
    rates = {
        id(p): group.get("lr", 0.0) for group in groups for p in group["params"] if p.requires_grad
    }
    with _enlisting:
        layers = list(_layers)
    layers = [
        layer
        for layer in layers
        if layer.training and any(id(p) in rates for p in layer.parameters())
    ]
    layers.sort(key=lambda layer: layer.serial)
    if not layers:
        return
    if world_size() > 1:
        _sum_over_ranks([t for layer in layers for t in (layer.group_sums, layer.group_counts)])
    for layer in layers:
        layer.update(next(rates[id(p)] for p in layer.parameters() if id(p) in rates))


def _sum_over_ranks(tensors: list[Tensor]) -> None:
    """Sum many small tensors over all ranks, in place, in a single collective."""
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


register_optimizer_step_post_hook(_after_step)


def renormalize_centroids(model: nn.Module) -> None:
    """Bring all centroids of a model to unit norm in place, for example after averaging weights.

    Args:
        model: any module; its :class:`dgt.DGAttention` layers are changed, nothing else.

    Example:
        >>> layer = dgt.DGAttention(64, num_heads=2)
        >>> _ = layer.centroids.mul_(3)
        >>> renormalize_centroids(layer)
        >>> torch.allclose(layer.centroids.norm(dim=-1), torch.ones(2, 48))
        True
    """
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, CentroidState):
                layer.centroids.copy_(layer.unit_centroids())
