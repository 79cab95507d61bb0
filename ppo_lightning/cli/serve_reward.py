"""``ppo-lightning serve-reward``: a reward model, or any component, behind HTTP."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_lightning.cli.arguments import Arguments
from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.errors import ConfigError

if TYPE_CHECKING:
    from ppo_lightning.rewards import Reward
    from ppo_lightning.rewards.batching import BatchScorer


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    options = Arguments(
        prog="ppo-lightning serve-reward",
        description="Score responses for `ppo_lightning.rewards.HTTPReward` of other processes: "
        "`POST /score`, and `GET /health`. Requests that arrive together are scored together.",
    )
    options.add_argument(
        "model", nargs="?", help="reward model: a run of it, a folder, hub name or package:NAME"
    )
    options.add_argument(
        "--component",
        metavar="FILE",
        help="serve this component instead: YAML or JSON with `class_path` and `init_args`",
    )
    options.add_argument("--name", help="what `GET /health` calls it")
    _add_address(options)
    _add_limits(options)
    _add_model(options)
    return options


def _add_address(options: argparse.ArgumentParser) -> None:
    options.add_argument("--host", default="127.0.0.1", help="address to listen on")
    options.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the token to ask for"
    )
    options.add_argument(
        "--insecure", action="store_true", help="let other machines in without a token"
    )


def _add_limits(options: argparse.ArgumentParser) -> None:
    options.add_argument("--max-batch", type=int, default=32, help="responses scored at once")
    options.add_argument(
        "--max-wait-ms", type=float, default=2.0, help="how long one waits for others to join it"
    )
    options.add_argument("--max-items", type=int, default=1024, help="most in a request")
    options.add_argument("--max-queue", type=int, default=10_000, help="most that may wait")
    options.add_argument(
        "--max-body-bytes", type=int, default=16_000_000, help="longest body of a request"
    )


def _add_model(options: argparse.ArgumentParser) -> None:
    options.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    model = options.add_argument_group("options of MODEL, see SequenceClassifierReward")
    # No defaults here: the class has them.
    model.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"])
    model.add_argument("--label", help="number or name of the output to read")
    model.add_argument("--transform", choices=["logit", "probability", "log_odds"])
    model.add_argument("--plain-prompts", choices=["text", "chat"])
    model.add_argument("--max-length", type=int)


def main(arguments: Sequence[str]) -> int:
    """Run the command; see ``parser`` for its options.

    Returns:
        0 after SIGTERM, when all is answered; 130 after Ctrl-C.
    """
    given = parser().parse_args(arguments)
    for option, lowest in _LOWEST.items():
        require_at_least(f"--{option}", getattr(given, option.replace("-", "_")), lowest)

    import torch

    from ppo_lightning.cli.sample import _device
    from ppo_lightning.rewards.extras import import_extra

    for package in ("starlette", "uvicorn"):
        import_extra(package, package=package, extra="server", needed_by="serve-reward")
    from ppo_lightning.rewards.serving import Limits, RewardServer, refuse_open_door, score_app

    token = _token(given.token_env)
    refuse_open_door(given.host, token=token, insecure=given.insecure)
    device = torch.device(_device(given))
    scorer = _scorer(given)
    limits = Limits(max_body_bytes=given.max_body_bytes, max_items=given.max_items)
    app = score_app(scorer, token=token, limits=limits)
    server = RewardServer(app, host=given.host, port=given.port)
    server.start()
    try:
        scorer.load(device)  # `GET /health` says `loading` meanwhile
        print(f"ppo-lightning: `{scorer.name}` is served at {server.url}", flush=True)
        received = server.wait()
    finally:
        server.stop()  # `now` would leave a traceback of its lifespan
        server.join()
        scorer.close()
    return 130 if received == signal.SIGINT else 0


_LOWEST = {"max-batch": 1, "max-wait-ms": 0, "max-items": 1, "max-queue": 1, "max-body-bytes": 1}


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"`--token-env`: the environment variable `{variable}` is not set.")
    return token


def _scorer(given: argparse.Namespace) -> BatchScorer:
    from ppo_lightning.rewards.batching import BatchScorer

    if (given.model is None) == (given.component is None):
        raise ConfigError("give either a reward model or `--component FILE`.")
    component = _of_model(given) if given.component is None else _of_file(given)
    return BatchScorer(
        component,
        name=given.name or Path(given.model or given.component).stem,
        max_batch=given.max_batch,
        max_wait=given.max_wait_ms / 1000,
        max_queue=given.max_queue,
    )


_MODEL_OPTIONS = ("dtype", "label", "transform", "plain_prompts", "max_length")


def _of_model(given: argparse.Namespace) -> Reward:
    from ppo_lightning.rewards import SequenceClassifierReward

    options = {name: getattr(given, name) for name in _MODEL_OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    if str(options.get("label", "")).isdigit():
        options["label"] = int(options["label"])
    return SequenceClassifierReward(given.model, batch_size=given.max_batch, **options)


def _of_file(given: argparse.Namespace) -> Reward:
    from ppo_lightning.cli.components import read_component

    stray = [name for name in _MODEL_OPTIONS if getattr(given, name) is not None]
    if stray:
        option = stray[0].replace("_", "-")
        raise ConfigError(f"`--{option}` is for a model: set it in `init_args` of the file.")
    return read_component(given.component)
