"""A Python function as a reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.configs.checks import require_positive
from ppo_lightning.errors import ConfigError, RewardError, nearest
from ppo_lightning.rewards.arguments import (
    bind_arguments,
    function_name,
    named_parameters,
    takes_anything,
)
from ppo_lightning.rewards.base import Reward, TokenRewards
from ppo_lightning.rewards.deadline import call_within
from ppo_lightning.rewards.locate import load_function, split_target
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions

_COLUMNS = tuple(field.name for field in fields(Completions))


class FunctionReward(Reward):
    """Scores responses with a function of one's own.

    It is called once a batch, by name, with those of these that it has parameters for (with
    ``**anything``: with all of them), each a list with one entry for each response:

    - ``prompts``, ``responses`` (text), ``messages`` (the chat, or None), ``prompt_ids``,
      ``response_ids`` (token ids), ``truncated``, ``metadata`` (the prompt's record);
    - any field of the prompts' records, by its own name.

    It returns one number for each response, or ``TokenRewards``. Example:
    ``def short(responses, answer, scale=1.0)``.

    Args:
        function: ``package.module:name``, ``package.module.name`` or ``path/to/file.py:name``.
        arguments: Further arguments, by name. A quoted text stays one, but for ``1e-6`` and the
            like, which reach the function as numbers.
        timeout: Seconds after which a call ends the run with an error, for functions that wait for
            something. They are called in a thread of their own then, which nobody can stop: it
            goes on until the process ends. Null waits for ever.
    """

    def __init__(
        self,
        function: str,
        # Not `dict[str, Any]`: jsonargparse reads a text under `Any` as YAML once more.
        arguments: dict | None = None,  # type: ignore[type-arg]
        timeout: float | None = None,
    ) -> None:
        split_target(function)
        require_positive("timeout", timeout)
        self.function = function
        self.timeout = timeout
        self.arguments = dict(arguments or {})
        taken = [name for name in self.arguments if name in _COLUMNS]
        if taken:
            raise ConfigError(f"`arguments` must not name {taken}: they come from the rollout.")
        self._call: Callable[..., Any] | None = None
        self._bound: dict[str, Any] = {}

    def setup(self, device: torch.device) -> None:
        """Import the function and check the arguments against it.

        Raises:
            ConfigError: There is no such function, or it does not take an argument.
        """
        if self._call is None:
            function = load_function(self.function)
            self._bound = bind_arguments(function, self.arguments)
            self._call = function

    def __call__(self, completions: Completions) -> Tensor | Sequence[float] | TokenRewards:
        """Return what the function returns.

        Raises:
            RewardError: The function asks for something that neither the rollout, the records nor
                ``arguments`` have, or takes longer than ``timeout``.
        """
        if self._call is None:
            self.setup(torch.device("cpu"))
        assert self._call is not None
        call: Callable[[], Tensor | Sequence[float] | TokenRewards] = partial(
            self._call, **self._columns(self._call, completions), **self._bound
        )
        if self.timeout is None:
            return call()
        name = f"`{function_name(self._call)}` ({len(completions)} responses)"
        return call_within(call, seconds=self.timeout, name=name)

    def _columns(self, function: Callable[..., Any], completions: Completions) -> dict[str, Any]:
        """Return the columns that the function has parameters for."""
        columns = {}
        for name, parameter in named_parameters(function).items():
            if name in _COLUMNS:
                columns[name] = list(getattr(completions, name))
            elif name not in self._bound and self._is_wanted(parameter, completions):
                columns[name] = self._field(name, completions)
        if takes_anything(function):
            columns = {**_everything(completions), **columns}
        return {name: values for name, values in columns.items() if name not in self._bound}

    @staticmethod
    def _is_wanted(parameter: inspect.Parameter, completions: Completions) -> bool:
        """A parameter with a default may lack a field; then no record may have it."""
        optional = parameter.default is not parameter.empty
        return not optional or any(parameter.name in record for record in completions.metadata)

    def _field(self, name: str, completions: Completions) -> list[Any]:
        for i, record in enumerate(completions.metadata):
            if name not in record:
                assert self._call is not None
                known = [*_COLUMNS, *map(str, record)]
                meant = nearest(name, known)
                hint = f" Did it mean `{meant}`?" if meant else ""
                raise RewardError(
                    f"`{function_name(self._call)}` asks for `{name}`, which the prompt's record "
                    f"lacks.{hint} There are {', '.join(known)}, and whatever `arguments` adds. "
                    f"{quoted(completions, i)}",
                    sample=i,
                )
        return [record[name] for record in completions.metadata]


def _everything(completions: Completions) -> dict[str, list[Any]]:
    """All columns, and all fields that any record has, None where one lacks it."""
    keys = dict.fromkeys(str(key) for record in completions.metadata for key in record)
    found = {key: [record.get(key) for record in completions.metadata] for key in keys}
    return {**found, **{name: list(getattr(completions, name)) for name in _COLUMNS}}
