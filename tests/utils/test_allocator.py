"""Memory that a process frees is kept, unless the environment says what becomes of it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from dgt.utils import allocator

PAGES_OF_MAPS = 40 * 4 * 2**20 // 4096
# The file by itself: importing the package takes seconds.
SCRIPT = """
import resource, runpy, sys

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    maps = [bytearray(4 * 2**20) for _ in range(40)]
    del maps
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

is_kept = "keep" in sys.argv and runpy.run_path(sys.argv[1])["keep_freed_memory"]()
faults()
print(is_kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns memory so")
@pytest.mark.parametrize(
    ("words", "environment", "is_kept"),
    [
        ((), {}, False),
        (("keep",), {}, True),
        (("keep",), {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
    ],
    ids=["as it is", "kept", "as the environment says"],
)
def test_what_a_step_frees_the_next_one_takes(
    words: tuple[str, ...], environment: dict[str, str], is_kept: bool
) -> None:
    command = [sys.executable, "-c", SCRIPT, allocator.__file__, *words]
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    ran = subprocess.run(
        command, env=plain | environment, capture_output=True, text=True, check=True
    )
    says_so, faults = ran.stdout.split()
    assert says_so == str(is_kept)
    assert (int(faults) < PAGES_OF_MAPS / 10) == is_kept
