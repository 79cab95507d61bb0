"""Freed memory is kept, in a process of its own: what is set cannot be taken back."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from ppo_lightning.modules.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.ones(2**20) for _ in range(8)]  # 4 MiB each
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    print(keep_freed_memory())
faults()
print(faults())
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")


def run(argument, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
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
