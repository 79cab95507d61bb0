"""What ``estimate`` reads and prints of runs on several GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_lightning.errors import ConfigError
from ppo_lightning.io import read_json

if TYPE_CHECKING:
    from ppo_lightning.estimate import Architecture, Hardware, Plan, Predictor, Strategy

_CLASSES = {"DDPStrategy": "ddp", "FSDP2Strategy": "fsdp", "DeepSpeedStrategy": "deepspeed"}


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options that are about a cluster."""
    group = options.add_argument_group(
        "on a cluster",
        "with --trainer.strategy, --trainer.devices and --trainer.num_nodes of fit: memory of each "
        "GPU, bytes that it sends, expected tokens a second",
    )
    group.add_argument(
        "--architecture",
        metavar="NAME",
        help="of a policy that is not on the disk: llama-3.2-1b, llama-3.1-8b, llama-3.1-70b; "
        "needs --prompt-tokens",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="T",
        help="with fsdp: so many neighbouring GPUs compute each layer together",
    )
    group.add_argument(
        "--hardware",
        nargs="+",
        metavar="NAME|KEY=NUMBER",
        help="h100 (default), h200 or a100, in nodes of eight, and what differs: memory=96e9 "
        "network_bandwidth=25e9 flops_share=0.5",
    )
    group.add_argument(
        "--asynchronous",
        action="store_true",
        help="count the weights that a generator of its own gets in every iteration",
    )


def check_options(given: argparse.Namespace) -> None:
    """Refuse options that cannot go together.

    Raises:
        ConfigError: Names them.
    """
    tensor = given.tensor_parallel
    if tensor is not None and tensor < 1:
        raise ConfigError(f"`--tensor-parallel` must be at least 1, got {tensor}.")
    if given.architecture is not None and given.prompt_tokens is None:
        raise ConfigError(
            "`--architecture` names a model without a tokenizer: give `--prompt-tokens N`, the "
            "length of the longest prompt."
        )
    if given.hardware is not None and given.device == "cpu":
        raise ConfigError("`--hardware` is about GPUs: leave it out, or `--device cpu`.")


def is_of_cluster(given: argparse.Namespace, trainer: Any) -> bool:
    """Whether what is asked can only be meant for GPUs."""
    name, _ = _strategy_name(trainer.strategy)
    asked = (given.architecture, given.tensor_parallel, given.hardware)
    sharded = name.startswith(("fsdp", "deepspeed"))
    return sharded or int(trainer.num_nodes) > 1 or any(one is not None for one in asked)


def read_strategy(given: argparse.Namespace, trainer: Any, ranks: int) -> Strategy:
    """Read the strategy of a config.

    Args:
        given: Options of the command.
        trainer: Section of the config.
        ranks: Processes.

    Raises:
        ConfigError: It is none that can be estimated.
    """
    from ppo_lightning.estimate import strategy_of

    name, own = _strategy_name(trainer.strategy)
    try:
        return strategy_of(name, ranks=ranks, tensor=given.tensor_parallel or own)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _strategy_name(strategy: Any) -> tuple[str, int]:
    """Return name and tensor-parallel size of a strategy, given by name or as a class."""
    if isinstance(strategy, str):
        return strategy, 1
    settings = getattr(strategy, "init_args", None)
    kind = _CLASSES.get(str(getattr(strategy, "class_path", strategy)).rpartition(".")[2])
    if kind is None:
        raise ConfigError(
            f"`trainer.strategy`: {getattr(strategy, 'class_path', strategy)} cannot be estimated: "
            f"set ddp, fsdp or deepspeed_stage_1 to 3, or one of {', '.join(_CLASSES)}."
        )
    if kind == "deepspeed":
        return f"deepspeed_stage_{getattr(settings, 'stage', 2)}", 1
    tensor = getattr(settings, "tensor_parallel_size", 1)
    return kind, tensor if isinstance(tensor, int) else 1


def read_hardware(given: argparse.Namespace) -> Hardware:
    """Read ``--hardware``.

    Raises:
        ConfigError: There is no such, or a value is out of range.
    """
    from ppo_lightning.estimate import hardware_of

    try:
        return hardware_of(given.hardware or ())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def predictor_of(architecture: Architecture | None) -> Predictor:
    """Choose how the memory of a run is predicted."""
    from ppo_lightning.estimate import Estimator, SketchEstimator

    return Estimator() if architecture is None else SketchEstimator(architecture)


