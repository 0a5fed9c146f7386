"""The centroids of a DG-Attention layer: initialized and updated (Eqs. 3-4) in any training loop.

A training forward only *observes*: it adds up the statistics of Eq. 3. The centroids move (Eq. 4)
after the step of an optimizer, as :mod:`dgt.layers.centroid_steps` has it. So

- they move once per step, after any number of accumulated micro-batches, only in training, and only
  where all weights of the layer are trained: what trains beside a frozen weight is an adapter, and
  adapters are saved without the centroids of their model;
- a forward that gradient checkpointing repeats sees the same centroids. It observes twice, which
  leaves the mean of Eq. 3 as it is.

Where the weights change again and again and no step was seen, a layer says so, once.

Centroids are float32 whatever the model is cast to, and are normalized when they are used, so
averaging weights (EMA) never moves a layer off the sphere.
"""

import sys
import warnings
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dgt.layers.joint import Joint, Statistics
from dgt.layers.seeding import seed_from_batch
from dgt.ops.checks import check_share, is_transformed
from dgt.ops.dispatch import resolve_backend
from dgt.ops.grouping import blend_centroids, group_statistics
from dgt.ops.registry import load_triton

# The function that PyTorch wraps around the step of every optimizer, which calls the hooks.
STEP = Optimizer.profile_hook_step(lambda *_: None).__code__

WATCHED = 16  # numbers of each weight that show whether it has changed

MISSED_STEP = (
    "the centroids of DG-Attention have not moved, because its weights changed without a step "
    "of a torch.optim.Optimizer that holds them (as with FSDP's flat parameters, float32 master "
    "weights, and updates by hand): call dgt.step_centroids(model, learning_rate) after every step"
)

STAY_RANDOM = (
    "the centroids of DG-Attention are random, and stay so, because a weight of the layer is frozen: "
    "find them first with dgt.calibrate(model, images), or train all weights of the layer"
)


