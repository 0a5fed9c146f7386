"""The loader: workers end with the main process and only then; the last step runs on the device."""

import signal
import subprocess
import sys

import pytest
import torch

from dgt.data.classification import ClassificationData
from dgt.data.loader import Key
from dgt.data.transforms import Augmentation

# Something keeps a reference to the batches until the interpreter exits, as a traceback would.
SCRIPT = """
import builtins, os, signal, subprocess
from multiprocessing import active_children
from torch.utils.data._utils import signal_handling
from dgt.data.classification import ClassificationData
begin = signal_handling._set_worker_signal_handlers  # open to any signal, until ours are set
builtins.kept = []
def load(names):
    def begin_and_be_told():
        begin()
        for name in names:
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
    signal_handling._set_worker_signal_handlers = begin_and_be_told
    data = ClassificationData(dataset="scenes", image_size=32, train_size=64, val_size=8, batch_size=4, num_workers=2)
    data.setup()
    loader = data.train_dataloader()
    builtins.kept.append(loader)
    others = active_children()
    batches = iter(loader)
    seen = [next(batches), next(batches)]  # one of each worker: both have begun
    workers = [child for child in active_children() if child not in others]
    for name in names:
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    print(len(seen) + len(list(batches)), sum(worker.is_alive() for worker in workers))
load([])
load(["TERM", "INT", "USR1"])
"""


@pytest.mark.skipif(
    not hasattr(signal, "sigwaitinfo"), reason="this system does not tell who sent a signal"
)
def test_workers_end_with_the_main_process_and_for_nobody_else():
    """In peace, and told to stop together with their process group."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=800, check=False
    )
    assert (process.returncode, process.stdout) == (0, "16 2\n16 2\n"), process.stderr


def test_images_are_finished_on_the_loaders_device_as_a_function_of_seed_epoch_and_batch():
    data = ClassificationData(
        dataset="scenes", image_size=32, train_size=16, val_size=8, batch_size=4, num_workers=0
    )
    data.setup()
    loader = data.train_dataloader()
    assert loader.device == torch.device("cpu")
    torch.manual_seed(0)
    first = [images.clone() for images, _ in loader]
    loader.load_state_dict({"epoch": 0, "batch": 2})
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for (a, _), b in zip(loader, first[2:], strict=True))
    other = [images for images, _ in loader]  # the next epoch
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    loader.device = torch.device("meta")
    images, targets = next(iter(loader))
    assert (images.device, images.dtype, targets.device) == (
        loader.device,
        torch.float32,
        loader.device,
    )


def test_mixing_belongs_to_the_batch_and_erasing_comes_after_it():
    data = ClassificationData(
        dataset="scenes",
        image_size=32,
        train_size=8,
        val_size=8,
        batch_size=4,
        num_workers=0,
        augmentation=Augmentation(
            None, 0.0, erasing=1.0, mixup=1.0, cutmix=0.0, min_scale=1.0, flip=0.0
        ),
    )
    data.setup()
    keys = [Key(0, 0, item) for item in (3, 1, 4, 2)]
    samples = [data.datasets["train"].__getitems__(keys).samples for _ in range(2)]
    (images, targets), (again, same) = (data.collate("train", keys[0], drawn) for drawn in samples)
    assert torch.equal(images, again)
    assert torch.equal(targets, same)
    erased, _ = data.finish("train", keys[0], images, targets)
    plain = data.normalize(images)
    assert (
        (erased != plain).flatten(1).any(dim=1)
    ).all()  # every image, none mixed with another's erased box
    assert torch.equal(erased, data.finish("train", keys[0], images, targets)[0])