def read_architecture(given: argparse.Namespace, path: str, tensor: int) -> Architecture | None:
    """Find the shape of the policy, where it has to be known: by name, or for tensor parallel.

    Args:
        given: Options of the command.
        path: Of the policy.
        tensor: Ranks that share a layer.

    Raises:
        ConfigError: There is no such, or its layers cannot be shared.
    """
    from ppo_lightning.estimate import Architecture, named_architecture
    from ppo_lightning.models.locate import local_path

    if given.architecture is None and tensor == 1:
        return None
    try:
        if given.architecture is not None:
            found = named_architecture(given.architecture)
        else:
            file = Path(local_path(path)) / "config.json"
            found = Architecture.of_settings(read_json(file) if file.is_file() else {}, path)
        found.on_one_of(tensor)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found


# ---------------------------------------------------------------------- what is printed


def plan_lines(plan: Plan) -> list[str]:
    """Write what a GPU sends, and what the time comes to.

    Args:
        plan: Of a run on several GPUs, or on one.
    """
    lines = [f"Sent by each rank in an iteration, and as much received: {_gb(plan.traffic.total)}"]
    lines += [f"  {_gb(size):>10}  {name}" for name, size in plan.traffic.parts.items()]
    if plan.run.device == "cpu":
        return lines
    time = plan.seconds
    stages = {"rollout": time.rollout, "scoring": time.scoring, "update": time.update}
    told = ", ".join(f"{name} {_number(value)} s" for name, value in stages.items())
    return [
        *lines,
        "",
        f"Expected: {_number(plan.tokens_per_second)} response tokens a second over all ranks "
        f"({_number(time.total)} s an iteration: {told}).",
        "Not measured. It assumes " + assumptions(plan.hardware),
    ]


def assumptions(hardware: Hardware) -> str:
    """Say in words what a plan takes for granted."""
    h = hardware
    return (
        f"GPUs of {h.flops / 1e12:g} teraflops in 16 bits, {h.flops_float32 / 1e12:g} in float32, "
        f"{h.memory / 1e9:g} GB (10^9 bytes) at {h.memory_bandwidth / 1e12:g} TB/s, in nodes of "
        f"{h.node_gpus}, {h.node_bandwidth / 1e9:g} GB/s within and {h.network_bandwidth / 1e9:g} "
        f"GB/s between nodes for each GPU, one way; attained: {h.flops_share:.0%} of the products, "
        f"{h.memory_bandwidth_share:.0%} of the memory's speed when decoding, "
        f"{h.network_share:.0%} of the links', {h.latency * 1e6:g} µs a collective; tensors may "
        f"take {h.memory_share:.0%} of the memory."
    )


def strategy_notes(strategy: Strategy) -> list[str]:
    """Say what the rows of a table mean where ranks share something."""
    notes = []
    if strategy.kind == "ddp":
        notes.append("`buckets` are the copy of the gradients that DDP adds up in.")
    if strategy.kind == "deepspeed":
        notes.append(
            "`master weights` and `buckets` are DeepSpeed's own: a float32 copy of what is "
            "trained, cut over ranks, and two buffers."
        )
    if strategy.cuts_weights:
        notes.append(
            "`gathered` is what is put together for a while: the whole actor in the rollout, else "
            "two blocks and what is in no block, with gradients of that size in the update."
        )
    if strategy.tensor > 1:
        notes.append(
            "Tensor parallel cuts heads and feed-forward layers; embedding and output layer are "
            "whole on each rank."
        )
    return notes


def plan_json(plan: Plan) -> Mapping[str, Any]:
    """Return a plan in plain numbers: bytes and seconds."""
    time = plan.seconds
    return {
        "strategy": plan.run.strategy.name,
        "sent_bytes": dict(plan.traffic.parts),
        "seconds": {"rollout": time.rollout, "scoring": time.scoring, "update": time.update},
        "tokens_per_second": plan.tokens_per_second,
    }


def _gb(size: float) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.1f} MB"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
