"""Actor and critic as one module, which a strategy can wrap and a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ppo_lightning.configs import CriticConfig, PolicyConfig
from ppo_lightning.errors import ModelError
from ppo_lightning.models.adapters import attach_lora, base_causal_lm
from ppo_lightning.models.compiling import uncompiled
from ppo_lightning.models.frozen_trunk import (
    is_still_frozen,
    learn_frozen_trunk,
    with_frozen_states,
)
from ppo_lightning.models.layout import TokenLayout
from ppo_lightning.models.loading import load_causal_lm, load_value_network
from ppo_lightning.models.reading import reading_of
from ppo_lightning.models.scoring import (
    Asked,
    PolicyOutput,
    layout_for,
    response_scores,
    trunk_states,
    unknown_logprobs,
)
from ppo_lightning.models.value_network import ValueHead, ValueNetwork, output_width
from ppo_lightning.types import Sequences


class ActorCritic(nn.Module):
    """A policy, and a critic that is a network of its own or a head on the policy's trunk.

    Args:
        actor: Causal language model of transformers or PEFT.
        critic: Network of its own; either this or ``value_head``.
        value_head: Head on the actor's last hidden state.
        trunk_grad_scale: Factor on the gradient that a value head sends into the trunk, in [0, 1].
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        critic: ValueNetwork | None = None,
        value_head: ValueHead | None = None,
        trunk_grad_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if (critic is None) == (value_head is None):
            raise ValueError("give either `critic` or `value_head`, and not both.")
        self.actor = actor
        self.critic = critic
        self.value_head = value_head
        self.trunk_grad_scale = trunk_grad_scale

    def forward(
        self,
        sequences: Sequences,
        *,
        temperature: float,
        policy: bool = True,
        values: bool = True,
        entropy: bool = True,
        logits: bool = False,
        entropy_grad: bool = True,
        final_values: bool = True,
    ) -> PolicyOutput:
        """Score the response tokens of some sequences.

        Args:
            sequences: Prompts and responses. Where they bring along what the actor's frozen blocks
                make of them, these blocks are not run.
            temperature: Of the sampling distribution, above 0.
            policy: Whether to ask the actor for log-probabilities. Without, no gradient reaches it
                from a value head either.
            values: Whether to ask the critic.
            entropy: Whether to compute the entropy too.
            logits: Whether to return the actor's logits too.
            entropy_grad: False where the entropy is only logged: its graph is not kept.
            final_values: Whether to value the state after the last token too. Each row then has one
                more token to read; of a shared trunk so does the actor's, which may round
                log-probabilities otherwise.

        Returns:
            What was asked for; the rest is None, and log-probabilities are nan.
        """
        if not (policy or values):
            raise ValueError("nothing was asked for: set `policy` or `values`.")
        asked = Asked(temperature, entropy=entropy, entropy_grad=entropy_grad, logits=logits)
        final = values and final_values
        if self.critic is None:
            return self._with_shared_trunk(sequences, asked, policy, values, final)
        output: PolicyOutput | None = None
        if policy:
            own = layout_for(self.causal_lm, sequences)
            output, _ = response_scores(self.causal_lm, own, asked)
        if not values:
            assert output is not None
            return output
        layout = layout_for(self.critic.backbone, sequences, final=final)
        return _with_values(output, self.critic(layout), layout, sequences, final=final)

    def _with_shared_trunk(
        self, sequences: Sequences, asked: Asked, policy: bool, values: bool, final: bool
    ) -> PolicyOutput:
        """Ask the actor, and the value head about the same states."""
        layout = layout_for(self.causal_lm, sequences, final=final)
        output: PolicyOutput | None = None
        if policy:
            output, states = response_scores(self.causal_lm, layout, asked)
        else:
            with torch.no_grad():
                states = trunk_states(self.causal_lm, layout)
        if not values:
            assert output is not None
            return output
        assert self.value_head is not None
        values_ = self.value_head(_scale_gradient(states, self.trunk_grad_scale)).squeeze(-1)
        return _with_values(output, values_, layout, sequences, final=final)

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        """Trainable parameters of the policy, a shared trunk included."""
        return (p for p in self.actor.parameters() if p.requires_grad)

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Trainable parameters of the critic; of a shared one, its head."""
        part = self.critic if self.value_head is None else self.value_head
        assert part is not None
        return (p for p in part.parameters() if p.requires_grad)

    def packs(self, sequences: Sequences) -> bool:
        """Whether no network computes padding of these sequences."""
        trunks = [self.causal_lm] if self.critic is None else [self.causal_lm, self.critic.backbone]
        return all(reading_of(trunk).takes_packed(sequences.width) for trunk in trunks)

    @property
    def has_frozen_trunk(self) -> bool:
        """Whether the actor can begin behind blocks that nothing trains."""
        return is_still_frozen(self.causal_lm)

    def with_frozen_states(self, sequences: Sequences, groups: Sequence[Tensor]) -> Sequences:
        """Add what the actor's frozen blocks make of sequences.

        Args:
            sequences: Prompts and responses.
            groups: Rows that are read together. ``[N_i]`` long each.
        """
        return with_frozen_states(self.causal_lm, sequences, groups)

    @property
    def causal_lm(self) -> nn.Module:
        """The actor as transformers' own model, its adapter acting."""
        return base_causal_lm(self.actor)


