"""How a reward server is asked: the settings of ``HTTPReward``, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ppo_lightning.configs.checks import require, require_at_least, require_positive
from ppo_lightning.errors import ConfigError
from ppo_lightning.rewards.contract import FIELDS

_LOWEST = {
    "retries": 0,
    "backoff": 0,
    "startup_timeout": 0,
    "batch_size": 1,
    "concurrency": 1,
    "max_reply_bytes": 1,
}


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How a server is asked; see ``HTTPReward``."""

    url: str
    timeout: float
    connect_timeout: float
    retries: int
    backoff: float
    max_backoff: float
    concurrency: int
    retry_on: Sequence[int]
    trust_env: bool
    max_reply_bytes: int
    token: str | None = field(default=None, repr=False)


def checked_url(url: str) -> str:
    """Return the URL with a path; the message about a wrong one must not tell its secrets.

    Raises:
        ConfigError: It is no URL of a page, or holds a password.
    """
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises where it is no number
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(
            f"`url` must be like `http://127.0.0.1:8000/score`, got "
            f"{without_secrets(url.rpartition('@')[2])!r}."
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"`url` must not hold user and password ({without_secrets(url)}): a config is kept and "
            "shown. Give a token in an environment variable, named by `token_env`."
        )
    path = parts.path if parts.path.strip("/") else "/score"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse waits and sizes that are too small.

    Raises:
        ConfigError: Names the setting and its bound.
    """
    for name in ("timeout", "connect_timeout", "max_backoff"):
        require_positive(name, given[name])
    for name, low in _LOWEST.items():
        require_at_least(name, given[name], low)


def check_choices(
    retry_on: Sequence[int], fields: Sequence[str], health: str | None, on_failure: str
) -> None:
    """Refuse statuses, fields, pages and choices that there are not.

    Raises:
        ConfigError: Names the setting, and what it may be.
    """
    never = [status for status in retry_on if status != 429 and not 500 <= status <= 599]
    require(
        not never,
        f"`retry_on` may name 429 and 500 to 599, got {never}: the same request is as wrong when "
        "it is sent again.",
    )
    unknown = [name for name in fields if name not in FIELDS]
    require(not unknown, f"`fields` must be some of {', '.join(FIELDS)}, got {unknown}.")
    require("response" in fields, f"`fields` must name `response`, got {list(fields)}.")
    require(
        health is None or health.startswith("/"),
        f"`health` must be a page on the server of `url`, such as `/health`, got {health!r}.",
    )
    require(
        on_failure in ("error", "missing"),
        f"`on_failure` must be one of error, missing, got {on_failure!r}.",
    )


def without_secrets(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return "(no URL)"
    return urlunsplit((parts.scheme, host, parts.path, "", "")) + ("?…" if parts.query else "")
