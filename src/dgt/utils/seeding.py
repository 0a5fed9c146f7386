"""Randomness as a function of names and numbers: (seed, epoch, index) in, the same draws out, in
any process.

Every random choice of the data layer goes through here, so that neither the number of workers, nor
the order in which they answer, nor a restart in the middle of an epoch can change what a model
sees.
"""

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(*parts: int | str) -> np.random.Generator:
    """A fresh NumPy generator that depends on `parts` alone, e.g. `("augment", seed, epoch,
    index)`; none below 0.
    """
    return np.random.Generator(np.random.PCG64(_words(parts)))


def reseed(*parts: int | str) -> None:
    """Seed the global generators with `parts` again.

    To be called inside of `seeded`, which puts the old states back.
    """
    python_seed, numpy_seed, torch_seed = map(
        int, np.random.SeedSequence(_words(parts)).generate_state(3)
    )
    random.seed(python_seed)
    np.random.seed(numpy_seed)  # noqa: NPY002
    torch.default_generator.manual_seed(torch_seed)


def _words(parts: tuple[int | str, ...]) -> list[int]:
    return [zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in parts]


@contextmanager
def seeded(*parts: int | str, device: torch.device | None = None) -> Iterator[None]:
    """Seed Python's, NumPy's and PyTorch's global generators with `parts`; put their old states
    back at the end.

    For library transforms that draw from the global generators; of PyTorch's, the CPU's, and a CUDA
    `device`'s.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else [], device_type="cuda"):
        reseed(*parts)
        if on_gpu:
            torch.cuda.manual_seed(torch.initial_seed())
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
