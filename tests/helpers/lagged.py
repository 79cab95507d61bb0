"""An engine that is late: some responses are of weights that are a number of updates old."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.functional import hash_uniform
from ppo_lightning.rollout import NativeEngine, RolloutEngine
from ppo_lightning.types import PromptBatch, Rollout

_COUNTER = 1 << 20  # of the draw that says which responses are late; far from token positions


class LaggedEngine(RolloutEngine):
    """Samples a share of the responses with older weights, of which it keeps copies.

    Args:
        lag: Updates between those weights and the current ones, as far as there were so many.
        share: Of the responses, by chance.
    """

    def __init__(self, lag: int, share: float = 1.0) -> None:
        self.lag, self.share = lag, share
        self._inner = NativeEngine()
        self._models: deque[tuple[int, nn.Module]] = deque(maxlen=lag + 1)

    @override
    def generate(
        self, model: nn.Module, prompts: PromptBatch, *, policy_version: int, **settings: Any
    ) -> Rollout:
        if not self._models or self._models[-1][0] != policy_version:
            self._models.append((policy_version, copy.deepcopy(model).requires_grad_(False)))
        (old_version, old_model), late = self._models[0], self._late(prompts)
        new = self._inner.generate(model, prompts, policy_version=policy_version, **settings)
        old = self._inner.generate(old_model, prompts, policy_version=old_version, **settings)
        return mixed(new, old, late)

    def _late(self, prompts: PromptBatch) -> Tensor:
        return hash_uniform(prompts.keys, _COUNTER) < self.share


def mixed(new: Rollout, old: Rollout, late: Tensor) -> Rollout:
    """Take some responses from another rollout of the same prompts.

    Args:
        new: The rollout.
        old: The other one.
        late: Which are taken from ``old``. ``[B]`` bool.
    """
    width = max(new.response_ids.shape[1], old.response_ids.shape[1])

    def widened(values: Tensor) -> Tensor:
        return nn.functional.pad(values, (0, width - values.shape[1]))

    rows = late[:, None]
    columns = {
        name: torch.where(rows, widened(getattr(old, name)), widened(getattr(new, name)))
        for name in ("response_ids", "response_mask", "sampler_logprobs")
    }
    return replace(
        new,
        **columns,
        truncated=torch.where(late, old.truncated, new.truncated),
        versions=torch.where(late, old.sampled_by, new.sampled_by),
    )
