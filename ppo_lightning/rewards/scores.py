"""The door through which every component's answer passes: finite numbers, as many as expected."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ppo_lightning.distributed import pulse
from ppo_lightning.errors import ConfigError, RewardError
from ppo_lightning.rewards.base import Reward, TokenRewards
from ppo_lightning.rewards.texts import quoted
from ppo_lightning.types import Completions

OnNonfinite = Literal["error", "drop"]


@dataclass(frozen=True)
class Judgement:
    """What a component said of B responses.

    Args:
        scores: One number a response; of rewards per token their sum. NaN where it said nothing
            usable. ``[B]`` float32.
        tokens: Rewards per token, 0 after a response's last one and where ``scores`` is NaN; None
            from a component that scores whole responses. T is the longest response's tokens.
            ``[B, T]`` float32.
    """

    scores: Tensor
    tokens: Tensor | None = None

    def to(self, device: torch.device) -> Judgement:
        """Move it."""
        tokens = None if self.tokens is None else self.tokens.to(device)
        return Judgement(self.scores.to(device), tokens)


def scores_of(
    component: Reward,
    name: str,
    completions: Completions,
    *,
    on_nonfinite: OnNonfinite = "error",
) -> Tensor:
    """Ask a component for one number a response; see ``judged``.

    Returns:
        ``[B]`` float32 on the CPU, without gradient.
    """
    return judged(component, name, completions, on_nonfinite=on_nonfinite).scores


def judged(
    component: Reward,
    name: str,
    completions: Completions,
    *,
    on_nonfinite: OnNonfinite = "error",
) -> Judgement:
    """Ask a component and check its answer. No responses, no question: the result is empty.

    A list, tuple, array or tensor of B numbers is an answer, also as ``[B, 1]``, and so are
    ``TokenRewards`` of B rows. A single number, a dict, a generator or another count never is,
    whatever ``on_nonfinite`` says.

    Args:
        component: Whom to ask.
        name: How messages call it.
        completions: B responses.
        on_nonfinite: A score that is NaN, infinite (in float32), None or text is an ``error``, or
            comes back as NaN (``drop``).

    Returns:
        On the CPU, without gradient.

    Raises:
        RewardError: The component failed, or its answer is no such thing; names the component,
            what was expected and received, the sample and its prompt.
    """
    pulse.beat()
    count = len(completions)
    if count == 0:
        return Judgement(torch.zeros(0))
    with blamed_on(name):
        answer = _ask(component, completions)
        if isinstance(answer, TokenRewards):
            tokens = _token_table(answer, completions)
            values: list[Any] = [_first_bad(row) for row in tokens]
            scores = tokens.sum(1).float()
        else:
            tokens, values = None, _entries(answer, count)
            numbers = [_number(value, i) for i, value in enumerate(values)]
            scores = torch.tensor(numbers, dtype=torch.float64).float()
        finite = scores.isfinite()
        if on_nonfinite == "error" and not finite.all():
            raise _nonfinite(values, finite, completions)
    if tokens is not None:
        tokens = tokens.float().masked_fill(~finite[:, None], 0)
    return Judgement(scores.masked_fill(~finite, math.nan), tokens)


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


def _token_table(answer: TokenRewards, completions: Completions) -> Tensor:
    """Pad rewards per token to the longest response: ``[B, T]`` float64."""
    rows = answer.rows
    expected = f"expected rewards per token for {len(completions)} responses, received"
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__len__"):
        raise RewardError(f"{expected} {_kind(rows)}.")
    if len(rows) != len(completions):
        raise RewardError(f"{expected} {len(rows)}.")
    lengths = [len(ids) for ids in completions.response_ids]
    table = torch.zeros(len(rows), max(lengths), dtype=torch.float64)
    for sample, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        values = row.tolist() if isinstance(row, Tensor | np.ndarray) else row
        if not isinstance(values, Sequence) or len(values) != length:
            raise _wrong_length(values, length, sample, completions)
        numbers = [_number(value, sample) for value in values]
        table[sample, :length] = torch.tensor(numbers, dtype=torch.float64)
    return table


def _wrong_length(values: Any, length: int, sample: int, completions: Completions) -> RewardError:
    found = str(len(values)) if isinstance(values, Sequence) else _kind(values)
    return RewardError(
        f"expected {length} rewards, one for each token of the response (`response_ids`, the end "
        f"token included), received {found}. {quoted(completions, sample)}",
        sample=sample,
    )


def _first_bad(row: Tensor) -> float:
    """The first number that is not finite; or the sum, which is too large then or quite right."""
    bad = row[~row.isfinite()]
    return float(bad[0] if len(bad) else row.sum())


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
