"""The door through which every component's answer passes: one finite number a response."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards.base import Reward
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions

OnNonfinite = Literal["error", "drop"]


def scores_of(
    component: Reward,
    name: str,
    completions: Completions,
    *,
    on_nonfinite: OnNonfinite = "error",
) -> Tensor:
    """Ask a component and check its answer. No responses, no question: the result is empty.

    A list, tuple, array or tensor of B numbers is an answer, also as ``[B, 1]``. A single
    number, a dict, a generator or another count never is, whatever ``on_nonfinite`` says.

    Args:
        component: Whom to ask.
        name: How messages call it.
        completions: B responses.
        on_nonfinite: A score that is NaN, infinite (in float32), None or text is an ``error``, or
            comes back as NaN (``drop``).

    Returns:
        ``[B]`` float32 on the CPU, without gradient.

    Raises:
        RewardError: The component failed, or its answer is no such thing; names the component,
            what was expected and received, the sample and its prompt.
    """
    count = len(completions)
    if count == 0:
        return torch.zeros(0)
    with blamed_on(name):
        answer = _ask(component, completions)
        values = _entries(answer, count)
        numbers = [_number(value, i) for i, value in enumerate(values)]
        scores = torch.tensor(numbers, dtype=torch.float64).float()
        finite = scores.isfinite()
        if on_nonfinite == "error" and not finite.all():
            raise _nonfinite(values, finite, completions)
    return scores.masked_fill(~finite, math.nan)


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Write the component's name into an error that does not know it."""
    try:
        yield
    except RewardError as error:
        error.component = error.component or name
        raise
    except ConfigError as error:
        raise RewardError(str(error), component=name) from error
    except SystemExit as error:
        raise RewardError(f"raised SystemExit: {error}", component=name) from error


def _ask(component: Reward, completions: Completions) -> Any:
    try:
        return component(completions)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit` in a script would end the run unheard
        asked = f"{type(component).__name__} raised {type(error).__name__}: {error}"
        raise RewardError(asked) from error


def _entries(answer: Any, count: int) -> list[Any]:
    """Return the B entries of an answer, not yet known to be numbers."""
    expected = f"expected {count} scores, one for each response, received"
    if isinstance(answer, Tensor | np.ndarray):
        shape = list(answer.shape)
        if shape not in ([count], [count, 1]):
            kind = "a tensor" if isinstance(answer, Tensor) else "an array"
            raise RewardError(f"{expected} {kind} of shape {shape}.")
        return list(answer.reshape(-1).tolist())
    if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
        if len(answer) != count:
            raise RewardError(f"{expected} {len(answer)}.")
        return list(answer)
    raise RewardError(f"{expected} {_kind(answer)}. Return a list of numbers in their order.")


def _kind(answer: Any) -> str:
    if answer is None:
        return "None (does the function lack a `return`?)"
    if isinstance(answer, Mapping):
        return f"a {type(answer).__name__} of {len(answer)} entries, which have no order to go by"
    if inspect.iscoroutine(answer):
        answer.close()  # or Python would warn that nobody waited for it
        return "a coroutine (the function is `async`)"
    if isinstance(answer, Iterator):
        return f"a {type(answer).__name__}"
    return f"{answer!r:.60} ({type(answer).__name__})"


def _number(value: Any, sample: int) -> float:
    """Return the entry as a float; NaN stands for None and text, which are missing numbers."""
    if value is None or isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{value!r:.60} ({type(value).__name__})"
        raise RewardError(f"expected a number, received {what}.", sample=sample) from error


def _nonfinite(values: Sequence[Any], finite: Tensor, completions: Completions) -> RewardError:
    bad = (~finite).nonzero().flatten().tolist()
    first = bad[0]
    message = (
        f"expected a finite number, received {values[first]!r:.60}, as {len(bad)} of "
        f"{len(values)} scores are none. {quoted(completions, first)} Mend the component, or leave "
        "such responses out with `reward_processing.on_nonfinite: drop`."
    )
    return RewardError(message, sample=first)
