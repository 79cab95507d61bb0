"""The planning tables of the documentation.

``python -m ppo_lightning.estimate.docs docs/scaling.md`` writes them into the page, between its two
marks; without a file they are printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ppo_lightning.configs import (
    BufferConfig,
    CriticConfig,
    PolicyConfig,
    PPOConfig,
    SamplingConfig,
)
from ppo_lightning.errors import ConfigError
from ppo_lightning.estimate.architectures import ARCHITECTURES
from ppo_lightning.estimate.hardware import HARDWARE, Hardware
from ppo_lightning.estimate.plan import Plan, plan
from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.sketch import SketchEstimator
from ppo_lightning.estimate.strategy import Strategy
from ppo_lightning.io import read_text, write_text_atomic

BEGIN, END = "<!-- plan: begin -->", "<!-- plan: end -->"
RANKS = (8, 64, 256, 1024)
ROWS, TOKENS = 32, 512
STRATEGIES = (
    Strategy(kind="ddp"),
    Strategy(kind="deepspeed", stage=1),
    Strategy(kind="deepspeed", stage=2),
    Strategy(kind="deepspeed", stage=3),
    Strategy(kind="fsdp"),
    Strategy(kind="fsdp", tensor=8),
)

_HEADER = """\
| GPUs | strategy | GB a GPU, peak | stage | fits | GB sent a GPU | seconds | tokens/s |
| ---: | --- | ---: | --- | --- | ---: | ---: | ---: |
"""


def planned_run(ranks: int, strategy: Strategy) -> Run:
    """Return the run of the tables: so many responses for each GPU, whatever their number.

    Args:
        ranks: GPUs.
        strategy: How they share the weights.
    """
    return Run(
        policy=PolicyConfig(path="by its architecture", gradient_checkpointing=True),
        critic_model=CriticConfig(gradient_checkpointing=True),
        prompt_tokens=TOKENS,
        sampling=SamplingConfig(max_new_tokens=TOKENS),
        ppo=PPOConfig(microbatch_tokens=8192),
        buffer=BufferConfig(num_prompts=ROWS * ranks, num_minibatches=4),
        precision="bf16-mixed",
        device="cuda",
        ranks=ranks,
        strategy=strategy,
    )


def tables(names: Iterable[str] = tuple(ARCHITECTURES)) -> str:
    """Return a table for each architecture, as Markdown.

    Args:
        names: Of the architectures.
    """
    hardware = HARDWARE["h100"]
    sections = [table(name, plans(name, hardware)) for name in names]
    return "\n".join([introduction(hardware), *sections])


def plans(name: str, hardware: Hardware) -> Iterator[Plan]:
    """Plan the run of the tables for every number of GPUs and every strategy.

    Args:
        name: Of the architecture.
        hardware: Of the GPUs.
    """
    predictor = SketchEstimator(ARCHITECTURES[name])
    for ranks in RANKS:
        for strategy in STRATEGIES:
            yield plan(planned_run(ranks, strategy), predictor, hardware)


def table(name: str, found: Iterable[Plan]) -> str:
    """Return one table.

    Args:
        name: Of the architecture.
        found: A row each.
    """
    size = ARCHITECTURES[name].parameters / 1e9
    rows = "".join(_row(one) for one in found)
    return f"### {name} ({size:.2f} billion weights)\n\n{_HEADER}{rows}"


def _row(found: Plan) -> str:
    peak = found.memory.peak
    cells = (
        f"{found.run.ranks:,}",
        found.run.strategy.name,
        f"{peak.total / 2**30:.1f}",
        peak.name,
        "yes" if found.fits else "no",
        f"{found.traffic.total / 2**30:,.1f}",
        f"{found.seconds.total:,.1f}",
        f"{found.tokens_per_second:,.0f}" if found.fits else "",
    )
    return f"| {' | '.join(cells)} |\n"


def introduction(hardware: Hardware) -> str:
    """Say what the tables take for granted.

    Args:
        hardware: Of the GPUs.
    """
    usable = hardware.usable_memory / 2**30
    return f"""\
Every number below is computed, none is measured. An iteration of {ROWS} responses for each GPU, {TOKENS} tokens
each after a prompt of {TOKENS}, four minibatches, four update epochs; actor, critic and reference of the same size;
all weights trained, kept in float32, `bf16-mixed`, activations recomputed (`gradient_checkpointing: true`), at most
8,192 tokens a microbatch; rewards that are no networks. A GPU has {hardware.memory / 1e9:g} GB (10^9 bytes) at {hardware.memory_bandwidth / 1e12:g} TB/s and
{hardware.flops / 1e12:g} teraflops in 16 bits; a node has {hardware.node_gpus} of them, with {hardware.node_bandwidth / 1e9:g} GB/s one way between them and {hardware.network_bandwidth / 1e9:g} GB/s a GPU
to other nodes. Attained: {hardware.flops_share:.0%} of the products, {hardware.memory_bandwidth_share:.0%} of the memory's speed when decoding, {hardware.network_share:.0%} of the links',
{hardware.latency * 1e6:g} µs a collective. Tensors may take {hardware.memory_share:.0%} of the memory, {usable:.1f} GB of 2^30 bytes: `fits` is about that.
Reference and critic are cut as the actor is. Weights travel in float32. `GB sent` is of one GPU in an iteration, and
as much is received. `tokens/s` counts response tokens of all GPUs over the time of whole iterations. With tensor
parallel eight GPUs share the budget of a microbatch, so weights travel eight times as often: a larger
`microbatch_tokens` sends less, and takes more memory.
"""  # noqa: E501 (lines of a page)


def with_tables(page: str, text: str) -> str:
    """Put tables between the marks of a page.

    Raises:
        ConfigError: It has no such marks.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ConfigError(f"the page must hold `{BEGIN}` and `{END}`, once each.")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", page)


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into the page that is named."""
    text = tables()
    if not arguments:
        sys.stdout.buffer.write(text.encode("utf-8"))
        return
    path = Path(arguments[0])
    write_text_atomic(path, with_tables(read_text(path), text))


if __name__ == "__main__":
    main(sys.argv[1:])
