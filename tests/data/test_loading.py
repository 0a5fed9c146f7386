"""Worker processes of the loaders: they end with the main process, and for nobody else."""

import signal
import subprocess
import sys

import pytest

# Something holds on to the batches until the interpreter ends, as the traceback of an error does.
SCRIPT = """
import builtins, subprocess, sys
from multiprocessing import active_children
from dgt.data.classification import ClassificationData
data = ClassificationData(dataset="scenes", image_size=32, train_size=64, val_size=8, batch_size=4, num_workers=2)
data.setup()
builtins.kept = loader = data.train_dataloader()
batches = iter(loader)
next(batches)
workers = active_children()
for name in sys.argv[1:]:
    subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
print(1 + len(list(batches)), sum(worker.is_alive() for worker in workers))
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system does not tell who sent a signal")
@pytest.mark.parametrize("signals", [(), ("TERM", "INT", "USR1")], ids=["in peace", "told to stop with the group"])
def test_workers_end_with_the_main_process_and_for_nobody_else(signals):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *signals], capture_output=True, text=True, timeout=60, check=False
    )
    assert (process.returncode, process.stdout) == (0, "16 2\n"), process.stderr
