"""The console script ``ppo-lightning``: helper commands by name, the rest to LightningCLI.

Nothing heavy is imported before the command at hand needs it.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from ppo_lightning import __version__
from ppo_lightning.cli.file_errors import file_problem
from ppo_lightning.cli.logs import show_log
from ppo_lightning.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    RankError,
    RewardError,
    RolloutError,
    UpdateError,
    nearest,
)

TRAINER_COMMANDS = {
    "fit": "train",
    "validate": "answer and score held-out prompts, as between iterations",
    "test": "answer held-out prompts and print their scores",
    "predict": "answer held-out prompts and write answers and scores to predictions.jsonl",
}

HELPER_COMMANDS = {
    "estimate": "predict the memory of a run, and say what to change to fit some",
    "export": "write a checkpoint's actor or critic as a Hugging Face folder",
    "sample": "answer prompts with a checkpoint or a model, beside the reference",
    "serve-reward": "score responses for other processes, over HTTP",
    "diagnose": "name a run's illnesses from its log, with evidence and remedies",
    "check-reward": "score known-good against known-bad answers with any reward",
    "export-pairs": "write a run's best and most suspicious answers as pairs to be labelled",
    "sweep": "run a config with settings varied, for the same seeds, and compare",
}

EXPECTED_ERRORS = (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    RankError,
    RewardError,
    RolloutError,
    UpdateError,
)
"""They say what the user can do; anything else is told with its traceback."""

LOST_RANK = 75
"""Exit code of a run that has lost a rank; the one of its watchdog."""

_LIGHTNING_SAYS = "Early stopping conditioned on metric"  # and then which metrics there are

_USAGE = """\
usage: ppo-lightning COMMAND [options]

{commands}

  ppo-lightning fit --config ppo-lightning:quickstart    a config that comes with the package
  ppo-lightning fit --config my.yaml --print_config      all settings with their values
  ppo-lightning COMMAND --help                           the options of a command

options: --version, --help, --debug (show the traceback of an error)
Environment variables are settings too, PPO_LIGHTNING_FIT__TRAINER__MAX_EPOCHS=3;
config files win over them, and options over both.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        Exit code: 0, 1 for a check that failed or a sweep with failed runs, 2 for an error that
        the user can mend, 3 or 4 for a run that ``diagnose`` finds ill or critical, 75 for a run
        that has lost a rank, 130 after Ctrl-C, 141 where nobody reads on (``ppo-lightning --help |
        head``), 143 after SIGTERM.
    """
    try:
        code = _main(argv)
        sys.stdout.flush()  # here, where a reader that has gone is no surprise
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # What is left in the buffer would be a second error when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    show_log()
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:
        return _exit_code(leaving)
    except Exception as error:
        told = str(error) if is_expected(error) else file_problem(error)
        if debug or told is None:
            raise
        print(f"ppo-lightning: {told}", file=sys.stderr)
        return LOST_RANK if isinstance(error, RankError) else 2


def is_expected(error: BaseException) -> bool:
    """Whether an error is about what the user gave, and says what to do.

    That are this project's own errors, ``ValueError`` and ``TypeError`` of its checks, and
    Lightning's about its settings.
    """
    if isinstance(error, EXPECTED_ERRORS):
        return True
    if type(error).__name__ == "MisconfigurationException":  # of Lightning, which is not imported
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(_LIGHTNING_SAYS):
        return True
    return type(error) in (ValueError, TypeError) and _raised_here(error)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("--help", "-h", "help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"ppo-lightning {__version__}")
        return 0
    if command in HELPER_COMMANDS:
        module = import_module(f"ppo_lightning.cli.{command.replace('-', '_')}")
        helper: Callable[[list[str]], int] = module.main
        return helper(arguments[1:])
    known = [*TRAINER_COMMANDS, *HELPER_COMMANDS]
    if not command.startswith("-") and command not in known:
        near = nearest(command, known)
        hint = f"did you mean `{near}`? " if near else ""
        raise ConfigError(f"unknown command `{command}`; {hint}Commands: {', '.join(known)}.")
    from ppo_lightning.cli.lightning import run

    run(arguments)
    return 0


def usage() -> str:
    """Return the text of ``ppo-lightning --help``."""
    commands = TRAINER_COMMANDS | HELPER_COMMANDS
    lines = [f"  {name:<14}{what}" for name, what in commands.items()]
    return _USAGE.format(commands="\n".join(lines))


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))


def _raised_here(error: BaseException) -> bool:
    """Whether the line that raised is one of this package."""
    package = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and package in Path(frames[-1].filename).parents


def _exit_code(leaving: SystemExit) -> int:
    """Return the code of a ``SystemExit``; Lightning leaves with 1 after Ctrl-C."""
    if isinstance(leaving.__context__, KeyboardInterrupt):
        return 130
    if leaving.code is None:
        return 0
    return leaving.code if isinstance(leaving.code, int) else 1


if __name__ == "__main__":
    sys.exit(main())
