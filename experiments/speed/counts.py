"""What is computed for nothing, and what the weights alone take."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


class Counts(pl.Callback):
    """Counts the tokens that networks read in updates, beside those of prompts and responses.

    Right where every step trains all networks and none is left out, as in ``ppo.py``.

    Attributes:
        computed: Read with gradient.
        useful: The same, had each network read every token of a minibatch once.
        state_mib: Weights of all networks, gradients and Adam's moments of the trained ones.
    """

    def __init__(self) -> None:
        self.computed, self.useful, self.state_mib = 0, 0, 0.0
        self._networks = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Listen to the embeddings of actor and critic."""
        networks = module.networks
        trunks = [networks.causal_lm, *([networks.critic.backbone] if networks.critic else [])]
        self._networks = len(trunks)
        for trunk in trunks:
            trunk.get_input_embeddings().register_forward_pre_hook(self._count)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        """Count what a minibatch holds."""
        self.state_mib = self.state_mib or _state_mib(module)  # reward models are gone at the end
        real = batch.experience.sequences.attention_mask
        self.useful += self._networks * int(real.sum())

    def _count(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self.computed += inputs[0].numel()


def _state_mib(module: Any) -> float:
    with module.reference.causal_lm() as reference:
        scorers = [term.component._scorer.model for term in module.reward_pipeline.terms]
        parts = [module.networks, reference, *scorers]
    parameters = {id(p): p for part in parts for p in part.parameters()}.values()
    sizes = (p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in parameters)
    return sum(sizes) / 2**20
