"""Scores of mean 0 and deviation 1, in the weights of a reward model that is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ppo_lightning.data.preferences.pair_batches import PairExample
from ppo_lightning.models import normalised_head

_MOST = 1024  # training pairs whose scores are measured


def score_moments(
    examples: Sequence[PairExample], scores_of: Callable[[Sequence[tuple[int, ...]]], Tensor]
) -> tuple[float, float] | None:
    """Return mean and deviation of the scores of answers, of some thousand of them at most.

    Args:
        examples: Training pairs.
        scores_of: Scores rows of tokens. ``[len(rows)]`` float.

    Returns:
        None, with a warning, where there are no pairs or their scores do not vary.
    """
    if not examples:
        rank_zero_warn(
            "`normalize_scores`: there are no training pairs at hand, so scores are written as "
            "they are. Export within the run that trains."
        )
        return None
    chosen = examples[:: math.ceil(len(examples) / _MOST)]
    rows = [row for example in chosen for row in (example.chosen, *example.rejected)]
    scores = scores_of(rows).double()
    std = float(scores.std(correction=0))
    if not (math.isfinite(std) and std > 0):
        rank_zero_warn(f"`normalize_scores`: the deviation of scores is {std}; left as it is.")
        return None
    return float(scores.mean()), std


@contextmanager
def normalised_scores(model: Any, moments: tuple[float, float] | None) -> Iterator[None]:
    """Let a model's scores have mean 0 and deviation 1 for a while.

    Args:
        model: Sequence classifier of transformers.
        moments: Of ``score_moments``; None leaves it as it is.
    """
    if moments is None:
        yield
        return
    mean, std = moments
    with normalised_head(model, mean=mean, std=std) as shifted:
        if not shifted:
            rank_zero_info(
                f"`normalize_scores`: {type(model).__name__} has no bias that could take the mean "
                f"off, so scores have deviation 1 and mean {mean / std:.3f}. `centering_coef` "
                "keeps the mean small; PPO's whitening takes it off."
            )
        yield
