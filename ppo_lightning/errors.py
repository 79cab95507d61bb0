"""Errors that name what was wrong, where, and the way out, in one line.

A check of an argument names it in back-ticks, says the rule and gives the value:
``f"`clip_range` must lie in (0, 1), got {x}."``. The classes below add the place.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from os import PathLike, fspath

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ModelError",
    "RankError",
    "RewardError",
    "RolloutError",
    "UpdateError",
    "first_line",
    "nearest",
    "unknown_key_message",
]


class ConfigError(ValueError):
    """A setting that cannot be used: unknown, of the wrong type, or against another setting."""


class ModelError(ValueError):
    """A model or tokenizer that cannot be used, alone or beside the others of the run."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed or exported."""


class RolloutError(RuntimeError):
    """An engine outside this process that failed, took too long, or has other weights."""


class RankError(RuntimeError):
    """Another rank of the run is gone, stopped or failed, and this one cannot go on."""


class UpdateError(RuntimeError):
    """An update that went wrong: not on-policy at its start, or not finite again and again."""


class DataError(ValueError):
    """Something in a file that cannot be read as what it should be.

    Args:
        message: What is wrong and what to do about it, without the place.
        path: The file.
        line: Line number, from 1.
        column: Character in the line, from 1.
    """

    # The place is optional for pickle, which calls the class with the message alone and sets the
    # rest as attributes: these errors must cross from a worker process to the one that reports.
    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else fspath(path)
        self.line = line
        self.column = column

    def __str__(self) -> str:
        """``file:line:column: message``, with the parts that are known."""
        place = [str(part) for part in (self.path, self.line, self.column) if part is not None]
        return f"{':'.join(place)}: {self.args[0]}" if place else str(self.args[0])


class RewardError(RuntimeError):
    """A reward component that failed, or returned something that is no reward.

    Args:
        message: What is wrong and what to do about it, without the place.
        component: Name of the component in the config's list of rewards.
        sample: Index of the response in the batch that was scored.
    """

    def __init__(
        self, message: str, *, component: str | None = None, sample: int | None = None
    ) -> None:
        super().__init__(message)
        self.component = component
        self.sample = sample

    def __str__(self) -> str:
        """``reward `name`, sample i: message``, with the parts that are known."""
        place = [] if self.component is None else [f"reward `{self.component}`"]
        place += [] if self.sample is None else [f"sample {self.sample}"]
        return f"{', '.join(place)}: {self.args[0]}" if place else str(self.args[0])


def first_line(error: BaseException) -> str:
    """Return the first line of what another library's error says, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that ``key`` was probably meant to be, or None if none is close.

    Case, and ``-`` for ``_``, do not count as differences.
    """
    by_plain_name = {_plain(candidate): candidate for candidate in candidates}
    found = get_close_matches(_plain(key), by_plain_name, n=1, cutoff=0.6)
    return by_plain_name[found[0]] if found else None


def unknown_key_message(key: str, candidates: Iterable[str], where: str) -> str:
    """Say that ``key`` is unknown, what may have been meant, and what is valid.

    Args:
        key: The key as the user wrote it.
        candidates: The keys that are valid there, in the order to list them.
        where: The place in the user's words, such as a config section or a file.
    """
    known = list(candidates)
    meant = nearest(key, known)
    hint = f"; did you mean `{meant}`?" if meant else "."
    valid = f" Valid keys: {', '.join(known)}." if known else " No keys are valid there."
    return f"unknown key `{key}` in {where}{hint}{valid}"


def _plain(key: str) -> str:
    return key.lower().replace("-", "_")
