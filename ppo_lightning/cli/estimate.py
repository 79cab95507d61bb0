"""``ppo-lightning estimate``: the memory that a run will take, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.cli.cluster import (
    add_options,
    check_options,
    is_of_cluster,
    plan_json,
    plan_lines,
    predictor_of,
    read_architecture,
    read_hardware,
    read_strategy,
    strategy_notes,
)
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from ppo_lightning.estimate import (
        Architecture,
        Change,
        Device,
        Estimate,
        Fitting,
        Hardware,
        Plan,
        Predictor,
        Run,
    )

GIB = 2**30
OUTSIDE = ("libraries", "heap")
"""What is no tensor; last in the table."""


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning estimate",
        usage="ppo-lightning estimate [options] --config FILE [options of fit]",
        description="Predict the peak memory of each stage of a PPO run from its config: nothing "
        "is loaded. All that `fit` takes may follow. Exit code 0: it fits, or nothing was asked; "
        "1: it does not fit; 2: something cannot be read.",
    )
    options.add_argument(
        "--fit",
        type=float,
        metavar="GB",
        dest="limit",
        help="memory that there is, in GB of 2^30 bytes: say what to change where it is too little",
    )
    options.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="of the longest prompt; else the prompts are read, as `fit` does",
    )
    options.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where the run is to be; else as `trainer.accelerator` has it on this machine",
    )
    options.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    add_options(options)
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options."""
    given, rest = parser().parse_known_args(arguments)
    _check(given)
    from ppo_lightning.estimate import find_fit, plan

    asked = _asked(given, rest)
    run, predictor, limit = asked.run, asked.predictor, asked.limit
    planned = None
    if asked.hardware is not None:
        planned = plan(run, predictor, asked.hardware, asynchronous=given.asynchronous)
    found = predictor(run) if planned is None else planned.memory
    fits = limit is None or found.peak.total <= limit
    fitting = None if limit is None or fits else find_fit(run, limit, predictor)
    if given.json:
        print(json.dumps(_as_json(run, found, limit, fitting, planned)))
    else:
        print(_as_text(run, found, limit, fitting, planned))
    return 0 if fits else 1


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is to be estimated.

    Args:
        run: As the config says.
        predictor: Of its memory.
        limit: Bytes that there are; None where nobody asks.
        hardware: Where the run has several ranks, or is meant for a cluster.
    """

    run: Run
    predictor: Predictor
    limit: int | None
    hardware: Hardware | None


def _check(given: argparse.Namespace) -> None:
    if given.limit is not None and not given.limit > 0:
        raise ConfigError(f"`--fit` must be above 0 GB, got {given.limit:g}.")
    if given.prompt_tokens is not None and given.prompt_tokens < 1:
        raise ConfigError(f"`--prompt-tokens` must be at least 1, got {given.prompt_tokens}.")
    check_options(given)


# ---------------------------------------------------------------------- the config


def _asked(given: argparse.Namespace, rest: Sequence[str]) -> _Asked:
    from ppo_lightning.cli.read_config import ConfigReader
    from ppo_lightning.modules import PPOModule
    from ppo_lightning.rollout import RolloutDataModule

    config = ConfigReader.read(rest)
    module, data = config.model, config.datamodule
    for key, part, kind in (("model", module, PPOModule), ("data", data, RolloutDataModule)):
        if not isinstance(part, kind):
            raise ConfigError(
                f"`{key}`: memory is estimated for a {kind.__name__} only, and the config has a "
                f"{type(part).__name__}."
            )
    trainer = config.trainer_settings
    cluster = is_of_cluster(given, trainer)
    run, architecture = _run(given, module, data, trainer, cluster=cluster)
    limit = None if given.limit is None else int(given.limit * GIB)
    hardware = read_hardware(given) if cluster or run.ranks > 1 else None
    if given.hardware is not None and run.device == "cpu":
        raise ConfigError(
            f"`--hardware` is about GPUs, and `trainer.accelerator` is `{trainer.accelerator}`: "
            "add `--device cuda`, or leave it out."
        )
    if limit is None and hardware is not None and cluster and run.device == "cuda":
        limit = hardware.usable_memory
    return _Asked(run=run, predictor=predictor_of(architecture), limit=limit, hardware=hardware)


def _run(
    given: argparse.Namespace, module: Any, data: Any, trainer: Any, *, cluster: bool
) -> tuple[Run, Architecture | None]:
    from ppo_lightning.estimate import run_of

    device: Device = given.device or _device(trainer.accelerator, cluster=cluster)
    ranks = _ranks(trainer, device, cluster=cluster)
    strategy = read_strategy(given, trainer, ranks)
    architecture = read_architecture(given, module.policy.path, strategy.tensor)
    run = run_of(
        module,
        buffer=data.buffer,
        prompt_tokens=given.prompt_tokens or _longest_prompt(module, data),
        precision=_precision(trainer),
        device=device,
        ranks=ranks,
        strategy=strategy,
    )
    if architecture is None:
        return run, None
    node = read_hardware(given).node_gpus
    return replace(run, tensor_limit=gcd(architecture.kv_heads, node)), architecture


def _device(accelerator: str, *, cluster: bool) -> Device:
    import torch

    if accelerator == "auto":
        return "cuda" if cluster or torch.cuda.is_available() else "cpu"
    known: dict[str, Device] = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
    if accelerator not in known:
        raise ConfigError(
            f"`trainer.accelerator: {accelerator}`: memory is estimated for cpu and gpu only; "
            "`--device` chooses one of them."
        )
    return known[accelerator]


def _precision(trainer: Any) -> str:
    return "32-true" if trainer.precision is None else str(trainer.precision)


def _ranks(trainer: Any, device: str, *, cluster: bool) -> int:
    """Processes of a run, as far as they are known before it starts."""
    import torch

    nodes = int(trainer.num_nodes)
    if nodes < 1:
        raise ConfigError(f"`trainer.num_nodes` must be at least 1, got {nodes}.")
    devices = trainer.devices
    if isinstance(devices, str) and devices.lstrip("-").isdigit():
        devices = int(devices)
    if devices in ("auto", -1):
        if cluster and nodes > 1:
            raise ConfigError(
                f"`trainer.devices: {devices}` leaves open how many GPUs each of the {nodes} nodes "
                "has: give a number."
            )
        devices = max(1, torch.cuda.device_count()) if device == "cuda" else 1
    count = devices if isinstance(devices, int) else len(_listed(devices))
    return max(1, count) * nodes


def _listed(devices: Any) -> list[Any]:
    return devices.strip(",").split(",") if isinstance(devices, str) else list(devices)


def _longest_prompt(module: Any, data: Any) -> int:
    """Read the prompts as the run would: only the tokenizer is loaded."""
    from ppo_lightning.data import PromptReader, PromptSet

    room, wanted = module.max_prompt_tokens, data.max_prompt_tokens
    reader = PromptReader(
        tokenizer=module.tokenizer,
        chat=data.chat,
        system_prompt=data.system_prompt,
        max_prompt_tokens=room if wanted is None else wanted,
        overlong=data.overlong,
        deduplicate=data.deduplicate,
    )
    prompts = data.prompts.feed(reader)
    if isinstance(prompts, PromptSet):
        return max(len(ids) for ids in prompts.ids)
    if wanted is None:
        raise ConfigError(
            "the longest prompt is not known before all of them are read: give "
            "`--prompt-tokens N`, or set `data.init_args.max_prompt_tokens`."
        )
    return int(wanted)


# ---------------------------------------------------------------------- what is printed


def _as_text(
    run: Run,
    found: Estimate,
    limit: int | None,
    fitting: Fitting | None,
    planned: Plan | None,
) -> str:
    size = _Sizes.for_largest(max(found.peak.total, limit or 0))
    lines = [_header(run, size), "", *_table(found, size), "", *_notes(run)]
    if planned is not None:
        lines += ["", *plan_lines(planned)]
    if limit is None:
        return "\n".join(lines)
    over = found.peak.total - limit
    if fitting is None:
        return "\n".join([*lines, "", f"It fits {size(limit)}: {size(-over)} are left."])
    where = ", ".join(stage.name for stage in found.stages if stage.total > limit)
    lines += ["", f"It does not fit {size(limit)}: {size(over)} too much ({where}).", ""]
    return "\n".join([*lines, *_advice(fitting, size)])


@dataclass(frozen=True)
class _Sizes:
    """Writes bytes in one unit.

    Args:
        unit: Its name.
        factor: Bytes.
        digits: Behind the point.
    """

    unit: str
    factor: int
    digits: int

    @classmethod
    def for_largest(cls, size: int) -> _Sizes:
        """Choose the unit in which the largest number is easy to read."""
        return cls("GB", GIB, 1) if size >= 8 * GIB else cls("MB", 2**20, 0)

    def number(self, size: int) -> str:
        return f"{size / self.factor:.{self.digits}f}"

    def __call__(self, size: int) -> str:
        return f"{self.number(size)} {self.unit}"


def _header(run: Run, size: _Sizes) -> str:
    shared = f" on {run.ranks} ranks, the memory of one" if run.ranks > 1 else ""
    if run.shares_gradients:
        shared = f" on {run.ranks} ranks ({run.strategy.name}), the memory of one"
    return (
        f"Peak memory in {size.unit}: prompts of {run.prompt_tokens} and responses of "
        f"{run.sampling.max_new_tokens} tokens, all of them as long as they may be; "
        f"{run.buffer.num_responses} responses in {run.buffer.num_minibatches} minibatches{shared}."
    )


def _table(found: Estimate, size: _Sizes) -> list[str]:
    stages = found.stages
    parts = dict.fromkeys(part for stage in stages for part in stage.parts if part not in OUTSIDE)
    parts |= dict.fromkeys(part for part in OUTSIDE if part in found.peak.parts)
    width = max(map(len, [*parts, "total"]))
    lines = [" " * width + "".join(f"{stage.name:>10}" for stage in stages)]
    for part in parts:
        cells = (size.number(n) if (n := stage.parts.get(part, 0)) else "" for stage in stages)
        lines.append(f"{part:<{width}}" + "".join(f"{cell:>10}" for cell in cells).rstrip())
    totals = "".join(f"{size.number(stage.total):>10}" for stage in stages)
    return [*lines, f"{'total':<{width}}{totals}   peak: {found.peak.name}"]


def _notes(run: Run) -> list[str]:
    notes = [
        "`libraries` and `heap` are what a process on a CPU takes beside its tensors, as measured "
        "on Linux; the imports (some 450 MB) come on top."
        if run.takes_process
        else "Tensors alone are counted: libraries and what an allocator holds in reserve come on "
        "top (on a GPU some 500 MB for the context of CUDA)."
    ]
    if run.strategy.kind == "single" and run.ranks > 1:
        notes.append("Each rank holds everything.")
    return [*notes, *(strategy_notes(run.strategy) if run.ranks > 1 else ())]


def _advice(fitting: Fitting, size: _Sizes) -> list[str]:
    lines = ["What each change saves by itself, cheapest first:"]
    for change, saved in fitting.alone:
        if saved > 0:
            lines.append(f"  {size(saved):>9}  {_options(change.settings)}  ({change.price})")
    if fitting.together is None:
        left = f"All of them together leave {size(fitting.total)}: take smaller models."
        return [*lines, "", left]
    merged = _merged(fitting.together)
    return [*lines, "", f"The cheapest that fit, {size(fitting.total)}:", f"  {_options(merged)}"]


def _merged(changes: Sequence[Change]) -> dict[str, str]:
    return {key: value for change in changes for key, value in change.settings.items()}


def _options(settings: Mapping[str, str]) -> str:
    """Return settings as they are given to ``fit``; those of the environment come first."""
    ordered = sorted(settings.items(), key=lambda item: not item[0].isupper())
    return " ".join(f"{k}={v}" if k.isupper() else f"--{_short(k)} {v}" for k, v in ordered)


def _short(key: str) -> str:
    """Leave out what the command line knows by itself."""
    return key.replace(".init_args", "")


def _as_json(
    run: Run,
    found: Estimate,
    limit: int | None,
    fitting: Fitting | None,
    planned: Plan | None,
) -> dict[str, Any]:
    said: dict[str, Any] = {
        "device": found.device,
        "ranks": run.ranks,
        "prompt_tokens": run.prompt_tokens,
        "response_tokens": run.sampling.max_new_tokens,
        "stages": {stage.name: dict(stage.parts) for stage in found.stages},
        "peak": {"stage": found.peak.name, "bytes": found.peak.total},
    }
    if planned is not None:
        said |= plan_json(planned)
    if limit is not None:
        said |= {"limit": limit, "fits": found.peak.total <= limit}
    if fitting is not None:
        said["saves_alone"] = [
            {"settings": dict(change.settings), "bytes": saved, "price": change.price}
            for change, saved in fitting.alone
        ]
        enough = fitting.together
        said["together"] = None if enough is None else _merged(enough)
        said["bytes_together"] = fitting.total
    return said