def steps_around() -> int:
    """Return the number of optimizers inside of whose step this is called."""
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None:
        steps += frame.f_code is STEP
        frame = frame.f_back
    return steps


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
    """Mixin of DG-Attention: the centroids, and the statistics that will move them.

    Attributes:
        centroids: buffer (H, G, D), float32.
        num_updates: buffer, the number of steps that have moved the centroids; 0 before they are
            learned.
        seeded: whether the centroids are known to be initialized, so that no forward has to wait
            for a device; bool, on the CPU.
        observed: statistics of this process since the last step. No buffers: DDP would overwrite
            every rank's with those of the first.
        joint: what joins this layer with those of other processes, or None.
    """

    centroids: Tensor
    num_updates: Tensor
    backend: str
    steps_ended: ClassVar[int] = 0  # of all optimizers
    watched_in: int | None = None  # the step inside of which weights were looked at last

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
        centroids = torch.empty(shape, device=device, dtype=torch.float32)
        self.register_buffer("centroids", centroids)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64, device=device))
        self.joint: Joint | None = None
        self.step_is_known = False  # one has moved the centroids, or was missed and told of
        self.frozen_is_known = False  # told of, where that leaves the centroids random
        self.reset_centroids()

    def reset_centroids(self) -> None:
        """Set random unit centroids, the same for every layer and run, and forget all training."""
        generator = torch.Generator().manual_seed(0)
        shape = self.centroids.shape
        noise = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            self.centroids.copy_(F.normalize(noise, dim=-1))
            self.num_updates.zero_()
        self.forget()

    def forget(self) -> None:
        """Start a step anew: with no statistics, and knowing nothing of weights and centroids."""
        with torch.inference_mode(False):  # a training may go on after it
            self.observed = Statistics(self.centroids)
            self.seeded = torch.zeros((), dtype=torch.bool, device="cpu")
        self.weights_before: dict[str, Tensor] = {}
        self.have_changed = False  # once, and no step was known yet

    def unit_centroids(self) -> Tensor:
        """Return the (H, G, D) centroids at unit norm, also after something has averaged them."""
        return F.normalize(self.centroids, dim=-1)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name.

        Where FSDP has left no parameters, those are the tensors in their places.
        """
        return dict(self.named_parameters()) or {
            f"{place}.{name}": value
            for place, module in self.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        }

    def learns(self) -> bool:
        """Tell whether this forward counts: in training, unless a weight is frozen.

        Raises:
            ValueError: inside of a transform of ``torch.func``, which cannot change any state.
        """
        if not self.training:
            return False
        if not all(weight.requires_grad for weight in self.parameters()):
            self._tell_of_random_centroids()
            return False
        if is_transformed():
            raise ValueError(
                f"{type(self).__name__} must be in evaluation mode inside of a transform of torch.func, "
                "got training mode, which changes centroids: call eval() before"
            )
        return True

    def _tell_of_random_centroids(self) -> None:
        if self.frozen_is_known or torch.compiler.is_compiling() or self.centroids.is_meta:
            return
        self.frozen_is_known = True
        if not self.num_updates:
            warnings.warn(STAY_RANDOM, stacklevel=2)

    def seed(self, query: Tensor, query_mask: Tensor | None, anew: bool = False) -> None:
        """Initialize the centroids from the (B, H, L, D) queries of the first batch that has any.

        Those that something copied in place (DDP from its first rank, an average) stay, but
        ``anew``, which counts as an update.
        """
        group = "" if self.joint is None else self.joint.group_name()
        with torch.no_grad():
            if anew:
                self.seeded.fill_(False)
                self.num_updates.zero_()
            seed_from_batch(self.centroids, self.seeded, self.num_updates, query, query_mask, group)
            if anew:
                self.num_updates.copy_(self.seeded)

    def observe(self, query: Tensor, group_ids: Tensor) -> None:
        """Add the statistics of (B, H, L, D) queries in (B, H, L) groups to those of the step."""
        if self.observed.sums.device != self.centroids.device:  # the buffer was replaced
            self.forget()
        with torch.no_grad():
            groups = self.centroids.shape[1]
            self.observed.add(*group_statistics(query, group_ids, groups, self.backend))
        if not (torch.compiler.is_compiling() or self.step_is_known):
            self.watch_weights()

    def watch_weights(self) -> None:
        """Warn, once, where weights have changed twice and no step was seen that changed them.

        Once is no sign: sharpness-aware minimization looks at weights nearby before each step; nor are
        changes inside of one step, as LBFGS makes them.
        """
        if self.centroids.is_meta:  # there are no numbers
            return
        if not all(isinstance(weight, nn.Parameter) for weight in self.parameters()):
            return  # others are in their place for this call, by torch.func.functional_call
        if self.centroids.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        before = self.weights_before
        self.weights_before = {
            name: _first_numbers(weight) for name, weight in self.weights().items()
        }
        have_changed = not all(
            torch.equal(weight, before.get(name, weight))
            for name, weight in self.weights_before.items()
        )
        step = CentroidState.steps_ended if steps_around() else None
        is_same_step = step is not None and step == self.watched_in
        self.watched_in = step
        if is_same_step:
            return
        self.step_is_known = have_changed and self.have_changed
        self.have_changed |= have_changed
        if self.step_is_known:
            warnings.warn(MISSED_STEP, stacklevel=2)

    def move(self, learning_rate: float | Tensor | None) -> None:
        """Move the centroids by the step's statistics (Eq. 4), and clear those.

        Raises:
            ValueError: neither the layer nor the step says what tau is.
        """
        if self.tau is not None:
            tau: float | Tensor = self.tau
        elif learning_rate is not None:
            tau = 0.1 * learning_rate
        else:
            raise ValueError(
                "tau must be a number from 0 to 1 where the optimizer has no learning rate, got None"
            )
        rate = tau if self.tau_weighs == "new" else 1 - tau
        sums, counts = self.observed.sums, self.observed.counts
        self.step_is_known = True
        with torch.no_grad():
            if self._move_at_once(rate):
                return
            self.centroids.copy_(blend_centroids(self.unit_centroids(), sums, counts, rate))
            self.num_updates += counts.any()
            self.observed.clear()

    def _move_at_once(self, rate: float | Tensor) -> bool:
        """Do :meth:`move` in one Triton kernel where the layer's backend is Triton.

        Tell whether it was done.
        """
        tensors = (self.centroids, self.observed.sums, self.observed.counts)
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

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the module (``.to``, ``.cuda``), but stay float32-exact when it is cast."""
        before = self.centroids
        super()._apply(fn, recurse)
        if self.centroids.dtype != torch.float32:
            self.centroids = before.to(self.centroids.device)
        self.weights_before = {}  # a cast changes them
        if before.device != self.centroids.device:
            self.forget()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.inference_mode(False):
            self.centroids = self.centroids.float()  # `assign` takes what it is given
        self.forget()


def _first_numbers(weight: Tensor) -> Tensor:
    """Copy a few numbers of a weight; of a sharded one, of its part here."""
    local: Any = weight.to_local() if hasattr(weight, "to_local") else weight
    return local.detach().flatten()[:WATCHED].clone()
