"""Measure what scoring over HTTP costs: texts a second, with 32 requests on their way.

    OMP_NUM_THREADS=1 python experiments/speed/http_reward.py        # a minute or two

A `ppo-lightning serve-reward` process on this machine serves a rule that costs next to nothing, so
that what is left is the way there and back: JSON, HTTP, batching, two processes. Beside the time on
the clock stands the processor time that a text costs on either side, which other programs on the
machine change little: the slower side bounds what a quiet machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import starlette
import torch
import uvicorn

from ppo_lightning.rewards import HTTPReward, RegexReward
from ppo_lightning.types import Completions

PATTERN = r"(?i)\b(good|great)\b"
WORDS = ["the", "film", "movie", "was", "is", "good", "bad", "great", "plot", "and", "not", "long"]


def texts(count: int, words: int) -> Completions:
    """Make prompts and responses of some words each."""
    draw = random.Random(0)
    written = [" ".join(draw.choices(WORDS, k=words)) for _ in range(2 * count)]
    return Completions(
        prompts=written[:count],
        messages=[None] * count,
        responses=written[count:],
        prompt_ids=[[]] * count,
        response_ids=[[]] * count,
        truncated=[False] * count,
        metadata=[{}] * count,
    )


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a server; its address and the number of its process."""
    file = folder / "rule.json"
    block = {"class_path": "RegexReward", "init_args": {"pattern": PATTERN}}
    file.write_text(json.dumps(block), encoding="utf-8")
    command = [sys.executable, "-m", "ppo_lightning.cli.main", "serve-reward"]
    options = ["--component", str(file), "--port", "0", "--max-batch", "256"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/score", process.stdout.readline())
        assert found is not None, "the server did not start"
        try:
            yield found[0], process.pid
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Of scoring all texts once: seconds on the clock, and of the processor on either side."""

    clock: float
    client: float
    server: float


def cost_of(score: Callable[[], object], server: int, repeats: int) -> Cost:
    """Mean of some calls."""
    before = time.perf_counter(), time.process_time(), processor_seconds(server)
    for _ in range(repeats):
        score()
    after = time.perf_counter(), time.process_time(), processor_seconds(server)
    return Cost(*((end - start) / repeats for start, end in zip(before, after, strict=True)))


def state_of_the_machine() -> str:
    """Say what the figures were taken on."""
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, load {loads}; Python {platform.python_version()}, torch "
        f"{torch.__version__}, httpx {httpx.__version__}, starlette {starlette.__version__}, "
        f"uvicorn {uvicorn.__version__}; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}"
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--words", type=int, default=30, help="in a prompt, and in a response")
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    completions = texts(given.texts, given.words)
    rule = RegexReward(PATTERN)
    expected = list(rule(completions))
    direct = cost_of(lambda: rule(completions), os.getpid(), 5).clock
    print(f"before: {state_of_the_machine()}\n")
    print("| how | seconds | texts a second | direct is faster by | client µs | server µs |")
    print("| --- | --- | --- | --- | --- | --- |")
    each = 1e6 * direct / given.texts
    print(f"| called directly | {direct:.4f} | {given.texts / direct:,.0f} | 1 | {each:.1f} | |")
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (url, pid):
        for size in given.batch_sizes:
            reward = HTTPReward(url, batch_size=size, concurrency=given.in_flight)
            reward.setup(torch.device("cpu"))
            assert reward(completions) == expected  # also to warm up
            cost = cost_of(lambda reward=reward: reward(completions), pid, given.repeats)
            reward.close()
            client, server = (1e6 * part / given.texts for part in (cost.client, cost.server))
            print(
                f"| {given.in_flight} in flight, {size} a request | {cost.clock:.2f} | "
                f"{given.texts / cost.clock:,.0f} | {cost.clock / direct:,.0f} | {client:.0f} | "
                f"{server:.0f} |",
                flush=True,
            )
    print(f"\nafter: {state_of_the_machine()}")


if __name__ == "__main__":
    main()
