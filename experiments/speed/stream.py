"""Stream prompts of a file that is larger than the memory it may take.

Writes a JSONL file, streams prompts through it, stops in the middle, goes on with a new reader and
prints: time of the index, time of a look at every record, prompts a second, the peak of the memory
above the start, and whether the resumed run got the same next prompts. The exit code is 1 if it did
not, or if the peak exceeds ``--limit``.

    python experiments/speed/stream.py                       # 1 GB
    python experiments/speed/stream.py --megabytes 100 --validate lazy
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppo_lightning.data import PromptReader, StreamedPrompts
from ppo_lightning.data.prompts.feeds import PromptFeed

BATCH = 512
SEED = 7


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment; returns the exit code."""
    given = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "prompts.jsonl"
        count = write_prompts(path, given.megabytes * 1_000_000)
        print(f"file: {path.stat().st_size / 1e9:.3f} GB, {count} records")
        reader = PromptReader(tokenizer=tiny_tokenizer(), chat=False)
        reader.tokenizer("warm up", add_special_tokens=False)
        start = reset_peak()
        source = StreamedPrompts(path, validate=given.validate)
        with timed("index (one pass over the bytes)"):
            source.rows()
        with timed(f"start with `validate: {given.validate}` (index included)"):
            feed = source.feed(reader)
        same = stream(feed, source, reader, given.prompts)
        peak = memory("VmHWM") - start
    print(f"memory peak above the start: {peak:.0f} MB (start {start:.0f} MB)")
    print(f"a resume in the middle gives the same next prompts: {'yes' if same else 'NO'}")
    return 0 if same and peak < given.limit else 1


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--megabytes", type=int, default=1000, help="size of the file")
    made.add_argument("--prompts", type=int, default=20 * BATCH, help="prompts to take")
    made.add_argument("--validate", choices=("all", "lazy"), default="all")
    made.add_argument("--limit", type=float, default=500, help="most MB above the start")
    made.add_argument("--folder", default=None, help="where the file is made; it is deleted")
    return made


def stream(
    feed: PromptFeed, source: StreamedPrompts, reader: PromptReader, num_prompts: int
) -> bool:
    """Take prompts, then the second half of them again with a new feed; compare."""
    num_batches = max(2, num_prompts // BATCH)
    began = time.perf_counter()
    batches, position, middle = [], 0, 0
    for number in range(num_batches):
        if number == num_batches // 2:
            middle = position
        taken = feed.take(position, BATCH, seed=SEED)
        batches.append(taken.ids)
        position = taken.position
    seconds = time.perf_counter() - began
    print(f"streamed: {num_batches * BATCH / seconds:,.0f} prompts/s, in batches of {BATCH}")
    lazily = StreamedPrompts(source.path, validate="lazy").feed(reader)
    again = []
    for _ in batches[num_batches // 2 :]:
        taken = lazily.take(middle, BATCH, seed=SEED)
        again.append(taken.ids)
        middle = taken.position
    return again == batches[num_batches // 2 :]


def write_prompts(path: Path, size: int) -> int:
    """Write records of some 100 to 1000 bytes until the file has a size; return their number."""
    random, count = Random(SEED), 0
    words = [f"word{number}" for number in range(1000)]
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < size:
            lines = []
            for number in range(count, count + 1000):
                text = " ".join(random.choices(words, k=random.randint(8, 100)))
                lines.append(json.dumps({"prompt": f"{number}: {text}", "answer": number}) + "\n")
            file.writelines(lines)
            count += 1000
    return count


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level and without merges: a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long something took."""
    began = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - began:.1f} s")


def reset_peak() -> float:
    """Forget the highest memory so far, where Linux allows it; return the present, in MB."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak before the start counts as well: it cannot be reset here", file=sys.stderr)
    return memory("VmRSS")


def memory(name: str) -> float:
    """Return a figure of ``/proc/self/status``, in MB."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
