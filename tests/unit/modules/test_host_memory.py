"""Freed memory is kept, in a process of its own: what is set cannot be taken back."""

import os
import platform
import subprocess
import sys

import pytest

from ppo_lightning.modules import host_memory

PROGRAM = """
import ctypes, resource, runpy, sys

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
SIZE = 4 * 2**20

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [libc.malloc(ctypes.c_size_t(SIZE)) for _ in range(8)]
        for block in blocks:
            ctypes.memset(block, 1, SIZE)
        for block in reversed(blocks):
            libc.free(ctypes.c_void_p(block))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    print(runpy.run_path(sys.argv[2])["keep_freed_memory"]())  # imports nothing else
faults()
print(faults())
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")


def run(argument, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument, host_memory.__file__],
        env=clean | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return finished.stdout.split()


@needs_glibc
def test_pages_are_not_asked_for_again():
    (left,) = run("leave")
    did, again = run("keep")
    assert did == "True"
    assert int(again) < int(left) / 10


@needs_glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"])
def test_the_environment_has_the_last_word(name):
    assert run("keep", **{name: "131072"})[0] == "False"
