"""The frozen policy that the KL is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ppo_lightning.configs import PolicyConfig, ReferenceConfig
from ppo_lightning.models.adapters import adapter_disabled, base_causal_lm, is_adapted
from ppo_lightning.models.fingerprint import fingerprint
from ppo_lightning.models.loading import load_causal_lm
from ppo_lightning.models.scoring import PolicyOutput, policy_logprobs
from ppo_lightning.types import Sequences


class ReferencePolicy:
    """Holds the reference without being a module: no checkpoint keys, no gradient sync.

    Args:
        model: The reference itself; or, with ``adapter_off``, the actor.
        adapter_off: The reference is ``model`` with its adapter switched off.
    """

    def __init__(self, model: nn.Module, *, adapter_off: bool = False) -> None:
        if adapter_off and not is_adapted(model):
            raise ValueError("`adapter_off` needs a model with an adapter.")
        self.adapter_off = adapter_off
        self._model = model if adapter_off else model.eval().requires_grad_(False)

    @classmethod
    def build(
        cls, reference: ReferenceConfig, policy: PolicyConfig, actor: nn.Module
    ) -> ReferencePolicy:
        """Make the reference of a run.

        The policy's own starting weights are wanted unless a path is given. An actor with adapters
        has them at hand; otherwise they are read again, so it does not matter whether the actor
        has been trained or resumed meanwhile.

        Args:
            reference: Path and dtype.
            policy: How the policy is loaded.
            actor: The policy being trained.

        Raises:
            ModelError: The reference cannot be loaded.
        """
        same = reference.path is None and reference.dtype in (None, policy.dtype)
        if same and is_adapted(actor):
            return cls(actor, adapter_off=True)
        source = replace(
            policy, path=reference.path or policy.path, lora=None, gradient_checkpointing=False
        )
        return cls(load_causal_lm(source, dtype=reference.dtype))

    @torch.no_grad()
    def logprobs(
        self,
        sequences: Sequences,
        *,
        temperature: float,
        entropy: bool = False,
        logits: bool = False,
    ) -> PolicyOutput:
        """Score response tokens, without gradient; see ``policy_logprobs``."""
        with self.causal_lm() as model:
            return policy_logprobs(
                model, sequences, temperature=temperature, entropy=entropy, logits=logits
            )

    @contextmanager
    def causal_lm(self) -> Iterator[nn.Module]:
        """Lend the reference, to score or to sample with; an adapter is off meanwhile."""
        if not self.adapter_off:
            yield self._model
            return
        with adapter_disabled(self._model):
            yield base_causal_lm(self._model)

    def fingerprint(self) -> str:
        """Digest of a copy of its own; ``""`` where the reference is the actor's own base."""
        return "" if self.adapter_off else fingerprint(self._model)

    def to(self, device: torch.device | str) -> ReferencePolicy:
        """Move a copy of its own; an actor with its adapter off is moved by whoever trains it."""
        if not self.adapter_off:
            self._model.to(device)
        return self
