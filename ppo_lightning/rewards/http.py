"""A reward that a server gives."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.contract import VERSION, NoNumber, SentField
from ppo_lightning.rewards.http_client import Outcome, ScoreClient
from ppo_lightning.rewards.http_connections import Trouble
from ppo_lightning.rewards.http_requests import Request, requests_of
from ppo_lightning.rewards.http_settings import (
    ClientSettings,
    check_choices,
    check_numbers,
    checked_url,
    without_secrets,
)
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions

log = logging.getLogger(__name__)

_LEAVE_OUT = (
    "To leave such responses out, set `on_failure: missing` here and "
    "`on_nonfinite: drop` in `reward_processing`."
)


class HTTPReward(Reward):
    """Asks a server for scores, such as ``ppo-lightning serve-reward``.

    The contract (version 1) is a POST of ``{"version": 1, "items": [{"prompt", "messages",
    "response", "truncated"}]}``, answered by ``{"scores": [0.5]}``: a number for each item, in
    their order. Null, text, booleans and NaN are no scores. Redirects are not followed. Every
    process of a run asks for its own share.

    Args:
        url: Page that scores; ``/score`` where it names none. Without user and password.
        timeout: Seconds that one request may take, from its start to the last byte of the answer.
        connect_timeout: Seconds of it that connecting may take.
        retries: Further tries of a request that found no server, got no answer in time, or one of
            ``retry_on``.
        backoff: Seconds before the first retry, doubled with each, half of it drawn at random.
        max_backoff: Most seconds before a retry, whatever the server's ``Retry-After`` says.
        retry_on: Statuses that another try may mend: 429 and those from 500 on.
        batch_size: Responses in one request.
        concurrency: Requests on their way at once.
        fields: What is sent of each response; the ids only on request, as they are many.
        send_metadata: Fields of the prompt's record to send; true sends all that JSON can hold.
        token_env: Environment variable with a bearer token; null sends none.
        on_failure: What the run does without a score: end with an ``error``, or take it as
            ``missing``, which ``reward_processing.on_nonfinite: drop`` leaves out and counts. A
            page that is not there or a token that is refused is an error always.
        health: Page of the server that says whether it is ready, asked at the start; null for none.
        startup_timeout: Seconds to wait until it is.
        trust_env: Use the proxies and certificates that environment variables name; a server on
            this machine is asked directly in any case.
        max_reply_bytes: Longest answer that is read.
    """

    _client: ScoreClient | None

    def __init__(
        self,
        url: str,
        timeout: float = 60.0,
        connect_timeout: float = 5.0,
        retries: int = 3,
        backoff: float = 0.5,
        max_backoff: float = 30.0,
        retry_on: Sequence[int] = (429, 502, 503, 504),
        batch_size: int = 16,
        concurrency: int = 8,
        fields: Sequence[SentField] = ("prompt", "messages", "response", "truncated"),
        send_metadata: bool | list[str] = False,
        token_env: str | None = None,
        on_failure: Literal["error", "missing"] = "error",
        health: str | None = "/health",
        startup_timeout: float = 60.0,
        trust_env: bool = True,
        max_reply_bytes: int = 1_000_000,
    ) -> None:
        self.url = checked_url(url)
        check_numbers(locals())
        check_choices(retry_on, fields, health, on_failure)
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.retries = retries
        self.backoff = backoff
        self.max_backoff = max_backoff
        self.retry_on = tuple(retry_on)
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.fields = tuple(fields)
        self.send_metadata = send_metadata
        self.token_env = token_env
        self.on_failure = on_failure
        self.health = health
        self.startup_timeout = startup_timeout
        self.trust_env = trust_env
        self.max_reply_bytes = max_reply_bytes
        self._begin()

    def setup(self, device: torch.device) -> None:
        """Read the token, and wait until the server says that it is ready.

        Raises:
            ConfigError: httpx is missing, or the variable with the token is.
            RewardError: The server is not ready in time, or refuses.
        """
        with self._setting_up:  # the others wait as well
            if not self._is_open():
                self._greet()

    def fingerprint(self) -> str:
        """Digest of the server's model, where it told one; ``""`` before ``setup``."""
        return self._fingerprint

    def close(self) -> None:
        """Close the connections; the next call opens new ones.

        Where another thread waits for an answer, it gets that and closes them afterwards.
        """
        with self._opening:
            client, self._client, self._fingerprint = self._mine(), None, ""
            unused = client not in self._asking
        if client is not None and unused:
            client.close()

    def __call__(self, completions: Completions) -> list[float]:
        """Score each response; NaN where there is no score and ``on_failure`` is ``missing``.

        Raises:
            RewardError: There is no score: names the server, the sample, and what was received.
        """
        with self._leased() as client:
            requests = requests_of(
                completions,
                fields=self.fields,
                send_metadata=self.send_metadata,
                batch_size=self.batch_size,
            )
            outcomes = client.ask(requests, stop_at_trouble=self.on_failure == "error")
        return self._scores(requests, outcomes, completions)

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections out, which no copy can share."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without connections."""
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        self._client, self._fingerprint = None, ""
        self._opened_by = 0
        self._inherited: list[ScoreClient] = []
        self._asking: Counter[ScoreClient] = Counter()
        # Several threads may ask, and close.
        self._opening: threading.Lock = threading.Lock()
        self._setting_up: threading.Lock = threading.Lock()

    # ------------------------------------------------------------------ the connection

    def _mine(self) -> ScoreClient | None:
        """Return the client, unless it is that of the process that this one was forked from.

        To be called with ``_opening`` held.
        """
        if self._client is not None and self._opened_by != os.getpid():
            # Its thread does not run here, and its sockets are the parent's: never touched, never
            # collected.
            self._inherited.append(self._client)
            self._client = None
        return self._client

    def _is_open(self) -> bool:
        with self._opening:
            return self._mine() is not None

    @contextmanager
    def _leased(self) -> Iterator[ScoreClient]:
        """Have the client of this process, made if need be; ``close`` leaves it open that long."""
        with self._opening:
            client = self._mine()
            if client is None:
                client = self._client = ScoreClient(self._settings())
                self._opened_by = os.getpid()
            self._asking[client] += 1
        try:
            yield client
        finally:
            with self._opening:
                self._asking[client] -= 1
                unused = self._asking[client] == 0
                if unused:
                    del self._asking[client]
                closed = client is not self._client
            if unused and closed:
                client.close()

    def _settings(self) -> ClientSettings:
        return ClientSettings(
            url=self.url,
            timeout=self.timeout,
            connect_timeout=self.connect_timeout,
            retries=self.retries,
            backoff=self.backoff,
            max_backoff=self.max_backoff,
            concurrency=self.concurrency,
            retry_on=self.retry_on,
            trust_env=self.trust_env,
            max_reply_bytes=self.max_reply_bytes,
            token=self._token(),
        )

    def _token(self) -> str | None:
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not token:
            raise ConfigError(
                f"`token_env`: the environment variable `{self.token_env}` is not set or empty. "
                "It must hold the server's bearer token."
            )
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise ConfigError(
                f"`token_env`: what the environment variable `{self.token_env}` holds can be no "
                "bearer token: it has spaces, line breaks or letters beyond ASCII."
            )
        return token

    def _greet(self) -> None:
        with self._leased() as client:
            if self.health is None:
                return
            try:
                said = client.health(self.health, within=self.startup_timeout)
                if said.get("version", VERSION) != VERSION:
                    raise Trouble(
                        f"speaks version {said['version']!r:.20} of the contract",
                        f"This client speaks version {VERSION}: install matching releases.",
                    )
            except Trouble as trouble:
                self.close()
                raise self._error(trouble.what, trouble.remedy) from trouble
            except BaseException:
                self.close()
                raise
            with self._opening:
                if client is self._client:  # not closed meanwhile
                    self._fingerprint = str(said.get("fingerprint") or "")

    # ------------------------------------------------------------------ its answers

    def _scores(
        self,
        requests: Sequence[Request],
        outcomes: Sequence[Outcome | None],
        completions: Completions,
    ) -> list[float]:
        scores: list[float] = []
        problems: list[RewardError] = []
        for request, outcome in zip(requests, outcomes, strict=True):
            if outcome is None:
                scores += [math.nan] * request.count
                continue
            if isinstance(outcome, Trouble):
                told = (outcome.what, outcome.remedy, completions, request.start)
                if outcome.permanent:
                    raise self._error(*told, avoidable=False) from outcome
                problems.append(self._error(*told))
                scores += [math.nan] * request.count
                continue
            for i, entry in enumerate(outcome, start=request.start):
                if isinstance(entry, NoNumber):
                    what = f"answered {entry.shown} where a number belongs"
                    problems.append(self._error(what, "Mend the server.", completions, i))
                scores.append(math.nan if isinstance(entry, NoNumber) else entry)
        self._report(problems, scores)
        return scores

    def _report(self, problems: Sequence[RewardError], scores: Sequence[float]) -> None:
        """Raise or log what went wrong."""
        if problems and self.on_failure == "error":
            raise problems[0]
        if problems:
            missing = sum(map(math.isnan, scores))
            log.warning(
                "%d of %d responses have no score. The first, sample %d: %s",
                missing,
                len(scores),
                problems[0].sample,
                problems[0].args[0],
            )

    def _error(
        self,
        what: str,
        remedy: str,
        completions: Completions | None = None,
        sample: int | None = None,
        *,
        avoidable: bool = True,
    ) -> RewardError:
        parts = [f"the reward server `{without_secrets(self.url)}` {what}."]
        if completions is not None and sample is not None:
            parts.append(quoted(completions, sample))
        parts.append(remedy)
        if completions is not None and self.on_failure == "error" and avoidable:
            parts.append(_LEAVE_OUT)
        return RewardError(" ".join(part for part in parts if part), sample=sample)


_OF_THIS_PROCESS = (
    "_client",
    "_fingerprint",
    "_opened_by",
    "_inherited",
    "_asking",
    "_opening",
    "_setting_up",
)