def _with_values(
    output: PolicyOutput | None,
    values: Tensor,
    layout: TokenLayout,
    sequences: Sequences,
    *,
    final: bool,
) -> PolicyOutput:
    """Add the values of the states before each token, and after the last. ``[N + M]``."""
    count = len(layout.places)
    if output is None:
        output = PolicyOutput(unknown_logprobs(sequences, values))
    return output._replace(
        values=layout.on_tokens(values[:count]),
        final_values=layout.on_rows(values[count:]) if final else None,
    )


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def _scale_gradient(hidden: Tensor, factor: float) -> Tensor:
    """Leave the values as they are and scale the gradient that flows back."""
    if factor == 1.0:
        return hidden
    if factor == 0.0:
        return hidden.detach()
    scaled: Tensor = _ScaleGradient.apply(hidden, factor)  # type: ignore[no-untyped-call]
    return scaled


def build_actor_critic(policy: PolicyConfig, critic: CriticConfig) -> ActorCritic:
    """Load actor and critic, with adapters and heads as configured.

    Raises:
        ModelError: A model cannot be loaded, or is of the wrong kind or dtype.
    """
    _refuse_half("policy", policy.dtype)
    _refuse_half("critic_model", critic.dtype)
    model = load_causal_lm(policy)
    head: ValueHead | None = None
    if critic.kind == "shared":
        # Trained, so never coarser than float32; float64 as the trunk.
        finer = torch.promote_types(model.dtype, torch.float32)
        head = ValueHead(output_width(model), init=critic.head_init, dtype=finer)
    actor = model if policy.lora is None else attach_lora(model, policy.lora)
    if policy.cache_frozen_trunk:
        with uncompiled(base_causal_lm(actor)):  # it is tried on the CPU, wherever the run is
            learn_frozen_trunk(base_causal_lm(actor))
    return ActorCritic(
        actor,
        critic=load_value_network(critic, policy) if critic.kind == "separate" else None,
        value_head=head,
        trunk_grad_scale=critic.trunk_grad_scale,
    )


def build_policy(policy: PolicyConfig, *, keep_dropout: bool = False) -> nn.Module:
    """Load a policy alone, with adapters as configured.

    Args:
        policy: Which one.
        keep_dropout: Leave dropout as the folder has it.

    Raises:
        ModelError: It cannot be loaded, or is of the wrong kind or dtype.
    """
    _refuse_half("policy", policy.dtype)
    model = load_causal_lm(policy, keep_dropout=keep_dropout)
    return model if policy.lora is None else attach_lora(model, policy.lora)


def _refuse_half(setting: str, dtype: str | None) -> None:
    if dtype == "float16":
        raise ModelError(
            f"`{setting}.dtype: float16` overflows in training; take `float32`, or `bfloat16` "
            "under adapters (`policy.lora`)."
        )
